//! Pure decisions about delivery: no I/O, no clock, no randomness. Time and chance are arguments.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::lease::ORDINARY_SUSPICION;
use crate::message::Message;
use crate::outcome::{Certainty, Fault, Outcome, Reach, Verdict, code};
use crate::time::Timestamp;

/// The budgets of a lane.
#[derive(Clone, Debug, PartialEq)]
pub struct Budgets {
    /// Outcomes a message may have in all.
    pub max_attempts: u32,
    /// Takeovers after which a message is buried as `POISON`.
    pub max_crashes: u32,
    pub backoff: Backoff,
    /// The longest `Retry-After` that is honoured.
    pub retry_after_cap: Duration,
    /// What may have been sent never ends by a budget: it is tried until it is resolved.
    pub keep_unresolved: bool,
}

impl Default for Budgets {
    fn default() -> Self {
        Budgets {
            max_attempts: 8,
            max_crashes: 5,
            backoff: Backoff::default(),
            retry_after_cap: Duration::from_secs(3600),
            keep_unresolved: false,
        }
    }
}

/// What becomes of a courier's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    Settle(Verdict),
    /// Give back without counting anything.
    Defer {
        delay: Duration,
        code: String,
    },
}

/// What was known of a message before the outcome at hand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Before {
    pub attempts: u32,
    /// An earlier attempt may have arrived.
    pub maybe_sent: bool,
    /// It is `maybe_sent` only because this very attempt said so before its first byte.
    pub begun_now: bool,
}

/// Turns an outcome into what is recorded.
pub fn after_delivery(outcome: Outcome, before: Before, budgets: &Budgets, chance: f64) -> Decision {
    let certainty = |fault: &Fault| match fault.reach {
        Reach::Unknown => Certainty::MaybeSent,
        _ if before.begun_now || fault.resolves => Certainty::Resolved,
        _ => Certainty::Unchanged,
    };
    Decision::Settle(match outcome {
        Outcome::Sent { result_ref } => Verdict::Sent { result_ref, dedup_hit: false },
        Outcome::Defer { delay, code } => return Decision::Defer { delay, code: code.into_owned() },
        Outcome::Dead(fault) => {
            let certainty = certainty(&fault);
            Verdict::Dead { code: fault.code.into_owned(), error: fault.error, certainty, counted: true }
        }
        Outcome::Retry { fault, retry_after } => {
            let certainty = certainty(&fault);
            let (code, error) = (fault.code.into_owned(), fault.error);
            let counted = before.attempts.saturating_add(1);
            let unresolved = match certainty {
                Certainty::Unchanged => before.maybe_sent,
                Certainty::MaybeSent => true,
                Certainty::Resolved => false,
            };
            if counted >= budgets.max_attempts && !(unresolved && budgets.keep_unresolved) {
                Verdict::Dead { code, error, certainty, counted: true }
            } else {
                let wanted = retry_after.unwrap_or_default().min(budgets.retry_after_cap);
                let delay = budgets.backoff.delay(counted, chance).max(wanted);
                Verdict::Retry { delay, code, error, certainty }
            }
        }
    })
}

/// Its time has passed, and nothing was sent.
pub fn expiry() -> Verdict {
    let error = "deliver_before passed before it could be delivered".to_owned();
    Verdict::Dead { code: code::EXPIRED.to_owned(), error, certainty: Certainty::Unchanged, counted: false }
}

/// Why a freshly claimed message must not be delivered at all, if so. What may have been sent on a lane that keeps such
/// messages is left to its courier.
pub fn burial(message: &Message, budgets: &Budgets, now: Timestamp) -> Option<Verdict> {
    let kept = budgets.keep_unresolved && message.maybe_sent;
    let (code, error) = if message.crashes >= budgets.max_crashes && !kept {
        let crashes = message.crashes;
        (code::POISON, format!("{crashes} workers died while holding it; requeue it once its cause is mended"))
    } else if !message.maybe_sent && message.deliver_before.is_some_and(|limit| limit < now) {
        return Some(expiry());
    } else if !message.payload_is_intact() && !kept {
        (code::PAYLOAD_CORRUPT, "the stored payload does not match its digest; nothing was sent".to_owned())
    } else {
        return None;
    };
    Some(Verdict::Dead { code: code.to_owned(), error, certainty: Certainty::Unchanged, counted: false })
}

