//! The operator's hands: waking what waits, bringing back what was given up, taking a memory out.

use std::sync::Arc;

use postrider::error::Kind;
use postrider::store::{Mode, Requeued, Retried};
use postrider::tx::Tx;
use postrider::{Outbox, Result, Timestamp};

use crate::tend::waiting;
use crate::{LANE, Memories, copies};

/// Messages brought back in one transaction.
const BATCH: usize = 100;

impl Memories {
    /// Makes due now what waits only because the service could not be used; answers how many.
    pub async fn wake(&self) -> Result<usize> {
        self.0.outbox.wake_waiting(LANE, Some(&waiting::FOR_SERVICE)).await
    }

    /// Makes every queued memory due now, whatever it waits for; answers how many waited.
    pub async fn wake_all(&self) -> Result<usize> {
        self.0.outbox.wake_waiting(LANE, None).await
    }

    /// Makes one queued memory due now.
    pub async fn retry(&self, id: i64) -> Result<Retried> {
        self.0.outbox.retry(id).await
    }

    /// Brings given-up memories back under their ids.
    pub async fn requeue(&self, ids: &[i64]) -> Result<Vec<Requeued>> {
        let mut answers = Vec::with_capacity(ids.len());
        for part in ids.chunks(BATCH) {
            match self.requeue_some(part).await {
                // Somebody took the place of one of them just now: each alone, so that it keeps none of the others.
                Err(error) if error.kind == Kind::Conflict => {
                    for id in part {
                        let answered = match self.requeue_some(&[*id]).await {
                            Err(error) if error.kind == Kind::Conflict => vec![Requeued::Conflict],
                            other => other?,
                        };
                        answers.extend(answered);
                    }
                }
                other => answers.extend(other?),
            }
        }
        self.0.outbox.ring();
        Ok(answers)
    }

    async fn requeue_some(&self, ids: &[i64]) -> Result<Vec<Requeued>> {
        let (outbox, ids): (Outbox, Arc<[i64]>) = (self.0.outbox.clone(), ids.into());
        self.transact(Mode::Write, move |tx| {
            let (outbox, ids) = (outbox.clone(), ids.clone());
            Box::pin(async move {
                let mut answers = Vec::with_capacity(ids.len());
                for &id in ids.iter() {
                    let requeued = outbox.requeue_in(tx, id).await?;
                    if requeued == Requeued::Requeued {
                        let sql = "UPDATE memory_writes SET state = 'queued', refusal = NULL WHERE outbox_id = ? AND state = 'dead'";
                        tx.execute(sql, &[id.into()]).await?;
                    }
                    answers.push(requeued);
                }
                Ok(answers)
            })
        })
        .await
    }

    /// A page of given-up memories' messages, the oldest first; `after` is the last of the page before.
    pub async fn dead(&self, after: Option<(Timestamp, i64)>, limit: u32) -> Result<Vec<(Timestamp, i64)>> {
        self.transact(Mode::Read, move |tx| Box::pin(dead(tx, after, limit))).await
    }

    /// Takes a memory out of the service and out of our copies, unless it waits or is being written. For what was only a trial.
    pub async fn forget(&self, space: &str, payload_sha: &str) -> Result<bool> {
        let find = (space.to_owned(), payload_sha.to_owned());
        let gone = self.transact(Mode::Write, move |tx| {
            let (space, sha) = find.clone();
            Box::pin(async move {
                let Some(copy) = copies::find(tx, &space, &sha, true).await? else { return Ok(None) };
                let (Some(note), true) = (copies::note_of(tx, copy.id).await?, copy.state == copies::State::Stored)
                else {
                    return Ok(None);
                };
                copies::forget_delivery(tx, &note).await?;
                copies::remove(tx, copy.id, &note).await?;
                Ok(copy.memory_id.filter(|_| !copy.merged))
            })
        });
        let Some(memory_id) = gone.await? else { return Ok(false) };
        match self.0.upstream.forget(&memory_id).await {
            Ok(gone) => Ok(gone),
            Err(fault) => {
                tracing::warn!(code = fault.code, memory_id, "OpenMemory did not forget a memory of a trial");
                Ok(false)
            }
        }
    }
}

async fn dead(tx: &mut (dyn Tx + Send), after: Option<(Timestamp, i64)>, limit: u32) -> Result<Vec<(Timestamp, i64)>> {
    let mut params = Vec::new();
    let from = after.map_or("", |_| " AND finished_at >= ? AND (finished_at > ? OR id > ?)");
    if let Some((at, id)) = after {
        params.extend([at.into(), at.into(), id.into()]);
    }
    let sql = format!(
        "SELECT finished_at, id FROM outbox_done WHERE lane = '{LANE}' AND status = 'dead'{from} ORDER BY finished_at, id LIMIT {limit}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| Ok((row.time(0)?, row.int(1)?))).collect()
}
