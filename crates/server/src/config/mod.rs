//! The configuration in force: `postrider.toml`, the environment and the flags, checked once, before anything starts.

mod file;
mod memory;
mod orders;
mod plain;
pub mod reference;
mod tuning;
pub mod values;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use postrider::backoff::Backoff;
use postrider::decide::HttpClasses;
use postrider::message::check_lane_name;
use postrider::stores::without_password;
use postrider::worker::core::LaneSettings;
use postrider::{LaneRules, Lanes};
use postrider_memories::LANE as MEMORY;
use postrider_memories::gate::{Mode, SkipSource, Skips};
use postrider_orders::LANE as ORDERS;
use postrider_webhooks::guard::Policy;
use postrider_webhooks::{LANE, Reports, Settings, lane_rules, lane_settings};

pub use self::file::AuthMode;
use self::file::{AlertKeys, CourierName, File, GateKeys, HttpKeys, LaneKeys, MemoryKeys, OrderKeys, WebhookKeys};
pub use self::memory::MemoryConfig;
pub use self::orders::{Broker, OrdersConfig};
use self::tuning::{FromEnvironment, Tuning};
use self::values::Span;
use crate::couriers::{Destination, check_http};
use crate::failure::{Failure, Result};
use crate::gate::{CAPABILITIES, GateRules};
use crate::http::{Limits, Patience, SlotRules};
use crate::logs::LogFormat;
use crate::secret;

const DEFAULT_FILE: &str = "postrider.toml";
const DEFAULT_DATABASE: &str = "sqlite://postrider.db";
const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8787);
/// The lane alerts go through, where `[alerts]` is configured.
pub const ALERTS: &str = "alerts";
/// What an editor put in front of a text, unseen.
pub const BYTE_ORDER_MARK: &str =
    "it begins with a byte order mark (BOM), which does not belong there; save it as UTF-8 without one";
const DEFAULT_KEY: &str = "file:postrider.key";

/// All that the commands need to know.
#[derive(Debug)]
pub struct Config {
    pub database: String,
    pub listen: SocketAddr,
    pub http: Limits,
    pub auth: AuthMode,
    /// How long a browser stays signed in.
    pub session_ttl: Duration,
    pub tls: Option<TlsFiles>,
    pub log: Option<LogFormat>,
    pub otlp_endpoint: Option<String>,
    pub otlp_guard: bool,
    /// What is right, but unwise.
    pub warnings: Vec<String>,
    pub alerts: Option<AlertRules>,
    pub webhooks: Settings,
    /// What webhook couriers saw, until the store writes it.
    pub reports: Reports,
    pub orders: OrdersConfig,
    /// The memory gateway, where it is configured.
    pub memory: Option<MemoryConfig>,
    pub gate: GateRules,
    /// How often `serve` looks for what is not as it should be; zero: only when asked.
    pub doctor_every: Duration,
    pub verify: Option<VerifyCommands>,
    /// Where the key for secrets at rest is kept.
    pub secrets_key: String,
    pub enabled: bool,
    pub drain: Duration,
    pub lanes: BTreeMap<String, Lane>,
}

/// How an operator's OpenMemory is stopped and started.
#[derive(Clone, Debug)]
pub struct VerifyCommands {
    pub stop: String,
    pub start: String,
}

/// A certificate and its key, in PEM files.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Where alerts go (through the lane [`ALERTS`]), and when there is one.
#[derive(Clone, Copy, Debug)]
pub struct AlertRules {
    /// The same trouble is told at most once in this time.
    pub every: Duration,
    /// A lane whose oldest due message is older is in trouble; zero: never.
    pub max_age: Duration,
}

/// One lane: what the store keeps, how it is worked, where it goes.
#[derive(Debug)]
pub struct Lane {
    pub rules: LaneRules,
    pub settings: LaneSettings,
    pub destination: Destination,
    /// Its own limit of age for alerts.
    pub max_age: Option<Duration>,
}

