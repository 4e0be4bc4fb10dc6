//! The sweep of `proving` over what memories add to the kernel: the deferred store, the copy's part in a settle, and what a
//! project allows. Every message between us and the server, with every kind of fault; copy and message must never disagree.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::error::Result;
use postrider::lease::Lease;
use postrider::message::{hex, sha256};
use postrider::outcome::{Certainty, Settled, Settlement, Verdict};
use postrider::store::{Claim, From};
use postrider::{Lanes, Options, Outbox, stores};
use postrider_memories::note::Governance;
use postrider_memories::{LANE, MIGRATIONS, Memories, NewMemory, Settings, Settling, lane_rules, upstream};
use proving::kit::scratch;
use proving::sweep::{Look, Part, Selection, Subject, Told, ask, sweep};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verb {
    Store,
    SettleStored,
    SettleDead,
    SettleRetry,
    Govern,
}

struct Scene {
    project: String,
    lease: Option<Lease>,
}

const WORKER: &str = "w";

impl Scene {
    fn space(&self) -> String {
        format!("team:{}", self.project)
    }

    fn text(&self) -> String {
        format!("what {} remembers", self.project)
    }

    async fn store(&self, memories: &Memories) -> Vec<Told> {
        let memory = NewMemory {
            payload_md: self.text(),
            target_space: Some(self.space()),
            correlation_id: "c".to_owned(),
            skip_openmemory: true,
            ..NewMemory::default()
        };
        let stored = memories.store(memory).await;
        // Of what went wrong a caller is told that it may be there all the same.
        vec![if stored.error.is_none() && stored.outbox_id.is_some() { Told::Applied } else { Told::Unknown }]
    }
}

impl Verb {
    fn verdict(self) -> Verdict {
        let (code, error, certainty) = ("HTTP_400".to_owned(), "no use".to_owned(), Certainty::Unchanged);
        match self {
            Verb::SettleDead => Verdict::Dead { code, error, certainty, counted: true },
            Verb::SettleRetry => Verdict::Retry { delay: Duration::from_secs(600), code, error, certainty },
            _ => Verdict::Sent { result_ref: Some("mem-1".to_owned()), dedup_hit: false },
        }
    }

    async fn settle(self, outbox: &Outbox, scene: &Scene, again: bool) -> Result<Vec<Told>> {
        let entry = Settlement { again, ..Settlement::new(scene.lease.expect("a lease"), self.verdict()) };
        let mut answers = outbox.store().settle(LANE, WORKER, std::slice::from_ref(&entry)).await?;
        // Whoever was cut off keeps it locked for a while: asked for again, as a worker does.
        for _ in 0..50 {
            if answers != [Settled::Locked] || !again {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
            answers = outbox.store().settle(LANE, WORKER, std::slice::from_ref(&entry)).await?;
        }
        Ok(vec![if answers == [Settled::Applied] { Told::Applied } else { Told::NotApplied }])
    }

    async fn does(self, memories: &Memories, outbox: &Outbox, scene: &Scene, again: bool) -> Result<Vec<Told>> {
        match self {
            Verb::Store => Ok(scene.store(memories).await),
            Verb::Govern => {
                let open = Governance::open(&scene.project);
                let rules = Governance { team_write_enabled: false, max_length: Some(7), ..open };
                memories.govern(rules, "me").await.map(|()| vec![Told::Applied])
            }
            verb => verb.settle(outbox, scene, again).await,
        }
    }
}

fn settings() -> Settings {
    Settings {
        upstream: upstream::Settings {
            resolver: None,
            url: None,
            key: Arc::new(|| Ok(None)),
            timeout: Duration::from_millis(500),
        },
        default_space: "team:a".to_owned(),
        max_bytes: 1 << 20,
        breaker_failures: 5,
        probe: Duration::from_secs(1),
        under_way: Duration::from_secs(3),
        recognise: true,
    }
}

async fn open_at(url: &str, options: Options) -> (Memories, Outbox) {
    let settling = Settling::default();
    let lanes = Lanes::new().with(LANE, lane_rules(&settling));
    let options = Options { migrations: MIGRATIONS.to_vec(), ..options };
    let outbox = Outbox::new(stores::open(url, lanes, options).await.expect("open"));
    (Memories::new(outbox.clone(), settings(), &settling, None).expect("memories"), outbox)
}

#[async_trait]
impl Subject for Verb {
    type Handle = (Memories, Outbox);
    type Scene = Scene;

