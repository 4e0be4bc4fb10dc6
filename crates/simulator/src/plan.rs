//! What a run is made of: all of it follows from the seed, and each piece can be taken away when a failing plan is shrunk.

use std::collections::HashSet;
use std::time::Duration;

use crate::dice::{Fate, dice, fate};

pub const SECOND: u64 = 1_000_000;
pub const LEASE: Duration = Duration::from_secs(15);
pub const POLL: Duration = Duration::from_millis(500);
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(30);
pub const JITTER: f64 = 0.3;
pub const MAX_CRASHES: u32 = 5;
/// Contents of a lane with dedup.
pub const CONTENTS: usize = 20;

/// The kinds of lanes, each with rules that change what a settle does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LaneKind {
    /// Settled by the short cut.
    Plain,
    /// With a part that hears of every outcome.
    Heard,
    Dedup,
    /// *Send begun* is committed before the first byte; what may have been sent is never given up.
    Begun,
    /// Keeps nothing of what was sent.
    Brief,
    /// The jobs of webhooks: their part makes them, hears of their ends, and keeps what has ended itself.
    Webhooks,
    /// Orders to a broker that takes a key once.
    KeyedOrders,
    /// Orders to one that does not: *send begun* is committed first.
    Orders,
    /// What OpenMemory did not take at once.
    Memories,
}

impl LaneKind {
    /// Those on which messages are enqueued by themselves.
    pub const OWN: [LaneKind; 5] =
        [LaneKind::Plain, LaneKind::Heard, LaneKind::Dedup, LaneKind::Begun, LaneKind::Brief];

    pub fn name(self) -> &'static str {
        match self {
            LaneKind::Plain => "plain",
            LaneKind::Heard => "heard",
            LaneKind::Dedup => "dedup",
            LaneKind::Begun => "begun",
            LaneKind::Brief => "brief",
            LaneKind::Webhooks => postrider_webhooks::LANE,
            LaneKind::KeyedOrders | LaneKind::Orders => postrider_orders::LANE,
            LaneKind::Memories => postrider_memories::LANE,
        }
    }

    pub fn is_orders(self) -> bool {
        matches!(self, LaneKind::KeyedOrders | LaneKind::Orders)
    }

    /// *Send begun* is committed before the first byte.
    pub fn commits_begun(self) -> bool {
        matches!(self, LaneKind::Begun | LaneKind::Orders)
    }

    /// What may have been sent is never given up.
    pub fn keeps_unresolved(self) -> bool {
        self == LaneKind::Begun || self.is_orders()
    }

    /// A part makes and ends what is on this lane.
    pub fn is_parts(lane: &str) -> bool {
        [postrider_webhooks::LANE, postrider_orders::LANE, postrider_memories::LANE].contains(&lane)
    }
}

#[derive(Clone, Debug)]
pub struct LanePlan {
    pub kind: LaneKind,
    pub shards: u32,
    /// Outcomes a message may have; few in some runs, so that budgets are reached.
    pub max_attempts: u32,
}

/// One worker process.
#[derive(Clone, Debug)]
pub struct ProcessPlan {
    /// Lanes it serves; all of them if it is the first.
    pub lanes: Vec<LaneKind>,
    /// It was configured when lanes had this many shards at most.
    pub knows_shards: u32,
    /// Takes every second shard only, these.
    pub half: Option<u32>,
    /// How fast its clock runs, in parts of a million, and what it showed at the start.
    pub drift_ppm: i64,
    pub clock: u64,
    pub concurrency: usize,
}

/// A message to be enqueued; those of one lane and one moment come in one transaction.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Which one it is, whatever was taken out of the plan.
    pub n: usize,
    pub lane: LaneKind,
    pub at: u64,
    pub keyed: bool,
    pub delay: Duration,
    /// Worth delivering only for so long after its enqueue.
    pub worth: Option<Duration>,
    /// Kills whoever delivers it.
    pub poison: bool,
}

/// Something that happens at a moment of its own.
#[derive(Clone, Debug)]
pub struct Incident {
    pub at: u64,
    pub what: What,
}

