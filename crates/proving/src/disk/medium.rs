//! What a disk holds when the power fails: pure. What was synced is there; of everything else, any part.

use std::collections::{BTreeMap, HashMap};

/// A disk writes so many bytes whole or not at all.
const SECTOR: usize = 512;

pub type Inode = u64;

/// Something a disk was told to do, and said that it had done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Create {
        name: String,
        inode: Inode,
    },
    Remove {
        name: String,
    },
    Rename {
        from: String,
        to: String,
    },
    Write {
        inode: Inode,
        at: usize,
        bytes: Vec<u8>,
    },
    Resize {
        inode: Inode,
        to: usize,
    },
    Sync {
        inode: Inode,
    },
    SyncNames,
    /// A sync that failed: Linux forgets what it could not write, and the next sync succeeds without it.
    Forget {
        inode: Inode,
    },
}

impl Op {
    fn concerns(&self, file: Inode) -> bool {
        matches!(self, Op::Write { inode, .. } | Op::Resize { inode, .. } if *inode == file)
    }

    fn is_of_names(&self) -> bool {
        matches!(self, Op::Create { .. } | Op::Remove { .. } | Op::Rename { .. })
    }
}

/// What becomes of what was not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    Nothing,
    Everything,
    /// Of each sector chance decides; of files' names a beginning is kept, since they are written in order.
    Torn(u64),
}

/// Files by name.
pub type Image = BTreeMap<String, Vec<u8>>;

#[derive(Clone, Debug, Default)]
struct Contents {
    names: BTreeMap<String, Inode>,
    files: HashMap<Inode, Vec<u8>>,
}

impl Contents {
    fn apply(&mut self, op: &Op) {
        match op {
            Op::Create { name, inode } => {
                self.names.insert(name.clone(), *inode);
            }
            Op::Remove { name } => {
                self.names.remove(name);
            }
            Op::Rename { from, to } => {
                if let Some(inode) = self.names.remove(from) {
                    self.names.insert(to.clone(), inode);
                }
            }
            Op::Write { inode, at, bytes } => self.write(*inode, *at, bytes),
            Op::Resize { inode, to } => self.files.entry(*inode).or_default().resize(*to, 0),
            Op::Sync { .. } | Op::SyncNames | Op::Forget { .. } => {}
        }
    }

    fn write(&mut self, inode: Inode, at: usize, bytes: &[u8]) {
        let file = self.files.entry(inode).or_default();
        if file.len() < at + bytes.len() {
            file.resize(at + bytes.len(), 0);
        }
        file[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn image(&self) -> Image {
        let file = |inode| self.files.get(inode).cloned().unwrap_or_default();
        self.names.iter().map(|(name, inode)| (name.clone(), file(inode))).collect()
    }
}

/// A disk, told one thing after the other.
#[derive(Clone, Debug, Default)]
pub struct Medium {
    synced: Contents,
    unsynced: Vec<Op>,
}

impl Medium {
    pub fn apply(&mut self, op: &Op) {
        let is_synced = |waiting: &Op| match op {
            Op::Sync { inode } => waiting.concerns(*inode),
            Op::SyncNames => waiting.is_of_names(),
            _ => false,
        };
        match op {
            Op::Sync { .. } | Op::SyncNames => {
                for waiting in self.unsynced.extract_if(.., |waiting| is_synced(waiting)) {
                    self.synced.apply(&waiting);
                }
            }
            Op::Forget { inode } => self.unsynced.retain(|waiting| !waiting.concerns(*inode)),
            _ => self.unsynced.push(op.clone()),
        }
    }

    /// What is there after the power failed now.
    pub fn after(&self, loss: Loss) -> Image {
        let mut left = self.synced.clone();
        match loss {
            Loss::Everything => {}
            Loss::Nothing => self.unsynced.iter().for_each(|op| left.apply(op)),
            Loss::Torn(seed) => self.tear(&mut left, seed),
        }
        left.image()
    }

    fn tear(&self, left: &mut Contents, seed: u64) {
        let mut chance = fastrand::Rng::with_seed(seed);
        let mut names_go_on = true;
        for op in &self.unsynced {
            match op {
                _ if op.is_of_names() => {
                    names_go_on = names_go_on && chance.bool();
                    if names_go_on {
                        left.apply(op);
                    }
                }
                Op::Write { inode, at, bytes } => {
                    let mut done = 0;
                    while done < bytes.len() {
                        let end = bytes.len().min(done + SECTOR - (at + done) % SECTOR);
                        if chance.bool() {
                            left.write(*inode, at + done, &bytes[done..end]);
                        }
                        done = end;
                    }
                }
                _ if chance.bool() => left.apply(op),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(bytes: &[u8]) -> Op {
        Op::Write { inode: 1, at: 0, bytes: bytes.to_vec() }
    }

    fn told(ops: &[Op]) -> Medium {
        let mut medium = Medium::default();
        ops.iter().for_each(|op| medium.apply(op));
        medium
    }

    fn create() -> Op {
        Op::Create { name: "a".to_owned(), inode: 1 }
    }

    #[test]
    fn what_was_synced_is_there() {
        let medium = told(&[create(), Op::SyncNames, write(b"one"), Op::Sync { inode: 1 }, write(b"two")]);
        assert_eq!(medium.after(Loss::Everything)["a"], b"one");
        assert_eq!(medium.after(Loss::Nothing)["a"], b"two");
    }

    #[test]
    fn a_file_without_a_synced_name_may_be_gone() {
        let medium = told(&[create(), write(b"one"), Op::Sync { inode: 1 }]);
        assert!(medium.after(Loss::Everything).is_empty());
        assert_eq!(medium.after(Loss::Nothing)["a"], b"one");
    }

    #[test]
    fn a_write_is_torn_between_sectors_only() {
        let medium = told(&[create(), Op::SyncNames, write(&[7; 4 * SECTOR])]);
        let torn = (0..32).map(|seed| medium.after(Loss::Torn(seed))["a"].clone());
        let mut kinds: Vec<Vec<bool>> = torn
            .map(|file| {
                let whole = |sector: &[u8]| sector.iter().all(|byte| *byte == 7);
                assert!(file.chunks(SECTOR).all(|sector| whole(sector) || sector.iter().all(|byte| *byte == 0)));
                file.chunks(SECTOR).map(whole).collect()
            })
            .collect();
        kinds.sort();
        kinds.dedup();
        assert!(kinds.len() > 8, "it is torn in many ways");
    }

    #[test]
    fn what_a_failed_sync_has_lost_does_not_come_with_the_next() {
        let lost = [create(), Op::SyncNames, write(b"one"), Op::Forget { inode: 1 }, Op::Sync { inode: 1 }];
        assert_eq!(told(&lost).after(Loss::Everything)["a"], b"");
    }
}
