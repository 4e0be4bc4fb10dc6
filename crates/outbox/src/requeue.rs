//! Requeue: dead messages come back under their ids, many in one transaction, written once on the `Tx` port.
//!
//! What somebody else holds at the moment is skipped, never waited for, and what cannot come back harms no other. A
//! message comes back with its key, as an enqueue would take it: not while another has it.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::active_keys;
use crate::cold;
use crate::error::{Error, Kind, Result};
use crate::lanes::Lanes;
use crate::permit::{permit, withdraw_permit};
use crate::settle::{delete_by, for_update, in_ids};
use crate::store::Requeued;
use crate::time::Timestamp;
use crate::tx::{Dialect, Row, Tx, Value};

/// Messages of one transaction.
pub(crate) const BATCH: usize = 500;

const BACK: &str = "id, lane, shard_id, lease_token, maybe_sent, target, active_key, payload, content_type, headers, payload_sha, \
                    correlation_id, created_at";

/// A dead message's place among those of its lane, in the order of their deaths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Died {
    pub at: Timestamp,
    pub id: i64,
}

/// Whether to wait for rows that others hold.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Held {
    Wait,
    Skip,
}

impl Held {
    fn lock(self, dialect: Dialect) -> String {
        let skip = if self == Held::Skip && dialect != Dialect::Sqlite { " SKIP LOCKED" } else { "" };
        format!("{}{skip}", for_update(dialect))
    }
}

/// Brings dead messages back; answers in the order given. One that expired is wanted after all: its `deliver_before` is
/// dropped. Why a message died stays in its history.
pub(crate) async fn requeue(
    tx: &mut (dyn Tx + Send),
    ids: &[i64],
    lanes: &Lanes,
    owner: Option<&str>,
    held: Held,
) -> Result<Vec<Requeued>> {
    let mut answers: HashMap<i64, Requeued> = HashMap::with_capacity(ids.len());
    if held == Held::Skip && tx.dialect() == Dialect::Postgres {
        // An insert cannot skip: whoever has an active key and has not committed yet is not waited for either.
        tx.execute("SET LOCAL lock_timeout = '2s'", &[]).await?;
    }
    let dead = lock_dead(tx, ids, held, &mut answers).await?;
    let of_lanes: HashSet<&str> = dead.values().map(String::as_str).collect();
    of_lanes.into_iter().try_for_each(|lane| lanes.permit_upkeep(lane, owner))?;
    let mut back: Vec<i64> = dead.keys().copied().collect();
    back.sort_unstable();
    let now = cold::clock(tx).await?;
    let expires = |id: &i64| -> Result<Timestamp> {
        let lane = dead.get(id).map(String::as_str).unwrap_or_default();
        Ok(now.plus(lanes.get(lane)?.key_ttl))
    };
    take_keys_back(tx, &mut back, &expires, held, &mut answers).await?;
    // Those that are not moved have an active key that is taken.
    answers.extend(back.iter().map(|id| (*id, Requeued::Conflict)));
    answers.extend(move_back(tx, &back).await?.into_iter().map(|id| (id, Requeued::Requeued)));
    // What named a message twice has brought it back once.
    let mut seen = HashSet::with_capacity(ids.len());
    let answer = |id: &i64| if seen.insert(*id) { answers.get(id).copied() } else { None };
    Ok(ids.iter().map(answer).map(|answer| answer.unwrap_or(Requeued::NotDead)).collect())
}

/// The dead among these, locked, with their lanes. Those that somebody else holds are answered so.
async fn lock_dead(
    tx: &mut (dyn Tx + Send),
    ids: &[i64],
    held: Held,
    answers: &mut HashMap<i64, Requeued>,
) -> Result<HashMap<i64, String>> {
    let dialect = tx.dialect();
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids.dedup();
    let mut params = Vec::new();
    let list = in_ids(dialect, &ids, &mut params);
    let dead = format!("SELECT id, lane FROM outbox_done WHERE id {list} AND status = 'dead' ORDER BY id");
    let locked = tx.query(&format!("{dead}{}", held.lock(dialect)), &params).await?;
    let locked: HashMap<i64, String> =
        locked.iter().map(|row| Ok((row.int(0)?, row.text(1)?))).collect::<Result<_>>()?;
    if held == Held::Skip && dialect != Dialect::Sqlite && locked.len() < ids.len() {
        for row in tx.query(&dead, &params).await? {
            let id = row.int(0)?;
            if !locked.contains_key(&id) {
                answers.insert(id, Requeued::Held);
            }
        }
    }
    Ok(locked)
}

