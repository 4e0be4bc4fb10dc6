//! Storing a memory: audited as pending, written to the service or queued in the outbox, audited as it ended. Each of the
//! two halves is one transaction, and none is open while the service is called.

use std::sync::Arc;
use std::time::Duration;

use postrider::clock::{self, Tick};
use postrider::error::Kind;
use postrider::store::{Mode, repeat};
use postrider::tx::Tx;
use postrider::{Enqueued, Error, NewMessage, Result};

use crate::answer::{Action, Ended, Failed, Stored, answer_of, blank, code};
use crate::audit::{self, By, End};
use crate::copies::{self, Becomes, Copy, State};
use crate::note::{NewMemory, Note, active_key};
use crate::upstream::{Blame, Doubt, Fault, Sight};
use crate::writing::{Called, Written, is_merged};
use crate::{LANE, Memories, governance};

/// Beyond the service's own timeout, until a write that nobody ended counts as left behind.
pub(crate) const MARGIN: Duration = Duration::from_secs(2);
/// Why the service was not called where the caller said so.
pub(crate) const SKIPPED: &str = "skipped";
/// How often a twin's write is looked at.
const LOOK: Duration = Duration::from_millis(20);
const RARELY: Duration = Duration::from_millis(320);

/// How the first half ended.
#[derive(Clone, Debug)]
enum Begun {
    /// The service is to be called.
    Write {
        copy: i64,
        audit_id: i64,
    },
    /// It should be there under this id; the service is to be asked first.
    See {
        memory_id: String,
    },
    /// A twin's write is under way.
    Wait,
    Ended(Ended),
}

/// With what the first half is tried.
#[derive(Clone, Debug)]
struct Attempt {
    writer: String,
    /// Why the service is not to be called, if so, and for how long that will be.
    kept_from: Option<(&'static str, Duration)>,
    /// What was seen under an id it should have.
    seen: Option<(String, Sight)>,
    /// An earlier try may have been committed.
    again: bool,
}

impl Attempt {
    fn by(&self) -> By<'_> {
        By { writer: &self.writer, again: self.again }
    }
}

/// How a memory waits in the outbox.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    pub delay: Duration,
    /// So long may an earlier write still be applied.
    pub doubt: Option<Duration>,
}

impl Memories {
    /// Stores a memory. Always answers; what it says holds.
    pub async fn store(&self, memory: NewMemory) -> Stored {
        let (correlation_id, refs) = (memory.correlation_id.clone(), memory.evidence_refs.clone());
        let (settings, skips) = (&self.0.settings, memory.skip_openmemory);
        let note = match memory.check(&settings.default_space, settings.max_bytes) {
            Ok(note) => Arc::new(note),
            Err(why) => {
                let mut answer = blank(correlation_id, refs, Action::Error, why);
                answer.error = Some(code::INVALID_MEMORY);
                return answer;
            }
        };
        // A task of its own: a caller may go away, a write that was begun may not.
        let (handle, work) = (self.clone(), note.clone());
        let ended = tokio::spawn(async move { handle.store_note(&work, skips).await }).await;
        let ended = ended.unwrap_or_else(|e| Err(Failed::first_half(Error::database(e.to_string()))));
        answer_of(&note, ended)
    }

