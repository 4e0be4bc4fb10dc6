//! Two processes on one database: what one remembers, holds or has just changed strands nothing of the other's.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use postrider::doctor::{Check, Examine};
use postrider::error::Kind;
use postrider_webhooks::keyring::{Keyring, Source};
use postrider_webhooks::{NewEvent, NewSubscription, Patch, Publishing};
use proving::kit::Session;

use crate::harness::{Home, mysql, on_every_store, open, open_with, postgres, secs, settings, wait_until, work};
use crate::receiver::{Receiver, status_line};

on_every_store!(
    what_is_parked_where_nobody_looks_is_found_again,
    a_resume_reaches_what_another_process_holds_back,
    what_was_put_off_for_nothing_is_woken,
    a_delivery_without_a_job_gets_one,
    one_key_for_all_processes,
    secrets_nobody_can_read_stop_nobody_else,
    changes_at_the_same_time_are_all_kept,
    rotations_at_the_same_time_all_sign,
    row_43_what_is_sent_during_a_rotation_verifies,
    row_44_what_is_claimed_after_a_pause_or_a_removal_is_not_sent,
    a_reseal_undoes_nothing,
    whoever_publishes_needs_no_key,
    a_receiver_that_asks_for_time_changes_nobodys_catalogue,
    the_doctor_finds_and_mends,
    the_doctor_looks_at_all_and_says_what_it_could_not_mend,
);

const FAR: [&str; 2] = ["253402214400000000", "'9999-12-31 00:00:00'"];

fn far(home: &Home) -> &'static str {
    FAR[usize::from(!home.url.starts_with("sqlite"))]
}

async fn what_is_parked_where_nobody_looks_is_found_again(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (limited, _) = home.subscribe_with(&receiver.url, &["a"], |s| s.max_in_flight = Some(5)).await;
    let (gateless, _) = home.subscribe_with(&receiver.url, &["b"], |s| s.max_in_flight = Some(5)).await;
    let sagas =
        [home.publish("a", "1").await.1[0], home.publish("b", "2").await.1[0], home.publish("a", "3").await.1[0]];
    // As a crash or an older version may have left them: parked, and the gate says that nothing is, or is gone.
    home.rows(&format!("UPDATE webhook_delivery_sagas SET next_attempt_at = {}", far(&home))).await;
    home.rows(&format!("UPDATE webhook_delivery_sagas SET next_attempt_at = NULL WHERE id = {}", sagas[2])).await;
    home.rows(&format!("UPDATE subscription_gates SET parked = 0 WHERE subscription_id = {}", limited.id)).await;
    home.rows(&format!("DELETE FROM subscription_gates WHERE subscription_id = {}", gateless.id)).await;
    let _working = home.work();
    for saga in sagas {
        home.ends(saga, "Completed").await;
    }
}

/// The job of a saga, put off for an hour.
async fn put_off(home: &Home, saga: i64, code: &str) {
    let due = if home.url.starts_with("sqlite") { "due_at + 3600000000" } else { "due_at + INTERVAL '1' HOUR" };
    let sql = format!("UPDATE outbox SET due_at = {due}, last_error_code = '{code}' WHERE active_key = 'saga:{saga}'");
    home.rows(&sql).await;
}

async fn a_resume_reaches_what_another_process_holds_back(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    let (second, outbox) = open(&home.url, settings()).await;
    let (_, sagas) = home.publish("a", "x").await;
    home.webhooks.pause(subscription.id).await.unwrap();
    // A worker alone, without an orchestrator that would mend it. It meets the pause, and remembers it for a moment.
    let worker = crate::harness::worker(&second, &outbox);
    let put_off = "outbox WHERE lane = 'webhooks' AND last_error_code = 'SUBSCRIPTION_PAUSED' AND locked_by IS NULL";
    wait_until("the job is put off", async || home.count(put_off).await == 1).await;
    home.webhooks.resume(subscription.id).await.unwrap();
    wait_until("the job is sent", async || receiver.got().len() == 1).await;
    wait_until("its result is applied", async || {
        home.webhooks.pass().await.unwrap();
        home.status(sagas[0]).await == "Completed"
    })
    .await;
    drop(worker);
}

