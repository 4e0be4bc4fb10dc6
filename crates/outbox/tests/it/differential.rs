//! P12: random sequences of operations through a small oracle in memory and through each database; every answer and the
//! final state must be the same. A failing sequence is shrunk before it is shown.
//!
//! Model time goes in ticks of a thousand seconds, so the milliseconds a real run takes never matter. They only break
//! ties: what fell due in the same tick is claimed in the order in which it was made due.
//!
//! `POSTRIDER_DIFFERENTIAL_CASES` and `POSTRIDER_DIFFERENTIAL_SEED` ask for more, or others.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use postrider::lease::Lease;
use postrider::message::sha256;
use postrider::outcome::{Certainty, Settled, Settlement, Verdict};
use postrider::store::{From, Requeued, Status};
use postrider::tx::Dialect;
use postrider::{Enqueued, LaneRules, Lanes, NewMessage, Timestamp};

use crate::harness::{self, Database};

const TICK: Duration = Duration::from_secs(1000);
const LANES: [&str; 3] = ["plain", "dedup", "fleeting"];
const OWNERS: [&str; 3] = ["w0", "w1", "w2"];
const KEYS: [&str; 3] = ["k", "K", "k "];
const PAYLOADS: [&str; 2] = ["x", "y"];
const TARGETS: [&str; 2] = ["t", "T"];
const KEY_TTL: u64 = 3;
const RETENTION: u64 = 5;

fn ticks(n: u64) -> Duration {
    TICK * n as u32
}

fn lanes() -> Lanes {
    let plain = LaneRules { key_ttl: ticks(KEY_TTL), retention: ticks(RETENTION), ..LaneRules::default() };
    Lanes::new()
        .with("plain", plain.clone())
        .with("dedup", LaneRules { dedup: true, ..plain.clone() })
        .with("fleeting", LaneRules { retention: Duration::ZERO, ..plain })
}

/// One operation. Messages and leases are named by how long ago they were made, so that any subsequence makes sense.
#[derive(Clone, Debug)]
enum Op {
    Enqueue {
        lane: usize,
        payload: usize,
        key: Option<usize>,
        active: Option<usize>,
        target: Option<usize>,
        delay: u64,
    },
    Claim {
        lane: usize,
        owner: usize,
        limit: usize,
        lease: u64,
        adopt: bool,
    },
    ClaimIds {
        lane: usize,
        owner: usize,
        ago: Vec<usize>,
        limit: usize,
    },
    Settle {
        ago: usize,
        twist: Twist,
        verdict: usize,
        delay: u64,
        again: bool,
    },
    Renew {
        ago: usize,
        twist: Twist,
        lease: u64,
    },
    Defer {
        ago: usize,
        twist: Twist,
        delay: u64,
    },
    Advance {
        by: u64,
    },
    Requeue {
        ago: usize,
    },
    Wake {
        lane: usize,
        active: usize,
    },
    Seize {
        ago: usize,
    },
    Prune {
        older_than: u64,
    },
    CheckDedup {
        lane: usize,
        payload: usize,
        target: Option<usize>,
    },
}

/// What is wrong about the lease that is shown.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Twist {
    Nothing,
    Owner,
    Token,
    Lane,
}

fn generate(rng: &mut fastrand::Rng, length: usize) -> Vec<Op> {
    (0..length).map(|_| generate_one(rng)).collect()
}

