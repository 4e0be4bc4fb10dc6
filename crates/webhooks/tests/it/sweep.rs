//! The sweep of `proving` over what webhooks add to the kernel: an event with its sagas and jobs, the worker's part in a
//! settle, and the orchestrator applying a result. Every message between us and the server, with every kind of fault.

use std::time::Duration;

use async_trait::async_trait;
use postrider::error::{Effect, Result};
use postrider::lease::Lease;
use postrider::outcome::{Certainty, Settled, Settlement, Verdict};
use postrider::store::{Claim, From};
use postrider::{Options, Outbox};
use postrider_webhooks::{LANE, NewEvent, NewSubscription, Webhooks};
use proving::kit::scratch::{self, Scratch};
use proving::sweep::{Look, Part, Selection, Subject, Told, ask, sweep};

use crate::harness::{open, open_with_options, settings};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Publish,
    SettleSent,
    SettleFailed,
    ApplyResult,
}

struct Scene {
    event_type: String,
    lease: Option<Lease>,
}

type Handle = (Webhooks, Outbox);

const WORKER: &str = "w";

impl Scene {
    async fn publish(&self, webhooks: &Webhooks) -> Result<Vec<i64>> {
        let event = NewEvent::new(&*self.event_type, "{}").external_id(&*self.event_type);
        Ok(webhooks.publish(vec![event]).await?.remove(0).saga_ids)
    }

    async fn settle(&self, outbox: &Outbox, verdict: Verdict, again: bool) -> Result<Vec<Told>> {
        let entry = Settlement { again, ..Settlement::new(self.lease.expect("a lease"), verdict) };
        let answers = outbox.store().settle(LANE, WORKER, &[entry]).await?;
        Ok(vec![match answers[0] {
            Settled::Applied => Told::Applied,
            // The lane keeps nothing of what has ended.
            Settled::Unknown => Told::Unknown,
            _ => Told::NotApplied,
        }])
    }

    /// The first job of its only saga, claimed.
    async fn claim(&mut self, (webhooks, outbox): &Handle) {
        let sagas = self.publish(webhooks).await.expect("an event");
        let sql = "SELECT id FROM outbox WHERE lane = 'webhooks' AND active_key = ?";
        let jobs = ask(outbox, sql, vec![format!("saga:{}", sagas[0]).into()]).await;
        let claim = Claim {
            lane: LANE.to_owned(),
            shard: 0,
            limit: 1,
            lease: Duration::from_secs(300),
            owner: WORKER.to_owned(),
            max_crashes: 5,
            send_begun: false,
            from: From::Ids(vec![jobs[0].int(0).expect("an id")]),
        };
        let claimed = outbox.store().claim(&claim).await.expect("claim").messages;
        self.lease = Some(claimed[0].lease());
    }
}

impl Verb {
    fn verdict(self) -> Verdict {
        if self != Verb::SettleFailed {
            return Verdict::sent();
        }
        let (code, error, certainty) = ("HTTP_500".to_owned(), "broken".to_owned(), Certainty::Unchanged);
        Verdict::Dead { code, error, certainty, counted: true }
    }
}

#[async_trait]
impl Subject for Verb {
    type Handle = Handle;
    type Scene = Scene;

    fn name(&self) -> String {
        format!("{self:?}")
    }

    async fn open(&self, url: &str, options: Options, _: &[String]) -> Handle {
        open_with_options(url, options).await
    }

