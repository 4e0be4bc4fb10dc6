//! A seeded simulator: the real worker core and the real SQLite store (in memory) under a scheduler that owns time.
//!
//! Store operations may fail before or after they took effect, be slow or stall past a lease; deliveries may fail, time
//! out or lose their answer; workers crash with operations under way and come back under a new name, or freeze and go on
//! later. From some moment on nothing goes wrong any more, and everything must come to its end. The same seed gives the
//! same trace.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::backoff::Backoff;
use postrider::clock::Tick;
use postrider::decide::Budgets;
use postrider::error::{Effect, Error, Kind};
use postrider::lease::Lease;
use postrider::outcome::{Fault, LeaseState, Outcome, Reach, Verdict};
use postrider::store::{Claimed, Filter, Mode, Seen, Status, Store, Walked, transact};
use postrider::stores::sqlite::SqliteStore;
use postrider::tx::Tx;
use postrider::worker::core::{Command, Core, Event, LaneSettings, Settings};
use postrider::{LaneRules, Lanes, Message, NewMessage, OnSettled, Outbox, Result, Timestamp, Winner};

const LANE: &str = "sim";
const START: Timestamp = Timestamp::from_micros(1_800_000_000_000_000);
const SECOND: u64 = 1_000_000;
const LEASE: Duration = Duration::from_secs(15);
/// After a worker was frozen or stalled, its leases may still be found expired for this long.
const AFTERMATH: u64 = 40 * SECOND;

/// What a run is made of; all of it follows from the seed.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub workers: usize,
    pub messages: usize,
    /// Until when things go wrong, in seconds.
    pub trouble_sec: u64,
    /// Chance of a fault per store operation and per delivery.
    pub fault: f64,
    /// Mean seconds between crashes of one worker; 0 for none.
    pub crash_every_sec: u64,
    pub poison: usize,
    pub dedup: bool,
    /// Outcomes a message may have; few in some runs, so that budgets are reached.
    pub max_attempts: u32,
    /// All messages are there from the start, so that several claims are under way at once.
    pub deep: bool,
    /// The database takes its time now and then, so that answers overtake each other.
    pub uneven: bool,
}

impl Plan {
    /// A varied plan for a seed. Every eighth is free of faults, so that "exactly once when nothing fails" is checked too.
    pub fn of(seed: u64) -> Plan {
        let mut rng = fastrand::Rng::with_seed(seed);
        let calm = seed.is_multiple_of(8);
        let dedup = rng.u8(0..4) == 0;
        Plan {
            seed,
            workers: rng.usize(1..5),
            messages: if seed % 5 == 1 { rng.usize(200..400) } else { rng.usize(20..160) },
            trouble_sec: rng.u64(20..120),
            fault: if calm { 0.0 } else { rng.f64() * 0.25 },
            crash_every_sec: if calm || rng.bool() { 0 } else { rng.u64(5..40) },
            // A twin of the poison would end it by dedup.
            poison: usize::from(!calm && !dedup && rng.u8(0..3) == 0),
            dedup,
            max_attempts: if rng.u8(0..3) == 0 { 2 } else { 40 },
            deep: rng.u8(0..3) == 0,
            uneven: calm && rng.bool(),
        }
    }
}

/// One request as the receiver saw it.
#[derive(Clone, Debug)]
pub struct Received {
    pub at: u64,
    pub id: i64,
    pub token: i64,
    pub accepted: bool,
}

/// What happened in a run, told from outside.
#[derive(Debug, Default)]
pub struct Outcomes {
    pub trace: u64,
    pub events: u64,
    pub received: Vec<Received>,
    pub violations: Vec<String>,
    /// Rare things that did happen; over many seeds each must be reached.
    pub marks: BTreeMap<&'static str, u64>,
    pub virtual_seconds: u64,
}

/// Counts ends through the same door a peer has: in the settle's own transaction, for winners only.
struct Ledger;

#[async_trait]
impl OnSettled for Ledger {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<()> {
        for winner in winners.iter().filter(|w| w.verdict.ends()) {
            tx.execute(
                "INSERT INTO sim_ends (id, token) VALUES (?, ?)",
                &[winner.id.into(), winner.lease_token.into()],
            )
            .await?;
        }
        Ok(())
    }
}

