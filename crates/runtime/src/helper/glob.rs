//! Patterns over paths: `*` and `?` within a name, `[a-z]`, and `**` for any number of directories.

pub struct Glob {
    names: Vec<Vec<u8>>,
}

impl Glob {
    /// A leading `/` means nothing: all paths are from the root.
    pub fn new(pattern: &str) -> Self {
        Glob { names: split(pattern.as_bytes()).map(<[u8]>::to_vec).collect() }
    }

    /// Whether the pattern names this path. `dir/**` names `dir` too.
    pub fn matches(&self, path: &[u8]) -> bool {
        let path: Vec<&[u8]> = split(path).collect();
        walk(&self.names, &path, false)
    }

    /// Whether the pattern could name something below this path.
    pub fn reaches_below(&self, path: &[u8]) -> bool {
        let path: Vec<&[u8]> = split(path).collect();
        walk(&self.names, &path, true)
    }
}

fn split(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|name| !name.is_empty())
}

/// Row by row over the path, which names of the pattern may come next; linear in the product of both lengths, whatever a
/// hostile path looks like.
fn walk(pattern: &[Vec<u8>], path: &[&[u8]], below: bool) -> bool {
    let end = pattern.len();
    let mut next = vec![false; end + 1];
    next[0] = true;
    skip_stars(pattern, &mut next);
    for name in path {
        let mut after = vec![false; end + 1];
        for (at, part) in pattern.iter().enumerate().filter(|(at, _)| next[*at]) {
            if part == b"**" {
                after[at] = true;
            } else if name_matches(part, name) {
                after[at + 1] = true;
            }
        }
        skip_stars(pattern, &mut after);
        next = after;
    }
    if below {
        next[..end].contains(&true)
    } else {
        next[end]
    }
}

fn skip_stars(pattern: &[Vec<u8>], next: &mut [bool]) {
    for at in 0..pattern.len() {
        if next[at] && pattern[at] == b"**" {
            next[at + 1] = true;
        }
    }
}

/// One name, with backtracking to the last `*` only.
fn name_matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p + 1, n));
            p += 1;
            continue;
        }
        match one(&pattern[p..], name[n]) {
            Some(length) => (p, n) = (p + length, n + 1),
            None => match star {
                Some((after, from)) => {
                    star = Some((after, from + 1));
                    (p, n) = (after, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|b| *b == b'*')
}

/// Length of the pattern's first element if it matches the byte.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match *pattern.first()? {
        b'?' => Some(1),
        b'[' => class(pattern, byte),
        literal => (literal == byte).then_some(1),
    }
}

/// `[abc]`, `[a-z]`, `[!a]`; one that is not closed is a literal bracket.
fn class(pattern: &[u8], byte: u8) -> Option<usize> {
    let Some(close) = pattern.iter().skip(2).position(|b| *b == b']').map(|i| i + 2) else {
        return (byte == b'[').then_some(1);
    };
    let inside = &pattern[1..close];
    let (negated, set) = match inside.first() {
        Some(b'!' | b'^') => (true, &inside[1..]),
        _ => (false, inside),
    };
    let mut found = false;
    let mut at = 0;
    while at < set.len() {
        if at + 2 < set.len() && set[at + 1] == b'-' {
            found |= (set[at]..=set[at + 2]).contains(&byte);
            at += 3;
        } else {
            found |= set[at] == byte;
            at += 1;
        }
    }
    (found != negated).then_some(close + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_directories() {
        for (pattern, path, expected) in [
            ("src/**", "src/a/b.py", true),
            ("src/**", "src", true),
            ("/src/*.py", "src/a.py", true),
            ("src/*.py", "src/a/b.py", false),
            ("**/*.py", "a.py", true),
            ("**/*.py", "a/b/c.py", true),
            ("**", "anything/at/all", true),
            ("a/**/z", "a/z", true),
            ("a/**/z", "a/b/c/z", true),
            ("a/**/z", "a/b/c/y", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[x", "[x", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("", "a", false),
        ] {
            assert_eq!(Glob::new(pattern).matches(path.as_bytes()), expected, "{pattern} {path}");
        }
    }

    #[test]
    fn reaches_below_parents_only() {
        let glob = Glob::new("a/b/*.py");
        assert!(glob.reaches_below(b"a") && glob.reaches_below(b"a/b"));
        assert!(!glob.reaches_below(b"a/c") && !glob.reaches_below(b"a/b/x.py"));
        assert!(Glob::new("a/**").reaches_below(b"a/b/c/d"));
    }

    #[test]
    fn hostile_names_cost_little() {
        let name = "a".repeat(255);
        let pattern = "a*".repeat(50) + "b";
        assert!(!Glob::new(&pattern).matches(name.as_bytes()));
    }
}
