//! What the kernel's tables hold of one lane: rows as they are, and their shape without ids and times; and what must never
//! be there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use postrider::error::Kind;
use postrider::store::{Mode, transact};
use postrider::tx::{Dialect, Row, Tx, Value};
use postrider::{OnSettled, Outbox, Timestamp, Winner};
use proving::sweep::{Look, Part};

pub const WITNESS: &str = "CREATE TABLE sweep_witness (lane VARCHAR(64) NOT NULL, id BIGINT NOT NULL, token BIGINT NOT NULL, verdict VARCHAR(32) NOT NULL)";

/// A peer that writes down for whom it was called, in the settle's own transaction.
pub struct Witness;

#[async_trait]
impl OnSettled for Witness {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> postrider::Result<()> {
        for winner in winners {
            let verdict = winner.verdict.flush_code().as_str();
            let row = [(&winner.lane).into(), winner.id.into(), winner.lease_token.into(), verdict.into()];
            tx.execute("INSERT INTO sweep_witness (lane, id, token, verdict) VALUES (?, ?, ?, ?)", &row).await?;
        }
        Ok(())
    }
}

/// Whether a look takes all as one, or message by message; and what of it may differ.
#[derive(Clone, Copy)]
pub struct How {
    pub one_by_one: bool,
    /// Every claim raises the token: asked again, it is one higher.
    pub tokens_matter: bool,
    /// The lane keeps nothing of what was sent, so a key outlives its message.
    pub fleeting: bool,
    /// A table that tells how often it was asked for, and not what came of it.
    pub without: &'static str,
}

/// The tables, each with the id of its message first and its token second, if it has one.
const TABLES: [(&str, &str); 9] = [
    (
        "outbox",
        "SELECT id, lease_token, attempts, crashes, maybe_sent, locked_by, active_key, last_error_code, due_at, lease_until, updated_at
         FROM outbox WHERE lane = ? ORDER BY id",
    ),
    (
        "done",
        "SELECT id, lease_token, attempts, crashes, maybe_sent, status, active_key, result_ref, last_error_code, finished_at
         FROM outbox_done WHERE lane = ? ORDER BY id",
    ),
    ("key", "SELECT outbox_id, NULL, expires_at FROM outbox_keys WHERE lane = ? ORDER BY outbox_id"),
    (
        "attempt",
        "SELECT outbox_id, lease_token, kind, attempt, code, worker FROM outbox_attempts WHERE outbox_id IN (IDS) ORDER BY id",
    ),
    ("dedup", "SELECT outbox_id, NULL, result_ref FROM outbox_dedup WHERE lane = ? ORDER BY outbox_id"),
    ("audit", "SELECT outbox_id, NULL, action, reason, status FROM write_audit WHERE outbox_id IN (IDS) ORDER BY audit_id"),
    ("pause", "SELECT 0, NULL, paused_at FROM outbox_pauses WHERE lane = ?"),
    ("lane", "SELECT 0, NULL, shards FROM outbox_lanes WHERE lane = ?"),
    ("witness", "SELECT id, token, verdict FROM sweep_witness WHERE lane = ? ORDER BY id, token"),
];

const ACTIVE_KEYS: (&str, &str) =
    ("active key", "SELECT outbox_id, NULL, active_key FROM outbox_active_keys WHERE lane = ? ORDER BY outbox_id");

/// Each counts what must not be there.
const NEVER: [(&str, &str); 4] = [
    ("a message is live and done at once", "SELECT COUNT(*) FROM outbox o JOIN outbox_done d ON d.id = o.id WHERE o.lane = ?"),
    (
        "a lease is half",
        "SELECT COUNT(*) FROM outbox WHERE lane = ? AND (locked_by IS NULL AND lease_until IS NOT NULL OR locked_by IS NOT NULL AND lease_until IS NULL)",
    ),
    (
        "on_settled took effect twice",
        "SELECT COUNT(*) FROM (SELECT id FROM sweep_witness WHERE lane = ? GROUP BY id, token HAVING COUNT(*) > 1) twice",
    ),
    (
        "a settle took effect twice",
        "SELECT COUNT(*) FROM (SELECT outbox_id FROM outbox_attempts WHERE outbox_id IN (SELECT id FROM outbox WHERE lane = ?)
         AND kind <> 'takeover' GROUP BY outbox_id, lease_token HAVING COUNT(*) > 1) twice",
    ),
];

const NEVER_KEPT: (&str, &str) = (
    "a key has no message",
    "SELECT COUNT(*) FROM outbox_keys k WHERE k.lane = ? AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.id = k.outbox_id)
     AND NOT EXISTS (SELECT 1 FROM outbox_done d WHERE d.id = k.outbox_id)",
);