enum Action {
    Enqueue(usize),
    Step {
        worker: usize,
        life: u64,
    },
    /// A store operation reaches the database.
    Execute {
        worker: usize,
        life: u64,
        owner: String,
        command: Command,
        lose_answer: bool,
    },
    Hear {
        worker: usize,
        life: u64,
        event: Event,
    },
    Arrive {
        worker: usize,
        life: u64,
        message: Box<Message>,
        outcome: Outcome,
        accepted: bool,
        answer_after: u64,
    },
    Crash {
        worker: usize,
    },
    /// Is told to stop, and comes back later.
    Stop {
        worker: usize,
        life: u64,
    },
    /// Hears that the lane is paused, or open again.
    Gate {
        worker: usize,
        life: u64,
        paused: bool,
    },
    Start {
        worker: usize,
    },
}

struct Alive {
    core: Core,
    life: u64,
    next_step: u64,
    frozen_until: u64,
}

struct World {
    plan: Plan,
    rng: fastrand::Rng,
    now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    actions: HashMap<u64, Action>,
    workers: Vec<Option<Alive>>,
    lives: u64,
    store: Arc<SqliteStore>,
    outbox: Outbox,
    poison: Vec<i64>,
    enqueued: Vec<i64>,
    /// Which message of the plan an id is.
    order: HashMap<i64, usize>,
    /// Who claimed a message last, under which token (the only one who may act on it), and until when.
    holders: HashMap<i64, (i64, String, u64)>,
    settled: HashSet<Lease>,
    /// What each life of a worker is delivering right now, by content.
    delivering: HashMap<(u64, usize), i64>,
    /// Workers that were made to die, freeze or stall, and until when what they hold may rightly count as lost with them.
    struck: HashMap<String, u64>,
    /// Outcomes recorded per message.
    counted: HashMap<i64, u32>,
    /// Workers a poison message killed.
    poisoned: HashSet<String>,
    /// Messages taken over from a worker that was struck, since their last outcome.
    unlucky: HashSet<i64>,
    outcomes: Outcomes,
}

/// Runs one plan to its end and checks the promises.
pub fn run(plan: Plan) -> Outcomes {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let mut world = World::new(plan).await;
        world.go().await;
        world.check().await;
        world.outcomes
    })
}

impl World {
    async fn new(plan: Plan) -> World {
        let rules = LaneRules { dedup: plan.dedup, on_settled: Some(Arc::new(Ledger)), ..LaneRules::default() };
        let lanes = Arc::new(Lanes::new().with(LANE, rules));
        let store = Arc::new(SqliteStore::simulated(START, lanes).expect("a store in memory"));
        let outbox = Outbox::new(store.clone());
        outbox.migrate().await.expect("migrations");
        transact(&*store, Mode::Write, |tx| {
            Box::pin(async move { tx.execute("CREATE TABLE sim_ends (id INTEGER, token INTEGER)", &[]).await })
        })
        .await
        .expect("the ledger's table");
        let mut world = World {
            rng: fastrand::Rng::with_seed(plan.seed ^ 0x5eed),
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            actions: HashMap::new(),
            workers: (0..plan.workers).map(|_| None).collect(),
            lives: 0,
            store,
            outbox,
            poison: vec![],
            enqueued: vec![],
            order: HashMap::new(),
            holders: HashMap::new(),
            settled: HashSet::new(),
            delivering: HashMap::new(),
            struck: HashMap::new(),
            counted: HashMap::new(),
            poisoned: HashSet::new(),
            unlucky: HashSet::new(),
            outcomes: Outcomes::default(),
            plan,
        };
        for worker in 0..world.plan.workers {
            let at = world.rng.u64(0..SECOND);
            world.at(at, Action::Start { worker });
        }
        for n in 0..world.plan.messages {
            let last = if world.plan.deep { SECOND } else { world.plan.trouble_sec * SECOND };
            let at = world.rng.u64(0..last);
            world.at(at, Action::Enqueue(n));
        }
        world
    }

    fn at(&mut self, time: u64, action: Action) {
        self.sequence += 1;
        self.queue.push(Reverse((time, self.sequence)));
        self.actions.insert(self.sequence, action);
    }

