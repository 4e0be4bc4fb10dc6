//! The whole settle, written once on the `Tx` port: lock, tell the peer, record, move. Stores add a short cut for the
//! one case that is hot (plain `sent` on a lane without peer, audit or dedup); every rule is here.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;

use crate::active_keys;
use crate::audit;
use crate::error::{Error, Result};
use crate::lanes::{LaneRules, Winner};
use crate::lease::Hold;
use crate::message::{cut_code, cut_error};
use crate::outcome::{Certainty, Settled, Settlement, Verdict};
use crate::time::micros_of;
use crate::tx::{Dialect, Row, Tx, Value};

/// Columns that move unchanged from `outbox` to `outbox_done`.
pub(crate) const MOVED: &str = "id, lane, shard_id, due_at, lease_token, locked_by, locked_at, target, active_key, payload, content_type, \
                                headers, payload_sha, correlation_id, created_at, deliver_before";

/// `outbox`, found by primary key and nothing else: in MySQL a scan would lock what others hold.
pub(crate) fn by_id(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Mysql { "outbox FORCE INDEX (PRIMARY)" } else { "outbox" }
}

/// Deletes the rows of these ids, found by the column's index and nothing else: of a small table MySQL would read every row,
/// and wait for those that others have locked.
pub fn delete_by(dialect: Dialect, (table, column): (&str, &str), ids: &[i64], params: &mut Vec<Value>) -> String {
    match dialect {
        Dialect::Mysql => {
            let list: Vec<String> = ids.iter().map(i64::to_string).collect();
            format!(
                "DELETE o FROM JSON_TABLE('[{}]', '$[*]' COLUMNS (id BIGINT PATH '$')) t STRAIGHT_JOIN {table} o ON o.{column} = t.id",
                list.join(",")
            )
        }
        dialect => format!("DELETE FROM {table} WHERE {column} {}", in_ids(dialect, ids, params)),
    }
}

/// `IN (…)` over ids. Binds what it needs; MySQL gets literals (they are numbers) and so no prepared statement per length.
pub fn in_ids(dialect: Dialect, ids: &[i64], params: &mut Vec<Value>) -> String {
    match dialect {
        Dialect::Postgres => {
            params.push(Value::Ints(ids.to_vec()));
            "= ANY(?::bigint[])".to_owned()
        }
        Dialect::Sqlite => {
            params.push(Value::Text(serde_json::json!(ids).to_string()));
            "IN (SELECT value FROM json_each(?))".to_owned()
        }
        Dialect::Mysql if ids.is_empty() => "IN (NULL)".to_owned(),
        Dialect::Mysql => {
            let list: Vec<String> = ids.iter().map(i64::to_string).collect();
            format!("IN ({})", list.join(","))
        }
    }
}

pub fn for_update(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE" }
}

/// Locks what nobody else has locked, and waits for nobody.
pub fn skip_locked(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" }
}

/// Can the store take its short cut for this entry? Yes if recording it means nothing but the move.
pub(crate) fn is_plain_sent(rules: &LaneRules, entry: &Settlement) -> bool {
    rules.on_settled.is_none()
        && !rules.audit
        && !rules.dedup
        && !entry.again
        && !entry.wary
        && entry.trouble.is_none()
        && matches!(entry.verdict, Verdict::Sent { .. })
}

