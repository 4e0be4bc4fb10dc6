//! Sends one job: signed, guarded, within one deadline. What came of it is kept until the settle writes it, as an attempt
//! for people and a result for the orchestrator.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::Full;
use postrider::clock::{self, Tick};
use postrider::couriers::blot::Blot;
use postrider::couriers::exchange::{Answer, retry_after};
use postrider::error::Kind;
use postrider::observe::sending;
use postrider::outcome::{Fault, Reach, Verdict};
use postrider::store::Mode;
use postrider::tx::{Tx, Value, in_ids};
use postrider::{Courier, Error, Message, OnSettled, Outcome, Result, Timestamp, Winner, bulk};
use tokio::sync::{Notify, mpsc, oneshot};
use url::{Host, Url};

use crate::Webhooks;
use crate::publish::Job;
use crate::secrets::Opened;
use crate::subscriptions::{Subscription, SubscriptionStatus};

/// Most bytes of a response's head that are kept.
const MOST_HEAD: usize = 4096;
/// A job that meets a pause waits for `resume` to wake it, or the sweep; this is only how long at most.
const PAUSED_FOR: Duration = Duration::from_secs(3600);
/// Why a job was put off.
pub(crate) const PAUSED: &str = "SUBSCRIPTION_PAUSED";
pub(crate) const RESTING: &str = "RECEIVER_RESTING";
/// A process without the key leaves a job to those who have it; one whose secrets nobody can read waits to be mended.
const LEFT_FOR: Duration = Duration::from_secs(1);
const UNREADABLE_FOR: Duration = Duration::from_secs(10);
/// Most characters of what is said of a failure.
const MOST_DETAIL: usize = 300;
/// Events that are asked for in one statement.
const LOAD_AT_ONCE: usize = 256;
const LOAD_GATHER: Duration = Duration::from_millis(2);
/// A report whose settle never came is dropped after this.
const KEPT_FOR: Duration = Duration::from_secs(900);

/// How one attempt went.
#[derive(Clone, Debug)]
struct Report {
    started_at: Timestamp,
    took: Duration,
    /// `None`: it succeeded.
    failure: Option<(String, Reach)>,
    status: Option<u16>,
    headers: Option<String>,
    body: Option<Bytes>,
    remote: Option<String>,
    retry_after: Option<Duration>,
    /// More than the code says.
    detail: Option<String>,
    /// Of the subscription it was sent by.
    version: Option<i64>,
    kept_at: Tick,
}

/// What couriers saw, between a delivery and its settle. Shared by the couriers of a process and its store.
#[derive(Clone, Default)]
pub struct Reports(Arc<Shared>);

#[derive(Default)]
struct Shared {
    kept: Mutex<HashMap<i64, Arc<Report>>>,
    work: Arc<Notify>,
}

impl std::fmt::Debug for Reports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reports")
    }
}

impl Reports {
    pub(crate) fn work(&self) -> Arc<Notify> {
        self.0.work.clone()
    }

    fn keep(&self, id: i64, report: Report) {
        let mut kept = self.0.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() > 10_000 {
            let now = report.kept_at;
            kept.retain(|_, old| now.since(old.kept_at) < KEPT_FOR);
        }
        kept.insert(id, Arc::new(report));
    }

    fn of(&self, id: i64) -> Option<Arc<Report>> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    fn forget(&self, id: i64) {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }
}

const ATTEMPT_COLUMNS: [bulk::Column; 12] = [
    ("job_id", "bigint"),
    ("saga_id", "bigint"),
    ("attempt", "int"),
    ("started_at", "timestamptz"),
    ("duration_ms", "bigint"),
    ("error_class", "text"),
    ("error_code", "text"),
    ("response_status", "int"),
    ("response_headers", "text"),
    ("response_body", "bytea"),
    ("remote_address", "text"),
    ("error_detail", "text"),
];
const RESULT_COLUMNS: [bulk::Column; 8] = [
    ("job_id", "bigint"),
    ("saga_id", "bigint"),
    ("attempt", "int"),
    ("success", "int"),
    ("error_code", "text"),
    ("retry_after", "bigint"),
    ("at", "timestamptz"),
    ("sent_version", "bigint"),
];

