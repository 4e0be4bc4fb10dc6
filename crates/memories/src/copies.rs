//! Our own copy of each memory (`memory_writes`): its SQL, and how it moves.

use std::time::Duration;

use postrider::Result;
use postrider::message::sha256;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Row, Tx, Value, for_update, in_ids};
use serde_json::{Map, Value as Json};

use crate::note::Note;
use crate::{LANE, index};

/// How far a memory has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A direct write is under way.
    Writing,
    Stored,
    /// It waits in the outbox.
    Queued,
    /// It was given up.
    Dead,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Writing => "writing",
            State::Stored => "stored",
            State::Queued => "queued",
            State::Dead => "dead",
        }
    }

    fn parse(text: &str) -> Result<State> {
        let all = [State::Writing, State::Stored, State::Queued, State::Dead];
        let found = all.into_iter().find(|state| state.as_str() == text);
        found.ok_or_else(|| postrider::Error::database(format!("`{text}` is no state of a memory")))
    }
}

/// One copy, without its text.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub id: i64,
    pub state: State,
    pub memory_id: Option<String>,
    pub outbox_id: Option<i64>,
    pub audit_id: Option<i64>,
    pub writer: String,
    /// The service has something else under its id, which it takes for this.
    pub merged: bool,
    /// Why the service refused it.
    pub refusal: Option<String>,
    /// For how much longer an earlier write may be applied; `None`: none can be.
    pub doubt: Option<Duration>,
    /// The time a direct write had is over.
    pub overdue: bool,
}

const COLUMNS: &str = "id, state, memory_id, outbox_id, audit_id, writer, merged, refusal, doubt_until, writing_until";

fn copy(row: &Row) -> Result<Copy> {
    let (doubt, until, now) = (row.opt_time(8)?, row.opt_time(9)?, row.time(10)?);
    Ok(Copy {
        id: row.int(0)?,
        state: State::parse(&row.text(1)?)?,
        memory_id: row.opt_text(2)?,
        outbox_id: row.opt_int(3)?,
        audit_id: row.opt_int(4)?,
        writer: row.text(5)?,
        merged: row.bool(6)?,
        refusal: row.opt_text(7)?,
        doubt: doubt.map(|until| until.since(now)),
        overdue: until.is_some_and(|until| until <= now),
    })
}

/// The copy of this content in this space; locked for those who will change it.
pub(crate) async fn find(
    tx: &mut (dyn Tx + Send),
    space: &str,
    payload_sha: &str,
    locked: bool,
) -> Result<Option<Copy>> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.extend([space.into(), payload_sha.into()]);
    let lock = if locked { for_update(tx.dialect()) } else { "" };
    let sql = format!("SELECT {COLUMNS}, {now} FROM memory_writes WHERE target_space = ? AND payload_sha = ?{lock}");
    tx.query(&sql, &params).await?.first().map(copy).transpose()
}

/// The copy that waits, or waited, as this message; locked. By its number: what a message holds may be damaged.
pub(crate) async fn of_message(tx: &mut (dyn Tx + Send), outbox_id: i64) -> Result<Option<Copy>> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(outbox_id.into());
    let lock = for_update(tx.dialect());
    let sql = format!("SELECT {COLUMNS}, {now} FROM memory_writes WHERE outbox_id = ? ORDER BY id LIMIT 1{lock}");
    tx.query(&sql, &params).await?.first().map(copy).transpose()
}

/// The copy of this number; locked.
pub(crate) async fn by_id(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<Copy>> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(id.into());
    let lock = for_update(tx.dialect());
    let sql = format!("SELECT {COLUMNS}, {now} FROM memory_writes WHERE id = ?{lock}");
    tx.query(&sql, &params).await?.first().map(copy).transpose()
}

/// A new copy, in the state `writing`, with the words it is found by. `None`: somebody was faster.
pub(crate) async fn insert(
    tx: &mut (dyn Tx + Send),
    note: &Note,
    audit_id: i64,
    writer: &str,
    patience: Duration,
) -> Result<Option<i64>> {
    let meta = (!note.meta.is_empty()).then(|| Json::Object(note.meta.clone()).to_string());
    let mut params: Vec<Value> = vec![note.space.as_str().into(), note.payload_sha.as_str().into()];
    let until = tx.now().plus(micros_of(patience), &mut params);
    params.extend([
        note.payload_md.as_str().into(),
        audit_id.into(),
        writer.into(),
        note.kind.as_deref().into(),
        meta.into(),
        Json::Array(note.evidence_refs.clone()).to_string().into(),
    ]);
    let created = tx.now().plus(0, &mut params);
    let updated = tx.now().plus(0, &mut params);
    let dialect = tx.dialect();
    let text = if dialect == Dialect::Postgres { "?::text" } else { "?" };
    let (verb, tail) = match dialect {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT (target_space, payload_sha) DO NOTHING"),
    };
    let sql = format!(
        "{verb} INTO memory_writes (target_space, payload_sha, state, writing_until, payload_md, audit_id, writer, kind, meta_json, evidence_refs_json, created_at, updated_at)
         VALUES (?, ?, 'writing', {until}, ?, ?, ?, {text}, {text}, ?, {created}, {updated}){tail}"
    );
    if tx.execute(&sql, &params).await? != 1 {
        return Ok(None);
    }
    let Some(copy) = find(tx, &note.space, &note.payload_sha, false).await? else { return Ok(None) };
    index::write(tx, index::Source::Memory, copy.id, &note.space, &indexed_text(note)).await?;
    Ok(Some(copy.id))
}

