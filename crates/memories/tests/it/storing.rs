//! What a store answers, and what it leaves in the database.

use std::sync::atomic::Ordering;

use postrider_memories::{Action, Governance, NewMemory};
use serde_json::json;

use crate::harness::{Home, on_every_store};
use crate::openmemory::Mood;

on_every_store!(
    stored_queued_and_settled,
    one_store_leaves_one_audit_though_an_answer_is_lost,
    what_is_merged_away_is_told_and_found,
    the_same_text_in_another_space_is_no_other_text,
    a_refused_memory_is_refused_again,
    evidence_goes_along,
);

async fn stored_queued_and_settled(home: Home) {
    let first = home.store("written at once").await;
    assert_eq!((first.action, first.ok, first.deduplicated), (Action::Allow, true, false), "{first:?}");
    assert_eq!(first.merged_with, None);
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    let queued = home.store("kept for later").await;
    assert_eq!((queued.action, queued.ok), (Action::Deferred, false), "{queued:?}");
    let twin = home.store("kept for later").await;
    assert_eq!((twin.outbox_id, twin.deduplicated), (queued.outbox_id, true), "{twin:?}");
    assert_eq!(home.text("SELECT state FROM memory_writes WHERE outbox_id IS NOT NULL").await, "queued");
    assert_eq!(home.ask("later").await, (vec!["kept for later".to_owned()], false), "found while it waits");
    home.upstream.be(Mood::Well);
    assert_eq!(home.flush().await.sent, 1);
    assert_eq!(home.count("memory_writes WHERE state = 'stored'").await, 2);
    assert_eq!(home.upstream.contents(), ["written at once", "kept for later"]);
    let again = home.store("kept for later").await;
    assert_eq!((again.action, again.deduplicated), (Action::Allow, true), "{again:?}");
    assert_eq!(home.count("write_audit WHERE status = 'pending'").await, 0);
}

/// The answer of each COMMIT a store makes is lost in turn; its audit is one row all the same.
async fn one_store_leaves_one_audit_though_an_answer_is_lost(home: Home) {
    let audits = async |text: &str| home.count(&format!("write_audit WHERE correlation_id = 'corr {text}'")).await;
    // What is left of it once the store is over must not meet our own look.
    let losing = async |lost: i64, text: &str| {
        home.lossy.store(lost, Ordering::SeqCst);
        let stored = home.store(text).await;
        assert!(home.lossy.swap(-1, Ordering::SeqCst) < 0, "there were more than {lost} to lose");
        stored
    };
    for lost in 0..2 {
        let text = format!("well {}", ["alpha", "beta"][lost as usize]);
        let stored = losing(lost, &text).await;
        assert_eq!(stored.action, Action::Allow, "{lost}: {stored:?}");
        assert_eq!(audits(&text).await, 1, "answer {lost} lost");
    }
    for lost in 0..2 {
        // Stored again: asked for, and answered as known.
        let before = audits("well alpha").await;
        let again = losing(lost, "well alpha").await;
        assert!(again.deduplicated, "{again:?}");
        assert_eq!(audits("well alpha").await, before + 1, "answer {lost} lost of a store that was known");
    }
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    for lost in 0..2 {
        let text = format!("away {}", ["alpha", "beta"][lost as usize]);
        let queued = losing(lost, &text).await;
        assert_eq!(queued.action, Action::Deferred, "{lost}: {queued:?}");
        assert_eq!(audits(&text).await, 1, "answer {lost} lost of a store that was queued");
        assert_eq!(home.count("outbox").await, lost + 1);
    }
    let rules = Governance { team_write_enabled: false, ..Governance::open("a") };
    home.memories.govern(rules, "test").await.unwrap();
    assert_eq!(losing(0, "not allowed").await.action, Action::Reject);
    assert_eq!(audits("not allowed").await, 1);
}

