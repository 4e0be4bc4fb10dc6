//! How reliable it was: queued and ended memories, and what the audit says.

use std::collections::BTreeMap;

use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Tx, Value};
use postrider::{Result, Timestamp};
use serde::Serialize;

use crate::{Capability, LANE, Memories};

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OutboxStats {
    pub total: i64,
    pub by_status: BTreeMap<String, i64>,
    pub avg_retry_count: f64,
    pub oldest_pending_age_seconds: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AuditStats {
    pub total: i64,
    pub by_action: BTreeMap<String, i64>,
    pub by_status: BTreeMap<String, i64>,
    pub by_reason: BTreeMap<String, i64>,
    pub recent_24h: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub ok: bool,
    pub outbox_stats: OutboxStats,
    pub audit_stats: AuditStats,
    pub openmemory: Capability,
    /// `closed`, `open` or `half_open`, of the process that was asked.
    pub breaker: &'static str,
    pub generated_at: Timestamp,
}

impl Memories {
    pub async fn report(&self) -> Result<Report> {
        let gathered = self.transact(Mode::Read, |tx| Box::pin(gather(tx)));
        let (outbox_stats, audit_stats, generated_at) = gathered.await?;
        let breaker = self.0.breaker.state();
        Ok(Report { ok: true, outbox_stats, audit_stats, openmemory: self.capability(), breaker, generated_at })
    }
}

async fn gather(tx: &mut (dyn Tx + Send)) -> Result<(OutboxStats, AuditStats, Timestamp)> {
    let mut params: Vec<Value> = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let sql = format!("SELECT COUNT(*), SUM(attempts), MIN(created_at), {now} FROM outbox WHERE lane = '{LANE}'");
    let rows = tx.query(&sql, &params).await?;
    let row = rows.first().ok_or_else(|| postrider::Error::database("a count without a row"))?;
    let (mut outbox, now) = (OutboxStats::default(), row.time(3)?);
    let mut retries = row.opt_int(1)?.unwrap_or(0);
    outbox.by_status.insert("pending".to_owned(), row.int(0)?);
    outbox.oldest_pending_age_seconds = row.opt_time(2)?.map_or(0.0, |oldest| now.since(oldest).as_secs_f64());
    let sql = format!("SELECT status, COUNT(*), SUM(attempts) FROM outbox_done WHERE lane = '{LANE}' GROUP BY status");
    for status in ["sent", "dead"] {
        outbox.by_status.insert(status.to_owned(), 0);
    }
    for row in tx.query(&sql, &[]).await? {
        outbox.by_status.insert(row.text(0)?, row.int(1)?);
        retries += row.opt_int(2)?.unwrap_or(0);
    }
    outbox.total = outbox.by_status.values().sum();
    outbox.avg_retry_count = if outbox.total > 0 { retries as f64 / outbox.total as f64 } else { 0.0 };

    let mut audit = AuditStats::default();
    let mut params: Vec<Value> = Vec::new();
    let day = tx.now().plus(-micros_of(std::time::Duration::from_secs(24 * 3600)), &mut params);
    let sql = format!(
        "SELECT action, status, reason, COUNT(*), SUM(CASE WHEN created_at >= {day} THEN 1 ELSE 0 END) FROM write_audit
         GROUP BY action, status, reason"
    );
    for row in tx.query(&sql, &params).await? {
        let count = row.int(3)?;
        audit.total += count;
        audit.recent_24h += row.opt_int(4)?.unwrap_or(0);
        *audit.by_action.entry(row.text(0)?).or_default() += count;
        *audit.by_status.entry(row.text(1)?).or_default() += count;
        *audit.by_reason.entry(row.text(2)?).or_default() += count;
    }
    Ok((outbox, audit, now))
}
