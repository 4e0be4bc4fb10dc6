//! The threads that own SQLite's connections. The writer takes waiting requests into one commit. Every read has a
//! transaction of its own, begun after it was asked for: what was committed and answered before, it sees.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};

use super::sqlite::{SqliteTx, classify};
use crate::error::{Error, Kind, Result};

/// Nothing more could be written: the disk is full, or the file may not grow.
const FULL: i32 = 13;
const IOERR_WRITE: i32 = 10 | (3 << 8);
/// Requests taken into one commit at most.
const GROUP: usize = 64;

/// A request for a connection thread; what it gives back is told to the requester after the commit.
/// Without a connection there is no transaction: the request only learns of the error.
pub(super) type Job = Box<dyn FnOnce(Option<&mut SqliteTx>) -> (bool, Finish) + Send>;
pub(super) type Finish = Box<dyn FnOnce(Result<()>) + Send>;
pub(super) type Queue = mpsc::Sender<Request>;

pub(super) struct Request {
    pub job: Job,
    /// Claim and settle: many, and sure to succeed as long as the file does.
    pub hot: bool,
}

/// The file as it was when it was opened. Deleted or moved, its writes would still succeed, into a file that nobody
/// finds again; and so they would without its log, or the index of that, which stand beside it.
#[derive(Clone, Debug)]
pub(super) struct OpenFile {
    path: PathBuf,
    /// As it was named, where that leads to the file by a link: another process would open what it leads to by then.
    #[cfg(unix)]
    given: Option<PathBuf>,
    #[cfg(unix)]
    identity: (u64, u64),
    #[cfg(unix)]
    beside: Arc<[Beside; 2]>,
}

/// A file beside the database's own, known from the first commit that finds it there.
#[cfg(unix)]
#[derive(Debug)]
struct Beside {
    path: PathBuf,
    identity: OnceLock<(u64, u64)>,
    /// Its length when it was last looked at.
    length: AtomicU64,
}

#[cfg(unix)]
impl Beside {
    fn is_there(&self) -> bool {
        match (self.identity.get(), identity(&self.path, false)) {
            (Some(known), now) => now == Some(*known),
            (None, Some(now)) => *self.identity.get_or_init(|| now) == now,
            (None, None) => true,
        }
    }
}

impl OpenFile {
    #[cfg(unix)]
    pub fn at(given: &Path, path: &Path) -> Result<Self> {
        // A path may stand for a file that SQLite makes at its first write.
        let identity = identity(path, false).ok_or_else(|| gone(path))?;
        let path = path.to_owned();
        // A relative path means this file even after the process has changed its folder.
        let given = std::path::absolute(given).ok().filter(|given| *given != path);
        let beside = |end: &str| {
            let mut name = path.clone().into_os_string();
            name.push(end);
            Beside { path: name.into(), identity: OnceLock::new(), length: AtomicU64::new(0) }
        };
        let beside = Arc::new([beside("-wal"), beside("-shm")]);
        Ok(OpenFile { path, given, identity, beside })
    }

    #[cfg(unix)]
    fn check(&self) -> Result<()> {
        let led = self.given.as_ref().is_none_or(|given| identity(given, true) == Some(self.identity));
        if led && identity(&self.path, false) == Some(self.identity) { Ok(()) } else { Err(gone(&self.path)) }
    }

    /// The same for what is about to be written.
    #[cfg(unix)]
    fn check_all(&self) -> Result<()> {
        self.check()?;
        match self.beside.iter().find(|file| !file.is_there()) {
            Some(file) => Err(gone(&file.path)),
            None => Ok(()),
        }
    }

    /// Was the log cut off behind our back? It is empty, too, after a checkpoint that truncates it: then the log's index knows
    /// of no frames. Not in a transaction.
    #[cfg(unix)]
    fn check_log(&self, tx: &SqliteTx) -> Result<()> {
        let log = &self.beside[0];
        let length = || look(&log.path, true).map_or(0, |file| file.length);
        let found = length();
        if found >= log.length.swap(found, Ordering::Relaxed) {
            return Ok(());
        }
        let number = |sql, column| tx.connection.query_row(sql, (), |row| row.get::<_, i64>(column));
        let frames = number("PRAGMA wal_checkpoint(NOOP)", 1).map_err(|e| classify(&e))?;
        let page = number("PRAGMA page_size", 0).map_err(|e| classify(&e))?;
        // Looked at again: another process may have written the frames after its checkpoint, and since the first look.
        if frames > 0 && (length() as i64) < 32 + frames * (24 + page) {
            log.length.store(u64::MAX, Ordering::Relaxed); // and so it stays
            return Err(gone(&log.path));
        }
        Ok(())
    }