/// The worker's part: job, attempt and result end together.
#[async_trait]
impl OnSettled for Reports {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<()> {
        let now = clock::wall();
        let (mut attempts, mut results) = (Vec::with_capacity(winners.len()), Vec::with_capacity(winners.len()));
        for winner in winners {
            let Some(job) = job_of(tx, winner).await? else { continue };
            let failed = match &winner.verdict {
                Verdict::Sent { .. } => None,
                Verdict::Retry { code, .. } | Verdict::Dead { code, .. } => Some(code.clone()),
            };
            // Without a report it ended without us: buried, or aborted at the end of a drain.
            let report = self.of(winner.id);
            let reach = report.as_ref().and_then(|r| r.failure.as_ref()).map_or(Reach::Unknown, |failure| failure.1);
            let report = report.as_deref();
            attempts.push(vec![
                winner.id.into(),
                job.saga_id.into(),
                i64::from(job.attempt).into(),
                report.map_or(now, |r| r.started_at).into(),
                report.map_or(0, |r| r.took.as_millis() as i64).into(),
                failed.as_ref().map(|_| class(reach)).into(),
                failed.clone().into(),
                report.and_then(|r| r.status).map(i64::from).into(),
                report.and_then(|r| r.headers.clone()).into(),
                report.and_then(|r| r.body.clone()).into(),
                report.and_then(|r| r.remote.clone()).into(),
                report.and_then(|r| r.detail.clone()).into(),
            ]);
            results.push(vec![
                winner.id.into(),
                job.saga_id.into(),
                i64::from(job.attempt).into(),
                i64::from(failed.is_none()).into(),
                failed.into(),
                report.and_then(|r| r.retry_after).map(|after| after.as_secs().min(i64::MAX as u64) as i64).into(),
                now.into(),
                report.and_then(|r| r.version).into(),
            ]);
        }
        bulk::insert(tx, "webhook_attempts", &ATTEMPT_COLUMNS, &attempts, false).await?;
        bulk::insert(tx, "webhook_results", &RESULT_COLUMNS, &results, false).await?;
        Ok(())
    }
}

/// Which attempt of which saga this was. Of a job nobody can read its key still says the saga.
async fn job_of(tx: &mut (dyn Tx + Send), winner: &Winner) -> Result<Option<Job>> {
    if let Some(job) = Job::parse(&winner.payload) {
        return Ok(Some(job));
    }
    let id = winner.active_key.as_deref().and_then(|key| key.strip_prefix("saga:")?.parse::<i64>().ok());
    let Some(saga_id) = id else { return Ok(None) };
    let sql = "SELECT attempt_count, event_id, subscription_id FROM webhook_delivery_sagas WHERE id = ?";
    let rows = tx.query(sql, &[saga_id.into()]).await?;
    let job = |row: &postrider::tx::Row| {
        let attempt = row.int(0)? as u32 + 1;
        Ok(Job { saga_id, attempt, event_id: row.int(1)?, subscription_id: row.int(2)? })
    };
    rows.first().map(job).transpose()
}

fn class(reach: Reach) -> &'static str {
    match reach {
        Reach::NeverSent => "never_sent",
        Reach::Unknown => "unknown",
        Reach::Answered => "answered",
    }
}

/// An event as it is sent.
#[derive(Debug)]
struct Loaded {
    payload: Bytes,
    content_type: Option<String>,
    correlation_id: Option<String>,
}

type Wanted = (i64, oneshot::Sender<Result<Option<Arc<Loaded>>>>);