    fn trouble(&mut self) -> bool {
        self.now < self.plan.trouble_sec * SECOND && self.rng.f64() < self.plan.fault
    }

    fn mark(&mut self, name: &'static str) {
        *self.outcomes.marks.entry(name).or_default() += 1;
    }

    fn note(&mut self, text: std::fmt::Arguments<'_>) {
        // FNV-1a over the whole story: two runs of one seed must agree on every step.
        let mut hash = self.outcomes.trace ^ 0xcbf2_9ce4_8422_2325;
        for byte in format!("{} {text}", self.now).bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.outcomes.trace = hash;
        self.outcomes.events += 1;
        if std::env::var_os("POSTRIDER_SIM_TRACE").is_some() {
            println!("{:>12} {text}", self.now);
        }
    }

    async fn go(&mut self) {
        // Leases, retries and suspects take their time after the last fault.
        let limit = (self.plan.trouble_sec + 3600) * SECOND;
        while let Some(Reverse((time, sequence))) = self.queue.pop() {
            let Some(action) = self.actions.remove(&sequence) else { continue };
            if time > self.now {
                self.store.advance_clock(Duration::from_micros(time - self.now));
                self.now = time;
            }
            if time > limit || (time > self.plan.trouble_sec * SECOND && self.drained().await) {
                break;
            }
            self.act(action).await;
        }
        self.outcomes.virtual_seconds = self.now / SECOND;
    }

    async fn drained(&self) -> bool {
        // Looking costs a query: look only when nobody holds anything.
        if self.enqueued.len() < self.plan.messages || self.workers.iter().flatten().any(|w| w.core.held() > 0) {
            return false;
        }
        let stats = self.outbox.stats().await.expect("stats");
        stats.get(LANE).is_some_and(|lane| lane.pending + lane.leased == 0)
    }

    async fn act(&mut self, action: Action) {
        match action {
            Action::Enqueue(n) => self.enqueue(n).await,
            Action::Start { worker } => self.start(worker),
            Action::Crash { worker } => {
                self.strike(worker, u64::MAX);
                self.crash(worker);
            }
            Action::Stop { worker, life } => {
                let now = self.now;
                if let Some(alive) = self.alive(worker, life) {
                    alive.core.handle(Tick::from_micros(now), Event::Shutdown);
                    self.note(format_args!("stop w{worker}"));
                    self.mark("told to stop");
                    self.at(now, Action::Step { worker, life });
                }
            }
            Action::Gate { worker, life, paused } => {
                let (now, lanes) = (self.now, if paused { vec![LANE.to_owned()] } else { vec![] });
                if let Some(alive) = self.alive(worker, life) {
                    alive.core.handle(Tick::from_micros(now), Event::Paused { lanes });
                    self.note(format_args!("w{worker} paused {paused}"));
                    self.at(now, Action::Step { worker, life });
                }
            }
            Action::Step { worker, life } => self.step(worker, life),
            Action::Execute { worker, life, owner, command, lose_answer } => {
                let event = self.execute(&owner, command, lose_answer).await;
                // That an answer is lost shows only when the deadline has passed.
                let deadline = if lose_answer { self.rng.u64(0..10 * SECOND) } else { 0 };
                let back = self.now + self.latency(worker) + deadline;
                self.at(back, Action::Hear { worker, life, event });
            }
            Action::Hear { worker, life, event } => self.hear(worker, life, event),
            Action::Arrive { worker, life, message, outcome, accepted, answer_after } => {
                self.arrive(worker, life, *message, outcome, accepted, answer_after);
            }
        }
    }

    fn latency(&mut self, worker: usize) -> u64 {
        if self.trouble() && self.rng.u8(0..8) == 0 {
            self.mark("stalled past a lease");
            let stall = self.rng.u64(5 * SECOND..40 * SECOND);
            self.strike(worker, self.now + stall + AFTERMATH);
            return stall;
        }
        if self.plan.uneven && self.rng.u8(0..4) == 0 {
            return self.rng.u64(20_000..600_000);
        }
        self.rng.u64(50..5_000)
    }

