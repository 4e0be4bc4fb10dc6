//! Beside others, seen from outside: real processes in folders of their own, somebody else's lock, readers that never
//! pause. The last step is the doctor's, and it finds nothing.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proving::kit::{Fleet, Pager, Scratch, Session, scratch, until, until_within};
use proving::receiver::{Answer, Receiver};
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_postrider");
/// Two pools of eight, a listener each, and what is being closed at the moment.
const MOST_SESSIONS: i64 = 2 * (8 + 1 + 2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_row_locked_by_a_stranger_costs_no_other_message_a_second_delivery() {
    a_locked_row(scratch::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_a_row_locked_by_a_stranger_costs_no_other_message_a_second_delivery() {
    a_locked_row(scratch::mysql().await).await;
}

async fn a_locked_row(scratch: Scratch) {
    let slow = Answer { after: Duration::from_millis(400), ..Answer::OK };
    let receiver = Receiver::start(move |_| slow).await.unwrap();
    let config = format!("[lane.a]\ncourier = \"http\"\nurl = \"{}\"\nlock_lease_sec = 3\n", receiver.url());
    let mut fleet = Fleet::new(BINARY, &scratch.url);
    let first = fleet.folder(&config);
    assert_eq!(fleet.run(first, &["migrate", "--json"]).0, 0);
    let mut producer = Session::to(&scratch.url).await;
    let enqueue = match producer {
        Session::Mysql(_) => "CALL postrider_enqueue('a', 'x', NULL, NULL, NULL, NULL, @id, @outcome)",
        _ => "SELECT postrider_enqueue('a', 'x'::bytea)",
    };
    for _ in 0..80 {
        producer.run(enqueue).await.unwrap();
    }
    fleet.start(&config, &["worker", "--lane", "a"]);
    fleet.start(&config, &["worker", "--lane", "a"]);
    until("one is being delivered", async || {
        producer.number("SELECT COUNT(*) FROM outbox WHERE locked_by IS NOT NULL").await > 0
    })
    .await;
    let locked = producer.number("SELECT MIN(id) FROM outbox WHERE locked_by IS NOT NULL").await;
    let mut stranger = Session::holding(&scratch.url, &format!("outbox WHERE id = {locked}")).await;
    // It lets go only when everything else is done, and after more than one lease.
    until("all the others are settled", async || producer.number("SELECT COUNT(*) FROM outbox").await <= 1).await;
    let since = std::time::Instant::now();
    until("two leases have passed", async || since.elapsed() > Duration::from_secs(6)).await;
    stranger.run("COMMIT").await.unwrap();
    until("that one is settled, too", async || producer.number("SELECT COUNT(*) FROM outbox").await == 0).await;
    let twice: Vec<i64> = (receiver.by_message().into_iter())
        .filter(|(id, requests)| *id != locked && requests.len() != 1)
        .map(|(id, _)| id)
        .collect();
    assert_eq!(twice, Vec::<i64>::new(), "all but {locked} are delivered once");
    assert_eq!(receiver.by_message().len(), 80);
    fleet.is_healthy(first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_row_of_every_table_locked_at_once_costs_no_second_delivery() {
    a_row_of_every_table(scratch::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_a_row_of_every_table_locked_at_once_costs_no_second_delivery() {
    a_row_of_every_table(scratch::mysql().await).await;
}

/// How long strangers hold their locks: more than two leases, unless told otherwise.
fn held() -> Duration {
    let secs = std::env::var("POSTRIDER_LOCK_SEC").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(secs.unwrap_or(8))
}

/// Each in a session of its own, while two servers take in and deliver.
async fn a_row_of_every_table(scratch: Scratch) {
    let slow = Answer { after: Duration::from_millis(300), ..Answer::OK };
    let receiver = Receiver::start(move |_| slow).await.unwrap();
    let keys = tempfile::tempdir().unwrap();
    let config = format!(
        "[webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\n[lane.webhooks]\nlock_lease_sec = 3\n\
         [lane.a]\ncourier = \"http\"\nurl = \"{}\"\nlock_lease_sec = 3\n[secrets]\nkey = \"file:{}\"\n",
        receiver.url(),
        keys.path().join("key").display()
    );
    let mut fleet = Fleet::new(BINARY, &scratch.url);
    let servers = [0, 1].map(|_| fleet.start(&config, &["serve", "--listen", "127.0.0.1:0"]));
    let subscription = json!({ "url": receiver.url(), "event_types": ["*"] });
    assert_eq!(fleet.ask(servers[0], "POST", "/v1/subscriptions", Some(subscription)).0, 201);
    let mut looker = Session::to(&scratch.url).await;
    let (stop, accepted, refused) = (AtomicBool::new(false), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let mut locked = 0;
    std::thread::scope(|scope| {
        for (n, server) in servers.into_iter().enumerate() {
            let (fleet, stop, accepted, refused) = (&fleet, &stop, &accepted, &refused);
            scope.spawn(move || {
                for count in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let body = json!({ "server": n, "n": count });
                    let (path, asked) = match count % 2 {
                        0 => ("/v1/outbox/a", body.clone()),
                        _ => ("/v1/events", json!({ "event_type": "a.b", "payload": body })),
                    };
                    let (status, answer) = fleet.ask(server, "POST", path, Some(asked));
                    match status {
                        201 | 202 => accepted.lock().unwrap().push(body.to_string()),
                        _ => refused.lock().unwrap().push(format!("{path}: {status} {answer}")),
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        }
        // Also when something fails here.
        let _stops = Stops(&stop);
        tokio::task::block_in_place(|| {
            tokio::runtime::Handle::current().block_on(async {
                until("both deliver", async || receiver.count() > 60).await;
                locked = while_all_are_locked(&scratch.url, &mut looker).await;
            });
        });
    });
    let open = "SELECT (SELECT COUNT(*) FROM outbox WHERE lane IN ('a', 'webhooks'))
        + (SELECT COUNT(*) FROM webhook_delivery_sagas WHERE status NOT IN ('Completed', 'DeadLettered'))";
    until("all have ended", async || looker.number(open).await == 0).await;
    let bodies: Vec<_> = receiver.log().into_iter().filter(|request| request.id != locked).collect();
    let mut times: HashMap<String, u32> = HashMap::new();
    for request in &bodies {
        let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
        *times.entry(body.to_string()).or_default() += 1;
    }
    let twice: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty(), "delivered twice: {twice:?}, of {}", times.len());
    let accepted = accepted.into_inner().unwrap();
    let never: Vec<_> = accepted.iter().filter(|body| !times.contains_key(*body)).collect();
    assert!(never.len() <= 1, "only the locked message is not counted: {never:?}");
    println!("{} accepted, {} delivered", accepted.len(), bodies.len());
    assert_eq!(refused.into_inner().unwrap(), Vec::<String>::new(), "and nobody is refused");
    fleet.is_healthy(servers[0]);
}

struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A session that holds some row of a table, and nothing beside it.
async fn one_row_of(url: &str, table: &str) -> Session {
    let mut session = Session::to(url).await;
    if matches!(session, Session::Mysql(_)) {
        // Without a key to look for it would lock the gap before the row as well.
        session.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.unwrap();
    }
    session.run("BEGIN").await.unwrap();
    session.run(&format!("SELECT 1 FROM {table} LIMIT 1 FOR UPDATE")).await.unwrap();
    session
}

/// Holds them for a while; answers which message is among them. The servers' sessions do not grow in number meanwhile.
async fn while_all_are_locked(url: &str, looker: &mut Session) -> i64 {
    let mysql = matches!(looker, Session::Mysql(_));
    let mariadb = mysql && looker.number("SELECT version() LIKE '%MariaDB%'").await == 1;
    let (schema, sessions) = match looker {
        Session::Mysql(_) if mariadb => {
            ("DATABASE()", "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()")
        }
        // MySQL's own list fails on statements with bytes in them.
        Session::Mysql(_) => {
            ("DATABASE()", "SELECT COUNT(*) FROM performance_schema.threads WHERE processlist_db = DATABASE()")
        }
        _ => ("current_schema()", "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"),
    };
    let tables = format!(
        "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = {schema} AND table_type = 'BASE TABLE'"
    );
    let leased = "FROM outbox WHERE lane = 'a' AND locked_by IS NOT NULL";
    until("one is leased", async || looker.number(&format!("SELECT COUNT(*) {leased}")).await > 0).await;
    let id = looker.number(&format!("SELECT MAX(id) {leased}")).await;
    let mut strangers = vec![Session::holding(url, &format!("outbox WHERE id = {id}")).await];
    for table in looker.texts(&tables).await.into_iter().filter(|table| table != "outbox") {
        strangers.push(one_row_of(url, &table).await);
    }
    let others = strangers.len() as i64 + 1;
    let (begun, mut most) = (std::time::Instant::now(), 0);
    until_within(held() * 2, "they have been held", async || {
        most = most.max(looker.number(sessions).await - others);
        begun.elapsed() > held()
    })
    .await;
    println!("{} rows held for {:?}; at most {most} sessions of ours", strangers.len(), held());
    assert!(most <= MOST_SESSIONS, "{most} sessions of two servers");
    for mut stranger in strangers {
        stranger.run("COMMIT").await.unwrap();
    }
    id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_key_in_an_open_transaction_keeps_no_other_out() {
    a_held_key(scratch::postgres().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_a_key_in_an_open_transaction_keeps_no_other_out() {
    a_held_key(scratch::mysql().await).await;
}

/// Several clients post the key that an application's own transaction has and keeps; everybody else goes on.
async fn a_held_key(scratch: Scratch) {
    let config = "[lane.a]\ncourier = \"noop\"\n[lane.b]\ncourier = \"noop\"\n";
    let mut fleet = Fleet::new(BINARY, &scratch.url);
    let server = fleet.start(config, &["serve", "--listen", "127.0.0.1:0"]);
    let address = fleet.address(server);
    let mut application = Session::to(&scratch.url).await;
    application.run("BEGIN").await.unwrap();
    let enqueue = match application {
        Session::Mysql(_) => "CALL postrider_enqueue('a', 'x', 'held', NULL, NULL, NULL, @id, @outcome)",
        _ => "SELECT postrider_enqueue('a', 'x'::bytea, key => 'held')",
    };
    application.run(enqueue).await.unwrap();
    let keyed = |key: &str| {
        let (address, key) = (address.clone(), key.to_owned());
        std::thread::spawn(move || {
            let messages = json!({ "payload": "x" });
            let headers = [("Idempotency-Key", key.as_str())];
            crate::api::exchange(&address, "POST", "/v1/outbox/a", &headers, messages.to_string().as_bytes())
        })
    };
    let waiting: Vec<_> = (0..6).map(|_| keyed("held")).collect();
    // As long as none of them has given up, everybody else is taken in, with other keys, too.
    let mut others = 0;
    while !waiting.iter().any(|client| client.is_finished()) {
        assert_eq!(fleet.ask(server, "POST", "/v1/outbox/b", Some(json!({ "n": others }))).0, 201);
        assert_eq!(keyed(&format!("other {others}")).join().unwrap().status, 201);
        others += 1;
    }
    for client in waiting {
        let answer = client.join().unwrap();
        answer.refused(503, "LOCKED");
    }
    assert!(others >= 10, "only {others} were taken in meanwhile");
    assert_eq!(fleet.ask(server, "GET", "/readyz", None).0, 200);
    // Who waits when the transaction ends is told what came of it.
    let waiting = keyed("held");
    application.run("COMMIT").await.unwrap();
    waiting.join().unwrap().refused(409, "DIFFERS");
    fleet.is_healthy(server);
}

/// What a delivery reads neither waits behind what people page through, nor sees what was there before it was asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_never_pause_cost_no_webhook() {
    let scratch = scratch::sqlite();
    let receiver = Receiver::start(|_| Answer::OK).await.unwrap();
    let mut fleet = Fleet::new(BINARY, &scratch.url);
    let config = "[webhooks]\nallow_http = true\nallow_cidrs = [\"127.0.0.0/8\"]\n[lane.parked]\ncourier = \"noop\"\n";
    let server = fleet.start(config, &["serve", "--listen", "127.0.0.1:0"]);
    assert_eq!(fleet.ask(server, "POST", "/v1/lanes/parked/pause", None).0, 200);
    let messages: Vec<_> = (0..1000).map(|n| json!({ "payload": n })).collect();
    for _ in 0..30 {
        let batch = Some(json!({ "messages": messages }));
        assert_eq!(fleet.ask(server, "POST", "/v1/outbox/parked/batch", batch).0, 200);
    }
    let subscription = json!({ "url": receiver.url(), "event_types": ["*"] });
    let (status, made) = fleet.ask(server, "POST", "/v1/subscriptions", Some(subscription));
    assert_eq!(status, 201, "{made}");
    let address = fleet.address(server);
    let readers: Vec<Pager> = (0..6).map(|_| Pager::start(&address, "/v1/outbox?lane=parked&limit=500")).collect();
    until("all of them read", async || readers.iter().all(|reader| reader.pages() > 2)).await;
    for n in 0..150 {
        let event = json!({ "event_type": "a.b", "payload": { "n": n } });
        let (status, published) = fleet.ask(server, "POST", "/v1/events", Some(event));
        assert_eq!(status, 202, "{published}");
        let seen = fleet.ask(server, "GET", &format!("/v1/events/{}", published["event_id"]), None);
        assert_eq!(seen.0, 200, "an event is there right after its 202: {}", seen.1);
    }
    until("all are delivered", async || receiver.count() >= 150).await;
    drop(readers);
    assert_eq!(fleet.ask(server, "GET", "/v1/dead-letters", None).1["items"], json!([]));
    let bodies: std::collections::HashSet<Vec<u8>> = receiver.log().into_iter().map(|request| request.body).collect();
    assert_eq!((receiver.count(), bodies.len()), (150, 150), "each of them once");
    fleet.is_healthy(server);
}

/// By command and over HTTP: told with what to do, repaired when asked, then nothing is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_tells_what_is_wrong_and_repairs_what_it_can() {
    let scratch = scratch::sqlite();
    let mut fleet = Fleet::new(BINARY, &scratch.url);
    let server = fleet.start("[doctor]\nevery = \"0\"\n", &["serve", "--listen", "127.0.0.1:0"]);
    let round = |n| fleet.ask(n, "GET", "/v1/doctor", None).1;
    assert_eq!(round(server)["ok"], json!(null), "nobody has asked yet");
    assert_eq!(fleet.run(server, &["doctor", "--json"]).1["findings"], json!([]));
    let mut stranger = Session::to(&scratch.url).await;
    let alone = "INSERT INTO outbox_keys (lane, key, outbox_id, digest, expires_at) VALUES ('log', 'k', 0, x'00', 9000000000000000)";
    stranger.run(alone).await.unwrap();
    let (code, report) = fleet.run(server, &["doctor", "--json"]);
    assert_eq!((code, &report["ok"]), (1, &json!(false)), "{report}");
    let finding = &report["findings"][0];
    assert_eq!((&finding["check"], &finding["part"]), (&json!("KEY_WITHOUT_MESSAGE"), &json!("outbox")), "{report}");
    assert!(finding["advice"].as_str().unwrap().contains("--repair"), "{report}");
    assert_eq!(fleet.ask(server, "POST", "/v1/doctor", Some(json!({ "repair": true }))).0, 202);
    until("the round is over", async || round(server)["ok"] == true).await;
    assert_eq!(round(server)["findings"][0]["repaired"], true);
    assert!(round(server)["age_seconds"].as_f64().unwrap() < 60.0);
    assert_eq!(stranger.number("SELECT COUNT(*) FROM outbox_keys").await, 0);
    let findings =
        || fleet.text(server, "/metrics").lines().find_map(|l| l.strip_prefix("doctor_findings ").map(str::to_owned));
    assert_eq!(findings().as_deref(), Some("0"));
    stranger.run(alone).await.unwrap();
    assert_eq!(fleet.ask(server, "POST", "/v1/doctor", Some(json!({}))).0, 202);
    until("it is found again", async || round(server)["ok"] == false).await;
    assert_eq!(findings().as_deref(), Some("1"), "as a number, too");
    stranger.run("DELETE FROM outbox_keys").await.unwrap();
    fleet.is_healthy(server);
    assert_eq!(fleet.ask(server, "POST", "/v1/doctor", Some(json!({ "repair": 1 }))).0, 400);
}
