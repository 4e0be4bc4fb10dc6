//! The gate over HTTP and on the command line, and `verify` with each of its steps broken on purpose.

use std::net::TcpListener;

use serde_json::{Value, json};

use crate::api::Server;
use crate::home::{Answer, Home};
use crate::memory::{OpenMemory, assert_deferred, configured, on_every_database, store};

#[test]
fn health_tells_what_works() {
    on_every_database(|home| {
        let server = Server::start(&home, &["--no-workers"]);
        let health = server.get("/health").answered(200).json();
        assert_eq!(
            (&health["ok"], &health["status"], &health["service"]),
            (&json!(true), &json!("ok"), &json!("postrider"))
        );
        assert_eq!(health["mode"], "FULL");
        assert_eq!(health["capabilities"], json!({"store": "ok", "outbox": "ok", "audit": "ok"}), "without a gateway");
        let (break_it, mend_it) = home.database.refuse("INSERT", "write_audit");
        home.execute(&break_it);
        crate::home::wait_until("the audit is seen to fail", || server.get("/health").status == 503);
        let health = server.get("/health").json();
        assert_eq!(health["reason"], "FULL mode: required capability audit failed");
        home.execute(&mend_it);
        crate::home::wait_until("it is well again", || server.get("/health").status == 200);
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit"), 0, "a probe leaves nothing behind");
    });
}

/// Each capability by itself: what fails is named, and fails the gate while it is required.
#[test]
fn each_required_capability_fails_the_gate_by_itself() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &[]);
        configured(&home, &memory, "");
        let server = Server::start(&home, &["--no-workers"]);
        server.get("/health").answered(200);
        for (capability, table, column) in [("reconcile", "write_audit", "outbox_id"), ("outbox", "outbox", "due_at")] {
            home.execute(&format!("ALTER TABLE {table} RENAME COLUMN {column} TO elsewhere"));
            crate::home::wait_until("it is seen to fail", || {
                server.get("/health").json()["capabilities"][capability] == "failed"
            });
            let health = server.get("/health").answered(503).json();
            assert_eq!(health["reason"], format!("FULL mode: required capability {capability} failed"));
            assert_eq!(server.get(&format!("/health?skip={capability}")).status, 200);
            home.execute(&format!("ALTER TABLE {table} RENAME COLUMN elsewhere TO {column}"));
            crate::home::wait_until("it is well again", || server.get("/health").status == 200);
        }
    });
}

/// A service so slow that a look at it takes longer than a request may: whoever asks is told so, in time.
#[test]
fn a_slow_openmemory_is_told_in_time() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &[]);
    home.write("postrider.toml", &format!("[memory]\nurl = \"{}\"\ntimeout_ms = 5000\n", memory.url()));
    let server = Server::start(&home, &["--no-workers"]);
    memory.told(json!({ "mode": "fail_writes", "status": 503 }));
    assert_deferred(&store(&server, "it failed", "team:a").answered(202).json());
    memory.told(json!({ "mode": "slow", "delay_ms": 4500 }));
    let health = || {
        let answer = server.get("/health");
        assert!([200, 503].contains(&answer.status), "{answer:#?}");
        answer.json()
    };
    crate::home::wait_until("it is told to be late", || {
        let health = health();
        assert_eq!(health["capabilities"]["store"], "ok", "{health}");
        health["capabilities"]["openmemory"] == "failed"
    });
    crate::home::wait_until("it answers after all", || health()["ok"] == true);
}

