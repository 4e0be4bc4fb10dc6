//! Claims, renewals, what is given back, and *send begun*: one holder, a token one higher, nothing before it is due.

use std::collections::BTreeSet;
use std::time::Duration;

use postrider::lease::Lease;
use postrider::message::Message;
use postrider::outcome::{GiveBack, LeaseState};
use postrider::store::{Claim, Claimed, From};
use postrider::time::micros_of;

use super::{Changes, Checker, Row, Seen, Takeover};
use crate::journal::Kind;
use crate::plan::{LaneKind, MAX_CRASHES};
use crate::store::Locks;

impl Checker {
    pub(super) fn claim(&mut self, claim: &Claim, got: &Claimed, changes: &Changes, seen: &mut Seen) {
        if got.messages.len() > claim.limit as usize {
            self.wrong(format!("S5: a claim of {} brought {}", claim.limit, got.messages.len()));
        }
        let ids: BTreeSet<i64> = got.messages.iter().map(|message| message.id).collect();
        self.expect_only("a claim", &ids, changes);
        for message in &got.messages {
            self.claim_one(claim, message, changes, seen);
        }
    }

    fn claim_one(&mut self, claim: &Claim, message: &Message, changes: &Changes, seen: &mut Seen) {
        let (id, owner) = (message.id, claim.owner.as_str());
        let Some(known) = self.known.get(&id).filter(|known| known.live && !known.hidden) else {
            return self.wrong(format!("{owner} claimed message {id}, which is not there"));
        };
        let (before, until, expired) = (known.row.clone(), micros_of(claim.lease), known.held_until);
        if known.lane != claim.lane || known.shard != i64::from(claim.shard) {
            self.wrong(format!("{owner} claimed message {id} of another lane or shard"));
        }
        let ours = before.locked_by.as_deref() == Some(owner);
        let running = before.lease_until.is_some_and(|until| until >= self.db_now);
        let adopts = match &claim.from {
            From::Mark(_) => false,
            From::Adopt { known, .. } => !known.contains(&id),
            From::Ids(ids) => ids.contains(&id),
        };
        if before.due_at > self.db_now {
            self.wrong(format!("P7: {owner} claimed message {id} before it is due: {before:?}"));
        }
        if running && !(ours && adopts) {
            self.wrong(format!("P2: {owner} claimed message {id}, which somebody holds: {before:?}"));
        }
        let takeover = before.locked_by.is_some() && !ours;
        let suspicion = before.crashes + u32::from(takeover);
        if suspicion > 1 && !matches!(claim.from, From::Ids(_)) {
            self.wrong(format!("{owner} claimed the suspect {id} with the others: {before:?}"));
        }
        let begun = self.kind(&claim.lane).is_some_and(LaneKind::commits_begun);
        let wanted = Row {
            token: before.token + 1,
            locked_by: Some(owner.to_owned()),
            lease_until: Some(self.db_now + until),
            crashes: suspicion.min(MAX_CRASHES.max(before.crashes)),
            maybe_sent: before.maybe_sent || (takeover && !begun),
            ..before.clone()
        };
        self.expect_row("a claim", id, &wanted, changes);
        let told = (message.lease_token, message.attempts, message.crashes, message.maybe_sent);
        if told != (wanted.token, wanted.attempts, wanted.crashes, wanted.maybe_sent) {
            self.wrong(format!("{owner} was told {told:?} of message {id}, which is {wanted:?}"));
        }
        if let Some(known) = self.known.get_mut(&id) {
            known.held_until = self.now + claim.lease.as_micros() as u64;
        }
        if let Some(from) = before.locked_by.filter(|_| takeover) {
            self.marks.reach(if suspicion > 1 { "a suspect taken over" } else { "taken over" });
            seen.takeovers.push(Takeover { id, from, expired });
        } else if ours && running {
            self.marks.reach(if matches!(claim.from, From::Ids(_)) { "adopted by the walk" } else { "adopted" });
        } else if ours {
            self.marks.reach("claimed again by its own holder");
        }
    }

