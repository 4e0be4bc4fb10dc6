//! Worker processes: each has a core, a clock of its own and a view of the database. They start, step, hear, freeze, are told
//! to stop, and die.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use postrider::backoff::Backoff;
use postrider::clock::Tick;
use postrider::decide::Budgets;
use postrider::stores::sqlite::SqliteStore;
use postrider::worker::core::{Core, Event, LaneSettings, Settings};
use postrider::{Lanes, Outbox};
use postrider_memories::Settling;
use postrider_orders::{Book, OrderCourier};
use postrider_webhooks::Reports;

use crate::carrying::without_answer;
use crate::dice::dice;
use crate::parts::memories::Gateway;
use crate::parts::orders;
use crate::parts::webhooks::Part;
use crate::plan::{JITTER, LEASE, LONGEST_BACKOFF, LaneKind, MAX_CRASHES, POLL, Plan, ProcessPlan, SECOND};
use crate::store::{Activity, Locks, SimStore};
use crate::world::{Action, World, lanes};

/// After a process was frozen, stalled or cut off, its leases may still be found expired for this long.
pub const AFTERMATH: u64 = 40 * SECOND;
const DRAIN: Duration = Duration::from_secs(5);

pub struct Alive {
    pub core: Core,
    pub life: u64,
    next_step: u64,
    pub frozen_until: u64,
    /// Store operations so far: names the next one's fate.
    pub operations: u64,
    paused: Option<Vec<String>>,
}

pub struct Process {
    pub plan: ProcessPlan,
    pub store: Arc<SimStore>,
    pub outbox: Outbox,
    pub alive: Option<Alive>,
    pub lives: u64,
    pub cut_off_until: u64,
    /// What it has of webhooks and orders, as long as it lives.
    pub part: Option<Arc<Part>>,
    pub courier: Option<Arc<OrderCourier>>,
    pub gateway: Option<Gateway>,
    /// Of its former lives: what they asked the database for may come late.
    former: BTreeMap<u64, Arc<SimStore>>,
}

impl Process {
    pub fn new(
        own: &ProcessPlan,
        plan: &Plan,
        store: &Arc<SqliteStore>,
        locks: &Arc<Locks>,
        activity: &Arc<Activity>,
        reports: &Reports,
    ) -> Self {
        let lanes = lanes(plan, own.knows_shards, reports, &Book::default(), &Settling::default());
        let store = Arc::new(SimStore::new(store.clone(), lanes, locks.clone(), activity.clone()));
        let outbox = Outbox::new(store.clone());
        Process {
            plan: own.clone(),
            store,
            outbox,
            alive: None,
            lives: 0,
            cut_off_until: 0,
            part: None,
            courier: None,
            gateway: None,
            former: BTreeMap::new(),
        }
    }

    /// The connections of one of its lives.
    pub fn store_of(&self, life: u64) -> Arc<SimStore> {
        self.former.get(&life).unwrap_or(&self.store).clone()
    }

    /// A new life remembers nothing of the orders and memories of the one before.
    fn forget(&mut self, lanes: Arc<Lanes>) {
        let (inner, locks, activity) =
            (self.store.inner.clone(), self.store.locks.clone(), self.store.activity.clone());
        let store = Arc::new(SimStore::new(inner, lanes, locks, activity));
        self.former.insert(self.lives, std::mem::replace(&mut self.store, store.clone()));
        self.outbox = Outbox::new(store);
    }

    /// Its own clock at a moment of the world.
    pub fn tick(&self, now: u64) -> Tick {
        let drifted = i128::from(now) * i128::from(1_000_000 + self.plan.drift_ppm) / 1_000_000;
        Tick::from_micros(self.plan.clock + drifted as u64)
    }

    /// The first moment of the world at which its clock shows this.
    fn moment(&self, tick: Tick) -> u64 {
        let shown = i128::from(tick.micros().saturating_sub(self.plan.clock)) * 1_000_000;
        (shown / i128::from(1_000_000 + self.plan.drift_ppm)) as u64 + 1
    }

