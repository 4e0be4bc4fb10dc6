//! The orchestrator: results count once, limits hold, the dead come back as new sagas, and what has ended stays as it is.

use std::time::{Duration, Instant};

use postrider_webhooks::{Counted, DeadLetterFilter, NewEvent, NewReplay, Patch, Requeued};

use crate::harness::{Home, on_every_store, open, settings, wait_until, work};
use crate::receiver::{Receiver, status_line};

on_every_store!(
    a_result_that_comes_twice_changes_nothing,
    a_late_copy_of_a_result_is_not_taken_for_the_next,
    the_dead_come_back_as_a_new_generation,
    ended_sagas_events_and_attempts_refuse_raw_sql,
    one_live_job_per_saga,
    a_rate_holds_and_burns_no_attempts,
    a_rate_below_one_a_second_lets_them_through_one_by_one,
    only_so_many_are_in_flight,
    several_orchestrators_and_workers_share_the_work,
    a_replay_sends_again_what_it_is_asked_to,
    what_asks_for_time_gets_it,
    a_deleted_subscription_ends_what_waits,
    what_is_old_is_pruned,
    one_that_only_fails_is_disabled,
    what_another_process_remembers_gives_up_nothing,
    silence_disables_nobody,
    what_is_published_to_one_disabled_by_itself_is_kept,
    an_old_answer_says_nothing_of_a_new_receiver,
    a_limit_lowered_meanwhile_holds_at_the_gate_too,
    a_replay_leaves_alone_what_is_under_way,
    after_a_rest_a_few_try_it,
);

async fn a_result_that_comes_twice_changes_nothing(home: Home) {
    let receiver = Receiver::with_status(500).await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.retry_schedule_sec = Some(vec![3600.0])).await;
    let (_, sagas) = home.publish("a", "x").await;
    let working = home.work();
    home.ends(sagas[0], "PendingRetry").await;
    working.end().await;
    let job = home.rows("SELECT job_id FROM webhook_attempts").await[0].int(0).unwrap();
    let now = if home.url.starts_with("sqlite") { "1" } else { "CURRENT_TIMESTAMP" };
    for (attempt, success) in [(1, 0), (1, 1), (2, 1), (2, 0)] {
        let sql = format!(
            "INSERT INTO webhook_results (job_id, saga_id, attempt, success, error_code, at) VALUES ({job}, {}, {attempt}, {success}, 'HTTP_418', {now})",
            sagas[0]
        );
        home.rows(&sql).await;
        home.webhooks.pass().await.unwrap();
        let (saga, ..) = home.webhooks.saga(sagas[0]).await.unwrap().unwrap();
        let seen = (saga.status.as_str(), saga.attempt_count, saga.final_error_code.as_deref());
        assert_eq!(seen, ("PendingRetry", 1, Some("HTTP_500")), "result of attempt {attempt}, success {success}");
        assert_eq!(home.count("webhook_results").await, 0, "it is taken away all the same");
        assert_eq!(home.count("subscription_gates WHERE failures = 1").await, 1, "nor does it speak of its receiver");
    }
    assert_eq!(home.count("dead_letters").await, 0);
}

