//! The operator's hands: look at an order, bring a failed one back, settle by hand what nobody else can.

use std::time::Duration;

use postrider::outcome::{Certainty, Settled, Verdict};
use postrider::store::{Mode, Requeued};
use postrider::{Error, OPERATOR, Result, clock};

use crate::Orders;
use crate::book::{Tried, unreadable_result};
use crate::decide::{Event, SETTLED, Status, code, http_status};
use crate::ledger::{self, By, Entry, Finish, LedgerEvent};
use crate::result::Execution;

/// How a requeue went.
#[derive(Clone, Debug, PartialEq)]
pub enum Reopened {
    Reopened {
        outbox_id: i64,
    },
    NotFound,
    /// Why it cannot be.
    Refused(String),
}

/// How settling by hand went.
#[derive(Clone, Debug, PartialEq)]
pub enum ByHand {
    Done(Box<Entry>),
    NotFound,
    Refused(String),
}

impl Orders {
    /// The entry of a key, unless its time is over.
    pub async fn entry(&self, key: &str) -> Result<Option<Entry>> {
        let key = key.to_owned();
        let found = self.transact(Mode::Read, move |tx| {
            let key = key.clone();
            Box::pin(async move { ledger::find_one(tx, &key, false).await })
        });
        found.await?.filter(|entry| !entry.expired).map(Entry::intact).transpose()
    }

    pub async fn events(&self, key: &str) -> Result<Vec<LedgerEvent>> {
        let key = key.to_owned();
        self.transact(Mode::Read, move |tx| {
            let key = key.clone();
            Box::pin(async move { ledger::events(tx, &key).await })
        })
        .await
    }

    /// Reopens a failed order: entry and message together.
    pub async fn requeue(&self, key: &str, by: By) -> Result<Reopened> {
        let (orders, work) = (self.clone(), std::sync::Arc::new((key.to_owned(), by)));
        let reopened = self.transact(Mode::Write, move |tx| {
            let (orders, work) = (orders.clone(), work.clone());
            Box::pin(async move {
                let (key, by) = &*work;
                let Some(entry) = ledger::find_one(tx, key, true).await?.filter(|entry| !entry.expired) else {
                    return Ok(Reopened::NotFound);
                };
                let Some(outbox_id) = entry.outbox_id else { return Ok(Reopened::NotFound) };
                if entry.status != Status::Failed {
                    return Ok(Reopened::Refused(not_failed(entry.status)));
                }
                match orders.0.outbox.requeue_in(tx, outbox_id).await? {
                    Requeued::Requeued => {}
                    other => return Ok(Reopened::Refused(format!("its message cannot be brought back: {other:?}"))),
                }
                ledger::reopen(tx, key, by).await?;
                Ok(Reopened::Reopened { outbox_id })
            })
        });
        let reopened = reopened.await?;
        self.committed();
        Ok(reopened)
    }

    /// Says what became of an order that waits, by somebody who knows. It goes the way of every settle, so entry and message
    /// end together.
    pub async fn settle(&self, key: &str, executed: bool, broker_ref: Option<String>, by: By) -> Result<ByHand> {
        let Some(entry) = self.entry(key).await? else { return Ok(ByHand::NotFound) };
        if entry.status != Status::InProgress {
            return Ok(ByHand::Refused(format!("it has ended: {}", entry.status.as_str())));
        }
        let Some(id) = entry.outbox_id.filter(|_| entry.live) else {
            return self.settle_alone(key, executed, broker_ref, by).await;
        };
        let shown = self.0.outbox.show(id).await?.map(|found| found.0);
        let Some(shown) = shown else { return Ok(ByHand::Refused("its message is gone".to_owned())) };
        let owner = format!("{OPERATOR}{}", clock::incarnation(None));
        let leases = self.0.outbox.seize_idle(&owner, vec![id], Duration::from_secs(60)).await?;
        let Some((lane, lease)) = leases.into_iter().next() else {
            let what = "a worker holds it now and may be sending it; wait until it is done or given up".to_owned();
            return Ok(ByHand::Refused(what));
        };
        let reason = shown.last_error_code.filter(|code| code.starts_with("BROKER_"));
        let reason = reason.unwrap_or_else(|| code::SETTLED_BY_HAND.to_owned());
        let verdict = match executed {
            true => Verdict::Sent { result_ref: broker_ref.clone(), dedup_hit: false },
            false => Verdict::Dead {
                code: reason,
                error: SETTLED.to_owned(),
                certainty: Certainty::Resolved,
                counted: false,
            },
        };
        let now = clock::wall();
        let execution = executed.then(|| Execution { order_ref: broker_ref.unwrap_or_default(), fills: vec![] });
        let tried = Tried {
            received_at: shown.created_at,
            began_at: now,
            took: Duration::ZERO,
            broker: self.0.adapter.name().to_owned(),
            execution,
            reason: executed.then_some(code::SETTLED_BY_HAND),
            by,
        };
        self.0.book.keep_by_hand(lease, tried);
        let settled = self.0.outbox.settle_one(&lane, &owner, lease, verdict).await;
        self.0.book.forget_by_hand(lease);
        match settled? {
            Settled::Applied => {}
            other => return Ok(ByHand::Refused(format!("somebody else was faster: {other:?}"))),
        }
        let entry = self.entry(key).await?.ok_or_else(|| Error::database("the entry is gone"))?;
        let wanted = Status::InProgress.next(if executed { Event::Executed } else { Event::Refused });
        if Ok(entry.status) != wanted {
            return Err(Error::database("the entry does not stand where it was put"));
        }
        Ok(ByHand::Done(Box::new(entry)))
    }
}

impl Orders {
    /// Ends an entry whose message is gone or has ended without it, so that nothing else will.
    async fn settle_alone(&self, key: &str, executed: bool, broker_ref: Option<String>, by: By) -> Result<ByHand> {
        let ended = self.ended_of(vec![key.to_owned()]).await?.first().map(|(id, _)| *id);
        let (ttl, work) = (self.0.settings.ledger_ttl, std::sync::Arc::new((key.to_owned(), broker_ref, by)));
        let done = self.transact(Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let (key, broker_ref, by) = &*work;
                let alone = |entry: &Entry| entry.status == Status::InProgress && !entry.live;
                if !ledger::find_one(tx, key, true).await?.is_some_and(|entry| alone(&entry)) {
                    return Ok(false);
                }
                let event = if executed { Event::Executed } else { Event::Refused };
                let finish = Finish {
                    event,
                    http_status: if executed { 200 } else { http_status(code::SETTLED_BY_HAND) },
                    response: unreadable_result(event, key, Some(code::SETTLED_BY_HAND)),
                    broker_ref: broker_ref.clone(),
                    reason_code: Some(code::SETTLED_BY_HAND.to_owned()),
                };
                ledger::finish(tx, (key, ended), &finish, ttl, by).await
            })
        });
        if !done.await? {
            return Ok(ByHand::Refused("somebody else was faster".to_owned()));
        }
        let entry = self.entry(key).await?.ok_or_else(|| Error::database("the entry is gone"))?;
        Ok(ByHand::Done(Box::new(entry)))
    }
}

fn not_failed(status: Status) -> String {
    match status {
        Status::Succeeded => "it succeeded, which is final".to_owned(),
        _ => "it is still in progress; if it waits for a person: postrider orders settle KEY --as succeeded|failed"
            .to_owned(),
    }
}
