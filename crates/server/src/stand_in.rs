//! A stand-in for OpenMemory, which is in no package registry: for the demo, `verify` and tests. It speaks both dialects,
//! keeps what it is given, finds it again by words, and misbehaves on request.

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use postrider_memories::terms::terms;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::failure::{Failure, Result};

const MOST_BODY: usize = 16 << 20;
/// It shortens what it shows, as the real one does.
const SUMMARY: usize = 200;

/// Which of OpenMemory's servers it plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Dialect {
    Js,
    Py,
}

/// How it behaves.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "mode", rename_all = "snake_case", deny_unknown_fields)]
enum Mood {
    Well,
    /// Nobody is there: connections are closed.
    Down,
    Slow {
        delay_ms: u64,
    },
    /// Every call to a memory is answered with this status.
    Status {
        status: u16,
        error: Option<String>,
    },
    /// Questions are answered, and what is to be added with this status.
    FailWrites {
        status: u16,
    },
    /// It does what it is told, and its answer is lost.
    LoseReply,
    /// It does what it is told, and answers without an id.
    NoId,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Memory {
    id: String,
    content: String,
    tags: Value,
    metadata: Value,
}

struct Inner {
    dialect: Dialect,
    key: Option<String>,
    mood: Mood,
    memories: Vec<Memory>,
    /// Requests about memories that arrived, whatever became of them.
    calls: u64,
    /// Requests to add that were carried out.
    adds: u64,
    failed_adds: u64,
    file: Option<std::fs::File>,
    keep_duplicates: bool,
}

/// A running one.
#[derive(Clone)]
pub struct OpenMemory(Arc<Mutex<Inner>>);

impl Default for Settings {
    fn default() -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        Settings { listen, dialect: Dialect::Js, data: None, api_key: None, keep_duplicates: true, mood: None }
    }
}

/// What it starts with.
#[derive(Debug, clap::Args)]
pub struct Settings {
    #[arg(long, default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    #[arg(long, value_enum, default_value = "js")]
    pub dialect: Dialect,
    /// Keeps memories here, one JSON document a line
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// The key it wants
    #[arg(long)]
    pub api_key: Option<String>,
    /// Takes the same content twice as two memories, unlike the real one
    #[arg(long)]
    pub keep_duplicates: bool,
    /// How it behaves from the start, like {"mode":"down"}
    #[arg(long, value_parser = parse_mood)]
    mood: Option<Mood>,
}

fn parse_mood(text: &str) -> Result<Mood, String> {
    serde_json::from_str(text).map_err(|e| e.to_string())
}

/// The connection ends without an answer.
#[derive(Debug)]
struct Lost;

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the answer is lost on purpose")
    }
}

impl std::error::Error for Lost {}

type Answer = Result<(StatusCode, Value), Lost>;