/// How many suspects of this suspicion are claimed together; `None` for what is claimed in the ordinary way.
/// The groups shrink, so that a message that kills its worker is found without its neighbours.
pub fn suspect_group(suspicion: u32, max_crashes: u32) -> Option<usize> {
    if suspicion <= ORDINARY_SUSPICION && suspicion < max_crashes {
        None
    } else if suspicion >= max_crashes {
        Some(64) // buried, not delivered: no danger to the others
    } else if suspicion + 1 >= max_crashes {
        Some(1)
    } else if suspicion == ORDINARY_SUSPICION + 1 {
        Some(64)
    } else {
        Some(8)
    }
}

/// What an HTTP status means for a plain delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HttpClass {
    Sent,
    Retry,
    Dead,
}

/// What statuses mean where it differs from [`http_class`]. One status beats its hundred.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpClasses {
    statuses: BTreeMap<u16, HttpClass>,
    hundreds: BTreeMap<u16, HttpClass>,
}

impl HttpClasses {
    /// From words: `404` or `5xx`, and `sent`, `retry` or `dead`.
    pub fn new<'a>(words: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let mut classes = HttpClasses::default();
        for (status, class) in words {
            let class = match class {
                "sent" => HttpClass::Sent,
                "retry" => HttpClass::Retry,
                "dead" => HttpClass::Dead,
                _ => return Err(format!("`{class}` is none of sent, retry, dead")),
            };
            // 1xx is no answer yet.
            let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
            let number = |text: &str| text.parse::<u16>().ok().filter(|_| digits(text));
            let hundred = status.strip_suffix("xx").and_then(number).filter(|n| (2..=5).contains(n));
            match (hundred, number(status).filter(|n| (200..=599).contains(n))) {
                (Some(hundred), _) => classes.hundreds.insert(hundred, class),
                (None, Some(status)) => classes.statuses.insert(status, class),
                _ => return Err(format!("`{status}` is no status; write one from 200 to 599, or 2xx to 5xx")),
            };
        }
        if (200..=599).all(|status| classes.of(status) != HttpClass::Sent) {
            return Err("with these nothing would ever count as sent".to_owned());
        }
        Ok(classes)
    }

    pub fn of(&self, status: u16) -> HttpClass {
        let own = self.statuses.get(&status).or_else(|| self.hundreds.get(&(status / 100)));
        own.copied().unwrap_or_else(|| http_class(status))
    }

    /// As they were written.
    pub fn words(&self) -> BTreeMap<String, &'static str> {
        let word = |class: &HttpClass| match class {
            HttpClass::Sent => "sent",
            HttpClass::Retry => "retry",
            HttpClass::Dead => "dead",
        };
        let hundreds = self.hundreds.iter().map(|(hundred, class)| (format!("{hundred}xx"), word(class)));
        self.statuses.iter().map(|(status, class)| (status.to_string(), word(class))).chain(hundreds).collect()
    }
}

/// 2xx sent; 408, 425, 429 and 5xx retry; redirects and every other 4xx are dead.
pub fn http_class(status: u16) -> HttpClass {
    match status {
        200..=299 => HttpClass::Sent,
        408 | 425 | 429 | 500..=599 => HttpClass::Retry,
        _ => HttpClass::Dead,
    }
}