async fn what_was_put_off_for_nothing_is_woken(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    let (paused, _) = home.subscribe(&format!("{}/paused", receiver.url), &["p"]).await;
    let (_, sagas) = home.publish("a", "x").await;
    let (_, held) = home.publish("p", "y").await;
    let held = held[1];
    home.webhooks.pause(paused.id).await.unwrap();
    put_off(&home, sagas[0], "SUBSCRIPTION_PAUSED").await;
    put_off(&home, held, "SUBSCRIPTION_PAUSED").await;
    let _working = home.work();
    home.ends(sagas[0], "Completed").await;
    assert_eq!(home.status(held).await, "InProgress", "what is paused waits");
    assert!(receiver.got().iter().all(|got| !got.path.ends_with("/paused")));
    home.webhooks.resume(paused.id).await.unwrap();
    home.ends(held, "Completed").await;
    let (_, resting) = home.publish("a", "z").await;
    wait_until("it arrived", async || home.status(resting[0]).await == "Completed").await;
    assert_eq!(home.webhooks.subscription(subscription.id).await.unwrap().unwrap().status.as_str(), "active");
}

async fn a_delivery_without_a_job_gets_one(home: Home) {
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let (_, lost) = home.publish("a", "lost").await;
    let (_, broken) = home.publish("a", "broken").await;
    home.rows(&format!("DELETE FROM outbox WHERE active_key = 'saga:{}'", lost[0])).await;
    let nonsense = if home.url.starts_with("postgres") { "'nonsense'::bytea" } else { "'nonsense'" };
    home.rows(&format!("UPDATE outbox SET payload = {nonsense} WHERE active_key = 'saga:{}'", broken[0])).await;
    let _working = home.work();
    home.ends(lost[0], "Completed").await;
    home.ends(broken[0], "Completed").await;
    let (saga, _, attempts) = home.webhooks.saga(broken[0]).await.unwrap().unwrap();
    assert_eq!(saga.attempt_count, 2, "the job nobody could read was an attempt: {attempts:?}");
    assert_eq!(home.webhooks.saga(lost[0]).await.unwrap().unwrap().0.attempt_count, 1);
}

/// A folder of its own, with or without a key in it.
#[derive(Clone, Default)]
struct Folder(Arc<Mutex<Option<String>>>);

impl Source for Folder {
    fn read(&self) -> postrider::Result<Option<String>> {
        Ok(self.0.lock().unwrap().clone())
    }

    fn keep(&self, fresh: &str) -> postrider::Result<String> {
        Ok(self.0.lock().unwrap().get_or_insert_with(|| fresh.to_owned()).clone())
    }

    fn place(&self) -> String {
        "a folder".to_owned()
    }
}

async fn one_key_for_all_processes(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let folders = [Folder::default(), Folder::default()];
    let (a, a_outbox) = open_with(&home.url, settings(), Keyring::at(Box::new(folders[0].clone())).unwrap()).await;
    let (b, b_outbox) = open_with(&home.url, settings(), Keyring::at(Box::new(folders[1].clone())).unwrap()).await;
    for webhooks in [&a, &b] {
        webhooks.check_key().await.unwrap();
        webhooks.publish(vec![NewEvent::new("nobody", "x")]).await.unwrap();
    }
    assert!(folders.iter().all(|folder| folder.read().unwrap().is_none()), "nobody has needed one so far");
    let wish =
        || NewSubscription { url: receiver.url.clone(), event_types: vec!["a".into()], ..NewSubscription::default() };
    // Both at once: one of them makes the key.
    let (first, second) = tokio::join!(a.subscribe(wish()), b.subscribe(wish()));
    let (holder, lacking, folder) = match (&first, &second) {
        (Ok(_), Err(e)) => ((&a, &a_outbox), (&b, &b_outbox, e), 1),
        (Err(e), Ok(_)) => ((&b, &b_outbox), (&a, &a_outbox, e), 0),
        other => panic!("one of them: {other:?}"),
    };
    assert_eq!(lacking.2.kind, Kind::KeyMissing, "{}", lacking.2);
    assert_eq!(lacking.0.check_key().await.unwrap_err().kind, Kind::KeyMissing);
    assert!(folders[folder].read().unwrap().is_none(), "whoever does not hold it makes none");
    holder.0.check_key().await.unwrap();
    // Publishing needs none, and a worker without it leaves the job to one that has it.
    let published = lacking.0.publish(vec![NewEvent::new("a", "x")]).await.unwrap().remove(0);
    assert!(!postrider::Courier::ready(&lacking.0.courier()).await, "it takes none");
    assert!(postrider::Courier::ready(&holder.0.courier()).await);
    let _working = (work(lacking.0, lacking.1), work(holder.0, holder.1));
    home.ends(published.saga_ids[0], "Completed").await;
    assert_eq!(receiver.got().len(), 1);
    // Brought there, it is found without a restart.
    *folders[folder].0.lock().unwrap() = folders[1 - folder].read().unwrap();
    wait_until("it is held by both", async || lacking.0.check_key().await.is_ok()).await;
    assert!(postrider::Courier::ready(&lacking.0.courier()).await);
    lacking.0.subscribe(wish()).await.unwrap();
    assert_eq!(home.count("webhook_keys").await, 1);
}

