//! What the outbox brings to OpenMemory: limits, doubts, damage, and what is over.

use std::sync::Arc;
use std::time::Duration;

use postrider::Worker;
use postrider::worker::core::LaneSettings;
use postrider_memories::{Action, LANE, Memories, lane_settings};
use serde_json::json;

use crate::harness::{Home, on_every_store, plain, secs, wait_until};
use crate::openmemory::Mood;

on_every_store!(
    a_limit_costs_no_attempt_and_paces_the_lane,
    a_damaged_message_loses_no_memory,
    a_damaged_copy_is_not_sent_in_its_place,
    a_write_in_doubt_is_looked_for_before_it_is_made_again,
    a_write_that_may_be_under_way_is_not_made_again,
    what_got_no_answer_is_woken_when_the_service_is_back,
    what_ended_long_ago_is_pruned,
    all_that_were_given_up_come_back,
);

pub async fn flush_with(memories: &Memories, home: &Home) {
    memories.wake_all().await.unwrap();
    let settings = LaneSettings { poll: Duration::from_millis(50), ..lane_settings() };
    let worker = Worker::new(home.outbox.clone()).lane_with(settings, Arc::new(memories.courier()));
    worker.once().run(std::future::pending()).await.unwrap();
}

async fn a_limit_costs_no_attempt_and_paces_the_lane(home: Home) {
    home.upstream.be(Mood::All(429, json!({"error": "rate_limit_exceeded", "retry_after": 300})));
    for n in ["one", "two", "three", "four"] {
        let stored = home.store(&format!("limited {n}")).await;
        assert_eq!(stored.action, Action::Deferred, "{stored:?}");
    }
    assert_eq!(home.upstream.mind().requests, 1, "once it said so, nobody else asks");
    for _ in 0..6 {
        home.flush().await;
    }
    assert!(home.ask("limited").await.1, "a question meanwhile is answered from what we have");
    assert_eq!(home.upstream.mind().requests, 1, "neither do the flush and those who ask");
    // A process that does not know of it asks, is told, and counts nothing either; more than there are attempts.
    for _ in 0..6 {
        let (other, _) = home.again(secs(3600)).await;
        flush_with(&other, &home).await;
    }
    let live = home.rows("SELECT attempts, last_error_code FROM outbox ORDER BY id").await;
    assert_eq!(live.len(), 4);
    assert!(live.iter().all(|row| row.int(0).unwrap() == 0), "no attempt is counted: {live:?}");
    assert!(live.iter().all(|row| row.text(1).unwrap() == "OPENMEMORY_LIMITED"), "{live:?}");
    let waits = "SELECT COUNT(DISTINCT due_at) FROM outbox";
    assert_eq!(home.rows(waits).await[0].int(0).unwrap(), 4, "each has its own turn");
    home.upstream.be(Mood::Well);
    let (other, _) = home.again(secs(3600)).await;
    flush_with(&other, &home).await;
    assert_eq!(home.upstream.contents().len(), 4, "all are brought once the limit is over");
    assert_eq!(home.count("outbox_done WHERE status = 'dead'").await, 0);
}

/// The message is as it was stored: what stands beside it and was changed is put right.
async fn a_damaged_copy_is_not_sent_in_its_place(home: Home) {
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    home.store("we never deploy on fridays").await;
    home.execute("UPDATE memory_writes SET payload_md = 'we deploy on fridays'").await;
    home.upstream.be(Mood::Well);
    wait_until("it is brought", async || {
        home.flush().await;
        !home.upstream.contents().is_empty()
    })
    .await;
    assert_eq!(home.upstream.contents(), ["we never deploy on fridays"]);
    assert_eq!(home.text("SELECT payload_md FROM memory_writes").await, "we never deploy on fridays");
}

async fn a_damaged_message_loses_no_memory(home: Home) {
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    let queued = home.store("precious and damaged").await;
    let id = queued.outbox_id.unwrap();
    home.execute(&format!("UPDATE outbox SET payload = 'gibberish' WHERE id = {id}")).await;
    home.upstream.be(Mood::Well);
    assert_eq!(home.flush().await.dead, 1);
    assert_eq!(home.text(&format!("SELECT last_error_code FROM outbox_done WHERE id = {id}")).await, "PAYLOAD_CORRUPT");
    assert!(home.upstream.contents().is_empty(), "what is damaged is not sent");
    // Whoever stores it again is not sent to a message that is dead.
    let again = home.store("precious and damaged").await;
    assert_eq!(again.action, Action::Deferred, "{again:?}");
    assert_ne!(again.outbox_id, Some(id), "{again:?}");
    wait_until("it is brought", async || {
        home.flush().await;
        home.upstream.contents() == ["precious and damaged"]
    })
    .await;
    // And nobody need: the sweep finds it.
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    let id = home.store("damaged and found").await.outbox_id.unwrap();
    home.execute(&format!("UPDATE outbox SET payload = 'gibberish' WHERE id = {id}")).await;
    home.upstream.be(Mood::Well);
    home.flush().await;
    assert_eq!(home.memories.rescue(secs(0)).await.unwrap(), 1);
    assert_eq!(home.flush().await.sent, 1);
    assert_eq!(home.upstream.contents().len(), 2);
    assert_eq!(home.count("memory_writes WHERE state = 'stored'").await, 2);
}

