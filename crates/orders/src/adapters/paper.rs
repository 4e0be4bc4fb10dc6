//! The paper broker: executes nothing real. Its book is a table, so all processes on one database trade with the same
//! broker, and what it executed can be counted apart from the ledger. It can be told to misbehave, by settings (with a
//! chance each) or for one order by its tags.

use std::time::Duration;

use async_trait::async_trait;
use postrider::message::{hex, sha256};
use postrider::outcome::Reach;
use postrider::store::{Mode, transact};
use postrider::tx::{Dialect, Tx, Value};
use postrider::{Error, Outbox, clock};
use rust_decimal::Decimal;

use super::{Adapter, Answer, Found, Sending};
use crate::decide::{Idempotency, Reason, Refusal};
use crate::request::Side;
use crate::result::{Execution, Fill, Number};

/// How often something goes wrong, each from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// It rejects the order.
    pub reject: f64,
    /// It executes only half of it.
    pub partial: f64,
    /// It answers 503 and does nothing.
    pub fail: f64,
    /// It does nothing, and no answer comes in time.
    pub timeout: f64,
    /// It executes the order, and no answer comes in time.
    pub lose_reply: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaperSettings {
    pub idempotency: Idempotency,
    pub timeout: Duration,
    /// How long it takes to answer.
    pub latency: Duration,
    pub faults: Faults,
}

impl Default for PaperSettings {
    fn default() -> Self {
        PaperSettings {
            idempotency: Idempotency::Key,
            timeout: Duration::from_millis(2500),
            latency: Duration::ZERO,
            faults: Faults::default(),
        }
    }
}

pub struct PaperBroker {
    outbox: Outbox,
    settings: PaperSettings,
}

/// What happens to one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Fill,
    Partial,
    Reject,
    Fail,
    Timeout,
    LoseReply,
}

fn fate(faults: &Faults, told: Option<&str>, chance: f64) -> Fate {
    match told {
        Some("fill") => return Fate::Fill,
        Some("partial") => return Fate::Partial,
        Some("reject") => return Fate::Reject,
        Some("fail") => return Fate::Fail,
        Some("timeout") => return Fate::Timeout,
        Some("lose_reply") => return Fate::LoseReply,
        _ => {}
    }
    let mut chance = chance;
    for (share, fate) in [
        (faults.reject, Fate::Reject),
        (faults.partial, Fate::Partial),
        (faults.fail, Fate::Fail),
        (faults.timeout, Fate::Timeout),
        (faults.lose_reply, Fate::LoseReply),
    ] {
        if chance < share {
            return fate;
        }
        chance -= share;
    }
    Fate::Fill
}

/// What a market order costs: always the same for one instrument.
fn market_price(instrument: &str) -> Decimal {
    let sha = sha256(instrument.as_bytes());
    Decimal::new(i64::from(u16::from_be_bytes([sha[0], sha[1]])) + 1, 2)
}

impl PaperBroker {
    pub fn new(outbox: Outbox, settings: PaperSettings) -> Self {
        PaperBroker { outbox, settings }
    }

    fn execution(&self, sending: &Sending<'_>, partial: bool) -> Execution {
        let order = sending.order;
        // Half of the smallest quantity there is would be none.
        let half = Some(order.qty / Decimal::TWO).filter(|half| partial && *half > Decimal::ZERO);
        let qty = half.unwrap_or(order.qty);
        let px = order.price.unwrap_or_else(|| market_price(&order.instrument));
        let order_ref = format!("paper-{}", &hex(&sha256(format!("{}{}", sending.key, sending.now).as_bytes()))[..16]);
        Execution { order_ref, fills: vec![Fill { px: Number(px), qty: Number(qty), ts: sending.now.to_string() }] }
    }

    /// What it executed under a key, if it keeps keys apart.
    async fn executed_before(&self, key: &str) -> Option<Execution> {
        if self.settings.idempotency != Idempotency::Key {
            return None;
        }
        match self.look_up(key).await {
            Ok(Found::Executed(before)) => Some(before),
            _ => None,
        }
    }

    /// Writes it into the book; answers what the book had under the key, if it keeps keys apart.
    async fn execute(&self, sending: &Sending<'_>, execution: &Execution) -> Result<Option<Execution>, Error> {
        let json = serde_json::to_string(execution).map_err(|e| Error::database(e.to_string()))?;
        let qty = execution.executed_qty().normalize().to_string();
        let (key, instrument, side) = (sending.key.to_owned(), sending.order.instrument.clone(), sending.order.side);
        let (order_ref, once) = (execution.order_ref.clone(), self.settings.idempotency == Idempotency::Key);
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let (key, instrument, qty, json) = (key.clone(), instrument.clone(), qty.clone(), json.clone());
            let order_ref = order_ref.clone();
            Box::pin(async move {
                if once {
                    lock(tx, &key).await?;
                    if let Some(before) = booked(tx, &key).await? {
                        return Ok(Some(before));
                    }
                }
                book(tx, [key, order_ref, instrument], side, qty, json).await?;
                Ok(None)
            })
        })
        .await
    }
}