async fn secrets_nobody_can_read_stop_nobody_else(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (broken, _) = home.subscribe(&format!("{}/broken", receiver.url), &["*"]).await;
    let (fine, _) = home.subscribe(&receiver.url, &["*"]).await;
    home.rows(&format!(
        "UPDATE subscriptions SET secrets = 'v1:test:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA' WHERE id = {}",
        broken.id
    ))
    .await;
    let (second, outbox) = open(&home.url, settings()).await;
    let published = second.publish(vec![NewEvent::new("a", "x")]).await.unwrap().remove(0);
    assert_eq!(published.saga_ids.len(), 2, "publishing reads no secrets");
    let _working = work(&second, &outbox);
    home.ends(published.saga_ids[1], "Completed").await;
    assert_eq!(second.subscription(broken.id).await.unwrap().unwrap().id, broken.id);
    let found = second.look(Duration::ZERO).await.unwrap();
    let unreadable: Vec<i64> =
        found.iter().filter(|case| case.ailment.check == Check::UnreadableRow).map(|case| case.id).collect();
    assert_eq!(unreadable, [broken.id]);
    second.rotate_secret(broken.id, None, secs(60)).await.unwrap().unwrap();
    home.ends(published.saga_ids[0], "Completed").await;
    assert_ne!(broken.id, fine.id);
}

async fn changes_at_the_same_time_are_all_kept(home: Home) {
    let (subscription, _) = home.subscribe("http://127.0.0.1:1/", &["*"]).await;
    let (second, _) = open(&home.url, settings()).await;
    for n in 0..25 {
        let (a, b) = tokio::join!(
            home.webhooks.change(subscription.id, Patch { description: Some(Some(n.to_string())), ..Patch::default() }),
            second.change(subscription.id, Patch { timeout_ms: Some(Some(1000 + n)), ..Patch::default() }),
        );
        for changed in [a, b] {
            changed.unwrap();
        }
        let now = home.webhooks.subscription(subscription.id).await.unwrap().unwrap();
        assert_eq!((now.description, now.timeout_ms), (Some(n.to_string()), Some(1000 + n)), "round {n}");
    }
}

async fn rotations_at_the_same_time_all_sign(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (second, _) = open(&home.url, settings()).await;
    for n in 0..10 {
        let (subscription, first) = home.subscribe(&format!("{}/{n}", receiver.url), &["*"]).await;
        let (a, b) = tokio::join!(
            home.webhooks.rotate_secret(subscription.id, None, secs(3600)),
            second.rotate_secret(subscription.id, None, secs(3600)),
        );
        let secrets = [first, a.unwrap().unwrap().1, b.unwrap().unwrap().1];
        second.test(subscription.id).await.unwrap().unwrap();
        let got = receiver.got().pop().unwrap();
        let at = got.header("webhook-timestamp").parse().unwrap();
        for secret in secrets {
            let (id, signatures) = (got.header("webhook-id"), got.header("webhook-signature"));
            assert!(postrider_webhooks::sign::verify(&secret, id, at, &got.body, signatures), "round {n}");
        }
    }
}

