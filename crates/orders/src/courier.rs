//! Sends one order to its broker: looks at the ledger first, and never sends blindly what may have gone out already.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use postrider::alerts::Alert;
use postrider::clock::{self, Tick};
use postrider::failpoint::reach;
use postrider::observe::sending as send_itself;
use postrider::outcome::{Fault, Reach};
use postrider::store::Mode;
use postrider::{Begin, Courier, Message, Outcome, Result, Timestamp};

use crate::adapters::{Adapter, Answer, Found, Sending};
use crate::book::{Tried, by_worker};
use crate::decide::{
    Claimed, Idempotency, Next, Past, Reason, Refusal, Sent, Status, Way, after_nonsense, after_refusal,
    awaits_look_up, code, left_a_doubt, outlives_its_budget, waits_since, way,
};
use crate::ledger::{self, Entry};
use crate::request::Order;
use crate::result::Execution;
use crate::{LANE, Orders, PARKED_FOR, order_id};

/// Delivers messages of the lane [`LANE`].
pub struct OrderCourier(Orders);

impl Orders {
    pub fn courier(&self) -> OrderCourier {
        OrderCourier(self.clone())
    }
}

/// Whether an order may be sent, and what is known of it.
enum Prepared {
    Send {
        order: Box<Order>,
        key: String,
        unresolved: bool,
        resolved: bool,
    },
    /// It needs no sending: this is the outcome.
    Say(Outcome),
}

fn store_unavailable() -> Outcome {
    Outcome::Defer { delay: Duration::from_secs(1), code: "STORE_UNAVAILABLE".into() }
}

impl OrderCourier {
    fn adapter(&self) -> &dyn Adapter {
        &*self.0.0.adapter
    }

    async fn prepare(&self, message: &Message) -> Prepared {
        let order = match Order::parse(&message.payload) {
            Ok(order) if message.payload_is_intact() => order,
            Ok(_) => return Prepared::Say(self.give_up(message, unreadable("it does not match its digest")).await),
            Err(why) => return Prepared::Say(self.give_up(message, unreadable(&why.to_string())).await),
        };
        let Some(key) = message.active_key.clone() else {
            return Prepared::Say(self.give_up(message, unreadable("it has no key")).await);
        };
        let standing = match self.standing(&key, message, &order).await {
            Ok(standing) => standing,
            Err(error) => {
                tracing::warn!(%error, outbox_id = message.id, "the ledger cannot be read; the order waits");
                return Prepared::Say(store_unavailable());
            }
        };
        match standing.entry.as_ref().map_or(Known::Nothing, |entry| known(entry, &order)) {
            Known::Nothing => {}
            Known::Ended(outcome) => return Prepared::Say(outcome),
            Known::Other => return Prepared::Say(self.give_up(message, conflict()).await),
            Known::Damaged => {
                return Prepared::Say(self.park(message, "its entry in the ledger and its message differ").await);
            }
        }
        let claimed = Claimed {
            maybe_sent: message.maybe_sent,
            poison: message.crashes >= self.0.0.settings.max_crashes,
            has_waited: standing.has_waited,
        };
        let send = |unresolved, resolved| Prepared::Send {
            order: Box::new(order.clone()),
            key: key.clone(),
            unresolved,
            resolved,
        };
        match way(claimed, self.adapter().idempotency()) {
            Way::Send { unresolved } => send(unresolved, false),
            Way::Park => Prepared::Say(self.park(message, why_parked(message, claimed)).await),
            Way::Wait(settling) => {
                Prepared::Say(Outcome::Defer { delay: settling, code: awaits_look_up(message.lease_token).into() })
            }
            Way::LookUp => match self.look_up(message, &key, &order).await {
                Some(outcome) => Prepared::Say(outcome),
                None => {
                    reach("looked_up");
                    send(false, true)
                }
            },
        }
    }

    /// The ledger's entry, and whether the message has waited for its look-up. What would end the order, or leave it to a
    /// person, is read once more beside the writers, where no read is older than what was committed before it.
    async fn standing(&self, key: &str, message: &Message, order: &Order) -> Result<Standing> {
        let standing = self.read_standing(Mode::Read, key, message).await?;
        match standing.entry.as_ref().map(|entry| known(entry, order)) {
            None | Some(Known::Nothing) => Ok(standing),
            Some(_) => self.read_standing(Mode::Work, key, message).await,
        }
    }