const NEVER_ON_MYSQL: [(&str, &str); 2] = [
    (
        "a live message has lost its active key",
        "SELECT COUNT(*) FROM outbox o LEFT JOIN outbox_active_keys k ON k.lane = o.lane AND k.active_key = o.active_key AND k.outbox_id = o.id
         WHERE o.lane = ? AND o.active_key IS NOT NULL AND k.outbox_id IS NULL",
    ),
    (
        "an active key has no live message",
        "SELECT COUNT(*) FROM outbox_active_keys k LEFT JOIN outbox o ON o.id = k.outbox_id WHERE k.lane = ? AND o.id IS NULL",
    ),
];

/// `known` are the messages there were before, which may be gone by now.
pub async fn look(outbox: &Outbox, lane: &str, known: &[i64], how: How) -> Look {
    let work = Arc::new((lane.to_owned(), known.to_vec()));
    for _ in 0..5 {
        let work = work.clone();
        let found = transact(&**outbox.store(), Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move { read(tx, &work.0, &work.1, how).await })
        });
        match found.await {
            Ok(found) => return found,
            Err(error) if matches!(error.kind, Kind::Timeout | Kind::Unreachable | Kind::Overloaded) => {}
            Err(error) => panic!("a look at lane {lane}: {error}"),
        }
    }
    panic!("the server does not answer")
}

async fn read(tx: &mut (dyn Tx + Send), lane: &str, known: &[i64], how: How) -> postrider::Result<Look> {
    let mysql = tx.dialect() == Dialect::Mysql;
    let mut ids: BTreeSet<i64> = known.iter().copied().collect();
    let mut rows: Vec<(&str, Row)> = Vec::new();
    let tables = TABLES.into_iter().chain(mysql.then_some(ACTIVE_KEYS)).filter(|(table, _)| *table != how.without);
    for (table, sql) in tables {
        let list: Vec<String> = ids.iter().chain([&0]).map(i64::to_string).collect();
        let params: Vec<Value> = if sql.contains("IDS") { vec![] } else { vec![lane.into()] };
        for row in tx.query(&sql.replace("IDS", &list.join(",")), &params).await? {
            ids.insert(row.int(0)?);
            rows.push((table, row));
        }
    }
    ids.remove(&0);
    let mut broken = Vec::new();
    let never = NEVER.into_iter().chain((!how.fleeting).then_some(NEVER_KEPT));
    for (what, sql) in never.chain(NEVER_ON_MYSQL.into_iter().filter(|_| mysql)) {
        if tx.query(sql, &[lane.into()]).await?[0].int(0)? > 0 {
            broken.push(what.to_owned());
        }
    }
    let clock = if mysql { "SELECT UTC_TIMESTAMP(6)" } else { "SELECT clock_timestamp()" };
    let now = tx.query(clock, &[]).await?[0].time(0)?;
    Ok(Look { parts: parts(&rows, &ids, how, now)?, tokens: tokens(&rows)?, broken })
}

fn tokens(rows: &[(&str, Row)]) -> postrider::Result<BTreeMap<i64, i64>> {
    let of_messages = rows.iter().filter(|(table, _)| matches!(*table, "outbox" | "done"));
    of_messages.map(|(_, row)| Ok((row.int(0)?, row.int(1)?))).collect()
}

fn parts(rows: &[(&str, Row)], ids: &BTreeSet<i64>, how: How, now: Timestamp) -> postrider::Result<Vec<Part>> {
    let numbers: BTreeMap<i64, usize> = ids.iter().enumerate().map(|(n, id)| (*id, n)).collect();
    let mut parts = vec![Part::default(); if how.one_by_one { ids.len() } else { 1 }];
    for (table, row) in rows {
        let id = row.int(0)?;
        let part = if how.one_by_one { numbers.get(&id).copied().unwrap_or(0) } else { 0 };
        let values = row.0.iter().enumerate().map(|(column, value)| match (column, value) {
            (0, _) => numbers.get(&id).map_or_else(String::new, |n| format!("#{n}")),
            (1, _) if !how.tokens_matter => "token".to_owned(),
            // Of times only how far off they are, roughly.
            (_, Value::Time(time)) => format!("{:+}", (time.micros() - now.micros()).div_euclid(200_000_000)),
            (_, value) => format!("{value:?}"),
        });
        parts[part].shape.push(format!("{table} {}", values.collect::<Vec<_>>().join(" ")));
        parts[part].rows.push(format!("{table} {:?}", row.0));
    }
    Ok(parts)
}
