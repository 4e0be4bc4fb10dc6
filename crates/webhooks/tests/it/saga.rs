//! The saga as its specification has it: its table and indexes by name, what the database itself refuses, its jobs as they are
//! seen, and the rules of retries on every database.

use postrider::outcome::GiveBack;
use postrider::store::{Claim, From};
use postrider_webhooks::{DeadLetterFilter, LANE, Patch, Requeued, Settings};

use crate::harness::{Home, on_every_store, open, secs, settings, wait_until, work};
use crate::receiver::{Receiver, status_line};

on_every_store!(
    the_indexes_have_their_names,
    no_sixth_status_and_no_second_saga,
    a_dead_saga_refuses_raw_sql,
    jobs_are_seen_pending_leased_completed_and_failed,
    a_requeued_saga_begins_at_nought,
    each_wait_is_twice_the_last_and_the_columns_tell_it,
    a_limit_lowered_meanwhile_gives_up,
    a_subscription_has_a_limit_of_its_own,
    nothing_is_started_before_its_time_nor_after_its_end,
);

async fn the_indexes_have_their_names(home: Home) {
    for (name, columns) in [
        ("idx_saga_event", "event_id, subscription_id"),
        ("idx_saga_status_retry", "status, next_attempt_at"),
        ("idx_saga_status", "status"),
        ("uniq_saga_event_subscription", "event_id, subscription_id, generation"),
    ] {
        let sql = match home.url.split(':').next() {
            Some("sqlite") => format!("SELECT group_concat(name, ', ') FROM pragma_index_info('{name}')"),
            Some("mysql") => format!(
                "SELECT GROUP_CONCAT(column_name ORDER BY seq_in_index SEPARATOR ', ') FROM information_schema.statistics
                 WHERE table_schema = DATABASE() AND table_name = 'webhook_delivery_sagas' AND index_name = '{name}'"
            ),
            _ => format!(
                "SELECT string_agg(a.attname, ', ' ORDER BY a.attnum) FROM pg_attribute a WHERE a.attrelid = to_regclass('{name}')"
            ),
        };
        assert_eq!(home.rows(&sql).await[0].opt_text(0).unwrap().as_deref(), Some(columns), "{name}");
    }
    // As many characters as it was given.
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    home.publish("a", "x").await;
    let long = "x".repeat(100);
    home.rows(&format!("UPDATE webhook_delivery_sagas SET final_error_code = '{long}'")).await;
    assert_eq!(home.count(&format!("webhook_delivery_sagas WHERE final_error_code = '{long}'")).await, 1);
    if !home.url.starts_with("sqlite") {
        let longer = format!("UPDATE webhook_delivery_sagas SET final_error_code = '{long}x'");
        assert!(home.try_rows(&longer).await.is_err(), "and no more");
    }
}

async fn no_sixth_status_and_no_second_saga(home: Home) {
    let now = if home.url.starts_with("sqlite") { "1" } else { "CURRENT_TIMESTAMP" };
    let insert = |event: i64, status: &str, generation: i64| {
        format!(
            "INSERT INTO webhook_delivery_sagas (event_id, subscription_id, status, attempt_count, created_at, updated_at, generation)
             VALUES ({event}, 1, '{status}', 0, {now}, {now}, {generation})"
        )
    };
    for (event, status) in
        ["Pending", "InProgress", "PendingRetry", "Completed", "DeadLettered"].into_iter().enumerate()
    {
        home.rows(&insert(event as i64, status, 0)).await;
    }
    for status in ["Failed", "pending", "", "Leased"] {
        assert!(home.try_rows(&insert(99, status, 0)).await.is_err(), "{status:?}");
    }
    assert!(home.try_rows("UPDATE webhook_delivery_sagas SET status = 'Paused' WHERE event_id = 0").await.is_err());
    assert!(home.try_rows(&insert(0, "Pending", 0)).await.is_err(), "the same event and subscription");
    home.rows(&insert(0, "Pending", 1)).await; // as a requeue does
    assert_eq!(home.count("webhook_delivery_sagas").await, 6);
}

