//! The gateway's answers while OpenMemory is away, as their specification has them: field by field, in the answer, in the outbox
//! and in the audit; and what a caller can do about what was deferred.

use serde_json::{Value, json};

use crate::api::{Response, Server};
use crate::home::{Home, wait_until};
use crate::memory::{OpenMemory, assert_deferred, configured, on_every_database, store};
use crate::scratch::Database;

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];

fn post(server: &Server, path: &str, body: &Value) -> Response {
    server.post(path, &JSON, &body.to_string())
}

fn audit(server: &Server, outbox_id: i64) -> Value {
    let rows = server.get(&format!("/v1/audit?outbox_id={outbox_id}")).answered(200).json();
    rows["items"].as_array().unwrap().last().unwrap().clone()
}

#[test]
fn the_printed_request_is_deferred_with_all_that_was_promised() {
    on_every_database(|home| {
        let mut memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "[lane.memory]\nbackoff_sec = [1]\n");
        let server = Server::start(&home, &["--no-workers"]);
        memory.stop();
        let printed = r#"{"tool": "memory_store", "arguments": {"payload_md": "test", "target_space": "team:test"}}"#;
        let answer = server.post("/mcp", &[("content-type", "application/json")], printed).answered(202);
        let header = answer.header("x-correlation-id").unwrap().to_owned();
        let answer = answer.json();
        let id = assert_deferred(&answer);
        assert_eq!(answer["correlation_id"], json!(header));
        let message = answer["message"].as_str().unwrap();
        assert!(
            message.contains("openmemory_write_failed:") && message.contains("queued"),
            "it names the cause: {message}"
        );

        // By its id it can be looked up, and its queue is the gateway's alone.
        let queued = server.get(&format!("/v1/outbox/{id}")).answered(200).json();
        assert_eq!((&queued["status"], &queued["correlation_id"]), (&json!("pending"), &answer["correlation_id"]));
        server.post("/v1/outbox/memory", &[], "x").refused(409, "LANE_OWNED");

        let pending = "outbox_memory WHERE status = 'pending'";
        assert_eq!(home.number(&format!("SELECT COUNT(*) FROM {pending}")), 1);
        let why = home.text(&format!("SELECT last_error FROM {pending}"));
        assert!(why.starts_with("openmemory_write_failed:") && message.contains(&why), "{why}");
        if matches!(home.database, Database::Postgres { .. }) {
            let rows = home.rows("SELECT * FROM logbook.outbox_memory WHERE status = 'pending'");
            assert_eq!(rows.len(), 1, "as it is printed");
        }
        let row = audit(&server, id);
        assert_eq!(
            (&row["action"], &row["status"], &row["reason"]),
            (&json!("redirect"), &json!("redirected"), &json!(why))
        );
        let evidence = match &row["evidence_refs_json"] {
            Value::String(text) => serde_json::from_str(text).unwrap(),
            other => other.clone(),
        };
        assert_eq!(evidence["outbox_id"], json!(id), "an integer, as in the answer: {evidence}");
        assert_eq!(evidence["extra"]["correlation_id"], answer["correlation_id"], "{evidence}");

        if matches!(home.database, Database::Postgres { .. }) {
            let row = home.rows(
                "SELECT action, reason, evidence_refs_json->>'outbox_id', evidence_refs_json#>>'{extra,correlation_id}'
                 FROM governance.write_audit",
            );
            assert_eq!(row, [["redirect", &why, &id.to_string(), &header]]);
        }

        let refs = json!(["mr://project/123"]);
        let body = json!({"payload_md": "with evidence", "target_space": "team:test", "evidence_refs": refs});
        let answer = post(&server, "/memory/store", &body).answered(202).json();
        assert_eq!(answer["evidence_refs"], refs, "they are given back");
        assert_deferred(&answer);
        drop(server);

        // The project's settings are there from its first store on, and allow everything.
        let settings = home.rows("SELECT project_key, team_write_enabled, updated_by FROM governance_settings");
        assert_eq!(
            (settings.len(), settings[0][0].as_str(), settings[0][2].as_str()),
            (1, "test", "default"),
            "{settings:?}"
        );

        memory.start_again(&home);
        home.run(&["worker", "--lane", "memory", "--once"]).done();
        let mut contents = memory.contents();
        contents.sort();
        assert_eq!(contents, ["test", "with evidence"]);
        assert_eq!(home.text(&format!("SELECT status FROM outbox_memory WHERE outbox_id = {id}")), "sent");
    });
}