    /// The shards of a lane it takes, as far as it knows of them.
    fn shards(&self, shards: u32) -> Vec<u32> {
        let half = self.plan.half.unwrap_or(0);
        let every = if self.plan.half.is_some() { 2 } else { 1 };
        let known = shards.min(self.plan.knows_shards);
        let ours: Vec<u32> = (0..known).filter(|shard| shard % every == half % every).collect();
        if ours.is_empty() { (0..known).collect() } else { ours }
    }
}

pub fn budgets(plan: &Plan, kind: LaneKind) -> Budgets {
    Budgets {
        max_attempts: plan.lane(kind).max_attempts,
        max_crashes: MAX_CRASHES,
        backoff: Backoff::Exponential { base: Duration::from_secs(1), max: LONGEST_BACKOFF, jitter: JITTER },
        retry_after_cap: LONGEST_BACKOFF,
        keep_unresolved: kind.keeps_unresolved(),
    }
}

impl World {
    pub async fn start(&mut self, process: usize) {
        let serves = self.processes[process].plan.lanes.contains(&LaneKind::Webhooks);
        let trades = self.processes[process].plan.lanes.iter().any(|kind| kind.is_orders());
        let remembers = self.processes[process].plan.lanes.contains(&LaneKind::Memories);
        if (serves || trades) && self.now < self.down_until {
            return self.at(self.down_until, Action::Start { process });
        }
        if let Some(traders) = self.traders.as_ref().filter(|_| trades) {
            let (book, broker) = (Book::default(), traders.broker.clone());
            let shards = self.processes[process].plan.knows_shards;
            let lanes = lanes(&self.plan, shards, &self.reports, &book, &Settling::default());
            self.processes[process].forget(lanes);
            let outbox = self.processes[process].outbox.clone();
            let orders = orders::open(&self.plan, &outbox, book, broker).await;
            self.processes[process].courier = Some(Arc::new(orders.courier()));
        }
        if let Some(rememberers) = self.rememberers.as_ref().filter(|_| remembers) {
            let (settling, calls) = (Settling::default(), rememberers.calls());
            let (shards, life) = (self.processes[process].plan.knows_shards, self.processes[process].lives + 1);
            let lanes = lanes(&self.plan, shards, &self.reports, &Book::default(), &settling);
            self.processes[process].forget(lanes);
            let gateway = Gateway::new(&self.processes[process].outbox, &settling, calls, process, life);
            self.processes[process].gateway = Some(gateway);
        }
        let outbox = self.processes[process].outbox.clone();
        self.processes[process].part = match serves {
            true => Some(Arc::new(Part::new(&outbox, &self.reports).await)),
            false => None,
        };
        let of = &mut self.processes[process];
        of.lives += 1;
        let life = of.lives;
        let lane = |kind: &LaneKind| LaneSettings {
            concurrency: of.plan.concurrency,
            batch: 16,
            lease: LEASE,
            poll: POLL,
            budgets: budgets(&self.plan, *kind),
            dedup: matches!(kind, LaneKind::Dedup | LaneKind::Memories),
            send_begun: kind.commits_begun(),
            one_destination: kind.is_orders() || *kind == LaneKind::Memories,
            keyed: kind.is_orders(),
            shards: of.shards(self.plan.lane(*kind).shards),
            ..LaneSettings::new(kind.name())
        };
        let settings = Settings {
            owner: format!("w{process}:{life}"),
            lanes: of.plan.lanes.iter().map(lane).collect(),
            drain: DRAIN,
            once: false,
            seed: crate::dice::fate(self.plan.seed, "core", [process as u64, life, 0]),
        };
        let core = Core::new(settings, of.tick(self.now));
        of.alive = Some(Alive { core, life, next_step: u64::MAX, frozen_until: 0, operations: 0, paused: None });
        self.note(format_args!("w{process} starts its life {life}"));
        self.at(self.now, Action::Watch { process, life, round: 0 });
        self.at(self.now, Action::Step { process, life });
        if serves {
            self.at(self.now, Action::Orchestrate { process, life, round: 0 });
        }
        if remembers {
            self.at(self.now, Action::Attend { process, life, round: 0 });
            self.at(self.now + SECOND, Action::Tidy { process, life, round: 0 });
        }
    }

