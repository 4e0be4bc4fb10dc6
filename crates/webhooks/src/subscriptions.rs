//! Subscriptions: made, changed, paused, rotated, disabled. Secrets and headers are kept encrypted; a secret is shown once.

use std::time::Duration;

use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, Value};
use postrider::{Error, Result, Timestamp, bulk};
use serde::{Deserialize, Serialize};

use crate::decide::{RetryRules, is_pattern};
use crate::keyring::Keyring;
use crate::secrets::{SigningKey, open_headers, sealed_headers, sealed_keys};
use crate::sign::{Key, Scheme};
use crate::{Settings, Webhooks, catalog};

/// A header somebody sets must not frame the message, steer the connection or be ours to say.
const RESERVED: [&str; 13] = [
    "host",
    "content-length",
    "content-type",
    "content-encoding",
    "transfer-encoding",
    "connection",
    "expect",
    "keep-alive",
    "te",
    "trailer",
    "upgrade",
    "user-agent",
    "x-correlation-id",
];
const MOST_HEADERS: usize = 32;
/// Of one value, and of all of them.
const MOST_VALUE: usize = 4096;
const MOST_OF_HEADERS: usize = 16_384;
pub(crate) const MOST_PATTERNS: usize = 100;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubscriptionStatus {
    #[default]
    Active,
    Paused,
    Disabled,
}

impl SubscriptionStatus {
    pub fn as_str(self) -> &'static str {
        match self {
            SubscriptionStatus::Active => "active",
            SubscriptionStatus::Paused => "paused",
            SubscriptionStatus::Disabled => "disabled",
        }
    }
}

/// Why a subscription was disabled without anybody asking for it.
pub(crate) const FAILING: &str = "FAILING";
pub(crate) const GONE: &str = "HTTP_410";

/// Who wants to hear of what, and how; without its secrets.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Subscription {
    pub id: i64,
    pub url: String,
    pub event_types: Vec<String>,
    pub status: SubscriptionStatus,
    pub description: Option<String>,
    /// Names only: values may be credentials.
    pub headers: Vec<String>,
    pub signature: Scheme,
    pub max_retry_limit: Option<u32>,
    pub retry_schedule_sec: Option<Vec<f64>>,
    pub timeout_ms: Option<u32>,
    pub rate_per_sec: Option<f64>,
    pub max_in_flight: Option<u32>,
    pub failing_since: Option<Timestamp>,
    pub disabled_reason: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    /// The number of the change that touched it last, and of the one that gave it its URL.
    #[serde(skip)]
    pub(crate) version: i64,
    #[serde(skip)]
    pub(crate) url_version: i64,
    #[serde(skip)]
    pub(crate) disabled_at: Option<Timestamp>,
}

impl Subscription {
    /// Was it disabled automatically, and not long ago? What is published then becomes a dead letter, to be brought back
    /// when its receiver is mended. Nothing is kept for one that was disabled by hand.
    pub(crate) fn is_lamented(&self, now: Timestamp, long: Duration) -> bool {
        let automatically = matches!(self.disabled_reason.as_deref(), Some(FAILING | GONE));
        self.status == SubscriptionStatus::Disabled
            && automatically
            && now.since(self.disabled_at.unwrap_or(self.updated_at)) < long
    }

    pub fn is_limited(&self) -> bool {
        self.rate_per_sec.is_some() || self.max_in_flight.is_some()
    }

    pub fn retry_rules(&self, settings: &Settings) -> RetryRules {
        let schedule = self.retry_schedule_sec.iter().flatten();
        RetryRules {
            limit: self.max_retry_limit.unwrap_or(settings.max_retry_limit),
            schedule: schedule.map(|sec| Duration::from_secs_f64(*sec)).collect(),
            base: settings.base_delay,
            jitter: settings.jitter,
        }
    }