#[test]
fn every_answer_has_the_id_of_its_request() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &["--no-workers"]);
    let tool = |name: &str, arguments: Value| json!({ "tool": name, "arguments": arguments });
    let id = [("content-type", "application/json"), ("x-correlation-id", "corr-7")];
    for (method, path, body) in [
        ("POST", "/memory/store", json!({"payload_md": "a", "target_space": "team:a"})),
        ("POST", "/memory/store", json!({"payload_md": ""})),
        ("POST", "/memory/store", json!({"nonsense": 1})),
        ("POST", "/memory/query", json!({"query": "a"})),
        ("POST", "/memory/query", json!([])),
        ("GET", "/reliability/report", Value::Null),
        ("POST", "/v1/reconcile", json!({})),
        ("POST", "/mcp", tool("outbox_status", json!({}))),
        ("POST", "/mcp", tool("outbox_requeue", json!({"ids": [1]}))),
        ("POST", "/mcp", tool("reliability_report", json!({}))),
        ("POST", "/mcp", tool("reconcile", json!({"report": true}))),
        ("POST", "/mcp", tool("unknown", json!({}))),
        ("GET", "/v1/outbox/999", Value::Null),
        ("GET", "/nowhere", Value::Null),
    ] {
        let body_text = if body.is_null() { String::new() } else { body.to_string() };
        let answer = server.request(method, path, &id, body_text.as_bytes());
        assert_eq!(answer.header("x-correlation-id"), Some("corr-7"), "{path}");
        assert_eq!(answer.json()["correlation_id"], "corr-7", "{method} {path} {body}: {answer:?}");
    }
}

#[test]
fn a_store_that_skips_openmemory_is_queued_without_a_call() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let server = Server::start(&home, &["--no-workers"]);
    let skipping = |text: &str, names: Value| {
        post(&server, "/memory/store", &json!({"payload_md": text, "target_space": "team:a", "skip": names}))
    };
    let answer = skipping("later", json!(["openmemory"])).answered(202).json();
    let id = assert_deferred(&answer);
    assert!(answer["message"].as_str().unwrap().contains("as asked"), "{answer}");
    assert_eq!(audit(&server, id)["reason"], "openmemory_write_failed:skipped");
    assert!(memory.contents().is_empty(), "it was not called");
    skipping("now", json!(["reconcile"])).answered(200);
    for needed in ["audit", "outbox", "store"] {
        skipping("x", json!([needed])).refused(422, "INVALID_ARGUMENTS");
    }
    skipping("x", json!(["nonsense"])).refused(422, "INVALID_ARGUMENTS");
    assert_eq!(memory.contents(), ["now"]);
    home.run(&["memory", "flush"]).done();
    assert_eq!(memory.contents().len(), 2);
}

/// What was deferred can be tried now, over HTTP and by a tool.
#[test]
fn a_deferred_memory_can_be_tried_now() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "[lane.memory]\nbackoff_sec = [3600]\n");
        let server = Server::start(&home, &[]);
        memory.told(json!({ "mode": "fail_writes", "status": 500 }));
        let ids: Vec<i64> = ["by http", "by a tool"]
            .iter()
            .map(|text| assert_deferred(&store(&server, text, "team:a").answered(202).json()))
            .collect();
        for id in &ids {
            wait_until("it was tried and waits an hour", || {
                let shown = home.show(*id);
                shown["attempts"] == 1 && shown["status"] == "pending"
            });
        }
        memory.told(json!({ "mode": "well" }));
        let answer = server.post(&format!("/v1/outbox/{}/retry", ids[0]), &[], "").answered(200).json();
        assert_eq!(answer, json!({"id": ids[0], "outcome": "retried"}));
        let tool = json!({"tool": "outbox_requeue", "arguments": {"ids": [ids[1]]}});
        let answer = post(&server, "/mcp", &tool).answered(200).json();
        assert_eq!(answer["results"], json!([{"id": ids[1], "outcome": "not_dead", "retried": true}]), "{answer}");
        for id in &ids {
            wait_until("it is written", || home.show(*id)["status"] == "sent");
        }
        let ended = server.post(&format!("/v1/outbox/{}/retry", ids[0]), &[], "").answered(200).json();
        assert_eq!(ended["outcome"], "ended");
        server.post("/v1/outbox/999/retry", &[], "").refused(404, "NOT_FOUND");
    });
}
