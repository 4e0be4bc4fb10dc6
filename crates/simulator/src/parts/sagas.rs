//! The record of sagas: every change of one, told by triggers, is an edge of its state machine; results count once; limits are
//! kept; what has ended stays.

use std::collections::BTreeMap;

use postrider::Result;
use postrider::store::{Mode, Store, transact};
use postrider_webhooks::decide::{Event, Status};

use crate::marks::Marks;

#[derive(Clone, Debug)]
pub struct Saga {
    pub event: i64,
    pub subscription: i64,
    pub status: Status,
    pub attempts: u32,
}

/// One change of a saga.
pub struct Moved {
    pub id: i64,
    pub saga: Saga,
    pub parked: bool,
}

#[derive(Default)]
pub struct Sagas {
    pub known: BTreeMap<i64, Saga>,
    /// Who parked it.
    parked: BTreeMap<i64, String>,
}

const EDGES: [Event; 5] = [
    Event::JobCreated,
    Event::Succeeded,
    Event::Failed { may_retry: true },
    Event::Failed { may_retry: false },
    Event::GivenUp,
];

impl Sagas {
    pub async fn install(store: &dyn Store) -> Result<()> {
        let trigger = |name: &str, when: &str| {
            format!(
                "CREATE TRIGGER sim_saga_{name} AFTER {when} ON webhook_delivery_sagas BEGIN
                     INSERT INTO sim_sagas (id, event_id, subscription_id, status, attempt_count, parked)
                     VALUES (NEW.id, NEW.event_id, NEW.subscription_id, NEW.status, NEW.attempt_count, COALESCE(NEW.next_attempt_at, 0) > 250000000000000000); END"
            )
        };
        let table = "CREATE TABLE sim_sagas (seq INTEGER PRIMARY KEY, id, event_id, subscription_id, status, attempt_count, parked)";
        let statements = [table.to_owned(), trigger("insert", "INSERT"), trigger("update", "UPDATE")];
        transact(store, Mode::Write, move |tx| {
            let statements = statements.clone();
            Box::pin(async move {
                for statement in statements {
                    tx.execute(&statement, &[]).await?;
                }
                Ok(())
            })
        })
        .await
    }

    /// What happened since the last look.
    pub async fn read(store: &dyn Store) -> Result<Vec<Moved>> {
        transact(store, Mode::Write, |tx| {
            Box::pin(async move {
                let sql =
                    "SELECT id, event_id, subscription_id, status, attempt_count, parked FROM sim_sagas ORDER BY seq";
                let moved = |row: &postrider::tx::Row| {
                    let status = Status::parse(&row.text(3)?).unwrap_or(Status::DeadLettered);
                    let (event, subscription, attempts) = (row.int(1)?, row.int(2)?, row.int(4)? as u32);
                    let saga = Saga { event, subscription, status, attempts };
                    Ok(Moved { id: row.int(0)?, saga, parked: row.bool(5)? })
                };
                let moved = tx.query(sql, &[]).await?.iter().map(moved).collect::<Result<Vec<_>>>()?;
                if !moved.is_empty() {
                    tx.execute("DELETE FROM sim_sagas", &[]).await?;
                }
                Ok(moved)
            })
        })
        .await
    }

    /// Holds the changes against the state machine. `limits`: most under way, by subscription; `who` did it.
    pub fn check(
        &mut self,
        moved: Vec<Moved>,
        who: &str,
        limits: &BTreeMap<i64, (Option<u32>, u32)>,
        marks: &mut Marks,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        for Moved { id, saga, parked } in moved {
            let before = self.known.insert(id, saga.clone());
            let fits = match &before {
                None => saga.attempts == 0 && !matches!(saga.status, Status::PendingRetry | Status::Completed),
                Some(before) if before.status == saga.status => {
                    before.attempts == saga.attempts && !saga.status.has_ended()
                }
                Some(before) => {
                    let counted = before.attempts + u32::from(before.status == Status::InProgress);
                    EDGES.iter().any(|edge| before.status.next(*edge) == Ok(saga.status)) && saga.attempts == counted
                }
            };
            if !fits {
                wrong.push(format!("S17: saga {id} went from {before:?} to {saga:?}"));
            }
            let limit = limits.get(&saga.subscription).map_or(u32::MAX, |limit| limit.1);
            if saga.attempts > limit {
                wrong.push(format!("S12: saga {id} had {} of {limit} attempts", saga.attempts));
            }
            self.mark(id, before.as_ref(), &saga, parked, who, marks);
        }
        for (subscription, (most, _)) in limits {
            let under_way = |saga: &&Saga| saga.subscription == *subscription && saga.status == Status::InProgress;
            let under_way = self.known.values().filter(under_way).count();
            if most.is_some_and(|most| under_way > most as usize) {
                wrong.push(format!("subscription {subscription} has {under_way} under way, and may have {most:?}"));
            }
        }
        wrong
    }

    fn mark(&mut self, id: i64, before: Option<&Saga>, saga: &Saga, parked: bool, who: &str, marks: &mut Marks) {
        // A saga keeps its far time once it is under way.
        if parked && saga.status != Status::InProgress {
            self.parked.insert(id, who.to_owned());
            marks.reach("a saga parked at its gate");
        } else if saga.status == Status::InProgress
            && let Some(by) = self.parked.remove(&id)
        {
            marks.reach(if by == who { "a saga admitted" } else { "a saga admitted by another process" });
        }
        match (before.map(|before| before.status), saga.status) {
            (Some(Status::PendingRetry), Status::InProgress) => marks.reach("a saga tried again"),
            (Some(Status::InProgress), Status::DeadLettered) => marks.reach("a saga out of attempts"),
            (Some(Status::Pending | Status::PendingRetry), Status::DeadLettered) => marks.reach("a saga given up"),
            (_, Status::Completed) => marks.reach("a saga completed"),
            _ => {}
        }
    }

    pub fn live(&self) -> usize {
        self.known.values().filter(|saga| !saga.status.has_ended()).count()
    }
}