impl Config {
    /// Reads the file (`postrider.toml` if it is there, or the one that was named) and the environment.
    pub fn load(file: Option<&Path>, database: Option<String>) -> Result<Config> {
        let path = file.map_or_else(|| PathBuf::from(DEFAULT_FILE), Path::to_owned);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && file.is_none() => String::new(),
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                return Err(Failure::usage(format!("{} is not UTF-8; save it as UTF-8", path.display())));
            }
            Err(error) => {
                return Err(Failure::usage(format!(
                    "cannot read the configuration {}: {error}; check --config",
                    path.display()
                )));
            }
        };
        let variable = |name: &str| std::env::var(name).ok();
        let mut config = read(&path, &text, variable)?;
        let stands_here = !config.database.is_empty() && !secret::is_reference(&config.database);
        if stands_here && without_password(&config.database) != config.database && others_may_read(&path) {
            let file = path.display();
            config.warnings.push(format!(
                "{file} holds the password of the database and can be read by others; `chmod 600 {file}`, or write database = \"env:NAME\""
            ));
        }
        let given = |url: &String| !url.trim().is_empty();
        if let Some(url) = database.filter(given) {
            config.database = url;
        } else if config.database.is_empty() {
            config.database = variable("POSTGRES_DSN").filter(given).unwrap_or_else(|| DEFAULT_DATABASE.to_owned());
        }
        config.database =
            secret::resolve(&config.database).map_err(|e| Failure::usage(format!("the database's URL: {e}")))?;
        Ok(config)
    }

    /// Makes the gateway talk to another OpenMemory, whether or not there was one before.
    pub fn use_openmemory(&mut self, url: &str) -> Result<()> {
        let place = Place { path: Path::new("the command"), text: "" };
        let url = toml::Spanned::new(0..0, url.to_owned());
        let mut memory = memory::read(&place, &MemoryKeys { url: Some(url), ..MemoryKeys::default() })?;
        // It is not the one our memories are in.
        memory.settings.recognise = false;
        let (keys, none) = (LaneKeys::default(), Tuning::default());
        let lane = memory::lane(&place, 0..0, &keys, &none, &none, &mut memory)?;
        self.lanes.insert(MEMORY.to_owned(), lane);
        self.memory = Some(memory);
        Ok(())
    }

    /// The lanes as the store keeps them.
    pub fn store_lanes(&self) -> Lanes {
        self.lanes.iter().fold(Lanes::new(), |lanes, (name, lane)| lanes.with(name, lane.rules.clone()))
    }

    /// The lane of that name, or why it cannot be used.
    pub fn lane(&self, name: &str) -> Result<&Lane> {
        if name == MEMORY && self.memory.is_none() {
            return Err(Failure::usage(format!(
                "the lane `{name}` is the memory gateway's; say where OpenMemory is, with [memory] url in {DEFAULT_FILE}"
            )));
        }
        check_lane_name(name)?;
        self.lanes.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.lanes.keys().map(String::as_str).collect();
            Failure::usage(format!(
                "there is no lane `{name}`; known: {}. Add [lane.{name}] to {DEFAULT_FILE}, or name the file with --config",
                known.join(", ")
            ))
        })
    }
}

/// May somebody else on this machine read the file?
fn others_may_read(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|file| file.permissions().mode() & 0o077 != 0)
}

/// An address and a port.
pub fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "listen must be an address and a port, like \"127.0.0.1:8787\"".to_owned())
}

/// Complains with the file and the line.
struct Place<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Place<'_> {
    fn wrong(&self, at: Range<usize>, what: impl std::fmt::Display) -> Failure {
        let line = self.text.get(..at.start).unwrap_or(self.text).matches('\n').count() + 1;
        Failure::usage(format!("{}:{line}: {what}", self.path.display()))
    }

    /// An error of the parser or of a value, with the key it is about.
    fn refused(&self, error: &toml::de::Error) -> Failure {
        let at = error.span().unwrap_or(0..0);
        if let Some(names) = error.message().strip_prefix("unknown field ") {
            return self.wrong(at, unknown_key(names));
        }
        let message = match error.message().strip_prefix("unknown variant ") {
            Some(names) => unknown_word(names),
            None => secret::without_value(error.message()).replace('\n', "; "),
        };
        let start = self.text.get(..at.start).and_then(|before| before.rfind('\n')).map_or(0, |n| n + 1);
        let line = self.text.get(start..).and_then(|rest| rest.lines().next()).unwrap_or("");
        // Of a line that is wrong in itself, what stands before the first `=` may be a part of a value.
        let is_known = |key: &&str| reference::SECTIONS.iter().any(|section| section.keys.iter().any(|k| k.0 == *key));
        let key = line.split_once('=').map(|(key, _)| key.trim()).filter(is_known);
        let key = key.map_or(String::new(), |key| format!("{key}: "));
        // What the parser makes of `courier = noop`.
        let hint = if error.message().starts_with("invalid float") { "; text needs quotes" } else { "" };
        self.wrong(at, format!("{key}{message}{hint}"))
    }
}