    async fn enqueue(&mut self, n: usize) {
        let payload = if self.plan.dedup { format!("content {}", n % 20) } else { format!("content {n}") };
        let target = format!("t{}", n % 5);
        let message = NewMessage::new(LANE, payload).target(target).key(format!("key-{n}"));
        let entries = self.outbox.enqueue(vec![message]).await.expect("an enqueue on a healthy connection");
        let id = entries[0].id;
        self.enqueued.push(id);
        self.order.insert(id, n);
        if self.poison.len() < self.plan.poison {
            self.poison.push(id);
        }
        self.note(format_args!("enqueue {id}"));
    }

    fn start(&mut self, worker: usize) {
        self.lives += 1;
        let life = self.lives;
        let budgets = Budgets {
            max_attempts: self.plan.max_attempts,
            max_crashes: 5,
            backoff: Backoff::Exponential { base: Duration::from_secs(1), max: Duration::from_secs(30), jitter: 0.3 },
            retry_after_cap: Duration::from_secs(60),
            ..Budgets::default()
        };
        let lane = LaneSettings {
            concurrency: 8,
            batch: 16,
            lease: LEASE,
            budgets,
            dedup: self.plan.dedup,
            shards: vec![0],
            ..LaneSettings::new(LANE)
        };
        let settings = Settings {
            owner: format!("w{worker}:{life}"),
            lanes: vec![lane],
            drain: Duration::from_secs(5),
            once: false,
            seed: self.rng.u64(..),
        };
        let mut core = Core::new(settings, Tick::from_micros(self.now));
        core.handle(Tick::from_micros(self.now), Event::Paused { lanes: vec![] });
        self.workers[worker] = Some(Alive { core, life, next_step: u64::MAX, frozen_until: 0 });
        self.note(format_args!("start w{worker} life {life}"));
        self.at(self.now, Action::Step { worker, life });
        let end = self.plan.trouble_sec * SECOND;
        if self.plan.crash_every_sec > 0 {
            let at = self.now + self.rng.u64(SECOND..2 * self.plan.crash_every_sec * SECOND);
            let stop = self.rng.u8(0..4) == 0;
            if at < end {
                self.at(at, if stop { Action::Stop { worker, life } } else { Action::Crash { worker } });
            }
        }
        if self.rng.u8(0..4) == 0 {
            let pause = self.now + self.rng.u64(SECOND..30 * SECOND);
            let resume = pause + self.rng.u64(SECOND..30 * SECOND);
            self.at(pause, Action::Gate { worker, life, paused: true });
            self.at(resume, Action::Gate { worker, life, paused: false });
        }
    }

    fn strike(&mut self, worker: usize, until: u64) {
        if let Some(alive) = &self.workers[worker] {
            let excused = self.struck.entry(alive.core.owner().to_owned()).or_default();
            *excused = until.max(*excused);
        }
    }

    fn crash(&mut self, worker: usize) {
        if self.workers[worker].take().is_none() {
            return;
        }
        self.mark("crashed");
        self.note(format_args!("crash w{worker}"));
        let again = self.now + self.rng.u64(SECOND / 10..10 * SECOND);
        self.at(again, Action::Start { worker });
    }

    /// It stopped by itself, and comes back later under another name. What it left leased, it lost: rightly so only if its
    /// time was over with an answer of the database still on the way.
    fn finish(&mut self, worker: usize) {
        let Some(life) = self.workers[worker].as_ref().map(|gone| gone.life) else { return };
        let unanswered = self.actions.values().any(|action| match action {
            Action::Execute { worker: of, life: in_life, .. } | Action::Hear { worker: of, life: in_life, .. } => {
                (*of, *in_life) == (worker, life)
            }
            _ => false,
        });
        if unanswered {
            self.mark("stopped without an answer");
            self.strike(worker, u64::MAX);
        }
        self.workers[worker] = None;
        self.note(format_args!("w{worker} stopped"));
        let again = self.now + self.rng.u64(SECOND / 10..10 * SECOND);
        self.at(again, Action::Start { worker });
    }

    fn alive(&mut self, worker: usize, life: u64) -> Option<&mut Alive> {
        self.workers[worker].as_mut().filter(|alive| alive.life == life)
    }