async fn a_dead_saga_refuses_raw_sql(home: Home) {
    let receiver = Receiver::with_status(500).await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.max_retry_limit = Some(1)).await;
    let _working = home.work();
    let (_, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "DeadLettered").await;
    let before = home.rows("SELECT * FROM webhook_delivery_sagas").await;
    let mut attacks: Vec<String> = [
        "status = 'Pending'",
        "attempt_count = 0",
        "final_error_code = NULL",
        "next_attempt_at = created_at",
        "updated_at = created_at",
    ]
    .map(|change| format!("UPDATE webhook_delivery_sagas SET {change}"))
    .into();
    attacks.push("DELETE FROM webhook_delivery_sagas".to_owned());
    if home.url.starts_with("postgres") {
        attacks.push("TRUNCATE webhook_delivery_sagas".to_owned());
    } else {
        let columns = "id, event_id, subscription_id, status, attempt_count, created_at, updated_at, generation";
        attacks.push(format!("REPLACE INTO webhook_delivery_sagas ({columns}) SELECT id, event_id, subscription_id, 'Pending', 0, created_at, updated_at, generation FROM webhook_delivery_sagas"));
    }
    for attack in attacks {
        assert!(home.try_rows(&attack).await.is_err(), "{attack}");
    }
    assert_eq!(home.rows("SELECT * FROM webhook_delivery_sagas").await, before);
}

async fn jobs_are_seen_pending_leased_completed_and_failed(home: Home) {
    let receiver = Receiver::start(|_, nth| status_line(if nth == 0 { 200 } else { 500 }, "")).await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.max_retry_limit = Some(1)).await;
    let seen = async |saga: i64| {
        let rows = home.rows(&format!("SELECT status FROM webhook_jobs WHERE saga_id = {saga}")).await;
        rows.iter().map(|row| row.text(0).unwrap()).collect::<Vec<String>>()
    };
    let (_, sagas) = home.publish("a", "x").await;
    assert_eq!(
        (seen(sagas[0]).await, home.status(sagas[0]).await.as_str()),
        (vec!["Pending".to_owned()], "InProgress")
    );
    let store = home.outbox.store();
    let claim = Claim {
        lane: LANE.into(),
        shard: 0,
        limit: 1,
        lease: secs(60),
        owner: "w".into(),
        from: From::Mark(None),
        max_crashes: 5,
        send_begun: false,
    };
    let lease = store.claim(&claim).await.unwrap().messages[0].lease();
    assert_eq!(seen(sagas[0]).await, ["Leased"]);
    store.defer("w", &[lease], &GiveBack::now()).await.unwrap();
    let _working = home.work();
    wait_until("it is completed", async || seen(sagas[0]).await == ["Completed"]).await;
    let (_, sagas) = home.publish("a", "y").await;
    wait_until("it failed", async || seen(sagas[0]).await == ["Failed"]).await;
}

async fn a_requeued_saga_begins_at_nought(home: Home) {
    let receiver = Receiver::with_status(500).await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.max_retry_limit = Some(1)).await;
    let working = home.work();
    let (event, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "DeadLettered").await;
    working.end().await;
    let letter = home.webhooks.dead_letters(DeadLetterFilter::default(), None, 1).await.unwrap().items.remove(0);
    assert_eq!((letter.saga_id, letter.final_error_code.as_deref()), (sagas[0], Some("HTTP_500")));
    let Requeued::Created(new) = home.webhooks.requeue(letter.id).await.unwrap() else { panic!("not created") };
    let sql = format!(
        "SELECT status, attempt_count, event_id, final_error_code, generation, CASE WHEN next_attempt_at = created_at THEN 1 ELSE 0 END
         FROM webhook_delivery_sagas WHERE id = {new}"
    );
    let row = home.rows(&sql).await.remove(0);
    assert_eq!((row.text(0).unwrap().as_str(), home.count(JOBS).await), ("Pending", 0), "a saga without a job");
    assert_eq!(
        (row.int(1).unwrap(), row.int(2).unwrap(), row.opt_text(3).unwrap(), row.int(4).unwrap()),
        (0, event, None, 1)
    );
    assert_eq!(row.int(5).unwrap(), 1, "due at once");
    home.webhooks.pass().await.unwrap();
    assert_eq!(
        (home.status(new).await.as_str(), home.count(JOBS).await),
        ("InProgress", 1),
        "its first job is the saga's"
    );
    assert_eq!(home.status(sagas[0]).await, "DeadLettered", "the old one stays");
}

