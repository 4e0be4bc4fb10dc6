//! The subscriptions as every process remembers them, without their secrets. Each change in the database has a number;
//! whoever sees a higher one reads the rows that changed since, and no others. What only cools down for a while is known
//! apart from it, and changes nobody's catalogue.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::error::Kind;
use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value, for_update};
use postrider::{Error, Result, Timestamp};

use crate::Webhooks;
use crate::orchestrator::skip_locked;
use crate::subscriptions::{COLUMNS, Subscription, SubscriptionStatus, from_row};

/// How long the courier and the orchestrator believe what they remember without asking for its version.
const BELIEVED: Duration = Duration::from_millis(250);
/// The same for holds: a delivery that does not know of one comes early, and is put off by whoever does.
const HOLDS_BELIEVED: Duration = Duration::from_secs(1);
/// What is published to a subscription that was disabled automatically becomes a dead letter for so long.
const LAMENTED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Changes so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Version {
    /// By anybody, also by processes of an older make that do not number rows.
    all: i64,
    /// By those who number the rows they change.
    rows: i64,
    /// The last of these that deleted a row.
    deleted: i64,
}

impl Version {
    /// Has everything that changed since `known` a row that says so?
    fn is_told_by_rows(self, known: Version) -> bool {
        self.all >= known.all && self.all - known.all == self.rows - known.rows
    }
}

#[derive(Default)]
pub(crate) struct Catalog {
    version: Version,
    subscriptions: HashMap<i64, Arc<Subscription>>,
    routes: Routes,
}

/// Who wants what, by pattern.
#[derive(Default)]
struct Routes {
    all: Vec<i64>,
    /// By the part before `*`.
    under: HashMap<String, Vec<i64>>,
    exactly: HashMap<String, Vec<i64>>,
}

impl Routes {
    fn of<'a>(subscriptions: impl Iterator<Item = &'a Arc<Subscription>>) -> Routes {
        let mut routes = Routes::default();
        for subscription in subscriptions {
            for pattern in &subscription.event_types {
                let list = match pattern.strip_suffix('*') {
                    Some("") => &mut routes.all,
                    Some(prefix) => routes.under.entry(prefix.to_owned()).or_default(),
                    None => routes.exactly.entry(pattern.clone()).or_default(),
                };
                list.push(subscription.id);
            }
        }
        routes
    }

    fn wanting(&self, event_type: &str) -> Vec<i64> {
        let prefixes = event_type.match_indices('.').map(|(at, _)| &event_type[..=at]);
        let under = prefixes.filter_map(|prefix| self.under.get(prefix)).flatten();
        let mut ids: Vec<i64> =
            self.all.iter().chain(under).chain(self.exactly.get(event_type).into_iter().flatten()).copied().collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}

impl Catalog {
    pub fn get(&self, id: i64) -> Option<&Arc<Subscription>> {
        self.subscriptions.get(&id)
    }

    /// Those that get a saga for an event of this type: active, paused, or disabled automatically and not long ago.
    pub fn wanting(&self, event_type: &str, now: Timestamp) -> Vec<&Arc<Subscription>> {
        let ids = self.routes.wanting(event_type);
        let takes = |s: &&Arc<Subscription>| s.status != SubscriptionStatus::Disabled || s.is_lamented(now, LAMENTED);
        ids.into_iter().filter_map(|id| self.subscriptions.get(&id)).filter(takes).collect()
    }

    fn changed(&self, version: Version, rows: Vec<Subscription>, there: Option<&[i64]>) -> Catalog {
        let mut subscriptions = self.subscriptions.clone();
        for subscription in rows {
            subscriptions.insert(subscription.id, Arc::new(subscription));
        }
        if let Some(there) = there {
            let there: std::collections::HashSet<i64> = there.iter().copied().collect();
            subscriptions.retain(|id, _| there.contains(id));
        }
        let routes = Routes::of(subscriptions.values());
        Catalog { version, subscriptions, routes }
    }
}

/// A receiver that is left alone, or tried with a few.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hold {
    pub until: Timestamp,
}

/// Who is held: not free until a success, or the end of a wait that was asked for, opens the gate again.
#[derive(Default)]
struct Holds {
    held: HashMap<i64, Hold>,
    read_at: Option<Tick>,
}

/// What a process knows.
#[derive(Default)]
pub(crate) struct Knowledge {
    catalog: Mutex<Remembered>,
    holds: Mutex<Holds>,
}

