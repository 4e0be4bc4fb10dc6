//! The saga's decisions, pure: which state follows which, when to retry, which events a subscription wants, how many
//! deliveries a gate lets through.

use std::time::Duration;

use postrider::Timestamp;

/// No wait is longer: what a receiver asks for beyond this is cut.
pub const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

/// Where a delivery stands.
///
/// ```text
/// Pending ──job created──► InProgress ──succeeded──► Completed
///    │                       │  ▲
///    │                failed │  │ job created, once due
///    │                       ▼  │
///    │                   PendingRetry       InProgress ──failed, none left──► DeadLettered
///    └──given up──► DeadLettered ◄──given up──┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    Pending,
    InProgress,
    PendingRetry,
    Completed,
    DeadLettered,
}

/// What happens to a saga.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    JobCreated,
    Succeeded,
    Failed {
        may_retry: bool,
    },
    /// Its subscription is disabled or gone, or allows no further attempt.
    GivenUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IllegalTransition {
    pub from: Status,
    pub event: Event,
}

impl Status {
    pub const ALL: [Status; 5] =
        [Status::Pending, Status::InProgress, Status::PendingRetry, Status::Completed, Status::DeadLettered];

    pub fn next(self, event: Event) -> Result<Status, IllegalTransition> {
        use Event::{Failed, GivenUp, JobCreated, Succeeded};
        use Status::{Completed, DeadLettered, InProgress, Pending, PendingRetry};
        match (self, event) {
            (Pending | PendingRetry, JobCreated) => Ok(InProgress),
            (InProgress, Succeeded) => Ok(Completed),
            (InProgress, Failed { may_retry: true }) => Ok(PendingRetry),
            (InProgress, Failed { may_retry: false }) => Ok(DeadLettered),
            (Pending | PendingRetry, GivenUp) => Ok(DeadLettered),
            (from, event) => Err(IllegalTransition { from, event }),
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "Pending",
            Status::InProgress => "InProgress",
            Status::PendingRetry => "PendingRetry",
            Status::Completed => "Completed",
            Status::DeadLettered => "DeadLettered",
        }
    }

    pub fn parse(text: &str) -> Option<Status> {
        Status::ALL.into_iter().find(|status| status.as_str() == text)
    }

    pub fn has_ended(self) -> bool {
        matches!(self, Status::Completed | Status::DeadLettered)
    }
}

/// How a subscription is retried.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryRules {
    /// Attempts in all.
    pub limit: u32,
    /// Waits after the first, second, … failure; the last one goes on. Without: doubling.
    pub schedule: Vec<Duration>,
    pub base: Duration,
    /// Spreads a wait by this part, up and down.
    pub jitter: f64,
}

/// What becomes of a saga after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Retry { delay: Duration },
    DeadLetter,
}

/// Codes after which no further attempt makes sense.
pub fn is_final(code: &str) -> bool {
    matches!(code, "POISON" | "EXPIRED" | "SUBSCRIPTION_DISABLED" | "EVENT_GONE" | "HTTP_410")
}

/// `attempt` counts this failure too; `chance` is from 0 to 1.
pub fn after_failure(
    rules: &RetryRules,
    attempt: u32,
    code: &str,
    retry_after: Option<Duration>,
    chance: f64,
) -> Verdict {
    if attempt >= rules.limit || is_final(code) {
        return Verdict::DeadLetter;
    }
    let wait = backoff(rules, attempt, chance);
    Verdict::Retry { delay: retry_after.map_or(wait, |asked| wait.max(asked)).min(LONGEST_WAIT) }
}

/// `base * 2^(attempt - 1)`, or what the schedule says.
pub fn backoff(rules: &RetryRules, attempt: u32, chance: f64) -> Duration {
    let nth = attempt.saturating_sub(1);
    let wait = match rules.schedule.last() {
        Some(last) => *rules.schedule.get(nth as usize).unwrap_or(last),
        None => rules.base.checked_mul(1 << nth.min(30)).unwrap_or(LONGEST_WAIT),
    };
    wait.min(LONGEST_WAIT).mul_f64(1.0 + rules.jitter * (2.0 * chance - 1.0))
}

/// Does the pattern take this type? `*` all, `order.*` all below `order.`, else the very type.
pub fn matches(pattern: &str, event_type: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some("") => true,
        Some(prefix) => prefix.ends_with('.') && event_type.len() > prefix.len() && event_type.starts_with(prefix),
        None => pattern == event_type,
    }
}

/// A type: words of letters, digits, `_` and `-`, joined by dots.
pub fn is_event_type(text: &str) -> bool {
    let word = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
    text.len() <= 255 && text.split('.').all(word)
}

/// A pattern: `*`, a type, or a type followed by `.*`.
pub fn is_pattern(text: &str) -> bool {
    text == "*" || is_event_type(text.strip_suffix(".*").unwrap_or(text))
}

