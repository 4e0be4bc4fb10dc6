//! What the doctor finds where ledger and outbox were brought apart, what it repairs, and what it leaves to people.

use std::time::Duration;

use postrider::doctor::{Case, Check, Examine};
use postrider_orders::{By, ByHand, Idempotency, Settings, Status};
use proving::kit::Session;

use crate::harness::{Act, Ground, Home, on_every_store, wait_until};

on_every_store!(
    a_healthy_house_has_no_findings,
    an_entry_without_a_message_is_found_and_settled_by_hand,
    the_end_of_a_message_is_written_into_the_ledger,
    what_is_parked_for_nobody_is_woken,
    strangers_are_reaped,
);

async fn found(home: &Home) -> Vec<Case> {
    home.orders.look(Duration::ZERO).await.unwrap()
}

fn kinds(cases: &[Case]) -> Vec<(Check, &'static str)> {
    cases.iter().map(|case| (case.ailment.check, case.ailment.part)).collect()
}

const AGAINST: (Check, &str) = (Check::LedgerAgainstOutbox, "orders");
const IN_VAIN: (Check, &str) = (Check::WaitsInVain, "orders");

async fn a_healthy_house_has_no_findings(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    home.broker.next(&[
        Act::Fill,
        Act::Refuse(postrider_orders::decide::Reason::Rejected, postrider::outcome::Reach::Answered),
    ]);
    for key in ["sent", "refused"] {
        home.place(key).await;
        let working = home.work();
        wait_until("it has ended", async || ["succeeded", "aborted"].contains(&home.view(key).await.0.as_str())).await;
        working.end().await;
    }
    home.broker.next(&[Act::LoseReply]);
    home.place("parked").await;
    home.work_until("parked", "NEEDS_RECONCILE").await;
    home.place("waiting").await;
    assert_eq!(found(&home).await, [], "nor after a second look");
    assert_eq!(found(&home).await, []);
    assert_eq!(home.orders.reap().await.unwrap(), 0);
    assert_eq!(home.view("parked").await.2.as_deref(), Some("NEEDS_RECONCILE"), "the janitor leaves it alone");
}

async fn an_entry_without_a_message_is_found_and_settled_by_hand(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    for key in ["a", "b"] {
        let id = home.place(key).await;
        home.execute(&format!("DELETE FROM outbox WHERE id = {id}")).await.unwrap();
    }
    let cases = found(&home).await;
    assert_eq!(kinds(&cases), [AGAINST, AGAINST]);
    assert_eq!(home.orders.look(Duration::from_secs(3600)).await.unwrap(), [], "it has not stood so long");
    let cases = postrider::doctor::confirmed(&cases, found(&home).await);
    assert_eq!(cases.len(), 2);
    assert_eq!(home.orders.repair(&cases).await.unwrap(), [], "nobody but the broker knows");
    let by = || By { actor: "ann".to_owned(), reason: None };
    for (key, executed, status) in [("a", true, Status::Succeeded), ("b", false, Status::Failed)] {
        let reference = executed.then(|| "r-1".to_owned());
        let ByHand::Done(entry) = home.orders.settle(key, executed, reference.clone(), by()).await.unwrap() else {
            panic!("{key} is settled")
        };
        assert_eq!((entry.status, entry.broker_ref), (status, reference));
        assert!(matches!(home.orders.settle(key, executed, None, by()).await.unwrap(), ByHand::Refused(_)), "once");
    }
    assert_eq!(found(&home).await, []);
}

/// As an older version, or somebody with a client of the database, could leave it.
async fn the_end_of_a_message_is_written_into_the_ledger(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    let dialect = home.outbox.store().dialect().name();
    let truth = if dialect == "postgres" { "TRUE" } else { "1" };
    let columns = "id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, locked_at, target, active_key, payload, content_type, headers, payload_sha, last_error_code, last_error, correlation_id, created_at, updated_at, deliver_before";
    for (key, status, doubt) in [("sent", "sent", false), ("dead", "dead", false), ("in doubt", "dead", true)] {
        let id = home.place(key).await;
        let code = if status == "dead" { "'BROKER_REJECTED'" } else { "NULL" };
        home.execute(&format!("UPDATE outbox SET last_error_code = {code} WHERE id = {id}")).await.unwrap();
        if doubt {
            home.execute(&format!("UPDATE outbox SET maybe_sent = {truth} WHERE id = {id}")).await.unwrap();
        }
        home.execute(&format!(
            "INSERT INTO outbox_done ({columns}, status, result_ref, finished_at) SELECT {columns}, '{status}', 'r-9', updated_at FROM outbox WHERE id = {id}"
        ))
        .await
        .unwrap();
        home.execute(&format!("DELETE FROM outbox WHERE id = {id}")).await.unwrap();
    }
    let cases = found(&home).await;
    assert_eq!(kinds(&cases), [AGAINST; 3]);
    let repaired = home.orders.repair(&cases).await.unwrap();
    assert_eq!(repaired.len(), 2, "what may have been executed is for a person");
    let entry = home.entry("sent").await;
    assert_eq!(
        (entry.status, entry.http_status, entry.broker_ref.as_deref()),
        (Status::Succeeded, Some(200), Some("r-9"))
    );
    let entry = home.entry("dead").await;
    assert_eq!(
        (entry.status, entry.http_status, entry.reason_code.as_deref()),
        (Status::Failed, Some(409), Some("BROKER_REJECTED"))
    );
    assert_eq!(home.entry("in doubt").await.status, Status::InProgress);
    let events = home.orders.events("dead").await.unwrap();
    assert_eq!(events[0].actor, "doctor");
    let left = found(&home).await;
    assert_eq!(kinds(&left), [AGAINST], "it is told again until somebody settles it");
    assert_eq!(home.orders.repair(&cases).await.unwrap(), [], "each is checked again");
    let by = By { actor: "ann".to_owned(), reason: None };
    assert!(matches!(home.orders.settle("in doubt", true, None, by).await.unwrap(), ByHand::Done(_)));
    assert!(home.entry("in doubt").await.outbox_id.is_some(), "it goes with its message, in time");
    assert_eq!(found(&home).await, []);
}