/// Settles entries of one lane in the given transaction. An error means: roll back.
pub(crate) async fn settle(
    tx: &mut (dyn Tx + Send),
    rules: &LaneRules,
    lane: &str,
    owner: &str,
    entries: &[Settlement],
) -> Result<Vec<Settled>> {
    let by_lease: HashMap<i64, usize> = entries.iter().enumerate().map(|(i, e)| (e.lease.id, i)).collect();
    if by_lease.len() != entries.len() {
        return Err(Error::invalid("a message stands twice in one settle"));
    }
    let wants_payload = rules.on_settled.is_some() || rules.audit;
    let is_ours = |row: &Row, entry: &Settlement| -> Result<bool> {
        let hold = Hold { token: row.int(1)?, locked_by: row.opt_text(2)?, ..Hold::default() };
        Ok(hold.accepts(entry.lease.token, owner) && row.text(3)? == lane)
    };
    let rows = lock(tx, entries, wants_payload).await?;
    let mut locked = locked_elsewhere(tx, entries, &rows, &is_ours).await?;
    let mut winners = Vec::with_capacity(rows.len());
    let mut won: Vec<&Settlement> = Vec::with_capacity(rows.len());
    for row in &rows {
        let Some(entry) = by_lease.get(&row.int(0)?).map(|&i| &entries[i]) else { continue };
        if is_ours(row, entry)? {
            winners.push(winner(row, lane, entry)?);
            won.push(entry);
        }
    }
    if tx.dialect() == Dialect::Mysql && entries.iter().any(|entry| entry.wary) {
        let kept = locked_in_indexes(tx, &winners).await?;
        winners.retain(|winner| !kept.contains(&winner.id));
        won.retain(|entry| !kept.contains(&entry.lease.id));
        locked.extend(kept);
    }
    if tx.dialect() == Dialect::Mysql {
        let ending = winners.iter().filter(|w| w.verdict.ends());
        let keys: Vec<_> = ending.filter_map(|w| Some((w.id, w.active_key.clone()?))).collect();
        let kept = active_keys::free(tx, lane, &keys).await?;
        winners.retain(|winner| !kept.contains(&winner.id));
        won.retain(|entry| !kept.contains(&entry.lease.id));
        locked.extend(kept);
    }
    if let Some(peer) = &rules.on_settled
        && !winners.is_empty()
    {
        // A panic would take the connection's thread or the worker's settle with it.
        AssertUnwindSafe(peer.on_settled(tx, &winners)).catch_unwind().await.unwrap_or_else(|panic| {
            Err(Error::database(format!("the part that owns lane `{lane}` {}", crate::error::panicked(&*panic))))
        })?;
    }
    if rules.audit {
        audit::outcomes(tx, owner, &winners, &won).await?;
    }
    record_retries(tx, &won).await?;
    record_ends(tx, rules, &won).await?;
    if rules.history {
        record_attempts(tx, owner, &winners).await?;
    }
    if rules.dedup {
        remember_content(tx, &won).await?;
    }

    let mut answers = vec![Settled::LeaseLost; entries.len()];
    for entry in &won {
        answers[by_lease[&entry.lease.id]] = Settled::Applied;
    }
    let mut conflicts = Vec::new();
    for (answer, entry) in answers.iter_mut().zip(entries).filter(|(a, _)| **a == Settled::LeaseLost) {
        if locked.contains(&entry.lease.id) {
            *answer = Settled::Locked;
            continue;
        }
        if entry.again {
            *answer = judge_again(tx, entry).await?;
        }
        if *answer == Settled::LeaseLost {
            conflicts.push((entry.lease, entry.verdict.flush_code()));
        }
    }
    audit::conflicts(tx, owner, &conflicts).await?;
    Ok(answers)
}

async fn lock(tx: &mut (dyn Tx + Send), entries: &[Settlement], wants_payload: bool) -> Result<Vec<Row>> {
    let mut ids: Vec<i64> = entries.iter().map(|e| e.lease.id).collect();
    ids.sort_unstable();
    let dialect = tx.dialect();
    let mut params = Vec::new();
    let list = in_ids(dialect, &ids, &mut params);
    let payload = if wants_payload { "payload" } else { "NULL" };
    let sql = format!(
        "SELECT id, lease_token, locked_by, lane, attempts, maybe_sent, target, active_key, correlation_id, {payload}
         FROM {} WHERE id {list} ORDER BY id{}",
        by_id(dialect),
        skip_locked(dialect)
    );
    tx.query(&sql, &params).await
}

/// Of the entries whose rows were not got: those that are still ours, so that somebody else must have them locked.
async fn locked_elsewhere(
    tx: &mut (dyn Tx + Send),
    entries: &[Settlement],
    got: &[Row],
    is_ours: &(dyn Fn(&Row, &Settlement) -> Result<bool> + Sync),
) -> Result<HashSet<i64>> {
    let got: HashSet<i64> = got.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    let missing: HashMap<i64, &Settlement> =
        entries.iter().filter(|e| !got.contains(&e.lease.id)).map(|e| (e.lease.id, e)).collect();
    let mut locked = HashSet::new();
    if missing.is_empty() || tx.dialect() == Dialect::Sqlite {
        return Ok(locked);
    }
    let mut params = Vec::new();
    let ids: Vec<i64> = missing.keys().copied().collect();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    let table = by_id(tx.dialect());
    let sql = format!("SELECT id, lease_token, locked_by, lane FROM {table} WHERE id {list}");
    for row in tx.query(&sql, &params).await? {
        let id = row.int(0)?;
        if is_ours(&row, missing[&id])? {
            locked.insert(id);
        }
    }
    Ok(locked)
}

