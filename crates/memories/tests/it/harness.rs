//! A fresh database per test on each store, with a gateway on it, an OpenMemory before it, and a worker where it is wanted.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider::error::{Effect, Kind};
use postrider::lease::Lease;
use postrider::outcome::{GiveBack, LeaseState, Settled, Settlement};
use postrider::store::{Claim, Claimed, Mark, Mode, Store, Walked, Work, transact};
use postrider::tx::{Dialect, Row, Value};
use postrider::worker::core::{LaneSettings, Tally};
use postrider::{Error, LaneRules, Lanes, NewMessage, Options, Outbox, Result, Schema, Worker, stores};
use postrider_memories::{
    LANE, MIGRATIONS, Memories, NewMemory, Question, Settings, Settling, Stored, lane_rules, lane_settings, upstream,
};

use crate::openmemory::OpenMemory;
use proving::kit::scratch::{self, Scratch};

pub use proving::on_every_store;

/// Runs one case.
pub async fn case<F: Future<Output = ()>>(home: Home, case: impl FnOnce(Home) -> F) {
    case(home).await;
}

pub struct Home {
    pub memories: Memories,
    pub outbox: Outbox,
    pub upstream: OpenMemory,
    pub key: Arc<Mutex<String>>,
    pub lossy: Arc<AtomicI64>,
    url: String,
    _scratch: Scratch,
}

pub async fn sqlite() -> Home {
    Home::on(scratch::sqlite()).await
}

pub async fn postgres() -> Home {
    Home::on(scratch::postgres().await).await
}

pub async fn mysql() -> Home {
    Home::on(scratch::mysql().await).await
}

pub fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn settings(upstream: &OpenMemory, key: &Arc<Mutex<String>>) -> Settings {
    let key = key.clone();
    Settings {
        upstream: upstream::Settings {
            resolver: None,
            url: Some(upstream.url.parse().unwrap()),
            key: Arc::new(move || Ok(Some(key.lock().unwrap().clone()))),
            timeout: Duration::from_millis(500),
        },
        default_space: "team:a".to_owned(),
        max_bytes: 1 << 20,
        breaker_failures: 1000,
        probe: Duration::from_millis(50),
        under_way: secs(3),
        recognise: true,
    }
}

impl Home {
    pub async fn on(scratch: Scratch) -> Home {
        let upstream = OpenMemory::start().await;
        let (key, lossy) = (Arc::new(Mutex::new("first".to_owned())), Arc::new(AtomicI64::new(-1)));
        let (memories, outbox) = open(&scratch.url, &upstream, &key, lossy.clone(), secs(3600)).await;
        Home { memories, outbox, upstream, key, lossy, url: scratch.url.clone(), _scratch: scratch }
    }

    /// As another process, with other settings of the lane, would have it.
    pub async fn again(&self, retention: Duration) -> (Memories, Outbox) {
        open(&self.url, &self.upstream, &self.key, Arc::new(AtomicI64::new(-1)), retention).await
    }

    pub async fn store(&self, text: &str) -> Stored {
        let memory = NewMemory {
            payload_md: text.to_owned(),
            target_space: Some("team:a".to_owned()),
            correlation_id: format!("corr {text}"),
            ..NewMemory::default()
        };
        self.memories.store(memory).await
    }

    /// The contents a question finds, and whether the answer is degraded.
    pub async fn ask(&self, question: &str) -> (Vec<String>, bool) {
        let question = Question { query: question.to_owned(), ..Question::default() };
        let answer = self.memories.query(question).await.unwrap();
        (answer.results.into_iter().map(|found| found.content).collect(), answer.degraded)
    }

    /// Everything queued is tried once, whatever it waits for.
    pub async fn flush(&self) -> Tally {
        self.memories.wake_all().await.unwrap();
        let settings = LaneSettings { poll: Duration::from_millis(50), ..lane_settings() };
        let worker = Worker::new(self.outbox.clone()).lane_with(settings, Arc::new(self.memories.courier()));
        let report = worker.once().run(std::future::pending()).await.unwrap();
        report.into_iter().next().map(|(_, tally)| tally).unwrap_or_default()
    }

    pub async fn rows(&self, sql: &str) -> Vec<Row> {
        let text: Arc<str> = sql.into();
        let rows = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let sql = text.clone();
            Box::pin(async move { tx.query(&sql, &[] as &[Value]).await })
        });
        rows.await.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    pub async fn execute(&self, sql: &str) {
        let text: Arc<str> = sql.into();
        let done = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let sql = text.clone();
            Box::pin(async move { tx.execute(&sql, &[] as &[Value]).await })
        });
        done.await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    }

    pub async fn count(&self, what: &str) -> i64 {
        self.rows(&format!("SELECT COUNT(*) FROM {what}")).await[0].int(0).unwrap()
    }

    pub async fn text(&self, sql: &str) -> String {
        self.rows(sql).await[0].text(0).unwrap()
    }
}

async fn open(
    url: &str,
    upstream: &OpenMemory,
    key: &Arc<Mutex<String>>,
    lossy: Arc<AtomicI64>,
    retention: Duration,
) -> (Memories, Outbox) {
    let settling = Settling::default();
    let rules = LaneRules { retention, ..lane_rules(&settling) };
    let lanes = Lanes::new().with(LANE, rules).with("other", LaneRules::default());
    let options = Options { migrations: MIGRATIONS.to_vec(), ..Options::default() };
    let store = stores::open(url, lanes, options).await.unwrap();
    let outbox = Outbox::new(Arc::new(Forgetful { store, lossy }));
    outbox.migrate().await.unwrap();
    let memories = Memories::new(outbox.clone(), settings(upstream, key), &settling, None).unwrap();
    (memories, outbox)
}

pub async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let limit = tokio::time::Instant::now() + secs(30);
    while !holds().await {
        assert!(tokio::time::Instant::now() < limit, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A store that commits and loses its answer, once, when told to.
struct Forgetful {
    store: Arc<dyn Store>,
    /// Which of the next writes is lost: 0 is the next one, less than 0 none.
    lossy: Arc<AtomicI64>,
}

#[async_trait]
impl Store for Forgetful {
    fn dialect(&self) -> Dialect {
        self.store.dialect()
    }

    fn lanes(&self) -> &Arc<Lanes> {
        self.store.lanes()
    }

    fn schema(&self) -> &Schema {
        self.store.schema()
    }

    async fn migrate(&self) -> Result<Vec<String>> {
        self.store.migrate().await
    }

    async fn claim(&self, claim: &Claim) -> Result<Claimed> {
        self.store.claim(claim).await
    }

    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
        self.store.walk(lane, shard, after, limit).await
    }

    async fn settle(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Result<Vec<Settled>> {
        self.store.settle(lane, owner, entries).await
    }

    async fn renew(&self, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>> {
        self.store.renew(owner, leases, lease).await
    }

    async fn defer(&self, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>> {
        self.store.defer(owner, leases, how).await
    }

    async fn transact(&self, mode: Mode, work: Work) -> Result<()> {
        self.store.transact(mode, work).await?;
        if mode == Mode::Write && self.lossy.fetch_sub(1, Ordering::SeqCst) == 0 {
            let lost = Error::new(Kind::Unreachable, "the answer of a COMMIT is lost");
            return Err(Error { effect: Effect::Unknown, ..lost });
        }
        Ok(())
    }

    fn advance_clock(&self, by: Duration) {
        self.store.advance_clock(by);
    }
}

/// A message as an application would enqueue it.
pub fn plain(lane: &str) -> NewMessage {
    NewMessage::new(lane, "x")
}