    pub fn alive(&mut self, process: usize, life: u64) -> Option<&mut Alive> {
        self.processes[process].alive.as_mut().filter(|alive| alive.life == life)
    }

    pub fn owner(&self, process: usize) -> Option<String> {
        Some(self.processes[process].alive.as_ref()?.core.owner().to_owned())
    }

    /// Can it reach the database?
    pub fn is_connected(&self, process: usize) -> bool {
        self.now >= self.down_until && self.now >= self.processes[process].cut_off_until
    }

    /// Looks which lanes are paused, and for shards it does not know of.
    pub async fn watch(&mut self, process: usize, life: u64, round: u64) {
        let (now, connected) = (self.now, self.is_connected(process));
        let Some(alive) = self.alive(process, life) else { return };
        if connected && now >= alive.frozen_until {
            let outbox = self.processes[process].outbox.clone();
            let lanes = outbox.paused_lanes().await.expect("the pauses");
            if let Some(alive) = self.alive(process, life).filter(|alive| alive.paused.as_ref() != Some(&lanes)) {
                alive.paused = Some(lanes.clone());
                self.note(format_args!("w{process} sees paused: {lanes:?}"));
                self.at(now, Action::Hear { process, life, event: Event::Paused { lanes }, era: None });
            }
            if round % 8 == 1 {
                self.look_for_strays(process, life).await;
            }
        }
        let wait = dice(self.fate("watch", [process as u64, life, round])).u64(SECOND / 2..SECOND);
        self.at(now + wait, Action::Watch { process, life, round: round + 1 });
    }

    async fn look_for_strays(&mut self, process: usize, life: u64) {
        let (outbox, kinds) = (self.processes[process].outbox.clone(), self.processes[process].plan.lanes.clone());
        for kind in kinds {
            let knows = self.plan.lane(kind).shards.min(self.processes[process].plan.knows_shards);
            let ours = self.processes[process].shards(knows);
            for shard in outbox.stray_shards(kind.name()).await.expect("the strays") {
                // A transaction that is still open is seen by nobody.
                if i64::from(shard) < crate::journal::HIDDEN && ours.contains(&(shard % knows)) {
                    self.mark("a stray shard served");
                    let event = Event::Strayed { lane: kind.name().to_owned(), shard };
                    self.at(self.now, Action::Hear { process, life, event, era: None });
                }
            }
        }
    }

    /// What this process holds may rightly be lost until then.
    pub fn strike(&mut self, process: usize, until: u64) {
        if let Some(owner) = self.owner(process) {
            let excused = self.struck.entry(owner).or_default();
            *excused = until.max(*excused);
        }
    }

    pub fn freeze(&mut self, process: usize, lasts: u64) {
        let until = self.now + lasts;
        let Some(alive) = self.processes[process].alive.as_mut() else { return };
        alive.frozen_until = until;
        let life = alive.life;
        self.stands_still(process);
        self.fault("a freeze", None, until);
        self.mark("froze");
        self.strike(process, until + AFTERMATH);
        self.note(format_args!("w{process} stands still for {lasts} us"));
        self.at(until, Action::Thaw { process, life });
    }

    pub fn stop(&mut self, process: usize) {
        let now = self.now;
        let Some(life) = self.processes[process].alive.as_ref().map(|alive| alive.life) else { return };
        self.fault("a stop", None, now + 2 * DRAIN.as_micros() as u64);
        self.mark("told to stop");
        self.note(format_args!("w{process} is told to stop"));
        self.at(now, Action::Hear { process, life, event: Event::Shutdown, era: None });
    }

