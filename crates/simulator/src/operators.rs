//! Operators and strangers: those who pause, requeue, release, seize and prune, and those whose transactions lock rows.

use std::time::Duration;

use postrider::OPERATOR;
use postrider::lease::Lease;
use postrider::outcome::{GiveBack, Settlement, Verdict};
use postrider::store::{Prune, Store};

use crate::checker::{End, Known, Step};
use crate::dice::{Fate, dice};
use crate::plan::{LEASE, LaneKind, SECOND, What};
use crate::store::Reply;
use crate::world::{Action, World};

/// As long as an operator's own release holds what it takes.
const RELEASE_LEASE: u64 = 60 * SECOND;
const SEIZED_FOR: Duration = Duration::from_secs(20);

impl World {
    /// Some live messages that nobody has locked; operators leave to a part what is its own.
    fn pick(&self, rng: &mut fastrand::Rng, most: usize, owned: bool) -> Vec<i64> {
        let may = |known: &Known| known.live && !known.hidden && (owned || !LaneKind::is_parts(&known.lane));
        let live = self.checker.known.iter().filter(|(id, known)| may(known) && !self.locks.any(**id));
        let live: Vec<i64> = live.map(|(id, _)| *id).collect();
        let mut picked: Vec<i64> = rng.choose_multiple(live.iter(), most).into_iter().copied().collect();
        picked.sort_unstable();
        picked
    }

    pub async fn operate(&mut self, n: u64, what: What) {
        let fate = self.fate("incident", [n, 0, 0]);
        let mut rng = dice(fate);
        self.clients.expect([]);
        if self.now < self.down_until {
            return;
        }
        match what {
            What::Lock { rows, lasts, weak } => self.lock(&mut rng, rows, lasts, weak),
            What::Pause { lane, lasts } => {
                self.outbox.pause(lane.name()).await.expect("a pause");
                self.note(format_args!("{} is paused for {lasts} us", lane.name()));
                self.fault("a pause", None, self.now + lasts + SECOND);
                self.at(self.now + lasts, Action::Resume { lane });
            }
            What::Requeue => self.requeue(&mut rng).await,
            What::Release => self.release(&mut rng).await,
            // What is locked would be skipped, which SQLite cannot do.
            What::ReleaseExpired if self.locks.is_empty() => {
                let got = self.outbox.release_expired(None, 100).await.expect("a release");
                self.note(format_args!("an operator releases what has expired: {got:?}"));
                self.fault("an operator's release", None, self.now);
                self.checked(Step::ReleaseExpired { got: &got }).await;
            }
            What::ReleaseExpired => {}
            What::Retry => {
                for id in self.pick(&mut rng, 2, false) {
                    let told = self.outbox.retry(id).await.expect("a retry");
                    self.note(format_args!("an operator wants {id} tried: {told:?}"));
                    self.checked(Step::Retry { id }).await;
                }
                self.fault("an operator's retry", None, self.now);
            }
            What::Seize { lasts } => self.seize(&mut rng, fate, lasts).await,
            What::Prune => self.prune(&mut rng).await,
            What::Hold { subscription, lasts } => self.hold(subscription, lasts).await,
            _ => unreachable!("not an operator's"),
        }
    }

    fn lock(&mut self, rng: &mut fastrand::Rng, rows: usize, lasts: u64, weak: bool) {
        let ids = self.pick(rng, rows, true);
        for id in &ids {
            self.locks.lock(*id, weak);
            // If it lasts longer than the lease, that one message may be delivered again.
            let until = self.now + lasts + 2 * LEASE.as_micros() as u64;
            self.struck_rows.entry(*id).and_modify(|was| *was = until.max(*was)).or_insert(until);
        }
        let how = if weak { "from ending" } else { "altogether" };
        self.note(format_args!("somebody locks {ids:?} {how} for {lasts} us"));
        self.fault("somebody else's lock", None, self.now + lasts);
        self.at(self.now + lasts, Action::Unlock { ids });
    }

