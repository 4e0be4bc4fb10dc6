//! Traces, alerts and gauges of a running server, as a collector, a pager and Prometheus see them.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::Value;

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn attribute(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|a| a.key == key).and_then(|a| a.value.clone()).and_then(|v| v.value);
    format!("{found:?}")
}

#[test]
fn a_trace_goes_from_the_enqueuer_through_us_to_the_destination() {
    let destination = Receiver::start(|request| Some(if request.body.contains("refuse") { 400 } else { 200 }));
    let collector = Receiver::start(|_| Some(200));
    let home = Home::sqlite();
    home.write(
        "postrider.toml",
        &format!(
            "[lane.work]\ncourier = \"http\"\nurl = \"{}\"\n[telemetry]\notlp_endpoint = \"{}\"\n",
            destination.url,
            collector.url.trim_end_matches("/in")
        ),
    );
    let server = Server::start(&home, &[]);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let parent = format!("00-{trace}-b7ad6b7169203331-01");
    let headers = [("traceparent", parent.as_str()), ("Idempotency-Key", "canary-key")];
    server.post("/v1/outbox/work", &headers, "canary-payload").answered(201);
    server.post("/v1/outbox/work", &[("traceparent", &parent)], "refuse").answered(201);
    server.post("/v1/outbox/work", &[], "no trace").answered(201);
    wait_until("all three arrived", || destination.requests().len() == 3);
    wait_until("and ended", || server.get("/v1/outbox?status=pending").json()["items"] == serde_json::json!([]));
    wait_until("and ended", || server.get("/v1/outbox?status=leased").json()["items"] == serde_json::json!([]));
    assert_eq!(server.stop().0, 0, "what is left is sent at the end");

    let requests = collector.requests();
    assert!(!requests.is_empty());
    assert!(requests.iter().all(|r| !r.body.contains("canary")), "a canary is in a trace");
    let exported = requests.iter().map(|r| ExportTraceServiceRequest::decode(&*r.bytes).unwrap());
    let spans: Vec<Span> =
        exported.flat_map(|e| e.resource_spans).flat_map(|r| r.scope_spans).flat_map(|s| s.spans).collect();
    assert_eq!(spans.len(), 6, "two of each message");
    let of_trace =
        |name: &str| spans.iter().filter(|s| s.name == name && hex(&s.trace_id) == trace).collect::<Vec<_>>();
    let (processed, sent) = (of_trace("outbox.process"), of_trace("broker.send"));
    assert_eq!((processed.len(), sent.len()), (2, 2), "the trace of the enqueuer goes on");
    for process in &processed {
        assert_eq!(hex(&process.parent_span_id), "b7ad6b7169203331");
        let send = sent.iter().find(|send| send.parent_span_id == process.span_id).expect("its child");
        assert!(attribute(send, "adapter").contains("http"), "{send:?}");
        assert!(process.start_time_unix_nano <= send.start_time_unix_nano);
        assert!(process.end_time_unix_nano >= send.end_time_unix_nano, "until the outcome is recorded");
        let told = format!("00-{trace}-{}-01", hex(&send.span_id));
        assert!(
            destination.requests().iter().any(|r| r.header("traceparent") == told),
            "the destination goes on from it"
        );
    }
    let outcomes: Vec<String> = processed.iter().map(|p| attribute(p, "outcome")).collect();
    assert!(outcomes.iter().any(|o| o.contains("outbox_flush_success")), "{outcomes:?}");
    assert!(outcomes.iter().any(|o| o.contains("outbox_flush_dead")), "{outcomes:?}");
}

#[test]
fn a_dead_message_is_told_though_server_and_pager_are_down_for_a_while() {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        let status = Arc::new(AtomicU16::new(503));
        let answer = status.clone();
        let pager = Receiver::start(move |_| Some(answer.load(Ordering::SeqCst)));
        let refuses = Receiver::start(|_| Some(400));
        let home = Home::on(database);
        let config = format!(
            "[lane.work]\ncourier = \"http\"\nurl = \"{}\"\n[alerts]\nurl = \"env:PAGER\"\nheaders = {{ Authorization = \"env:SECRET\" }}\n",
            refuses.url
        );
        home.write("postrider.toml", &config);
        let environment = [("PAGER", pager.url.as_str()), ("SECRET", "Bearer s")];
        let server = Server::start_with(&home, &[], &environment);
        // The first look notes where it begins.
        wait_until("it has looked", || {
            server.get("/metrics").status == 200 && {
                server.post("/v1/outbox/work", &[], "x").answered(201);
                std::thread::sleep(std::time::Duration::from_millis(500));
                !pager.requests().is_empty()
            }
        });
        drop(server); // killed
        status.store(200, Ordering::SeqCst);
        let before = pager.requests().len();
        let server = Server::start_with(&home, &[], &environment);
        wait_until("the alert arrives", || pager.requests().len() > before);
        let told = pager.requests().pop().unwrap();
        assert_eq!(told.header("authorization"), "Bearer s");
        let alert: Value = serde_json::from_str(&told.body).unwrap();
        assert_eq!((&alert["kind"], &alert["subject"]), (&"dead_messages".into(), &"work".into()), "{alert}");
        server.post("/v1/outbox/work", &[], "one more").answered(201);
        let alerts = |status: &str| {
            let page = server.get(&format!("/v1/outbox?lane=alerts&status={status}")).json();
            page["items"].as_array().unwrap().len()
        };
        wait_until("it is recorded", || alerts("sent") == 1);
        assert_eq!((alerts("pending"), alerts("leased")), (0, 0), "one trouble is one alert");
    }
}

