//! What goes wrong on the wire, as data: at which message, and what.

use std::fmt;
use std::time::Duration;

use super::framing::{Direction, Wire};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub direction: Direction,
    pub at: At,
    pub action: Action,
}

/// Which message of its direction, counted from when the fault was armed, over all connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum At {
    /// The n-th, from 1.
    Nth(usize),
    /// The first whose name contains this.
    Named(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Both sides are closed, and the message is lost.
    CutBefore,
    /// The message arrives, then both sides are closed.
    CutAfter,
    /// It arrives so much later, and whatever is behind it too.
    Delay(Duration),
    /// From here on the server's answers are read and never passed on; the connection stays open until the client ends it.
    Swallow,
    /// From here on nothing passes in either direction, and neither side hears that the other is gone.
    HalfOpen,
    /// An administrator ends the server's session; then the message goes on its way.
    Terminate,
}

impl Action {
    /// Every kind, with the delay a sweep wants.
    pub fn all(delay: Duration) -> [Action; 6] {
        [
            Action::CutBefore,
            Action::CutAfter,
            Action::Delay(delay),
            Action::Swallow,
            Action::HalfOpen,
            Action::Terminate,
        ]
    }

    /// Only answers can be swallowed: a request that never arrives is a cut, a delay or half a connection.
    pub fn fits(self, direction: Direction) -> bool {
        self != Action::Swallow || direction == Direction::ToClient
    }

    /// Does the client hear of it by itself?
    pub fn is_silent(self) -> bool {
        matches!(self, Action::Delay(_) | Action::Swallow | Action::HalfOpen)
    }

    pub fn name(self) -> &'static str {
        match self {
            Action::CutBefore => "cut before it",
            Action::CutAfter => "cut after it",
            Action::Delay(_) => "delayed",
            Action::Swallow => "swallowed",
            Action::HalfOpen => "half-open from there",
            Action::Terminate => "backend terminated",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = if self.direction == Direction::ToServer { "to the server" } else { "to the client" };
        match &self.at {
            At::Nth(n) => write!(f, "message {n} {to}: {}", self.action.name()),
            At::Named(name) => write!(f, "first `{name}` {to}: {}", self.action.name()),
        }
    }
}

/// A message the proxy saw, since it was armed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub wire: Wire,
    pub direction: Direction,
    /// Which connection, in the order they were made.
    pub connection: usize,
    /// Its number in its direction, from 1.
    pub number: usize,
    pub name: String,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (wire, number, name) = (self.wire, self.number, &self.name);
        match self.direction {
            Direction::ToServer => write!(f, "client → {wire}, message {number} ({name})"),
            Direction::ToClient => write!(f, "{wire} → client, message {number} ({name})"),
        }
    }
}
