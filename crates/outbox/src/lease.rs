//! The fence: who may act on a message, and when a message may be taken.
//!
//! Protocol. Every claim mints a new token, one higher than the last, never lower, not even after a requeue. Whoever
//! settles, renews or defers must show the token and the owner of the *current* claim; otherwise the lease is lost, and
//! that is an answer, not an error. Neither the owner's name (a restarted process may have the same) nor the attempt
//! count (requeue resets it) could do this.
//!
//! `due_at` says when a row may be tried; `lease_until` says until when it is held, as an absolute time, so a claimer
//! with a shorter lease cannot steal a longer one. There is no rescuer: an expired lease is simply claimable.

use crate::time::Timestamp;

/// What a worker shows to act on a message it claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
pub struct Lease {
    pub id: i64,
    pub token: i64,
}

/// The lease columns of one live row.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Hold {
    pub token: i64,
    pub locked_by: Option<String>,
    pub lease_until: Option<Timestamp>,
    pub crashes: u32,
}

impl Hold {
    /// May anybody take this row now? Expiry is strict: at the very end of its lease a row is still held.
    pub fn claimable(&self, due_at: Timestamp, now: Timestamp) -> bool {
        due_at <= now && self.lease_until.is_none_or(|until| until < now)
    }

    /// A claim by `owner` takes over from a worker that never came back (and was not `owner` itself).
    pub fn takeover(&self, owner: &str) -> bool {
        self.locked_by.as_deref().is_some_and(|holder| holder != owner)
    }

    /// Takeovers of this row once `owner` has claimed it.
    pub fn suspicion(&self, owner: &str) -> u32 {
        self.crashes + u32::from(self.takeover(owner))
    }

    /// The token of the next claim. A row with [`LAST_TOKEN`] is never claimed.
    pub fn mint(&self) -> i64 {
        self.token.saturating_add(1)
    }

    /// May the bearer of `token` settle or defer? Expiry does not matter: if nobody took the row, the work is done and
    /// refusing it would make a duplicate.
    pub fn accepts(&self, token: i64, owner: &str) -> bool {
        self.token == token && self.locked_by.as_deref() == Some(owner)
    }

    /// May the bearer extend the lease? Only while it still runs.
    pub fn renewable(&self, token: i64, owner: &str, now: Timestamp) -> bool {
        self.accepts(token, owner) && self.lease_until.is_some_and(|until| until >= now)
    }
}

/// No claim comes after it; only a hand can have written it. The row waits for one, and its neighbours do not.
pub const LAST_TOKEN: i64 = i64::MAX;

/// Rows taken over once at most are claimed in the ordinary way; others are suspects, claimed apart.
pub const ORDINARY_SUSPICION: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    const T: fn(i64) -> Timestamp = Timestamp::from_micros;

    #[test]
    fn claimable_only_when_due_and_not_held() {
        let free = Hold::default();
        assert!(free.claimable(T(10), T(10)));
        assert!(!free.claimable(T(11), T(10)));
        let held = Hold { lease_until: Some(T(20)), ..Hold::default() };
        assert!(!held.claimable(T(0), T(20)), "held until the end of its last microsecond");
        assert!(held.claimable(T(0), T(21)));
    }

    #[test]
    fn the_fence_needs_token_and_owner() {
        let hold = Hold { token: 3, locked_by: Some("a".into()), lease_until: Some(T(5)), crashes: 1 };
        assert!(hold.accepts(3, "a"));
        assert!(!hold.accepts(2, "a") && !hold.accepts(3, "b"));
        assert!(hold.renewable(3, "a", T(5)) && !hold.renewable(3, "a", T(6)));
        assert!(hold.accepts(3, "a"), "a late ack is let through while nobody else took the row");
        assert_eq!((hold.suspicion("a"), hold.suspicion("b")), (1, 2));
        assert_eq!(hold.mint(), 4);
    }
}
