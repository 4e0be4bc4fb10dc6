//! Is the OpenMemory that answers the one we know? With another key, or emptied, it answers as well as ever.

use postrider_memories::{Action, Memories};
use serde_json::json;

use crate::harness::{Home, on_every_store};
use crate::openmemory::Mood;

on_every_store!(
    an_emptied_service_is_not_the_one_we_know,
    an_emptied_service_that_numbers_anew_is_not_the_one_we_know,
    an_old_backup_is_not_the_one_we_know,
    another_key_is_another_tenant,
    one_forgotten_memory_is_no_amnesia,
    the_gate_asks_with_the_key_and_for_writes,
);

const TEXTS: [&str; 4] = ["we deploy on tuesdays", "the database is sqlite", "ann owns billing", "logs go to loki"];

async fn filled(home: &Home) {
    for text in TEXTS {
        assert_eq!(home.store(text).await.action, Action::Allow);
    }
    assert_eq!(status(&home.memories).await, "ok");
}

async fn status(memories: &Memories) -> &'static str {
    memories.check().await.status
}

/// Asks for everything, and writes again what is not there; how many that were.
async fn mended(home: &Home) -> u64 {
    let deep = home.memories.deep(u64::MAX, &|_| {}).await.unwrap();
    assert!(deep.finished, "{deep:?}");
    let counted = home.memories.resend(true).await.unwrap();
    let resent = home.memories.resend(false).await.unwrap();
    assert_eq!((counted.missing, counted.queued, resent.queued), (deep.missing, 0, deep.missing));
    assert_eq!(home.flush().await.sent, resent.queued);
    resent.queued
}

async fn an_emptied_service_is_not_the_one_we_know(home: Home) {
    filled(&home).await;
    home.upstream.mind().memories.clear();
    let (found, degraded) = home.ask("deploy tuesdays").await;
    assert!(degraded, "it has nothing of what it had");
    assert_eq!(found, [TEXTS[0]], "and ours is found");
    let seen = home.memories.check().await;
    assert_eq!(seen.status, "failed");
    assert!(seen.detail.unwrap().contains("resend --missing"));
    // Who stores what was stored is not told that it is there.
    let again = home.store(TEXTS[1]).await;
    assert_eq!((again.action, again.deduplicated), (Action::Allow, false), "{again:?}");
    assert_eq!(home.upstream.contents(), [TEXTS[1]]);
    // A look in small steps goes on where it stopped.
    let first = home.memories.deep(3, &|_| {}).await.unwrap();
    assert_eq!((first.asked, first.finished), (3, false), "{first:?}");
    let rest = home.memories.deep(u64::MAX, &|_| {}).await.unwrap();
    assert_eq!((rest.asked, rest.present, rest.missing, rest.finished), (4, 1, 3, true), "{rest:?}");
    assert_eq!(mended(&home).await, 3);
    let mut contents = home.upstream.contents();
    contents.sort();
    let mut wanted = TEXTS.to_vec();
    wanted.sort_unstable();
    assert_eq!(contents, wanted, "each once");
    assert_eq!(status(&home.memories).await, "ok");
    assert_eq!(home.ask("deploy tuesdays").await, (vec![TEXTS[0].to_owned()], false));
    assert_eq!(mended(&home).await, 0, "doing it again changes nothing");
}

/// Emptied again after everything was written anew, and by now other memories stand under the ids we know.
async fn an_emptied_service_that_numbers_anew_is_not_the_one_we_know(home: Home) {
    filled(&home).await;
    home.upstream.mind().memories.clear();
    assert_eq!(status(&home.memories).await, "failed");
    assert_eq!(mended(&home).await, 4);
    assert_eq!(status(&home.memories).await, "ok");
    {
        let mut mind = home.upstream.mind();
        let first = mind.memories.remove(0).id;
        mind.memories.clear();
        mind.made = first.strip_prefix("m-").unwrap().parse::<usize>().unwrap() - 1;
    }
    for text in ["tom owns search", "dumps are kept for a week", "nobody deploys on fridays", "traces go to tempo"] {
        home.store(text).await;
    }
    assert_eq!(status(&home.memories).await, "failed", "it shows something under each id, and not what it had");
    // Who stores what was stored is not told that it is there, under a stranger's id.
    let again = home.store(TEXTS[1]).await;
    assert_eq!((again.action, again.deduplicated), (Action::Allow, false), "{again:?}");
    assert_eq!(mended(&home).await, 3);
    assert_eq!(status(&home.memories).await, "ok");
}