/// Only one of several that come with one key at once goes on.
async fn lock(tx: &mut (dyn Tx + Send), key: &str) -> Result<(), Error> {
    match tx.dialect() {
        // One writer at a time anyway.
        Dialect::Sqlite => Ok(()),
        Dialect::Postgres => {
            tx.query("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))::text", &[key.into()]).await.map(drop)
        }
        Dialect::Mysql => {
            let sql = "SELECT 1 FROM idempo_ledger WHERE idempotency_key = ? FOR UPDATE";
            tx.query(sql, &[key.into()]).await.map(drop)
        }
    }
}

async fn booked(tx: &mut (dyn Tx + Send), key: &str) -> Result<Option<Execution>, Error> {
    let sql = "SELECT execution_json FROM paper_executions WHERE idempotency_key = ? ORDER BY id LIMIT 1";
    let rows = tx.query(sql, &[key.into()]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    serde_json::from_str(&row.text(0)?).map(Some).map_err(|e| Error::database(format!("the paper book: {e}")))
}

async fn book(
    tx: &mut (dyn Tx + Send),
    names: [String; 3],
    side: Side,
    qty: String,
    json: String,
) -> Result<(), Error> {
    let mut params: Vec<Value> = names.into_iter().map(Value::from).collect();
    params.extend([side.as_str().into(), qty.into(), json.into()]);
    let now = tx.now().plus(0, &mut params);
    let sql = format!(
        "INSERT INTO paper_executions (idempotency_key, order_ref, instrument, side, executed_qty, execution_json, at)
         VALUES (?, ?, ?, ?, ?, ?, {now})"
    );
    tx.execute(&sql, &params).await.map(drop)
}

fn refused(reason: Reason, message: &str, reach: Reach) -> Answer {
    Answer::Refused(Refusal { reason, message: message.to_owned(), reach, retry_after: None })
}

#[async_trait]
impl Adapter for PaperBroker {
    fn name(&self) -> &str {
        "paper"
    }

    fn idempotency(&self) -> Idempotency {
        self.settings.idempotency
    }

    async fn send(&self, sending: &Sending<'_>) -> Answer {
        let fate = fate(&self.settings.faults, sending.order.tag("paper"), clock::chance());
        tokio::time::sleep(self.settings.latency).await;
        let late = || refused(Reason::Timeout, "the paper broker did not answer in time", Reach::Unknown);
        match fate {
            Fate::Reject => {
                // What it has executed it does not reject any more.
                return match self.executed_before(sending.key).await {
                    Some(before) => Answer::Executed(before, Some(Reason::AlreadyProcessed)),
                    None => refused(Reason::Rejected, "the paper broker rejects it", Reach::Answered),
                };
            }
            Fate::Fail => return refused(Reason::ServerError, "the paper broker answers 503", Reach::Answered),
            Fate::Timeout => {
                tokio::time::sleep(self.settings.timeout).await;
                return late();
            }
            Fate::Fill | Fate::Partial | Fate::LoseReply => {}
        }
        let execution = self.execution(sending, fate == Fate::Partial);
        let answer = match self.execute(sending, &execution).await {
            Ok(None) => Answer::Executed(execution, None),
            Ok(Some(before)) => Answer::Executed(before, Some(Reason::AlreadyProcessed)),
            Err(error) => refused(Reason::Unknown, &error.to_string(), Reach::Unknown),
        };
        if fate == Fate::LoseReply {
            tokio::time::sleep(self.settings.timeout).await;
            return late();
        }
        answer
    }

    async fn look_up(&self, key: &str) -> Result<Found, Refusal> {
        let key = key.to_owned();
        let found = transact(&**self.outbox.store(), Mode::Read, move |tx| {
            let key = key.clone();
            Box::pin(async move { booked(tx, &key).await })
        });
        let refusal = |error: Error| Refusal {
            reason: Reason::Unknown,
            message: error.to_string(),
            reach: Reach::NeverSent,
            retry_after: None,
        };
        Ok(found.await.map_err(refusal)?.map_or(Found::Nothing, Found::Executed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_does_as_it_is_told() {
        let faults = Faults { reject: 0.1, partial: 0.1, fail: 0.1, timeout: 0.1, lose_reply: 0.1 };
        let seen: Vec<Fate> = (0..6).map(|n| fate(&faults, None, f64::from(n) / 10.0 + 0.05)).collect();
        let all = [Fate::Reject, Fate::Partial, Fate::Fail, Fate::Timeout, Fate::LoseReply, Fate::Fill];
        assert_eq!(seen, all);
        assert_eq!(fate(&faults, Some("fill"), 0.0), Fate::Fill);
        assert_eq!(fate(&Faults::default(), Some("lose_reply"), 0.9), Fate::LoseReply);
        assert_eq!(fate(&Faults::default(), Some("?"), 0.0), Fate::Fill);
    }
}
