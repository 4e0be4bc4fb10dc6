//! The ledger's own SQL: entries, how they move, and the events that tell of it.

use std::time::Duration;

use postrider::message::{hex, sha256};
use postrider::time::micros_of;
use postrider::tx::{Dialect, Row, Tx, Value, for_update};
use postrider::{Error, Result, Timestamp};
use serde::Serialize;

use crate::LANE;
use crate::decide::{Event, Status};

/// One entry, as it stands.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    pub idempotency_key: String,
    pub request_digest: String,
    #[serde(serialize_with = "status")]
    pub status: Status,
    pub http_status: Option<u16>,
    pub response_payload_json: Option<String>,
    pub result_digest: Option<String>,
    pub broker_ref: Option<String>,
    pub reason_code: Option<String>,
    pub first_seen_at: Timestamp,
    pub last_seen_at: Timestamp,
    pub finished_at: Option<Timestamp>,
    pub replays: i64,
    pub expires_at: Option<Timestamp>,
    /// Its message in the outbox.
    pub outbox_id: Option<i64>,
    /// Its message has not ended.
    #[serde(skip)]
    pub(crate) live: bool,
    #[serde(skip)]
    pub(crate) expired: bool,
}

impl Entry {
    /// Refuses to tell an answer that is not what was stored.
    pub(crate) fn intact(self) -> Result<Entry> {
        match (&self.response_payload_json, &self.result_digest) {
            (Some(stored), Some(digest)) if hex(&sha256(stored.as_bytes())) != *digest => Err(Error::database(
                format!("the stored answer of the order with message {:?} does not match its digest", self.outbox_id),
            )),
            _ => Ok(self),
        }
    }
}

fn status<S: serde::Serializer>(status: &Status, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(status.as_str())
}

/// How an entry moved, and by whom.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LedgerEvent {
    pub from_status: Option<String>,
    pub to_status: String,
    pub actor: String,
    pub reason: Option<String>,
    pub at: Timestamp,
}

/// The `key` column of the kernel's table, which MySQL wants quoted.
pub(crate) fn key_column(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Mysql { "`key`" } else { "key" }
}

/// `IN (…)` over keys; binds what it needs.
pub(crate) fn in_keys(dialect: Dialect, keys: &[&str], params: &mut Vec<Value>) -> String {
    match dialect {
        Dialect::Postgres => {
            params.push(Value::Texts(keys.iter().map(|key| Some((*key).to_owned())).collect()));
            "= ANY(?::text[])".to_owned()
        }
        Dialect::Sqlite => {
            params.push(Value::Text(serde_json::json!(keys).to_string()));
            "IN (SELECT value FROM json_each(?))".to_owned()
        }
        Dialect::Mysql if keys.is_empty() => "IN (NULL)".to_owned(),
        Dialect::Mysql => {
            params.extend(keys.iter().map(|key| Value::from(*key)));
            format!("IN ({})", vec!["?"; keys.len()].join(", "))
        }
    }
}

/// What keys are told by outside the ledger itself.
pub fn key_hash(key: &str) -> String {
    hex(&sha256(key.as_bytes()))
}

/// Rows of one insert on SQLite.
const SQLITE_ROWS: usize = 8;

const COLUMNS: &str = "l.idempotency_key, l.request_digest, l.status, l.http_status, l.response_payload_json, l.result_digest, l.broker_ref, \
                       l.reason_code, l.first_seen_at, l.last_seen_at, l.finished_at, l.replays, l.expires_at";

fn entry(row: &Row) -> Result<Entry> {
    let status = row.text(2)?;
    Ok(Entry {
        idempotency_key: row.text(0)?,
        request_digest: row.text(1)?,
        status: Status::parse(&status).ok_or_else(|| Error::database(format!("`{status}` is no status")))?,
        http_status: row.opt_int(3)?.map(|n| n as u16),
        response_payload_json: row.opt_text(4)?,
        result_digest: row.opt_text(5)?,
        broker_ref: row.opt_text(6)?,
        reason_code: row.opt_text(7)?,
        first_seen_at: row.time(8)?,
        last_seen_at: row.time(9)?,
        finished_at: row.opt_time(10)?,
        replays: row.int(11)?,
        expires_at: row.opt_time(12)?,
        // What is live has not heard of its end yet: it is not over.
        expired: row.opt_int(14)?.is_none()
            && row.opt_time(12)?.map_or(Ok(false), |at| row.time(13).map(|now| at <= now))?,
        live: row.opt_int(14)?.is_some(),
        outbox_id: row.opt_int(14)?.or(row.opt_int(15)?),
    })
}