/// Makes sure that the keys of these messages are theirs again, for as long as those of new ones. Those whose key another
/// has are answered and left out, as are those whose key somebody is just taking.
async fn take_keys_back(
    tx: &mut (dyn Tx + Send),
    back: &mut Vec<i64>,
    expires: &(dyn Fn(&i64) -> Result<Timestamp> + Sync),
    held: Held,
    answers: &mut HashMap<i64, Requeued>,
) -> Result<()> {
    let dialect = tx.dialect();
    let mut params = Vec::new();
    let list = in_ids(dialect, back, &mut params);
    let own = format!("SELECT outbox_id FROM outbox_keys WHERE outbox_id {list}");
    let with_key = ids_of(&tx.query(&own, &params).await?)?;
    if !with_key.is_empty() {
        let locked = ids_of(&tx.query(&format!("{own}{}", held.lock(dialect)), &params).await?)?;
        for id in with_key.difference(&locked) {
            answers.insert(*id, Requeued::Held);
        }
        // Whoever sees an older state, in which the message was dead and its key over, sees by the key that it came back.
        let mut renewed: BTreeMap<Timestamp, Vec<i64>> = BTreeMap::new();
        for id in locked {
            renewed.entry(expires(&id)?).or_default().push(id);
        }
        // As in `outbox`, a scan would lock what others hold.
        let keys = if dialect == Dialect::Mysql { "outbox_keys FORCE INDEX (idx_keys_outbox)" } else { "outbox_keys" };
        for (until, ids) in renewed {
            let mut params: Vec<Value> = vec![until.into()];
            let list = in_ids(dialect, &ids, &mut params);
            params.push(until.into());
            let sql = format!("UPDATE {keys} SET expires_at = ? WHERE outbox_id {list} AND expires_at < ?");
            tx.execute(&sql, &params).await?;
        }
    }
    let without: Vec<i64> = back.iter().copied().filter(|id| !with_key.contains(id)).collect();
    let mut params = Vec::new();
    let list = in_ids(dialect, &without, &mut params);
    let key = key_column(dialect);
    let former = format!(
        "SELECT outbox_id, lane, {key}, digest, expires_at FROM postrider_former_keys WHERE outbox_id {list} ORDER BY lane, {key}"
    );
    for row in tx.query(&former, &params).await? {
        // Whoever comes back with this batch is as good as live.
        let coming = |id: i64| back.contains(&id) && !answers.contains_key(&id);
        if let Some(answer) = take_back(tx, &row, expires(&row.int(0)?)?, held, &coming).await? {
            answers.insert(row.int(0)?, answer);
        }
    }
    back.retain(|id| !answers.contains_key(id));
    Ok(())
}

fn ids_of(rows: &[Row]) -> Result<HashSet<i64>> {
    rows.iter().map(|row| row.int(0)).collect()
}

fn key_column(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Mysql { "`key`" } else { "key" }
}

/// A message that lost its key takes it back, if it is free. If it is another's, who lives, or had it of late, that is the
/// answer: what was sent under a key since is not done again, and who is dead may come back with it.
async fn take_back(
    tx: &mut (dyn Tx + Send),
    former: &Row,
    until: Timestamp,
    held: Held,
    coming: &(dyn Fn(i64) -> bool + Sync),
) -> Result<Option<Requeued>> {
    let (dialect, key) = (tx.dialect(), key_column(tx.dialect()));
    let [id, lane, name, digest, _] = &former.0[..] else {
        return Err(Error::database("a former key has five columns"));
    };
    let insert = match dialect {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT DO NOTHING"),
    };
    let sql = format!(
        "{} INTO outbox_keys (lane, {key}, outbox_id, digest, expires_at) VALUES (?, ?, ?, ?, ?){}",
        insert.0, insert.1
    );
    let expires_at: Value = former.opt_time(4)?.map_or(until, |former| former.max(until)).into();
    let row = [lane.clone(), name.clone(), id.clone(), digest.clone(), expires_at.clone()];
    if tx.execute(&sql, &row).await? == 1 {
        return Ok(None);
    }
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.extend([lane.clone(), name.clone()]);
    let sql = format!(
        "SELECT outbox_id, CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END FROM outbox_keys WHERE lane = ? AND {key} = ?{}",
        held.lock(dialect)
    );
    let holder = tx.query(&sql, &params).await?;
    let Some(holder) = holder.first() else { return Ok(Some(Requeued::Held)) };
    let (holder, is_over) = (holder.int(0)?, holder.bool(1)?);
    let lives = !tx.query("SELECT 1 FROM outbox WHERE id = ?", &[holder.into()]).await?.is_empty();
    if lives || !is_over || coming(holder) {
        return Ok(Some(Requeued::Conflict));
    }
    let sql = format!("UPDATE outbox_keys SET outbox_id = ?, digest = ?, expires_at = ? WHERE lane = ? AND {key} = ?");
    tx.execute(&sql, &[id.clone(), digest.clone(), expires_at, lane.clone(), name.clone()]).await?;
    Ok(None)
}