    pub fn timeout(&self, settings: &Settings) -> Duration {
        self.timeout_ms.map_or(settings.timeout, |ms| Duration::from_millis(ms.into()))
    }
}

/// A subscription to be made.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NewSubscription {
    pub url: String,
    pub event_types: Vec<String>,
    pub description: Option<String>,
    pub headers: Vec<(String, String)>,
    pub signature: Scheme,
    pub max_retry_limit: Option<u32>,
    pub retry_schedule_sec: Option<Vec<f64>>,
    pub timeout_ms: Option<u32>,
    pub rate_per_sec: Option<f64>,
    pub max_in_flight: Option<u32>,
    /// `whsec_…`; without, one is made.
    pub secret: Option<String>,
}

/// What to change; `Some(None)` takes a setting away.
#[derive(Clone, Debug, Default)]
pub struct Patch {
    pub url: Option<String>,
    pub event_types: Option<Vec<String>>,
    pub description: Option<Option<String>>,
    pub headers: Option<Vec<(String, String)>>,
    pub max_retry_limit: Option<Option<u32>>,
    pub retry_schedule_sec: Option<Option<Vec<f64>>>,
    pub timeout_ms: Option<Option<u32>>,
    pub rate_per_sec: Option<Option<f64>>,
    pub max_in_flight: Option<Option<u32>>,
}

/// Names of headers are read from what is sealed only where an older make wrote the row.
pub(crate) const COLUMNS: &str = "id, url, event_types, status, description, header_names, signature, max_retry_limit, retry_schedule, \
                                  timeout_ms, rate_per_sec, max_in_flight, CASE WHEN header_names IS NULL THEN headers END, failing_since, disabled_reason, \
                                  created_at, updated_at, version, url_version, disabled_at";

pub(crate) fn from_json<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::database(format!("a subscription cannot be read: {e}")))
}

pub(crate) fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))
}

fn names_of(headers: &[(String, String)]) -> Vec<&str> {
    headers.iter().map(|header| header.0.as_str()).collect()
}

pub(crate) fn from_row(row: &Row, keyring: &Keyring) -> Result<Subscription> {
    let id = row.int(0)?;
    let status = match row.text(3)?.as_str() {
        "active" => SubscriptionStatus::Active,
        "paused" => SubscriptionStatus::Paused,
        _ => SubscriptionStatus::Disabled,
    };
    let headers = match (row.opt_text(5)?, row.opt_text(12)?) {
        (Some(names), _) => from_json(&names)?,
        (None, None) => vec![],
        (None, Some(sealed)) => open_headers(&keyring.keys(), id, &sealed)
            .map(|headers| headers.into_iter().map(|header| header.0).collect())
            .unwrap_or_default(),
    };
    Ok(Subscription {
        id,
        url: row.text(1)?,
        event_types: from_json(&row.text(2)?)?,
        status,
        description: row.opt_text(4)?,
        headers,
        signature: Scheme::parse(&row.text(6)?).unwrap_or_default(),
        max_retry_limit: row.opt_int(7)?.map(|n| n as u32),
        retry_schedule_sec: row.opt_text(8)?.map(|text| from_json(&text)).transpose()?,
        timeout_ms: row.opt_int(9)?.map(|n| n as u32),
        rate_per_sec: row.opt_float(10)?,
        max_in_flight: row.opt_int(11)?.map(|n| n as u32),
        failing_since: row.opt_time(13)?,
        disabled_reason: row.opt_text(14)?,
        created_at: row.time(15)?,
        updated_at: row.time(16)?,
        version: row.int(17)?,
        url_version: row.int(18)?,
        disabled_at: row.opt_time(19)?,
    })
}

