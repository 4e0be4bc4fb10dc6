//! Many messages from lines of JSON, in transactions of a thousand. A bad line stops the run; all lines before it are
//! committed, so that one can mend it and go on from there.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use postrider::{Enqueued, LaneRules, NewMessage, Outbox, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::config::BYTE_ORDER_MARK;
use crate::config::values::parse_duration;
use crate::failure::{Ending, Failure, Result, complain};
use crate::http::check_headers;
use crate::output::{Output, count, print};
use crate::secret;
use crate::signals::interruption;

/// Messages of one transaction at most, and their bytes.
const BATCH: usize = 1000;
const BATCH_BYTES: usize = 16 << 20;
/// Lines that differ are named up to this many.
const NAMED_LINES: usize = 100;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line<'a> {
    /// As it is written: numbers and the order of keys stay as they are.
    #[serde(borrow)]
    payload: &'a RawValue,
    key: Option<String>,
    target: Option<String>,
    active_key: Option<String>,
    delay: Option<String>,
    deliver_before: Option<Timestamp>,
    #[serde(default)]
    headers: BTreeMap<String, String>,
}

/// What became of the lines so far.
#[derive(Debug, Default, Serialize)]
struct Sum {
    lines: u64,
    created: u64,
    exists: u64,
    differs: u64,
    /// Lines whose key belongs to another message.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    differing_lines: Vec<u64>,
    /// The first line that is not committed.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_at_line: Option<u64>,
    #[serde(skip_serializing_if = "is_false")]
    interrupted: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

pub async fn enqueue(
    outbox: &Outbox,
    lane: &str,
    rules: &LaneRules,
    mut lines: Lines,
    output: Output,
) -> Result<Ending> {
    let mut interrupted = interruption()?;
    let mut sum = Sum::default();
    let progress = lines.progress.clone();
    let stopped = loop {
        let committed_to = lines.number;
        // Whoever writes the lines may take his time: a signal is heard meanwhile.
        let (lane, rules) = (lane.to_owned(), rules.clone());
        let reading = tokio::task::spawn_blocking(move || {
            let batch = lines.batch(&lane, &rules);
            (lines, batch)
        });
        let read = tokio::select! {
            biased;
            _ = interrupted.wait_for(|interrupted| *interrupted) => None,
            read = reading => Some(read),
        };
        let Some(read) = read else {
            (sum.interrupted, sum.stopped_at_line) = (true, Some(committed_to + 1));
            break Some(Failure::failed(format!("interrupted at line {}", committed_to + 1)));
        };
        let batch;
        (lines, batch) = read.map_err(|e| Failure::failed(format!("reading the lines ended badly: {e}")))?;
        let (first, more) = (batch.messages.first().map(|(line, _)| *line), !batch.messages.is_empty());
        if let Err(failure) = write(outbox, batch.messages, &mut sum).await {
            sum.stopped_at_line = first;
            break Some(failure);
        }
        progress.set_message(count(sum.lines, "message"));
        if batch.bad_line.is_some() {
            sum.stopped_at_line = Some(lines.number);
        }
        if batch.bad_line.is_some() || !more {
            break batch.bad_line;
        }
    };
    progress.finish_and_clear();
    outbox.flush().await;
    if output.json {
        output.json(&sum)?;
    }
    if let Some(failure) = stopped {
        return Err(failure.with(format!("; {} committed before it ({} new)", count(sum.lines, "line"), sum.created)));
    }
    if !output.json {
        print(&told(&sum))?;
    }
    if sum.differs > 0 {
        let lines: Vec<String> = sum.differing_lines.iter().map(u64::to_string).collect();
        let lines = lines.join(", ");
        complain(&format!(
            "the keys of {} belong to other messages, nothing was written for them: line {lines}",
            count(sum.differs, "line")
        ));
    }
    Ok(Ending::failed_if(sum.differs > 0))
}

fn told(sum: &Sum) -> String {
    let mut text = format!("{}: {} created", count(sum.lines, "message"), sum.created);
    for (number, word) in [(sum.exists, "already there"), (sum.differs, "differ")] {
        if number > 0 {
            text.push_str(&format!(", {number} {word}"));
        }
    }
    text
}

fn parse(lane: &str, rules: &LaneRules, line: &str) -> Result<NewMessage, String> {
    let line: Line = serde_json::from_str(line).map_err(|e| {
        let why = secret::without_value(&e.to_string());
        format!(
            "{why}; write {{\"payload\": …}} with key, target, active_key, delay, deliver_before and headers as needed"
        )
    })?;
    let raw = line.payload.get();
    let mut message = if raw.starts_with('"') {
        let text: String = serde_json::from_str(raw).map_err(|e| e.to_string())?;
        NewMessage::new(lane, text).content_type("text/plain")
    } else {
        NewMessage::new(lane, raw.to_owned()).content_type("application/json")
    };
    message.key = line.key;
    message.target = line.target;
    message.active_key = line.active_key;
    message.delay = line.delay.as_deref().map(parse_duration).transpose()?.unwrap_or_default();
    message.deliver_before = line.deliver_before;
    check_headers(&line.headers)?;
    message.headers = line.headers.into_iter().collect();
    message.validate(rules).map_err(|e| e.message)?;
    Ok(message)
}

async fn write(outbox: &Outbox, batch: Vec<(u64, NewMessage)>, sum: &mut Sum) -> Result<()> {
    if batch.is_empty() {
        return Ok(());
    }
    let (numbers, messages): (Vec<u64>, Vec<NewMessage>) = batch.into_iter().unzip();
    let entries = outbox.enqueue(messages).await?;
    for (line, entry) in numbers.into_iter().zip(entries) {
        sum.lines += 1;
        match entry.outcome {
            Enqueued::Created => sum.created += 1,
            Enqueued::Exists => sum.exists += 1,
            Enqueued::Differs => {
                sum.differs += 1;
                if sum.differing_lines.len() < NAMED_LINES {
                    sum.differing_lines.push(line);
                }
            }
        }
    }
    Ok(())
}

/// The next messages with their line numbers, and the bad line they end at, if there is one.
struct Batch {
    messages: Vec<(u64, NewMessage)>,
    bad_line: Option<Failure>,
}

/// Lines of a file or of standard input, counted, with a bar while somebody watches.
pub struct Lines {
    reader: BufReader<Box<dyn Read + Send>>,
    longest: u64,
    number: u64,
    progress: ProgressBar,
}

impl Lines {
    pub fn open(path: &Path, rules: &LaneRules) -> Result<Self> {
        let size = std::fs::metadata(path).ok().filter(|m| m.is_file()).map(|m| m.len());
        let bar = ProgressBar::with_draw_target(size, ProgressDrawTarget::stderr());
        let template =
            if size.is_some() { "{bar:40} {percent}%  {msg}  {elapsed}" } else { "{spinner} {msg}  {elapsed}" };
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        // A payload at the limit, every byte of it escaped, still fits.
        let longest = 6 * rules.max_payload_bytes as u64 + (1 << 20);
        Ok(Lines {
            reader: BufReader::new(super::enqueue::open(path)?),
            longest,
            number: 0,
            progress: bar.with_style(style),
        })
    }