/// Delivers webhook jobs.
pub struct WebhookCourier {
    webhooks: Webhooks,
    /// Events that are asked for at the same time are read together.
    events: mpsc::UnboundedSender<Wanted>,
    /// Whether this process holds a key is to be asked: until it does, and when one was missed.
    without_key: AtomicBool,
}

impl WebhookCourier {
    pub(crate) fn new(webhooks: Webhooks) -> Self {
        let (events, wanted) = mpsc::unbounded_channel();
        tokio::spawn(load(webhooks.clone(), wanted));
        WebhookCourier { webhooks, events, without_key: AtomicBool::new(true) }
    }

    async fn event(&self, id: i64) -> Result<Option<Arc<Loaded>>> {
        let (reply, answer) = oneshot::channel();
        let gone = || Error::new(Kind::Unavailable, "the loader of events is gone");
        self.events.send((id, reply)).map_err(|_| gone())?;
        match answer.await.map_err(|_| gone())?? {
            // It would end the delivery: asked again where the answer cannot be older than the event.
            None => Ok(self.webhooks.read_events(Mode::Work, vec![id]).await?.remove(&id)),
            event => Ok(event),
        }
    }

    /// The subscription of a job, if it is to be sent now.
    async fn subscription_of(&self, job: Job) -> Result<Result<Arc<Subscription>, Sent>> {
        let catalog = self.webhooks.catalog().await?;
        let known = catalog.get(job.subscription_id).filter(|s| s.status == SubscriptionStatus::Active);
        let rests = self.webhooks.rest_of(job.subscription_id).is_some();
        Ok(match known.filter(|_| !rests) {
            Some(subscription) => Ok(subscription.clone()),
            // What is remembered may be older than a resume, and what ends or puts off a job must not be.
            None => {
                let standing = self.webhooks.standing(job.subscription_id).await?;
                let alive = standing.subscription.filter(|s| s.status != SubscriptionStatus::Disabled);
                match (alive, standing.rest) {
                    (None, _) => Err(Sent::Not("SUBSCRIPTION_DISABLED")),
                    (Some(s), _) if s.status == SubscriptionStatus::Paused => Err(Sent::Paused),
                    // A receiver that is left alone for a while: what is live waits, more or less spread.
                    (Some(_), Some(rest)) => Err(Sent::Later(rest.mul_f64(1.0 + clock::chance() / 2.0))),
                    (Some(subscription), None) => Ok(subscription),
                }
            }
        })
    }

    async fn send(&self, job: Job, message: &Message) -> Result<Sent> {
        let subscription = match self.subscription_of(job).await? {
            Ok(subscription) => subscription,
            Err(not_sent) => return Ok(not_sent),
        };
        let opened = match self.webhooks.opened(&subscription).await {
            Err(error) if error.kind == Kind::KeyMissing => return Ok(Sent::Left),
            Err(error) if error.kind == Kind::Database => {
                tracing::error!(%error, subscription_id = subscription.id, "the secrets of a subscription cannot be read; give it a new one with rotate-secret");
                return Ok(Sent::Unreadable);
            }
            opened => opened?,
        };
        let Some(event) = self.event(job.event_id).await? else { return Ok(Sent::Not("EVENT_GONE")) };
        let id = format!("msg_{}_{}", self.webhooks.0.store_id, job.event_id);
        let timeout = subscription.timeout(&self.webhooks.0.settings);
        Ok(Sent::Tried(self.webhooks.post((&subscription, timeout), &opened, id, &event, &message.headers).await))
    }
}

enum Sent {
    Tried(Report),
    Not(&'static str),
    Paused,
    Later(Duration),
    /// To a process that has the key.
    Left,
    Unreadable,
}

#[async_trait]
impl Courier for WebhookCourier {
    fn name(&self) -> &str {
        "webhook"
    }

