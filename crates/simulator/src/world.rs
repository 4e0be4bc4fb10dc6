//! The world: a queue of what happens when, the clocks, and the record of the run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use postrider::clock::simulated::Clock;
use postrider::clock::{Tick, simulated};
use postrider::lease::Lease;
use postrider::message::Message;
use postrider::store::{Mode, transact};
use postrider::stores::sqlite::SqliteStore;
use postrider::worker::core::{Command, Event};
use postrider::{LaneRules, Lanes, Options, Outbox, Timestamp};

use postrider::couriers::exchange::Answer;
use postrider_memories::Settling;
use postrider_orders::Book;
use postrider_webhooks::Reports;
use tokio::sync::oneshot;

use crate::checker::{Checker, Step};
use crate::delivering::Delivery;
use crate::dice::{Fate, dice, fate};
use crate::journal::{self, Listener};
use crate::marks::Marks;
use crate::parts::memories::Rememberers;
use crate::parts::openmemory::Call;
use crate::parts::orders::{self, Traders};
use crate::parts::webhooks::Publishers;
use crate::plan::{LEASE, LaneKind, Plan, SECOND, What};
use crate::processes::Process;
use crate::producers::Batch;
use crate::store::{Activity, Locks, Reply, SimStore};

pub const START: Timestamp = Timestamp::from_micros(1_800_000_000_000_000);

/// What happened in a run, told from outside.
#[derive(Debug, Default)]
pub struct Outcomes {
    /// A digest of every step.
    pub trace: u64,
    pub events: u64,
    /// Steps whose effect on the database was checked.
    pub steps: u64,
    pub requests: u64,
    pub messages: u64,
    pub violations: Vec<String>,
    pub faults: BTreeMap<&'static str, u64>,
    /// The faults that were drawn, for shrinking.
    pub injected: Vec<Fate>,
    pub marks: Marks,
    pub virtual_seconds: u64,
    /// How long everything took to end after the last fault, as a part of what the configuration allows.
    pub patience_used: f64,
    /// What happened, in lines, where it was asked for.
    pub story: Vec<String>,
}

pub enum Action {
    Enqueue {
        batch: usize,
        round: u64,
    },
    /// An open transaction ends.
    Conclude {
        batch: usize,
        round: u64,
        commit: bool,
    },
    Start {
        process: usize,
    },
    Step {
        process: usize,
        life: u64,
    },
    Watch {
        process: usize,
        life: u64,
        round: u64,
    },
    /// A store operation reaches the database.
    Execute {
        process: usize,
        life: u64,
        owner: String,
        command: Command,
        reply: Reply,
        era: u64,
        fate: Fate,
    },
    Hear {
        process: usize,
        life: u64,
        event: Event,
        era: Option<u64>,
    },
    /// *Send begun* reaches the database.
    Begin {
        delivery: Box<Delivery>,
        reply: Reply,
        era: u64,
    },
    Arrive {
        delivery: Box<Delivery>,
    },
    Incident(usize),
    Thaw {
        process: usize,
        life: u64,
    },
    Unlock {
        ids: Vec<i64>,
    },
    Resume {
        lane: LaneKind,
    },
    Publish {
        event: usize,
        round: u64,
    },
    Orchestrate {
        process: usize,
        life: u64,
        round: u64,
    },
    Place {
        order: usize,
        round: u64,
    },
    /// A person looks for orders that nobody can tell the end of.
    Reconcile {
        round: u64,
    },
    Remember {
        memory: usize,
        round: u64,
    },
    /// Whoever tends a gateway looks at it.
    Attend {
        process: usize,
        life: u64,
        round: u64,
    },
    Tidy {
        process: usize,
        life: u64,
        round: u64,
    },
    /// A request reaches OpenMemory.
    Asked {
        call: Box<Call>,
        fate: Fate,
    },
    /// Its answer comes back.
    Answer {
        process: usize,
        life: u64,
        send: oneshot::Sender<Answer>,
        answer: Box<Answer>,
        fate: Fate,
    },
    /// OpenMemory comes to what it was sent before.
    Apply {
        number: u64,
    },
    /// A pause is over.
    Wake {
        process: usize,
        life: u64,
        wake: oneshot::Sender<()>,
    },
    /// A subscription is resumed.
    LetGo {
        subscription: usize,
        round: u64,
    },
    /// An operator comes back to what was seized.
    Conclusion {
        owner: String,
        lane: String,
        lease: Lease,
        fate: Fate,
    },
}