/// What is heard of an attempt again, while the next one is under way or the saga has ended.
async fn a_late_copy_of_a_result_is_not_taken_for_the_next(home: Home) {
    let receiver = Receiver::with_status(500).await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.retry_schedule_sec = Some(vec![3600.0])).await;
    let (_, sagas) = home.publish("a", "x").await;
    let working = home.work();
    home.ends(sagas[0], "PendingRetry").await;
    working.end().await;
    let now = if home.url.starts_with("sqlite") { "1" } else { "CURRENT_TIMESTAMP" };
    let told = async |job: i64, saga: i64, attempt: i64, success: i64| {
        let columns = "job_id, saga_id, attempt, success, error_code, at";
        let row = format!("({job}, {saga}, {attempt}, {success}, 'HTTP_418', {now})");
        home.rows(&format!("INSERT INTO webhook_results ({columns}) VALUES {row}")).await;
    };
    let first = home.rows("SELECT job_id FROM webhook_attempts").await[0].int(0).unwrap();
    let whole = "SELECT * FROM webhook_delivery_sagas ORDER BY id";
    let jobs = "outbox WHERE lane = 'webhooks'";
    // The second job is under way, and nobody works on it.
    home.rows("UPDATE webhook_delivery_sagas SET next_attempt_at = created_at").await;
    home.webhooks.pass().await.unwrap();
    assert_eq!((home.status(sagas[0]).await.as_str(), home.count(jobs).await), ("InProgress", 1));
    let before = home.rows(whole).await;
    for success in [0, 1] {
        told(first, sagas[0], 1, success).await;
        home.webhooks.pass().await.unwrap();
        assert_eq!(home.rows(whole).await, before, "a copy of the first, success {success}");
        assert_eq!((home.count("webhook_results").await, home.count(jobs).await), (0, 1));
    }
    // Two results of one attempt, met together: the first one counts.
    home.rows("DELETE FROM outbox WHERE lane = 'webhooks'").await;
    told(900_001, sagas[0], 2, 0).await;
    told(900_002, sagas[0], 2, 1).await;
    home.webhooks.pass().await.unwrap();
    let (saga, ..) = home.webhooks.saga(sagas[0]).await.unwrap().unwrap();
    assert_eq!((saga.status.as_str(), saga.attempt_count), ("PendingRetry", 2));
    assert_eq!(home.count("webhook_results").await, 0);
    // And of what has ended, either way.
    home.rows("UPDATE webhook_delivery_sagas SET next_attempt_at = created_at").await;
    home.webhooks.pass().await.unwrap();
    told(900_003, sagas[0], 3, 0).await;
    home.webhooks.pass().await.unwrap();
    assert_eq!(home.status(sagas[0]).await, "DeadLettered");
    home.rows("DELETE FROM outbox WHERE lane = 'webhooks'").await;
    let (_, others) = home.publish("a", "y").await;
    home.rows("DELETE FROM outbox WHERE lane = 'webhooks'").await;
    told(900_004, others[0], 1, 1).await;
    home.webhooks.pass().await.unwrap();
    assert_eq!(home.status(others[0]).await, "Completed");
    let before = home.rows(whole).await;
    for (job, saga, attempt) in
        [(900_005, sagas[0], 3), (900_006, sagas[0], 4), (900_007, others[0], 1), (900_008, others[0], 2)]
    {
        for success in [0, 1] {
            told(job, saga, attempt, success).await;
            home.webhooks.pass().await.unwrap();
            assert_eq!(home.rows(whole).await, before, "attempt {attempt} of {saga}, success {success}");
            assert_eq!(home.count("webhook_results").await, 0);
        }
    }
    assert_eq!(home.count("dead_letters").await, 1);
}

async fn the_dead_come_back_as_a_new_generation(home: Home) {
    let receiver = Receiver::start(|_, nth| status_line(if nth < 3 { 500 } else { 200 }, "")).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    let (event, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "DeadLettered").await;
    let before = home.rows("SELECT updated_at, attempt_count FROM webhook_delivery_sagas").await;
    let letter = home.webhooks.dead_letters(DeadLetterFilter::default(), None, 10).await.unwrap().items.remove(0);
    let (a, b) = tokio::join!(home.webhooks.requeue(letter.id), home.webhooks.requeue(letter.id));
    let id = |r| match r {
        Requeued::Created(id) | Requeued::Exists(id) => id,
        other => panic!("{other:?}"),
    };
    let (a, b) = (id(a.unwrap()), id(b.unwrap()));
    assert_eq!(a, b, "asked twice, the same saga");
    home.ends(a, "Completed").await;
    let (saga, ..) = home.webhooks.saga(a).await.unwrap().unwrap();
    assert_eq!((saga.generation, saga.event_id, saga.subscription_id), (1, event, subscription.id));
    let sql = format!("SELECT updated_at, attempt_count FROM webhook_delivery_sagas WHERE id = {}", sagas[0]);
    assert_eq!(home.rows(&sql).await, before, "the dead one is as it was");
    assert_eq!(home.webhooks.requeue(999).await.unwrap(), Requeued::NotFound);
    let left = home.webhooks.requeueable(DeadLetterFilter::default(), 10).await.unwrap();
    assert_eq!(left, (0, vec![]), "nothing waits any more");
}