/// Each lasts no longer than the time of trouble.
#[derive(Clone, Debug)]
pub enum What {
    Crash {
        process: usize,
    },
    Stop {
        process: usize,
    },
    /// The process, or its whole machine, stands still.
    Freeze {
        process: usize,
        lasts: u64,
    },
    /// It cannot reach the database.
    CutOff {
        process: usize,
        lasts: u64,
    },
    /// The database restarts: what is under way has no answer, what is not committed is gone.
    Restart {
        lasts: u64,
    },
    /// The database's clock is set.
    Jump {
        by: i64,
    },
    /// Somebody else's transaction locks rows; `weak` keeps them from ending only.
    Lock {
        rows: usize,
        lasts: u64,
        weak: bool,
    },
    Pause {
        lane: LaneKind,
        lasts: u64,
    },
    Requeue,
    Release,
    ReleaseExpired,
    Retry,
    /// An operator takes messages, and settles them, gives them back or forgets about them.
    Seize {
        lasts: u64,
    },
    Prune,
    /// A subscription is paused, and resumed by another process.
    Hold {
        subscription: usize,
        lasts: u64,
    },
}

/// Somebody who wants to hear of events.
#[derive(Clone, Debug)]
pub struct SubscriptionPlan {
    pub max_in_flight: Option<u32>,
    pub rate_per_sec: Option<f64>,
    /// Attempts in all.
    pub limit: u32,
}

/// Events to be published; those of one moment in one transaction.
#[derive(Clone, Debug)]
pub struct EventPlan {
    pub n: usize,
    pub at: u64,
    /// Published again under its id if nobody knows what came of it.
    pub keyed: bool,
}

/// An order, placed until somebody says that it is.
#[derive(Clone, Debug)]
pub struct OrderPlan {
    pub n: usize,
    pub at: u64,
}

/// A memory, stored until somebody says what became of it. Some have the same content, in the same space or another.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    pub n: usize,
    pub at: u64,
    pub content: usize,
    pub space: usize,
    /// It goes by the outbox, as its client wants.
    pub skips: bool,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub lanes: Vec<LanePlan>,
    pub processes: Vec<ProcessPlan>,
    pub messages: Vec<Planned>,
    pub incidents: Vec<Incident>,
    pub subscriptions: Vec<SubscriptionPlan>,
    pub events: Vec<EventPlan>,
    pub orders: Vec<OrderPlan>,
    pub memories: Vec<MemoryPlan>,
    /// OpenMemory keeps one of what has the same content.
    pub merges: bool,
    /// A broker that takes no keys can be asked what became of one.
    pub look_up: bool,
    /// Until when things go wrong, in seconds.
    pub trouble_sec: u64,
    /// Chance of a fault per store operation and per delivery.
    pub fault: f64,
    /// The database takes its time now and then, so that answers overtake each other.
    pub uneven: bool,
    /// For shrinking: only these faults happen.
    pub only: Option<HashSet<Fate>>,
}

impl Plan {
    /// A varied plan for a seed. Every eighth is free of faults, so that "exactly once when nothing fails" is checked too.
    pub fn of(seed: u64) -> Plan {
        let mut rng = dice(fate(seed, "plan", [0; 3]));
        let calm = seed.is_multiple_of(8);
        let big = seed % 25 == 3;
        let mut kinds = LaneKind::OWN.to_vec();
        rng.shuffle(&mut kinds);
        kinds.truncate(if big { 5 } else { rng.usize(1..4) });
        let webhooks = seed % 3 == 2;
        let orders = seed % 6 == 1;
        let memories = seed % 12 == 9 || seed % 24 == 16;
        if webhooks || orders || memories {
            kinds.truncate(2);
        }
        let mut lanes: Vec<LanePlan> = kinds
            .iter()
            .map(|kind| LanePlan {
                kind: *kind,
                shards: [1, 1, 2, 3][rng.usize(0..4)],
                max_attempts: if rng.u8(0..3) == 0 { 2 } else { 40 },
            })
            .collect();
        if webhooks {
            kinds.push(LaneKind::Webhooks);
            lanes.push(LanePlan { kind: LaneKind::Webhooks, shards: 1, max_attempts: 1 });
        }
        if orders {
            let kind = if rng.u8(0..3) == 0 { LaneKind::KeyedOrders } else { LaneKind::Orders };
            kinds.push(kind);
            lanes.push(LanePlan { kind, shards: 1, max_attempts: rng.u32(2..8) });
        }
        if memories {
            kinds.push(LaneKind::Memories);
            lanes.push(LanePlan { kind: LaneKind::Memories, shards: 1, max_attempts: [5, 40][rng.usize(0..2)] });
        }
        let trouble_sec = rng.u64(20..90);
        let fault = if calm { 0.0 } else { 0.02 + rng.f64() * 0.23 };
        let processes: Vec<ProcessPlan> = (0..rng.usize(1..5)).map(|n| process(n, &kinds, &mut rng)).collect();
        let mut plan = Plan {
            seed,
            lanes,
            messages: vec![],
            incidents: vec![],
            subscriptions: vec![],
            events: vec![],
            orders: vec![],
            memories: vec![],
            merges: false,
            look_up: false,
            trouble_sec,
            fault,
            uneven: calm && rng.bool(),
            only: None,
            processes,
        };
        plan.messages = messages(&plan, big, &mut rng);
        if webhooks {
            events(&mut plan, &mut rng);
        }
        if orders {
            let end = plan.trouble_sec * SECOND;
            plan.orders = (0..rng.usize(5..60)).map(|n| OrderPlan { n, at: rng.u64(SECOND..end) }).collect();
            plan.look_up = rng.bool();
        }
        if memories {
            remembering(&mut plan, &mut rng);
        }
        if !calm {
            plan.incidents = incidents(&plan, &mut rng);
        }
        plan
    }