fn generate_one(rng: &mut fastrand::Rng) -> Op {
    // Mostly one lane and few names, so that things meet.
    let lane = [0, 0, 1, 2][rng.usize(..4)];
    let maybe = |rng: &mut fastrand::Rng, n: usize| rng.bool().then(|| rng.usize(..n));
    let ago = |rng: &mut fastrand::Rng| if rng.u8(..4) == 0 { rng.usize(..12) } else { rng.usize(..3) };
    let twist =
        [Twist::Nothing, Twist::Nothing, Twist::Nothing, Twist::Nothing, Twist::Owner, Twist::Token, Twist::Lane];
    let twist = twist[rng.usize(..twist.len())];
    let owner = rng.usize(..OWNERS.len());
    match rng.u8(..24) {
        0..=5 => Op::Enqueue {
            lane,
            payload: rng.usize(..2),
            key: maybe(rng, 3),
            active: maybe(rng, 3),
            target: maybe(rng, 2),
            delay: [0, 0, 0, 1, 2][rng.usize(..5)],
        },
        6..=9 => Op::Claim { lane, owner, limit: rng.usize(..4), lease: rng.u64(1..3), adopt: rng.u8(..4) == 0 },
        10 => Op::ClaimIds {
            lane,
            owner,
            ago: (0..rng.usize(..4)).map(|_| rng.usize(..6)).collect(),
            limit: rng.usize(1..3),
        },
        11..=14 => {
            Op::Settle { ago: ago(rng), twist, verdict: rng.usize(..6), delay: rng.u64(..3), again: rng.u8(..3) == 0 }
        }
        15 => Op::Renew { ago: ago(rng), twist, lease: rng.u64(1..3) },
        16 => Op::Defer { ago: ago(rng), twist, delay: rng.u64(..2) },
        17..=18 => Op::Advance { by: rng.u64(1..4) },
        19 => Op::Requeue { ago: ago(rng) },
        20 => Op::Wake { lane, active: rng.usize(..3) },
        21 => Op::Seize { ago: ago(rng) },
        22 => Op::Prune { older_than: rng.u64(..4) },
        _ => Op::CheckDedup { lane: 1, payload: rng.usize(..2), target: maybe(rng, 2) },
    }
}

fn verdict(which: usize, delay: u64) -> Verdict {
    let retry = |certainty| Verdict::Retry { delay: ticks(delay), code: "R".into(), error: "again".into(), certainty };
    match which {
        0 => Verdict::sent(),
        1 => Verdict::Sent { result_ref: Some("ref".into()), dedup_hit: false },
        2 => retry(Certainty::Unchanged),
        3 => retry(Certainty::MaybeSent),
        4 => Verdict::Dead { code: "D".into(), error: "no".into(), certainty: Certainty::Resolved, counted: true },
        _ => Verdict::Dead { code: "B".into(), error: "no".into(), certainty: Certainty::Unchanged, counted: false },
    }
}

/// A lease somebody was given: message (by order of creation), token, owner, lane.
#[derive(Clone, Copy, Debug)]
struct Given {
    message: usize,
    token: i64,
    owner: &'static str,
    lane: usize,
}

/// The lease an operation shows, with its twist.
fn shown(given: &[Given], ago: usize, twist: Twist) -> Option<Given> {
    let mut lease = *given.iter().rev().nth(ago % given.len().max(1))?;
    match twist {
        Twist::Nothing => {}
        Twist::Owner => lease.owner = if lease.owner == "w0" { "w1" } else { "w0" },
        Twist::Token => lease.token -= 1,
        Twist::Lane => lease.lane = (lease.lane + 1) % LANES.len(),
    }
    Some(lease)
}

/// The messages an operation names, of `made` in all.
fn named(made: usize, ago: usize) -> Option<usize> {
    (made > 0).then(|| made - 1 - ago % made)
}

// ---- the oracle ----

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Live,
    Sent,
    Dead,
    Gone,
}