async fn ended_sagas_events_and_attempts_refuse_raw_sql(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    let (event, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "Completed").await;
    let saga = sagas[0];
    let whole = format!("SELECT * FROM webhook_delivery_sagas WHERE id = {saga}");
    let before = home.rows(&whole).await;
    let mut attacks = vec![
        format!("UPDATE webhook_delivery_sagas SET updated_at = created_at WHERE id = {saga}"),
        format!("UPDATE webhook_delivery_sagas SET next_attempt_at = created_at WHERE id = {saga}"),
        format!("UPDATE webhook_delivery_sagas SET final_error_code = 'HTTP_500' WHERE id = {saga}"),
        format!("UPDATE webhook_delivery_sagas SET status = 'Pending' WHERE id = {saga}"),
        format!("UPDATE webhook_delivery_sagas SET attempt_count = 9 WHERE id = {saga}"),
        format!("DELETE FROM webhook_delivery_sagas WHERE id = {saga}"),
        format!("UPDATE events SET event_type = 'b' WHERE id = {event}"),
        format!("DELETE FROM events WHERE id = {event}"),
        "UPDATE webhook_attempts SET response_status = 500".to_owned(),
        "DELETE FROM webhook_attempts".to_owned(),
    ];
    if home.url.starts_with("postgres") {
        attacks.extend(["events", "webhook_attempts", "webhook_delivery_sagas"].map(|t| format!("TRUNCATE {t}")));
    } else {
        let columns = "id, event_id, subscription_id, status, attempt_count, created_at, updated_at, generation";
        attacks.push(format!("REPLACE INTO webhook_delivery_sagas ({columns}) SELECT id, event_id, subscription_id, 'Pending', 0, created_at, updated_at, generation FROM webhook_delivery_sagas"));
        attacks.push("REPLACE INTO events (id, event_type, payload, payload_sha, created_at) SELECT id, 'b', payload, payload_sha, created_at FROM events".to_owned());
    }
    for attack in attacks {
        assert!(home.try_rows(&attack).await.is_err(), "{attack}");
    }
    for _ in 0..3 {
        home.webhooks.pass().await.unwrap();
    }
    assert_eq!(home.rows(&whole).await, before, "nor by us: updated_at is when it was completed");
    assert_eq!(home.count("outbox WHERE lane = 'webhooks'").await, 0, "and nobody gives it another job");
    assert_eq!(home.status(saga).await, "Completed");
    assert_eq!(home.count("events WHERE event_type = 'a'").await, 1);
}

async fn one_live_job_per_saga(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let (_, sagas) = home.publish("a", "x").await;
    // As if a saga had been put back by hand while its job is live: no second job is made.
    home.rows(&format!("UPDATE webhook_delivery_sagas SET status = 'Pending' WHERE id = {}", sagas[0])).await;
    let (_, others) = home.publish("a", "y").await;
    home.rows(&format!("DELETE FROM outbox WHERE active_key = 'saga:{}'", others[0])).await;
    home.rows(&format!("UPDATE webhook_delivery_sagas SET status = 'Pending' WHERE id = {}", others[0])).await;
    home.webhooks.pass().await.unwrap();
    assert_eq!(home.status(sagas[0]).await, "InProgress", "as its job says");
    assert_eq!(home.count(&format!("outbox WHERE active_key = 'saga:{}'", sagas[0])).await, 1);
    assert_eq!(
        home.count(&format!("outbox WHERE active_key = 'saga:{}'", others[0])).await,
        1,
        "it is in nobody's way"
    );
    let _working = home.work();
    home.ends(sagas[0], "Completed").await;
    home.ends(others[0], "Completed").await;
    assert_eq!(receiver.got().len(), 2);
}

async fn publish_many(home: &Home, n: usize) {
    let events = (0..n).map(|n| NewEvent::new("a", n.to_string())).collect();
    home.webhooks.publish(events).await.unwrap();
}

