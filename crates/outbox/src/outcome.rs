//! What a courier answers, what is then recorded, and the words for both.

use std::borrow::Cow;
use std::time::Duration;

use crate::lease::Lease;

/// How sure we are that a failed attempt left no trace at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// No byte went out: refused, unresolvable, our own fault.
    NeverSent,
    /// Bytes went out and no answer came back: it may have been applied.
    Unknown,
    /// The destination answered.
    Answered,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// `SCREAMING_SNAKE`, for machines: `HTTP_503`, `TIMEOUT`, …
    pub code: Cow<'static, str>,
    /// For people; cut to 512 characters when stored.
    pub error: String,
    pub reach: Reach,
    /// Whatever was in doubt before this attempt is known not to have arrived.
    pub resolves: bool,
}

impl Fault {
    pub fn new(code: impl Into<Cow<'static, str>>, error: impl Into<String>, reach: Reach) -> Self {
        Fault { code: code.into(), error: error.into(), reach, resolves: false }
    }
}

/// Stands between our own words about a failure and those of the destination, which may repeat what was sent.
pub const SAID: &str = ", saying: ";

/// Of an error, what is in our own words.
pub fn in_our_words(error: &str) -> &str {
    error.split_once(SAID).map_or(error, |(ours, _)| ours)
}

/// A courier's answer for one delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Delivered. `result_ref` is what the destination calls it, if anything.
    Sent { result_ref: Option<String> },
    /// Failed; worth another attempt. The delay is the larger of the lane's backoff and `retry_after` (capped).
    Retry { fault: Fault, retry_after: Option<Duration> },
    /// Failed; another attempt would fail too.
    Dead(Fault),
    /// Not attempted, for a reason that is ours (a limit, a pause, a rotated key): counts nothing.
    Defer { delay: Duration, code: Cow<'static, str> },
}

impl Outcome {
    pub fn sent() -> Self {
        Outcome::Sent { result_ref: None }
    }

    pub fn retry(code: impl Into<Cow<'static, str>>, error: impl Into<String>, reach: Reach) -> Self {
        Outcome::Retry { fault: Fault::new(code, error, reach), retry_after: None }
    }

    pub fn dead(code: impl Into<Cow<'static, str>>, error: impl Into<String>) -> Self {
        Outcome::Dead(Fault::new(code, error, Reach::Answered))
    }
}

/// What `maybe_sent` becomes with an outcome. It is sticky: only a definite resolution clears it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Certainty {
    #[default]
    Unchanged,
    MaybeSent,
    Resolved,
}

/// What is to be recorded for a leased message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Sent {
        result_ref: Option<String>,
        dedup_hit: bool,
    },
    Retry {
        delay: Duration,
        code: String,
        error: String,
        certainty: Certainty,
    },
    /// `counted`: it was an outcome of a delivery, not a burial.
    Dead {
        code: String,
        error: String,
        certainty: Certainty,
        counted: bool,
    },
}

impl Verdict {
    pub fn sent() -> Self {
        Verdict::Sent { result_ref: None, dedup_hit: false }
    }

    pub fn flush_code(&self) -> FlushCode {
        match self {
            Verdict::Sent { dedup_hit: true, .. } => FlushCode::DedupHit,
            Verdict::Sent { .. } => FlushCode::Success,
            Verdict::Retry { .. } => FlushCode::Retry,
            Verdict::Dead { .. } => FlushCode::Dead,
        }
    }

    pub fn ends(&self) -> bool {
        !matches!(self, Verdict::Retry { .. })
    }
}

/// One entry of a settle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settlement {
    pub lease: Lease,
    pub verdict: Verdict,
    /// An earlier settle of this entry got no answer: if the lease is gone, look for the proof that it was ours.
    pub again: bool,
    /// The database trouble this entry had to wait out, told in the audit once it is settled.
    pub trouble: Option<FlushCode>,
    /// How long its delivery took, for those who tell.
    pub took: Option<Duration>,
    /// It has met somebody else's lock: more kinds of them are looked for before anything is written.
    pub wary: bool,
}