#[derive(Clone, Debug)]
struct Row {
    lane: usize,
    payload: usize,
    target: Option<usize>,
    active: Option<usize>,
    state: State,
    /// Tick, and the operation that set it.
    due: (u64, usize),
    attempts: u32,
    crashes: u32,
    maybe_sent: bool,
    token: i64,
    lock: Option<(&'static str, u64)>,
    reference: Option<&'static str>,
    code: Option<&'static str>,
    finished: u64,
    history: Vec<(&'static str, u32, i64)>,
}

struct Key {
    message: usize,
    digest: (usize, Option<usize>),
    expires: u64,
}

/// What was sent on the lane with dedup.
struct Content {
    message: usize,
    payload: usize,
    target: Option<usize>,
    reference: Option<&'static str>,
    sent: u64,
}

#[derive(Default)]
struct Oracle {
    now: u64,
    op: usize,
    rows: Vec<Row>,
    keys: BTreeMap<(usize, usize), Key>,
    contents: Vec<Content>,
    conflicts: usize,
    given: Vec<Given>,
}

impl Oracle {
    fn apply(&mut self, op: &Op) -> String {
        self.op += 1;
        match op {
            Op::Enqueue { lane, payload, key, active, target, delay } => {
                let (outcome, message) = self.enqueue(*lane, *payload, *key, *active, *target, *delay);
                format!("{outcome:?} {message}")
            }
            Op::Claim { lane, owner, limit, lease, adopt } => {
                self.claim(*lane, OWNERS[*owner], *limit, *lease, *adopt, None)
            }
            Op::ClaimIds { lane, owner, ago, limit } => {
                let ids: Vec<usize> = ago.iter().filter_map(|ago| named(self.rows.len(), *ago)).collect();
                self.claim(*lane, OWNERS[*owner], *limit, 1, true, Some(&ids))
            }
            Op::Settle { ago, twist, verdict, delay, again } => match shown(&self.given, *ago, *twist) {
                Some(lease) => format!("{:?}", self.settle(lease, *verdict, *delay, *again)),
                None => String::new(),
            },
            Op::Renew { ago, twist, lease } => {
                let Some(shown) = shown(&self.given, *ago, *twist) else { return String::new() };
                let (now, holds) = (self.now, self.holds(shown));
                let row = &mut self.rows[shown.message];
                let kept = holds && row.lock.is_some_and(|(_, until)| until > now);
                if kept {
                    row.lock = Some((shown.owner, now + lease));
                }
                format!("{kept}")
            }
            Op::Defer { ago, twist, delay } => {
                let Some(shown) = shown(&self.given, *ago, *twist) else { return String::new() };
                let held = self.holds(shown);
                if held {
                    let due = (self.now + delay, self.op);
                    let row = &mut self.rows[shown.message];
                    (row.lock, row.due, row.code) = (None, due, Some("PAUSED"));
                }
                format!("{held}")
            }
            Op::Advance { by } => {
                self.now += by;
                String::new()
            }
            Op::Requeue { ago } => {
                named(self.rows.len(), *ago).map_or(String::new(), |n| format!("{:?}", self.requeue(n)))
            }
            Op::Wake { lane, active } => {
                let (now, op) = (self.now, self.op);
                let waits = |r: &&mut Row| {
                    r.state == State::Live
                        && r.lane == *lane
                        && r.active == Some(*active)
                        && r.lock.is_none()
                        && r.due.0 > now
                };
                let woken = self.rows.iter_mut().filter(waits).map(|r| r.due = (now, op)).count();
                format!("{woken}")
            }
            Op::Seize { ago } => {
                let Some(n) = named(self.rows.len(), *ago) else { return String::new() };
                let now = self.now;
                let row = &mut self.rows[n];
                if row.state != State::Live {
                    return "[]".to_owned();
                }
                row.maybe_sent |= row.lock.is_some();
                row.token += 1;
                row.lock = Some(("operator", now + 1));
                self.given.push(Given { message: n, token: row.token, owner: "operator", lane: row.lane });
                format!("[{n}:{}]", row.token)
            }
            Op::Prune { older_than } => self.prune(*older_than),
            Op::CheckDedup { lane: _, payload, target } => {
                let fresh =
                    |c: &&Content| c.payload == *payload && c.target == *target && c.sent + RETENTION > self.now;
                let hit = self.contents.iter().filter(fresh).min_by_key(|c| c.message);
                format!("{:?}", hit.map(|c| c.reference))
            }
        }
    }

    fn enqueue(
        &mut self,
        lane: usize,
        payload: usize,
        key: Option<usize>,
        active: Option<usize>,
        target: Option<usize>,
        delay: u64,
    ) -> (Enqueued, usize) {
        let same = |same: bool| if same { Enqueued::Exists } else { Enqueued::Differs };
        if let Some(held) = key.and_then(|key| self.keys.get(&(lane, key)))
            && (held.expires > self.now || self.rows[held.message].state == State::Live)
        {
            return (same(held.digest == (payload, target)), held.message);
        }
        let holds = |r: &Row| r.state == State::Live && r.lane == lane && r.active == active;
        if active.is_some()
            && let Some(holder) = self.rows.iter().position(holds)
        {
            return (same(self.rows[holder].payload == payload), holder);
        }
        let message = self.rows.len();
        if let Some(key) = key {
            self.keys.insert((lane, key), Key { message, digest: (payload, target), expires: self.now + KEY_TTL });
        }
        self.rows.push(Row {
            lane,
            payload,
            target,
            active,
            state: State::Live,
            due: (self.now + delay, self.op),
            attempts: 0,
            crashes: 0,
            maybe_sent: false,
            token: 0,
            lock: None,
            reference: None,
            code: None,
            finished: 0,
            history: vec![],
        });
        (Enqueued::Created, message)
    }

    fn claim(
        &mut self,
        lane: usize,
        owner: &'static str,
        limit: usize,
        lease: u64,
        adopt: bool,
        ids: Option<&[usize]>,
    ) -> String {
        let now = self.now;
        let takes_over = |r: &Row| r.lock.is_some_and(|(holder, _)| holder != owner);
        let mut found: Vec<usize> = (0..self.rows.len())
            .filter(|n| {
                let r = &self.rows[*n];
                let free = r.lock.is_none_or(|(holder, until)| until <= now || (adopt && holder == owner));
                let ordinary = ids.is_some() || r.crashes + u32::from(takes_over(r)) <= 1;
                r.state == State::Live
                    && r.lane == lane
                    && r.due.0 <= now
                    && free
                    && ordinary
                    && ids.is_none_or(|ids| ids.contains(n))
            })
            .collect();
        found.sort_by_key(|n| (self.rows[*n].due, *n));
        found.truncate(limit);
        let mut answer = String::new();
        for n in found {
            let row = &mut self.rows[n];
            let from = row.lock.map(|(holder, _)| holder).filter(|holder| *holder != owner);
            row.token += 1;
            if from.is_some() {
                row.crashes = (row.crashes + 1).min(row.crashes.max(5));
                row.maybe_sent = true;
                row.history.push(("takeover", row.attempts, row.token));
            }
            row.lock = Some((owner, now + lease));
            let _ =
                write!(answer, "[{n}:{} a{} c{} m{} {from:?}]", row.token, row.attempts, row.crashes, row.maybe_sent);
            self.given.push(Given { message: n, token: row.token, owner, lane });
        }
        answer
    }

    fn holds(&self, lease: Given) -> bool {
        let row = &self.rows[lease.message];
        row.state == State::Live
            && row.token == lease.token
            && row.lock.is_some_and(|(holder, _)| holder == lease.owner)
    }

    fn settle(&mut self, lease: Given, which: usize, delay: u64, again: bool) -> Settled {
        let kind = ["sent", "sent", "retry", "retry", "dead", "dead"][which];
        let (now, op) = (self.now, self.op);
        if !self.holds(lease) || self.rows[lease.message].lane != lease.lane {
            let row = &self.rows[lease.message];
            let proven = match kind {
                "sent" => row.state == State::Sent && row.token == lease.token,
                _ => row.history.iter().any(|(k, _, token)| *k == kind && *token == lease.token),
            };
            if again && proven {
                return Settled::Applied;
            }
            if again && row.state == State::Gone {
                return Settled::Unknown;
            }
            self.conflicts += 1;
            return Settled::LeaseLost;
        }
        let row = &mut self.rows[lease.message];
        row.lock = None;
        row.attempts += u32::from((2..5).contains(&which));
        if kind != "sent" {
            row.history.push((kind, row.attempts, row.token));
            row.code = Some(["", "", "R", "R", "D", "B"][which]);
        }
        match which {
            2 | 3 => {
                row.due = (now + delay, op);
                row.crashes = 0;
                row.maybe_sent |= which == 3;
            }
            4 | 5 => {
                (row.state, row.finished) = (State::Dead, now);
                row.maybe_sent &= which != 4;
            }
            _ => {
                row.reference = (which == 1).then_some("ref");
                row.finished = now;
                row.state = if LANES[lease.lane] == "fleeting" { State::Gone } else { State::Sent };
                if LANES[lease.lane] == "dedup" {
                    let content = Content {
                        message: lease.message,
                        payload: row.payload,
                        target: row.target,
                        reference: row.reference,
                        sent: now,
                    };
                    self.contents.push(content);
                }
            }
        }
        Settled::Applied
    }

    fn requeue(&mut self, n: usize) -> Requeued {
        let (lane, active) = (self.rows[n].lane, self.rows[n].active);
        if self.rows[n].state != State::Dead {
            return Requeued::NotDead;
        }
        if active.is_some() && self.rows.iter().any(|r| r.state == State::Live && r.lane == lane && r.active == active)
        {
            return Requeued::Conflict;
        }
        let (due, until) = ((self.now, self.op), self.now + KEY_TTL);
        self.keys.values_mut().filter(|key| key.message == n).for_each(|key| key.expires = key.expires.max(until));
        let row = &mut self.rows[n];
        (row.state, row.attempts, row.crashes, row.due) = (State::Live, 0, 0, due);
        Requeued::Requeued
    }

    fn prune(&mut self, older_than: u64) -> String {
        let (now, mut messages) = (self.now, 0);
        for (n, row) in self.rows.iter_mut().enumerate() {
            if matches!(row.state, State::Sent | State::Dead) && row.finished + older_than <= now {
                row.state = State::Gone;
                row.history.clear();
                self.contents.retain(|c| c.message != n);
                messages += 1;
            }
        }
        let before = self.keys.len();
        let rows = &self.rows;
        self.keys.retain(|_, key| key.expires > now || rows[key.message].state == State::Live);
        format!("{messages} {}", before - self.keys.len())
    }

    fn state(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.rows.iter().enumerate().map(|(n, r)| r.shown(n)).collect();
        let live = self.rows.iter().filter(|r| r.state == State::Live).count();
        let done = self.rows.iter().filter(|r| matches!(r.state, State::Sent | State::Dead)).count();
        let attempts: usize = self.rows.iter().map(|r| r.history.len()).sum();
        lines.push(format!("{live} {done} {} {attempts} {} {}", self.keys.len(), self.contents.len(), self.conflicts));
        lines
    }
}

impl Row {
    fn shown(&self, n: usize) -> String {
        if self.state == State::Gone {
            // Attempts of a message whose sent row was not kept are pruned by nobody, and seen by nobody.
            return format!("{n} gone");
        }
        let lock = if self.state == State::Live { self.lock } else { None };
        let active = self.active.map(|k| KEYS[k]);
        format!(
            "{n} {:?} due {} a{} c{} m{} token {} lock {lock:?} ref {:?} code {:?} active {active:?} {:?}",
            self.state,
            self.due.0,
            self.attempts,
            self.crashes,
            self.maybe_sent,
            self.token,
            self.reference,
            self.code,
            self.history
        )
    }
}

// ---- a database ----

struct Subject {
    db: Database,
    start: Timestamp,
    ids: Vec<i64>,
    given: Vec<Given>,
}

impl Subject {
    async fn new(db: &Database) -> Subject {
        let wipe = ["outbox", "outbox_keys", "outbox_attempts", "outbox_dedup", "write_audit", "outbox_done"];
        let (permit, withdraw) = match db.dialect {
            Dialect::Sqlite => ("INSERT INTO postrider_permit VALUES ('prune')", "DELETE FROM postrider_permit"),
            Dialect::Postgres => ("SET postrider.permit = 'prune'", "RESET postrider.permit"),
            Dialect::Mysql => ("SET @postrider_permit = 'prune'", "SET @postrider_permit = NULL"),
        };
        let mut raw = db.raw().await;
        raw.run(permit).await.unwrap();
        for table in wipe {
            raw.run(&format!("DELETE FROM {table}")).await.unwrap();
        }
        raw.run(withdraw).await.unwrap();
        let start = db.outbox.store().walk("plain", 0, None, 1).await.unwrap().now;
        Subject { db: db.clone(), start, ids: vec![], given: vec![] }
    }

    fn name(&self, id: i64) -> usize {
        self.ids.iter().position(|known| *known == id).unwrap_or(usize::MAX)
    }

    fn tick(&self, moment: Timestamp) -> u64 {
        moment.since(self.start).as_secs() / TICK.as_secs()
    }

    fn lease(&self, given: Given) -> Lease {
        Lease { id: self.ids[given.message], token: given.token }
    }

    async fn apply(&mut self, op: &Op) -> String {
        let outbox = self.db.outbox.clone();
        match op {
            Op::Enqueue { lane, payload, key, active, target, delay } => {
                let mut message = NewMessage::new(LANES[*lane], PAYLOADS[*payload]).delay(ticks(*delay));
                message.key = key.map(|k| KEYS[k].to_owned());
                message.active_key = active.map(|k| KEYS[k].to_owned());
                message.target = target.map(|t| TARGETS[t].to_owned());
                let entry = self.db.enqueue(message).await;
                if entry.outcome == Enqueued::Created {
                    self.ids.push(entry.id);
                }
                format!("{:?} {}", entry.outcome, self.name(entry.id))
            }
            Op::Claim { lane, owner, limit, lease, adopt } => {
                let from = if *adopt { From::Adopt { mark: None, known: vec![] } } else { From::Mark(None) };
                self.claim(*lane, OWNERS[*owner], *limit, *lease, from).await
            }
            Op::ClaimIds { lane, owner, ago, limit } => {
                let ids = ago.iter().filter_map(|ago| named(self.ids.len(), *ago)).map(|n| self.ids[n]).collect();
                self.claim(*lane, OWNERS[*owner], *limit, 1, From::Ids(ids)).await
            }
            Op::Settle { ago, twist, verdict: which, delay, again } => {
                let Some(shown) = shown(&self.given, *ago, *twist) else { return String::new() };
                let mut entry = Settlement::new(self.lease(shown), verdict(*which, *delay));
                entry.again = *again;
                let answers = self.db.settle_all(LANES[shown.lane], shown.owner, &[entry]).await;
                format!("{:?}", answers[0])
            }
            Op::Renew { ago, twist, lease } => {
                let Some(shown) = shown(&self.given, *ago, *twist) else { return String::new() };
                format!("{}", outbox.renew_lease(shown.owner, self.lease(shown), ticks(*lease)).await.unwrap())
            }
            Op::Defer { ago, twist, delay } => {
                let Some(shown) = shown(&self.given, *ago, *twist) else { return String::new() };
                format!("{}", self.db.defer(shown.owner, self.lease(shown), ticks(*delay)).await)
            }
            Op::Advance { by } => {
                self.db.advance(ticks(*by));
                String::new()
            }
            Op::Requeue { ago } => {
                let Some(n) = named(self.ids.len(), *ago) else { return String::new() };
                format!("{:?}", outbox.requeue(vec![self.ids[n]]).await.unwrap()[0])
            }
            Op::Wake { lane, active } => {
                format!("{}", outbox.wake(LANES[*lane], vec![KEYS[*active].to_owned()]).await.unwrap())
            }
            Op::Seize { ago } => {
                let Some(n) = named(self.ids.len(), *ago) else { return String::new() };
                let seized = outbox.seize("operator", vec![self.ids[n]], TICK).await.unwrap();
                let Some((lane, lease)) = seized.first() else { return "[]".to_owned() };
                let lane = LANES.iter().position(|l| l == lane).unwrap();
                self.given.push(Given { message: n, token: lease.token, owner: "operator", lane });
                format!("[{n}:{}]", lease.token)
            }
            Op::Prune { older_than } => {
                let pruned = self.db.prune(ticks(*older_than), 10_000).await;
                format!("{} {}", pruned.messages, pruned.keys)
            }
            Op::CheckDedup { lane, payload, target } => {
                let probe = (target.map(|t| TARGETS[t].to_owned()), sha256(PAYLOADS[*payload].as_bytes()));
                let hits = outbox.check_dedup(LANES[*lane], vec![probe]).await.unwrap();
                format!("{:?}", hits[0])
            }
        }
    }

    async fn claim(&mut self, lane: usize, owner: &'static str, limit: usize, lease: u64, from: From) -> String {
        let mut answer = String::new();
        for m in self.db.claim_with(LANES[lane], owner, limit as u32, ticks(lease), from).await {
            let (n, from) = (self.name(m.id), &m.taken_over_from);
            let _ = write!(answer, "[{n}:{} a{} c{} m{} {from:?}]", m.lease_token, m.attempts, m.crashes, m.maybe_sent);
            self.given.push(Given { message: n, token: m.lease_token, owner, lane });
        }
        answer
    }

    async fn state(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (n, id) in self.ids.iter().enumerate() {
            let Some((s, history)) = self.db.outbox.show(*id).await.unwrap() else {
                lines.push(format!("{n} gone"));
                continue;
            };
            let state = match s.status {
                Status::Pending | Status::Leased => State::Live,
                Status::Sent => State::Sent,
                Status::Dead => State::Dead,
            };
            let lock = s.locked_by.as_deref().zip(s.lease_until.map(|until| self.tick(until)));
            let history: Vec<(&str, u32, i64)> =
                history.attempts.iter().map(|a| (a.kind.as_str(), a.attempt, a.lease_token)).collect();
            lines.push(format!(
                "{n} {state:?} due {} a{} c{} m{} token {} lock {lock:?} ref {:?} code {:?} active {:?} {history:?}",
                self.tick(s.due_at),
                s.attempts,
                s.crashes,
                s.maybe_sent,
                s.lease_token,
                s.result_ref,
                s.last_error_code,
                s.active_key
            ));
        }
        let [live, done, keys, attempts] = self.db.counts().await;
        let (contents, audits) = (self.db.count("outbox_dedup").await, self.db.count("write_audit").await);
        lines.push(format!("{live} {done} {keys} {attempts} {contents} {audits}"));
        lines
    }
}

// ---- the comparison ----

/// The first difference, if any.
async fn difference(db: &Database, ops: &[Op]) -> Option<String> {
    let (mut oracle, mut subject) = (Oracle::default(), Subject::new(db).await);
    for (n, op) in ops.iter().enumerate() {
        let (wanted, got) = (oracle.apply(op), subject.apply(op).await);
        if wanted != got {
            return Some(format!("operation {n}, {op:?}\n  oracle:   {wanted}\n  database: {got}"));
        }
    }
    let (wanted, got) = (oracle.state(), subject.state().await);
    let place = (0..wanted.len().max(got.len())).find(|n| wanted.get(*n) != got.get(*n))?;
    Some(format!("the final state\n  oracle:   {:?}\n  database: {:?}", wanted.get(place), got.get(place)))
}

/// Leaves out whatever can be left out.
async fn shrink(db: &Database, mut ops: Vec<Op>) -> Vec<Op> {
    let mut size = ops.len() / 2;
    while size > 0 {
        let mut start = 0;
        while start < ops.len() {
            let mut fewer = ops.clone();
            fewer.drain(start..(start + size).min(ops.len()));
            if difference(db, &fewer).await.is_some() { ops = fewer } else { start += size }
        }
        size /= 2;
    }
    ops
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

async fn compare(db: Database) {
    let db = db.again(lanes()).await;
    db.outbox.migrate().await.unwrap();
    let first = setting("POSTRIDER_DIFFERENTIAL_SEED", 1);
    for seed in first..first + setting("POSTRIDER_DIFFERENTIAL_CASES", 64) {
        let ops = generate(&mut fastrand::Rng::with_seed(seed), 40);
        if difference(&db, &ops).await.is_some() {
            let fewest = shrink(&db, ops).await;
            let told = difference(&db, &fewest).await.unwrap_or_else(|| "it went away when run again".to_owned());
            let list: Vec<String> = fewest.iter().map(|op| format!("  {op:?}")).collect();
            panic!("seed {seed} on {}: {told}\n{}", db.dialect.name(), list.join("\n"));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_agrees_with_the_oracle() {
    harness::case(harness::sqlite().await, compare).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_agrees_with_the_oracle() {
    harness::case(harness::postgres().await, compare).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_agrees_with_the_oracle() {
    harness::case(harness::mysql().await, compare).await;
}