async fn what_is_parked_for_nobody_is_woken(ground: Ground) {
    let url = ground.url().to_owned();
    let home = ground.open(Idempotency::None).await;
    let dialect = home.outbox.store().dialect().name();
    let ago = match dialect {
        "sqlite" => "updated_at - 3600000000",
        "postgres" => "updated_at - INTERVAL '1 hour'",
        _ => "updated_at - INTERVAL 1 HOUR",
    };
    for key in ["ended", "unlisted"] {
        home.broker.next(&[Act::LoseReply]);
        home.place(key).await;
        home.work_until(key, "NEEDS_RECONCILE").await;
    }
    // The ledger has an end the message did not hear of; a code that was overwritten.
    let far = if dialect == "sqlite" { "253402300799000000" } else { "'9999-12-31 23:59:59'" };
    home.execute(&format!(
        "UPDATE idempo_ledger SET status = 'succeeded', http_status = 200, response_payload_json = '{{}}', finished_at = first_seen_at, expires_at = {far} WHERE idempotency_key = 'ended'"
    ))
    .await
    .unwrap();
    home.execute("UPDATE outbox SET last_error_code = 'TARGET_BUSY' WHERE active_key = 'unlisted'").await.unwrap();
    home.execute(&format!("UPDATE outbox SET updated_at = {ago}")).await.unwrap();
    let mut seen = kinds(&found(&home).await);
    seen.sort_unstable();
    assert_eq!(seen, [IN_VAIN, AGAINST]);
    // One of them is somebody's: the other does not wait for that.
    if dialect != "sqlite" {
        // By its id: whatever InnoDB looks at, it locks.
        let first = Session::to(&url).await.number("SELECT MIN(id) FROM outbox").await;
        let stranger = Session::holding(&url, &format!("outbox WHERE id = {first}")).await;
        let mended = home.orders.repair(&found(&home).await).await.unwrap();
        assert_eq!(kinds(&mended), [IN_VAIN]);
        drop(stranger);
        home.work_until("unlisted", "NEEDS_RECONCILE").await;
        home.execute("UPDATE outbox SET last_error_code = 'TARGET_BUSY' WHERE active_key = 'unlisted'").await.unwrap();
        home.execute(&format!("UPDATE outbox SET updated_at = {ago}")).await.unwrap();
    }
    // The janitor does it by itself.
    assert_eq!(home.orders.reap().await.unwrap(), 0);
    assert_eq!(found(&home).await, []);
    home.work_until("ended", "succeeded").await;
    home.work_until("unlisted", "NEEDS_RECONCILE").await;
    assert_eq!(home.broker.sends(), 2, "neither was sent again");
}

/// Another order has their key: they end, and go when their time is over.
async fn strangers_are_reaped(ground: Ground) {
    let settings = Settings { ledger_ttl: Duration::from_millis(1), ..Settings::default() };
    let home = ground.open_with(Idempotency::Key, settings).await;
    let id = home.place("k").await;
    home.work_until("k", "succeeded").await;
    let payload = crate::harness::order("9").canonical().to_owned();
    let value = match home.outbox.store().dialect().name() {
        "postgres" => format!("'{payload}'::bytea"),
        _ => format!("'{payload}'"),
    };
    let columns = "lane, shard_id, due_at, lease_token, attempts, crashes, target, active_key, content_type, created_at, updated_at";
    home.execute(&format!(
        "INSERT INTO outbox ({columns}, payload) SELECT {columns}, {value} FROM outbox_done WHERE id = {id}"
    ))
    .await
    .unwrap();
    let working = home.work();
    let aborted = "outbox_done WHERE last_error_code = 'IDEMPOTENCY_CONFLICT'";
    wait_until("it is aborted", async || home.count(aborted).await == 1).await;
    working.end().await;
    wait_until("all of it is gone", async || {
        home.orders.reap().await.unwrap();
        home.count("outbox_done").await == 0
    })
    .await;
    assert_eq!(home.count("idempo_ledger").await + home.count("outbox_attempts").await, 0);
}
