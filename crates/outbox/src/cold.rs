//! The verbs that are not hot, written once on the `Tx` port: renew, defer, wake, seize, prune, dedup.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::lanes::Lanes;
use crate::lease::{Hold, LAST_TOKEN, Lease};
use crate::message::{Sha, cut_code};
use crate::outcome::{GiveBack, LeaseState, code};
use crate::permit::{permit, withdraw_permit};
use crate::settle::{by_id, delete_by, for_update, in_ids, skip_locked};
use crate::store::{Prune, Pruned, Retried};
use crate::time::{Timestamp, micros_of};
use crate::tx::{Dialect, Row, Tx, Value};

/// What became of each lease: those whose `keep` test passes are locked by now. A row that somebody else has locked is
/// not waited for: one forgotten session would cost all the others their leases.
async fn lock_held(
    tx: &mut (dyn Tx + Send),
    leases: &[Lease],
    keep: impl Fn(&Hold, i64, Timestamp) -> bool + Send + Sync,
) -> Result<Vec<LeaseState>> {
    let mut ids = ids_of(leases);
    ids.sort_unstable();
    let lock = keep_locked(tx.dialect());
    let rows = hold_rows(tx, &ids, lock).await?;
    let got: HashSet<i64> = rows.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    let missing: Vec<i64> = ids.into_iter().filter(|id| !got.contains(id)).collect();
    let others = if missing.is_empty() { vec![] } else { hold_rows(tx, &missing, "").await? };
    let mut states: HashMap<Lease, LeaseState> = HashMap::with_capacity(leases.len());
    for (rows, state) in [(rows, LeaseState::Held), (others, LeaseState::Locked)] {
        for row in rows {
            let (id, now) = (row.int(0)?, row.time(4)?);
            let (token, locked_by, lease_until) = (row.int(1)?, row.opt_text(2)?, row.opt_time(3)?);
            let hold = Hold { token, locked_by, lease_until, ..Hold::default() };
            let kept = leases.iter().filter(|lease| lease.id == id && keep(&hold, lease.token, now));
            states.extend(kept.map(|lease| (*lease, state)));
        }
    }
    Ok(leases.iter().map(|lease| states.get(lease).copied().unwrap_or(LeaseState::Lost)).collect())
}

/// As `skip_locked`, for what changes a row and leaves it where it is. PostgreSQL: somebody whose own row refers to it, or is
/// about to, has a lock that a claim passes; so must what keeps a claim.
fn keep_locked(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { " FOR NO KEY UPDATE SKIP LOCKED" } else { skip_locked(dialect) }
}

async fn hold_rows(tx: &mut (dyn Tx + Send), ids: &[i64], lock: &str) -> Result<Vec<Row>> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let list = in_ids(tx.dialect(), ids, &mut params);
    let table = by_id(tx.dialect());
    let sql =
        format!("SELECT id, lease_token, locked_by, lease_until, {now} FROM {table} WHERE id {list} ORDER BY id{lock}");
    tx.query(&sql, &params).await
}

fn ids_of(leases: &[Lease]) -> Vec<i64> {
    leases.iter().map(|l| l.id).collect()
}

fn held_of(leases: &[Lease], states: &[LeaseState]) -> Vec<i64> {
    let held = leases.iter().zip(states).filter(|(_, state)| **state == LeaseState::Held);
    held.map(|(lease, _)| lease.id).collect()
}

pub(crate) async fn renew(
    tx: &mut (dyn Tx + Send),
    owner: &str,
    leases: &[Lease],
    lease: Duration,
) -> Result<Vec<LeaseState>> {
    let states = lock_held(tx, leases, |hold, token, now| hold.renewable(token, owner, now)).await?;
    let held = held_of(leases, &states);
    if !held.is_empty() {
        let mut params = Vec::new();
        let until = tx.now().plus(micros_of(lease), &mut params);
        // Whoever looks for work that is stuck goes by when it was last locked.
        let (locked, updated) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
        let list = in_ids(tx.dialect(), &held, &mut params);
        let sql = format!(
            "UPDATE {} SET lease_until = {until}, locked_at = {locked}, updated_at = {updated} WHERE id {list}",
            by_id(tx.dialect())
        );
        tx.execute(&sql, &params).await?;
    }
    Ok(states)
}

