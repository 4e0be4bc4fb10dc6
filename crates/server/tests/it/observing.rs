//! What a worker shows of itself: numbers with their labels and values, log lines with their fields, spans with their round
//! trips; and that the variables of the environment do what they are named for.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::api::{Server, exchange};
use crate::home::{Answer, Home, PATIENCE, wait_until};
use crate::receiver::Receiver;
use crate::scratch::Database;

/// A worker whose log is a file, so that it can be read while it runs.
struct Worker {
    child: std::process::Child,
    log: PathBuf,
}

impl Worker {
    fn start(home: &Home, name: &str, args: &[&str], environment: &[(&str, &str)]) -> Worker {
        let log = home.path(name);
        let mut command = home.command(&[&["worker"], args].concat());
        command.envs(environment.iter().copied()).stderr(File::create(&log).unwrap());
        Worker { child: command.spawn().unwrap(), log }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// Where its metrics are.
    fn metrics(&self) -> String {
        let said = |log: &str| Some(log.split_once("metrics on http://")?.1.split_once("/metrics")?.0.to_owned());
        wait_until("it says where its metrics are", || said(&self.log()).is_some());
        said(&self.log()).unwrap()
    }

    fn stop(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let begun = std::time::Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "it does not stop");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.log()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn scrape(address: &str) -> String {
    exchange(address, "GET", "/metrics", &[], b"").answered(200).body
}

/// The number behind exactly this name and these labels.
fn value(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is not there:\n{page}")).parse().unwrap()
}

fn http_lane(receiver: &Receiver, more: &str) -> String {
    format!("[lane.work]\ncourier = \"http\"\nurl = \"{}\"\n{more}", receiver.url)
}

#[test]
fn a_worker_shows_its_numbers_with_their_labels() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    // The first message is refused twice; the other goes through. Each takes its time.
    let receiver = Receiver::start(move |request| {
        std::thread::sleep(Duration::from_millis(120));
        match request.body.as_str() {
            "twice" if count.fetch_add(1, Ordering::SeqCst) < 2 => Some(503),
            _ => Some(200),
        }
    });
    let home = Home::sqlite();
    home.write("postrider.toml", &http_lane(&receiver, "backoff_sec = [0.05]\npoll_interval_sec = 0.05\n"));
    home.enqueue(&["work", "--payload", "twice", "--json"]);
    home.enqueue(&["work", "--payload", "once", "--json"]);
    let worker = Worker::start(&home, "log", &["--lane", "work", "--metrics", "127.0.0.1:0"], &[]);
    let address = worker.metrics();
    wait_until("both are sent", || home.stats("work")["sent"] == 2);
    wait_until("and counted", || {
        scrape(&address).contains("outbox_processed_total{lane=\"work\",outcome=\"outbox_flush_success\"} 2")
    });
    let page = scrape(&address);
    for (name, expected) in [
        ("outbox_claimed_total{lane=\"work\"}", 4.0),
        ("outbox_processed_total{lane=\"work\",outcome=\"outbox_flush_retry\"}", 2.0),
        ("outbox_retry_total{lane=\"work\",attempt=\"1\"}", 1.0),
        ("outbox_retry_total{lane=\"work\",attempt=\"2\"}", 1.0),
        ("outbox_lock_lease_expired_total{lane=\"work\"}", 0.0),
        ("outbox_latency_ms_count{lane=\"work\",phase=\"send\"}", 4.0),
    ] {
        assert_eq!(value(&page, name), expected, "{name}:\n{page}");
    }
    assert!(!page.contains("attempt=\"3\""), "{page}");
    for phase in ["claim", "send", "commit"] {
        let sum = value(&page, &format!("outbox_latency_ms_sum{{lane=\"work\",phase=\"{phase}\"}}"));
        let count = value(&page, &format!("outbox_latency_ms_count{{lane=\"work\",phase=\"{phase}\"}}"));
        assert!(count >= 3.0 && sum > 0.0 && sum / count < 60_000.0, "{phase}: {sum} in {count}");
        assert!(phase != "send" || sum >= 4.0 * 120.0, "milliseconds: {sum} in {count}");
    }
    assert_eq!(exchange(&address, "GET", "/livez", &[], b"").status, 200);
    exchange(&address, "GET", "/v1/outbox", &[], b"").refused(404, "NOT_FOUND");
    let page_of_others = exchange(&address, "GET", "/metrics", &[("origin", "https://elsewhere.example")], b"");
    page_of_others.refused(403, "FORBIDDEN");
    worker.stop();
    // Beyond this machine it needs a token, like the API.
    home.run(&["worker", "--metrics", "0.0.0.0:0"]).refused(2, &["token create"]);
    let made = home.run(&["token", "create", "--scope", "read", "--json"]).done().json();
    let worker = Worker::start(&home, "log2", &["--metrics", "0.0.0.0:0"], &[]);
    let address = worker.metrics().replace("0.0.0.0", "127.0.0.1");
    exchange(&address, "GET", "/metrics", &[], b"").refused(401, "UNAUTHORIZED");
    let token = format!("Bearer {}", made["token"].as_str().unwrap());
    exchange(&address, "GET", "/metrics", &[("authorization", &token)], b"").answered(200);
    // Not every token: the page is of all lanes and spaces.
    let made = |args: &[&str]| home.run(&[&["token", "create", "--json", "--scope"], args].concat()).done().json();
    let refused = |made: &Value, status: u16, code: &str| {
        let shown = format!("Bearer {}", made["token"].as_str().unwrap());
        exchange(&address, "GET", "/metrics", &[("authorization", &shown)], b"").refused(status, code);
    };
    for args in [&["enqueue"][..], &["read", "--lane", "work"], &["read", "--space", "team:a"]] {
        refused(&made(args), 403, "FORBIDDEN");
    }
    let revoked = made(&["read"]);
    home.run(&["token", "revoke", &revoked["id"].to_string()]).done();
    refused(&revoked, 401, "UNAUTHORIZED");
    let expired = made(&["read"]);
    home.execute(&format!("UPDATE api_tokens SET expires_at = 1 WHERE id = {}", expired["id"]));
    refused(&expired, 401, "UNAUTHORIZED");
    worker.stop();
}

#[test]
fn a_lease_that_ran_out_is_counted_where_it_is_taken_over() {
    let receiver = Receiver::start(|request| (request.header("postrider-lease-token") != "1").then_some(200));
    let home = Home::sqlite();
    home.write(
        "postrider.toml",
        &http_lane(&receiver, "timeout_ms = 600000\nlock_lease_sec = 1\npoll_interval_sec = 0.05\n"),
    );
    let id = home.enqueue(&["work", "--payload", "x", "--json"]);
    let dies = Worker::start(&home, "first", &["--lane", "work"], &[]);
    wait_until("it is being sent", || receiver.requests().len() == 1);
    drop(dies); // killed
    let takes_over = Worker::start(&home, "second", &["--lane", "work", "--metrics", "127.0.0.1:0"], &[]);
    wait_until("it is sent", || home.show(id)["status"] == "sent");
    let address = takes_over.metrics();
    wait_until("and counted", || value(&scrape(&address), "outbox_lock_lease_expired_total{lane=\"work\"}") == 1.0);
    takes_over.stop();
    home.is_healthy();
}

#[test]
fn an_outcome_that_cannot_be_recorded_is_counted_and_logged() {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        let home = Home::on(database);
        home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\npoll_interval_sec = 0.05\naudit = true\n");
        home.run(&["migrate"]).done();
        let (broken, mended) = home.database.refuse("INSERT", "outbox_done");
        home.execute(&broken);
        home.enqueue(&["work", "--payload", "x", "--json"]);
        let worker = Worker::start(&home, "log", &["--lane", "work", "--metrics", "127.0.0.1:0"], &[]);
        let address = worker.metrics();
        let name = "outbox_processed_total{lane=\"work\",outcome=\"outbox_flush_db_error\"}";
        wait_until("the trouble is counted", || scrape(&address).contains(name));
        assert!(value(&scrape(&address), name) >= 1.0);
        home.execute(&mended);
        wait_until("it is recorded", || home.stats("work")["sent"] == 1);
        let audited = "SELECT COUNT(*) FROM write_audit WHERE reason = 'outbox_flush_db_error'";
        assert_eq!(home.number(audited), 1, "the audit has it, too, once the database is back");
        let log = worker.stop();
        assert!(log.lines().any(|line| line.contains("outbox_flush_db_error") && line.contains("WARN")), "{log}");
    }
}

