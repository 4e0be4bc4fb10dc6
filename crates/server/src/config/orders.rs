//! `[orders]` and `[lane.orders]`: which broker, how it is reached, what it can do about an order sent twice.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use postrider::LaneRules;
use postrider_orders::adapters::{Credentials, Faults, HttpBroker, HttpSettings, Meaning, PaperSettings};
use postrider_orders::{Book, Idempotency, Settings, lane_rules, lane_settings};

use super::file::{AdapterName, IdempotencyName, LaneKeys, OrderKeys};
use super::tuning::Tuning;
use super::{Lane, Place, headers, part_lane, plain, says_where};
use crate::couriers::Destination;
use crate::failure::{Failure, Result};
use crate::secret;

/// Orders, as configured.
#[derive(Debug)]
pub struct OrdersConfig {
    pub settings: Settings,
    /// What couriers learnt, until the store writes it.
    pub book: Book,
    pub broker: Broker,
    pub strict: bool,
}

/// Who executes orders.
pub enum Broker {
    /// `chosen`: the file names it.
    Paper { settings: PaperSettings, chosen: bool },
    /// `credentials`: its headers, read again; `guard`: its address is guarded as those of webhooks are.
    Http { settings: HttpSettings, credentials: Credentials, guard: bool },
}

impl std::fmt::Debug for Broker {
    /// Headers may be secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Broker {
    pub fn name(&self) -> &'static str {
        match self {
            Broker::Paper { .. } => "paper",
            Broker::Http { .. } => "http",
        }
    }

    fn idempotency(&self) -> Idempotency {
        match self {
            Broker::Paper { settings, .. } => settings.idempotency,
            Broker::Http { settings, .. } => settings.idempotency,
        }
    }
}

pub(super) fn read(
    place: &Place,
    keys: &OrderKeys,
    at: Range<usize>,
    variable: &impl Fn(&str) -> Option<String>,
) -> Result<OrdersConfig> {
    let timeout = match variable("BROKER_TIMEOUT_MS").filter(|text| !text.trim().is_empty()) {
        Some(text) => {
            let wrong = || Failure::usage("BROKER_TIMEOUT_MS must be milliseconds from 1 on");
            text.trim().parse().ok().filter(|ms| *ms > 0).ok_or_else(wrong)?
        }
        None => keys.timeout_ms.map_or(2500, |ms| u64::from(ms.0)),
    };
    let timeout = Duration::from_millis(timeout);
    let settling = keys.settling_sec.as_ref().map_or(Duration::from_secs(5), |s| s.get_ref().0);
    let idempotency = keys.idempotency.map(|name| match name {
        IdempotencyName::Key => Idempotency::Key,
        IdempotencyName::LookUp => Idempotency::LookUp { settling },
        IdempotencyName::None => Idempotency::None,
    });
    if let (Some(given), true) = (&keys.settling_sec, keys.idempotency != Some(IdempotencyName::LookUp)) {
        return Err(place.wrong(given.span(), "settling_sec is only for idempotency = \"look_up\"; leave it out"));
    }
    let broker = match keys.adapter.unwrap_or(AdapterName::Paper) {
        AdapterName::Paper => paper(place, keys, idempotency, timeout)?,
        AdapterName::Http => http(place, keys, at, idempotency, timeout)?,
    };
    let usual = Settings::default();
    let ledger_ttl = keys.ledger_ttl.map_or(usual.ledger_ttl, |span| span.0);
    Ok(OrdersConfig {
        settings: Settings { ledger_ttl, ..usual },
        book: Book::default(),
        broker,
        strict: keys.strict_idempotency.unwrap_or(false),
    })
}

fn paper(place: &Place, keys: &OrderKeys, idempotency: Option<Idempotency>, timeout: Duration) -> Result<Broker> {
    let alien = [
        ("url", keys.url.as_ref().map(|k| k.span())),
        ("look_up_url", keys.look_up_url.as_ref().map(|k| k.span())),
        ("headers", keys.headers.values().next().map(|k| k.span())),
        ("guard", keys.guard.as_ref().map(|k| k.span())),
        ("statuses", keys.statuses.values().next().map(|k| k.span())),
    ];
    for (key, at) in alien {
        if let Some(at) = at {
            return Err(place.wrong(at, format!("{key} is only for adapter = \"http\"; leave it out")));
        }
    }
    let faults = match &keys.faults {
        None => Faults::default(),
        Some(given) => {
            let f = given.get_ref();
            let shares = [f.reject, f.partial, f.fail, f.timeout, f.lose_reply];
            if shares.iter().any(|share| !(0.0..=1.0).contains(share)) || shares.iter().sum::<f64>() > 1.0 {
                return Err(place.wrong(given.span(), "faults are chances from 0.0 to 1.0, together at most 1.0"));
            }
            Faults { reject: f.reject, partial: f.partial, fail: f.fail, timeout: f.timeout, lose_reply: f.lose_reply }
        }
    };
    let latency = keys.latency_ms.as_ref().map_or(Duration::ZERO, |ms| Duration::from_millis(ms.get_ref().0.into()));
    let settings = PaperSettings { idempotency: idempotency.unwrap_or(Idempotency::Key), timeout, latency, faults };
    Ok(Broker::Paper { settings, chosen: keys.adapter.is_some() })
}

