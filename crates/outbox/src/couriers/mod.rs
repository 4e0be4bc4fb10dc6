//! The couriers every installation has.

#[cfg(feature = "http")]
pub mod blot;
#[cfg(feature = "http")]
pub mod exchange;
#[cfg(feature = "http")]
pub mod http;

mod log;

use async_trait::async_trait;

pub use self::log::Log;
use crate::courier::Courier;
use crate::message::Message;
use crate::observe::sending;
use crate::outcome::Outcome;

/// Delivers nothing, successfully. For measuring.
pub struct Noop;

#[async_trait]
impl Courier for Noop {
    fn name(&self) -> &str {
        "noop"
    }

    async fn deliver(&self, _: &Message) -> Outcome {
        sending(async { Outcome::sent() }).await
    }
}
