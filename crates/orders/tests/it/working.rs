//! From the outbox to the broker and into the ledger: the flow of spec 003, and what is done about doubt.

use std::time::Duration;

use postrider::outcome::Reach;
use postrider_orders::decide::Reason;
use postrider_orders::{By, ByHand, Idempotency, Reopened, Settings, Status};
use proving::kit::Session;
use serde_json::Value;

use crate::harness::{Act, Ground, Home, on_every_store, wait_until};

const LOOK_UP: Idempotency = Idempotency::LookUp { settling: Duration::from_millis(50) };

on_every_store!(
    an_order_is_executed_and_its_answer_kept,
    a_timeout_is_not_forgotten,
    budgets_end_only_what_was_never_in_doubt,
    refusals_end_at_once,
    what_is_ours_costs_no_attempt,
    an_order_that_cannot_be_read_is_aborted_at_once,
    the_ledger_is_the_truth,
    the_ledger_ends_first_and_the_outbox_with_it,
    late_confirmation,
    a_message_without_an_entry_gets_one,
    a_crash_after_the_claim,
    a_crash_after_the_broker_executed,
    the_look_up_waits_anew_after_a_crash,
    parked_orders_wait_for_a_person,
    a_refusal_after_doubt_parks,
    a_failed_order_is_reopened,
    poison_in_doubt_is_parked,
    damage_strands_nobody,
    a_hand_that_died_half_way,
    an_adapter_that_fails_without_a_reason_is_tried_again,
);

fn by() -> By {
    By { actor: "operator:test".to_owned(), reason: Some("a test".to_owned()) }
}

async fn response(home: &Home, key: &str) -> Value {
    serde_json::from_str(&home.entry(key).await.response_payload_json.unwrap()).unwrap()
}

async fn an_order_is_executed_and_its_answer_kept(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("k").await;
    assert_eq!(home.view("k").await.0, "pending");
    home.work_until("k", "succeeded").await;
    let entry = home.entry("k").await;
    assert_eq!(
        (entry.status, entry.http_status, entry.broker_ref.as_deref()),
        (Status::Succeeded, Some(200), Some("ref-1"))
    );
    let result = response(&home, "k").await;
    assert_eq!(
        (&result["status"], &result["executed_qty"], &result["avg_price"]),
        (&"ok".into(), &1.into(), &10.into())
    );
    assert!(result.get("reason_code").is_none(), "{result}");
    let events = home.orders.events("k").await.unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!((events[0].from_status.as_deref(), events[0].to_status.as_str()), (Some("in_progress"), "succeeded"));
    assert_eq!(home.count("ledger_events WHERE key_hash = 'k'").await, 0, "events know keys by their hash");
}

/// The most common doubt: the retry must know of it.
async fn a_timeout_is_not_forgotten(ground: Ground) {
    let home = ground.open(LOOK_UP).await;
    home.broker.next(&[Act::LoseReply]);
    home.place("k").await;
    home.work_until("k", "succeeded").await;
    assert_eq!((home.broker.executions("k"), home.broker.sends()), (1, 1), "asked, not sent again");
    assert_eq!(response(&home, "k").await["reason_code"], "BROKER_ALREADY_PROCESSED");

    home.broker.next(&[Act::Refuse(Reason::Timeout, Reach::Unknown)]);
    home.place("never arrived").await;
    home.work_until("never arrived", "succeeded").await;
    assert_eq!((home.broker.executions("never arrived"), home.broker.sends()), (1, 3), "asked, then sent again");
}