impl OpenMemory {
    pub fn new(settings: &Settings) -> Result<Self> {
        let wrong = |e: std::io::Error| Failure::failed(format!("the stand-in's data cannot be kept: {e}"));
        let mut memories = Vec::new();
        let file = match &settings.data {
            None => None,
            Some(path) => {
                let text = std::fs::read_to_string(path).unwrap_or_default();
                memories.extend(text.lines().filter_map(|line| serde_json::from_str(line).ok()));
                Some(std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(wrong)?)
            }
        };
        let Settings { dialect, api_key, keep_duplicates, .. } = settings;
        let (dialect, key, keep_duplicates) = (*dialect, api_key.clone(), *keep_duplicates);
        let inner = Inner {
            dialect,
            key,
            mood: settings.mood.clone().unwrap_or(Mood::Well),
            memories,
            calls: 0,
            adds: 0,
            failed_adds: 0,
            file,
            keep_duplicates,
        };
        Ok(OpenMemory(Arc::new(Mutex::new(inner))))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on nobody is there, or somebody is again.
    pub fn be_down(&self, down: bool) {
        self.lock().mood = if down { Mood::Down } else { Mood::Well };
    }

    /// What it was given, by content.
    pub fn contents(&self) -> Vec<String> {
        self.lock().memories.iter().map(|memory| memory.content.clone()).collect()
    }

    /// Serves until it is dropped.
    pub async fn serve(self, listener: TcpListener) {
        loop {
            let Ok((stream, _)) = listener.accept().await else { continue };
            let this = self.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let this = this.clone();
                    async move { this.handle(request).await }
                });
                // One request a connection, so that being down is seen at once.
                let _ = http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service).await;
            });
        }
    }

    async fn handle(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Lost> {
        let (parts, body) = request.into_parts();
        let body = Limited::new(body, MOST_BODY).collect().await.map(|body| body.to_bytes());
        let (status, answer) = match body {
            Err(_) => (StatusCode::PAYLOAD_TOO_LARGE, json!("payload too large")),
            Ok(body) if parts.uri.path() == "/stand-in" => self.control(&parts.method, &body),
            Ok(body) => self.answer(&parts.method, parts.uri.path(), &parts.headers, &body).await?,
        };
        let response = Response::builder().status(status).header("content-type", "application/json");
        response.body(Full::new(Bytes::from(answer.to_string()))).map_err(|_| Lost)
    }

    /// `GET /stand-in` tells what it has; `POST` with a mood changes how it behaves, with a key which one it wants.
    fn control(&self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let mut inner = self.lock();
        if method == Method::POST {
            let Ok(mut wanted) = serde_json::from_slice::<Value>(body) else {
                return (StatusCode::BAD_REQUEST, json!({"error": "invalid_json"}));
            };
            if let Some(key) = wanted.as_object_mut().and_then(|wanted| wanted.remove("api_key")) {
                inner.key = key.as_str().map(str::to_owned);
            }
            if wanted.get("mode").is_some() {
                match serde_json::from_value(wanted) {
                    Ok(mood) => inner.mood = mood,
                    Err(e) => return (StatusCode::BAD_REQUEST, json!({"error": e.to_string()})),
                }
            }
        }
        let body = json!({ "mood": inner.mood, "calls": inner.calls, "adds": inner.adds, "failed_adds": inner.failed_adds, "memories": inner.memories });
        (StatusCode::OK, body)
    }

    async fn answer(&self, method: &Method, path: &str, headers: &HeaderMap, body: &[u8]) -> Answer {
        let health = path == "/health";
        let mood = {
            let mut inner = self.lock();
            inner.calls += u64::from(!health);
            inner.mood.clone()
        };
        match mood {
            Mood::Down => return Err(Lost),
            Mood::Slow { delay_ms } => tokio::time::sleep(Duration::from_millis(delay_ms)).await,
            Mood::FailWrites { status } if path == "/memory/add" => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                self.lock().failed_adds += 1;
                return Ok((status, json!({"err": "boom"})));
            }
            Mood::Status { status, ref error } if !health => {
                let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                let body = match status.as_u16() {
                    _ if error.is_some() => json!({ "error": error }),
                    429 => json!({"error": "rate_limit_exceeded", "retry_after": 60}),
                    500 => json!({"err": "boom"}),
                    _ => json!({"error": "as_told"}),
                };
                return Ok((status, body));
            }
            _ => {}
        }
        let mut inner = self.lock();
        let js = inner.dialect == Dialect::Js;
        if health {
            return Ok((
                StatusCode::OK,
                if js { json!({"ok": true, "version": "stand-in"}) } else { json!({"status": "ok"}) },
            ));
        }
        if let Err(refused) = inner.check_key(headers) {
            return Ok(refused);
        }
        let Ok(body) = serde_json::from_slice::<Value>(body) else {
            return Ok((StatusCode::BAD_REQUEST, json!({"error": "invalid_json"})));
        };
        let told = match (method.as_str(), path) {
            ("POST", "/memory/add") => inner.add(&body),
            ("POST", "/memory/query") if js => inner.query(&body, "k", "matches"),
            ("POST", "/memory/search") if !js => inner.query(&body, "limit", "results"),
            _ => (StatusCode::NOT_FOUND, json!({"error": "not_found"})),
        };
        match mood {
            Mood::LoseReply => Err(Lost),
            Mood::NoId if told.0 == StatusCode::OK => Ok((StatusCode::OK, json!({"primary_sector": "semantic"}))),
            _ => Ok(told),
        }
    }
}

