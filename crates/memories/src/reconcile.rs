//! Reconciliation: what ended or got stuck without its audit gets it, and an audit that was begun and not ended is ended
//! by what became of its memory. No payload and no status of a message is ever touched.

use std::collections::HashSet;
use std::time::Duration;

use postrider::Result;
use postrider::message::hex;
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Row, Tx, Value, in_ids};
use serde::Serialize;
use serde_json::json;

use crate::audit::{self, End};
use crate::copies::{self, State};
use crate::store::redirected;
use crate::{LANE, Memories};

/// Rows of one transaction.
const BATCH: usize = 500;

/// What was found, and what was done about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reconciled {
    pub scanned: usize,
    pub missing_audit: usize,
    pub stale_pending: usize,
    pub repaired: usize,
}

impl Memories {
    /// Looks at everything; `repair`: and sets it right.
    pub async fn reconcile(&self, repair: bool) -> Result<Reconciled> {
        let mut all = Reconciled::default();
        let mode = if repair { Mode::Write } else { Mode::Read };
        let mut after = 0;
        loop {
            let (part, last) = self.transact(mode, move |tx| Box::pin(look_at_ended(tx, after, repair))).await?;
            all.add(part);
            let Some(last) = last else { break };
            after = last;
        }
        all.add(self.transact(mode, move |tx| Box::pin(look_at_stuck(tx, repair))).await?);
        all.add(self.end_pending(repair).await?);
        if all.repaired > 0 {
            tracing::info!(?all, "audits were completed");
            self.0.outbox.ring();
        }
        Ok(all)
    }

    async fn end_pending(&self, repair: bool) -> Result<Reconciled> {
        let patience = self.0.settings.upstream.timeout + Duration::from_secs(4);
        let (mut all, mut after) = (Reconciled::default(), 0);
        loop {
            let pending = self.transact(Mode::Read, move |tx| Box::pin(pending(tx, patience, after))).await?;
            for audit_id in &pending {
                all.scanned += 1;
                let handle = self.clone();
                let (audit_id, mode) = (*audit_id, if repair { Mode::Write } else { Mode::Read });
                let ended = self.transact(mode, move |tx| {
                    let handle = handle.clone();
                    Box::pin(async move { handle.end_one(tx, audit_id, repair).await })
                });
                if ended.await? {
                    all.stale_pending += 1;
                    all.repaired += usize::from(repair);
                }
            }
            match pending.last() {
                Some(last) if pending.len() == BATCH => after = *last,
                _ => return Ok(all),
            }
        }
    }

    /// Ends one audit that was left pending; `false`: it is not left, or has ended.
    async fn end_one(&self, tx: &mut (dyn Tx + Send), audit_id: i64, repair: bool) -> Result<bool> {
        let sql = "SELECT target_space, payload_sha FROM write_audit WHERE audit_id = ? AND status = 'pending'";
        let rows = tx.query(sql, &[audit_id.into()]).await?;
        let Some(row) = rows.first() else { return Ok(false) };
        let (space, sha) = (row.opt_text(0)?.unwrap_or_default(), row.opt_text(1)?.unwrap_or_default());
        let Some(copy) = copies::find(tx, &space, &sha, repair).await? else {
            if repair {
                let reason = "openmemory_write_unknown".to_owned();
                let end = End { action: "reject", reason, status: "failed", outbox_id: None, memory_id: None };
                let evidence = json!({ "source": "reconcile", "payload_sha": sha });
                audit::finish(tx, audit_id, &end, &evidence).await?;
            }
            return Ok(true);
        };
        if copy.state == State::Writing && !copy.overdue {
            return Ok(false);
        }
        let Some(note) = copies::note_of(tx, copy.id).await? else { return Ok(false) };
        if !repair {
            return Ok(true);
        }
        let left = "openmemory_write_failed:left_behind";
        let end = match (copy.state, copy.outbox_id) {
            (State::Stored, _) => End {
                action: "allow",
                reason: "openmemory_write_success".to_owned(),
                status: "success",
                outbox_id: copy.outbox_id,
                memory_id: copy.memory_id.as_deref(),
            },
            (State::Queued, Some(outbox_id)) => redirected(left, outbox_id),
            (State::Dead, _) => End {
                action: "reject",
                reason: "openmemory_refused:given_up".to_owned(),
                status: "failed",
                outbox_id: copy.outbox_id,
                memory_id: None,
            },
            // Whoever wrote it is gone, and may have written it: the outbox brings it to its end.
            (State::Writing | State::Queued, _) => redirected(left, self.queue(tx, &note, copy.id).await?),
        };
        audit::end(tx, audit_id, &note, &end).await
    }
}

