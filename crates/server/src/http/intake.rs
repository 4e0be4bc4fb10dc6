//! Group commit: messages that arrive together, each in a request of its own, share a transaction.
//!
//! While one transaction is under way, the next one gathers. Each message gets its own answer, and one that cannot be
//! written harms no other.

use std::sync::Arc;
use std::time::Duration;

use postrider::error::Effect;
use postrider::{Entry, Error, NewMessage, Outbox};
use tokio::sync::{Semaphore, mpsc, oneshot};

/// Messages and bytes of one transaction.
const MESSAGES: usize = 500;
const BYTES: usize = 4 << 20;
/// Messages that may wait; beyond it requests wait for their turn.
const WAITING: usize = 10_000;
/// Transactions under way at once.
const UNDER_WAY: usize = 2;

type Answer = postrider::Result<Entry>;
type Waiting = (NewMessage, oneshot::Sender<Answer>);

#[derive(Clone)]
pub struct Intake {
    queue: mpsc::Sender<Waiting>,
    patience: Duration,
}

impl Intake {
    /// Works until the last handle is gone.
    pub fn start(outbox: Outbox, patience: Duration) -> Self {
        let (queue, waiting) = mpsc::channel(WAITING);
        tokio::spawn(gather(outbox, waiting));
        Intake { queue, patience }
    }

    /// Answers once the message is committed.
    pub async fn enqueue(&self, message: NewMessage) -> Answer {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::new(postrider::error::Kind::Unavailable, "the server is shutting down");
        let late = |effect| Error {
            kind: postrider::error::Kind::Timeout,
            effect,
            message: "the database did not answer in time".to_owned(),
        };
        let queued = tokio::time::timeout(self.patience, self.queue.send((message, reply))).await;
        queued.map_err(|_| late(Effect::NotApplied))?.map_err(|_| gone())?;
        // From here on it may be written without our hearing of it.
        let answered = tokio::time::timeout(self.patience, answer).await;
        answered.map_err(|_| late(Effect::Unknown))?.map_err(|_| gone())?
    }
}

async fn gather(outbox: Outbox, mut waiting: mpsc::Receiver<Waiting>) {
    let slots = Arc::new(Semaphore::new(UNDER_WAY));
    while let Some(first) = waiting.recv().await {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let mut bytes = first.0.payload.len();
        let mut batch = vec![first];
        while batch.len() < MESSAGES && bytes < BYTES {
            let Ok(next) = waiting.try_recv() else { break };
            bytes += next.0.payload.len();
            batch.push(next);
        }
        let outbox = outbox.clone();
        tokio::spawn(async move {
            let _slot = slot;
            write(&outbox, batch).await;
        });
    }
}

async fn write(outbox: &Outbox, batch: Vec<Waiting>) {
    let (messages, replies): (Vec<NewMessage>, Vec<oneshot::Sender<Answer>>) = batch.into_iter().unzip();
    match outbox.enqueue(messages.clone()).await {
        Ok(entries) => replies.into_iter().zip(entries).for_each(|(reply, entry)| drop(reply.send(Ok(entry)))),
        // Something is wrong with one of them, or was with all: each alone, unless it may have been written.
        Err(error) => {
            let alone = messages.len() == 1;
            for (message, reply) in messages.into_iter().zip(replies) {
                let again = !alone && (error.effect == Effect::NotApplied || message.key.is_some());
                let retryable = error.class() != postrider::error::Class::Retryable;
                let answer = if again && retryable {
                    outbox.enqueue(vec![message]).await.and_then(|entries| {
                        entries.first().copied().ok_or_else(|| Error::database("a message without an answer"))
                    })
                } else {
                    Err(error.clone())
                };
                let _ = reply.send(answer);
            }
        }
    }
}