    fn step(&mut self, worker: usize, life: u64) {
        let now = self.now;
        let Some(alive) = self.alive(worker, life) else { return };
        if now < alive.frozen_until {
            let later = alive.frozen_until;
            self.at(later, Action::Step { worker, life });
            return;
        }
        alive.next_step = u64::MAX;
        let commands = alive.core.step(Tick::from_micros(now));
        let idle = commands.is_empty();
        for command in commands {
            self.carry_out(worker, life, command);
        }
        if self.trouble() && self.rng.u16(0..400) == 0 {
            let until = now + self.rng.u64(SECOND..40 * SECOND);
            self.mark("froze");
            self.strike(worker, until + AFTERMATH);
            self.note(format_args!("freeze w{worker} until {until}"));
            if let Some(alive) = self.alive(worker, life) {
                alive.frozen_until = until;
            }
        }
        let Some(alive) = self.alive(worker, life) else { return };
        if alive.core.finished(Tick::from_micros(now)) {
            self.finish(worker);
            return;
        }
        let next = alive.core.next_step(Tick::from_micros(now)).micros();
        if idle && next <= now {
            self.outcomes
                .violations
                .push(format!("L9: w{worker} has nothing to do at {now} and wants to be asked again at once"));
            return;
        }
        let next = next.max(now + 1);
        if next < alive.next_step {
            alive.next_step = next;
            self.at(next, Action::Step { worker, life });
        }
    }

    fn hear(&mut self, worker: usize, life: u64, event: Event) {
        let now = self.now;
        let Some(alive) = self.alive(worker, life) else { return };
        if now < alive.frozen_until {
            let later = alive.frozen_until;
            self.at(later, Action::Hear { worker, life, event });
            return;
        }
        let delivered = if let Event::Delivered { id, .. } = event { Some(id) } else { None };
        alive.core.handle(Tick::from_micros(now), event);
        if let Some(id) = delivered {
            self.delivering.remove(&(life, self.content(id)));
        }
        self.at(now, Action::Step { worker, life });
    }

    fn carry_out(&mut self, worker: usize, life: u64, command: Command) {
        match command {
            Command::Deliver { message, .. } => self.send_out(worker, life, message),
            Command::Abort { .. } => {}
            command => {
                let there = self.now + self.latency(worker);
                let owner = self.alive(worker, life).map(|w| w.core.owner().to_owned()).unwrap_or_default();
                if self.trouble() {
                    match self.rng.u8(0..3) {
                        // Refused before it took effect.
                        0 => {
                            let event = failed(&command, Effect::NotApplied);
                            self.at(there, Action::Hear { worker, life, event });
                            return;
                        }
                        // The answer will be lost, but nothing was done either.
                        1 => {
                            self.mark("answer lost, not applied");
                            let event = failed(&command, Effect::Unknown);
                            self.at(there + SECOND, Action::Hear { worker, life, event });
                            return;
                        }
                        _ => {
                            self.at(there, Action::Execute { worker, life, owner, command, lose_answer: true });
                            return;
                        }
                    }
                }
                self.at(there, Action::Execute { worker, life, owner, command, lose_answer: false });
            }
        }
    }

    /// Messages of one content to one target are twins.
    fn content(&self, id: i64) -> usize {
        self.order.get(&id).map_or(usize::MAX, |n| n % 20)
    }

