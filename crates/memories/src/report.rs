//! How reliable it was: queued and ended memories, and what the audit says.

use std::collections::BTreeMap;

use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Tx, Value};
use postrider::{Result, Timestamp};
use serde::Serialize;

use crate::spaces::Spaces;
use crate::{Capability, LANE, Memories};

/// Rows of one kind that a report looks at, the newest of them.
const MOST: i64 = 50_000;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OutboxStats {
    pub total: i64,
    pub by_status: BTreeMap<String, i64>,
    pub avg_retry_count: f64,
    pub oldest_pending_age_seconds: f64,
    /// `false`: there is more, and only the newest are counted.
    pub complete: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AuditStats {
    pub total: i64,
    pub by_action: BTreeMap<String, i64>,
    pub by_status: BTreeMap<String, i64>,
    pub by_reason: BTreeMap<String, i64>,
    pub recent_24h: i64,
    /// `false`: there is more, and only the newest are counted.
    pub complete: bool,
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
    /// The numbers of these spaces; `everything`: with audits that are of no memory, too. Bounded, whatever there is.
    pub async fn report(&self, spaces: Spaces, everything: bool) -> Result<Report> {
        let gathered = self.transact(Mode::Look, move |tx| {
            let spaces = spaces.clone();
            Box::pin(async move {
                let (outbox, now) = of_outbox(tx, &spaces).await?;
                Ok((outbox, of_audit(tx, &spaces, everything).await?, now))
            })
        });
        let (outbox_stats, audit_stats, generated_at) = gathered.await?;
        let breaker = self.0.breaker.state();
        Ok(Report { ok: true, outbox_stats, audit_stats, openmemory: self.capability(), breaker, generated_at })
    }
}

/// ` AND …`, where only some spaces are wanted.
fn within(tx: &(dyn Tx + Send), spaces: &Spaces, column: &str, params: &mut Vec<Value>) -> String {
    spaces.condition(tx.dialect(), column, params).map_or(String::new(), |condition| format!(" AND {condition}"))
}

async fn of_outbox(tx: &mut (dyn Tx + Send), spaces: &Spaces) -> Result<(OutboxStats, Timestamp)> {
    let mut params: Vec<Value> = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let of_spaces = within(tx, spaces, "target", &mut params);
    let sql = format!(
        "SELECT COUNT(*), SUM(attempts), MIN(created_at), {now}
         FROM (SELECT attempts, created_at FROM outbox WHERE lane = '{LANE}'{of_spaces} LIMIT {MOST}) live"
    );
    let rows = tx.query(&sql, &params).await?;
    let row = rows.first().ok_or_else(|| postrider::Error::database("a count without a row"))?;
    let (mut outbox, now) = (OutboxStats { complete: row.int(0)? < MOST, ..OutboxStats::default() }, row.time(3)?);
    let mut retries = row.opt_int(1)?.unwrap_or(0);
    outbox.by_status.insert("pending".to_owned(), row.int(0)?);
    outbox.oldest_pending_age_seconds = row.opt_time(2)?.map_or(0.0, |oldest| now.since(oldest).as_secs_f64());
    for status in ["sent", "dead"] {
        let mut params: Vec<Value> = Vec::new();
        let of_spaces = within(tx, spaces, "target", &mut params);
        let sql = format!(
            "SELECT COUNT(*), SUM(attempts) FROM (SELECT attempts FROM outbox_done
             WHERE lane = '{LANE}' AND status = '{status}'{of_spaces} ORDER BY finished_at DESC LIMIT {MOST}) ended"
        );
        for row in tx.query(&sql, &params).await? {
            outbox.by_status.insert(status.to_owned(), row.int(0)?);
            outbox.complete &= row.int(0)? < MOST;
            retries += row.opt_int(1)?.unwrap_or(0);
        }
    }
    outbox.total = outbox.by_status.values().sum();
    outbox.avg_retry_count = if outbox.total > 0 { retries as f64 / outbox.total as f64 } else { 0.0 };
    Ok((outbox, now))
}

async fn of_audit(tx: &mut (dyn Tx + Send), spaces: &Spaces, everything: bool) -> Result<AuditStats> {
    let mut params: Vec<Value> = Vec::new();
    let day = tx.now().plus(-micros_of(std::time::Duration::from_secs(24 * 3600)), &mut params);
    let of_spaces = within(tx, spaces, "target_space", &mut params);
    let of_memories = match (everything, tx.dialect()) {
        (true, _) => String::new(),
        // What the worker wrote of other lanes is not ours.
        (false, dialect) => {
            let (source, lane) = (evidence_text(dialect, "source"), evidence_text(dialect, "extra.lane"));
            format!(" AND (COALESCE({source}, '') <> 'outbox_worker' OR {lane} = '{LANE}')")
        }
    };
    let sql = format!(
        "SELECT action, status, reason, COUNT(*), SUM(CASE WHEN created_at >= {day} THEN 1 ELSE 0 END)
         FROM (SELECT action, status, reason, created_at, target_space, evidence_refs_json
               FROM write_audit ORDER BY audit_id DESC LIMIT {MOST}) newest
         WHERE 1 = 1{of_spaces}{of_memories} GROUP BY action, status, reason"
    );
    let mut audit = AuditStats::default();
    for row in tx.query(&sql, &params).await? {
        let count = row.int(3)?;
        audit.total += count;
        audit.recent_24h += row.opt_int(4)?.unwrap_or(0);
        *audit.by_action.entry(row.text(0)?).or_default() += count;
        *audit.by_status.entry(row.text(1)?).or_default() += count;
        *audit.by_reason.entry(row.text(2)?).or_default() += count;
    }
    let beyond = format!("SELECT audit_id FROM write_audit ORDER BY audit_id DESC LIMIT 1 OFFSET {MOST}");
    audit.complete = tx.query(&beyond, &[]).await?.is_empty();
    Ok(audit)
}

/// A text within the evidence of an audit, as SQL; NULL where the evidence is no JSON, which others may have written.
fn evidence_text(dialect: Dialect, path: &str) -> String {
    match dialect {
        Dialect::Postgres => format!("evidence_refs_json #>> '{{{}}}'", path.replace('.', ",")),
        Dialect::Sqlite => {
            format!("CASE WHEN json_valid(evidence_refs_json) THEN json_extract(evidence_refs_json, '$.{path}') END")
        }
        Dialect::Mysql => format!(
            "CASE WHEN JSON_VALID(evidence_refs_json) THEN JSON_UNQUOTE(JSON_EXTRACT(evidence_refs_json, '$.{path}')) END"
        ),
    }
}