/// Failures in a row after which a receiver is left alone for a while, and for how long: longer each time, so that a dead
/// one costs little and a recovered one is found soon.
pub fn rest_after(failures: i64) -> Option<Duration> {
    const PATIENCE: i64 = 20;
    if failures < PATIENCE {
        return None;
    }
    let rounds = (failures / PATIENCE).ilog2().min(5);
    Some(Duration::from_secs(10 << rounds))
}

/// Does this code say something of the receiver? The others are our own doing.
pub fn is_receivers(code: &str) -> bool {
    !matches!(
        code,
        "SUBSCRIPTION_DISABLED"
            | "EVENT_GONE"
            | "INVALID_JOB"
            | "POISON"
            | "EXPIRED"
            | "SHUTDOWN"
            | "PAYLOAD_CORRUPT"
            | "COURIER_PANIC"
            | "HEADER_INVALID"
    )
}

/// Failures since the last success.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Failing {
    pub failures: i64,
    pub from: Option<Timestamp>,
    pub last: Option<Timestamp>,
    /// When the spell that goes on began, and how many there were.
    pub spell: Option<Timestamp>,
    pub spells: i64,
}

/// A spell is so much of the time after which a subscription is disabled.
const SPELL: u32 = 5;
/// So many it needs at least: one bad hour is none, however long nothing is sent afterwards.
const SPELLS: i64 = 3;

impl Failing {
    /// More of them, now.
    pub fn note(&mut self, failures: i64, now: Timestamp, limit: Duration) {
        if failures == 0 {
            return;
        }
        self.failures += failures;
        self.from.get_or_insert(now);
        self.last = Some(now);
        if self.spell.is_none_or(|began| now.since(began) >= limit / SPELL) {
            self.spell = Some(now);
            self.spells += 1;
        }
    }

    /// Has it failed, and nothing else, for so long and all over that time? Silence is no failure.
    pub fn is_lasting(&self, limit: Duration) -> bool {
        let lasted = self.from.zip(self.last).map_or(Duration::ZERO, |(from, last)| last.since(from));
        !limit.is_zero() && lasted >= limit && self.spells >= SPELLS
    }
}

/// A token bucket: how many may pass now, and what is left. At most half a second's worth is saved up, so that the rate
/// holds after a pause too. One through which nothing has passed yet is full: a slow one would otherwise never be.
pub fn refill(tokens: f64, rate: f64, since: Option<Duration>) -> f64 {
    let most = (rate / 2.0).max(1.0);
    since.map_or(most, |elapsed| (tokens + rate * elapsed.as_secs_f64()).clamp(0.0, most))
}