    async fn store_note(&self, note: &Arc<Note>, skips: bool) -> Result<Ended, Failed> {
        let began = Tick::now();
        let writer = format!("{:016x}{:016x}", clock::seed(), clock::seed());
        let patience = self.0.settings.upstream.timeout * 2 + 2 * MARGIN;
        let (mut seen, mut turn) = (None, None);
        loop {
            let mut kept_from = if skips { Some((SKIPPED, Duration::ZERO)) } else { self.kept_from() };
            if kept_from.is_none() && turn.is_none() {
                turn = self.0.turns.wait(note, self.0.settings.upstream.timeout).await;
                kept_from = turn.is_none().then(|| ("writes_in_doubt", self.look_every()));
            }
            let attempt = Attempt { writer: writer.clone(), kept_from, seen: seen.take(), again: false };
            match self.begin(note, attempt).await.map_err(Failed::first_half)? {
                Begun::Write { copy, audit_id } => {
                    let called = match (self.0.breaker.permit(), turn) {
                        (Some(permit), Some(turn)) => {
                            let called = self.add(note, None, turn).await;
                            permit.tell(self.sign_of(called.as_ref().err()));
                            called
                        }
                        _ => Err(Fault::breaker_open()),
                    };
                    return self.end(note, copy, audit_id, called).await;
                }
                Begun::See { memory_id } => {
                    let sight = self.sight(&memory_id).await;
                    seen = Some((memory_id, sight));
                    continue;
                }
                Begun::Ended(ended) => {
                    self.0.outbox.ring();
                    return Ok(ended);
                }
                Begun::Wait => turn = None,
            }
            if Tick::now().since(began) > patience {
                let what = "another write of the same memory does not end";
                return Err(Failed::first_half(Error::new(Kind::Busy, what)));
            }
            self.wait_for_the_other(note, patience.saturating_sub(Tick::now().since(began))).await;
        }
    }

    /// Waits until the other write of this memory has ended, by looks that write nothing and become rarer.
    async fn wait_for_the_other(&self, note: &Arc<Note>, patience: Duration) {
        let (began, mut pause) = (Tick::now(), LOOK);
        while Tick::now().since(began) < patience {
            clock::sleep(pause).await;
            pause = (pause * 2).min(RARELY);
            let work = note.clone();
            let looked = self.transact(Mode::Look, move |tx| {
                let note = work.clone();
                Box::pin(async move { copies::find(tx, &note.space, &note.payload_sha, false).await })
            });
            match looked.await {
                Ok(Some(copy)) if copy.state == State::Writing && !copy.overdue => {}
                // It has ended, or the next try is told why it cannot be seen.
                _ => return,
            }
        }
    }

    /// Why the service is not to be called now, if so.
    fn kept_from(&self) -> Option<(&'static str, Duration)> {
        if self.0.settings.upstream.url.is_none() {
            return Some(("not_configured", Duration::ZERO));
        }
        if self.0.breaker.is_open() {
            return Some(("breaker_open", Duration::ZERO));
        }
        self.limited().map(|_| ("rate_limited", self.next_turn()))
    }

    /// The first half: the audit, and a copy in the state `writing`; or, where the service is not to be called, all of it.
    async fn begin(&self, note: &Arc<Note>, attempt: Attempt) -> Result<Begun> {
        // What was written is found then: its content is its key.
        repeat(|round| {
            let attempt = Arc::new(Attempt { again: round > 0, ..attempt.clone() });
            let (handle, work) = (self.clone(), note.clone());
            self.transact(Mode::Write, move |tx| {
                let (handle, note, attempt) = (handle.clone(), work.clone(), attempt.clone());
                Box::pin(async move { handle.begin_in(tx, &note, &attempt).await })
            })
        })
        .await
    }

    async fn begin_in(&self, tx: &mut (dyn Tx + Send), note: &Note, attempt: &Attempt) -> Result<Begun> {
        if let Some((rule, why)) = governance::get_or_create(tx, &note.space).await?.refuses(note) {
            let reason = format!("governance:{rule}");
            audit::write(tx, note, &rejected(reason), attempt.by()).await?;
            return Ok(Begun::Ended(Ended::Refused { code: "GOVERNANCE_REJECTED", why }));
        }
        if let Some(copy) = copies::find(tx, &note.space, &note.payload_sha, true).await? {
            return self.meet(tx, note, &copy, attempt).await;
        }
        let audit_id = audit::write(tx, note, &End::pending(), attempt.by()).await?;
        let patience = self.0.settings.upstream.timeout + MARGIN;
        let Some(copy) = copies::insert(tx, note, audit_id, &attempt.writer, patience).await? else {
            return Err(Error::new(Kind::Busy, "the same memory was stored a moment ago; try again"));
        };
        let Some((class, delay)) = attempt.kept_from else { return Ok(Begun::Write { copy, audit_id }) };
        let why = format!("openmemory_write_failed:{class}");
        let outbox_id = self.queue(tx, note, copy, Waits { delay, doubt: None }, &why).await?;
        audit::end(tx, audit_id, note, &redirected(&why, outbox_id)).await?;
        Ok(Begun::Ended(Ended::Queued { outbox_id, again: false, why }))
    }