pub struct World {
    pub plan: Plan,
    pub now: u64,
    sequence: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    pub actions: HashMap<u64, Action>,
    pub processes: Vec<Process>,
    pub store: Arc<SqliteStore>,
    pub locks: Arc<Locks>,
    pub activity: Arc<Activity>,
    /// What producers and operators use.
    pub clients: Arc<SimStore>,
    pub outbox: Outbox,
    pub checker: Checker,
    pub batches: Vec<Batch>,
    /// Which message of the plan an id is, and which ids a message has.
    pub planned: HashMap<i64, usize>,
    /// How far the database's clock is from the world's.
    pub db_offset: i64,
    /// Raised by every restart of the database.
    pub era: u64,
    pub down_until: u64,
    pub last_fault: u64,
    /// The receivers' own log: the tokens under which a message came.
    pub received: BTreeMap<i64, Vec<i64>>,
    pub accepted: HashSet<i64>,
    pub settled_by_hand: HashSet<i64>,
    pub dedup_hits: HashSet<i64>,
    pub claims: HashMap<Lease, String>,
    /// What each life of a process is delivering right now.
    pub under_way: BTreeMap<(usize, u64), BTreeMap<i64, Message>>,
    /// Owners that were made to die, freeze or stall, and until when what they hold may rightly count as lost with them.
    pub struck: HashMap<String, u64>,
    /// The same for everybody, and for single messages.
    pub struck_all: u64,
    pub struck_rows: HashMap<i64, u64>,
    /// Messages of claims whose answer was lost, and whose; and those whose look for them failed.
    pub lost_claims: HashMap<i64, String>,
    pub adoptions_failed: HashSet<String>,
    /// Owners a poison message killed.
    pub poisoned: HashSet<String>,
    /// Messages taken over from somebody who was struck, since their last outcome.
    pub unlucky: HashSet<i64>,
    pub requeued: BTreeSet<i64>,
    pub reports: Reports,
    pub publishers: Option<Publishers>,
    pub traders: Option<Traders>,
    pub rememberers: Option<Rememberers>,
    pub clock: Arc<Clock>,
    pub outcomes: Outcomes,
    telling: bool,
    looked_at: u64,
}

/// Runs a plan to its end and checks the promises.
pub fn run(plan: Plan) -> Outcomes {
    go(plan, false)
}

/// The same, telling what happened.
pub(crate) fn go(plan: Plan, telling: bool) -> Outcomes {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let outcomes = runtime.block_on(async {
        let mut world = World::new(plan, telling).await;
        world.run().await;
        world.finish().await
    });
    simulated::leave();
    outcomes
}

/// The rules of the lanes, as somebody knows them who knows of so many shards.
pub fn lanes(plan: &Plan, knows_shards: u32, reports: &Reports, book: &Book, settling: &Settling) -> Arc<Lanes> {
    let mut lanes = Lanes::new();
    for lane in &plan.lanes {
        let mut rules = LaneRules { shards: lane.shards.min(knows_shards), ..LaneRules::default() };
        match lane.kind {
            LaneKind::Plain => {}
            LaneKind::Heard => rules.on_settled = Some(Arc::new(Listener)),
            LaneKind::Dedup => rules.dedup = true,
            LaneKind::Begun => rules.send_begun = true,
            LaneKind::Brief => rules.retention = std::time::Duration::ZERO,
            LaneKind::Webhooks => rules = postrider_webhooks::lane_rules(reports),
            LaneKind::Memories => rules = postrider_memories::lane_rules(settling),
            LaneKind::KeyedOrders | LaneKind::Orders => {
                rules = postrider_orders::lane_rules(book, orders::idempotency(plan));
            }
        }
        lanes = lanes.with(lane.kind.name(), rules);
    }
    Arc::new(lanes)
}

/// The thread of the database lives by the world's clock, too.
async fn live_by(store: &SqliteStore, clock: &Arc<Clock>) {
    let clock = clock.clone();
    let entered = transact(store, Mode::Read, move |_| {
        clock.enter();
        Box::pin(async { Ok(()) })
    });
    entered.await.expect("a transaction");
}

