//! Settles: only the current holder's count, once; what ends moves, what is tried again is put off; and whoever asks again
//! after a lost answer is told the truth.

use std::collections::{BTreeMap, BTreeSet};

use postrider::lease::Lease;
use postrider::outcome::{Certainty, Settled, Settlement, Verdict};
use postrider::time::micros_of;

use super::{Changes, Checker, End, Row, Seen};
use crate::journal::{Change, Heard, Kind};
use crate::plan::LaneKind;
use crate::store::Locks;

impl Checker {
    /// Answers what the part of the lane should have heard.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn settle(
        &mut self,
        locks: &Locks,
        lane: &str,
        owner: &str,
        entries: &[Settlement],
        answers: &[Settled],
        changes: &Changes,
        seen: &mut Seen,
    ) -> Vec<Heard> {
        if answers.len() != entries.len() {
            self.wrong(format!("{} outcomes got {} answers", entries.len(), answers.len()));
        }
        let mut won: BTreeMap<i64, &Settlement> = BTreeMap::new();
        for (entry, answer) in entries.iter().zip(answers) {
            let lease = entry.lease;
            let known = self.known.get(&lease.id).filter(|known| known.live && known.lane == lane);
            let ours = known.is_some_and(|known| known.row.accepts(lease, owner)) && !won.contains_key(&lease.id);
            if ours && !locks.any(lease.id) {
                let late = known.and_then(|known| known.row.lease_until).is_some_and(|until| until < self.db_now);
                won.insert(lease.id, entry);
                self.expect_settled(owner, entry, &[Settled::Applied], *answer);
                self.marks.reach(if late { "a late ack counted" } else { "settled" });
                if entry.wary {
                    self.marks.reach("a locked row settled alone later");
                }
                if entry.again {
                    self.marks.reach("settled at the second asking");
                }
            } else if ours {
                self.expect_settled(owner, entry, &[Settled::Locked], *answer);
                self.marks.reach("a settle met a lock");
            } else {
                self.settle_lost(owner, entry, *answer);
            }
        }
        self.expect_only("a settle", &won.keys().copied().collect::<BTreeSet<_>>(), changes);
        for entry in won.values() {
            self.settle_one(lane, entry, changes, seen);
        }
        let hears = self.kind(lane) == Some(LaneKind::Heard);
        let heard = |e: &&Settlement| Heard { id: e.lease.id, token: e.lease.token, ends: e.verdict.ends() };
        if hears { won.values().map(heard).collect() } else { vec![] }
    }

    /// The lease is not this owner's any more. Was it this very outcome that ended it?
    fn settle_lost(&mut self, owner: &str, entry: &Settlement, answer: Settled) {
        let lease = entry.lease;
        let gone = self.known.get(&lease.id).is_none_or(|known| known.forgotten);
        let recorded = self.recorded.get(&lease).copied();
        let same = recorded == Some(verdict_name(&entry.verdict));
        match (entry.again, same) {
            (true, true) if gone => {
                self.expect_settled(owner, entry, &[Settled::Applied, Settled::Unknown], answer);
                self.marks.reach("nothing left to prove a settle by");
            }
            (true, true) => {
                self.expect_settled(owner, entry, &[Settled::Applied], answer);
                self.marks.reach("a settle unknown, then proved");
            }
            (true, false) if gone => self.expect_settled(owner, entry, &[Settled::LeaseLost, Settled::Unknown], answer),
            _ => {
                self.expect_settled(owner, entry, &[Settled::LeaseLost], answer);
                self.marks.reach("a lost lease told to a settle");
            }
        }
    }

    fn expect_settled(&mut self, owner: &str, entry: &Settlement, wanted: &[Settled], told: Settled) {
        if !wanted.contains(&told) {
            let known = self.known.get(&entry.lease.id).cloned();
            self.wrong(format!("S6: {owner} settled {entry:?} and was told {told:?}, not {wanted:?}: {known:?}"));
        }
    }

    /// What the one who won did to the row.
    fn settle_one(&mut self, lane: &str, entry: &Settlement, changes: &Changes, seen: &mut Seen) {
        let id = entry.lease.id;
        self.recorded.insert(entry.lease, verdict_name(&entry.verdict));
        let Some(before) = self.known.get(&id).map(|known| known.row.clone()) else { return };
        let certain = |certainty: Certainty| match certainty {
            Certainty::Unchanged => before.maybe_sent,
            Certainty::MaybeSent => true,
            Certainty::Resolved => false,
        };
        let most = self.lanes.get(lane).map_or(1, |lane| lane.max_attempts);
        match &entry.verdict {
            Verdict::Retry { delay, certainty, .. } => {
                let due_at = self.db_now + micros_of(*delay);
                let after = Row {
                    attempts: before.attempts + 1,
                    crashes: 0,
                    maybe_sent: certain(*certainty),
                    ..before.unlocked(due_at)
                };
                let keeps = self.kind(lane).is_some_and(LaneKind::keeps_unresolved) && after.maybe_sent;
                if after.attempts >= most && !keeps {
                    self.wrong(format!("P11: message {id} is tried again after {} of {most} outcomes", after.attempts));
                }
                self.expect_row("a retry", id, &after, changes);
            }
            Verdict::Sent { .. } => {
                let brief = matches!(self.kind(lane), Some(LaneKind::Brief | LaneKind::Webhooks));
                let end = if brief { None } else { Some((End::Sent, before.attempts, before.maybe_sent)) };
                self.expect_end(entry.lease, end, changes);
                if brief {
                    if let Some(known) = self.known.get_mut(&id) {
                        known.forgotten = true;
                    }
                    seen.ended.push((id, End::Sent));
                }
            }
            Verdict::Dead { code, counted, certainty, .. } => {
                let attempts = before.attempts + u32::from(*counted);
                if *counted && attempts > most && !self.kind(lane).is_some_and(LaneKind::keeps_unresolved) {
                    self.wrong(format!("P11: message {id} died after {attempts} of {most} outcomes"));
                }
                let end = (End::Dead(code.clone()), attempts, certain(*certainty));
                if self.kind(lane) == Some(LaneKind::Webhooks) {
                    self.expect_end(entry.lease, None, changes);
                    self.known.entry(id).and_modify(|known| known.forgotten = true);
                    seen.ended.push((id, end.0));
                } else {
                    self.expect_end(entry.lease, Some(end), changes);
                }
            }
        }
    }

    /// It moved, as it was: out of the live ones and, unless nothing is kept, into what has ended.
    fn expect_end(&mut self, lease: Lease, end: Option<(End, u32, bool)>, changes: &Changes) {
        let found = changes.get(&lease.id).map(Vec::as_slice).unwrap_or_default();
        let deleted = |one: &Change| one.kind == Kind::Delete && one.token == lease.token;
        let fits = match (&end, found) {
            (None, [one]) => deleted(one),
            (Some((end, attempts, maybe_sent)), [one, other]) => {
                let (done, gone) = if one.kind == Kind::Done { (one, other) } else { (other, one) };
                let told = match done.status.as_deref() {
                    Some("sent") => End::Sent,
                    _ => End::Dead(done.code.clone().unwrap_or_default()),
                };
                let same = (told, done.attempts, done.maybe_sent) == (end.clone(), *attempts, *maybe_sent);
                deleted(gone) && done.kind == Kind::Done && done.token == lease.token && same
            }
            _ => false,
        };
        if !fits {
            self.wrong(format!("{lease:?} should have ended as {end:?}, and did {found:?}"));
        }
    }
}

fn verdict_name(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Sent { .. } => "sent",
        Verdict::Retry { .. } => "retry",
        Verdict::Dead { .. } => "dead",
    }
}
