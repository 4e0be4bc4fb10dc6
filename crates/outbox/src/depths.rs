//! How much there is, and how long it has waited. What people ask for once may count all of it ([`depths`], [`stats`]); what
//! a timer or an open door asks costs a bounded amount, whatever the backlog ([`Counting`], [`ages`]).

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::Result;
use crate::pulse;
use crate::store::LaneStats;
use crate::tx::{Tx, Value};

/// Live messages counted by one statement.
const SLICE: usize = 10_000;

/// Counts of all lanes, what has ended too. Its cost grows with both.
pub(crate) async fn stats(tx: &mut (dyn Tx + Send)) -> Result<BTreeMap<String, LaneStats>> {
    let mut lanes = depths(tx).await?;
    for row in tx.query("SELECT lane, status, COUNT(*) FROM outbox_done GROUP BY lane, status", &[]).await? {
        let stats = lanes.entry(row.text(0)?).or_default();
        let count = row.int(2)? as u64;
        if row.text(1)? == "sent" { stats.sent = count } else { stats.dead = count }
    }
    Ok(lanes)
}

/// The same of live messages alone, which does not grow with history.
pub(crate) async fn depths(tx: &mut (dyn Tx + Send)) -> Result<BTreeMap<String, LaneStats>> {
    let mut lanes: BTreeMap<String, LaneStats> = BTreeMap::new();
    let mut params = Vec::new();
    let now: Vec<String> = (0..4).map(|_| tx.now().plus(0, &mut params)).collect();
    let sql = format!(
        "SELECT lane, SUM(CASE WHEN lease_until >= {} THEN 1 ELSE 0 END), COUNT(*),
                MIN(CASE WHEN due_at <= {} AND (lease_until IS NULL OR lease_until < {}) THEN due_at END), {} FROM outbox GROUP BY lane",
        now[0], now[1], now[2], now[3]
    );
    for row in tx.query(&sql, &params).await? {
        let (leased, live) = (row.opt_int(1)?.unwrap_or(0) as u64, row.int(2)? as u64);
        let age = row.opt_time(3)?.map_or(Duration::ZERO, |oldest| row.time(4).unwrap_or(oldest).since(oldest));
        let stats =
            LaneStats { pending: live - leased, leased, oldest_due_seconds: age.as_secs_f64(), ..LaneStats::default() };
        lanes.insert(row.text(0)?, stats);
    }
    Ok(lanes)
}

/// Live rows whose lease ran out and that nobody took yet.
pub(crate) async fn expired_leases(tx: &mut (dyn Tx + Send), lane: Option<&str>, limit: u32) -> Result<Vec<i64>> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let of_lane = lane.map_or("", |_| " AND lane = ?");
    params.extend(lane.map(Value::from));
    let sql = format!("SELECT id FROM outbox WHERE lease_until < {now}{of_lane} ORDER BY id LIMIT {limit}");
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

/// Live messages of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    pub pending: u64,
    pub leased: u64,
}

/// A count of the live messages that goes on from step to step, each of a bounded cost. What fits into one step is exact at
/// every step; more than that is exact as of its last round through all of them.
#[derive(Clone, Debug, Default)]
pub struct Counting {
    /// Counted in the round at hand, up to this id.
    round: BTreeMap<String, Depth>,
    up_to: i64,
    /// What the last whole round came to.
    whole: Option<BTreeMap<String, Depth>>,
}

impl Counting {
    /// What is known; until the first round is over, only what it has counted so far: at least so many.
    pub fn depths(&self) -> &BTreeMap<String, Depth> {
        self.whole.as_ref().unwrap_or(&self.round)
    }

    /// Is a round under way?
    pub fn is_under_way(&self) -> bool {
        self.up_to > 0
    }

    /// Takes a slice in: which lanes it had, and its last id. Answers whether it was the last one of its round.
    fn take(&mut self, slice: Vec<(String, Depth)>, last: i64) -> bool {
        let counted: u64 = slice.iter().map(|(_, depth)| depth.pending + depth.leased).sum();
        for (lane, depth) in slice {
            let sum = self.round.entry(lane).or_default();
            *sum = Depth { pending: sum.pending + depth.pending, leased: sum.leased + depth.leased };
        }
        if counted < SLICE as u64 {
            (self.whole, self.up_to) = (Some(std::mem::take(&mut self.round)), 0);
            return true;
        }
        self.up_to = last;
        false
    }
}

