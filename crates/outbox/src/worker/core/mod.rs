//! The worker's mind, without hands: `step` says what to do, `handle` hears what came of it. It reads no clock, draws
//! its chances from a seed and does no I/O, so that a simulator can drive the very code that runs in production.
//!
//! One core serves several lanes of one database. What it holds is in `held`, from the claim until the settle is
//! answered; it keeps renewing all of it.

mod claiming;
mod delivering;
#[cfg(test)]
mod kit;
mod settling;
mod suspects;
mod telling;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use self::telling::Sample;
use crate::clock::Tick;
use crate::decide::{self, Before, Budgets, Decision};
use crate::error::{Effect, Error, Kind};
use crate::lease::Lease;
use crate::message::{Message, Sha};
use crate::observe::{Observer, Silent, Standing, Told};
use crate::outcome::{FlushCode, GiveBack, LeaseState, Outcome, Settled, Settlement, Verdict, code};
use crate::store::{Claim, Claimed, From, Mark, Walked};

/// A mark stays this far behind the clock: commits younger than this may still appear before it.
const MARK_LAG: Duration = Duration::from_millis(200);
/// Entries of one walk step, and the pace of the walk.
const WALK_STEP: u32 = 1000;
const WALK_PER_SECOND: u64 = 20_000;
/// The longest pause between two passes of the walk.
const WALK_PAUSE: Duration = Duration::from_secs(1);
/// Outcomes wait this long for company before they are settled.
const SETTLE_WAIT: Duration = Duration::from_millis(3);
/// A target that has more than its share, and of which nothing ended for so long, is slow: what is too much is given back.
const CROWD_PATIENCE: Duration = Duration::from_millis(50);
/// What is given back of a crowd comes again at the pace its target has shown, or at this one, within this time.
const CROWD_PER_SECOND: f64 = 50.0;
const CROWD_HORIZON: Duration = Duration::from_secs(300);
/// Targets remembered as crowded before those that are no longer are forgotten.
const MOST_CROWDS: usize = 1000;
/// Claims under way at once, per lane; the second only while there is more than one brings.
const CLAIMS: usize = 2;
/// Settles under way at once, per lane.
const SETTLES: usize = 2;
/// A suspect that waited this long is served even if there is other work.
const SUSPECT_PATIENCE: Duration = Duration::from_secs(10);
/// For this long its lane claims nothing else, so that it is held alone; then it is served beside what is still under way.
const CLEARING: Duration = Duration::from_secs(2);
/// An outcome or a lease that met somebody else's lock is asked for again after this long, and then ever later.
const LOCK_WAIT: Duration = Duration::from_millis(5);
const LONGEST_LOCK_WAIT: Duration = Duration::from_secs(1);

/// How one lane is worked.
#[derive(Clone, Debug)]
pub struct LaneSettings {
    pub lane: String,
    /// The shards this process takes; all of the lane's if none are named.
    pub shards: Vec<u32>,
    pub concurrency: usize,
    pub batch: usize,
    pub lease: Duration,
    pub poll: Duration,
    pub budgets: Budgets,
    pub dedup: bool,
    pub send_begun: bool,
    /// Whatever their target, messages go to one place: no target's share is kept from the others.
    pub one_destination: bool,
    /// Outcomes wait this long for company before they are settled.
    pub settle_wait: Duration,
    /// What the courier is called, in logs.
    pub adapter: String,
    /// Its active keys are idempotency keys: logs tell their digests.
    pub keyed: bool,
}

impl LaneSettings {
    /// The defaults of a user's own lane.
    pub fn new(lane: impl Into<String>) -> Self {
        LaneSettings {
            lane: lane.into(),
            shards: vec![],
            concurrency: 64,
            batch: 256,
            lease: Duration::from_secs(60),
            poll: Duration::from_millis(500),
            budgets: Budgets::default(),
            dedup: false,
            send_begun: false,
            one_destination: false,
            settle_wait: SETTLE_WAIT,
            adapter: String::new(),
            keyed: false,
        }
    }

