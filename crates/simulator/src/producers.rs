//! Those who enqueue: one transaction for all of a moment, whose answer may be lost, which may be refused, or which commits
//! long after it wrote, when claims have passed its place. Whoever has keys asks again.

use std::collections::BTreeMap;

use postrider::error::Effect;
use postrider::store::{Mode, transact};
use postrider::tx::{Dialect, Value, in_ids};
use postrider::worker::core::Event;
use postrider::{Enqueued, Entry, NewMessage, Timestamp};

use crate::checker::Step;
use crate::delivering::{content, target_of};
use crate::dice::{Fate, dice};
use crate::plan::{LaneKind, Plan, Planned, SECOND};
use crate::store::Reply;
use crate::world::{Action, World};

/// Messages of one lane and one moment.
pub struct Batch {
    pub at: u64,
    pub messages: Vec<Planned>,
    /// Nobody will ask for it again.
    pub over: bool,
    /// Its transaction is open, with these.
    pub open: Option<Vec<i64>>,
    pub round: u64,
    /// What its caller was told: the ids, by the plan's numbers.
    pub answered: BTreeMap<usize, i64>,
}

impl Batch {
    pub fn of(plan: &Plan) -> Vec<Batch> {
        let mut batches: BTreeMap<(u64, LaneKind), Vec<Planned>> = BTreeMap::new();
        for message in &plan.messages {
            batches.entry((message.at, message.lane)).or_default().push(message.clone());
        }
        let batch =
            |((at, _), messages)| Batch { at, messages, over: false, open: None, round: 0, answered: BTreeMap::new() };
        batches.into_iter().map(batch).collect()
    }

    fn keyed(&self) -> bool {
        self.messages.iter().all(|m| m.keyed)
    }
}

impl World {
    fn new_messages(&self, batch: usize) -> Vec<NewMessage> {
        let now = Timestamp::from_micros(self.db_now());
        let message = |m: &Planned| {
            let mut new = NewMessage::new(m.lane.name(), content(m.lane, m.n)).target(target_of(m.n)).delay(m.delay);
            new = new.correlation_id(m.n.to_string());
            if m.keyed {
                new = new.key(format!("key-{}", m.n));
            }
            match m.worth {
                Some(worth) => new.deliver_before(now.plus(worth)),
                None => new,
            }
        };
        self.batches[batch].messages.iter().map(message).collect()
    }

    pub async fn enqueue(&mut self, batch: usize, round: u64) {
        let first = self.batches[batch].messages[0].n as u64;
        let fate = self.fate("enqueue", [first, self.batches[batch].messages[0].lane as u64, round]);
        self.batches[batch].round = round;
        if self.now < self.down_until {
            return self.ask_again(batch, round);
        }
        let (replies, late) = self.fate_of_enqueue(fate);
        if replies.first().is_some_and(|first| *first != Reply::Refused) && self.batches[batch].keyed() {
            self.mark("a keyed enqueue repeated");
        }
        let messages = self.new_messages(batch);
        self.clients.expect(replies);
        let result = self.outbox.enqueue(messages).await;
        self.clients.expect([]);
        let before = self.checker.known.len();
        self.checked(Step::Enqueue { hidden: late.is_some() }).await;
        let inserted: Vec<i64> = self.checker.known.keys().skip(before).copied().collect();
        self.check_whole(batch, &inserted);
        let told = result.as_ref().map(|_| ()).map_err(|error| error.effect);
        let numbers: Vec<usize> = self.batches[batch].messages.iter().map(|m| m.n).collect();
        let lane = self.batches[batch].messages[0].lane.name();
        self.note(format_args!("enqueue of {numbers:?} on {lane}: {inserted:?} {told:?}, late {late:?}"));
        match (late, result) {
            (Some((lasts, commit)), Ok(_)) if !inserted.is_empty() => {
                self.clients.hide(&inserted, true).await.expect("rows that are there");
                self.batches[batch].open = Some(inserted);
                self.at(self.now + lasts, Action::Conclude { batch, round, commit });
            }
            (_, Ok(entries)) => self.answered(batch, &entries, &inserted),
            (_, Err(error)) if error.effect == Effect::NotApplied => self.ask_again(batch, round),
            (_, Err(_)) if self.batches[batch].keyed() => self.ask_again(batch, round),
            // Without keys it is never asked again: whether it is there, nobody knows.
            (_, Err(_)) => {
                self.mark("an enqueue nobody knows of");
                self.batches[batch].over = true;
            }
        }
    }