#[derive(Default)]
struct Remembered {
    catalog: Arc<Catalog>,
    /// When it was read.
    read_at: Option<Tick>,
    checked_at: Option<Tick>,
    /// What the database's clock said, and when.
    clock: Option<(Timestamp, Tick)>,
}

/// One subscription as it is at this moment.
#[derive(Clone)]
pub(crate) struct Standing {
    pub subscription: Option<Arc<Subscription>>,
    /// How long its receiver is still to be left alone.
    pub rest: Option<Duration>,
}

/// The changes so far and the database's time.
async fn version<T: Tx + ?Sized>(tx: &mut T) -> Result<(Version, Timestamp)> {
    let mut params: Vec<Value> = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let sql = format!(
        "SELECT name, value, {now} FROM webhook_state WHERE name IN ('subscriptions', 'subscription_rows', 'subscriptions_deleted')"
    );
    let (mut version, mut at) = (Version::default(), None);
    for row in tx.query_often(&sql, &params).await? {
        let value = row.int(1)?;
        match row.text(0)?.as_str() {
            "subscriptions" => version.all = value,
            "subscription_rows" => version.rows = value,
            _ => version.deleted = value,
        }
        at = Some(row.time(2)?);
    }
    let now = at.ok_or_else(|| Error::database("webhook_state has no row `subscriptions`"))?;
    Ok((version, now))
}

/// The database's time.
pub(crate) async fn now<T: Tx + ?Sized>(tx: &mut T) -> Result<Timestamp> {
    Ok(version(tx).await?.1)
}

/// Nobody else changes a subscription until this transaction ends.
pub(crate) async fn lock<T: Tx + ?Sized>(tx: &mut T) -> Result<()> {
    let sql = format!("SELECT value FROM webhook_state WHERE name = 'subscriptions'{}", for_update(tx.dialect()));
    tx.query(&sql, &[]).await.map(drop)
}

/// The same without waiting; `false`: somebody else is at it.
pub(crate) async fn try_lock<T: Tx + ?Sized>(tx: &mut T) -> Result<bool> {
    let names = "('subscriptions', 'subscription_rows')";
    let sql =
        format!("SELECT name FROM webhook_state WHERE name IN {names} ORDER BY name{}", skip_locked(tx.dialect()));
    Ok(tx.query(&sql, &[]).await?.len() == 2)
}

/// Begins a change that every process shall notice; answers its number, which the row that changes gets as its version.
/// Changes wait for each other here, so that what one reads is not changed by another before it writes, and numbers are
/// seen in their order.
pub(crate) async fn bump<T: Tx + ?Sized>(tx: &mut T) -> Result<i64> {
    for name in ["subscriptions", "subscription_rows"] {
        tx.execute("UPDATE webhook_state SET value = value + 1 WHERE name = ?", &[name.into()]).await?;
    }
    let rows = tx.query("SELECT value FROM webhook_state WHERE name = 'subscription_rows'", &[]).await?;
    rows.first().ok_or_else(|| Error::database("webhook_state has no row `subscription_rows`"))?.int(0)
}

/// The same for a change of this one, which nobody else may have locked: all others would wait with us.
pub(crate) async fn bump_for<T: Tx + ?Sized>(tx: &mut T, id: i64) -> Result<i64> {
    let version = bump(tx).await?;
    if tx.dialect() == Dialect::Sqlite {
        return Ok(version);
    }
    for row in ["subscriptions WHERE id", "subscription_gates WHERE subscription_id"] {
        let sql = format!("SELECT 1 FROM {row} = ?");
        let there = !tx.query(&sql, &[id.into()]).await?.is_empty();
        let free = format!("{sql}{}", skip_locked(tx.dialect()));
        if there && tx.query(&free, &[id.into()]).await?.is_empty() {
            return Err(Error::new(Kind::Locked, format!("somebody else has subscription {id} locked; try again")));
        }
    }
    Ok(version)
}

/// The change with this number deletes a row.
pub(crate) async fn mark_deletion<T: Tx + ?Sized>(tx: &mut T, number: i64) -> Result<()> {
    let sql = "UPDATE webhook_state SET value = ? WHERE name = 'subscriptions_deleted'";
    tx.execute(sql, &[number.into()]).await.map(drop)
}