/// Can this be told as the name of a key? What has other letters in it may be a value.
fn is_key(name: &str) -> bool {
    name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// From "`wrong`, expected one of `a`, `b`" to the names, and the known one that is nearest.
fn names(message: &str) -> (&str, Vec<&str>, Option<&str>) {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let wrong = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.collect();
    let nearest = known.iter().copied().min_by_key(|key| distance(wrong, key)).filter(|key| distance(wrong, key) <= 2);
    (wrong, known, nearest)
}

fn unknown_key(message: &str) -> String {
    let (wrong, known, nearest) = names(message);
    match nearest {
        Some(key) => format!("unknown key `{wrong}`; did you mean `{key}`?"),
        None if is_key(wrong) => format!("unknown key `{wrong}`; known here: {}", known.join(", ")),
        None => format!("unknown key; known here: {}", known.join(", ")),
    }
}

fn unknown_word(message: &str) -> String {
    let (_, known, nearest) = names(message);
    let one = known.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
    match nearest {
        Some(word) => format!("must be one of {one}; did you mean \"{word}\"?"),
        None => format!("must be one of {one}"),
    }
}

/// How many letters must change to make one word the other.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let changed = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn read(path: &Path, text: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Config> {
    let place = Place { path, text };
    if text.starts_with('\u{feff}') {
        return Err(place.wrong(0..0, BYTE_ORDER_MARK));
    }
    let file: File = toml::from_str(text).map_err(|error| place.refused(&error))?;
    if let Some(key) = toml::from_str(text).ok().and_then(|all: toml::Table| with_nul(&toml::Value::Table(all))) {
        return Err(Failure::usage(format!(
            "{}: `{key}` contains a NUL character, which nothing can have",
            path.display()
        )));
    }
    if let Some((name, at)) = file.later().next() {
        let what =
            format!("[{name}] is for a part that this version of postrider does not have yet; take the section out");
        return Err(place.wrong(at, what));
    }
    let listen = match &file.listen {
        None => DEFAULT_LISTEN,
        Some(listen) => parse_listen(listen.get_ref()).map_err(|e| place.wrong(listen.span(), e))?,
    };
    if let (Some(_), Some(twice)) = (&file.outbox.backoff, &file.outbox.backoff_sec) {
        return Err(place.wrong(twice.span(), "backoff and backoff_sec say the same thing; keep one"));
    }
    let environment = FromEnvironment::read(&variable)
        .map_err(|e| Failure::usage(format!("{e} (from the environment; correct or unset it)")))?;
    let common = Tuning::from(&file.outbox);

    let mut lanes = BTreeMap::new();
    let mut orders = match &file.orders {
        Some(keys) => orders::read(&place, keys.get_ref(), keys.span(), &variable)?,
        None => orders::read(&place, &OrderKeys::default(), 0..0, &variable)?,
    };
    let no_keys = LaneKeys::default();
    let (keys, at) = file.lane.get(ORDERS).map_or((&no_keys, 0..0), |keys| (keys.get_ref(), keys.span()));
    let lane_of_orders = orders::lane(&place, at, keys, &common, &environment.tuning, &mut orders)?;
    lanes.insert(ORDERS.to_owned(), lane_of_orders);
    let mut memory = match &file.memory {
        Some(keys) => Some(memory::read(&place, keys.get_ref())?),
        None => None,
    };
    let (keys, at) = file.lane.get(MEMORY).map_or((&no_keys, 0..0), |keys| (keys.get_ref(), keys.span()));
    match &mut memory {
        Some(memory) => {
            let lane = memory::lane(&place, at, keys, &common, &environment.tuning, memory)?;
            lanes.insert(MEMORY.to_owned(), lane);
        }
        None if file.lane.contains_key(MEMORY) => {
            return Err(place.wrong(at, "[lane.memory] is the memory gateway's; say in [memory] url where OpenMemory is, or choose another name"));
        }
        None => {}
    }
    for (name, keys) in file.lane.iter().filter(|(name, _)| ![ORDERS, MEMORY].contains(&name.as_str())) {
        let lane = lane(&place, name, keys.span(), keys.get_ref(), &common, &environment.tuning)?;
        lanes.insert(name.clone(), lane);
    }
    if !lanes.contains_key("log") {
        let keys = LaneKeys::default();
        lanes.insert("log".to_owned(), lane(&place, "log", 0..0, &keys, &common, &environment.tuning)?);
    }
    let webhooks = webhooks(&place, &file.webhooks)?;
    let reports = Reports::default();
    if !lanes.contains_key(LANE) {
        lanes.insert(LANE.to_owned(), webhook_lane(&place, 0..0, &LaneKeys::default(), &common, &environment.tuning)?);
    }
    if let Some(lane) = lanes.get_mut(LANE) {
        lane.rules = lane_rules(&reports);
    }
    let secrets_key = match &file.secrets.key {
        None => DEFAULT_KEY.to_owned(),
        Some(key) if secret::is_reference(key.get_ref()) => key.get_ref().clone(),
        Some(key) => {
            let what = "key must not stand here in plain text; write where it is kept: \"file:PATH\", \"env:NAME\" or \"exec:COMMAND\"";
            return Err(place.wrong(key.span(), what));
        }
    };
    let alerts = match &file.alerts {
        None => None,
        Some(keys) => {
            let (lane, rules) = alerts(&place, keys.span(), keys.get_ref())?;
            lanes.insert(ALERTS.to_owned(), lane);
            Some(rules)
        }
    };
    let endpoint = file.telemetry.otlp_endpoint.as_ref().map(|given| {
        plain::url("otlp_endpoint", given.get_ref())
            .and_then(|()| secret::resolve(given.get_ref()))
            .map_err(|e| place.wrong(given.span(), e))
    });
    let otlp_endpoint = match endpoint.transpose()? {
        Some(endpoint) => Some(endpoint),
        None => {
            let given =
                |name: &'static str| variable(name).filter(|value| !value.trim().is_empty()).map(|url| (name, url));
            let named = given("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").or_else(|| given("OTEL_EXPORTER_OTLP_ENDPOINT"));
            // It is kept elsewhere already, so a parameter may be a secret; credentials would not be sent.
            let checked = named.map(|(name, url)| plain::without_credentials(name, &url).map(|()| url));
            checked.transpose().map_err(Failure::usage)?
        }
    };
    if let Some(keys) = &file.tls
        && [&keys.get_ref().cert, &keys.get_ref().key].iter().any(|text| text.contains("-----BEGIN"))
    {
        return Err(
            place.wrong(keys.span(), "[tls] names files: cert = \"cert.pem\", key = \"key.pem\"; not what is in them")
        );
    }
    Ok(Config {
        database: file.database.unwrap_or_default(),
        listen,
        http: http(&place, &file.http)?,
        auth: file.auth.mode,
        session_ttl: session_ttl(&place, file.auth.session_ttl.as_ref())?,
        tls: file
            .tls
            .map(|keys| keys.into_inner())
            .map(|keys| TlsFiles { cert: keys.cert.into(), key: keys.key.into() }),
        log: file.telemetry.log,
        otlp_endpoint,
        otlp_guard: file.telemetry.guard,
        alerts,
        webhooks,
        reports,
        orders,
        memory,
        gate: gate(&place, &file.gate, &variable)?,
        doctor_every: file.doctor.every.map_or(Duration::from_secs(3600), |every| every.0),
        verify: file.verify.map(|keys| VerifyCommands { stop: keys.stop_command, start: keys.start_command }),
        secrets_key,
        warnings: vec![],
        enabled: environment.enabled.or(file.outbox.enabled).unwrap_or(true),
        drain: environment.drain.or(file.outbox.drain_timeout_sec.map(|s| s.0)).unwrap_or(Duration::from_secs(20)),
        lanes,
    })
}

