//! The reference page of `postrider.toml`, printed by `postrider config reference`. A test holds it against what the
//! parser really knows, another holds `docs/configuration.md` against it.

/// One section of the file.
pub struct Section {
    pub name: &'static str,
    pub about: &'static str,
    pub keys: &'static [Key],
}

/// One key: its name, what it is when left out, and what it means.
pub struct Key(pub &'static str, pub &'static str, pub &'static str);

pub(super) const SECTIONS: &[Section] = &[
    Section {
        name: "",
        about: "At the top of the file, before any section.",
        keys: &[
            Key(
                "database",
                "`\"sqlite://postrider.db\"`",
                "`sqlite://FILE`, `postgres://…` or `mysql://…`; may be a reference. `--database`, `POSTRIDER_DATABASE` and, where nothing else says, `POSTGRES_DSN` too.",
            ),
            Key("listen", "`\"127.0.0.1:8787\"`", "Where `serve` listens. Beyond loopback tokens are needed."),
        ],
    },
    Section {
        name: "outbox",
        about: "For all lanes. A lane's own section wins, `OUTBOX_*` in the environment wins over both.",
        keys: &[
            Key("enabled", "`true`", "`false`: nothing is claimed; messages are still taken in. `OUTBOX_ENABLED`."),
            Key("concurrency", "`64`", "Deliveries at a time, per lane and process. `OUTBOX_CONCURRENCY`."),
            Key("batch", "`256`", "Messages per claim. `OUTBOX_BATCH`."),
            Key("poll_interval_sec", "`0.5`", "How often an idle worker looks. `OUTBOX_POLL_INTERVAL_SEC`."),
            Key(
                "lock_lease_sec",
                "`60`",
                "How long a message is held before others may take it over; renewed at a third. `OUTBOX_LOCK_LEASE_SEC`.",
            ),
            Key("max_attempts", "`8`", "Outcomes before a message is dead. `OUTBOX_MAX_ATTEMPTS`."),
            Key(
                "max_crashes",
                "`5`",
                "Workers a message may take with it before it is buried as `POISON`. `OUTBOX_MAX_CRASHES`.",
            ),
            Key(
                "backoff",
                "exponential",
                "`{ kind = \"exponential\", base_sec = 60, max_sec = 3600, jitter = 0.3 }`, `{ kind = \"table\", sec = [5, 10] }` or `{ kind = \"doubling\", base_sec = 30 }`.",
            ),
            Key("backoff_sec", "", "`[5, 10, 20]`: a table, shorter to write. `OUTBOX_BACKOFF_SEC=5,10,20`."),
            Key("drain_timeout_sec", "`20`", "How long a shutdown may take. `OUTBOX_DRAIN_TIMEOUT_SEC`."),
        ],
    },
    Section {
        name: "lane.NAME",
        about: "A lane of your own. `concurrency` to `backoff_sec` as in `[outbox]`.",
        keys: &[
            Key("courier", "needed", "`\"http\"`, `\"log\"` (prints) or `\"noop\"` (throws away)."),
            Key("url", "needed for http", "Where payloads are posted."),
            Key("timeout_ms", "`2500`", "For one delivery over HTTP, from DNS to the last byte."),
            Key(
                "headers",
                "",
                "`{ Name = \"value\" }` for every request. What looks like a credential must be a reference.",
            ),
            Key(
                "statuses",
                "",
                "For `http`: what an answer means where it differs from custom, `{ \"404\" = \"retry\", \"5xx\" = \"dead\" }`; `sent`, `retry` or `dead`, one status beats its hundred. By custom 2xx is sent; 408, 425, 429, 5xx and no answer at all are tried again (429 and 503 not before their `Retry-After`); 3xx, which is not followed, and every other 4xx are dead.",
            ),
            Key(
                "guard",
                "`false`",
                "For `http`; `true`: the address is guarded as those of webhooks are, with what `[webhooks]` allows: for a URL that is not wholly your own.",
            ),
            Key("show_payload", "`false`", "For `log`: print the payload too."),
            Key("concurrency", "`64`", "As in `[outbox]`."),
            Key("batch", "`256`", "As in `[outbox]`."),
            Key("poll_interval_sec", "`0.5`", "As in `[outbox]`."),
            Key("lock_lease_sec", "`60`", "As in `[outbox]`."),
            Key("max_attempts", "`8`", "As in `[outbox]`."),
            Key("max_crashes", "`5`", "As in `[outbox]`."),
            Key("backoff", "exponential", "As in `[outbox]`."),
            Key("backoff_sec", "", "As in `[outbox]`."),
            Key(
                "shards",
                "`1`",
                "Parts of the lane that are claimed apart. It may be changed at any time: workers also find what waits beyond.",
            ),
            Key("dedup", "`false`", "The same target and payload again, within `retention`, is not sent again."),
            Key("audit", "`false`", "A `write_audit` row for every outcome. It costs a write."),
            Key("retention", "`\"7d\"`", "How long ended messages are kept; `\"0\"` keeps none that were sent."),
            Key("key_ttl", "`\"7d\"`", "How long idempotency keys are remembered; at least `\"1s\"`."),
            Key("max_age", "of `[alerts]`", "An alert is raised when the oldest due message is older; `\"0\"`: never."),
            Key("max_payload_bytes", "`1048576`", "Larger ones are refused."),
        ],
    },
    Section {
        name: "webhooks",
        about: "How events are delivered to subscriptions, unless one says otherwise. `[lane.webhooks]` takes only `concurrency`, `batch`, `poll_interval_sec`, `lock_lease_sec` and `max_age`.",
        keys: &[
            Key("max_retry_limit", "`5`", "Attempts in all."),
            Key("base_delay_sec", "`30`", "The wait after the first failure; it doubles."),
            Key("jitter", "`0.0`", "Spreads waits by this part, up and down."),
            Key("timeout_ms", "`15000`", "For one attempt, from DNS to the last byte."),
            Key("allow_http", "`false`", "Take `http://` URLs too."),
            Key(
                "allow_cidrs",
                "`[]`",
                "Ranges of private addresses that may be sent to, like `[\"10.0.0.0/8\"]`. Cloud metadata stays closed.",
            ),
            Key("dns_servers", "the system's", "Name servers to ask instead, like `[\"10.0.0.2:53\"]`."),
            Key("retention", "`\"30d\"`", "How long ended deliveries, their attempts and events are kept."),
            Key(
                "disable_after",
                "`\"5d\"`",
                "A subscription that has only failed for so long is disabled, with an alert; `\"0\"`: never.",
            ),
        ],
    },
    Section {
        name: "orders",
        about: "Which broker executes orders. Without this section it is the paper broker, which executes nothing real. `[lane.orders]` takes the keys of a lane but those that say where it goes and how long it is kept; its defaults are concurrency 4, batch 32, lock_lease_sec 120, max_attempts 6, backoff_sec `[5, 10, 20, 40, 80, 160]`.",
        keys: &[
            Key("adapter", "`\"paper\"`", "`paper`, or `http` for a broker with a JSON API."),
            Key("timeout_ms", "`2500`", "For one order, until the broker has answered. `BROKER_TIMEOUT_MS`."),
            Key("ledger_ttl", "`\"48h\"`", "How long an order that has ended is remembered under its key."),
            Key(
                "strict_idempotency",
                "`false`",
                "After the IETF's draft: 409 while the first request is in flight, 422 for another order under the key.",
            ),
            Key(
                "idempotency",
                "needed for http",
                "What the broker does with an order sent twice: `key` (executes an `Idempotency-Key` once), `look_up` (can be asked about a key), `none`.",
            ),
            Key("settling_sec", "`5`", "For `look_up`: how long after a send the broker's answer can be relied on."),
            Key("url", "needed for http", "Where orders are posted."),
            Key("look_up_url", "needed for look_up", "Where a key is looked up, with `{key}` in it."),
            Key(
                "guard",
                "`false`",
                "For `http`; `true`: the address is guarded as those of webhooks are, with what `[webhooks]` allows.",
            ),
            Key("headers", "", "As of a lane. References are read again when the broker answers 401 or 403."),
            Key(
                "statuses",
                "",
                "What the broker's statuses mean where it differs from custom: `{ \"409\" = \"already_processed\" }`. Words: `executed`, `already_processed`, `rejected`, `bad_request`, `unauthorized`, `rate_limited`, `server_error`, `nothing_done` (the broker failed and surely did nothing), `timeout`, `unknown`.",
            ),
            Key("latency_ms", "`0`", "For `paper`: how long it takes."),
            Key(
                "faults",
                "",
                "For `paper`: how often it misbehaves, `{ reject = 0.1, partial = 0.1, fail = 0.1, timeout = 0.1, lose_reply = 0.1 }`.",
            ),
        ],
    },
    Section {
        name: "memory",
        about: "The memory gateway, which exists where this section does. `[lane.memory]` takes the keys of a lane but those that say where it goes; its defaults are concurrency 10, batch 10, lock_lease_sec 120, max_attempts 5.",
        keys: &[
            Key(
                "guard",
                "`false`",
                "`true`: the address is guarded as those of webhooks are, with what `[webhooks]` allows.",
            ),
            Key("url", "", "Where OpenMemory is, like `\"http://127.0.0.1:8080\"`. Without it every memory is queued."),
            Key("api_key", "", "Its key, as a reference. Read again when OpenMemory refuses the one in use."),
            Key("timeout_ms", "`5000`", "For one call, at most 10000."),
            Key(
                "breaker",
                "`{ failures = 3, probe_sec = 5 }`",
                "After so many failures in a row nobody waits for OpenMemory; it is looked for this often until it is back.",
            ),
            Key("default_space", "`\"team:default\"`", "Where a memory goes that names no space."),
            Key(
                "doubt_sec",
                "`60`",
                "For so long a write that got no answer in time may still be applied; it is looked for, and not written again before. Twelve timeouts, if those are longer.",
            ),
            Key(
                "consume_scm",
                "`false`",
                "`serve` and `worker` make memories of what `scm sync` read, by themselves; else `scm consume` does.",
            ),
        ],
    },
    Section {
        name: "gate",
        about: "How much must work for `/health` and `postrider gate` to pass. `GATEWAY_SKIP_<CAPABILITY>=1` in the environment leaves out a capability, too.",
        keys: &[
            Key("mode", "`\"FULL\"`", "`FULL`: every capability; `DEGRADED`: what can, and the rest is said."),
            Key("skip_store", "`false`", "Leave it out."),
            Key("skip_outbox", "`false`", "Leave it out."),
            Key("skip_audit", "`false`", "Leave it out."),
            Key("skip_openmemory", "`false`", "Leave it out."),
            Key("skip_reconcile", "`false`", "Leave it out."),
        ],
    },
    Section {
        name: "doctor",
        about: "What `postrider doctor` does when asked, `serve` does by itself, without repairing anything.",
        keys: &[Key("every", "`\"1h\"`", "How often; `\"0\"`: only when asked, by `POST /v1/doctor`.")],
    },
    Section {
        name: "verify",
        about: "How `postrider verify --full` stops and starts your OpenMemory; without this section it uses a stand-in of its own.",
        keys: &[
            Key("stop_command", "needed", "For a shell, like `\"docker stop openmemory\"`."),
            Key("start_command", "needed", "For a shell, like `\"docker start openmemory\"`."),
        ],
    },
    Section {
        name: "secrets",
        about: "Secrets of subscriptions are encrypted in the database.",
        keys: &[Key(
            "key",
            "`\"file:postrider.key\"`",
            "Where the key is kept: lines of `ID:BASE64` (32 bytes each), the first encrypts. A file that is not there is made by the first process on the database that needs it; whoever else does not hold it answers 503 `SECRETS_KEY_MISSING` for what needs it and fails its health. To rotate, put a new line in front and run `postrider webhooks reseal`.",
        )],
    },
    Section {
        name: "http",
        about: "The connections `serve` bears. Beyond the limits `/livez`, `/readyz` and `/health` are still answered, and everything else with 503 `OVERLOADED`.",
        keys: &[
            Key(
                "max_connections",
                "`10000`",
                "In all. The limit of open files (`ulimit -n`) is raised for them as far as it goes; where it allows fewer, there are fewer, and the log says so.",
            ),
            Key("max_connections_per_peer", "`2500`", "Of one address; of IPv6, of one /64. `0`: no limit."),
            Key(
                "idle_timeout_sec",
                "`15`",
                "A connection without a request under way is closed after this time, in HTTP/2 too, whatever it pings; also the time for a TLS handshake and for a request's head.",
            ),
            Key(
                "write_timeout_sec",
                "`30`",
                "A connection whose client takes nothing of an answer for this time is ended. In HTTP/2 that goes for each answer: the least is 4 KiB.",
            ),
            Key(
                "trusted_proxies",
                "`[]`",
                "Addresses like `\"10.0.0.0/8\"` that speak for many: not counted in `max_connections_per_peer`. It opens nothing: without a token whatever a proxy has passed on is refused (403 `FORWARDED_WITHOUT_TOKEN`).",
            ),
        ],
    },
    Section {
        name: "auth",
        about: "Who may use the API.",
        keys: &[
            Key(
                "mode",
                "`\"auto\"`",
                "`auto`: tokens beyond loopback; `always`: everywhere. Make one with `postrider token create`.",
            ),
            Key(
                "session_ttl",
                "`\"12h\"`",
                "How long a browser stays signed in to the dashboard. A session also ends when it signs out, and with its token.",
            ),
        ],
    },
    Section {
        name: "tls",
        about: "HTTPS for `serve`, where it is configured.",
        keys: &[
            Key("cert", "needed", "A PEM file with the certificate and its chain."),
            Key("key", "needed", "A PEM file with its private key."),
        ],
    },
    Section {
        name: "telemetry",
        about: "What is told about the work.",
        keys: &[
            Key("log", "`\"text\"`", "`text` or `json`, to standard error. `--log`; `RUST_LOG` chooses how much."),
            Key(
                "otlp_endpoint",
                "",
                "An OpenTelemetry collector for traces over HTTP, like `\"http://127.0.0.1:4318\"`. `OTEL_EXPORTER_OTLP_ENDPOINT`; headers from `OTEL_EXPORTER_OTLP_HEADERS`.",
            ),
            Key(
                "guard",
                "`false`",
                "`true`: the address is guarded as those of webhooks are, with what `[webhooks]` allows.",
            ),
        ],
    },
    Section {
        name: "alerts",
        about: "Where troubles are told: dead messages, lanes that wait too long. Sent through the lane `alerts`, so they survive what a message survives.",
        keys: &[
            Key(
                "url",
                "needed",
                "Alerts are posted here as JSON; may be a reference. Chat programs show their `text`.",
            ),
            Key("headers", "", "As of a lane."),
            Key(
                "guard",
                "`false`",
                "`true`: the address is guarded as those of webhooks are, with what `[webhooks]` allows.",
            ),
            Key("every", "`\"5m\"`", "The same trouble is told at most once in this time."),
            Key("max_age", "`\"15m\"`", "A lane whose oldest due message is older is in trouble; `\"0\"`: never."),
        ],
    },
];

const HEAD: &str = "<!-- Printed by `postrider config reference`; edit crates/server/src/config/reference.rs. -->
# Configuration

`postrider.toml` in the working directory, or the file named with `--config`. Everything may be left out: without a file
there is an embedded database, the lanes `webhooks` and `orders` (on the paper broker), and a lane `log` that prints. What is wrong is refused before anything starts, with the line
and what to write instead: `postrider config check`. What is in force: `postrider config print`.

Secrets are never written here but where they are kept: `\"env:NAME\"`, `\"file:PATH\"`, or `\"exec:COMMAND\"` (a secrets
manager's own client). Durations have a unit: `\"500ms\"`, `\"5s\"`, `\"10m\"`, `\"2h\"`, `\"7d\"`.

A setting is taken from the last of these that has it: the lane's default, `[outbox]`, `[lane.NAME]`, the environment.
";

/// The page, as Markdown.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for section in SECTIONS {
        let title = if section.name.is_empty() { "The top".to_owned() } else { format!("`[{}]`", section.name) };
        page.push_str(&format!(
            "\n## {title}\n\n{}\n\n| key | when left out | meaning |\n| --- | --- | --- |\n",
            section.about
        ));
        for Key(name, usual, meaning) in section.keys {
            page.push_str(&format!("| `{name}` | {usual} | {} |\n", meaning.replace('|', "\\|")));
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn it_names_exactly_the_keys_the_parser_knows() {
        let sections: BTreeSet<&str> = SECTIONS.iter().map(|s| s.name.split('.').next().unwrap_or_default()).collect();
        for section in SECTIONS {
            let head = if section.name.is_empty() {
                String::new()
            } else {
                format!("[{}]\n", section.name.replace("NAME", "x"))
            };
            let refused = super::super::read(Path::new("f"), &format!("{head}zzzzzz = 1\n"), |_| None);
            let words = refused.expect_err("an unknown key").message().to_owned();
            let known = words.split_once("known here: ").unwrap_or_else(|| panic!("{words}")).1;
            let known: BTreeSet<&str> = known
                .split(", ")
                .filter(|key| {
                    // At the top the parser also knows the sections; those of parts to come are not for this page.
                    !section.name.is_empty() || !(sections.contains(key) || LATER.contains(key))
                })
                .collect();
            let told: BTreeSet<&str> = section.keys.iter().map(|key| key.0).collect();
            assert_eq!(told, known, "[{}]", section.name);
        }
    }

    const LATER: [&str; 1] = ["store"];

    #[test]
    fn the_documentation_is_this_page() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        let text = std::fs::read_to_string(file).unwrap_or_default();
        assert!(
            text == page(),
            "docs/configuration.md is out of date: postrider config reference > docs/configuration.md"
        );
    }
}