async fn budgets_end_only_what_was_never_in_doubt(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    let fail = Act::Refuse(Reason::ServerError, Reach::Answered);
    home.broker.next(&[fail.clone(), fail.clone(), fail.clone()]);
    home.place("plain").await;
    home.work_until("plain", "aborted").await;
    let entry = home.entry("plain").await;
    assert_eq!(
        (entry.status, entry.http_status, entry.reason_code.as_deref()),
        (Status::Failed, Some(503), Some("BROKER_5XX"))
    );
    assert_eq!(home.view("plain").await.1, 3, "max_attempts of the harness");

    let timeout = Act::Refuse(Reason::Timeout, Reach::Unknown);
    home.broker.next(&[timeout, fail.clone(), fail.clone(), fail.clone(), fail]);
    home.place("doubtful").await;
    home.work_until("doubtful", "succeeded").await;
    assert_eq!(home.view("doubtful").await.1, 5, "more than the budget, and not given up");
    assert_eq!(home.told(IN_DOUBT).await, 0, "only the first attempt had no answer");

    let timeout = || Act::Refuse(Reason::Timeout, Reach::Unknown);
    home.broker.next(&[timeout(), timeout(), timeout(), timeout()]);
    home.place("silence").await;
    home.work_until("silence", "succeeded").await;
    assert_eq!(home.broker.executions("silence"), 1);
    assert!(home.told(IN_DOUBT).await > 0, "somebody is told once its attempts are used up");
}

/// The alert about a broker that does not answer.
const IN_DOUBT: &str = "orders_in_doubt";

async fn an_adapter_that_fails_without_a_reason_is_tried_again(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.broker.next(&[Act::Panic]);
    let id = home.place("once").await;
    home.work_until("once", "succeeded").await;
    assert_eq!((home.broker.executions("once"), home.broker.sends()), (1, 2));
    let history = home.rows(&format!("SELECT kind, code FROM outbox_attempts WHERE outbox_id = {id}")).await;
    let history: Vec<(String, String)> =
        history.iter().map(|row| (row.text(0).unwrap(), row.text(1).unwrap())).collect();
    assert_eq!(history, [("retry".to_owned(), "INTERNAL_ERROR".to_owned())]);

    home.broker.next(&[Act::Panic, Act::Panic, Act::Panic]);
    home.place("always").await;
    home.work_until("always", "aborted").await;
    let entry = home.entry("always").await;
    assert_eq!(
        (entry.status, entry.http_status, entry.reason_code.as_deref()),
        (Status::Failed, Some(500), Some("INTERNAL_ERROR"))
    );
    // Where nobody can tell what became of it, a person must.
    drop(home);
}

async fn refusals_end_at_once(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    for (reason, status) in [(Reason::Rejected, 409), (Reason::BadRequest, 400)] {
        let key = reason.as_str();
        home.broker.next(&[Act::Refuse(reason, Reach::Answered)]);
        home.place(key).await;
        home.work_until(key, "aborted").await;
        let entry = home.entry(key).await;
        assert_eq!(
            (entry.status, entry.http_status, entry.reason_code.as_deref()),
            (Status::Failed, Some(status), Some(key))
        );
        assert_eq!(response(&home, key).await["status"], "error");
        assert_eq!(home.view(key).await.1, 1);
    }
    assert!(home.told("failed_orders").await > 0, "somebody is told");
}

async fn what_is_ours_costs_no_attempt(ground: Ground) {
    // The hardest kind: it had said that it begins.
    let home = ground.open(Idempotency::None).await;
    home.broker.next(&[Act::Refuse(Reason::Unauthorized, Reach::Answered)]);
    home.place("k").await;
    home.work_until("k", "BROKER_UNAUTHORIZED").await;
    assert_eq!(home.view("k").await.1, 0);
    assert_eq!(home.entry("k").await.status, Status::InProgress);
    assert_eq!(home.told("broker_unauthorized").await, 1);
    let doubt = if home.outbox.store().dialect().name() == "postgres" { "maybe_sent" } else { "maybe_sent = 1" };
    assert_eq!(home.count(&format!("outbox WHERE {doubt}")).await, 0, "nothing went out, and it will be sent");
}

