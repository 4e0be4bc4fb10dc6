//! A disk that forgets: a file system in memory (FUSE) that writes down everything it is told, so that a test can look at
//! what would be left if the power had failed at any moment; and that fails, lies or is full when it is told to.
//!
//! It has one folder, which is all that a database needs.

mod medium;

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
pub use medium::{Image, Inode, Loss, Medium, Op};
use tempfile::TempDir;

/// The kernel asks again each time: it is another process's file, too.
const TTL: Duration = Duration::ZERO;
const BLOCK: u32 = 4096;

/// What is wrong with the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Fault {
    #[default]
    None,
    /// Every sync fails, and what it was to write is lost.
    SyncFails,
    /// A sync says that it has been done, and has done nothing.
    SyncLies,
    /// Nothing can grow any more.
    Full,
}

/// A mounted disk; dropping it unmounts it.
pub struct Disk {
    /// Before the folder it is mounted on.
    _session: BackgroundSession,
    folder: TempDir,
    state: Arc<Mutex<State>>,
}

impl Disk {
    /// Fails where there is no FUSE, or no right to mount.
    pub fn mount() -> io::Result<Disk> {
        let folder = tempfile::tempdir()?;
        let state: Arc<Mutex<State>> = Arc::default();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("postrider-disk".to_owned())];
        let session = fuser::spawn_mount(Mounted(state.clone()), folder.path(), &config).map_err(|error| {
            let advice = "is /dev/fuse there, and may we mount? (as root, or with the package fuse3)";
            io::Error::new(error.kind(), format!("no file system of our own can be mounted: {error}; {advice}"))
        })?;
        Ok(Disk { _session: session, folder, state })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn is(&self, fault: Fault) {
        lock(&self.state).fault = fault;
    }

    /// How much it has been told so far.
    pub fn told(&self) -> usize {
        lock(&self.state).told.len()
    }

    /// Everything it has been told, in order.
    pub fn journal(&self) -> Vec<Op> {
        lock(&self.state).told.clone()
    }
}

#[derive(Default)]
struct State {
    names: BTreeMap<String, Inode>,
    files: HashMap<Inode, File>,
    last: Inode,
    told: Vec<Op>,
    fault: Fault,
}

#[derive(Default)]
struct File {
    bytes: Vec<u8>,
    mode: u16,
    /// Memory that processes share about the database: nobody expects it to outlive them.
    is_passing: bool,
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    fn tell(&mut self, inode: Inode, op: Op) {
        if !self.files.get(&inode).is_some_and(|file| file.is_passing) {
            self.told.push(op);
        }
    }

    fn create(&mut self, name: &str, mode: u32) -> Inode {
        self.last = self.last.max(u64::from(INodeNo::ROOT)) + 1;
        let inode = self.last;
        let is_passing = name.ends_with("-shm");
        self.files.insert(inode, File { mode: mode as u16 & 0o7777, is_passing, ..File::default() });
        self.names.insert(name.to_owned(), inode);
        self.tell(inode, Op::Create { name: name.to_owned(), inode });
        inode
    }

    fn attributes(&self, inode: Inode) -> Option<FileAttr> {
        let is_folder = inode == u64::from(INodeNo::ROOT);
        let file = self.files.get(&inode);
        if !is_folder && file.is_none() {
            return None;
        }
        let size = file.map_or(0, |file| file.bytes.len() as u64);
        Some(FileAttr {
            ino: INodeNo(inode),
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if is_folder { FileType::Directory } else { FileType::RegularFile },
            perm: file.map_or(0o755, |file| file.mode),
            nlink: u32::from(is_folder || self.names.values().any(|named| *named == inode)),
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: BLOCK,
            flags: 0,
        })
    }

    fn resize(&mut self, inode: Inode, to: usize) -> Result<(), Errno> {
        let file = self.files.get_mut(&inode).ok_or(Errno::ENOENT)?;
        if to > file.bytes.len() && self.fault == Fault::Full {
            return Err(Errno::ENOSPC);
        }
        file.bytes.resize(to, 0);
        self.tell(inode, Op::Resize { inode, to });
        Ok(())
    }

    fn write(&mut self, inode: Inode, at: usize, bytes: &[u8]) -> Result<(), Errno> {
        let file = self.files.get_mut(&inode).ok_or(Errno::ENOENT)?;
        let end = at + bytes.len();
        if end > file.bytes.len() {
            if self.fault == Fault::Full {
                return Err(Errno::ENOSPC);
            }
            file.bytes.resize(end, 0);
        }
        file.bytes[at..end].copy_from_slice(bytes);
        self.tell(inode, Op::Write { inode, at, bytes: bytes.to_vec() });
        Ok(())
    }

