//! The couriers every installation has.

#[cfg(feature = "http")]
pub mod http;

use async_trait::async_trait;

use crate::courier::Courier;
use crate::message::{Message, hex};
use crate::outcome::Outcome;

/// Delivers nothing, successfully. For measuring.
pub struct Noop;

#[async_trait]
impl Courier for Noop {
    async fn deliver(&self, _: &Message) -> Outcome {
        Outcome::sent()
    }
}

/// Prints one line per message on standard output. The payload is shown only if asked for.
pub struct Log {
    pub show_payload: bool,
}

#[async_trait]
impl Courier for Log {
    async fn deliver(&self, message: &Message) -> Outcome {
        let payload = match self.show_payload {
            true => String::from_utf8_lossy(&message.payload).into_owned(),
            false => format!("{} bytes, sha256 {}", message.payload.len(), &hex(&message.sha())[..12]),
        };
        println!("{} #{} attempt {}: {payload}", message.lane, message.id, message.attempts + 1);
        Outcome::sent()
    }
}
