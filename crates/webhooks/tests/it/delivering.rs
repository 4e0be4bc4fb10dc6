//! What receivers see: signatures, headers, retries, and what is recorded of each attempt.

use postrider_webhooks::sign::{Scheme, verify};
use postrider_webhooks::{NewEvent, Patch};

use crate::harness::{Home, on_every_store, wait_until};
use crate::receiver::{Receiver, status_line};

on_every_store!(
    an_event_arrives_signed_and_its_saga_is_completed,
    failures_are_retried_until_the_limit_and_then_dead_lettered,
    a_receiver_that_recovers_completes_the_saga,
    gone_disables_and_what_waits_is_dead_lettered,
    a_pause_holds_and_a_resume_lets_go,
);

async fn an_event_arrives_signed_and_its_saga_is_completed(home: Home) {
    let receiver = Receiver::with_status(204).await;
    let (first, secret) =
        home.subscribe_with(&receiver.url, &["order.*"], |s| s.headers = vec![("X-Own".into(), "1".into())]).await;
    let (second, public) =
        home.subscribe_with(&format!("{}/v1a", receiver.url), &["*"], |s| s.signature = Scheme::V1a).await;
    assert!(secret.starts_with("whsec_") && public.starts_with("whpk_"));
    let _working = home.work();
    let payload: &[u8] = b"\xff\x00 not text \xfe";
    let mut event = NewEvent::new("order.paid", payload);
    event.content_type = Some("application/octet-stream".into());
    event.trace = vec![("traceparent".into(), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into())];
    let published = home.webhooks.publish(vec![event]).await.unwrap().remove(0);
    assert_eq!(published.saga_ids.len(), 2);
    for saga in &published.saga_ids {
        home.ends(*saga, "Completed").await;
    }
    for got in receiver.got() {
        assert_eq!(got.body, payload, "byte for byte");
        let (id, at) = (got.header("webhook-id"), got.header("webhook-timestamp").parse().unwrap());
        assert!(id.ends_with(&format!("_{}", published.event_id)) && !id.contains('.'), "{id}");
        let verifier = if got.path.ends_with("v1a") { &public } else { &secret };
        assert!(verify(verifier, id, at, payload, got.header("webhook-signature")), "{got:?}");
        assert_eq!(got.header("content-type"), "application/octet-stream");
        assert!(got.header("traceparent").starts_with("00-0af7651916cd43dd8448eb211c80319c-"));
        assert_eq!(got.header("x-own"), if got.path.ends_with("v1a") { "" } else { "1" });
    }
    let shown = home.webhooks.event(published.event_id).await.unwrap().unwrap();
    let (event, timeline) = (shown.event, shown.sagas);
    assert_eq!(event.event_type, "order.paid");
    let ids: Vec<i64> = timeline.iter().map(|(saga, _)| saga.subscription_id).collect();
    assert_eq!(ids, [first.id, second.id]);
    for (saga, attempts) in timeline {
        assert_eq!((saga.attempt_count, saga.final_error_code.as_deref()), (1, None));
        assert_eq!(
            (attempts.len(), attempts[0].response_status, attempts[0].error_class.as_deref()),
            (1, Some(204), None)
        );
        assert!(attempts[0].remote_address.as_deref().unwrap().starts_with("127.0.0.1:"));
    }
    assert_eq!(home.count("webhook_results").await, 0, "applied results are gone");
    assert_eq!(home.count("outbox WHERE lane = 'webhooks'").await, 0);
    assert_eq!(home.count("outbox_done").await + home.count("outbox_attempts").await, 0, "history is webhook_attempts");
}

async fn failures_are_retried_until_the_limit_and_then_dead_lettered(home: Home) {
    let receiver = Receiver::with_status(500).await;
    let (subscription, _) = home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    let (event, sagas) = home.publish("a", "payload as it was").await;
    home.ends(sagas[0], "DeadLettered").await;
    let (saga, jobs, attempts) = home.webhooks.saga(sagas[0]).await.unwrap().unwrap();
    assert_eq!((saga.attempt_count, saga.final_error_code.as_deref(), jobs.len()), (3, Some("HTTP_500"), 0));
    let seen: Vec<(i64, Option<&str>, Option<&str>)> =
        attempts.iter().map(|a| (a.attempt, a.error_class.as_deref(), a.error_code.as_deref())).collect();
    assert_eq!(seen, [1, 2, 3].map(|n| (n, Some("answered"), Some("HTTP_500"))));
    assert_eq!(receiver.got().len(), 3);
    let ids: std::collections::HashSet<_> = receiver.got().iter().map(|g| g.header("webhook-id").to_owned()).collect();
    assert_eq!(ids.len(), 1, "the same id over all attempts");
    let letters = home.webhooks.dead_letters(Default::default(), None, 10).await.unwrap().items;
    assert_eq!(letters.len(), 1);
    assert_eq!(
        (letters[0].saga_id, letters[0].event_id, letters[0].subscription_id),
        (sagas[0], event, subscription.id)
    );
    let rows = home.rows("SELECT payload_snapshot FROM dead_letters").await;
    assert_eq!(&rows[0].bytes(0).unwrap()[..], b"payload as it was");
    assert_eq!(home.count("webhook_jobs WHERE status = 'Failed'").await, 3);
    assert_eq!(home.count("outbox WHERE lane = 'alerts'").await, 1, "somebody is told");
}