    fn sync(&mut self, inode: Inode, op: Op) -> Result<(), Errno> {
        match self.fault {
            Fault::SyncFails => {
                self.tell(inode, Op::Forget { inode });
                Err(Errno::EIO)
            }
            Fault::SyncLies => Ok(()),
            Fault::None | Fault::Full => {
                self.tell(inode, op);
                Ok(())
            }
        }
    }
}

/// The same as the kernel sees it.
struct Mounted(Arc<Mutex<State>>);

fn text(name: &OsStr) -> Result<&str, Errno> {
    name.to_str().ok_or(Errno::EINVAL)
}

impl Mounted {
    fn file(&self, name: &OsStr) -> Result<FileAttr, Errno> {
        let state = lock(&self.0);
        let inode = *state.names.get(text(name)?).ok_or(Errno::ENOENT)?;
        state.attributes(inode).ok_or(Errno::ENOENT)
    }

    fn ends(done: Result<(), Errno>, reply: ReplyEmpty) {
        match done {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        }
    }
}

impl Filesystem for Mounted {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.file(name) {
            Ok(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match lock(&self.0).attributes(ino.into()) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut state = lock(&self.0);
        let inode = ino.into();
        if let (Some(mode), Some(file)) = (mode, state.files.get_mut(&inode)) {
            file.mode = mode as u16 & 0o7777;
        }
        if let Some(Err(error)) = size.map(|size| state.resize(inode, size as usize)) {
            return reply.error(error);
        }
        match state.attributes(inode) {
            Some(attributes) => reply.attr(&TTL, &attributes),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn create(&self, _: &Request, _: INodeNo, name: &OsStr, mode: u32, umask: u32, _: i32, reply: ReplyCreate) {
        let name = match text(name) {
            Ok(name) => name,
            Err(error) => return reply.error(error),
        };
        let mut state = lock(&self.0);
        let inode = state.create(name, mode & !umask);
        match state.attributes(inode) {
            Some(attributes) => {
                reply.created(&TTL, &attributes, Generation(0), FileHandle(0), FopenFlags::empty());
            }
            None => reply.error(Errno::EIO),
        }
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = lock(&self.0);
        let done = text(name).and_then(|name| {
            let inode = state.names.remove(name).ok_or(Errno::ENOENT)?;
            state.tell(inode, Op::Remove { name: name.to_owned() });
            Ok(())
        });
        Self::ends(done, reply);
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _: INodeNo,
        newname: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut state = lock(&self.0);
        let done = text(name).and_then(|from| Ok((from, text(newname)?))).and_then(|(from, to)| {
            let inode = state.names.remove(from).ok_or(Errno::ENOENT)?;
            state.names.insert(to.to_owned(), inode);
            state.tell(inode, Op::Rename { from: from.to_owned(), to: to.to_owned() });
            Ok(())
        });
        Self::ends(done, reply);
    }

    fn link(&self, _: &Request, ino: INodeNo, _: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let mut state = lock(&self.0);
        let name = match text(newname) {
            Ok(name) if !state.names.contains_key(name) => name,
            Ok(_) => return reply.error(Errno::EEXIST),
            Err(error) => return reply.error(error),
        };
        let inode = ino.into();
        state.names.insert(name.to_owned(), inode);
        state.tell(inode, Op::Create { name: name.to_owned(), inode });
        match state.attributes(inode) {
            Some(attributes) => reply.entry(&TTL, &attributes, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let state = lock(&self.0);
        let Some(file) = state.files.get(&ino.into()) else { return reply.error(Errno::ENOENT) };
        let begin = file.bytes.len().min(offset as usize);
        let end = file.bytes.len().min(begin + size as usize);
        reply.data(&file.bytes[begin..end]);
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match lock(&self.0).write(ino.into(), offset as usize, data) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let inode = ino.into();
        Self::ends(lock(&self.0).sync(inode, Op::Sync { inode }), reply);
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        Self::ends(lock(&self.0).sync(ino.into(), Op::SyncNames), reply);
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = lock(&self.0);
        let names = state.names.iter().enumerate().skip(offset as usize);
        for (n, (name, inode)) in names {
            if reply.add(INodeNo(*inode), n as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let free = if lock(&self.0).fault == Fault::Full { 0 } else { 1 << 20 };
        reply.statfs(1 << 20, free, free, 1 << 20, 1 << 20, BLOCK, 255, BLOCK);
    }
}