    async fn read_standing(&self, mode: Mode, key: &str, message: &Message) -> Result<Standing> {
        let (key, id, token) = (key.to_owned(), message.id, message.lease_token);
        let read = self.0.transact(mode, move |tx| {
            let key = key.clone();
            Box::pin(async move {
                let entry = ledger::find_one(tx, &key, false).await?;
                let sql = "SELECT last_error_code FROM outbox WHERE id = ? AND lease_token = ?";
                let rows = tx.query(sql, &[id.into(), token.into()]).await?;
                let last_code = rows.first().map(|row| row.opt_text(0)).transpose()?.flatten();
                let has_waited = match waits_since(last_code.as_deref()) {
                    None => false,
                    Some(since) => {
                        // Whoever was taken over from may have sent it.
                        let sql = "SELECT 1 FROM outbox_attempts WHERE outbox_id = ? AND lease_token > ? AND kind = 'takeover' LIMIT 1";
                        tx.query(sql, &[id.into(), since.into()]).await?.is_empty()
                    }
                };
                Ok(Standing { entry, has_waited })
            })
        });
        read.await
    }

    /// What became of the attempts so far, the oldest first.
    async fn past(&self, id: i64) -> Result<Vec<Past>> {
        let read = self.0.transact(Mode::Work, move |tx| {
            Box::pin(async move {
                let sql =
                    "SELECT kind, code, error FROM outbox_attempts WHERE outbox_id = ? ORDER BY id DESC LIMIT 1000";
                let rows = tx.query(sql, &[id.into()]).await?;
                let past = |row: &postrider::tx::Row| {
                    Ok(Past { kind: row.text(0)?, code: row.opt_text(1)?, error: row.opt_text(2)? })
                };
                rows.iter().rev().map(past).collect::<Result<Vec<_>>>()
            })
        });
        read.await
    }

    /// What the broker knows of it; `None` if nothing, so that it may be sent.
    async fn look_up(&self, message: &Message, key: &str, order: &Order) -> Option<Outcome> {
        let (began_at, began) = (clock::wall(), Tick::now());
        let found = guarded(self.adapter().look_up(key)).await.and_then(|found| found);
        let took = Tick::now().since(began);
        match found {
            Ok(Found::Nothing) => None,
            Ok(Found::Executed(execution)) => Some(match execution.check(order.qty) {
                Err(why) => self.nonsense(message, &format!("looking it up: {why}")).await,
                Ok(()) => {
                    let result_ref = Some(execution.order_ref.clone());
                    let reason = Some(Reason::AlreadyProcessed.as_str());
                    self.keep(message, began_at, took, Some(execution), reason);
                    Outcome::Sent { result_ref }
                }
            }),
            Ok(Found::Rejected(why)) => {
                self.keep(message, began_at, took, None, None);
                let mut fault = Fault::new(Reason::Rejected.as_str(), why, Reach::Answered);
                fault.resolves = true;
                Some(Outcome::Dead(fault))
            }
            Ok(Found::Nonsense(why)) => Some(self.nonsense(message, &format!("looking it up: {why}")).await),
            Err(refusal) => {
                if refusal.reason == Reason::Unauthorized {
                    return Some(self.unauthorized(message.id, refusal.retry_after).await);
                }
                let why = format!("looking it up: {}", refusal.message);
                let fault = Fault::new(refusal.reason.as_str(), why, Reach::NeverSent);
                Some(Outcome::Retry { fault, retry_after: refusal.retry_after })
            }
        }
    }

    /// An answer that makes no sense.
    async fn nonsense(&self, message: &Message, why: &str) -> Outcome {
        match after_nonsense(why, message.attempts, self.0.0.settings.max_attempts) {
            Next::Settle(outcome) => outcome,
            Next::Park => self.park(message, why).await,
        }
    }

    /// Ends what cannot be sent; but what may have been is for a person to judge.
    async fn give_up(&self, message: &Message, fault: Fault) -> Outcome {
        if message.maybe_sent { self.park(message, &fault.error).await } else { Outcome::Dead(fault) }
    }

    /// It stays where it is until a person has looked.
    async fn park(&self, message: &Message, why: &str) -> Outcome {
        let id = message.id;
        tracing::error!(
            outbox_id = id,
            lane = LANE,
            why,
            "an order may have been executed and nobody can tell; find out, then: postrider orders settle KEY --as succeeded|failed"
        );
        if let Some(alerts) = self.0.0.alerts.clone() {
            let why = why.to_owned();
            let told = self.0.transact(Mode::Work, move |tx| {
                let (alerts, alert) = (alerts.clone(), needs_reconcile(id, &why));
                Box::pin(async move { alerts.raise(tx, &alert).await })
            });
            if let Err(error) = told.await {
                tracing::warn!(%error, outbox_id = id, "the alert could not be written; the order is tried again");
                return store_unavailable();
            }
            self.0.0.outbox.ring();
        }
        Outcome::Defer { delay: PARKED_FOR, code: code::NEEDS_RECONCILE.into() }
    }