    pub fn crash(&mut self, process: usize) {
        let Some(gone) = self.processes[process].alive.take() else { return };
        self.under_way.remove(&(process, gone.life));
        self.processes[process].part = None;
        self.processes[process].courier = None;
        self.ground(process, gone.life);
        self.mark("crashed");
        self.note(format_args!("w{process} is dead"));
        self.start_again(process);
    }

    fn start_again(&mut self, process: usize) {
        let lives = self.processes[process].lives;
        let pause = dice(self.fate("start", [process as u64, lives, 1])).u64(SECOND / 10..10 * SECOND);
        self.last_fault = self.last_fault.max(self.now + pause);
        self.at(self.now + pause, Action::Start { process });
    }

    /// It stopped by itself, and comes back later under another name. What it left leased, it lost: rightly so only if its
    /// time was over with an answer of the database still on the way, or without the database.
    fn ended(&mut self, process: usize) {
        let Some(life) = self.processes[process].alive.as_ref().map(|gone| gone.life) else { return };
        let unanswered = self.actions.values().any(|action| match action {
            Action::Execute { process: of, life: in_life, .. }
            | Action::Hear { process: of, life: in_life, era: Some(_), .. } => (*of, *in_life) == (process, life),
            Action::Begin { delivery, .. } => (delivery.process, delivery.life) == (process, life),
            _ => false,
        });
        if unanswered || self.last_fault > self.now {
            self.mark("stopped without an answer");
            self.strike(process, u64::MAX);
        }
        self.processes[process].alive = None;
        self.under_way.remove(&(process, life));
        self.ground(process, life);
        self.note(format_args!("w{process} has stopped"));
        self.start_again(process);
    }

    pub fn step(&mut self, process: usize, life: u64) {
        let now = self.now;
        let tick = self.processes[process].tick(now);
        let Some(alive) = self.alive(process, life) else { return };
        if now < alive.frozen_until {
            return; // the thaw asks again
        }
        alive.next_step = u64::MAX;
        let commands = alive.core.step(tick);
        let idle = commands.is_empty();
        for command in commands {
            self.carry_out(process, life, command);
        }
        let Some(alive) = self.alive(process, life) else { return };
        if alive.core.finished(tick) {
            self.ended(process);
            return;
        }
        let next = alive.core.next_step(tick);
        if idle && next <= tick {
            self.violation(format!("L9: w{process} has nothing to do and wants to be asked again at once"));
            return;
        }
        let next = self.processes[process].moment(next).max(now + 1);
        if let Some(alive) = self.alive(process, life)
            && next < alive.next_step
        {
            alive.next_step = next;
            self.at(next, Action::Step { process, life });
        }
    }

    /// `era`: it is an answer of the database, which was up then.
    pub fn hear(&mut self, process: usize, life: u64, event: Event, era: Option<u64>) {
        let now = self.now;
        let cut_off = now < self.processes[process].cut_off_until;
        let lost = era.is_some_and(|era| era != self.era || cut_off);
        let tick = self.processes[process].tick(now);
        let Some(alive) = self.alive(process, life) else { return };
        if now < alive.frozen_until {
            let later = alive.frozen_until;
            self.at(later, Action::Hear { process, life, event, era });
            return;
        }
        let delivered = if let Event::Delivered { id, .. } = event { Some(id) } else { None };
        alive.core.handle(tick, if lost { without_answer(event) } else { event });
        if let Some(id) = delivered
            && let Some(under_way) = self.under_way.get_mut(&(process, life))
        {
            under_way.remove(&id);
        }
        if lost {
            self.mark(if cut_off { "a cut-off process came back" } else { "the database restarted under way" });
        }
        self.at(now, Action::Step { process, life });
    }
}
