//! Decisions about orders, pure: where a ledger entry may go, what a broker's answer means, and what is to be done about
//! an order that may have gone out already.

use std::time::Duration;

use postrider::outcome::{Fault, Outcome, Reach};

/// Where an entry of the ledger stands.
///
/// ```text
/// in_progress ──executed──► succeeded
///   │      ▲
///   │      └──reopened──┐
///   └──────refused──────► failed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    InProgress,
    Succeeded,
    Failed,
}

/// What happens to an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Executed,
    Refused,
    Reopened,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IllegalTransition {
    pub from: Status,
    pub event: Event,
}

impl Status {
    pub const ALL: [Status; 3] = [Status::InProgress, Status::Succeeded, Status::Failed];

    pub fn next(self, event: Event) -> Result<Status, IllegalTransition> {
        match (self, event) {
            (Status::InProgress, Event::Executed) => Ok(Status::Succeeded),
            (Status::InProgress, Event::Refused) => Ok(Status::Failed),
            (Status::Failed, Event::Reopened) => Ok(Status::InProgress),
            (from, event) => Err(IllegalTransition { from, event }),
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Status::InProgress => "in_progress",
            Status::Succeeded => "succeeded",
            Status::Failed => "failed",
        }
    }

    pub fn parse(text: &str) -> Option<Status> {
        Status::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

/// Why an order was not executed (and the one way it was all the same).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    Timeout,
    ServerError,
    RateLimited,
    Unknown,
    BadRequest,
    Rejected,
    Unauthorized,
    AlreadyProcessed,
}

impl Reason {
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Timeout => "BROKER_TIMEOUT",
            Reason::ServerError => "BROKER_5XX",
            Reason::RateLimited => "BROKER_RATE_LIMITED",
            Reason::Unknown => "BROKER_UNKNOWN",
            Reason::BadRequest => "BROKER_BAD_REQUEST",
            Reason::Rejected => "BROKER_REJECTED",
            Reason::Unauthorized => "BROKER_UNAUTHORIZED",
            Reason::AlreadyProcessed => "BROKER_ALREADY_PROCESSED",
        }
    }
}

/// Codes that do not come from a broker.
pub mod code {
    /// The ledger has the key with another order.
    pub const CONFLICT: &str = "IDEMPOTENCY_CONFLICT";
    /// The stored order cannot be read.
    pub const UNREADABLE: &str = "ORDER_UNREADABLE";
    /// It may have been executed, and nobody but a person can tell.
    pub const NEEDS_RECONCILE: &str = "NEEDS_RECONCILE";
    /// It waits until the broker can be asked about it; the token of the claim follows.
    pub const AWAITS_LOOK_UP: &str = "AWAITS_LOOK_UP";
    /// Settled by hand.
    pub const SETTLED_BY_HAND: &str = "SETTLED_BY_HAND";
}

/// The status an order that ended with this reason is answered with from then on.
pub fn http_status(reason: &str) -> u16 {
    match reason {
        "BROKER_TIMEOUT" => 504,
        "BROKER_5XX" => 503,
        "BROKER_RATE_LIMITED" => 429,
        "BROKER_UNKNOWN" | "BROKER_UNAUTHORIZED" => 502,
        "BROKER_BAD_REQUEST" => 400,
        "BROKER_REJECTED" => 409,
        _ => 500,
    }
}

/// What an adapter can do about an order that may have arrived already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idempotency {
    /// The broker executes a key once: sending it again is safe.
    Key,
    /// The broker can be asked about a key, once so much time has passed since it may have been sent.
    LookUp { settling: Duration },
    /// Neither: what may have been sent is never sent again.
    None,
}

/// Why a broker did not execute an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    pub message: String,
    pub reach: Reach,
    pub retry_after: Option<Duration>,
}

/// How sure we are after the broker itself failed. Where a key is executed once it does not matter; elsewhere only 503
/// says that nothing was done: a server that failed half-way may have executed the order.
pub fn reach_of_server_error(status: u16, idempotency: Idempotency) -> Reach {
    if status == 503 || idempotency == Idempotency::Key { Reach::Answered } else { Reach::Unknown }
}

/// How an order may be sent that was claimed just now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Send it. `unresolved`: an earlier attempt may have arrived.
    Send { unresolved: bool },
    /// Ask the broker what became of it.
    LookUp,
    /// Wait so long before asking.
    Wait(Duration),
    /// A person must look.
    Park,
}

/// What is known of a claimed order.
#[derive(Clone, Copy, Debug)]
pub struct Claimed<'a> {
    pub maybe_sent: bool,
    /// So many workers died over it that it is not tried again.
    pub poison: bool,
    pub lease_token: i64,
    pub last_code: Option<&'a str>,
}

/// The code of an order that waits for its look-up: it holds for the very next claim only, since whoever claims after a
/// crash must wait anew.
pub fn awaits_look_up(lease_token: i64) -> String {
    format!("{}:{lease_token}", code::AWAITS_LOOK_UP)
}

pub fn way(claimed: Claimed, idempotency: Idempotency) -> Way {
    match idempotency {
        _ if !claimed.maybe_sent => Way::Send { unresolved: false },
        _ if claimed.poison => Way::Park,
        Idempotency::None => Way::Park,
        Idempotency::Key => Way::Send { unresolved: true },
        Idempotency::LookUp { settling } => {
            let waited = awaits_look_up(claimed.lease_token - 1);
            if claimed.last_code == Some(waited.as_str()) { Way::LookUp } else { Way::Wait(settling) }
        }
    }
}

