//! The verbs that are not hot, written once on the `Tx` port: renew, defer, wake, seize, prune, dedup.

use std::collections::HashSet;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::lanes::Lanes;
use crate::lease::{Hold, Lease};
use crate::message::{Sha, cut_code};
use crate::permit::{permit, withdraw_permit};
use crate::settle::{by_id, for_update, in_ids};
use crate::store::{Prune, Pruned};
use crate::time::{Timestamp, micros_of};
use crate::tx::{Dialect, Tx, Value};

/// The leases whose `keep` test passes under their rows' locks.
async fn lock_held(
    tx: &mut (dyn Tx + Send),
    leases: &[Lease],
    keep: impl Fn(&Hold, i64, Timestamp) -> bool + Send,
) -> Result<Vec<Lease>> {
    let mut ids: Vec<i64> = leases.iter().map(|l| l.id).collect();
    ids.sort_unstable();
    let dialect = tx.dialect();
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let list = in_ids(dialect, &ids, &mut params);
    let sql = format!(
        "SELECT id, lease_token, locked_by, lease_until, {now} FROM {} WHERE id {list} ORDER BY id{}",
        by_id(dialect),
        for_update(dialect)
    );
    let mut held = Vec::new();
    for row in tx.query(&sql, &params).await? {
        let (id, now) = (row.int(0)?, row.time(4)?);
        let hold =
            Hold { token: row.int(1)?, locked_by: row.opt_text(2)?, lease_until: row.opt_time(3)?, ..Hold::default() };
        held.extend(leases.iter().find(|l| l.id == id && keep(&hold, l.token, now)));
    }
    Ok(held)
}

fn ids_of(leases: &[Lease]) -> Vec<i64> {
    leases.iter().map(|l| l.id).collect()
}

pub(crate) async fn renew(
    tx: &mut (dyn Tx + Send),
    owner: &str,
    leases: &[Lease],
    lease: Duration,
) -> Result<Vec<bool>> {
    let held = lock_held(tx, leases, |hold, token, now| hold.renewable(token, owner, now)).await?;
    if !held.is_empty() {
        let mut params = Vec::new();
        let until = tx.now().plus(micros_of(lease), &mut params);
        let list = in_ids(tx.dialect(), &ids_of(&held), &mut params);
        tx.execute(&format!("UPDATE outbox SET lease_until = {until} WHERE id {list}"), &params).await?;
    }
    Ok(leases.iter().map(|l| held.contains(l)).collect())
}

/// Notes that the first byte is about to go out, on leases that still run; or that it did not after all.
pub(crate) async fn begin(tx: &mut (dyn Tx + Send), owner: &str, lease: Lease, begun: bool) -> Result<bool> {
    let held = lock_held(tx, &[lease], |hold, token, now| hold.renewable(token, owner, now)).await?;
    if !held.is_empty() {
        tx.execute("UPDATE outbox SET maybe_sent = ? WHERE id = ?", &[begun.into(), lease.id.into()]).await?;
    }
    Ok(!held.is_empty())
}

pub(crate) async fn defer(
    tx: &mut (dyn Tx + Send),
    owner: &str,
    leases: &[Lease],
    delay: Duration,
    code: Option<&str>,
) -> Result<Vec<bool>> {
    let held = lock_held(tx, leases, |hold, token, _| hold.accepts(token, owner)).await?;
    if !held.is_empty() {
        let mut params = Vec::new();
        let due = tx.now().plus(micros_of(delay), &mut params);
        let now = tx.now().plus(0, &mut params);
        let why = if code.is_some() { ", last_error_code = ?" } else { "" };
        params.extend(code.map(|code| cut_code(code).into()));
        let list = in_ids(tx.dialect(), &ids_of(&held), &mut params);
        let sql = format!(
            "UPDATE outbox SET due_at = {due}, updated_at = {now}, locked_by = NULL, locked_at = NULL, lease_until = NULL{why} WHERE id {list}"
        );
        tx.execute(&sql, &params).await?;
    }
    Ok(leases.iter().map(|l| held.contains(l)).collect())
}

pub(crate) async fn wake(tx: &mut (dyn Tx + Send), lane: &str, active_keys: &[String]) -> Result<u64> {
    let mut woken = 0;
    for key in active_keys {
        let mut params = Vec::new();
        let due = tx.now().plus(0, &mut params);
        params.extend([lane.into(), key.into()]);
        let now = tx.now().plus(0, &mut params);
        let sql = format!(
            "UPDATE outbox SET due_at = {due} WHERE lane = ? AND active_key = ? AND locked_by IS NULL AND due_at > {now}"
        );
        woken += tx.execute(&sql, &params).await?;
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
        tx.execute(&format!("UPDATE outbox SET due_at = {now} WHERE id {list}"), &params).await?;
    }
    Ok(ids.len())
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
        if wanted(&lane, row.opt_text(3)?.as_deref()) {
            leases.push((lane, Lease { id: row.int(0)?, token: row.int(1)? + 1 }));
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
            "UPDATE outbox SET maybe_sent = CASE WHEN locked_by IS NULL THEN maybe_sent ELSE {truth} END,
                    lease_token = lease_token + 1, lease_until = {until}, locked_at = {now}, locked_by = ? WHERE id {list}"
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
        for table in [
            "outbox_done WHERE id",
            "outbox_attempts WHERE outbox_id",
            "outbox_dedup WHERE outbox_id",
            "postrider_former_keys WHERE outbox_id",
        ] {
            let mut params = Vec::new();
            let list = in_ids(dialect, &ids, &mut params);
            let gone = tx.execute(&format!("DELETE FROM {table} {list}"), &params).await?;
            if table.starts_with("outbox_done") {
                messages = gone;
            }
        }
        withdraw_permit(tx).await?;
    }
    Ok(Pruned { messages, keys: prune_keys(tx, lane, prune).await? })
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

/// Writes the lanes' rules where SQL clients find them, and refuses what would strand live rows.
pub(crate) async fn register_lanes(tx: &mut (dyn Tx + Send), lanes: &Lanes) -> Result<()> {
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
        let before = row.int(0)?;
        if i64::from(rules.shards) < before {
            let stranded = "SELECT 1 FROM outbox WHERE lane = ? AND shard_id >= ? LIMIT 1";
            if !tx.query(stranded, &[lane.into(), rules.shards.into()]).await?.is_empty() {
                return Err(Error::new(
                    Kind::Invalid,
                    format!(
                        "lane `{lane}` has live messages in shards up to {before}; with shards = {} nobody would deliver them. Drain the lane first",
                        rules.shards
                    ),
                ));
            }
        }
        let same = before == i64::from(rules.shards)
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

pub(crate) async fn store_id(tx: &mut (dyn Tx + Send)) -> Result<String> {
    let rows = tx.query("SELECT value FROM postrider_meta WHERE name = 'store_id'", &[]).await?;
    rows.first()
        .ok_or_else(|| Error::new(Kind::Schema, "the database has no store id; run `postrider migrate`"))?
        .text(0)
}