/// `Retry-After` counts only where the destination says "not now".
pub fn honours_retry_after(status: u16) -> bool {
    matches!(status, 429 | 503)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retry(reach: Reach, retry_after: Option<Duration>) -> Outcome {
        Outcome::Retry { fault: Fault::new("HTTP_503", "busy", reach), retry_after }
    }

    fn tried(attempts: u32) -> Before {
        Before { attempts, ..Before::default() }
    }

    #[test]
    fn the_last_attempt_dies_with_the_last_error() {
        let budgets = Budgets { max_attempts: 3, ..Budgets::default() };
        for attempts in 0..2 {
            let decision = after_delivery(retry(Reach::Answered, None), tried(attempts), &budgets, 0.5);
            assert!(matches!(decision, Decision::Settle(Verdict::Retry { .. })), "attempt {attempts}");
        }
        let Decision::Settle(Verdict::Dead { code, error, .. }) =
            after_delivery(retry(Reach::Answered, None), tried(2), &budgets, 0.5)
        else {
            panic!("the third outcome of three must end it")
        };
        assert_eq!((code.as_str(), error.as_str()), ("HTTP_503", "busy"));
    }

    #[test]
    fn retry_after_is_honoured_when_longer_and_capped() {
        let delay = |after: u64| match after_delivery(
            retry(Reach::Answered, Some(Duration::from_secs(after))),
            tried(0),
            &Budgets::default(),
            0.5,
        ) {
            Decision::Settle(Verdict::Retry { delay, .. }) => delay.as_secs(),
            other => panic!("{other:?}"),
        };
        assert_eq!(delay(5), 120, "backoff is longer");
        assert_eq!(delay(600), 600);
        assert_eq!(delay(u64::MAX), 3600, "a year-9999 Retry-After is capped");
    }

    #[test]
    fn an_unanswered_attempt_is_remembered() {
        let certainty = |begun_now, reach| {
            let before = Before { begun_now, ..Before::default() };
            match after_delivery(retry(reach, None), before, &Budgets::default(), 0.5) {
                Decision::Settle(Verdict::Retry { certainty, .. }) => certainty,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(certainty(false, Reach::Unknown), Certainty::MaybeSent);
        assert_eq!(certainty(false, Reach::NeverSent), Certainty::Unchanged);
        assert_eq!(certainty(false, Reach::Answered), Certainty::Unchanged);
        assert_eq!(certainty(true, Reach::Unknown), Certainty::MaybeSent);
        assert_eq!(certainty(true, Reach::NeverSent), Certainty::Resolved, "it said that it would send, and did not");
        assert_eq!(certainty(true, Reach::Answered), Certainty::Resolved);
    }

    #[test]
    fn what_may_have_been_sent_does_not_end_by_a_budget() {
        let budgets = Budgets { max_attempts: 2, keep_unresolved: true, ..Budgets::default() };
        let ends = |budgets: &Budgets, maybe_sent, reach, resolves| {
            let mut outcome = retry(reach, None);
            if let Outcome::Retry { fault, .. } = &mut outcome {
                fault.resolves = resolves;
            }
            let before = Before { attempts: 9, maybe_sent, begun_now: false };
            match after_delivery(outcome, before, budgets, 0.5) {
                Decision::Settle(verdict) => verdict.ends(),
                Decision::Defer { .. } => panic!("deferred"),
            }
        };
        assert!(!ends(&budgets, true, Reach::Answered, false), "an earlier attempt is in doubt");
        assert!(!ends(&budgets, false, Reach::Unknown, false), "this one is");
        assert!(ends(&budgets, false, Reach::Answered, false));
        assert!(ends(&budgets, true, Reach::Answered, true), "the doubt is over");
        let others = Budgets { keep_unresolved: false, ..budgets };
        assert!(ends(&others, true, Reach::Unknown, false));
    }

    fn message() -> Message {
        Message {
            id: 1,
            lane: "l".to_owned(),
            shard_id: 0,
            due_at: Timestamp::default(),
            lease_until: Timestamp::default(),
            lease_token: 1,
            attempts: 0,
            crashes: 0,
            maybe_sent: false,
            target: None,
            active_key: None,
            payload: "p".into(),
            content_type: None,
            headers: vec![],
            payload_sha: None,
            correlation_id: None,
            created_at: Timestamp::default(),
            deliver_before: None,
            taken_over_from: None,
        }
    }

    /// The code it is buried with, at a time.
    fn buried(message: &Message, budgets: &Budgets, now: i64) -> Option<String> {
        burial(message, budgets, Timestamp::from_micros(now)).map(|verdict| match verdict {
            Verdict::Dead { code, counted: false, .. } => code,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn what_expired_is_buried_unless_it_may_have_been_sent() {
        let limited = Message { deliver_before: Some(Timestamp::from_micros(10)), ..message() };
        let budgets = Budgets::default();
        assert_eq!([9, 10].map(|now| buried(&limited, &budgets, now)), [None, None], "to the end of its time");
        assert_eq!(buried(&limited, &budgets, 11).as_deref(), Some(code::EXPIRED));
        assert_eq!(buried(&Message { maybe_sent: true, ..limited }, &budgets, 11), None);
        assert_eq!(buried(&message(), &budgets, 11), None);
    }

    #[test]
    fn what_may_have_been_sent_is_not_buried() {
        let budgets = Budgets { keep_unresolved: true, ..Budgets::default() };
        let code = |budgets: &Budgets, maybe_sent, crashes, payload_sha| {
            buried(&Message { maybe_sent, crashes, payload_sha, ..message() }, budgets, 0)
        };
        let (poison, corrupt) = (Some(code::POISON.to_owned()), Some(code::PAYLOAD_CORRUPT.to_owned()));
        assert_eq!(code(&budgets, false, 5, None), poison);
        assert_eq!(code(&budgets, true, 5, None), None);
        assert_eq!(code(&budgets, false, 0, Some([0; 32])), corrupt);
        assert_eq!(code(&budgets, true, 0, Some([0; 32])), None);
        let others = Budgets::default();
        assert_eq!(code(&others, true, 5, None), poison);
        assert_eq!(code(&others, true, 0, Some([0; 32])), corrupt);
    }

    #[test]
    fn suspects_shrink_and_are_buried_at_the_limit() {
        let groups: Vec<_> = (0..7).map(|s| suspect_group(s, 5)).collect();
        assert_eq!(groups, [None, None, Some(64), Some(8), Some(1), Some(64), Some(64)]);
        assert_eq!(suspect_group(1, 1), Some(64), "with a limit of one the first takeover buries");
        assert_eq!(suspect_group(2, 3), Some(1));
    }

    #[test]
    fn http_statuses() {
        use HttpClass::*;
        for (status, class) in
            [(200, Sent), (204, Sent), (299, Sent), (301, Dead), (304, Dead), (400, Dead), (404, Dead), (408, Retry)]
                .into_iter()
                .chain([(410, Dead), (425, Retry), (429, Retry), (500, Retry), (503, Retry), (599, Retry), (100, Dead)])
        {
            assert_eq!(http_class(status), class, "{status}");
            assert_eq!(HttpClasses::default().of(status), class, "{status}");
        }
    }

    #[test]
    fn only_who_says_not_now_says_when() {
        assert_eq!([200, 408, 429, 500, 503, 504].map(honours_retry_after), [false, false, true, false, true, false]);
    }

    #[test]
    fn a_lane_may_see_statuses_otherwise() {
        use HttpClass::*;
        let classes = HttpClasses::new([("404", "retry"), ("5xx", "dead"), ("503", "retry"), ("409", "sent")]).unwrap();
        let seen = [404, 500, 503, 409, 410, 200, 429].map(|status| classes.of(status));
        assert_eq!(seen, [Retry, Dead, Retry, Sent, Dead, Sent, Retry]);
        let words = [("404", "retry"), ("409", "sent"), ("503", "retry"), ("5xx", "dead")];
        assert_eq!(classes.words(), words.map(|(status, class)| (status.to_owned(), class)).into());
        for (status, class) in [
            ("404", "again"),
            ("404", ""),
            ("99", "dead"),
            ("1xx", "dead"),
            ("600", "dead"),
            ("6xx", "dead"),
            ("4x", "dead"),
            ("+404", "dead"),
            ("xx", "dead"),
            ("", "dead"),
            ("2xx", "dead"),
        ] {
            assert!(HttpClasses::new([(status, class)]).is_err(), "{status} = {class}");
        }
        assert!(HttpClasses::new([("2xx", "retry"), ("204", "sent")]).is_ok());
    }
}