    /// Whoever can open no secret leaves every job to those who can.
    async fn ready(&self) -> bool {
        if !self.without_key.load(Ordering::Relaxed) {
            return true;
        }
        // Where it cannot be asked, each job shows it. As long as no key is in use, the first one may be another's.
        let holds = self.webhooks.holds_a_key().await.unwrap_or(None);
        self.without_key.store(holds != Some(true), Ordering::Relaxed);
        holds != Some(false)
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        let Some(job) = Job::parse(&message.payload) else {
            return Outcome::Dead(Fault::new("INVALID_JOB", "the job cannot be read", Reach::NeverSent));
        };
        self.told(message.id, self.send(job, message).await)
    }

    fn settled(&self, id: i64) {
        self.webhooks.0.reports.forget(id);
        self.webhooks.0.work.notify_one();
    }
}

impl WebhookCourier {
    /// What it answers without sending anything, if that is so: for simulators, whose receivers are not real.
    #[doc(hidden)]
    pub async fn unsent(&self, message: &Message) -> Option<Outcome> {
        let subscription = match Job::parse(&message.payload) {
            Some(job) => self.subscription_of(job).await,
            None => Ok(Err(Sent::Not("INVALID_JOB"))),
        };
        match subscription {
            Ok(Ok(_)) => None,
            Ok(Err(not_sent)) => Some(self.told(message.id, Ok(not_sent))),
            Err(error) => Some(self.told(message.id, Err(error))),
        }
    }

    /// What came of it, as the worker hears it; what the settle writes of it is kept.
    fn told(&self, id: i64, sent: Result<Sent>) -> Outcome {
        let report = match sent {
            // Our own trouble, not the receiver's: nothing is counted.
            Err(_) => return Outcome::Defer { delay: Duration::from_secs(1), code: "STORE_UNAVAILABLE".into() },
            Ok(Sent::Paused) => return Outcome::Defer { delay: PAUSED_FOR, code: PAUSED.into() },
            Ok(Sent::Later(delay)) => return Outcome::Defer { delay, code: RESTING.into() },
            Ok(Sent::Left) => {
                self.without_key.store(true, Ordering::Relaxed);
                let delay = LEFT_FOR.mul_f64(1.0 + clock::chance());
                return Outcome::Defer { delay, code: "SECRETS_KEY_MISSING".into() };
            }
            Ok(Sent::Unreadable) => {
                return Outcome::Defer { delay: UNREADABLE_FOR, code: "SECRETS_UNREADABLE".into() };
            }
            Ok(Sent::Not(code)) => Report::not_sent(code),
            Ok(Sent::Tried(report)) => report,
        };
        let outcome = match &report.failure {
            None => Outcome::sent(),
            Some((code, reach)) => Outcome::Dead(Fault::new(code.clone(), code.clone(), *reach)),
        };
        self.webhooks.0.reports.keep(id, report);
        outcome
    }
}

impl Report {
    fn not_sent(code: &str) -> Self {
        Report {
            started_at: clock::wall(),
            took: Duration::ZERO,
            failure: Some((code.to_owned(), Reach::NeverSent)),
            status: None,
            headers: None,
            body: None,
            remote: None,
            retry_after: None,
            detail: None,
            version: None,
            kept_at: Tick::now(),
        }
    }
}

impl Webhooks {
    /// One attempt.
    async fn post(
        &self,
        (subscription, timeout): (&Subscription, Duration),
        opened: &Opened,
        id: String,
        event: &Loaded,
        trace: &[(String, String)],
    ) -> Report {
        let (started_at, tick) = (clock::wall(), Tick::now());
        let request = match self.request((subscription, opened), &id, event, trace, started_at) {
            Ok(request) => request,
            Err(code) => return Report::not_sent(code),
        };
        let answer = sending(self.0.exchange.send(request, timeout)).await;
        let took = Tick::now().since(tick);
        let version = Some(subscription.version);
        let report = Report { started_at, took, version, kept_at: Tick::now(), ..Report::not_sent("") };
        match answer {
            Answer::Unanswered { code, cause, reach, remote } => Report {
                failure: Some((code.to_owned(), reach)),
                remote: remote.map(|r| r.to_string()),
                detail: detail(code, &cause),
                ..report
            },
            Answer::Answered { status, headers, body, remote, .. } => {
                let failure = match status {
                    status if status.is_success() => None,
                    status if status.is_redirection() => Some("REDIRECT_REFUSED".to_owned()),
                    status => Some(format!("HTTP_{}", status.as_u16())),
                };
                let asks_to_wait = matches!(status.as_u16(), 429 | 503);
                // Some receivers repeat what they were sent.
                let url = Url::parse(&subscription.url).ok();
                let secrets = Blot::new(url.as_ref(), opened.headers.iter().map(|(_, value)| value.as_str()));
                Report {
                    failure: failure.map(|code| (code, Reach::Answered)),
                    status: Some(status.as_u16()),
                    retry_after: if asks_to_wait { retry_after(&headers) } else { None },
                    headers: Some(text(secrets.bytes(head(&headers).into_bytes()))),
                    body: (!body.is_empty()).then(|| secrets.bytes(body).into()),
                    remote: remote.map(|remote| remote.to_string()),
                    ..report
                }
            }
        }
    }

