//! The flush: brings a queued memory to the service, unless it is there already. What may be there is looked for first.

use std::time::Duration;

use async_trait::async_trait;
use postrider::message::{hex, sha256};
use postrider::observe::sending;
use postrider::outcome::{Fault as Failure, Reach, code};
use postrider::store::Mode;
use postrider::{Courier, Message, Outcome, Result};

use crate::Memories;
use crate::copies::{self, State};
use crate::note::Note;
use crate::tend::waiting;
use crate::turns::Turn;
use crate::upstream::{Blame, Doubt, Fault};
use crate::writing::{Found, Written, is_merged};

/// How long a memory waits while the service cannot be used, unless it is woken, as it is once it can.
const AWAY: Duration = Duration::from_secs(60);

/// Delivers messages of the lane [`LANE`](crate::LANE).
pub struct MemoryCourier(Memories);

impl Memories {
    pub fn courier(&self) -> MemoryCourier {
        MemoryCourier(self.clone())
    }
}

/// What our copy says about a message.
enum Known {
    /// It is in the service already.
    Stored(String),
    Open(Option<Open>),
}

/// A memory that is still to be brought.
struct Open {
    copy: i64,
    note: Note,
    merged: bool,
    /// For how much longer an earlier write may be applied.
    doubt: Option<Duration>,
}

/// What became of the doubt about an earlier write.
enum Doubted {
    /// It may be written now; `true`: whatever was in doubt did not arrive.
    Write(bool, Turn),
    Instead(Outcome),
}

impl MemoryCourier {
    async fn look(&self, space: &str, sha: &str) -> Result<Known> {
        let (space, sha) = (space.to_owned(), sha.to_owned());
        let look = self.0.transact(Mode::Read, move |tx| {
            let (space, sha) = (space.clone(), sha.clone());
            Box::pin(async move {
                let Some(copy) = copies::find(tx, &space, &sha, false).await? else { return Ok(Known::Open(None)) };
                if let (State::Stored, Some(memory_id)) = (copy.state, &copy.memory_id) {
                    return Ok(Known::Stored(memory_id.clone()));
                }
                let note = copies::note_of(tx, copy.id).await?;
                let (copy, merged, doubt) = (copy.id, copy.merged, copy.doubt);
                Ok(Known::Open(note.map(|note| Open { copy, note, merged, doubt })))
            })
        });
        look.await
    }

    async fn restore(&self, copy: i64, text: &str) -> Result<()> {
        let text = text.to_owned();
        let restored = self.0.transact(Mode::Write, move |tx| {
            let text = text.clone();
            Box::pin(async move { copies::restore(tx, copy, &text).await })
        });
        restored.await
    }

    async fn set_doubt(&self, copy: i64, doubt: Option<Duration>) -> Result<()> {
        self.0.transact(Mode::Write, move |tx| Box::pin(copies::set_doubt(tx, copy, doubt))).await
    }

    /// A memory that may have been written is looked for; while it may yet be applied, it is not written again.
    async fn doubted(&self, message: &Message, open: &mut Open) -> Result<Doubted> {
        if open.doubt.is_none() && (message.crashes > 0 || message.maybe_sent) {
            // Whoever held it is gone, and may have written it just then.
            open.doubt = self.0.doubt_of(Doubt::UnderWay);
            self.set_doubt(open.copy, open.doubt).await?;
        }
        let later = |delay: Duration| {
            Doubted::Instead(Outcome::Defer {
                delay: delay.max(Duration::from_millis(100)),
                code: waiting::IN_DOUBT.into(),
            })
        };
        let turns = &self.0.0.turns;
        let Some(left) = open.doubt else {
            let turn = turns.wait(&open.note, self.0.0.settings.under_way).await;
            return Ok(turn.map_or_else(|| later(self.0.look_every()), |turn| Doubted::Write(false, turn)));
        };
        turns.doubt(&open.note, left);
        let Some(permit) = self.0.0.breaker.permit() else {
            return Ok(Doubted::Instead(Outcome::Defer { delay: AWAY, code: waiting::BREAKER_OPEN.into() }));
        };
        let found = self.0.look_up(&open.note, left.is_zero()).await;
        permit.tell(self.0.sign_of(found.as_ref().err()));
        self.0.note_answer(found.as_ref().err());
        match found {
            Ok(Found::There(memory_id)) => {
                turns.resolved(&open.note);
                return Ok(Doubted::Instead(Outcome::Sent { result_ref: Some(memory_id) }));
            }
            Err(fault) if fault.blame == Blame::Limit => return Ok(Doubted::Instead(self.limited())),
            Err(fault) if fault.blame == Blame::Ours => {
                return Ok(Doubted::Instead(Outcome::Defer { delay: AWAY, code: waiting::UNUSABLE.into() }));
            }
            Err(fault) if fault.blame == Blame::Service => return Ok(later(self.0.look_every())),
            // Not there, or it cannot be asked: only time tells.
            _ if !left.is_zero() => return Ok(later(left.min(self.0.look_every()))),
            _ => {}
        }
        let turn = turns.wait(&open.note, self.0.0.settings.under_way).await;
        let Some(turn) = turn else { return Ok(later(self.0.look_every())) };
        // From here on it is a new write: should we die in it, the doubt begins anew.
        self.set_doubt(open.copy, None).await?;
        Ok(Doubted::Write(true, turn))
    }

    fn limited(&self) -> Outcome {
        Outcome::Defer { delay: self.0.next_turn(), code: waiting::LIMITED.into() }
    }