    #[cfg(not(unix))]
    fn check_log(&self, _: &SqliteTx) -> Result<()> {
        Ok(())
    }

    /// Elsewhere an open file can be neither deleted nor moved.
    #[cfg(not(unix))]
    pub fn at(_: &Path, path: &Path) -> Result<Self> {
        Ok(OpenFile { path: path.to_owned() })
    }

    #[cfg(not(unix))]
    fn check(&self) -> Result<()> {
        Ok(())
    }

    #[cfg(not(unix))]
    fn check_all(&self) -> Result<()> {
        Ok(())
    }
}

/// A file as it is found under a name.
#[cfg(unix)]
struct Found {
    identity: (u64, u64),
    length: u64,
}

/// Not its times: to whom Linux (since 6.13) has told those, the next write looks different in any case, and the sync after it
/// has the inode to write, too.
#[cfg(target_os = "linux")]
fn look(path: &Path, follows: bool) -> Option<Found> {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let flags = if follows { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    match statx(CWD, path, flags, StatxFlags::INO | StatxFlags::SIZE) {
        Ok(file) => {
            let device = u64::from(file.stx_dev_major) << 32 | u64::from(file.stx_dev_minor);
            Some(Found { identity: (device, file.stx_ino), length: file.stx_size })
        }
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => look_anywhere(path, follows),
        Err(_) => None,
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
use look_anywhere as look;

#[cfg(unix)]
fn look_anywhere(path: &Path, follows: bool) -> Option<Found> {
    use std::os::unix::fs::MetadataExt;
    let metadata = if follows { std::fs::metadata } else { std::fs::symlink_metadata };
    let file = metadata(path).ok()?;
    Some(Found { identity: (file.dev(), file.ino()), length: file.len() })
}

#[cfg(unix)]
fn identity(path: &Path, follows: bool) -> Option<(u64, u64)> {
    // Cut off to nothing it is not the file any more, whatever is found under its name.
    let is_log = path.as_os_str().as_encoded_bytes().ends_with(b"-wal");
    let file = look(path, follows).filter(|file| file.length > 0 || is_log)?;
    Some(file.identity)
}

fn gone(path: &Path) -> Error {
    let file = path.display();
    Error::new(
        Kind::Unavailable,
        format!(
            "the SQLite file {file} was deleted, moved, cut off or replaced while in use; nothing is written any more. Put the file back or restart on another one"
        ),
    )
}

fn still_there(file: Option<&OpenFile>) -> Result<()> {
    file.map_or(Ok(()), OpenFile::check)
}

fn start(name: String, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name).spawn(run);
    started.map(drop).map_err(|e| Error::new(Kind::Unreachable, format!("cannot start a thread: {e}")))
}

/// Starts the thread that writes. Waiting requests share one commit; a failed one is rolled back alone.
pub(super) fn write(name: &str, mut tx: SqliteTx, file: Option<OpenFile>) -> Result<Queue> {
    let (sender, requests) = mpsc::channel::<Request>();
    start(name.to_owned(), move || {
        while let Ok(first) = requests.recv() {
            run_group(&mut tx, first, &requests, file.as_ref());
        }
    })?;
    Ok(sender)
}

/// Who may have the processor first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haste {
    Delivers,
    /// Somebody looks: a page that comes a little later harms nobody.
    Looks,
}

/// Threads of this process that have work to do go before this one.
fn give_way() {
    // What the system does not grant only costs time.
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 10);
}

