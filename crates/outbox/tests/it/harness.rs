//! A fresh database per test on each of the three stores, and the words the cases are written in. A case is an
//! `async fn(Database)`, named by its promise and listed in `on_every_store!`; stores supply nothing but a factory.

use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use postrider::lease::Lease;
use postrider::outcome::{Certainty, GiveBack, LeaseState, Settled, Settlement, Verdict};
use postrider::store::{Attempt, Claim, From, Mark, Mode, Prune, Pruned, Shown, Status, transact};
use postrider::tx::{Dialect, Row, Value};
use postrider::{Enqueued, Entry, LaneRules, Lanes, Message, NewMessage, Outbox};

pub use proving::kit::Session as Raw;
pub use proving::on_every_store;

/// One database of a test's own. Clones share it, its store and the store's clock.
#[derive(Clone)]
pub struct Database {
    pub outbox: Outbox,
    pub url: String,
    pub dialect: Dialect,
    folder: Option<Arc<tempfile::TempDir>>,
}

/// Owns the lane `owned`.
pub const OWNER: &str = "shop pay";

/// The lanes every case may use.
pub fn lanes() -> Lanes {
    let plain = LaneRules::default;
    Lanes::new()
        .with("a", plain())
        .with("b", plain())
        .with("audited", LaneRules { audit: true, ..plain() })
        .with("dedup", LaneRules { dedup: true, ..plain() })
        .with("fleeting", LaneRules { retention: Duration::ZERO, ..plain() })
        .with("brief", LaneRules { key_ttl: secs(100), ..plain() })
        .with("sharded", LaneRules { shards: 8, ..plain() })
        .with("memory", LaneRules { audit: true, dedup: true, ..plain() })
        .with("orders", plain())
        .with("careful", LaneRules { send_begun: true, ..plain() })
        .with("owned", LaneRules { owned_by: Some(OWNER), ..plain() })
}

pub const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

pub async fn sqlite() -> Database {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let url = format!("sqlite://{}/test.db", folder.path().display());
    let outbox = Outbox::open(&url, lanes()).await.expect("open");
    Database { outbox, url, dialect: Dialect::Sqlite, folder: Some(Arc::new(folder)) }
}

pub async fn postgres() -> Database {
    server_database(Dialect::Postgres, "POSTRIDER_TEST_POSTGRES").await
}

pub async fn mysql() -> Database {
    server_database(Dialect::Mysql, "POSTRIDER_TEST_MYSQL").await
}

fn server_url(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: run `make test`"))
}