#[test]
fn the_three_ways_to_skip_and_no_other() {
    let home = Home::sqlite();
    let mut memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    let gate = |args: &[&str]| home.run(&[&["gate", "--json"], args].concat());
    let passed = gate(&[]).done().json();
    assert_eq!(passed["capabilities"]["openmemory"], json!({"status": "ok"}), "{passed}");
    assert_eq!(passed["capabilities"].as_object().unwrap().len(), 5);
    memory.stop();
    let failed = gate(&[]).ended(1).json();
    assert_eq!((&failed["mode"], &failed["passed"]), (&json!("FULL"), &json!(false)), "{failed}");
    assert_eq!(failed["reason"], "FULL mode: required capability openmemory failed");
    assert!(failed["capabilities"]["openmemory"]["detail"].as_str().unwrap().contains("CONNECT_REFUSED"));
    let degraded = gate(&["--mode", "DEGRADED"]).done().json();
    assert_eq!((&degraded["mode"], &degraded["passed"]), (&json!("DEGRADED"), &json!(true)));
    assert!(degraded["reason"].as_str().unwrap().contains("openmemory"), "{degraded}");

    let source = |answer: Answer| answer.done().json()["capabilities"]["openmemory"].clone();
    assert_eq!(source(gate(&["--skip", "openmemory"])), json!({"status": "skipped", "source": "request"}));
    gate(&["--skip", "everything"]).refused(2, &["no capability `everything`", "openmemory"]);
    let environment = |value: &str| {
        let output = home.command(&["gate", "--json"]).env("GATEWAY_SKIP_OPENMEMORY", value).output().unwrap();
        Answer::from(output)
    };
    assert_eq!(source(environment("1")), json!({"status": "skipped", "source": "environment"}));
    environment("0").ended(1);
    environment("yes").refused(2, &["GATEWAY_SKIP_OPENMEMORY"]);
    configured(&home, &memory, "[gate]\nskip_openmemory = true\n");
    assert_eq!(source(gate(&[])), json!({"status": "skipped", "source": "config"}));

    // The gate fails, and a store is taken all the same.
    configured(&home, &memory, "");
    let server = Server::start(&home, &["--no-workers"]);
    let health = server.get("/health").answered(503).json();
    assert_eq!((&health["status"], &health["capabilities"]["openmemory"]), (&json!("failed"), &json!("failed")));
    let skipped = server.get("/health?skip=openmemory").answered(200).json();
    assert_eq!((&skipped["status"], &skipped["capabilities"]["openmemory"]), (&json!("degraded"), &json!("skipped")));
    assert_eq!(skipped["skipped_by"], json!({"openmemory": "request"}), "the answer names the source");
    let both = server.get("/health?skip=openmemory,reconcile").answered(200).json();
    assert_eq!(both["skipped_by"], json!({"openmemory": "request", "reconcile": "request"}));
    server.get("/health?skip=everything").refused(400, "INVALID_REQUEST");
    assert_deferred(&store(&server, "kept whatever the gate says", "team:a").answered(202).json());
    let (_, log) = server.stop();
    assert!(log.contains("required capability openmemory failed"), "told at the start: {log}");
}

#[test]
fn without_its_database_the_gate_still_answers() {
    let home = Home::sqlite();
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("postgres://nobody@{nobody}/x");
    let gate = home.run(&["--database", &url, "gate", "--json"]).ended(1).json();
    assert_eq!(gate["capabilities"]["store"]["status"], "failed", "{gate}");
    assert_eq!(
        (&gate["passed"], &gate["reason"]),
        (&json!(false), &json!("FULL mode: required capability store failed"))
    );
    home.run(&["--database", "foo://x", "gate"]).refused(2, &["foo"]);
}

/// A stand-in keeps nothing, so nothing that waits for the real one may go there.
#[test]
fn verify_never_gives_a_backlog_to_its_stand_in() {
    let home = Home::sqlite();
    let mut memory = OpenMemory::start(&home, &[]);
    configured(&home, &memory, "");
    memory.stop();
    let id = assert_deferred(&home.run(&["memory", "store", "precious", "--json"]).done().json());
    assert_eq!(failed_step(home.run(&["verify", "--full", "--json"])), "precondition: control of OpenMemory");
    std::fs::remove_file(home.path("postrider.toml")).unwrap();
    assert_eq!(failed_step(home.run(&["verify", "--full", "--json"])), "precondition: empty queue");
    configured(&home, &memory, "");
    assert_eq!(home.show(id)["status"], "pending");
}

fn steps(report: &Value) -> Vec<(String, bool)> {
    let steps = report["steps"].as_array().unwrap().iter();
    steps.map(|step| (step["name"].as_str().unwrap().to_owned(), step["passed"].as_bool().unwrap())).collect()
}

/// The step that failed, and that it is the only one.
fn failed_step(answer: Answer) -> String {
    let report = answer.ended(1).json();
    assert_eq!(report["passed"], false, "{report}");
    let failed: Vec<String> = steps(&report).into_iter().filter(|(_, passed)| !passed).map(|(name, _)| name).collect();
    assert_eq!(failed.len(), 1, "{report:#}");
    failed[0].clone()
}