    fn name(&self) -> String {
        format!("{self:?}")
    }

    async fn open(&self, url: &str, options: Options, _: &[String]) -> (Memories, Outbox) {
        open_at(url, options).await
    }

    fn outbox<'a>(&self, handle: &'a (Memories, Outbox)) -> &'a Outbox {
        &handle.1
    }

    async fn prepare(&self, (memories, outbox): &(Memories, Outbox), place: &str) -> Scene {
        let mut scene = Scene { project: place.to_owned(), lease: None };
        if matches!(self, Verb::Store | Verb::Govern) {
            return scene;
        }
        assert_eq!(scene.store(memories).await, [Told::Applied]);
        let sql = "SELECT outbox_id FROM memory_writes WHERE target_space = ?";
        let outbox_id = ask(outbox, sql, vec![scene.space().into()]).await[0].int(0).expect("an id");
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

    async fn run(&self, (memories, outbox): &(Memories, Outbox), scene: &Scene) -> Result<Vec<Told>> {
        self.does(memories, outbox, scene, false).await
    }

    async fn again(&self, (memories, outbox): &(Memories, Outbox), scene: &Scene) -> Option<Result<Vec<Told>>> {
        Some(self.does(memories, outbox, scene, true).await)
    }

    async fn look(&self, (_, outbox): &(Memories, Outbox), scene: &Scene) -> Look {
        let (space, sha) = (scene.space(), hex(&sha256(scene.text().as_bytes())));
        let mut rows = Vec::new();
        for (table, sql, of) in [
            ("copy", "SELECT state, memory_id, refusal FROM memory_writes WHERE target_space = ?", &space),
            (
                "live",
                "SELECT lease_token, attempts, locked_by FROM outbox WHERE lane = 'memory' AND target = ?",
                &space,
            ),
            (
                "done",
                "SELECT status, attempts, result_ref FROM outbox_done WHERE lane = 'memory' AND target = ?",
                &space,
            ),
            ("audit", "SELECT action, status, reason FROM write_audit WHERE payload_sha = ? ORDER BY audit_id", &sha),
            (
                "rules",
                "SELECT team_write_enabled, max_length, updated_by FROM governance_settings WHERE project_key = ?",
                &scene.project,
            ),
        ] {
            let found = ask(outbox, sql, vec![of.into()]).await;
            rows.extend(found.into_iter().map(|row| (table, format!("{table} {:?}", row.0))));
        }
        let has = |table: &str, word: &str| rows.iter().any(|(of, row)| *of == table && row.contains(word));
        let mut broken = Vec::new();
        for (copy, message, word) in [("queued", "live", ""), ("stored", "done", "sent"), ("dead", "done", "dead")] {
            if has("copy", copy) != has(message, word) {
                broken.push(format!("a copy that is {copy}, and its message, disagree: {rows:?}"));
            }
        }
        if has("copy", "") && has("audit", "pending") {
            broken.push(format!("what has been audited as pending has ended: {rows:?}"));
        }
        // A store that is asked for again is audited again.
        let told = rows.into_iter().filter(|(table, _)| *self != Verb::Store || *table != "audit");
        let rows: Vec<String> = told.map(|(_, row)| row).collect();
        Look {
            parts: vec![Part { rows: rows.clone(), shape: shapes(&rows, &scene.project) }],
            broken,
            ..Look::default()
        }
    }
}

/// The same without the name of the case.
fn shapes(rows: &[String], project: &str) -> Vec<String> {
    rows.iter().map(|row| row.replace(project, "P")).collect()
}

async fn every_transaction(title: &str, url: &str) {
    open_at(url, Options::default()).await.1.migrate().await.expect("migrate");
    let verbs = vec![Verb::Store, Verb::SettleStored, Verb::SettleDead, Verb::SettleRetry, Verb::Govern];
    sweep(title, vec![url.to_owned(); 12], verbs, &Selection::from_environment()).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres() {
    let database = scratch::postgres().await;
    every_transaction("the sweep of memories on PostgreSQL", &database.url).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    let database = scratch::mysql().await;
    every_transaction("the sweep of memories on MySQL", &database.url).await;
}