async fn an_order_that_cannot_be_read_is_aborted_at_once(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    let id = home.place("k").await;
    let broken = if home.outbox.store().dialect().name() == "postgres" { "'{'::bytea" } else { "'{'" };
    home.execute(&format!("UPDATE outbox SET payload = {broken}, payload_sha = NULL WHERE id = {id}")).await.unwrap();
    home.work_until("k", "aborted").await;
    assert_eq!(home.view("k").await.2.as_deref(), Some("ORDER_UNREADABLE"));
    let entry = home.entry("k").await;
    assert_eq!((entry.status, entry.http_status), (Status::Failed, Some(500)));
    assert_eq!(home.broker.sends(), 0);
}

/// §6: another order is settled under the key; the message is aborted and the ledger left alone.
async fn the_ledger_is_the_truth(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    let id = home.place("k").await;
    home.work_until("k", "succeeded").await;
    let before = home.entry("k").await;
    // A message of an older race: another order, the same key.
    let payload = crate::harness::order("9").canonical().to_owned();
    let value = if home.outbox.store().dialect().name() == "postgres" {
        format!("'{payload}'::bytea")
    } else {
        format!("'{payload}'")
    };
    let columns = "lane, shard_id, due_at, lease_token, attempts, crashes, target, active_key, content_type, created_at, updated_at";
    home.execute(&format!(
        "INSERT INTO outbox ({columns}, payload) SELECT {columns}, {value} FROM outbox_done WHERE id = {id}"
    ))
    .await
    .unwrap();
    let _working = home.work();
    let aborted = "outbox_done WHERE last_error_code = 'IDEMPOTENCY_CONFLICT' AND status = 'dead'";
    wait_until("it is aborted", async || home.count(aborted).await == 1).await;
    assert_eq!(home.entry("k").await, before);
    assert_eq!(home.broker.sends(), 1);
    let noted = home.orders.conflicts(None, 10).await.unwrap().items;
    assert_eq!((noted.len(), noted[0].times), (1, 1), "{noted:?}");
    assert_eq!(noted[0].idempotency_key, "k");
    assert!(
        noted[0].outbox_id.is_some_and(|message| message != id) && noted[0].request_digest != before.request_digest
    );
}

/// SQL that lets no order end where this holds, and what undoes it.
fn guard(dialect: &str, condition: &str) -> (String, &'static str) {
    match dialect {
        "sqlite" => (
            format!("CREATE TRIGGER guard BEFORE INSERT ON outbox_done WHEN NEW.lane = 'orders' AND {condition} BEGIN SELECT RAISE(ABORT, 'not yet'); END"),
            "DROP TRIGGER guard",
        ),
        "postgres" => (
            format!(
                "CREATE OR REPLACE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.lane = 'orders' AND {condition} THEN RAISE EXCEPTION 'not yet'; END IF; RETURN NEW; END $$;
                 CREATE TRIGGER guard BEFORE INSERT ON outbox_done FOR EACH ROW EXECUTE FUNCTION guard()"
            ),
            "DROP TRIGGER guard ON outbox_done",
        ),
        _ => (
            format!("CREATE TRIGGER guard BEFORE INSERT ON outbox_done FOR EACH ROW IF NEW.lane = 'orders' AND {condition} THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not yet'; END IF"),
            "DROP TRIGGER guard",
        ),
    }
}