/// Requests are under way all the while: each is signed with a secret that was in force, and those after a rotation with the
/// new one.
async fn row_43_what_is_sent_during_a_rotation_verifies(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, first) = home.subscribe(&receiver.url, &["*"]).await;
    let (second, _) = open(&home.url, settings()).await;
    let mut secrets = vec![first];
    let working = home.work();
    let mut published = 0;
    for round in 1..=4 {
        let events = (0..100).map(|n| NewEvent::new("a", format!("{round}-{n}"))).collect();
        home.webhooks.publish(events).await.unwrap();
        published += 100;
        wait_until("some are under way", async || receiver.got().len() > published - 90).await;
        secrets.push(second.rotate_secret(subscription.id, None, secs(3600)).await.unwrap().unwrap().1);
    }
    home.publish("a", "afterwards").await;
    wait_until("all have arrived", async || receiver.got().len() == published + 1).await;
    working.end().await;
    let signs = |secret: &String, got: &crate::receiver::Got| {
        let at = got.header("webhook-timestamp").parse().unwrap();
        let (id, signatures) = (got.header("webhook-id"), got.header("webhook-signature"));
        postrider_webhooks::sign::verify(secret, id, at, &got.body, signatures)
    };
    for got in receiver.got() {
        assert!(secrets.iter().any(|secret| signs(secret, &got)), "signed with none of its secrets");
    }
    assert!(signs(&secrets[4], receiver.got().last().unwrap()), "the last one with the newest");
}

/// Another process changes a subscription in the middle, when most jobs are live and nobody has claimed them: nothing that
/// is claimed afterwards is sent, by a process that remembers the subscription as it was, once it has to look again.
async fn row_44_what_is_claimed_after_a_pause_or_a_removal_is_not_sent(home: Home) {
    const EVENTS: i64 = 1000;
    let (second, _) = open(&home.url, settings()).await;
    for (kind, is_removed) in [("paused", false), ("removed", true)] {
        let receiver = Receiver::with_status(200).await;
        let (subscription, _) = home.subscribe(&receiver.url, &[kind]).await;
        let events = (0..EVENTS).map(|n| NewEvent::new(kind, n.to_string())).collect();
        home.webhooks.publish(events).await.unwrap();
        let working = home.work();
        wait_until("some have arrived", async || receiver.got().len() > 20).await;
        working.end().await;
        let arrived = receiver.got().len() as i64;
        let live = home.count("outbox WHERE lane = 'webhooks'").await;
        assert!(live > EVENTS / 10 && arrived < EVENTS, "it is in the middle: {live} live, {arrived} arrived");
        match is_removed {
            true => assert!(second.unsubscribe(subscription.id).await.unwrap()),
            false => assert!(second.pause(subscription.id).await.unwrap().is_some()),
        }
        // What a process remembers it believes for a quarter of a second.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let working = home.work();
        // Every job is met: put off, or a dead letter.
        let now = match home.url.split(':').next().unwrap() {
            "sqlite" => "CAST(unixepoch('subsec') * 1000000 AS INTEGER)",
            "mysql" => "UTC_TIMESTAMP(6)",
            _ => "clock_timestamp()",
        };
        let unmet = match is_removed {
            true => "outbox WHERE lane = 'webhooks'".to_owned(),
            false => format!("outbox WHERE lane = 'webhooks' AND (locked_by IS NOT NULL OR due_at <= {now})"),
        };
        wait_until("every job is met", async || home.count(&unmet).await == 0).await;
        let of = format!("webhook_delivery_sagas WHERE subscription_id = {} AND", subscription.id);
        wait_until("what arrived counts", async || home.count(&format!("{of} status = 'Completed'")).await == arrived)
            .await;
        if is_removed {
            wait_until("the others are dead letters", async || {
                home.count(&format!("{of} status = 'DeadLettered'")).await == EVENTS - arrived
            })
            .await;
        }
        assert_eq!(receiver.got().len() as i64, arrived, "nothing is sent once it is {kind}");
        if !is_removed {
            second.resume(subscription.id).await.unwrap().unwrap();
            let all = format!("{of} status = 'Completed'");
            wait_until("the rest comes after the pause", async || home.count(&all).await == EVENTS).await;
            assert_eq!(receiver.got().len() as i64, EVENTS, "each once");
        }
        working.end().await;
    }
}

