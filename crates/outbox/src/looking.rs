//! Messages as people look at them: lists, one message, its payload. A page costs so many rows and no more, however many
//! messages there are and wherever those wanted lie; where that is not enough to fill it, it says how far it has looked.

use crate::cold::lane_names;
use crate::error::Result;
use crate::message::hex;
use crate::settle::in_ids;
use crate::store::{Attempt, Filter, Page, Shown, Status};
use crate::tx::{Dialect, Row, Tx, Value};

/// Rows of a table that one page looks at, from its beginning.
const SEARCHED: i64 = 50_000;
/// Up to so many candidates are found by an index, whatever their ids.
const FEW: usize = 5_000;
/// Due rows of a lane that are looked at for leases.
const HEAD: i64 = 20_000;
/// Candidates fetched at a time.
const CHUNK: usize = 500;

const SHOWN: &str = "id, lane, shard_id, attempts, crashes, maybe_sent, lease_token, due_at, lease_until, locked_by, target, active_key, \
                     payload_sha, content_type, last_error_code, last_error, correlation_id, created_at, deliver_before, locked_at, ";

fn payload_length(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Postgres { "octet_length(payload)" } else { "length(payload)" }
}

fn shown(row: &Row) -> Result<Shown> {
    let now = row.opt_time(24)?;
    let lease_until = row.opt_time(8)?;
    let status = match row.opt_text(21)?.as_deref() {
        Some("sent") => Status::Sent,
        Some(_) => Status::Dead,
        None if lease_until.zip(now).is_some_and(|(until, now)| until >= now) => Status::Leased,
        None => Status::Pending,
    };
    Ok(Shown {
        id: row.int(0)?,
        lane: row.text(1)?,
        shard_id: row.int(2)? as u32,
        status,
        attempts: row.int(3)? as u32,
        crashes: row.int(4)? as u32,
        maybe_sent: row.bool(5)?,
        lease_token: row.int(6)?,
        due_at: row.time(7)?,
        lease_until,
        locked_by: row.opt_text(9)?,
        target: row.opt_text(10)?,
        active_key: row.opt_text(11)?,
        payload_sha: row.opt_bytes(12)?.map(|sha| hex(&sha)),
        content_type: row.opt_text(13)?,
        last_error_code: row.opt_text(14)?,
        last_error: row.opt_text(15)?,
        correlation_id: row.opt_text(16)?,
        created_at: row.time(17)?,
        deliver_before: row.opt_time(18)?,
        locked_at: row.opt_time(19)?,
        payload_bytes: row.int(20)?,
        result_ref: row.opt_text(22)?,
        finished_at: row.opt_time(23)?,
    })
}

/// Live or ended messages that match `condition`; one table at a time, so that each uses its own index.
async fn select_shown(
    tx: &mut (dyn Tx + Send),
    done: bool,
    condition: &str,
    mut params: Vec<Value>,
    tail: &str,
) -> Result<Vec<Shown>> {
    let length = payload_length(tx.dialect());
    let mut bound = Vec::new();
    let (table, rest) = if done {
        ("outbox_done", "status, result_ref, finished_at, NULL".to_owned())
    } else {
        ("outbox", format!("NULL, NULL, NULL, {}", tx.now().plus(0, &mut bound)))
    };
    bound.append(&mut params);
    let sql = format!("SELECT {SHOWN}{length}, {rest} FROM {table} WHERE {condition}{tail}");
    tx.query(&sql, &bound).await?.iter().map(shown).collect()
}

/// A page, the newest first.
pub(crate) async fn list(tx: &mut (dyn Tx + Send), filter: &Filter) -> Result<Page> {
    if let Some(key) = &filter.key {
        return by_key(tx, key, filter).await;
    }
    let limit = filter.limit as usize;
    let (mut messages, mut down_to) = (Vec::new(), 0);
    for done in [false, true] {
        let ended = matches!(filter.status, Some(Status::Sent | Status::Dead));
        if filter.status.is_some() && ended != done {
            continue;
        }
        match few(tx, filter, done).await? {
            Some(ids) => messages.extend(among(tx, filter, done, ids).await?),
            None => {
                let (found, searched) = newest(tx, filter, done).await?;
                messages.extend(found);
                down_to = down_to.max(searched);
            }
        }
    }
    // What is older than where the search ended comes with what is still to be found there.
    messages.retain(|message| message.id > down_to);
    messages.sort_by_key(|message| std::cmp::Reverse(message.id));
    messages.truncate(limit);
    let full = messages.last().filter(|_| messages.len() == limit).map(|last| last.id);
    Ok(Page { next: full.or((down_to > 0).then_some(down_to + 1)), messages })
}

