//! Storing a memory: audited as pending, written to the service or queued in the outbox, audited as it ended. Each of the
//! two halves is one transaction, and none is open while the service is called.

use std::sync::Arc;
use std::time::Duration;

use postrider::clock::{self, Tick};
use postrider::error::{Effect, Kind};
use postrider::store::Mode;
use postrider::tx::Tx;
use postrider::{Error, NewMessage, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::audit::{self, End};
use crate::copies::{self, Copy, State};
use crate::note::{NewMemory, Note, active_key};
use crate::upstream::{Addition, Blame, Fault};
use crate::{LANE, Memories, governance};

/// Beyond the service's own timeout, until a write that nobody ended counts as left behind.
pub(crate) const MARGIN: Duration = Duration::from_secs(2);
/// How often a twin's write is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// What became of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// It is in the service.
    Allow,
    /// It is in the outbox and will be brought there.
    Deferred,
    /// It is not taken.
    Reject,
    /// It could not be taken now.
    Error,
}

impl Action {
    pub fn as_str(self) -> &'static str {
        match self {
            Action::Allow => "allow",
            Action::Deferred => "deferred",
            Action::Reject => "reject",
            Action::Error => "error",
        }
    }
}

/// Codes of [`Stored::error`].
pub mod code {
    pub const AUDIT_WRITE_FAILED: &str = "AUDIT_WRITE_FAILED";
    pub const OUTBOX_ENQUEUE_FAILED: &str = "OUTBOX_ENQUEUE_FAILED";
    pub const INVALID_MEMORY: &str = "INVALID_MEMORY";
}

/// The answer to a store, with the same fields and types whatever happened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stored {
    pub ok: bool,
    pub action: Action,
    pub outbox_id: Option<i64>,
    pub correlation_id: String,
    pub space_written: Option<String>,
    pub memory_id: Option<String>,
    pub evidence_refs: Vec<Value>,
    pub message: String,
    pub deduplicated: bool,
    pub payload_sha: Option<String>,
    /// For [`Action::Error`] and [`Action::Reject`].
    #[serde(skip)]
    pub error: Option<&'static str>,
}

/// How the first half ended.
#[derive(Clone, Debug)]
enum Begun {
    /// The service is to be called.
    Write {
        copy: i64,
        audit_id: i64,
    },
    /// A twin's write is under way.
    Wait,
    Ended(Ended),
}

/// Where a memory is.
#[derive(Clone, Debug)]
enum Ended {
    Stored { memory_id: String, again: bool },
    Queued { outbox_id: i64, again: bool, why: String },
    Refused { code: &'static str, why: String },
}

/// Why there is no answer but an error.
#[derive(Debug)]
struct Failed {
    code: &'static str,
    what: &'static str,
    error: Error,
}

impl Failed {
    fn first_half(error: Error) -> Self {
        let what = "our database cannot record the write, and nothing is written unrecorded; store it again later";
        Failed { code: code::AUDIT_WRITE_FAILED, what, error }
    }

    fn second_half(written: bool, error: Error) -> Self {
        let (code, what) = match written {
            true => (
                code::AUDIT_WRITE_FAILED,
                "OpenMemory has the memory, but our database could not record it; the record will be completed, and storing it again does no harm",
            ),
            false => (
                code::OUTBOX_ENQUEUE_FAILED,
                "neither OpenMemory nor our database takes the memory now; store it again later",
            ),
        };
        Failed { code, what, error }
    }
}

/// What the service said, or why it was not asked.
type Called = std::result::Result<String, Fault>;

impl Memories {
    /// Stores a memory. Always answers; what it says holds.
    pub async fn store(&self, memory: NewMemory) -> Stored {
        let (correlation_id, refs) = (memory.correlation_id.clone(), memory.evidence_refs.clone());
        let settings = &self.0.settings;
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
        let ended = tokio::spawn(async move { handle.store_note(&work).await }).await;
        let ended = ended.unwrap_or_else(|e| Err(Failed::first_half(Error::database(e.to_string()))));
        answer_of(&note, ended)
    }

