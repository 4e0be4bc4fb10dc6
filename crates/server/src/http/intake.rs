//! Group commit: what arrives together, each in a request of its own, shares a transaction.
//!
//! While one transaction is under way, the next one gathers. Each entry gets its own answer, and one that cannot be
//! written harms no other.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use postrider::Error;
use postrider::error::{Class, Effect, Kind};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::writes;

/// Entries and bytes of one transaction.
const ENTRIES: usize = 500;
const BYTES: usize = 4 << 20;
/// Entries that may wait; beyond it requests wait for their turn.
const WAITING: usize = 10_000;
/// Transactions under way at once.
const UNDER_WAY: usize = 2;

type Answer<R> = postrider::Result<R>;
type Waiting<T, R> = (T, oneshot::Sender<Answer<R>>);
type Writing<R> = Pin<Box<dyn Future<Output = Answer<Vec<R>>> + Send>>;

/// How entries of one kind are written.
pub struct Ways<T, R> {
    /// All of them in one transaction, answered in order.
    pub write: Box<dyn Fn(Vec<T>) -> Writing<R> + Send + Sync>,
    pub bytes: fn(&T) -> usize,
    /// The same again is harmless: it has a key.
    pub repeatable: fn(&T) -> bool,
}

pub struct Intake<T, R> {
    queue: mpsc::Sender<Waiting<T, R>>,
    patience: Duration,
}

impl<T: Clone + Send + 'static, R: Send + 'static> Intake<T, R> {
    /// Works until it is dropped.
    pub fn start(ways: Ways<T, R>, patience: Duration) -> Self {
        let (queue, waiting) = mpsc::channel(WAITING);
        tokio::spawn(gather(Arc::new(ways), waiting));
        Intake { queue, patience }
    }

    /// Answers once the entry is committed.
    pub async fn put(&self, entry: T) -> Answer<R> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::new(Kind::Unavailable, "the server is shutting down");
        let late =
            |effect| Error { kind: Kind::Timeout, effect, message: "the database did not answer in time".to_owned() };
        let queued = tokio::time::timeout(self.patience, self.queue.send((entry, reply))).await;
        queued.map_err(|_| late(Effect::NotApplied))?.map_err(|_| gone())?;
        // From here on it may be written without our hearing of it.
        let answered = tokio::time::timeout(self.patience, answer).await;
        answered.map_err(|_| late(Effect::Unknown))?.map_err(|_| gone())?
    }
}

async fn gather<T: Clone + Send + 'static, R: Send + 'static>(
    ways: Arc<Ways<T, R>>,
    mut waiting: mpsc::Receiver<Waiting<T, R>>,
) {
    let slots = Arc::new(Semaphore::new(UNDER_WAY));
    while let Some(first) = waiting.recv().await {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let mut bytes = (ways.bytes)(&first.0);
        let mut batch = vec![first];
        while batch.len() < ENTRIES && bytes < BYTES {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += (ways.bytes)(&next.0);
            batch.push(next);
        }
        let ways = ways.clone();
        tokio::spawn(async move {
            let _slot = slot;
            write(&ways, batch).await;
        });
    }
}

async fn write<T: Clone, R>(ways: &Ways<T, R>, batch: Vec<Waiting<T, R>>) {
    let (entries, replies): (Vec<T>, Vec<oneshot::Sender<Answer<R>>>) = batch.into_iter().unzip();
    let written = (ways.write)(entries.clone()).await;
    writes::note(&written);
    match written {
        Ok(answers) => replies.into_iter().zip(answers).for_each(|(reply, answer)| drop(reply.send(Ok(answer)))),
        // Something is wrong with one of them, or was with all: each alone, unless it may have been written.
        Err(error) => {
            let alone = entries.len() == 1;
            for (entry, reply) in entries.into_iter().zip(replies) {
                let again = !alone && (error.effect == Effect::NotApplied || (ways.repeatable)(&entry));
                let answer = if again && error.class() != Class::Retryable {
                    let answers = (ways.write)(vec![entry]).await;
                    answers.and_then(|answers| {
                        answers.into_iter().next().ok_or_else(|| Error::database("an entry without an answer"))
                    })
                } else {
                    Err(error.clone())
                };
                let _ = reply.send(answer);
            }
        }
    }
}
