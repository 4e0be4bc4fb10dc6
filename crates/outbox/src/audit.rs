//! Audit rows of the lease protocol: one per outcome on lanes with `audit`, and one per conflict on every lane, with what
//! was intended and what was observed. Written once, on the `Tx` port.

use serde_json::json;

use crate::error::Result;
use crate::lanes::Winner;
use crate::lease::Lease;
use crate::message::{cut_error, hex, sha256};
use crate::outcome::{FlushCode, Settlement, Verdict};
use crate::tx::{Dialect, Row, Tx, Value};

struct Record<'a> {
    code: FlushCode,
    target: Option<&'a str>,
    payload_sha: Option<String>,
    correlation_id: Option<&'a str>,
    outbox_id: i64,
    evidence: serde_json::Value,
}

async fn write(tx: &mut (dyn Tx + Send), record: Record<'_>) -> Result<()> {
    let mut params = Vec::with_capacity(10);
    let created = tx.now().plus(0, &mut params);
    let updated = tx.now().plus(0, &mut params);
    params.extend([
        record.target.into(),
        record.code.action().into(),
        record.code.as_str().into(),
        record.code.audit_status().into(),
        record.payload_sha.into(),
        record.correlation_id.into(),
        record.outbox_id.into(),
        Value::Text(record.evidence.to_string()),
    ]);
    let evidence = if tx.dialect() == Dialect::Postgres { "?::text::jsonb" } else { "?" };
    let sql = format!(
        "INSERT INTO write_audit (created_at, updated_at, target_space, action, reason, status, payload_sha, correlation_id, outbox_id, evidence_refs_json)
         VALUES ({created}, {updated}, ?, ?, ?, ?, ?, ?, ?, {evidence})"
    );
    tx.execute(&sql, &params).await?;
    Ok(())
}

/// One row per winner, and one more for the database trouble it had to wait out.
pub(crate) async fn outcomes(
    tx: &mut (dyn Tx + Send),
    owner: &str,
    winners: &[Winner],
    entries: &[&Settlement],
) -> Result<()> {
    for (winner, entry) in winners.iter().zip(entries) {
        let result_ref = match &winner.verdict {
            Verdict::Sent { result_ref, .. } => result_ref.as_deref().map(cut_error),
            _ => None,
        };
        let payload_sha = hex(&sha256(&winner.payload));
        for code in entry.trouble.into_iter().chain([winner.verdict.flush_code()]) {
            let evidence = json!({
                "source": "outbox_worker", "outbox_id": winner.id, "memory_id": result_ref, "payload_sha": payload_sha,
                "extra": { "correlation_id": winner.correlation_id, "worker_id": owner, "lane": winner.lane, "lease_token": winner.lease_token, "attempts": winner.attempts },
            });
            let record = Record {
                code,
                target: winner.target.as_deref(),
                payload_sha: Some(payload_sha.clone()),
                correlation_id: winner.correlation_id.as_deref(),
                outbox_id: winner.id,
                evidence,
            };
            write(tx, record).await?;
        }
    }
    Ok(())
}

/// One row per settle that found its lease lost. The message itself is left alone.
pub(crate) async fn conflicts(tx: &mut (dyn Tx + Send), owner: &str, losers: &[(Lease, FlushCode)]) -> Result<()> {
    for (lease, intended) in losers {
        let live =
            "SELECT 'live', lease_token, locked_by, target, payload_sha, correlation_id, lane FROM outbox WHERE id = ?";
        let done =
            "SELECT status, lease_token, NULL, target, payload_sha, correlation_id, lane FROM outbox_done WHERE id = ?";
        let mut seen: Vec<Row> = tx.query(live, &[lease.id.into()]).await?;
        if seen.is_empty() {
            seen = tx.query(done, &[lease.id.into()]).await?;
        }
        let observed = match seen.first() {
            Some(row) => {
                json!({"status": row.opt_text(0)?, "lease_token": row.opt_int(1)?, "locked_by": row.opt_text(2)?})
            }
            None => json!({"status": "gone"}),
        };
        let row = seen.first();
        let target = row.map(|r| r.opt_text(3)).transpose()?.flatten();
        let payload_sha = row.map(|r| r.opt_bytes(4)).transpose()?.flatten().map(|sha| hex(&sha));
        let correlation_id = row.map(|r| r.opt_text(5)).transpose()?.flatten();
        let lane = row.map(|r| r.opt_text(6)).transpose()?.flatten();
        let evidence = json!({
            "source": "outbox_worker", "outbox_id": lease.id, "payload_sha": payload_sha,
            "intended": { "outcome": intended.as_str(), "lease_token": lease.token }, "observed": observed,
            "extra": { "correlation_id": correlation_id, "worker_id": owner, "lane": lane },
        });
        let record = Record {
            code: FlushCode::Conflict,
            target: target.as_deref(),
            payload_sha,
            correlation_id: correlation_id.as_deref(),
            outbox_id: lease.id,
            evidence,
        };
        write(tx, record).await?;
    }
    Ok(())
}