impl World {
    async fn new(plan: Plan, telling: bool) -> World {
        let clock = Clock::new(fate(plan.seed, "clock", [0; 3]));
        clock.set(Tick::from_micros(0), START);
        clock.enter();
        let reports = Reports::default();
        let book = Book::default();
        let all = lanes(&plan, u32::MAX, &reports, &book, &Settling::default());
        let migrations =
            [&postrider_webhooks::MIGRATIONS[..], &postrider_orders::MIGRATIONS, &postrider_memories::MIGRATIONS];
        let migrations = migrations.concat();
        let options = Options { migrations, ..Options::default() };
        let store = Arc::new(SqliteStore::simulated(START, all.clone(), options).expect("a store in memory"));
        live_by(&store, &clock).await;
        let locks: Arc<Locks> = Arc::default();
        let activity: Arc<Activity> = Arc::default();
        let clients = Arc::new(SimStore::new(store.clone(), all, locks.clone(), activity.clone()));
        let outbox = Outbox::new(clients.clone());
        outbox.migrate().await.expect("migrations");
        journal::install(&*store).await.expect("the journal");
        let process = |own| Process::new(own, &plan, &store, &locks, &activity, &reports);
        let processes = plan.processes.iter().map(process).collect();
        let publishers = match plan.subscriptions.is_empty() {
            true => None,
            false => Some(Publishers::new(&plan, &outbox, &reports).await),
        };
        let traders = match plan.orders.is_empty() {
            true => None,
            false => Some(Traders::new(&plan, &outbox, book).await),
        };
        let rememberers = match plan.memories.is_empty() {
            true => None,
            false => Some(Rememberers::new(&plan, &*store).await),
        };
        let mut world = World {
            checker: Checker::new(&plan),
            batches: Batch::of(&plan),
            now: 0,
            sequence: 0,
            queue: BinaryHeap::new(),
            actions: HashMap::new(),
            processes,
            store,
            locks,
            activity,
            clients,
            outbox,
            planned: HashMap::new(),
            db_offset: 0,
            era: 0,
            down_until: 0,
            last_fault: 0,
            received: BTreeMap::new(),
            accepted: HashSet::new(),
            settled_by_hand: HashSet::new(),
            dedup_hits: HashSet::new(),
            claims: HashMap::new(),
            under_way: BTreeMap::new(),
            struck: HashMap::new(),
            struck_all: 0,
            struck_rows: HashMap::new(),
            lost_claims: HashMap::new(),
            adoptions_failed: HashSet::new(),
            poisoned: HashSet::new(),
            unlucky: HashSet::new(),
            requeued: BTreeSet::new(),
            reports,
            publishers,
            traders,
            rememberers,
            clock,
            outcomes: Outcomes::default(),
            telling,
            looked_at: 0,
            plan,
        };
        world.set_out();
        world
    }

    fn set_out(&mut self) {
        for process in 0..self.processes.len() {
            let at = dice(self.fate("start", [process as u64, 0, 0])).u64(0..SECOND);
            self.at(at, Action::Start { process });
        }
        for batch in 0..self.batches.len() {
            self.at(self.batches[batch].at, Action::Enqueue { batch, round: 0 });
        }
        for event in 0..self.plan.events.len() {
            self.at(self.plan.events[event].at, Action::Publish { event, round: 0 });
        }
        for order in 0..self.plan.orders.len() {
            self.at(self.plan.orders[order].at, Action::Place { order, round: 0 });
        }
        for memory in 0..self.plan.memories.len() {
            self.at(self.plan.memories[memory].at, Action::Remember { memory, round: 0 });
        }
        if self.traders.is_some() {
            self.at(SECOND, Action::Reconcile { round: 0 });
        }
        for incident in 0..self.plan.incidents.len() {
            self.at(self.plan.incidents[incident].at, Action::Incident(incident));
        }
    }

    pub fn at(&mut self, time: u64, action: Action) {
        self.sequence += 1;
        self.queue.push(Reverse((time, self.sequence)));
        self.actions.insert(self.sequence, action);
    }

    pub fn fate(&self, topic: &str, of: [u64; 3]) -> Fate {
        fate(self.plan.seed, topic, of)
    }

    pub fn db_now(&self) -> i64 {
        START.micros() + self.now as i64 + self.db_offset
    }

    pub fn trouble_ends(&self) -> u64 {
        self.plan.trouble_sec * SECOND
    }

    /// Does something go wrong here? Its dice, if so.
    pub fn goes_wrong(&self, fate: Fate) -> Option<fastrand::Rng> {
        if self.now >= self.trouble_ends() || self.plan.only.as_ref().is_some_and(|only| !only.contains(&fate)) {
            return None;
        }
        let mut rng = dice(fate);
        (rng.f64() < self.plan.fault).then_some(rng)
    }

    /// A fault was injected; its effect lasts until then.
    pub fn fault(&mut self, kind: &'static str, fate: Option<Fate>, until: u64) {
        *self.outcomes.faults.entry(kind).or_default() += 1;
        self.outcomes.injected.extend(fate);
        self.last_fault = self.last_fault.max(until);
    }

