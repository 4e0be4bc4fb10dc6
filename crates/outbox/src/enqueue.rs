//! Enqueue, inside whatever transaction it is given: the caller's own or the store's. One algorithm on the `Tx` port;
//! only the insert of many rows is written per database.
//!
//! Keys first, then the message: whoever comes second with the same key waits for the first one's transaction at the
//! unique index and then sees its answer. Keys are taken in sorted order, so two batches cannot deadlock on them.

use std::collections::{HashMap, HashSet};

use crate::active_keys::{self, Wanted};
use crate::error::{Error, Kind, Result};
use crate::lanes::Lanes;
use crate::message::{Enqueued, Entry, NewMessage, Sha, hex, sha256};
use crate::time::micros_of;
use crate::tx::{Dialect, Inserted, LAST_INSERT_ID, Row, Tx, Value};

/// Rows of one multi-row statement; also bounded by bytes, for MySQL's `max_allowed_packet`.
const CHUNK_ROWS: usize = 1000;
const SQLITE_ROWS: usize = 8;
const CHUNK_BYTES: usize = 4 << 20;
/// A holder of an active key that ends between our two looks makes us look again; more often than this is a bug.
const LOOKS: usize = 16;
/// SQLite: the id the next message gets. Whoever asks has the file to himself until the end of the transaction.
const NEXT_ID: &str = "(SELECT COALESCE(MAX(seq), 0) + 1 FROM sqlite_sequence WHERE name = 'outbox')";

/// A message with all that is computed before it meets the database.
struct Prepared<'a> {
    message: &'a NewMessage,
    sha: Sha,
    shard: u32,
    key_ttl_micros: i64,
}

fn prepare<'a>(lanes: &Lanes, messages: &'a [NewMessage]) -> Result<Vec<Prepared<'a>>> {
    let mut prepared = Vec::with_capacity(messages.len());
    for message in messages {
        let rules = lanes.get(&message.lane)?;
        message.validate(rules)?;
        prepared.push(Prepared {
            message,
            sha: sha256(&message.payload),
            shard: message.shard(rules.shards),
            key_ttl_micros: micros_of(rules.key_ttl),
        });
    }
    Ok(prepared)
}

/// Which messages are new, by a peer that keeps a row of its own for each of their active keys.
#[derive(Clone, Copy, Debug)]
pub enum Admit<'a> {
    /// All: the peer has just written their rows.
    All,
    /// Those this statement names: it writes the rows and answers with the keys that were new.
    By { sql: &'a str, params: &'a [Value] },
}

/// Which rows of an insert are written.
enum Which<'a> {
    All,
    /// Those whose active key is free.
    UnlessActive,
    /// Those this statement names.
    Admitted {
        sql: &'a str,
        params: &'a [Value],
    },
}

/// Writes the messages that are new, in one statement with what says so where the database can; the others are left without
/// an entry. Should an active key be taken all the same, the unique index (on MySQL the keys' own table)
/// refuses the lot.
pub(crate) async fn enqueue_admitted<T: Tx + ?Sized>(
    tx: &mut T,
    lanes: &Lanes,
    admit: Admit<'_>,
    messages: &[NewMessage],
) -> Result<Vec<Option<Entry>>> {
    let prepared = prepare(lanes, messages)?;
    let name = |i: usize| messages[i].active_key.as_deref().unwrap_or_default();
    let places: HashMap<&str, usize> = (0..messages.len()).map(|i| (name(i), i)).collect();
    if places.len() != messages.len() || messages.iter().any(|m| m.key.is_some() || m.active_key.is_none()) {
        return Err(Error::invalid("messages to be admitted have an active key each, and no other key"));
    }
    let mut answers: Vec<Option<Entry>> = vec![None; messages.len()];
    if messages.is_empty() {
        return Ok(answers);
    }
    let Admit::By { sql, params } = admit else {
        let all: Vec<usize> = (0..messages.len()).collect();
        insert_in_chunks(tx, &prepared, &all, &[], &mut answers).await?;
        return Ok(answers);
    };
    if tx.dialect() == Dialect::Postgres && messages.len() <= CHUNK_ROWS {
        let rows: Vec<&Prepared<'_>> = prepared.iter().collect();
        for (id, key) in insert_rows_postgres(tx, &rows, &[], Which::Admitted { sql, params }).await? {
            if let Some(&i) = key.as_deref().and_then(|key| places.get(key)) {
                answers[i] = Some(Entry { id, outcome: Enqueued::Created });
            }
        }
        return Ok(answers);
    }
    let mut admitted = Vec::with_capacity(messages.len());
    for row in tx.query(sql, params).await? {
        admitted.extend(places.get(row.text(0)?.as_str()));
    }
    admitted.sort_unstable();
    // Their active keys are theirs for sure: one that is taken is an error.
    insert_in_chunks(tx, &prepared, &admitted, &[], &mut answers).await?;
    Ok(answers)
}

