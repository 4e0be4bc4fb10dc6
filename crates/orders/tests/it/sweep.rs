//! The sweep of `proving` over what orders add to the kernel: the intake, and the ledger's part in a settle. Every message
//! between us and the server, with every kind of fault; ledger and outbox must never disagree.

use std::time::Duration;

use async_trait::async_trait;
use postrider::error::Result;
use postrider::lease::Lease;
use postrider::outcome::{Certainty, Settled, Settlement, Verdict};
use postrider::store::{Claim, From};
use postrider::{Options, Outbox};
use postrider_orders::ledger::key_hash;
use postrider_orders::{Idempotency, LANE, NewOrder, Orders, Placed};
use proving::kit::scratch;
use proving::sweep::{Look, Part, Selection, Subject, Told, ask, sweep};

use crate::harness::{migrate, open_at, order};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Place,
    SettleSucceeded,
    SettleFailed,
    SettleRetry,
}

struct Scene {
    key: String,
    lease: Option<Lease>,
}

const WORKER: &str = "w";

impl Verb {
    fn verdict(self) -> Verdict {
        let (code, error, certainty) = ("BROKER_BUSY".to_owned(), "later".to_owned(), Certainty::Unchanged);
        match self {
            Verb::SettleFailed => Verdict::Dead { code, error, certainty, counted: true },
            Verb::SettleRetry => Verdict::Retry { delay: Duration::from_secs(600), code, error, certainty },
            _ => Verdict::sent(),
        }
    }

    async fn settle(self, outbox: &Outbox, scene: &Scene, again: bool) -> Result<Vec<Told>> {
        let lease = scene.lease.expect("a lease");
        let entry = Settlement { again, ..Settlement::new(lease, self.verdict()) };
        let mut answers = outbox.store().settle(LANE, WORKER, std::slice::from_ref(&entry)).await?;
        // All that fail tell of it in one alert, and whoever is cut off there keeps it locked for a while: asked for again,
        // as a worker does.
        for _ in 0..50 {
            if answers != [Settled::Locked] || !again {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            answers = outbox.store().settle(LANE, WORKER, std::slice::from_ref(&entry)).await?;
        }
        Ok(vec![if answers == [Settled::Applied] { Told::Applied } else { Told::NotApplied }])
    }
}

async fn place(orders: &Orders, key: &str) -> Result<Placed> {
    Ok(orders.place(vec![NewOrder::new(key, order("1"))]).await?.remove(0))
}

#[async_trait]
impl Subject for Verb {
    type Handle = (Orders, Outbox);
    type Scene = Scene;

    fn name(&self) -> String {
        format!("{self:?}")
    }

    async fn open(&self, url: &str, options: Options, _: &[String]) -> (Orders, Outbox) {
        let opened = open_at(url, options, Idempotency::Key, postrider_orders::Settings::default()).await;
        (opened.0, opened.1)
    }

    fn outbox<'a>(&self, handle: &'a (Orders, Outbox)) -> &'a Outbox {
        &handle.1
    }

    async fn prepare(&self, (orders, outbox): &(Orders, Outbox), key: &str) -> Scene {
        let mut scene = Scene { key: key.to_owned(), lease: None };
        if *self == Verb::Place {
            return scene;
        }
        let placed = place(orders, key).await.expect("an order");
        let Placed::Accepted { outbox_id } = placed else { panic!("{placed:?}") };
        let claim = Claim {
            lane: LANE.to_owned(),
            shard: 0,
            limit: 1,
            lease: Duration::from_secs(300),
            owner: WORKER.to_owned(),
            max_crashes: 5,
            send_begun: false,
            from: From::Ids(vec![outbox_id]),
        };
        let claimed = outbox.store().claim(&claim).await.expect("claim").messages;
        scene.lease = Some(claimed[0].lease());
        scene
    }

    async fn run(&self, (orders, outbox): &(Orders, Outbox), scene: &Scene) -> Result<Vec<Told>> {
        match self {
            // Asked again after a lost answer, it is told as a replay.
            Verb::Place => place(orders, &scene.key).await.map(|_| vec![Told::Applied]),
            verb => verb.settle(outbox, scene, false).await,
        }
    }

    async fn again(&self, (orders, outbox): &(Orders, Outbox), scene: &Scene) -> Option<Result<Vec<Told>>> {
        Some(match self {
            Verb::Place => place(orders, &scene.key).await.map(|_| vec![Told::Applied]),
            verb => verb.settle(outbox, scene, true).await,
        })
    }

    async fn look(&self, (_, outbox): &(Orders, Outbox), scene: &Scene) -> Look {
        let (key, hash) = (scene.key.clone(), key_hash(&scene.key));
        let mut rows = Vec::new();
        for (table, sql, of) in [
            ("ledger", "SELECT status, http_status, reason_code FROM idempo_ledger WHERE idempotency_key = ?", &key),
            ("event", "SELECT from_status, to_status, actor FROM ledger_events WHERE key_hash = ? ORDER BY id", &hash),
            (
                "outbox",
                "SELECT lease_token, attempts, locked_by FROM outbox WHERE lane = 'orders' AND active_key = ?",
                &key,
            ),
            (
                "done",
                "SELECT status, lease_token, attempts FROM outbox_done WHERE lane = 'orders' AND active_key = ?",
                &key,
            ),
        ] {
            let found = ask(outbox, sql, vec![of.into()]).await;
            rows.extend(found.into_iter().map(|row| (table, format!("{table} {:?}", row.0))));
        }
        let count = |table: &str| rows.iter().filter(|(of, _)| *of == table).count();
        let open = rows.iter().any(|(table, row)| *table == "ledger" && row.contains("in_progress"));
        let mut broken = Vec::new();
        if count("ledger") != count("outbox") + count("done") {
            broken.push(format!("ledger and outbox disagree: {rows:?}"));
        }
        if open != (count("outbox") == 1) {
            broken.push(format!("an order ended in one of ledger and outbox: {rows:?}"));
        }
        let rows: Vec<String> = rows.into_iter().map(|(_, row)| row).collect();
        Look { parts: vec![Part { rows: rows.clone(), shape: rows }], broken, ..Look::default() }
    }
}

async fn every_transaction(title: &str, url: &str) {
    migrate(url).await;
    let verbs = vec![Verb::Place, Verb::SettleSucceeded, Verb::SettleFailed, Verb::SettleRetry];
    sweep(title, vec![url.to_owned(); 12], verbs, &Selection::from_environment()).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres() {
    let database = scratch::postgres().await;
    every_transaction("the sweep of orders on PostgreSQL", &database.url).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    let database = scratch::mysql().await;
    every_transaction("the sweep of orders on MySQL", &database.url).await;
}