    /// What becomes of its transactions, or how long one stays open and whether it commits then.
    fn fate_of_enqueue(&mut self, fate: Fate) -> (Vec<Reply>, Option<(u64, bool)>) {
        use Reply::{LostAfter, LostBefore, Refused};
        let Some(mut rng) = self.goes_wrong(fate) else { return (vec![], None) };
        let (kind, replies, late) = match rng.u8(0..6) {
            0 => ("an enqueue refused", vec![Refused], None),
            1 => ("an enqueue's answer lost, not applied", vec![LostBefore], None),
            2 => ("an enqueue's answer lost, applied", vec![LostAfter], None),
            3 => {
                let lost = vec![LostBefore, LostAfter, LostBefore, LostAfter];
                ("an enqueue's answers lost for long", lost, None)
            }
            4 => ("a late commit", vec![], Some((rng.u64(SECOND / 4..20 * SECOND), true))),
            _ => ("a late rollback", vec![], Some((rng.u64(SECOND / 4..10 * SECOND), false))),
        };
        self.fault(kind, Some(fate), self.now + late.map_or(0, |(lasts, _)| lasts));
        (replies, late)
    }

    /// All of a transaction, or nothing.
    fn check_whole(&mut self, batch: usize, inserted: &[i64]) {
        let numbers: Vec<usize> = self.batches[batch].messages.iter().map(|m| m.n).collect();
        if !inserted.is_empty() && inserted.len() != numbers.len() {
            self.violation(format!("P9: of {numbers:?} only {inserted:?} were written"));
        }
    }

    fn answered(&mut self, batch: usize, entries: &[Entry], inserted: &[i64]) {
        for (message, entry) in self.batches[batch].messages.clone().into_iter().zip(entries) {
            let new = inserted.contains(&entry.id);
            let same = self.planned.get(&entry.id) == Some(&message.n);
            // Created by a round whose answer was lost, it exists for the next one.
            let fits = match entry.outcome {
                Enqueued::Created => new,
                Enqueued::Exists => message.keyed,
                _ => false,
            };
            if !fits || !same {
                self.violation(format!("P8: message {} was answered {entry:?} (new: {new})", message.n));
            }
            self.batches[batch].answered.insert(message.n, entry.id);
        }
        self.batches[batch].over = true;
        self.wake(batch as u64);
    }

    /// Some workers hear of new work at once.
    fn wake(&mut self, which: u64) {
        for process in 0..self.processes.len() {
            let mut rng = dice(self.fate("wake", [which, process as u64, self.now]));
            if let Some(life) = self.processes[process].alive.as_ref().map(|alive| alive.life).filter(|_| rng.bool()) {
                let at = self.now + rng.u64(100..5_000);
                self.at(at, Action::Hear { process, life, event: Event::Wake, era: None });
            }
        }
    }

    fn ask_again(&mut self, batch: usize, round: u64) {
        let wait = dice(self.fate("again", [batch as u64, round, 0])).u64(SECOND / 2..5 * SECOND);
        self.last_fault = self.last_fault.max(self.now + wait);
        self.at(self.now + wait, Action::Enqueue { batch, round: round + 1 });
    }

    /// The transaction ends, with a commit or without.
    pub async fn conclude(&mut self, batch: usize, round: u64, commit: bool) {
        if self.batches[batch].round != round {
            return;
        }
        let Some(ids) = self.batches[batch].open.take() else { return };
        self.clients.hide(&ids, false).await.expect("rows that are there");
        if commit {
            self.checked(Step::Commit { ids: &ids }).await;
            let lag = self.db_now() - SECOND as i64 / 5;
            let behind = |id: &i64| self.checker.known.get(id).is_some_and(|known| known.row.due_at < lag);
            if ids.iter().any(behind) {
                self.mark("a late commit behind the mark");
            }
            self.note(format_args!("{ids:?} are committed at last"));
            for id in ids {
                let n = self.planned.get(&id).copied().unwrap_or(usize::MAX);
                self.batches[batch].answered.insert(n, id);
            }
            self.batches[batch].over = true;
            self.wake(batch as u64);
        } else {
            self.mark("a rollback after all");
            self.roll_back(&ids).await;
            self.checked(Step::Rollback { ids: &ids }).await;
            for id in &ids {
                self.planned.remove(id);
            }
            self.note(format_args!("{ids:?} are rolled back"));
            self.ask_again(batch, round);
        }
    }

    async fn roll_back(&self, ids: &[i64]) {
        let ids = ids.to_vec();
        let undo = transact(&*self.store, Mode::Write, move |tx| {
            let ids = ids.clone();
            Box::pin(async move {
                for (table, column) in [("outbox", "id"), ("outbox_keys", "outbox_id")] {
                    let mut params: Vec<Value> = Vec::new();
                    let list = in_ids(Dialect::Sqlite, &ids, &mut params);
                    tx.execute(&format!("DELETE FROM {table} WHERE {column} {list}"), &params).await?;
                }
                Ok(())
            })
        });
        undo.await.expect("a rollback");
    }
}
