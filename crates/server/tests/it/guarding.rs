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

fn run(guard: bool, allowed: &str) -> usize {
    let home = Home::sqlite();
    let (port, connected) = listener();
    let url = format!("http://127.0.0.1:{port}");
    let config = format!(
        "[webhooks]
allow_cidrs = [{allowed}]
[lane.work]
courier = \"http\"
url = \"{url}/lane\"
guard = {guard}
max_attempts = 1
[alerts]
url = \"{url}/alert\"
guard = {guard}
[orders]
adapter = \"http\"
url = \"{url}/order\"
idempotency = \"key\"
guard = {guard}
[memory]
url = \"{url}\"
timeout_ms = 500
guard = {guard}
[telemetry]
otlp_endpoint = \"{url}\"
guard = {guard}
"
    );
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
    let code = |lane: &str| {
        let page = server.get(&format!("/v1/outbox?lane={lane}")).json();
        page["items"][0]["last_error_code"].as_str().unwrap_or_default().to_owned()
    };
    wait_until("the message is dead", || server.get(&format!("/v1/outbox/{id}")).json()["status"] == "dead");
    wait_until("an alert and an order were tried", || !code("alerts").is_empty() && !code("orders").is_empty());
    if guard && allowed.is_empty() {
        assert_eq!((code("work").as_str(), code("alerts").as_str()), ("ADDRESS_FORBIDDEN", "ADDRESS_FORBIDDEN"));
    }
    // The last traces are sent, or not.
    server.stop();
    connected.load(Ordering::SeqCst)
}

#[test]
fn what_is_guarded_is_not_connected_to() {
    assert_eq!(run(true, ""), 0);
    assert!(run(true, "\"127.0.0.0/8\"") >= 4, "what [webhooks] allows is allowed here too");
    assert!(run(false, "") >= 4, "the operator's own are not guarded");
}

#[test]
fn only_what_is_sent_by_http_can_be_guarded() {
    let home = Home::sqlite();
    for (wrong, line) in [("[lane.x]\ncourier = \"noop\"\nguard = true", 3), ("[orders]\nguard = true", 2)] {
        home.write("postrider.toml", wrong);
        home.run(&["config", "check"]).refused(2, &[&format!("postrider.toml:{line}: guard is only for")]);
    }
}
