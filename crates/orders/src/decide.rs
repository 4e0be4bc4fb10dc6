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
    /// The adapter failed, and did not say why.
    Internal,
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
            Reason::Internal => "INTERNAL_ERROR",
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
    /// As sure as can be: `Unknown` wherever it may have been executed, even where sending it again does no harm.
    pub reach: Reach,
    pub retry_after: Option<Duration>,
}

/// How sure we are after the broker itself failed: one that failed half-way may have executed the order. Only a 503 that
/// says when to come back says that nothing was done.
pub fn reach_of_server_error(status: u16, says_when: bool) -> Reach {
    if status == 503 && says_when { Reach::Answered } else { Reach::Unknown }
}

/// What the error of an attempt begins with that surely did nothing.
const NOTHING_DONE: &str = "nothing was done: ";

/// An attempt that is over, as it is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Past {
    pub kind: String,
    pub code: Option<String>,
    pub error: Option<String>,
}

/// Whether one of the attempts so far, the oldest first, may have executed the order, though the message is not marked:
/// where a key is executed once, a broker that failed is simply asked again, and a budget may end that. But a refusal that
/// comes afterwards may only mean that it has the order already. A person's word ends the doubt.
pub fn left_a_doubt(attempts: &[Past]) -> bool {
    attempts.iter().fold(false, |doubt, past| {
        let (code, error) = (past.code.as_deref().unwrap_or_default(), past.error.as_deref().unwrap_or_default());
        match code {
            _ if past.kind == "dead" && error == SETTLED => false,
            "BROKER_TIMEOUT" | "BROKER_5XX" | "BROKER_UNKNOWN" | "INTERNAL_ERROR" => {
                doubt || !error.starts_with(NOTHING_DONE)
            }
            _ => doubt,
        }
    })
}

/// The error of a message that was settled by hand.
pub const SETTLED: &str = "settled by hand";

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
pub struct Claimed {
    pub maybe_sent: bool,
    /// So many workers died over it that it is not tried again.
    pub poison: bool,
    /// It has waited for its look-up, and since then nobody held it who may have sent it. Whoever claims after a crash
    /// waits anew; one who gave it back unsent costs nothing.
    pub has_waited: bool,
}

/// The code of an order that waits for its look-up: with the token of the claim that put it there.
pub fn awaits_look_up(lease_token: i64) -> String {
    format!("{}:{lease_token}", code::AWAITS_LOOK_UP)
}

/// The claim that put the order to wait for its look-up, if that is what it did last.
pub fn waits_since(last_code: Option<&str>) -> Option<i64> {
    last_code?.strip_prefix(code::AWAITS_LOOK_UP)?.strip_prefix(':')?.parse().ok()
}