/// The entries of these keys, the expired ones too; `locked` for those who will change them.
pub(crate) async fn find(tx: &mut (dyn Tx + Send), keys: &[&str], locked: bool) -> Result<Vec<Entry>> {
    let dialect = tx.dialect();
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    // PostgreSQL locks no row of an outer join's far side; a subquery has none to lock.
    // In MySQL they lock too: under a caller's REPEATABLE READ a plain one would look into the past.
    let share = if locked && dialect == Dialect::Mysql { " LOCK IN SHARE MODE" } else { "" };
    // Its message may be newer than the caller's snapshot: then its key's entry names it all the same.
    let (live, there, newer) = match share {
        "" => ("o.id FROM outbox o", "", ", NULL".to_owned()),
        _ => (
            "o.outbox_id FROM outbox_active_keys o",
            " AND EXISTS (SELECT 1 FROM outbox m WHERE m.id = o.outbox_id)",
            format!(
                ", (SELECT a.outbox_id FROM outbox_active_keys a WHERE a.lane = '{LANE}' AND a.active_key = l.idempotency_key{share})"
            ),
        ),
    };
    let column = key_column(dialect);
    let outbox_id = format!(
        "(SELECT {live} WHERE o.lane = '{LANE}' AND o.active_key = l.idempotency_key{there}{share}),
         COALESCE((SELECT k.outbox_id FROM outbox_keys k WHERE k.lane = '{LANE}' AND k.{column} = l.idempotency_key{share}){newer})"
    );
    let list = in_keys(dialect, keys, &mut params);
    let lock = if locked { for_update(dialect) } else { "" };
    let sql = format!(
        "SELECT {COLUMNS}, {now}, {outbox_id} FROM idempo_ledger l WHERE l.idempotency_key {list} ORDER BY l.idempotency_key{lock}"
    );
    tx.query(&sql, &params).await?.iter().map(entry).collect()
}

pub(crate) async fn find_one(tx: &mut (dyn Tx + Send), key: &str, locked: bool) -> Result<Option<Entry>> {
    Ok(find(tx, &[key], locked).await?.into_iter().next())
}

pub(crate) async fn events(tx: &mut (dyn Tx + Send), key: &str) -> Result<Vec<LedgerEvent>> {
    let sql = "SELECT from_status, to_status, actor, reason, at FROM ledger_events WHERE key_hash = ? ORDER BY id";
    let rows = tx.query(sql, &[key_hash(key).into()]).await?;
    let event = |row: &Row| {
        Ok(LedgerEvent {
            from_status: row.opt_text(0)?,
            to_status: row.text(1)?,
            actor: row.text(2)?,
            reason: row.opt_text(3)?,
            at: row.time(4)?,
        })
    };
    rows.iter().map(event).collect()
}

/// Who moves an entry, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct By {
    pub actor: String,
    pub reason: Option<String>,
}

async fn tell(tx: &mut (dyn Tx + Send), key: &str, from: Option<Status>, to: Status, by: &By) -> Result<()> {
    let from = from.map(Status::as_str);
    let mut params: Vec<Value> = vec![key_hash(key).into(), from.into(), to.as_str().into()];
    params.extend([by.actor.chars().take(255).collect::<String>().into(), by.reason.clone().into()]);
    let now = tx.now().plus(0, &mut params);
    let sql = format!(
        "INSERT INTO ledger_events (key_hash, from_status, to_status, actor, reason, at) VALUES (?, ?, ?, ?, ?, {now})"
    );
    tx.execute(&sql, &params).await.map(drop)
}

/// How an order ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finish {
    pub event: Event,
    pub http_status: u16,
    pub response: String,
    pub broker_ref: Option<String>,
    pub reason_code: Option<String>,
}