/// The key of a text with a NUL in it: no name, address, command or file has one, and some would be cut off there.
fn with_nul(value: &toml::Value) -> Option<String> {
    let inside = |name: &str, value: &toml::Value| {
        let shown = name.replace('\0', "");
        if name.contains('\0') {
            return Some(shown);
        }
        let rest = with_nul(value)?;
        Some(if rest.is_empty() { shown } else { format!("{shown}.{rest}") })
    };
    match value {
        toml::Value::String(text) => text.contains('\0').then(String::new),
        toml::Value::Array(all) => all.iter().find_map(with_nul),
        toml::Value::Table(all) => all.iter().find_map(|(name, value)| inside(name, value)),
        _ => None,
    }
}

/// `[http]`.
fn http(place: &Place, keys: &HttpKeys) -> Result<Limits> {
    let usual = Limits::default();
    let range = |text: &toml::Spanned<String>| text.get_ref().parse().map_err(|e: String| place.wrong(text.span(), e));
    Ok(Limits {
        slots: SlotRules {
            most: keys.max_connections.map_or(usual.slots.most, |n| n.0 as usize),
            per_peer: keys.max_connections_per_peer.map_or(usual.slots.per_peer, |n| n.0 as usize),
            trusted: keys.trusted_proxies.iter().map(range).collect::<Result<_>>()?,
            reserve: usual.slots.reserve,
        },
        patience: Patience {
            idle: keys.idle_timeout_sec.map_or(usual.patience.idle, |s| s.0),
            write: keys.write_timeout_sec.map_or(usual.patience.write, |s| s.0),
        },
    })
}