    fn request(
        &self,
        (subscription, opened): (&Subscription, &Opened),
        id: &str,
        event: &Loaded,
        trace: &[(String, String)],
        now: Timestamp,
    ) -> Result<Request<Full<Bytes>>, &'static str> {
        let url = Url::parse(&subscription.url).map_err(|_| "URL_INVALID")?;
        // Names are judged when they are resolved; an address in the URL is not resolved.
        let address = match url.host() {
            Some(Host::Ipv4(address)) => Some(address.into()),
            Some(Host::Ipv6(address)) => Some(address.into()),
            _ => None,
        };
        if address.is_some_and(|address| self.0.settings.policy.judge(address).is_err()) {
            return Err("ADDRESS_FORBIDDEN");
        }
        let uri = Uri::try_from(url.as_str()).map_err(|_| "URL_INVALID")?;
        let timestamp = now.micros().div_euclid(1_000_000);
        let signatures: Vec<String> = opened.signing(now).map(|key| key.sign(id, timestamp, &event.payload)).collect();
        let mut headers = HeaderMap::new();
        let text = |text: &str| HeaderValue::from_str(text).map_err(|_| "HEADER_INVALID");
        for (name, value) in opened.headers.iter().chain(trace) {
            let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| "HEADER_INVALID")?;
            headers.append(name, text(value)?);
        }
        headers.insert(CONTENT_TYPE, text(event.content_type.as_deref().unwrap_or("application/json"))?);
        headers.insert(CONTENT_LENGTH, event.payload.len().into());
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("postrider/", env!("CARGO_PKG_VERSION"))));
        headers.insert("webhook-id", text(id)?);
        headers.insert("webhook-timestamp", timestamp.into());
        headers.insert("webhook-signature", text(&signatures.join(" "))?);
        // One that was taken before it was checked is left out.
        if let Some(id) = event.correlation_id.as_deref().and_then(|id| HeaderValue::from_str(id).ok()) {
            headers.insert("x-correlation-id", id);
        }
        let mut request = Request::new(Full::new(event.payload.clone()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        Ok(request)
    }

    /// Sends a test event to one subscription, now and once, whatever its state; nothing is recorded.
    pub async fn test(&self, id: i64) -> Result<Option<serde_json::Value>> {
        self.test_within(id, Duration::MAX).await
    }

    /// The same by somebody who does not wait longer than this for the receiver.
    pub async fn test_within(&self, id: i64, most: Duration) -> Result<Option<serde_json::Value>> {
        let Some(subscription) = self.subscription(id).await? else { return Ok(None) };
        let payload = serde_json::json!({ "type": "postrider.test", "subscription_id": id });
        let event = Loaded { payload: payload.to_string().into(), content_type: None, correlation_id: None };
        let id = format!("test_{:016x}", clock::seed());
        let opened = self.opened(&subscription).await?;
        let timeout = subscription.timeout(&self.0.settings).min(most);
        let report = self.post((&subscription, timeout), &opened, id, &event, &[]).await;
        Ok(Some(serde_json::json!({
            "success": report.failure.is_none(),
            "error_code": report.failure.as_ref().map(|failure| failure.0.clone()),
            "error_detail": report.detail,
            "error_class": report.failure.as_ref().map(|failure| class(failure.1)),
            "response_status": report.status,
            "duration_ms": report.took.as_millis() as u64,
        })))
    }
}