fn order(qty: u32) -> String {
    format!(r#"{{"instrument":"AAPL","side":"BUY","qty":{qty},"price":null,"time_in_force":"IOC","tags":[]}}"#)
}

/// The fields of the lines with this message.
fn lines(log: &str, message: &str) -> Vec<Value> {
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["fields"]["message"] == message).collect()
}

fn sha256(text: &str) -> String {
    postrider::message::hex(&postrider::message::sha256(text.as_bytes()))
}

#[test]
fn every_outcome_of_an_order_is_one_line_with_its_fields() {
    let answers = Arc::new(AtomicUsize::new(0));
    let count = answers.clone();
    let filled = r#"{"status":"ok","order_ref":"b-1","fills":[{"px":10.5,"qty":3,"ts":"2026-01-01T00:00:00Z"}]}"#;
    let broker = Receiver::answering(move |_| {
        std::thread::sleep(Duration::from_millis(100));
        match count.fetch_add(1, Ordering::SeqCst) {
            0 => (500, String::new()),
            1 => (200, filled.to_owned()),
            _ => (400, String::new()),
        }
    });
    let home = Home::sqlite();
    let config = format!(
        "[orders]\nadapter = \"http\"\nurl = \"{}\"\nidempotency = \"key\"\n[lane.orders]\nbackoff_sec = [0.01]\n",
        broker.url
    );
    home.write("postrider.toml", &config);
    home.run(&["migrate"]).done();
    let place =
        |key: &str| home.run(&["orders", "place", "--key", key, "--payload", &order(3), "--json"]).done().json();
    let id = place("canary-key")["outbox_id"].clone();
    let work = || home.run(&["--log", "json", "worker", "--once", "--lane", "orders"]).stderr;
    // In milliseconds, as long as the broker took at least.
    let took = |fields: &Value| fields["latency_ms"].as_f64().is_some_and(|ms| (100.0..60_000.0).contains(&ms));
    let log = work();
    let retried = lines(&log, "will be tried again").remove(0);
    assert_eq!(lines(&log, "will be tried again").len(), 1, "{log}");
    let fields = &retried["fields"];
    assert_eq!(retried["level"], "INFO", "{log}");
    assert_eq!((&fields["outbox_id"], &fields["lane"], &fields["adapter"]), (&id, &json!("orders"), &json!("http")));
    assert_eq!((&fields["status"], &fields["attempts"]), (&json!("pending"), &json!(1)));
    assert_eq!((&fields["reason_code"], &fields["outcome"]), (&json!("BROKER_5XX"), &json!("outbox_flush_retry")));
    assert_eq!(fields["idempotency_key"], sha256("canary-key"));
    assert!(took(fields), "{fields}");
    let mut logs = log;
    wait_until("it is executed", || {
        logs.push_str(&work());
        home.show(id.as_i64().unwrap())["status"] == "sent"
    });
    let sent = lines(&logs, "sent").remove(0);
    assert_eq!(lines(&logs, "sent").len(), 1, "{logs}");
    let fields = &sent["fields"];
    assert_eq!(sent["level"], "INFO", "{logs}");
    assert_eq!((&fields["outbox_id"], &fields["status"], &fields["attempts"]), (&id, &json!("sent"), &json!(2)));
    assert!(took(fields), "{fields}");
    assert_eq!((&fields["adapter"], &fields["idempotency_key"]), (&json!("http"), &json!(sha256("canary-key"))));
    let dead = place("canary-dead")["outbox_id"].clone();
    let log = work();
    let line = lines(&log, "dead").remove(0);
    let fields = &line["fields"];
    assert_eq!((&line["level"], &fields["outbox_id"]), (&json!("WARN"), &dead), "{log}");
    assert_eq!((&fields["status"], &fields["reason_code"]), (&json!("dead"), &json!("BROKER_BAD_REQUEST")));
    assert_eq!((&fields["attempts"], &fields["adapter"]), (&json!(1), &json!("http")), "{fields}");
    assert!(fields["idempotency_key"] == sha256("canary-dead") && took(fields), "{fields}");
    logs.push_str(&log);
    assert!(!logs.contains("canary") && !logs.contains("AAPL"), "a key or an order is in the log: {logs}");
}

