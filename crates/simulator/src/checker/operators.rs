//! What operators and producers may change: tokens rise when a message is taken from somebody, and only the dead come back.

use std::collections::BTreeSet;

use postrider::store::Requeued;
use postrider::time::micros_of;

use super::{Changes, Checker, End, Row, Step};
use crate::journal::Kind;

impl Checker {
    pub(super) fn operate(&mut self, step: &Step<'_>, changes: &Changes) {
        match step {
            Step::Commit { ids } => {
                for id in *ids {
                    if let Some(known) = self.known.get_mut(id) {
                        known.hidden = false;
                    }
                }
                self.expect_only("a commit", &BTreeSet::new(), changes);
            }
            Step::Rollback { ids } => self.expect_only("a rollback", &ids.iter().copied().collect(), changes),
            Step::Seize { owner, lease, got } => {
                for lease_got in *got {
                    let Some(before) = self.row(lease_got.id) else { continue };
                    let wanted = Row {
                        token: before.token + 1,
                        locked_by: Some((*owner).to_owned()),
                        lease_until: Some(self.db_now + micros_of(*lease)),
                        maybe_sent: before.maybe_sent || before.locked_by.is_some(),
                        ..before
                    };
                    self.expect_row("a seizure", lease_got.id, &wanted, changes);
                    if let Some(known) = self.known.get_mut(&lease_got.id) {
                        known.held_until = self.now + lease.as_micros() as u64;
                    }
                }
                self.expect_only("a seizure", &got.iter().map(|lease| lease.id).collect(), changes);
            }
            Step::Release { ids } => self.expect_only("a release", &ids.iter().copied().collect(), changes),
            Step::ReleaseExpired { got } => {
                for id in *got {
                    let expired = |row: &Row| row.lease_until.is_some_and(|until| until < self.db_now);
                    if !self.row(*id).is_some_and(|row| expired(&row)) {
                        self.wrong(format!("message {id} was taken from its holder before its time"));
                    }
                }
                self.expect_only("a release", &got.iter().copied().collect(), changes);
            }
            Step::Retry { id } => {
                if let Some(before) = self.row(*id).filter(|_| changes.contains_key(id)) {
                    if before.locked_by.is_some() || before.due_at <= self.db_now {
                        self.wrong(format!("message {id} was hurried, and did not wait: {before:?}"));
                    }
                    self.expect_row("a retry by hand", *id, &Row { due_at: self.db_now, ..before }, changes);
                }
                self.expect_only("a retry by hand", &BTreeSet::from([*id]), changes);
            }
            Step::Requeue { ids, answers } => self.requeue(ids, answers, changes),
            Step::Prune => {
                for change in changes.values().flatten().filter(|change| change.kind != Kind::Undone) {
                    self.wrong(format!("a prune did {change:?}"));
                }
            }
            Step::ByHand { id } => self.expect_only("an order settled by hand", &BTreeSet::from([*id]), changes),
            Step::Part => {
                for (id, changes) in changes {
                    // What it has just enqueued is its own.
                    if changes.first().is_some_and(|change| change.kind == Kind::Insert) {
                        continue;
                    }
                    let before = self.row(*id);
                    let hurried = |row: &Row| row.locked_by.is_none() && row.due_at > self.db_now;
                    if changes.iter().any(|change| change.kind == Kind::Update) && !before.as_ref().is_some_and(hurried)
                    {
                        self.wrong(format!("a part changed message {id}, which did not wait: {before:?}"));
                    }
                }
            }
            _ => {}
        }
    }

    fn row(&self, id: i64) -> Option<Row> {
        self.known.get(&id).filter(|known| known.live).map(|known| known.row.clone())
    }

    fn requeue(&mut self, ids: &[i64], answers: &[Requeued], changes: &Changes) {
        let mut back = BTreeSet::new();
        for (id, answer) in ids.iter().zip(answers) {
            let dead = self.known.get(id).is_some_and(|known| matches!(known.end, Some(End::Dead(_))));
            let wanted = if dead { Requeued::Requeued } else { Requeued::NotDead };
            if *answer != wanted {
                self.wrong(format!("P6: a requeue of message {id} was answered {answer:?}, not {wanted:?}"));
            }
            if dead {
                back.insert(*id);
                self.marks.reach("requeued");
                let fresh = |row: &Row| (row.attempts, row.crashes, row.locked_by.is_none()) == (0, 0, true);
                let changes = changes.get(id).map(Vec::as_slice).unwrap_or_default();
                let came = changes.iter().find(|change| change.kind == Kind::Insert).map(Row::of);
                if !came.as_ref().is_some_and(fresh) {
                    self.wrong(format!("message {id} came back as {came:?}"));
                }
            }
        }
        self.expect_only("a requeue", &back, changes);
    }
}
