//! Lanes and the rules the store keeps for each: shards, keys, retention, dedup, audit, and a peer's part in the settle.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Kind, Result};
use crate::message::check_lane_name;
use crate::outcome::Verdict;
use crate::tx::Tx;

/// What the store must know about a lane. Every process on one database should agree on these.
#[derive(Clone)]
pub struct LaneRules {
    pub shards: u32,
    pub max_payload_bytes: usize,
    /// How long an idempotency key is remembered.
    pub key_ttl: Duration,
    /// How long ended messages are kept; zero keeps no `sent` rows at all.
    pub retention: Duration,
    /// A message whose (target, payload) was delivered before, within retention, is not delivered again.
    pub dedup: bool,
    /// Every outcome leaves an audit row.
    pub audit: bool,
    /// A peer's part in every settle of this lane.
    pub on_settled: Option<Arc<dyn OnSettled>>,
    /// The command of the peer that owns the lane. Generic enqueue, requeue and prune are refused and name it; the peer
    /// itself uses [`crate::Outbox::owning`].
    pub owned_by: Option<&'static str>,
    /// Couriers of this lane commit [`crate::Begin`] before their first byte, so a worker that died without having done so
    /// has sent nothing. It costs a transaction per delivery.
    pub send_begun: bool,
    /// `false`: the peer keeps what has ended itself; nothing of this lane goes to `outbox_done` or `outbox_attempts`.
    pub history: bool,
}

impl Default for LaneRules {
    fn default() -> Self {
        LaneRules {
            shards: 1,
            max_payload_bytes: 1 << 20,
            key_ttl: Duration::from_secs(7 * 24 * 3600),
            retention: Duration::from_secs(7 * 24 * 3600),
            dedup: false,
            audit: false,
            on_settled: None,
            owned_by: None,
            send_begun: false,
            history: true,
        }
    }
}

impl LaneRules {
    /// Does its owner bring back and delete what has ended?
    pub(crate) fn has_upkeep(&self) -> bool {
        self.owned_by.is_some_and(|owner| owner != crate::alerts::OWNER)
    }
}

impl fmt::Debug for LaneRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneRules")
            .field("shards", &self.shards)
            .field("retention", &self.retention)
            .field("dedup", &self.dedup)
            .field("audit", &self.audit)
            .field("on_settled", &self.on_settled.is_some())
            .finish_non_exhaustive()
    }
}

/// A message that is being settled, as a peer hears of it: the fence has been checked, the row is locked.
#[derive(Clone, Debug, PartialEq)]
pub struct Winner {
    pub id: i64,
    pub lane: String,
    pub lease_token: i64,
    /// Outcomes so far, the one at hand not counted.
    pub attempts: u32,
    pub maybe_sent: bool,
    pub target: Option<String>,
    pub active_key: Option<String>,
    pub payload: bytes::Bytes,
    pub correlation_id: Option<String>,
    pub verdict: Verdict,
}

/// A peer's part in the settle: its ledger, results, attempts and audit, in the same transaction.
#[async_trait]
pub trait OnSettled: Send + Sync {
    /// Called with the winners only, before their rows change. An error rolls all of it back; the winners are then
    /// tried one by one, so one bad entry harms no other.
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<()>;
}

/// The configured lanes.
#[derive(Clone, Debug, Default)]
pub struct Lanes(BTreeMap<String, LaneRules>);

impl Lanes {
    pub fn new() -> Self {
        Lanes::default()
    }

    pub fn with(mut self, name: impl Into<String>, rules: LaneRules) -> Self {
        self.0.insert(name.into(), rules);
        self
    }

    pub fn get(&self, lane: &str) -> Result<&LaneRules> {
        self.0.get(lane).ok_or_else(|| {
            let known: Vec<&str> = self.0.keys().map(String::as_str).collect();
            Error::new(
                Kind::UnknownLane,
                format!(
                    "there is no lane `{lane}`; known: {}. Add [lane.{lane}] to postrider.toml",
                    if known.is_empty() { "none".to_owned() } else { known.join(", ") }
                ),
            )
        })
    }

    /// Refuses to touch a lane that somebody else owns. Lanes nobody configured any more are free.
    pub(crate) fn permit(&self, lane: &str, owner: Option<&str>) -> Result<()> {
        match self.0.get(lane).and_then(|rules| rules.owned_by) {
            Some(command) if owner != Some(command) => {
                let message = format!("lane `{lane}` has an owner; use `{command}` instead");
                Err(Error::new(Kind::LaneOwned, message))
            }
            _ => Ok(()),
        }
    }

    /// The same for bringing back and deleting what has ended. Alerts have nobody else who would do that.
    pub(crate) fn permit_upkeep(&self, lane: &str, owner: Option<&str>) -> Result<()> {
        match self.0.get(lane) {
            Some(rules) if rules.has_upkeep() => self.permit(lane, owner),
            _ => Ok(()),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &LaneRules)> {
        self.0.iter().map(|(name, rules)| (name.as_str(), rules))
    }

    /// Refuses combinations that cannot keep their promise.
    pub fn check(&self) -> Result<()> {
        for (name, rules) in &self.0 {
            check_lane_name(name)?;
            if rules.dedup && rules.retention.is_zero() {
                return Err(Error::invalid(format!(
                    "lane `{name}`: dedup = true needs a retention (dedup looks at what was sent); set retention or drop dedup"
                )));
            }
            if rules.shards == 0 || rules.shards > 1024 {
                return Err(Error::invalid(format!("lane `{name}`: shards must be 1 to 1024, not {}", rules.shards)));
            }
        }
        Ok(())
    }
}