    /// The same content in the same space was here before.
    async fn meet(&self, tx: &mut (dyn Tx + Send), note: &Note, copy: &Copy, attempt: &Attempt) -> Result<Begun> {
        if copy.writer == attempt.writer {
            // Our own, from a first half whose answer was lost.
            match (copy.state, copy.audit_id, copy.outbox_id) {
                (State::Writing, Some(audit_id), _) if !copy.overdue => {
                    return Ok(Begun::Write { copy: copy.id, audit_id });
                }
                (State::Queued, _, Some(outbox_id)) => {
                    let why = "openmemory_write_failed:breaker_open".to_owned();
                    return Ok(Begun::Ended(Ended::Queued { outbox_id, again: false, why }));
                }
                _ => {}
            }
        }
        match (copy.state, &copy.memory_id, copy.outbox_id) {
            (State::Writing, ..) if !copy.overdue => Ok(Begun::Wait),
            (State::Stored, Some(memory_id), _) => self.meet_stored(tx, note, copy, memory_id, attempt).await,
            (State::Queued, _, Some(outbox_id)) => {
                let why = "openmemory_write_failed:queued_before".to_owned();
                audit::write(tx, note, &redirected(&why, outbox_id), attempt.by()).await?;
                Ok(Begun::Ended(Ended::Queued { outbox_id, again: true, why }))
            }
            (State::Dead, ..) if copy.refusal.is_some() => self.meet_refused(tx, note, copy, attempt).await,
            // Left behind by a process that is gone, or given up: it is brought to its end through the outbox.
            (state, ..) => {
                let class = if state == State::Dead { "given_up_before" } else { "left_behind" };
                let why = format!("openmemory_write_failed:{class}");
                let doubt = (state == State::Writing).then(|| self.doubt_of(Doubt::UnderWay)).flatten();
                let outbox_id = self.queue(tx, note, copy.id, Waits { delay: Duration::ZERO, doubt }, &why).await?;
                if let (State::Writing, Some(audit_id), Some(first)) =
                    (state, copy.audit_id, copies::note_of(tx, copy.id).await?)
                {
                    audit::end(tx, audit_id, &first, &redirected(&why, outbox_id)).await?;
                }
                audit::write(tx, note, &redirected(&why, outbox_id), attempt.by()).await?;
                Ok(Begun::Ended(Ended::Queued { outbox_id, again: false, why }))
            }
        }
    }

    /// It was stored. That the service still has it is asked, not believed: with another key, or emptied, it has not.
    async fn meet_stored(
        &self,
        tx: &mut (dyn Tx + Send),
        note: &Note,
        copy: &Copy,
        memory_id: &str,
        attempt: &Attempt,
    ) -> Result<Begun> {
        let seen = attempt.seen.as_ref().filter(|(id, _)| id == memory_id).map(|(_, sight)| sight);
        let gone = match (seen, attempt.kept_from) {
            (None, None) => return Ok(Begun::See { memory_id: memory_id.to_owned() }),
            (Some(Sight::Missing), _) => true,
            // What it was merged with may be another key's: writing it again would merge it again.
            (Some(Sight::Hidden), _) => !copy.merged,
            (Some(Sight::Seen(held)), _) => !copy.merged && !held.may_be(&note.payload_sha),
            (Some(Sight::Unaskable), _) => false,
            (None, Some(_)) => self.is_stranger() && !copy.merged,
        };
        if !gone {
            let reason = if copy.merged { "merged" } else { "deduplicated" }.to_owned();
            let end = End { action: "allow", reason, status: "success", outbox_id: None, memory_id: Some(memory_id) };
            audit::write(tx, note, &end, attempt.by()).await?;
            let (memory_id, merged) = (memory_id.to_owned(), copy.merged);
            return Ok(Begun::Ended(Ended::Stored { memory_id, again: true, deduplicated: true, merged }));
        }
        copies::forget_delivery(tx, note).await?;
        if let Some((class, delay)) = attempt.kept_from {
            let why = format!("openmemory_write_failed:{class}");
            let outbox_id = self.queue(tx, note, copy.id, Waits { delay, doubt: None }, &why).await?;
            audit::write(tx, note, &redirected(&why, outbox_id), attempt.by()).await?;
            return Ok(Begun::Ended(Ended::Queued { outbox_id, again: false, why }));
        }
        self.write_again(tx, note, copy, attempt).await
    }