async fn a_reseal_undoes_nothing(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let mut ids = Vec::new();
    for n in 0..12 {
        ids.push(home.subscribe(&format!("{}/{n}", receiver.url), &["*"]).await.0.id);
    }
    let key = crate::harness::KEY;
    let text = format!("new:{}\n{key}", key.split_once(':').unwrap().1.replace("MDEy", "OTEy"));
    let (a, _) = open_with(&home.url, settings(), Keyring::parse(&text).unwrap()).await;
    let (b, _) = open_with(&home.url, settings(), Keyring::parse(&text).unwrap()).await;
    let rotate = async {
        let mut secrets = Vec::new();
        for id in &ids {
            secrets.push(b.rotate_secret(*id, None, Duration::ZERO).await.unwrap().unwrap().1);
        }
        secrets
    };
    let (resealed, secrets) = tokio::join!(a.reseal(), rotate);
    resealed.unwrap();
    for (id, secret) in ids.iter().zip(secrets) {
        a.test(*id).await.unwrap().unwrap();
        let got = receiver.got().pop().unwrap();
        let at = got.header("webhook-timestamp").parse().unwrap();
        let (message, signatures) = (got.header("webhook-id"), got.header("webhook-signature"));
        assert!(postrider_webhooks::sign::verify(&secret, message, at, &got.body, signatures), "subscription {id}");
    }
    a.reseal().await.unwrap();
    let known: Vec<String> =
        home.rows("SELECT key_id FROM webhook_keys").await.iter().map(|row| row.text(0).unwrap()).collect();
    assert_eq!(known, ["new"], "a key that seals nothing any more is forgotten");
    assert_eq!(home.webhooks.check_key().await.unwrap_err().kind, Kind::KeyMissing);
}

async fn whoever_publishes_needs_no_key(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (first, _) = home.subscribe(&receiver.url, &["order.*"]).await;
    let (publisher, _) = open_with(&home.url, settings(), Keyring::none()).await;
    let publish = async |kind: &str| publisher.publish(vec![NewEvent::new(kind, "x")]).await.unwrap()[0].saga_ids.len();
    assert_eq!((publish("order.paid").await, publish("other").await), (1, 0));
    // It notices every change, though nothing in its process looks for one.
    let (second, _) = home.subscribe(&receiver.url, &["*"]).await;
    assert_eq!((publish("order.paid").await, publish("other").await), (2, 1));
    let patch = Patch { event_types: Some(vec!["else".into()]), ..Patch::default() };
    home.webhooks.change(first.id, patch).await.unwrap();
    assert_eq!((publish("order.paid").await, publish("else").await), (1, 2));
    home.webhooks.unsubscribe(second.id).await.unwrap();
    assert_eq!((publish("order.paid").await, publish("else").await), (0, 1));
}

async fn a_receiver_that_asks_for_time_changes_nobodys_catalogue(home: Home) {
    let receiver = Receiver::start(|_, _| status_line(429, "retry-after: 60\r\n")).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let (second, _) = open(&home.url, settings()).await;
    let version = "SELECT value FROM webhook_state WHERE name = 'subscriptions'";
    let before = home.rows(version).await;
    let _working = home.work();
    let (_, sagas) = home.publish("a", "1").await;
    home.ends(sagas[0], "PendingRetry").await;
    assert_eq!(home.rows(version).await, before);
    // Yet everybody knows of it, sooner or later.
    wait_until("another process waits too", async || {
        let published = second.publish(vec![NewEvent::new("a", "2")]).await.unwrap().remove(0);
        home.status(published.saga_ids[0]).await == "Pending"
    })
    .await;
    let status = home.webhooks.saga(sagas[0]).await.unwrap().unwrap().0;
    assert_eq!(status.attempt_count, 1);
}

async fn the_doctor_finds_and_mends(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, _) = home.subscribe_with(&receiver.url, &["a"], |s| s.max_in_flight = Some(9)).await;
    home.subscribe(&receiver.url, &["b"]).await;
    let parked = home.publish("a", "1").await.1[0];
    let jobless = home.publish("b", "2").await.1[0];
    let deferred = home.publish("b", "3").await.1[0];
    let timeless = home.publish("a", "4").await.1[0];
    assert_eq!(home.webhooks.look(Duration::ZERO).await.unwrap(), [], "all is well");
    home.rows(&format!("UPDATE webhook_delivery_sagas SET next_attempt_at = {} WHERE id = {parked}", far(&home))).await;
    home.rows(&format!("UPDATE webhook_delivery_sagas SET next_attempt_at = NULL WHERE id = {timeless}")).await;
    home.rows(&format!("DELETE FROM outbox WHERE active_key = 'saga:{jobless}'")).await;
    put_off(&home, deferred, "RECEIVER_RESTING").await;
    let found = home.webhooks.look(Duration::ZERO).await.unwrap();
    let mut seen: Vec<(Check, i64)> = found.iter().map(|case| (case.ailment.check, case.id)).collect();
    seen.sort();
    let mut expected = vec![
        (Check::WaitsInVain, subscription.id),
        (Check::WaitsInVain, timeless),
        (Check::WaitsInVain, deferred),
        (Check::SagaAgainstJob, jobless),
    ];
    expected.sort();
    assert_eq!(seen, expected);
    let recent = home.webhooks.look(secs(3600)).await.unwrap();
    assert!(recent.is_empty(), "what has not stood for long is not told: {recent:?}");
    assert_eq!(home.webhooks.repair(&found).await.unwrap().len(), found.len());
    assert_eq!(home.webhooks.look(Duration::ZERO).await.unwrap(), []);
    let _working = home.work();
    for saga in [parked, jobless, deferred, timeless] {
        home.ends(saga, "Completed").await;
    }
}