/// `[auth] session_ttl`.
fn session_ttl(place: &Place, given: Option<&toml::Spanned<Span>>) -> Result<Duration> {
    let Some(span) = given else { return Ok(Duration::from_secs(12 * 3600)) };
    let ttl = span.get_ref().0;
    if ttl < Duration::from_secs(1) {
        let what = "session_ttl below \"1s\" would sign everybody out at once; write for how long, like \"12h\"";
        return Err(place.wrong(span.span(), what));
    }
    Ok(ttl)
}

/// The lane of a part of ours, tuned like any other.
fn part_lane(
    place: &Place,
    keys: &LaneKeys,
    usual: LaneRules,
    mut settings: LaneSettings,
    tunings: [&Tuning; 2],
) -> Result<(LaneRules, LaneSettings)> {
    if let (Some(_), Some(twice)) = (&keys.backoff, &keys.backoff_sec) {
        return Err(place.wrong(twice.span(), "backoff and backoff_sec say the same thing; keep one"));
    }
    let rules = LaneRules {
        shards: keys.shards.map_or(usual.shards, |n| n.0),
        max_payload_bytes: keys.max_payload_bytes.map_or(usual.max_payload_bytes, |n| n.0 as usize),
        ..usual
    };
    settings.shards = (0..rules.shards).collect();
    let [common, environment] = tunings;
    for tuning in [common, &Tuning::from(keys), environment] {
        tuning.apply(&mut settings);
    }
    Ok((rules, settings))
}

/// Does a lane say where its messages go, and how?
fn says_where(keys: &LaneKeys) -> bool {
    keys.courier.is_some()
        || keys.url.is_some()
        || keys.timeout_ms.is_some()
        || !keys.headers.is_empty()
        || !keys.statuses.is_empty()
        || keys.show_payload.is_some()
        || keys.guard.is_some()
        || keys.dedup.is_some()
        || keys.key_ttl.is_some()
}

