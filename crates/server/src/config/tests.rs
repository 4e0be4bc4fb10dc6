//! What `postrider.toml` may say, what it may not, and which place wins.

use std::path::Path;
use std::time::Duration;

use super::*;

fn config(text: &str) -> Config {
    with_environment(text, &[])
}

fn with_environment(text: &str, environment: &[(&str, &str)]) -> Config {
    let variable = |name: &str| environment.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
    read(Path::new("postrider.toml"), text, variable).unwrap_or_else(|e| panic!("{}\nin\n{text}", e.message()))
}

fn refusal(text: &str) -> String {
    read(Path::new("postrider.toml"), text, |_| None).expect_err(text).message().to_owned()
}

#[test]
fn without_a_file_there_are_three_lanes() {
    let config = config("");
    assert_eq!(config.lanes.keys().collect::<Vec<_>>(), ["log", "orders", "webhooks"]);
    let log = &config.lanes["log"].settings;
    assert_eq!((log.concurrency, log.batch, log.lease), (64, 256, Duration::from_secs(60)));
    let orders = &config.lanes["orders"].settings;
    assert_eq!((orders.concurrency, orders.batch, orders.lease), (4, 32, Duration::from_secs(120)));
    assert_eq!((orders.poll, orders.budgets.max_attempts), (Duration::from_millis(500), 6));
    let table = Backoff::Table([5, 10, 20, 40, 80, 160].map(Duration::from_secs).to_vec());
    assert_eq!(orders.budgets.backoff, table);
    assert!(config.enabled);
    assert_eq!(config.listen.to_string(), "127.0.0.1:8787");
    assert_eq!(config.drain, Duration::from_secs(20));
}

#[test]
fn every_key_of_a_lane_arrives() {
    let config = config(
        r#"
        database = "sqlite://x.db"
        listen = "127.0.0.1:8787"
        [lane.invoices]
        courier = "http"
        url = "https://erp.example/invoices"
        timeout_ms = 2500
        headers = { X-Source = "postrider" }
        statuses = { "404" = "retry", "5xx" = "dead" }
        concurrency = 3
        batch = 7
        lock_lease_sec = 30
        poll_interval_sec = 0.25
        shards = 4
        max_attempts = 9
        max_crashes = 2
        backoff = { kind = "exponential", base_sec = 1, max_sec = 8, jitter = 0.0 }
        dedup = true
        audit = true
        retention = "30d"
        key_ttl = "2h"
        max_payload_bytes = 1000
        "#,
    );
    assert_eq!(config.database, "sqlite://x.db");
    let lane = &config.lanes["invoices"];
    let s = &lane.settings;
    assert_eq!(
        (s.concurrency, s.batch, s.shards.len(), s.budgets.max_attempts, s.budgets.max_crashes),
        (3, 7, 4, 9, 2)
    );
    assert_eq!((s.lease, s.poll), (Duration::from_secs(30), Duration::from_millis(250)));
    let exponential = Backoff::Exponential { base: Duration::from_secs(1), max: Duration::from_secs(8), jitter: 0.0 };
    assert_eq!(s.budgets.backoff, exponential);
    let r = &lane.rules;
    assert!(r.dedup && r.audit);
    assert_eq!((r.shards, r.max_payload_bytes), (4, 1000));
    assert_eq!((r.retention, r.key_ttl), (Duration::from_secs(30 * 86400), Duration::from_secs(7200)));
    let expected = Destination::Http {
        url: "https://erp.example/invoices".into(),
        timeout: Duration::from_millis(2500),
        headers: vec![("X-Source".into(), "postrider".into())],
        statuses: HttpClasses::new([("404", "retry"), ("5xx", "dead")]).unwrap(),
        guard: false,
    };
    assert_eq!(lane.destination, expected);
}

#[test]
fn the_doors_are_set_in_http() {
    let usual = config("");
    assert_eq!((usual.http.slots.most, usual.http.slots.per_peer), (10_000, 2500));
    let seconds = |patience: crate::http::Patience| (patience.idle.as_secs(), patience.write.as_secs());
    assert_eq!(seconds(usual.http.patience), (15, 30));
    assert_eq!(usual.session_ttl, Duration::from_secs(12 * 3600));
    let own = config(
        "[http]\nmax_connections = 50\nmax_connections_per_peer = 0\nidle_timeout_sec = 5\nwrite_timeout_sec = 7\ntrusted_proxies = [\"10.0.0.0/8\", \"fd00::/8\"]\n[auth]\nsession_ttl = \"1h\"\n",
    );
    assert_eq!((own.http.slots.most, own.http.slots.per_peer, own.http.slots.trusted.len()), (50, 0, 2));
    assert_eq!(seconds(own.http.patience), (5, 7));
    assert_eq!(own.session_ttl, Duration::from_secs(3600));
}

