//! Enqueue, inside whatever transaction it is given: the caller's own or the store's. One algorithm on the `Tx` port;
//! only the insert of many rows is written per database.
//!
//! Keys first, then the message: whoever comes second with the same key waits for the first one's transaction at the
//! unique index and then sees its answer. Keys are taken in sorted order, so two batches cannot deadlock on them.

use std::collections::HashMap;

use crate::error::{Error, Kind, Result};
use crate::lanes::Lanes;
use crate::message::{Enqueued, Entry, NewMessage, Sha, sha256};
use crate::time::micros_of;
use crate::tx::{Dialect, Row, Tx, Value};

/// Rows of one multi-row statement; also bounded by bytes, for MySQL's `max_allowed_packet`.
const CHUNK_ROWS: usize = 500;
const CHUNK_BYTES: usize = 4 << 20;
/// A holder of an active key that ends between our two looks makes us look again; more often than this is a bug.
const LOOKS: usize = 16;

/// A message with all that is computed before it meets the database.
struct Prepared<'a> {
    message: &'a NewMessage,
    sha: Sha,
    shard: u32,
    key_ttl_micros: i64,
}

/// Writes the messages and answers in their order. Nothing is written for one that exists or differs. An error leaves
/// the transaction to be rolled back by its owner.
pub async fn enqueue<T: Tx + ?Sized>(tx: &mut T, lanes: &Lanes, messages: &[NewMessage]) -> Result<Vec<Entry>> {
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
    let mut answers: Vec<Option<Entry>> = vec![None; messages.len()];

    let plain: Vec<usize> =
        (0..messages.len()).filter(|&i| messages[i].key.is_none() && messages[i].active_key.is_none()).collect();
    insert_in_chunks(tx, &prepared, &plain, &[], &mut answers).await?;

    let mut one_by_one: Vec<usize> = (0..messages.len()).filter(|&i| messages[i].active_key.is_some()).collect();
    let mut keyed: Vec<usize> =
        (0..messages.len()).filter(|&i| messages[i].key.is_some() && messages[i].active_key.is_none()).collect();
    keyed.sort_by_key(|&i| (&messages[i].lane, &messages[i].key, i));
    if tx.dialect() == Dialect::Sqlite {
        one_by_one.append(&mut keyed); // no round trips to save
    } else {
        // A key given twice in one batch: the second finds the first.
        let same = |a: &usize, b: &usize| (&messages[*a].lane, &messages[*a].key) == (&messages[*b].lane, &messages[*b].key);
        let mut first: Vec<usize> = Vec::with_capacity(keyed.len());
        for i in keyed {
            match first.last() {
                Some(last) if same(last, &i) => one_by_one.push(i),
                _ => first.push(i),
            }
        }
        for chunk in first.chunks(CHUNK_ROWS) {
            one_by_one.extend(enqueue_new_keys(tx, &prepared, chunk, &mut answers).await?);
        }
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

/// Enqueues those of `chunk` whose key nobody has; answers with the others.
async fn enqueue_new_keys<T: Tx + ?Sized>(
    tx: &mut T,
    prepared: &[Prepared<'_>],
    chunk: &[usize],
    answers: &mut [Option<Entry>],
) -> Result<Vec<usize>> {
    let key = |i: usize| prepared[i].message.key.clone().unwrap_or_default();
    let by_key: HashMap<(&str, String), usize> =
        chunk.iter().map(|&i| ((prepared[i].message.lane.as_str(), key(i)), i)).collect();
    let taken: Vec<Row> = if tx.dialect() == Dialect::Postgres {
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
        tx.query(&sql, &params).await?
    } else {
        let mut params = Vec::with_capacity(chunk.len() * 4);
        let mut rows = Vec::with_capacity(chunk.len());
        for &i in chunk {
            let p = &prepared[i];
            params.extend([p.message.lane.as_str().into(), p.message.key.clone().into(), digest(p).as_slice().into()]);
            let expires = tx.now().plus(p.key_ttl_micros, &mut params);
            rows.push(format!("(?, ?, 0, ?, {expires})"));
        }
        let sql = format!("INSERT IGNORE INTO outbox_keys (lane, `key`, outbox_id, digest, expires_at) VALUES {}", rows.join(", "));
        tx.execute(&sql, &params).await?;
        // A row of ours has no id yet; one of another transaction would have made us wait until it had.
        let pairs = vec!["(lane = ? AND `key` = ?)"; chunk.len()].join(" OR ");
        let sql = format!("SELECT lane, `key`, outbox_id FROM outbox_keys WHERE outbox_id = 0 AND ({pairs}) LOCK IN SHARE MODE");
        let params: Vec<Value> =
            chunk.iter().flat_map(|&i| [prepared[i].message.lane.as_str().into(), key(i).into()]).collect();
        tx.query(&sql, &params).await?
    };
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
    let done: std::collections::HashSet<usize> = indexes.into_iter().collect();
    Ok(chunk.iter().copied().filter(|i| !done.contains(i)).collect())
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
        let undo = match take_key(tx, p).await? {
            KeyTaken::Held(entry) => return Ok(entry),
            KeyTaken::Vanished => continue,
            KeyTaken::Ours(undo) => undo,
        };
        let Some(active_key) = &p.message.active_key else {
            let id = insert_rows(tx, &[p], &[]).await?.first().copied();
            let id = id.ok_or_else(|| Error::database("the insert gave no id"))?;
            name_key(tx, p, id).await?;
            return Ok(Entry { id, outcome: Enqueued::Created });
        };
        if let Some(id) = insert_unless_active(tx, p).await? {
            name_key(tx, p, id).await?;
            return Ok(Entry { id, outcome: Enqueued::Created });
        }
        match undo {
            Some(KeyUndo::Delete) => drop_key(tx, p).await?,
            Some(KeyUndo::Restore(row)) => restore_key(tx, p, &row).await?,
            None => {}
        }
        // A locking read: under REPEATABLE READ a plain one would look into the past.
        let lock = if tx.dialect() == Dialect::Mysql { " LOCK IN SHARE MODE" } else { "" };
        let sql = format!("SELECT id, payload_sha, payload FROM outbox WHERE lane = ? AND active_key = ?{lock}");
        let holder = tx.query(&sql, &[p.message.lane.as_str().into(), active_key.into()]).await?;
        if let Some(row) = holder.first() {
            let sha = match row.opt_bytes(1)? {
                Some(sha) => sha.to_vec(),
                None => sha256(&row.bytes(2)?).to_vec(),
            };
            let outcome = if sha == p.sha { Enqueued::Exists } else { Enqueued::Differs };
            return Ok(Entry { id: row.int(0)?, outcome });
        }
        // The holder ended meanwhile: insert again.
    }
    Err(Error::new(Kind::Busy, format!("the active key of lane `{}` kept changing hands; try again", p.message.lane)))
}

enum KeyTaken {
    /// The key is ours (or there is none to take).
    Ours(Option<KeyUndo>),
    /// Another message has it: this is the answer.
    Held(Entry),
    /// It was there and is gone: look again.
    Vanished,
}

async fn take_key<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>) -> Result<KeyTaken> {
    let Some(key) = &p.message.key else { return Ok(KeyTaken::Ours(None)) };
    let (dialect, column, digest) = (tx.dialect(), key_column(tx.dialect()), digest(p));
    let lane: Value = p.message.lane.as_str().into();
    let mut params = vec![lane.clone(), key.into(), digest.as_slice().into()];
    let expires = tx.now().plus(p.key_ttl_micros, &mut params);
    let (verb, tail) = match dialect {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT (lane, key) DO NOTHING"),
    };
    let sql = format!("{verb} INTO outbox_keys (lane, {column}, outbox_id, digest, expires_at) VALUES (?, ?, 0, ?, {expires}){tail}");
    if tx.execute(&sql, &params).await? == 1 {
        return Ok(KeyTaken::Ours(Some(KeyUndo::Delete)));
    }
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.extend([lane.clone(), key.into()]);
    let lock = if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE" };
    let sql = format!(
        "SELECT outbox_id, digest, expires_at, CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END
         FROM outbox_keys WHERE lane = ? AND {column} = ?{lock}"
    );
    let held = tx.query(&sql, &params).await?;
    let Some(row) = held.into_iter().next() else { return Ok(KeyTaken::Vanished) };
    let id = row.int(0)?;
    let expired = row.bool(3)?;
    if !expired || !tx.query("SELECT 1 FROM outbox WHERE id = ?", &[id.into()]).await?.is_empty() {
        let outcome = if row.bytes(1)? == digest.as_slice() { Enqueued::Exists } else { Enqueued::Differs };
        return Ok(KeyTaken::Held(Entry { id, outcome }));
    }
    let mut params = vec![digest.as_slice().into()];
    let expires = tx.now().plus(p.key_ttl_micros, &mut params);
    params.extend([lane, key.into()]);
    let sql = format!("UPDATE outbox_keys SET outbox_id = 0, digest = ?, expires_at = {expires} WHERE lane = ? AND {column} = ?");
    tx.execute(&sql, &params).await?;
    Ok(KeyTaken::Ours(Some(KeyUndo::Restore(row))))
}

async fn name_key<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>, id: i64) -> Result<()> {
    let Some(key) = &p.message.key else { return Ok(()) };
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

const COLUMNS: &str = "lane, shard_id, target, active_key, payload, content_type, headers, payload_sha, correlation_id, \
                       deliver_before, created_at, updated_at, due_at";

/// The row's own values, in the order of `COLUMNS` up to `deliver_before`.
fn own_values(p: &Prepared<'_>) -> [Value; 10] {
    let m = p.message;
    [
        m.lane.as_str().into(),
        p.shard.into(),
        m.target.clone().into(),
        m.active_key.clone().into(),
        m.payload.clone().into(),
        m.content_type.clone().into(),
        m.headers_json().into(),
        p.sha.as_slice().into(),
        m.correlation_id.clone().into(),
        m.deliver_before.into(),
    ]
}

/// `(?, …, now, now, now + delay)` with its values.
fn values_row<T: Tx + ?Sized>(tx: &T, p: &Prepared<'_>, params: &mut Vec<Value>) -> String {
    let now = tx.now();
    params.extend(own_values(p));
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
    format!("(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {created}, {updated}, {due})")
}

async fn insert_unless_active<T: Tx + ?Sized>(tx: &mut T, p: &Prepared<'_>) -> Result<Option<i64>> {
    let mut params = Vec::with_capacity(14);
    let values = values_row(tx, p, &mut params);
    if tx.dialect() == Dialect::Mysql {
        let sql = format!("INSERT IGNORE INTO outbox ({COLUMNS}) VALUES {values}");
        if tx.execute(&sql, &params).await? == 0 {
            return Ok(None);
        }
        return Ok(Some(last_insert_id(tx).await?.0));
    }
    let sql = format!(
        "INSERT INTO outbox ({COLUMNS}) VALUES {values}
         ON CONFLICT (lane, active_key) WHERE active_key IS NOT NULL DO NOTHING RETURNING id"
    );
    tx.query(&sql, &params).await?.first().map(|row| row.int(0)).transpose()
}

/// The first id of the last insert, and the step between ids (more than 1 on Galera).
async fn last_insert_id<T: Tx + ?Sized>(tx: &mut T) -> Result<(i64, i64)> {
    let rows = tx.query("SELECT CAST(LAST_INSERT_ID() AS SIGNED), CAST(@@auto_increment_increment AS SIGNED)", &[]).await?;
    let row = rows.first().ok_or_else(|| Error::database("no last insert id"))?;
    Ok((row.int(0)?, row.int(1)?))
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
            let mut new = Vec::with_capacity(rows.len());
            for p in rows {
                let mut params = Vec::with_capacity(13);
                let values = values_row(tx, p, &mut params);
                let sql = format!("INSERT INTO outbox ({COLUMNS}) VALUES {values} RETURNING id");
                let row = tx.query(&sql, &params).await?;
                new.push(row.first().ok_or_else(|| Error::database("the insert gave no id"))?.int(0)?);
            }
            Ok(new)
        }
        Dialect::Mysql => {
            let mut params = Vec::with_capacity(rows.len() * 11);
            let values: Vec<String> = rows.iter().map(|p| values_row(tx, p, &mut params)).collect();
            let sql = format!("INSERT INTO outbox ({COLUMNS}) VALUES {}", values.join(", "));
            let inserted = tx.execute(&sql, &params).await?;
            // The number of rows is known in advance, so InnoDB hands out consecutive ids in every lock mode.
            let (first, step) = last_insert_id(tx).await?;
            Ok((0..inserted as i64).map(|n| first + n * step).collect())
        }
        Dialect::Postgres => insert_rows_postgres(tx, rows, ids).await,
    }
}