    async fn requeue(&mut self, rng: &mut fastrand::Rng) {
        let again = |id: &i64| !self.requeued.contains(id);
        let dead: Vec<i64> = (self.checker.known.iter())
            .filter(|(_, known)| matches!(known.end, Some(End::Dead(_))) && !LaneKind::is_parts(&known.lane))
            .map(|(id, _)| *id)
            .filter(again)
            .collect();
        let mut ids: Vec<i64> = rng.choose_multiple(dead.iter(), 4).into_iter().copied().collect();
        // And one that is not dead, most likely.
        let other = self.checker.known.iter().nth(rng.usize(0..self.checker.known.len().max(1)));
        ids.extend(other.filter(|(_, known)| !LaneKind::is_parts(&known.lane)).map(|(id, _)| *id));
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            return;
        }
        let answers = self.outbox.requeue(ids.clone()).await.expect("a requeue");
        self.requeued.extend(ids.iter().copied());
        for id in &ids {
            self.unlucky.remove(id);
        }
        self.note(format_args!("an operator requeues {ids:?}: {answers:?}"));
        self.fault("an operator's requeue", None, self.now);
        self.checked(Step::Requeue { ids: &ids, answers: &answers }).await;
    }

    async fn release(&mut self, rng: &mut fastrand::Rng) {
        let ids = self.pick(rng, 3, false);
        // Its answer may be lost, whether it was carried out or not.
        let lost = if ids.len().is_multiple_of(2) { Reply::LostAfter } else { Reply::LostBefore };
        self.clients.expect(if rng.u8(0..3) == 0 { vec![lost] } else { vec![] });
        let told = self.outbox.release(ids.clone()).await;
        self.clients.expect([]);
        self.note(format_args!("an operator releases {ids:?}: {:?}", told.as_ref().ok()));
        self.fault("an operator's release", None, self.now);
        if told.is_ok() {
            self.mark("released by hand");
        }
        // What was under way goes on elsewhere.
        let now = self.now;
        for id in &ids {
            self.struck_rows.insert(*id, now + RELEASE_LEASE);
        }
        self.checked(Step::Release { ids: &ids }).await;
    }

    async fn seize(&mut self, rng: &mut fastrand::Rng, fate: Fate, lasts: u64) {
        let (ids, owner) = (self.pick(rng, 3, false), format!("{OPERATOR}sim:{fate:x}"));
        let got = self.outbox.seize(&owner, ids.clone(), SEIZED_FOR).await.expect("a seizure");
        let leases: Vec<Lease> = got.iter().map(|(_, lease)| *lease).collect();
        self.note(format_args!("an operator seizes {leases:?}"));
        self.fault("an operator's seizure", None, self.now + lasts + SEIZED_FOR.as_micros() as u64);
        self.checked(Step::Seize { owner: &owner, lease: SEIZED_FOR, got: &leases }).await;
        for (n, (lane, lease)) in got.into_iter().enumerate() {
            let fate = fate ^ (n as u64 + 1);
            self.at(self.now + lasts, Action::Conclusion { owner: owner.clone(), lane, lease, fate });
        }
    }

    /// What the operator does with what was seized; some never come back.
    pub async fn come_back(&mut self, owner: String, lane: String, lease: Lease, fate: Fate) {
        let verdict = match dice(fate).u8(0..4) {
            0 => return,
            1 => {
                let how = GiveBack::now();
                let answers = self.clients.defer(&owner, &[lease], &how).await.expect("a database in memory");
                self.note(format_args!("an operator gives back {lease:?} {answers:?}"));
                let step = Step::Defer { owner: &owner, leases: &[lease], how: &how, answers: &answers };
                return self.checked(step).await;
            }
            2 => Verdict::sent(),
            _ => Verdict::Dead {
                code: "BY_HAND".to_owned(),
                error: String::new(),
                certainty: postrider::outcome::Certainty::Unchanged,
                counted: false,
            },
        };
        if self.now < self.down_until {
            return;
        }
        self.mark("an operator settled it");
        self.settled_by_hand.insert(lease.id);
        let entries = [Settlement::new(lease, verdict)];
        let answers = self.clients.settle(&lane, &owner, &entries).await.expect("a database in memory");
        self.note(format_args!("an operator settles {lease:?} {answers:?}"));
        self.checked(Step::Settle { lane: &lane, owner: &owner, entries: &entries, answers: &answers }).await;
    }

    async fn prune(&mut self, rng: &mut fastrand::Rng) {
        let lanes: Vec<LaneKind> =
            self.plan.lanes.iter().map(|lane| lane.kind).filter(|kind| !LaneKind::is_parts(kind.name())).collect();
        let lane = Some(lanes[rng.usize(0..lanes.len())].name().to_owned());
        let older_than = Duration::from_millis(rng.u64(0..5_000));
        let pruned = self.outbox.prune(Prune { lane, older_than, limit: 50, dry_run: false }).await.expect("a prune");
        self.note(format_args!("what is old is deleted: {pruned:?}"));
        self.fault("an operator's prune", None, self.now);
        self.checked(Step::Prune).await;
    }
}