/// `[gate]`, and what the environment leaves out.
fn gate(place: &Place, keys: &GateKeys, variable: &impl Fn(&str) -> Option<String>) -> Result<GateRules> {
    let mode = match &keys.mode {
        None => Mode::Full,
        Some(mode) => match mode.get_ref().as_str() {
            "FULL" => Mode::Full,
            "DEGRADED" => Mode::Degraded,
            _ => return Err(place.wrong(mode.span(), "mode is \"FULL\" or \"DEGRADED\"")),
        },
    };
    let mut skips = Skips::new();
    for name in CAPABILITIES {
        let in_file = match name {
            "store" => keys.skip_store,
            "outbox" => keys.skip_outbox,
            "audit" => keys.skip_audit,
            "openmemory" => keys.skip_openmemory,
            _ => keys.skip_reconcile,
        };
        let named = format!("GATEWAY_SKIP_{}", name.to_ascii_uppercase());
        match variable(&named).as_deref().map(str::trim) {
            Some("1") => drop(skips.insert(name.to_owned(), SkipSource::Environment)),
            None | Some("" | "0") => {}
            Some(_) => return Err(Failure::usage(format!("{named} is 1 or unset, and nothing else"))),
        }
        if in_file {
            skips.insert(name.to_owned(), SkipSource::File);
        }
    }
    Ok(GateRules { mode, skips })
}

/// `[webhooks]`.
fn webhooks(place: &Place, keys: &WebhookKeys) -> Result<Settings> {
    let usual = Settings::default();
    let jitter = match &keys.jitter {
        Some(jitter) if !(0.0..=1.0).contains(jitter.get_ref()) => {
            return Err(place.wrong(jitter.span(), "jitter must be from 0.0 to 1.0"));
        }
        jitter => jitter.as_ref().map_or(usual.jitter, |jitter| *jitter.get_ref()),
    };
    let range = |text: &toml::Spanned<String>| text.get_ref().parse().map_err(|e: String| place.wrong(text.span(), e));
    let server = |text: &toml::Spanned<String>| {
        let what = "write a name server's address and port, like \"10.0.0.2:53\"";
        text.get_ref().parse().map_err(|_| place.wrong(text.span(), what))
    };
    Ok(Settings {
        max_retry_limit: keys.max_retry_limit.map_or(usual.max_retry_limit, |n| n.0),
        base_delay: keys.base_delay_sec.map_or(usual.base_delay, |s| s.0),
        jitter,
        timeout: keys.timeout_ms.map_or(usual.timeout, |ms| Duration::from_millis(ms.0.into())),
        policy: Policy {
            allow_http: keys.allow_http.unwrap_or(false),
            allow_cidrs: keys.allow_cidrs.iter().map(range).collect::<Result<_>>()?,
        },
        dns: keys.dns_servers.iter().map(server).collect::<Result<_>>()?,
        retention: keys.retention.map_or(usual.retention, |s| s.0),
        disable_after: keys.disable_after.map_or(usual.disable_after, |s| s.0),
    })
}

/// `[lane.webhooks]`: retries, retention and destination are not its business.
fn webhook_lane(
    place: &Place,
    at: Range<usize>,
    keys: &LaneKeys,
    common: &Tuning,
    environment: &Tuning,
) -> Result<Lane> {
    let allowed = LaneKeys {
        concurrency: keys.concurrency,
        batch: keys.batch,
        poll_interval_sec: keys.poll_interval_sec,
        lock_lease_sec: keys.lock_lease_sec,
        max_age: keys.max_age,
        ..LaneKeys::default()
    };
    if *keys != allowed {
        let what = "[lane.webhooks] takes only concurrency, batch, poll_interval_sec, lock_lease_sec and max_age; retries are set in [webhooks]";
        return Err(place.wrong(at, what));
    }
    let mut settings = lane_settings();
    for tuning in [common, &Tuning::from(keys), environment] {
        tuning.apply(&mut settings);
    }
    // One job is one attempt; the saga decides about the next.
    settings.budgets.max_attempts = 1;
    let max_age = keys.max_age.map(|span| span.0);
    Ok(Lane { rules: LaneRules::default(), settings, destination: Destination::Webhooks, max_age })
}

