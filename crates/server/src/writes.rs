//! Can this process write? Reads say nothing about it: with a full disk they go on. So what became of the last writes is
//! remembered, for `/readyz` and `/health` to tell, and where nobody writes a little something is written now and then.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::error::Kind;
use postrider::store::{Mode, transact};
use postrider::tx::Dialect;
use postrider::{Error, Outbox};
use tokio::sync::watch;

/// A write that failed is told for so long at least, whatever succeeded since: with little space left small writes succeed
/// among large ones that fail.
const REMEMBERED: Duration = Duration::from_secs(5);
/// How often it is looked whether a write is due, and after how long without one it is.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const SILENCE: Duration = Duration::from_secs(5);

/// What became of the last writes.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    failed: Option<(Tick, Kind)>,
    written: Option<Tick>,
}

impl Last {
    fn note(&mut self, failed: Option<Kind>, now: Tick) {
        match failed {
            Some(kind) => self.failed = Some((now, kind)),
            None => self.written = Some(now),
        }
    }

    /// The failure that is still to be told: a recent one, or one that no write has succeeded after.
    fn trouble(&self, now: Tick) -> Option<Trouble> {
        let (at, kind) = self.failed?;
        let over = self.written.is_some_and(|written| written > at);
        let ago = now.since(at);
        (!over || ago < REMEMBERED).then_some(Trouble { kind, ago })
    }

    /// Is it time to write something, to see whether that works?
    fn is_due(&self, now: Tick) -> bool {
        self.trouble(now).is_some() || self.written.is_none_or(|written| now.since(written) >= SILENCE)
    }
}

/// A write that failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trouble {
    pub kind: Kind,
    pub ago: Duration,
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Error {
        let seconds = trouble.ago.as_secs();
        Error::new(
            Kind::Unavailable,
            format!(
                "a write failed {seconds} s ago; is the disk full, is the database read-only, has somebody locked its tables?"
            ),
        )
    }
}

/// Of this process, which has one database.
static LAST: Mutex<Last> = Mutex::new(Last { failed: None, written: None });

fn last() -> MutexGuard<'static, Last> {
    LAST.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remembers what became of a write. Only failures of the store count: what was refused for its own sake says nothing.
pub fn note<T>(written: &postrider::Result<T>) {
    match written {
        Ok(_) => last().note(None, Tick::now()),
        Err(error) => note_failure(error),
    }
}

/// Remembers a failure, if it is one of the store.
pub fn note_failure(error: &Error) {
    if matches!(error.kind, Kind::Unreachable | Kind::Unavailable | Kind::Timeout) {
        last().note(Some(error.kind), Tick::now());
    }
}

/// The failure that is still to be told.
pub fn trouble() -> Option<Trouble> {
    last().trouble(Tick::now())
}

/// Writes a little something where nobody else has for a while, until told to stop.
pub fn watch(outbox: &Outbox, mut stopped: watch::Receiver<bool>) -> tokio::task::JoinHandle<()> {
    let outbox = outbox.clone();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                _ = stopped.wait_for(|stop| *stop) => return,
            }
            let due = last().is_due(Tick::now());
            if due && let Err(error) = probe(&outbox).await {
                tracing::debug!(%error, "a write to see whether writes succeed did not");
            }
        }
    })
}

/// Writes a little something, and remembers what became of it.
pub async fn probe(outbox: &Outbox) -> postrider::Result<()> {
    let mut written = write(outbox, "written_at").await;
    if written.as_ref().is_err_and(|error| error.kind == Kind::Locked) {
        // Of one row somebody may have a lock, and no writer needs it.
        written = write(outbox, "written_at_too").await;
    }
    note(&written);
    if let Err(error) = &written
        && error.kind == Kind::Locked
    {
        // All that is written waits, as while a backup has all tables locked.
        last().note(Some(error.kind), Tick::now());
    }
    written
}

async fn write(outbox: &Outbox, name: &'static str) -> postrider::Result<()> {
    transact(&**outbox.store(), Mode::Write, move |tx| {
        Box::pin(async move {
            let sql = match tx.dialect() {
                Dialect::Mysql => {
                    "INSERT INTO postrider_meta (name, value) VALUES (?, ?) ON DUPLICATE KEY UPDATE value = VALUES(value)"
                }
                _ => {
                    "INSERT INTO postrider_meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"
                }
            };
            // Something new each time: what is not changed is not written.
            let value = postrider::clock::wall().to_string();
            tx.execute(sql, &[name.into(), value.into()]).await.map(drop)
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Tick {
        Tick::default().plus(Duration::from_secs(seconds))
    }

    #[test]
    fn a_failed_write_is_told_until_one_succeeds_and_a_few_seconds_at_least() {
        let mut last = Last::default();
        assert_eq!(last.trouble(at(1)), None);
        last.note(Some(Kind::Unavailable), at(10));
        let told = |ago: u64| Some(Trouble { kind: Kind::Unavailable, ago: Duration::from_secs(ago) });
        assert_eq!(last.trouble(at(12)), told(2));
        assert_eq!(last.trouble(at(100)), told(90), "nothing succeeded since");
        last.note(None, at(101));
        assert_eq!(last.trouble(at(101)), None);
        last.note(Some(Kind::Unavailable), at(110));
        last.note(None, at(111));
        assert_eq!(last.trouble(at(112)), told(2), "one that succeeds does not hide one that just failed");
        assert_eq!(last.trouble(at(116)), None);
    }

    #[test]
    fn where_nobody_writes_it_is_tried() {
        let mut last = Last::default();
        assert!(last.is_due(at(1)), "nobody knows");
        last.note(None, at(10));
        assert!(!last.is_due(at(12)));
        assert!(last.is_due(at(15)), "nobody wrote for a while");
        last.note(Some(Kind::Unavailable), at(15));
        assert!(last.is_due(at(16)), "is it over?");
    }
}