/// MySQL: who reads by an index alone, with a lock, locks its entries and not the rows. Those of messages that move would be
/// waited for: answers with these.
async fn locked_in_indexes(tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<HashSet<i64>> {
    let mut kept: HashSet<i64> = winners.iter().map(|winner| winner.id).collect();
    let ids: Vec<i64> = winners.iter().map(|winner| winner.id).collect();
    for part in ids.chunks(100) {
        let list = in_ids(Dialect::Mysql, part, &mut Vec::new());
        let places =
            format!("SELECT lane, shard_id, due_at, id, active_key FROM {} WHERE id {list}", by_id(Dialect::Mysql));
        let places = tx.query(&places, &[]).await?;
        let mut free: Option<HashSet<i64>> = None;
        for (index, columns) in
            [("idx_claim", "shard_id = ? AND due_at = ?"), ("idx_outbox_active_key", "active_key <=> ?")]
        {
            let mut params: Vec<Value> = Vec::new();
            for row in &places {
                params.push(row.text(0)?.into());
                match index {
                    "idx_claim" => params.extend([row.int(1)?.into(), row.time(2)?.into()]),
                    _ => params.push(row.opt_text(4)?.into()),
                }
                params.push(row.int(3)?.into());
            }
            let each = vec![format!("(lane = ? AND {columns} AND id = ?)"); places.len()].join(" OR ");
            let sql = format!("SELECT id FROM outbox FORCE INDEX ({index}) WHERE {each} FOR UPDATE SKIP LOCKED");
            let found: HashSet<i64> =
                tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
            free = Some(free.map_or(found.clone(), |before| before.intersection(&found).copied().collect()));
        }
        kept.retain(|id| !free.as_ref().is_some_and(|free| free.contains(id)));
    }
    Ok(kept)
}

fn winner(row: &Row, lane: &str, entry: &Settlement) -> Result<Winner> {
    Ok(Winner {
        id: row.int(0)?,
        lane: lane.to_owned(),
        lease_token: row.int(1)?,
        attempts: row.int(4)? as u32,
        maybe_sent: row.bool(5)?,
        target: row.opt_text(6)?,
        active_key: row.opt_text(7)?,
        correlation_id: row.opt_text(8)?,
        payload: row.opt_bytes(9)?.unwrap_or_default(),
        verdict: entry.verdict.clone(),
    })
}

/// The new value of `maybe_sent`, as SQL.
fn certainty_sql(dialect: Dialect, certainty: Certainty) -> &'static str {
    match (certainty, dialect) {
        (Certainty::Unchanged, _) => "maybe_sent",
        (Certainty::MaybeSent, Dialect::Postgres) => "TRUE",
        (Certainty::Resolved, Dialect::Postgres) => "FALSE",
        (Certainty::MaybeSent, _) => "1",
        (Certainty::Resolved, _) => "0",
    }
}

fn changed_one(changed: u64, what: &str, id: i64) -> Result<()> {
    if changed == 1 { Ok(()) } else { Err(Error::database(format!("{what} of message {id} changed {changed} rows"))) }
}

async fn record_retries(tx: &mut (dyn Tx + Send), won: &[&Settlement]) -> Result<()> {
    for entry in won {
        let Verdict::Retry { delay, code, error, certainty } = &entry.verdict else { continue };
        let mut params = Vec::with_capacity(6);
        let due = tx.now().plus(micros_of(*delay), &mut params);
        let now = tx.now().plus(0, &mut params);
        params.extend([cut_code(code).into(), cut_error(error).into(), entry.lease.id.into()]);
        let maybe_sent = certainty_sql(tx.dialect(), *certainty);
        let sql = format!(
            "UPDATE outbox SET due_at = {due}, updated_at = {now}, attempts = attempts + 1, crashes = 0, maybe_sent = {maybe_sent},
                    last_error_code = ?, last_error = ?, locked_by = NULL, locked_at = NULL, lease_until = NULL WHERE id = ?"
        );
        changed_one(tx.execute(&sql, &params).await?, "the retry", entry.lease.id)?;
    }
    Ok(())
}

