//! `postrider.toml` as it is written: names and types, every section and key known by name.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::Deserialize;
use serde::de::IgnoredAny;
use toml::Spanned;

use crate::logs::LogFormat;

use super::values::{BackoffRule, BackoffTable, Count, CountOrNone, Seconds, Span};

/// Sections of parts that are still to come: known, and refused by name.
macro_rules! file {
    ($($later:ident),*) => {
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct File {
            pub database: Option<String>,
            pub listen: Option<Spanned<String>>,
            #[serde(default)]
            pub outbox: OutboxKeys,
            #[serde(default)]
            pub lane: BTreeMap<String, Spanned<LaneKeys>>,
            #[serde(default)]
            pub http: HttpKeys,
            #[serde(default)]
            pub auth: AuthKeys,
            pub tls: Option<Spanned<TlsKeys>>,
            #[serde(default)]
            pub telemetry: TelemetryKeys,
            pub alerts: Option<Spanned<AlertKeys>>,
            #[serde(default)]
            pub webhooks: WebhookKeys,
            pub orders: Option<Spanned<OrderKeys>>,
            pub memory: Option<Spanned<MemoryKeys>>,
            #[serde(default)]
            pub gate: GateKeys,
            #[serde(default)]
            pub doctor: DoctorKeys,
            pub verify: Option<VerifyKeys>,
            #[serde(default)]
            pub secrets: SecretKeys,
            $($later: Option<Spanned<IgnoredAny>>,)*
        }

        impl File {
            /// The sections this version does not have yet, and where they stand.
            pub fn later(&self) -> impl Iterator<Item = (&'static str, Range<usize>)> {
                [$((stringify!($later), &self.$later)),*].into_iter().filter_map(|(name, section)| Some((name, section.as_ref()?.span())))
            }
        }
    };
}
file!(store);

/// `[auth]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [auth]")]
pub struct AuthKeys {
    #[serde(default)]
    pub mode: AuthMode,
    pub session_ttl: Option<Spanned<Span>>,
}

/// `[http]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [http]")]
pub struct HttpKeys {
    pub max_connections: Option<Count<1_000_000>>,
    pub max_connections_per_peer: Option<CountOrNone<1_000_000>>,
    pub idle_timeout_sec: Option<Seconds<1000>>,
    pub write_timeout_sec: Option<Seconds<1000>>,
    #[serde(default)]
    pub trusted_proxies: Vec<Spanned<String>>,
}

/// When a token is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuthMode {
    /// Beyond loopback.
    #[default]
    Auto,
    Always,
}

/// `[tls]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [tls]")]
pub struct TlsKeys {
    pub cert: String,
    pub key: String,
}

/// `[telemetry]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [telemetry]")]
pub struct TelemetryKeys {
    pub log: Option<LogFormat>,
    pub otlp_endpoint: Option<Spanned<String>>,
    #[serde(default)]
    pub guard: bool,
}

/// `[webhooks]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [webhooks]")]
pub struct WebhookKeys {
    pub max_retry_limit: Option<Count<1000>>,
    pub base_delay_sec: Option<Seconds<1>>,
    pub jitter: Option<Spanned<f64>>,
    pub timeout_ms: Option<Count<120_000>>,
    pub allow_http: Option<bool>,
    #[serde(default)]
    pub allow_cidrs: Vec<Spanned<String>>,
    #[serde(default)]
    pub dns_servers: Vec<Spanned<String>>,
    pub retention: Option<Span>,
    pub disable_after: Option<Span>,
}

