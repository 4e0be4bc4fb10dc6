//! The gateway's part in the settle of a queued memory: its copy moves in the transaction that ends the message.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use postrider::alerts::{Alert, Alerts};
use postrider::message::{hex, sha256};
use postrider::outcome::{Verdict, code};
use postrider::tx::Tx;
use postrider::{OnSettled, Result, Winner};

use crate::LANE;
use crate::copies::{self, Becomes, Copy, State};
use crate::courier::refusal;

/// Shared by the store of a process and its gateway.
#[derive(Clone, Default)]
pub struct Settling(Arc<OnceLock<Option<Alerts>>>);

impl std::fmt::Debug for Settling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Settling")
    }
}

impl Settling {
    pub(crate) fn open(&self, alerts: Option<Alerts>) {
        let _ = self.0.set(alerts);
    }
}

#[async_trait]
impl OnSettled for Settling {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<()> {
        let mut ended: Vec<&Winner> = winners.iter().filter(|winner| winner.verdict.ends()).collect();
        // In the order of their copies, so that two settles cannot deadlock.
        ended.sort_by(|a, b| (&a.target, &a.active_key).cmp(&(&b.target, &b.active_key)));
        let mut dead = Vec::new();
        for winner in ended {
            // By its number first: what a damaged message holds is the digest of nothing we know.
            let copy = match copies::of_message(tx, winner.id).await? {
                Some(copy) => Some(copy),
                None => {
                    let space = winner.target.as_deref().unwrap_or_default();
                    copies::find(tx, space, &hex(&sha256(&winner.payload)), true).await?
                }
            };
            match &winner.verdict {
                Verdict::Sent { result_ref: Some(memory_id), .. } => {
                    if let Some(copy) = copy.filter(|copy| copy.state != State::Stored) {
                        let (merged, outbox_id) = (copy.merged, Some(winner.id));
                        copies::become_(tx, copy.id, Becomes::Stored { memory_id, merged, outbox_id }).await?;
                    }
                }
                Verdict::Dead { code, error, .. } => dead.push(self.give_up(tx, winner, copy, code, error).await?),
                _ => {}
            }
        }
        match self.0.get().and_then(Option::as_ref) {
            Some(alerts) => alerts.raise_all(tx, dead).await,
            None => Ok(()),
        }
    }
}

impl Settling {
    async fn give_up(
        &self,
        tx: &mut (dyn Tx + Send),
        winner: &Winner,
        copy: Option<Copy>,
        code: &str,
        error: &str,
    ) -> Result<Alert> {
        let its = |copy: &Copy| copy.state == State::Queued && copy.outbox_id == Some(winner.id);
        let mut again = false;
        if let Some(copy) = copy.filter(its) {
            // What the message lost our copy may still have: it is queued anew, by whoever looks next.
            again = code == code::PAYLOAD_CORRUPT
                && copies::note_of(tx, copy.id).await?.is_some_and(|note| note.is_intact());
            let next = if again { Becomes::LeftBehind } else { Becomes::Dead { refusal: refusal(error) } };
            copies::become_(tx, copy.id, next).await?;
        }
        Ok(given_up(winner.id, code, again))
    }
}

fn given_up(id: i64, code: &str, again: bool) -> Alert {
    let message = match again {
        true => format!(
            "message {id} was damaged in the database and not sent: {code}; its memory is queued again from our own copy. Look: postrider outbox show {id}"
        ),
        false => format!(
            "memory {id} was given up: {code}; look: postrider outbox show {id}, bring back: postrider memory requeue {id}"
        ),
    };
    Alert {
        kind: "dead_memories",
        subject: LANE.to_owned(),
        message,
        count: 1,
        details: serde_json::json!({ "outbox_id": id, "code": code }),
    }
}