    async fn store_note(&self, note: &Arc<Note>) -> Result<Ended, Failed> {
        let (began, writer) = (Tick::now(), format!("{:016x}{:016x}", clock::seed(), clock::seed()));
        let patience = self.0.settings.upstream.timeout + 2 * MARGIN;
        loop {
            let may_call = self.0.settings.upstream.url.is_some() && !self.0.breaker.is_open();
            let begun = self.begin(note, &writer, may_call).await.map_err(Failed::first_half)?;
            if let Begun::Write { copy, audit_id } = begun {
                let called = match self.0.breaker.permit() {
                    Some(permit) => {
                        let called = self.add(note, note.kind.as_deref(), &note.meta, None).await;
                        permit.answered(called.as_ref().is_err_and(Fault::counts));
                        called
                    }
                    None => Err(Fault::breaker_open()),
                };
                return self.end(note, copy, audit_id, called).await;
            }
            if let Begun::Ended(ended) = begun {
                self.0.outbox.ring();
                return Ok(ended);
            }
            if Tick::now().since(began) > patience {
                let what = "another write of the same memory does not end";
                return Err(Failed::first_half(Error::new(Kind::Busy, what)));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// The first half: the audit, and a copy in the state `writing`; or, where the service is not to be called, all of it.
    async fn begin(&self, note: &Arc<Note>, writer: &str, may_call: bool) -> Result<Begun> {
        let writer: Arc<str> = writer.into();
        for round in 0.. {
            let (handle, work, writer) = (self.clone(), note.clone(), writer.clone());
            let begun = self.transact(Mode::Write, move |tx| {
                let (handle, note, writer) = (handle.clone(), work.clone(), writer.clone());
                Box::pin(async move { handle.begin_in(tx, &note, &writer, may_call).await })
            });
            match begun.await {
                // What was written is found then: its content is its key.
                Err(error) if error.effect == Effect::Unknown && round < 3 => {}
                other => return other,
            }
        }
        unreachable!("the loop ends by returning")
    }

    async fn begin_in(&self, tx: &mut (dyn Tx + Send), note: &Note, writer: &str, may_call: bool) -> Result<Begun> {
        if let Some((rule, why)) = governance::of(tx, &note.space).await?.refuses(note) {
            let reason = format!("governance:{rule}");
            let end = End { action: "reject", reason, status: "failed", outbox_id: None, memory_id: None };
            audit::write(tx, note, &end).await?;
            return Ok(Begun::Ended(Ended::Refused { code: "GOVERNANCE_REJECTED", why }));
        }
        if let Some(copy) = copies::find(tx, &note.space, &note.payload_sha, true).await? {
            return self.meet(tx, note, &copy, writer).await;
        }
        let audit_id = audit::write(tx, note, &End::pending()).await?;
        let patience = self.0.settings.upstream.timeout + MARGIN;
        let Some(copy) = copies::insert(tx, note, audit_id, writer, patience).await? else {
            return Err(Error::new(Kind::Busy, "the same memory was stored a moment ago; try again"));
        };
        if may_call {
            return Ok(Begun::Write { copy, audit_id });
        }
        let class = if self.0.settings.upstream.url.is_none() { "not_configured" } else { "breaker_open" };
        let why = format!("openmemory_write_failed:{class}");
        let outbox_id = self.queue(tx, note, copy).await?;
        audit::end(tx, audit_id, note, &redirected(&why, outbox_id)).await?;
        Ok(Begun::Ended(Ended::Queued { outbox_id, again: false, why }))
    }

    /// The same content in the same space was here before.
    async fn meet(&self, tx: &mut (dyn Tx + Send), note: &Note, copy: &Copy, writer: &str) -> Result<Begun> {
        if copy.writer == writer {
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
            (State::Stored, Some(memory_id), _) => {
                let reason = "deduplicated".to_owned();
                let end =
                    End { action: "allow", reason, status: "success", outbox_id: None, memory_id: Some(memory_id) };
                audit::write(tx, note, &end).await?;
                Ok(Begun::Ended(Ended::Stored { memory_id: memory_id.clone(), again: true }))
            }
            (State::Queued, _, Some(outbox_id)) => {
                let why = "openmemory_write_failed:queued_before".to_owned();
                audit::write(tx, note, &redirected(&why, outbox_id)).await?;
                Ok(Begun::Ended(Ended::Queued { outbox_id, again: true, why }))
            }
            // Left behind by a process that is gone, or given up: it is brought to its end through the outbox.
            (state, ..) => {
                let class = if state == State::Dead { "given_up_before" } else { "left_behind" };
                let why = format!("openmemory_write_failed:{class}");
                let outbox_id = self.queue(tx, note, copy.id).await?;
                if let (State::Writing, Some(audit_id), Some(first)) =
                    (state, copy.audit_id, copies::note_of(tx, copy.id).await?)
                {
                    audit::end(tx, audit_id, &first, &redirected(&why, outbox_id)).await?;
                }
                audit::write(tx, note, &redirected(&why, outbox_id)).await?;
                Ok(Begun::Ended(Ended::Queued { outbox_id, again: false, why }))
            }
        }
    }

    /// Puts a memory into the outbox; the copy is locked.
    pub(crate) async fn queue(&self, tx: &mut (dyn Tx + Send), note: &Note, copy: i64) -> Result<i64> {
        let mut message = NewMessage::new(LANE, note.payload_md.clone())
            .content_type("text/markdown; charset=utf-8")
            .active_key(active_key(&note.space, &note.payload_sha))
            .target(&note.space);
        message.correlation_id = Some(note.correlation_id.clone()).filter(|id| !id.is_empty());
        let receipt = self.0.outbox.enqueue_in(tx, &[message]).await?;
        let id = receipt.ids().first().copied().ok_or_else(|| Error::database("an enqueue without an id"))?;
        copies::become_(tx, copy, State::Queued, None, Some(id)).await?;
        Ok(id)
    }

    /// One write to the service, with what tells whose it is.
    pub(crate) async fn add(
        &self,
        note: &Note,
        kind: Option<&str>,
        meta: &Map<String, Value>,
        outbox_id: Option<i64>,
    ) -> Called {
        let mut metadata = meta.clone();
        metadata.extend([
            ("target_space".to_owned(), json!(note.space)),
            ("payload_sha".to_owned(), json!(note.payload_sha)),
            ("outbox_id".to_owned(), json!(outbox_id)),
        ]);
        metadata.extend(kind.map(|kind| ("kind".to_owned(), json!(kind))));
        let tags = [note.space.as_str()].into_iter().chain(kind).collect();
        let addition = Addition { content: &note.payload_md, tags, metadata: Value::Object(metadata) };
        let called = self.0.upstream.add(&addition).await;
        self.note_trouble(called.as_ref().err());
        called
    }

    /// The second half.
    async fn end(&self, note: &Arc<Note>, copy: i64, audit_id: i64, called: Called) -> Result<Ended, Failed> {
        let written = called.is_ok();
        let work = Arc::new((note.clone(), called));
        for round in 0.. {
            let (handle, work) = (self.clone(), work.clone());
            let ended = self.transact(Mode::Write, move |tx| {
                let (handle, work) = (handle.clone(), work.clone());
                Box::pin(async move { handle.end_in(tx, &work.0, copy, audit_id, &work.1).await })
            });
            match ended.await {
                Err(error) if error.effect == Effect::Unknown && round < 3 => {}
                Err(error) => return Err(Failed::second_half(written, error)),
                Ok(ended) => {
                    if matches!(ended, Ended::Queued { .. }) {
                        self.0.outbox.ring();
                    }
                    return Ok(ended);
                }
            }
        }
        unreachable!("the loop ends by returning")
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
            Ok(memory_id) => {
                // Also where somebody thought us gone and queued it: the flush then finds it stored.
                if copy.state != State::Stored {
                    copies::become_(tx, copy.id, State::Stored, Some(memory_id), None).await?;
                }
                let reason = "openmemory_write_success".to_owned();
                let end =
                    End { action: "allow", reason, status: "success", outbox_id: None, memory_id: Some(memory_id) };
                if !audit::end(tx, audit_id, note, &end).await? && !ours {
                    audit::write(tx, note, &end).await?;
                }
                Ok(Ended::Stored { memory_id: memory_id.clone(), again: false })
            }
            Err(fault) if fault.blame == Blame::Memory => {
                if ours {
                    copies::become_(tx, id, State::Dead, None, None).await?;
                }
                let reason = format!("openmemory_refused:{}", fault.class());
                let end = End { action: "reject", reason, status: "failed", outbox_id: None, memory_id: None };
                audit::end(tx, audit_id, note, &end).await?;
                Ok(Ended::Refused { code: "MEMORY_REFUSED", why: fault.message.clone() })
            }
            Err(fault) => {
                let why = format!("openmemory_write_failed:{}", fault.class());
                let outbox_id = match (ours, copy.outbox_id) {
                    (true, _) => self.queue(tx, note, id).await?,
                    // Somebody thought us gone, and queued it; or our own answer was lost.
                    (false, Some(outbox_id)) => outbox_id,
                    (false, None) => return Err(gone()),
                };
                audit::end(tx, audit_id, note, &redirected(&why, outbox_id)).await?;
                Ok(Ended::Queued { outbox_id, again: false, why })
            }
        }
    }
}

pub(crate) fn redirected(reason: &str, outbox_id: i64) -> End<'static> {
    let reason = reason.to_owned();
    End { action: "redirect", reason, status: "redirected", outbox_id: Some(outbox_id), memory_id: None }
}

fn blank(correlation_id: String, evidence_refs: Vec<Value>, action: Action, message: String) -> Stored {
    Stored {
        ok: false,
        action,
        outbox_id: None,
        correlation_id,
        space_written: None,
        memory_id: None,
        evidence_refs,
        message,
        deduplicated: false,
        payload_sha: None,
        error: None,
    }
}

fn answer_of(note: &Note, ended: Result<Ended, Failed>) -> Stored {
    let blank = |action, message| Stored {
        payload_sha: Some(note.payload_sha.clone()),
        ..blank(note.correlation_id.clone(), note.evidence_refs.clone(), action, message)
    };
    match ended {
        Ok(Ended::Stored { memory_id, again }) => {
            let message = if again { "this memory was stored before" } else { "stored" };
            Stored {
                ok: true,
                space_written: Some(note.space.clone()),
                memory_id: Some(memory_id),
                deduplicated: again,
                ..blank(Action::Allow, message.to_owned())
            }
        }
        Ok(Ended::Queued { outbox_id, again, why }) => {
            let message =
                format!("OpenMemory is not available ({why}); the memory is queued and will be written later");
            Stored { outbox_id: Some(outbox_id), deduplicated: again, ..blank(Action::Deferred, message) }
        }
        Ok(Ended::Refused { code, why }) => Stored { error: Some(code), ..blank(Action::Reject, why) },
        Err(Failed { code, what, error }) => {
            tracing::error!(%error, code, correlation_id = note.correlation_id, "a memory could not be stored");
            Stored { error: Some(code), ..blank(Action::Error, format!("{code}: {what}")) }
        }
    }
}