#[test]
fn of_many_successes_a_sample_is_told() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[lane.work]\ncourier = \"noop\"\n");
    home.write("many", &"{\"payload\":1}\n".repeat(2000));
    home.run(&["enqueue", "work", "--ndjson", "many"]).done();
    let begun = std::time::Instant::now();
    let log = home.run(&["--log", "json", "worker", "--once", "--lane", "work"]).done().stderr;
    let most = 10 * (begun.elapsed().as_secs() as usize + 2);
    let told = lines(&log, "sent").len();
    assert!((10..=most).contains(&told), "{told} lines of 2000, {most} at most");
}

#[test]
fn the_variables_of_the_environment_do_what_they_are_named_for() {
    let receiver = Receiver::start(|request| match request.body.as_str() {
        "hangs" => None,
        "fails" => Some(500),
        _ => Some(200),
    });
    // What the file says would not end within the test's patience.
    let home = Home::sqlite();
    let slow =
        "timeout_ms = 600000\npoll_interval_sec = 900\nlock_lease_sec = 900\nmax_attempts = 900\nbackoff_sec = [900]\n";
    let orders = format!(
        "[orders]\nadapter = \"http\"\nurl = \"{}\"\ntimeout_ms = 600000\nidempotency = \"key\"\n",
        receiver.url
    );
    home.write("postrider.toml", &format!("{}{orders}", http_lane(&receiver, slow)));
    home.run(&["migrate"]).done();
    let with = |args: &[&str], environment: &[(&str, &str)]| {
        Answer::from(home.command(args).envs(environment.iter().copied()).output().unwrap())
    };

    let dies = home.enqueue(&["work", "--payload", "fails", "--json"]);
    with(&["worker", "--once", "--lane", "work"], &[("OUTBOX_MAX_ATTEMPTS", "1")]).ended(1);
    assert_eq!((&home.show(dies)["status"], &home.show(dies)["attempts"]), (&json!("dead"), &json!(1)));

    let waits = home.enqueue(&["work", "--payload", "fails", "--json"]);
    with(&["worker", "--once", "--lane", "work"], &[("OUTBOX_BACKOFF_SEC", "1,1")]).ended(1);
    wait_until("it is tried again", || {
        with(&["worker", "--once", "--lane", "work"], &[("OUTBOX_BACKOFF_SEC", "1,1")]);
        home.show(waits)["attempts"].as_i64() >= Some(2)
    });
    with(&["worker", "--once", "--lane", "work"], &[("OUTBOX_MAX_ATTEMPTS", "2")]);

    // Found by a poll: another process enqueues, and SQLite notifies nobody.
    let environment =
        [("OUTBOX_POLL_INTERVAL_SEC", "0.05"), ("OUTBOX_LOCK_LEASE_SEC", "7"), ("OUTBOX_CONCURRENCY", "2")];
    let worker = Worker::start(&home, "log", &["--lane", "work"], &environment);
    wait_until("it has begun", || worker.log().contains("worker started"));
    for _ in 0..6 {
        home.enqueue(&["work", "--payload", "hangs", "--json"]);
    }
    let hanging = || receiver.requests().iter().filter(|request| request.body == "hangs").count();
    wait_until("two are being sent", || hanging() == 2);
    let lease = home.number("SELECT MAX(lease_until - locked_at) FROM outbox");
    assert!((6_900_000..=7_100_000).contains(&lease), "a lease of {lease} µs");
    let held = home.number("SELECT COUNT(*) FROM outbox WHERE locked_by IS NOT NULL");
    assert!((2..=3).contains(&held), "{held} held by two slots and one at hand");
    let holder = home.text("SELECT MAX(locked_by) FROM outbox");
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let named = format!("{host}:{}:", worker.child.id());
    assert!(holder.starts_with(&named), "host, process, incarnation: {holder}");
    assert_eq!(hanging(), 2, "no more than two side by side");
    drop(worker);

    // A claim stamps all its rows with one time, and the lease of the file is too long for a renewal to change it.
    home.execute("DELETE FROM outbox");
    for _ in 0..6 {
        home.enqueue(&["work", "--payload", "hangs", "--json"]);
    }
    let before = hanging();
    let worker = Worker::start(&home, "log3", &["--lane", "work"], &[("OUTBOX_BATCH", "2")]);
    wait_until("all are being sent", || hanging() == before + 6);
    let sizes = home.rows("SELECT COUNT(*) FROM outbox WHERE locked_by IS NOT NULL GROUP BY locked_at");
    assert!(sizes.iter().all(|size| size[0] == "1" || size[0] == "2"), "claimed two at a time: {sizes:?}");
    drop(worker);

    let place = ["orders", "place", "--key", "k", "--payload", &order(1), "--json"];
    let id = home.run(&place).done().json()["outbox_id"].as_i64().unwrap();
    // The broker takes it and says nothing: its body is no word of ours, so it is answered.
    drop(receiver);
    let silent = Receiver::start(|_| None);
    home.write(
        "postrider.toml",
        &format!(
            "[orders]\nadapter = \"http\"\nurl = \"{}\"\ntimeout_ms = 600000\nidempotency = \"key\"\n",
            silent.url
        ),
    );
    with(&["worker", "--once", "--lane", "orders"], &[("BROKER_TIMEOUT_MS", "100")]).ended(1);
    assert_eq!(home.show(id)["last_error_code"], "BROKER_TIMEOUT");
    with(&["worker", "--once"], &[("BROKER_TIMEOUT_MS", "soon")]).refused(2, &["BROKER_TIMEOUT_MS"]);
}