    pub fn lane(&self, kind: LaneKind) -> &LanePlan {
        self.lanes.iter().find(|lane| lane.kind == kind).expect("a lane of the plan")
    }

    /// Nothing at all goes wrong.
    pub fn is_calm(&self) -> bool {
        self.fault == 0.0 && self.incidents.is_empty() && self.messages.iter().all(|m| !m.poison)
    }

    /// How long everything may take to end after the last fault, by the numbers of the configuration alone: leases run out
    /// and what they held is found and delivered, what was put off comes due, and suspects are tried apart.
    pub fn patience(&self) -> Duration {
        let leases = LEASE * 3;
        let polls = POLL * 12;
        let backoff = LONGEST_BACKOFF.mul_f64(1.0 + JITTER);
        // What is too much for one target comes back at 50 a second, and suspects have a tenth of the time.
        let jobs = self.events.len() * self.subscriptions.len();
        let backlog =
            Duration::from_millis(60) * (self.messages.len() + jobs + self.orders.len() + self.memories.len()) as u32;
        // A receiver that has only failed lately is left alone for a while, then tried with a few; a limited one takes its time.
        let slowest = self.subscriptions.iter().filter_map(|s| s.rate_per_sec).fold(f64::INFINITY, f64::min);
        let limited = Duration::from_secs_f64(self.events.len() as f64 / slowest);
        let rests = if jobs > 0 { Duration::from_secs(150) } else { Duration::ZERO };
        // What nobody can tell waits for a person, who may have died over it before.
        let orders = Duration::from_secs(if self.orders.is_empty() { 0 } else { 150 });
        // A write that was begun and never ended is found by who tidies up, then waits until it cannot be applied any more.
        let memories = Duration::from_secs(if self.memories.is_empty() { 0 } else { 180 });
        leases + polls + backoff + backlog + limited + rests + orders + memories
    }
}

fn process(n: usize, kinds: &[LaneKind], rng: &mut fastrand::Rng) -> ProcessPlan {
    let all = n == 0 || rng.bool();
    let mut lanes: Vec<LaneKind> = kinds.iter().copied().filter(|_| all || rng.bool()).collect();
    if lanes.is_empty() {
        lanes.push(kinds[0]);
    }
    ProcessPlan {
        lanes,
        knows_shards: if rng.u8(0..4) == 0 { 1 } else { 8 },
        half: (n > 0 && rng.u8(0..3) == 0).then(|| rng.u32(0..2)),
        drift_ppm: rng.i64(-2000..2000),
        clock: rng.u64(0..1_000_000 * SECOND),
        concurrency: [4, 8, 8, 24][rng.usize(0..4)],
    }
}

fn messages(plan: &Plan, big: bool, rng: &mut fastrand::Rng) -> Vec<Planned> {
    let count = match plan.seed % 5 {
        _ if big => rng.usize(1500..3000),
        1 => rng.usize(200..500),
        _ => rng.usize(20..160),
    };
    let last = if rng.u8(0..3) == 0 { SECOND } else { plan.trouble_sec * SECOND };
    let poisonous = plan.fault > 0.0 && rng.u8(0..3) == 0;
    let mut moments: Vec<u64> = Vec::new();
    let mut messages: Vec<Planned> = (0..count)
        .map(|n| {
            let again = !moments.is_empty() && rng.u8(0..3) == 0;
            let at = if again { moments[rng.usize(0..moments.len())] } else { rng.u64(0..last) };
            moments.push(at);
            let own = plan.lanes.iter().filter(|lane| !LaneKind::is_parts(lane.kind.name())).count();
            let lane = plan.lanes[rng.usize(0..own)].kind;
            Planned {
                n,
                lane,
                at,
                keyed: rng.u8(0..4) > 0,
                delay: if rng.u8(0..8) == 0 { Duration::from_millis(rng.u64(0..20_000)) } else { Duration::ZERO },
                worth: (rng.u8(0..12) == 0).then(|| Duration::from_millis(rng.u64(500..30_000))),
                poison: false,
            }
        })
        .collect();
    if poisonous && let Some(one) = messages.iter_mut().find(|m| can_be_poison(m)) {
        one.poison = true;
    }
    messages
}