/// Notes that the first byte is about to go out, on leases that still run; or that it did not after all.
pub(crate) async fn begin(tx: &mut (dyn Tx + Send), owner: &str, lease: Lease, begun: bool) -> Result<bool> {
    let states = lock_held(tx, &[lease], |hold, token, now| hold.renewable(token, owner, now)).await?;
    if states.contains(&LeaseState::Locked) {
        return Err(Error::new(Kind::Locked, format!("somebody else has message {} locked", lease.id)));
    }
    let held = states.contains(&LeaseState::Held);
    if held {
        tx.execute("UPDATE outbox SET maybe_sent = ? WHERE id = ?", &[begun.into(), lease.id.into()]).await?;
    }
    Ok(held)
}

pub(crate) async fn defer(
    tx: &mut (dyn Tx + Send),
    owner: &str,
    leases: &[Lease],
    how: &GiveBack,
) -> Result<Vec<LeaseState>> {
    let states = lock_held(tx, leases, |hold, token, _| hold.accepts(token, owner)).await?;
    let held = held_of(leases, &states);
    if !held.is_empty() {
        let mut params = Vec::new();
        let due = tx.now().plus(micros_of(how.delay), &mut params);
        let now = tx.now().plus(0, &mut params);
        let why = if how.code.is_some() { ", last_error_code = ?" } else { "" };
        params.extend(how.code.as_ref().map(|code| cut_code(code).into()));
        let unsure = if !how.maybe_sent {
            ""
        } else if tx.dialect() == Dialect::Postgres {
            ", maybe_sent = TRUE"
        } else {
            ", maybe_sent = 1"
        };
        let list = in_ids(tx.dialect(), &held, &mut params);
        let sql = format!(
            "UPDATE {} SET due_at = {due}, updated_at = {now}, locked_by = NULL, locked_at = NULL, lease_until = NULL{why}{unsure} WHERE id {list}",
            by_id(tx.dialect())
        );
        tx.execute(&sql, &params).await?;
        if how.code.as_deref() == Some(code::SHUTDOWN) {
            record_broken_off(tx, owner, &held).await?;
        }
    }
    Ok(states)
}

/// Deliveries that a stop broke off count as no attempt, but what may arrive once more has the reason in its history.
async fn record_broken_off(tx: &mut (dyn Tx + Send), owner: &str, ids: &[i64]) -> Result<()> {
    let mut params = vec![code::SHUTDOWN.into(), owner.into()];
    let at = tx.now().plus(0, &mut params);
    let list = in_ids(tx.dialect(), ids, &mut params);
    let sql = format!(
        "INSERT INTO outbox_attempts (outbox_id, lease_token, kind, attempt, code, worker, at)
         SELECT id, lease_token, 'retry', attempts, ?, ?, {at} FROM {} WHERE id {list}",
        by_id(tx.dialect())
    );
    tx.execute(&sql, &params).await.map(drop)
}

/// Makes waiting messages due now. One that somebody else has locked is left as it is.
pub(crate) async fn wake(tx: &mut (dyn Tx + Send), lane: &str, active_keys: &[String]) -> Result<u64> {
    let skip = skip_locked(tx.dialect());
    let mut woken = 0;
    for key in active_keys {
        let mut params = vec![lane.into(), key.into()];
        let now = tx.now().plus(0, &mut params);
        let waits = format!(
            "SELECT id FROM outbox WHERE lane = ? AND active_key = ? AND locked_by IS NULL AND due_at > {now}{skip}"
        );
        let Some(row) = tx.query(&waits, &params).await?.into_iter().next() else { continue };
        let mut params = Vec::new();
        let due = tx.now().plus(0, &mut params);
        params.push(row.int(0)?.into());
        woken += tx.execute(&format!("UPDATE outbox SET due_at = {due} WHERE id = ?"), &params).await?;
    }
    Ok(woken)
}

