//! What can be wrong with memories, how it is found, and how it is set right. The same questions are asked by the sweep of
//! every server, which heals by itself; the doctor tells what is left.

use std::time::Duration;

use async_trait::async_trait;
use postrider::Result;
use postrider::doctor::{Ailment, Case, Check, Examine, MOST_CASES};
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Tx, for_update};

use crate::copies::{self, Becomes, State};
use crate::store::{MARGIN, Waits, redirected};
use crate::upstream::Doubt;
use crate::{LANE, Memories, audit};

static LEFT_BEHIND: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: "memory",
    message: "memories whose write was begun and never ended, and that nobody queued",
    advice: "a running server queues them within a minute; `postrider doctor --repair` or `postrider memory reconcile` does so now",
};
static WITHOUT_MESSAGE: Ailment = Ailment {
    check: Check::CopyAgainstMessage,
    part: "memory",
    message: "memories that are said to be queued, and whose message is not in the outbox",
    advice: "`postrider doctor --repair` ends them as their message ended, or queues them anew",
};
static AUDIT_OPEN: Ailment = Ailment {
    check: Check::AuditOpen,
    part: "memory",
    message: "audits that were begun and never ended",
    advice: "`postrider memory reconcile` ends them by what became of their memory",
};

/// Queued memories looked at for one without a message, the longest waiting first: one that has none never moves on.
const QUEUED: u32 = 5 * MOST_CASES;
/// How long a state stands before the sweep takes it for left behind.
const STANDS: Duration = Duration::from_secs(30);

#[async_trait]
impl Examine for Memories {
    async fn look(&self, stood: Duration) -> Result<Vec<Case>> {
        let patience = self.0.settings.upstream.timeout + 2 * MARGIN + stood;
        let found = self.transact(Mode::Read, move |tx| {
            Box::pin(async move {
                let mut cases = Vec::new();
                let mut add = |ailment: &'static Ailment, ids: Vec<i64>| {
                    cases.extend(ids.into_iter().map(|id| Case { ailment, id }));
                };
                add(&LEFT_BEHIND, left_behind(tx, stood).await?);
                add(&WITHOUT_MESSAGE, without_message(tx, stood).await?);
                add(&AUDIT_OPEN, audit::open(tx, patience, MOST_CASES).await?);
                Ok(cases)
            })
        });
        found.await
    }

    async fn repair(&self, cases: &[Case]) -> Result<Vec<Case>> {
        let mut repaired = Vec::new();
        for case in cases {
            let (handle, case) = (self.clone(), case.clone());
            let work = case.clone();
            let done = self.transact(Mode::Write, move |tx| {
                let (handle, case) = (handle.clone(), work.clone());
                Box::pin(async move {
                    match case.ailment {
                        ailment if *ailment == LEFT_BEHIND => handle.queue_left_behind(tx, case.id).await,
                        ailment if *ailment == WITHOUT_MESSAGE => handle.end_without_message(tx, case.id).await,
                        ailment if *ailment == AUDIT_OPEN => handle.end_one(tx, case.id, true).await,
                        _ => Ok(false),
                    }
                })
            });
            match done.await {
                Ok(true) => repaired.push(case),
                Ok(false) => {}
                // One that cannot be mended keeps none of the others.
                Err(error) => tracing::warn!(%error, id = case.id, "a memory could not be set right"),
            }
        }
        if !repaired.is_empty() {
            self.0.outbox.ring();
        }
        Ok(repaired)
    }
}

impl Memories {
    /// Sets right what waits in vain; audits are reconciled apart. Answers how many.
    pub async fn heal(&self) -> Result<usize> {
        let mut cases = self.look(STANDS).await?;
        cases.retain(|case| *case.ailment != AUDIT_OPEN);
        if cases.is_empty() {
            return Ok(0);
        }
        let healed = self.repair(&cases).await?.len();
        tracing::warn!(healed, found = cases.len(), "memories that waited in vain were set right");
        Ok(healed)
    }