#[test]
fn the_later_place_wins() {
    let text = "
        [outbox]
        concurrency = 10
        batch = 20
        backoff_sec = [5, 10]
        drain_timeout_sec = 3
        [lane.a]
        courier = \"noop\"
        batch = 30
        backoff = { kind = \"doubling\", base_sec = 30 }
        [lane.b]
        courier = \"noop\"
    ";
    let table = |seconds: &[u64]| Backoff::Table(seconds.iter().map(|s| Duration::from_secs(*s)).collect());
    let plain = config(text);
    let (a, b) = (&plain.lanes["a"].settings, &plain.lanes["b"].settings);
    assert_eq!((a.concurrency, a.batch, b.concurrency, b.batch), (10, 30, 10, 20));
    assert_eq!(a.budgets.backoff, Backoff::Doubling { base: Duration::from_secs(30), jitter: 0.0 });
    assert_eq!(b.budgets.backoff, table(&[5, 10]));
    assert_eq!(plain.drain, Duration::from_secs(3));

    let forced =
        with_environment(text, &[("OUTBOX_BATCH", "40"), ("OUTBOX_BACKOFF_SEC", "1,2"), ("OUTBOX_ENABLED", "false")]);
    let a = &forced.lanes["a"].settings;
    assert_eq!((a.concurrency, a.batch, &a.budgets.backoff), (10, 40, &table(&[1, 2])));
    assert!(!forced.enabled);
}

#[test]
fn nonsense_is_refused_with_line_and_remedy() {
    let lane = |rest: &str| format!("[lane.a]\ncourier = \"noop\"\n{rest}\n");
    let http = |rest: &str| format!("[lane.a]\ncourier = \"http\"\nurl = \"http://x\"\n{rest}\n");
    let cases = [
        (lane("concurency = 4"), "postrider.toml:3: unknown key `concurency`; did you mean `concurrency`?"),
        (lane("concurrency = 0"), "postrider.toml:3: concurrency: must be a whole number from 1"),
        (lane("concurrency = \"64\""), "postrider.toml:3: concurrency: must be a whole number"),
        (lane("lock_lease_sec = 0"), "postrider.toml:3: lock_lease_sec: must be at least 1"),
        (lane("poll_interval_sec = -1"), "postrider.toml:3: poll_interval_sec: must be a number of seconds from 0"),
        (lane("retention = 7"), "like \"7d\""),
        (lane("retention = \"7 days\""), "500ms, 5s, 10m, 2h, 7d"),
        (lane("shards = 2000"), "from 1 to 1024"),
        (lane("dedup = \"yes\""), "postrider.toml:3: dedup: "),
        (lane("dedup = true\nretention = \"0\""), "postrider.toml:1: lane `a`: dedup = true needs a retention"),
        (
            lane("backoff = { kind = \"exponential\", jitter = 2 }"),
            "postrider.toml:3: backoff: jitter must be from 0.0 to 1.0",
        ),
        (lane("backoff = { kind = \"linear\" }"), "\"exponential\", \"table\" or \"doubling\""),
        (lane("backoff = { kind = \"table\" }"), "sec = [5, 10, 20]"),
        (lane("backoff = { kind = \"table\", sec = [1], jitter = 0.1 }"), "`jitter` means nothing"),
        (lane("backoff_sec = []"), "postrider.toml:3: backoff_sec: the list is empty"),
        (lane("backoff_sec = [5]\nbackoff = { kind = \"doubling\" }"), "keep one"),
        (lane("url = \"https://x.example\""), "postrider.toml:3: url is only for courier = \"http\""),
        ("[lane.a]\nurl = \"https://x.example\"".into(), "postrider.toml:1: [lane.a] needs a courier"),
        ("\n[lane.a]\ncourier = \"http\"".into(), "postrider.toml:2: [lane.a] needs a url"),
        ("[lane.a]\ncourier = \"pigeon\"".into(), "postrider.toml:2: courier: must be one of \"http\""),
        ("[lane.a]\ncourier = \"http\"\nurl = \"ftp://x\"".into(), "postrider.toml:3: "),
        (
            "[lane.a]\ncourier = \"http\"\nurl = \"http://x\"\nheaders = { Authorization = \"Bearer abc\" }".into(),
            "postrider.toml:4: Authorization looks like a secret",
        ),
        ("[lane.\"a b\"]\ncourier = \"noop\"".into(), "postrider.toml:1: `a b` is no lane name"),
        ("[lane.memory]\nconcurrency = 4".into(), "postrider.toml:1: [lane.memory] is the memory gateway's"),
        ("[lane.orders]\nretention = \"1d\"".into(), "postrider.toml:1: [lane.orders] takes no courier"),
        ("[orders]\nadapter = \"http\"".into(), "postrider.toml:1: [orders] needs a url"),
        (
            "[orders]\nadapter = \"http\"\nurl = \"http://x\"\nidempotency = \"key\"\nheaders = { Authorization = \"Bearer abc\" }"
                .into(),
            "postrider.toml:5: Authorization looks like a secret",
        ),
        (
            "[orders]\nadapter = \"http\"\nurl = \"https://b.example\"".into(),
            "postrider.toml:1: [orders] must say what the broker does with an order sent twice",
        ),
        (
            "[orders]\nadapter = \"http\"\nurl = \"https://b.example\"\nidempotency = \"look_up\"".into(),
            "look_up_url is missing",
        ),
        ("[orders]\nurl = \"https://b.example\"".into(), "postrider.toml:2: url is only for adapter = \"http\""),
        ("[orders]\nfaults = { timeout = 0.9, fail = 0.2 }".into(), "postrider.toml:2: faults are chances"),
        ("[orders]\nsettling_sec = 3".into(), "postrider.toml:2: settling_sec is only for"),
        (
            "[orders]\nadapter = \"http\"\nurl = \"https://b.example\"\nidempotency = \"key\"\nstatuses = { \"409\" = \"fine\" }"
                .into(),
            "postrider.toml:5: statuses are like",
        ),
        (lane("key_ttl = \"0\""), "postrider.toml:1: [lane.a]: with key_ttl"),
        (lane("key_ttl = \"500ms\""), "postrider.toml:1: [lane.a]: with key_ttl"),
        (lane("statuses = { \"404\" = \"retry\" }"), "postrider.toml:3: statuses is only for courier = \"http\""),
        (http("statuses = { \"404\" = \"later\" }"), "postrider.toml:4: statuses are like { \"404\" = \"retry\""),
        (http("statuses = { \"4o4\" = \"retry\" }"), "postrider.toml:4: statuses are like"),
        (http("statuses = { \"2xx\" = \"dead\" }"), "postrider.toml:4: statuses: with these nothing would"),
        (http("statuses = { 404 = true }"), "postrider.toml:4: statuses: "),
        ("[lane.orders]\nstatuses = { \"404\" = \"retry\" }".into(), "postrider.toml:1: [lane.orders] takes no courier"),
        ("\u{feff}[outbox]".into(), "postrider.toml:1: it begins with a byte order mark"),
        (lane("colour = 4"), "postrider.toml:3: unknown key `colour`; known here: courier, url"),
        ("[lane.a]\ncourier = noop".into(), "postrider.toml:2: courier: "),
        ("[lane]\nx = 5".into(), "postrider.toml:2: invalid type: integer `5`, expected a section [lane.NAME]"),
        ("x = 1".into(), "postrider.toml:1: unknown key `x`"),
        ("listen = \"here\"".into(), "postrider.toml:1: listen must be an address"),
        ("[verify]\nstop_command = \"x\"".into(), "postrider.toml:1: missing field `start_command`"),
        ("[http]\nmax_connections = 0".into(), "postrider.toml:2: max_connections: must be a whole number from 1"),
        ("[http]\nmax_connections_per_peer = -1".into(), "postrider.toml:2: max_connections_per_peer: must be a whole"),
        ("[http]\nidle_timeout_sec = 0".into(), "postrider.toml:2: idle_timeout_sec: must be at least 1"),
        ("[http]\ntrusted_proxies = [\"10.0.0.1\"]".into(), "postrider.toml:2: a range of addresses is written like"),
        ("[auth]\nsession_ttl = \"0\"".into(), "postrider.toml:2: session_ttl below \"1s\""),
        ("[gate]\nmode = \"full\"".into(), "postrider.toml:2: mode is \"FULL\" or \"DEGRADED\""),
        ("[gate]\nskip_everything = true".into(), "postrider.toml:2: unknown key `skip_everything`"),
        ("[memory]\nurl = \"ftp://x\"".into(), "postrider.toml:2: url is where OpenMemory is"),
        ("[memory]\nurl = \"http://u:p@x\"".into(), "postrider.toml:2: url is where OpenMemory is"),
        ("[memory]\napi_key = \"sk-123\"".into(), "postrider.toml:2: api_key must not stand here in plain text"),
        ("[memory]\napi_key = \"file:/no/such/file\"".into(), "postrider.toml:2: cannot read /no/such/file"),
        ("[memory]\ntimeout_ms = 20000".into(), "postrider.toml:2: timeout_ms: "),
        ("[memory]\nbreaker = { failures = 0 }".into(), "postrider.toml:2: "),
        ("[memory]\ndefault_space = \"a b\"".into(), "postrider.toml:2: a space is like team:payments"),
        ("[memory]\n[lane.memory]\ndedup = false".into(), "postrider.toml:2: [lane.memory] takes no courier"),
        ("[memory]\n[lane.memory]\nretention = \"0\"".into(), "postrider.toml:2: "),
        ("[[store]]\nshards = [0]".into(), "[store] is for a part"),
        ("database = ".into(), "postrider.toml:1: "),
        ("[outbox]\nenabled = 1".into(), "postrider.toml:2: enabled: "),
    ];
    for (text, expected) in cases {
        let said = refusal(&text);
        assert!(said.contains(expected), "{text}\nsaid:     {said}\nexpected: {expected}");
        if text.contains("Bearer") {
            assert!(!said.contains("abc"), "a secret is shown: {said}");
        }
    }
}

/// Whatever section, whatever key: a secret in plain text is refused, where it stands, and not repeated.
#[test]
fn no_secret_stands_in_plain_text() {
    let lane = |rest: &str| format!("[lane.a]\ncourier = \"http\"\n{rest}");
    let broker = |rest: &str| format!("[orders]\nadapter = \"http\"\nidempotency = \"look_up\"\n{rest}");
    let (fine, look_up) = ("url = \"https://b.example/\"", "look_up_url = \"https://b.example/{key}\"");
    let cases = [
        (lane("url = \"https://u:canary@h.example/\""), 3, "[lane.a] url has credentials in it"),
        (lane("url = \"https://canary@h.example/\""), 3, "[lane.a] url has credentials in it"),
        (lane("url = \"https://h.example/?api_key=canary\""), 3, "the parameter `api_key` of [lane.a] url looks like"),
        (lane(&format!("{fine}\nheaders = {{ X-Token = \"canary\" }}")), 4, "X-Token looks like a secret"),
        (lane(&format!("{fine}\nheaders = {{ X-Any = \"Basic canary\" }}")), 4, "X-Any looks like a secret"),
        (broker("url = \"https://u:canary@b.example/\""), 4, "[orders] url has credentials in it"),
        (broker("url = \"https://b.example/?sig=canary\""), 4, "the parameter `sig` of [orders] url looks like"),
        (broker(&format!("{fine}\nlook_up_url = \"https://u:canary@b/{{key}}\"")), 5, "look_up_url has credentials"),
        (
            broker(&format!("{fine}\nlook_up_url = \"https://b/{{key}}?token=canary\"")),
            5,
            "the parameter `token` of look_up",
        ),
        (broker(&format!("{fine}\n{look_up}\nheaders = {{ Cookie = \"canary\" }}")), 6, "Cookie looks like a secret"),
        ("[alerts]\nurl = \"https://u:canary@h.example/\"".into(), 2, "[alerts] url has credentials in it"),
        ("[alerts]\nurl = \"https://h.example/?secret=canary\"".into(), 2, "the parameter `secret` of [alerts] url"),
        ("[alerts]\nurl = \"https://h/\"\nheaders = { X-Auth = \"canary\" }".into(), 3, "X-Auth looks like a secret"),
        ("[telemetry]\notlp_endpoint = \"http://u:canary@h\"".into(), 2, "otlp_endpoint has credentials in it"),
        ("[telemetry]\notlp_endpoint = \"http://h/?token=canary\"".into(), 2, "the parameter `token` of otlp_endpoint"),
        ("[memory]\nurl = \"http://u:canary@h\"".into(), 2, "url is where OpenMemory is"),
        ("[memory]\nurl = \"http://canary@h\"".into(), 2, "url is where OpenMemory is"),
        ("[memory]\nurl = \"http://:canary@h\"".into(), 2, "url is where OpenMemory is"),
        ("database: \"postgres://u:canary@h/a?sslmode=require\"".into(), 1, ""),
        ("[memory]\napi_key: \"canary=\"".into(), 2, ""),
        ("database = \"postgres://u:canary@h/a".into(), 1, "database: "),
        ("[memory]\nurl = \"http://h/?key=canary\"".into(), 2, "url is where OpenMemory is"),
        ("[memory]\nurl = \"http://h/#canary\"".into(), 2, "url is where OpenMemory is"),
        ("[memory]\nurl = \"http://h\"\napi_key = \"canary\"".into(), 3, "api_key must not stand here in plain text"),
        ("[secrets]\nkey = \"canary\"".into(), 2, "key must not stand here in plain text"),
        ("[tls]\ncert = \"c.pem\"\nkey = \"-----BEGIN PRIVATE KEY----- canary\"".into(), 1, "[tls] names files"),
        ("[tls]\ncert = \"-----BEGIN CERTIFICATE----- canary\"\nkey = \"k.pem\"".into(), 1, "[tls] names files"),
    ];
    for (text, line, expected) in cases {
        let said = refusal(&text);
        let expected = format!("postrider.toml:{line}: {expected}");
        assert!(said.contains(&expected), "{text}\nsaid:     {said}\nexpected: {expected}");
        assert!(!said.contains("canary"), "a secret is shown: {said}");
    }
}

/// Somebody pastes a secret under a key it does not belong to: whichever it is, the refusal does not repeat it.
#[test]
fn what_stands_in_the_wrong_place_is_not_repeated() {
    let mut refused = 0;
    for section in reference::SECTIONS {
        let head = if section.name.is_empty() { String::new() } else { format!("[{}]\n", section.name) };
        for reference::Key(key, _, _) in section.keys {
            for value in [
                "\"canary-8d1f\"",
                "canary-8d1f",
                "\"https://canary-8d1f@h/\"",
                "\"Authorization: canary-8d1f\"",
                "\"5 canary-8d1f\"",
                "[\"canary-8d1f\"]",
                "[1, \"canary-8d1f\"]",
                "{ kind = \"canary-8d1f\" }",
                "{ \"Authorization: canary-8d1f\" = \"x\" }",
                "{ a = { b = \"canary-8d1f\" } }",
            ] {
                let Err(said) = read(Path::new("f"), &format!("{head}{key} = {value}\n"), |_| None) else { continue };
                assert!(!said.message().contains("8d1f"), "[{}] {key} = {value}: {}", section.name, said.message());
                refused += 1;
            }
        }
    }
    assert!(refused > 500, "most of it was refused: {refused}");
    // A secret on a line of its own, whose padding looks like an assignment.
    for broken in [
        "[memory]\napi_key = \"abc\ncanary8d1f==\"\n",
        "[memory]\napi_key =\ncanary8d1f==\n",
        "[lane.a]\nheaders = {\nAuthorization =\ncanary8d1f==\n}\n",
        "[memory]\napi_key = \"\"\"\ncanary8d1f==\n\"\"\"x\n",
    ] {
        let said = refusal(broken);
        assert!(!said.contains("8d1f"), "{broken}: {said}");
    }
    let set = |name: &'static str| move |asked: &str| (asked == name).then(|| "canary-8d1f".to_owned());
    for name in [
        "OUTBOX_ENABLED",
        "OUTBOX_BATCH",
        "OUTBOX_BACKOFF_SEC",
        "OUTBOX_LOCK_LEASE_SEC",
        "GATEWAY_SKIP_STORE",
        "BROKER_TIMEOUT_MS",
    ] {
        let said = read(Path::new("f"), "", set(name)).expect_err(name).message().to_owned();
        assert!(said.contains(name) && !said.contains("8d1f"), "{said}");
    }
}

#[test]
fn what_belongs_elsewhere_is_refused_where_it_stands() {
    let noop = |rest: &str| format!("[lane.a]\ncourier = \"noop\"\n{rest}");
    let http = |rest: &str| format!("[lane.a]\ncourier = \"http\"\nurl = \"http://x\"\n{rest}");
    let broker = "[orders]\nadapter = \"http\"\nidempotency = \"key\"\nurl = \"https://b.example\"\n";
    let part = |lane: &str, rest: &str| format!("[memory]\n[lane.{lane}]\n{rest}");
    let mut cases = vec![
        (noop("timeout_ms = 5"), "postrider.toml:3: timeout_ms is only for courier = \"http\""),
        (noop("headers = { X-A = \"b\" }"), "postrider.toml:3: headers is only for courier = \"http\""),
        (noop("guard = true"), "postrider.toml:3: guard is only for courier = \"http\""),
        (noop("show_payload = true"), "postrider.toml:3: show_payload is only for courier = \"log\""),
        (http("show_payload = true"), "postrider.toml:4: show_payload is only for courier = \"log\""),
        (noop("backoff = { kind = \"doubling\", base_sec = 0 }"), "base_sec must be more than 0"),
        (noop("backoff = { kind = \"doubling\", max_sec = 9 }"), "`max_sec` means nothing"),
        (noop("backoff = { kind = \"doubling\", sec = [1] }"), "`sec` means nothing"),
        (noop("backoff = { kind = \"exponential\", sec = [1] }"), "`sec` means nothing"),
        (noop("backoff = { kind = \"exponential\", base_sec = 9, max_sec = 8 }"), "max_sec must not be less"),
        (noop("backoff = { kind = \"table\", sec = [1], base_sec = 1 }"), "`base_sec` means nothing"),
        (noop("backoff = { kind = \"table\", sec = [1], max_sec = 1 }"), "`max_sec` means nothing"),
        (noop("backoff = { kind = \"table\", sec = [] }"), "the list is empty"),
        (noop("poll_interval_sec = 400000000"), "from 0 to ten years"),
        (
            "[outbox]\nbackoff = { kind = \"doubling\" }\nbackoff_sec = [5]".into(),
            "postrider.toml:3: backoff and backoff_sec",
        ),
        (
            part("orders", "backoff = { kind = \"doubling\" }\nbackoff_sec = [5]"),
            "postrider.toml:4: backoff and backoff_sec",
        ),
        (
            part("memory", "backoff = { kind = \"doubling\" }\nbackoff_sec = [5]"),
            "postrider.toml:4: backoff and backoff_sec",
        ),
        (part("memory", "audit = true"), "postrider.toml:2: [lane.memory] takes no courier"),
        ("[lane.alerts]\ncourier = \"noop\"".into(), "postrider.toml:1: the lane `alerts` is Postrider's own"),
        ("[alerts]\nurl = \"https://h/\"\nevery = \"0\"".into(), "postrider.toml:1: [alerts]: every = \"0\""),
        ("[alerts]\nurl = \"ftp://h/\"".into(), "postrider.toml:2: "),
        ("[alerts]\nurl = \"env:NOT_SET_ANYWHERE\"".into(), "postrider.toml:2: "),
        ("[webhooks]\njitter = 1.5".into(), "postrider.toml:2: jitter must be from 0.0 to 1.0"),
        ("[webhooks]\nallow_cidrs = [\"10.0.0.1/33\"]".into(), "postrider.toml:2: "),
        ("[webhooks]\ndns_servers = [\"10.0.0.2\"]".into(), "postrider.toml:2: write a name server's address and port"),
        ("[http]\nwrite_timeout_sec = 0".into(), "postrider.toml:2: write_timeout_sec: must be at least 1"),
        ("[orders]\nlook_up_url = \"https://b/{key}\"".into(), "postrider.toml:2: look_up_url is only for adapter"),
        ("[orders]\nheaders = { X-A = \"b\" }".into(), "postrider.toml:2: headers is only for adapter"),
        ("[orders]\nguard = true".into(), "postrider.toml:2: guard is only for adapter"),
        ("[orders]\nstatuses = { \"409\" = \"executed\" }".into(), "postrider.toml:2: statuses is only for adapter"),
        (format!("{broker}faults = {{ fail = 0.1 }}"), "postrider.toml:5: faults is only for adapter = \"paper\""),
        (format!("{broker}latency_ms = 5"), "postrider.toml:5: latency_ms is only for adapter = \"paper\""),
        (format!("{broker}settling_sec = 5"), "postrider.toml:5: settling_sec is only for idempotency"),
        (format!("{broker}statuses = {{ \"600\" = \"executed\" }}"), "postrider.toml:5: statuses are like"),
        ("[orders]\nfaults = { fail = -0.1 }".into(), "postrider.toml:2: faults are chances"),
        ("[orders]\nadapter = \"http\"\nidempotency = \"key\"\nurl = \"ftp://b\"".into(), "postrider.toml:4: "),
        ("[tls]\ncert = \"a\\u0000b\"\nkey = \"k\"".into(), "`tls.cert` contains a NUL character"),
        ("[webhooks]\nallow_cidrs = [\"10.0.0.0/8\\u0000\"]".into(), "`webhooks.allow_cidrs` contains a NUL character"),
        (
            "[lane.a]\ncourier = \"http\"\nurl = \"http://x\"\nheaders = { \"X\\u0000A\" = \"b\" }".into(),
            "contains a NUL character",
        ),
    ];
    for key in
        ["courier = \"noop\"", "url = \"http://x\"", "timeout_ms = 5", "headers = { X-A = \"b\" }", "guard = true"]
            .into_iter()
            .chain(["statuses = { \"404\" = \"retry\" }", "show_payload = true", "dedup = true", "key_ttl = \"1d\""])
    {
        for (lane, said) in [("orders", "[lane.orders] takes no"), ("memory", "[lane.memory] takes no")] {
            cases.push((part(lane, key), said));
        }
        cases.push((part("webhooks", key), "[lane.webhooks] takes only concurrency"));
    }
    for key in ["shards = 2", "max_attempts = 2", "retention = \"1d\"", "audit = true", "max_payload_bytes = 9"] {
        cases.push((part("webhooks", key), "[lane.webhooks] takes only concurrency"));
    }
    for (text, expected) in cases {
        let said = refusal(&text);
        assert!(said.contains(expected), "{text}\nsaid:     {said}\nexpected: {expected}");
    }
    for (name, value) in [("GATEWAY_SKIP_STORE", "yes"), ("BROKER_TIMEOUT_MS", "0"), ("BROKER_TIMEOUT_MS", "soon")] {
        let variable = |asked: &str| (asked == name).then(|| value.to_owned());
        let said = read(Path::new("postrider.toml"), "", variable).expect_err(name).message().to_owned();
        assert!(said.contains(name), "{name}={value}: {said}");
    }
}

/// A key of every section, whatever its kind: none takes what is of none, and none is taken that is not known.
#[test]
fn no_key_takes_a_value_of_another_kind() {
    let mut tried = 0;
    for section in reference::SECTIONS {
        let head = match section.name {
            "" => String::new(),
            name => format!("[{}]\n", name.replace("NAME", "a")),
        };
        for reference::Key(key, ..) in section.keys {
            let said = refusal(&format!("{head}{key} = [[[1]]]\n"));
            assert!(said.starts_with("postrider.toml:") && said.contains(key), "{head}{key}: {said}");
            tried += 1;
        }
        let said = refusal(&format!("{head}nonsense = 1\n"));
        assert!(said.contains("unknown key `nonsense`"), "{head}: {said}");
    }
    assert!(tried > 90, "{tried}");
    for inner in [
        "[orders]\nfaults = { x = 1 }",
        "[memory]\nbreaker = { x = 1 }",
        "[outbox]\nbackoff = { kind = \"table\", x = 1 }",
    ] {
        assert!(refusal(inner).contains("unknown key `x`"), "{inner}: {}", refusal(inner));
    }
}

#[test]
fn the_variables_reach_the_lane_of_orders_too() {
    let variables = [
        ("OUTBOX_CONCURRENCY", "2"),
        ("OUTBOX_BATCH", "7"),
        ("OUTBOX_LOCK_LEASE_SEC", "30"),
        ("OUTBOX_MAX_ATTEMPTS", "3"),
        ("OUTBOX_BACKOFF_SEC", "1,2"),
        ("OUTBOX_POLL_INTERVAL_SEC", "0.1"),
    ];
    let config = with_environment("", &variables);
    let lane = &config.lanes["orders"].settings;
    assert_eq!((lane.concurrency, lane.batch, lane.lease), (2, 7, Duration::from_secs(30)));
    assert_eq!((lane.poll, lane.budgets.max_attempts), (Duration::from_millis(100), 3));
    assert_eq!(lane.budgets.backoff, Backoff::Table(vec![Duration::from_secs(1), Duration::from_secs(2)]));
    assert_eq!(config.orders.settings.max_attempts, 3);
}

/// Whoever is told to keep a URL elsewhere can.
#[test]
fn urls_with_a_secret_are_read_where_they_are_kept() {
    let kept = |url: &str| format!("exec:echo {url}");
    let text = format!(
        "[orders]\nadapter = \"http\"\nidempotency = \"look_up\"\nurl = \"{}\"\nlook_up_url = \"{}\"\n[telemetry]\notlp_endpoint = \"{}\"\n",
        kept("https://broker.example/orders?token=hush"),
        kept("https://broker.example/orders/{key}?token=hush"),
        kept("https://collector.example/?token=hush")
    );
    let config = config(&text);
    let Broker::Http { settings, .. } = config.orders.broker else { panic!("a broker by HTTP") };
    assert_eq!(settings.url, "https://broker.example/orders?token=hush");
    assert_eq!(settings.look_up_url.as_deref(), Some("https://broker.example/orders/{key}?token=hush"));
    assert_eq!(config.otlp_endpoint.as_deref(), Some("https://collector.example/?token=hush"));
}

#[test]
fn each_capability_is_skipped_by_its_own_name() {
    use postrider_memories::gate::{SkipSource, Skips};
    for name in crate::gate::CAPABILITIES {
        let by = |source| Skips::from([(name.to_owned(), source)]);
        assert_eq!(config(&format!("[gate]\nskip_{name} = true\n")).gate.skips, by(SkipSource::File));
        let variable = format!("GATEWAY_SKIP_{}", name.to_ascii_uppercase());
        assert_eq!(with_environment("", &[(&variable, "1")]).gate.skips, by(SkipSource::Environment));
    }
}

#[test]
fn memory_is_worked_as_its_protocol_says() {
    let memory = config("[memory]\nurl = \"http://127.0.0.1:1\"\n");
    let memory = &memory.lanes["memory"];
    assert!(memory.rules.dedup && memory.rules.audit, "looked up before a delivery, and audited");
    let lane = &memory.settings;
    assert_eq!((lane.batch, lane.lease, lane.budgets.max_attempts), (10, Duration::from_secs(120), 5));
    let (base, max) = (Duration::from_secs(60), Duration::from_secs(3600));
    assert_eq!(lane.budgets.backoff, Backoff::Exponential { base, max, jitter: 0.3 });
}

#[test]
fn retries_of_webhooks_are_configured() {
    let webhooks = config("").webhooks;
    assert_eq!((webhooks.max_retry_limit, webhooks.base_delay), (5, Duration::from_secs(30)));
    assert_eq!(webhooks.jitter, 0.0, "every wait can be told beforehand");
    let own = config("[webhooks]\nmax_retry_limit = 7\nbase_delay_sec = 2\njitter = 0.5\n").webhooks;
    assert_eq!((own.max_retry_limit, own.base_delay, own.jitter), (7, Duration::from_secs(2), 0.5));
}

#[test]
fn orders_are_worked_as_their_protocol_says() {
    let config = config("");
    let lane = &config.lanes["orders"].settings;
    assert_eq!((lane.concurrency, lane.batch, lane.lease), (4, 32, Duration::from_secs(120)));
    assert_eq!((lane.poll, lane.budgets.max_attempts), (Duration::from_millis(500), 6));
    let table = [5, 10, 20, 40, 80, 160].map(Duration::from_secs).to_vec();
    assert_eq!(lane.budgets.backoff, Backoff::Table(table));
    let Broker::Paper { settings, .. } = config.orders.broker else { panic!("the paper broker") };
    assert_eq!(settings.timeout, Duration::from_millis(2500));
    let http = "[orders]\nadapter = \"http\"\nurl = \"https://broker.example/\"\nidempotency = \"key\"\n";
    let Broker::Http { settings, .. } = self::config(http).orders.broker else { panic!("a broker by HTTP") };
    assert_eq!(settings.timeout, Duration::from_millis(2500));
}