/// Makes messages of a lane that wait unheld for a later time due now, at most so many; answers how many.
pub(crate) async fn wake_waiting(
    tx: &mut (dyn Tx + Send),
    lane: &str,
    shards: u32,
    codes: Option<&[String]>,
    limit: usize,
) -> Result<usize> {
    let mut ids = Vec::new();
    let only =
        codes.map_or(String::new(), |codes| format!(" AND last_error_code IN ({})", vec!["?"; codes.len()].join(", ")));
    let skip = if tx.dialect() == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" };
    for shard in 0..shards {
        let mut params: Vec<Value> = vec![lane.into(), shard.into()];
        let now = tx.now().bound(0, &mut params);
        let sql = format!(
            "SELECT id FROM outbox WHERE lane = ? AND shard_id = ? AND due_at > {now} AND locked_by IS NULL{only}
             ORDER BY due_at, id LIMIT {}{skip}",
            limit - ids.len()
        );
        params.extend(codes.into_iter().flatten().map(Value::from));
        for row in tx.query(&sql, &params).await? {
            ids.push(row.int(0)?);
        }
        if ids.len() == limit {
            break;
        }
    }
    if !ids.is_empty() {
        let mut params = Vec::new();
        let now = tx.now().plus(0, &mut params);
        let list = in_ids(tx.dialect(), &ids, &mut params);
        let sql = format!("UPDATE {} SET due_at = {now} WHERE id {list}", by_id(tx.dialect()));
        tx.execute(&sql, &params).await?;
    }
    Ok(ids.len())
}

/// Makes one waiting message due now. One that somebody else has locked is left as it is.
pub(crate) async fn retry(tx: &mut (dyn Tx + Send), id: i64, lanes: &Lanes, owns: Option<&str>) -> Result<Retried> {
    let live = "SELECT lane, locked_by FROM outbox WHERE id = ?";
    let Some(row) = tx.query(live, &[id.into()]).await?.into_iter().next() else { return Ok(Retried::Ended) };
    lanes.permit(&row.text(0)?, owns)?;
    let skip = skip_locked(tx.dialect());
    let waits = format!("SELECT id FROM outbox WHERE id = ? AND locked_by IS NULL{skip}");
    if tx.query(&waits, &[id.into()]).await?.is_empty() {
        return Ok(Retried::Leased);
    }
    let mut params = Vec::new();
    let (due, updated) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
    params.push(id.into());
    let later = tx.now().plus(0, &mut params);
    let sql = format!("UPDATE outbox SET due_at = {due}, updated_at = {updated} WHERE id = ? AND due_at > {later}");
    tx.execute(&sql, &params).await?;
    Ok(Retried::Retried)
}

/// Pauses a lane or resumes it; answers whether that changed anything.
pub(crate) async fn pause(tx: &mut (dyn Tx + Send), lane: &str, paused: bool) -> Result<bool> {
    if !paused {
        return Ok(tx.execute("DELETE FROM outbox_pauses WHERE lane = ?", &[lane.into()]).await? > 0);
    }
    let (verb, tail) = match tx.dialect() {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT DO NOTHING"),
    };
    let mut params = vec![lane.into()];
    let now = tx.now().plus(0, &mut params);
    let sql = format!("{verb} INTO outbox_pauses (lane, paused_at) VALUES (?, {now}){tail}");
    Ok(tx.execute(&sql, &params).await? > 0)
}

pub(crate) async fn paused(tx: &mut (dyn Tx + Send)) -> Result<Vec<String>> {
    tx.query("SELECT lane FROM outbox_pauses ORDER BY lane", &[]).await?.iter().map(|row| row.text(0)).collect()
}

pub(crate) async fn seize(
    tx: &mut (dyn Tx + Send),
    owner: &str,
    ids: &[i64],
    lease: Duration,
    wanted: &(dyn Fn(&str, Option<&str>) -> bool + Send + Sync),
) -> Result<Vec<(String, Lease)>> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    let dialect = tx.dialect();
    let mut params = Vec::new();
    let list = in_ids(dialect, &ids, &mut params);
    let sql = format!(
        "SELECT id, lease_token, lane, locked_by FROM {} WHERE id {list} ORDER BY id{}",
        by_id(dialect),
        for_update(dialect)
    );
    let rows = tx.query(&sql, &params).await?;
    let mut leases = Vec::with_capacity(rows.len());
    for row in rows {
        let lane = row.text(2)?;
        // One that a hand has written cannot rise any more; the doctor tells of it.
        let token = row.int(1)?;
        if token < LAST_TOKEN && wanted(&lane, row.opt_text(3)?.as_deref()) {
            leases.push((lane, Lease { id: row.int(0)?, token: token + 1 }));
        }
    }
    let found: Vec<i64> = leases.iter().map(|(_, l)| l.id).collect();
    if !found.is_empty() {
        let truth = if dialect == Dialect::Postgres { "TRUE" } else { "1" };
        let mut params = Vec::new();
        let until = tx.now().plus(micros_of(lease), &mut params);
        let now = tx.now().plus(0, &mut params);
        params.push(owner.into());
        let list = in_ids(dialect, &found, &mut params);
        // `maybe_sent` before `locked_by`: MySQL assigns from left to right.
        let sql = format!(
            "UPDATE {} SET maybe_sent = CASE WHEN locked_by IS NULL THEN maybe_sent ELSE {truth} END,
                    lease_token = lease_token + 1, lease_until = {until}, locked_at = {now}, locked_by = ? WHERE id {list}",
            by_id(dialect)
        );
        tx.execute(&sql, &params).await?;
    }
    Ok(leases)
}