async fn what_is_merged_away_is_told_and_found(home: Home) {
    let a = home.store("We chose plan A for the rollout").await;
    let b = home.store("We chose plan B for the rollout").await;
    assert_eq!((b.action, b.ok, b.deduplicated), (Action::Allow, true, true), "{b:?}");
    assert_eq!(b.merged_with, a.memory_id, "{b:?}");
    assert!(b.message.contains("keeps only that one"), "{b:?}");
    assert_eq!(home.upstream.contents(), ["We chose plan A for the rollout"], "OpenMemory has only one");
    let (found, degraded) = home.ask("plan B").await;
    assert_eq!((found[0].as_str(), degraded), ("We chose plan B for the rollout", false), "{found:?}");
    let again = home.store("We chose plan B for the rollout").await;
    assert_eq!((again.deduplicated, &again.merged_with), (true, &a.memory_id), "{again:?}");
    // The same through the outbox.
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    home.store("We chose plan C for the rollout").await;
    home.upstream.be(Mood::Well);
    assert_eq!(home.flush().await.sent, 1);
    assert_eq!(home.count("memory_writes WHERE merged = 1 AND state = 'stored'").await, 2);
    assert_eq!(home.ask("plan C").await.0[0], "We chose plan C for the rollout");
    assert_eq!(home.ask("plan A").await.0[0], "We chose plan A for the rollout", "the others do not hide it");
}

async fn the_same_text_in_another_space_is_no_other_text(home: Home) {
    let first = home.store("shared knowledge").await;
    let memory = NewMemory {
        payload_md: "shared knowledge".to_owned(),
        target_space: Some("team:b".to_owned()),
        ..NewMemory::default()
    };
    let second = home.memories.store(memory).await;
    assert_eq!((second.deduplicated, second.merged_with), (true, None), "nothing of it is lost");
    assert_eq!(second.memory_id, first.memory_id);
    assert_eq!(home.count("memory_writes WHERE merged = 0").await, 2);
}

async fn a_refused_memory_is_refused_again(home: Home) {
    let long = json!({"error": "invalid_input", "details": ["content: length > 200000"]});
    home.upstream.be(Mood::Adding(400, long.clone()));
    for round in 0..2 {
        let refused = home.store("far too long").await;
        assert_eq!((refused.action, refused.outbox_id), (Action::Reject, None), "{round}: {refused:?}");
        assert!(refused.message.contains("length > 200000"), "{round}: {refused:?}");
    }
    assert_eq!(home.count("outbox").await, 0, "nothing is queued that would die at once");
    // While OpenMemory is away its word stands.
    home.upstream.be(Mood::All(429, json!({"error": "rate_limit_exceeded", "retry_after": 30})));
    home.ask("anything").await;
    let refused = home.store("far too long").await;
    assert_eq!(refused.action, Action::Reject, "{refused:?}");
    assert!(refused.message.contains("length > 200000"), "{refused:?}");
    // In the flush the reason is kept too, and the next store asks again.
    let (other, _) = home.again(crate::harness::secs(3600)).await;
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    let memory = NewMemory { payload_md: "long in the flush".to_owned(), ..NewMemory::default() };
    assert_eq!(other.store(memory.clone()).await.action, Action::Deferred);
    home.upstream.be(Mood::Adding(400, long));
    crate::flushing::flush_with(&other, &home).await;
    assert_eq!(home.text("SELECT state FROM memory_writes WHERE payload_md LIKE '%flush'").await, "dead");
    let refused = other.store(memory.clone()).await;
    assert_eq!((refused.action, refused.outbox_id), (Action::Reject, None), "{refused:?}");
    home.upstream.be(Mood::Well);
    assert_eq!(other.store(memory).await.action, Action::Allow, "it thought better of it");
}

async fn evidence_goes_along(home: Home) {
    let memory = NewMemory {
        payload_md: "with evidence".to_owned(),
        evidence_refs: vec![json!("mr://project/123")],
        actor_user_id: Some("ann".to_owned()),
        ..NewMemory::default()
    };
    home.memories.store(memory.clone()).await;
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    home.memories.store(NewMemory { payload_md: "evidence in the flush".to_owned(), ..memory }).await;
    home.upstream.be(Mood::Well);
    home.flush().await;
    for memory in &home.upstream.mind().memories {
        assert_eq!(memory.metadata["evidence_refs"], json!(["mr://project/123"]), "{memory:?}");
        assert_eq!(memory.metadata["actor_user_id"], "ann", "{memory:?}");
    }
    assert_eq!(home.upstream.contents().len(), 2);
}
