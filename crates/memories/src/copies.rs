//! Our own copy of each memory (`memory_writes`): its SQL, and how it moves.

use std::time::Duration;

use postrider::Result;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Row, Tx, Value, for_update, in_ids};
use serde_json::{Map, Value as Json};

use crate::index;
use crate::note::Note;

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
    /// The time a direct write had is over.
    pub overdue: bool,
}

const COLUMNS: &str = "id, state, memory_id, outbox_id, audit_id, writer";

fn copy(row: &Row) -> Result<Copy> {
    let (until, now) = (row.opt_time(6)?, row.time(7)?);
    Ok(Copy {
        id: row.int(0)?,
        state: State::parse(&row.text(1)?)?,
        memory_id: row.opt_text(2)?,
        outbox_id: row.opt_int(3)?,
        audit_id: row.opt_int(4)?,
        writer: row.text(5)?,
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
    let sql = format!(
        "SELECT {COLUMNS}, writing_until, {now} FROM memory_writes WHERE target_space = ? AND payload_sha = ?{lock}"
    );
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
    let text = format!("{}\n{}", note.kind.as_deref().unwrap_or_default(), note.payload_md);
    index::write(tx, index::Source::Memory, copy.id, &note.space, &text).await?;
    Ok(Some(copy.id))
}

/// Moves a copy; the caller has it locked.
pub(crate) async fn become_(
    tx: &mut (dyn Tx + Send),
    id: i64,
    state: State,
    memory_id: Option<&str>,
    outbox_id: Option<i64>,
) -> Result<()> {
    let mut params: Vec<Value> = vec![state.as_str().into()];
    let mut set = "state = ?, writing_until = NULL".to_owned();
    if let Some(memory_id) = memory_id {
        set.push_str(", memory_id = ?");
        params.push(memory_id.into());
    }
    if let Some(outbox_id) = outbox_id {
        set.push_str(", outbox_id = ?");
        params.push(outbox_id.into());
    }
    let now = tx.now().plus(0, &mut params);
    params.push(id.into());
    let sql = format!("UPDATE memory_writes SET {set}, updated_at = {now} WHERE id = ?");
    tx.execute(&sql, &params).await.map(drop)
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

fn object(text: Option<String>) -> Map<String, Json> {
    text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// What goes with a queued memory when it is sent at last.
pub(crate) struct Extras {
    pub kind: Option<String>,
    pub meta: Map<String, Json>,
}

/// The copy of a message, and what goes with it.
pub(crate) async fn extras(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<Extras>> {
    let rows = tx.query("SELECT kind, meta_json FROM memory_writes WHERE id = ?", &[id.into()]).await?;
    rows.first().map(|row| Ok(Extras { kind: row.opt_text(0)?, meta: object(row.opt_text(1)?) })).transpose()
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
}

const FOUND: &str = "id, target_space, state, memory_id, outbox_id, payload_md, kind, created_at";

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