/// Every lane ever registered, configured here or not.
pub(crate) async fn lane_names(tx: &mut (dyn Tx + Send)) -> Result<Vec<String>> {
    tx.query("SELECT lane FROM outbox_lanes ORDER BY lane", &[]).await?.iter().map(|row| row.text(0)).collect()
}

/// One bounded batch of one lane: lock done rows, delete exactly those.
pub(crate) async fn prune(tx: &mut (dyn Tx + Send), lane: &str, prune: &Prune) -> Result<Pruned> {
    let dialect = tx.dialect();
    let skip = if dialect == Dialect::Sqlite || prune.dry_run { "" } else { " FOR UPDATE SKIP LOCKED" };
    let mut ids = Vec::new();
    let mut messages = 0;
    // Status by status, so that each is a range on `idx_done`.
    for status in ["sent", "dead"] {
        let mut params = vec![lane.into()];
        let old = tx.now().bound(-micros_of(prune.older_than), &mut params);
        let what = if prune.dry_run { "COUNT(*)" } else { "id" };
        let limit = if prune.dry_run {
            String::new()
        } else {
            format!(" ORDER BY finished_at LIMIT {}", prune.limit as usize - ids.len())
        };
        let sql = format!(
            "SELECT {what} FROM outbox_done WHERE lane = ? AND status = '{status}' AND finished_at < {old}{limit}{skip}"
        );
        let rows = tx.query(&sql, &params).await?;
        if prune.dry_run {
            messages += rows.first().map(|r| r.int(0)).transpose()?.unwrap_or(0) as u64;
        } else {
            for row in rows {
                ids.push(row.int(0)?);
            }
        }
    }
    ids.sort_unstable();
    if !ids.is_empty() {
        permit(tx, "prune").await?;
        for of in [
            ("outbox_done", "id"),
            ("outbox_attempts", "outbox_id"),
            ("outbox_dedup", "outbox_id"),
            ("postrider_former_keys", "outbox_id"),
        ] {
            let mut params = Vec::new();
            let sql = delete_by(dialect, of, &ids, &mut params);
            let gone = tx.execute(&sql, &params).await?;
            if of.0 == "outbox_done" {
                messages = gone;
            }
        }
        withdraw_permit(tx).await?;
    }
    Ok(Pruned { messages, keys: prune_keys(tx, lane, prune).await? })
}

/// Audits older than this go, the oldest first, one bounded batch at a time; answers how many. Those without an end stay.
pub(crate) async fn prune_audit(tx: &mut (dyn Tx + Send), older_than: Duration, limit: u32) -> Result<usize> {
    let old = clock(tx).await?.minus(older_than);
    let sql = format!(
        "SELECT audit_id FROM (SELECT audit_id, created_at FROM write_audit WHERE status <> 'pending' ORDER BY audit_id LIMIT {limit}) oldest
         WHERE created_at < ?"
    );
    let ids: Vec<i64> = tx.query(&sql, &[old.into()]).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    if !ids.is_empty() {
        let mut params = Vec::new();
        let sql = delete_by(tx.dialect(), ("write_audit", "audit_id"), &ids, &mut params);
        tx.execute(&sql, &params).await?;
    }
    Ok(ids.len())
}

/// What the database's clock says.
pub(crate) async fn clock(tx: &mut (dyn Tx + Send)) -> Result<Timestamp> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let rows = tx.query(&format!("SELECT {now}"), &params).await?;
    rows.first().map_or(Ok(Timestamp::default()), |row| row.time(0))
}