    pub(super) fn renew(
        &mut self,
        locks: &Locks,
        owner: &str,
        leases: &[Lease],
        lease: Duration,
        answers: &[LeaseState],
        changes: &Changes,
    ) {
        let mut held = BTreeSet::new();
        for (asked, answer) in leases.iter().zip(answers) {
            let row = self.known.get(&asked.id).filter(|known| known.live).map(|known| known.row.clone());
            let row = row.filter(|row| row.accepts(*asked, owner));
            let wanted = match &row {
                Some(_) if locks.strong(asked.id) => LeaseState::Locked,
                Some(row) if row.lease_until.is_some_and(|until| until >= self.db_now) => LeaseState::Held,
                _ => LeaseState::Lost,
            };
            self.expect_answer("a renewal", owner, *asked, wanted, *answer);
            match (wanted, row) {
                (LeaseState::Held, Some(row)) => {
                    held.insert(asked.id);
                    let until = Some(self.db_now + micros_of(lease));
                    self.expect_row("a renewal", asked.id, &Row { lease_until: until, ..row }, changes);
                    if let Some(known) = self.known.get_mut(&asked.id) {
                        known.held_until = self.now + lease.as_micros() as u64;
                    }
                    self.marks.reach("renewed");
                }
                (LeaseState::Locked, _) => self.marks.reach("a renewal met a lock"),
                (_, Some(_)) => self.marks.reach("renewed too late"),
                _ => self.marks.reach("a lost lease told to a renewal"),
            }
        }
        self.expect_only("a renewal", &held, changes);
    }

    pub(super) fn defer(
        &mut self,
        locks: &Locks,
        owner: &str,
        leases: &[Lease],
        how: &GiveBack,
        answers: &[LeaseState],
        changes: &Changes,
    ) {
        let mut held = BTreeSet::new();
        for (asked, answer) in leases.iter().zip(answers) {
            let row = self.known.get(&asked.id).filter(|known| known.live).map(|known| known.row.clone());
            let row = row.filter(|row| row.accepts(*asked, owner));
            let wanted = match &row {
                Some(_) if locks.strong(asked.id) => LeaseState::Locked,
                Some(_) => LeaseState::Held,
                None => LeaseState::Lost,
            };
            self.expect_answer("giving back", owner, *asked, wanted, *answer);
            if let (LeaseState::Held, Some(row)) = (wanted, row) {
                held.insert(asked.id);
                let due_at = self.db_now + micros_of(how.delay);
                let after = Row { maybe_sent: row.maybe_sent || how.maybe_sent, ..row.unlocked(due_at) };
                self.expect_row("giving back", asked.id, &after, changes);
                match how.code.as_deref() {
                    Some("SHUTDOWN") => self.marks.reach("cut off by a stop"),
                    Some("TARGET_BUSY") => self.marks.reach("given back for a crowd"),
                    Some("TWIN_BUSY") => self.marks.reach("given back for its twin"),
                    _ => self.marks.reach("given back"),
                }
            }
        }
        self.expect_only("giving back", &held, changes);
    }

    pub(super) fn begin(&mut self, owner: &str, lease: Lease, held: bool, changes: &Changes) {
        let row = self.known.get(&lease.id).filter(|known| known.live).map(|known| known.row.clone());
        let runs = |row: &Row| row.lease_until.is_some_and(|until| until >= self.db_now);
        let row = row.filter(|row| row.accepts(lease, owner) && runs(row));
        if held != row.is_some() {
            self.wrong(format!("{owner} began {lease:?} ({held}), which is {row:?}"));
        }
        let mut changed = BTreeSet::new();
        if let Some(row) = row {
            changed.insert(lease.id);
            self.expect_row("send begun", lease.id, &Row { maybe_sent: true, ..row }, changes);
        }
        self.expect_only("send begun", &changed, changes);
    }

    /// An order's send is begun, or that is taken back; nothing else of it changes, and only its holder may.
    pub(super) fn order(&mut self, owner: &str, lease: Lease, changes: &Changes) {
        let row = self.known.get(&lease.id).filter(|known| known.live).map(|known| known.row.clone());
        let row = row.filter(|row| row.accepts(lease, owner));
        for change in changes.get(&lease.id).into_iter().flatten() {
            let fits = |row: &Row| Row::of(change) == Row { maybe_sent: change.maybe_sent, ..row.clone() };
            if change.kind != Kind::Update || !row.as_ref().is_some_and(fits) {
                self.wrong(format!("{owner} sent {lease:?}, which is {row:?}, and did {change:?}"));
            }
        }
        self.expect_only("an order's send", &BTreeSet::from([lease.id]), changes);
    }

    fn expect_answer(&mut self, what: &str, owner: &str, lease: Lease, wanted: LeaseState, told: LeaseState) {
        if wanted != told {
            let known = self.known.get(&lease.id).cloned();
            self.wrong(format!("S6: {what} of {lease:?} told {owner} {told:?}, not {wanted:?}: {known:?}"));
        }
    }
}