/// Starts a thread for each connection; whichever is free takes the next request.
pub(super) fn read(name: &str, haste: Haste, connections: Vec<SqliteTx>, file: Option<OpenFile>) -> Result<Queue> {
    let (sender, requests) = mpsc::channel::<Request>();
    let requests = Arc::new(Mutex::new(requests));
    for (n, mut tx) in connections.into_iter().enumerate() {
        let (requests, file) = (requests.clone(), file.clone());
        start(format!("{name}-{n}"), move || {
            if haste == Haste::Looks {
                give_way();
            }
            loop {
                let next = requests.lock().unwrap_or_else(|e| e.into_inner()).recv();
                let Ok(request) = next else { return };
                run_read(&mut tx, request, file.as_ref());
            }
        })?;
    }
    Ok(sender)
}

fn run_read(tx: &mut SqliteTx, request: Request, file: Option<&OpenFile>) {
    let begun = still_there(file).and_then(|()| tx.batch("BEGIN"));
    let (_, finish) = (request.job)(begun.is_ok().then_some(&mut *tx));
    if begun.is_ok() && !tx.connection.is_autocommit() {
        let _ = tx.batch("ROLLBACK"); // it changed nothing
    }
    finish(begun);
}

fn run_group(tx: &mut SqliteTx, first: Request, requests: &mpsc::Receiver<Request>, file: Option<&OpenFile>) {
    let begin = "BEGIN IMMEDIATE";
    let whole = file.map_or(Ok(()), |file| file.check_log(tx));
    let mut begun = whole.and_then(|()| tx.batch(begin));
    let mut done: Vec<Finish> = Vec::with_capacity(4);
    let mut next = Some(first);
    let mut taken = 0;
    while let Some(request) = next {
        taken += 1;
        // A savepoint lets a request fail without its neighbours, but every page is then copied before it changes. The
        // first needs none, and the hot ones fail only when the file does.
        let guarded = begun.is_ok() && !done.is_empty() && !request.hot;
        if guarded {
            let _ = tx.batch("SAVEPOINT request");
        }
        let (fine, finish) = (request.job)(if begun.is_ok() { Some(&mut *tx) } else { None });
        if begun.is_ok() && tx.connection.is_autocommit() {
            // The file is full or failed: SQLite has rolled all of it back by itself, savepoints included.
            let lost =
                Error::new(Kind::Unavailable, "SQLite rolled back: the disk is full or failed; nothing was changed");
            done.drain(..).for_each(|finish| finish(Err(lost.clone())));
            finish(if fine { Err(lost) } else { Ok(()) });
            begun = tx.batch(begin);
            next = if taken < GROUP { requests.try_recv().ok() } else { None };
            continue;
        }
        match (&begun, guarded, fine) {
            (Err(error), ..) => finish(Err(error.clone())),
            (Ok(()), true, _) => {
                let _ = tx.batch(if fine { "RELEASE request" } else { "ROLLBACK TO request; RELEASE request" });
                done.push(finish);
            }
            (Ok(()), false, true) => done.push(finish),
            (Ok(()), false, false) => {
                let _ = tx.batch("ROLLBACK");
                let neighbour =
                    Error::new(Kind::Busy, "another request of the same commit failed; nothing was changed, try again");
                done.drain(..).for_each(|finish| finish(Err(neighbour.clone())));
                finish(Ok(())); // it knows its own error
                begun = tx.batch(begin);
            }
        }
        next = if taken < GROUP { requests.try_recv().ok() } else { None };
    }
    let ended = begun.and_then(|()| commit(tx, file));
    for finish in done {
        finish(ended.clone());
    }
}

fn commit(tx: &SqliteTx, file: Option<&OpenFile>) -> Result<()> {
    let roll_back = |error: Error| {
        let _ = tx.batch("ROLLBACK");
        error
    };
    file.map_or(Ok(()), OpenFile::check_all).map_err(roll_back)?;
    tx.connection.execute_batch("COMMIT").map_err(|e| {
        // Busy is definite, and so is what could not be written: it is not in the log. Another I/O error is not.
        let code = e.sqlite_error().map_or(0, |e| e.extended_code);
        let error = classify(&e);
        let definite = error.kind == Kind::Busy || code & 0xff == FULL || code == IOERR_WRITE;
        roll_back(if definite { error } else { error.unknown() })
    })
}