async fn server_database(dialect: Dialect, variable: &str) -> Database {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("it_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    let server = server_url(variable);
    let mut url = url::Url::parse(&server).expect("a URL");
    Raw::connect(dialect, &server).await.run(&format!("CREATE DATABASE {name}")).await.expect("create database");
    url.set_path(&name);
    let outbox = Outbox::open(url.as_str(), lanes()).await.expect("open");
    Database { outbox, url: url.into(), dialect, folder: None }
}

/// Migrates, runs the case, and drops the database however it ended.
pub async fn case<F: Future<Output = ()>>(db: Database, case: impl FnOnce(Database) -> F) {
    let ended = AssertUnwindSafe(async {
        db.outbox.migrate().await.expect("migrate");
        case(db.clone()).await;
    });
    let ended = ended.catch_unwind().await;
    db.remove().await;
    if let Err(panic) = ended {
        resume_unwind(panic);
    }
}

impl Database {
    pub async fn remove(self) {
        let name = self.url.rsplit('/').next().unwrap_or_default();
        match self.dialect {
            Dialect::Sqlite => drop(self.folder),
            Dialect::Postgres => {
                let sql = format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)");
                Raw::connect(self.dialect, &server_url("POSTRIDER_TEST_POSTGRES")).await.run(&sql).await.expect("drop");
            }
            Dialect::Mysql => {
                let sql = format!("DROP DATABASE IF EXISTS {name}");
                Raw::connect(self.dialect, &server_url("POSTRIDER_TEST_MYSQL")).await.run(&sql).await.expect("drop");
            }
        }
    }

    /// Another process, as far as the database can tell: its own store, connections and lanes. Its clock is not moved.
    pub async fn again(&self, lanes: Lanes) -> Database {
        let outbox = Outbox::open(&self.url, lanes).await.expect("open");
        Database { outbox, ..self.clone() }
    }

    /// A connection the kernel knows nothing of.
    pub async fn raw(&self) -> Raw {
        Raw::connect(self.dialect, &self.url).await
    }

    pub fn advance(&self, by: Duration) {
        self.outbox.store().advance_clock(by);
    }

    // ---- enqueue ----

    pub async fn enqueue(&self, message: NewMessage) -> Entry {
        self.outbox.enqueue(vec![message]).await.expect("enqueue")[0]
    }

    /// Enqueues a plain message and answers its id.
    pub async fn put(&self, lane: &str, payload: &str) -> i64 {
        self.enqueue(NewMessage::new(lane, payload.to_owned())).await.id
    }

    // ---- the worker's verbs ----

    pub async fn claim_with(&self, lane: &str, owner: &str, limit: u32, lease: Duration, from: From) -> Vec<Message> {
        let claim = claim_of(lane, owner, limit, lease, from);
        self.outbox.store().claim(&claim).await.expect("claim").messages
    }

    /// From the head, for a minute.
    pub async fn claim(&self, lane: &str, owner: &str, limit: u32) -> Vec<Message> {
        self.claim_with(lane, owner, limit, secs(60), From::Mark(None)).await
    }

    /// Exactly one message must be there.
    pub async fn claim_one(&self, lane: &str, owner: &str) -> Message {
        let mut claimed = self.claim(lane, owner, 10).await;
        assert_eq!(claimed.len(), 1, "one claimable message on lane {lane}");
        claimed.remove(0)
    }

    pub async fn claim_ids(&self, lane: &str, owner: &str, ids: &[i64]) -> Vec<Message> {
        self.claim_with(lane, owner, 100, secs(60), From::Ids(ids.to_vec())).await
    }

    pub async fn settle_all(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Vec<Settled> {
        let mut answers = self.outbox.store().settle(lane, owner, entries).await.expect("settle");
        // Another transaction of the test has the row: ask again, as a worker does.
        for (entry, answer) in entries.iter().zip(&mut answers) {
            while *answer == Settled::Locked {
                tokio::time::sleep(Duration::from_millis(2)).await;
                let again = self.outbox.store().settle(lane, owner, std::slice::from_ref(entry)).await;
                *answer = again.expect("settle")[0];
            }
        }
        answers
    }

    pub async fn settle(&self, lane: &str, owner: &str, lease: Lease, verdict: Verdict) -> Settled {
        let answers = self.settle_all(lane, owner, &[Settlement::new(lease, verdict)]).await;
        assert_eq!(answers.len(), 1);
        answers[0]
    }

    pub async fn renew(&self, owner: &str, lease: Lease) -> bool {
        self.outbox.renew_lease(owner, lease, secs(60)).await.expect("renew")
    }

    pub async fn defer(&self, owner: &str, lease: Lease, delay: Duration) -> bool {
        let how = GiveBack::after(delay, "PAUSED");
        self.outbox.store().defer(owner, &[lease], &how).await.expect("defer")[0] == LeaseState::Held
    }

    pub async fn walk(&self, lane: &str, after: Option<Mark>, limit: u32) -> Vec<i64> {
        let walked = self.outbox.store().walk(lane, 0, after, limit).await.expect("walk");
        walked.seen.iter().map(|seen| seen.mark.id).collect()
    }

    // ---- shortcuts to states ----

    /// A message that is dead, with token 1.
    pub async fn put_dead(&self, message: NewMessage) -> i64 {
        let lane = message.lane.clone();
        let id = self.enqueue(message).await.id;
        let lease = self.claim_ids(&lane, "undertaker", &[id]).await[0].lease();
        assert_eq!(self.settle(&lane, "undertaker", lease, dead("BAD")).await, Settled::Applied);
        id
    }

    /// A message that was sent, with token 1.
    pub async fn put_sent(&self, message: NewMessage) -> i64 {
        let lane = message.lane.clone();
        let id = self.enqueue(message).await.id;
        let lease = self.claim_ids(&lane, "postman", &[id]).await[0].lease();
        assert_eq!(self.settle(&lane, "postman", lease, Verdict::sent()).await, Settled::Applied);
        id
    }

    pub async fn prune(&self, older_than: Duration, limit: u32) -> Pruned {
        self.outbox.prune(Prune { lane: None, older_than, limit, dry_run: false }).await.expect("prune")
    }

    // ---- reads ----

    pub async fn show(&self, id: i64) -> Shown {
        self.outbox.show(id).await.expect("show").unwrap_or_else(|| panic!("message {id} is gone")).0
    }

    pub async fn is_gone(&self, id: i64) -> bool {
        self.outbox.show(id).await.expect("show").is_none()
    }

    pub async fn status(&self, id: i64) -> Status {
        self.show(id).await.status
    }

    pub async fn history(&self, id: i64) -> Vec<Attempt> {
        self.outbox.show(id).await.expect("show").map_or(vec![], |(_, history)| history.attempts)
    }

    pub async fn payload(&self, id: i64) -> Vec<u8> {
        self.outbox.payload(id).await.expect("payload").expect("a payload").to_vec()
    }

    /// Runs portable SQL in a transaction of the store; placeholders are `?`.
    pub async fn try_sql(&self, sql: &str, params: Vec<Value>) -> postrider::Result<Vec<Row>> {
        let work = Arc::new((sql.to_owned(), params));
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move { tx.query(&work.0, &work.1).await })
        })
        .await
    }

    pub async fn sql(&self, sql: &str) -> Vec<Row> {
        self.try_sql(sql, vec![]).await.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    pub async fn count(&self, table: &str) -> i64 {
        self.sql(&format!("SELECT COUNT(*) FROM {table}")).await[0].int(0).expect("a count")
    }

    /// Live and ended messages, keys and attempts: what an enqueue that writes nothing leaves alone.
    pub async fn counts(&self) -> [i64; 4] {
        let mut counts = [0; 4];
        for (n, table) in ["outbox", "outbox_done", "outbox_keys", "outbox_attempts"].into_iter().enumerate() {
            counts[n] = self.count(table).await;
        }
        counts
    }
}

pub fn claim_of(lane: &str, owner: &str, limit: u32, lease: Duration, from: From) -> Claim {
    Claim { lane: lane.into(), shard: 0, limit, lease, owner: owner.into(), from, max_crashes: 5, send_begun: false }
}

pub fn retry(delay: Duration) -> Verdict {
    Verdict::Retry { delay, code: "HTTP_503".into(), error: "busy".into(), certainty: Certainty::Unchanged }
}

pub fn dead(code: &str) -> Verdict {
    Verdict::Dead { code: code.into(), error: "no use".into(), certainty: Certainty::Unchanged, counted: true }
}

pub fn created(entry: Entry) -> i64 {
    assert_eq!(entry.outcome, Enqueued::Created);
    entry.id
}

/// Waits until the condition holds.
pub async fn until(holds: impl AsyncFnMut() -> bool) {
    proving::kit::until("the condition of this test holds", holds).await;
}
