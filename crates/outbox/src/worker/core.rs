//! The worker's mind, without hands: `step` says what to do, `handle` hears what came of it. It reads no clock, draws
//! its chances from a seed and does no I/O, so that a simulator can drive the very code that runs in production.
//!
//! One core serves several lanes of one database. What it holds is in `held`, from the claim until the settle is
//! answered; it keeps renewing all of it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use crate::clock::Tick;
use crate::decide::{self, Budgets, Decision};
use crate::error::{Effect, Error, Kind};
use crate::lease::Lease;
use crate::message::{Message, Sha};
use crate::outcome::{FlushCode, Outcome, Reach, Settled, Settlement, Verdict, code};
use crate::store::{Claim, Claimed, From, Mark, Walked};

/// A mark stays this far behind the clock: commits younger than this may still appear before it.
const MARK_LAG: Duration = Duration::from_millis(200);
/// Entries of one walk step, and the pace of the walk.
const WALK_STEP: u32 = 1000;
const WALK_PER_SECOND: u64 = 20_000;
/// Outcomes wait this long for company before they are settled.
const SETTLE_WAIT: Duration = Duration::from_millis(3);
/// Claims under way at once, per lane; the second only while there is more than one brings.
const CLAIMS: usize = 2;
/// Settles under way at once, per lane.
const SETTLES: usize = 2;
/// A suspect that waited this long is served even if there is other work.
const SUSPECT_PATIENCE: Duration = Duration::from_secs(10);

/// How one lane is worked.
#[derive(Clone, Debug)]
pub struct LaneSettings {
    pub lane: String,
    /// The shards this process takes.
    pub shards: Vec<u32>,
    pub concurrency: usize,
    pub batch: usize,
    pub lease: Duration,
    pub poll: Duration,
    pub budgets: Budgets,
    pub dedup: bool,
}

impl LaneSettings {
    /// The defaults of a user's own lane.
    pub fn new(lane: impl Into<String>) -> Self {
        LaneSettings {
            lane: lane.into(),
            shards: vec![0],
            concurrency: 64,
            batch: 256,
            lease: Duration::from_secs(60),
            poll: Duration::from_millis(500),
            budgets: Budgets::default(),
            dedup: false,
        }
    }

    fn prefetch(&self) -> usize {
        (self.concurrency.min(self.batch) / 2).max(1)
    }

    fn per_target(&self) -> usize {
        (self.concurrency / 4).max(1)
    }
}

/// How the whole worker behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `hostname:pid:incarnation`; nobody else ever has it.
    pub owner: String,
    pub lanes: Vec<LaneSettings>,
    pub drain: Duration,
    /// Handle all that is due, then finish.
    pub once: bool,
    /// Where all chances come from.
    pub seed: u64,
}

/// Names one store operation, from its command to its event.
pub type Op = u64;

/// Something to be done.
#[derive(Debug)]
pub enum Command {
    Claim {
        op: Op,
        claim: Claim,
    },
    Walk {
        op: Op,
        lane: usize,
        shard: u32,
        after: Option<Mark>,
        limit: u32,
    },
    Dedup {
        op: Op,
        lane: usize,
        probes: Vec<(Option<String>, Sha)>,
    },
    Settle {
        op: Op,
        lane: usize,
        entries: Vec<Settlement>,
    },
    Defer {
        op: Op,
        leases: Vec<Lease>,
        delay: Duration,
        code: Option<String>,
    },
    Renew {
        op: Op,
        leases: Vec<Lease>,
        lease: Duration,
    },
    Deliver {
        lane: usize,
        message: Box<Message>,
    },
    /// Stop the delivery under way; no outcome is expected any more.
    Abort {
        id: i64,
    },
}

/// Something that came about.
#[derive(Debug)]
pub enum Event {
    Claimed {
        op: Op,
        result: Result<Claimed, Error>,
    },
    Walked {
        op: Op,
        result: Result<Walked, Error>,
    },
    Deduped {
        op: Op,
        result: Result<Vec<Option<Option<String>>>, Error>,
    },
    Settled {
        op: Op,
        result: Result<Vec<Settled>, Error>,
    },
    Deferred {
        op: Op,
        result: Result<Vec<bool>, Error>,
    },
    Renewed {
        op: Op,
        result: Result<Vec<bool>, Error>,
    },
    Delivered {
        id: i64,
        outcome: Outcome,
    },
    /// There may be new work.
    Wake,
    /// Finish or give back, then end.
    Shutdown,
}

/// Counts since the start, per lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub claimed: u64,
    pub takeovers: u64,
    pub sent: u64,
    pub dedup_hits: u64,
    pub retried: u64,
    pub dead: u64,
    pub deferred: u64,
    pub conflicts: u64,
    pub unknown: u64,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Claimed, not begun. On lanes with dedup it must be checked first.
    Ready {
        checked: bool,
    },
    Running,
    /// Its outcome is known and waits to be settled, or is being settled.
    Settling,
}

type Twin = (Option<String>, Sha);