impl Reconciled {
    fn add(&mut self, other: Reconciled) {
        self.scanned += other.scanned;
        self.missing_audit += other.missing_audit;
        self.stale_pending += other.stale_pending;
        self.repaired += other.repaired;
    }
}

async fn pending(tx: &mut (dyn Tx + Send), patience: Duration, after: i64) -> Result<Vec<i64>> {
    let mut params = Vec::new();
    let before = tx.now().plus(-micros_of(patience), &mut params);
    params.push(after.into());
    let sql = format!(
        "SELECT audit_id FROM write_audit WHERE status = 'pending' AND created_at < {before} AND audit_id > ?
         ORDER BY audit_id LIMIT {BATCH}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

/// Messages that ended; the last id looked at, if there may be more.
async fn look_at_ended(tx: &mut (dyn Tx + Send), after: i64, repair: bool) -> Result<(Reconciled, Option<i64>)> {
    let sql = format!(
        "SELECT id, status, target, payload_sha, correlation_id, result_ref, last_error_code FROM outbox_done
         WHERE lane = '{LANE}' AND id > ? ORDER BY id LIMIT {BATCH}"
    );
    let rows = tx.query(&sql, &[after.into()]).await?;
    let ids: Vec<i64> = rows.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    let told = audited(tx, &ids, "reason IN ('outbox_flush_success', 'outbox_flush_dedup_hit')").await?;
    let told_dead = audited(tx, &ids, "reason = 'outbox_flush_dead'").await?;
    let mut seen = Reconciled { scanned: rows.len(), ..Reconciled::default() };
    for row in &rows {
        let (id, sent) = (row.int(0)?, row.text(1)? == "sent");
        if (if sent { &told } else { &told_dead }).contains(&id) {
            continue;
        }
        seen.missing_audit += 1;
        let end = match sent {
            true => ("allow", "outbox_flush_success", "success"),
            false => ("reject", "outbox_flush_dead", "failed"),
        };
        if repair {
            write(tx, row, end).await?;
            seen.repaired += 1;
        }
    }
    Ok((seen, ids.last().copied().filter(|_| ids.len() == BATCH)))
}

/// Live messages whose lease ran out and that nobody took again.
async fn look_at_stuck(tx: &mut (dyn Tx + Send), repair: bool) -> Result<Reconciled> {
    let mut params: Vec<Value> = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let sql = format!(
        "SELECT id, 'stale', target, payload_sha, correlation_id, NULL, last_error_code FROM outbox o
         WHERE lane = '{LANE}' AND lease_until < {now}
           AND NOT EXISTS (SELECT 1 FROM write_audit a WHERE a.outbox_id = o.id AND a.reason = 'outbox_stale' AND a.created_at >= o.locked_at)
         ORDER BY id LIMIT {BATCH}"
    );
    let rows = tx.query(&sql, &params).await?;
    let repaired = if repair { rows.len() } else { 0 };
    for row in rows.iter().take(repaired) {
        write(tx, row, ("redirect", "outbox_stale", "redirected")).await?;
    }
    Ok(Reconciled { scanned: rows.len(), missing_audit: rows.len(), stale_pending: 0, repaired })
}

async fn audited(tx: &mut (dyn Tx + Send), ids: &[i64], which: &str) -> Result<HashSet<i64>> {
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql = format!("SELECT DISTINCT outbox_id FROM write_audit WHERE outbox_id {list} AND {which}");
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

async fn write(tx: &mut (dyn Tx + Send), row: &Row, end: (&'static str, &str, &'static str)) -> Result<()> {
    let (id, sha) = (row.int(0)?, row.opt_bytes(3)?.map(|sha| hex(&sha)).unwrap_or_default());
    let (memory_id, correlation_id) = (row.opt_text(5)?, row.opt_text(4)?);
    let evidence = json!({
        "source": "reconcile", "outbox_id": id, "memory_id": memory_id, "payload_sha": sha,
        "extra": { "correlation_id": correlation_id, "error_code": row.opt_text(6)? },
    });
    let space = row.opt_text(2)?.unwrap_or_default();
    let (action, reason, status) = end;
    let end = End { action, reason: reason.to_owned(), status, outbox_id: Some(id), memory_id: memory_id.as_deref() };
    audit::insert(tx, None, &space, &sha, correlation_id.as_deref(), &end, &evidence).await.map(drop)
}
