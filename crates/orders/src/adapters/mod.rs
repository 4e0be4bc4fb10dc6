//! Brokers, behind one trait. An adapter never retries by itself: what it answers is what happened once.

mod http;
mod paper;

use async_trait::async_trait;
use postrider::Timestamp;

pub use self::http::{Credentials, HttpBroker, HttpSettings, Meaning};
pub use self::paper::{Faults, PaperBroker, PaperSettings};
use crate::decide::{Idempotency, Reason, Refusal};
use crate::request::Order;
use crate::result::Execution;

/// An order on its way to the broker.
pub struct Sending<'a> {
    pub order: &'a Order,
    /// The same for every attempt; the broker gets it too.
    pub key: &'a str,
    pub order_id: &'a str,
    pub now: Timestamp,
    /// The trace it belongs to, as headers.
    pub headers: &'a [(String, String)],
}

/// What a broker answered.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Executed, in part or whole. With a reason if it had been before.
    Executed(Execution, Option<Reason>),
    Refused(Refusal),
    /// It said yes, in words that make no sense: whatever it did is done.
    Nonsense(String),
}

/// What a broker knows of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Found {
    Executed(Execution),
    Rejected(String),
    Nothing,
    /// It answered, and nobody can tell what that means.
    Nonsense(String),
}

impl Found {
    pub fn executed(self) -> Option<Execution> {
        match self {
            Found::Executed(execution) => Some(execution),
            _ => None,
        }
    }
}

#[async_trait]
pub trait Adapter: Send + Sync + 'static {
    fn name(&self) -> &str;

    /// What it can do about an order that may have arrived already.
    fn idempotency(&self) -> Idempotency;

    /// Sends an order, once.
    async fn send(&self, sending: &Sending<'_>) -> Answer;

    /// Asks about a key. Only for [`Idempotency::LookUp`].
    async fn look_up(&self, _key: &str) -> Result<Found, Refusal> {
        Ok(Found::Nothing)
    }

    /// Reads its credentials again; answers whether they are others now.
    async fn renew(&self) -> bool {
        false
    }
}