#[test]
fn the_status_of_orders_is_counted_as_it_is_printed() {
    for database in [Database::sqlite(), Database::postgres(), Database::mysql()] {
        let home = Home::on(database);
        home.write("postrider.toml", "[lane.orders]\nmax_attempts = 1\n");
        home.run(&["migrate"]).done();
        let place = |key: &str, tag: &str| {
            let order = order(1).replace("[]", tag);
            home.run(&["orders", "place", "--key", key, "--payload", &order]).done();
        };
        place("good-1", "[]");
        place("good-2", "[]");
        place("bad", "[\"paper:reject\"]");
        home.run(&["worker", "--once", "--lane", "orders"]).ended(1);
        place("waits", "[]");
        let mut rows = home.rows("SELECT status, count(*) FROM outbox_orders GROUP BY 1");
        rows.sort();
        let expected =
            [["aborted", "1"], ["pending", "1"], ["succeeded", "2"]].map(|row| row.map(str::to_owned).to_vec());
        assert_eq!(rows, expected);
    }
}

fn number(span: &Span, key: &str) -> f64 {
    let found = span.attributes.iter().find(|a| a.key == key).and_then(|a| a.value.clone()).and_then(|v| v.value);
    match found {
        Some(Any::DoubleValue(number)) => number,
        other => panic!("{key}: {other:?}"),
    }
}