/// Writes the messages and answers in their order. Nothing is written for one that exists or differs. An error leaves
/// the transaction to be rolled back by its owner.
pub async fn enqueue<T: Tx + ?Sized>(tx: &mut T, lanes: &Lanes, messages: &[NewMessage]) -> Result<Vec<Entry>> {
    let prepared = prepare(lanes, messages)?;
    let mut answers: Vec<Option<Entry>> = vec![None; messages.len()];

    let plain: Vec<usize> =
        (0..messages.len()).filter(|&i| messages[i].key.is_none() && messages[i].active_key.is_none()).collect();
    insert_in_chunks(tx, &prepared, &plain, &[], &mut answers).await?;

    let mut one_by_one: Vec<usize> = (0..messages.len()).filter(|&i| messages[i].active_key.is_some()).collect();
    let mut keyed: Vec<usize> =
        (0..messages.len()).filter(|&i| messages[i].key.is_some() && messages[i].active_key.is_none()).collect();
    let name = |i: usize| (messages[i].lane.as_str(), messages[i].key.as_deref());
    // A key given twice in one batch: the second finds the first.
    let mut names: HashSet<_> = one_by_one.iter().map(|&i| name(i)).collect();
    keyed.retain(|&i| {
        names.insert(name(i)) || {
            one_by_one.push(i);
            false
        }
    });
    if tx.dialect() == Dialect::Sqlite {
        for &i in &keyed {
            answers[i] = Some(enqueue_one(tx, &prepared[i]).await?); // no round trips to save
        }
    } else {
        keyed.sort_by_key(|&i| name(i));
        one_by_one.extend(enqueue_new_keys(tx, &prepared, &keyed, &mut answers).await?);
        one_by_one = enqueue_new_active_keys(tx, &prepared, one_by_one, &mut answers).await?;
    }
    one_by_one.sort_by_key(|&i| (&messages[i].lane, &messages[i].key, i));
    for i in one_by_one {
        answers[i] = Some(enqueue_one(tx, &prepared[i]).await?);
    }
    answers.into_iter().map(|a| a.ok_or_else(|| Error::database("a message was left without an answer"))).collect()
}

/// The `key` column, which MySQL wants quoted.
fn key_column(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Mysql { "`key`" } else { "key" }
}

/// Takes those of the keys that nobody has; answers rows of (lane, key, id).
async fn take_new_keys<T: Tx + ?Sized>(tx: &mut T, prepared: &[Prepared<'_>], chunk: &[usize]) -> Result<Vec<Row>> {
    if tx.dialect() == Dialect::Postgres {
        let crate::tx::Now::Expression(now) = tx.now() else { return Err(Error::database("no clock")) };
        let sql = format!(
            "INSERT INTO outbox_keys (lane, key, outbox_id, digest, expires_at)
             SELECT lane, key, nextval('outbox_id_seq'), digest, {now} + ttl * INTERVAL '1 microsecond'
             FROM unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[]) AS t(lane, key, digest, ttl)
             ON CONFLICT (lane, key) DO NOTHING RETURNING lane, key, outbox_id"
        );
        let params = [
            Value::Texts(chunk.iter().map(|&i| Some(prepared[i].message.lane.clone())).collect()),
            Value::Texts(chunk.iter().map(|&i| prepared[i].message.key.clone()).collect()),
            Value::Blobs(chunk.iter().map(|&i| Some(digest(&prepared[i]).to_vec().into())).collect()),
            Value::Ints(chunk.iter().map(|&i| prepared[i].key_ttl_micros).collect()),
        ];
        tx.query_often(&sql, &params).await
    } else {
        let mut params = Vec::with_capacity(chunk.len() * 4);
        let mut rows = Vec::with_capacity(chunk.len());
        for &i in chunk {
            let p = &prepared[i];
            params.extend([p.message.lane.as_str().into(), p.message.key.clone().into(), digest(p).as_slice().into()]);
            let expires = tx.now().plus(p.key_ttl_micros, &mut params);
            rows.push(format!("(?, ?, 0, ?, {expires})"));
        }
        let sql = format!(
            "INSERT IGNORE INTO outbox_keys (lane, `key`, outbox_id, digest, expires_at) VALUES {}",
            rows.join(", ")
        );
        tx.execute(&sql, &params).await?;
        // A row of ours has no id yet, and nobody else's without one can be seen. Not a locking read: it would go by the
        // index on ids and wait for all others that have none yet.
        let pairs = vec!["(lane = ? AND `key` = ?)"; chunk.len()].join(" OR ");
        let sql = format!("SELECT lane, `key`, outbox_id FROM outbox_keys WHERE outbox_id = 0 AND ({pairs})");
        let names = |&i: &usize| [prepared[i].message.lane.as_str().into(), prepared[i].message.key.clone().into()];
        tx.query(&sql, &chunk.iter().flat_map(names).collect::<Vec<Value>>()).await
    }
}