fn lane(
    place: &Place,
    name: &str,
    at: Range<usize>,
    keys: &LaneKeys,
    common: &Tuning,
    environment: &Tuning,
) -> Result<Lane> {
    if name == LANE {
        return webhook_lane(place, at, keys, common, environment);
    }
    if name == ALERTS {
        let what = "the lane `alerts` is Postrider's own; say where alerts go in [alerts], or choose another name";
        return Err(place.wrong(at, what));
    }
    check_lane_name(name).map_err(|e| place.wrong(at.clone(), e))?;
    if let (Some(_), Some(twice)) = (&keys.backoff, &keys.backoff_sec) {
        return Err(place.wrong(twice.span(), "backoff and backoff_sec say the same thing; keep one"));
    }
    if keys.key_ttl.is_some_and(|ttl| ttl.0 < Duration::from_secs(1)) {
        return Err(place.wrong(
            at,
            format!(
                "[lane.{name}]: with key_ttl below \"1s\" no key would be remembered; write for how long, like \"7d\""
            ),
        ));
    }
    let usual = LaneRules::default();
    let rules = LaneRules {
        shards: keys.shards.map_or(usual.shards, |n| n.0),
        max_payload_bytes: keys.max_payload_bytes.map_or(usual.max_payload_bytes, |n| n.0 as usize),
        key_ttl: keys.key_ttl.map_or(usual.key_ttl, |s| s.0),
        retention: keys.retention.map_or(usual.retention, |s| s.0),
        dedup: keys.dedup.unwrap_or(false),
        audit: keys.audit.unwrap_or(false),
        ..usual
    };
    Lanes::new().with(name, rules.clone()).check().map_err(|e| place.wrong(at.clone(), e))?;
    let mut settings = LaneSettings::new(name);
    settings.shards = (0..rules.shards).collect();
    for tuning in [common, &Tuning::from(keys), environment] {
        tuning.apply(&mut settings);
    }
    let max_age = keys.max_age.map(|span| span.0);
    Ok(Lane { rules, settings, destination: destination(place, name, at, keys)?, max_age })
}

fn destination(place: &Place, name: &str, at: Range<usize>, keys: &LaneKeys) -> Result<Destination> {
    let courier = match (keys.courier, name) {
        (Some(courier), _) => courier,
        (None, "log") => CourierName::Log,
        (None, _) => {
            return Err(
                place.wrong(at, format!("[lane.{name}] needs a courier: \"http\" (with url), \"log\" or \"noop\""))
            );
        }
    };
    let alien = |key: &str, given: Option<Range<usize>>, wants: &str| match given {
        Some(at) => Err(place.wrong(at, format!("{key} is only for courier = \"{wants}\"; leave it out"))),
        None => Ok(()),
    };
    if courier != CourierName::Log {
        alien("show_payload", keys.show_payload.as_ref().map(|k| k.span()), "log")?;
    }
    if courier != CourierName::Http {
        alien("url", keys.url.as_ref().map(|k| k.span()), "http")?;
        alien("timeout_ms", keys.timeout_ms.as_ref().map(|k| k.span()), "http")?;
        alien("headers", keys.headers.values().next().map(|k| k.span()), "http")?;
        alien("statuses", keys.statuses.values().next().map(|k| k.span()), "http")?;
        alien("guard", keys.guard.as_ref().map(|k| k.span()), "http")?;
    }
    Ok(match courier {
        CourierName::Noop => Destination::Nowhere,
        CourierName::Log => {
            Destination::Print { show_payload: keys.show_payload.as_ref().is_some_and(|k| *k.get_ref()) }
        }
        CourierName::Http => {
            let url = keys.url.as_ref().ok_or_else(|| {
                place.wrong(
                    at,
                    format!("[lane.{name}] needs a url for courier = \"http\", like \"https://example.com/{name}\""),
                )
            })?;
            let resolved = headers(place, &keys.headers)?;
            let timeout = Duration::from_millis(keys.timeout_ms.as_ref().map_or(2500, |ms| u64::from(ms.get_ref().0)));
            plain::url(&format!("[lane.{name}] url"), url.get_ref()).map_err(|e| place.wrong(url.span(), e))?;
            let told = secret::resolve(url.get_ref()).map_err(|e| place.wrong(url.span(), e))?;
            let statuses = statuses(place, &keys.statuses)?;
            check_http(&told, timeout, &resolved, &statuses).map_err(|e| place.wrong(url.span(), e))?;
            let (url, headers) = (url.get_ref().clone(), texts(&keys.headers));
            let guard = keys.guard.as_ref().is_some_and(|guard| *guard.get_ref());
            Destination::Http { url, timeout, headers, statuses, guard }
        }
    })
}