    fn prefetch(&self) -> usize {
        (self.concurrency.min(self.batch) / 2).max(1)
    }

    fn per_target(&self) -> usize {
        if self.one_destination { self.concurrency } else { (self.concurrency / 4).max(1) }
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
        how: GiveBack,
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
        result: Result<Vec<LeaseState>, Error>,
    },
    Renewed {
        op: Op,
        result: Result<Vec<LeaseState>, Error>,
    },
    Delivered {
        id: i64,
        outcome: Outcome,
        /// *Send begun* was committed for it.
        begun: bool,
    },
    /// The lanes that are paused now; those not named are open. Before the first of these, nothing is claimed.
    Paused {
        lanes: Vec<String>,
    },
    /// Messages of a lane lie in this shard, which the configuration does not know: somebody has, or had, more shards.
    Strayed {
        lane: String,
        shard: u32,
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
    /// An earlier attempt may have arrived.
    maybe_sent: bool,
    /// Until when the lease surely lasts, counted from before the claim was sent.
    until: Tick,
    state: State,
    target: Option<String>,
    twin: Option<Twin>,
    /// It stands for its twins: they wait until it is settled.
    first_twin: bool,
    /// When its delivery began.
    began: Tick,
    /// `deliver_before`, by our own clock.
    expires: Option<Tick>,
    /// How often its outcome met somebody else's lock.
    met_locks: u32,
    /// Its idempotency key, where the lane has them.
    key: Option<String>,
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
    /// Entries of the pass at hand so far, and of the last whole one.
    entries: u64,
    last_entries: u64,
}

#[derive(Debug, Default)]
struct Shard {
    id: u32,
    mark: Option<Mark>,
    /// A claim's answer was lost: from here on (from the head without a mark) rows may be ours without our knowing.
    lost: Option<Option<Mark>>,
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

/// A target with its full share of slots and more waiting. What does not fit is given back, spread over the time the
/// target will take for it: thousands for a dead one are then met a few at a time, and keep nobody out.
#[derive(Debug)]
struct Crowd {
    since: Tick,
    /// Deliveries that ended since.
    ended: u32,
    /// When the last one did.
    moved: Tick,
    /// When what was given back last is due again.
    horizon: Tick,
}

impl Crowd {
    fn new(now: Tick) -> Self {
        Crowd { since: now, ended: 0, moved: now, horizon: now }
    }