#[test]
fn verify_makes_an_outage_and_sees_it_end() {
    on_every_database(|home| {
        let short = home.run(&["verify", "--json"]).done().json();
        assert_eq!(short["passed"], true, "{short}");
        assert!(steps(&short).iter().all(|(name, _)| name != "stop OpenMemory"), "without --full nothing is stopped");
        let report = home.run(&["verify", "--full", "--json"]).done().json();
        let names: Vec<String> = steps(&report).into_iter().map(|(name, _)| name).collect();
        assert_eq!(
            names[names.len() - 4..],
            ["stop OpenMemory", "store is deferred", "start OpenMemory", "flush delivers"],
            "{report:#}"
        );
        assert!(
            report["steps"].as_array().unwrap().iter().all(|step| step["seen"].as_str().is_some_and(|s| !s.is_empty()))
        );
        home.run(&["verify", "--full"]).done();
        for table in ["memory_writes", "outbox"] {
            assert_eq!(home.number(&format!("SELECT COUNT(*) FROM {table}")), 0, "a trial leaves nothing behind");
        }
    });
}

/// The specification's own entry, as make would run it.
#[test]
fn make_verify_unified_runs_the_same_check() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let would_run = |variables: &[(&str, &str)]| {
        let mut make = std::process::Command::new("make");
        // Not as part of the make that may be running this test: that one would also tell its directory.
        make.args(["--dry-run", "verify-unified"]).current_dir(root);
        for name in ["VERIFY_FULL", "MAKEFLAGS", "MAKELEVEL", "POSTGRES_DSN", "POSTRIDER_DATABASE"] {
            make.env_remove(name);
        }
        let output = make.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    };
    let short = would_run(&[]);
    assert!(short.ends_with("postrider verify") && short.contains("sqlite"), "{short}");
    let full = would_run(&[("VERIFY_FULL", "1"), ("POSTGRES_DSN", "postgres://x/y")]);
    assert!(full.ends_with("postrider verify --full") && !full.contains("sqlite"), "on that database: {full}");
}

#[test]
fn verify_fails_at_each_step_that_is_broken() {
    on_every_database(verify_with_each_step_broken);
}

fn verify_with_each_step_broken(home: Home) {
    let memory = OpenMemory::start(&home, &[]);
    let pid = memory.pid();
    let program = env!("CARGO_BIN_EXE_postrider");
    let data = home.path("openmemory.ndjson");
    let start = format!(
        "{program} stand-in openmemory --listen {} --data {} >/dev/null 2>&1 & echo $! >pid",
        memory.address,
        data.display()
    );
    let stop = format!("kill $(cat pid 2>/dev/null || echo {pid})");
    let with = |stop: &str, start: &str| {
        home.write(
            "postrider.toml",
            &format!(
                "[memory]\nurl = \"{}\"\n[verify]\nstop_command = '{stop}'\nstart_command = '{start}'\n",
                memory.url()
            ),
        );
        home.run(&["verify", "--full", "--json"])
    };
    // Each command is the operator's own, and each may not do what it says.
    assert_eq!(failed_step(with("exit 3", "true")), "stop OpenMemory");
    assert_eq!(failed_step(with("true", "true")), "stop OpenMemory", "it ends well and stops nothing");
    let report = with(&stop, &start).done().json();
    assert_eq!(report["passed"], true, "{report:#}");
    // Nothing can be queued.
    let (break_it, mend_it) = home.database.refuse("INSERT", "outbox");
    home.execute(&break_it);
    assert_eq!(failed_step(with(&stop, &start)), "store is deferred");
    home.execute(&mend_it);
    // It comes back, and takes no memory.
    let broken = start.replace(" --data", " --mood {\\\"mode\\\":\\\"fail_writes\\\",\\\"status\\\":500} --data");
    assert_eq!(failed_step(with(&stop, &broken)), "flush delivers");
    // While it takes nothing the gate knows; then it does not come back.
    assert_eq!(failed_step(with(&stop, &start)), "gate");
    memory.told(json!({ "mode": "well" }));
    assert_eq!(failed_step(with(&stop, "exit 4")), "start OpenMemory");
    // And what is not there cannot be verified at all.
    assert_eq!(failed_step(with(&stop, &start)), "precondition: OpenMemory answers");
}
