//! A fresh database per test on each store, with webhooks on it, a worker and an orchestrator where they are wanted.

use std::sync::Arc;
use std::time::Duration;

use postrider::alerts::Alerts;
use postrider::store::{Mode, transact};
use postrider::tx::{Row, Value};
use postrider::worker::core::LaneSettings;
use postrider::{LaneRules, Lanes, Options, Outbox, Worker, stores};
use postrider_webhooks::guard::Policy;
use postrider_webhooks::keyring::Keyring;
use postrider_webhooks::{
    LANE, MIGRATIONS, NewEvent, NewSubscription, Reports, Settings, Subscription, Webhooks, lane_rules, lane_settings,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use proving::kit::scratch::{self, Scratch};

pub use proving::on_every_store;

/// Runs one case.
pub async fn case<F: Future<Output = ()>>(home: Home, case: impl FnOnce(Home) -> F) {
    case(home).await;
}

pub struct Home {
    pub webhooks: Webhooks,
    pub outbox: Outbox,
    pub url: String,
    _scratch: Scratch,
}

pub async fn sqlite() -> Home {
    Home::on(scratch::sqlite(), settings()).await
}

pub async fn postgres() -> Home {
    Home::on(scratch::postgres().await, settings()).await
}

pub async fn mysql() -> Home {
    Home::on(scratch::mysql().await, settings()).await
}

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Quick, and to this machine.
pub fn settings() -> Settings {
    Settings {
        base_delay: Duration::from_millis(20),
        max_retry_limit: 3,
        timeout: Duration::from_secs(2),
        policy: Policy { allow_http: true, allow_cidrs: vec!["127.0.0.0/8".parse().unwrap()] },
        ..Settings::default()
    }
}

pub const KEY: &str = "test:MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

/// Webhooks on a database, as another process would have them.
pub async fn open(url: &str, settings: Settings) -> (Webhooks, Outbox) {
    open_with(url, settings, Keyring::parse(KEY).unwrap()).await
}

/// The same with keys of its own.
pub async fn open_with(url: &str, settings: Settings, keyring: Keyring) -> (Webhooks, Outbox) {
    let (webhooks, outbox) = unmigrated(url, settings, keyring).await;
    outbox.migrate().await.unwrap();
    (webhooks().await, outbox)
}

/// By somebody who may not migrate.
pub async fn open_migrated(url: &str, settings: Settings) -> (Webhooks, Outbox) {
    let (webhooks, outbox) = unmigrated(url, settings, Keyring::parse(KEY).unwrap()).await;
    (webhooks().await, outbox)
}

async fn unmigrated(url: &str, settings: Settings, keyring: Keyring) -> (impl AsyncFnOnce() -> Webhooks, Outbox) {
    let (outbox, reports) = outbox_on(url, Options::default()).await;
    let made = outbox.clone();
    (async move || webhooks_on(made, settings, keyring, reports).await, outbox)
}

/// By somebody with other patience, on a database that is migrated.
pub async fn open_with_options(url: &str, options: Options) -> (Webhooks, Outbox) {
    let (outbox, reports) = outbox_on(url, options).await;
    (webhooks_on(outbox.clone(), settings(), Keyring::parse(KEY).unwrap(), reports).await, outbox)
}

async fn outbox_on(url: &str, options: Options) -> (Outbox, Reports) {
    let reports = Reports::default();
    let lanes = Lanes::new().with(LANE, lane_rules(&reports)).with("alerts", LaneRules::default());
    let options = Options { migrations: MIGRATIONS.to_vec(), ..options };
    (Outbox::new(stores::open(url, lanes, options).await.unwrap()), reports)
}

async fn webhooks_on(outbox: Outbox, settings: Settings, keyring: Keyring, reports: Reports) -> Webhooks {
    let alerts = Alerts::new(outbox.clone(), "alerts", secs(300));
    Webhooks::new(outbox, settings, keyring, reports, Some(alerts)).await.unwrap()
}

impl Home {
    pub async fn on(scratch: Scratch, settings: Settings) -> Home {
        let (webhooks, outbox) = open(&scratch.url, settings).await;
        Home { webhooks, outbox, url: scratch.url.clone(), _scratch: scratch }
    }

    pub async fn subscribe(&self, url: &str, types: &[&str]) -> (Subscription, String) {
        self.subscribe_with(url, types, |_| {}).await
    }

    pub async fn subscribe_with(
        &self,
        url: &str,
        types: &[&str],
        change: impl FnOnce(&mut NewSubscription),
    ) -> (Subscription, String) {
        let event_types = types.iter().map(|t| (*t).to_owned()).collect();
        let mut new = NewSubscription { url: url.to_owned(), event_types, ..NewSubscription::default() };
        change(&mut new);
        self.webhooks.subscribe(new).await.unwrap()
    }

    /// Publishes one; its event and sagas.
    pub async fn publish(&self, event_type: &str, payload: &str) -> (i64, Vec<i64>) {
        let events = vec![NewEvent::new(event_type, payload.to_owned())];
        let published = self.webhooks.publish(events).await.unwrap().remove(0);
        (published.event_id, published.saga_ids)
    }

    /// A worker and an orchestrator, until it is dropped.
    pub fn work(&self) -> Working {
        work(&self.webhooks, &self.outbox)
    }

    pub async fn rows(&self, sql: &str) -> Vec<Row> {
        self.try_rows(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    pub async fn try_rows(&self, sql: &str) -> postrider::Result<Vec<Row>> {
        let sql: Arc<str> = sql.into();
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let sql = sql.clone();
            Box::pin(async move { tx.query(&sql, &[] as &[Value]).await })
        })
        .await
    }

    pub async fn count(&self, what: &str) -> i64 {
        self.rows(&format!("SELECT COUNT(*) FROM {what}")).await[0].int(0).unwrap()
    }

    pub async fn status(&self, saga: i64) -> String {
        self.rows(&format!("SELECT status FROM webhook_delivery_sagas WHERE id = {saga}")).await[0].text(0).unwrap()
    }

    pub async fn ends(&self, saga: i64, status: &str) {
        wait_until(&format!("saga {saga} is {status}"), async || self.status(saga).await == status).await;
    }
}

pub struct Working {
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Working {
    /// Stops it, and waits until it does nothing any more.
    pub async fn end(mut self) {
        let _ = self.stop.send(true);
        for task in std::mem::take(&mut self.tasks) {
            task.await.unwrap();
        }
    }
}

async fn until(mut stopped: watch::Receiver<bool>) {
    drop(stopped.wait_for(|stop| *stop).await)
}

/// A worker alone.
pub fn worker(webhooks: &Webhooks, outbox: &Outbox) -> Working {
    let (stop, stopped) = watch::channel(false);
    let settings = LaneSettings { poll: Duration::from_millis(50), ..lane_settings() };
    let worker = Worker::new(outbox.clone()).lane_with(settings, Arc::new(webhooks.courier()));
    let task = tokio::spawn(async move { drop(worker.run(until(stopped)).await) });
    Working { stop, tasks: vec![task] }
}

pub fn work(webhooks: &Webhooks, outbox: &Outbox) -> Working {
    let mut working = worker(webhooks, outbox);
    let stopped = working.stop.subscribe();
    let webhooks = webhooks.clone();
    working.tasks.push(tokio::spawn(async move { webhooks.orchestrate(until(stopped)).await }));
    working
}

impl Drop for Working {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
    }
}

pub async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let limit = tokio::time::Instant::now() + secs(30);
    while !holds().await {
        assert!(tokio::time::Instant::now() < limit, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
