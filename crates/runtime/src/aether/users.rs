//! Users and groups of the image: /etc/passwd and /etc/group, read by ourselves (nothing of the image is ever loaded).
//!
//! Both files belong to the sandbox and may hold anything: they are read up to a bound, and a line that does not parse
//! does not exist.

use super::fault::Fault;
use super::os;

const MAX_FILE: usize = 1 << 20;
const MAX_GROUPS: usize = 256;

/// Who a command or a file operation runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: Vec<u8>,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: Vec<u8>,
    pub shell: Vec<u8>,
}

fn id(text: &[u8]) -> Option<u32> {
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok().filter(|id| *id != u32::MAX)
}

fn lines(file: &[u8]) -> impl Iterator<Item = &[u8]> {
    file[..file.len().min(MAX_FILE)].split(|b| *b == b'\n').filter(|line| !line.contains(&0))
}

fn fields<const N: usize>(line: &[u8]) -> Option<[&[u8]; N]> {
    let mut fields = line.split(|b| *b == b':');
    let mut found = [&line[..0]; N];
    for field in &mut found {
        *field = fields.next()?;
    }
    Some(found)
}

/// The first entry of a passwd file that is called so; of a number, the first with that id.
fn find_user(passwd: &[u8], wanted: &[u8]) -> Option<User> {
    let parse = |line| {
        let [name, _, uid, gid, _, home, shell] = fields::<7>(line)?;
        let (uid, gid) = (id(uid)?, id(gid)?);
        let user =
            || User { name: name.to_vec(), uid, gid, groups: Vec::new(), home: home.to_vec(), shell: shell.to_vec() };
        (!name.is_empty() && (name == wanted || id(wanted) == Some(uid))).then(user)
    };
    lines(passwd).find_map(parse)
}

fn find_group(groups: &[u8], wanted: &[u8]) -> Option<u32> {
    lines(groups).find_map(|line| {
        let [name, _, gid] = fields::<3>(line)?;
        (name == wanted && !name.is_empty()).then(|| id(gid)).flatten()
    })
}

fn groups_of(groups: &[u8], user: &[u8]) -> Vec<u32> {
    let member = |line| {
        let [_, _, gid, members] = fields::<4>(line)?;
        members.split(|b| *b == b',').any(|m| m == user).then(|| id(gid)).flatten()
    };
    lines(groups).filter_map(member).take(MAX_GROUPS).collect()
}

/// At most `MAX_FILE` bytes of a regular file; nothing when it cannot be read.
fn read(path: &std::ffi::CStr) -> Vec<u8> {
    let mut bytes = Vec::new();
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    let Ok(fd) = os::open(libc::AT_FDCWD, path, flags, 0, os::SAFE) else { return bytes };
    let Ok(stat) = os::fstat(fd.0) else { return bytes };
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG {
        return bytes;
    }
    bytes.resize((stat.st_size.max(0) as usize).min(MAX_FILE), 0);
    let size = os::pread(fd.0, &mut bytes, 0).unwrap_or(0);
    bytes.truncate(size);
    bytes
}

/// `name`, `id`, `name:group` or `id:gid`, looked up in the image. A number needs no entry: its group is then its own number.
pub fn look_up(wanted: &str) -> Result<User, Fault> {
    resolve(wanted, &read(c"/etc/passwd"), &read(c"/etc/group"))
}

fn resolve(wanted: &str, passwd: &[u8], groups: &[u8]) -> Result<User, Fault> {
    let (name, group) = wanted.split_once(':').map_or((wanted, None), |(name, group)| (name, Some(group)));
    let nameless = |uid| User {
        name: name.into(),
        uid,
        gid: uid,
        groups: Vec::new(),
        home: b"/".to_vec(),
        shell: b"/bin/sh".to_vec(),
    };
    let numbered = || id(name.as_bytes()).map(nameless);
    let root = || (name == "root").then(|| nameless(0)); // every image has root, listed or not
    let found = find_user(passwd, name.as_bytes()).or_else(numbered).or_else(root);
    let mut user = found.ok_or_else(|| {
        Fault::invalid(format!("user {name:?} does not exist in the sandbox"))
            .hint("name a user of /etc/passwd, or an id")
    })?;
    user.groups = groups_of(groups, &user.name);
    if let Some(group) = group {
        let gid = find_group(groups, group.as_bytes()).or_else(|| id(group.as_bytes()));
        user.gid = gid.ok_or_else(|| Fault::invalid(format!("group {group:?} does not exist in the sandbox")))?;
    }
    Ok(user)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\n#comment\nagent:x:1000:1000::/home/agent:/bin/sh\nbad:x:-1:0::/:/x\n\
        huge:x:4294967295:0::/:/x\nmore:x:99999999999:0::/:/x\nshort:x:5\n:x:7:7::/:/x\nnul\0:x:8:8::/:/x\nagent:x:1:1::/other:/x";
    const GROUP: &[u8] = b"root:x:0:\nwheel:x:10:agent,other\nnone\ndocker:x:998:other,agent\nagents:x:x:agent\n";

    #[test]
    fn names_and_ids() {
        let agent = resolve("agent", PASSWD, GROUP).expect("agent");
        assert_eq!(
            (agent.uid, agent.gid, agent.groups, agent.home),
            (1000, 1000, vec![10, 998], b"/home/agent".to_vec())
        );
        assert_eq!(resolve("1000", PASSWD, GROUP).expect("by id").name, b"agent");
        let stranger = resolve("4242", PASSWD, GROUP).expect("id without entry");
        assert_eq!((stranger.uid, stranger.gid, stranger.home), (4242, 4242, b"/".to_vec()));
        assert_eq!(resolve("agent:wheel", PASSWD, GROUP).expect("group by name").gid, 10);
        assert_eq!(resolve("agent:77", PASSWD, GROUP).expect("group by id").gid, 77);
        assert_eq!(resolve("root", b"", b"").expect("root without files").uid, 0);
    }

    #[test]
    fn what_does_not_parse_does_not_exist() {
        for name in ["bad", "huge", "more", "short", "nul\0", "", "nobody", "-1", "4294967295", "+5", "agent:nogroup"] {
            let fault = resolve(name, PASSWD, GROUP).expect_err(name);
            assert_eq!(fault.kind, "invalid_request", "{name}");
        }
        assert!(resolve("nobody", PASSWD, GROUP).expect_err("unknown").message.contains("\"nobody\""));
    }

    #[test]
    fn hostile_files_are_bounded() {
        let mut file = vec![b':'; 3 * MAX_FILE];
        file.extend_from_slice(b"\nlate:x:5:5::/:/bin/sh\n");
        assert!(resolve("late", &file, &file).is_err());
        let crowd: Vec<u8> = (0..5000).flat_map(|i| format!("g{i}:x:{i}:root\n").into_bytes()).collect();
        assert_eq!(resolve("root", b"", &crowd).expect("root").groups.len(), MAX_GROUPS);
    }
}