/// `in_progress` → `succeeded` or `failed`, for good but for requeue. An entry that has ended is left as it is: `false`.
pub(crate) async fn finish(
    tx: &mut (dyn Tx + Send),
    (key, outbox_id): (&str, Option<i64>),
    finish: &Finish,
    ttl: Duration,
    by: &By,
) -> Result<bool> {
    let to = moves(Status::InProgress, finish.event)?;
    let dialect = tx.dialect();
    let (int, text) = if dialect == Dialect::Postgres { ("?::int", "?::text") } else { ("?", "?") };
    let mut params: Vec<Value> = vec![
        to.as_str().into(),
        i64::from(finish.http_status).into(),
        finish.response.as_str().into(),
        hex(&sha256(finish.response.as_bytes())).into(),
        finish.broker_ref.clone().into(),
        finish.reason_code.clone().into(),
    ];
    let now = tx.now().plus(0, &mut params);
    let expires = tx.now().plus(micros_of(ttl), &mut params);
    params.push(key.into());
    let sql = format!(
        "UPDATE idempo_ledger SET status = ?, http_status = {int}, response_payload_json = ?, result_digest = ?, broker_ref = {text},
                reason_code = {text}, finished_at = {now}, expires_at = {expires}
         WHERE idempotency_key = ? AND status = 'in_progress'"
    );
    let ended = tx.execute(&sql, &params).await? == 1;
    // Without a message there is none to find; the entry goes when its key is used again.
    if let Some(outbox_id) = outbox_id {
        remember_key(tx, key, outbox_id, ttl).await?;
    }
    if !ended {
        return Ok(false);
    }
    tell(tx, key, Some(Status::InProgress), to, by).await?;
    Ok(true)
}

/// An order that has a message and no entry (an older version left it so) gets one.
pub(crate) async fn adopt(tx: &mut (dyn Tx + Send), key: &str, digest: &str) -> Result<()> {
    if insert_new(tx, &[(key, digest)]).await?.is_empty() {
        return Ok(());
    }
    let by = By { actor: "worker".to_owned(), reason: Some("the message had no entry".to_owned()) };
    tell(tx, key, None, Status::InProgress, &by).await
}

/// `failed` → `in_progress`.
pub(crate) async fn reopen(tx: &mut (dyn Tx + Send), key: &str, by: &By) -> Result<()> {
    let to = moves(Status::Failed, Event::Reopened)?;
    let sql = "UPDATE idempo_ledger SET status = ?, http_status = NULL, response_payload_json = NULL, result_digest = NULL, broker_ref = NULL,
                      reason_code = NULL, finished_at = NULL, expires_at = NULL WHERE idempotency_key = ? AND status = 'failed'";
    if tx.execute(sql, &[to.as_str().into(), key.into()]).await? != 1 {
        return Err(Error::database("the entry moved under its lock"));
    }
    forget_keys(tx, &[key]).await?;
    tell(tx, key, Some(Status::Failed), to, by).await
}

/// The message of an order that has ended is found by its key in the kernel's table, as long as the entry lasts.
async fn remember_key(tx: &mut (dyn Tx + Send), key: &str, outbox_id: i64, ttl: Duration) -> Result<()> {
    forget_keys(tx, &[key]).await?;
    let sql = "SELECT request_digest FROM idempo_ledger WHERE idempotency_key = ?";
    let rows = tx.query(sql, &[key.into()]).await?;
    let digest = rows.first().map(|row| row.text(0)).transpose()?.unwrap_or_default();
    let mut params: Vec<Value> = vec![key.into(), outbox_id.into(), unhex(&digest).as_slice().into()];
    let expires = tx.now().plus(micros_of(ttl), &mut params);
    let column = key_column(tx.dialect());
    let sql = format!(
        "INSERT INTO outbox_keys (lane, {column}, outbox_id, digest, expires_at) VALUES ('{LANE}', ?, ?, ?, {expires})"
    );
    tx.execute(&sql, &params).await.map(drop)
}

pub(crate) async fn forget_keys(tx: &mut (dyn Tx + Send), keys: &[&str]) -> Result<()> {
    let (mut params, column) = (Vec::new(), key_column(tx.dialect()));
    let list = in_keys(tx.dialect(), keys, &mut params);
    tx.execute(&format!("DELETE FROM outbox_keys WHERE lane = '{LANE}' AND {column} {list}"), &params).await.map(drop)
}

/// From hex back to bytes; the column takes 32.
fn unhex(text: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or(0);
    }
    bytes
}

