//! Watching directories: what changes in them, as the kernel's inotify tells it.
//!
//! The machine has few inotify instances for all sandboxes together, so there is one for a sandbox, while anything is watched.
//! Watches, names and changes that wait for a reader are bounded; beyond the bounds changes are lost, and the reader is told.

use super::conn::{Job, Sink, Step};
use super::fault::Fault;
use super::files::{self, Acting, Place};
use super::os::{self, check, cstring, Epoll, Fd, Watched, BENEATH, SAFE};
use super::token;
use super::users::User;
use super::walk::{put_record, read_names};
use crate::birth::Birth;
use crate::msgpack::{Pack, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::CStr;
use std::rc::Rc;

const MAX_WATCHERS: usize = 16;
/// Directories watched, by all watchers together.
const MAX_WATCHES: usize = 8192;
/// Bytes of changes that wait for a reader.
const MAX_QUEUE: usize = 1 << 18;
/// Names of new directories remembered so that none is told twice.
const MAX_KNOWN: usize = 1 << 13;
/// Directories with longer paths are not looked into.
const MAX_PATH: usize = 1024;
const BUFFER: usize = 32 * 1024;
/// Events are looked at for so long (microseconds), and, when there are more, again after a pause (seconds): a move of a
/// directory is a look at all that is watched, and who moves in a loop must keep aether neither from others nor busy.
const PIECE_US: u64 = 2_000;
const PAUSE: f64 = 0.004;
/// The two halves of a move come microseconds apart: how many looks the second half gets.
const PATIENCE: u32 = 3;

const CHANGES: u32 = libc::IN_CREATE | libc::IN_DELETE | libc::IN_MODIFY | libc::IN_ATTRIB | libc::IN_MOVE;
const OF_ITSELF: u32 = libc::IN_DELETE_SELF | libc::IN_MOVE_SELF;
const GONE: u32 = OF_ITSELF | libc::IN_UNMOUNT;

/// One directory as one watcher knows it.
struct Spot {
    watcher: u32,
    /// From the watcher's root.
    path: Vec<u8>,
}

/// The first half of a move.
struct Moved {
    cookie: u32,
    path: Vec<u8>,
    is_dir: bool,
    looks: u32,
}

/// A directory to watch and look into. `is_new`: what is in it came after it, and is told.
struct Found {
    path: Vec<u8>,
    is_new: bool,
}

struct Watcher {
    root: Vec<u8>,
    is_dir: bool,
    recursive: bool,
    moved: Option<Moved>,
    found: VecDeque<Found>,
    /// What was told of new directories, by events or by looking into them, until the events of that time have passed.
    known: BTreeSet<(i32, Vec<u8>)>,
    known_until: u64,
    queue: Vec<u8>,
    last: Vec<u8>,
    count: u64,
    lost: bool,
    ended: bool,
}

impl Watcher {
    fn tell(&mut self, kind: &str, path: &[u8], is_dir: bool, source: Option<&[u8]>) {
        let whole = |path: &[u8]| match (path, &self.root[..]) {
            (b"", b"") => b"/".to_vec(),
            (b"", root) => root.to_vec(),
            (path, root) => [root, b"/", path].concat(),
        };
        let pack = Pack::default().map(4).str("path").bin(&whole(path)).str("kind").str(kind);
        let pack = pack.str("is_dir").bool(is_dir).str("source");
        let record = match source {
            Some(source) => pack.bin(&whole(source)),
            None => pack.nil(),
        };
        if self.lost || self.queue.len() + record.0.len() > MAX_QUEUE {
            self.lost = true;
        } else if self.last != record.0 {
            put_record(&mut self.queue, &record.0);
            self.last = record.0;
            self.count += 1;
        }
    }

    /// Before everything that was told so far.
    fn begin_with(&mut self, kind: &str) {
        let (waiting, lost) = (std::mem::take(&mut self.queue), std::mem::take(&mut self.lost));
        self.tell(kind, b"", self.is_dir, None);
        self.queue.extend_from_slice(&waiting);
        self.lost = lost;
    }

    /// What waits to be sent. That something is missing is told behind what is not.
    fn take(&mut self) -> Vec<u8> {
        if self.queue.is_empty() && std::mem::take(&mut self.lost) {
            self.tell("lost", b"", self.is_dir, None);
        }
        self.last.clear(); // sent: the same change again is news
        std::mem::take(&mut self.queue)
    }

    fn look_into(&mut self, path: Vec<u8>, is_new: bool) {
        match self.found.len() < MAX_WATCHES && path.len() <= MAX_PATH {
            true => self.found.push_back(Found { path, is_new }),
            false => self.lost = true,
        }
    }

    /// Whether a name of a new directory is told for the first time.
    fn is_news(&mut self, watch: i32, name: &[u8]) -> bool {
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        self.known_until == 0 || self.known.insert((watch, name.to_vec()))
    }
}

#[derive(Default)]
struct Table {
    inotify: Option<Watched>,
    next: u32,
    watchers: BTreeMap<u32, Watcher>,
    spots: BTreeMap<i32, Vec<Spot>>,
    /// Bytes of events so far, and those that were read and not looked at yet.
    passed: u64,
    unseen: Vec<u8>,
    /// When to look again.
    again: Option<f64>,
}

/// Everything that is watched; a handle, shared with the jobs.
#[derive(Clone, Default)]
pub struct Watches(Rc<RefCell<Table>>);

struct Event<'a> {
    watch: i32,
    mask: u32,
    cookie: u32,
    name: &'a [u8],
}