async fn a_write_in_doubt_is_looked_for_before_it_is_made_again(home: Home) {
    home.upstream.be(Mood::LoseAnswer);
    let stored = home.store("applied without an answer").await;
    assert_eq!(stored.action, Action::Deferred, "{stored:?}");
    home.upstream.be(Mood::Well);
    assert_eq!(home.flush().await.sent, 1, "it is there: nothing is left to write");
    assert_eq!(home.upstream.mind().adds, 1, "and it was not written again");
    assert_eq!(home.upstream.contents().len(), 1);
    let memory_id = home.text("SELECT memory_id FROM memory_writes").await;
    assert_eq!(memory_id, home.upstream.mind().memories[0].id);
}

/// It has a minute to wait after its attempt; what could not be tried at all would be woken, and so is this.
async fn what_got_no_answer_is_woken_when_the_service_is_back(home: Home) {
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    home.store("patient").await;
    home.upstream.be(Mood::Silent(secs(2)));
    wait_until("an attempt got no answer", async || {
        home.flush().await;
        home.text("SELECT last_error_code FROM outbox").await == "TIMEOUT"
    })
    .await;
    home.upstream.be(Mood::Well);
    assert_eq!(home.memories.wake().await.unwrap(), 1);
    assert_eq!(home.memories.wake().await.unwrap(), 0, "it is due now");
}

/// OpenMemory looks whether it has a text before it makes its embedding, and writes it afterwards: two at once are two.
async fn a_write_that_may_be_under_way_is_not_made_again(home: Home) {
    home.upstream.be(Mood::Late(Duration::from_millis(1500)));
    let stored = home.store("slow but sure").await;
    assert_eq!(stored.action, Action::Deferred, "its timeout is 500 ms: {stored:?}");
    home.upstream.be(Mood::Well);
    wait_until("it is found", async || home.flush().await.sent == 1).await;
    assert_eq!(home.upstream.mind().adds, 1, "one write");
    assert_eq!(home.upstream.contents().len(), 1, "one memory");
    // One that never arrived is written again once it cannot be under way any more, and not before.
    home.upstream.be(Mood::Silent(secs(1)));
    let stored = home.store("never arrived").await;
    assert_eq!(stored.action, Action::Deferred, "{stored:?}");
    home.upstream.be(Mood::Well);
    let adds = home.upstream.mind().adds;
    home.flush().await;
    assert_eq!(home.upstream.mind().adds, adds, "it may be under way");
    assert_eq!(home.text("SELECT last_error_code FROM outbox").await, "OPENMEMORY_IN_DOUBT");
    assert_eq!(home.count("outbox WHERE attempts = 0").await, 1, "waiting costs no attempt");
    wait_until("it is written", async || home.flush().await.sent == 1).await;
    assert_eq!(home.upstream.contents(), ["slow but sure", "never arrived"]);
}

async fn what_ended_long_ago_is_pruned(home: Home) {
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    home.store("over and done with").await;
    home.outbox.enqueue(vec![plain("other")]).await.unwrap();
    home.upstream.be(Mood::Well);
    assert_eq!(home.flush().await.sent, 1);
    assert_eq!(home.count("outbox_dedup").await, 1, "what was written is known by its content");
    let tend = async |memories: &Memories| {
        let _ = tokio::time::timeout(Duration::from_millis(300), memories.tend(std::future::pending())).await;
    };
    tend(&home.memories).await;
    assert_eq!(home.count("outbox_done").await, 1, "its hour is not over");
    let (brief, _) = home.again(secs(1)).await;
    wait_until("it is pruned", async || {
        tend(&brief).await;
        home.count(&format!("outbox_done WHERE lane = '{LANE}'")).await == 0
    })
    .await;
    assert_eq!(home.count("outbox_dedup").await, 0);
    assert_eq!(home.count("memory_writes WHERE state = 'stored'").await, 1, "the memory itself stays");
    assert_eq!(home.ask("done").await.0, ["over and done with"]);
}

async fn all_that_were_given_up_come_back(home: Home) {
    home.upstream.be(Mood::Adding(503, json!({"error": "overloaded"})));
    let words = ["one", "two", "three", "four", "five"];
    for n in words {
        home.store(&format!("given up {n}")).await;
    }
    home.upstream.be(Mood::Adding(422, json!({"detail": "no"})));
    assert_eq!(home.flush().await.dead, 5);
    home.upstream.be(Mood::Well);
    // One has come another way meanwhile.
    assert_eq!(home.store("given up three").await.action, Action::Allow);
    let dead = home.memories.dead(None, 2).await.unwrap();
    assert_eq!(dead.len(), 2);
    let rest = home.memories.dead(dead.last().copied(), 100).await.unwrap();
    let ids: Vec<i64> = dead.iter().chain(&rest).map(|(_, id)| *id).collect();
    assert_eq!(ids.len(), 5);
    home.memories.requeue(&ids).await.unwrap();
    assert_eq!(home.count("memory_writes WHERE state = 'queued'").await, 4);
    home.flush().await;
    assert_eq!(home.upstream.contents().len(), 5);
    assert_eq!(home.count("memory_writes WHERE state = 'stored'").await, 5);
    assert_eq!(home.count("outbox").await, 0);
}