#[derive(Debug)]
struct Held {
    lane: usize,
    token: i64,
    attempts: u32,
    /// Until when the lease surely lasts, counted from before the claim was sent.
    until: Tick,
    state: State,
    target: Option<String>,
    twin: Option<Twin>,
    /// It stands for its twins: they wait until it is settled.
    first_twin: bool,
}

#[derive(Debug, Default)]
struct Walk {
    cursor: Option<Mark>,
    next_at: Tick,
    busy: bool,
    /// This pass began when claims found nothing more.
    began_dry: bool,
    /// Such a pass was completed, and nothing was claimed since.
    clean: bool,
}

#[derive(Debug, Default)]
struct Shard {
    id: u32,
    mark: Option<Mark>,
    /// A claim's answer was lost: rows may be ours without our knowing.
    adopt: bool,
    /// Claim without waiting for the poll.
    hungry: bool,
    /// The last claim came back full: there is more.
    deep: bool,
    /// The last claim found nothing at all.
    dry: bool,
    walk: Walk,
    /// Claimable rows the walk found behind the mark.
    found: Vec<i64>,
}

impl Shard {
    /// What an earlier step found is claimed first.
    fn may_walk(&self) -> bool {
        !self.walk.busy && self.mark.is_some() && self.found.is_empty()
    }
}

/// Waits between tries at a database in trouble.
#[derive(Debug, Default)]
struct Trouble {
    failures: u32,
    until: Tick,
}

impl Trouble {
    fn again(&mut self, now: Tick, chance: f64) {
        let ceiling = 100_u64 << self.failures.min(6);
        self.failures += 1;
        self.until =
            now.plus(Duration::from_millis((ceiling as f64 * (0.5 + 0.5 * chance)) as u64).min(Duration::from_secs(5)));
    }

    fn over(&mut self) {
        *self = Trouble::default();
    }
}

#[derive(Debug)]
struct Lane {
    settings: LaneSettings,
    shards: Vec<Shard>,
    turn: usize,
    next_poll: Tick,
    /// Claims under way, and how many rows they may bring.
    claims: usize,
    coming: usize,
    claim_trouble: Trouble,
    ready: VecDeque<Box<Message>>,
    running: usize,
    by_target: HashMap<String, usize>,
    verdicts: Vec<Settlement>,
    verdicts_since: Tick,
    settling: usize,
    settle_trouble: Trouble,
    give_back: Vec<(Lease, Duration, Option<String>)>,
    giving_back: usize,
    renew_at: Tick,
    renewing: bool,
    deduping: bool,
    twins: HashSet<Twin>,
    tally: Tally,
}

#[derive(Debug)]
struct Suspect {
    lane: usize,
    shard: usize,
    suspicion: u32,
    since: Tick,
}

/// Suspects are delivered apart, with nothing else held.
#[derive(Debug, PartialEq, Eq)]
enum Apart {
    No,
    Clearing,
    Serving { since: Tick, claimed: bool },
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Draining { abort_at: Tick, end_at: Tick, aborted: bool },
}

enum Pending {
    Claim { lane: usize, shard: usize, issued: Tick, limit: u32, from_mark: bool },
    Walk { lane: usize, shard: usize },
    Dedup { lane: usize, ids: Vec<i64> },
    Settle { lane: usize, entries: Vec<Settlement> },
    Defer { lane: usize, leases: Vec<Lease>, delay: Duration, code: Option<String> },
    Renew { lane: usize, leases: Vec<Lease>, issued: Tick },
}

pub struct Core {
    owner: String,
    once: bool,
    drain: Duration,
    rng: fastrand::Rng,
    lanes: Vec<Lane>,
    held: HashMap<i64, Held>,
    pending: HashMap<Op, Pending>,
    next_op: Op,
    suspects: BTreeMap<i64, Suspect>,
    apart: Apart,
    rest_until: Tick,
    phase: Phase,
    commands: Vec<Command>,
}

impl Core {
    pub fn new(settings: Settings, now: Tick) -> Self {
        let lane = |settings: LaneSettings| Lane {
            shards: settings.shards.iter().map(|&id| Shard { id, hungry: true, ..Shard::default() }).collect(),
            settings,
            turn: 0,
            next_poll: now,
            claims: 0,
            coming: 0,
            claim_trouble: Trouble::default(),
            ready: VecDeque::new(),
            running: 0,
            by_target: HashMap::new(),
            verdicts: Vec::new(),
            verdicts_since: now,
            settling: 0,
            settle_trouble: Trouble::default(),
            give_back: Vec::new(),
            giving_back: 0,
            renew_at: Tick::from_micros(u64::MAX),
            renewing: false,
            deduping: false,
            twins: HashSet::new(),
            tally: Tally::default(),
        };
        Core {
            owner: settings.owner,
            once: settings.once,
            drain: settings.drain,
            rng: fastrand::Rng::with_seed(settings.seed),
            lanes: settings.lanes.into_iter().map(lane).collect(),
            held: HashMap::new(),
            pending: HashMap::new(),
            next_op: 1,
            suspects: BTreeMap::new(),
            apart: Apart::No,
            rest_until: now,
            phase: Phase::Running,
            commands: Vec::new(),
        }
    }