/// One orchestrator has found a gate empty and is about to say so while another parks there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parking_and_emptying_a_gate_meet_in_the_database() {
    for home in [postgres().await, mysql().await] {
        let receiver = Receiver::with_status(200).await;
        let (limited, _) = home.subscribe_with(&receiver.url, &["*"], |s| s.max_in_flight = Some(5)).await;
        home.rows("UPDATE subscription_gates SET parked = 1").await;
        let (_, sagas) = home.publish("a", "x").await;
        let empty = format!("UPDATE subscription_gates SET parked = 0 WHERE subscription_id = {}", limited.id);
        if home.url.starts_with("postgres") {
            let (mut client, connection) = tokio_postgres::connect(&home.url, tokio_postgres::NoTls).await.unwrap();
            tokio::spawn(connection);
            let tx = client.transaction().await.unwrap();
            tx.batch_execute(&empty).await.unwrap();
            home.webhooks.pass().await.unwrap();
            tx.commit().await.unwrap();
        } else {
            let mut conn = proving::kit::mysql(&home.url).await.unwrap();
            let mut tx = conn.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
            tx.query_drop(&empty).await.unwrap();
            home.webhooks.pass().await.unwrap();
            tx.commit().await.unwrap();
        }
        let stranded = "webhook_delivery_sagas s JOIN subscription_gates g ON g.subscription_id = s.subscription_id
                        WHERE s.next_attempt_at > '9000-01-01' AND g.parked = 0";
        assert_eq!(home.count(stranded).await, 0, "parked where nobody will look");
        let _working = home.work();
        home.ends(sagas[0], "Completed").await;
    }
}

/// The same external id in two callers' own transactions at once: the second waits, and is told that it exists.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_external_id_in_two_callers_transactions() {
    let event = |id: &str| NewEvent::new("a", "x").external_id(id);
    let home = postgres().await;
    let receiver = Receiver::with_status(200).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let connect = async || {
        let (client, connection) = tokio_postgres::connect(&home.url, tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    };
    let (mut one, mut two) = (connect().await, connect().await);
    let mut first = one.transaction().await.unwrap();
    let mut second = two.transaction().await.unwrap();
    let a = home.webhooks.publish_in(&mut first, &[event("same"), event("mine")]).await.unwrap();
    let later = async {
        let published = home.webhooks.publish_in(&mut second, &[event("new"), event("same")]).await.unwrap();
        second.batch_execute("SELECT 1").await.unwrap(); // the caller's transaction is as it was
        second.commit().await.unwrap();
        published
    };
    let commit = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        first.commit().await.unwrap();
    };
    let (b, ()) = tokio::join!(later, commit);
    assert_eq!([b[0].outcome, b[1].outcome], [Publishing::Created, Publishing::Exists]);
    assert_eq!((b[1].event_id, &b[1].saga_ids), (a[0].event_id, &a[0].saga_ids));
    assert_eq!(home.count("events").await, 3);

    let home = mysql().await;
    home.subscribe(&receiver.url, &["*"]).await;
    let connect = async || proving::kit::mysql(&home.url).await.unwrap();
    let (mut one, mut two) = (connect().await, connect().await);
    // As callers have it: under REPEATABLE READ, and the snapshot is taken before the other commits.
    let mut first = one.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
    let mut second = two.start_transaction(mysql_async::TxOpts::default()).await.unwrap();
    second.query_drop("SELECT COUNT(*) FROM events").await.unwrap();
    let a = home.webhooks.publish_in(&mut first, &[event("same"), event("mine")]).await.unwrap();
    let later = async {
        let wanted = [event("new"), event("same"), event("newer"), event("same")];
        let published = home.webhooks.publish_in(&mut second, &wanted).await.unwrap();
        second.commit().await.unwrap();
        published
    };
    let commit = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        first.commit().await.unwrap();
    };
    let (b, ()) = tokio::join!(later, commit);
    let outcomes: Vec<Publishing> = b.iter().map(|p| p.outcome).collect();
    use Publishing::{Created, Exists};
    assert_eq!(outcomes, [Created, Exists, Created, Exists]);
    assert_eq!((b[1].event_id, &b[1].saga_ids), (a[0].event_id, &a[0].saga_ids));
    let names = home.rows("SELECT external_id, id FROM events ORDER BY id").await;
    let id_of = |name: &str| names.iter().find(|row| row.text(0).unwrap() == name).unwrap().int(1).unwrap();
    assert_eq!((b[0].event_id, b[2].event_id), (id_of("new"), id_of("newer")));
    assert_eq!((names.len(), home.count("webhook_delivery_sagas").await), (4, 4));
}

