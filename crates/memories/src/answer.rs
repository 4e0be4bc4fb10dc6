//! The answer to a store: what became of a memory, told with the same fields whatever happened.

use postrider::Error;
use serde::Serialize;
use serde_json::Value;

use crate::note::Note;
use crate::store::SKIPPED;

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
    /// It was here before, or the service takes it for something it has.
    pub deduplicated: bool,
    /// The service has no memory of its own for it: it keeps this one, which it takes for the same.
    pub merged_with: Option<String>,
    pub payload_sha: Option<String>,
    /// It was stored or queued before.
    #[serde(skip)]
    pub again: bool,
    /// For [`Action::Error`] and [`Action::Reject`].
    #[serde(skip)]
    pub error: Option<&'static str>,
}

/// Where a memory is.
#[derive(Clone, Debug)]
pub(crate) enum Ended {
    Stored {
        memory_id: String,
        /// It was stored before.
        again: bool,
        /// The service said that it had it.
        deduplicated: bool,
        /// What it has is something else.
        merged: bool,
    },
    Queued {
        outbox_id: i64,
        again: bool,
        why: String,
    },
    Refused {
        code: &'static str,
        why: String,
    },
}

/// Why there is no answer but an error.
#[derive(Debug)]
pub(crate) struct Failed {
    code: &'static str,
    what: &'static str,
    error: Error,
}

impl Failed {
    pub fn first_half(error: Error) -> Self {
        let what = "our database cannot record the write, and nothing is written unrecorded; store it again later";
        Failed { code: code::AUDIT_WRITE_FAILED, what, error }
    }

    pub fn second_half(written: bool, error: Error) -> Self {
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

/// An answer that says nothing yet.
pub(crate) fn blank(correlation_id: String, evidence_refs: Vec<Value>, action: Action, message: String) -> Stored {
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
        merged_with: None,
        payload_sha: None,
        again: false,
        error: None,
    }
}

pub(crate) fn answer_of(note: &Note, ended: Result<Ended, Failed>) -> Stored {
    let blank = |action, message| Stored {
        payload_sha: Some(note.payload_sha.clone()),
        ..blank(note.correlation_id.clone(), note.evidence_refs.clone(), action, message)
    };
    match ended {
        Ok(Ended::Stored { memory_id, again, deduplicated, merged }) => {
            let message = match (merged, again, deduplicated) {
                (true, ..) => format!(
                    "OpenMemory takes this for a memory it has ({memory_id}) and keeps only that one; this text is kept here, and questions find it"
                ),
                (false, true, _) => "this memory was stored before".to_owned(),
                (false, false, true) => "stored; OpenMemory had this text before".to_owned(),
                (false, false, false) => "stored".to_owned(),
            };
            Stored {
                ok: true,
                space_written: Some(note.space.clone()),
                again,
                deduplicated: again || deduplicated || merged,
                merged_with: merged.then(|| memory_id.clone()),
                memory_id: Some(memory_id),
                ..blank(Action::Allow, message)
            }
        }
        Ok(Ended::Queued { outbox_id, again, why }) => {
            let message = match why.ends_with(SKIPPED) {
                true => {
                    format!("OpenMemory was left out, as asked ({why}); the memory is queued and will be written later")
                }
                false => format!("OpenMemory is not available ({why}); the memory is queued and will be written later"),
            };
            Stored { outbox_id: Some(outbox_id), again, deduplicated: again, ..blank(Action::Deferred, message) }
        }
        Ok(Ended::Refused { code, why }) => Stored { error: Some(code), ..blank(Action::Reject, why) },
        Err(Failed { code, what, error }) => {
            tracing::error!(%error, code, correlation_id = note.correlation_id, "a memory could not be stored");
            Stored { error: Some(code), ..blank(Action::Error, format!("{code}: {what}")) }
        }
    }
}