/// How many deliveries a gate lets through: by its tokens, by what is in flight, and never more than `batch`.
pub fn admits(tokens: Option<f64>, max_in_flight: Option<u32>, in_flight: u32, batch: usize) -> usize {
    let by_rate = tokens.map_or(batch, |tokens| tokens as usize);
    let by_flight = max_in_flight.map_or(batch, |most| most.saturating_sub(in_flight) as usize);
    by_rate.min(by_flight).min(batch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_transition_is_allowed_or_refused_as_the_diagram_says() {
        use Event::*;
        use Status::*;
        let events = [JobCreated, Succeeded, Failed { may_retry: true }, Failed { may_retry: false }, GivenUp];
        let legal = [
            (Pending, JobCreated, InProgress),
            (PendingRetry, JobCreated, InProgress),
            (InProgress, Succeeded, Completed),
            (InProgress, Failed { may_retry: true }, PendingRetry),
            (InProgress, Failed { may_retry: false }, DeadLettered),
            (Pending, GivenUp, DeadLettered),
            (PendingRetry, GivenUp, DeadLettered),
        ];
        for from in Status::ALL {
            for event in events {
                let expected = legal.iter().find(|(f, e, _)| *f == from && *e == event).map(|(.., to)| *to);
                assert_eq!(from.next(event).ok(), expected, "{from:?} {event:?}");
            }
            assert_eq!(Status::parse(from.as_str()), Some(from));
            assert_eq!(from.has_ended(), events.iter().all(|event| from.next(*event).is_err()), "an end is an end");
        }
    }

    #[test]
    fn retries_double_and_end() {
        let rules = RetryRules { limit: 5, schedule: vec![], base: Duration::from_secs(30), jitter: 0.0 };
        let delays: Vec<_> = (1..=5).map(|n| after_failure(&rules, n, "HTTP_500", None, 0.9)).collect();
        let retry = |secs| Verdict::Retry { delay: Duration::from_secs(secs) };
        assert_eq!(delays, [retry(30), retry(60), retry(120), retry(240), Verdict::DeadLetter]);
        assert_eq!(after_failure(&rules, 1, "POISON", None, 0.5), Verdict::DeadLetter);
        assert_eq!(after_failure(&rules, 1, "HTTP_429", Some(Duration::from_secs(45)), 0.5), retry(45));
        assert_eq!(after_failure(&rules, 1, "HTTP_429", Some(Duration::MAX), 0.5), retry(86400), "the year 9999");
        let listed = RetryRules { schedule: [5, 7].map(Duration::from_secs).to_vec(), limit: 99, ..rules.clone() };
        assert_eq!(backoff(&listed, 1, 0.0), Duration::from_secs(5));
        assert_eq!(backoff(&listed, 9, 0.0), Duration::from_secs(7));
        let spread = RetryRules { jitter: 0.5, ..rules.clone() };
        assert_eq!(backoff(&spread, 1, 0.0), Duration::from_secs(15));
        assert_eq!(backoff(&spread, 1, 1.0), Duration::from_secs(45));
        assert_eq!(backoff(&rules, u32::MAX, 0.5), LONGEST_WAIT, "no overflow");
    }

    #[test]
    fn failing_means_failures_all_over_the_time() {
        let (hour, limit) = (3600, Duration::from_secs(5 * 24 * 3600));
        let at = |secs: i64| Timestamp::from_micros(secs * 1_000_000);
        let after = |moments: &[i64]| {
            let mut failing = Failing::default();
            moments.iter().for_each(|secs| failing.note(1, at(*secs), limit));
            failing.is_lasting(limit)
        };
        let daily: Vec<i64> = (0..6).map(|day| day * 25 * hour).collect();
        assert!(after(&daily));
        assert!(!after(&daily[..4]), "not long enough");
        assert!(!after(&[0, 30, 90, 210, 450]), "one event with all its attempts, and then silence");
        assert!(!after(&[0, 30, 90, 6 * 24 * hour, 6 * 24 * hour + 30]), "two bad moments far apart");
        let mut failing = Failing::default();
        failing.note(0, at(0), limit);
        assert_eq!(failing, Failing::default());
        failing.note(2, at(0), limit);
        failing.note(3, at(1), limit);
        assert_eq!((failing.failures, failing.spells), (5, 1), "all of them count, in one spell");
        daily.iter().for_each(|secs| failing.note(1, at(*secs), limit));
        assert!(!failing.is_lasting(Duration::ZERO), "zero means never");
    }

    #[test]
    fn only_what_a_receiver_did_speaks_of_it() {
        assert!(["HTTP_500", "HTTP_410", "TIMEOUT", "REDIRECT_REFUSED"].iter().all(|code| is_receivers(code)));
        assert!(!["EVENT_GONE", "POISON", "SHUTDOWN", "COURIER_PANIC"].iter().any(|code| is_receivers(code)));
    }

    #[test]
    fn patterns_match_types() {
        for (pattern, event_type, expected) in [
            ("*", "order.paid", true),
            ("order.*", "order.paid", true),
            ("order.*", "order.item.added", true),
            ("order.*", "order", false),
            ("order.*", "order.", false),
            ("order.*", "orders.paid", false),
            ("order.paid", "order.paid", true),
            ("order.paid", "order.paid.late", false),
            ("order.Paid", "order.paid", false),
            ("ord*", "order", false),
        ] {
            assert_eq!(matches(pattern, event_type), expected, "{pattern} {event_type}");
        }
        assert!(is_pattern("*") && is_pattern("a.b-c_d") && is_pattern("a.*"));
        assert!(
            !is_pattern("a*") && !is_pattern("") && !is_pattern("a..b") && !is_pattern("*.a") && !is_pattern("a b")
        );
        assert!(!is_event_type("*") && !is_event_type(&"x".repeat(256)));
    }

    #[test]
    fn gates_let_through_what_their_limits_allow() {
        assert_eq!(admits(None, None, 7, 500), 500);
        assert_eq!(admits(Some(2.9), None, 0, 500), 2);
        assert_eq!(admits(None, Some(10), 7, 500), 3);
        assert_eq!(admits(Some(5.0), Some(10), 12, 500), 0);
        assert_eq!(rest_after(19), None);
        let rests = [20, 40, 80, 1 << 40].map(|n| rest_after(n).map(|rest| rest.as_secs()));
        assert_eq!(rests, [Some(10), Some(20), Some(40), Some(320)]);
        assert_eq!(refill(0.0, 10.0, Some(Duration::from_millis(200))), 2.0);
        assert_eq!(refill(4.0, 10.0, Some(Duration::from_secs(3600))), 5.0, "half a second's worth");
        assert_eq!(refill(0.0, 0.5, Some(Duration::from_secs(60))), 1.0, "a slow one still passes one by one");
        assert_eq!(refill(0.0, 0.5, Some(Duration::from_secs(1))), 0.5);
        assert_eq!([0.001, 0.5, 10.0].map(|rate| refill(0.0, rate, None)), [1.0, 1.0, 5.0], "the first needs no wait");
    }
}
