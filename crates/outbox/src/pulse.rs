//! What an operator's screen asks again and again. Every question here is bounded, whatever the backlog and the history:
//! it reads so many entries of an index and no more, and where that is not all it says how fast they came.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cold::clock;
use crate::error::Result;
use crate::time::{Timestamp, micros_of};
use crate::tx::{Row, Tx, Value};

/// Ended messages looked at per lane and outcome.
const ENDED: u64 = 1_000;
/// Failed attempts looked at; each is looked up for its lane.
const ATTEMPTS: u64 = 200;
/// Due messages looked at per lane and shard, from the oldest.
const HEAD: u64 = 1_000;

/// How things go at this moment.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Pulse {
    pub now: Timestamp,
    pub lanes: BTreeMap<String, LanePulse>,
    pub holders: Vec<Holder>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct LanePulse {
    pub sent_per_second: f64,
    pub dead_per_second: f64,
    pub retries_per_second: f64,
    /// Age of the oldest message that is due and not held, among those at the head.
    pub oldest_due_seconds: f64,
    /// Everything at the head is held: there may be older ones behind it.
    pub head_is_held: bool,
    /// Age of the last one at a head that is all held.
    #[serde(skip)]
    pub held_to_seconds: f64,
    pub paused: bool,
}

/// A worker that holds messages of a lane, as far as the head of the lane tells.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Holder {
    pub worker: String,
    pub lane: String,
    pub holds: u64,
    /// When the one was claimed or renewed for which that was longest ago.
    pub since: Timestamp,
    /// When the first of its leases ends unless it is renewed.
    pub lease_until: Timestamp,
}

/// So many were seen, the earliest that long ago; `most` would be seen.
pub fn per_second(seen: u64, most: u64, earliest: Duration, window: Duration) -> f64 {
    let span = if seen < most { window } else { earliest.min(window) };
    seen as f64 / span.as_secs_f64().max(0.001)
}

pub(crate) async fn pulse(tx: &mut (dyn Tx + Send), window: Duration) -> Result<Pulse> {
    let mut pulse = Pulse::default();
    let mut lanes = heads_and_holders(tx, &mut pulse.holders).await?;
    for (lane, of_lane) in &mut lanes {
        of_lane.sent_per_second = ended(tx, lane, "sent", window).await?;
        of_lane.dead_per_second = ended(tx, lane, "dead", window).await?;
    }
    pulse.lanes = lanes;
    for (lane, rate) in retries(tx, window).await? {
        pulse.lanes.entry(lane).or_default().retries_per_second = rate;
    }
    pulse.now = clock(tx).await?;
    Ok(pulse)
}

/// The heads of all lanes.
pub(crate) async fn heads(tx: &mut (dyn Tx + Send)) -> Result<BTreeMap<String, LanePulse>> {
    heads_and_holders(tx, &mut Vec::new()).await
}

async fn heads_and_holders(tx: &mut (dyn Tx + Send), holders: &mut Vec<Holder>) -> Result<BTreeMap<String, LanePulse>> {
    let sql = "SELECT l.lane, l.shards, CASE WHEN p.lane IS NULL THEN 0 ELSE 1 END FROM outbox_lanes l
               LEFT JOIN outbox_pauses p ON p.lane = l.lane ORDER BY l.lane";
    let mut lanes = BTreeMap::new();
    for row in tx.query(sql, &[]).await? {
        let (lane, shards) = (row.text(0)?, row.int(1)?);
        let mut of_lane = LanePulse { paused: row.bool(2)?, ..LanePulse::default() };
        for shard in 0..shards {
            head(tx, &lane, shard, &mut of_lane, holders).await?;
        }
        lanes.insert(lane, of_lane);
    }
    Ok(lanes)
}

fn ago(row: &Row, at: usize, now: usize) -> Result<Duration> {
    Ok(row.opt_time(at)?.map_or(Duration::ZERO, |at| row.time(now).unwrap_or(at).since(at)))
}