impl Watches {
    /// Begins `fs.watch`.
    pub fn request(&self, params: Value, birth: &Birth, epoll: &Epoll) -> Result<Box<dyn Job>, Fault> {
        let user = files::user(params, birth)?;
        let _acting = Acting::new(&user)?;
        let path = files::path(params, "path", birth, &user)?;
        let recursive = params.get("recursive").and_then(Value::bool).unwrap_or(false);
        let fault = |errno| Fault::file(errno, path.to_bytes());
        let (dir, name) = match os::open(libc::AT_FDCWD, &path, libc::O_PATH | libc::O_DIRECTORY, 0, SAFE) {
            Ok(dir) => (dir, c".".to_owned()),
            Err(libc::ENOTDIR) => {
                let place = Place::of_target(&path, false)?;
                (place.dir, place.name)
            }
            Err(errno) => return Err(fault(errno)),
        };
        os::not_of_proc(dir.0).map_err(fault)?;
        let mut root = path.to_bytes().to_vec();
        while root.last() == Some(&b'/') {
            root.pop();
        }
        let is_dir = name.as_c_str() == c".";
        let number = self.0.borrow_mut().enter(root, is_dir, recursive, epoll)?;
        let watch = Watch {
            watches: self.clone(),
            number,
            user: user.clone(),
            dir,
            looking: None,
            ready: false,
            pending: Vec::new(),
            sent: 0,
        };
        let mut table = self.0.borrow_mut();
        table.watch(number, watch.dir.0, &name, b"").map_err(|errno| refused(errno, path.to_bytes()))?;
        if let (true, true, Some(watcher)) = (is_dir, recursive, table.watchers.get_mut(&number)) {
            watcher.look_into(Vec::new(), false);
        }
        drop(table);
        Ok(Box::new(watch))
    }

    /// Takes in what the kernel has to tell, some of it.
    pub fn on_event(&self, epoll: &Epoll) {
        let mut table = self.0.borrow_mut();
        let all = table.take_in(crate::sys::now_us() + PIECE_US);
        let Some(fd) = table.inotify.as_ref().map(Watched::raw) else { return };
        if all == table.again.is_some() {
            let events = if all { libc::EPOLLIN } else { 0 };
            let _ = epoll.watch(fd, events, token::make(token::WATCH, 0));
        }
        table.again = (!all).then(|| os::now() + PAUSE);
    }

    /// When `tick` has something to do, on the clock of `os::now`.
    pub fn next_tick(&self) -> Option<f64> {
        self.0.borrow().again
    }

    pub fn tick(&self, epoll: &Epoll) {
        if self.next_tick().is_some_and(|at| at <= os::now()) {
            self.on_event(epoll);
        }
    }
}

/// ENOSPC is of watches here, not of the disk.
fn refused(errno: i32, path: &[u8]) -> Fault {
    match errno {
        libc::ENOSPC => too_many(format!("{}: too many directories are watched", String::from_utf8_lossy(path))),
        errno => Fault::file(errno, path),
    }
}

fn too_many(what: String) -> Fault {
    Fault::new("capacity", what).hint("watch fewer, or end watches that are not needed")
}

/// The first event, and what is behind it.
fn first_event(bytes: &[u8]) -> Option<(Event<'_>, &[u8])> {
    let (head, rest) = bytes.split_at_checked(16)?;
    let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (name, rest) = rest.split_at_checked(word(12) as usize)?;
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    Some((Event { watch: word(0) as i32, mask: word(4), cookie: word(8), name }, rest))
}