async fn a_rate_holds_and_burns_no_attempts(home: Home) {
    let (slow, quick) = (Receiver::with_status(200).await, Receiver::with_status(200).await);
    home.subscribe_with(&slow.url, &["*"], |s| s.rate_per_sec = Some(20.0)).await;
    home.subscribe(&quick.url, &["*"]).await;
    publish_many(&home, 120).await;
    let _working = home.work();
    wait_until("the quick one has all", async || quick.got().len() == 120).await;
    let at_once = slow.got().len();
    assert!(at_once < 70, "{at_once} were not held back");
    wait_until("a first part passed", async || slow.got().len() >= 15).await;
    let (begun, before) = (Instant::now(), slow.got().len());
    wait_until("the rest comes", async || slow.got().len() >= before + 40).await;
    let rate = 40.0 / begun.elapsed().as_secs_f64();
    assert!((8.0..23.0).contains(&rate), "{rate} a second instead of 20");
    wait_until("all end", async || home.count("webhook_delivery_sagas WHERE status = 'Completed'").await == 240).await;
    assert_eq!(home.count("webhook_delivery_sagas WHERE attempt_count <> 1").await, 0);
}

/// The one through which nothing has passed yet, too.
async fn a_rate_below_one_a_second_lets_them_through_one_by_one(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.rate_per_sec = Some(0.25)).await;
    publish_many(&home, 2).await;
    let begun = Instant::now();
    let _working = home.work();
    wait_until("the second has passed, too", async || receiver.got().len() == 2).await;
    assert!(begun.elapsed() > Duration::from_secs(3), "after {:?}", begun.elapsed());
}

async fn only_so_many_are_in_flight(home: Home) {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (n, m) = (now.clone(), most.clone());
    let receiver = Receiver::start(move |_, _| {
        m.fetch_max(n.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(5));
        n.fetch_sub(1, Ordering::SeqCst);
        status_line(200, "")
    })
    .await;
    home.subscribe_with(&receiver.url, &["*"], |s| s.max_in_flight = Some(3)).await;
    publish_many(&home, 40).await;
    let _working = home.work();
    let mut live = 0;
    wait_until("all are delivered", async || {
        live = live.max(home.count("webhook_delivery_sagas WHERE status = 'InProgress'").await);
        receiver.got().len() == 40
    })
    .await;
    assert!((1..=3).contains(&live), "{live} in flight at once");
    assert!(most.load(Ordering::SeqCst) <= 3);
}

async fn several_orchestrators_and_workers_share_the_work(home: Home) {
    // A few are refused, every time.
    let receiver = Receiver::start(|got, _| {
        let refuse = got.body.len() == 2 && got.body.ends_with(b"7");
        status_line(if refuse { 500 } else { 200 }, "")
    })
    .await;
    for n in 0..3 {
        home.subscribe(&format!("{}/{n}", receiver.url), &["*"]).await;
    }
    let (second, outbox) = open(&home.url, settings()).await;
    let _working = (home.work(), work(&second, &outbox));
    publish_many(&home, 200).await;
    let ended = "webhook_delivery_sagas WHERE status IN ('Completed', 'DeadLettered')";
    wait_until("all have ended", async || home.count(ended).await == 600).await;
    let wrong = "webhook_delivery_sagas s WHERE attempt_count <> (SELECT COUNT(*) FROM webhook_attempts a WHERE a.saga_id = s.id)";
    assert_eq!(home.count(wrong).await, 0, "attempts are the distinct results");
    let dead = home.count("webhook_delivery_sagas WHERE status = 'DeadLettered'").await;
    assert_eq!(dead, 27, "nine of each subscription");
    assert_eq!(home.count("dead_letters").await, dead, "one dead letter each");
    assert_eq!(home.count("webhook_results").await + home.count("outbox WHERE lane = 'webhooks'").await, 0);
    assert_eq!(receiver.got().len() as i64, home.count("webhook_attempts").await, "what was sent is recorded");
}