/// All candidates of one table, if an index knows them and they are few.
async fn few(tx: &mut (dyn Tx + Send), filter: &Filter, done: bool) -> Result<Option<Vec<i64>>> {
    let lanes = match (&filter.lane, filter.status) {
        (Some(lane), _) => vec![lane.clone()],
        (None, Some(Status::Dead | Status::Leased)) => lane_names(tx).await?,
        (None, _) => return Ok(None),
    };
    let mut ids = Vec::new();
    for lane in &lanes {
        if filter.status == Some(Status::Leased) {
            ids.extend(held_at_head(tx, lane).await?);
            continue;
        }
        let of_live = ["SELECT id FROM outbox WHERE lane = ? ORDER BY shard_id, due_at, id".to_owned()];
        let of_done = ["sent", "dead"]
            .into_iter()
            .filter(|status| filter.status.is_none_or(|wanted| wanted.as_str() == *status))
            .map(|status| {
                format!("SELECT id FROM outbox_done WHERE lane = ? AND status = '{status}' ORDER BY finished_at DESC, id DESC")
            });
        let queries: Vec<String> = if done { of_done.collect() } else { of_live.into() };
        // In the order of their index, so that no other is as cheap.
        for sql in queries {
            let sql = format!("{sql} LIMIT {}", FEW + 1 - ids.len());
            for row in tx.query(&sql, &[lane.into()]).await? {
                ids.push(row.int(0)?);
            }
            if ids.len() > FEW {
                return Ok(None);
            }
        }
    }
    Ok(Some(ids))
}

/// A page of those with these ids.
async fn among(tx: &mut (dyn Tx + Send), filter: &Filter, done: bool, mut ids: Vec<i64>) -> Result<Vec<Shown>> {
    ids.retain(|id| filter.before.is_none_or(|before| *id < before));
    ids.sort_unstable_by(|a, b| b.cmp(a));
    let mut found = Vec::new();
    for chunk in ids.chunks(CHUNK.max(filter.limit as usize)) {
        let (mut condition, mut params) = condition(tx, filter);
        let list = in_ids(tx.dialect(), chunk, &mut params);
        condition.push_str(&format!(" AND id {list}"));
        let tail = format!(" ORDER BY id DESC LIMIT {}", filter.limit as usize - found.len());
        found.extend(select_shown(tx, done, &condition, params, &tail).await?);
        if found.len() == filter.limit as usize {
            break;
        }
    }
    Ok(found)
}

/// A page of the newest, and the id down to which it is all there is; 0 if that is all.
async fn newest(tx: &mut (dyn Tx + Send), filter: &Filter, done: bool) -> Result<(Vec<Shown>, i64)> {
    let table = if done { "outbox_done" } else { "outbox" };
    let limit = filter.limit as usize;
    let top = match filter.before {
        Some(before) => before,
        None => {
            let rows = tx.query(&format!("SELECT MAX(id) FROM {table}"), &[]).await?;
            rows.first().map(|row| row.opt_int(0)).transpose()?.flatten().unwrap_or(0).saturating_add(1)
        }
    };
    let near = top.saturating_sub(SEARCHED);
    let mut found = between(tx, filter, done, near, top, limit).await?;
    let mut down_to = near;
    if found.len() < limit {
        // So many rows, not so many ids: of some only a few are left.
        let sql = format!("SELECT id FROM {table} WHERE id < ? ORDER BY id DESC LIMIT 1 OFFSET {SEARCHED}");
        let rows = tx.query(&sql, &[top.into()]).await?;
        down_to = rows.first().map(|row| row.int(0)).transpose()?.unwrap_or(0);
        if down_to < near {
            found.extend(between(tx, filter, done, down_to, near + 1, limit - found.len()).await?);
        }
    }
    let end = found.last().filter(|_| found.len() == limit).map_or(down_to, |last| last.id - 1);
    Ok((found, end))
}

/// Those with ids above `floor` and below `top`. The lane's own index is kept out of it: it knows no order of ids.
async fn between(
    tx: &mut (dyn Tx + Send),
    filter: &Filter,
    done: bool,
    floor: i64,
    top: i64,
    limit: usize,
) -> Result<Vec<Shown>> {
    let (mut condition, mut params) = condition(tx, filter);
    if let Some(lane) = &filter.lane {
        condition.push_str(match tx.dialect() {
            Dialect::Sqlite => " AND +lane = ?",
            Dialect::Postgres => " AND lane || '' = ?",
            Dialect::Mysql => " AND CONCAT(lane) = ?",
        });
        params.push(lane.into());
    }
    condition.push_str(" AND id > ? AND id < ?");
    params.extend([floor.into(), top.into()]);
    select_shown(tx, done, &condition, params, &format!(" ORDER BY id DESC LIMIT {limit}")).await
}

