//! A stand-in for OpenMemory, which is in no package registry: for the demo, `verify` and tests. It speaks both dialects and
//! is as unkind as OpenMemory 1.3.3: it takes texts that are merely alike for one memory, shows a memory only to the key it
//! was written with, answers `/health` to anybody, and limits what it takes. It misbehaves further on request.

mod simhash;

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::http::request::Parts;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use postrider::clock::{self, Tick};
use postrider::message::{hex, sha256};
use postrider_memories::terms::terms;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::failure::{Failure, Result};

const MOST_BODY: usize = 1_000_000;
/// Longest content, in UTF-16 units, as JavaScript counts.
const MOST_CONTENT: usize = 200_000;
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
    /// Whose it is: the digest of the key it was written with.
    #[serde(default)]
    tenant: String,
    #[serde(default)]
    created_at: i64,
}

/// So many requests of one tenant within a window.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct RateLimit {
    max: u64,
    window_ms: u64,
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
    rate_limit: Option<RateLimit>,
    /// When the window began, and how many requests came since.
    window: Option<(Tick, u64)>,
    limited: u64,
    /// How long one embedding takes; they are made one after the other.
    embed_ms: u64,
    made: u64,
}

/// A running one.
#[derive(Clone)]
pub struct OpenMemory {
    inner: Arc<Mutex<Inner>>,
    embedding: Arc<tokio::sync::Mutex<()>>,
}