fn is_below(path: &[u8], top: &[u8]) -> bool {
    path.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

impl Table {
    fn enter(&mut self, root: Vec<u8>, is_dir: bool, recursive: bool, epoll: &Epoll) -> Result<u32, Fault> {
        if self.watchers.len() >= MAX_WATCHERS {
            return Err(too_many(format!("{MAX_WATCHERS} watches are open in this sandbox")).retryable());
        }
        if self.inotify.is_none() {
            let made = check(unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) });
            let fd = made.map(|fd| epoll.own(Fd(fd as i32))).map_err(|errno| match errno {
                libc::EMFILE => too_many("the machine's inotify instances are all in use".into()).retryable(),
                errno => Fault::internal("cannot watch files", errno),
            })?;
            let watched = epoll.watch(fd.raw(), libc::EPOLLIN, token::make(token::WATCH, 0));
            watched.map_err(|errno| Fault::internal("cannot watch files", errno))?;
            self.inotify = Some(fd);
        }
        self.next = self.next.wrapping_add(1);
        let (found, known, queue, last) = (VecDeque::new(), BTreeSet::new(), Vec::new(), Vec::new());
        let watcher = Watcher {
            root,
            is_dir,
            recursive,
            moved: None,
            found,
            known,
            known_until: 0,
            queue,
            last,
            count: 0,
            lost: false,
            ended: false,
        };
        self.watchers.insert(self.next, watcher);
        Ok(self.next)
    }

    /// Watches a name of a directory, as the user who acts. The watch, and whether this watcher had it already.
    fn watch(&mut self, number: u32, dir: i32, name: &CStr, path: &[u8]) -> os::Result<(i32, bool)> {
        let fd = self.inotify.as_ref().map(Watched::raw).ok_or(libc::EBADF)?;
        if self.spots.len() >= MAX_WATCHES {
            return Err(libc::ENOSPC);
        }
        // inotify takes paths only: the directory becomes the working directory for as long as the call takes
        check(unsafe { libc::fchdir(dir) })?;
        let mask = CHANGES | OF_ITSELF | libc::IN_EXCL_UNLINK | libc::IN_DONT_FOLLOW;
        let added = check(unsafe { libc::inotify_add_watch(fd, name.as_ptr(), mask) });
        unsafe { libc::chdir(c"/".as_ptr()) };
        let watch = added? as i32;
        let spots = self.spots.entry(watch).or_default();
        let known = spots.iter_mut().find(|spot| spot.watcher == number);
        let is_known = known.is_some();
        match known {
            Some(spot) => spot.path = path.to_vec(),
            None => spots.push(Spot { watcher: number, path: path.to_vec() }),
        }
        Ok((watch, is_known))
    }

    /// Forgets what a watcher has below a path; watches that nobody has any more are given back.
    fn unwatch(&mut self, number: u32, top: &[u8]) {
        let inotify = self.inotify.as_ref().map_or(-1, Watched::raw);
        self.spots.retain(|watch, spots| {
            spots.retain(|spot| spot.watcher != number || !(top.is_empty() || is_below(&spot.path, top)));
            if spots.is_empty() {
                unsafe { libc::inotify_rm_watch(inotify, *watch) };
            }
            !spots.is_empty()
        });
    }

    fn leave(&mut self, number: u32) {
        self.unwatch(number, b"");
        self.watchers.remove(&number);
        if self.watchers.is_empty() {
            self.inotify = None;
            self.spots.clear();
            (self.unseen, self.again) = (Vec::new(), None);
        }
    }

    /// Reads events and acts on them until some time (microseconds). False: there may be more.
    fn take_in(&mut self, until: u64) -> bool {
        while crate::sys::now_us() < until {
            let Some(fd) = self.inotify.as_ref().map(Watched::raw) else { return true };
            if self.unseen.is_empty() && !os::read_onto(fd, &mut self.unseen, BUFFER).is_ok_and(|size| size > 0) {
                return true;
            }
            let bytes = std::mem::take(&mut self.unseen);
            let mut rest = &bytes[..];
            while crate::sys::now_us() < until && !rest.is_empty() {
                let Some((event, behind)) = first_event(rest) else { break };
                self.dispatch(&event);
                self.passed += (rest.len() - behind.len()) as u64;
                rest = behind;
            }
            self.unseen.extend_from_slice(rest);
        }
        false
    }

    fn dispatch(&mut self, event: &Event) {
        if event.mask & libc::IN_Q_OVERFLOW != 0 {
            self.watchers.values_mut().for_each(|watcher| watcher.lost = true);
            return;
        }
        let Some(spots) = self.spots.get(&event.watch) else { return };
        let concerned: Vec<(u32, Vec<u8>)> = spots.iter().map(|spot| (spot.watcher, spot.path.clone())).collect();
        if event.mask & libc::IN_IGNORED != 0 {
            self.spots.remove(&event.watch);
            return;
        }
        for (number, dir) in concerned {
            self.change(number, &dir, event);
        }
    }

    fn change(&mut self, number: u32, dir: &[u8], event: &Event) {
        let Some(watcher) = self.watchers.get(&number) else { return };
        let is_second_half = event.mask & libc::IN_MOVED_TO != 0;
        if watcher.moved.as_ref().is_some_and(|moved| !is_second_half || moved.cookie != event.cookie) {
            self.moved_away(number);
        }
        let Some(watcher) = self.watchers.get_mut(&number) else { return };
        let path = match (dir, event.name) {
            (dir, b"") => dir.to_vec(),
            (b"", name) => name.to_vec(),
            (dir, name) => [dir, b"/", name].concat(),
        };
        let is_dir = event.mask & libc::IN_ISDIR != 0;
        if event.mask & GONE != 0 {
            if dir.is_empty() && !watcher.ended {
                watcher.tell("deleted", b"", watcher.is_dir, None);
                watcher.ended = true;
            }
        } else if event.mask & libc::IN_CREATE != 0 {
            watcher.came(event, path, is_dir);
        } else if event.mask & libc::IN_DELETE != 0 {
            watcher.known.remove(&(event.watch, event.name.to_vec()));
            watcher.tell("deleted", &path, is_dir, None);
        } else if event.mask & libc::IN_MOVED_FROM != 0 {
            watcher.known.remove(&(event.watch, event.name.to_vec()));
            watcher.moved = Some(Moved { cookie: event.cookie, path, is_dir, looks: 0 });
        } else if is_second_half {
            match watcher.moved.take() {
                Some(moved) => self.moved_within(number, &moved, &path),
                None => watcher.came(event, path, is_dir),
            }
        } else if event.mask & libc::IN_MODIFY != 0 {
            watcher.tell("modified", &path, is_dir, None);
        } else if !event.name.is_empty() || dir.is_empty() {
            watcher.tell("attributes", &path, is_dir, None); // of directories below: their parent tells
        }
    }

    fn moved_within(&mut self, number: u32, moved: &Moved, path: &[u8]) {
        if moved.is_dir {
            let own = self.spots.values_mut().flatten().filter(|spot| spot.watcher == number);
            for spot in own.filter(|spot| is_below(&spot.path, &moved.path)) {
                spot.path = [path, &spot.path[moved.path.len()..]].concat();
            }
        }
        if let Some(watcher) = self.watchers.get_mut(&number) {
            watcher.tell("moved", path, moved.is_dir, Some(&moved.path));
        }
    }

    /// The other half of a move did not come: it leads out of what is watched.
    fn moved_away(&mut self, number: u32) {
        let Some(moved) = self.watchers.get_mut(&number).and_then(|watcher| watcher.moved.take()) else { return };
        if let Some(watcher) = self.watchers.get_mut(&number) {
            watcher.tell("deleted", &moved.path, moved.is_dir, None);
        }
        if moved.is_dir {
            self.unwatch(number, &moved.path);
        }
    }

    /// Bytes of events of now that were not looked at yet.
    fn unread(&self) -> u64 {
        let mut size: libc::c_int = 0;
        let fd = self.inotify.as_ref().map_or(-1, Watched::raw);
        unsafe { libc::ioctl(fd, libc::FIONREAD, &mut size) };
        size.max(0) as u64 + self.unseen.len() as u64
    }
}

