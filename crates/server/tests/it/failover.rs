//! A primary dies while its standby lags behind, and the standby is promoted: row 18.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use postrider::{NewMessage, Outbox};
use proving::kit::Session;
use proving::receiver::{Answer, Receiver};
use proving::servers::{Pooler, Postgres};
use tokio::runtime::Runtime;

use crate::fleet::{ONE_FLEET, lanes};
use crate::home::{Home, wait_long_until, wait_until};
use crate::scratch::Database;

/// A message's body, and the id it was accepted under.
type Accepted = BTreeMap<String, i64>;

async fn enqueue(outbox: &Outbox, bodies: impl Iterator<Item = String>) -> Accepted {
    let mut accepted = Accepted::new();
    for body in bodies {
        let message = NewMessage::new("fleet", body.clone().into_bytes()).key(&body);
        let entries = outbox.enqueue(vec![message]).await.unwrap();
        accepted.insert(body, entries[0].id);
    }
    accepted
}

fn bodies(name: &'static str, count: usize) -> impl Iterator<Item = String> {
    (0..count).map(move |n| format!("{name} {n}"))
}

#[test]
fn row_18_a_lagging_standby_is_promoted() {
    a_lagging_standby_is_promoted(None);
}

/// A pooler keeps its clients while the server behind it becomes another.
#[test]
#[ignore = "needs a PgBouncer that knows prepared statements: make databases NAMES=pgbouncer brings one"]
fn row_18_a_lagging_standby_is_promoted_behind_a_pooler() {
    a_lagging_standby_is_promoted(Some(|server| Pooler::before(server.port(), "postrider").unwrap()));
}

fn a_lagging_standby_is_promoted(pooler: Option<fn(&Postgres) -> Pooler>) {
    let _alone = ONE_FLEET.lock().unwrap_or_else(|e| e.into_inner());
    let runtime = Runtime::new().unwrap();
    let takes = Answer { status: 200, after: Duration::from_millis(30) };
    let receiver = runtime.block_on(Receiver::start(move |_| takes)).unwrap();
    let mut primary = Postgres::start().unwrap();
    let mut standby = primary.standby().unwrap();
    let direct = primary.url();
    let pooler = pooler.map(|before| before(&primary));
    let port = pooler.as_ref().map_or(primary.port(), Pooler::port);
    let url = direct.replace(&primary.port().to_string(), &port.to_string());
    let home = Home::on(Database::sqlite());
    let config = format!(
        "database = \"{url}\"\n[lane.fleet]\ncourier = \"http\"\nurl = \"{}\"\nconcurrency = 4\nbatch = 8\n\
         timeout_ms = 20000\nlock_lease_sec = 3\npoll_interval_sec = 0.05\n",
        receiver.url()
    );
    home.write("postrider.toml", &config).run(&["migrate"]).done();
    let server = crate::api::Server::start(&home, &["--no-workers"]);
    let logs = ["one.log", "two.log"];
    let workers = logs.map(|log| home.start_logging(&["worker", "--lane", "fleet"], log));

    let outbox = runtime.block_on(Outbox::open(&url, lanes())).unwrap();
    let kept = runtime.block_on(enqueue(&outbox, bodies("kept", 200)));
    wait_until("some have arrived", || receiver.count() > 50);
    // The standby has all of these, and hears of nothing that comes after.
    runtime.block_on(async {
        let mut here = Session::to(&direct).await;
        let mut there = Session::to(&standby.url()).await;
        let upto = here.texts("SELECT pg_current_wal_lsn()::text").await.remove(0);
        let has = format!("SELECT (pg_last_wal_replay_lsn() >= '{upto}')::text");
        proving::kit::until("the standby has it", async || there.texts(&has).await == ["true"]).await;
    });
    standby.stop_immediate();
    let lost = runtime.block_on(enqueue(&outbox, bodies("lost", 100)));
    wait_until("some of the lag were delivered", || count(&receiver, "lost") > 20);
    standby.take_the_place_of(&mut primary).unwrap();
    runtime.block_on(async {
        Session::to(&direct).await.texts("SELECT pg_promote(TRUE, 60)::text").await;
    });

    // What a worker hears by itself, before anybody enqueues anything.
    wait_until("the server writes again", || {
        server.request("POST", "/v1/outbox/fleet", &[("Idempotency-Key", "ready")], b"after ready").status < 300
    });
    let after = runtime.block_on(enqueue(&outbox, bodies("after", 100)));
    wait_long_until("everything has ended", Duration::from_secs(60), || {
        let stats = home.run(&["outbox", "stats", "--json"]).done().json()["lanes"]["fleet"].clone();
        stats["pending"] == 0 && stats["leased"] == 0
    });

    let book = receiver.log();
    let ended: BTreeMap<i64, String> = runtime.block_on(async {
        let sql = "SELECT concat_ws('|', id, status) FROM outbox_done WHERE lane = 'fleet' ORDER BY id";
        let lines = Session::to(&direct).await.texts(sql).await;
        lines
            .iter()
            .filter_map(|line| line.split_once('|'))
            .map(|(id, s)| (id.parse().unwrap(), s.to_owned()))
            .collect()
    });
    for (body, id) in kept.iter().chain(&after) {
        assert_eq!(ended.get(id).map(String::as_str), Some("sent"), "{body} was accepted as {id}");
        assert!(book.iter().any(|request| request.id == *id && request.body == body.as_bytes()), "{body} arrived");
    }
    let gone = lost.values().filter(|id| !ended.contains_key(id)).count();
    println!("{gone} of {} were accepted within the lag and are lost with it", lost.len());
    assert!(gone > 0, "the standby was behind");
    // A receiver that remembers what it has seen is never fooled: not by a token, and not by an id that comes again.
    let tokens: BTreeSet<(i64, i64)> = book.iter().map(|request| (request.id, request.token)).collect();
    assert_eq!(tokens.len(), book.len(), "no token twice");
    let mut bodies_by_id: BTreeMap<i64, BTreeSet<&[u8]>> = BTreeMap::new();
    for request in &book {
        bodies_by_id.entry(request.id).or_default().insert(&request.body);
    }
    assert!(bodies_by_id.values().all(|bodies| bodies.len() == 1), "no id for two messages");
    drop(workers);
    let (_, log) = server.stop();
    let told = logs.map(|log| std::fs::read_to_string(home.path(log)).unwrap()).join("") + &log;
    assert_eq!(told.matches("PostgreSQL was promoted or restored").count(), 1, "it is told, once: {told}");
    home.is_healthy();
}

fn count(receiver: &Receiver, name: &str) -> usize {
    receiver.log().iter().filter(|request| request.body.starts_with(name.as_bytes())).count()
}