    fn keep(
        &self,
        message: &Message,
        began_at: Timestamp,
        took: Duration,
        execution: Option<Execution>,
        reason: Option<&'static str>,
    ) {
        let broker = self.adapter().name().to_owned();
        let received_at = message.created_at;
        self.0
            .0
            .book
            .keep(message.id, Tried { received_at, began_at, took, broker, execution, reason, by: by_worker() });
    }

    async fn send(&self, message: &Message, prepared: Prepared) -> Outcome {
        let (order, key, unresolved, resolved) = match prepared {
            Prepared::Say(outcome) => return outcome,
            Prepared::Send { order, key, unresolved, resolved } => (order, key, unresolved, resolved),
        };
        let id = order.order_id.clone().unwrap_or_else(|| order_id(&self.0.0.store_id, message.id));
        let (began_at, began) = (clock::wall(), Tick::now());
        let sending = Sending { order: &order, key: &key, order_id: &id, now: began_at, headers: &message.headers };
        let answer = send_itself(guarded(self.adapter().send(&sending))).await.unwrap_or_else(Answer::Refused);
        let took = Tick::now().since(began);
        reach("sent");
        let refusal = match answer {
            Answer::Executed(execution, reason) => match execution.check(order.qty) {
                Err(why) => return self.nonsense(message, &why).await,
                Ok(()) => {
                    let result_ref = Some(execution.order_ref.clone()).filter(|r| !r.is_empty());
                    self.keep(message, began_at, took, Some(execution), reason.map(Reason::as_str));
                    return Outcome::Sent { result_ref };
                }
            },
            Answer::Nonsense(why) => return self.nonsense(message, &why).await,
            Answer::Refused(refusal) if refusal.reason == Reason::Unauthorized => {
                return self.unauthorized(message.id, refusal.retry_after).await;
            }
            Answer::Refused(refusal) => refusal,
        };
        let idempotency = self.adapter().idempotency();
        let mut unresolved = unresolved;
        let ends = matches!(refusal.reason, Reason::BadRequest | Reason::Rejected);
        if ends && !unresolved && idempotency == Idempotency::Key && message.lease_token > 1 {
            match self.past(message.id).await {
                Ok(past) => unresolved = left_a_doubt(&past),
                // With its key it may be sent again, and is then refused again.
                Err(error) => {
                    tracing::warn!(%error, outbox_id = message.id, "what became of it before cannot be read; the order waits");
                    return store_unavailable();
                }
            }
        }
        let why = format!("{} after an attempt that may have arrived: {}", refusal.reason.as_str(), refusal.message);
        match after_refusal(refusal, Sent { unresolved, resolved, idempotency }) {
            Next::Park => self.park(message, &why).await,
            Next::Settle(outcome) => {
                self.keep(message, began_at, took, None, None);
                if outlives_its_budget(&outcome, message.attempts, self.0.0.settings.max_attempts) {
                    self.tell_in_doubt(message).await;
                }
                outcome
            }
        }
    }

    /// Our credentials are refused. Where new ones were found, it goes on at once; else every order waits.
    async fn unauthorized(&self, id: i64, at_once: Option<Duration>) -> Outcome {
        match at_once {
            None => self.tell_unauthorized(id).await,
            Some(_) => self.0.wake_refused().await,
        }
        let refusal = Refusal {
            reason: Reason::Unauthorized,
            message: String::new(),
            reach: Reach::Answered,
            retry_after: at_once,
        };
        let sent = Sent { unresolved: false, resolved: false, idempotency: self.adapter().idempotency() };
        match after_refusal(refusal, sent) {
            Next::Settle(outcome) => outcome,
            Next::Park => store_unavailable(),
        }
    }

    /// Every order waits for it, so one alert for all.
    async fn tell_unauthorized(&self, id: i64) {
        tracing::error!(outbox_id = id, lane = LANE, "the broker refuses our credentials; orders wait");
        self.tell(unauthorized()).await;
    }

    /// A broker that answers nothing is most likely silent about other orders, too: one alert for all.
    async fn tell_in_doubt(&self, message: &Message) {
        let attempts = message.attempts.saturating_add(1);
        let id = message.id;
        tracing::error!(
            outbox_id = id,
            lane = LANE,
            attempts,
            "the broker does not say what became of an order; it goes on"
        );
        self.tell(in_doubt(id, attempts)).await;
    }

    async fn tell(&self, alert: Alert) {
        let Some(alerts) = self.0.0.alerts.clone() else { return };
        let told = self.0.transact(Mode::Work, move |tx| {
            let (alerts, alert) = (alerts.clone(), alert.clone());
            Box::pin(async move { alerts.raise(tx, &alert).await })
        });
        match told.await {
            Ok(true) => self.0.0.outbox.ring(),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "the alert could not be written"),
        }
    }
}

#[async_trait]
impl Courier for OrderCourier {
    async fn deliver(&self, message: &Message) -> Outcome {
        let prepared = self.prepare(message).await;
        self.send(message, prepared).await
    }

