//! The kernel's own ailments: what waits and nobody looks at, tokens that fell, keys whose message never existed.

use std::time::Duration;

use async_trait::async_trait;

use crate::active_keys;
use crate::cold;
use crate::doctor::{Ailment, Case, Check, Examine, MOST_CASES};
use crate::error::Result;
use crate::lease::LAST_TOKEN;
use crate::outbox::Outbox;
use crate::settle::skip_locked;
use crate::store::{Mode, transact};
use crate::time::Timestamp;
use crate::tx::{Dialect, Row, Tx, Value};

const PART: &str = "outbox";
/// Hardly any lease lasts longer.
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);
/// Live messages of one page.
const PAGE: i64 = 5_000;
/// Keys that are mended in one transaction.
const AT_ONCE: u32 = 200;

static UNSERVED: Ailment = Ailment {
    check: Check::UnservedShard,
    part: PART,
    message: "messages are due, their lane is not paused, and nobody takes them",
    advice: "start a worker that serves their lane and shard (`postrider serve`, or `postrider worker` without --shard)",
};

static UNKNOWN_LANE: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: PART,
    message: "messages wait on a lane that is registered nowhere",
    advice: "add the lane to postrider.toml and run `postrider migrate`, then start a worker",
};

static ABANDONED: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: PART,
    message: "leases ran out, and nobody took the messages over",
    advice: "start a worker; `postrider outbox release --expired` gives them back at once",
};

static UNREADABLE: Ailment = Ailment {
    check: Check::UnreadableRow,
    part: PART,
    message: "rows whose due time is no time are never claimed",
    advice: "correct their due_at by hand: microseconds since 1970, as a whole number",
};

static UNNAMED_LANE: Ailment = Ailment {
    check: Check::UnreadableRow,
    part: PART,
    message: "rows whose lane has a name that is no text belong to no lane",
    advice: "correct their lane by hand, or delete them",
};

static LAST: Ailment = Ailment {
    check: Check::UnreadableRow,
    part: PART,
    message: "rows whose lease token cannot rise any more are never claimed",
    advice: "the table was edited by hand: lower lease_token to one above the highest in outbox_attempts",
};

static ENDLESS: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: PART,
    message: "messages are held under leases that end later than any worker's would",
    advice: "set by hand, or by a clock that was wrong: `postrider outbox release ID` gives them back",
};

static TOKEN_FELL: Ailment = Ailment {
    check: Check::TokenFell,
    part: PART,
    message: "the lease token of a live message is lower than one it has had",
    advice: "the table was restored or edited by hand: raise lease_token above the highest in outbox_attempts",
};

static KEY_ALONE: Ailment = Ailment {
    check: Check::KeyWithoutMessage,
    part: PART,
    message: "idempotency keys are taken by messages that never existed (id 0)",
    advice: "`postrider doctor --repair` frees them, so that their producers' next try creates the message",
};

static UNNAMED_KEY: Ailment = Ailment {
    check: Check::KeyWithoutMessage,
    part: PART,
    message: "active keys are taken and name no message (outbox_id 0), so that a second message may take them",
    advice: "the triggers of the table `outbox` are missing, as after a dump without triggers: make them as the migrations V011 and V014 do, then `postrider doctor --repair` gives the keys to their messages",
};

#[async_trait]
impl Examine for Outbox {
    async fn look(&self, stood: Duration) -> Result<Vec<Case>> {
        let mut cases = transact(&**self.store(), Mode::Look, move |tx| Box::pin(look(tx, stood))).await?;
        let (mut fallen, mut after) = (Vec::new(), 0);
        loop {
            let (found, next) =
                transact(&**self.store(), Mode::Look, move |tx| Box::pin(fallen_after(tx, after))).await?;
            fallen.extend(found);
            match next {
                Some(next) if fallen.len() < MOST_CASES as usize => after = next,
                _ => break,
            }
        }
        push(&mut cases, &TOKEN_FELL, fallen);
        Ok(cases)
    }

    async fn repair(&self, cases: &[Case]) -> Result<Vec<Case>> {
        let mut repaired = Vec::new();
        for (ailment, left) in
            [(&KEY_ALONE, self.free_keys(cases).await?), (&UNNAMED_KEY, self.name_keys(cases).await?)]
        {
            // What somebody has locked is left.
            repaired.extend(cases.iter().filter(|case| !left && case.ailment == ailment).cloned());
        }
        Ok(repaired)
    }
}