impl Default for Settings {
    fn default() -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 0));
        Settings {
            listen,
            dialect: Dialect::Js,
            data: None,
            api_key: None,
            keep_duplicates: true,
            rate_limit: None,
            embed_ms: 0,
            mood: None,
        }
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
    /// Requests of one key it answers within a minute
    #[arg(long)]
    pub rate_limit: Option<u64>,
    /// How long an embedding takes
    #[arg(long, default_value_t = 0)]
    pub embed_ms: u64,
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
        let made = memories.len() as u64;
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
            rate_limit: settings.rate_limit.map(|max| RateLimit { max, window_ms: 60_000 }),
            window: None,
            limited: 0,
            embed_ms: settings.embed_ms,
            made,
        };
        Ok(OpenMemory { inner: Arc::new(Mutex::new(inner)), embedding: Arc::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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
            Err(_) => (StatusCode::PAYLOAD_TOO_LARGE, json!("Payload Too Large")),
            Ok(body) if parts.uri.path() == "/stand-in" => self.control(&parts.method, &body),
            Ok(body) => {
                // What was asked for is done, whether or not its caller is still there.
                let this = self.clone();
                let answered = tokio::spawn(async move { this.answer(&parts, &body).await });
                answered.await.map_err(|_| Lost)??
            }
        };
        // What it says as text is no JSON.
        let (kind, bytes) = match answer {
            Value::String(text) => ("text/plain", text),
            answer => ("application/json", answer.to_string()),
        };
        let response = Response::builder().status(status).header("content-type", kind);
        response.body(Full::new(Bytes::from(bytes))).map_err(|_| Lost)
    }

    /// `GET /stand-in` tells what it has; `POST` with a mood changes how it behaves, with `api_key` which one it wants, with
    /// `rate_limit` and `embed_ms` how much it takes and how fast, with `forget` (an id, or `*`) what it has.
    fn control(&self, method: &Method, body: &[u8]) -> (StatusCode, Value) {
        let mut inner = self.lock();
        if method == Method::POST {
            let Ok(mut wanted) = serde_json::from_slice::<Value>(body) else {
                return (StatusCode::BAD_REQUEST, json!({"error": "invalid_json"}));
            };
            if let Some(key) = wanted.as_object_mut().and_then(|wanted| wanted.remove("api_key")) {
                inner.key = key.as_str().map(str::to_owned);
            }
            if let Some(limit) = wanted.as_object_mut().and_then(|wanted| wanted.remove("rate_limit")) {
                (inner.rate_limit, inner.window) = (serde_json::from_value(limit).ok(), None);
            }
            if let Some(ms) = wanted.as_object_mut().and_then(|wanted| wanted.remove("embed_ms")) {
                inner.embed_ms = ms.as_u64().unwrap_or(0);
            }
            if let Some(which) = wanted.as_object_mut().and_then(|wanted| wanted.remove("forget")) {
                inner.memories.retain(|memory| which != "*" && which != memory.id.as_str());
            }
            if wanted.get("mode").is_some() {
                match serde_json::from_value(wanted) {
                    Ok(mood) => inner.mood = mood,
                    Err(e) => return (StatusCode::BAD_REQUEST, json!({"error": e.to_string()})),
                }
            }
        }
        let body = json!({ "mood": inner.mood, "calls": inner.calls, "adds": inner.adds, "failed_adds": inner.failed_adds, "limited": inner.limited, "memories": inner.memories });
        (StatusCode::OK, body)
    }

    async fn answer(&self, parts: &Parts, body: &[u8]) -> Answer {
        let path = parts.uri.path();
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
        let (js, tenant) = {
            let mut inner = self.lock();
            let js = inner.dialect == Dialect::Js;
            if health {
                let well = if js { json!({"ok": true, "version": "stand-in"}) } else { json!({"status": "ok"}) };
                return Ok((StatusCode::OK, well));
            }
            let checked = inner.check_key(&parts.headers);
            match checked.and_then(|tenant| inner.check_rate().map(|()| tenant)) {
                Err(refused) => return Ok(refused),
                Ok(tenant) => (js, tenant),
            }
        };
        let body = match body.is_empty() {
            true => Value::Null,
            false => match serde_json::from_slice::<Value>(body) {
                Ok(body) => body,
                Err(_) => return Ok((StatusCode::BAD_REQUEST, json!({"error": "invalid_json"}))),
            },
        };
        let one = path.strip_prefix("/memory/").filter(|id| js && !id.contains('/'));
        let told = match (parts.method.as_str(), path) {
            ("POST", "/memory/add") => self.add(&body, &tenant).await,
            ("POST", "/memory/query") if js => self.lock().query(&body, "k", "matches", &tenant),
            ("POST", "/memory/search") if !js => self.lock().query(&body, "limit", "results", &tenant),
            ("GET", "/memory/all") if js => self.lock().all(parts.uri.query().unwrap_or_default(), &tenant),
            ("GET" | "DELETE", _) if one.is_some() => {
                self.lock().one(one.unwrap_or_default(), &tenant, parts.method == Method::DELETE)
            }
            _ => (StatusCode::NOT_FOUND, json!("404: Not Found")),
        };
        match mood {
            Mood::LoseReply => Err(Lost),
            Mood::NoId if told.0 == StatusCode::OK => Ok((StatusCode::OK, json!({"primary_sector": "semantic"}))),
            _ => Ok(told),
        }
    }

    /// What is like something it has, whoever wrote that, is taken for it. It looks first and writes later, so two at once
    /// are two memories.
    async fn add(&self, body: &Value, tenant: &str) -> (StatusCode, Value) {
        let (dialect, embed_ms, content) = {
            let mut inner = self.lock();
            inner.adds += 1;
            let dialect = inner.dialect;
            let content = body.get("content").and_then(Value::as_str).filter(|text| !text.is_empty());
            let wrong = match content {
                None => Some("content: required"),
                Some(text) if text.encode_utf16().count() > MOST_CONTENT => Some("content: length > 200000"),
                Some(_) => None,
            };
            match (wrong, content, dialect) {
                (None, Some(content), _) => {
                    let likeness = simhash::simhash(content);
                    let alike = |memory: &&Memory| simhash::simhash(&memory.content) == likeness;
                    let known = inner.memories.iter().find(|memory| !inner.keep_duplicates && alike(memory));
                    if let Some(known) = known {
                        let told = match dialect {
                            Dialect::Py => json!({"success": true, "data": {"id": known.id}}),
                            Dialect::Js => {
                                json!({"id": known.id, "primary_sector": "semantic", "sectors": ["semantic"], "deduplicated": true})
                            }
                        };
                        return (StatusCode::OK, told);
                    }
                    (dialect, inner.embed_ms, content.to_owned())
                }
                (_, _, Dialect::Js) => {
                    return (StatusCode::BAD_REQUEST, json!({"error": "invalid_input", "details": [wrong]}));
                }
                (_, _, Dialect::Py) => {
                    return (StatusCode::UNPROCESSABLE_ENTITY, json!({"detail": [{"loc": ["body", "content"]}]}));
                }
            }
        };
        if embed_ms > 0 {
            let _in_turn = self.embedding.lock().await;
            tokio::time::sleep(Duration::from_millis(embed_ms)).await;
        }
        let mut inner = self.lock();
        let part = |name: &str| body.get(name).cloned().unwrap_or(Value::Null);
        inner.made += 1;
        let memory = Memory {
            id: format!("mem-{}", inner.made),
            content,
            tags: part("tags"),
            metadata: part("metadata"),
            tenant: tenant.to_owned(),
            created_at: clock::wall().micros() / 1000,
        };
        if let Some(file) = &mut inner.file {
            // At one stroke: half a line would spoil the next one.
            let _ = file.write_all(format!("{}\n", json!(memory)).as_bytes());
        }
        let id = memory.id.clone();
        inner.memories.push(memory);
        let told = match dialect {
            Dialect::Py => json!({"success": true, "data": {"id": id}}),
            Dialect::Js => json!({"id": id, "primary_sector": "semantic", "sectors": ["semantic"], "chunks": 1}),
        };
        (StatusCode::OK, told)
    }
}