impl Settlement {
    pub fn new(lease: Lease, verdict: Verdict) -> Self {
        Settlement { lease, verdict, again: false, trouble: None, took: None, wary: false }
    }
}

/// The answer per entry of a settle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// Recorded, exactly once.
    Applied,
    /// Somebody else holds or ended the message; nothing was changed.
    LeaseLost,
    /// Asked again after a lost answer, and nothing proves either (retention 0). Counted as neither.
    Unknown,
    /// This entry alone could not be recorded (its peer refused); nothing was changed, it is still held.
    Refused,
    /// Somebody else's transaction has its row locked; nothing was changed, it is still held. Ask for it again, alone.
    Locked,
}

/// What became of one lease in a renewal, or when it was to be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// It was held, and is renewed or given back.
    Held,
    /// It is gone: expired, taken over or ended.
    Lost,
    /// Somebody else's transaction has its row locked; nothing was changed. Ask for it again.
    Locked,
}

/// How a message is given back without an outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GiveBack {
    /// It is due again after this long.
    pub delay: Duration,
    /// Why, as its last error code.
    pub code: Option<String>,
    /// Its delivery was cut off: it may have arrived.
    pub maybe_sent: bool,
}

impl GiveBack {
    /// To be taken by anybody, now.
    pub fn now() -> Self {
        GiveBack::default()
    }

    pub fn after(delay: Duration, code: impl Into<String>) -> Self {
        GiveBack { delay, code: Some(code.into()), maybe_sent: false }
    }
}

/// Outcome codes of Outbox Lease Protocol v1, §8: in metrics, logs and audit rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FlushCode {
    Success,
    Retry,
    Dead,
    Conflict,
    DedupHit,
    DbTimeout,
    DbError,
}

impl FlushCode {
    pub fn as_str(self) -> &'static str {
        match self {
            FlushCode::Success => "outbox_flush_success",
            FlushCode::Retry => "outbox_flush_retry",
            FlushCode::Dead => "outbox_flush_dead",
            FlushCode::Conflict => "outbox_flush_conflict",
            FlushCode::DedupHit => "outbox_flush_dedup_hit",
            FlushCode::DbTimeout => "outbox_flush_db_timeout",
            FlushCode::DbError => "outbox_flush_db_error",
        }
    }

    /// The audit's `action` for this code.
    pub fn action(self) -> &'static str {
        match self {
            FlushCode::Success | FlushCode::DedupHit => "allow",
            FlushCode::Retry | FlushCode::Conflict | FlushCode::DbTimeout | FlushCode::DbError => "redirect",
            FlushCode::Dead => "reject",
        }
    }

    /// The audit's `status` for this code.
    pub fn audit_status(self) -> &'static str {
        match self {
            FlushCode::Success | FlushCode::DedupHit => "success",
            FlushCode::Retry | FlushCode::Conflict | FlushCode::DbTimeout | FlushCode::DbError => "redirected",
            FlushCode::Dead => "failed",
        }
    }
}

/// Codes the kernel itself records.
pub mod code {
    /// Its worker died every time; buried after `max_crashes` takeovers.
    pub const POISON: &str = "POISON";
    /// `deliver_before` passed and nothing had been sent.
    pub const EXPIRED: &str = "EXPIRED";
    /// The payload no longer has the digest it was enqueued with.
    pub const PAYLOAD_CORRUPT: &str = "PAYLOAD_CORRUPT";
    /// Aborted at the end of a drain, with a request under way.
    pub const SHUTDOWN: &str = "SHUTDOWN";
    /// The courier panicked.
    pub const COURIER_PANIC: &str = "COURIER_PANIC";
    /// An operator gave the lease back.
    pub const RELEASED: &str = "RELEASED";
    /// Found out right before the first byte: somebody else has the message.
    pub const LEASE_LOST: &str = "LEASE_LOST";
    /// The database could not be told that the delivery begins; nothing was sent.
    pub const STORE_UNAVAILABLE: &str = "STORE_UNAVAILABLE";
}