    /// How long the next one given back waits.
    fn next_turn(&mut self, now: Tick, chance: f64) -> Duration {
        let seen = f64::from(self.ended) / now.since(self.since).as_secs_f64().max(1.0);
        let per_second = (seen * 1.25).max(CROWD_PER_SECOND);
        let due =
            self.horizon.max(now.plus(Duration::from_millis(500))).plus(Duration::from_secs_f64(1.0 / per_second));
        let wait = match due.since(now) {
            wait if wait > CROWD_HORIZON => CROWD_HORIZON.mul_f64(chance),
            wait => {
                self.horizon = due;
                wait
            }
        };
        // Whole seconds, so that many share one statement.
        if wait < Duration::from_secs(2) { wait } else { Duration::from_secs(wait.as_secs() + 1) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    /// Whether it is paused is not known yet.
    Unknown,
    Open,
    Paused,
}

#[derive(Debug)]
struct Lane {
    settings: LaneSettings,
    gate: Gate,
    shards: Vec<Shard>,
    turn: usize,
    next_poll: Tick,
    /// Claims under way, and how many rows they may bring.
    claims: usize,
    coming: usize,
    /// The one claim under way asks for single messages.
    claims_by_id: bool,
    claim_trouble: Trouble,
    ready: VecDeque<Box<Message>>,
    running: usize,
    by_target: HashMap<String, usize>,
    /// Targets that had their full share, with more waiting.
    crowds: HashMap<String, Crowd>,
    /// More of one target is held than may run or wait: when to look at it again.
    crowded: Option<Tick>,
    verdicts: Vec<Settlement>,
    verdicts_since: Tick,
    settling: usize,
    settle_trouble: Trouble,
    /// Outcomes whose rows somebody else has locked, and when to ask for them again, apart from the others.
    locked: Vec<(Tick, Settlement)>,
    settling_locked: bool,
    /// When something was last given back that is due at once.
    given_back_at: Tick,
    /// What is to be given back, and not before when.
    give_back: Vec<(Tick, Lease, GiveBack)>,
    giving_back: usize,
    renew_at: Tick,
    renewing: bool,
    deduping: bool,
    twins: HashSet<Twin>,
    /// Twins that wait for the first of them.
    twin_crowd: Option<Crowd>,
    tally: Tally,
    /// How much is told of what simply succeeded.
    successes: Sample,
}

#[derive(Debug)]
struct Suspect {
    lane: usize,
    shard: usize,
    suspicion: u32,
    since: Tick,
}

/// Suspects of one lane at a time are delivered apart, with nothing else of that lane held. The other lanes go on.
#[derive(Debug, PartialEq, Eq)]
enum Apart {
    No,
    /// Waits, for a moment, until nothing else of the lane is held.
    Clearing {
        lane: usize,
        since: Tick,
    },
    /// `since` is when the clearing began.
    Serving {
        lane: usize,
        since: Tick,
        claimed: bool,
    },
}

impl Apart {
    fn of(&self, index: usize) -> bool {
        matches!(self, Apart::Clearing { lane, .. } | Apart::Serving { lane, .. } if *lane == index)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Draining { abort_at: Tick, end_at: Tick, aborted: bool },
}

/// Where a claim under way began.
enum Start {
    Mark(Option<Mark>),
    Adopt(Option<Mark>),
    Ids(Vec<i64>),
}

enum Pending {
    Claim { lane: usize, shard: usize, issued: Tick, limit: u32, from: Start },
    Walk { lane: usize, shard: usize },
    Dedup { lane: usize, ids: Vec<i64> },
    Settle { lane: usize, entries: Vec<Settlement>, locked: bool },
    Defer { lane: usize, leases: Vec<Lease>, how: GiveBack },
    Renew { lane: usize, leases: Vec<Lease>, issued: Tick },
}

pub struct Core {
    observer: Arc<dyn Observer>,
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

impl Lane {
    /// A claim that adopts takes what is ours already under a new token. What another claim has brought us meanwhile, or
    /// is about to, would lose its lease to it while its outcome is on the way, and be sent twice: so it goes alone.
    fn must_claim_alone(&self) -> bool {
        self.claims_by_id || self.shards.iter().any(|shard| shard.lost.is_some() || !shard.found.is_empty())
    }

    /// Gives back what was claimed and not begun.
    fn give_back_ready(&mut self, held: &mut HashMap<i64, Held>) {
        for message in std::mem::take(&mut self.ready) {
            let Some(held) = held.get_mut(&message.id) else { continue };
            held.state = State::Settling;
            self.give_back(Lease { id: message.id, token: held.token }, GiveBack::now());
        }
    }

    fn give_back(&mut self, lease: Lease, how: GiveBack) {
        self.give_back.push((Tick::default(), lease, how));
    }
}

impl Core {
    pub fn new(settings: Settings, now: Tick) -> Self {
        let lane = |settings: LaneSettings| Lane {
            shards: settings.shards.iter().map(|&id| Shard { id, hungry: true, ..Shard::default() }).collect(),
            settings,
            gate: Gate::Unknown,
            turn: 0,
            next_poll: now,
            claims: 0,
            coming: 0,
            claims_by_id: false,
            claim_trouble: Trouble::default(),
            ready: VecDeque::new(),
            running: 0,
            by_target: HashMap::new(),
            crowds: HashMap::new(),
            crowded: None,
            verdicts: Vec::new(),
            verdicts_since: now,
            settling: 0,
            settle_trouble: Trouble::default(),
            locked: Vec::new(),
            settling_locked: false,
            given_back_at: Tick::default(),
            give_back: Vec::new(),
            giving_back: 0,
            renew_at: Tick::from_micros(u64::MAX),
            renewing: false,
            deduping: false,
            twins: HashSet::new(),
            twin_crowd: None,
            tally: Tally::default(),
            successes: Sample::default(),
        };
        Core {
            observer: Arc::new(Silent),
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

    /// Tells this one what happens from now on.
    pub fn observe(&mut self, observer: Arc<dyn Observer>) {
        self.observer = observer;
    }

    /// How each lane stands.
    pub fn standing(&self) -> impl Iterator<Item = (&str, Standing)> {
        self.lanes.iter().enumerate().map(|(index, lane)| {
            let entries: u64 = lane.shards.iter().map(|s| s.walk.last_entries.max(s.walk.entries)).max().unwrap_or(0);
            let standing = Standing {
                held: self.held.values().filter(|held| held.lane == index).count(),
                in_flight: lane.running,
                walk_bound: WALK_PAUSE + Duration::from_micros(entries * 1_000_000 / WALK_PER_SECOND),
            };
            (lane.settings.lane.as_str(), standing)
        })
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
            Phase::Draining { end_at, .. } => {
                let nothing_lost = self.lanes.iter().flat_map(|l| &l.shards).all(|s| s.lost.is_none());
                let all_given_back = self.lanes.iter().all(|lane| lane.give_back.is_empty());
                (self.held.is_empty() && self.pending.is_empty() && nothing_lost && all_given_back) || now >= end_at
            }
            Phase::Running => {
                self.once
                    && self.held.is_empty()
                    && self.pending.is_empty()
                    && self.suspects.is_empty()
                    && self.lanes.iter().all(|lane| match lane.gate {
                        Gate::Unknown => false,
                        Gate::Paused => true,
                        Gate::Open => lane.shards.iter().all(|s| s.dry && s.walk.clean && s.found.is_empty()),
                    })
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
        for (index, lane) in self.lanes.iter().enumerate() {
            if !lane.verdicts.is_empty() && lane.settling < SETTLES {
                at(lane.verdicts_since.plus(lane.settings.settle_wait).max(lane.settle_trouble.until));
            }
            // They wait for the renewal's answer, which comes by itself.
            let waits = lane.settling_locked || lane.renewing;
            if let Some(first) = lane.locked.iter().map(|(at, _)| *at).min().filter(|_| !waits) {
                at(first.max(lane.settle_trouble.until));
            }
            if let Some(first) = lane.give_back.iter().map(|(at, ..)| *at).min().filter(|_| lane.giving_back == 0) {
                at(first.max(lane.settle_trouble.until));
            }
            // A crowd that may have stopped.
            if let Some(look_at) = lane.crowded {
                at(look_at);
            }
            if !lane.renewing {
                at(lane.renew_at);
            }
            if self.must_adopt(lane) {
                at(lane.claim_trouble.until);
            }
            if self.phase == Phase::Running {
                if self.may_claim(index) {
                    at(lane.next_poll.max(lane.claim_trouble.until));
                }
                for shard in lane.shards.iter().filter(|s| lane.gate == Gate::Open && s.may_walk()) {
                    at(shard.walk.next_at.max(lane.claim_trouble.until));
                }
            }
        }
        // In a drain suspects are left to others; a walk that was under way may still have found some.
        if self.phase != Phase::Running {
            return next.max(now);
        }
        match self.apart {
            Apart::No => {}
            // A claim's answer comes by itself.
            Apart::Clearing { lane, .. } if self.lanes[lane].claims > 0 => {}
            Apart::Clearing { since, .. } => at(since.plus(CLEARING)),
            Apart::Serving { lane, since, .. } => at(since.plus(self.lanes[lane].settings.lease)),
        }
        if self.apart == Apart::No
            && let Some(oldest) = self.suspects.values().min_by_key(|s| s.since)
        {
            let trouble = self.lanes[oldest.lane].claim_trouble.until;
            at(oldest.since.plus(SUSPECT_PATIENCE).max(self.rest_until).max(trouble));
        }
        next.max(now)
    }

    /// Hears what came of a command, or from the world.
    pub fn handle(&mut self, now: Tick, event: Event) {
        match event {
            Event::Wake => self.lanes.iter_mut().flat_map(|l| &mut l.shards).for_each(|s| s.hungry = true),
            Event::Paused { lanes } => self.set_gates(&lanes),
            Event::Strayed { lane, shard } => self.take_shard(&lane, shard),
            Event::Shutdown => self.begin_drain(now),
            Event::Delivered { id, outcome, begun } => self.delivered(id, outcome, begun, now),
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

    fn begin_drain(&mut self, now: Tick) {
        if self.phase != Phase::Running {
            return;
        }
        let reserve = (self.drain / 4).min(Duration::from_secs(2));
        self.phase =
            Phase::Draining { abort_at: now.plus(self.drain - reserve), end_at: now.plus(self.drain), aborted: false };
        self.apart = Apart::No;
        self.suspects.clear();
        for lane in &mut self.lanes {
            lane.give_back_ready(&mut self.held);
        }
    }

    /// Looks at one more shard of a lane from now on.
    fn take_shard(&mut self, name: &str, shard: u32) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.settings.lane == name) {
            if lane.shards.iter().all(|known| known.id != shard) {
                tracing::info!(
                    lane = name,
                    shard,
                    "messages lie in a shard beyond the configured ones; it is served too"
                );
                lane.shards.push(Shard { id: shard, hungry: true, ..Shard::default() });
            }
        }
    }

    fn set_gates(&mut self, paused: &[String]) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            lane.gate = if paused.contains(&lane.settings.lane) { Gate::Paused } else { Gate::Open };
            lane.shards.iter_mut().for_each(|shard| shard.hungry = true);
            if lane.gate == Gate::Paused {
                lane.give_back_ready(&mut self.held);
                self.suspects.retain(|_, suspect| suspect.lane != index);
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
            self.cut_off(id, now);
        }
    }

    /// A stop is a crash with manners: what was under way may have been done, so it has no outcome. It costs no attempt,
    /// ends nothing, and is given back in doubt.
    fn cut_off(&mut self, id: i64, now: Tick) {
        let Some(held) = self.held.get_mut(&id).filter(|h| h.state == State::Running) else { return };
        let lane = &mut self.lanes[held.lane];
        lane.ended(held.target.as_deref(), now);
        held.state = State::Settling;
        // Where *send begun* is committed, the row itself knows whether anything went out.
        let maybe_sent = !lane.settings.send_begun;
        let how = GiveBack { maybe_sent, ..GiveBack::after(Duration::ZERO, code::SHUTDOWN) };
        lane.give_back(Lease { id, token: held.token }, how);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(crowd: &mut Crowd, now: Tick, messages: usize) -> Vec<f64> {
        (0..messages).map(|n| crowd.next_turn(now, n as f64 / messages as f64).as_secs_f64()).collect()
    }

    #[test]
    fn what_a_dead_target_cannot_take_comes_back_a_few_at_a_time() {
        let now = Tick::default().plus(Duration::from_secs(1000));
        let waits = waits(&mut Crowd::new(now), now, 50_000);
        let longest = CROWD_HORIZON.as_secs_f64() + 1.0;
        assert!(waits.iter().all(|wait| (0.0..=longest).contains(wait)));
        for second in 0..300 {
            let due = waits.iter().filter(|wait| **wait as u64 == second).count();
            assert!(due < 400, "{due} of 50,000 come back in second {second}");
        }
    }

    #[test]
    fn a_target_that_moves_gets_its_messages_at_its_pace() {
        let now = Tick::default().plus(Duration::from_secs(1000));
        let mut crowd = Crowd::new(now);
        let later = now.plus(Duration::from_secs(10));
        crowd.ended = 6400;
        let longest = waits(&mut crowd, later, 8000).into_iter().fold(0.0, f64::max);
        assert!((8.0..14.0).contains(&longest), "8,000 at some 800 a second take {longest} s");
    }
}