fn word(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|a| a.key == key).and_then(|a| a.value.clone()).and_then(|v| v.value);
    match found {
        Some(Any::StringValue(word)) => word,
        other => panic!("{key}: {other:?}"),
    }
}

fn spans_of(collector: &Receiver) -> Vec<Span> {
    let requests = collector.requests();
    let exported = requests.iter().map(|r| ExportTraceServiceRequest::decode(&*r.bytes).unwrap());
    exported.flat_map(|e| e.resource_spans).flat_map(|r| r.scope_spans).flat_map(|s| s.spans).collect()
}

fn milliseconds(span: &Span) -> f64 {
    (span.end_time_unix_nano - span.start_time_unix_nano) as f64 / 1e6
}

/// SQL that makes the rows written so take this long each.
fn slowly(name: &str, written: &str, milliseconds: u32) -> String {
    let seconds = f64::from(milliseconds) / 1000.0;
    format!(
        "CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NEW; END $$;
         CREATE TRIGGER {name} BEFORE {written} EXECUTE FUNCTION {name}()"
    )
}

/// Whatever a delivery writes before the send and after the answer, and however long it takes: it is none of the send.
#[test]
fn broker_send_ends_with_the_answer_and_not_with_what_is_done_about_it() {
    const SLOW: u32 = 1500;
    let times: Arc<Mutex<Vec<(SystemTime, SystemTime)>>> = Arc::default();
    let told = times.clone();
    let broker = Receiver::answering(move |_| {
        let came = SystemTime::now();
        std::thread::sleep(Duration::from_millis(150));
        told.lock().unwrap().push((came, SystemTime::now()));
        (401, String::new())
    });
    let (collector, pager) = (Receiver::start(|_| Some(200)), Receiver::start(|_| Some(200)));
    let home = Home::on(Database::postgres());
    let config = format!(
        "[orders]\nadapter = \"http\"\nurl = \"{}\"\nidempotency = \"none\"\n[alerts]\nurl = \"{}\"\n[telemetry]\notlp_endpoint = \"{}\"\n",
        broker.url,
        pager.url,
        collector.url.trim_end_matches("/in")
    );
    home.write("postrider.toml", &config).run(&["migrate"]).done();
    // That it begins is committed before the first byte; that our credentials are refused is told before the delivery ends.
    let begins = "UPDATE ON outbox FOR EACH ROW WHEN (NEW.maybe_sent AND NOT OLD.maybe_sent)";
    home.execute(&slowly("slow_begin", begins, SLOW));
    home.execute(&slowly("slow_alert", "INSERT ON outbox FOR EACH ROW WHEN (NEW.lane = 'alerts')", SLOW));
    home.run(&["orders", "place", "--key", "k", "--payload", &order(1)]).done();
    home.run(&["worker", "--once", "--lane", "orders"]);
    let spans = spans_of(&collector);
    let of = |name: &str| spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name}: {spans:?}"));
    let (process, send) = (of("outbox.process"), of("broker.send"));
    let (whole, alone, rtt) = (milliseconds(process), milliseconds(send), number(send, "rtt_ms"));
    let slow = f64::from(SLOW);
    assert!(whole >= 2.0 * slow + 150.0, "{whole} ms: both writes are in the process");
    assert!((150.0..slow).contains(&rtt) && (150.0..slow).contains(&alone), "{rtt} ms, and the span {alone} ms");
    let nanos = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let (came, answered) = times.lock().unwrap()[0];
    assert!(send.start_time_unix_nano <= nanos(came) && nanos(answered) <= send.end_time_unix_nano, "{send:?}");
    let late = |end: u64| end.saturating_sub(nanos(answered)) as f64 / 1e6;
    assert!(late(send.end_time_unix_nano) < slow, "it ends {} ms after the answer", late(send.end_time_unix_nano));
    assert!(late(process.end_time_unix_nano) >= slow, "{process:?}");
}

