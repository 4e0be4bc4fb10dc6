//! Group commit: what arrives together, each in a request of its own, shares a transaction.
//!
//! While one transaction is under way, the next one gathers. Each entry gets its own answer, and one that cannot be
//! written harms no other: what meets a lock of somebody else's, on its key, waits apart.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
/// How long a key is known to be somebody else's.
const HELD_KNOWN: Duration = Duration::from_secs(2);

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
    /// What somebody else's open transaction may have, too.
    pub key: fn(&T) -> Option<String>,
}

/// Keys that somebody else's transaction had a moment ago: who comes with one goes apart at once, and holds up no batch.
type Held = Arc<Mutex<HashMap<String, Tick>>>;

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
    let apart =
        Apart { first: Arc::new(Semaphore::new(APART)), again: Arc::new(Semaphore::new(APART)), held: Held::default() };
    while let Some(first) = waiting.recv().await {
        if apart.knows(&ways, &first.0) {
            tokio::spawn(wait_apart(ways.clone(), apart.clone(), first));
            continue;
        }
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let mut bytes = (ways.bytes)(&first.0);
        let mut batch = vec![first];
        while batch.len() < ENTRIES && bytes < BYTES {
            let Ok(next) = waiting.try_recv() else { break };
            if apart.knows(&ways, &next.0) {
                tokio::spawn(wait_apart(ways.clone(), apart.clone(), next));
                continue;
            }
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
    apart: &Apart,
    batch: Vec<Waiting<T, R>>,
) {
    let written = (ways.write)(batch.iter().map(|(entry, _)| entry.clone()).collect()).await;
    if !written.as_ref().is_err_and(is_held) {
        writes::note(&written);
        return answer(ways, batch, written).await;
    }
    // Somebody else's transaction has one of their keys. Who has none goes on at once.
    let (keyed, plain): (Vec<_>, Vec<_>) = batch.into_iter().partition(|(entry, _)| (ways.key)(entry).is_some());
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

/// Where entries are tried alone: those whose key is not known to be held have turns of their own.
#[derive(Clone)]
struct Apart {
    first: Arc<Semaphore>,
    again: Arc<Semaphore>,
    held: Held,
}

impl Apart {
    fn held(&self) -> MutexGuard<'_, HashMap<String, Tick>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Was its key somebody else's a moment ago?
    fn knows<T, R>(&self, ways: &Ways<T, R>, entry: &T) -> bool {
        let mut held = self.held();
        if held.is_empty() {
            return false;
        }
        held.retain(|_, at| Tick::now().since(*at) < HELD_KNOWN);
        (ways.key)(entry).is_some_and(|key| held.contains_key(&key))
    }
}

/// Tries one entry alone until the lock is gone, its time is over, or nobody waits for it any more.
async fn wait_apart<T: Clone, R>(ways: Arc<Ways<T, R>>, apart: Apart, (entry, reply): Waiting<T, R>) {
    let begun = Tick::now();
    let left = || HELD_FOR.saturating_sub(Tick::now().since(begun));
    loop {
        let turns = if apart.knows(&ways, &entry) { &apart.again } else { &apart.first };
        let Ok(turn) = tokio::time::timeout(left().max(HELD_EVERY), turns.acquire()).await else {
            let busy = "somebody else's open transaction has the same key; nothing was written, try again";
            let _ = reply.send(Err(Error::new(Kind::Locked, busy)));
            return;
        };
        let Ok(turn) = turn else { return };
        let written = (ways.write)(vec![entry.clone()]).await;
        drop(turn);
        let is_held = written.as_ref().is_err_and(is_held);
        if let (true, Some(key)) = (is_held, (ways.key)(&entry)) {
            apart.held().insert(key, Tick::now());
        }
        if is_held && !left().is_zero() && !reply.is_closed() {
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
        // Busy may be what one of them makes it.
        let answer = if again && (error.class() != Class::Retryable || error.kind == Kind::Busy) {
            (ways.write)(vec![entry]).await.and_then(only)
        } else {
            Err(error.clone())
        };
        let _ = reply.send(answer);
    }
}