    fn send_out(&mut self, worker: usize, life: u64, message: Box<Message>) {
        if self.plan.dedup
            && let Some(twin) = self.delivering.insert((life, self.content(message.id)), message.id)
        {
            let both = format!("P10: w{worker} delivers the twins {twin} and {} side by side", message.id);
            self.outcomes.violations.push(both);
        }
        let there = self.now + self.rng.u64(100..20_000);
        let mut answer_after = self.rng.u64(100..20_000);
        let retry = |code: &'static str, reach| Outcome::Retry {
            fault: Fault::new(code, "simulated", reach),
            retry_after: None,
        };
        let (outcome, accepted) = if self.trouble() {
            match self.rng.u8(0..5) {
                0 => (retry("CONNECT_REFUSED", Reach::NeverSent), false),
                1 => (retry("HTTP_503", Reach::Answered), false),
                2 => {
                    self.mark("delivered, answer lost");
                    answer_after = 5 * SECOND;
                    (retry("TIMEOUT", Reach::Unknown), true)
                }
                3 => {
                    answer_after = 25 * SECOND; // longer than the lease: it must be renewed meanwhile
                    (Outcome::sent(), true)
                }
                _ => (Outcome::Defer { delay: Duration::from_secs(2), code: "PAUSED".into() }, false),
            }
        } else {
            (Outcome::Sent { result_ref: Some(format!("r{}", message.id)) }, true)
        };
        self.at(there, Action::Arrive { worker, life, message, outcome, accepted, answer_after });
    }

    fn arrive(
        &mut self,
        worker: usize,
        life: u64,
        message: Message,
        outcome: Outcome,
        accepted: bool,
        answer_after: u64,
    ) {
        // A request on its way arrives even if its sender is gone.
        if self.poison.contains(&message.id) {
            if let Some(alive) = self.alive(worker, life) {
                let owner = alive.core.owner().to_owned();
                self.poisoned.insert(owner);
                self.note(format_args!("poison {} kills w{worker}", message.id));
                self.crash(worker);
            }
            return;
        }
        let (at, id, token) = (self.now, message.id, message.lease_token);
        self.note(format_args!("received {id} token {token} accepted {accepted}"));
        if !matches!(outcome, Outcome::Defer { .. }) {
            self.outcomes.received.push(Received { at, id, token, accepted });
        }
        let back = self.now + answer_after;
        self.at(back, Action::Hear { worker, life, event: Event::Delivered { id, outcome, begun: false } });
    }

    /// Runs a store operation now, as the connection of a worker that may be dead by the time of the answer.
    async fn execute(&mut self, owner: &str, command: Command, lose_answer: bool) -> Event {
        if lose_answer {
            self.mark("answer lost, applied");
        }
        let lost = |op| failed_op(op, Effect::Unknown);
        let store = self.store.clone();
        macro_rules! answer {
            ($op:expr, $variant:ident, $result:expr, $told:expr) => {{
                let result = $result;
                let (told, lost_or_not) = ($told(&result), if lose_answer { ", answer lost" } else { "" });
                self.note(format_args!("{owner} {} {told}{lost_or_not}", stringify!($variant)));
                if lose_answer {
                    Event::$variant { op: $op, result: Err(lost($op)) }
                } else {
                    Event::$variant { op: $op, result }
                }
            }};
        }
        match command {
            Command::Claim { op, claim } => {
                let adopting = matches!(claim.from, postrider::store::From::Adopt { .. });
                let result = store.claim(&claim).await;
                if let Ok(claimed) = &result {
                    for message in &claimed.messages {
                        let until = self.now + LEASE.as_micros() as u64;
                        let before = self.holders.insert(message.id, (message.lease_token, owner.to_owned(), until));
                        let expired = before.map_or(0, |(_, _, until)| until);
                        if message.crashes == 0 {
                            self.unlucky.remove(&message.id);
                        }
                        if let Some(from) = &message.taken_over_from {
                            self.mark("taken over");
                            if self.struck.get(from).is_some_and(|until| expired <= *until) {
                                self.unlucky.insert(message.id);
                            } else if !self.poisoned.contains(from) {
                                let lost = format!("P5: {from} is well, and lost message {} to {owner}", message.id);
                                self.outcomes.violations.push(lost);
                            }
                        }
                        if adopting && message.lease_token > 1 && message.taken_over_from.is_none() {
                            self.mark("adopted");
                        }
                    }
                }
                answer!(op, Claimed, result, messages)
            }
            Command::Walk { op, shard, after, limit, .. } => {
                answer!(op, Walked, store.walk(LANE, shard, after, limit).await, entries)
            }
            Command::Dedup { op, probes, .. } => {
                let result = self.outbox.check_dedup(LANE, probes).await;
                if result.as_ref().is_ok_and(|hits| hits.iter().any(Option::is_some)) {
                    self.mark("dedup hit");
                }
                answer!(op, Deduped, result, |r| format!("{r:?}"))
            }
            Command::Settle { op, entries, .. } => {
                let again = entries.iter().any(|e| e.again);
                let result = store.settle(LANE, owner, &entries).await;
                if let Ok(answers) = &result {
                    use postrider::outcome::Settled;
                    for (entry, answer) in entries.iter().zip(answers) {
                        // The second time it is only told again what the first time did.
                        let first = *answer == Settled::Applied && self.settled.insert(entry.lease);
                        if first
                            && !matches!(entry.verdict, Verdict::Dead { counted: false, .. } | Verdict::Sent { .. })
                        {
                            *self.counted.entry(entry.lease.id).or_default() += 1;
                        }
                        self.check_fence("settled", owner, entry.lease, first);
                    }
                    if answers.contains(&Settled::LeaseLost) {
                        self.mark("lease lost");
                    }
                    if again && answers.contains(&Settled::Applied) {
                        self.mark("settled again after a lost answer");
                    }
                }
                answer!(op, Settled, result, |r| format!(
                    "{:?} {r:?}",
                    entries.iter().map(|e| e.lease).collect::<Vec<_>>()
                ))
            }
            Command::Defer { op, leases, how } => {
                let result = store.defer(owner, &leases, &how).await;
                for (lease, given) in leases.iter().zip(result.as_deref().unwrap_or_default()) {
                    self.check_fence("gave back", owner, *lease, *given == LeaseState::Held);
                }
                answer!(op, Deferred, result, |r| format!("{leases:?} {r:?}"))
            }
            Command::Renew { op, leases, lease } => {
                self.mark("renewed");
                let result = store.renew(owner, &leases, lease).await;
                for (lease, kept) in leases.iter().zip(result.as_deref().unwrap_or_default()) {
                    self.check_fence("renewed", owner, *lease, *kept == LeaseState::Held);
                    if let Some(holder) = self.holders.get_mut(&lease.id).filter(|_| *kept == LeaseState::Held) {
                        holder.2 = self.now + LEASE.as_micros() as u64;
                    }
                }
                answer!(op, Renewed, result, |r| format!("{leases:?} {r:?}"))
            }
            Command::Deliver { .. } | Command::Abort { .. } => unreachable!("not a store operation"),
        }
    }

    fn check_fence(&mut self, did: &str, owner: &str, lease: Lease, applied: bool) {
        let holder = self.holders.get(&lease.id);
        if applied && holder.is_none_or(|(token, name, _)| *token != lease.token || name != owner) {
            let broken = format!("S6: {owner} {did} {lease:?}, which belongs to {holder:?}");
            self.outcomes.violations.push(broken);
        }
    }

    // ---- the checks: the database and the receiver's log, not what the workers say ----

    async fn check(&mut self) {
        let filter = Filter { limit: 100_000, ..Filter::default() };
        let rows = self.outbox.list(filter).await.expect("the list").items;
        let mut wrong = Vec::new();
        let ends: Vec<(i64, i64)> = transact(&*self.store, Mode::Read, |tx| {
            Box::pin(async move {
                let rows = tx.query("SELECT id, token FROM sim_ends", &[]).await?;
                rows.iter().map(|row| Ok((row.int(0)?, row.int(1)?))).collect()
            })
        })
        .await
        .expect("the ledger");
        for &id in &self.enqueued {
            let found: Vec<_> = rows.iter().filter(|row| row.id == id).collect();
            let [row] = found[..] else {
                wrong.push(format!("P1: message {id} is there {} times", found.len()));
                continue;
            };
            if !matches!(row.status, Status::Sent | Status::Dead) {
                wrong.push(format!("L1: message {id} never ended: {row:?}"));
                continue;
            }
            let ended: Vec<i64> = ends.iter().filter(|(end, _)| *end == id).map(|(_, token)| *token).collect();
            if ended != [row.lease_token] {
                wrong.push(format!("P3: message {id} ended under tokens {ended:?}, its row says {}", row.lease_token));
            }
            let requests: Vec<&Received> = self.outcomes.received.iter().filter(|r| r.id == id).collect();
            let mut tokens: Vec<i64> = requests.iter().map(|r| r.token).collect();
            tokens.sort_unstable();
            tokens.dedup();
            if tokens.len() != requests.len() {
                wrong.push(format!("P2: message {id} was sent twice under one token: {requests:?}"));
            }
            if tokens.iter().any(|token| *token > row.lease_token) {
                wrong.push(format!("S11: message {id} was sent under a token beyond its end: {requests:?}"));
            }
            let accepted = requests.iter().filter(|r| r.accepted).count();
            let poisoned = self.poison.contains(&id);
            match row.status {
                Status::Sent if accepted == 0 && !self.plan.dedup => {
                    wrong.push(format!("S10: message {id} is called sent, but nobody received it"));
                }
                Status::Sent if poisoned => wrong.push(format!("message {id} kills its worker and is called sent")),
                // Workers struck time and again while they hold a message look like workers it kills. But what lost only
                // its poisonous neighbour's workers, or healthy ones, must not be buried for it.
                Status::Dead if !poisoned => {
                    let poison = row.last_error_code.as_deref() == Some("POISON");
                    let spent = !poison && row.attempts == self.plan.max_attempts;
                    if spent {
                        *self.outcomes.marks.entry("died of its attempts").or_default() += 1;
                    } else if !poison || !self.unlucky.contains(&id) {
                        wrong.push(format!(
                            "message {id} is dead without a reason: {:?} {:?}",
                            row.last_error_code, row.crashes
                        ));
                    }
                }
                Status::Dead if row.last_error_code.as_deref() != Some("POISON") => {
                    wrong.push(format!("the poison message {id} ended as {:?}", row.last_error_code));
                }
                Status::Dead => *self.outcomes.marks.entry("buried").or_default() += 1,
                _ => {}
            }
            if self.plan.fault == 0.0 && !self.plan.dedup && requests.len() != 1 {
                wrong.push(format!("nothing failed, and message {id} was sent {} times", requests.len()));
            }
            if row.crashes > 5 || row.attempts > self.plan.max_attempts {
                wrong.push(format!("P11: message {id} went over its budgets: {row:?}"));
            }
            let recorded = self.counted.get(&id).copied().unwrap_or(0);
            if row.attempts != recorded {
                wrong.push(format!("P11: message {id} had {recorded} outcomes, but {} are counted", row.attempts));
            }
        }
        if self.plan.dedup && self.plan.fault == 0.0 && self.plan.workers == 1 {
            // P10: with one process and no faults, each content goes to each target once.
            let mut contents = std::collections::HashSet::new();
            for id in self.outcomes.received.iter().map(|r| r.id) {
                if !contents.insert(self.content(id)) {
                    wrong.push(format!(
                        "P10: message {id} is the twin of one that was delivered, and was delivered too"
                    ));
                }
            }
        }
        self.outcomes.violations.append(&mut wrong);
    }
}