    pub fn owner(&self) -> &str {
        &self.owner
    }

    pub fn lane_name(&self, lane: usize) -> &str {
        &self.lanes[lane].settings.lane
    }

    pub fn tally(&self) -> impl Iterator<Item = (&str, Tally)> {
        self.lanes.iter().map(|lane| (lane.settings.lane.as_str(), lane.tally))
    }

    /// Messages held right now.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Nothing is left to be done, by a drain or by `once`.
    pub fn finished(&self, now: Tick) -> bool {
        match self.phase {
            Phase::Draining { end_at, .. } => (self.held.is_empty() && self.pending.is_empty()) || now >= end_at,
            Phase::Running => {
                self.once
                    && self.held.is_empty()
                    && self.pending.is_empty()
                    && self.suspects.is_empty()
                    && self.lanes.iter().flat_map(|l| &l.shards).all(|s| s.dry && s.walk.clean && s.found.is_empty())
            }
        }
    }

    /// Says what to do now.
    pub fn step(&mut self, now: Tick) -> Vec<Command> {
        self.advance_drain(now);
        self.advance_suspects(now);
        for lane in 0..self.lanes.len() {
            self.start_deliveries(lane, now);
            self.check_dedup(lane);
            self.flush_verdicts(lane, now);
            self.flush_give_back(lane, now);
            self.renew(lane, now);
            self.claim(lane, now);
            self.walk(lane, now);
        }
        std::mem::take(&mut self.commands)
    }

    /// When `step` should run again, if nothing happens before.
    pub fn next_step(&self, now: Tick) -> Tick {
        let mut next = now.plus(Duration::from_secs(5));
        let mut at = |tick: Tick| next = next.min(tick);
        if let Phase::Draining { abort_at, end_at, aborted } = self.phase {
            at(if aborted { end_at } else { abort_at });
        }
        for lane in &self.lanes {
            if !lane.verdicts.is_empty() && lane.settling < SETTLES {
                at(lane.verdicts_since.plus(SETTLE_WAIT).max(lane.settle_trouble.until));
            }
            if !lane.give_back.is_empty() && lane.giving_back == 0 {
                at(lane.settle_trouble.until);
            }
            if !lane.renewing {
                at(lane.renew_at);
            }
            if self.phase == Phase::Running {
                if self.may_claim(lane) {
                    at(lane.next_poll.max(lane.claim_trouble.until));
                }
                for shard in lane.shards.iter().filter(|s| s.may_walk()) {
                    at(shard.walk.next_at.max(lane.claim_trouble.until));
                }
            }
        }
        if self.apart == Apart::No
            && let Some(suspect) = self.suspects.values().map(|s| s.since).min()
        {
            at(suspect.plus(SUSPECT_PATIENCE).max(self.rest_until));
        }
        next.max(now)
    }

    /// Hears what came of a command, or from the world.
    pub fn handle(&mut self, now: Tick, event: Event) {
        match event {
            Event::Wake => self.lanes.iter_mut().flat_map(|l| &mut l.shards).for_each(|s| s.hungry = true),
            Event::Shutdown => self.begin_drain(now),
            Event::Delivered { id, outcome } => self.delivered(id, outcome, now),
            Event::Claimed { op, result } => self.claimed(op, result, now),
            Event::Walked { op, result } => self.walked(op, result, now),
            Event::Deduped { op, result } => self.deduped(op, result, now),
            Event::Settled { op, result } => self.settled(op, result, now),
            Event::Deferred { op, result } => self.deferred(op, result, now),
            Event::Renewed { op, result } => self.renewed(op, result, now),
        }
    }

    fn op(&mut self, pending: Pending) -> Op {
        let op = self.next_op;
        self.next_op += 1;
        self.pending.insert(op, pending);
        op
    }

    // ---- claiming ----

    /// How many more messages the lane may hold.
    fn capacity(&self, lane: &Lane) -> usize {
        let s = &lane.settings;
        // Outcomes the database is slow to take hold claims back.
        if lane.verdicts.len() + lane.settling * s.batch > 3 * s.batch.max(s.concurrency) {
            return 0;
        }
        (s.concurrency + s.prefetch()).saturating_sub(lane.running + lane.ready.len() + lane.coming).min(s.batch)
    }

    fn may_claim(&self, lane: &Lane) -> bool {
        let capacity = self.capacity(lane);
        // One row at a time would cost a transaction each: wait until a fair part is free.
        let enough = lane.settings.prefetch().div_ceil(2).min(lane.settings.batch);
        self.phase == Phase::Running
            && self.apart == Apart::No
            && lane.claims < if lane.shards.iter().any(|s| s.adopt) { 1 } else { CLAIMS }
            && capacity > 0
            && (capacity >= enough || lane.running + lane.claims == 0)
    }

    fn claim(&mut self, index: usize, now: Tick) {
        while self.claim_once(index, now) {}
    }