async fn a_receiver_that_recovers_completes_the_saga(home: Home) {
    let receiver = Receiver::start(|_, nth| if nth == 0 { String::new() } else { status_line(200, "") }).await;
    home.subscribe(&receiver.url, &["*"]).await;
    let _working = home.work();
    let (_, sagas) = home.publish("a", "x").await;
    home.ends(sagas[0], "Completed").await;
    let (saga, _, attempts) = home.webhooks.saga(sagas[0]).await.unwrap().unwrap();
    assert_eq!(saga.attempt_count, 2);
    assert_eq!(saga.final_error_code.as_deref(), Some("CONNECTION_RESET"), "it says why an earlier attempt failed");
    assert_eq!(attempts[0].error_class.as_deref(), Some("unknown"));
    assert_eq!(attempts[1].error_class, None);
}

async fn gone_disables_and_what_waits_is_dead_lettered(home: Home) {
    let receiver = Receiver::with_status(410).await;
    let (subscription, _) = home.subscribe_with(&receiver.url, &["*"], |s| s.max_in_flight = Some(1)).await;
    let mut sagas = Vec::new();
    for _ in 0..5 {
        sagas.extend(home.publish("a", "x").await.1);
    }
    let _working = home.work();
    for saga in &sagas {
        home.ends(*saga, "DeadLettered").await;
    }
    let now = home.webhooks.subscription(subscription.id).await.unwrap().unwrap();
    assert_eq!((now.status.as_str(), now.disabled_reason.as_deref()), ("disabled", Some("HTTP_410")));
    assert_eq!(receiver.got().len(), 1, "nothing more was sent");
    let codes =
        home.rows("SELECT final_error_code, COUNT(*) FROM dead_letters GROUP BY final_error_code ORDER BY 1").await;
    let codes: Vec<(String, i64)> = codes.iter().map(|r| (r.text(0).unwrap(), r.int(1).unwrap())).collect();
    assert_eq!(codes, [("HTTP_410".to_owned(), 1), ("SUBSCRIPTION_DISABLED".to_owned(), 4)]);
    let (_, later) = home.publish("a", "x").await;
    home.ends(later[0], "DeadLettered").await;
    assert_eq!(receiver.got().len(), 1, "what is published now is a dead letter at once");
}

async fn a_pause_holds_and_a_resume_lets_go(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (paused, _) = home.subscribe(&receiver.url, &["*"]).await;
    let (_, other) = home.subscribe(&format!("{}/other", receiver.url), &["*"]).await;
    assert!(!other.is_empty());
    home.webhooks.pause(paused.id).await.unwrap().unwrap();
    let _working = home.work();
    let mut sagas = Vec::new();
    for n in 0..20 {
        sagas.extend(home.publish("a", &n.to_string()).await.1);
    }
    let done = async || home.count("webhook_delivery_sagas WHERE status = 'Completed'").await;
    wait_until("the other one has all", async || done().await == 20).await;
    let far = if home.url.starts_with("sqlite") { "253000000000000000" } else { "'9999-01-01'" };
    let parked = format!("webhook_delivery_sagas WHERE status = 'Pending' AND next_attempt_at > {far}");
    wait_until("the paused one is parked", async || home.count(&parked).await == 20).await;
    assert_eq!(receiver.got().iter().filter(|got| got.path == "/hook").count(), 0);
    home.webhooks.resume(paused.id).await.unwrap().unwrap();
    for saga in sagas {
        home.ends(saga, "Completed").await;
    }
    assert_eq!(receiver.got().iter().filter(|got| got.path == "/hook").count(), 20);
    assert_eq!(
        home.rows("SELECT MAX(attempt_count) FROM webhook_delivery_sagas").await[0].int(0).unwrap(),
        1,
        "no attempt was burnt"
    );
    wait_until("the gate is closed again", async || home.count("subscription_gates WHERE parked = 1").await == 0).await;
    let patch = Patch { timeout_ms: Some(Some(100)), ..Patch::default() };
    assert_eq!(home.webhooks.change(paused.id, patch).await.unwrap().unwrap().timeout_ms, Some(100));
}
