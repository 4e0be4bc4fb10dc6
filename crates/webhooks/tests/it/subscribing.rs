//! Subscriptions: what may be asked for, secrets at rest and their rotation.

use std::time::Duration;

use postrider_webhooks::sign::{Scheme, verify};
use postrider_webhooks::{NewSubscription, Patch};

use crate::harness::{Home, KEY, on_every_store, secs};
use crate::receiver::{Got, Receiver};

on_every_store!(secrets_are_sealed_and_rotated, wishes_are_checked_and_changed,);

/// By our own `verify` and by the official package, which must agree.
fn verified(got: &Got, secret: &str) -> bool {
    let mut headers = http::HeaderMap::new();
    for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
        headers.insert(name, got.header(name).parse().unwrap());
    }
    let official = standardwebhooks::Webhook::new(secret).unwrap().verify(&got.body, &headers).is_ok();
    let at = got.header("webhook-timestamp").parse().unwrap();
    let ours = verify(secret, got.header("webhook-id"), at, &got.body, got.header("webhook-signature"));
    assert_eq!(ours, official);
    ours
}

async fn secrets_are_sealed_and_rotated(home: Home) {
    let receiver = Receiver::with_status(200).await;
    let (subscription, first) = home
        .subscribe_with(&receiver.url, &["*"], |s| s.headers = vec![("Authorization".into(), "canary-header".into())])
        .await;
    let row = &home.rows("SELECT secrets, headers FROM subscriptions").await[0];
    for column in [row.text(0).unwrap(), row.text(1).unwrap()] {
        assert!(column.starts_with("v1:test:"), "sealed, with the key's id: {column}");
        assert!(!column.contains("canary") && !column.contains(first.trim_start_matches("whsec_")));
    }
    assert!(!serde_json::to_string(&subscription).unwrap().contains("canary"), "values of headers are not shown");
    let _working = home.work();
    let (_, sagas) = home.publish("a", "1").await;
    home.ends(sagas[0], "Completed").await;
    let (_, second) = home.webhooks.rotate_secret(subscription.id, None, secs(3600)).await.unwrap().unwrap();
    let (_, sagas) = home.publish("a", "2").await;
    home.ends(sagas[0], "Completed").await;
    let (_, third) = home.webhooks.rotate_secret(subscription.id, None, Duration::ZERO).await.unwrap().unwrap();
    let (_, sagas) = home.publish("a", "3").await;
    home.ends(sagas[0], "Completed").await;
    let got = receiver.got();
    let by = |n: usize| [&first, &second, &third].map(|secret| verified(&got[n], secret));
    assert_eq!((by(0), by(1), by(2)), ([true, false, false], [true, true, false], [false, false, true]));
    assert_eq!(got[1].header("webhook-signature").split(' ').count(), 2, "two while it is being rotated");
    assert_eq!(got[0].header("authorization"), "canary-header");

    // A new key in front: everything is brought over, and goes on working.
    let text = format!("new:{}\n{KEY}", KEY.split_once(':').unwrap().1.replace("MDEy", "OTEy"));
    let keyring = postrider_webhooks::keyring::Keyring::parse(&text).unwrap();
    let reports = postrider_webhooks::Reports::default();
    let newer =
        postrider_webhooks::Webhooks::new(home.outbox.clone(), crate::harness::settings(), keyring, reports, None)
            .await
            .unwrap();
    assert_eq!((newer.reseal().await.unwrap(), newer.reseal().await.unwrap()), (1, 0));
    let row = &home.rows("SELECT secrets, headers FROM subscriptions").await[0];
    assert!(row.text(0).unwrap().starts_with("v1:new:") && row.text(1).unwrap().starts_with("v1:new:"));
    drop(_working);
    assert_eq!(newer.test(subscription.id).await.unwrap().unwrap()["success"], true);
    assert_eq!(receiver.got().last().unwrap().header("authorization"), "canary-header");
    let (elsewhere, _) = crate::harness::open(&home.url, crate::harness::settings()).await;
    let lacking = elsewhere.test(subscription.id).await.unwrap_err();
    assert_eq!(lacking.kind, postrider::error::Kind::KeyMissing, "whoever lacks the key is told so: {lacking}");
    let shown = elsewhere.subscription(subscription.id).await.unwrap().unwrap();
    assert_eq!(shown.headers, ["Authorization"], "what is no secret is shown all the same");
}

async fn wishes_are_checked_and_changed(home: Home) {
    let fine = || NewSubscription {
        url: "http://127.0.0.1:1/".into(),
        event_types: vec!["*".into()],
        ..NewSubscription::default()
    };
    let wrong: [fn(&mut NewSubscription); 14] = [
        |s| s.url = "http://10.0.0.1/".into(),
        |s| s.url = "http://169.254.169.254/".into(),
        |s| s.url = "ftp://example.com/".into(),
        |s| s.url = format!("http://127.0.0.1/{}", "x".repeat(3000)),
        |s| s.event_types = vec![],
        |s| s.event_types = vec!["a*".into()],
        |s| s.headers = vec![("Host".into(), "x".into())],
        |s| s.headers = vec![("webhook-id".into(), "x".into())],
        |s| s.headers = vec![("X".into(), "a\r\nb".into())],
        |s| s.max_retry_limit = Some(0),
        |s| s.rate_per_sec = Some(0.0),
        |s| s.retry_schedule_sec = Some(vec![]),
        |s| s.secret = Some("whsec_short".into()),
        |s| (s.secret, s.signature) = (Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into()), Scheme::V1a),
    ];
    for (n, spoil) in wrong.into_iter().enumerate() {
        let mut subscription = fine();
        spoil(&mut subscription);
        let error = home.webhooks.subscribe(subscription).await.unwrap_err();
        assert_eq!(error.kind, postrider::error::Kind::Invalid, "{n}: {error}");
    }
    assert_eq!(home.count("subscriptions").await, 0);
    let mut given = fine();
    given.secret = Some("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".into());
    let (subscription, secret) = home.webhooks.subscribe(given).await.unwrap();
    assert_eq!(secret, "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw");
    let patch = Patch {
        event_types: Some(vec!["order.*".into()]),
        description: Some(Some("d".into())),
        rate_per_sec: Some(Some(2.5)),
        retry_schedule_sec: Some(Some(vec![1.0, 2.5])),
        ..Patch::default()
    };
    let changed = home.webhooks.change(subscription.id, patch).await.unwrap().unwrap();
    assert_eq!((changed.rate_per_sec, changed.description.as_deref()), (Some(2.5), Some("d")));
    assert_eq!(changed.retry_schedule_sec, Some(vec![1.0, 2.5]));
    assert_eq!(changed.url, subscription.url, "what is not named stays");
    let patch =
        Patch { rate_per_sec: Some(None), retry_schedule_sec: Some(None), description: Some(None), ..Patch::default() };
    let changed = home.webhooks.change(subscription.id, patch).await.unwrap().unwrap();
    assert_eq!((changed.rate_per_sec, changed.description, changed.retry_schedule_sec), (None, None, None));
    let patch = Patch { url: Some("http://10.0.0.1/".into()), ..Patch::default() };
    assert!(home.webhooks.change(subscription.id, patch).await.is_err());
    assert!(home.webhooks.change(99, Patch::default()).await.unwrap().is_none());
    assert!(home.webhooks.unsubscribe(subscription.id).await.unwrap());
    assert!(!home.webhooks.unsubscribe(subscription.id).await.unwrap());
}