    /// The service refused it. It may think better of it, so it is asked again; while it cannot be, its word stands.
    async fn meet_refused(
        &self,
        tx: &mut (dyn Tx + Send),
        note: &Note,
        copy: &Copy,
        attempt: &Attempt,
    ) -> Result<Begun> {
        if attempt.kept_from.is_none() {
            return self.write_again(tx, note, copy, attempt).await;
        }
        audit::write(tx, note, &rejected("openmemory_refused:before".to_owned()), attempt.by()).await?;
        let why = copy.refusal.clone().unwrap_or_default();
        let why = format!("{why} (when it was stored before; OpenMemory cannot be asked again now)");
        Ok(Begun::Ended(Ended::Refused { code: "MEMORY_REFUSED", why }))
    }

    async fn write_again(
        &self,
        tx: &mut (dyn Tx + Send),
        note: &Note,
        copy: &Copy,
        attempt: &Attempt,
    ) -> Result<Begun> {
        let audit_id = audit::write(tx, note, &End::pending(), attempt.by()).await?;
        let patience = self.0.settings.upstream.timeout + MARGIN;
        copies::write_again(tx, copy.id, audit_id, &attempt.writer, patience).await?;
        Ok(Begun::Write { copy: copy.id, audit_id })
    }

    /// Puts a memory into the outbox, with the reason why it is there; the copy is locked.
    pub(crate) async fn queue(
        &self,
        tx: &mut (dyn Tx + Send),
        note: &Note,
        copy: i64,
        waits: Waits,
        why: &str,
    ) -> Result<i64> {
        let mut message = NewMessage::new(LANE, note.payload_md.clone())
            .content_type("text/markdown; charset=utf-8")
            .active_key(active_key(&note.space, &note.payload_sha))
            .target(&note.space)
            .delay(waits.delay);
        message.correlation_id = Some(note.correlation_id.clone()).filter(|id| !id.is_empty());
        let receipt = self.0.outbox.enqueue_in(tx, &[message]).await?;
        let entry = *receipt.entries().first().ok_or_else(|| Error::database("an enqueue without an id"))?;
        let id = entry.id;
        // One that was there before has a story of its own, and a worker may be at it.
        if entry.outcome == Enqueued::Created {
            tx.execute("UPDATE outbox SET last_error = ? WHERE id = ?", &[why.into(), id.into()]).await?;
        }
        copies::become_(tx, copy, Becomes::Queued { outbox_id: id, doubt: waits.doubt }).await?;
        Ok(id)
    }

    /// The second half.
    async fn end(&self, note: &Arc<Note>, copy: i64, audit_id: i64, called: Called) -> Result<Ended, Failed> {
        let written = called.is_ok();
        let work = Arc::new((note.clone(), called));
        let ended = repeat(|_| {
            let (handle, work) = (self.clone(), work.clone());
            self.transact(Mode::Write, move |tx| {
                let (handle, work) = (handle.clone(), work.clone());
                Box::pin(async move { handle.end_in(tx, &work.0, copy, audit_id, &work.1).await })
            })
        });
        let ended = ended.await.map_err(|error| Failed::second_half(written, error))?;
        if matches!(ended, Ended::Queued { .. }) {
            self.0.outbox.ring();
        }
        Ok(ended)
    }

