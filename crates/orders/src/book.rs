//! What couriers learnt of orders, between a delivery and its settle; and the worker's part in the settle: the ledger entry
//! ends in the transaction that ends the message, ledger first.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::alerts::{Alert, Alerts};
use postrider::failpoint::reach;
use postrider::lease::Lease;
use postrider::outcome::{Certainty, Verdict};
use postrider::tx::Tx;
use postrider::{OnSettled, Result, Timestamp, Winner, clock};

use crate::decide::{Event, Status, code, http_status};
use crate::ledger::{self, By, Finish};
use crate::request::Order;
use crate::result::{Execution, Frame, LatencyMs};
use crate::{LANE, conflicts, order_id};

/// What is known of an order that has just been tried.
#[derive(Clone, Debug)]
pub(crate) struct Tried {
    pub received_at: Timestamp,
    pub began_at: Timestamp,
    pub took: Duration,
    pub broker: String,
    /// What was executed, if anything.
    pub execution: Option<Execution>,
    pub reason: Option<&'static str>,
    pub by: By,
}

/// Shared by the couriers of a process and its store.
#[derive(Clone, Default)]
pub struct Book(Arc<Inner>);

#[derive(Default)]
struct Inner {
    tried: Mutex<HashMap<i64, Tried>>,
    /// What a person said of an order, under the lease it was said with: two may speak of one order at once.
    by_hand: Mutex<HashMap<Lease, Tried>>,
    rules: OnceLock<Rules>,
}

/// Known once the part is opened.
pub(crate) struct Rules {
    pub ledger_ttl: Duration,
    pub store_id: String,
    pub alerts: Option<Alerts>,
}

impl std::fmt::Debug for Book {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Book")
    }
}

impl Book {
    pub(crate) fn open(&self, rules: Rules) {
        let _ = self.0.rules.set(rules);
    }

    pub(crate) fn keep(&self, id: i64, tried: Tried) {
        self.0.tried.lock().unwrap_or_else(PoisonError::into_inner).insert(id, tried);
    }