    fn claim_once(&mut self, index: usize, now: Tick) -> bool {
        let lane = &self.lanes[index];
        if !self.may_claim(lane) || now < lane.claim_trouble.until {
            return false;
        }
        let capacity = self.capacity(lane);
        let poll_due = now >= lane.next_poll;
        let shards = lane.shards.len();
        let wants = |s: &Shard| s.hungry || s.adopt || poll_due || !s.found.is_empty();
        let Some(turn) = (0..shards).map(|n| (lane.turn + n) % shards).find(|&n| wants(&lane.shards[n])) else {
            return false;
        };
        let chance = self.rng.f64();
        let mut known: Vec<i64> = if lane.shards[turn].adopt { self.held.keys().copied().collect() } else { vec![] };
        known.sort_unstable(); // the same seed gives the same trace
        let lane = &mut self.lanes[index];
        if poll_due {
            // A poll looks at every shard once.
            lane.shards.iter_mut().for_each(|s| s.hungry = true);
            lane.next_poll = now.plus(lane.settings.poll.mul_f64(0.8 + 0.4 * chance));
        }
        lane.turn = turn + 1;
        let shard = &mut lane.shards[turn];
        // Where the last claim came back full, the next one goes out before this one's answer.
        shard.hungry = shard.deep && !shard.adopt && lane.claims == 0;
        let from = if shard.adopt {
            From::Adopt { mark: shard.mark, known }
        } else if !shard.found.is_empty() {
            let n = shard.found.len().min(capacity);
            From::Ids(shard.found.drain(..n).collect())
        } else {
            From::Mark(shard.mark)
        };
        self.send_claim(index, turn, from, capacity as u32, now);
        true
    }

    fn send_claim(&mut self, index: usize, shard: usize, from: From, limit: u32, now: Tick) {
        let lane = &mut self.lanes[index];
        lane.claims += 1;
        lane.coming += limit as usize;
        let claim = Claim {
            lane: lane.settings.lane.clone(),
            shard: lane.shards[shard].id,
            limit,
            lease: lane.settings.lease,
            owner: self.owner.clone(),
            max_crashes: lane.settings.budgets.max_crashes,
            from,
        };
        let from_mark = !matches!(claim.from, From::Ids(_));
        let op = self.op(Pending::Claim { lane: index, shard, issued: now, limit, from_mark });
        self.commands.push(Command::Claim { op, claim });
    }

