//! Reconciliation: what ended or got stuck without its audit gets it, and an audit that was begun and not ended is ended
//! by what became of its memory. No payload and no status of a message is ever touched.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use postrider::message::hex;
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Row, Tx, Value, for_update, in_ids};
use postrider::{Result, Timestamp};
use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::audit::{self, End};
use crate::copies::{self, State};
use crate::store::{MARGIN, Waits, redirected};
use crate::upstream::Doubt;
use crate::{LANE, Memories};

/// Rows of one look.
const BATCH: usize = 500;
/// How far back an automatic look goes.
const RECENT: Duration = Duration::from_secs(15 * 60);

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Everything there is: when somebody asks.
    All,
    /// What ended lately, and what is pending: every now and then.
    Recent,
    /// One page of each: does it work at all?
    Glance,
}

/// What was found, and what was done about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reconciled {
    pub scanned: usize,
    pub missing_audit: usize,
    pub stale_pending: usize,
    pub repaired: usize,
}

/// A message that should have left an audit.
#[derive(Clone, Debug)]
struct Trace {
    id: i64,
    kind: Kind,
    space: String,
    payload_sha: String,
    correlation_id: Option<String>,
    memory_id: Option<String>,
    error_code: Option<String>,
    lease_token: i64,
    finished_at: Option<Timestamp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Sent,
    Dead,
    /// Live, and its lease ran out.
    Stuck,
}

impl Kind {
    fn end(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Kind::Sent => ("allow", "outbox_flush_success", "success"),
            Kind::Dead => ("reject", "outbox_flush_dead", "failed"),
            Kind::Stuck => ("redirect", "outbox_stale", "redirected"),
        }
    }

    /// What an audit with this reason told of.
    fn of(reason: &str) -> Option<Kind> {
        match reason {
            "outbox_flush_success" | "outbox_flush_dedup_hit" => Some(Kind::Sent),
            "outbox_flush_dead" => Some(Kind::Dead),
            "outbox_stale" => Some(Kind::Stuck),
            _ => None,
        }
    }
}

impl Memories {
    /// Looks, and if told to `repair` sets it right.
    pub async fn reconcile(&self, scope: Scope, repair: bool) -> Result<Reconciled> {
        let mut all = Reconciled::default();
        for kind in [Kind::Sent, Kind::Dead] {
            let mut after = match scope {
                Scope::All => Page::Start,
                Scope::Recent | Scope::Glance => Page::Since(RECENT),
            };
            loop {
                let traces = self.transact(Mode::Read, move |tx| Box::pin(ended(tx, kind, after))).await?;
                let last = traces.last().filter(|_| traces.len() == BATCH).map(|t| (t.finished_at, t.id));
                all.add(self.complete(traces, repair).await?);
                let Some((Some(at), id)) = last.filter(|_| scope != Scope::Glance) else { break };
                after = Page::After(at, id);
            }
        }
        if scope == Scope::All {
            let mut after = 0;
            loop {
                let traces = self.transact(Mode::Read, move |tx| Box::pin(stuck(tx, after))).await?;
                let last = traces.last().filter(|_| traces.len() == BATCH).map(|t| t.id);
                all.add(self.complete(traces, repair).await?);
                let Some(id) = last else { break };
                after = id;
            }
        }
        all.add(self.end_pending(scope, repair).await?);
        if repair && scope == Scope::All {
            // Long enough for an audit that was begun with it to be met first.
            self.rescue(2 * MARGIN).await?;
        }
        if all.repaired > 0 {
            tracing::info!(repaired = all.repaired, "audits were completed");
            self.0.outbox.ring();
        }
        Ok(all)
    }