/// Identity and order are what must repeat, and what a reader looks for; payloads are noise.
fn messages(result: &Result<Claimed>) -> String {
    let one = |m: &Message| {
        let from = m.taken_over_from.as_ref().map(|from| format!(" from {from}")).unwrap_or_default();
        format!("{}@{} crashes {}{from}", m.id, m.lease_token, m.crashes)
    };
    match result {
        Ok(claimed) => claimed.messages.iter().map(one).collect::<Vec<_>>().join(", "),
        Err(error) => error.to_string(),
    }
}

fn entries(result: &Result<Walked>) -> String {
    let one = |s: &Seen| format!("{}@{} {:?}", s.mark.id, s.hold.token, s.hold.locked_by);
    match result {
        Ok(walked) => walked.seen.iter().map(one).collect::<Vec<_>>().join(", "),
        Err(error) => error.to_string(),
    }
}

fn failed_op(_: u64, effect: Effect) -> Error {
    Error { kind: Kind::Unreachable, effect, message: "simulated".to_owned() }
}

fn failed(command: &Command, effect: Effect) -> Event {
    match command {
        Command::Claim { op, .. } => Event::Claimed { op: *op, result: Err(failed_op(*op, effect)) },
        Command::Walk { op, .. } => Event::Walked { op: *op, result: Err(failed_op(*op, effect)) },
        Command::Dedup { op, .. } => Event::Deduped { op: *op, result: Err(failed_op(*op, effect)) },
        Command::Settle { op, .. } => Event::Settled { op: *op, result: Err(failed_op(*op, effect)) },
        Command::Defer { op, .. } => Event::Deferred { op: *op, result: Err(failed_op(*op, effect)) },
        Command::Renew { op, .. } => Event::Renewed { op: *op, result: Err(failed_op(*op, effect)) },
        Command::Deliver { .. } | Command::Abort { .. } => Event::Wake,
    }
}
