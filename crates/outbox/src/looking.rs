//! Messages as people look at them: lists, one message, its payload. Nothing here costs more when there is more of it.

use crate::cold::lane_names;
use crate::error::Result;
use crate::message::hex;
use crate::paging::{self, Candidates, Page, Rows, Wanted};
use crate::store::{Attempt, Filter, History, Shown, Status};
use crate::tx::{Dialect, Row, Tx, Value};

/// Due rows of a lane that are looked at for leases.
const HEAD: i64 = 20_000;

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
    let (claimed_by, claimed_at) = (row.opt_text(9)?, row.opt_time(19)?);
    let is_live = !matches!(status, Status::Sent | Status::Dead);
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
        locked_by: claimed_by.clone().filter(|_| is_live),
        locked_at: claimed_at.filter(|_| is_live),
        claimed_by,
        claimed_at,
        target: row.opt_text(10)?,
        active_key: row.opt_text(11)?,
        payload_sha: row.opt_bytes(12)?.map(|sha| hex(&sha)),
        content_type: row.opt_text(13)?,
        last_error_code: row.opt_text(14)?,
        last_error: row.opt_text(15)?,
        correlation_id: row.opt_text(16)?,
        created_at: row.time(17)?,
        deliver_before: row.opt_time(18)?,
        payload_bytes: row.int(20)?,
        result_ref: row.opt_text(22)?,
        finished_at: row.opt_time(23)?,
    })
}

/// Live or ended messages; one table at a time, so that each uses its own index.
fn rows(tx: &mut (dyn Tx + Send), done: bool, wanted: Wanted) -> Rows<'static> {
    let mut bound = Vec::new();
    let (table, rest) = if done {
        ("outbox_done", "status, result_ref, finished_at, NULL".to_owned())
    } else {
        ("outbox", format!("NULL, NULL, NULL, {}", tx.now().plus(0, &mut bound)))
    };
    Rows { table, id: "id", columns: format!("{SHOWN}{}, {rest}", payload_length(tx.dialect())), bound, wanted }
}

/// A page, the newest first.
pub(crate) async fn list(tx: &mut (dyn Tx + Send), filter: &Filter) -> Result<Page<Shown>> {
    if let Some(key) = &filter.key {
        return by_key(tx, key, filter).await;
    }
    let (mut messages, mut down_to) = (Vec::new(), 0);
    for done in [false, true] {
        let ended = matches!(filter.status, Some(Status::Sent | Status::Dead));
        if filter.status.is_some() && ended != done {
            continue;
        }
        let few = few(tx, filter, done).await?;
        let wanted = wanted(tx, filter);
        let rows = rows(tx, done, wanted);
        let (found, searched) = paging::part(tx, &rows, few, filter.before, filter.limit.saturating_add(1)).await?;
        for row in &found {
            messages.push(shown(row)?);
        }
        down_to = down_to.max(searched);
    }
    // What is older than where the search ended comes with what is still to be found there.
    messages.retain(|message| message.id > down_to);
    messages.sort_by_key(|message| (std::cmp::Reverse(message.id), message.finished_at.is_none()));
    // One that ended between the two looks is seen twice.
    messages.dedup_by_key(|message| message.id);
    Ok(Page::of(messages, filter.limit as usize, |message| message.id).looked_down_to(down_to))
}

/// All candidates of one table, if an index knows them and they are few.
async fn few(tx: &mut (dyn Tx + Send), filter: &Filter, done: bool) -> Result<Option<Vec<i64>>> {
    let lanes = match (&filter.lane, filter.status) {
        (Some(lane), _) => vec![lane.clone()],
        (None, Some(Status::Dead | Status::Leased)) => lane_names(tx).await?,
        (None, _) => return Ok(None),
    };
    if filter.status == Some(Status::Leased) {
        let mut held = Vec::new();
        for lane in &lanes {
            match held_at_head(tx, lane).await? {
                Some(ids) => held.extend(ids),
                None => return Ok(None),
            }
        }
        return Ok(Some(held));
    }
    let mut candidates = Vec::new();
    for lane in lanes {
        let mut of = |sql: &str| candidates.push(Candidates::new(sql, [lane.as_str().into()]));
        if !done {
            // From the end: what PostgreSQL has not cleared away yet lies at the head.
            of("SELECT id FROM outbox WHERE lane = ? ORDER BY shard_id DESC, due_at DESC, id DESC");
        }
        for status in ["sent", "dead"].into_iter().filter(|_| done) {
            if filter.status.is_none_or(|wanted| wanted.as_str() == status) {
                let order = "ORDER BY finished_at DESC, id DESC";
                of(&format!("SELECT id FROM outbox_done WHERE lane = ? AND status = '{status}' {order}"));
            }
        }
    }
    paging::few(tx, &candidates).await
}