async fn ended(tx: &mut (dyn Tx + Send), lane: &str, status: &str, window: Duration) -> Result<f64> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.extend([lane.into(), status.into()]);
    let from = tx.now().bound(-micros_of(window), &mut params);
    let sql = format!(
        "SELECT COUNT(*), MIN(finished_at), {now} FROM (SELECT finished_at FROM outbox_done WHERE lane = ? AND status = ?
         AND finished_at > {from} ORDER BY finished_at DESC LIMIT {ENDED}) newest"
    );
    let rows = tx.query(&sql, &params).await?;
    rows.first().map_or(Ok(0.0), |row| Ok(per_second(row.int(0)? as u64, ENDED, ago(row, 1, 2)?, window)))
}

async fn retries(tx: &mut (dyn Tx + Send), window: Duration) -> Result<Vec<(String, f64)>> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let sql = format!(
        "SELECT COALESCE(o.lane, d.lane), a.at, {now}, a.kind FROM (SELECT outbox_id, kind, at FROM outbox_attempts ORDER BY id DESC LIMIT {ATTEMPTS}) a
         LEFT JOIN outbox o ON o.id = a.outbox_id LEFT JOIN outbox_done d ON d.id = a.outbox_id"
    );
    let rows = tx.query(&sql, &params).await?;
    let (mut lanes, mut all, mut earliest) = (BTreeMap::<String, u64>::new(), 0, Duration::ZERO);
    for row in &rows {
        let age = ago(row, 1, 2)?;
        if age <= window {
            all += 1;
            earliest = earliest.max(age);
            if row.text(3)? == "retry" {
                *lanes.entry(row.opt_text(0)?.unwrap_or_default()).or_default() += 1;
            }
        }
    }
    // The same span for all: the looked-at rows are the newest of every lane together.
    let rate = |seen: u64| {
        if all < ATTEMPTS {
            per_second(seen, u64::MAX, earliest, window)
        } else {
            per_second(seen, 0, earliest, window)
        }
    };
    Ok(lanes.into_iter().filter(|(lane, _)| !lane.is_empty()).map(|(lane, seen)| (lane, rate(seen))).collect())
}

/// From the oldest due message on: who holds what, and how long the first that nobody holds has waited.
async fn head(
    tx: &mut (dyn Tx + Send),
    lane: &str,
    shard: i64,
    of_lane: &mut LanePulse,
    holders: &mut Vec<Holder>,
) -> Result<()> {
    let mut params: Vec<Value> = Vec::new();
    let now: Vec<String> = (0..2).map(|_| tx.now().plus(0, &mut params)).collect();
    params.extend([lane.into(), shard.into()]);
    let due = tx.now().bound(0, &mut params);
    let sql = format!(
        "SELECT CASE WHEN lease_until >= {} THEN locked_by END, COUNT(*), MIN(due_at), MIN(locked_at), MIN(lease_until), {}, MAX(due_at)
         FROM (SELECT lease_until, locked_by, locked_at, due_at FROM outbox WHERE lane = ? AND shard_id = ? AND due_at <= {due}
               ORDER BY due_at, id LIMIT {HEAD}) head GROUP BY 1",
        now[0], now[1]
    );
    let rows = tx.query(&sql, &params).await?;
    let (mut held, mut free, mut held_to) = (0, false, None::<Duration>);
    for row in rows {
        match row.opt_text(0)? {
            None => {
                free = true;
                of_lane.oldest_due_seconds = of_lane.oldest_due_seconds.max(ago(&row, 2, 5)?.as_secs_f64());
            }
            Some(worker) => {
                let holds = row.int(1)? as u64;
                held += holds;
                let last = ago(&row, 6, 5)?;
                held_to = Some(held_to.map_or(last, |least| least.min(last)));
                holders.push(Holder {
                    worker,
                    lane: lane.to_owned(),
                    holds,
                    since: row.opt_time(3)?.unwrap_or_default(),
                    lease_until: row.opt_time(4)?.unwrap_or_default(),
                });
            }
        }
    }
    if !free && held >= HEAD {
        of_lane.head_is_held = true;
        of_lane.held_to_seconds = of_lane.held_to_seconds.max(held_to.unwrap_or_default().as_secs_f64());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_sample_tells_its_own_span() {
        let (window, second) = (Duration::from_secs(2), Duration::from_secs(1));
        assert_eq!(per_second(10, 1_000, second, window), 5.0);
        assert_eq!(per_second(1_000, 1_000, second / 10, window), 10_000.0);
        assert_eq!(per_second(0, 1_000, Duration::ZERO, window), 0.0);
    }
}