    async fn deliver_begun(&self, message: &Message, begin: &Begin) -> Outcome {
        let prepared = self.prepare(message).await;
        let sends = matches!(prepared, Prepared::Send { .. });
        if sends {
            match begin.commit().await {
                Ok(true) => {}
                Ok(false) => return Outcome::Defer { delay: Duration::ZERO, code: "LEASE_LOST".into() },
                Err(_) => {
                    take_back(message, begin).await;
                    return store_unavailable();
                }
            }
            reach("begun");
        }
        let outcome = self.send(message, prepared).await;
        // Refused for a reason of ours: nothing went out, and it waits.
        if sends && matches!(&outcome, Outcome::Defer { code, .. } if *code != code::NEEDS_RECONCILE) {
            take_back(message, begin).await;
        }
        outcome
    }

    fn settled(&self, id: i64) {
        self.0.0.book.forget(id);
    }

    fn name(&self) -> &str {
        self.adapter().name()
    }
}

/// An adapter that fails without saying why has failed one attempt: what it did, nobody knows.
async fn guarded<T>(call: impl Future<Output = T>) -> Result<T, Refusal> {
    AssertUnwindSafe(call).catch_unwind().await.map_err(|_| Refusal {
        reason: Reason::Internal,
        message: "the adapter failed without a reason; the log says where".to_owned(),
        reach: Reach::Unknown,
        retry_after: None,
    })
}

/// What is known of an order that was claimed.
struct Standing {
    entry: Option<Entry>,
    has_waited: bool,
}

fn why_parked(message: &Message, claimed: Claimed) -> &'static str {
    match claimed.poison {
        true => "too many workers died over it",
        false if message.attempts == 0 => "a worker died while it was being sent",
        false => "the broker may have got it, and can neither be asked nor told twice",
    }
}

/// What the ledger says already.
enum Known {
    Nothing,
    /// The order ended, and its message has not heard of it.
    Ended(Outcome),
    /// Another order was settled under the key.
    Other,
    /// Entry and message were written together and differ: one of them is damaged.
    Damaged,
}

fn known(entry: &Entry, order: &Order) -> Known {
    let same = entry.request_digest == order.digest;
    match entry.status {
        Status::InProgress if same => Known::Nothing,
        Status::InProgress => Known::Damaged,
        _ if !same => Known::Other,
        Status::Succeeded => Known::Ended(Outcome::Sent { result_ref: entry.broker_ref.clone() }),
        Status::Failed => {
            let reason = entry.reason_code.clone().unwrap_or_else(|| "INTERNAL_ERROR".to_owned());
            Known::Ended(Outcome::Dead(Fault::new(reason, "the ledger says that it failed", Reach::NeverSent)))
        }
    }
}

fn conflict() -> Fault {
    Fault::new(code::CONFLICT, "the ledger has another order under this key; it stands", Reach::NeverSent)
}

/// The record that a send began, where none did.
async fn take_back(message: &Message, begin: &Begin) {
    if !message.maybe_sent
        && let Err(error) = begin.take_back().await
    {
        tracing::warn!(%error, outbox_id = message.id, "an order that was not sent will look as if it may have been");
    }
}

fn unreadable(why: &str) -> Fault {
    Fault::new(code::UNREADABLE, format!("the stored order cannot be read: {why}"), Reach::NeverSent)
}

fn needs_reconcile(id: i64, why: &str) -> Alert {
    Alert {
        kind: "needs_reconcile",
        subject: format!("order {id}"),
        message: format!(
            "order {id} may have been executed and nobody can tell; ask the broker, then: postrider orders settle KEY --as succeeded|failed"
        ),
        count: 1,
        details: serde_json::json!({ "outbox_id": id, "why": why }),
    }
}

fn in_doubt(id: i64, attempts: u32) -> Alert {
    Alert {
        kind: "orders_in_doubt",
        subject: LANE.to_owned(),
        message: format!(
            "the broker has not said what became of order {id} after {attempts} attempts; it may have been executed, so no budget ends it and it is asked for again. Is the broker well? To end it by hand: postrider orders settle KEY --as succeeded|failed"
        ),
        count: 1,
        details: serde_json::json!({ "outbox_id": id, "attempts": attempts }),
    }
}

fn unauthorized() -> Alert {
    Alert {
        kind: "broker_unauthorized",
        subject: LANE.to_owned(),
        message: "the broker refuses our credentials; orders wait until it takes them: correct [orders] headers, or what they refer to"
            .to_owned(),
        count: 1,
        details: serde_json::json!({}),
    }
}

/// Where sending twice does harm, the lease is checked once more right before the first byte, and the send recorded.
pub(crate) fn says_begun(idempotency: Idempotency) -> bool {
    idempotency != Idempotency::Key
}
