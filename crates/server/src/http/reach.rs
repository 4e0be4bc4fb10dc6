//! How far a caller's token reaches: the lanes and the spaces it is for. What lies beyond is not told, not even that it is
//! there.

use postrider_memories::{AuditRow, LANE as MEMORY, Spaces};

use super::auth::Caller;
use super::error::Refusal;

impl Caller {
    /// The lanes it is for; empty: all.
    pub fn lanes(&self) -> &[String] {
        self.token().map_or(&[], |token| &token.lanes)
    }

    pub fn sees(&self, lane: &str) -> bool {
        self.lanes().is_empty() || self.lanes().iter().any(|own| own == lane)
    }

    /// A token for some lanes says nothing of others.
    pub fn may_use(&self, lane: &str) -> Result<(), Refusal> {
        if self.sees(lane) {
            return Ok(());
        }
        Err(Refusal::forbidden(format!("this token is for {} only", named("the lane", self.lanes()))))
    }

    /// The spaces it is for.
    pub fn spaces(&self) -> Spaces {
        match self.token() {
            Some(token) if !token.spaces.is_empty() => Spaces::these(token.spaces.clone()),
            _ => Spaces::all(),
        }
    }

    /// A token for some spaces says nothing of others, whether or not there are any.
    pub fn may_enter(&self, space: &str) -> Result<(), Refusal> {
        let own = self.spaces();
        if own.cover(space) {
            return Ok(());
        }
        Err(Refusal::forbidden(format!("this token is for {} only", named("the space", &own.names()))))
    }

    /// For what looks at everything at once.
    pub fn is_unlimited(&self) -> bool {
        self.lanes().is_empty() && self.spaces().are_all()
    }

    pub fn must_be_unlimited(&self, what: &str) -> Result<(), Refusal> {
        if self.is_unlimited() {
            return Ok(());
        }
        Err(Refusal::forbidden(format!("{what}; this token is for some lanes or spaces only")))
    }

    /// A message of a lane; those of memories go to a space.
    pub fn sees_message(&self, lane: &str, target: Option<&str>) -> bool {
        self.sees(lane) && (lane != MEMORY || self.spaces().cover(target.unwrap_or_default()))
    }

    /// A row of the audit. One that does not say whose it is, is seen by those who see everything.
    pub fn sees_audit(&self, row: &AuditRow) -> bool {
        if self.is_unlimited() {
            return true;
        }
        let evidence = &row.evidence_refs_json;
        let lane = match evidence["source"].as_str() {
            Some("outbox_worker") => evidence["extra"]["lane"].as_str(),
            _ => Some(MEMORY),
        };
        lane.is_some_and(|lane| self.sees_message(lane, row.target_space.as_deref()))
    }
}

fn named(what: &str, names: &[String]) -> String {
    match names {
        [one] => format!("{what} `{one}`"),
        several => format!("{what}s {}", several.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ")),
    }
}