/// A copy's next state. All of them end whatever write was under way.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Becomes<'a> {
    Stored {
        memory_id: &'a str,
        /// The service keeps something else under this id.
        merged: bool,
        outbox_id: Option<i64>,
    },
    Queued {
        outbox_id: i64,
        /// So long may an earlier write still be applied.
        doubt: Option<Duration>,
    },
    Dead {
        /// The service's words, if it was refused.
        refusal: Option<&'a str>,
    },
    /// Nobody writes it, though it says so: whoever looks next queues it.
    LeftBehind,
}

/// Moves a copy; the caller has it locked.
pub(crate) async fn become_(tx: &mut (dyn Tx + Send), id: i64, next: Becomes<'_>) -> Result<()> {
    let mut params: Vec<Value> = Vec::new();
    let text = if tx.dialect() == Dialect::Postgres { "?::text" } else { "?" };
    let mut set = match next {
        Becomes::Stored { memory_id, merged, outbox_id } => {
            params.extend([memory_id.into(), i64::from(merged).into()]);
            params.extend(outbox_id.map(Value::from));
            let outbox = outbox_id.map_or("", |_| ", outbox_id = ?");
            format!(
                "state = 'stored', memory_id = ?, merged = ?{outbox}, doubt_until = NULL, refusal = NULL, lost_at = NULL"
            )
        }
        Becomes::Queued { outbox_id, doubt } => {
            params.push(outbox_id.into());
            // Past doubts are over: it is looked for all the same.
            let until = doubt.map(|doubt| tx.now().plus(micros_of(doubt), &mut params));
            let until = until.map_or(String::new(), |until| format!(", doubt_until = {until}"));
            format!("state = 'queued', outbox_id = ?{until}, refusal = NULL, lost_at = NULL")
        }
        Becomes::Dead { refusal } => {
            params.push(refusal.into());
            format!("state = 'dead', refusal = {text}, doubt_until = NULL")
        }
        Becomes::LeftBehind => "state = 'writing'".to_owned(),
    };
    set.push_str(", writing_until = ");
    let until = match next {
        Becomes::LeftBehind => tx.now().plus(0, &mut params),
        _ => "NULL".to_owned(),
    };
    let now = tx.now().plus(0, &mut params);
    params.push(id.into());
    let sql = format!("UPDATE memory_writes SET {set}{until}, updated_at = {now} WHERE id = ?");
    tx.execute(&sql, &params).await.map(drop)
}

/// A copy that has ended is written once more, by this writer; the caller has it locked.
pub(crate) async fn write_again(
    tx: &mut (dyn Tx + Send),
    id: i64,
    audit_id: i64,
    writer: &str,
    patience: Duration,
) -> Result<()> {
    let mut params: Vec<Value> = vec![audit_id.into(), writer.into()];
    let until = tx.now().plus(micros_of(patience), &mut params);
    let now = tx.now().plus(0, &mut params);
    params.push(id.into());
    let sql = format!(
        "UPDATE memory_writes SET state = 'writing', audit_id = ?, writer = ?, writing_until = {until}, updated_at = {now} WHERE id = ?"
    );
    tx.execute(&sql, &params).await.map(drop)
}

/// What was delivered before is no longer there: the outbox must not take it for delivered.
pub(crate) async fn forget_delivery(tx: &mut (dyn Tx + Send), note: &Note) -> Result<()> {
    let sql = format!("DELETE FROM outbox_dedup WHERE lane = '{LANE}' AND payload_sha = ? AND target = ?");
    let sha = sha256(note.payload_md.as_bytes());
    tx.execute(&sql, &[sha.as_slice().into(), note.space.as_str().into()]).await.map(drop)
}

/// From now on an earlier write may be applied for so long; `None`: none can be any more.
pub(crate) async fn set_doubt(tx: &mut (dyn Tx + Send), id: i64, doubt: Option<Duration>) -> Result<()> {
    let mut params: Vec<Value> = Vec::new();
    let until = doubt.map_or("NULL".to_owned(), |doubt| tx.now().plus(micros_of(doubt), &mut params));
    params.push(id.into());
    tx.execute(&format!("UPDATE memory_writes SET doubt_until = {until} WHERE id = ?"), &params).await.map(drop)
}

/// What the settle will find: the service has something else under its id, or not.
pub(crate) async fn set_merged(tx: &mut (dyn Tx + Send), id: i64, merged: bool) -> Result<()> {
    let params = [i64::from(merged).into(), id.into()];
    tx.execute("UPDATE memory_writes SET merged = ? WHERE id = ?", &params).await.map(drop)
}