/// Enqueues those whose key nobody has, in the order of the messages; answers with the others.
async fn enqueue_new_keys<T: Tx + ?Sized>(
    tx: &mut T,
    prepared: &[Prepared<'_>],
    keyed: &[usize],
    answers: &mut [Option<Entry>],
) -> Result<Vec<usize>> {
    let key = |i: usize| prepared[i].message.key.clone().unwrap_or_default();
    let by_key: HashMap<(&str, String), usize> =
        keyed.iter().map(|&i| ((prepared[i].message.lane.as_str(), key(i)), i)).collect();
    let mut taken = Vec::with_capacity(keyed.len());
    for chunk in keyed.chunks(CHUNK_ROWS) {
        taken.extend(take_new_keys(tx, prepared, chunk).await?);
    }
    let mut new: Vec<(usize, i64)> = Vec::with_capacity(taken.len());
    for row in &taken {
        let (lane, key) = (row.text(0)?, row.text(1)?);
        if let Some(&i) = by_key.get(&(lane.as_str(), key)) {
            new.push((i, row.int(2)?));
        }
    }
    new.sort_unstable();
    let indexes: Vec<usize> = new.iter().map(|n| n.0).collect();
    let ids: Vec<i64> = if tx.dialect() == Dialect::Postgres { new.iter().map(|n| n.1).collect() } else { vec![] };
    insert_in_chunks(tx, prepared, &indexes, &ids, answers).await?;
    if tx.dialect() == Dialect::Mysql {
        for part in indexes.chunks(CHUNK_ROWS) {
            let mut params = Vec::with_capacity(part.len() * 3);
            for &i in part {
                params.extend([prepared[i].message.lane.as_str().into(), key(i).into()]);
                params.push(answers[i].map_or(0, |a| a.id).into());
                params.push(digest(&prepared[i]).as_slice().into());
            }
            let sql = format!(
                "INSERT INTO outbox_keys (lane, `key`, outbox_id, digest, expires_at) VALUES {}
                 ON DUPLICATE KEY UPDATE outbox_id = VALUES(outbox_id)",
                vec!["(?, ?, ?, ?, UTC_TIMESTAMP(6))"; part.len()].join(", ")
            );
            tx.execute(&sql, &params).await?;
        }
    }
    let done: HashSet<usize> = indexes.into_iter().collect();
    Ok(keyed.iter().copied().filter(|i| !done.contains(i)).collect())
}

/// Enqueues those that have an active key nobody has, and no other key; answers with the rest.
async fn enqueue_new_active_keys<T: Tx + ?Sized>(
    tx: &mut T,
    prepared: &[Prepared<'_>],
    indexes: Vec<usize>,
    answers: &mut [Option<Entry>],
) -> Result<Vec<usize>> {
    let name = |i: usize| (prepared[i].message.lane.as_str(), prepared[i].message.active_key.as_deref());
    let mut names = HashSet::new();
    // Of one lane, so that an active key names one of them.
    let lane = indexes.first().map(|&i| prepared[i].message.lane.as_str());
    let fits = |message: &NewMessage| {
        message.key.is_none() && message.active_key.is_some() && Some(message.lane.as_str()) == lane
    };
    let (mut new, mut rest): (Vec<usize>, Vec<usize>) =
        indexes.into_iter().partition(|&i| fits(prepared[i].message) && names.insert(name(i)));
    if new.len() < 2 {
        rest.append(&mut new);
        return Ok(rest);
    }
    new.sort_by_key(|&i| name(i)); // two batches cannot deadlock
    for part in new.chunks(CHUNK_ROWS) {
        let rows: Vec<&Prepared<'_>> = part.iter().map(|&i| &prepared[i]).collect();
        let ids = match tx.dialect() {
            Dialect::Mysql => insert_unless_active_mysql(tx, &rows).await?,
            _ => insert_rows_postgres(tx, &rows, &[], Which::UnlessActive).await?,
        };
        let ids: HashMap<String, i64> = ids.into_iter().filter_map(|(id, key)| Some((key?, id))).collect();
        for &i in part {
            match ids.get(prepared[i].message.active_key.as_deref().unwrap_or_default()) {
                Some(&id) => answers[i] = Some(Entry { id, outcome: Enqueued::Created }),
                None => rest.push(i),
            }
        }
    }
    Ok(rest)
}

/// Inserts the rows whose active key is free; answers their ids and active keys. All are of one lane.
async fn insert_unless_active_mysql<T: Tx + ?Sized>(
    tx: &mut T,
    rows: &[&Prepared<'_>],
) -> Result<Vec<(i64, Option<String>)>> {
    let wanted: Vec<Wanted<'_>> = rows.iter().filter_map(|p| wanted(p)).collect();
    let free = active_keys::take(tx, &wanted).await?;
    let is_free = |p: &&&Prepared<'_>| p.message.active_key.as_ref().is_some_and(|key| free.contains(key));
    let rows: Vec<&Prepared<'_>> = rows.iter().filter(is_free).copied().collect();
    if rows.is_empty() {
        return Ok(vec![]);
    }
    let ids = insert_rows(tx, &rows, &[]).await?;
    Ok(ids.into_iter().zip(rows).map(|(id, p)| (id, p.message.active_key.clone())).collect())
}

fn wanted<'a>(p: &'a Prepared<'_>) -> Option<Wanted<'a>> {
    Some(Wanted { lane: &p.message.lane, key: p.message.active_key.as_deref()?, sha: &p.sha })
}

fn digest(p: &Prepared<'_>) -> Sha {
    p.message.key_digest(&p.sha)
}

/// What had been in a key row we took over, to be put back if the message is not written after all.
enum KeyUndo {
    Delete,
    Restore(Row),
}

/// The whole rule for one message, with a key, an active key or both.
async fn enqueue_one<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>) -> Result<Entry> {
    for _ in 0..LOOKS {
        let (named, undo) = match take_key(tx, p).await? {
            KeyTaken::Held(entry) => return Ok(entry),
            KeyTaken::Vanished => continue,
            KeyTaken::Ours { named, undo } => (named, undo),
        };
        let Some(active_key) = &p.message.active_key else {
            let id = insert_rows(tx, &[p], &[]).await?.first().copied();
            let id = id.ok_or_else(|| Error::database("the insert gave no id"))?;
            name_key(tx, p, named, id).await?;
            return Ok(Entry { id, outcome: Enqueued::Created });
        };
        if let Some(id) = insert_unless_active(tx, p).await? {
            name_key(tx, p, named, id).await?;
            return Ok(Entry { id, outcome: Enqueued::Created });
        }
        match undo {
            Some(KeyUndo::Delete) => drop_key(tx, p).await?,
            Some(KeyUndo::Restore(row)) => restore_key(tx, p, &row).await?,
            None => {}
        }
        if let Some((id, sha)) = holder_of(tx, &p.message.lane, active_key).await? {
            let outcome = if sha == p.sha { Enqueued::Exists } else { Enqueued::Differs };
            return Ok(Entry { id, outcome });
        }
        // The holder ended meanwhile: insert again.
    }
    Err(Error::new(Kind::Busy, format!("the active key of lane `{}` kept changing hands; try again", p.message.lane)))
}

/// Who has an active key, and the digest of its payload.
async fn holder_of<T: Tx + ?Sized>(tx: &mut T, lane: &str, active_key: &str) -> Result<Option<(i64, Vec<u8>)>> {
    if tx.dialect() == Dialect::Mysql {
        return active_keys::holder(tx, lane, active_key).await;
    }
    let sql = "SELECT id, payload_sha, payload FROM outbox WHERE lane = ? AND active_key = ?";
    let found = tx.query(sql, &[lane.into(), active_key.into()]).await?;
    let Some(row) = found.first() else { return Ok(None) };
    let sha = match row.opt_bytes(1)? {
        Some(sha) => sha.to_vec(),
        None => sha256(&row.bytes(2)?).to_vec(),
    };
    Ok(Some((row.int(0)?, sha)))
}

enum KeyTaken {
    /// The key is ours (or there is none to take), and says that it is of this message: 0 if it does not say yet.
    Ours { named: i64, undo: Option<KeyUndo> },
    /// Another message has it: this is the answer.
    Held(Entry),
    /// It was there and is gone: look again.
    Vanished,
}

async fn take_key<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>) -> Result<KeyTaken> {
    let Some(key) = &p.message.key else { return Ok(KeyTaken::Ours { named: 0, undo: None }) };
    let (dialect, column, digest) = (tx.dialect(), key_column(tx.dialect()), digest(p));
    let lane: Value = p.message.lane.as_str().into();
    let mut params = vec![lane.clone(), key.into(), digest.as_slice().into()];
    let expires = tx.now().plus(p.key_ttl_micros, &mut params);
    let (verb, id, tail) = match dialect {
        Dialect::Mysql => ("INSERT IGNORE", "0", ""),
        Dialect::Postgres => ("INSERT", "0", " ON CONFLICT (lane, key) DO NOTHING"),
        Dialect::Sqlite => ("INSERT", NEXT_ID, " ON CONFLICT (lane, key) DO NOTHING RETURNING outbox_id"),
    };
    let sql = format!(
        "{verb} INTO outbox_keys (lane, {column}, outbox_id, digest, expires_at) VALUES (?, ?, {id}, ?, {expires}){tail}"
    );
    let named = if dialect == Dialect::Sqlite {
        tx.query(&sql, &params).await?.first().map(|row| row.int(0)).transpose()?
    } else {
        (tx.execute(&sql, &params).await? == 1).then_some(0)
    };
    if let Some(named) = named {
        return Ok(KeyTaken::Ours { named, undo: Some(KeyUndo::Delete) });
    }
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.extend([lane.clone(), key.into()]);
    // MySQL: the newest version, whatever the caller's isolation. Shared, as the lock the INSERT has taken: two who are told
    // the same do not wait for each other, and nobody who works on the message needs it.
    let lock = if dialect == Dialect::Mysql { " LOCK IN SHARE MODE" } else { "" };
    let sql = format!(
        "SELECT outbox_id, digest, expires_at, CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END
         FROM outbox_keys WHERE lane = ? AND {column} = ?{lock}"
    );
    let held = tx.query(&sql, &params).await?;
    let Some(row) = held.into_iter().next() else { return Ok(KeyTaken::Vanished) };
    let id = row.int(0)?;
    let expired = row.bool(3)?;
    let outcome = if row.bytes(1)? == digest.as_slice() { Enqueued::Exists } else { Enqueued::Differs };
    let live = "SELECT 1 FROM outbox WHERE id = ?";
    if !expired || !tx.query(live, &[id.into()]).await?.is_empty() {
        return Ok(KeyTaken::Held(Entry { id, outcome }));
    }
    let mut params = vec![digest.as_slice().into()];
    let expires = tx.now().plus(p.key_ttl_micros, &mut params);
    params.extend([lane, key.into(), id.into(), row.time(2)?.into()]);
    // Exactly what was looked at: should somebody else have taken it meanwhile, look again.
    let sql = format!(
        "UPDATE outbox_keys SET outbox_id = 0, digest = ?, expires_at = {expires}
         WHERE lane = ? AND {column} = ? AND outbox_id = ? AND expires_at = ?"
    );
    if tx.execute(&sql, &params).await? == 0 {
        return Ok(KeyTaken::Vanished);
    }
    // A requeue may have brought its message back before the row was ours.
    if !tx.query(live, &[id.into()]).await?.is_empty() {
        restore_key(tx, p, &row).await?;
        return Ok(KeyTaken::Held(Entry { id, outcome }));
    }
    Ok(KeyTaken::Ours { named: 0, undo: Some(KeyUndo::Restore(row)) })
}

/// Makes the key say whose it is, unless it says so already.
async fn name_key<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>, named: i64, id: i64) -> Result<()> {
    let Some(key) = p.message.key.as_ref().filter(|_| named != id) else { return Ok(()) };
    let sql = format!("UPDATE outbox_keys SET outbox_id = ? WHERE lane = ? AND {} = ?", key_column(tx.dialect()));
    tx.execute(&sql, &[id.into(), p.message.lane.as_str().into(), key.into()]).await?;
    Ok(())
}