async fn an_old_backup_is_not_the_one_we_know(home: Home) {
    filled(&home).await;
    let backup = home.upstream.mind().memories.clone();
    let since = ["bob owns search", "releases are signed", "errors go to sentry", "kim answers the pager"];
    for text in since {
        assert_eq!(home.store(text).await.action, Action::Allow);
    }
    let (fresh, _) = home.again(crate::harness::secs(3600)).await;
    assert_eq!(status(&fresh).await, "ok");
    home.upstream.mind().memories = backup;
    let (fresh, _) = home.again(crate::harness::secs(3600)).await;
    let seen = fresh.check().await;
    assert_eq!(seen.status, "failed", "it has the oldest, and none of what came since");
    assert!(seen.detail.unwrap().contains("resend --missing"));
    assert_eq!(mended(&home).await, since.len() as u64);
    assert_eq!(home.upstream.contents().len(), TEXTS.len() + since.len());
    assert_eq!(status(&fresh).await, "ok");
}

async fn another_key_is_another_tenant(home: Home) {
    filled(&home).await;
    *home.key.lock().unwrap() = "second".to_owned();
    // As a process that was started with the new key sees it.
    let (fresh, _) = home.again(crate::harness::secs(3600)).await;
    assert_eq!(status(&fresh).await, "failed");
    let question = postrider_memories::Question { query: "deploy".to_owned(), ..Default::default() };
    let answer = fresh.query(question.clone()).await.unwrap();
    assert!(answer.degraded, "{answer:?}");
    assert_eq!(answer.results[0].content, TEXTS[0], "{answer:?}");
    let deep = fresh.deep(u64::MAX, &|_| {}).await.unwrap();
    assert_eq!((deep.missing, deep.hidden), (4, 4), "{deep:?}");
    assert_eq!(fresh.resend(false).await.unwrap().queued, 4);
    // It takes them for the other tenant's, which it does not show: they are merged away, and found by our own index.
    crate::flushing::flush_with(&fresh, &home).await;
    assert_eq!(home.count("memory_writes WHERE state = 'stored' AND merged = 1").await, 4);
    assert_eq!(status(&fresh).await, "ok");
    let answer = fresh.query(question).await.unwrap();
    assert_eq!((answer.degraded, answer.results[0].content.as_str()), (false, TEXTS[0]), "{answer:?}");
    assert_eq!(fresh.deep(u64::MAX, &|_| {}).await.unwrap().missing, 0, "and they are not missing for ever");
}

async fn one_forgotten_memory_is_no_amnesia(home: Home) {
    filled(&home).await;
    home.upstream.mind().memories.remove(0);
    assert_eq!(status(&home.memories).await, "ok", "the others are there");
    assert_eq!(home.ask("sqlite").await, (vec![TEXTS[1].to_owned()], false));
    assert_eq!(mended(&home).await, 1);
    assert_eq!(home.upstream.contents().len(), 4);
}

async fn the_gate_asks_with_the_key_and_for_writes(home: Home) {
    assert_eq!(status(&home.memories).await, "ok", "there is nothing to recognise it by");
    filled(&home).await;
    home.upstream.be(Mood::All(403, json!({"error": "invalid_api_key"})));
    assert_eq!(status(&home.memories).await, "failed", "though /health is well");
    home.upstream.be(Mood::Well);
    assert_eq!(status(&home.memories).await, "ok");
    home.upstream.be(Mood::Adding(500, json!({"err": "disk full"})));
    assert_eq!(home.store("cannot be written").await.action, Action::Deferred);
    assert_eq!(status(&home.memories).await, "failed", "it answers, and takes nothing");
    let (other, _) = home.again(crate::harness::secs(3600)).await;
    assert_eq!(status(&other).await, "failed", "another process knows it too");
    home.upstream.be(Mood::Well);
    assert_eq!(status(&other).await, "ok", "and that it is over, at once");
    assert_eq!(home.upstream.contents().len(), 4, "finding out leaves nothing behind");
}