async fn a_replay_sends_again_what_it_is_asked_to(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["order.*"]).await;
    let working = home.work();
    let events =
        (0..30).map(|n| NewEvent::new(if n % 3 == 0 { "order.paid" } else { "order.void" }, n.to_string())).collect();
    home.webhooks.publish(events).await.unwrap();
    wait_until("all arrived", async || home.count("webhook_delivery_sagas WHERE status = 'Completed'").await == 30)
        .await;
    let wanted = NewReplay {
        subscription_id: subscription.id,
        from: "2000-01-01T00:00:00Z".parse().unwrap(),
        to: "2100-01-01T00:00:00Z".parse().unwrap(),
        event_types: Some(vec!["order.paid".into()]),
        statuses: Some(vec!["Completed".into()]),
    };
    let counted = |count| Some(Counted { count, at_least: false });
    assert_eq!(home.webhooks.count_replay(wanted.clone()).await.unwrap(), counted(10));
    assert_eq!(receiver.got().len(), 30, "counting sends nothing");
    let replay = home.webhooks.replay(wanted.clone()).await.unwrap().unwrap();
    wait_until("they came again", async || receiver.got().len() == 40).await;
    wait_until("it is done", async || home.webhooks.replay_of(replay.id).await.unwrap().unwrap().status == "done")
        .await;
    assert_eq!(home.webhooks.replay_of(replay.id).await.unwrap().unwrap().count, 10);
    assert_eq!(home.count("webhook_delivery_sagas WHERE generation = 1").await, 10);
    let never = NewReplay { statuses: Some(vec!["DeadLettered".into()]), ..wanted.clone() };
    assert_eq!(home.webhooks.count_replay(never).await.unwrap(), counted(0));
    for wrong in [vec![], vec!["a b".to_owned()]] {
        let wrong = NewReplay { event_types: Some(wrong), ..wanted.clone() };
        assert_eq!(home.webhooks.replay(wrong).await.unwrap_err().kind, postrider::error::Kind::Invalid);
    }
    let backwards = NewReplay { to: wanted.from, ..wanted.clone() };
    assert!(home.webhooks.count_replay(backwards).await.is_err());
    let nobody = NewReplay { subscription_id: 99, ..wanted.clone() };
    assert!(home.webhooks.replay(nobody).await.unwrap().is_none());
    working.end().await;
    let cancelled = home.webhooks.replay(wanted).await.unwrap().unwrap();
    assert_eq!(home.webhooks.cancel_replay(cancelled.id).await.unwrap().unwrap().status, "cancelled");
    home.webhooks.pass().await.unwrap();
    assert_eq!(home.count("webhook_delivery_sagas WHERE generation = 2").await, 0);
}

async fn what_asks_for_time_gets_it(home: Home) {
    let receiver = Receiver::start(|_, nth| match nth {
        0 => status_line(429, "retry-after: 1\r\n"),
        _ => status_line(200, ""),
    })
    .await;
    home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    let (_, first) = home.publish("a", "1").await;
    home.ends(first[0], "PendingRetry").await;
    let begun = Instant::now();
    let (_, second) = home.publish("a", "2").await;
    home.ends(second[0], "Completed").await;
    home.ends(first[0], "Completed").await;
    assert!(begun.elapsed() > Duration::from_millis(500), "the whole subscription waits");
    assert_eq!(home.webhooks.saga(second[0]).await.unwrap().unwrap().0.attempt_count, 1);
}

async fn a_deleted_subscription_ends_what_waits(home: Home) {
    let receiver = Receiver::with_status(500).await;
    let (subscription, _) =
        home.subscribe_with(&receiver.url, &["*"], |s| s.retry_schedule_sec = Some(vec![3600.0])).await;
    let _working = home.work();
    let (_, sagas) = home.publish("a", "1").await;
    home.ends(sagas[0], "PendingRetry").await;
    home.webhooks.pause(subscription.id).await.unwrap();
    let (_, held) = home.publish("a", "2").await;
    home.webhooks.unsubscribe(subscription.id).await.unwrap();
    home.ends(held[0], "DeadLettered").await;
    home.ends(sagas[0], "DeadLettered").await;
    assert_eq!(home.count("dead_letters").await, 2);
    let letter = home.webhooks.dead_letters(DeadLetterFilter::default(), None, 10).await.unwrap().items.remove(0);
    assert_eq!(home.webhooks.requeue(letter.id).await.unwrap(), Requeued::NoSubscription);
    wait_until("its gate is gone", async || home.count("subscription_gates").await == 0).await;
}