/// Moves what has ended. `sent` rows without a reference go together, the rest one by one: each has its own words.
async fn record_ends(tx: &mut (dyn Tx + Send), rules: &LaneRules, won: &[&Settlement]) -> Result<()> {
    let keep_sent = rules.history && !rules.retention.is_zero();
    let is_bare_sent = |e: &&&Settlement| matches!(e.verdict, Verdict::Sent { result_ref: None, .. });
    let bare: Vec<i64> = won.iter().filter(is_bare_sent).map(|e| e.lease.id).collect();
    if keep_sent && !bare.is_empty() {
        let moved =
            insert_done(tx, &bare, "sent", None, "attempts", "last_error_code, last_error", "maybe_sent", &[]).await?;
        if moved != bare.len() as u64 {
            return Err(Error::database(format!("{moved} of {} sent messages were moved", bare.len())));
        }
    }
    for entry in won.iter().filter(|e| e.verdict.ends() && !is_bare_sent(e)) {
        let id = [entry.lease.id];
        let moved = match &entry.verdict {
            Verdict::Sent { result_ref, .. } if keep_sent => {
                let words = result_ref.as_deref().map(cut_error);
                insert_done(tx, &id, "sent", words, "attempts", "last_error_code, last_error", "maybe_sent", &[])
                    .await?
            }
            Verdict::Dead { code, error, certainty, counted } if rules.history => {
                let words = [cut_code(code).into(), cut_error(error).into()];
                let attempts = if *counted { "attempts + 1" } else { "attempts" };
                let errors = if tx.dialect() == Dialect::Postgres { "?::text, ?::text" } else { "?, ?" };
                let maybe_sent = certainty_sql(tx.dialect(), *certainty);
                insert_done(tx, &id, "dead", None, attempts, errors, maybe_sent, &words).await?
            }
            _ => 1,
        };
        changed_one(moved, "the move", entry.lease.id)?;
    }
    let ended: Vec<i64> = won.iter().filter(|e| e.verdict.ends()).map(|e| e.lease.id).collect();
    let sent = won.iter().filter(|e| matches!(e.verdict, Verdict::Sent { .. })).map(|e| e.lease.id);
    let forgotten = if rules.history { sent.collect() } else { ended.clone() };
    forget_attempts(tx, rules, forgotten).await?;
    if !ended.is_empty() {
        let mut params = Vec::new();
        let sql = delete_by(tx.dialect(), ("outbox", "id"), &ended, &mut params);
        let gone = tx.execute(&sql, &params).await?;
        if gone != ended.len() as u64 {
            return Err(Error::database(format!("{gone} of {} ended messages were taken out", ended.len())));
        }
    }
    Ok(())
}

/// A lane that keeps nothing of what was sent keeps no history of it either.
async fn forget_attempts(tx: &mut (dyn Tx + Send), rules: &LaneRules, ids: Vec<i64>) -> Result<()> {
    if (rules.history && !rules.retention.is_zero()) || ids.is_empty() {
        return Ok(());
    }
    let mut params = Vec::new();
    let sql = delete_by(tx.dialect(), ("outbox_attempts", "outbox_id"), &ids, &mut params);
    tx.execute(&sql, &params).await.map(drop)
}