impl Outbox {
    /// Frees idempotency keys of messages that never existed; answers whether some are left.
    async fn free_keys(&self, cases: &[Case]) -> Result<bool> {
        if !cases.iter().any(|case| case.ailment == &KEY_ALONE) {
            return Ok(false);
        }
        loop {
            let freed = transact(&**self.store(), Mode::Write, |tx| {
                Box::pin(async move {
                    let key = if tx.dialect() == Dialect::Mysql { "`key`" } else { "key" };
                    let alone = format!("SELECT lane, {key} FROM outbox_keys WHERE outbox_id = 0 LIMIT {AT_ONCE}");
                    let mut freed = 0;
                    for row in tx.query(&alone, &[]).await? {
                        let name: [Value; 2] = [row.text(0)?.into(), row.text(1)?.into()];
                        let which = format!("outbox_keys WHERE lane = ? AND {key} = ? AND outbox_id = 0");
                        let skip = skip_locked(tx.dialect());
                        if !tx.query(&format!("SELECT 1 FROM {which}{skip}"), &name).await?.is_empty() {
                            freed += tx.execute(&format!("DELETE FROM {which}"), &name).await?;
                        }
                    }
                    Ok(freed)
                })
            });
            if freed.await? == 0 {
                break;
            }
        }
        let alone = "SELECT 1 FROM outbox_keys WHERE outbox_id = 0 LIMIT 1";
        transact(&**self.store(), Mode::Read, move |tx| {
            Box::pin(async move { Ok(!tx.query(alone, &[]).await?.is_empty()) })
        })
        .await
    }

    /// MySQL: gives active keys that name nobody to their messages, or frees them; answers whether some are left.
    async fn name_keys(&self, cases: &[Case]) -> Result<bool> {
        if !cases.iter().any(|case| case.ailment == &UNNAMED_KEY) {
            return Ok(false);
        }
        loop {
            let named = transact(&**self.store(), Mode::Write, |tx| {
                Box::pin(async move {
                    let keys = active_keys::unnamed(tx, AT_ONCE).await?;
                    active_keys::name_again(tx, &keys).await
                })
            });
            if named.await? == 0 {
                break;
            }
        }
        transact(&**self.store(), Mode::Read, |tx| {
            Box::pin(async move { Ok(!active_keys::unnamed(tx, 1).await?.is_empty()) })
        })
        .await
    }
}

async fn look(tx: &mut (dyn Tx + Send), stood: Duration) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    let old = cold::clock(tx).await?.minus(stood);
    let paused = cold::paused(tx).await?;
    let known = cold::lane_names(tx).await?;
    let mut lane: Option<String> = None;
    // From lane to lane and from shard to shard, each by one look at the index.
    while let Some(next) = next_lane(tx, lane.as_deref()).await? {
        if lane.as_ref().is_some_and(|last| *last >= next) {
            // Read as something that it is not: there is no way past it.
            let sql = format!("SELECT id FROM outbox WHERE lane > ? LIMIT {MOST_CASES}");
            let params = [lane.as_deref().unwrap_or_default().into()];
            push(&mut cases, &UNNAMED_LANE, ids_of(tx.query(&sql, &params).await?)?);
            break;
        }
        let mut shard: Option<i64> = None;
        while let Some(found) = next_shard(tx, &next, shard).await? {
            let Heads { free, expired, endless, last } = heads(tx, &next, found, old, stood).await?;
            push(&mut cases, &ENDLESS, endless);
            push(&mut cases, &LAST, last);
            if !known.contains(&next) {
                push(&mut cases, &UNKNOWN_LANE, free);
            } else if !paused.contains(&next) {
                push(&mut cases, &UNSERVED, free);
                push(&mut cases, &ABANDONED, expired);
            }
            if tx.dialect() == Dialect::Sqlite {
                // Text is greater than every number.
                let sql = format!(
                    "SELECT id FROM outbox WHERE lane = ? AND shard_id = ? AND due_at > {} LIMIT {MOST_CASES}",
                    i64::MAX
                );
                let params: [Value; 2] = [next.as_str().into(), found.into()];
                push(&mut cases, &UNREADABLE, ids_of(tx.query(&sql, &params).await?)?);
            }
            shard = Some(found);
        }
        lane = Some(next);
    }
    if !tx.query("SELECT 1 FROM outbox_keys WHERE outbox_id = 0 LIMIT 1", &[]).await?.is_empty() {
        cases.push(Case { ailment: &KEY_ALONE, id: 0 });
    }
    if tx.dialect() == Dialect::Mysql && !active_keys::unnamed(tx, 1).await?.is_empty() {
        cases.push(Case { ailment: &UNNAMED_KEY, id: 0 });
    }
    Ok(cases)
}