/// `next_attempt_at = now + base_delay * 2^(attempt_count - 1)`, to the second.
async fn each_wait_is_twice_the_last_and_the_columns_tell_it(home: Home) {
    let slow = Settings { base_delay: secs(100), max_retry_limit: 5, ..settings() };
    let (webhooks, outbox) = open(&home.url, slow).await;
    // Another failure each time: the last one is the one that is told.
    let receiver = Receiver::start(|_, nth| status_line([500, 503, 502, 504, 507][nth.min(4)], "")).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    let (event, sagas) = home.publish("a", "x").await;
    let columns = "id, event_id, subscription_id, status, attempt_count, final_error_code, created_at, updated_at, next_attempt_at";
    let saga = async || home.rows(&format!("SELECT {columns} FROM webhook_delivery_sagas")).await.remove(0);
    let first = saga().await;
    assert_eq!((first.text(3).unwrap().as_str(), first.int(4).unwrap()), ("InProgress", 0));
    assert_eq!(first.opt_text(5).unwrap(), None, "nothing has failed yet");
    let (made, now) = (first.time(6).unwrap(), home.outbox.now().await.unwrap());
    assert!(now.since(made) < secs(60) && made <= now, "in UTC: {made:?} {now:?}");
    let _working = work(&webhooks, &outbox);
    let mut updated = first.time(7).unwrap();
    for (attempt, wait, code) in [(1, 100, 500), (2, 200, 503), (3, 400, 502), (4, 800, 504)] {
        wait_until("it has failed again", async || {
            let row = saga().await;
            row.int(4).unwrap() == attempt && row.text(3).unwrap() == "PendingRetry"
        })
        .await;
        let row = saga().await;
        let ids = (row.int(0).unwrap(), row.int(1).unwrap(), row.int(2).unwrap());
        assert_eq!(ids, (sagas[0], event, subscription.id));
        assert_eq!(row.text(5).unwrap(), format!("HTTP_{code}"));
        let waits = row.time(8).unwrap().since(row.time(7).unwrap());
        assert!(waits.as_millis().abs_diff(wait * 1000) < 100, "attempt {attempt}: {waits:?}");
        assert!(
            row.time(7).unwrap() > updated && row.time(6).unwrap() == made,
            "updated_at moves, created_at does not"
        );
        updated = row.time(7).unwrap();
        home.rows("UPDATE webhook_delivery_sagas SET next_attempt_at = created_at").await;
    }
    home.ends(sagas[0], "DeadLettered").await;
    let jobs = home.rows("SELECT COUNT(DISTINCT job_id) FROM webhook_attempts").await[0].int(0).unwrap();
    assert_eq!((jobs, saga().await.int(4).unwrap()), (5, 5), "each attempt was a job of its own");
    assert_eq!(saga().await.text(5).unwrap(), "HTTP_507");
    assert_eq!(home.rows("SELECT final_error_code FROM dead_letters").await[0].text(0).unwrap(), "HTTP_507");
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/webhooks.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let words = docs.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("stays after a later success"), "what `final_error_code` says of one that succeeded later");
    assert!(docs.contains("`base_delay_sec * 2^(n-1)` (30 s, 60 s, 120 s, …)"), "the formula is written down");
}