impl Inner {
    fn check_key(&self, headers: &HeaderMap) -> Result<(), (StatusCode, Value)> {
        let Some(key) = self.key.as_ref().filter(|_| self.dialect == Dialect::Js) else { return Ok(()) };
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let shown = text("authorization").and_then(|value| value.strip_prefix("Bearer ")).or_else(|| text("x-api-key"));
        match shown {
            None => Err((StatusCode::UNAUTHORIZED, json!({"error": "authentication_required"}))),
            Some(shown) if shown != key => Err((StatusCode::FORBIDDEN, json!({"error": "invalid_api_key"}))),
            Some(_) => Ok(()),
        }
    }

    /// The same content again is the same memory.
    fn add(&mut self, body: &Value) -> (StatusCode, Value) {
        self.adds += 1;
        let Some(content) = body.get("content").and_then(Value::as_str).filter(|text| !text.is_empty()) else {
            return match self.dialect {
                Dialect::Js => (StatusCode::BAD_REQUEST, json!({"error": "invalid_input"})),
                Dialect::Py => (StatusCode::UNPROCESSABLE_ENTITY, json!({"detail": [{"loc": ["body", "content"]}]})),
            };
        };
        let known = self.memories.iter().find(|memory| memory.content == content && !self.keep_duplicates);
        let known = known.map(|memory| memory.id.clone());
        let deduplicated = known.is_some();
        let id = known.unwrap_or_else(|| {
            let part = |name: &str| body.get(name).cloned().unwrap_or(Value::Null);
            let id = format!("mem-{}", self.memories.len() + 1);
            let memory =
                Memory { id: id.clone(), content: content.to_owned(), tags: part("tags"), metadata: part("metadata") };
            if let Some(file) = &mut self.file {
                let _ = writeln!(file, "{}", json!(memory));
            }
            self.memories.push(memory);
            id
        });
        let answer = match self.dialect {
            Dialect::Py => json!({"success": true, "data": {"id": id}}),
            Dialect::Js if deduplicated => json!({"id": id, "deduplicated": true}),
            Dialect::Js => json!({"id": id, "primary_sector": "semantic", "sectors": ["semantic"], "chunks": 1}),
        };
        (StatusCode::OK, answer)
    }

    fn query(&self, body: &Value, limit: &str, list: &str) -> (StatusCode, Value) {
        let Some(question) = body.get("query").and_then(Value::as_str) else {
            return (StatusCode::BAD_REQUEST, json!({"error": "invalid_input"}));
        };
        let most = body.get(limit).and_then(Value::as_u64).unwrap_or(8) as usize;
        let wanted = terms(question);
        let mut found: Vec<(f64, &Memory)> = Vec::new();
        for memory in &self.memories {
            let has = terms(&memory.content);
            let hits = wanted.iter().filter(|term| has.contains(term)).count();
            if hits > 0 {
                found.push((hits as f64 / wanted.len() as f64, memory));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let shown = found.iter().take(most).map(|(score, memory)| {
            let content: String = memory.content.chars().take(SUMMARY).collect();
            json!({"id": memory.id, "content": content, "score": score, "sectors": ["semantic"]})
        });
        (StatusCode::OK, json!({ list: shown.collect::<Vec<_>>() }))
    }
}

/// `postrider stand-in openmemory`.
pub async fn run(settings: Settings) -> Result<()> {
    let address = settings.listen;
    let memory = OpenMemory::new(&settings)?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|e| Failure::usage(format!("cannot listen on {address}: {e}; choose another with --listen")))?;
    let address = listener.local_addr().unwrap_or(address);
    crate::output::print(&format!("listening on http://{address}"))?;
    memory.serve(listener).await;
    Ok(())
}