/// Of a page of live messages, those whose token is lower than one of their history; and where the next page begins.
async fn fallen_after(tx: &mut (dyn Tx + Send), after: i64) -> Result<(Vec<i64>, Option<i64>)> {
    let sql = format!("SELECT id FROM outbox WHERE id > ? ORDER BY id LIMIT 1 OFFSET {}", PAGE - 1);
    let next = tx.query(&sql, &[after.into()]).await?.first().map(|row| row.int(0)).transpose()?;
    let sql = "SELECT o.id FROM outbox o WHERE o.id > ? AND o.id <= ?
               AND EXISTS (SELECT 1 FROM outbox_attempts a WHERE a.outbox_id = o.id AND a.lease_token > o.lease_token) ORDER BY o.id";
    let found = ids_of(tx.query(sql, &[after.into(), next.unwrap_or(i64::MAX).into()]).await?)?;
    Ok((found, next))
}

fn push(cases: &mut Vec<Case>, ailment: &'static Ailment, ids: Vec<i64>) {
    cases.extend(ids.into_iter().map(|id| Case { ailment, id }));
}

fn ids_of(rows: Vec<Row>) -> Result<Vec<i64>> {
    rows.iter().map(|row| row.int(0)).collect()
}

async fn next_lane(tx: &mut (dyn Tx + Send), after: Option<&str>) -> Result<Option<String>> {
    let rows = match after {
        None => tx.query("SELECT MIN(lane) FROM outbox", &[]).await?,
        Some(lane) => tx.query("SELECT MIN(lane) FROM outbox WHERE lane > ?", &[lane.into()]).await?,
    };
    rows.first().map_or(Ok(None), |row| row.opt_text(0))
}

async fn next_shard(tx: &mut (dyn Tx + Send), lane: &str, after: Option<i64>) -> Result<Option<i64>> {
    let sql = "SELECT MIN(shard_id) FROM outbox WHERE lane = ? AND shard_id > ?";
    let rows = tx.query(sql, &[lane.into(), after.unwrap_or(i64::from(i32::MIN)).into()]).await?;
    rows.first().map_or(Ok(None), |row| row.opt_int(0))
}

/// What stands at the beginning of a shard.
#[derive(Default)]
struct Heads {
    free: Vec<i64>,
    expired: Vec<i64>,
    endless: Vec<i64>,
    last: Vec<i64>,
}

/// Of the first entries that have been due since `old`: those that are free, and those whose lease had run out by then. Where
/// somebody holds one of them, somebody is at it: a long backlog is not a shard nobody serves.
async fn heads(tx: &mut (dyn Tx + Send), lane: &str, shard: i64, old: Timestamp, stood: Duration) -> Result<Heads> {
    // What has stood long enough has stood longer than any lease that is configured.
    let far = old.plus(stood + stood.max(LONGEST_LEASE));
    let sql = format!(
        "SELECT id, lease_until, lease_token FROM outbox WHERE lane = ? AND shard_id = ? AND due_at < ? ORDER BY due_at, id LIMIT {MOST_CASES}"
    );
    let (mut heads, mut is_served) = (Heads::default(), false);
    for row in tx.query(&sql, &[lane.into(), shard.into(), old.into()]).await? {
        let id = row.int(0)?;
        match row.opt_time(1)? {
            _ if row.int(2)? == LAST_TOKEN => heads.last.push(id),
            None => heads.free.push(id),
            Some(until) if until < old => heads.expired.push(id),
            Some(until) if until > far => heads.endless.push(id),
            Some(_) => is_served = true,
        }
    }
    if is_served {
        heads.free.clear();
    }
    Ok(heads)
}