    /// Writes the audits that are missing.
    async fn complete(&self, traces: Vec<Trace>, repair: bool) -> Result<Reconciled> {
        let scanned = traces.len();
        let traces = Arc::new(traces);
        let work = traces.clone();
        let told = self.transact(Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move { told(tx, &work).await })
        });
        let told = told.await?;
        let missing: Vec<Trace> =
            traces.iter().filter(|t| !told.contains(&(t.id, t.lease_token, t.kind))).cloned().collect();
        let missing_audit = missing.len();
        let mut repaired = 0;
        if repair && missing_audit > 0 {
            let missing = Arc::new(missing);
            let written = self.transact(Mode::Write, move |tx| {
                let missing = missing.clone();
                Box::pin(async move { write_missing(tx, &missing).await })
            });
            repaired = written.await?;
        }
        Ok(Reconciled { scanned, missing_audit, stale_pending: 0, repaired })
    }

    async fn end_pending(&self, scope: Scope, repair: bool) -> Result<Reconciled> {
        let patience = self.0.settings.upstream.timeout + 2 * MARGIN;
        let mut all = Reconciled::default();
        let (mut since, mut seen) = (None, HashSet::new());
        loop {
            let pending = self.transact(Mode::Read, move |tx| Box::pin(pending(tx, patience, since))).await?;
            let new: Vec<i64> = pending.iter().map(|(id, _)| *id).filter(|id| seen.insert(*id)).collect();
            if scope == Scope::Glance {
                return Ok(Reconciled { scanned: new.len(), ..all });
            }
            for audit_id in &new {
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
                Some((_, at)) if pending.len() == BATCH && !new.is_empty() => since = Some(*at),
                _ => return Ok(all),
            }
        }
    }

    /// Ends one audit that was left pending; `false`: it is not left, or has ended.
    pub(crate) async fn end_one(&self, tx: &mut (dyn Tx + Send), audit_id: i64, repair: bool) -> Result<bool> {
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
            (State::Writing | State::Queued, _) => {
                let waits = Waits { delay: Duration::ZERO, doubt: self.doubt_of(Doubt::UnderWay) };
                redirected(left, self.queue(tx, &note, copy.id, waits, left).await?)
            }
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

/// Audits that are pending and should not be, oldest first.
async fn pending(
    tx: &mut (dyn Tx + Send),
    patience: Duration,
    since: Option<Timestamp>,
) -> Result<Vec<(i64, Timestamp)>> {
    let mut params = Vec::new();
    let before = tx.now().bound(-micros_of(patience), &mut params);
    let from = since.map_or("", |_| " AND created_at >= ?");
    params.extend(since.map(Value::from));
    let sql = format!(
        "SELECT audit_id, created_at FROM write_audit WHERE status = 'pending' AND created_at < {before}{from}
         ORDER BY created_at LIMIT {BATCH}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| Ok((row.int(0)?, row.time(1)?))).collect()
}

/// Where a page of ended messages begins.
#[derive(Clone, Copy, Debug)]
enum Page {
    Start,
    Since(Duration),
    After(Timestamp, i64),
}

const TRACE: &str = "id, target, payload_sha, correlation_id, last_error_code, lease_token";

fn trace(row: &Row, kind: Kind) -> Result<Trace> {
    Ok(Trace {
        id: row.int(0)?,
        kind,
        space: row.opt_text(1)?.unwrap_or_default(),
        payload_sha: row.opt_bytes(2)?.map(|sha| hex(&sha)).unwrap_or_default(),
        correlation_id: row.opt_text(3)?,
        error_code: row.opt_text(4)?,
        lease_token: row.int(5)?,
        memory_id: row.opt_text(6)?,
        finished_at: row.opt_time(7)?,
    })
}

/// Messages that ended so, in the order of `idx_done`.
async fn ended(tx: &mut (dyn Tx + Send), kind: Kind, page: Page) -> Result<Vec<Trace>> {
    let status = if kind == Kind::Sent { "sent" } else { "dead" };
    let mut params: Vec<Value> = Vec::new();
    let from = match page {
        Page::Start => String::new(),
        Page::Since(span) => format!(" AND finished_at >= {}", tx.now().plus(-micros_of(span), &mut params)),
        Page::After(at, id) => {
            params.extend([at.into(), at.into(), id.into()]);
            " AND finished_at >= ? AND (finished_at > ? OR id > ?)".to_owned()
        }
    };
    let sql = format!(
        "SELECT {TRACE}, result_ref, finished_at FROM outbox_done WHERE lane = '{LANE}' AND status = '{status}'{from}
         ORDER BY finished_at, id LIMIT {BATCH}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| trace(row, kind)).collect()
}

/// Live messages whose lease ran out and that nobody took again.
async fn stuck(tx: &mut (dyn Tx + Send), after: i64) -> Result<Vec<Trace>> {
    let mut params: Vec<Value> = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(after.into());
    let sql = format!(
        "SELECT {TRACE}, NULL, NULL FROM outbox WHERE lane = '{LANE}' AND lease_until < {now} AND id > ? ORDER BY id LIMIT {BATCH}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| trace(row, Kind::Stuck)).collect()
}

/// What audits tell of these messages: which end, under which token.
async fn told(tx: &mut (dyn Tx + Send), traces: &[Trace]) -> Result<HashSet<(i64, i64, Kind)>> {
    let ids: Vec<i64> = traces.iter().map(|t| t.id).collect();
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    let json = if tx.dialect() == Dialect::Postgres { "evidence_refs_json::text" } else { "evidence_refs_json" };
    let sql = format!("SELECT outbox_id, reason, {json} FROM write_audit WHERE outbox_id {list}");
    let mut told = HashSet::new();
    for row in tx.query(&sql, &params).await? {
        let evidence: Json = serde_json::from_str(&row.text(2)?).unwrap_or_default();
        let token = evidence["extra"]["lease_token"].as_i64();
        if let (Some(kind), Some(token)) = (Kind::of(&row.text(1)?), token) {
            told.insert((row.int(0)?, token, kind));
        }
    }
    Ok(told)
}

/// Looks once more under a lock, so that two who reconcile at once do not both write; answers how many it wrote.
async fn write_missing(tx: &mut (dyn Tx + Send), missing: &[Trace]) -> Result<usize> {
    let stuck = missing.first().is_some_and(|t| t.kind == Kind::Stuck);
    let table = if stuck { "outbox" } else { "outbox_done" };
    let mut ids: Vec<i64> = missing.iter().map(|t| t.id).collect();
    ids.sort_unstable();
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    let lock = for_update(tx.dialect());
    let sql = format!("SELECT id, lease_token FROM {table} WHERE id {list} ORDER BY id{lock}");
    let there: Result<HashSet<(i64, i64)>> =
        tx.query(&sql, &params).await?.iter().map(|row| Ok((row.int(0)?, row.int(1)?))).collect();
    let (there, told) = (there?, told(tx, missing).await?);
    let mut written = 0;
    for t in missing {
        if !there.contains(&(t.id, t.lease_token)) || told.contains(&(t.id, t.lease_token, t.kind)) {
            continue;
        }
        let evidence = json!({
            "source": "reconcile", "outbox_id": t.id, "memory_id": t.memory_id, "payload_sha": t.payload_sha,
            "extra": { "correlation_id": t.correlation_id, "error_code": t.error_code, "lease_token": t.lease_token },
        });
        let (action, reason, status) = t.kind.end();
        let (outbox_id, memory_id) = (Some(t.id), t.memory_id.as_deref());
        let end = End { action, reason: reason.to_owned(), status, outbox_id, memory_id };
        audit::insert(tx, None, &t.space, &t.payload_sha, t.correlation_id.as_deref(), &end, &evidence).await?;
        written += 1;
    }
    Ok(written)
}