    fn claimed(&mut self, op: Op, result: Result<Claimed, Error>, now: Tick) {
        let Some(Pending::Claim { lane: index, shard, issued, limit, from_mark }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        lane.claims -= 1;
        lane.coming -= limit as usize;
        let claimed = match result {
            Ok(claimed) => claimed,
            Err(error) => {
                if error.effect == Effect::Unknown {
                    lane.shards[shard].adopt = true;
                    // Rows claimed by id lie behind the mark: look from the head.
                    if !from_mark {
                        lane.shards[shard].mark = None;
                    }
                }
                lane.shards[shard].hungry = true;
                lane.claim_trouble.again(now, chance);
                if let Apart::Serving { .. } = self.apart {
                    self.apart = Apart::No;
                }
                tracing::warn!(%error, lane = lane.settings.lane, "a claim failed");
                return;
            }
        };
        lane.claim_trouble.over();
        let place = &mut lane.shards[shard];
        if from_mark {
            place.adopt = false;
            let lag = Mark { due_at: claimed.now.minus(MARK_LAG), id: 0 };
            let reached = match claimed.messages.last() {
                _ if claimed.exhausted => Some(lag),
                Some(last) => Some(Mark { due_at: last.due_at, id: last.id + 1 }.min(lag)),
                None => place.mark,
            };
            place.mark = place.mark.max(reached);
            place.deep = !claimed.exhausted;
            place.hungry |= place.deep;
            place.dry = claimed.messages.is_empty() && claimed.exhausted;
            if place.dry && self.once && !place.walk.clean {
                place.walk.next_at = now;
            }
        }
        place.walk.clean &= claimed.messages.is_empty();
        lane.tally.claimed += claimed.messages.len() as u64;
        if let Apart::Serving { claimed, .. } = &mut self.apart {
            *claimed = true;
        }
        let until = issued.plus(lane.settings.lease);
        lane.renew_at = lane.renew_at.min(issued.plus(lane.settings.lease / 3));
        for message in claimed.messages {
            self.take(index, message, until, claimed.now, now);
        }
    }

    fn take(&mut self, index: usize, message: Message, until: Tick, db_now: crate::time::Timestamp, now: Tick) {
        let lane = &mut self.lanes[index];
        if message.taken_over_from.is_some() {
            lane.tally.takeovers += 1;
        }
        // Our own row, in flight: it takes the new token and goes on.
        if let Some(held) = self.held.get_mut(&message.id) {
            if message.lease_token > held.token {
                held.token = message.lease_token;
                held.until = until;
            }
            return;
        }
        self.suspects.remove(&message.id);
        let dedup = lane.settings.dedup;
        let mut held = Held {
            lane: index,
            token: message.lease_token,
            attempts: message.attempts,
            until,
            state: State::Ready { checked: !dedup },
            target: message.target.clone(),
            twin: dedup.then(|| (message.target.clone(), message.sha())),
            first_twin: false,
        };
        if let Some(verdict) = decide::burial(&message, lane.settings.budgets.max_crashes, db_now) {
            held.state = State::Settling;
            lane.add_verdict(Settlement::new(message.lease(), verdict), now);
        } else if matches!(self.phase, Phase::Draining { .. }) {
            lane.give_back.push((message.lease(), Duration::ZERO, None));
            held.state = State::Settling;
        } else {
            lane.ready.push_back(Box::new(message));
            self.held.insert(lane.ready[lane.ready.len() - 1].id, held);
            return;
        }
        self.held.insert(message.id, held);
    }

    // ---- the walk from the head ----

    fn walk(&mut self, index: usize, now: Tick) {
        let lane = &self.lanes[index];
        if self.phase != Phase::Running || now < lane.claim_trouble.until {
            return;
        }
        for shard in 0..self.lanes[index].shards.len() {
            let place = &self.lanes[index].shards[shard];
            if !place.may_walk() || now < place.walk.next_at {
                continue;
            }
            let (id, after, dry) = (place.id, place.walk.cursor, place.dry);
            let walk = &mut self.lanes[index].shards[shard].walk;
            walk.busy = true;
            walk.began_dry = dry && (after.is_none() || walk.began_dry);
            let op = self.op(Pending::Walk { lane: index, shard });
            self.commands.push(Command::Walk { op, lane: index, shard: id, after, limit: WALK_STEP });
        }
    }

    fn walked(&mut self, op: Op, result: Result<Walked, Error>, now: Tick) {
        let Some(Pending::Walk { lane: index, shard }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        let max_crashes = lane.settings.budgets.max_crashes;
        let place = &mut lane.shards[shard];
        place.walk.busy = false;
        let walked = match result {
            Ok(walked) => walked,
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "the walk from the head failed");
                place.walk.next_at = now.plus(Duration::from_secs(1));
                return;
            }
        };
        for seen in &walked.seen {
            if Some(seen.mark) >= place.mark || self.held.contains_key(&seen.mark.id) {
                continue;
            }
            if !seen.hold.claimable(seen.mark.due_at, walked.now) {
                self.suspects.remove(&seen.mark.id);
                continue;
            }
            let suspicion = seen.hold.suspicion(&self.owner);
            if suspicion >= max_crashes || decide::suspect_group(suspicion, max_crashes).is_none() {
                place.found.push(seen.mark.id);
            } else {
                let suspect = Suspect { lane: index, shard, suspicion, since: now };
                self.suspects.entry(seen.mark.id).or_insert(suspect).suspicion = suspicion;
            }
        }
        let entries = walked.seen.len() as u64;
        match walked.seen.last() {
            Some(last) if entries == u64::from(WALK_STEP) && Some(last.mark) < place.mark => {
                place.walk.cursor = Some(last.mark);
                place.walk.next_at = now.plus(Duration::from_micros(entries * 1_000_000 / WALK_PER_SECOND));
            }
            _ => {
                place.walk.cursor = None;
                place.walk.clean = place.walk.began_dry;
                place.walk.next_at = now.plus(Duration::from_millis(500).mul_f64(1.0 + chance));
            }
        }
    }

    // ---- suspects ----

    fn advance_suspects(&mut self, now: Tick) {
        if self.phase != Phase::Running {
            return;
        }
        let idle = self.held.is_empty() && self.lanes.iter().all(|lane| lane.claims == 0);
        match self.apart {
            Apart::No => {
                let Some(oldest) = self.suspects.values().map(|s| s.since).min() else { return };
                let quiet = idle && self.lanes.iter().flat_map(|l| &l.shards).all(|s| s.dry);
                if quiet || (now >= oldest.plus(SUSPECT_PATIENCE) && now >= self.rest_until) {
                    self.apart = Apart::Clearing;
                    self.advance_suspects(now);
                }
            }
            Apart::Clearing if idle => self.claim_suspects(now),
            Apart::Serving { since, claimed: true } if idle => {
                // At most a tenth of the time, while there is other work.
                self.rest_until = now.plus(now.since(since) * 9);
                self.apart = Apart::No;
                self.advance_suspects(now);
            }
            _ => {}
        }
    }

    fn claim_suspects(&mut self, now: Tick) {
        let Some((lane, shard, suspicion)) =
            self.suspects.values().min_by_key(|s| s.since).map(|s| (s.lane, s.shard, s.suspicion))
        else {
            self.apart = Apart::No;
            return;
        };
        let group = decide::suspect_group(suspicion, self.lanes[lane].settings.budgets.max_crashes).unwrap_or(1);
        let alike = |s: &Suspect| (s.lane, s.shard, s.suspicion) == (lane, shard, suspicion);
        let ids: Vec<i64> = self.suspects.iter().filter(|(_, s)| alike(s)).map(|(id, _)| *id).take(group).collect();
        self.suspects.retain(|id, _| !ids.contains(id));
        self.apart = Apart::Serving { since: now, claimed: false };
        let limit = ids.len() as u32;
        self.send_claim(lane, shard, From::Ids(ids), limit, now);
    }