async fn insert_rows_postgres<T: Tx + ?Sized>(tx: &mut T, rows: &[&Prepared<'_>], ids: &[i64]) -> Result<Vec<i64>> {
    let crate::tx::Now::Expression(now) = tx.now() else { return Err(Error::database("no clock")) };
    // The sequence is read row by row in the order of the arrays, so sorted ids are in that order.
    let id = if ids.is_empty() { "nextval('outbox_id_seq')" } else { "given" };
    let sql = format!(
        "INSERT INTO outbox (id, {COLUMNS})
         SELECT {id}, lane, shard::int, target, active_key, payload, content_type, headers, sha, correlation,
                deliver_before, {now}, {now}, {now} + delay * INTERVAL '1 microsecond'
         FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[], $5::bytea[], $6::text[], $7::text[],
                     $8::bytea[], $9::text[], $10::timestamptz[], $11::bigint[], $12::bigint[])
              AS t(lane, shard, target, active_key, payload, content_type, headers, sha, correlation,
                   deliver_before, delay, given)
         RETURNING id"
    );
    let texts = |pick: fn(&NewMessage) -> Option<String>| Value::Texts(rows.iter().map(|p| pick(p.message)).collect());
    let given = if ids.is_empty() { vec![0; rows.len()] } else { ids.to_vec() };
    let params = [
        texts(|m| Some(m.lane.clone())),
        Value::Ints(rows.iter().map(|p| i64::from(p.shard)).collect()),
        texts(|m| m.target.clone()),
        texts(|m| m.active_key.clone()),
        Value::Blobs(rows.iter().map(|p| Some(p.message.payload.clone())).collect()),
        texts(|m| m.content_type.clone()),
        texts(|m| m.headers_json()),
        Value::Blobs(rows.iter().map(|p| Some(p.sha.to_vec().into())).collect()),
        texts(|m| m.correlation_id.clone()),
        Value::Times(rows.iter().map(|p| p.message.deliver_before).collect()),
        Value::Ints(rows.iter().map(|p| micros_of(p.message.delay)).collect()),
        Value::Ints(given),
    ];
    let answer = tx.query(&sql, &params).await?;
    let mut new = answer.iter().map(|row| row.int(0)).collect::<Result<Vec<i64>>>()?;
    if ids.is_empty() {
        new.sort_unstable();
        Ok(new)
    } else {
        Ok(ids.to_vec())
    }
}