/// One step of a count; answers whether it ended a round.
pub(crate) async fn count(tx: &mut (dyn Tx + Send), mut counting: Counting) -> Result<(Counting, bool)> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(counting.up_to.into());
    let sql = format!(
        "SELECT lane, COUNT(*), SUM(CASE WHEN lease_until >= {now} THEN 1 ELSE 0 END), MAX(id)
         FROM (SELECT id, lane, lease_until FROM outbox WHERE id > ? ORDER BY id LIMIT {SLICE}) slice GROUP BY lane"
    );
    let (mut slice, mut last) = (Vec::new(), counting.up_to);
    for row in tx.query(&sql, &params).await? {
        let (live, leased) = (row.int(1)? as u64, row.opt_int(2)?.unwrap_or(0) as u64);
        slice.push((row.text(0)?, Depth { pending: live - leased, leased }));
        last = last.max(row.int(3)?);
    }
    let ended = counting.take(slice, last);
    Ok((counting, ended))
}

/// How long a lane's oldest message waits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Age {
    /// Age of the oldest message that is due and not held.
    pub oldest_due_seconds: f64,
    pub paused: bool,
}

/// The age of every lane, by its index: so many entries at the head of each are looked at and no more.
pub(crate) async fn ages(tx: &mut (dyn Tx + Send)) -> Result<BTreeMap<String, Age>> {
    let lanes = pulse::heads(tx).await?;
    let age = |of_lane: &pulse::LanePulse| Age {
        // Behind a head that is all held, the next one is hardly younger than the last of the head.
        oldest_due_seconds: match of_lane.head_is_held {
            true => of_lane.oldest_due_seconds.max(of_lane.held_to_seconds),
            false => of_lane.oldest_due_seconds,
        },
        paused: of_lane.paused,
    };
    Ok(lanes.iter().map(|(lane, of_lane)| (lane.clone(), age(of_lane))).collect())
}

/// Counts of one lane, of each kind of message up to `most`; `true`: there may be more. Its cost has a bound, whatever there
/// is. The age is told by [`ages`].
pub(crate) async fn stats_up_to(tx: &mut (dyn Tx + Send), lane: &str, most: u64) -> Result<(LaneStats, bool)> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(lane.into());
    let sql = format!(
        "SELECT COUNT(*), SUM(CASE WHEN lease_until >= {now} THEN 1 ELSE 0 END)
         FROM (SELECT lease_until FROM outbox WHERE lane = ? LIMIT {most}) live"
    );
    let rows = tx.query(&sql, &params).await?;
    let Some(row) = rows.first() else { return Ok(Default::default()) };
    let (live, leased) = (row.int(0)? as u64, row.opt_int(1)?.unwrap_or(0) as u64);
    let mut ended = [0; 2];
    for (count, status) in ended.iter_mut().zip(["sent", "dead"]) {
        let sql = format!(
            "SELECT COUNT(*) FROM (SELECT id FROM outbox_done WHERE lane = ? AND status = '{status}' LIMIT {most}) ended"
        );
        let rows = tx.query(&sql, &[lane.into()]).await?;
        *count = rows.first().map(|row| row.int(0)).transpose()?.unwrap_or(0) as u64;
    }
    let [sent, dead] = ended;
    let stats = LaneStats { pending: live - leased, leased, sent, dead, oldest_due_seconds: 0.0 };
    Ok((stats, [live, sent, dead].contains(&most)))
}

/// Live messages of a lane, up to `most`.
pub(crate) async fn waiting(tx: &mut (dyn Tx + Send), lane: &str, most: u64) -> Result<u64> {
    let sql = format!("SELECT COUNT(*) FROM (SELECT id FROM outbox WHERE lane = ? LIMIT {most}) live");
    let rows = tx.query(&sql, &[lane.into()]).await?;
    Ok(rows.first().map(|row| row.int(0)).transpose()?.unwrap_or(0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_goes_on_from_slice_to_slice_and_tells_whole_rounds() {
        let slice = |pending: u64| vec![("a".to_owned(), Depth { pending, leased: 0 })];
        let mut counting = Counting::default();
        assert!(counting.take(slice(3), 3), "little is counted at once");
        assert_eq!((counting.depths()["a"].pending, counting.is_under_way()), (3, false));
        assert!(!counting.take(slice(SLICE as u64), 10_000));
        assert_eq!((counting.depths()["a"].pending, counting.is_under_way()), (3, true), "the last whole round");
        assert!(counting.take(slice(5), 10_005));
        assert_eq!(counting.depths()["a"].pending, SLICE as u64 + 5);
        assert!(counting.take(vec![], 0));
        assert!(counting.depths().is_empty(), "all of them are gone");
    }
}
