//! Beside others: what somebody else's session has locked delays what it is about, and nobody else; and what a transaction
//! wrote that was rolled back was never there.

use std::time::Duration;

use postrider::store::{Mode, transact};
use postrider_webhooks::NewEvent;
use proving::kit::Session;

use crate::harness::{Home, mysql, on_every_store, postgres, wait_until};
use crate::receiver::Receiver;

on_every_store!(a_change_that_was_rolled_back_is_not_remembered, an_external_id_with_a_blank_at_its_end_is_refused,);

/// On SQLite transactions share a commit, and each sees what those before it wrote: if the commit fails, what one of them
/// learned was never true. Here one transaction does both.
async fn a_change_that_was_rolled_back_is_not_remembered(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    home.publish("a", "before").await;
    let (webhooks, id) = (home.webhooks.clone(), subscription.id);
    let rolled_back = transact(&**home.outbox.store(), Mode::Write, move |tx| {
        let webhooks = webhooks.clone();
        Box::pin(async move {
            let bump =
                "UPDATE webhook_state SET value = value + 1 WHERE name IN ('subscriptions', 'subscription_rows')";
            let pause = "UPDATE subscriptions SET status = 'paused', version = (SELECT value FROM webhook_state WHERE name = 'subscription_rows') WHERE id = ?";
            for _ in 0..3 {
                tx.execute(bump, &[]).await?;
            }
            tx.execute(pause, &[id.into()]).await?;
            webhooks.publish_in(tx, &[NewEvent::new("a", "never")]).await?;
            Err::<(), _>(postrider::Error::invalid("no"))
        })
    });
    assert!(rolled_back.await.is_err());
    let (_, sagas) = home.publish("a", "after").await;
    let _working = home.work();
    home.ends(sagas[0], "Completed").await;
}

async fn an_external_id_with_a_blank_at_its_end_is_refused(home: Home) {
    for id in ["x ", " "] {
        let event = NewEvent::new("a", "x").external_id(id);
        let refused = home.webhooks.publish(vec![event]).await.unwrap_err();
        assert!(refused.message.contains("ends with a blank"), "{refused}");
    }
    assert_eq!(home.count("events").await, 0);
    let published = home.webhooks.publish(vec![NewEvent::new("a", "x").external_id(" x")]).await.unwrap();
    assert_eq!(published.len(), 1);
}

/// On MySQL a statement that reads a small table as a whole waits for whatever of it somebody has locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_result_holds_up_no_other() {
    for home in [postgres().await, mysql().await] {
        let receiver = Receiver::with_status(200).await;
        home.subscribe(&receiver.url, &["*"]).await;
        // Told before anybody applies it, and locked by a stranger.
        let held = "INSERT INTO webhook_results (job_id, saga_id, attempt, success, error_code, at) VALUES (4000000000, 4000000000, 1, 1, '', CURRENT_TIMESTAMP)";
        let mut stranger = Session::to(&home.url).await;
        stranger.run(held).await.unwrap();
        stranger.run("BEGIN").await.unwrap();
        stranger.run("SELECT 1 FROM webhook_results WHERE job_id = 4000000000 FOR UPDATE").await.unwrap();
        let _working = home.work();
        let events = (0..300).map(|n| NewEvent::new("a", n.to_string())).collect();
        home.webhooks.publish(events).await.unwrap();
        let completed = "webhook_delivery_sagas WHERE status = 'Completed'";
        wait_until("all are applied beside it", async || home.count(completed).await == 300).await;
        stranger.run("ROLLBACK").await.unwrap();
    }
}

/// Somebody has a subscription locked whose receiver says 410: its results wait, and those of the others do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_gone_and_locked_holds_up_nobody() {
    for home in [postgres().await, mysql().await] {
        let (gone, well) = (Receiver::with_status(410).await, Receiver::with_status(200).await);
        home.subscribe(&well.url, &["well"]).await;
        for (n, table) in ["subscriptions", "webhook_state", "subscription_gates"].into_iter().enumerate() {
            let (leaving, _) = home.subscribe(&gone.url, &[&format!("gone-{n}")]).await;
            let rows = match table {
                "subscriptions" => format!("subscriptions WHERE id = {}", leaving.id),
                "subscription_gates" => format!("subscription_gates WHERE subscription_id = {}", leaving.id),
                all => all.to_owned(),
            };
            let working = home.work();
            let (_, sagas) = home.publish("well", "the catalogue is known").await;
            home.ends(sagas[0], "Completed").await;
            let mut stranger = Session::holding(&home.url, &rows).await;
            let (_, left) = home.publish(&format!("gone-{n}"), "x").await;
            for n in 0..20 {
                let (_, sagas) = home.publish("well", &n.to_string()).await;
                home.ends(sagas[0], "Completed").await;
            }
            wait_until("its result is there", async || home.count("webhook_results").await > 0).await;
            assert_eq!(home.status(left[0]).await, "InProgress", "{rows}: it waits");
            stranger.run("ROLLBACK").await.unwrap();
            home.ends(left[0], "DeadLettered").await;
            let disabled = format!("subscriptions WHERE id = {} AND status = 'disabled'", leaving.id);
            wait_until("it is disabled", async || home.count(&disabled).await == 1).await;
            working.end().await;
        }
    }
}