/// `[orders]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [orders]")]
pub struct OrderKeys {
    pub adapter: Option<AdapterName>,
    pub timeout_ms: Option<Count<3_600_000>>,
    pub ledger_ttl: Option<Span>,
    pub strict_idempotency: Option<bool>,
    pub idempotency: Option<IdempotencyName>,
    pub settling_sec: Option<Spanned<Seconds<0>>>,
    pub url: Option<Spanned<String>>,
    pub look_up_url: Option<Spanned<String>>,
    pub guard: Option<Spanned<bool>>,
    #[serde(default)]
    pub headers: BTreeMap<String, Spanned<String>>,
    #[serde(default)]
    pub statuses: BTreeMap<String, Spanned<String>>,
    pub latency_ms: Option<Spanned<Count<3_600_000>>>,
    pub faults: Option<Spanned<FaultKeys>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AdapterName {
    Paper,
    Http,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IdempotencyName {
    Key,
    LookUp,
    None,
}

/// `[orders] faults`: how often the paper broker misbehaves.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "faults, like { timeout = 0.1 }")]
pub struct FaultKeys {
    pub reject: f64,
    pub partial: f64,
    pub fail: f64,
    pub timeout: f64,
    pub lose_reply: f64,
}

/// `[memory]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [memory]")]
pub struct MemoryKeys {
    pub url: Option<Spanned<String>>,
    pub api_key: Option<Spanned<String>>,
    pub timeout_ms: Option<Count<10_000>>,
    pub breaker: Option<BreakerKeys>,
    pub default_space: Option<Spanned<String>>,
    pub consume_scm: Option<bool>,
    pub guard: Option<bool>,
    pub doubt_sec: Option<Seconds<1>>,
}

/// `[memory] breaker`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a breaker, like { failures = 3, probe_sec = 5 }")]
pub struct BreakerKeys {
    pub failures: Option<Count<1000>>,
    pub probe_sec: Option<Seconds<1>>,
}

/// `[gate]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "the section [gate]")]
pub struct GateKeys {
    pub mode: Option<Spanned<String>>,
    pub skip_store: bool,
    pub skip_outbox: bool,
    pub skip_audit: bool,
    pub skip_openmemory: bool,
    pub skip_reconcile: bool,
}

/// `[doctor]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [doctor]")]
pub struct DoctorKeys {
    pub every: Option<Span>,
}

/// `[verify]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [verify]")]
pub struct VerifyKeys {
    pub stop_command: String,
    pub start_command: String,
}

/// `[secrets]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [secrets]")]
pub struct SecretKeys {
    pub key: Option<Spanned<String>>,
}

/// `[alerts]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [alerts]")]
pub struct AlertKeys {
    pub url: Spanned<String>,
    #[serde(default)]
    pub headers: BTreeMap<String, Spanned<String>>,
    pub every: Option<Span>,
    pub max_age: Option<Span>,
    #[serde(default)]
    pub guard: bool,
}

/// `[outbox]`: for all lanes.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "the section [outbox]")]
pub struct OutboxKeys {
    pub enabled: Option<bool>,
    pub drain_timeout_sec: Option<Seconds<0>>,
    pub concurrency: Option<Count<100_000>>,
    pub batch: Option<Count<10_000>>,
    pub poll_interval_sec: Option<Seconds<1>>,
    pub lock_lease_sec: Option<Seconds<1000>>,
    pub max_attempts: Option<Count<1_000_000>>,
    pub max_crashes: Option<Count<1_000>>,
    pub backoff: Option<BackoffRule>,
    pub backoff_sec: Option<Spanned<BackoffTable>>,
}

/// `[lane.NAME]`.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section [lane.NAME]")]
pub struct LaneKeys {
    pub courier: Option<CourierName>,
    pub url: Option<Spanned<String>>,
    pub timeout_ms: Option<Spanned<Count<3_600_000>>>,
    #[serde(default)]
    pub headers: BTreeMap<String, Spanned<String>>,
    #[serde(default)]
    pub statuses: BTreeMap<String, Spanned<String>>,
    pub show_payload: Option<Spanned<bool>>,
    pub guard: Option<Spanned<bool>>,
    pub concurrency: Option<Count<100_000>>,
    pub batch: Option<Count<10_000>>,
    pub poll_interval_sec: Option<Seconds<1>>,
    pub lock_lease_sec: Option<Seconds<1000>>,
    pub shards: Option<Count<1024>>,
    pub max_attempts: Option<Count<1_000_000>>,
    pub max_crashes: Option<Count<1_000>>,
    pub backoff: Option<BackoffRule>,
    pub backoff_sec: Option<Spanned<BackoffTable>>,
    pub dedup: Option<bool>,
    pub audit: Option<bool>,
    pub retention: Option<Span>,
    pub key_ttl: Option<Span>,
    pub max_age: Option<Span>,
    pub max_payload_bytes: Option<Count<1_073_741_824>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CourierName {
    Http,
    Log,
    Noop,
}