pub fn way(claimed: Claimed, idempotency: Idempotency) -> Way {
    match idempotency {
        _ if !claimed.maybe_sent => Way::Send { unresolved: false },
        _ if claimed.poison => Way::Park,
        Idempotency::None => Way::Park,
        Idempotency::Key => Way::Send { unresolved: true },
        Idempotency::LookUp { .. } if claimed.has_waited => Way::LookUp,
        Idempotency::LookUp { settling } => Way::Wait(settling),
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

/// What is known of an order when it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// An earlier attempt may have arrived.
    pub unresolved: bool,
    /// The broker has just said that it knows nothing of an earlier attempt.
    pub resolved: bool,
    pub idempotency: Idempotency,
}

pub fn after_refusal(refusal: Refusal, sent: Sent) -> Next {
    let Refusal { reason, message, reach, retry_after } = refusal;
    let nothing_done = match reason {
        Reason::ServerError | Reason::RateLimited => reach != Reach::Unknown,
        _ => reach == Reach::NeverSent,
    };
    // Where a key is executed once, it is sent again without harm, and the budget may end it.
    let kept = match (reason, sent.idempotency) {
        (Reason::ServerError | Reason::Internal, Idempotency::Key) => Reach::Answered,
        _ => reach,
    };
    let message = if nothing_done { format!("{NOTHING_DONE}{message}") } else { message };
    let mut fault = Fault::new(reason.as_str(), message, kept);
    fault.resolves = sent.resolved;
    match reason {
        Reason::Unauthorized => {
            Next::Settle(Outcome::Defer { delay: retry_after.unwrap_or(UNAUTHORIZED_DELAY), code: fault.code })
        }
        // Who refuses now may have executed it before: only what was never in doubt ends by a refusal.
        Reason::BadRequest | Reason::Rejected if sent.unresolved => Next::Park,
        Reason::BadRequest | Reason::Rejected => Next::Settle(Outcome::Dead(fault)),
        _ => Next::Settle(Outcome::Retry { fault, retry_after }),
    }
}

/// Is it tried again though its attempts are used up? No budget ends what may have been executed; but a person should know.
pub fn outlives_its_budget(outcome: &Outcome, attempts: u32, max_attempts: u32) -> bool {
    let in_doubt = matches!(outcome, Outcome::Retry { fault, .. } if fault.reach == Reach::Unknown);
    in_doubt && attempts.saturating_add(1) >= max_attempts
}

/// The broker answered, and what it says makes no sense: whatever it did is done. It is asked again within its budget, as
/// an order in doubt is, and then a person must look: the next answer would be no better.
pub fn after_nonsense(why: &str, attempts: u32, max_attempts: u32) -> Next {
    if attempts.saturating_add(1) >= max_attempts {
        return Next::Park;
    }
    Next::Settle(Outcome::retry(Reason::Unknown.as_str(), why, Reach::Unknown))
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
        assert_eq!(Status::ALL.map(Status::as_str), ["in_progress", "succeeded", "failed"]);
        assert_eq!(Status::ALL.map(|status| Status::parse(status.as_str())), Status::ALL.map(Some));
        assert_eq!(Status::parse("sent"), None);
    }

    fn claimed(maybe_sent: bool, has_waited: bool) -> Claimed {
        Claimed { maybe_sent, poison: false, has_waited }
    }

    #[test]
    fn what_may_have_gone_out_is_never_sent_blindly() {
        for idempotency in [Idempotency::Key, LOOK_UP, Idempotency::None] {
            assert_eq!(way(claimed(false, false), idempotency), Way::Send { unresolved: false });
        }
        assert_eq!(way(claimed(true, false), Idempotency::Key), Way::Send { unresolved: true });
        assert_eq!(way(claimed(true, false), Idempotency::None), Way::Park);
        assert_eq!(way(claimed(true, false), LOOK_UP), Way::Wait(Duration::from_secs(7)));
        assert_eq!(way(claimed(true, true), LOOK_UP), Way::LookUp);
        for idempotency in [Idempotency::Key, LOOK_UP, Idempotency::None] {
            let poison = Claimed { poison: true, ..claimed(true, true) };
            assert_eq!(way(poison, idempotency), Way::Park);
        }
        assert_eq!(waits_since(Some(&awaits_look_up(7))), Some(7));
        assert_eq!([waits_since(None), waits_since(Some("BROKER_TIMEOUT"))], [None, None]);
    }

    fn refusal(reason: Reason, reach: Reach) -> Refusal {
        Refusal { reason, message: "no".to_owned(), reach, retry_after: None }
    }

    fn sent(unresolved: bool, idempotency: Idempotency) -> Sent {
        Sent { unresolved, resolved: false, idempotency }
    }

    #[test]
    fn a_refusal_ends_only_what_was_never_in_doubt() {
        for reason in [Reason::BadRequest, Reason::Rejected] {
            let next = |unresolved| after_refusal(refusal(reason, Reach::Answered), sent(unresolved, LOOK_UP));
            assert!(matches!(next(false), Next::Settle(Outcome::Dead(fault)) if fault.code == reason.as_str()));
            assert_eq!(next(true), Next::Park);
        }
        for reason in [Reason::Timeout, Reason::ServerError, Reason::RateLimited, Reason::Unknown, Reason::Internal] {
            let next = after_refusal(refusal(reason, Reach::Answered), sent(true, LOOK_UP));
            assert!(matches!(next, Next::Settle(Outcome::Retry { .. })), "{reason:?}");
        }
        let ours = after_refusal(refusal(Reason::Unauthorized, Reach::Answered), sent(false, LOOK_UP));
        assert!(matches!(ours, Next::Settle(Outcome::Defer { .. })), "a rotated key is no attempt");
    }

    #[test]
    fn what_no_budget_ends_is_told_once_its_attempts_are_used_up() {
        let timeout = Outcome::retry("BROKER_TIMEOUT", "no answer", Reach::Unknown);
        assert_eq!([1, 2, 9].map(|attempts| outlives_its_budget(&timeout, attempts, 3)), [false, true, true]);
        let refused = Outcome::retry("BROKER_5XX", "no", Reach::Answered);
        assert!(!outlives_its_budget(&refused, 2, 3), "its budget ends it");
    }

    #[test]
    fn a_server_that_failed_half_way_leaves_a_doubt() {
        assert_eq!(reach_of_server_error(500, true), Reach::Unknown);
        assert_eq!(
            reach_of_server_error(503, false),
            Reach::Unknown,
            "who answers 503 in a hurry may have executed it"
        );
        assert_eq!(reach_of_server_error(503, true), Reach::Answered);
        let past = |reason, reach, idempotency| match after_refusal(refusal(reason, reach), sent(false, idempotency)) {
            Next::Settle(Outcome::Retry { fault, .. }) => {
                let (code, error) = (Some(fault.code.to_string()), Some(fault.error));
                (fault.reach, Past { kind: "retry".to_owned(), code, error })
            }
            other => panic!("{other:?}"),
        };
        let (reach, failed) = past(Reason::ServerError, Reach::Unknown, Idempotency::Key);
        assert_eq!(reach, Reach::Answered, "its budget may end it");
        let (_, refused) = past(Reason::ServerError, Reach::Answered, Idempotency::Key);
        let (_, away) = past(Reason::Unknown, Reach::NeverSent, Idempotency::Key);
        let (_, busy) = past(Reason::RateLimited, Reach::Answered, Idempotency::Key);
        assert!(
            left_a_doubt(&[failed.clone(), refused.clone(), away.clone(), busy.clone()]),
            "but no refusal is believed"
        );
        assert!(!left_a_doubt(&[refused, away.clone(), busy]));
        let by_hand = Past { kind: "dead".to_owned(), code: failed.code.clone(), error: Some(SETTLED.to_owned()) };
        assert!(!left_a_doubt(&[failed.clone(), by_hand.clone(), away]), "a person knew");
        assert!(left_a_doubt(&[by_hand, failed.clone()]));
        let given_up = Past { kind: "dead".to_owned(), ..failed.clone() };
        assert!(left_a_doubt(&[failed.clone(), given_up]), "a budget knows nothing");
        let retried = Past { error: Some(SETTLED.to_owned()), ..failed.clone() };
        assert!(left_a_doubt(&[failed, retried]), "nor do words alone");
        for idempotency in [LOOK_UP, Idempotency::None] {
            assert_eq!(past(Reason::ServerError, Reach::Unknown, idempotency).0, Reach::Unknown);
        }
    }

    #[test]
    fn nonsense_is_asked_about_again_within_the_budget_and_then_a_person_is() {
        let doubt = |next| matches!(next, Next::Settle(Outcome::Retry { fault, .. }) if fault.reach == Reach::Unknown);
        assert!(doubt(after_nonsense("?", 0, 3)) && doubt(after_nonsense("?", 1, 3)));
        assert_eq!(after_nonsense("?", 2, 3), Next::Park);
        assert_eq!(after_nonsense("?", 0, 1), Next::Park);
    }

    #[test]
    fn reasons_have_their_status() {
        let table = [
            (Reason::Timeout, "BROKER_TIMEOUT", 504),
            (Reason::ServerError, "BROKER_5XX", 503),
            (Reason::RateLimited, "BROKER_RATE_LIMITED", 429),
            (Reason::Unknown, "BROKER_UNKNOWN", 502),
            (Reason::Unauthorized, "BROKER_UNAUTHORIZED", 502),
            (Reason::Internal, "INTERNAL_ERROR", 500),
            (Reason::BadRequest, "BROKER_BAD_REQUEST", 400),
            (Reason::Rejected, "BROKER_REJECTED", 409),
            (Reason::AlreadyProcessed, "BROKER_ALREADY_PROCESSED", 500),
        ];
        for (reason, code, status) in table {
            assert_eq!((reason.as_str(), http_status(code)), (code, status), "{reason:?}");
        }
        assert_eq!(http_status("POISON"), 500);
    }
}