/// What follows from a refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    Settle(Outcome),
    Park,
}

/// How long an order waits when our credentials are refused.
pub const UNAUTHORIZED_DELAY: Duration = Duration::from_secs(30);

/// `resolved`: the broker has just said that it knows nothing of an earlier attempt.
pub fn after_refusal(refusal: Refusal, unresolved: bool, resolved: bool) -> Next {
    let Refusal { reason, message, reach, retry_after } = refusal;
    let mut fault = Fault::new(reason.as_str(), message, reach);
    fault.resolves = resolved;
    match reason {
        Reason::Unauthorized => Next::Settle(Outcome::Defer { delay: UNAUTHORIZED_DELAY, code: fault.code }),
        // Who refuses now may have executed it before: only what was never in doubt ends by a refusal.
        Reason::BadRequest | Reason::Rejected if unresolved => Next::Park,
        Reason::BadRequest | Reason::Rejected => Next::Settle(Outcome::Dead(fault)),
        _ => Next::Settle(Outcome::Retry { fault, retry_after }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOK_UP: Idempotency = Idempotency::LookUp { settling: Duration::from_secs(7) };

    #[test]
    fn entries_move_only_along_the_diagram() {
        use Event::*;
        use Status::*;
        let mut legal = Vec::new();
        for from in Status::ALL {
            for event in [Executed, Refused, Reopened] {
                legal.extend(from.next(event).ok().map(|to| (from, event, to)));
            }
        }
        let diagram =
            [(InProgress, Executed, Succeeded), (InProgress, Refused, Failed), (Failed, Reopened, InProgress)];
        assert_eq!(legal, diagram);
    }

    fn claimed(maybe_sent: bool, lease_token: i64, last_code: Option<&str>) -> Claimed<'_> {
        Claimed { maybe_sent, poison: false, lease_token, last_code }
    }

    #[test]
    fn what_may_have_gone_out_is_never_sent_blindly() {
        for idempotency in [Idempotency::Key, LOOK_UP, Idempotency::None] {
            assert_eq!(way(claimed(false, 1, None), idempotency), Way::Send { unresolved: false });
        }
        assert_eq!(way(claimed(true, 2, None), Idempotency::Key), Way::Send { unresolved: true });
        assert_eq!(way(claimed(true, 2, None), Idempotency::None), Way::Park);
        assert_eq!(way(claimed(true, 2, Some("BROKER_TIMEOUT")), LOOK_UP), Way::Wait(Duration::from_secs(7)));
        let waits = awaits_look_up(2);
        assert_eq!(way(claimed(true, 3, Some(&waits)), LOOK_UP), Way::LookUp);
        assert_eq!(way(claimed(true, 4, Some(&waits)), LOOK_UP), Way::Wait(Duration::from_secs(7)), "a crash between");
        for idempotency in [Idempotency::Key, LOOK_UP, Idempotency::None] {
            let poison = Claimed { poison: true, ..claimed(true, 3, Some(&waits)) };
            assert_eq!(way(poison, idempotency), Way::Park);
        }
    }

    fn refusal(reason: Reason, reach: Reach) -> Refusal {
        Refusal { reason, message: "no".to_owned(), reach, retry_after: None }
    }

    #[test]
    fn a_refusal_ends_only_what_was_never_in_doubt() {
        for reason in [Reason::BadRequest, Reason::Rejected] {
            let next = |unresolved| after_refusal(refusal(reason, Reach::Answered), unresolved, false);
            assert!(matches!(next(false), Next::Settle(Outcome::Dead(fault)) if fault.code == reason.as_str()));
            assert_eq!(next(true), Next::Park);
        }
        for reason in [Reason::Timeout, Reason::ServerError, Reason::RateLimited, Reason::Unknown] {
            let next = after_refusal(refusal(reason, Reach::Answered), true, false);
            assert!(matches!(next, Next::Settle(Outcome::Retry { .. })), "{reason:?}");
        }
        let ours = after_refusal(refusal(Reason::Unauthorized, Reach::Answered), false, false);
        assert!(matches!(ours, Next::Settle(Outcome::Defer { .. })), "a rotated key is no attempt");
    }

    #[test]
    fn a_server_that_failed_half_way_leaves_a_doubt() {
        assert_eq!(reach_of_server_error(500, Idempotency::Key), Reach::Answered);
        for idempotency in [LOOK_UP, Idempotency::None] {
            assert_eq!(reach_of_server_error(500, idempotency), Reach::Unknown);
            assert_eq!(reach_of_server_error(502, idempotency), Reach::Unknown);
            assert_eq!(reach_of_server_error(503, idempotency), Reach::Answered);
        }
    }

    #[test]
    fn reasons_have_their_status() {
        let table = [
            ("BROKER_TIMEOUT", 504),
            ("BROKER_5XX", 503),
            ("BROKER_RATE_LIMITED", 429),
            ("BROKER_UNKNOWN", 502),
            ("INTERNAL_ERROR", 500),
            ("BROKER_BAD_REQUEST", 400),
            ("BROKER_REJECTED", 409),
            ("POISON", 500),
        ];
        for (reason, status) in table {
            assert_eq!(http_status(reason), status, "{reason}");
        }
    }
}