impl Watcher {
    fn came(&mut self, event: &Event, path: Vec<u8>, is_dir: bool) {
        if !self.is_news(event.watch, event.name) {
            return;
        }
        self.tell("created", &path, is_dir, None);
        if is_dir && self.recursive {
            self.look_into(path, true);
        }
    }
}

/// A directory whose names are being read.
struct Looking {
    dir: Fd,
    watch: i32,
    path: Vec<u8>,
    is_new: bool,
}

/// One `fs.watch`: first `ready`, then changes, until it is cancelled or what it watches is gone.
struct Watch {
    watches: Watches,
    number: u32,
    user: User,
    dir: Fd,
    looking: Option<Looking>,
    ready: bool,
    pending: Vec<u8>,
    sent: usize,
}

impl Watch {
    /// Watches the next directory that was found, or reads some names of the last one. False: there is nothing to do.
    fn look(&mut self) -> Result<bool, Fault> {
        let mut table = self.watches.0.borrow_mut();
        let Some(watcher) = table.watchers.get_mut(&self.number) else { return Ok(false) };
        if self.looking.is_none() && watcher.found.is_empty() {
            return Ok(false);
        }
        let _acting = Acting::new(&self.user)?;
        if let Some(looking) = &self.looking {
            let more = names(watcher, looking).unwrap_or(false); // what cannot be read is as good as gone
            if !more {
                self.looking = None;
                let until = table.passed + table.unread() + 1;
                if let Some(watcher) = table.watchers.get_mut(&self.number) {
                    watcher.known_until = until;
                }
            }
            return Ok(true);
        }
        let Some(found) = watcher.found.pop_front() else { return Ok(false) };
        watcher.known_until = u64::MAX;
        match self.begin(&mut table, &found) {
            Ok(looking) => self.looking = looking,
            Err(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EACCES) => {} // gone, replaced, or not for this user
            Err(libc::ENOSPC) if !self.ready => return Err(refused(libc::ENOSPC, &found.path)),
            Err(_) => {
                if let Some(watcher) = table.watchers.get_mut(&self.number) {
                    watcher.lost = true;
                }
            }
        }
        Ok(true)
    }

