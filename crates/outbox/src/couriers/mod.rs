//! The couriers every installation has.

#[cfg(feature = "http")]
pub mod exchange;
#[cfg(feature = "http")]
pub mod http;

use std::io::Write;

use async_trait::async_trait;

use crate::courier::Courier;
use crate::message::{Message, hex};
use crate::outcome::{Outcome, Reach};

/// Delivers nothing, successfully. For measuring.
pub struct Noop;

#[async_trait]
impl Courier for Noop {
    fn name(&self) -> &str {
        "noop"
    }

    async fn deliver(&self, _: &Message) -> Outcome {
        Outcome::sent()
    }
}

/// Prints one line per message. The payload is shown only if asked for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Log {
    pub show_payload: bool,
    /// Standard output belongs to something else.
    pub to_stderr: bool,
}

#[async_trait]
impl Courier for Log {
    fn name(&self) -> &str {
        "log"
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        let payload = match self.show_payload {
            true => String::from_utf8_lossy(&message.payload).into_owned(),
            false => format!("{} bytes, sha256 {}", message.payload.len(), &hex(&message.sha())[..12]),
        };
        let line = format!("{} #{} attempt {}: {payload}\n", message.lane, message.id, message.attempts + 1);
        // `println!` would panic when the reader has gone.
        let printed = match self.to_stderr {
            true => std::io::stderr().write_all(line.as_bytes()),
            false => std::io::stdout().write_all(line.as_bytes()),
        };
        match printed {
            Ok(()) => Outcome::sent(),
            Err(error) => Outcome::retry("OUTPUT_CLOSED", format!("cannot print: {error}"), Reach::NeverSent),
        }
    }
}