#[allow(clippy::too_many_arguments)]
async fn insert_done(
    tx: &mut (dyn Tx + Send),
    ids: &[i64],
    status: &str,
    result_ref: Option<String>,
    attempts: &str,
    errors: &str,
    maybe_sent: &str,
    error_words: &[Value],
) -> Result<u64> {
    let mut params: Vec<Value> = error_words.to_vec();
    let reference = match (tx.dialect(), result_ref) {
        (_, None) => "NULL",
        (dialect, Some(words)) => {
            params.push(words.into());
            if dialect == Dialect::Postgres { "?::text" } else { "?" }
        }
    };
    let updated = tx.now().plus(0, &mut params);
    let finished = tx.now().plus(0, &mut params);
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql = format!(
        "INSERT INTO outbox_done ({MOVED}, attempts, last_error_code, last_error, maybe_sent, result_ref, status, crashes, updated_at, finished_at)
         SELECT {MOVED}, {attempts}, {errors}, {maybe_sent}, {reference}, '{status}', crashes, {updated}, {finished}
         FROM outbox WHERE id {list}"
    );
    tx.execute(&sql, &params).await
}

/// Attempts that did not simply succeed; also the proof, if our answer is lost, that the record is ours.
async fn record_attempts(tx: &mut (dyn Tx + Send), owner: &str, winners: &[Winner]) -> Result<()> {
    for winner in winners {
        let (kind, code, error, counted) = match &winner.verdict {
            Verdict::Sent { .. } => continue,
            Verdict::Retry { code, error, .. } => ("retry", code, error, true),
            Verdict::Dead { code, error, counted, .. } => ("dead", code, error, *counted),
        };
        let attempt = winner.attempts + u32::from(counted);
        record_attempt(tx, winner.id, winner.lease_token, kind, attempt, Some((code, error)), owner).await?;
    }
    Ok(())
}

pub(crate) async fn record_attempt(
    tx: &mut (dyn Tx + Send),
    id: i64,
    token: i64,
    kind: &str,
    attempt: u32,
    words: Option<(&str, &str)>,
    worker: &str,
) -> Result<()> {
    let mut params = vec![
        id.into(),
        token.into(),
        kind.into(),
        attempt.into(),
        words.map(|w| cut_code(w.0)).into(),
        words.map(|w| cut_error(w.1)).into(),
        worker.into(),
    ];
    let at = tx.now().plus(0, &mut params);
    let sql = format!(
        "INSERT INTO outbox_attempts (outbox_id, lease_token, kind, attempt, code, error, worker, at) VALUES (?, ?, ?, ?, ?, ?, ?, {at})"
    );
    tx.execute(&sql, &params).await?;
    Ok(())
}

/// On lanes with dedup: what was sent, by content.
async fn remember_content(tx: &mut (dyn Tx + Send), won: &[&Settlement]) -> Result<()> {
    for entry in won {
        let Verdict::Sent { dedup_hit: false, .. } = &entry.verdict else { continue };
        let sql = "INSERT INTO outbox_dedup (lane, payload_sha, target, outbox_id, result_ref, sent_at)
                   SELECT lane, payload_sha, target, id, result_ref, finished_at FROM outbox_done WHERE id = ? AND payload_sha IS NOT NULL";
        tx.execute(sql, &[entry.lease.id.into()]).await?;
    }
    Ok(())
}

/// An earlier settle of this entry got no answer, and the lease is gone. Was that us?
async fn judge_again(tx: &mut (dyn Tx + Send), entry: &Settlement) -> Result<Settled> {
    let lease: [Value; 2] = [entry.lease.id.into(), entry.lease.token.into()];
    let proof = match entry.verdict {
        Verdict::Sent { .. } => "SELECT 1 FROM outbox_done WHERE id = ? AND lease_token = ? AND status = 'sent'",
        Verdict::Retry { .. } => {
            "SELECT 1 FROM outbox_attempts WHERE outbox_id = ? AND lease_token = ? AND kind = 'retry'"
        }
        Verdict::Dead { .. } => {
            "SELECT 1 FROM outbox_attempts WHERE outbox_id = ? AND lease_token = ? AND kind = 'dead'"
        }
    };
    if !tx.query(proof, &lease).await?.is_empty() {
        return Ok(Settled::Applied);
    }
    // Gone without a trace: the lane keeps none, or what was kept is past its retention by now.
    let anywhere = "SELECT 1 FROM outbox WHERE id = ? UNION ALL SELECT 1 FROM outbox_done WHERE id = ?";
    if tx.query(anywhere, &[entry.lease.id.into(), entry.lease.id.into()]).await?.is_empty() {
        return Ok(Settled::Unknown);
    }
    Ok(Settled::LeaseLost)
}