    // ---- delivering ----

    fn start_deliveries(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        let settings = &lane.settings;
        let (third, per_target) = (settings.lease / 3, settings.per_target());
        let mut passed_over: VecDeque<Box<Message>> = VecDeque::new();
        let mut crowded = 0;
        while lane.running < settings.concurrency {
            let Some(message) = lane.ready.pop_front() else { break };
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            // Right before the first byte at least a third of the lease must be left; `renew` sees to the others.
            let fresh = held.until.since(now) >= third;
            let crowd = held.target.as_ref().is_some_and(|t| lane.by_target.get(t).copied().unwrap_or(0) >= per_target);
            if !fresh || held.state != (State::Ready { checked: true }) || crowd {
                crowded += usize::from(crowd);
                passed_over.push_back(message);
                continue;
            }
            held.state = State::Running;
            lane.running += 1;
            if let Some(target) = &held.target {
                *lane.by_target.entry(target.clone()).or_default() += 1;
            }
            self.commands.push(Command::Deliver { lane: index, message });
        }
        passed_over.append(&mut lane.ready);
        lane.ready = passed_over;
        // More of one target than will fit soon would keep the others out: give the rest back for a moment.
        // With `once` it would be gone for this run, though it was due.
        let excess = if self.once { 0 } else { crowded.saturating_sub(settings.prefetch()) };
        for _ in 0..excess {
            let Some(message) = lane.ready.pop_back() else { break };
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            held.state = State::Settling;
            let delay = Duration::from_millis(500 + self.rng.u64(0..1000));
            lane.give_back.push((Lease { id: message.id, token: held.token }, delay, Some("TARGET_BUSY".to_owned())));
        }
    }

    fn delivered(&mut self, id: i64, outcome: Outcome, now: Tick) {
        let chance = self.rng.f64();
        let Some(held) = self.held.get_mut(&id).filter(|h| h.state == State::Running) else { return };
        let lane = &mut self.lanes[held.lane];
        lane.running -= 1;
        if let Some(target) = &held.target
            && let Some(count) = lane.by_target.get_mut(target)
        {
            *count -= 1;
            if *count == 0 {
                lane.by_target.remove(target);
            }
        }
        held.state = State::Settling;
        let lease = Lease { id, token: held.token };
        match decide::after_delivery(outcome, held.attempts, &lane.settings.budgets, chance) {
            Decision::Settle(verdict) => lane.add_verdict(Settlement::new(lease, verdict), now),
            Decision::Defer { delay, code } => lane.give_back.push((lease, delay, Some(code))),
        }
    }

    // ---- dedup ----

    fn check_dedup(&mut self, index: usize) {
        let lane = &mut self.lanes[index];
        if !lane.settings.dedup || lane.deduping {
            return;
        }
        let mut ids = Vec::new();
        let mut probes = Vec::new();
        for message in &lane.ready {
            let Some(held) = self.held.get_mut(&message.id) else { continue };
            let Some(twin) = &held.twin else { continue };
            // A twin that is being checked or delivered comes first; its outcome decides about this one.
            if held.state == (State::Ready { checked: false }) && !lane.twins.contains(twin) {
                lane.twins.insert(twin.clone());
                probes.push(twin.clone());
                ids.push(message.id);
                held.first_twin = true;
            }
        }
        if !ids.is_empty() {
            lane.deduping = true;
            let op = self.op(Pending::Dedup { lane: index, ids });
            self.commands.push(Command::Dedup { op, lane: index, probes });
        }
    }