async fn the_doctor_looks_at_all_and_says_what_it_could_not_mend(home: Home) {
    // More under way than a page, and the last of them has no job.
    let (busy, _) = home.subscribe("http://127.0.0.1:1/", &["busy"]).await;
    let events = (0..620).map(|n| NewEvent::new("busy", n.to_string())).collect();
    let sagas: Vec<i64> =
        home.webhooks.publish(events).await.unwrap().into_iter().flat_map(|published| published.saga_ids).collect();
    let jobless = *sagas.last().unwrap();
    home.rows(&format!("DELETE FROM outbox WHERE active_key = 'saga:{jobless}'")).await;
    // The first to be put off would be due after all others.
    let deferred = sagas[0];
    put_off(&home, deferred, "RECEIVER_RESTING").await;
    // More subscriptions than a page, and the last of them has a delivery where nobody looks.
    let mut last = busy.id;
    for n in 0..420 {
        last = home.subscribe(&format!("http://127.0.0.1:1/{n}"), &[&format!("t{n}")]).await.0.id;
        home.webhooks.pause(last).await.unwrap();
        home.publish(&format!("t{n}"), "x").await;
    }
    let of_it = format!("WHERE subscription_id = {last}");
    home.rows(&format!("UPDATE webhook_delivery_sagas SET next_attempt_at = {} {of_it}", far(&home))).await;
    home.rows(&format!("UPDATE subscription_gates SET parked = 0 {of_it}")).await;
    let look = async || {
        let cases = home.webhooks.look(Duration::ZERO).await.unwrap();
        let mut seen: Vec<(Check, i64)> = cases.iter().map(|case| (case.ailment.check, case.id)).collect();
        seen.sort();
        (cases, seen)
    };
    let mut expected =
        vec![(Check::WaitsInVain, last), (Check::WaitsInVain, deferred), (Check::SagaAgainstJob, jobless)];
    expected.sort();
    let (cases, seen) = look().await;
    assert_eq!(seen, expected);
    // What somebody has locked is not called mended.
    if !home.url.starts_with("sqlite") {
        let gate = Session::holding(&home.url, &format!("subscription_gates WHERE subscription_id = {last}")).await;
        // By its id: whatever InnoDB looks at, it locks.
        let sql = format!("SELECT id FROM outbox WHERE active_key = 'saga:{deferred}'");
        let id = home.rows(&sql).await[0].int(0).unwrap();
        let job = Session::holding(&home.url, &format!("outbox WHERE id = {id}")).await;
        let mended: Vec<i64> = home.webhooks.repair(&cases).await.unwrap().iter().map(|case| case.id).collect();
        assert_eq!(mended, [jobless]);
        drop((gate, job));
        let (cases, seen) = look().await;
        assert_eq!(seen.len(), 2, "{seen:?}");
        wait_until("they are let go", async || {
            home.webhooks.repair(&cases).await.unwrap();
            look().await.1.is_empty()
        })
        .await;
    } else {
        assert_eq!(home.webhooks.repair(&cases).await.unwrap().len(), 3);
        assert_eq!(look().await.1, []);
    }
}
