//! Traces over OTLP: `outbox.process` from the delivery's begin to the recorded outcome, and in it `broker.send`, the send
//! alone, with its round trip. Both continue the trace of whoever enqueued the message, and the destination continues ours.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::Full;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{
    Span, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceId, TraceState, Tracer, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SdkTracer, SdkTracerProvider};
use postrider::couriers::exchange::{Answer, Exchange, Resolve, System};
use postrider::observe::{Observer, Told, Trip, followed};
use postrider::outcome::FlushCode;
use postrider::{Begin, Courier, Message, Outcome};
use tokio::runtime::Handle;

use crate::config::Config;
use crate::failure::{Failure, Result};
use crate::parts;

/// The collector must answer within this time.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of its answer.
const MOST_BODY: usize = 1 << 20;
/// The last spans must be out within this time: a collector that hangs does not hold up a stop.
const LAST_SPANS: Duration = Duration::from_secs(1);

/// Where spans of this process are made, and those that wait for their outcome to be recorded.
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    open: Mutex<HashMap<i64, Context>>,
}

impl Traces {
    /// As `[telemetry]` has it.
    pub fn configured(config: &Config) -> Result<Option<Arc<Self>>> {
        let Some(endpoint) = &config.otlp_endpoint else { return Ok(None) };
        let resolver = if config.otlp_guard { parts::guarded(config)? } else { Arc::new(System) };
        Traces::start(endpoint, resolver).map(Some)
    }

    /// Sends to an OTLP collector, like `http://127.0.0.1:4318`.
    pub fn start(endpoint: &str, resolver: Arc<dyn Resolve>) -> Result<Arc<Self>> {
        let wrong = |e: &dyn std::fmt::Display| {
            Failure::usage(format!(
                "[telemetry] otlp_endpoint cannot be used: {e}; write a collector's address, like \"http://127.0.0.1:4318\""
            ))
        };
        let mut url = url::Url::parse(endpoint).map_err(|e| wrong(&e))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(wrong(&"it must begin with http:// or https://"));
        }
        if matches!(url.path(), "" | "/") {
            url.set_path("/v1/traces");
        }
        let exporter =
            SpanExporter::builder().with_http().with_http_client(Collector::new(resolver)?).with_timeout(PATIENCE);
        let exporter = exporter.with_endpoint(url.to_string()).build().map_err(|e| wrong(&e))?;
        let resource = Resource::builder().with_service_name("postrider").build();
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_id_generator(Ids::default())
            .with_batch_exporter(exporter)
            .build();
        Ok(Arc::new(Traces { tracer: provider.tracer("postrider"), provider, open: Mutex::default() }))
    }

    /// Sends what is left.
    pub async fn end(self: Arc<Self>) {
        let ended = tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(LAST_SPANS));
        match tokio::time::timeout(LAST_SPANS, ended).await {
            Ok(Ok(Err(error))) => tracing::warn!(%error, "the last traces were not sent"),
            Err(_) => tracing::warn!("the last traces were not sent: the collector does not answer"),
            _ => {}
        }
    }

    /// The same courier, traced.
    pub fn around(self: &Arc<Self>, courier: Arc<dyn Courier>) -> Arc<dyn Courier> {
        Arc::new(Traced { courier, traces: self.clone() })
    }

    fn open(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Context>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the process; answers what the send will be called, and the message as the destination shall see it.
    fn begin(&self, message: &Message) -> (Sending, Message) {
        let carrier: HashMap<String, String> =
            message.headers.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone())).collect();
        let propagator = TraceContextPropagator::new();
        let enqueuer = propagator.extract_with_context(&Context::new(), &carrier);
        let process = self
            .tracer
            .span_builder("outbox.process")
            .with_kind(SpanKind::Consumer)
            .with_attributes([
                KeyValue::new("outbox.lane", message.lane.to_string()),
                KeyValue::new("outbox.id", message.id),
                KeyValue::new("outbox.attempts", i64::from(message.attempts)),
            ])
            .start_with_context(&self.tracer, &enqueuer);
        let process = enqueuer.with_span(process);
        let (id, whole) = (Ids::default().0.new_span_id(), process.span().span_context().clone());
        let send = SpanContext::new(whole.trace_id(), id, whole.trace_flags(), false, TraceState::default());
        let sending = Sending { id, process: process.clone() };
        // An earlier attempt of the same message whose outcome nobody told ends here.
        self.open().insert(message.id, process);
        let mut headers = HashMap::new();
        propagator.inject_context(&Context::new().with_remote_span_context(send), &mut headers);
        let mut message = message.clone();
        message.headers.retain(|(name, _)| !headers.contains_key(&name.to_ascii_lowercase()));
        message.headers.extend(headers.into_iter().filter(|(_, value)| !value.is_empty()));
        (sending, message)
    }

    /// The send as it was, if there was one; and what came of the delivery.
    fn sent(&self, id: i64, sending: &Sending, adapter: &str, trip: Option<Trip>, outcome: &Outcome) {
        // What is only deferred has no outcome to wait for.
        if matches!(outcome, Outcome::Defer { .. }) {
            self.open().remove(&id);
        }
        let Some(trip) = trip else { return };
        let began = UNIX_EPOCH + Duration::from_micros(trip.began.micros().max(0) as u64);
        NEXT.set(Some(sending.id));
        let mut span = self
            .tracer
            .span_builder("broker.send")
            .with_kind(SpanKind::Client)
            .with_start_time(began)
            .with_attributes([
                KeyValue::new("adapter", adapter.to_owned()),
                KeyValue::new("rtt_ms", trip.took.as_secs_f64() * 1000.0),
            ])
            .start_with_context(&self.tracer, &sending.process);
        NEXT.set(None);
        match outcome {
            Outcome::Sent { .. } => {}
            Outcome::Retry { fault, .. } | Outcome::Dead(fault) => {
                span.set_attribute(KeyValue::new("reason_code", fault.code.to_string()));
                span.set_status(Status::error(fault.code.to_string()));
            }
            Outcome::Defer { code, .. } => span.set_attribute(KeyValue::new("reason_code", code.to_string())),
        }
        span.end_with_timestamp(began + trip.took);
    }
}

