//! Messages: what an application enqueues and what a worker gets.

use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use crate::error::{Error, Kind, Result};
use crate::lanes::LaneRules;
use crate::lease::Lease;
use crate::time::Timestamp;

/// Longest lane name, in bytes.
pub const MAX_LANE_BYTES: usize = 64;
/// Longest idempotency key, active key or correlation id, in bytes.
pub const MAX_KEY_BYTES: usize = 255;
/// Longest target, in bytes.
pub const MAX_TARGET_BYTES: usize = 1024;
/// Most bytes of headers a message may carry, as JSON.
pub const MAX_HEADERS_BYTES: usize = 16 * 1024;
/// Longest delay of a new message.
pub const MAX_DELAY: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Stored errors are cut to this many characters.
pub const MAX_ERROR_CHARS: usize = 512;
/// Stored error codes are cut to this many characters.
pub const MAX_CODE_CHARS: usize = 100;

/// A SHA-256 digest.
pub type Sha = [u8; 32];

pub fn sha256(bytes: &[u8]) -> Sha {
    Sha256::digest(bytes).into()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A message to enqueue.
///
/// ```
/// use postrider::NewMessage;
/// let message = NewMessage::json("invoices", &serde_json::json!({"invoice": 7})).key("invoice-7").target("erp");
/// assert_eq!(message.content_type.as_deref(), Some("application/json"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewMessage {
    pub lane: String,
    pub payload: Bytes,
    pub content_type: Option<String>,
    /// Extra headers for couriers that have headers.
    pub headers: Vec<(String, String)>,
    /// Idempotency key: enqueueing the same key with the same content again answers with the first message.
    pub key: Option<String>,
    /// Where it goes, as far as the lane distinguishes; one target gets at most a quarter of a worker's slots.
    pub target: Option<String>,
    /// At most one live message per lane has this.
    pub active_key: Option<String>,
    /// Not due before this has passed.
    pub delay: Duration,
    /// Past this moment it is not worth delivering: it ends as `EXPIRED`, unless it may have gone out already.
    pub deliver_before: Option<Timestamp>,
    pub correlation_id: Option<String>,
    /// What the key is bound to, instead of payload and target.
    pub digest: Option<Sha>,
}

impl NewMessage {
    pub fn new(lane: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        NewMessage { lane: lane.into(), payload: payload.into(), ..NewMessage::default() }
    }

    pub fn json(lane: impl Into<String>, payload: &serde_json::Value) -> Self {
        NewMessage::new(lane, payload.to_string()).content_type("application/json")
    }

    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    pub fn target(mut self, target: impl Into<String>) -> Self {
        self.target = Some(target.into());
        self
    }

    pub fn active_key(mut self, active_key: impl Into<String>) -> Self {
        self.active_key = Some(active_key.into());
        self
    }

    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    pub fn deliver_before(mut self, moment: Timestamp) -> Self {
        self.deliver_before = Some(moment);
        self
    }

    pub fn correlation_id(mut self, id: impl Into<String>) -> Self {
        self.correlation_id = Some(id.into());
        self
    }

    /// What an idempotency key is bound to: the payload, and the target when there is one.
    pub fn key_digest(&self, payload_sha: &Sha) -> Sha {
        match (&self.digest, &self.target) {
            (Some(digest), _) => *digest,
            (None, None) => *payload_sha,
            (None, Some(target)) => sha256(&[payload_sha.as_slice(), target.as_bytes()].concat()),
        }
    }

    /// hash(idempotency key, else active key, else target) modulo the lane's shards. The SQL functions do the same.
    pub fn shard(&self, shards: u32) -> u32 {
        let basis = self.key.as_ref().or(self.active_key.as_ref()).or(self.target.as_ref());
        match basis {
            Some(basis) if shards > 1 => {
                let sha = sha256(basis.as_bytes());
                u32::from_be_bytes([sha[0], sha[1], sha[2], sha[3]]) % shards
            }
            _ => 0,
        }
    }

    pub(crate) fn headers_json(&self) -> Option<String> {
        (!self.headers.is_empty()).then(|| serde_json::json!(self.headers).to_string())
    }

    /// Refuses what no store could keep, with the remedy.
    pub fn validate(&self, rules: &LaneRules) -> Result<()> {
        if self.payload.len() > rules.max_payload_bytes {
            return Err(Error::invalid(format!(
                "the payload has {} bytes; lane `{}` takes at most {} (store it elsewhere and send a reference, or raise max_payload_bytes)",
                self.payload.len(),
                self.lane,
                rules.max_payload_bytes
            )));
        }
        if self.delay > MAX_DELAY {
            return Err(Error::invalid("the delay is longer than ten years"));
        }
        let storable = Timestamp::default()..=Timestamp::LAST;
        if self.deliver_before.is_some_and(|limit| !storable.contains(&limit)) {
            return Err(Error::invalid("deliver_before lies before 1970 or after 9999; leave it out instead"));
        }
        check_text("key", self.key.as_deref(), MAX_KEY_BYTES)?;
        check_text("active key", self.active_key.as_deref(), MAX_KEY_BYTES)?;
        check_text("correlation id", self.correlation_id.as_deref(), MAX_KEY_BYTES)?;
        check_text("content type", self.content_type.as_deref(), MAX_KEY_BYTES)?;
        check_text("target", self.target.as_deref(), MAX_TARGET_BYTES)?;
        check_text("headers", self.headers_json().as_deref(), MAX_HEADERS_BYTES)?;
        Ok(())
    }
}