async fn drop_key<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>) -> Result<()> {
    let sql = format!("DELETE FROM outbox_keys WHERE lane = ? AND {} = ?", key_column(tx.dialect()));
    tx.execute(&sql, &[p.message.lane.as_str().into(), p.message.key.clone().into()]).await?;
    Ok(())
}

async fn restore_key<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>, row: &Row) -> Result<()> {
    let sql = format!(
        "UPDATE outbox_keys SET outbox_id = ?, digest = ?, expires_at = ? WHERE lane = ? AND {} = ?",
        key_column(tx.dialect())
    );
    let params: [Value; 5] = [
        row.int(0)?.into(),
        row.bytes(1)?.into(),
        row.time(2)?.into(),
        p.message.lane.as_str().into(),
        p.message.key.clone().into(),
    ];
    tx.execute(&sql, &params).await?;
    Ok(())
}

/// A column of a new row: its name, its type in PostgreSQL, its value, and two questions that are asked of every row and
/// must not cost a copy.
struct Column {
    name: &'static str,
    pg_type: &'static str,
    value: fn(&Prepared<'_>) -> Value,
    present: fn(&NewMessage) -> bool,
    same: fn(&NewMessage, &NewMessage) -> bool,
}

macro_rules! optional {
    ($name:literal, $pg_type:literal, $field:ident) => {
        Column {
            name: $name,
            pg_type: $pg_type,
            value: |p| p.message.$field.clone().into(),
            present: |m| m.$field.is_some(),
            same: |a, b| a.$field == b.$field,
        }
    };
}

/// All of a new row but id and times.
const COLUMNS: [Column; 10] = [
    Column {
        name: "lane",
        pg_type: "text",
        value: |p| p.message.lane.as_str().into(),
        present: |_| true,
        same: |a, b| a.lane == b.lane,
    },
    // Of one lane, the shards differ only if what they are computed from differs.
    Column {
        name: "shard_id",
        pg_type: "bigint",
        value: |p| p.shard.into(),
        present: |_| true,
        same: |a, b| a.lane == b.lane && a.key == b.key && a.active_key == b.active_key && a.target == b.target,
    },
    optional!("target", "text", target),
    optional!("active_key", "text", active_key),
    Column {
        name: "payload",
        pg_type: "bytea",
        value: |p| p.message.payload.clone().into(),
        present: |_| true,
        same: |_, _| false,
    },
    optional!("content_type", "text", content_type),
    Column {
        name: "headers",
        pg_type: "text",
        value: |p| p.message.headers_json().into(),
        present: |m| !m.headers.is_empty(),
        same: |a, b| a.headers == b.headers,
    },
    Column {
        name: "payload_sha",
        pg_type: "bytea",
        value: |p| p.sha.as_slice().into(),
        present: |_| true,
        same: |_, _| false,
    },
    optional!("correlation_id", "text", correlation_id),
    optional!("deliver_before", "timestamptz", deliver_before),
];

/// The columns these rows have something in; the others stay NULL by themselves.
fn used_columns(rows: &[&Prepared<'_>]) -> Vec<&'static Column> {
    COLUMNS.iter().filter(|column| rows.iter().any(|p| (column.present)(p.message))).collect()
}

impl Column {
    fn uniform(&self, rows: &[&Prepared<'_>]) -> bool {
        rows.iter().all(|p| (self.same)(rows[0].message, p.message))
    }
}

/// `INSERT … (columns, created_at, updated_at, due_at) VALUES (…), (…)` without what follows, and its values.
fn insert_values<T: Tx + ?Sized>(tx: &T, verb: &str, rows: &[&Prepared<'_>], params: &mut Vec<Value>) -> String {
    let (columns, now) = (used_columns(rows), tx.now());
    let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
    let marks = "?, ".repeat(columns.len());
    let mut values = Vec::with_capacity(rows.len());
    for p in rows {
        params.extend(columns.iter().map(|column| (column.value)(p)));
        let created = now.plus(0, params);
        let updated = now.plus(0, params);
        let due = match (tx.dialect(), micros_of(p.message.delay)) {
            // Bound even when zero: all rows of a multi-row statement then have the same shape.
            (Dialect::Mysql, micros) => {
                params.push(micros.into());
                format!("{created} + INTERVAL ? MICROSECOND")
            }
            (_, micros) => now.plus(micros, params),
        };
        values.push(format!("({marks}{created}, {updated}, {due})"));
    }
    format!("{verb} INTO outbox ({}, created_at, updated_at, due_at) VALUES {}", names.join(", "), values.join(", "))
}

async fn insert_unless_active<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>) -> Result<Option<i64>> {
    let mut params = Vec::with_capacity(14);
    if tx.dialect() == Dialect::Mysql {
        return Ok(insert_unless_active_mysql(tx, &[p]).await?.first().map(|(id, _)| *id));
    }
    let mut sql = insert_values(tx, "INSERT", &[p], &mut params);
    sql.push_str(" ON CONFLICT (lane, active_key) WHERE active_key IS NOT NULL DO NOTHING RETURNING id");
    tx.query(&sql, &params).await?.first().map(|row| row.int(0)).transpose()
}

/// MySQL: runs an insert and answers the ids it has handed out.
pub(crate) async fn insert_ids<T: Tx + ?Sized>(tx: &mut T, sql: &str, params: &[Value]) -> Result<Vec<i64>> {
    if let Some(inserted) = tx.insert_at_once(sql, params) {
        return Ok(inserted.await?.ids());
    }
    let count = tx.execute(sql, params).await?;
    let answer = tx.query(LAST_INSERT_ID, &[]).await?;
    Ok(Inserted::of(count, &answer)?.ids())
}

/// Inserts in chunks and fills in the answers. `ids` is empty, or names the ids to use.
async fn insert_in_chunks<T: Tx + ?Sized>(
    tx: &mut T,
    prepared: &[Prepared<'_>],
    indexes: &[usize],
    ids: &[i64],
    answers: &mut [Option<Entry>],
) -> Result<()> {
    let mut start = 0;
    while start < indexes.len() {
        let mut end = start;
        let mut bytes = 0;
        while end < indexes.len() && end - start < CHUNK_ROWS && (end == start || bytes < CHUNK_BYTES) {
            bytes += prepared[indexes[end]].message.payload.len();
            end += 1;
        }
        let chunk: Vec<&Prepared<'_>> = indexes[start..end].iter().map(|&i| &prepared[i]).collect();
        let given = if ids.is_empty() { &[] } else { &ids[start..end] };
        let new = insert_rows(tx, &chunk, given).await?;
        if new.len() != chunk.len() {
            return Err(Error::database(format!("{} rows were inserted instead of {}", new.len(), chunk.len())));
        }
        for (&i, id) in indexes[start..end].iter().zip(new) {
            answers[i] = Some(Entry { id, outcome: Enqueued::Created });
        }
        start = end;
    }
    Ok(())
}

/// Inserts the rows and answers their ids, in order.
async fn insert_rows<T: Tx + ?Sized>(tx: &mut T, rows: &[&Prepared<'_>], ids: &[i64]) -> Result<Vec<i64>> {
    match tx.dialect() {
        Dialect::Sqlite => {
            // Few rows a statement: SQLite has no round trip to save, and the statement stays prepared.
            let mut new = Vec::with_capacity(rows.len());
            let mut params = Vec::with_capacity(13 * SQLITE_ROWS);
            for part in rows.chunks(SQLITE_ROWS) {
                params.clear();
                let mut sql = insert_values(tx, "INSERT", part, &mut params);
                sql.push_str(" RETURNING id");
                for row in tx.query(&sql, &params).await? {
                    new.push(row.int(0)?);
                }
            }
            new.sort_unstable(); // handed out in order; RETURNING promises none
            Ok(new)
        }
        Dialect::Mysql => {
            let (sql, params) = insert_rows_mysql(tx, rows);
            insert_ids(tx, &sql, &params).await
        }
        Dialect::Postgres => {
            let new = insert_rows_postgres(tx, rows, ids, Which::All).await?;
            let mut new: Vec<i64> = new.into_iter().map(|row| row.0).collect();
            new.sort_unstable();
            Ok(if ids.is_empty() { new } else { ids.to_vec() })
        }
    }
}

/// One statement with all rows; what is the same in every row stands in its text, so that only the rest is bound.
fn insert_rows_mysql<T: Tx + ?Sized>(tx: &T, rows: &[&Prepared<'_>]) -> (String, Vec<Value>) {
    let (columns, now) = (used_columns(rows), tx.now().plus(0, &mut Vec::new()));
    let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
    let mut bound: Vec<fn(&Prepared<'_>) -> Value> = Vec::new();
    let mut row = String::from("(");
    for column in columns {
        let first = (column.value)(rows[0]);
        let literal = match &first {
            Value::Int(number) => Some(number.to_string()),
            Value::Text(text) => Some(format!("X'{}'", hex(text.as_bytes()))),
            _ => None,
        };
        match literal.filter(|_| column.uniform(rows)) {
            Some(literal) => row.push_str(&format!("{literal}, ")),
            None => {
                row.push_str("?, ");
                bound.push(column.value);
            }
        }
    }
    bound.push(|p| micros_of(p.message.delay).into());
    row.push_str(&format!("{now}, {now}, {now} + INTERVAL ? MICROSECOND)"));
    let params = rows.iter().flat_map(|p| bound.iter().map(move |value| value(p))).collect();
    let values = vec![row.as_str(); rows.len()].join(", ");
    (format!("INSERT INTO outbox ({}, created_at, updated_at, due_at) VALUES {values}", names.join(", ")), params)
}

/// One statement over arrays; a column that is the same in every row is bound once. Answers ids, and active keys
/// where it is to leave out those whose active key is taken.
async fn insert_rows_postgres<T: Tx + ?Sized>(
    tx: &mut T,
    rows: &[&Prepared<'_>],
    ids: &[i64],
    which: Which<'_>,
) -> Result<Vec<(i64, Option<String>)>> {
    let crate::tx::Now::Expression(now) = tx.now() else { return Err(Error::database("no clock")) };
    let columns = used_columns(rows);
    let (mut names, mut chosen, mut arrays, mut sources) = (vec!["id"], vec![], vec![], vec![]);
    let mut active_key = "NULL".to_owned();
    let mut params: Vec<Value> = Vec::with_capacity(columns.len() + 2);
    // The sequence is read row by row in the order of the arrays, so sorted ids are in that order.
    chosen.push(if ids.is_empty() { "nextval('outbox_id_seq')".to_owned() } else { "given".to_owned() });
    for column in columns {
        let uniform = column.uniform(rows);
        params.push(if uniform { (column.value)(rows[0]) } else { array(rows, column) });
        names.push(column.name);
        if uniform {
            chosen.push(format!("${}::{}", params.len(), column.pg_type));
        } else {
            chosen.push(column.name.to_owned());
            arrays.push(format!("${}::{}[]", params.len(), column.pg_type));
            sources.push(column.name);
        }
        if column.name == "active_key" {
            active_key = chosen.last().cloned().unwrap_or_default();
        }
    }
    let first = micros_of(rows[0].message.delay);
    let due = if rows.iter().all(|p| micros_of(p.message.delay) == first) {
        params.push(Value::Int(first));
        format!("${}::bigint", params.len())
    } else {
        params.push(Value::Ints(rows.iter().map(|p| micros_of(p.message.delay)).collect()));
        arrays.push(format!("${}::bigint[]", params.len()));
        sources.push("delay");
        "delay".to_owned()
    };
    if !ids.is_empty() {
        params.push(Value::Ints(ids.to_vec()));
        arrays.push(format!("${}::bigint[]", params.len()));
        sources.push("given");
    }
    let (head, tail) = match which {
        Which::All => (String::new(), "RETURNING id, NULL".to_owned()),
        Which::UnlessActive => {
            let conflict = "ON CONFLICT (lane, active_key) WHERE active_key IS NOT NULL DO NOTHING";
            (String::new(), format!("{conflict} RETURNING id, active_key"))
        }
        Which::Admitted { sql, params: given } => {
            let mut sql = sql.to_owned();
            for value in given {
                params.push(value.clone());
                sql = sql.replacen('?', &format!("${}", params.len()), 1);
            }
            let join = format!("JOIN admitted ON admitted.named = {active_key} RETURNING id, active_key");
            (format!("WITH admitted(named) AS ({sql}) "), join)
        }
    };
    let sql = format!(
        "{head}INSERT INTO outbox ({}, created_at, updated_at, due_at)
         SELECT {}, {now}, {now}, {now} + {due} * INTERVAL '1 microsecond' FROM unnest({}) AS t({}) {tail}",
        names.join(", "),
        chosen.join(", "),
        arrays.join(", "),
        sources.join(", ")
    );
    let answer = tx.query_often(&sql, &params).await?;
    answer.iter().map(|row| Ok((row.int(0)?, row.opt_text(1)?))).collect()
}

/// One column of all rows.
fn array(rows: &[&Prepared<'_>], column: &Column) -> Value {
    let values = rows.iter().map(|p| (column.value)(p));
    match column.pg_type {
        "bytea" => Value::Blobs(values.map(|v| if let Value::Bytes(b) = v { Some(b) } else { None }).collect()),
        "bigint" => Value::Ints(values.map(|v| if let Value::Int(n) = v { n } else { 0 }).collect()),
        "timestamptz" => Value::Times(values.map(|v| if let Value::Time(t) = v { Some(t) } else { None }).collect()),
        _ => Value::Texts(values.map(|v| if let Value::Text(t) = v { Some(t) } else { None }).collect()),
    }
}