    fn deduped(&mut self, op: Op, result: Result<Vec<Option<Option<String>>>, Error>, now: Tick) {
        let Some(Pending::Dedup { lane: index, ids }) = self.pending.remove(&op) else { return };
        let lane = &mut self.lanes[index];
        lane.deduping = false;
        match result {
            Ok(hits) => {
                for (id, hit) in ids.into_iter().zip(hits) {
                    let Some(held) = self.held.get_mut(&id) else { continue };
                    if !matches!(held.state, State::Ready { .. }) {
                        continue;
                    }
                    let Some(result_ref) = hit else {
                        held.state = State::Ready { checked: true };
                        continue;
                    };
                    held.state = State::Settling;
                    lane.ready.retain(|m| m.id != id);
                    let verdict = Verdict::Sent { result_ref, dedup_hit: true };
                    lane.add_verdict(Settlement::new(Lease { id, token: held.token }, verdict), now);
                }
            }
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "the dedup check failed");
                for id in ids {
                    // Given back rather than asked again at once: the database is in trouble.
                    let Some(held) = self.held.get_mut(&id) else { continue };
                    if !matches!(held.state, State::Ready { .. }) {
                        continue;
                    }
                    held.state = State::Settling;
                    lane.ready.retain(|m| m.id != id);
                    lane.give_back.push((Lease { id, token: held.token }, Duration::ZERO, None));
                }
            }
        }
    }

    // ---- settling ----

    fn flush_verdicts(&mut self, index: usize, now: Tick) {
        let draining = self.phase != Phase::Running;
        let lane = &mut self.lanes[index];
        while lane.settling < SETTLES && !lane.verdicts.is_empty() && now >= lane.settle_trouble.until {
            let nothing_else = lane.running == 0;
            let waited = now >= lane.verdicts_since.plus(SETTLE_WAIT);
            if !(draining || nothing_else || waited || lane.verdicts.len() >= lane.settings.batch) {
                return;
            }
            let n = lane.verdicts.len().min(lane.settings.batch.max(1));
            let mut entries: Vec<Settlement> = lane.verdicts.drain(..n).collect();
            for entry in &mut entries {
                if let Some(held) = self.held.get(&entry.lease.id) {
                    entry.lease.token = held.token;
                }
            }
            lane.settling += 1;
            let op = self.next_op;
            self.next_op += 1;
            self.pending.insert(op, Pending::Settle { lane: index, entries: entries.clone() });
            self.commands.push(Command::Settle { op, lane: index, entries });
        }
    }

    fn settled(&mut self, op: Op, result: Result<Vec<Settled>, Error>, now: Tick) {
        let Some(Pending::Settle { lane: index, entries }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        lane.settling -= 1;
        let answers = match result {
            Ok(answers) => answers,
            Err(error) => {
                lane.settle_trouble.again(now, chance);
                tracing::warn!(%error, lane = lane.settings.lane, entries = entries.len(), "a settle failed; it will be tried again");
                let trouble = if error.kind == Kind::Timeout { FlushCode::DbTimeout } else { FlushCode::DbError };
                let again = error.effect == Effect::Unknown;
                for mut entry in entries {
                    entry.again |= again;
                    entry.trouble = Some(trouble);
                    lane.add_verdict(entry, now);
                }
                return;
            }
        };
        lane.settle_trouble.over();
        for (mut entry, answer) in entries.into_iter().zip(answers) {
            let id = entry.lease.id;
            let newer = self.held.get(&id).is_some_and(|held| held.token > entry.lease.token);
            match answer {
                Settled::LeaseLost if newer => {
                    // Adopted under a new token while this was under way.
                    entry.again = false;
                    lane.add_verdict(entry, now);
                    continue;
                }
                Settled::Refused => {
                    lane.settle_trouble.again(now, chance);
                    lane.add_verdict(entry, now);
                    continue;
                }
                _ => lane.count(&entry, answer),
            }
            if let Some(held) = self.held.remove(&id) {
                release_twin(&mut lane.twins, &held);
            }
        }
    }

    fn flush_give_back(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        if lane.giving_back > 0 || lane.give_back.is_empty() || now < lane.settle_trouble.until {
            return;
        }
        let mut groups: BTreeMap<(Duration, Option<String>), Vec<Lease>> = BTreeMap::new();
        for (lease, delay, code) in lane.give_back.drain(..) {
            // Whole tenths of a second, so that many share one statement.
            let delay = Duration::from_millis(delay.as_millis().div_ceil(100) as u64 * 100);
            groups.entry((delay, code)).or_default().push(lease);
        }
        lane.giving_back = groups.len();
        for ((delay, code), mut leases) in groups {
            leases.sort_unstable();
            let pending = Pending::Defer { lane: index, leases: leases.clone(), delay, code: code.clone() };
            let op = self.op(pending);
            self.commands.push(Command::Defer { op, leases, delay, code });
        }
    }

    fn deferred(&mut self, op: Op, result: Result<Vec<bool>, Error>, now: Tick) {
        let Some(Pending::Defer { lane: index, leases, delay, code }) = self.pending.remove(&op) else { return };
        let chance = self.rng.f64();
        let lane = &mut self.lanes[index];
        lane.giving_back -= 1;
        match result {
            Ok(answers) => {
                lane.tally.deferred += answers.iter().filter(|given| **given).count() as u64;
                for lease in leases {
                    if let Some(held) = self.held.remove(&lease.id) {
                        release_twin(&mut lane.twins, &held);
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "giving back failed; it will be tried again");
                lane.settle_trouble.again(now, chance);
                lane.give_back.extend(leases.into_iter().map(|lease| (lease, delay, code.clone())));
            }
        }
    }

    // ---- renewing ----

    fn renew(&mut self, index: usize, now: Tick) {
        let lane = &mut self.lanes[index];
        if lane.renewing || now < lane.renew_at {
            return;
        }
        let (lease, mine) = (lane.settings.lease, |held: &Held| held.lane == index);
        let due = |held: &Held| held.until.since(now) <= lease * 2 / 3 + lease / 20;
        let mut leases: Vec<Lease> = self
            .held
            .iter()
            .filter(|(_, held)| mine(held) && due(held))
            .map(|(id, held)| Lease { id: *id, token: held.token })
            .collect();
        if leases.is_empty() {
            let earliest = self.held.values().filter(|h| mine(h)).map(|h| h.until.since(now)).min();
            lane.renew_at = match earliest {
                Some(left) => now.plus(left.saturating_sub(lease * 2 / 3)),
                None => Tick::from_micros(u64::MAX),
            };
            return;
        }
        leases.sort_unstable();
        lane.renewing = true;
        let op = self.op(Pending::Renew { lane: index, leases: leases.clone(), issued: now });
        self.commands.push(Command::Renew { op, leases, lease });
    }

    fn renewed(&mut self, op: Op, result: Result<Vec<bool>, Error>, now: Tick) {
        let Some(Pending::Renew { lane: index, leases, issued }) = self.pending.remove(&op) else { return };
        let lane = &mut self.lanes[index];
        lane.renewing = false;
        let answers = match result {
            Ok(answers) => answers,
            Err(error) => {
                tracing::warn!(%error, lane = lane.settings.lane, "a renewal failed");
                lane.renew_at = now.plus(lane.settings.lease / 20);
                return;
            }
        };
        for (lease, kept) in leases.into_iter().zip(answers) {
            let Some(held) = self.held.get_mut(&lease.id) else { continue };
            if kept {
                held.until = issued.plus(lane.settings.lease);
            } else if matches!(held.state, State::Ready { .. }) && held.token == lease.token {
                // Lost before it was begun: somebody else has it.
                release_twin(&mut lane.twins, held);
                self.held.remove(&lease.id);
                lane.ready.retain(|m| m.id != lease.id);
            } else {
                // Begun: its outcome will be offered once, and the database decides. Not asked for again before that.
                held.until = now.plus(lane.settings.lease);
            }
        }
        let lease = lane.settings.lease;
        let earliest = self.held.values().filter(|h| h.lane == index).map(|h| h.until.since(now)).min();
        self.lanes[index].renew_at =
            earliest.map_or(Tick::from_micros(u64::MAX), |left| now.plus(left.saturating_sub(lease * 2 / 3)));
    }

    // ---- ending ----

    fn begin_drain(&mut self, now: Tick) {
        if self.phase != Phase::Running {
            return;
        }
        let reserve = (self.drain / 4).min(Duration::from_secs(2));
        self.phase =
            Phase::Draining { abort_at: now.plus(self.drain - reserve), end_at: now.plus(self.drain), aborted: false };
        for lane in &mut self.lanes {
            for message in lane.ready.drain(..) {
                let Some(held) = self.held.get_mut(&message.id) else { continue };
                held.state = State::Settling;
                lane.give_back.push((Lease { id: message.id, token: held.token }, Duration::ZERO, None));
            }
        }
    }

    fn advance_drain(&mut self, now: Tick) {
        let Phase::Draining { abort_at, aborted: aborted @ false, .. } = &mut self.phase else { return };
        if now < *abort_at {
            return;
        }
        *aborted = true;
        let mut running: Vec<i64> =
            self.held.iter().filter(|(_, h)| h.state == State::Running).map(|(id, _)| *id).collect();
        running.sort_unstable();
        for id in running {
            self.commands.push(Command::Abort { id });
            let error = "aborted at shutdown with the request under way";
            self.delivered(id, Outcome::retry(code::SHUTDOWN, error, Reach::Unknown), now);
        }
    }
}

fn release_twin(twins: &mut HashSet<Twin>, held: &Held) {
    if let Some(twin) = &held.twin
        && held.first_twin
    {
        twins.remove(twin);
    }
}

impl Lane {
    fn add_verdict(&mut self, entry: Settlement, now: Tick) {
        if self.verdicts.is_empty() {
            self.verdicts_since = now;
        }
        self.verdicts.push(entry);
    }

    fn count(&mut self, entry: &Settlement, answer: Settled) {
        let (id, lane) = (entry.lease.id, self.settings.lane.as_str());
        let outcome = match answer {
            Settled::Applied => entry.verdict.flush_code(),
            Settled::LeaseLost => FlushCode::Conflict,
            Settled::Unknown | Settled::Refused => {
                self.tally.unknown += 1;
                tracing::warn!(outbox_id = id, lane, "whether the outcome was recorded is unknown");
                return;
            }
        };
        let counter = match outcome {
            FlushCode::Success => &mut self.tally.sent,
            FlushCode::DedupHit => &mut self.tally.dedup_hits,
            FlushCode::Retry => &mut self.tally.retried,
            FlushCode::Dead => &mut self.tally.dead,
            _ => &mut self.tally.conflicts,
        };
        *counter += 1;
        match (&entry.verdict, outcome) {
            (_, FlushCode::Conflict) => {
                tracing::warn!(outbox_id = id, lane, outcome = outcome.as_str(), "the lease was lost")
            }
            (Verdict::Retry { code, delay, .. }, _) => {
                tracing::info!(outbox_id = id, lane, outcome = outcome.as_str(), reason_code = %code, delay_sec = delay.as_secs_f64(), "will be tried again");
            }
            (Verdict::Dead { code, .. }, _) => {
                tracing::warn!(outbox_id = id, lane, outcome = outcome.as_str(), reason_code = %code, "dead");
            }
            _ => tracing::debug!(outbox_id = id, lane, outcome = outcome.as_str(), "sent"),
        }
    }
}