/// A page of results whose sagas somebody has locked is passed by. (On MySQL whoever locks so many locks the others with them.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_locked_results_is_passed_by() {
    let home = postgres().await;
    let receiver = Receiver::with_status(200).await;
    let (locked, _) = home.subscribe(&receiver.url, &["locked"]).await;
    home.subscribe(&receiver.url, &["free"]).await;
    let events = (0..600).map(|n| NewEvent::new("locked", n.to_string())).collect();
    home.webhooks.publish(events).await.unwrap();
    let rows = format!("webhook_delivery_sagas WHERE subscription_id = {}", locked.id);
    let mut stranger = Session::holding(&home.url, &rows).await;
    let working = home.work();
    wait_until("their results are there", async || home.count("webhook_results").await == 600).await;
    let (_, sagas) = home.publish("free", "x").await;
    home.ends(sagas[0], "Completed").await;
    stranger.run("ROLLBACK").await.unwrap();
    wait_until("all is applied", async || home.count("webhook_results").await == 0).await;
    working.end().await;
}

/// Since when a subscription fails is written beside the deliveries: whoever has its row locked holds up nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_of_a_failing_one_slows_nobody_down() {
    for home in [postgres().await, mysql().await] {
        let (sick, well) = (Receiver::with_status(500).await, Receiver::with_status(200).await);
        let (failing, _) = home.subscribe(&sick.url, &["sick"]).await;
        home.subscribe_with(&well.url, &["well"], |s| s.max_in_flight = Some(1)).await;
        let mut stranger = Session::holding(&home.url, &format!("subscriptions WHERE id = {}", failing.id)).await;
        home.publish("sick", "x").await;
        let working = home.work();
        wait_until("it has failed", async || home.count("subscription_gates WHERE failures > 0").await == 1).await;
        let begun = tokio::time::Instant::now();
        let mut last = 0;
        for n in 0..60 {
            last = home.publish("well", &n.to_string()).await.1[0];
        }
        home.ends(last, "Completed").await;
        // One after the other, they took 106 s before: the orchestrator waited five seconds in each of its rounds.
        assert!(begun.elapsed() < Duration::from_secs(30));
        stranger.run("ROLLBACK").await.unwrap();
        let shown = "subscriptions WHERE failing_since IS NOT NULL";
        wait_until("it is shown", async || home.count(shown).await == 1).await;
        working.end().await;
    }
}

/// What waits in vain is found again for all but whoever somebody has locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_gate_keeps_the_sweep_from_nobody_else() {
    for home in [postgres().await, mysql().await] {
        let receiver = Receiver::with_status(200).await;
        let mut sagas = Vec::new();
        for name in ["locked", "parked", "gateless"] {
            let (subscription, _) = home.subscribe(&receiver.url, &[name]).await;
            home.webhooks.pause(subscription.id).await.unwrap();
            let (_, saga) = home.publish(name, "x").await;
            sagas.push((subscription.id, saga[0]));
        }
        let [(locked, stuck), (_, parked), (gateless, free)] = sagas[..] else { panic!("{sagas:?}") };
        let working = home.work();
        wait_until("all are parked", async || home.count("subscription_gates WHERE parked > 0").await == 3).await;
        working.end().await;
        // As a crash of another version may have left it: parked, and nobody looks.
        for (subscription, _) in &sagas {
            home.webhooks.resume(*subscription).await.unwrap();
        }
        home.rows("UPDATE subscription_gates SET parked = 0").await;
        home.rows(&format!("DELETE FROM subscription_gates WHERE subscription_id = {gateless}")).await;
        let rows = format!("subscription_gates WHERE subscription_id = {locked}");
        let mut stranger = Session::holding(&home.url, &rows).await;
        let working = home.work();
        home.ends(parked, "Completed").await;
        home.ends(free, "Completed").await;
        assert_ne!(home.status(stuck).await, "Completed");
        stranger.run("ROLLBACK").await.unwrap();
        home.ends(stuck, "Completed").await;
        working.end().await;
    }
}

/// Who wants to change a subscription that somebody has locked keeps no other change waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_locked_subscription_keeps_no_other_from_being_changed() {
    for home in [postgres().await, mysql().await] {
        let receiver = Receiver::with_status(200).await;
        let (locked, _) = home.subscribe(&receiver.url, &["a"]).await;
        let (other, _) = home.subscribe(&receiver.url, &["b"]).await;
        let mut stranger = Session::holding(&home.url, &format!("subscriptions WHERE id = {}", locked.id)).await;
        let patient: Vec<_> = (0..3)
            .map(|_| {
                let webhooks = home.webhooks.clone();
                tokio::spawn(async move { webhooks.pause(locked.id).await })
            })
            .collect();
        for n in 0..10 {
            let changed =
                if n % 2 == 0 { home.webhooks.pause(other.id).await } else { home.webhooks.resume(other.id).await };
            assert!(changed.unwrap().is_some(), "change {n} of another");
        }
        assert!(patient.iter().any(|one| !one.is_finished()), "they wait for the lock meanwhile");
        stranger.run("ROLLBACK").await.unwrap();
        for one in patient {
            assert!(one.await.unwrap().unwrap().is_some());
        }
    }
}