impl Webhooks {
    fn check(&self, subscription: &NewSubscription) -> Result<String> {
        let wrong = |what: String| Error::invalid(what);
        // A parser drops some of these without a word, and another address is left.
        if subscription.url.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(Error::invalid("the url has blanks or control characters; write them percent-encoded"));
        }
        let url = self.0.settings.policy.check_url(&subscription.url).map_err(wrong)?;
        if url.as_str().len() > 2048 {
            return Err(Error::invalid("the url is longer than 2048 characters"));
        }
        if subscription.event_types.is_empty() || subscription.event_types.len() > MOST_PATTERNS {
            return Err(Error::invalid(format!("event_types needs 1 to {MOST_PATTERNS} entries; [\"*\"] means all")));
        }
        if let Some(pattern) = subscription.event_types.iter().find(|pattern| !is_pattern(pattern)) {
            return Err(Error::invalid(format!(
                "`{}` is no event type; write `order.paid`, `order.*` or `*`",
                pattern.chars().take(80).collect::<String>()
            )));
        }
        if subscription.headers.len() > MOST_HEADERS {
            return Err(Error::invalid(format!("more than {MOST_HEADERS} headers")));
        }
        for (name, value) in &subscription.headers {
            check_header(name, value).map_err(wrong)?;
        }
        let bytes: usize = subscription.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes > MOST_OF_HEADERS {
            return Err(Error::invalid(format!("the headers have {bytes} bytes, at most {MOST_OF_HEADERS} are sent")));
        }
        let bounded = |what: &str, value: Option<f64>, least: f64, most: f64| match value {
            Some(n) if !(least..=most).contains(&n) => {
                Err(Error::invalid(format!("{what} must be from {least} to {most}, not {n}")))
            }
            _ => Ok(()),
        };
        bounded("max_retry_limit", subscription.max_retry_limit.map(f64::from), 1.0, 1000.0)?;
        bounded("timeout_ms", subscription.timeout_ms.map(f64::from), 1.0, 120_000.0)?;
        bounded("rate_per_sec", subscription.rate_per_sec, 0.001, 100_000.0)?;
        bounded("max_in_flight", subscription.max_in_flight.map(f64::from), 1.0, 10_000.0)?;
        for delay in subscription.retry_schedule_sec.iter().flatten() {
            bounded("a delay of retry_schedule_sec", Some(*delay), 0.0, 86_400.0)?;
        }
        if subscription.retry_schedule_sec.as_ref().is_some_and(|s| s.is_empty() || s.len() > 100) {
            return Err(Error::invalid("retry_schedule_sec needs 1 to 100 delays; leave it out for the usual ones"));
        }
        if subscription.description.as_ref().is_some_and(|text| text.len() > 1000) {
            return Err(Error::invalid("the description is longer than 1000 bytes"));
        }
        if subscription.description.as_ref().is_some_and(|text| text.contains('\0')) {
            return Err(Error::invalid("the description contains a NUL character"));
        }
        Ok(url.into())
    }

    /// Makes a subscription; answers it with what its receiver verifies with, which is shown only now.
    pub async fn subscribe(&self, new: NewSubscription) -> Result<(Subscription, String)> {
        let url = self.check(&new)?;
        let key = match &new.secret {
            None => Key::generate(new.signature),
            Some(text) => Key::parse(text).map_err(Error::invalid)?,
        };
        if key.scheme() != new.signature {
            return Err(Error::invalid(
                "the secret is of another kind than the signature; `whsec_…` is for v1, `whsk_…` for v1a",
            ));
        }
        let (webhooks, shown) = (self.clone(), key.verifier());
        let subscription = self
            .transact(Mode::Write, move |tx| {
                let (webhooks, new, key, url) = (webhooks.clone(), new.clone(), key.clone(), url.clone());
                Box::pin(async move { webhooks.insert(tx, new, key, url).await })
            })
            .await?;
        self.doubt();
        Ok((subscription, shown))
    }

    async fn insert(
        &self,
        tx: &mut (dyn Tx + Send),
        new: NewSubscription,
        key: Key,
        url: String,
    ) -> Result<Subscription> {
        let version = catalog::bump(tx).await?;
        let keyring = self.sealing(tx).await?;
        let now = catalog::now(tx).await?;
        let columns = [
            ("url", "text"),
            ("event_types", "text"),
            ("status", "text"),
            ("description", "text"),
            ("signature", "text"),
            ("max_retry_limit", "int"),
            ("retry_schedule", "text"),
            ("timeout_ms", "int"),
            ("rate_per_sec", "double precision"),
            ("max_in_flight", "int"),
            ("secrets", "text"),
            ("header_names", "text"),
            ("version", "bigint"),
            ("url_version", "bigint"),
            ("created_at", "timestamptz"),
            ("updated_at", "timestamptz"),
        ];
        let schedule = new.retry_schedule_sec.as_ref().map(to_json).transpose()?;
        let row: Vec<Value> = vec![
            url.into(),
            to_json(&new.event_types)?.into(),
            "active".into(),
            new.description.clone().into(),
            new.signature.as_str().into(),
            new.max_retry_limit.into(),
            schedule.into(),
            new.timeout_ms.into(),
            new.rate_per_sec.into(),
            new.max_in_flight.into(),
            "".into(),
            to_json(&names_of(&new.headers))?.into(),
            version.into(),
            version.into(),
            now.into(),
            now.into(),
        ];
        let ids = bulk::insert(tx, "subscriptions", &columns, &[row], true).await?;
        let id = *ids.first().ok_or_else(|| Error::database("the insert gave no id"))?;
        // Sealed for their row, whose id is known only now.
        let secrets = sealed_keys(&keyring, id, &[SigningKey { key, until: None }])?;
        let headers = sealed_headers(&keyring, id, &new.headers)?;
        let text = if tx.dialect() == Dialect::Postgres { "?::text" } else { "?" };
        let sql = format!("UPDATE subscriptions SET secrets = ?, headers = {text} WHERE id = ?");
        tx.execute(&sql, &[secrets.into(), headers.into(), id.into()]).await?;
        tx.execute("INSERT INTO subscription_gates (subscription_id) VALUES (?)", &[id.into()]).await?;
        self.read(tx, id).await?.ok_or_else(|| Error::database("the subscription is gone"))
    }

    pub(crate) async fn read<T: Tx + ?Sized>(&self, tx: &mut T, id: i64) -> Result<Option<Subscription>> {
        let sql = format!("SELECT {COLUMNS} FROM subscriptions WHERE id = ?");
        tx.query(&sql, &[id.into()]).await?.first().map(|row| from_row(row, &self.0.keyring)).transpose()
    }

    pub async fn subscription(&self, id: i64) -> Result<Option<Subscription>> {
        let webhooks = self.clone();
        self.transact(Mode::Read, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move { webhooks.read(tx, id).await })
        })
        .await
    }

    /// By id, after the one given.
    pub async fn subscriptions(&self, after: i64, limit: u32) -> Result<Vec<Subscription>> {
        let webhooks = self.clone();
        self.transact(Mode::Read, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move {
                let sql = format!("SELECT {COLUMNS} FROM subscriptions WHERE id > ? ORDER BY id LIMIT {limit}");
                let rows = tx.query(&sql, &[after.into()]).await?;
                rows.iter().map(|row| from_row(row, &webhooks.0.keyring)).collect()
            })
        })
        .await
    }

    /// Changes what the patch names; `None` if there is no such subscription.
    pub async fn change(&self, id: i64, patch: Patch) -> Result<Option<Subscription>> {
        let webhooks = self.clone();
        let changed = self
            .transact(Mode::Write, move |tx| {
                let (webhooks, patch) = (webhooks.clone(), patch.clone());
                Box::pin(async move { webhooks.apply(tx, id, patch).await })
            })
            .await?;
        self.doubt();
        self.ring();
        Ok(changed)
    }

    async fn apply(&self, tx: &mut (dyn Tx + Send), id: i64, patch: Patch) -> Result<Option<Subscription>> {
        // Changes wait for each other here: what is read now is not changed by another before it is written.
        let version = catalog::bump_for(tx, id).await?;
        let Some(old) = self.read(tx, id).await? else { return Ok(None) };
        let merged = NewSubscription {
            url: patch.url.unwrap_or_else(|| old.url.clone()),
            event_types: patch.event_types.unwrap_or(old.event_types),
            description: patch.description.unwrap_or(old.description),
            headers: patch.headers.clone().unwrap_or_default(),
            signature: old.signature,
            max_retry_limit: patch.max_retry_limit.unwrap_or(old.max_retry_limit),
            retry_schedule_sec: patch.retry_schedule_sec.unwrap_or(old.retry_schedule_sec),
            timeout_ms: patch.timeout_ms.unwrap_or(old.timeout_ms),
            rate_per_sec: patch.rate_per_sec.unwrap_or(old.rate_per_sec),
            max_in_flight: patch.max_in_flight.unwrap_or(old.max_in_flight),
            secret: None,
        };
        let url = self.check(&merged)?;
        let moved = url != old.url;
        let mut params: Vec<Value> = vec![
            url.into(),
            to_json(&merged.event_types)?.into(),
            merged.description.into(),
            merged.max_retry_limit.into(),
            merged.retry_schedule_sec.as_ref().map(to_json).transpose()?.into(),
            merged.timeout_ms.into(),
            merged.rate_per_sec.into(),
            merged.max_in_flight.into(),
            version.into(),
            (if moved { version } else { old.url_version }).into(),
        ];
        let now = tx.now().plus(0, &mut params);
        params.push(id.into());
        let postgres = tx.dialect() == Dialect::Postgres;
        let cast = |kind: &'static str| if postgres { format!("?::{kind}") } else { "?".to_owned() };
        let (int, float, text) = (cast("int"), cast("float8"), cast("text"));
        let sql = format!(
            "UPDATE subscriptions SET url = ?, event_types = ?, description = {text}, max_retry_limit = {int}, retry_schedule = {text},
                    timeout_ms = {int}, rate_per_sec = {float}, max_in_flight = {int}, version = ?, url_version = ?, updated_at = {now} WHERE id = ?"
        );
        tx.execute(&sql, &params).await?;
        if let Some(headers) = &patch.headers {
            let sealed = match headers.is_empty() {
                true => None,
                false => sealed_headers(&*self.sealing(tx).await?, id, headers)?,
            };
            let names = to_json(&names_of(headers))?;
            let sql = format!("UPDATE subscriptions SET headers = {text}, header_names = ? WHERE id = ?");
            tx.execute(&sql, &[sealed.into(), names.into(), id.into()]).await?;
        }
        // Another receiver starts anew: what the old one asked for or failed at is not its own. Whatever is parked is
        // looked at, once: limits may have changed.
        let sql = match moved {
            true => FRESH_GATE,
            false => "UPDATE subscription_gates SET parked = 1 WHERE subscription_id = ?",
        };
        tx.execute(sql, &[id.into()]).await?;
        self.read(tx, id).await
    }

    /// Takes it away. What waits for it is dead-lettered.
    pub async fn unsubscribe(&self, id: i64) -> Result<bool> {
        let gone = self
            .transact(Mode::Write, move |tx| {
                Box::pin(async move {
                    let version = catalog::bump_for(tx, id).await?;
                    let gone = tx.execute("DELETE FROM subscriptions WHERE id = ?", &[id.into()]).await? == 1;
                    catalog::mark_deletion(tx, version).await?;
                    // Its gate stays until what is parked there is buried.
                    tx.execute("UPDATE subscription_gates SET parked = 1 WHERE subscription_id = ?", &[id.into()])
                        .await?;
                    Ok(gone)
                })
            })
            .await?;
        self.doubt();
        self.ring();
        Ok(gone)
    }

    /// Holds a subscription: events go on being taken in for it, nothing is sent. One that is disabled stays so.
    pub async fn pause(&self, id: i64) -> Result<Option<Subscription>> {
        self.set_status(id, SubscriptionStatus::Paused).await
    }

    /// Lets it go again, from a pause or after it was disabled. What its receiver failed at or asked for before is
    /// forgotten.
    pub async fn resume(&self, id: i64) -> Result<Option<Subscription>> {
        let resumed = self.set_status(id, SubscriptionStatus::Active).await?;
        // Jobs that met the pause were put off; they are due again.
        self.wake_deferred(Some(id)).await?;
        Ok(resumed)
    }

    async fn set_status(&self, id: i64, status: SubscriptionStatus) -> Result<Option<Subscription>> {
        let webhooks = self.clone();
        let changed = self
            .transact(Mode::Write, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move {
                    let version = catalog::bump_for(tx, id).await?;
                    let Some(old) = webhooks.read(tx, id).await? else { return Ok(None) };
                    if old.status == SubscriptionStatus::Disabled && status == SubscriptionStatus::Paused {
                        return Ok(Some(old));
                    }
                    let mut params: Vec<Value> = vec![status.as_str().into(), version.into()];
                    let now = tx.now().plus(0, &mut params);
                    params.push(id.into());
                    let sql = format!(
                        "UPDATE subscriptions SET status = ?, disabled_reason = NULL, disabled_at = NULL, failing_since = NULL, version = ?, updated_at = {now} WHERE id = ?"
                    );
                    tx.execute(&sql, &params).await?;
                    tx.execute(FRESH_GATE, &[id.into()]).await?;
                    webhooks.read(tx, id).await
                })
            })
            .await?;
        self.note_hold(id, None);
        self.doubt();
        self.ring();
        Ok(changed)
    }

    /// Disables it for a reason, in this transaction; what waits for it is dead-lettered by the orchestrator. Answers
    /// whether it was not disabled before.
    pub(crate) async fn disable_in(&self, tx: &mut (dyn Tx + Send), id: i64, reason: &str) -> Result<bool> {
        let version = catalog::bump(tx).await?;
        let mut params: Vec<Value> = vec![reason.into(), version.into()];
        let (at, now) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
        params.push(id.into());
        let sql = format!(
            "UPDATE subscriptions SET status = 'disabled', disabled_reason = ?, version = ?, disabled_at = {at}, updated_at = {now} WHERE id = ? AND status <> 'disabled'"
        );
        let disabled = tx.execute(&sql, &params).await? == 1;
        if disabled {
            // Whatever is parked is looked at, once.
            tx.execute(FRESH_GATE, &[id.into()]).await?;
        }
        Ok(disabled)
    }
}

/// A gate that remembers nothing of its receiver, and is looked at.
const FRESH_GATE: &str = "UPDATE subscription_gates SET parked = 1, failures = 0, held_until = NULL, failing_from = NULL, failed_at = NULL, spell_at = NULL, spells = 0 WHERE subscription_id = ?";

fn check_header(name: &str, value: &str) -> Result<(), String> {
    let lower = name.to_ascii_lowercase();
    // What is no name may be a whole header, with its secret: it is not repeated.
    if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
        return Err("a header has a name that cannot be sent; write {\"Name\": \"value\"}".to_owned());
    }
    if http::HeaderValue::from_str(value).is_err() {
        return Err(format!("the value of the header {name} cannot be sent"));
    }
    if value.len() > MOST_VALUE {
        return Err(format!("the value of the header {name} is longer than {MOST_VALUE} bytes"));
    }
    if RESERVED.contains(&lower.as_str())
        || lower.starts_with("proxy-")
        || lower.starts_with("webhook-")
        || lower.starts_with("postrider-")
    {
        return Err(format!("the header {name} is not yours to set"));
    }
    Ok(())
}
