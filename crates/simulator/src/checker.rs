//! The independent record: what every row should be, and what each step may change. The journal of the database is held
//! against it after every step, and so is every answer.

mod claims;
mod operators;
mod settles;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use postrider::lease::Lease;
use postrider::outcome::{GiveBack, LeaseState, Settled, Settlement};
use postrider::store::{Claim, Claimed, Requeued};

use crate::journal::{Change, Heard, Kind};
use crate::marks::Marks;
use crate::plan::{LaneKind, LanePlan, Plan};
use crate::store::Locks;

/// What the checker was told to be going on.
pub enum Step<'a> {
    /// `hidden`: its transaction stays open.
    Enqueue {
        hidden: bool,
    },
    Commit {
        ids: &'a [i64],
    },
    Rollback {
        ids: &'a [i64],
    },
    Claim {
        claim: &'a Claim,
        got: &'a Claimed,
    },
    Settle {
        lane: &'a str,
        owner: &'a str,
        entries: &'a [Settlement],
        answers: &'a [Settled],
    },
    Renew {
        owner: &'a str,
        leases: &'a [Lease],
        lease: Duration,
        answers: &'a [LeaseState],
    },
    Defer {
        owner: &'a str,
        leases: &'a [Lease],
        how: &'a GiveBack,
        answers: &'a [LeaseState],
    },
    Begin {
        owner: &'a str,
        lease: Lease,
        held: bool,
    },
    Seize {
        owner: &'a str,
        lease: Duration,
        got: &'a [Lease],
    },
    Release {
        ids: &'a [i64],
    },
    ReleaseExpired {
        got: &'a [i64],
    },
    Retry {
        id: i64,
    },
    Requeue {
        ids: &'a [i64],
        answers: &'a [Requeued],
    },
    Prune,
    /// An order is on its way: *send begun* may be committed and taken back.
    Order {
        owner: &'a str,
        lease: Lease,
    },
    /// A person ends an order.
    ByHand {
        id: i64,
    },
    /// A part goes on: it may enqueue, and have what waits come earlier.
    Part,
}

/// The columns the protocol is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub token: i64,
    pub locked_by: Option<String>,
    pub lease_until: Option<i64>,
    pub due_at: i64,
    pub attempts: u32,
    pub crashes: u32,
    pub maybe_sent: bool,
}

impl Row {
    fn of(change: &Change) -> Row {
        Row {
            token: change.token,
            locked_by: change.locked_by.clone(),
            lease_until: change.lease_until,
            due_at: change.due_at,
            attempts: change.attempts,
            crashes: change.crashes,
            maybe_sent: change.maybe_sent,
        }
    }

    pub fn accepts(&self, lease: Lease, owner: &str) -> bool {
        self.token == lease.token && self.locked_by.as_deref() == Some(owner)
    }