    /// Writes it, and keeps with our copy what the settle must know of the answer.
    async fn write(&self, message: &Message, open: &Open, resolved: bool, turn: Turn) -> Outcome {
        let Some(permit) = self.0.0.breaker.permit() else {
            return Outcome::Defer { delay: AWAY, code: waiting::BREAKER_OPEN.into() };
        };
        let called = sending(self.0.add(&open.note, Some(message.id), turn)).await;
        permit.tell(self.0.sign_of(called.as_ref().err()));
        match called {
            Ok(written) => match self.keep_merged(open, &written).await {
                Ok(()) => Outcome::Sent { result_ref: Some(written.memory_id) },
                // It is there, and nobody could write that down: whoever comes next looks for it first.
                Err(error) => {
                    tracing::warn!(%error, outbox_id = message.id, "a memory was written, and our copy cannot be; it is looked for");
                    let what = "the memory was written, and our own database did not answer";
                    let fault = Failure::new(code::STORE_UNAVAILABLE, what, Reach::Unknown);
                    Outcome::Retry { fault, retry_after: None }
                }
            },
            Err(fault) => {
                // What was in doubt before and is over by now is only looked for.
                let over = message.maybe_sent.then_some(Duration::ZERO);
                if let Some(doubt) = self.0.doubt_of(fault.doubt).or(over)
                    && let Err(error) = self.set_doubt(open.copy, Some(doubt)).await
                {
                    tracing::warn!(%error, outbox_id = message.id, "a doubt could not be kept; it begins anew");
                }
                self.after(fault, resolved)
            }
        }
    }

    async fn keep_merged(&self, open: &Open, written: &Written) -> Result<()> {
        let (note, copy, was, written) = (open.note.clone(), open.copy, open.merged, written.clone());
        let kept = self.0.transact(Mode::Write, move |tx| {
            let (note, written) = (note.clone(), written.clone());
            Box::pin(async move {
                let merged = is_merged(tx, &note, &written).await?;
                if merged != was {
                    copies::set_merged(tx, copy, merged).await?;
                }
                Ok(())
            })
        });
        kept.await
    }

    /// What is recorded for a flush that failed.
    fn after(&self, fault: Fault, resolved: bool) -> Outcome {
        let mut failure = Failure::new(fault.code.clone(), fault.message, fault.reach);
        failure.resolves = resolved;
        match fault.blame {
            Blame::Memory => Outcome::Dead(Failure { error: refused(&failure.error), ..failure }),
            Blame::Ours => Outcome::Defer { delay: AWAY, code: waiting::UNUSABLE.into() },
            Blame::Limit => self.limited(),
            Blame::Service => Outcome::Retry { fault: failure, retry_after: fault.retry_after },
        }
    }
}

/// How a refusal is told where a message ends: the settle knows it by this.
const REFUSED: &str = "refused: ";

fn refused(why: &str) -> String {
    format!("{REFUSED}{why}")
}

/// The service's words, if a message ended because it refused it.
pub(crate) fn refusal(error: &str) -> Option<&str> {
    error.strip_prefix(REFUSED)
}

fn store_unavailable(outbox_id: i64, error: &postrider::Error) -> Outcome {
    tracing::warn!(%error, outbox_id, "our copy cannot be read or written; the memory waits");
    Outcome::Defer { delay: Duration::from_secs(1), code: code::STORE_UNAVAILABLE.into() }
}

#[async_trait]
impl Courier for MemoryCourier {
    async fn deliver(&self, message: &Message) -> Outcome {
        let damaged = |why: &str| Outcome::Dead(Failure::new(code::PAYLOAD_CORRUPT, why, Reach::NeverSent));
        if !message.payload_is_intact() {
            return damaged("the stored memory does not match its digest");
        }
        let Ok(text) = String::from_utf8(message.payload.to_vec()) else {
            return damaged("the stored memory is no text");
        };
        let space = message.target.clone().unwrap_or_default();
        let sha = hex(&sha256(&message.payload));
        let mut open = match self.look(&space, &sha).await {
            Ok(Known::Stored(memory_id)) => return Outcome::Sent { result_ref: Some(memory_id) },
            Ok(Known::Open(Some(mut open))) => {
                // The message is intact: what was changed beside it is not sent, and put right.
                if open.note.payload_md != text {
                    tracing::error!(outbox_id = message.id, "the copy of a memory was damaged; it is restored");
                    if let Err(error) = self.restore(open.copy, &text).await {
                        return store_unavailable(message.id, &error);
                    }
                    open.note.payload_md = text;
                }
                open
            }
            // Without our copy there is nothing to go by but the message.
            Ok(Known::Open(None)) => {
                Open { copy: 0, note: alone(message, text, space, sha), merged: false, doubt: None }
            }
            Err(error) => return store_unavailable(message.id, &error),
        };
        if self.0.0.breaker.is_open() {
            return Outcome::Defer { delay: AWAY, code: waiting::BREAKER_OPEN.into() };
        }
        if self.0.limited().is_some() {
            return self.limited();
        }
        if !self.0.may_scout() {
            return Outcome::Defer { delay: AWAY, code: waiting::UNUSABLE.into() };
        }
        match self.doubted(message, &mut open).await {
            Ok(Doubted::Instead(outcome)) => outcome,
            Ok(Doubted::Write(resolved, turn)) => self.write(message, &open, resolved, turn).await,
            Err(error) => store_unavailable(message.id, &error),
        }
    }

    fn name(&self) -> &str {
        "openmemory"
    }
}

fn alone(message: &Message, payload_md: String, space: String, payload_sha: String) -> Note {
    Note {
        payload_md,
        space,
        payload_sha,
        meta: serde_json::Map::new(),
        kind: None,
        evidence_refs: vec![],
        actor: None,
        correlation_id: message.correlation_id.clone().unwrap_or_default(),
    }
}