    pub(crate) fn forget(&self, id: i64) {
        self.0.tried.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    pub(crate) fn keep_by_hand(&self, lease: Lease, tried: Tried) {
        self.0.by_hand.lock().unwrap_or_else(PoisonError::into_inner).insert(lease, tried);
    }

    pub(crate) fn forget_by_hand(&self, lease: Lease) {
        self.0.by_hand.lock().unwrap_or_else(PoisonError::into_inner).remove(&lease);
    }

    /// Orders it remembers something of.
    #[doc(hidden)]
    pub fn remembered(&self) -> usize {
        let by_hand = self.0.by_hand.lock().unwrap_or_else(PoisonError::into_inner).len();
        self.0.tried.lock().unwrap_or_else(PoisonError::into_inner).len() + by_hand
    }

    fn of(&self, winner: &Winner) -> Option<Tried> {
        let lease = Lease { id: winner.id, token: winner.lease_token };
        let by_hand = self.0.by_hand.lock().unwrap_or_else(PoisonError::into_inner).get(&lease).cloned();
        by_hand.or_else(|| self.0.tried.lock().unwrap_or_else(PoisonError::into_inner).get(&winner.id).cloned())
    }

    /// What the ledger is to say about a message that ends.
    fn finish(&self, winner: &Winner, key: &str, order: Option<&Order>, store_id: &str) -> Option<Finish> {
        let tried = self.of(winner);
        let (event, reason) = match &winner.verdict {
            Verdict::Retry { .. } => return None,
            Verdict::Sent { .. } => (Event::Executed, tried.as_ref().and_then(|tried| tried.reason).map(str::to_owned)),
            Verdict::Dead { code, .. } => (Event::Refused, Some(code.clone())),
        };
        let now = clock::wall();
        let execution = tried.as_ref().and_then(|tried| tried.execution.clone());
        let broker_ref = execution.as_ref().map(|done| done.order_ref.clone()).filter(|r| !r.is_empty());
        let response = match order {
            None => unreadable_result(event, key, reason.as_deref()),
            Some(order) => {
                let received_at = tried.as_ref().map_or(now, |tried| tried.received_at);
                let millis = |span: Duration| span.as_millis() as u64;
                let latency = tried.as_ref().map_or_else(LatencyMs::default, |tried| LatencyMs {
                    queue: millis(tried.began_at.since(received_at)),
                    broker_rtt: millis(tried.took),
                    total: millis(now.since(received_at)),
                });
                let id = order.order_id.clone().unwrap_or_else(|| order_id(store_id, winner.id));
                let broker = tried.as_ref().map_or("", |tried| tried.broker.as_str());
                let frame = Frame { order, order_id: &id, key, received_at, completed_at: now, broker, latency };
                let done = execution.unwrap_or_default();
                frame.result((event == Event::Executed).then_some(&done), reason.as_deref())
            }
        };
        let http_status = match (event, &reason) {
            (Event::Refused, Some(reason)) => http_status(reason),
            _ => 200,
        };
        Some(Finish { event, http_status, response, broker_ref, reason_code: reason })
    }
}

fn given_up(finish: &Finish, id: i64) -> Alert {
    let reason = finish.reason_code.as_deref().unwrap_or("?");
    Alert {
        kind: "failed_orders",
        subject: LANE.to_owned(),
        message: format!(
            "order {id} was given up: {reason}; look: postrider outbox show {id}, bring back: postrider orders requeue KEY"
        ),
        count: 1,
        details: serde_json::json!({ "outbox_id": id, "reason_code": reason }),
    }
}

#[async_trait]
impl OnSettled for Book {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<()> {
        let ended: Vec<&Winner> = winners.iter().filter(|winner| winner.verdict.ends()).collect();
        if ended.is_empty() {
            return Ok(());
        }
        let unopened = || postrider::Error::invalid("the orders of this outbox were not opened");
        let rules = self.0.rules.get().ok_or_else(unopened)?;
        let mut named: Vec<(&Winner, &str)> =
            ended.iter().filter_map(|winner| Some((*winner, winner.active_key.as_deref()?))).collect();
        // In the order of keys, as everywhere.
        named.sort_by_key(|entry| entry.1);
        let mut failures = Vec::new();
        for (winner, key) in named {
            let order = Order::parse(&winner.payload).ok();
            let digest = order.as_ref().map_or("", |order| order.digest.as_str());
            if matches!(&winner.verdict, Verdict::Dead { code, .. } if code == code::CONFLICT) {
                // The ledger has another order under this key, and it is right.
                if ledger::find_one(tx, key, true).await?.is_some() {
                    let instrument = order.as_ref().map(|order| order.instrument.as_str());
                    conflicts::note(tx, key, digest, instrument, Some(winner.id)).await?;
                }
                continue;
            }
            let Some(finish) = self.finish(winner, key, order.as_ref(), &rules.store_id) else { continue };
            let by = self.of(winner).map_or_else(by_worker, |tried| tried.by);
            ledger::adopt(tx, key, digest).await?;
            if gives_up_in_doubt(winner)
                && ledger::find_one(tx, key, true).await?.is_some_and(|entry| entry.status == Status::InProgress)
            {
                // It stays held until its lease ends, and whoever takes it over finds it in doubt.
                return Err(postrider::Error::invalid(
                    "an order that may have been executed is not recorded as failed",
                ));
            }
            if ledger::finish(tx, (key, Some(winner.id)), &finish, rules.ledger_ttl, &by).await?
                && finish.event == Event::Refused
            {
                failures.push(given_up(&finish, winner.id));
            }
            reach("settling");
        }
        match &rules.alerts {
            Some(alerts) => alerts.raise_all(tx, failures).await,
            None => Ok(()),
        }
    }
}

/// The result of an order that cannot be read any more.
pub(crate) fn unreadable_result(event: Event, key: &str, reason: Option<&str>) -> String {
    let status = if event == Event::Executed { "ok" } else { "error" };
    serde_json::json!({ "status": status, "idempotency_key": key, "reason_code": reason }).to_string()
}

/// The last wall: whatever the worker made of an attempt that was cut off, an order that may have been executed never ends
/// as failed without somebody who knows better.
fn gives_up_in_doubt(winner: &Winner) -> bool {
    let resolved = |certainty: &Certainty| *certainty == Certainty::Resolved;
    winner.maybe_sent && matches!(&winner.verdict, Verdict::Dead { certainty, .. } if !resolved(certainty))
}

pub(crate) fn by_worker() -> By {
    By { actor: "worker".to_owned(), reason: None }
}