    fn begin(&self, table: &mut Table, found: &Found) -> os::Result<Option<Looking>> {
        let name = if found.path.is_empty() { c".".to_owned() } else { cstring(&found.path)? };
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK;
        let dir = os::open(self.dir.0, &name, flags, 0, BENEATH)?;
        os::not_of_proc(dir.0)?;
        let (watch, is_known) = table.watch(self.number, dir.0, c".", &found.path)?;
        let Found { path, is_new } = found;
        // the root is watched from the start, but was never looked into
        let again = is_known && !is_new && !path.is_empty();
        Ok((!again).then(|| Looking { dir, watch, path: path.clone(), is_new: *is_new }))
    }
}

/// Reads some names of a directory that is watched now. True: there are more.
fn names(watcher: &mut Watcher, looking: &Looking) -> os::Result<bool> {
    let mut found = Vec::new();
    let more = read_names(looking.dir.0, |name, kind| found.push((name.to_owned(), kind)))?;
    for (name, kind) in found {
        let is_dir = match kind {
            libc::DT_UNKNOWN => os::lstat(looking.dir.0, &name).is_ok_and(|stat| files::kind(&stat) == libc::S_IFDIR),
            kind => kind == libc::DT_DIR,
        };
        let name = name.to_bytes();
        let path = if looking.path.is_empty() { name.to_vec() } else { [&looking.path, &b"/"[..], name].concat() };
        if looking.is_new && watcher.is_news(looking.watch, name) {
            watcher.tell("created", &path, is_dir, None);
        }
        if is_dir {
            watcher.look_into(path, looking.is_new);
        }
    }
    Ok(more)
}

impl Job for Watch {
    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        if self.look()? {
            return Ok(Step::More);
        }
        let mut table = self.watches.0.borrow_mut();
        let (passed, is_all_seen) = (table.passed, table.again.is_none());
        let number = self.number;
        let Some(watcher) = table.watchers.get_mut(&number) else { return Ok(Step::Wait) };
        if watcher.known_until <= passed + 1 {
            watcher.known.clear();
            watcher.known_until = 0;
        }
        if self.sent == self.pending.len() {
            self.sent = 0;
            if !self.ready {
                self.ready = true;
                watcher.begin_with("ready");
            }
            self.pending = watcher.take();
        }
        if self.pending.is_empty() {
            if watcher.ended {
                return Ok(Step::Done(Pack::default().map(1).str("count").uint(watcher.count).0));
            }
            let Some(moved) = &mut watcher.moved else { return Ok(Step::Wait) };
            if !is_all_seen {
                return Ok(Step::Wait); // the second half may be among the rest
            }
            moved.looks += 1;
            if moved.looks > PATIENCE {
                table.moved_away(number);
            }
            return Ok(Step::More);
        }
        Ok(sink.drain(&self.pending, &mut self.sent))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watches.0.borrow_mut().leave(self.number);
    }
}