impl Webhooks {
    fn remembered(&self) -> std::sync::MutexGuard<'_, Remembered> {
        self.0.known.catalog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn holds(&self) -> std::sync::MutexGuard<'_, Holds> {
        self.0.known.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn load<T: Tx + ?Sized>(&self, tx: &mut T, known: &Catalog, version: Version) -> Result<Catalog> {
        let whole = known.version == Version::default() || !version.is_told_by_rows(known.version);
        let since = if whole { -1 } else { known.version.rows };
        let sql = format!("SELECT {COLUMNS} FROM subscriptions WHERE version > ?");
        let mut rows = Vec::new();
        for row in tx.query(&sql, &[since.into()]).await? {
            // One that cannot be read is nobody else's trouble.
            match from_row(&row, &self.0.keyring) {
                Ok(subscription) => rows.push(subscription),
                Err(error) => tracing::error!(%error, "a subscription cannot be read"),
            }
        }
        if whole {
            // Whoever does not number rows may have changed secrets too.
            self.0.cabinet.clear();
            return Ok(Catalog::default().changed(version, rows, None));
        }
        let mut there = None;
        if version.deleted > known.version.rows {
            let ids = tx.query("SELECT id FROM subscriptions", &[]).await?;
            there = Some(ids.iter().map(|row| row.int(0)).collect::<Result<Vec<i64>>>()?);
        }
        Ok(known.changed(version, rows, there.as_deref()))
    }

    /// As the given transaction sees it or newer, and the time.
    pub(crate) async fn catalog_in<T: Tx + ?Sized>(&self, tx: &mut T) -> Result<(Arc<Catalog>, Timestamp)> {
        self.catalog_of(tx, false).await
    }

    /// `newest`: this transaction sees all that was committed, so what is remembered beyond it never was.
    async fn catalog_of<T: Tx + ?Sized>(&self, tx: &mut T, newest: bool) -> Result<(Arc<Catalog>, Timestamp)> {
        let (version, now) = version(tx).await?;
        let known = {
            let mut remembered = self.remembered();
            remembered.clock = Some((now, Tick::now()));
            remembered.catalog.clone()
        };
        if known.version == version && known.version != Version::default() {
            return Ok((known, now));
        }
        if known.version.all > version.all && !newest {
            // An old snapshot; or what is remembered was never committed. Whoever looks next finds out.
            self.remembered().checked_at = None;
            return Ok((known, now));
        }
        let loaded = Arc::new(self.load(tx, &known, version).await?);
        let mut remembered = self.remembered();
        // Somebody may have read more of it meanwhile.
        if newest || remembered.catalog.version.all <= version.all {
            (remembered.catalog, remembered.read_at) = (loaded.clone(), Some(Tick::now()));
        }
        Ok((loaded, now))
    }

    /// A transaction that began then has failed. Whatever was read since may be what it, or one that was to be committed with
    /// it, has written: on SQLite several share a commit, and each sees what those before it wrote.
    pub(crate) fn forget_since(&self, begun: Tick) {
        let mut remembered = self.remembered();
        if remembered.read_at.is_some_and(|at| at >= begun) {
            (remembered.catalog, remembered.read_at) = (Arc::default(), None);
        }
        remembered.checked_at = None;
        drop(remembered);
        self.holds().read_at = None;
        self.0.cabinet.clear();
    }