/// What a lane makes of its destination's answers.
fn statuses(place: &Place, keys: &BTreeMap<String, toml::Spanned<String>>) -> Result<HttpClasses> {
    let word = |(status, class): (&String, &toml::Spanned<String>)| {
        HttpClasses::new([("200", "sent"), (status.as_str(), class.get_ref().as_str())]).map_err(|e| {
            place.wrong(class.span(), format!("statuses are like {{ \"404\" = \"retry\", \"5xx\" = \"dead\" }}: {e}"))
        })
    };
    keys.iter().try_for_each(|key| word(key).map(drop))?;
    let at = keys.values().next().map_or(0..0, |class| class.span());
    let words = keys.iter().map(|(status, class)| (status.as_str(), class.get_ref().as_str()));
    HttpClasses::new(words).map_err(|e| place.wrong(at, format!("statuses: {e}")))
}

/// `[alerts]` as the lane it becomes.
fn alerts(place: &Place, at: Range<usize>, keys: &AlertKeys) -> Result<(Lane, AlertRules)> {
    let every = keys.every.map_or(Duration::from_secs(300), |span| span.0);
    if every.is_zero() {
        return Err(place.wrong(at, "[alerts]: every = \"0\" would tell the same trouble without end; write \"5m\""));
    }
    plain::url("[alerts] url", keys.url.get_ref()).map_err(|e| place.wrong(keys.url.span(), e))?;
    let url = secret::resolve(keys.url.get_ref()).map_err(|e| place.wrong(keys.url.span(), e))?;
    let (timeout, statuses) = (Duration::from_secs(10), HttpClasses::default());
    check_http(&url, timeout, &headers(place, &keys.headers)?, &statuses)
        .map_err(|e| place.wrong(keys.url.span(), e))?;
    let headers = texts(&keys.headers);
    let destination =
        Destination::Http { url: keys.url.get_ref().clone(), timeout, headers, statuses, guard: keys.guard };
    let mut settings = LaneSettings::new(ALERTS);
    (settings.concurrency, settings.batch, settings.lease) = (4, 32, Duration::from_secs(30));
    // Somebody waits for it: soon at first, and for about a day in all.
    settings.budgets.backoff = Backoff::Table([2, 5, 10, 30, 60, 300, 900].map(Duration::from_secs).to_vec());
    settings.budgets.max_attempts = 100;
    // Whoever could write here could tell of troubles that are none.
    let rules = LaneRules { owned_by: Some(postrider::alerts::OWNER), ..LaneRules::default() };
    let lane = Lane { rules, settings, destination, max_age: Some(Duration::ZERO) };
    Ok((lane, AlertRules { every, max_age: keys.max_age.map_or(Duration::from_secs(900), |span| span.0) }))
}

fn headers(place: &Place, keys: &BTreeMap<String, toml::Spanned<String>>) -> Result<Vec<(String, String)>> {
    let value = |name: &str, value: &toml::Spanned<String>| {
        plain::header(name, value.get_ref()).map_err(|e| place.wrong(value.span(), e))
    };
    keys.iter().map(|(name, given)| Ok((name.clone(), value(name, given)?))).collect()
}

/// The same as they were written, references and all.
fn texts(keys: &BTreeMap<String, toml::Spanned<String>>) -> Vec<(String, String)> {
    keys.iter().map(|(name, given)| (name.clone(), given.get_ref().clone())).collect()
}

#[cfg(test)]
mod tests;