/// §4.1: whoever sees the outbox end sees that the ledger has; and neither ends without the other.
async fn the_ledger_ends_first_and_the_outbox_with_it(ground: Ground) {
    let url = ground.url();
    let home = ground.open(Idempotency::Key).await;
    let mut session = Session::to(&url).await;
    let dialect = home.outbox.store().dialect().name();
    let open = "(SELECT status FROM idempo_ledger l WHERE l.idempotency_key = NEW.active_key) = 'in_progress'";
    let (ledger_first, as_before) = guard(dialect, open);
    session.run(&ledger_first).await.unwrap();
    home.broker.next(&[Act::Fill, Act::Refuse(Reason::Rejected, Reach::Answered)]);
    home.place("good").await;
    home.work_until("good", "succeeded").await;
    home.place("bad").await;
    home.work_until("bad", "aborted").await;
    assert_eq!((home.entry("good").await.status, home.entry("bad").await.status), (Status::Succeeded, Status::Failed));
    session.run(as_before).await.unwrap();

    let (never, as_before) = guard(dialect, "1 = 1");
    session.run(&never).await.unwrap();
    let id = home.place("together").await;
    let _working = home.work();
    wait_until("it is executed", async || home.broker.executions("together") == 1).await;
    for _ in 0..20 {
        let entry = home.entry("together").await;
        assert_eq!((entry.status, entry.http_status), (Status::InProgress, None), "the message has not ended");
        assert_eq!(home.count(&format!("outbox WHERE id = {id}")).await, 1);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    session.run(as_before).await.unwrap();
    wait_until("both have ended", async || home.view("together").await.0 == "succeeded").await;
    assert_eq!(home.entry("together").await.status, Status::Succeeded);
    assert_eq!(home.broker.executions("together"), 1);
}

/// W-105: the ledger has it, the message has not heard.
async fn late_confirmation(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    home.place("k").await;
    let now = home.rows("SELECT first_seen_at FROM idempo_ledger").await[0].0[0].clone();
    drop(now);
    home.execute(
        "UPDATE idempo_ledger SET status = 'succeeded', http_status = 200, response_payload_json = '{\"status\":\"ok\"}',
                broker_ref = 'r-7', finished_at = first_seen_at, expires_at = last_seen_at",
    )
    .await
    .unwrap();
    let later = "UPDATE idempo_ledger SET expires_at = ";
    let far = match home.outbox.store().dialect().name() {
        "sqlite" => "253402300799000000",
        _ => "'9999-12-31 23:59:59'",
    };
    home.execute(&format!("{later}{far}")).await.unwrap();
    home.work_until("k", "succeeded").await;
    assert_eq!(home.broker.sends(), 0, "nothing is sent again");
    let entry = home.entry("k").await;
    assert_eq!(
        (entry.response_payload_json.as_deref(), entry.broker_ref.as_deref()),
        (Some("{\"status\":\"ok\"}"), Some("r-7"))
    );
}

async fn a_message_without_an_entry_gets_one(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("k").await;
    // As the owner of the tables could: no command of ours does.
    match home.outbox.store().dialect().name() {
        "sqlite" => home.execute("DROP TRIGGER idempo_ledger_no_delete").await.unwrap(),
        "postgres" => home.execute("ALTER TABLE idempo_ledger DISABLE TRIGGER ALL").await.unwrap(),
        _ => home.execute("DROP TRIGGER idempo_ledger_no_delete").await.unwrap(),
    };
    home.execute("DELETE FROM idempo_ledger").await.unwrap();
    home.work_until("k", "succeeded").await;
    assert_eq!(home.entry("k").await.status, Status::Succeeded);
}

async fn a_crash_after_the_claim(ground: Ground) {
    // Nothing was sent. An adapter that can do neither had not said that it begins: so it may be sent.
    let home = ground.open(Idempotency::None).await;
    home.place("k").await;
    home.claimed_by_one_who_dies().await;
    home.work_until("k", "succeeded").await;
    assert_eq!(home.broker.executions("k"), 1);
}

async fn a_crash_after_the_broker_executed(ground: Ground) {
    let home = ground.open(LOOK_UP).await;
    let id = home.place("k").await;
    home.claimed_by_one_who_dies().await;
    home.said_that_it_begins(id).await;
    home.broker.executed.lock().unwrap().insert("k".to_owned(), 1);
    home.work_until("k", "succeeded").await;
    assert_eq!((home.broker.executions("k"), home.broker.sends()), (1, 0));
    assert!(*home.broker.look_ups.lock().unwrap() > 0);
}

async fn the_look_up_waits_anew_after_a_crash(ground: Ground) {
    let home = ground.open(Idempotency::LookUp { settling: Duration::from_millis(500) }).await;
    let id = home.place("k").await;
    home.claimed_by_one_who_dies().await;
    home.said_that_it_begins(id).await;
    let working = home.work();
    let waits = format!("outbox WHERE id = {id} AND last_error_code LIKE 'AWAITS_LOOK_UP%'");
    wait_until("it waits", async || home.count(&waits).await == 1).await;
    working.end().await;
    // Whoever claims it now and dies may have sent it: the wait starts again.
    let mut claimed = false;
    wait_until("another has claimed it", async || {
        claimed |= home.try_claim().await.is_some();
        claimed
    })
    .await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(*home.broker.look_ups.lock().unwrap(), 0);
    home.broker.executed.lock().unwrap().insert("k".to_owned(), 1);
    home.work_until("k", "succeeded").await;
    assert_eq!((home.broker.executions("k"), home.broker.sends()), (1, 0));
    let token = home.rows(&format!("SELECT lease_token FROM outbox_done WHERE id = {id}")).await[0].int(0).unwrap();
    assert_eq!(token, 5, "dead, wait, dead, wait, look-up");
}

async fn parked_orders_wait_for_a_person(ground: Ground) {
    let home = ground.open_with(Idempotency::None, Settings::default()).await;
    for (key, executed) in [("gone", true), ("lost", false)] {
        home.broker.next(&[if executed { Act::LoseReply } else { Act::Refuse(Reason::Timeout, Reach::Unknown) }]);
        let id = home.place(key).await;
        let sends = home.broker.sends();
        home.work_until(key, "NEEDS_RECONCILE").await;
        assert_eq!(home.broker.sends(), sends + 1, "never a blind resend");
        assert_eq!(home.entry(key).await.status, Status::InProgress);
        assert_eq!(home.told(&format!("order {id}")).await, 1, "somebody is told");

        // No other hand moves it.
        assert!(matches!(home.orders.requeue(key, by()).await.unwrap(), Reopened::Refused(_)));
        assert_eq!(home.outbox.release(vec![id]).await.unwrap(), Vec::<i64>::new());
        assert!(home.outbox.requeue(vec![id]).await.is_ok_and(|r| r == [postrider::store::Requeued::NotDead]));
        let reference = executed.then(|| "broker-9".to_owned());
        let ByHand::Done(entry) = home.orders.settle(key, executed, reference, by()).await.unwrap() else {
            panic!("it waits for this")
        };
        let wanted = if executed { Status::Succeeded } else { Status::Failed };
        assert_eq!(entry.status, wanted);
        assert_eq!(home.view(key).await.0, if executed { "succeeded" } else { "aborted" });
        let events = home.orders.events(key).await.unwrap();
        assert_eq!((events[0].actor.as_str(), events[0].reason.as_deref()), ("operator:test", Some("a test")));
        assert!(matches!(home.orders.settle(key, executed, None, by()).await.unwrap(), ByHand::Refused(_)), "once");
    }
    // What a person declared failed may be sent again.
    assert!(matches!(home.orders.requeue("lost", by()).await.unwrap(), Reopened::Reopened { .. }));
    home.work_until("lost", "succeeded").await;
    assert_eq!(home.broker.executions("lost"), 1);
    assert_eq!(home.orders.settle("nobody", true, None, by()).await.unwrap(), ByHand::NotFound);
}

async fn a_refusal_after_doubt_parks(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.broker.next(&[Act::LoseReply, Act::Refuse(Reason::Rejected, Reach::Answered)]);
    home.place("k").await;
    home.work_until("k", "NEEDS_RECONCILE").await;
    assert_eq!(home.entry("k").await.status, Status::InProgress, "it was executed: calling it failed would be wrong");
}

/// W-104's second half.
async fn a_failed_order_is_reopened(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.broker.next(&[Act::Refuse(Reason::Rejected, Reach::Answered)]);
    let id = home.place("k").await;
    home.work_until("k", "aborted").await;
    assert_eq!(home.orders.requeue("nobody", by()).await.unwrap(), Reopened::NotFound);
    assert_eq!(home.orders.requeue("k", by()).await.unwrap(), Reopened::Reopened { outbox_id: id });
    let entry = home.entry("k").await;
    assert_eq!((entry.status, entry.http_status, entry.response_payload_json), (Status::InProgress, None, None));
    assert_eq!(home.view("k").await, ("pending".to_owned(), 0, None), "all begins anew");
    let silent = "SELECT CASE WHEN last_error_msg IS NULL THEN 1 ELSE 0 END FROM outbox_orders";
    assert_eq!(home.rows(silent).await[0].int(0).unwrap(), 1, "with nothing said of the last error");
    home.work_until("k", "succeeded").await;
    assert!(matches!(home.orders.requeue("k", by()).await.unwrap(), Reopened::Refused(_)), "succeeded is final");
    let moves: Vec<String> = home.orders.events("k").await.unwrap().into_iter().map(|e| e.to_status).collect();
    assert_eq!(moves, ["failed", "in_progress", "succeeded"]);
}

async fn poison_in_doubt_is_parked(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.place("k").await;
    home.claimed_by_one_who_dies().await;
    home.execute("UPDATE outbox SET crashes = 4").await.unwrap();
    home.work_until("k", "NEEDS_RECONCILE").await;
    assert_eq!(home.broker.sends(), 0, "it is not tried on yet another worker");
    assert_eq!(home.entry("k").await.status, Status::InProgress);
}

/// A flipped bit: found before anything is sent, and somebody can still end the order.
async fn damage_strands_nobody(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    let other = crate::harness::order("9").canonical().to_owned();
    let other = match home.outbox.store().dialect().name() {
        "postgres" => format!("'{other}'::bytea"),
        _ => format!("'{other}'"),
    };
    let id = home.place("payload").await;
    home.execute(&format!("UPDATE outbox SET payload = {other} WHERE id = {id}")).await.unwrap();
    home.work_until("payload", "aborted").await;
    assert_eq!(home.entry("payload").await.status, Status::Failed, "the ledger hears of it");

    // Payload and digest: now entry and message differ, and nobody knows which is right.
    let id = home.place("both").await;
    home.execute(&format!("UPDATE outbox SET payload = {other}, payload_sha = NULL WHERE id = {id}")).await.unwrap();
    home.work_until("both", "NEEDS_RECONCILE").await;
    assert!(matches!(home.orders.settle("both", false, None, by()).await.unwrap(), ByHand::Done(_)));
    assert_eq!(home.broker.sends(), 0);

    // What is stored is what is told, or nothing.
    home.place("answer").await;
    home.work_until("answer", "succeeded").await;
    let guard = match home.outbox.store().dialect().name() {
        "postgres" => "ALTER TABLE idempo_ledger DISABLE TRIGGER ALL",
        _ => "DROP TRIGGER idempo_ledger_no_update",
    };
    home.execute(guard).await.unwrap();
    home.execute("UPDATE idempo_ledger SET response_payload_json = '{}' WHERE idempotency_key = 'answer'")
        .await
        .unwrap();
    assert!(home.orders.entry("answer").await.is_err());
}

async fn a_hand_that_died_half_way(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    home.broker.next(&[Act::LoseReply]);
    let id = home.place("k").await;
    home.work_until("k", "NEEDS_RECONCILE").await;
    home.outbox.seize_idle("operator:gone:1", vec![id], Duration::from_millis(1)).await.unwrap();
    assert_eq!(home.outbox.release(vec![id]).await.unwrap(), Vec::<i64>::new(), "it is not for release");
    assert!(matches!(home.orders.settle("k", true, None, by()).await.unwrap(), ByHand::Done(_)));
    // And what a worker holds is not for hands.
    let held = home.place("held").await;
    home.claimed_by_one_who_dies().await;
    assert!(matches!(home.orders.settle("held", false, None, by()).await.unwrap(), ByHand::Refused(_)));
    assert_eq!(home.count(&format!("outbox WHERE id = {held} AND locked_by = 'dead:1:1'")).await, 1);
}