/// The service was asked for it: is it gone?
pub(crate) async fn set_lost(tx: &mut (dyn Tx + Send), ids: &[i64], lost: bool) -> Result<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let mut params: Vec<Value> = Vec::new();
    let at = if lost { tx.now().plus(0, &mut params) } else { "NULL".to_owned() };
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql = format!("UPDATE memory_writes SET lost_at = {at} WHERE id {list} AND state = 'stored'");
    tx.execute(&sql, &params).await.map(drop)
}

/// Does another text of ours stand under this id of the service?
pub(crate) async fn is_anothers(tx: &mut (dyn Tx + Send), memory_id: &str, payload_sha: &str) -> Result<bool> {
    let sql = "SELECT 1 FROM memory_writes WHERE memory_id = ? AND state = 'stored' AND merged = 0 AND payload_sha <> ? LIMIT 1";
    Ok(!tx.query(sql, &[memory_id.into(), payload_sha.into()]).await?.is_empty())
}

/// Does this very text of ours stand under this id of the service?
pub(crate) async fn is_known(tx: &mut (dyn Tx + Send), memory_id: &str, payload_sha: &str) -> Result<bool> {
    let sql = "SELECT 1 FROM memory_writes WHERE memory_id = ? AND state = 'stored' AND merged = 0 AND payload_sha = ? LIMIT 1";
    Ok(!tx.query(sql, &[memory_id.into(), payload_sha.into()]).await?.is_empty())
}

/// Takes a copy away, with the words it is found by.
pub(crate) async fn remove(tx: &mut (dyn Tx + Send), id: i64, note: &Note) -> Result<()> {
    index::remove(tx, index::Source::Memory, id, &note.space, &indexed_text(note)).await?;
    tx.execute("DELETE FROM memory_writes WHERE id = ?", &[id.into()]).await.map(drop)
}

fn indexed_text(note: &Note) -> String {
    format!("{}\n{}", note.kind.as_deref().unwrap_or_default(), note.payload_md)
}

/// The memory of a copy, as it was handed in.
pub(crate) async fn note_of(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<Note>> {
    let sql = "SELECT m.target_space, m.payload_sha, m.payload_md, m.kind, m.meta_json, m.evidence_refs_json, a.actor_user_id, a.correlation_id
               FROM memory_writes m LEFT JOIN write_audit a ON a.audit_id = m.audit_id WHERE m.id = ?";
    let rows = tx.query(sql, &[id.into()]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(Some(Note {
        space: row.text(0)?,
        payload_sha: row.text(1)?,
        payload_md: row.text(2)?,
        kind: row.opt_text(3)?,
        meta: object(row.opt_text(4)?),
        evidence_refs: serde_json::from_str(&row.text(5)?).unwrap_or_default(),
        actor: row.opt_text(6)?,
        correlation_id: row.opt_text(7)?.unwrap_or_default(),
    }))
}

/// Puts a text back that was damaged.
pub(crate) async fn restore(tx: &mut (dyn Tx + Send), id: i64, text: &str) -> Result<()> {
    tx.execute("UPDATE memory_writes SET payload_md = ? WHERE id = ?", &[text.into(), id.into()]).await.map(drop)
}

fn object(text: Option<String>) -> Map<String, Json> {
    text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// A copy as a question finds it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub id: i64,
    pub space: String,
    pub state: State,
    pub memory_id: Option<String>,
    pub outbox_id: Option<i64>,
    pub payload_md: String,
    pub kind: Option<String>,
    pub created_at: postrider::Timestamp,
    pub merged: bool,
    pub evidence_refs: Vec<Json>,
}

const FOUND: &str =
    "id, target_space, state, memory_id, outbox_id, payload_md, kind, created_at, merged, evidence_refs_json";

fn found(row: &Row) -> Result<Found> {
    Ok(Found {
        id: row.int(0)?,
        space: row.text(1)?,
        state: State::parse(&row.text(2)?)?,
        memory_id: row.opt_text(3)?,
        outbox_id: row.opt_int(4)?,
        payload_md: row.text(5)?,
        kind: row.opt_text(6)?,
        created_at: row.time(7)?,
        merged: row.bool(8)?,
        evidence_refs: serde_json::from_str(&row.text(9)?).unwrap_or_default(),
    })
}

pub(crate) async fn by_ids(tx: &mut (dyn Tx + Send), ids: &[i64]) -> Result<Vec<Found>> {
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql = format!("SELECT {FOUND} FROM memory_writes WHERE id {list}");
    tx.query(&sql, &params).await?.iter().map(found).collect()
}

/// Whose copies a memory of the service is; the same content in two spaces is one memory there.
pub(crate) async fn by_memory_ids(tx: &mut (dyn Tx + Send), memory_ids: &[&str]) -> Result<Vec<Found>> {
    let mut all = Vec::new();
    for part in memory_ids.chunks(100) {
        let params: Vec<Value> = part.iter().map(|id| Value::from(*id)).collect();
        let marks = vec!["?"; part.len()].join(", ");
        let sql = format!("SELECT {FOUND} FROM memory_writes WHERE memory_id IN ({marks})");
        for row in tx.query(&sql, &params).await? {
            all.push(found(&row)?);
        }
    }
    Ok(all)
}