async fn what_is_old_is_pruned(home: Home) {
    let receiver = Receiver::start(|got, _| status_line(if got.body == b"bad" { 410 } else { 200 }, "")).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    publish_many(&home, 20).await;
    wait_until("all arrived", async || home.count("webhook_delivery_sagas WHERE status = 'Completed'").await == 20)
        .await;
    let (_, bad) = home.publish("a", "bad").await;
    home.ends(bad[0], "DeadLettered").await;
    assert_eq!(home.webhooks.prune().await.unwrap(), (0, 0), "nothing is old yet");
    let old = postrider_webhooks::Settings { retention: Duration::ZERO, ..settings() };
    let (janitor, _) = open(&home.url, old).await;
    assert_eq!(janitor.prune().await.unwrap(), (21, 21));
    for table in ["webhook_delivery_sagas", "webhook_attempts", "events", "dead_letters"] {
        assert_eq!(home.count(table).await, 0, "{table}");
    }
    let error = home.try_rows("DELETE FROM events").await;
    assert!(error.is_ok(), "an empty table has nothing to guard");
}

async fn one_that_only_fails_is_disabled(home: Home) {
    let (good, bad) = (Receiver::with_status(200).await, Receiver::with_status(500).await);
    let (healthy, _) = home.subscribe(&good.url, &["*"]).await;
    let (sick, _) = home.subscribe(&bad.url, &["*"]).await;
    let impatient = postrider_webhooks::Settings { disable_after: Duration::from_millis(1), ..settings() };
    let (webhooks, outbox) = open(&home.url, impatient).await;
    let _working = work(&webhooks, &outbox);
    home.publish("a", "x").await;
    home.publish("a", "y").await;
    let status = async |id| home.webhooks.subscription(id).await.unwrap().unwrap().status;
    wait_until("the sick one is disabled", async || status(sick.id).await.as_str() == "disabled").await;
    assert_eq!(status(healthy.id).await.as_str(), "active");
    let told = "outbox WHERE lane = 'alerts' AND target LIKE 'subscription %'";
    wait_until("somebody is told", async || home.count(told).await >= 1).await;
}

async fn what_another_process_remembers_gives_up_nothing(home: Home) {
    let receiver = Receiver::with_status(500).await;
    let (second, outbox) = open(&home.url, settings()).await;
    second.pass().await.unwrap(); // it knows that there is no subscription
    home.subscribe_with(&receiver.url, &["*"], |s| s.retry_schedule_sec = Some(vec![3600.0])).await;
    let (_, first) = home.publish("a", "x").await;
    let now = if home.url.starts_with("sqlite") { "1" } else { "CURRENT_TIMESTAMP" };
    home.rows(&format!("INSERT INTO webhook_results (job_id, saga_id, attempt, success, error_code, at) VALUES (999, {}, 1, 0, 'HTTP_500', {now})", first[0])).await;
    second.pass().await.unwrap();
    assert_eq!(home.status(first[0]).await, "PendingRetry", "the orchestrator looks again before it gives up");
    let (_, next) = home.publish("a", "y").await;
    let _working = work(&second, &outbox);
    home.ends(next[0], "PendingRetry").await;
    let (saga, ..) = home.webhooks.saga(next[0]).await.unwrap().unwrap();
    assert_eq!(saga.final_error_code.as_deref(), Some("HTTP_500"), "and so does the courier");
}

async fn silence_disables_nobody(home: Home) {
    let receiver = Receiver::with_status(500).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    let impatient = postrider_webhooks::Settings { disable_after: Duration::from_secs(2), ..settings() };
    let (webhooks, outbox) = open(&home.url, impatient).await;
    let _working = work(&webhooks, &outbox);
    let (_, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "DeadLettered").await;
    // It has failed, and nothing was sent since; much longer than the limit, as far as the database knows.
    let ago = if home.url.starts_with("sqlite") { "99000000" } else { "INTERVAL '99' SECOND" };
    let columns = ["failing_from", "failed_at", "spell_at"].map(|column| format!("{column} = {column} - {ago}"));
    home.rows(&format!("UPDATE subscription_gates SET {}", columns.join(", "))).await;
    wait_until("its health was looked at", async || {
        home.webhooks.subscription(subscription.id).await.unwrap().unwrap().failing_since.is_some()
    })
    .await;
    tokio::time::sleep(Duration::from_secs(6)).await; // and once more
    assert_eq!(home.webhooks.subscription(subscription.id).await.unwrap().unwrap().status.as_str(), "active");
}