    /// Queues what is said to be written and is not, also what a moment ago was found damaged in the outbox.
    pub async fn rescue(&self, stood: Duration) -> Result<usize> {
        let ids = self.transact(Mode::Read, move |tx| Box::pin(left_behind(tx, stood))).await?;
        let cases: Vec<Case> = ids.into_iter().map(|id| Case { ailment: &LEFT_BEHIND, id }).collect();
        Ok(self.repair(&cases).await?.len())
    }

    async fn queue_left_behind(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
        let Some(copy) = copies::by_id(tx, id).await?.filter(|copy| copy.state == State::Writing && copy.overdue)
        else {
            return Ok(false);
        };
        let Some(note) = copies::note_of(tx, copy.id).await? else { return Ok(false) };
        // A write that was audited as begun may have been made; what was found damaged was not.
        let begun = match copy.audit_id {
            Some(audit_id) => audit::is_pending(tx, audit_id).await?,
            None => true,
        };
        let doubt = begun.then(|| self.doubt_of(Doubt::UnderWay)).flatten();
        let why = "openmemory_write_failed:left_behind";
        let outbox_id = self.queue(tx, &note, copy.id, Waits { delay: Duration::ZERO, doubt }, why).await?;
        if let Some(audit_id) = copy.audit_id {
            audit::end(tx, audit_id, &note, &redirected(why, outbox_id)).await?;
        }
        Ok(true)
    }

    async fn end_without_message(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
        let queued = |copy: &copies::Copy| copy.state == State::Queued;
        let Some(copy) = copies::by_id(tx, id).await?.filter(queued) else { return Ok(false) };
        let Some(outbox_id) = copy.outbox_id else { return Ok(false) };
        let lock = for_update(tx.dialect());
        if !tx.query(&format!("SELECT id FROM outbox WHERE id = ?{lock}"), &[outbox_id.into()]).await?.is_empty() {
            return Ok(false);
        }
        let sql = format!("SELECT status, result_ref FROM outbox_done WHERE id = ? AND lane = '{LANE}'");
        let ended = tx.query(&sql, &[outbox_id.into()]).await?;
        let ended = ended.first().map(|row| Ok::<_, postrider::Error>((row.text(0)?, row.opt_text(1)?))).transpose()?;
        match &ended {
            Some((status, Some(memory_id))) if status == "sent" => {
                let merged = copy.merged;
                copies::become_(tx, copy.id, Becomes::Stored { memory_id, merged, outbox_id: None }).await?;
            }
            Some((status, _)) if status == "dead" => {
                copies::become_(tx, copy.id, Becomes::Dead { refusal: None }).await?;
            }
            // Nobody knows what became of its message: it may have been written.
            _ => {
                let Some(note) = copies::note_of(tx, copy.id).await? else { return Ok(false) };
                let doubt = self.doubt_of(Doubt::Answered);
                self.queue(tx, &note, copy.id, Waits { delay: Duration::ZERO, doubt }, "message_lost").await?;
            }
        }
        Ok(true)
    }
}

/// Copies whose direct write had its time and was not ended.
async fn left_behind(tx: &mut (dyn Tx + Send), stood: Duration) -> Result<Vec<i64>> {
    let mut params = Vec::new();
    let before = tx.now().bound(-micros_of(stood), &mut params);
    let sql = format!(
        "SELECT id FROM memory_writes WHERE state = 'writing' AND writing_until <= {before} ORDER BY writing_until LIMIT {MOST_CASES}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

/// Queued copies whose message is not live.
async fn without_message(tx: &mut (dyn Tx + Send), stood: Duration) -> Result<Vec<i64>> {
    let mut params = Vec::new();
    let before = tx.now().bound(-micros_of(stood), &mut params);
    let sql = format!(
        "SELECT m.id FROM (SELECT id, outbox_id FROM memory_writes WHERE state = 'queued' AND updated_at <= {before} ORDER BY updated_at LIMIT {QUEUED}) m
         LEFT JOIN outbox o ON o.id = m.outbox_id WHERE o.id IS NULL LIMIT {MOST_CASES}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}
