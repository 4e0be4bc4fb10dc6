//! What the doctor finds, and how it is set right.

use std::collections::BTreeMap;

use postrider::doctor::{Check, Examine};
use postrider_memories::Action;
use serde_json::json;

use crate::harness::{Home, on_every_store, secs, wait_until};
use crate::openmemory::Mood;

on_every_store!(what_is_wrong_is_found_and_set_right);

async fn found(home: &Home) -> BTreeMap<Check, usize> {
    let mut counts = BTreeMap::new();
    for case in home.memories.look(secs(0)).await.unwrap() {
        assert_eq!(case.ailment.part, "memory");
        *counts.entry(case.ailment.check).or_default() += 1;
    }
    counts
}

async fn what_is_wrong_is_found_and_set_right(home: Home) {
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    for text in ["its message is gone", "its message was sent", "well and waiting"] {
        assert_eq!(home.store(text).await.action, Action::Deferred);
    }
    assert!(found(&home).await.is_empty(), "what waits is well");
    let id = |text: &str| format!("SELECT outbox_id FROM memory_writes WHERE payload_md = '{text}'");
    let gone = home.rows(&id("its message is gone")).await[0].int(0).unwrap();
    home.execute(&format!("DELETE FROM outbox WHERE id = {gone}")).await;
    home.upstream.be(Mood::Well);
    home.flush().await;
    home.execute(
        "UPDATE memory_writes SET state = 'queued', memory_id = NULL WHERE payload_md = 'its message was sent'",
    )
    .await;
    // A write somebody began and did not end, whose audit somebody ended; and an audit nobody did.
    home.store("left behind").await;
    home.execute(
        "UPDATE memory_writes SET state = 'writing', writing_until = created_at WHERE payload_md = 'left behind'",
    )
    .await;
    home.store("audited for ever").await;
    let audit = "UPDATE write_audit SET status = 'pending' WHERE correlation_id = 'corr audited for ever'";
    home.execute(audit).await;
    let mut all = BTreeMap::new();
    wait_until("all is found", async || {
        all = found(&home).await;
        all.contains_key(&Check::AuditOpen)
    })
    .await;
    let wanted = [(Check::WaitsInVain, 1), (Check::CopyAgainstMessage, 2), (Check::AuditOpen, 1)];
    assert_eq!(all, BTreeMap::from(wanted));
    let cases = home.memories.look(secs(0)).await.unwrap();
    assert!(home.memories.look(secs(3600)).await.unwrap().is_empty(), "it has not stood for long");
    assert_eq!(home.memories.repair(&cases).await.unwrap().len(), 4);
    assert!(home.memories.repair(&cases).await.unwrap().is_empty(), "once");
    assert!(found(&home).await.is_empty());
    wait_until("all are there", async || {
        home.flush().await;
        home.count("memory_writes WHERE state = 'stored'").await == 5
    })
    .await;
    assert_eq!(home.upstream.contents().len(), 5, "each once");
}
