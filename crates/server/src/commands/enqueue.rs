//! `postrider enqueue`: one message from the command line; many come from [`super::ndjson`].

use std::fs::File;
use std::io::Read;
use std::path::Path;

use postrider::{Enqueued, Entry, NewMessage, Outbox};

use super::ndjson;
use crate::cli::Enqueue;
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result, complain};
use crate::output::Output;

pub async fn run(config: &Config, args: Enqueue, output: Output) -> Result<Ending> {
    let rules = config.lane(&args.lane)?.rules.clone();
    if let Some(owner) = rules.owned_by {
        return Err(Failure::usage(format!("the lane `{}` has an owner; use `{owner}` instead", args.lane)));
    }
    if let Some(path) = args.source.ndjson {
        // The input is opened first: a file that is not there must not create a database.
        let lines = ndjson::Lines::open(&path, &rules)?;
        let outbox = database::open_ready(config).await?;
        return ndjson::enqueue(&outbox, &args.lane, &rules, lines, output).await;
    }
    let payload = match (args.source.payload, args.source.payload_file) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(path)) => read_payload(&path, rules.max_payload_bytes)?,
        (None, None) => return Err(Failure::usage("there is no payload; give --payload, --payload-file or --ndjson")),
    };
    let mut message = NewMessage::new(&args.lane, payload);
    message.content_type = Some(content_type(&message.payload).to_owned());
    message.key = args.key;
    message.target = args.target;
    message.active_key = args.active_key;
    message.delay = args.delay.unwrap_or_default();
    message.deliver_before = args.deliver_before;
    message.validate(&rules)?;
    let outbox = database::open_ready(config).await?;
    one(&outbox, message, output).await
}

async fn one(outbox: &Outbox, message: NewMessage, output: Output) -> Result<Ending> {
    let holder = if message.key.is_some() { "key" } else { "active key" };
    let entries = outbox.enqueue(vec![message]).await?;
    outbox.flush().await;
    let entry: Entry = *entries.first().ok_or_else(|| Failure::failed("the database gave no answer"))?;
    // Scripts read this line with and without --json.
    output.json(&entry)?;
    if entry.outcome == Enqueued::Differs {
        complain(&format!(
            "the {holder} belongs to another message, {}; nothing was written. Use another key, or look: postrider outbox show {}",
            entry.id, entry.id
        ));
    }
    Ok(Ending::failed_if(entry.outcome == Enqueued::Differs))
}

fn content_type(payload: &[u8]) -> &'static str {
    if serde_json::from_slice::<serde::de::IgnoredAny>(payload).is_ok() {
        "application/json"
    } else if std::str::from_utf8(payload).is_ok() {
        "text/plain"
    } else {
        "application/octet-stream"
    }
}

fn read_payload(path: &Path, max_bytes: usize) -> Result<Vec<u8>> {
    let mut payload = Vec::new();
    // One byte more than allowed shows that it is too long, without reading all of a huge file.
    open(path)?.take(max_bytes as u64 + 1).read_to_end(&mut payload).map_err(|e| unreadable(path, &e))?;
    if payload.len() > max_bytes {
        return Err(Failure::usage(format!(
            "{} has more than {max_bytes} bytes, the most the lane takes; store it elsewhere and send a reference, or raise max_payload_bytes",
            path.display()
        )));
    }
    Ok(payload)
}

/// `-` is standard input.
pub fn open(path: &Path) -> Result<Box<dyn Read + Send>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdin()));
    }
    Ok(Box::new(File::open(path).map_err(|e| unreadable(path, &e))?))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!("cannot read {}: {error}; name a file, or - for standard input", path.display()))
}
