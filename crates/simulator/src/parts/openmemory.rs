//! An OpenMemory of the world's own: it keeps what it is sent, at once or a good while later, may merge what it has already,
//! and has a book that tells whether something came twice. It speaks the wire protocol of the real one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use postrider::couriers::exchange::{Answer, Ask};
use postrider::outcome::Reach;
use serde_json::{Value, json};
use tokio::sync::oneshot;

/// A request of one life of a process.
pub struct Call {
    pub process: usize,
    pub life: u64,
    pub method: String,
    pub path: String,
    pub body: Value,
    pub timeout: Duration,
    pub answer: oneshot::Sender<Answer>,
}

impl Call {
    /// The memory it would write, if it is a write.
    pub fn written(&self) -> Option<Held> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let metadata = &self.body["metadata"];
        (self.method == "POST" && self.path == "/memory/add").then(|| Held {
            content: text(&self.body["content"]),
            space: text(&metadata["target_space"]),
            sha: text(&metadata["payload_sha"]),
        })
    }
}

/// What was asked and not yet answered.
pub type Calls = Arc<Mutex<Vec<Call>>>;

/// The network of one life of a process: whoever asks waits for the world.
pub struct Wire {
    pub process: usize,
    pub life: u64,
    pub calls: Calls,
}

#[async_trait]
impl Ask for Wire {
    async fn ask(&self, request: Request<Full<Bytes>>, timeout: Duration, _: usize) -> Answer {
        let (answer, answered) = oneshot::channel();
        let method = request.method().to_string();
        let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
        let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let body = serde_json::from_slice(&body).unwrap_or_default();
        let call = Call { process: self.process, life: self.life, method, path, body, timeout, answer };
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
        match answered.await {
            Ok(answer) => answer,
            // Whoever asked is dead.
            Err(_) => std::future::pending().await,
        }
    }
}

pub fn answered(status: u16, body: &Value) -> Answer {
    let status = StatusCode::from_u16(status).expect("a status");
    let body = if body.is_null() { vec![] } else { body.to_string().into_bytes() };
    Answer::Answered { status, headers: HeaderMap::new(), body, whole: true, remote: None }
}

pub fn unanswered(code: &'static str, reach: Reach) -> Answer {
    Answer::Unanswered { code, cause: "simulated".to_owned(), reach, remote: None }
}

/// One memory as it was sent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held {
    pub content: String,
    pub space: String,
    pub sha: String,
}

#[derive(Default)]
pub struct OpenMemory {
    merges: bool,
    rows: Vec<Held>,
    /// Sent, and not yet applied.
    late: BTreeMap<u64, Held>,
    sent: u64,
    /// What it said it will not take.
    pub refused: BTreeSet<String>,
    /// May rightly come twice: whoever sent it stood still in between, or time was set forward meanwhile.
    pub excused: BTreeSet<String>,
    pub wrong: Vec<String>,
}

impl OpenMemory {
    /// `merges`: it keeps one of what has the same content.
    pub fn new(merges: bool) -> Self {
        OpenMemory { merges, ..OpenMemory::default() }
    }

    /// Keeps it; its id, and whether it had it.
    pub fn apply(&mut self, held: Held) -> (String, bool) {
        if let Some(n) = self.rows.iter().position(|row| self.merges && row.content == held.content) {
            return (id(n), true);
        }
        if self.rows.contains(&held) && !self.excused.contains(&held.content) {
            self.wrong.push(format!("S18: {:?} in {} is there twice", held.content, held.space));
        }
        self.rows.push(held);
        (id(self.rows.len() - 1), false)
    }

    /// Will apply it later; under this number.
    pub fn put_off(&mut self, held: Held) -> u64 {
        self.sent += 1;
        self.late.insert(self.sent, held);
        self.sent
    }

    /// Is this one applied only now?
    pub fn apply_late(&mut self, number: u64) -> bool {
        let late = self.late.remove(&number);
        late.map(|held| self.apply(held)).is_some()
    }

    /// The wait for what is late goes by the database's clock: set forward, it is over sooner.
    pub fn hurry(&mut self) {
        for held in std::mem::take(&mut self.late).into_values() {
            self.apply(held);
        }
    }

    pub fn has(&self, memory_id: &str, content: &str) -> bool {
        self.rows.iter().enumerate().any(|(n, row)| id(n) == memory_id && row.content == content)
    }

    /// An answer as the real one gives it where nothing goes wrong.
    pub fn answer(&mut self, call: &Call) -> Answer {
        if let Some(held) = call.written() {
            let (id, had) = self.apply(held);
            let body = if had { json!({ "id": id, "deduplicated": true }) } else { json!({ "id": id }) };
            return answered(200, &body);
        }
        let show = |n: usize, row: &Held| {
            let metadata = json!({ "payload_sha": row.sha, "target_space": row.space });
            json!({ "id": id(n), "content": row.content, "metadata": metadata })
        };
        match (call.method.as_str(), call.path.as_str()) {
            ("GET", "/health") => answered(200, &json!({ "ok": true, "version": "simulated" })),
            ("GET", path) if path.starts_with("/memory/all?") => {
                let number = |name: &str| {
                    let found = path.split(['?', '&']).find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
                    found.and_then(|value| value.parse().ok()).unwrap_or(0)
                };
                let newest = self.rows.iter().enumerate().rev().skip(number("u")).take(number("l"));
                answered(200, &json!({ "items": newest.map(|(n, row)| show(n, row)).collect::<Vec<_>>() }))
            }
            ("GET", path) => {
                let wanted = path.strip_prefix("/memory/").unwrap_or_default();
                match self.rows.iter().enumerate().find(|(n, _)| id(*n) == wanted) {
                    Some((n, row)) => answered(200, &show(n, row)),
                    None => answered(404, &json!({ "error": "nf" })),
                }
            }
            _ => answered(404, &Value::Null),
        }
    }
}

fn id(row: usize) -> String {
    format!("m{row}")
}
