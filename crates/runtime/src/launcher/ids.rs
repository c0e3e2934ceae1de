//! Slots, and the range of host ids that each has for itself: sandboxes never share a user on the host, since inotify,
//! keyring and process limits are counted by the host's user.

use std::collections::BTreeSet;

pub const BASE: u32 = 100_000;
pub const RANGE: u32 = 65_536;
/// The last slot whose range lies below 2^32.
const SLOTS: u32 = (u32::MAX - BASE) / RANGE;

/// The host's id of a slot's root.
pub fn root_of(slot: u32) -> u32 {
    BASE + slot * RANGE
}

/// Which slots are taken.
pub struct Slots {
    free: BTreeSet<u32>,
    next: u32,
}

impl Slots {
    pub fn new() -> Self {
        Slots { free: BTreeSet::new(), next: 0 }
    }

    pub fn take(&mut self) -> Option<u32> {
        self.free.pop_first().or_else(|| {
            (self.next < SLOTS).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    pub fn give_back(&mut self, slot: u32) {
        self.free.insert(slot);
    }

    /// Sets aside a slot that an earlier launcher's sandbox still has; false when it is taken already.
    pub fn reserve(&mut self, slot: u32) -> bool {
        while self.next <= slot && self.next < SLOTS {
            self.free.insert(self.next);
            self.next += 1;
        }
        self.free.remove(&slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_do_not_overlap_and_fit() {
        assert_eq!(root_of(1) - root_of(0), RANGE);
        assert!(u64::from(root_of(SLOTS - 1)) + u64::from(RANGE) <= 1 << 32);
    }

    #[test]
    fn lowest_free_slot_comes_first() {
        let mut slots = Slots::new();
        assert!(slots.reserve(2));
        assert!(!slots.reserve(2));
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), Some(3)]);
        slots.give_back(1);
        assert_eq!(slots.take(), Some(1));
    }
}