    fn batch(&mut self, lane: &str, rules: &LaneRules) -> Batch {
        let mut batch = Batch { messages: Vec::new(), bad_line: None };
        let mut bytes = 0;
        while batch.messages.len() < BATCH && bytes < BATCH_BYTES {
            let message = match self.next() {
                Ok(None) => break,
                Ok(Some(line)) => parse(lane, rules, &line),
                Err(what) => Err(what),
            };
            match message {
                Ok(message) => {
                    bytes += message.payload.len();
                    batch.messages.push((self.number, message));
                }
                Err(what) => {
                    batch.bad_line = Some(Failure::usage(format!("line {}: {what}", self.number)));
                    break;
                }
            }
        }
        batch
    }

    /// The next line that is not blank.
    fn next(&mut self) -> Result<Option<String>, String> {
        loop {
            let mut line = Vec::new();
            let read = (&mut self.reader).take(self.longest).read_until(b'\n', &mut line);
            let read = read.map_err(|e| format!("cannot be read: {e}"))?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            self.progress.inc(read as u64);
            if read as u64 == self.longest && line.last() != Some(&b'\n') {
                return Err(format!("has more than {} bytes, more than any message of this lane needs", self.longest));
            }
            // What editors and spreadsheets write in front, in UTF-8 and in UTF-16.
            if self.number == 1
                && [&b"\xef\xbb\xbf"[..], b"\xff\xfe", b"\xfe\xff"].iter().any(|mark| line.starts_with(mark))
            {
                return Err(BYTE_ORDER_MARK.to_owned());
            }
            let text = String::from_utf8(line).map_err(|_| "is not UTF-8; JSON must be".to_owned())?;
            if !text.trim().is_empty() {
                return Ok(Some(text));
            }
        }
    }
}
