//! Standard output: a table or a sentence for people, one JSON document for scripts, and never a panic when the reader
//! has gone (`postrider outbox list | head`).

use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::failure::{Failure, Result};

#[derive(Clone, Copy, Debug)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// The same data in the form that was asked for.
    pub fn show(self, data: &impl Serialize, for_people: impl FnOnce() -> String) -> Result<()> {
        if self.json { self.json(data) } else { print(&for_people()) }
    }

    pub fn json(self, data: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(data)
            .map_err(|e| Failure::failed(format!("cannot write the answer as JSON: {e}")))?;
        print(&text)
    }
}

/// Writes text and a line end, if it lacks one.
pub fn print(text: &str) -> Result<()> {
    let end = if text.ends_with('\n') { "" } else { "\n" };
    print_bytes(format!("{text}{end}").as_bytes())
}

/// Whoever reads it, or does not: what runs for long neither waits for that nor ends over it.
pub fn print_aside(text: String) {
    let write = move || {
        if let Err(error) = print(&text) {
            tracing::warn!(%error, "standard output takes nothing");
        }
    };
    if std::thread::Builder::new().name("postrider-stdout".to_owned()).spawn(write).is_err() {
        tracing::warn!("no thread to write to standard output with");
    }
}

pub fn print_bytes(bytes: &[u8]) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::nobody_listens(),
        _ => Failure::failed(format!("cannot write to standard output: {e}")),
    })
}

/// `1 message`, `2 messages`.
pub fn count(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}