    pub fn mark(&mut self, name: &'static str) {
        self.checker.marks.reach(name);
    }

    pub fn violation(&mut self, what: String) {
        if self.outcomes.violations.len() < 20 {
            self.outcomes.violations.push(format!("at {:.6} s: {what}", self.now as f64 / 1e6));
        }
    }

    pub fn note(&mut self, text: std::fmt::Arguments<'_>) {
        // FNV-1a over the whole story: two runs of one seed must agree on every step.
        let text = format!("{:>12.6}  {text}", self.now as f64 / 1e6);
        let mut hash = self.outcomes.trace ^ 0xcbf2_9ce4_8422_2325;
        for byte in text.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.outcomes.trace = hash;
        self.outcomes.events += 1;
        if self.telling {
            self.outcomes.story.push(text);
        }
    }

    /// Holds the database's own journal against what this step may have done.
    pub async fn checked(&mut self, step: Step<'_>) {
        let (changes, heard) = journal::read(&*self.store).await.expect("the journal");
        let seen = self.checker.check((self.now, self.db_now()), &self.locks, &step, changes, heard);
        for (id, correlation) in &seen.inserted {
            if let Some(n) = correlation.as_ref().and_then(|n| n.parse().ok()) {
                self.planned.insert(*id, n);
            }
        }
        self.blame(seen);
        self.check_ledger().await;
        self.check_memories().await;
    }

    async fn run(&mut self) {
        while let Some(Reverse((time, sequence))) = self.queue.pop() {
            let Some(action) = self.actions.remove(&sequence) else { continue };
            if time > self.now {
                self.store.jump_clock((time - self.now) as i64);
                self.now = time;
                self.clock.set(Tick::from_micros(time), Timestamp::from_micros(self.db_now()));
            }
            if self.is_over() {
                break;
            }
            self.act(action).await;
            if !self.outcomes.violations.is_empty() || !self.checker.violations.is_empty() {
                break;
            }
        }
        self.outcomes.virtual_seconds = self.now / SECOND;
    }

    /// Everything has ended, or had its time.
    fn is_over(&mut self) -> bool {
        let healed = self.last_fault.max(self.trouble_ends());
        if self.now < healed || self.now < self.looked_at + SECOND / 20 {
            return false;
        }
        self.looked_at = self.now;
        let patience = self.plan.patience().as_micros() as u64;
        let idle = self.processes.iter().all(|p| p.alive.as_ref().is_none_or(|alive| alive.core.held() == 0));
        let published = self.publishers.as_ref().is_none_or(|publishers| publishers.is_done(&self.plan));
        let published = published && self.traders.as_ref().is_none_or(|traders| traders.is_done(&self.plan));
        let remembered = self.rememberers.as_ref().is_none_or(|all| all.is_done(&self.plan));
        let drained =
            idle && published && remembered && self.batches.iter().all(|batch| batch.over) && self.checker.live() == 0;
        let used = (self.now - healed) as f64 / patience as f64;
        if drained {
            self.outcomes.patience_used = used;
        } else if used > 1.0 {
            let waiting: Vec<_> = self.checker.known.iter().filter(|(_, k)| k.live).take(3).collect();
            let held: usize = self.processes.iter().filter_map(|p| Some(p.alive.as_ref()?.core.held())).sum();
            let text = format!(
                "L1: {:.1} leases after the last fault not everything has ended: {} live, {held} held, {} batches not enqueued, {} sagas, {}, first {waiting:?}",
                (self.now - healed) as f64 / LEASE.as_micros() as f64,
                self.checker.live(),
                self.batches.iter().filter(|batch| !batch.over).count(),
                self.publishers.as_ref().map_or(0, |publishers| publishers.sagas.live()),
                self.rememberers.as_ref().map_or(String::new(), |all| all.left(&self.plan)),
            );
            self.violation(text);
            return true;
        }
        drained
    }

