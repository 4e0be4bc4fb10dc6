//! The audit of the gateway's own writes, in two phases: `pending` before the memory service is called, then how it ended.

use std::time::Duration;

use postrider::paging::{self, Candidates, Page, Rows, Wanted};
use postrider::time::micros_of;
use postrider::tx::{Dialect, Row, Tx, Value};
use postrider::{Result, Timestamp};
use serde::Serialize;
use serde_json::{Value as Json, json};

use crate::note::Note;

/// How a write ended, or stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct End<'a> {
    pub action: &'static str,
    pub reason: String,
    pub status: &'static str,
    pub outbox_id: Option<i64>,
    pub memory_id: Option<&'a str>,
}

impl End<'_> {
    pub fn pending() -> Self {
        End { action: "allow", reason: "memory_store".to_owned(), status: "pending", outbox_id: None, memory_id: None }
    }
}

/// Who writes an audit, and whether an earlier try of the same may have been committed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct By<'a> {
    pub writer: &'a str,
    pub again: bool,
}

fn evidence(note: &Note, end: &End<'_>) -> Json {
    json!({
        "source": "gateway", "outbox_id": end.outbox_id, "memory_id": end.memory_id, "payload_sha": note.payload_sha,
        "evidence_refs": note.evidence_refs, "extra": { "correlation_id": note.correlation_id },
    })
}

fn json_sql(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::text::jsonb" } else { "?" }
}

fn bigint(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::bigint" } else { "?" }
}

fn text(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "?::text" } else { "?" }
}

/// Writes the row of a store; its id. One store leaves one row, however often its half is tried.
pub(crate) async fn write(tx: &mut (dyn Tx + Send), note: &Note, end: &End<'_>, by: By<'_>) -> Result<i64> {
    if by.again
        && let Some(known) = written_by(tx, &note.correlation_id, by.writer).await?
    {
        return Ok(known);
    }
    let (space, sha) = (note.space.as_str(), note.payload_sha.as_str());
    let actor = note.actor.as_deref();
    let correlation_id = Some(note.correlation_id.as_str());
    let mut evidence = evidence(note, end);
    evidence["extra"]["writer"] = by.writer.into();
    insert(tx, actor, space, sha, correlation_id, end, &evidence).await
}

/// The row an earlier try of this writer left, if it was committed.
async fn written_by(tx: &mut (dyn Tx + Send), correlation_id: &str, writer: &str) -> Result<Option<i64>> {
    let json = if tx.dialect() == Dialect::Postgres { "evidence_refs_json::text" } else { "evidence_refs_json" };
    let sql =
        format!("SELECT audit_id, {json} FROM write_audit WHERE correlation_id = ? ORDER BY audit_id DESC LIMIT 100");
    for row in tx.query(&sql, &[correlation_id.into()]).await? {
        let evidence: Json = serde_json::from_str(&row.text(1)?).unwrap_or_default();
        if evidence["extra"]["writer"] == writer {
            return Ok(Some(row.int(0)?));
        }
    }
    Ok(None)
}

#[allow(clippy::too_many_arguments)]
pub(crate) async fn insert(
    tx: &mut (dyn Tx + Send),
    actor: Option<&str>,
    space: &str,
    payload_sha: &str,
    correlation_id: Option<&str>,
    end: &End<'_>,
    evidence: &Json,
) -> Result<i64> {
    let mut params = Vec::with_capacity(12);
    let created = tx.now().plus(0, &mut params);
    let updated = tx.now().plus(0, &mut params);
    params.extend([
        actor.into(),
        space.into(),
        end.action.into(),
        end.reason.as_str().into(),
        end.status.into(),
        payload_sha.into(),
        correlation_id.into(),
        end.outbox_id.into(),
        Value::Text(evidence.to_string()),
    ]);
    let dialect = tx.dialect();
    let sql = format!(
        "INSERT INTO write_audit (created_at, updated_at, actor_user_id, target_space, action, reason, status, payload_sha, correlation_id, outbox_id, evidence_refs_json)
         VALUES ({created}, {updated}, {text}, ?, ?, ?, ?, ?, {text}, {bigint}, {json})",
        text = text(dialect),
        bigint = bigint(dialect),
        json = json_sql(dialect)
    );
    let rows = match dialect {
        Dialect::Mysql => {
            tx.execute(&sql, &params).await?;
            tx.query("SELECT LAST_INSERT_ID()", &[]).await?
        }
        _ => tx.query(&format!("{sql} RETURNING audit_id"), &params).await?,
    };
    rows.first().ok_or_else(|| postrider::Error::database("an audit without an id"))?.int(0)
}