async fn what_is_published_to_one_disabled_by_itself_is_kept(home: Home) {
    let gone = Receiver::start(|got, _| status_line(if got.body == b"bad" { 410 } else { 200 }, "")).await;
    let (automatic, _) = home.subscribe(&gone.url, &["a"]).await;
    let (by_hand, _) = home.subscribe(&gone.url, &["b"]).await;
    let _working = home.work();
    let (_, sagas) = home.publish("a", "bad").await;
    home.ends(sagas[0], "DeadLettered").await;
    let status = async |id| home.webhooks.subscription(id).await.unwrap().unwrap().status;
    wait_until("it is disabled", async || status(automatic.id).await.as_str() == "disabled").await;
    // In this order: whoever looks in between sees nothing new.
    let version = "(SELECT value + 1 FROM webhook_state WHERE name = 'subscription_rows')";
    home.rows(&format!("UPDATE subscriptions SET status = 'disabled', version = {version} WHERE id = {}", by_hand.id))
        .await;
    home.rows("UPDATE webhook_state SET value = value + 1 WHERE name IN ('subscriptions', 'subscription_rows')").await;
    let (_, kept) = home.publish("a", "later").await;
    home.ends(kept[0], "DeadLettered").await;
    let (saga, _, attempts) = home.webhooks.saga(kept[0]).await.unwrap().unwrap();
    assert_eq!((saga.final_error_code.as_deref(), attempts.len()), (Some("SUBSCRIPTION_DISABLED"), 0));
    assert_eq!(home.publish("b", "x").await.1, Vec::<i64>::new(), "one disabled by hand gets nothing");
    // Pausing what is disabled does not route to it again.
    assert_eq!(home.webhooks.pause(automatic.id).await.unwrap().unwrap().status.as_str(), "disabled");
    home.webhooks.resume(automatic.id).await.unwrap();
    let letters = home.webhooks.dead_letters(DeadLetterFilter::default(), None, 10).await.unwrap().items;
    let letter = letters.iter().find(|letter| letter.saga_id == kept[0]).unwrap();
    let Requeued::Created(again) = home.webhooks.requeue(letter.id).await.unwrap() else { panic!("not requeued") };
    home.ends(again, "Completed").await;
}

async fn an_old_answer_says_nothing_of_a_new_receiver(home: Home) {
    let receiver =
        Receiver::start(|got, _| status_line(if got.path == "/hook/old" { 429 } else { 200 }, "retry-after: 3600\r\n"))
            .await;
    let (subscription, _) = home
        .subscribe_with(&format!("{}/old", receiver.url), &["*"], |s| s.retry_schedule_sec = Some(vec![0.05]))
        .await;
    let (_, under_way) = home.publish("a", "1").await;
    // Its result comes after the URL was corrected.
    let patch = Patch { url: Some(format!("{}/new", receiver.url)), ..Patch::default() };
    home.webhooks.change(subscription.id, patch).await.unwrap();
    let now = if home.url.starts_with("sqlite") { "1" } else { "CURRENT_TIMESTAMP" };
    let result = |job: i64, saga: i64, attempt: i64| {
        format!(
            "INSERT INTO webhook_results (job_id, saga_id, attempt, success, error_code, at, sent_version) VALUES ({job}, {saga}, {attempt}, 0, 'HTTP_410', {now}, 1)"
        )
    };
    home.rows("DELETE FROM outbox WHERE lane = 'webhooks'").await;
    home.rows(&result(9001, under_way[0], 1)).await;
    // And one that moves nothing, of a saga that is elsewhere by now.
    home.rows(&result(9002, under_way[0], 7).replace(", 1)", ", NULL)")).await;
    home.webhooks.pass().await.unwrap();
    let found = home.webhooks.subscription(subscription.id).await.unwrap().unwrap();
    assert_eq!(found.status.as_str(), "active", "neither disables the new one");
    assert_eq!(home.count("subscription_gates WHERE failures > 0").await, 0);
    // What the old receiver asked for does not hold up the new one either.
    let back = Patch { url: Some(format!("{}/old", receiver.url)), ..Patch::default() };
    home.webhooks.change(subscription.id, back).await.unwrap();
    let _working = home.work();
    let (_, waits) = home.publish("a", "2").await;
    home.ends(waits[0], "PendingRetry").await;
    let patch = Patch { url: Some(format!("{}/new", receiver.url)), ..Patch::default() };
    home.webhooks.change(subscription.id, patch).await.unwrap();
    let (_, next) = home.publish("a", "3").await;
    home.ends(next[0], "Completed").await;
}