    fn outbox<'a>(&self, handle: &'a Handle) -> &'a Outbox {
        &handle.1
    }

    async fn prepare(&self, near: &Handle, place: &str) -> Scene {
        let mut scene = Scene { event_type: place.replace('-', ".c"), lease: None };
        let (url, event_types) = ("http://127.0.0.1:9/".to_owned(), vec![scene.event_type.clone()]);
        let subscription = NewSubscription { url, event_types, ..NewSubscription::default() };
        near.0.subscribe(subscription).await.expect("a subscription");
        match self {
            Verb::Publish => {}
            Verb::SettleSent | Verb::SettleFailed => scene.claim(near).await,
            Verb::ApplyResult => {
                // What earlier scenes left to be done is done.
                near.0.pass().await.expect("a pass");
                scene.claim(near).await;
                scene.settle(&near.1, Verdict::sent(), false).await.expect("a result");
            }
        }
        scene
    }

    async fn run(&self, (webhooks, outbox): &Handle, scene: &Scene) -> Result<Vec<Told>> {
        match self {
            Verb::Publish => scene.publish(webhooks).await.map(|_| vec![Told::Applied]),
            // Several transactions; whoever runs it only ever tries again.
            Verb::ApplyResult => match webhooks.pass().await {
                Err(error) if error.effect == Effect::NotApplied => Ok(vec![Told::Unknown]),
                done => done.map(|_| vec![Told::Applied]),
            },
            verb => scene.settle(outbox, verb.verdict(), false).await,
        }
    }

    async fn again(&self, (webhooks, outbox): &Handle, scene: &Scene) -> Option<Result<Vec<Told>>> {
        Some(match self {
            Verb::Publish => scene.publish(webhooks).await.map(|_| vec![Told::Applied]),
            Verb::ApplyResult => webhooks.pass().await.map(|_| vec![Told::Applied]),
            verb => scene.settle(outbox, verb.verdict(), true).await,
        })
    }

    async fn look(&self, (_, outbox): &Handle, scene: &Scene) -> Look {
        let sagas =
            "SELECT s.id FROM webhook_delivery_sagas s JOIN events e ON e.id = s.event_id WHERE e.event_type = ?";
        let keys = if outbox.store().dialect().name() == "postgres" {
            format!("SELECT 'saga:' || s.id{}", &sagas["SELECT s.id".len()..])
        } else {
            format!("SELECT CONCAT('saga:', s.id){}", &sagas["SELECT s.id".len()..])
        };
        let mut rows = Vec::new();
        for (table, sql) in [
            ("event", "SELECT 1 FROM events WHERE event_type = ?".to_owned()),
            (
                "saga",
                format!(
                    "SELECT status, attempt_count, generation, final_error_code FROM webhook_delivery_sagas WHERE id IN ({sagas})"
                ),
            ),
            (
                "job",
                format!(
                    "SELECT lease_token, attempts, locked_by FROM outbox WHERE lane = 'webhooks' AND active_key IN ({keys})"
                ),
            ),
            ("attempt", format!("SELECT attempt, error_code FROM webhook_attempts WHERE saga_id IN ({sagas})")),
            ("result", format!("SELECT attempt, success, error_code FROM webhook_results WHERE saga_id IN ({sagas})")),
        ] {
            let found = ask(outbox, &sql, vec![(&scene.event_type).into()]).await;
            rows.extend(found.into_iter().map(|row| (table, format!("{table} {:?}", row.0))));
        }
        let count = |table: &str| rows.iter().filter(|(of, _)| *of == table).count();
        let mut broken = Vec::new();
        if count("saga") != count("event") {
            broken.push(format!("an event without its saga, or twice: {rows:?}"));
        }
        let under_way = rows.iter().filter(|(table, row)| *table == "saga" && row.contains("InProgress")).count();
        if under_way != count("job") + count("result") {
            broken.push(format!("a saga under way has one job or one result: {rows:?}"));
        }
        let rows: Vec<String> = rows.into_iter().map(|(_, row)| row).collect();
        Look { parts: vec![Part { rows: rows.clone(), shape: rows }], broken, ..Look::default() }
    }
}

async fn every_transaction(title: &str, databases: &[Scratch]) {
    for database in databases {
        open(&database.url, settings()).await;
    }
    let urls = databases.iter().map(|database| database.url.clone()).collect();
    let verbs = vec![Verb::Publish, Verb::SettleSent, Verb::SettleFailed, Verb::ApplyResult];
    sweep(title, urls, verbs, &Selection::from_environment()).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres() {
    let databases = [scratch::postgres().await, scratch::postgres().await, scratch::postgres().await];
    every_transaction("the sweep of webhooks on PostgreSQL", &databases).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    let databases = [scratch::mysql().await, scratch::mysql().await, scratch::mysql().await];
    every_transaction("the sweep of webhooks on MySQL", &databases).await;
}