#[test]
fn broker_send_is_the_send_alone_with_its_round_trip() {
    let broker = Receiver::answering(|_| {
        std::thread::sleep(Duration::from_millis(150));
        (
            200,
            r#"{"status":"ok","order_ref":"b-1","fills":[{"px":10.5,"qty":1,"ts":"2026-01-01T00:00:00Z"}]}"#.to_owned(),
        )
    });
    let collector = Receiver::start(|_| Some(200));
    let home = Home::sqlite();
    let config = format!(
        "[orders]\nadapter = \"http\"\nurl = \"{}\"\nidempotency = \"key\"\n[telemetry]\notlp_endpoint = \"{}\"\n",
        broker.url,
        collector.url.trim_end_matches("/in")
    );
    home.write("postrider.toml", &config);
    let server = Server::start(&home, &[]);
    let headers = [("idempotency-key", "k"), ("content-type", "application/json")];
    server.post("/do/order", &headers, &order(1)).answered(201);
    wait_until("it is executed", || server.get("/do/order/k").json()["status"] == "ok");
    assert_eq!(server.stop().0, 0);
    let spans = spans_of(&collector);
    let of = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let (process, send) = (of("outbox.process"), of("broker.send"));
    assert_eq!((process.len(), send.len()), (1, 1), "{spans:?}");
    let (process, send) = (process[0], send[0]);
    assert_eq!(send.parent_span_id, process.span_id);
    assert!(process.parent_span_id.is_empty(), "nobody asked for it in a trace of theirs: it is the root");
    assert_eq!(word(send, "adapter"), "http");
    let lasted = milliseconds(send);
    let rtt = number(send, "rtt_ms");
    assert!(rtt >= 150.0 && (lasted - rtt).abs() < 1.0, "{rtt} ms, and the span {lasted} ms");
    // The ledger is read before, and the outcome recorded after it.
    assert!(process.start_time_unix_nano < send.start_time_unix_nano, "{process:?} {send:?}");
    assert!(process.end_time_unix_nano > send.end_time_unix_nano, "{process:?} {send:?}");
    let told = broker.requests()[0].header("traceparent").to_owned();
    let id: String = send.span_id.iter().map(|b| format!("{b:02x}")).collect();
    assert!(told.contains(&id), "the broker was told of this very span: {told} {id}");
}