async fn a_limit_lowered_meanwhile_gives_up(home: Home) {
    let receiver = Receiver::with_status(500).await;
    let (subscription, _) = home
        .subscribe_with(&receiver.url, &["*"], |s| {
            (s.max_retry_limit, s.retry_schedule_sec) = (Some(5), Some(vec![3600.0]));
        })
        .await;
    let working = home.work();
    let (_, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "PendingRetry").await;
    // A round that is under way may go by what was there when it began.
    working.end().await;
    let patch = Patch { max_retry_limit: Some(Some(1)), ..Patch::default() };
    home.webhooks.change(subscription.id, patch).await.unwrap();
    home.rows("UPDATE webhook_delivery_sagas SET next_attempt_at = created_at").await;
    let working = home.work();
    home.ends(sagas[0], "DeadLettered").await;
    working.end().await;
    let (saga, _, attempts) = home.webhooks.saga(sagas[0]).await.unwrap().unwrap();
    assert_eq!(
        (saga.attempt_count, attempts.len(), home.count("dead_letters WHERE final_error_code = 'HTTP_500'").await),
        (1, 1, 1),
        "it was not tried again"
    );
    assert_eq!(saga.final_error_code.as_deref(), Some("HTTP_500"), "its last failure, not that it was given up");
}

async fn a_subscription_has_a_limit_of_its_own(home: Home) {
    let receiver = Receiver::with_status(500).await;
    for limit in [Some(1), Some(2), None] {
        home.subscribe_with(&receiver.url, &["*"], |s| s.max_retry_limit = limit).await;
    }
    let _working = home.work();
    let (_, sagas) = home.publish("a", "x").await;
    // The third goes by the default of these tests.
    for (saga, attempts) in sagas.iter().zip([1, 2, 3]) {
        home.ends(*saga, "DeadLettered").await;
        let (saga, ..) = home.webhooks.saga(*saga).await.unwrap().unwrap();
        assert_eq!((saga.attempt_count, saga.final_error_code.as_deref()), (attempts, Some("HTTP_500")));
    }
}

/// Beside them there may be an alert.
const JOBS: &str = "outbox WHERE lane = 'webhooks'";

async fn nothing_is_started_before_its_time_nor_after_its_end(home: Home) {
    let receiver = Receiver::with_status(500).await;
    home.subscribe_with(&receiver.url, &["*"], |s| {
        (s.max_retry_limit, s.retry_schedule_sec) = (Some(2), Some(vec![3600.0]));
    })
    .await;
    let working = home.work();
    let (_, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "PendingRetry").await;
    for _ in 0..3 {
        home.webhooks.pass().await.unwrap();
    }
    assert_eq!((home.status(sagas[0]).await.as_str(), home.count(JOBS).await), ("PendingRetry", 0), "not yet");
    home.rows("UPDATE webhook_delivery_sagas SET next_attempt_at = created_at").await;
    home.ends(sagas[0], "DeadLettered").await;
    working.end().await;
    for _ in 0..3 {
        home.webhooks.pass().await.unwrap();
    }
    assert_eq!((home.count(JOBS).await, home.count("webhook_attempts").await), (0, 2), "no job for what has ended");
}

/// The orchestrator sends nothing and calls nobody: it has neither an HTTP client nor a courier.
#[test]
fn the_orchestrator_has_no_http_and_calls_no_worker() {
    for file in [
        "orchestrator.rs",
        "results.rs",
        "starting.rs",
        "gates.rs",
        "sweep.rs",
        "replays.rs",
        "health.rs",
        "janitor.rs",
    ] {
        let text = std::fs::read_to_string(format!("{}/src/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        for line in code {
            for word in [
                "exchange",
                "hyper",
                "http::",
                "Courier",
                ".deliver(",
                "Worker",
                ".claim(",
                ".renew(",
                ".settle(",
                ".defer(",
                ".seize(",
                "self.test(",
                "from_value(",
                "UPDATE events",
                "UPDATE subscriptions",
                "from_slice(",
            ] {
                // The health of subscriptions is looked after beside the sagas, as their administrator.
                let allowed = file == "health.rs" && word == "UPDATE subscriptions";
                assert!(!line.contains(word) || allowed, "{file} has `{word}`: {line}");
            }
        }
    }
}
