//! Signals: SIGTERM, SIGINT and SIGQUIT end a process with manners and, the second time, at once; SIGHUP reads secrets
//! again.
//!
//! They are heard on a thread of their own, so that a process whose other threads are all stuck still hears them.

use std::future::Future;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::failure::{Failure, Result};
use crate::secret;

/// What to do at the first signal to end.
type First = Box<dyn FnOnce() + Send>;

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
    hangup: Signal,
}

enum Heard {
    End,
    Hangup,
}

impl Signals {
    fn listen() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Heard {
        tokio::select! {
            _ = self.terminate.recv() => Heard::End,
            _ = self.interrupt.recv() => Heard::End,
            _ = self.quit.recv() => Heard::End,
            _ = self.hangup.recv() => Heard::Hangup,
        }
    }
}

/// Listens from now on. A second signal to end ends the process at once, whatever it is doing.
fn listen(hangup_ends: bool, first: First) -> Result<()> {
    let wrong = |e: std::io::Error| Failure::failed(format!("cannot listen for signals: {e}"));
    let (ready, is_ready) = std::sync::mpsc::channel();
    let hear = move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_io().build() {
            Ok(runtime) => runtime,
            Err(error) => return drop(ready.send(Err(error))),
        };
        runtime.block_on(async move {
            let mut signals = match Signals::listen() {
                Ok(signals) => signals,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(()));
            let mut first = Some(first);
            loop {
                match (signals.next().await, hangup_ends) {
                    (Heard::Hangup, false) => secret::read_again(),
                    _ => match first.take() {
                        Some(first) => first(),
                        None => std::process::exit(1),
                    },
                }
            }
        });
    };
    std::thread::Builder::new().name("postrider-signals".to_owned()).spawn(hear).map_err(wrong)?;
    let gone = |_| Failure::failed("cannot listen for signals: the thread ended");
    is_ready.recv().map_err(gone)?.map_err(wrong)
}

/// Resolves at SIGTERM, SIGQUIT or Ctrl-C. A second one ends the process at once; what it holds is taken over when its
/// leases run out. SIGHUP reads secrets again.
pub fn stop_signal() -> Result<impl Future<Output = ()> + Send + 'static> {
    stop_at(false)
}

/// The same for what runs in a terminal and ends with it.
pub fn end_signal() -> Result<impl Future<Output = ()> + Send + 'static> {
    stop_at(true)
}

fn stop_at(hangup_ends: bool) -> Result<impl Future<Output = ()> + Send + 'static> {
    let (stop, mut stopped) = watch::channel(false);
    let first = Box::new(move || {
        stop.send_replace(true);
        tracing::info!("stopping: finishing what is under way (once more to stop at once)");
    });
    listen(hangup_ends, first)?;
    Ok(async move { drop(stopped.wait_for(|stop| *stop).await) })
}

/// For commands that do much in many steps: true once somebody wants them to end. They finish the step at hand and say
/// how far they came.
pub fn interruption() -> Result<watch::Receiver<bool>> {
    let (interrupt, interrupted) = watch::channel(false);
    listen(
        true,
        Box::new(move || {
            interrupt.send_replace(true);
        }),
    )?;
    Ok(interrupted)
}
