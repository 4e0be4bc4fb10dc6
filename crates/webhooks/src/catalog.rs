//! The subscriptions as every process remembers them: read again whenever their version in the database changes.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::store::Mode;
use postrider::tx::Tx;
use postrider::{Result, Timestamp};

use crate::subscriptions::{COLUMNS, Subscription, SubscriptionStatus, from_row};
use crate::{Webhooks, decide};

/// How long the courier and the orchestrator believe what they remember without asking for its version.
const BELIEVED: Duration = Duration::from_millis(250);

#[derive(Default)]
pub(crate) struct Catalog {
    version: i64,
    subscriptions: HashMap<i64, Arc<Subscription>>,
    /// Cooling down until then.
    held: HashMap<i64, Timestamp>,
    checked_at: Option<Tick>,
}

impl Catalog {
    pub fn get(&self, id: i64) -> Option<&Arc<Subscription>> {
        self.subscriptions.get(&id)
    }

    /// Those that want events of this type, active or paused.
    pub fn wanting(&self, event_type: &str) -> Vec<&Arc<Subscription>> {
        let wants = |s: &&Arc<Subscription>| {
            s.status != SubscriptionStatus::Disabled && s.event_types.iter().any(|p| decide::matches(p, event_type))
        };
        let mut wanting: Vec<_> = self.subscriptions.values().filter(wants).collect();
        wanting.sort_by_key(|s| s.id);
        wanting
    }

    /// May a job be made at once, or does its gate decide?
    pub fn is_free(&self, subscription: &Subscription, now: Timestamp) -> bool {
        subscription.status == SubscriptionStatus::Active
            && !subscription.is_limited()
            && self.held.get(&subscription.id).is_none_or(|until| *until <= now)
    }

    /// How long its receiver is still to be left alone.
    pub fn rest_of(&self, id: i64, now: Timestamp) -> Option<Duration> {
        self.held.get(&id).filter(|until| **until > now).map(|until| until.since(now))
    }

    pub fn is_cooling(&self, id: i64, now: Timestamp) -> bool {
        self.held.get(&id).is_some_and(|until| *until > now)
    }
}

/// The version in force and the database's time.
pub(crate) async fn version<T: Tx + ?Sized>(tx: &mut T) -> Result<(i64, Timestamp)> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let sql = format!("SELECT value, {now} FROM webhook_state WHERE name = 'subscriptions'");
    let rows = tx.query(&sql, &params).await?;
    let row = rows.first().ok_or_else(|| postrider::Error::database("webhook_state has no row `subscriptions`"))?;
    Ok((row.int(0)?, row.time(1)?))
}

/// Every process shall notice.
pub(crate) async fn bump<T: Tx + ?Sized>(tx: &mut T) -> Result<()> {
    tx.execute("UPDATE webhook_state SET value = value + 1 WHERE name = 'subscriptions'", &[]).await.map(drop)
}

impl Webhooks {
    fn remembered(&self) -> Arc<Catalog> {
        self.0.catalog.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn remember(&self, catalog: Arc<Catalog>) {
        *self.0.catalog.lock().unwrap_or_else(PoisonError::into_inner) = catalog;
    }

    async fn load<T: Tx + ?Sized>(&self, tx: &mut T, version: i64) -> Result<Catalog> {
        let sql = format!("SELECT {COLUMNS} FROM subscriptions");
        let mut subscriptions = HashMap::new();
        for row in tx.query(&sql, &[]).await? {
            let subscription = from_row(&row, &self.0.keyring)?;
            subscriptions.insert(subscription.id, Arc::new(subscription));
        }
        let mut held = HashMap::new();
        let sql = "SELECT subscription_id, held_until FROM subscription_gates WHERE held_until IS NOT NULL";
        for row in tx.query(sql, &[]).await? {
            held.insert(row.int(0)?, row.time(1)?);
        }
        Ok(Catalog { version, subscriptions, held, checked_at: None })
    }

    /// As the given transaction sees it, and the time. What it loads is not remembered: the transaction may roll back.
    pub(crate) async fn catalog_in<T: Tx + ?Sized>(&self, tx: &mut T) -> Result<(Arc<Catalog>, Timestamp)> {
        let (version, now) = version(tx).await?;
        let remembered = self.remembered();
        if remembered.version == version {
            return Ok((remembered, now));
        }
        Ok((Arc::new(self.load(tx, version).await?), now))
    }

    /// Not older than a moment.
    pub(crate) async fn catalog(&self) -> Result<Arc<Catalog>> {
        let remembered = self.remembered();
        let tick = Tick::now();
        if remembered.checked_at.is_some_and(|at| tick.since(at) < BELIEVED) {
            return Ok(remembered);
        }
        let webhooks = self.clone();
        let known = remembered.version;
        let loaded = self.transact(Mode::Read, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move {
                let (version, _) = version(tx).await?;
                if version == known { Ok(None) } else { webhooks.load(tx, version).await.map(Some) }
            })
        });
        let mut catalog = match loaded.await? {
            Some(loaded) => loaded,
            None => Catalog {
                version: remembered.version,
                subscriptions: remembered.subscriptions.clone(),
                held: remembered.held.clone(),
                checked_at: None,
            },
        };
        catalog.checked_at = Some(tick);
        let catalog = Arc::new(catalog);
        self.remember(catalog.clone());
        Ok(catalog)
    }

    /// What is remembered may be out of date: ask again at the next look.
    pub(crate) fn doubt(&self) {
        self.remember(Arc::default());
    }
}