pub(crate) fn check_text(what: &str, text: Option<&str>, max_bytes: usize) -> Result<()> {
    let Some(text) = text else { return Ok(()) };
    if text.is_empty() {
        return Err(Error::invalid(format!("the {what} is empty; leave it out instead")));
    }
    if text.len() > max_bytes {
        return Err(Error::invalid(format!("the {what} has {} bytes; at most {max_bytes} are allowed", text.len())));
    }
    if text.contains('\0') {
        return Err(Error::invalid(format!("the {what} contains a NUL character")));
    }
    Ok(())
}

/// A lane's name: 1 to 64 of `a-z A-Z 0-9 . _ -`.
pub fn check_lane_name(lane: &str) -> Result<()> {
    let fine = !lane.is_empty()
        && lane.len() <= MAX_LANE_BYTES
        && lane.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fine {
        return Ok(());
    }
    Err(Error::new(
        Kind::UnknownLane,
        format!("`{lane}` is no lane name: use 1 to {MAX_LANE_BYTES} letters, digits, `.`, `_`, `-`"),
    ))
}

/// Cuts text for an error column.
pub fn cut_error(text: &str) -> String {
    cut(text, MAX_ERROR_CHARS)
}

/// Cuts text for the column of an error code.
pub(crate) fn cut_code(text: &str) -> String {
    cut(text, MAX_CODE_CHARS)
}

fn cut(text: &str, max_chars: usize) -> String {
    text.chars().filter(|c| *c != '\0').take(max_chars).collect()
}

/// The answer of an enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Enqueued {
    /// Written, under a new id.
    Created,
    /// The same message is there already, under this id; nothing was written.
    Exists,
    /// The key (or active key) is taken by a different message; nothing was written.
    Differs,
}

/// Id and answer for one message of an enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Entry {
    pub id: i64,
    pub outcome: Enqueued,
}

/// A message as a worker claimed it.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub id: i64,
    pub lane: String,
    pub shard_id: u32,
    pub due_at: Timestamp,
    pub lease_until: Timestamp,
    pub lease_token: i64,
    /// Outcomes so far; the delivery at hand is attempt `attempts + 1`.
    pub attempts: u32,
    /// Takeovers since the last recorded outcome, this claim's included.
    pub crashes: u32,
    /// An earlier attempt may have reached the destination without our knowing.
    pub maybe_sent: bool,
    pub target: Option<String>,
    pub active_key: Option<String>,
    pub payload: Bytes,
    pub content_type: Option<String>,
    pub headers: Vec<(String, String)>,
    pub payload_sha: Option<Sha>,
    pub correlation_id: Option<String>,
    pub created_at: Timestamp,
    pub deliver_before: Option<Timestamp>,
    /// The worker this claim took over from, if it never came back.
    pub taken_over_from: Option<String>,
}

impl Message {
    pub fn lease(&self) -> Lease {
        Lease { id: self.id, token: self.lease_token }
    }

    /// The digest it was enqueued with; computed for rows inserted by SQL without one.
    pub fn sha(&self) -> Sha {
        self.payload_sha.unwrap_or_else(|| sha256(&self.payload))
    }

    /// Does the payload match its digest?
    pub fn payload_is_intact(&self) -> bool {
        self.payload_sha.is_none_or(|sha| sha == sha256(&self.payload))
    }
}

pub(crate) fn parse_headers(json: Option<&str>) -> Vec<(String, String)> {
    // Undecodable headers of a foreign insert must not make the row unclaimable for ever.
    json.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_follow_key_then_active_key_then_target() {
        let m = NewMessage::new("l", "x").target("t").active_key("a").key("k");
        assert_eq!(m.shard(1), 0);
        assert_eq!(m.shard(1000), NewMessage::new("l", "y").key("k").shard(1000));
        assert_eq!(NewMessage::new("l", "x").shard(8), 0);
        // The same number the SQL functions compute: first four bytes of SHA-256("k").
        assert_eq!(hex(&sha256(b"k"))[..8], *"8254c329");
        assert_eq!(m.shard(1000), 0x8254_c329_u32 % 1000);
    }

    #[test]
    fn limits_are_refused_with_a_remedy() {
        let rules = LaneRules::default();
        let fails = |m: NewMessage| m.validate(&rules).unwrap_err().message;
        assert!(fails(NewMessage::new("l", vec![0; (1 << 20) + 1])).contains("max_payload_bytes"));
        assert!(fails(NewMessage::new("l", "x").key("k".repeat(256))).contains("at most 255"));
        assert!(fails(NewMessage::new("l", "x").key("")).contains("leave it out"));
        let before = |text: &str| NewMessage::new("l", "x").deliver_before(text.parse().unwrap());
        assert!(before("9999-12-31T23:59:59Z").validate(&rules).is_ok(), "not after 9999");
        assert!(fails(before("1969-12-31T23:59:59Z")).contains("leave it out"));
        assert!(NewMessage::new("l", vec![0; 1 << 20]).key("k".repeat(255)).validate(&rules).is_ok());
        assert!(check_lane_name("in voices").is_err() && check_lane_name("").is_err());
    }
}
