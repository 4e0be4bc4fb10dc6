//! The flush: brings a queued memory to the service, unless it is there already.

use std::time::Duration;

use async_trait::async_trait;
use postrider::message::{hex, sha256};
use postrider::outcome::{Fault as Failure, Reach, code};
use postrider::store::{Mode, Requeued};
use postrider::{Courier, Message, Outcome, Result};

use crate::copies::{self, Extras, State};
use crate::note::Note;
use crate::tend::waiting;
use crate::upstream::{Blame, Fault};
use crate::{LANE, Memories};

/// How long a memory waits while the service cannot be used, unless it is woken, as it is once it can.
const AWAY: Duration = Duration::from_secs(60);

/// Delivers messages of the lane [`LANE`].
pub struct MemoryCourier(Memories);

impl Memories {
    pub fn courier(&self) -> MemoryCourier {
        MemoryCourier(self.clone())
    }

    /// Makes due now what waits only because the service could not be used; answers how many.
    pub async fn wake(&self) -> Result<usize> {
        self.0.outbox.wake_waiting(LANE, Some(&waiting::ALL)).await
    }

    /// Makes every queued memory due now, whatever it waits for; answers how many waited.
    pub async fn wake_all(&self) -> Result<usize> {
        self.0.outbox.wake_waiting(LANE, None).await
    }

    /// Brings given-up memories back under their ids.
    pub async fn requeue(&self, ids: &[i64]) -> Result<Vec<Requeued>> {
        let mut answers = Vec::with_capacity(ids.len());
        for &id in ids {
            let outbox = self.0.outbox.clone();
            let requeued = self.transact(Mode::Write, move |tx| {
                let outbox = outbox.clone();
                Box::pin(async move {
                    let requeued = outbox.requeue_in(tx, id).await?;
                    if requeued == Requeued::Requeued {
                        let sql = "UPDATE memory_writes SET state = 'queued' WHERE outbox_id = ? AND state = 'dead'";
                        tx.execute(sql, &[id.into()]).await?;
                    }
                    Ok(requeued)
                })
            });
            answers.push(requeued.await?);
        }
        self.0.outbox.ring();
        Ok(answers)
    }
}

/// What our copy says about a message.
enum Known {
    /// It is in the service already.
    Stored(String),
    Open(Option<Extras>),
}

impl MemoryCourier {
    async fn look(&self, space: &str, sha: &str) -> Result<Known> {
        let (space, sha) = (space.to_owned(), sha.to_owned());
        let look = self.0.transact(Mode::Read, move |tx| {
            let (space, sha) = (space.clone(), sha.clone());
            Box::pin(async move {
                let Some(copy) = copies::find(tx, &space, &sha, false).await? else { return Ok(Known::Open(None)) };
                match (copy.state, copy.memory_id) {
                    (State::Stored, Some(memory_id)) => Ok(Known::Stored(memory_id)),
                    _ => Ok(Known::Open(copies::extras(tx, copy.id).await?)),
                }
            })
        });
        look.await
    }
}

#[async_trait]
impl Courier for MemoryCourier {
    async fn deliver(&self, message: &Message) -> Outcome {
        let damaged = |why: &str| Outcome::Dead(Failure::new(code::PAYLOAD_CORRUPT, why, Reach::NeverSent));
        if !message.payload_is_intact() {
            return damaged("the stored memory does not match its digest");
        }
        let Ok(text) = String::from_utf8(message.payload.to_vec()) else {
            return damaged("the stored memory is no text");
        };
        let space = message.target.clone().unwrap_or_default();
        let sha = hex(&sha256(&message.payload));
        let extras = match self.look(&space, &sha).await {
            Ok(Known::Stored(memory_id)) => return Outcome::Sent { result_ref: Some(memory_id) },
            Ok(Known::Open(extras)) => extras.unwrap_or(Extras { kind: None, meta: serde_json::Map::new() }),
            Err(error) => {
                tracing::warn!(%error, outbox_id = message.id, "our copy cannot be read; the memory waits");
                return Outcome::Defer { delay: Duration::from_secs(1), code: code::STORE_UNAVAILABLE.into() };
            }
        };
        let Some(permit) = self.0.0.breaker.permit() else {
            return Outcome::Defer { delay: AWAY, code: waiting::BREAKER_OPEN.into() };
        };
        if !self.0.may_scout() {
            permit.unused();
            return Outcome::Defer { delay: AWAY, code: waiting::UNUSABLE.into() };
        }
        let note = Note {
            payload_md: text,
            space,
            payload_sha: sha,
            meta: serde_json::Map::new(),
            kind: None,
            evidence_refs: vec![],
            actor: None,
            correlation_id: message.correlation_id.clone().unwrap_or_default(),
        };
        let called = self.0.add(&note, extras.kind.as_deref(), &extras.meta, Some(message.id)).await;
        match called {
            Ok(memory_id) => {
                permit.succeeded();
                Outcome::Sent { result_ref: Some(memory_id) }
            }
            Err(fault) => {
                permit.answered(fault.counts());
                after(fault)
            }
        }
    }

    fn name(&self) -> &str {
        "openmemory"
    }
}

/// What is recorded for a flush that failed.
fn after(fault: Fault) -> Outcome {
    let failure = Failure::new(fault.code.clone(), fault.message, fault.reach);
    match fault.blame {
        Blame::Memory => Outcome::Dead(failure),
        Blame::Ours => Outcome::Defer { delay: AWAY, code: waiting::UNUSABLE.into() },
        Blame::Service => Outcome::Retry { fault: failure, retry_after: fault.retry_after },
    }
}
