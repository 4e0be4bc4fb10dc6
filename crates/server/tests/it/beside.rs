//! Beside others, seen from outside: real processes in folders of their own, somebody else's lock, readers that never
//! pause. The last step is the doctor's, and it finds nothing.

use std::time::Duration;

use proving::kit::{Fleet, Pager, Scratch, Session, scratch, until};
use proving::receiver::{Answer, Receiver};
use serde_json::json;

const BINARY: &str = env!("CARGO_BIN_EXE_postrider");

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
