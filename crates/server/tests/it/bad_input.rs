//! Wrong input is refused with the right code, a remedy, and nothing half-written.

use crate::home::Home;

#[test]
fn what_a_lane_cannot_take() {
    let home = Home::sqlite();
    home.write("big", &"x".repeat((1 << 20) + 1)).write("limit", &"x".repeat(1 << 20));
    let refused = |args: &[&str], says: &[&str]| home.run(&[&["enqueue"], args].concat()).refused(2, says);
    refused(&["nope", "--payload", "x"], &["no lane `nope`", "log", "[lane.nope]"]);
    refused(&["no pe", "--payload", "x"], &["is no lane name"]);
    refused(&["webhooks", "--payload", "x"], &["has an owner", "postrider webhooks"]);
    refused(&["orders", "--payload", "x"], &["has an owner", "postrider orders"]);
    refused(&["memory", "--payload", "x"], &["memory gateway", "[memory] url"]);
    refused(&["log", "--payload-file", "big"], &["more than 1048576 bytes", "max_payload_bytes"]);
    refused(&["log", "--payload", "x", "--key", &"k".repeat(256)], &["256 bytes", "at most 255"]);
    refused(&["log", "--payload", "x", "--key", ""], &["empty"]);
    refused(&["log", "--payload", "x", "--active-key", &"k".repeat(256)], &["at most 255"]);
    refused(&["log", "--payload", "x", "--target", &"k".repeat(1025)], &["at most 1024"]);
    refused(&["log", "--payload", "x", "--delay", "soon"], &["5s"]);
    refused(&["log", "--payload", "x", "--deliver-before", "tomorrow"], &["2026-03-01T12:00:00Z"]);
    refused(&["log", "--payload-file", "not there"], &["cannot read not there"]);
    refused(&["log", "--ndjson", "not there"], &["cannot read not there"]);
    refused(&["log"], &["--payload"]);
    refused(&["log", "--payload", "x", "--ndjson", "-"], &["cannot be used with"]);
    refused(&["log", "--ndjson", "-", "--key", "k"], &["cannot be used with"]);
    assert!(!home.path("postrider.db").exists(), "nothing of all this created a database");
    home.enqueue(&["log", "--payload-file", "limit", "--key", &"k".repeat(255)]);
}

#[test]
fn databases_that_are_not_there() {
    let home = Home::sqlite();
    home.write("folder-is-a-file", "").write("garbage.db", &"no database ".repeat(100));
    let migrate = |url: &str| home.run(&["--database", url, "migrate"]);
    migrate("sqlite:///no/such/folder/x.db").refused(3, &["/no/such/folder/x.db", "choose a folder"]);
    migrate("sqlite://folder-is-a-file/x.db").refused(3, &["folder-is-a-file"]);
    migrate("sqlite://garbage.db").refused(3, &["garbage.db"]);
    migrate("postgres://127.0.0.1:1/x").refused(3, &["127.0.0.1:1", "is it running"]);
    migrate("mysql://127.0.0.1:1/x").refused(3, &["127.0.0.1:1", "is it running"]);
    migrate("oracle://x").refused(2, &["sqlite://FILE", "postgres://", "mysql://"]);
    migrate("sqlite://").refused(2, &["names no file"]);
    let secret = home.run(&["--database", "postgres://me:hush@127.0.0.1:1/x", "worker", "--once"]);
    assert!(!secret.stderr.contains("hush"), "{secret:?}");
    secret.refused(3, &["127.0.0.1:1"]);
    home.run(&["outbox", "stats"]).refused(3, &["there is no database postrider.db"]);
    assert!(!home.path("postrider.db").exists(), "looking creates nothing");
}

#[test]
fn wrong_usage() {
    let home = Home::sqlite();
    home.run(&["migrate"]).done();
    for args in [
        &["fly"][..],
        &["outbox", "requeue"],
        &["outbox", "requeue", "--dead"],
        &["outbox", "requeue", "--lane", "log"],
        &["outbox", "requeue", "1", "--lane", "log", "--dead"],
        &["outbox", "release"],
        &["outbox", "release", "1", "--expired"],
        &["outbox", "show", "one"],
        &["outbox", "list", "--limit", "0"],
        &["outbox", "purge", "--older-than", "7"],
        &["worker", "--concurrency", "0"],
        &["worker", "--lease-seconds", "0"],
        &["completions", "tcsh98"],
    ] {
        home.run(args).refused(2, &[]);
    }
    home.run(&["outbox", "show", "1"]).refused(1, &["no message 1"]);
}
