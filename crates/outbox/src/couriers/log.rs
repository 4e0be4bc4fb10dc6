//! The courier `log`: one line per message on standard output or standard error.
//!
//! Whoever reads the output may stop reading, and a write then waits without end. So a thread of its own writes, and a
//! delivery waits for it only so long: a message that cannot be printed is given back, and nothing else is held up.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::oneshot;

use crate::courier::Courier;
use crate::message::{Message, hex};
use crate::observe::sending;
use crate::outcome::{Outcome, Reach};

/// A line must be taken within this time, and is tried again after that one.
const PATIENCE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_secs(5);
/// Lines written at once.
const BATCH: usize = 256;

/// Prints one line per message. The payload is shown only if asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Log {
    pub show_payload: bool,
    /// Standard output belongs to something else.
    pub to_stderr: bool,
}

#[async_trait]
impl Courier for Log {
    fn name(&self) -> &str {
        "log"
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        let payload = match self.show_payload {
            true => String::from_utf8_lossy(&message.payload).into_owned(),
            false => format!("{} bytes, sha256 {}", message.payload.len(), &hex(&message.sha())[..12]),
        };
        let line = format!("{} #{} attempt {}: {payload}\n", message.lane, message.id, message.attempts + 1);
        static STDOUT: OnceLock<&'static Printer> = OnceLock::new();
        static STDERR: OnceLock<&'static Printer> = OnceLock::new();
        let printer = match self.to_stderr {
            true => STDERR.get_or_init(|| Printer::start(stderr())),
            false => STDOUT.get_or_init(|| Printer::start(stdout())),
        };
        sending(printer.print(line, PATIENCE)).await
    }
}

/// A descriptor of our own: the locks of `std::io` are for those who never wait.
#[cfg(unix)]
fn own(stream: std::os::fd::BorrowedFd<'_>) -> Option<Box<dyn Write + Send>> {
    let file = stream.try_clone_to_owned().map(std::fs::File::from);
    file.ok().map(|file| Box::new(file) as Box<dyn Write + Send>)
}

#[cfg(unix)]
fn stdout() -> Box<dyn Write + Send> {
    use std::os::fd::AsFd;
    own(std::io::stdout().as_fd()).unwrap_or_else(|| Box::new(std::io::stdout()))
}

#[cfg(unix)]
fn stderr() -> Box<dyn Write + Send> {
    use std::os::fd::AsFd;
    own(std::io::stderr().as_fd()).unwrap_or_else(|| Box::new(std::io::stderr()))
}

#[cfg(not(unix))]
fn stdout() -> Box<dyn Write + Send> {
    Box::new(std::io::stdout())
}

#[cfg(not(unix))]
fn stderr() -> Box<dyn Write + Send> {
    Box::new(std::io::stderr())
}

/// What became of a line.
type Printed = Result<(), std::io::ErrorKind>;

struct Line {
    text: String,
    reply: oneshot::Sender<Printed>,
    /// Told when it is about to be written: from then on it may be there. Closed once the delivery has given up.
    begun: oneshot::Sender<()>,
}

/// The lines that wait, and the thread that writes them. It lives as long as the process.
#[derive(Default)]
struct Printer {
    waiting: Mutex<VecDeque<Line>>,
    more: Condvar,
}

impl Printer {
    fn start(to: Box<dyn Write + Send>) -> &'static Printer {
        let printer: &'static Printer = Box::leak(Box::default());
        let started = std::thread::Builder::new().name("postrider-print".to_owned()).spawn(|| printer.write(to));
        if let Err(error) = started {
            tracing::error!(%error, "the courier `log` cannot start its thread; its messages wait");
        }
        printer
    }

    async fn print(&self, text: String, patience: Duration) -> Outcome {
        let (reply, printed) = oneshot::channel();
        let (begun, mut has_begun) = oneshot::channel();
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(Line { text, reply, begun });
        self.more.notify_one();
        match tokio::time::timeout(patience, printed).await {
            Ok(Ok(Ok(()))) => Outcome::sent(),
            Ok(Ok(Err(kind))) => Outcome::retry("OUTPUT_CLOSED", format!("cannot print: {kind}"), Reach::NeverSent),
            _ => {
                // From here on it is not begun any more.
                has_begun.close();
                match has_begun.try_recv() {
                    // Half of it may be out.
                    Ok(()) => Outcome::retry("OUTPUT_BLOCKED", "nobody reads the output", Reach::Unknown),
                    Err(_) => Outcome::Defer { delay: AGAIN, code: "OUTPUT_BLOCKED".into() },
                }
            }
        }
    }

    fn write(&self, mut to: Box<dyn Write + Send>) {
        loop {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            while waiting.is_empty() {
                waiting = self.more.wait(waiting).unwrap_or_else(PoisonError::into_inner);
            }
            let next = waiting.len().min(BATCH);
            let lines: Vec<Line> = waiting.drain(..next).collect();
            drop(waiting);
            let (mut text, mut replies) = (String::new(), Vec::with_capacity(lines.len()));
            for line in lines {
                // Whoever has given up a line will bring it again.
                if line.begun.send(()).is_ok() {
                    text.push_str(&line.text);
                    replies.push(line.reply);
                }
            }
            let printed = write_all(&mut to, text.as_bytes());
            for reply in replies {
                let _ = reply.send(printed);
            }
        }
    }
}

/// All of it; a descriptor somebody made non-blocking is asked again.
fn write_all(to: &mut dyn Write, mut bytes: &[u8]) -> Printed {
    use std::io::ErrorKind::{Interrupted, WouldBlock, WriteZero};
    while !bytes.is_empty() {
        match to.write(bytes) {
            Ok(0) => return Err(WriteZero),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == Interrupted => {}
            Err(error) if error.kind() == WouldBlock => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error.kind()),
        }
    }
    to.flush().map_err(|error| error.kind())
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

    #[tokio::test]
    async fn what_nobody_reads_is_given_back_and_never_printed_twice() {
        let ((open, gate), (taken, printed)) = (mpsc::channel(), mpsc::channel());
        let printer = Printer::start(Box::new(Gate(gate, taken)));
        let short = Duration::from_millis(50);
        let first = printer.print("first\n".to_owned(), short).await;
        assert!(matches!(&first, Outcome::Retry { fault, .. } if fault.reach == Reach::Unknown), "{first:?}");
        let second = printer.print("second\n".to_owned(), short).await;
        assert_eq!(second, Outcome::Defer { delay: AGAIN, code: "OUTPUT_BLOCKED".into() });
        open.send(()).unwrap();
        assert_eq!(printed.recv().unwrap(), b"first\n");
        open.send(()).unwrap();
        assert_eq!(printer.print("third\n".to_owned(), Duration::from_secs(60)).await, Outcome::sent());
        assert_eq!(printed.recv().unwrap(), b"third\n", "what was given back is not printed behind our back");
    }
}