/// Pages of keys that are over looked at for those whose message has ended.
const KEY_PAGES: usize = 10;

/// Keys go by their own expiry, the oldest first, never while their message is live. Where very many are over and live, as
/// in a lane that was paused for long, the others wait for them.
async fn prune_keys(tx: &mut (dyn Tx + Send), lane: &str, prune: &Prune) -> Result<u64> {
    let dialect = tx.dialect();
    let column = if dialect == Dialect::Mysql { "`key`" } else { "key" };
    // As a value: PostgreSQL then knows how few keys are over, and takes the index that tells which.
    let params: Vec<Value> = vec![lane.into(), clock(tx).await?.into()];
    let expired = "FROM outbox_keys WHERE lane = ? AND expires_at < ?";
    if prune.dry_run {
        let ended = "AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.id = outbox_keys.outbox_id)";
        let rows = tx.query(&format!("SELECT COUNT(*) {expired} {ended}"), &params).await?;
        return Ok(rows.first().map(|row| row.int(0)).transpose()?.unwrap_or(0) as u64);
    }
    let skip = if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" };
    let (mut gone, mut live) = (0, 0);
    for _ in 0..KEY_PAGES {
        let limit = u64::from(prune.limit) - gone;
        let sql = format!("SELECT {column}, outbox_id {expired} ORDER BY expires_at LIMIT {limit} OFFSET {live}{skip}");
        let rows = tx.query(&sql, &params).await?;
        let ids: Vec<i64> = rows.iter().map(|row| row.int(1)).collect::<Result<_>>()?;
        let mut listed = Vec::new();
        let list = in_ids(dialect, &ids, &mut listed);
        let found = tx.query(&format!("SELECT id FROM outbox WHERE id {list}"), &listed).await?;
        let found: HashSet<i64> = found.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
        for (row, id) in rows.iter().zip(&ids) {
            if found.contains(id) {
                live += 1;
                continue;
            }
            let sql = format!("DELETE FROM outbox_keys WHERE lane = ? AND {column} = ? AND expires_at < ?");
            gone += tx.execute(&sql, &[params[0].clone(), row.0[0].clone(), params[1].clone()]).await?;
        }
        if (rows.len() as u64) < limit || gone >= u64::from(prune.limit) {
            break;
        }
    }
    Ok(gone)
}

/// `Some(result_ref)` per probe whose content was delivered before, within retention.
pub(crate) async fn check_dedup(
    tx: &mut (dyn Tx + Send),
    lane: &str,
    retention: Duration,
    probes: &[(Option<String>, Sha)],
) -> Result<Vec<Option<Option<String>>>> {
    let mut hits = Vec::with_capacity(probes.len());
    for (target, sha) in probes {
        let mut params = vec![lane.into(), sha.as_slice().into()];
        let since = tx.now().bound(-micros_of(retention), &mut params);
        let target_is = if target.is_some() { "target = ?" } else { "target IS NULL" };
        params.extend(target.as_ref().map(Value::from));
        let sql = format!(
            "SELECT result_ref FROM outbox_dedup WHERE lane = ? AND payload_sha = ? AND sent_at >= {since} AND {target_is}
             ORDER BY outbox_id LIMIT 1"
        );
        hits.push(tx.query(&sql, &params).await?.first().map(|row| row.opt_text(0)).transpose()?);
    }
    Ok(hits)
}

/// Whose word counts about lanes that are registered already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Register {
    /// Ours: we serve them.
    All,
    /// Theirs who registered them: a command with another configuration only looks, or writes a message.
    Missing,
}