/// Moves locked dead messages back among the live ones; answers which. Where an active key is taken, the message stays.
async fn move_back(tx: &mut (dyn Tx + Send), ids: &[i64]) -> Result<Vec<i64>> {
    if ids.is_empty() {
        return Ok(vec![]);
    }
    let dialect = tx.dialect();
    let with_keys;
    let ids = if dialect == Dialect::Mysql {
        with_keys = active_keys::take_back(tx, ids).await?;
        &with_keys
    } else {
        ids
    };
    let mut params = Vec::new();
    let due = tx.now().plus(0, &mut params);
    let updated = tx.now().plus(0, &mut params);
    let list = in_ids(dialect, ids, &mut params);
    let (verb, tail) = match dialect {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT DO NOTHING"),
    };
    let insert = format!(
        "{verb} INTO outbox ({BACK}, deliver_before, attempts, crashes, due_at, updated_at)
         SELECT {BACK}, CASE WHEN last_error_code = 'EXPIRED' THEN NULL ELSE deliver_before END, 0, 0, {due}, {updated}
         FROM outbox_done WHERE id {list} AND status = 'dead' ORDER BY id{tail}"
    );
    let inserted = tx.execute(&insert, &params).await?;
    let mut params = Vec::new();
    let list = in_ids(dialect, ids, &mut params);
    let back = ids_of(&tx.query(&format!("SELECT id FROM outbox WHERE id {list}"), &params).await?)?;
    let back: Vec<i64> = ids.iter().copied().filter(|id| back.contains(id)).collect();
    let mut params = Vec::new();
    let sql = delete_by(dialect, ("outbox_done", "id"), &back, &mut params);
    permit(tx, "requeue").await?;
    let gone = tx.execute(&sql, &params).await?;
    withdraw_permit(tx).await?;
    if inserted != back.len() as u64 || gone != inserted {
        return Err(Error::database(format!(
            "a requeue inserted {inserted} and deleted {gone} rows of {}",
            back.len()
        )));
    }
    Ok(back)
}

/// The next dead messages of a lane that died after `after` and not after `until`.
pub(crate) async fn dead(
    tx: &mut (dyn Tx + Send),
    lane: &str,
    after: Option<Died>,
    until: Timestamp,
    limit: u32,
) -> Result<Vec<Died>> {
    let mut params: Vec<Value> = vec![lane.into(), until.into()];
    let on = match after {
        Some(after) => {
            params.extend([after.at.into(), after.at.into(), after.id.into()]);
            " AND finished_at >= ? AND (finished_at > ? OR id > ?)"
        }
        None => "",
    };
    let sql = format!(
        "SELECT finished_at, id FROM outbox_done WHERE lane = ? AND status = 'dead' AND finished_at <= ?{on}
         ORDER BY finished_at, id LIMIT {limit}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| Ok(Died { at: row.time(0)?, id: row.int(1)? })).collect()
}

/// Those of these that are dead.
pub(crate) async fn dead_among(tx: &mut (dyn Tx + Send), ids: &[i64]) -> Result<Vec<i64>> {
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), ids, &mut params);
    let rows = tx.query(&format!("SELECT id FROM outbox_done WHERE id {list} AND status = 'dead'"), &params).await?;
    let dead = ids_of(&rows)?;
    Ok(ids.iter().copied().filter(|id| dead.contains(id)).collect())
}

/// Is a batch that failed so worth trying one by one? One of them was in the way of the others.
pub(crate) fn one_by_one(error: &Error) -> bool {
    error.effect == crate::error::Effect::NotApplied && matches!(error.kind, Kind::Conflict | Kind::Busy | Kind::Locked)
}