    async fn end_in(
        &self,
        tx: &mut (dyn Tx + Send),
        note: &Note,
        id: i64,
        audit_id: i64,
        called: &Called,
    ) -> Result<Ended> {
        let gone = || Error::database("a memory's copy is gone");
        let copy = copies::find(tx, &note.space, &note.payload_sha, true).await?.ok_or_else(gone)?;
        let ours = copy.id == id && copy.state == State::Writing && copy.audit_id == Some(audit_id);
        match called {
            Ok(written) => self.end_written(tx, note, &copy, audit_id, written).await,
            Err(fault) if fault.blame == Blame::Memory => {
                if ours {
                    copies::become_(tx, id, Becomes::Dead { refusal: Some(&fault.message) }).await?;
                }
                audit::end(tx, audit_id, note, &rejected(format!("openmemory_refused:{}", fault.class()))).await?;
                Ok(Ended::Refused { code: "MEMORY_REFUSED", why: fault.message.clone() })
            }
            Err(fault) => {
                let why = format!("openmemory_write_failed:{}", fault.class());
                let outbox_id = match (ours, copy.outbox_id) {
                    (true, _) => self.queue(tx, note, id, self.waits_after(fault), &why).await?,
                    // Somebody thought us gone, and queued it; or our own answer was lost.
                    (false, Some(outbox_id)) => outbox_id,
                    (false, None) => return Err(gone()),
                };
                audit::end(tx, audit_id, note, &redirected(&why, outbox_id)).await?;
                Ok(Ended::Queued { outbox_id, again: false, why })
            }
        }
    }

    async fn end_written(
        &self,
        tx: &mut (dyn Tx + Send),
        note: &Note,
        copy: &Copy,
        audit_id: i64,
        written: &Written,
    ) -> Result<Ended> {
        let memory_id = written.memory_id.as_str();
        let merged = is_merged(tx, note, written).await?;
        // Also where somebody thought us gone and queued it: the flush then finds it stored.
        let new = copy.state != State::Stored;
        if new {
            copies::become_(tx, copy.id, Becomes::Stored { memory_id, merged, outbox_id: None }).await?;
        }
        let reason = if merged { "openmemory_merged" } else { "openmemory_write_success" }.to_owned();
        let end = End { action: "allow", reason, status: "success", outbox_id: None, memory_id: Some(memory_id) };
        // It ended before where somebody thought us gone, and where the answer of our own commit was lost; then it was
        // us who made it stored, and it is told.
        if !audit::end(tx, audit_id, note, &end).await? && new {
            let by = By { writer: &copy.writer, again: false };
            audit::write(tx, note, &end, by).await?;
        }
        let (memory_id, deduplicated) = (memory_id.to_owned(), written.deduplicated);
        Ok(Ended::Stored { memory_id, again: false, deduplicated, merged })
    }

    /// How long a memory waits whose write failed so.
    fn waits_after(&self, fault: &Fault) -> Waits {
        let doubt = self.doubt_of(fault.doubt);
        let delay = match fault.blame {
            Blame::Limit => self.next_turn(),
            // It is looked for soon: most that got no answer in time are there a little later.
            _ if doubt.is_some() => self.look_every(),
            _ => Duration::ZERO,
        };
        Waits { delay, doubt }
    }
}

pub(crate) fn redirected(reason: &str, outbox_id: i64) -> End<'static> {
    let reason = reason.to_owned();
    End { action: "redirect", reason, status: "redirected", outbox_id: Some(outbox_id), memory_id: None }
}

fn rejected(reason: String) -> End<'static> {
    End { action: "reject", reason, status: "failed", outbox_id: None, memory_id: None }
}