/// Tells the database the lanes' rules, for SQL clients. Fewer shards strand nothing: workers find what lies beyond.
pub(crate) async fn register_lanes(tx: &mut (dyn Tx + Send), lanes: &Lanes, how: Register) -> Result<()> {
    for (lane, rules) in lanes.iter() {
        let known = tx
            .query(
                "SELECT shards, max_payload_bytes, key_ttl_sec, owned_by FROM outbox_lanes WHERE lane = ?",
                &[lane.into()],
            )
            .await?;
        let key_ttl_sec = micros_of(rules.key_ttl) / 1_000_000;
        let wanted: [Value; 4] =
            [rules.shards.into(), (rules.max_payload_bytes as i64).into(), key_ttl_sec.into(), rules.owned_by.into()];
        let Some(row) = known.first() else {
            let mut params: Vec<Value> = vec![lane.into()];
            params.extend(wanted);
            let ignore = match tx.dialect() {
                Dialect::Mysql => ("INSERT IGNORE", ""),
                _ => ("INSERT", " ON CONFLICT DO NOTHING"),
            };
            let sql = format!(
                "{} INTO outbox_lanes (lane, shards, max_payload_bytes, key_ttl_sec, owned_by) VALUES (?, ?, ?, ?, ?){}",
                ignore.0, ignore.1
            );
            tx.execute(&sql, &params).await?;
            continue;
        };
        if how == Register::Missing {
            continue;
        }
        let same = row.int(0)? == i64::from(rules.shards)
            && row.int(1)? == rules.max_payload_bytes as i64
            && row.int(2)? == key_ttl_sec
            && row.opt_text(3)?.as_deref() == rules.owned_by;
        if !same {
            let mut params: Vec<Value> = wanted.into();
            params.push(lane.into());
            let sql = "UPDATE outbox_lanes SET shards = ?, max_payload_bytes = ?, key_ttl_sec = ?, owned_by = ? WHERE lane = ?";
            tx.execute(sql, &params).await?;
        }
    }
    Ok(())
}

/// The shards of a lane that have live messages and lie beyond the configured ones. One look at the index for each.
pub(crate) async fn stray_shards(tx: &mut (dyn Tx + Send), lane: &str, shards: u32) -> Result<Vec<u32>> {
    let sql = "SELECT MIN(shard_id) FROM outbox WHERE lane = ? AND shard_id >= ?";
    let (mut found, mut from) = (Vec::new(), i64::from(shards));
    while let Some(row) = tx.query(sql, &[lane.into(), from.into()]).await?.first()
        && let Some(shard) = row.opt_int(0)?
        && found.len() < MOST_STRAY_SHARDS
    {
        found.extend(u32::try_from(shard).ok());
        from = shard + 1;
    }
    Ok(found)
}

const MOST_STRAY_SHARDS: usize = 1024;

/// Gives back messages whose lease ran out and that nobody took, in one statement's lock: one that was taken over or
/// renewed meanwhile is left alone. Answers their ids.
pub(crate) async fn release_expired(
    tx: &mut (dyn Tx + Send),
    lane: &str,
    send_begun: bool,
    limit: u32,
) -> Result<Vec<i64>> {
    let dialect = tx.dialect();
    let mut params = vec![lane.into()];
    let now = tx.now().plus(0, &mut params);
    let sql = format!(
        "SELECT id FROM outbox WHERE lane = ? AND lease_until < {now} AND lease_token < {LAST_TOKEN} ORDER BY id LIMIT {limit}{}",
        skip_locked(dialect)
    );
    let ids: Vec<i64> = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
    if ids.is_empty() {
        return Ok(ids);
    }
    let mut params = Vec::new();
    let due = tx.now().plus(0, &mut params);
    let updated = tx.now().plus(0, &mut params);
    params.push(code::RELEASED.into());
    // Where *send begun* is committed, the row itself knows whether anything went out.
    let unsure = match (send_begun, dialect) {
        (true, _) => "",
        (false, Dialect::Postgres) => ", maybe_sent = TRUE",
        (false, _) => ", maybe_sent = 1",
    };
    let list = in_ids(dialect, &ids, &mut params);
    let sql = format!(
        "UPDATE {} SET due_at = {due}, updated_at = {updated}, lease_token = lease_token + 1, locked_by = NULL, locked_at = NULL,
                lease_until = NULL, last_error_code = ?{unsure} WHERE id {list}",
        by_id(dialect)
    );
    tx.execute(&sql, &params).await?;
    Ok(ids)
}

pub(crate) async fn store_id(tx: &mut (dyn Tx + Send)) -> Result<String> {
    let rows = tx.query("SELECT value FROM postrider_meta WHERE name = 'store_id'", &[]).await?;
    rows.first()
        .ok_or_else(|| Error::new(Kind::Schema, "the database has no store id; run `postrider migrate`"))?
        .text(0)
}