    async fn act(&mut self, action: Action) {
        match action {
            Action::Enqueue { batch, round } => self.enqueue(batch, round).await,
            Action::Conclude { batch, round, commit } => self.conclude(batch, round, commit).await,
            Action::Start { process } => self.start(process).await,
            Action::Step { process, life } => self.step(process, life),
            Action::Watch { process, life, round } => self.watch(process, life, round).await,
            Action::Execute { process, life, owner, command, reply, era, fate } => {
                self.reach_database(process, life, owner, command, reply, era, fate).await;
            }
            Action::Hear { process, life, event, era } => self.hear(process, life, event, era),
            Action::Begin { delivery, reply, era } => self.begin(delivery, reply, era).await,
            Action::Arrive { delivery } => self.arrive(*delivery).await,
            Action::Publish { event, round } => self.publish(event, round).await,
            Action::Orchestrate { process, life, round } => self.orchestrate(process, life, round).await,
            Action::Place { order, round } => self.place(order, round).await,
            Action::Reconcile { round } => self.reconcile(round).await,
            Action::Remember { memory, round } => self.remember(memory, round).await,
            Action::Attend { process, life, round } => self.tend(process, life, round, false).await,
            Action::Tidy { process, life, round } => self.tend(process, life, round, true).await,
            Action::Asked { call, fate } => self.asked(*call, fate),
            Action::Answer { process, life, send, answer, fate } => {
                self.hear_openmemory(process, life, send, *answer, fate).await;
            }
            Action::Apply { number } => self.apply_late(number),
            Action::Wake { process, life, wake } => self.woken(process, life, wake).await,
            Action::LetGo { subscription, round } => self.let_go(subscription, round).await,
            Action::Incident(n) => self.incident(n).await,
            Action::Thaw { process, life } => {
                self.note(format_args!("w{process} goes on"));
                self.at(self.now, Action::Step { process, life });
            }
            Action::Unlock { ids } => {
                ids.iter().for_each(|id| self.locks.release(*id));
                self.note(format_args!("somebody's locks on {ids:?} are gone"));
            }
            Action::Resume { lane } => {
                self.clients.expect([]);
                self.outbox.resume(lane.name()).await.expect("a resume");
                self.note(format_args!("{} is resumed", lane.name()));
            }
            Action::Conclusion { owner, lane, lease, fate } => self.come_back(owner, lane, lease, fate).await,
        }
    }

    async fn incident(&mut self, n: usize) {
        let what = self.plan.incidents[n].what.clone();
        let now = self.now;
        match what {
            What::Crash { process } => {
                self.fault("a crash", None, now);
                self.strike(process, u64::MAX);
                self.crash(process);
            }
            What::Stop { process } => self.stop(process),
            What::Freeze { process, lasts } => self.freeze(process, lasts),
            What::CutOff { process, lasts } => {
                self.fault("a process cut off", None, now + lasts);
                self.strike(process, now + lasts + crate::processes::AFTERMATH);
                self.processes[process].cut_off_until = now + lasts;
                self.note(format_args!("w{process} is cut off from the database for {lasts} us"));
            }
            What::Restart { lasts } => self.restart_database(lasts).await,
            What::Jump { by } => {
                self.fault("a jump of the database's clock", None, now + by.unsigned_abs());
                self.db_offset += by;
                self.store.jump_clock(by);
                if let (Some(traders), Ok(by)) = (&self.traders, u64::try_from(by)) {
                    traders.broker.hurry(now, by);
                }
                if by > 0 {
                    self.hurry_memories();
                }
                // Leases may end early, or renewals come too late, for everybody.
                self.struck_all = now + by.unsigned_abs() + crate::processes::AFTERMATH;
                self.note(format_args!("the database's clock jumps by {} s", by / SECOND as i64));
            }
            other => self.operate(n as u64, other).await,
        }
    }

    async fn restart_database(&mut self, lasts: u64) {
        self.fault("a restart of the database", None, self.now + lasts);
        self.era += 1;
        self.down_until = self.now + lasts;
        self.locks.release_all();
        self.struck_all = self.struck_all.max(self.now + lasts + crate::processes::AFTERMATH);
        self.note(format_args!("the database restarts, and is back after {lasts} us"));
        for batch in 0..self.batches.len() {
            if self.batches[batch].open.is_some() {
                let round = self.batches[batch].round;
                self.conclude(batch, round, false).await;
            }
        }
    }

    async fn finish(mut self) -> Outcomes {
        let rows = journal::everything(&*self.store).await.expect("the tables");
        self.checker.compare(self.now, rows);
        if self.outcomes.violations.is_empty() && self.checker.violations.is_empty() {
            self.check_ends();
            self.check_webhooks().await;
            self.check_orders();
            self.check_remembered();
        }
        let mut outcomes = self.outcomes;
        outcomes.violations.append(&mut self.checker.violations);
        outcomes.steps = self.checker.steps;
        outcomes.marks = self.checker.marks;
        outcomes.requests = self.received.values().map(|tokens| tokens.len() as u64).sum();
        outcomes.messages = self.checker.known.len() as u64;
        outcomes
    }
}
