//! Logs go to stderr, so that stdout stays for data. `RUST_LOG` chooses what is told.
//!
//! Whoever reads stderr may stop reading, and a write then waits without end. So lines are written aside, by a thread of
//! their own: a bounded number waits for it, and what comes beyond that is dropped and counted. Nothing else ever waits.

use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Lines that may wait to be read, by number and by bytes.
const LINES: usize = 10_000;
const BYTES: usize = 4 << 20;
/// Bytes written at once.
const CHUNK: usize = 64 << 10;
/// At the end of the process the last lines have this long to be read.
const LAST_WORDS: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// The log of this process, once it has begun.
static LOG: OnceLock<Aside> = OnceLock::new();
/// Lines nobody will read.
static DROPPED: AtomicU64 = AtomicU64::new(0);

pub fn start(format: LogFormat, default_level: &str) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default_level));
    let Some(aside) = stderr().and_then(Aside::start) else { return };
    let aside = LOG.get_or_init(|| aside);
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(aside.clone())
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .log_internal_errors(false);
    // A second start (in a test) keeps the first.
    let _ = match format {
        LogFormat::Text => subscriber.finish().with(filter_fn(is_ours)).try_init(),
        LogFormat::Json => subscriber.json().finish().with(filter_fn(is_ours)).try_init(),
    };
    // What the standard library tells of a panic it writes by itself, and would wait for its reader.
    std::panic::set_hook(Box::new(|panic| match tracing::enabled!(tracing::Level::ERROR) {
        true => tracing::error!("{panic}"),
        false => say(&format!("{panic}\n")),
    }));
}

/// What libraries tell in detail repeats statements with their values, requests with their headers, and what MCP clients say
/// of themselves; and of HTTP/2 any stranger could fill the log. So whatever `RUST_LOG` says, details are our own.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    let (level, target) = (*metadata.level(), metadata.target());
    let others = if target.starts_with("h2::") { Level::ERROR } else { Level::WARN };
    level <= others || target.starts_with("postrider")
}

/// A descriptor of our own: the lock of `std::io::stderr` is for those who never wait.
fn stderr() -> Option<Box<dyn Write + Send>> {
    let file = std::io::stderr().as_fd().try_clone_to_owned().map(std::fs::File::from);
    file.ok().map(|file| Box::new(file) as Box<dyn Write + Send>)
}

/// One more line for stderr, after all that was logged before it.
pub fn say(line: &str) {
    match LOG.get() {
        Some(aside) => aside.push(line.as_bytes()),
        None => drop(std::io::stderr().write_all(line.as_bytes())),
    }
}

/// Waits until the last lines are out, but not for a reader that has stopped reading.
pub fn end() {
    if let Some(aside) = LOG.get() {
        aside.empty_within(LAST_WORDS);
    }
}

/// How many lines were dropped so far.
pub fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Dropped since the reader was last told.
    dropped: u64,
    writing: bool,
}

/// Lines on their way to whoever reads them.
#[derive(Clone, Default)]
struct Aside(Arc<(Mutex<Waiting>, Condvar)>);

impl Aside {
    fn start(to: Box<dyn Write + Send>) -> Option<Aside> {
        let aside = Aside::default();
        let own = aside.clone();
        std::thread::Builder::new().name("postrider-log".to_owned()).spawn(move || own.write_to(to)).ok()?;
        Some(aside)
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut waiting = self.waiting();
        if waiting.lines.len() >= LINES || waiting.bytes + line.len() > BYTES {
            waiting.dropped += 1;
            DROPPED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        waiting.bytes += line.len();
        waiting.lines.push_back(line.to_vec());
        drop(waiting);
        self.0.1.notify_all();
    }

    fn empty_within(&self, patience: Duration) {
        let busy = |waiting: &mut Waiting| waiting.writing || !waiting.lines.is_empty();
        let _ = self.0.1.wait_timeout_while(self.waiting(), patience, busy);
    }

    /// As much as is written at once, and how many lines were dropped before the last of it could be.
    fn next(&self) -> (Vec<u8>, u64) {
        let mut waiting = self.waiting();
        waiting.writing = false;
        self.0.1.notify_all();
        while waiting.lines.is_empty() && waiting.dropped == 0 {
            waiting = self.0.1.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        let mut chunk = Vec::new();
        while chunk.len() < CHUNK
            && let Some(line) = waiting.lines.pop_front()
        {
            waiting.bytes -= line.len();
            chunk.extend(line);
        }
        waiting.writing = true;
        let dropped = if waiting.lines.is_empty() { std::mem::take(&mut waiting.dropped) } else { 0 };
        (chunk, dropped)
    }

    fn write_to(&self, mut to: Box<dyn Write + Send>) {
        loop {
            let (chunk, dropped) = self.next();
            write_all(&mut to, &chunk);
            if dropped > 0 {
                // It goes the way of all lines, and there is room for it now.
                tracing::warn!(lines = dropped, "log lines were dropped: nobody read them in time");
            }
        }
    }
}

/// All of it; where nobody will ever read it there is nobody to tell.
fn write_all(to: &mut dyn Write, mut bytes: &[u8]) {
    use std::io::ErrorKind::{Interrupted, WouldBlock};
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return,
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == Interrupted => {}
            // Somebody made the descriptor non-blocking.
            Err(error) if error.kind() == WouldBlock => std::thread::sleep(Duration::from_millis(20)),
            Err(_) => return,
        }
    }
}

impl Write for Aside {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Aside {
    type Writer = Aside;

    fn make_writer(&'a self) -> Aside {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Takes what it is given when the test lets it.
    struct Gate(mpsc::Receiver<()>, mpsc::Sender<Vec<u8>>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let _ = self.0.recv();
            let _ = self.1.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_stops_holds_nobody_up_and_what_is_dropped_is_counted() {
        let ((open, gate), (taken, written)) = (mpsc::channel(), mpsc::channel());
        let aside = Aside::start(Box::new(Gate(gate, taken))).unwrap();
        // The first is on its way when the reader stops; so many wait, and the rest is dropped.
        aside.push(b"first\n");
        while !aside.waiting().writing {
            std::thread::yield_now();
        }
        for n in 0..LINES + 7 {
            aside.push(format!("{n}\n").as_bytes());
        }
        let (waiting, dropped) = {
            let waiting = aside.waiting();
            (waiting.lines.len(), waiting.dropped)
        };
        assert_eq!((waiting, dropped), (LINES, 7));
        aside.push(&vec![b'x'; BYTES]);
        assert_eq!(aside.waiting().dropped, 8, "nor does it wait for one that is too long");
        drop(open);
        aside.empty_within(Duration::from_secs(60));
        let text = String::from_utf8(written.try_iter().flatten().collect()).unwrap();
        let expected: String = (0..LINES).map(|n| format!("{n}\n")).collect();
        assert_eq!(text, format!("first\n{expected}"), "in order, and whole");
        assert_eq!(aside.waiting().dropped, 0, "the reader was told");
    }
}