    /// Not older than a moment.
    pub(crate) async fn catalog(&self) -> Result<Arc<Catalog>> {
        let tick = Tick::now();
        {
            let remembered = self.remembered();
            if remembered.checked_at.is_some_and(|at| tick.since(at) < BELIEVED) {
                return Ok(remembered.catalog.clone());
            }
        }
        let webhooks = self.clone();
        let catalog = self
            .transact(Mode::Read, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move {
                    let (catalog, _) = webhooks.catalog_of(tx, true).await?;
                    webhooks.read_holds(tx).await?;
                    Ok(catalog)
                })
            })
            .await?;
        self.remembered().checked_at = Some(tick);
        Ok(catalog)
    }

    /// Who is held, read again if that was a while ago.
    pub(crate) async fn read_holds<T: Tx + ?Sized>(&self, tx: &mut T) -> Result<()> {
        let tick = Tick::now();
        if self.holds().read_at.is_some_and(|at| tick.since(at) < HOLDS_BELIEVED) {
            return Ok(());
        }
        let sql = "SELECT subscription_id, held_until FROM subscription_gates WHERE held_until IS NOT NULL";
        let rows = tx.query_often(sql, &[]).await?;
        let held = rows.iter().map(|row| Ok((row.int(0)?, Hold { until: row.time(1)? }))).collect::<Result<_>>()?;
        *self.holds() = Holds { held, read_at: Some(tick) };
        Ok(())
    }

    /// What this process itself changed in a gate it need not read.
    pub(crate) fn note_hold(&self, id: i64, until: Option<Timestamp>) {
        let held = &mut self.holds().held;
        match until {
            Some(until) => held.insert(id, Hold { until }),
            None => held.remove(&id),
        };
    }

    /// May a job be made at once, or does its gate decide?
    pub(crate) fn is_free(&self, subscription: &Subscription) -> bool {
        subscription.status == SubscriptionStatus::Active
            && !subscription.is_limited()
            && !self.holds().held.contains_key(&subscription.id)
    }

    /// How long its receiver is still to be left alone, as far as is remembered.
    pub(crate) fn rest_of(&self, id: i64) -> Option<Duration> {
        let now = self.database_now();
        self.holds().held.get(&id).map(|hold| hold.until).filter(|until| *until > now).map(|until| until.since(now))
    }

    /// The database's time, as far as it was heard of last.
    fn database_now(&self) -> Timestamp {
        let clock = self.remembered().clock;
        clock.map_or_else(postrider::clock::wall, |(said, at)| said.plus(Tick::now().since(at)))
    }

    /// What is remembered may be out of date: ask again at the next look.
    pub(crate) fn doubt(&self) {
        self.remembered().checked_at = None;
        self.holds().read_at = None;
    }

    /// How one subscription stands at this moment, asked where it cannot be stale. Those who ask at the same time share an
    /// answer that was begun after they asked.
    pub(crate) async fn standing(&self, id: i64) -> Result<Standing> {
        let asked = Tick::now();
        let mut asking = self.0.standing.lock().await;
        if let Some((_, standing)) = asking.get(&id).filter(|(begun, _)| *begun > asked) {
            return Ok(standing.clone());
        }
        let begun = Tick::now();
        let webhooks = self.clone();
        let standing = self
            .transact(Mode::Work, move |tx| {
                let webhooks = webhooks.clone();
                Box::pin(async move {
                    let subscription = webhooks.read(tx, id).await?.map(Arc::new);
                    let mut params: Vec<Value> = Vec::new();
                    let now = tx.now().plus(0, &mut params);
                    params.push(id.into());
                    let sql = format!("SELECT {now}, held_until FROM subscription_gates WHERE subscription_id = ?");
                    let rows = tx.query(&sql, &params).await?;
                    let Some(row) = rows.first() else { return Ok(Standing { subscription, rest: None }) };
                    let (now, until) = (row.time(0)?, row.opt_time(1)?);
                    webhooks.note_hold(id, until);
                    let rest = until.filter(|until| *until > now).map(|until| until.since(now));
                    Ok(Standing { subscription, rest })
                })
            })
            .await?;
        asking.retain(|_, (at, _)| begun.since(*at) < BELIEVED);
        asking.insert(id, (begun, standing.clone()));
        Ok(standing)
    }
}

/// Kept for [`Webhooks::standing`].
pub(crate) type Standings = tokio::sync::Mutex<HashMap<i64, (Tick, Standing)>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide;

    #[test]
    fn routes_find_what_patterns_match() {
        let of = |id: i64, patterns: &[&str]| {
            let event_types = patterns.iter().map(|p| (*p).to_owned()).collect();
            Arc::new(Subscription { id, event_types, ..Subscription::default() })
        };
        let all = [
            of(1, &["*"]),
            of(2, &["order.*", "order.paid"]),
            of(3, &["order.paid"]),
            of(4, &["order.item.*"]),
            of(5, &["order"]),
        ];
        let routes = Routes::of(all.iter());
        for event_type in ["order", "order.paid", "order.item.added", "orders.paid", "x", "order.item"] {
            let slow = all.iter().filter(|s| s.event_types.iter().any(|p| decide::matches(p, event_type)));
            let slow: Vec<i64> = slow.map(|s| s.id).collect();
            assert_eq!(routes.wanting(event_type), slow, "{event_type}");
        }
    }

    #[test]
    fn only_changes_that_number_their_rows_are_read_row_by_row() {
        let version = |all, rows| Version { all, rows, deleted: 0 };
        assert!(version(7, 4).is_told_by_rows(version(5, 2)));
        assert!(!version(8, 4).is_told_by_rows(version(5, 2)), "somebody changed a row without saying which");
        assert!(!version(4, 1).is_told_by_rows(version(5, 2)), "the database went back");
    }
}