    fn unlocked(&self, due_at: i64) -> Row {
        Row { due_at, locked_by: None, lease_until: None, ..self.clone() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    Sent,
    Dead(String),
}

/// All that is known of one message.
#[derive(Clone, Debug)]
pub struct Known {
    pub lane: String,
    pub shard: i64,
    pub row: Row,
    pub live: bool,
    /// Its transaction is still open.
    pub hidden: bool,
    pub end: Option<End>,
    /// It ended, and nothing of it is kept any more.
    pub forgotten: bool,
    /// Until when its holder has it, by the simulator's own time.
    pub held_until: u64,
}

/// Somebody took a message from a worker that had not given it back.
pub struct Takeover {
    pub id: i64,
    pub from: String,
    /// When the lease it lost ended.
    pub expired: u64,
}

/// What a step brought that others want to know.
#[derive(Default)]
pub struct Seen {
    pub takeovers: Vec<Takeover>,
    /// What ended in this step, for the first time under this token.
    pub ended: Vec<(i64, End)>,
    pub inserted: Vec<(i64, Option<String>)>,
}

pub struct Checker {
    lanes: HashMap<String, LanePlan>,
    pub known: BTreeMap<i64, Known>,
    /// Settles that took effect, and how.
    recorded: HashMap<Lease, &'static str>,
    pub violations: Vec<String>,
    pub marks: Marks,
    pub steps: u64,
    now: u64,
    db_now: i64,
}

type Changes = BTreeMap<i64, Vec<Change>>;

impl Checker {
    pub fn new(plan: &Plan) -> Self {
        Checker {
            lanes: plan.lanes.iter().map(|lane| (lane.kind.name().to_owned(), lane.clone())).collect(),
            known: BTreeMap::new(),
            recorded: HashMap::new(),
            violations: Vec::new(),
            marks: Marks::default(),
            steps: 0,
            now: 0,
            db_now: 0,
        }
    }

    fn wrong(&mut self, what: String) {
        if self.violations.len() < 20 {
            self.violations.push(format!("at {:.6} s: {what}", self.now as f64 / 1e6));
        }
    }

    fn kind(&self, lane: &str) -> Option<LaneKind> {
        self.lanes.get(lane).map(|lane| lane.kind)
    }

    /// Messages that are still to come to their end.
    pub fn live(&self) -> usize {
        self.known.values().filter(|known| known.live && !known.hidden).count()
    }

    /// Holds what the database did against what this step may do.
    pub fn check(
        &mut self,
        (now, db_now): (u64, i64),
        locks: &Locks,
        step: &Step<'_>,
        changes: Vec<Change>,
        heard: Vec<Heard>,
    ) -> Seen {
        (self.now, self.db_now) = (now, db_now);
        self.steps += 1;
        let mut seen = Seen::default();
        let mut by_id: Changes = BTreeMap::new();
        for change in changes {
            by_id.entry(change.id).or_default().push(change);
        }
        self.check_locks(locks, step, &by_id);
        let mut listened: Vec<Heard> = Vec::new();
        match step {
            Step::Claim { claim, got } => self.claim(claim, got, &by_id, &mut seen),
            Step::Settle { lane, owner, entries, answers } => {
                listened = self.settle(locks, lane, owner, entries, answers, &by_id, &mut seen);
            }
            Step::Renew { owner, leases, lease, answers } => self.renew(locks, owner, leases, *lease, answers, &by_id),
            Step::Defer { owner, leases, how, answers } => self.defer(locks, owner, leases, how, answers, &by_id),
            Step::Begin { owner, lease, held } => self.begin(owner, *lease, *held, &by_id),
            Step::Order { owner, lease } => self.order(owner, *lease, &by_id),
            other => self.operate(other, &by_id),
        }
        self.check_listeners(listened, heard);
        let touched: BTreeSet<i64> = by_id.keys().copied().collect();
        for change in by_id.into_values().flatten() {
            self.absorb(step, change, &mut seen);
        }
        self.check_presence(step, &touched);
        seen
    }

    /// A row that somebody else has locked is not changed by anybody.
    fn check_locks(&mut self, locks: &Locks, step: &Step<'_>, changes: &Changes) {
        for id in changes.keys() {
            let settles = matches!(step, Step::Settle { .. });
            if locks.strong(*id) || (settles && locks.any(*id)) {
                self.wrong(format!("message {id} was changed while somebody else had it locked"));
            }
        }
    }

    /// Parts hear of winners, of all of them, once.
    fn check_listeners(&mut self, mut wanted: Vec<Heard>, mut heard: Vec<Heard>) {
        wanted.sort();
        heard.sort();
        if wanted != heard {
            self.wrong(format!("P3: the part of the lane should have heard {wanted:?} and heard {heard:?}"));
        }
    }

    /// Brings the record up to the change, and says what no step may ever do.
    fn absorb(&mut self, step: &Step<'_>, change: Change, seen: &mut Seen) {
        let id = change.id;
        let before = self.known.get(&id).map(|known| (known.row.token, known.live, known.end.clone()));
        match (change.kind, &before) {
            (Kind::Insert, None) => {
                let hidden = matches!(step, Step::Enqueue { hidden: true });
                if !matches!(step, Step::Enqueue { .. } | Step::Part) {
                    self.wrong(format!("S2: message {id} appeared, and nobody enqueued it"));
                }
                if change.token != 0 || change.attempts != 0 {
                    self.wrong(format!("the new message {id} is born with {change:?}"));
                }
                let (lane, shard, row) = (change.lane.clone(), change.shard, Row::of(&change));
                let known = Known { lane, shard, row, live: true, hidden, end: None, forgotten: false, held_until: 0 };
                self.known.insert(id, known);
                seen.inserted.push((id, change.correlation.clone()));
                return;
            }
            (_, None) => {
                self.wrong(format!("S2: message {id} was changed, and nobody enqueued it: {change:?}"));
                return;
            }
            (Kind::Insert, Some((token, ..))) => {
                if !matches!(step, Step::Requeue { .. }) || change.token < *token {
                    self.wrong(format!("P6: message {id} came back under token {}, after {token}", change.token));
                }
            }
            (Kind::Update, Some((token, live, _))) => {
                let steps = change.token - token;
                if !(0..=1).contains(&steps) || !live {
                    self.wrong(format!("S5: message {id} went from token {token} to {} (live: {live})", change.token));
                }
            }
            (Kind::Done, Some((token, _, end))) => {
                let settled = matches!(step, Step::Settle { .. } | Step::ByHand { .. });
                if !settled || change.token != *token || end.is_some() {
                    self.wrong(format!(
                        "P6: message {id} ended under token {}, at {token}, after {end:?}",
                        change.token
                    ));
                }
            }
            (Kind::Undone, Some((_, _, end))) => {
                let may =
                    matches!(step, Step::Prune) || (matches!(step, Step::Requeue { .. }) && *end != Some(End::Sent));
                if !may {
                    self.wrong(format!("P6: what had ended of message {id} ({end:?}) was taken away"));
                }
            }
            (Kind::Delete, Some(_)) => {
                if !matches!(step, Step::Settle { .. } | Step::Rollback { .. } | Step::ByHand { .. }) {
                    self.wrong(format!("P1: message {id} was deleted"));
                }
            }
        }
        let Some(known) = self.known.get_mut(&id) else { return };
        match change.kind {
            Kind::Insert => (known.live, known.row, known.end, known.forgotten) = (true, Row::of(&change), None, false),
            Kind::Update => known.row = Row::of(&change),
            Kind::Delete => known.live = false,
            Kind::Undone => (known.end, known.forgotten) = (None, matches!(step, Step::Prune)),
            Kind::Done => {
                let end = match change.status.as_deref() {
                    Some("sent") => End::Sent,
                    _ => End::Dead(change.code.clone().unwrap_or_default()),
                };
                known.row = Row { attempts: change.attempts, maybe_sent: change.maybe_sent, ..known.row.clone() };
                known.end = Some(end.clone());
                seen.ended.push((id, end));
            }
        }
    }

    /// After every step a message is live, or has ended, or may be forgotten: exactly one of these.
    fn check_presence(&mut self, step: &Step<'_>, touched: &BTreeSet<i64>) {
        for id in touched {
            let Some(known) = self.known.get(id) else { continue };
            let (live, ended, forgotten) = (known.live, known.end.is_some(), known.forgotten);
            if live && ended {
                self.wrong(format!("P6: message {id} is live and has ended"));
            }
            if !live && !ended && !forgotten && !matches!(step, Step::Rollback { .. }) {
                self.wrong(format!("P1: message {id} is nowhere"));
            }
        }
        if let Step::Rollback { ids } = step {
            ids.iter().for_each(|id| drop(self.known.remove(id)));
        }
    }

    /// The whole of the database, against the whole record.
    pub fn compare(&mut self, now: u64, rows: Vec<Change>) {
        self.now = now;
        let mut found: BTreeMap<i64, u32> = BTreeMap::new();
        for row in rows {
            *found.entry(row.id).or_default() += 1;
            let told = self.known.get(&row.id).map(|known| {
                let same = Row::of(&row) == known.row || known.end.is_some();
                (same && known.live == (row.kind == Kind::Insert), known.clone())
            });
            match told {
                Some((true, _)) => {}
                Some((false, known)) => self.wrong(format!("message {} is {row:?}, and should be {known:?}", row.id)),
                None => self.wrong(format!("S2: nobody enqueued {row:?}")),
            }
        }
        let lost: Vec<i64> = (self.known.iter())
            .filter(|(id, known)| !known.forgotten && found.get(id) != Some(&1))
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            self.wrong(format!("P1: message {id} is there {} times", found.get(&id).copied().unwrap_or(0)));
        }
    }

    /// The one change of a row in this step, held against what it should have become.
    fn expect_row(&mut self, what: &str, id: i64, wanted: &Row, changes: &Changes) {
        match changes.get(&id).map(Vec::as_slice) {
            Some([one]) if one.kind == Kind::Update && Row::of(one) == *wanted => {}
            other => self.wrong(format!("{what}: message {id} should have become {wanted:?}, and did {other:?}")),
        }
    }

    /// Nobody but these was changed.
    fn expect_only(&mut self, what: &str, ids: &BTreeSet<i64>, changes: &Changes) {
        let others: Vec<i64> = changes.keys().filter(|id| !ids.contains(id)).copied().collect();
        if !others.is_empty() {
            self.wrong(format!("{what}: changed {others:?}, too: {changes:?}"));
        }
    }
}
