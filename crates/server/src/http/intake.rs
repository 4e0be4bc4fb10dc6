//! Group commit: what arrives together, each in a request of its own, shares a transaction.
//!
//! While one transaction is under way, the next one gathers. Each entry gets its own answer, and one that cannot be
//! written harms no other: what meets a lock of somebody else's, on its key, waits apart.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use postrider::Error;
use postrider::clock::Tick;
use postrider::error::{Class, Effect, Kind};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::writes;

/// Entries and bytes of one transaction.
const ENTRIES: usize = 500;
const BYTES: usize = 4 << 20;
/// Entries that may wait; beyond it requests wait for their turn.
const WAITING: usize = 10_000;
/// Transactions under way at once, and those of entries that wait apart.
const UNDER_WAY: usize = 2;
const APART: usize = 2;
/// How long an entry waits for somebody else's lock, and how often it is tried.
const HELD_FOR: Duration = Duration::from_secs(5);
const HELD_EVERY: Duration = Duration::from_millis(100);

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
    /// Somebody else's open transaction may have the same key.
    pub has_key: fn(&T) -> bool,
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
    let apart = Arc::new(Semaphore::new(APART));
    while let Some(first) = waiting.recv().await {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let mut bytes = (ways.bytes)(&first.0);
        let mut batch = vec![first];
        while batch.len() < ENTRIES && bytes < BYTES {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += (ways.bytes)(&next.0);
            batch.push(next);
        }
        let (ways, apart) = (ways.clone(), apart.clone());
        tokio::spawn(async move {
            let _slot = slot;
            write(&ways, &apart, batch).await;
        });
    }
}

async fn write<T: Clone + Send + 'static, R: Send + 'static>(
    ways: &Arc<Ways<T, R>>,
    apart: &Arc<Semaphore>,
    batch: Vec<Waiting<T, R>>,
) {
    let written = (ways.write)(batch.iter().map(|(entry, _)| entry.clone()).collect()).await;
    if !written.as_ref().is_err_and(is_held) {
        writes::note(&written);
        return answer(ways, batch, written).await;
    }
    // Somebody else's transaction has one of their keys. Who has none goes on at once.
    let (keyed, plain): (Vec<_>, Vec<_>) = batch.into_iter().partition(|(entry, _)| (ways.has_key)(entry));
    for waiting in keyed {
        tokio::spawn(wait_apart(ways.clone(), apart.clone(), waiting));
    }
    if !plain.is_empty() {
        let written = (ways.write)(plain.iter().map(|(entry, _)| entry.clone()).collect()).await;
        writes::note(&written);
        answer(ways, plain, written).await;
    }
}

fn is_held(error: &Error) -> bool {
    error.kind == Kind::Locked && error.effect == Effect::NotApplied
}

/// Tries one entry alone until the lock is gone, its time is over, or nobody waits for it any more.
async fn wait_apart<T: Clone, R>(ways: Arc<Ways<T, R>>, apart: Arc<Semaphore>, (entry, reply): Waiting<T, R>) {
    let begun = Tick::now();
    loop {
        let Ok(turn) = apart.acquire().await else { return };
        let written = (ways.write)(vec![entry.clone()]).await;
        drop(turn);
        let in_time = Tick::now().since(begun) < HELD_FOR && !reply.is_closed();
        if in_time && written.as_ref().is_err_and(is_held) {
            tokio::time::sleep(HELD_EVERY).await;
            continue;
        }
        let _ = reply.send(written.and_then(only));
        return;
    }
}

fn only<R>(answers: Vec<R>) -> Answer<R> {
    answers.into_iter().next().ok_or_else(|| Error::database("an entry without an answer"))
}

async fn answer<T: Clone, R>(ways: &Ways<T, R>, batch: Vec<Waiting<T, R>>, written: Answer<Vec<R>>) {
    let error = match written {
        Ok(answers) => {
            return batch.into_iter().zip(answers).for_each(|((_, reply), answer)| drop(reply.send(Ok(answer))));
        }
        Err(error) => error,
    };
    // Something is wrong with one of them, or was with all: each alone, unless it may have been written.
    let alone = batch.len() == 1;
    for (entry, reply) in batch {
        let again = !alone && (error.effect == Effect::NotApplied || (ways.repeatable)(&entry));
        let answer = if again && error.class() != Class::Retryable {
            (ways.write)(vec![entry]).await.and_then(only)
        } else {
            Err(error.clone())
        };
        let _ = reply.send(answer);
    }
}