fn events(plan: &mut Plan, rng: &mut fastrand::Rng) {
    let subscription = |rng: &mut fastrand::Rng| SubscriptionPlan {
        max_in_flight: (rng.u8(0..3) == 0).then(|| rng.u32(1..4)),
        rate_per_sec: (rng.u8(0..4) == 0).then(|| rng.f64() * 5.0 + 0.3),
        limit: rng.u32(1..5),
    };
    plan.subscriptions = (0..rng.usize(1..5)).map(|_| subscription(rng)).collect();
    let end = plan.trouble_sec * SECOND;
    plan.events =
        (0..rng.usize(5..40)).map(|n| EventPlan { n, at: rng.u64(2 * SECOND..end), keyed: rng.bool() }).collect();
}

fn remembering(plan: &mut Plan, rng: &mut fastrand::Rng) {
    let (end, count) = (plan.trouble_sec * SECOND, rng.usize(5..60));
    let contents = if rng.bool() { count } else { count / 2 + 1 };
    let memory = |n: usize, rng: &mut fastrand::Rng| MemoryPlan {
        n,
        at: rng.u64(2 * SECOND..end),
        content: n % contents,
        space: rng.usize(0..2),
        skips: rng.u8(0..10) == 0,
    };
    plan.memories = (0..count).map(|n| memory(n, rng)).collect();
    plan.merges = rng.u8(0..3) == 0;
}

/// How often each kind of incident happens in a plan at most, and whether at all.
fn incidents(plan: &Plan, rng: &mut fastrand::Rng) -> Vec<Incident> {
    let end = plan.trouble_sec * SECOND;
    let processes = plan.processes.len();
    let mut all = Vec::new();
    let wanted = rng.u32(0..1 << 15);
    let mut add = |kind: u32, most: usize, rng: &mut fastrand::Rng, make: &dyn Fn(&mut fastrand::Rng, u64) -> What| {
        if wanted & (1 << kind) == 0 {
            return;
        }
        for _ in 0..rng.usize(1..=most) {
            let at = rng.u64(SECOND..end);
            all.push(Incident { at, what: make(rng, end - at) });
        }
    };
    let lasts = |rng: &mut fastrand::Rng, most_sec: u64, left: u64| rng.u64(50_000..most_sec * SECOND).min(left);
    let of = |rng: &mut fastrand::Rng| rng.usize(0..processes);
    add(0, 8, rng, &|rng, _| What::Crash { process: of(rng) });
    add(1, 4, rng, &|rng, _| What::Stop { process: of(rng) });
    add(2, 4, rng, &|rng, left| What::Freeze { process: of(rng), lasts: lasts(rng, 40, left) });
    add(3, 3, rng, &|rng, left| What::CutOff { process: of(rng), lasts: lasts(rng, 30, left) });
    add(4, 2, rng, &|rng, left| What::Restart { lasts: lasts(rng, 12, left) });
    add(5, 2, rng, &|rng, _| What::Jump { by: rng.i64(-20..40) * SECOND as i64 });
    add(6, 12, rng, &|rng, left| What::Lock { rows: rng.usize(1..9), lasts: lasts(rng, 25, left), weak: rng.bool() });
    add(7, 3, rng, &|rng, left| What::Pause {
        lane: plan.lanes[rng.usize(0..plan.lanes.len())].kind,
        lasts: lasts(rng, 20, left),
    });
    add(8, 6, rng, &|_, _| What::Requeue);
    add(9, 6, rng, &|_, _| What::Release);
    add(10, 4, rng, &|_, _| What::ReleaseExpired);
    add(11, 4, rng, &|_, _| What::Retry);
    add(12, 4, rng, &|rng, left| What::Seize { lasts: lasts(rng, 10, left) });
    add(13, 4, rng, &|_, _| What::Prune);
    if !plan.subscriptions.is_empty() {
        let subscriptions = plan.subscriptions.len();
        add(14, 4, rng, &|rng, left| What::Hold {
            subscription: rng.usize(0..subscriptions),
            lasts: lasts(rng, 20, left),
        });
    }
    all.sort_by_key(|incident| incident.at);
    all
}

/// A twin of the poison would end it by dedup; what may have been sent is never buried where `send_begun` is committed; and
/// what is not worth delivering any more ends by itself.
fn can_be_poison(message: &Planned) -> bool {
    !matches!(message.lane, LaneKind::Dedup | LaneKind::Begun) && message.worth.is_none()
}
