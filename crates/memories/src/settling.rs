//! The gateway's part in the settle of a queued memory: its copy moves in the transaction that ends the message.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use postrider::alerts::{Alert, Alerts};
use postrider::message::{hex, sha256};
use postrider::outcome::Verdict;
use postrider::tx::Tx;
use postrider::{OnSettled, Result, Winner};

use crate::LANE;
use crate::copies::{self, State};

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
        for winner in ended {
            let space = winner.target.as_deref().unwrap_or_default();
            let sha = hex(&sha256(&winner.payload));
            let copy = copies::find(tx, space, &sha, true).await?;
            match &winner.verdict {
                Verdict::Sent { result_ref: Some(memory_id), .. } => {
                    if let Some(copy) = copy.filter(|copy| copy.state != State::Stored) {
                        copies::become_(tx, copy.id, State::Stored, Some(memory_id), Some(winner.id)).await?;
                    }
                }
                Verdict::Dead { code, .. } => {
                    let its = |copy: &copies::Copy| copy.state == State::Queued && copy.outbox_id == Some(winner.id);
                    if let Some(copy) = copy.filter(its) {
                        copies::become_(tx, copy.id, State::Dead, None, None).await?;
                    }
                    if let Some(alerts) = self.0.get().and_then(Option::as_ref) {
                        alerts.raise(tx, &given_up(winner.id, code)).await?;
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn given_up(id: i64, code: &str) -> Alert {
    Alert {
        kind: "dead_memories",
        subject: LANE.to_owned(),
        message: format!(
            "memory {id} was given up: {code}; look: postrider outbox show {id}, bring back: postrider memory requeue {id}"
        ),
        count: 1,
        details: serde_json::json!({ "outbox_id": id, "code": code }),
    }
}