/// Ends a pending row; one that has ended is left alone.
pub(crate) async fn end(tx: &mut (dyn Tx + Send), audit_id: i64, note: &Note, end: &End<'_>) -> Result<bool> {
    finish(tx, audit_id, end, &evidence(note, end)).await
}

pub(crate) async fn finish(tx: &mut (dyn Tx + Send), audit_id: i64, end: &End<'_>, evidence: &Json) -> Result<bool> {
    let mut params: Vec<Value> =
        vec![end.action.into(), end.reason.as_str().into(), end.status.into(), end.outbox_id.into()];
    params.push(Value::Text(evidence.to_string()));
    let now = tx.now().plus(0, &mut params);
    params.push(audit_id.into());
    let dialect = tx.dialect();
    let sql = format!(
        "UPDATE write_audit SET action = ?, reason = ?, status = ?, outbox_id = {}, evidence_refs_json = {}, updated_at = {now}
         WHERE audit_id = ? AND status = 'pending'",
        bigint(dialect),
        json_sql(dialect)
    );
    Ok(tx.execute(&sql, &params).await? == 1)
}

/// Is it begun and not ended?
pub(crate) async fn is_pending(tx: &mut (dyn Tx + Send), audit_id: i64) -> Result<bool> {
    let sql = "SELECT 1 FROM write_audit WHERE audit_id = ? AND status = 'pending'";
    Ok(!tx.query(sql, &[audit_id.into()]).await?.is_empty())
}

/// Rows that were begun so long ago and not ended, oldest first.
pub(crate) async fn open(tx: &mut (dyn Tx + Send), stood: Duration, limit: u32) -> Result<Vec<i64>> {
    let mut params = Vec::new();
    let before = tx.now().bound(-micros_of(stood), &mut params);
    let sql = format!(
        "SELECT audit_id FROM write_audit WHERE status = 'pending' AND created_at < {before} ORDER BY created_at LIMIT {limit}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

/// One row, as it is shown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AuditRow {
    pub audit_id: i64,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub actor_user_id: Option<String>,
    pub target_space: Option<String>,
    pub action: String,
    pub reason: String,
    pub status: String,
    pub payload_sha: Option<String>,
    pub correlation_id: Option<String>,
    pub outbox_id: Option<i64>,
    pub evidence_refs_json: Json,
}

/// Which rows are wanted.
#[derive(Clone, Debug, Default)]
pub struct AuditFilter {
    pub correlation_id: Option<String>,
    pub outbox_id: Option<i64>,
    pub status: Option<String>,
    /// Only rows with a smaller id: a page goes on where the last one ended.
    pub before: Option<i64>,
    pub limit: u32,
}

/// Newest first.
pub(crate) async fn list(tx: &mut (dyn Tx + Send), filter: &AuditFilter) -> Result<Page<AuditRow>> {
    let AuditFilter { correlation_id, outbox_id, status, before, limit } = filter.clone();
    let by = |column: &str, value: Value| {
        vec![Candidates::new(format!("SELECT audit_id FROM write_audit WHERE {column} = ?"), [value])]
    };
    let candidates = match (outbox_id, correlation_id.clone()) {
        (Some(id), _) => by("outbox_id", id.into()),
        (None, Some(id)) => by("correlation_id", id.into()),
        (None, None) => vec![],
    };
    let few = paging::few(tx, &candidates).await?;
    let json = if tx.dialect() == Dialect::Postgres { "evidence_refs_json::text" } else { "evidence_refs_json" };
    let columns = format!(
        "audit_id, created_at, updated_at, actor_user_id, target_space, action, reason, status, payload_sha, correlation_id, outbox_id, {json}"
    );
    let wanted = Wanted::default().is("correlation_id", correlation_id).is("outbox_id", outbox_id).is("status", status);
    let rows = Rows { table: "write_audit", id: "audit_id", columns, bound: vec![], wanted };
    paging::page(tx, &rows, few, before, limit).await?.read(shown)
}

fn shown(row: &Row) -> Result<AuditRow> {
    Ok(AuditRow {
        audit_id: row.int(0)?,
        created_at: row.time(1)?,
        updated_at: row.time(2)?,
        actor_user_id: row.opt_text(3)?,
        target_space: row.opt_text(4)?,
        action: row.text(5)?,
        reason: row.text(6)?,
        status: row.text(7)?,
        payload_sha: row.opt_text(8)?,
        correlation_id: row.opt_text(9)?,
        outbox_id: row.opt_int(10)?,
        evidence_refs_json: serde_json::from_str(&row.text(11)?).unwrap_or(Json::Null),
    })
}