/// Why there was no TLS session is the receiver's own affair, and what it needs to mend it. What else went wrong on the way
/// is told by its code alone: more would describe our network.
fn detail(code: &str, cause: &str) -> Option<String> {
    (code == "TLS_FAILED").then(|| cause.chars().filter(|c| !c.is_control()).take(MOST_DETAIL).collect())
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned())
}

/// The head of a response, as far as it is kept.
fn head(headers: &HeaderMap) -> String {
    let mut kept = Vec::new();
    let mut bytes = 0;
    for (name, value) in headers {
        bytes += name.as_str().len() + value.len();
        if bytes > MOST_HEAD {
            break;
        }
        kept.push((name.as_str(), String::from_utf8_lossy(value.as_bytes()).replace('\0', "")));
    }
    serde_json::to_string(&kept).unwrap_or_default()
}

/// Reads events for those who wait for them, many in one statement.
async fn load(webhooks: Webhooks, mut wanted: mpsc::UnboundedReceiver<Wanted>) {
    let mut waiting = Vec::new();
    let mut loaded_at: Option<Tick> = None;
    while wanted.recv_many(&mut waiting, LOAD_AT_ONCE).await > 0 {
        // One after the other under load: a moment brings more to read together.
        if loaded_at.is_some_and(|at| Tick::now().since(at) < 2 * LOAD_GATHER) {
            tokio::time::sleep(LOAD_GATHER).await;
            while waiting.len() < LOAD_AT_ONCE
                && let Ok(more) = wanted.try_recv()
            {
                waiting.push(more);
            }
        }
        loaded_at = Some(Tick::now());
        let batch = std::mem::take(&mut waiting);
        let webhooks = webhooks.clone();
        tokio::spawn(async move {
            let mut ids: Vec<i64> = batch.iter().map(|wanted| wanted.0).collect();
            ids.sort_unstable();
            ids.dedup();
            let events = webhooks.read_events(Mode::Read, ids).await;
            for (id, reply) in batch {
                let answer = events.as_ref().map(|events| events.get(&id).cloned()).map_err(Clone::clone);
                let _ = reply.send(answer);
            }
        });
    }
}

impl Webhooks {
    async fn read_events(&self, mode: Mode, ids: Vec<i64>) -> Result<HashMap<i64, Arc<Loaded>>> {
        self.transact(mode, move |tx| {
            let ids = ids.clone();
            Box::pin(async move {
                let mut params: Vec<Value> = Vec::new();
                let list = in_ids(tx.dialect(), &ids, &mut params);
                let sql = format!("SELECT id, payload, content_type, correlation_id FROM events WHERE id {list}");
                let rows = tx.query(&sql, &params).await?;
                let event = |row: &postrider::tx::Row| {
                    let loaded = Loaded {
                        payload: row.bytes(1)?,
                        content_type: row.opt_text(2)?,
                        correlation_id: row.opt_text(3)?,
                    };
                    Ok((row.int(0)?, Arc::new(loaded)))
                };
                rows.iter().map(event).collect()
            })
        })
        .await
    }
}