#[test]
fn a_trouble_that_is_over_is_no_news_after_the_pager_was_down() {
    let (down, accepted) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
    let (is_down, took) = (down.clone(), accepted.clone());
    let pager = Receiver::start(move |request| {
        if is_down.load(Ordering::SeqCst) {
            return Some(503);
        }
        let alert: Value = serde_json::from_str(&request.body).unwrap();
        took.lock().unwrap().push(alert["state"].as_str().unwrap().to_owned());
        Some(200)
    });
    let slow = Arc::new(AtomicBool::new(true));
    let is_slow = slow.clone();
    let destination = Receiver::start(move |_| {
        while is_slow.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        Some(200)
    });
    let home = Home::sqlite();
    let config = format!(
        "[lane.work]\ncourier = \"http\"\nurl = \"{}\"\ntimeout_ms = 600000\nconcurrency = 1\nbatch = 1\n[alerts]\nurl = \"{}\"\nmax_age = \"1s\"\n",
        destination.url, pager.url
    );
    home.write("postrider.toml", &config);
    let server = Server::start(&home, &[]);
    for _ in 0..20 {
        server.post("/v1/outbox/work", &[], "x").answered(201);
    }
    let tried = |state: &str| {
        let state = format!("\"state\":\"{state}\"");
        pager.requests().iter().any(|request| request.body.contains("lane_too_old") && request.body.contains(&state))
    };
    wait_until("the pager was to hear of it", || tried("raised"));
    slow.store(false, Ordering::SeqCst);
    wait_until("and that it is over", || tried("resolved"));
    down.store(false, Ordering::SeqCst);
    wait_until("all alerts have ended", || home.number("SELECT COUNT(*) FROM outbox WHERE lane = 'alerts'") == 0);
    assert_eq!(*accepted.lock().unwrap(), ["resolved"], "what was over was not told as news");
}

#[test]
fn a_collector_that_hangs_does_not_hold_up_a_stop() {
    let collector = Receiver::start(|_| None);
    let home = Home::sqlite();
    let endpoint = collector.url.trim_end_matches("/in").to_owned();
    home.write(
        "postrider.toml",
        &format!("[lane.work]\ncourier = \"noop\"\n[telemetry]\notlp_endpoint = \"{endpoint}\"\n"),
    );
    let server = Server::start(&home, &[]);
    server.post("/v1/outbox/work", &[], "x").answered(201);
    wait_until("it is sent", || home.stats("work")["sent"] == 1);
    let begun = std::time::Instant::now();
    assert_eq!(server.stop().0, 0);
    assert!(begun.elapsed() < std::time::Duration::from_secs(4), "it took {:?}", begun.elapsed());
}

#[test]
fn gauges_tell_how_the_store_is_doing() {
    let expected = [
        (Database::sqlite(), vec!["outbox_sqlite_wal_bytes "]),
        (
            Database::postgres(),
            vec![
                "outbox_postgres_dead_tuples{table=\"outbox\"} ",
                "outbox_postgres_oldest_xmin_age ",
                "outbox_pool_connections{state=\"in_use\"} ",
            ],
        ),
        (Database::mysql(), vec!["outbox_pool_connections{state=\"idle\"} "]),
    ];
    for (database, names) in expected {
        let home = Home::on(database);
        home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\n");
        let server = Server::start(&home, &[]);
        server.post("/v1/outbox/work", &[("Idempotency-Key", "k")], "x").answered(201);
        server.post("/v1/outbox/work", &[("Idempotency-Key", "k")], "y").refused(409, "DIFFERS");
        let page = server.get("/metrics").answered(200).body;
        assert!(page.contains("idempotency_conflicts_total{lane=\"work\"} 1"), "{page}");
        for name in names {
            assert!(page.lines().any(|line| line.starts_with(name)), "{name} is not there:\n{page}");
        }
        if page.contains("outbox_sqlite_wal_bytes 0") {
            assert!(home.database.url().is_some(), "there is a log:\n{page}");
        }
    }
}
