//! URLs of the configuration are the operator's own, and guarded only where their section says so; what is guarded is not
//! even connected to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;

use crate::api::Server;
use crate::home::{Home, wait_until};

/// Counts who connects, and says nothing.
fn listener() -> (u16, Arc<AtomicUsize>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, connected) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let count = connected.clone();
    std::thread::spawn(move || {
        for _ in listener.incoming() {
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    (port, connected)
}

const SECTIONS: [&str; 5] = ["lane.work", "alerts", "orders", "memory", "telemetry"];

/// Which of the sections were connected to, where these are guarded.
fn run(guarded: &[&str], allowed: &str) -> Vec<&'static str> {
    let home = Home::sqlite();
    let doors = SECTIONS.map(|section| (section, listener()));
    let mut config = format!("[webhooks]\nallow_cidrs = [{allowed}]\n");
    for (section, (port, _)) in &doors {
        let url = format!("\"http://127.0.0.1:{port}\"");
        let rest = match *section {
            "lane.work" => format!("courier = \"http\"\nurl = {url}\nmax_attempts = 1"),
            "orders" => format!("adapter = \"http\"\nurl = {url}\nidempotency = \"key\""),
            "memory" => format!("url = {url}\ntimeout_ms = 500"),
            "telemetry" => format!("otlp_endpoint = {url}"),
            _ => format!("url = {url}"),
        };
        config.push_str(&format!("[{section}]\n{rest}\nguard = {}\n", guarded.contains(section)));
    }
    home.write("postrider.toml", &config);
    let server = Server::start(&home, &[]);
    let post = |path: &str, body: serde_json::Value| {
        let headers = [("content-type", "application/json"), ("Idempotency-Key", "k")];
        server.post(path, &headers, &body.to_string())
    };
    let id = post("/v1/outbox/work", json!(1)).answered(201).json()["id"].clone();
    let order = json!({ "instrument": "ACME", "side": "BUY", "qty": 1, "price": 2, "time_in_force": "IOC" });
    post("/do/order", order).answered(201);
    post("/memory/store", json!({ "payload_md": "text", "target_space": "team:a" })).answered(202);
    // Of all messages of a lane: an alert may wait for an older one.
    let codes = |lane: &str| -> Vec<String> {
        let page = server.get(&format!("/v1/outbox?lane={lane}")).json();
        let items = page["items"].as_array().cloned().unwrap_or_default();
        items.iter().filter_map(|item| Some(item["last_error_code"].as_str()?.to_owned())).collect()
    };
    wait_until("the message is dead", || server.get(&format!("/v1/outbox/{id}")).json()["status"] == "dead");
    wait_until("an alert and an order were tried", || !codes("alerts").is_empty() && !codes("orders").is_empty());
    for lane in ["work", "alerts"] {
        let forbidden = allowed.is_empty() && guarded.iter().any(|section| section.trim_start_matches("lane.") == lane);
        let codes = codes(lane);
        assert_eq!(codes.iter().any(|code| code == "ADDRESS_FORBIDDEN"), forbidden, "{lane}: {codes:?}");
    }
    // The last traces are sent, or not.
    server.stop();
    let connected = |door: &&(&str, (u16, Arc<AtomicUsize>))| door.1.1.load(Ordering::SeqCst) > 0;
    doors.iter().filter(connected).map(|door| door.0).collect()
}

#[test]
fn what_is_guarded_is_not_connected_to() {
    assert_eq!(run(&SECTIONS, ""), [""; 0]);
    assert_eq!(run(&SECTIONS, "\"127.0.0.0/8\""), SECTIONS, "what [webhooks] allows is allowed here too");
    assert_eq!(run(&[], ""), SECTIONS, "the operator's own are not guarded");
}

#[test]
fn each_section_guards_its_own_address() {
    for section in SECTIONS {
        let others: Vec<&str> = SECTIONS.into_iter().filter(|other| *other != section).collect();
        assert_eq!(run(&[section], ""), others, "only {section} is guarded");
    }
}

#[test]
fn only_what_is_sent_by_http_can_be_guarded() {
    let home = Home::sqlite();
    for (wrong, line) in [("[lane.x]\ncourier = \"noop\"\nguard = true", 3), ("[orders]\nguard = true", 2)] {
        home.write("postrider.toml", wrong);
        home.run(&["config", "check"]).refused(2, &[&format!("postrider.toml:{line}: guard is only for")]);
    }
}