fn http(
    place: &Place,
    keys: &OrderKeys,
    at: Range<usize>,
    idempotency: Option<Idempotency>,
    timeout: Duration,
) -> Result<Broker> {
    for (key, at) in
        [("faults", keys.faults.as_ref().map(|k| k.span())), ("latency_ms", keys.latency_ms.as_ref().map(|k| k.span()))]
    {
        if let Some(at) = at {
            return Err(place.wrong(at, format!("{key} is only for adapter = \"paper\"; leave it out")));
        }
    }
    let Some(url) = &keys.url else {
        return Err(
            place.wrong(at, "[orders] needs a url for adapter = \"http\", like \"https://broker.example/orders\"")
        );
    };
    let resolved = |key: &str, given: &toml::Spanned<String>| {
        plain::url(key, given.get_ref())
            .and_then(|()| secret::resolve(given.get_ref()))
            .map_err(|e| place.wrong(given.span(), e))
    };
    let to = resolved("[orders] url", url)?;
    let look_up_url = keys.look_up_url.as_ref().map(|given| resolved("look_up_url", given)).transpose()?;
    let Some(idempotency) = idempotency else {
        let what = "[orders] must say what the broker does with an order sent twice: idempotency = \"key\" (executes an Idempotency-Key once), \"look_up\" (can be asked about a key) or \"none\"";
        return Err(place.wrong(at, what));
    };
    let mut statuses = BTreeMap::new();
    for (status, meaning) in &keys.statuses {
        let number = status.parse().ok().filter(|n| (100..=599).contains(n));
        let read = number.zip(Meaning::parse(meaning.get_ref()));
        let what = || format!("statuses are like \"409\" = \"already_processed\"; the words: {}", Meaning::WORDS);
        let (status, meaning) = read.ok_or_else(|| place.wrong(meaning.span(), what()))?;
        statuses.insert(status, meaning);
    }
    let settings =
        HttpSettings { url: to, look_up_url, headers: headers(place, &keys.headers)?, statuses, idempotency, timeout };
    let without = HttpSettings { look_up_url: None, idempotency: Idempotency::Key, ..settings.clone() };
    HttpBroker::new(without).map_err(|e| place.wrong(url.span(), e))?;
    let look_up = keys.look_up_url.as_ref().map_or(url.span(), |k| k.span());
    HttpBroker::new(settings.clone()).map_err(|e| place.wrong(look_up, e))?;
    let written: Vec<(String, String)> =
        keys.headers.iter().map(|(name, value)| (name.clone(), value.get_ref().clone())).collect();
    let credentials = Arc::new(move || {
        written.iter().map(|(name, value)| Ok((name.clone(), secret::resolve(value)?))).collect::<Result<_, String>>()
    });
    Ok(Broker::Http { settings, credentials, guard: keys.guard.as_ref().is_some_and(|guard| *guard.get_ref()) })
}

/// `[lane.orders]`: where orders go is said in `[orders]`, how long they are kept by the ledger.
pub(super) fn lane(
    place: &Place,
    at: Range<usize>,
    keys: &LaneKeys,
    common: &Tuning,
    environment: &Tuning,
    orders: &mut OrdersConfig,
) -> Result<Lane> {
    if says_where(keys) || keys.retention.is_some() {
        let what = "[lane.orders] takes no courier, url, timeout_ms, headers, statuses, guard, show_payload, dedup, retention or key_ttl; the broker and ledger_ttl are set in [orders]";
        return Err(place.wrong(at, what));
    }
    let usual = lane_rules(&orders.book, orders.broker.idempotency());
    let usual = LaneRules { audit: keys.audit.unwrap_or(false), ..usual };
    let (rules, settings) = part_lane(place, keys, usual, lane_settings(), [common, environment])?;
    (orders.settings.max_crashes, orders.settings.max_attempts) =
        (settings.budgets.max_crashes, settings.budgets.max_attempts);
    Ok(Lane { rules, settings, destination: Destination::Orders, max_age: keys.max_age.map(|span| span.0) })
}