/// Writes entries for keys that have none; answers those keys.
pub(crate) async fn insert_new(tx: &mut (dyn Tx + Send), orders: &[(&str, &str)]) -> Result<Vec<String>> {
    match tx.dialect() {
        Dialect::Sqlite => insert_new_sqlite(tx, orders).await,
        Dialect::Mysql => insert_new_mysql(tx, orders).await,
        Dialect::Postgres => {
            let (sql, params) = insert_statement(orders);
            tx.query(&sql, &params).await?.iter().map(|row| row.text(0)).collect()
        }
    }
}

const NEW: &str = "idempotency_key, request_digest, status, first_seen_at, last_seen_at";

/// PostgreSQL: one statement that writes entries for keys that have none and answers with those keys.
pub(crate) fn insert_statement(orders: &[(&str, &str)]) -> (String, Vec<Value>) {
    let sql = format!(
        "INSERT INTO idempo_ledger ({NEW}) SELECT k, d, 'in_progress', clock_timestamp(), clock_timestamp()
         FROM unnest(?::text[], ?::text[]) AS t(k, d) ON CONFLICT (idempotency_key) DO NOTHING RETURNING idempotency_key"
    );
    let texts = |of: fn(&(&str, &str)) -> String| Value::Texts(orders.iter().map(|o| Some(of(o))).collect());
    (sql, vec![texts(|o| o.0.to_owned()), texts(|o| o.1.to_owned())])
}

/// Few rows a statement: there is no round trip to save, and the statement stays prepared.
async fn insert_new_sqlite(tx: &mut (dyn Tx + Send), orders: &[(&str, &str)]) -> Result<Vec<String>> {
    let mut new = Vec::with_capacity(orders.len());
    for part in orders.chunks(SQLITE_ROWS) {
        let mut params: Vec<Value> = Vec::with_capacity(4 * SQLITE_ROWS);
        let mut rows = Vec::with_capacity(part.len());
        for (key, digest) in part {
            params.extend([(*key).into(), (*digest).into()]);
            let (first, last) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
            rows.push(format!("(?, ?, 'in_progress', {first}, {last})"));
        }
        let sql = format!(
            "INSERT INTO idempo_ledger ({NEW}) SELECT * FROM (VALUES {}) AS new
             WHERE NOT EXISTS (SELECT 1 FROM idempo_ledger l WHERE l.idempotency_key = new.column1) RETURNING idempotency_key",
            rows.join(", ")
        );
        for row in tx.query(&sql, &params).await? {
            new.push(row.text(0)?);
        }
    }
    Ok(new)
}

/// MySQL cannot say which rows an insert wrote, only how many.
async fn insert_new_mysql(tx: &mut (dyn Tx + Send), orders: &[(&str, &str)]) -> Result<Vec<String>> {
    let row = "(?, ?, 'in_progress', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))";
    let sql = format!("INSERT IGNORE INTO idempo_ledger ({NEW}) VALUES {}", vec![row; orders.len()].join(", "));
    let params: Vec<Value> = orders.iter().flat_map(|o| [o.0.into(), o.1.into()]).collect();
    let written = tx.execute(&sql, &params).await?;
    let mut new: Vec<String> = orders.iter().map(|order| order.0.to_owned()).collect();
    if written == 0 {
        return Ok(vec![]);
    }
    if written < new.len() as u64 {
        // Which were there before? Those that have ended, or have their message already.
        let keys: Vec<&str> = orders.iter().map(|order| order.0).collect();
        let ended = "SELECT idempotency_key FROM idempo_ledger WHERE status <> 'in_progress' AND idempotency_key";
        let live = format!("SELECT active_key FROM outbox_active_keys WHERE lane = '{LANE}' AND active_key");
        let mut taken = Vec::new();
        for sql in [ended, &live] {
            let mut params = Vec::new();
            let list = in_keys(Dialect::Mysql, &keys, &mut params);
            for row in tx.query(&format!("{sql} {list} LOCK IN SHARE MODE"), &params).await? {
                taken.push(row.text(0)?);
            }
        }
        new.retain(|key| !taken.contains(key));
    }
    Ok(new)
}

/// The state machine's word on it; the statements and the guards say the same again.
fn moves(from: Status, event: Event) -> Result<Status> {
    from.next(event).map_err(|illegal| Error::database(format!("{illegal:?}")))
}