impl Inner {
    /// Whose request it is.
    fn check_key(&self, headers: &HeaderMap) -> Result<String, (StatusCode, Value)> {
        let Some(key) = self.key.as_ref().filter(|_| self.dialect == Dialect::Js) else {
            return Ok("dev-no-auth".to_owned());
        };
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let shown = text("authorization").and_then(|value| value.strip_prefix("Bearer ")).or_else(|| text("x-api-key"));
        match shown {
            None => Err((StatusCode::UNAUTHORIZED, json!({"error": "authentication_required"}))),
            Some(shown) if shown != key => Err((StatusCode::FORBIDDEN, json!({"error": "invalid_api_key"}))),
            Some(shown) => Ok(hex(&sha256(shown.as_bytes())).chars().take(16).collect()),
        }
    }

    fn check_rate(&mut self) -> Result<(), (StatusCode, Value)> {
        let Some(RateLimit { max, window_ms }) = self.rate_limit else { return Ok(()) };
        let (now, window) = (Tick::now(), Duration::from_millis(window_ms));
        let open = self.window.filter(|(began, _)| now.since(*began) < window);
        let (began, count) = open.unwrap_or((now, 0));
        self.window = Some((began, count + 1));
        if count < max {
            return Ok(());
        }
        self.limited += 1;
        let left = window.saturating_sub(now.since(began)).as_secs_f64().ceil();
        Err((
            StatusCode::TOO_MANY_REQUESTS,
            json!({"error": "rate_limit_exceeded", "retry_after": left.max(1.0) as u64}),
        ))
    }

    fn query(&self, body: &Value, limit: &str, list: &str, tenant: &str) -> (StatusCode, Value) {
        let Some(question) = body.get("query").and_then(Value::as_str) else {
            return (StatusCode::BAD_REQUEST, json!({"error": "invalid_input", "details": ["query: required"]}));
        };
        let most = body.get(limit).and_then(Value::as_u64).unwrap_or(8) as usize;
        if !(1..=200).contains(&most) {
            return (
                StatusCode::BAD_REQUEST,
                json!({"error": "invalid_input", "details": [format!("{limit}: > 200")]}),
            );
        }
        let wanted = terms(question);
        let mut found: Vec<(f64, &Memory)> = Vec::new();
        for memory in self.memories.iter().filter(|memory| memory.tenant == tenant) {
            let has = terms(&memory.content);
            let hits = wanted.iter().filter(|term| has.contains(term)).count();
            if hits > 0 {
                found.push((hits as f64 / wanted.len() as f64, memory));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let shown = found.iter().take(most).map(|(score, memory)| {
            json!({"id": memory.id, "content": memory.shown(), "score": score, "sectors": ["semantic"]})
        });
        (StatusCode::OK, json!({ list: shown.collect::<Vec<_>>() }))
    }

    /// `GET /memory/all?l=LIMIT&u=OFFSET`, the newest first.
    fn all(&self, query: &str, tenant: &str) -> (StatusCode, Value) {
        let number = |name: &str, usual: usize| {
            let given = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            given.map_or(Ok(usual), str::parse)
        };
        let (Ok(limit), Ok(offset)) = (number("l", 100), number("u", 0)) else {
            return (StatusCode::BAD_REQUEST, json!({"error": "invalid_pagination"}));
        };
        let own = self.memories.iter().rev().filter(|memory| memory.tenant == tenant);
        let items: Vec<Value> = own.skip(offset).take(limit).map(Memory::whole).collect();
        (StatusCode::OK, json!({ "items": items }))
    }

    /// One memory by its id: shown, or forgotten.
    fn one(&mut self, id: &str, tenant: &str, forget: bool) -> (StatusCode, Value) {
        let Some(place) = self.memories.iter().position(|memory| memory.id == id) else {
            return (StatusCode::NOT_FOUND, json!({"err": "nf"}));
        };
        if self.memories[place].tenant != tenant {
            return (StatusCode::FORBIDDEN, json!({"err": "forbidden"}));
        }
        if forget {
            self.memories.remove(place);
            return (StatusCode::OK, json!({"ok": true}));
        }
        (StatusCode::OK, self.memories[place].whole())
    }
}

impl Memory {
    fn shown(&self) -> String {
        self.content.chars().take(SUMMARY).collect()
    }

    fn whole(&self) -> Value {
        json!({
            "id": self.id, "content": self.shown(), "tags": self.tags, "metadata": self.metadata,
            "created_at": self.created_at, "primary_sector": "semantic", "user_id": self.tenant,
        })
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