/// What the filter asks of a row, besides its lane and its id.
fn condition(tx: &mut (dyn Tx + Send), filter: &Filter) -> (String, Vec<Value>) {
    let mut condition = "1 = 1".to_owned();
    let mut params: Vec<Value> = Vec::new();
    if let Some(target) = &filter.target {
        condition.push_str(" AND target = ?");
        params.push(target.into());
    }
    match filter.status {
        Some(status @ (Status::Sent | Status::Dead)) => {
            condition.push_str(" AND status = ?");
            params.push(status.as_str().into());
        }
        Some(Status::Leased) => {
            let now = tx.now().plus(0, &mut params);
            condition.push_str(&format!(" AND lease_until >= {now}"));
        }
        Some(Status::Pending) => {
            let now = tx.now().plus(0, &mut params);
            condition.push_str(&format!(" AND (lease_until IS NULL OR lease_until < {now})"));
        }
        None => {}
    }
    (condition, params)
}

/// What is held of a lane. No index knows leases, but they are at the head: due rows in the order of claims.
async fn held_at_head(tx: &mut (dyn Tx + Send), lane: &str) -> Result<Vec<i64>> {
    let shards = tx.query("SELECT shards FROM outbox_lanes WHERE lane = ?", &[lane.into()]).await?;
    let shards = shards.first().map(|row| row.int(0)).transpose()?.unwrap_or(1).max(1);
    let most = (HEAD / shards).max(1_000);
    let mut held = Vec::new();
    for shard in 0..shards {
        let mut params: Vec<Value> = vec![lane.into(), shard.into()];
        let now = tx.now().plus(0, &mut params);
        let sql = format!(
            "SELECT id FROM (SELECT id, lease_until FROM outbox WHERE lane = ? AND shard_id = ? ORDER BY due_at, id LIMIT {most}) AS head
             WHERE lease_until >= {now}"
        );
        for row in tx.query(&sql, &params).await? {
            held.push(row.int(0)?);
        }
    }
    Ok(held)
}

/// The message that has this key or active key, in each lane or in one.
async fn by_key(tx: &mut (dyn Tx + Send), key: &str, filter: &Filter) -> Result<Page> {
    let lanes = match &filter.lane {
        Some(lane) => vec![lane.clone()],
        None => lane_names(tx).await?,
    };
    let column = if tx.dialect() == Dialect::Mysql { "`key`" } else { "key" };
    let mut ids = Vec::new();
    for lane in lanes {
        let sql = format!(
            "SELECT outbox_id FROM outbox_keys WHERE lane = ? AND {column} = ? UNION SELECT id FROM outbox WHERE lane = ? AND active_key = ?"
        );
        for row in tx.query(&sql, &[lane.as_str().into(), key.into(), lane.as_str().into(), key.into()]).await? {
            ids.push(row.int(0)?);
        }
    }
    let mut found = Vec::new();
    for id in ids {
        found.extend(show(tx, id).await?.map(|(shown, _)| shown));
    }
    found.retain(|shown| {
        filter.status.is_none_or(|status| status == shown.status)
            && filter.before.is_none_or(|before| shown.id < before)
            && filter.target.as_ref().is_none_or(|target| shown.target.as_ref() == Some(target))
    });
    found.sort_by_key(|s| std::cmp::Reverse(s.id));
    let more = found.len() > filter.limit as usize;
    found.truncate(filter.limit as usize);
    Ok(Page { next: found.last().filter(|_| more).map(|last| last.id), messages: found })
}

pub(crate) async fn show(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<(Shown, Vec<Attempt>)>> {
    let mut found = select_shown(tx, false, "id = ?", vec![id.into()], "").await?;
    if found.is_empty() {
        found = select_shown(tx, true, "id = ?", vec![id.into()], "").await?;
    }
    let Some(shown) = found.pop() else { return Ok(None) };
    let sql = "SELECT at, kind, attempt, lease_token, code, error, worker FROM outbox_attempts WHERE outbox_id = ? ORDER BY id";
    let mut history = Vec::new();
    for row in tx.query(sql, &[id.into()]).await? {
        history.push(Attempt {
            at: row.time(0)?,
            kind: row.text(1)?,
            attempt: row.int(2)? as u32,
            lease_token: row.int(3)?,
            code: row.opt_text(4)?,
            error: row.opt_text(5)?,
            worker: row.opt_text(6)?,
        });
    }
    Ok(Some((shown, history)))
}

pub(crate) async fn payload(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<bytes::Bytes>> {
    let sql = "SELECT payload FROM outbox WHERE id = ? UNION ALL SELECT payload FROM outbox_done WHERE id = ?";
    tx.query(sql, &[id.into(), id.into()]).await?.first().map(|row| row.bytes(0)).transpose()
}
