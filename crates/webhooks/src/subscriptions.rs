//! Subscriptions: made, changed, paused, rotated, disabled. Secrets and headers are kept encrypted; a secret is shown once.

use std::time::Duration;

use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, Value};
use postrider::{Error, Result, Timestamp, bulk};
use serde::{Deserialize, Serialize};

use crate::decide::{RetryRules, is_pattern};
use crate::keyring::Keyring;
use crate::sign::{Key, Scheme};
use crate::{LANE, Settings, Webhooks, catalog};

/// A header somebody sets must not frame the message, steer the connection or be ours to say.
const RESERVED: [&str; 9] = [
    "host",
    "content-length",
    "content-type",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "te",
    "trailer",
    "upgrade",
];
const MOST_HEADERS: usize = 32;
const MOST_PATTERNS: usize = 100;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SubscriptionStatus {
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

/// Who wants to hear of what, and how.
#[derive(Clone, Debug, Serialize)]
pub struct Subscription {
    pub id: i64,
    pub url: String,
    pub event_types: Vec<String>,
    pub status: SubscriptionStatus,
    pub description: Option<String>,
    /// Names only: values may be credentials.
    #[serde(serialize_with = "names_only")]
    pub headers: Vec<(String, String)>,
    pub signature: Scheme,
    pub max_retry_limit: Option<u32>,
    pub retry_schedule_sec: Option<Vec<f64>>,
    pub timeout_ms: Option<u32>,
    pub rate_per_sec: Option<f64>,
    pub max_in_flight: Option<u32>,
    #[serde(skip)]
    pub keys: Vec<SigningKey>,
    pub failing_since: Option<Timestamp>,
    pub disabled_reason: Option<String>,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

fn names_only<S: serde::Serializer>(headers: &[(String, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(headers.iter().map(|header| &header.0))
}

/// A key and until when it still signs; the current one has no end.
#[derive(Clone, Debug)]
pub struct SigningKey {
    pub key: Key,
    pub until: Option<Timestamp>,
}

/// A key as it is stored, encrypted.
#[derive(Serialize, Deserialize)]
struct StoredKey {
    key: String,
    until: Option<i64>,
}

impl Subscription {
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

    /// The keys that sign now, the current one first.
    pub fn signing(&self, now: Timestamp) -> impl Iterator<Item = &Key> {
        self.keys.iter().filter(move |key| key.until.is_none_or(|until| until > now)).map(|key| &key.key)
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

pub(crate) const COLUMNS: &str = "id, url, event_types, status, description, headers, signature, max_retry_limit, retry_schedule, \
                                  timeout_ms, rate_per_sec, max_in_flight, secrets, failing_since, disabled_reason, created_at, updated_at";

fn place(column: &str, id: i64) -> String {
    format!("subscriptions.{column}.{id}")
}

fn json<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|e| Error::database(format!("a subscription cannot be read: {e}")))
}

fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|e| Error::invalid(format!("cannot be written as JSON: {e}")))
}

pub(crate) fn from_row(row: &Row, keyring: &Keyring) -> Result<Subscription> {
    let id = row.int(0)?;
    let status = match row.text(3)?.as_str() {
        "active" => SubscriptionStatus::Active,
        "paused" => SubscriptionStatus::Paused,
        _ => SubscriptionStatus::Disabled,
    };
    let headers = match row.opt_text(5)? {
        None => vec![],
        Some(sealed) => json(&keyring.open(&place("headers", id), &sealed)?)?,
    };
    let stored: Vec<StoredKey> = json(&keyring.open(&place("secrets", id), &row.text(12)?)?)?;
    let mut keys = Vec::with_capacity(stored.len());
    for one in stored {
        let key = Key::parse(&one.key).map_err(Error::database)?;
        keys.push(SigningKey { key, until: one.until.map(Timestamp::from_micros) });
    }
    Ok(Subscription {
        id,
        url: row.text(1)?,
        event_types: json(&row.text(2)?)?,
        status,
        description: row.opt_text(4)?,
        headers,
        signature: Scheme::parse(&row.text(6)?).unwrap_or_default(),
        max_retry_limit: row.opt_int(7)?.map(|n| n as u32),
        retry_schedule_sec: row.opt_text(8)?.map(|text| json(&text)).transpose()?,
        timeout_ms: row.opt_int(9)?.map(|n| n as u32),
        rate_per_sec: row.opt_float(10)?,
        max_in_flight: row.opt_int(11)?.map(|n| n as u32),
        keys,
        failing_since: row.opt_time(13)?,
        disabled_reason: row.opt_text(14)?,
        created_at: row.time(15)?,
        updated_at: row.time(16)?,
    })
}

/// The current key first; of the old ones those that still sign.
fn sealed_keys(keyring: &Keyring, id: i64, keys: &[SigningKey]) -> Result<String> {
    let stored: Vec<StoredKey> =
        keys.iter().map(|key| StoredKey { key: key.key.text(), until: key.until.map(Timestamp::micros) }).collect();
    keyring.seal(&place("secrets", id), &to_json(&stored)?)
}

impl Webhooks {
    fn check(&self, subscription: &NewSubscription) -> Result<String> {
        let wrong = |what: String| Error::invalid(what);
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
        let (_, now) = catalog::version(tx).await?;
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
            now.into(),
            now.into(),
        ];
        let id = bulk::insert(tx, "subscriptions", &columns, &[row], true).await?[0];
        // Sealed for their row, whose id is known only now.
        let secrets = sealed_keys(&self.0.keyring, id, &[SigningKey { key, until: None }])?;
        let headers = self.sealed_headers(id, &new.headers)?;
        let sql = "UPDATE subscriptions SET secrets = ?, headers = ? WHERE id = ?";
        tx.execute(sql, &[secrets.into(), headers.into(), id.into()]).await?;
        tx.execute("INSERT INTO subscription_gates (subscription_id) VALUES (?)", &[id.into()]).await?;
        catalog::bump(tx).await?;
        self.read(tx, id).await?.ok_or_else(|| Error::database("the subscription is gone"))
    }

    fn sealed_headers(&self, id: i64, headers: &[(String, String)]) -> Result<Option<String>> {
        if headers.is_empty() {
            return Ok(None);
        }
        self.0.keyring.seal(&place("headers", id), &to_json(&headers)?).map(Some)
    }

    async fn read<T: Tx + ?Sized>(&self, tx: &mut T, id: i64) -> Result<Option<Subscription>> {
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
        let Some(old) = self.read(tx, id).await? else { return Ok(None) };
        let merged = NewSubscription {
            url: patch.url.unwrap_or(old.url),
            event_types: patch.event_types.unwrap_or(old.event_types),
            description: patch.description.unwrap_or(old.description),
            headers: patch.headers.unwrap_or(old.headers),
            signature: old.signature,
            max_retry_limit: patch.max_retry_limit.unwrap_or(old.max_retry_limit),
            retry_schedule_sec: patch.retry_schedule_sec.unwrap_or(old.retry_schedule_sec),
            timeout_ms: patch.timeout_ms.unwrap_or(old.timeout_ms),
            rate_per_sec: patch.rate_per_sec.unwrap_or(old.rate_per_sec),
            max_in_flight: patch.max_in_flight.unwrap_or(old.max_in_flight),
            secret: None,
        };
        let url = self.check(&merged)?;
        let mut params: Vec<Value> = vec![
            url.into(),
            to_json(&merged.event_types)?.into(),
            merged.description.into(),
            self.sealed_headers(id, &merged.headers)?.into(),
            merged.max_retry_limit.into(),
            merged.retry_schedule_sec.as_ref().map(to_json).transpose()?.into(),
            merged.timeout_ms.into(),
            merged.rate_per_sec.into(),
            merged.max_in_flight.into(),
        ];
        let now = tx.now().plus(0, &mut params);
        params.push(id.into());
        let postgres = tx.dialect() == Dialect::Postgres;
        let cast = |kind: &'static str| if postgres { format!("?::{kind}") } else { "?".to_owned() };
        let (int, float, text) = (cast("int"), cast("float8"), cast("text"));
        let sql = format!(
            "UPDATE subscriptions SET url = ?, event_types = ?, description = {text}, headers = {text}, max_retry_limit = {int},
                    retry_schedule = {text}, timeout_ms = {int}, rate_per_sec = {float}, max_in_flight = {int}, updated_at = {now} WHERE id = ?"
        );
        tx.execute(&sql, &params).await?;
        catalog::bump(tx).await?;
        self.read(tx, id).await
    }

    /// Takes it away. What waits for it is dead-lettered.
    pub async fn unsubscribe(&self, id: i64) -> Result<bool> {
        let gone = self
            .transact(Mode::Write, move |tx| {
                Box::pin(async move {
                    let gone = tx.execute("DELETE FROM subscriptions WHERE id = ?", &[id.into()]).await? == 1;
                    // Its gate stays until what is parked there is buried.
                    tx.execute("UPDATE subscription_gates SET parked = 1 WHERE subscription_id = ?", &[id.into()])
                        .await?;
                    catalog::bump(tx).await?;
                    Ok(gone)
                })
            })
            .await?;
        self.doubt();
        self.ring();
        Ok(gone)
    }

    /// Holds a subscription: events go on being taken in for it, nothing is sent.
    pub async fn pause(&self, id: i64) -> Result<Option<Subscription>> {
        self.set_status(id, SubscriptionStatus::Paused, None).await
    }

    /// Lets it go again, from a pause or after it was disabled.
    pub async fn resume(&self, id: i64) -> Result<Option<Subscription>> {
        let resumed = self.set_status(id, SubscriptionStatus::Active, None).await?;
        self.wake_jobs(id).await?;
        Ok(resumed)
    }

    /// Disables it for a reason; what waits for it is dead-lettered by the orchestrator.
    pub(crate) async fn disable(&self, id: i64, reason: &str) -> Result<Option<Subscription>> {
        self.set_status(id, SubscriptionStatus::Disabled, Some(reason.to_owned())).await
    }

    async fn set_status(
        &self,
        id: i64,
        status: SubscriptionStatus,
        reason: Option<String>,
    ) -> Result<Option<Subscription>> {
        let webhooks = self.clone();
        let changed = self
            .transact(Mode::Write, move |tx| {
                let (webhooks, reason) = (webhooks.clone(), reason.clone());
                Box::pin(async move {
                    let mut params: Vec<Value> = vec![status.as_str().into(), reason.into()];
                    let now = tx.now().plus(0, &mut params);
                    params.push(id.into());
                    let text = if tx.dialect() == Dialect::Postgres { "?::text" } else { "?" };
                    let sql = format!(
                        "UPDATE subscriptions SET status = ?, disabled_reason = {text}, failing_since = NULL, updated_at = {now} WHERE id = ?"
                    );
                    tx.execute(&sql, &params).await?;
                    // Whatever is parked is looked at, once.
                    let gate = "UPDATE subscription_gates SET parked = 1, failures = 0, held_until = NULL WHERE subscription_id = ?";
                    tx.execute(gate, &[id.into()]).await?;
                    catalog::bump(tx).await?;
                    webhooks.read(tx, id).await
                })
            })
            .await?;
        self.doubt();
        self.ring();
        Ok(changed)
    }

    /// Jobs that met the pause were put off; they are due again.
    async fn wake_jobs(&self, id: i64) -> Result<()> {
        let keys = self
            .transact(Mode::Read, move |tx| {
                Box::pin(async move {
                    let sql = "SELECT id FROM webhook_delivery_sagas WHERE subscription_id = ? AND status = 'InProgress' LIMIT 100000";
                    let rows = tx.query(sql, &[id.into()]).await?;
                    rows.iter().map(|row| Ok(format!("saga:{}", row.int(0)?))).collect::<Result<Vec<String>>>()
                })
            })
            .await?;
        for part in keys.chunks(500) {
            self.0.outbox.wake(LANE, part.to_vec()).await?;
        }
        Ok(())
    }

    /// A new key signs from now on; the old one goes on signing beside it for `overlap`. Answers what to verify with.
    pub async fn rotate_secret(
        &self,
        id: i64,
        secret: Option<String>,
        overlap: Duration,
    ) -> Result<Option<(Subscription, String)>> {
        let given = secret.as_deref().map(Key::parse).transpose().map_err(Error::invalid)?;
        let webhooks = self.clone();
        let rotated = self
            .transact(Mode::Write, move |tx| {
                let (webhooks, given) = (webhooks.clone(), given.clone());
                Box::pin(async move {
                    let Some(old) = webhooks.read(tx, id).await? else { return Ok(None) };
                    let key = given.unwrap_or_else(|| Key::generate(old.signature));
                    if key.scheme() != old.signature {
                        return Err(Error::invalid("the secret is of another kind than the subscription's signature"));
                    }
                    let (_, now) = catalog::version(tx).await?;
                    let until = now.plus(overlap);
                    let mut keys = vec![SigningKey { key: key.clone(), until: None }];
                    keys.extend(old.keys.into_iter().filter_map(|old| {
                        let until = old.until.map_or(until, |end| end.min(until));
                        (until > now).then_some(SigningKey { key: old.key, until: Some(until) })
                    }));
                    keys.truncate(4);
                    let sealed = sealed_keys(&webhooks.0.keyring, id, &keys)?;
                    let sql = "UPDATE subscriptions SET secrets = ?, updated_at = ? WHERE id = ?";
                    tx.execute(sql, &[sealed.into(), now.into(), id.into()]).await?;
                    catalog::bump(tx).await?;
                    let subscription = webhooks.read(tx, id).await?;
                    Ok(subscription.map(|subscription| (subscription, key.verifier())))
                })
            })
            .await?;
        self.doubt();
        Ok(rotated)
    }

    /// Brings secrets that an older key of the keyring sealed over to the current one; answers how many.
    pub async fn reseal(&self) -> Result<usize> {
        let webhooks = self.clone();
        self.transact(Mode::Write, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move {
                let keyring = &webhooks.0.keyring;
                let mut resealed = 0;
                for row in tx.query("SELECT id, secrets, headers FROM subscriptions ORDER BY id", &[]).await? {
                    let (id, secrets, headers) = (row.int(0)?, row.text(1)?, row.opt_text(2)?);
                    if !keyring.is_old(&secrets) && !headers.as_ref().is_some_and(|h| keyring.is_old(h)) {
                        continue;
                    }
                    let again = |column: &str, sealed: &str| {
                        keyring.seal(&place(column, id), &keyring.open(&place(column, id), sealed)?)
                    };
                    let secrets = again("secrets", &secrets)?;
                    let headers = headers.map(|headers| again("headers", &headers)).transpose()?;
                    let text = if tx.dialect() == Dialect::Postgres { "?::text" } else { "?" };
                    let sql = format!("UPDATE subscriptions SET secrets = ?, headers = {text} WHERE id = ?");
                    tx.execute(&sql, &[secrets.into(), headers.into(), id.into()]).await?;
                    resealed += 1;
                }
                Ok(resealed)
            })
        })
        .await
    }
}

fn check_header(name: &str, value: &str) -> Result<(), String> {
    let lower = name.to_ascii_lowercase();
    if http::HeaderName::from_bytes(name.as_bytes()).is_err() || http::HeaderValue::from_str(value).is_err() {
        return Err(format!("`{}` is no header that can be sent", name.chars().take(80).collect::<String>()));
    }
    if RESERVED.contains(&lower.as_str()) || lower.starts_with("proxy-") || lower.starts_with("webhook-") {
        return Err(format!("the header {name} is not yours to set"));
    }
    Ok(())
}
