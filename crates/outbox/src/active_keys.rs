//! MySQL and MariaDB: who has which active key, in a table of its own.
//!
//! A unique index among the messages has an entry for every message, and whoever met a taken key there had InnoDB lock
//! the gap beside it, with other people's messages in it, for as long as the transaction was open. The primary key of
//! this table locks one entry. PostgreSQL and SQLite have a partial unique index that does as well, and need none of this.
//!
//! A key is taken before its message is written, under the id 0 that nobody else can see, and freed with its end. Triggers of
//! the live table say whose it is, and take it for those who did not, such as SQL by hand and a process of the version before.

use std::collections::HashSet;

use crate::error::Result;
use crate::message::Sha;
use crate::settle::in_ids;
use crate::tx::{Dialect, Tx, Value};

/// Entries of one statement.
const MANY: usize = 500;

/// A key that is about to be, or is, some message's.
pub(crate) struct Wanted<'a> {
    pub lane: &'a str,
    pub key: &'a str,
    pub sha: &'a Sha,
}

/// Takes those keys of one lane that are free; answers which. Whoever gives them in order cannot deadlock with another who
/// does. They have no message until one is written.
pub(crate) async fn take<T: Tx + ?Sized>(tx: &mut T, wanted: &[Wanted<'_>]) -> Result<HashSet<String>> {
    let mut taken = HashSet::with_capacity(wanted.len());
    for part in wanted.chunks(MANY) {
        let values = vec!["(?, ?, 0, ?)"; part.len()].join(", ");
        let params: Vec<Value> =
            part.iter().flat_map(|w| [w.lane.into(), w.key.into(), w.sha.as_slice().into()]).collect();
        let sql =
            format!("INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha) VALUES {values}");
        let fresh = tx.execute(&sql, &params).await?;
        if fresh == part.len() as u64 {
            taken.extend(part.iter().map(|w| w.key.to_owned()));
        } else if fresh > 0 {
            // Nobody else's entry without a message can be seen.
            let mut params: Vec<Value> = vec![part[0].lane.into()];
            params.extend(part.iter().map(|w| Value::from(w.key)));
            let marks = vec!["?"; part.len()].join(", ");
            let sql = format!(
                "SELECT active_key FROM outbox_active_keys FORCE INDEX (PRIMARY) WHERE lane = ? AND active_key IN ({marks}) AND outbox_id = 0"
            );
            for row in tx.query(&sql, &params).await? {
                taken.insert(row.text(0)?);
            }
        }
    }
    Ok(taken)
}

/// Who has a key, and the digest of its payload: the newest answer, whatever the caller's isolation. Locks no message, as
/// that would stop its worker: one that cannot be seen is newer than the caller's snapshot, as its entry here is then too.
pub(crate) async fn holder<T: Tx + ?Sized>(tx: &mut T, lane: &str, key: &str) -> Result<Option<(i64, Vec<u8>)>> {
    let name: [Value; 2] = [lane.into(), key.into()];
    let sql =
        "SELECT outbox_id, payload_sha FROM outbox_active_keys WHERE lane = ? AND active_key = ? LOCK IN SHARE MODE";
    let found = tx.query(sql, &name).await?;
    let Some(row) = found.first() else { return Ok(None) };
    let (id, sha) = (row.int(0)?, row.bytes(1)?.to_vec());
    let seen = tx.query("SELECT 1 FROM outbox WHERE id = ?", &[id.into()]).await?;
    let entry = "SELECT 1 FROM outbox_active_keys WHERE lane = ? AND active_key = ? AND outbox_id = ?";
    if !seen.is_empty() || tx.query(entry, &[lane.into(), key.into(), id.into()]).await?.is_empty() {
        return Ok(Some((id, sha)));
    }
    // Seen without its message, which was taken away by hand: the key is free.
    forget(tx, lane, key, id).await?;
    Ok(None)
}

async fn forget<T: Tx + ?Sized>(tx: &mut T, lane: &str, key: &str, id: i64) -> Result<()> {
    let sql = "DELETE FROM outbox_active_keys WHERE lane = ? AND active_key = ? AND outbox_id = ?";
    tx.execute(sql, &[lane.into(), key.into(), id.into()]).await?;
    Ok(())
}

/// Frees the keys of messages that end. Whoever was told in an open transaction that a key is taken holds a lock on its
/// entry and is not waited for: answers with those, who cannot end yet.
pub(crate) async fn free<T: Tx + ?Sized>(tx: &mut T, lane: &str, ending: &[(i64, String)]) -> Result<HashSet<i64>> {
    let mut kept = HashSet::new();
    for part in ending.chunks(MANY) {
        let mut params: Vec<Value> = vec![lane.into()];
        params.extend(part.iter().map(|(_, key)| Value::from(key)));
        let ids: Vec<i64> = part.iter().map(|(id, _)| *id).collect();
        let which = format!(
            "FORCE INDEX (PRIMARY) WHERE lane = ? AND active_key IN ({}) AND outbox_id {}",
            vec!["?"; part.len()].join(", "),
            in_ids(Dialect::Mysql, &ids, &mut params)
        );
        let entries = format!("SELECT outbox_id FROM outbox_active_keys {which}");
        let got = ids_of(tx, &format!("{entries} FOR UPDATE SKIP LOCKED"), &params).await?;
        if got.len() < part.len() {
            // Held by others; or there is none, as for a message that was written by hand.
            let there = ids_of(tx, &entries, &params).await?;
            kept.extend(there.difference(&got));
        }
        if got.is_empty() {
            continue;
        }
        let free: Vec<&(i64, String)> = part.iter().filter(|(id, _)| got.contains(id)).collect();
        let mut params: Vec<Value> = vec![lane.into()];
        params.extend(free.iter().map(|(_, key)| Value::from(key)));
        let marks = vec!["?"; free.len()].join(", ");
        let sql = format!(
            "DELETE a FROM outbox_active_keys a FORCE INDEX (PRIMARY) WHERE a.lane = ? AND a.active_key IN ({marks})"
        );
        tx.execute(&sql, &params).await?;
    }
    Ok(kept)
}

/// Takes the keys of dead messages that are to come back; answers those that have theirs, or want none.
pub(crate) async fn take_back<T: Tx + ?Sized>(tx: &mut T, ids: &[i64]) -> Result<Vec<i64>> {
    let list = in_ids(Dialect::Mysql, ids, &mut Vec::new());
    let take = format!(
        "INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha)
         SELECT lane, active_key, id, COALESCE(payload_sha, UNHEX(SHA2(payload, 256))) FROM outbox_done
         WHERE id {list} AND status = 'dead' AND active_key IS NOT NULL ORDER BY lane, active_key, id"
    );
    let joined = "outbox_done d LEFT JOIN outbox_active_keys a ON a.lane = d.lane AND a.active_key = d.active_key";
    let ours = format!("SELECT d.id FROM {joined} WHERE d.id {list} AND (d.active_key IS NULL OR a.outbox_id = d.id)");
    tx.execute(&take, &[]).await?;
    let mut back = ids_of(tx, &ours, &[]).await?;
    if back.len() < ids.len() {
        let stale = format!(
            "SELECT a.lane, a.active_key, a.outbox_id FROM {joined} LEFT JOIN outbox o ON o.id = a.outbox_id
             WHERE d.id {list} AND a.outbox_id <> d.id AND o.id IS NULL"
        );
        let of_others = tx.query(&stale, &[]).await?;
        let mut freed = false;
        for row in &of_others {
            let id = row.int(2)?;
            if !ids.contains(&id) {
                forget(tx, &row.text(0)?, &row.text(1)?, id).await?;
                freed = true;
            }
        }
        if freed {
            tx.execute(&take, &[]).await?;
            back = ids_of(tx, &ours, &[]).await?;
        }
    }
    Ok(ids.iter().copied().filter(|id| back.contains(id)).collect())
}

/// Keys that were taken, committed, and are nobody's: the triggers that name them are not there. Whoever comes next takes
/// such a key, whether or not its message lives.
pub(crate) async fn unnamed<T: Tx + ?Sized>(tx: &mut T, limit: u32) -> Result<Vec<(String, String)>> {
    let sql = format!("SELECT lane, active_key FROM outbox_active_keys WHERE outbox_id = 0 LIMIT {limit}");
    tx.query(&sql, &[]).await?.iter().map(|row| Ok((row.text(0)?, row.text(1)?))).collect()
}

/// Gives such keys to their live messages, and frees those of none; what somebody has locked stays as it is. Answers how many.
pub(crate) async fn name_again<T: Tx + ?Sized>(tx: &mut T, keys: &[(String, String)]) -> Result<u64> {
    let mut named = 0;
    for (lane, key) in keys {
        let name: [Value; 2] = [lane.into(), key.into()];
        let which = "outbox_active_keys WHERE lane = ? AND active_key = ? AND outbox_id = 0";
        if tx.query(&format!("SELECT 1 FROM {which} FOR UPDATE SKIP LOCKED"), &name).await?.is_empty() {
            continue;
        }
        named += 1;
        let holder = "SELECT MIN(id) FROM outbox WHERE lane = ? AND active_key = ?";
        let rows = tx.query(holder, &name).await?;
        match rows.first().map(|row| row.opt_int(0)).transpose()?.flatten() {
            None => forget(tx, lane, key, 0).await?,
            Some(id) => {
                let sql =
                    "UPDATE outbox_active_keys SET outbox_id = ? WHERE lane = ? AND active_key = ? AND outbox_id = 0";
                tx.execute(sql, &[id.into(), lane.into(), key.into()]).await?;
            }
        }
    }
    Ok(named)
}

async fn ids_of<T: Tx + ?Sized>(tx: &mut T, sql: &str, params: &[Value]) -> Result<HashSet<i64>> {
    tx.query(sql, params).await?.iter().map(|row| row.int(0)).collect()
}