async fn a_limit_lowered_meanwhile_holds_at_the_gate_too(home: Home) {
    let receiver = Receiver::with_status(500).await;
    let (subscription, _) = home
        .subscribe_with(&receiver.url, &["*"], |s| {
            (s.max_in_flight, s.max_retry_limit) = (Some(5), Some(50));
            s.retry_schedule_sec = Some(vec![3600.0]);
        })
        .await;
    let working = home.work();
    let (_, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "PendingRetry").await;
    working.end().await;
    let far = if home.url.starts_with("sqlite") { "253402214400000000" } else { "'9999-12-31 00:00:00'" };
    home.rows(&format!("UPDATE webhook_delivery_sagas SET next_attempt_at = {far}")).await;
    let patch = Patch { max_retry_limit: Some(Some(1)), ..Patch::default() };
    home.webhooks.change(subscription.id, patch).await.unwrap();
    home.webhooks.pass().await.unwrap();
    assert_eq!(home.status(sagas[0]).await, "DeadLettered");
    assert_eq!(receiver.got().len(), 1, "and nothing is sent for it");
}

async fn a_replay_leaves_alone_what_is_under_way(home: Home) {
    let receiver = Receiver::start(|_, nth| status_line(if nth == 0 { 500 } else { 200 }, "")).await;
    let (subscription, _) =
        home.subscribe_with(&receiver.url, &["*"], |s| s.retry_schedule_sec = Some(vec![2.0])).await;
    let _working = home.work();
    let (_, waits) = home.publish("a", "1").await;
    home.ends(waits[0], "PendingRetry").await;
    let (_, done) = home.publish("a", "2").await;
    home.ends(done[0], "Completed").await;
    let wanted = NewReplay {
        subscription_id: subscription.id,
        from: "2000-01-01T00:00:00Z".parse().unwrap(),
        to: "2100-01-01T00:00:00Z".parse().unwrap(),
        event_types: None,
        statuses: None,
    };
    let replay = home.webhooks.replay(wanted).await.unwrap().unwrap();
    wait_until("it is done", async || home.webhooks.replay_of(replay.id).await.unwrap().unwrap().status == "done")
        .await;
    home.ends(waits[0], "Completed").await;
    wait_until("all have ended", async || home.count("webhook_delivery_sagas WHERE status <> 'Completed'").await == 0)
        .await;
    let firsts = receiver.got().iter().filter(|got| got.body == b"1").count();
    assert_eq!((firsts, receiver.got().len()), (2, 4), "one retry of the first, one replay of the second");
}

async fn after_a_rest_a_few_try_it(home: Home) {
    let receiver = Receiver::start(|_, _| status_line(500, "")).await;
    let (subscription, _) = home.subscribe_with(&receiver.url, &["*"], |s| s.max_retry_limit = Some(1)).await;
    publish_many(&home, 200).await;
    home.rows("DELETE FROM outbox WHERE lane = 'webhooks'").await;
    let due = if home.url.starts_with("sqlite") { "1" } else { "'2020-01-01 00:00:00'" };
    home.rows(&format!("UPDATE webhook_delivery_sagas SET status = 'Pending', next_attempt_at = {due}")).await;
    // It has only failed, and its rest has just ended.
    home.rows(&format!("UPDATE subscription_gates SET failures = 40, held_until = {due}")).await;
    let (webhooks, _) = open(&home.url, settings()).await;
    webhooks.pass().await.unwrap();
    let under_way = home.count("webhook_delivery_sagas WHERE status = 'InProgress'").await;
    assert!((1..=8).contains(&under_way), "{under_way} at once");
    assert_eq!(home.webhooks.subscription(subscription.id).await.unwrap().unwrap().status.as_str(), "active");
}