impl Observer for Traces {
    fn settled(&self, told: &Told<'_>) {
        let Some(process) = self.open().remove(&told.outbox_id) else { return };
        let span = process.span();
        span.set_attribute(KeyValue::new("outcome", told.outcome.as_str()));
        if let Some(reason) = told.reason_code {
            span.set_attribute(KeyValue::new("reason_code", reason.to_owned()));
        }
        if matches!(told.outcome, FlushCode::Dead | FlushCode::Conflict) {
            span.set_status(Status::error(told.outcome.as_str()));
        }
        span.end();
    }
}

/// A delivery under way: the span its send will be, and the one around it.
struct Sending {
    id: SpanId,
    process: Context,
}

thread_local! {
    /// The id of the next span of this thread, if it was told to a destination before the span was made.
    static NEXT: Cell<Option<SpanId>> = const { Cell::new(None) };
}

/// Random ids, but for a span whose id is known already.
#[derive(Debug, Default)]
struct Ids(RandomIdGenerator);

impl IdGenerator for Ids {
    fn new_trace_id(&self) -> TraceId {
        self.0.new_trace_id()
    }

    fn new_span_id(&self) -> SpanId {
        NEXT.take().unwrap_or_else(|| self.0.new_span_id())
    }
}

struct Traced {
    courier: Arc<dyn Courier>,
    traces: Arc<Traces>,
}

#[async_trait]
impl Courier for Traced {
    fn name(&self) -> &str {
        self.courier.name()
    }

    fn settled(&self, id: i64) {
        self.courier.settled(id);
    }

    async fn ready(&self) -> bool {
        self.courier.ready().await
    }

    async fn deliver(&self, message: &Message) -> Outcome {
        let (sending, message) = self.traces.begin(message);
        let (outcome, trip) = followed(self.courier.deliver(&message)).await;
        self.traces.sent(message.id, &sending, self.name(), trip, &outcome);
        outcome
    }

    async fn deliver_begun(&self, message: &Message, begin: &Begin) -> Outcome {
        let (sending, message) = self.traces.begin(message);
        let (outcome, trip) = followed(self.courier.deliver_begun(&message, begin)).await;
        self.traces.sent(message.id, &sending, self.name(), trip, &outcome);
        outcome
    }
}

/// The way to the collector. The exporter runs on a thread of its own without a runtime; requests are made on ours.
struct Collector {
    exchange: Arc<Exchange>,
    runtime: Handle,
}

impl Collector {
    fn new(resolver: Arc<dyn Resolve>) -> Result<Self> {
        let exchange = Arc::new(Exchange::new(resolver, PATIENCE)?);
        Ok(Collector { exchange, runtime: Handle::current() })
    }
}

impl std::fmt::Debug for Collector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Collector")
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: http::Request<Bytes>) -> Result<http::Response<Bytes>, HttpError> {
        let exchange = self.exchange.clone();
        let asking = async move { exchange.ask(request.map(Full::new), PATIENCE, MOST_BODY).await };
        match self.runtime.spawn(asking).await? {
            Answer::Answered { status, headers, body, .. } => {
                let mut response = http::Response::new(Bytes::from(body));
                (*response.status_mut(), *response.headers_mut()) = (status, headers);
                Ok(response)
            }
            Answer::Unanswered { code, cause, .. } => Err(format!("{code}: {cause}").into()),
        }
    }
}