/// What the filter asks of a row.
fn wanted(tx: &mut (dyn Tx + Send), filter: &Filter) -> Wanted {
    let wanted = Wanted::default().is("lane", filter.lane.as_deref()).is("target", filter.target.as_deref());
    let mut params = Vec::new();
    match filter.status {
        Some(status @ (Status::Sent | Status::Dead)) => wanted.is("status", Some(status.as_str())),
        Some(Status::Leased) => {
            let now = tx.now().plus(0, &mut params);
            wanted.and(&format!("lease_until >= {now}"), params)
        }
        Some(Status::Pending) => {
            let now = tx.now().plus(0, &mut params);
            wanted.and(&format!("(lease_until IS NULL OR lease_until < {now})"), params)
        }
        None => wanted,
    }
}

/// What is held of a lane. No index knows leases, but they are at the head: due rows in the order of claims. Nothing if so
/// much of the head is held that there may be more beyond it.
async fn held_at_head(tx: &mut (dyn Tx + Send), lane: &str) -> Result<Option<Vec<i64>>> {
    let shards = tx.query("SELECT shards FROM outbox_lanes WHERE lane = ?", &[lane.into()]).await?;
    let shards = shards.first().map(|row| row.int(0)).transpose()?.unwrap_or(1).max(1);
    let most = (HEAD / shards).max(100);
    let mut held = Vec::new();
    for shard in 0..shards {
        let mut params: Vec<Value> = vec![lane.into(), shard.into()];
        let now = tx.now().plus(0, &mut params);
        let sql = format!(
            "SELECT id FROM (SELECT id, lease_until FROM outbox WHERE lane = ? AND shard_id = ? ORDER BY due_at, id LIMIT {most}) AS head
             WHERE lease_until >= {now}"
        );
        let rows = tx.query(&sql, &params).await?;
        if rows.len() as i64 * 2 > most {
            return Ok(None);
        }
        for row in rows {
            held.push(row.int(0)?);
        }
    }
    Ok(Some(held))
}

/// The message that has this key or active key, in each lane or in one.
async fn by_key(tx: &mut (dyn Tx + Send), key: &str, filter: &Filter) -> Result<Page<Shown>> {
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
    Ok(Page::of(found, filter.limit as usize, |message| message.id))
}

/// Attempts of one message that are shown: the latest. With `key` and a silent broker there is no end of them.
const HISTORY: usize = 1000;

pub(crate) async fn show(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<(Shown, History)>> {
    let mut found = Vec::new();
    // It may go from one to the other, and back, between two looks.
    for done in [false, true, false, true] {
        if found.is_empty() {
            let Rows { table, columns, mut bound, .. } = rows(tx, done, Wanted::default());
            bound.push(id.into());
            found = tx.query(&format!("SELECT {columns} FROM {table} WHERE id = ?"), &bound).await?;
        }
    }
    let Some(shown) = found.first().map(shown).transpose()? else { return Ok(None) };
    // Tokens rise with time, and are what the index goes by.
    let sql = format!(
        "SELECT at, kind, attempt, lease_token, code, error, worker FROM outbox_attempts WHERE outbox_id = ?
         ORDER BY lease_token DESC, id DESC LIMIT {}",
        HISTORY + 1
    );
    let rows = tx.query(&sql, &[id.into()]).await?;
    let mut history = History { attempts: Vec::new(), truncated: rows.len() > HISTORY };
    for row in rows.iter().take(HISTORY).rev() {
        history.attempts.push(Attempt {
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
