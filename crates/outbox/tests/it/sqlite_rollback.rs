//! SQLite rolls a whole transaction back by itself when its disk fills or fails, and requests that share a commit share
//! that fate. A trigger that raises ROLLBACK brings the connection into the same state.

use futures_util::future::join_all;
use futures_util::poll;
use postrider::NewMessage;

use crate::harness;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_shared_the_rolled_back_commit_is_told_so() {
    harness::case(harness::sqlite().await, |db| async move {
        let mut raw = db.raw().await;
        let trigger = "CREATE TRIGGER full BEFORE INSERT ON outbox WHEN NEW.target = 'full'
                       BEGIN SELECT RAISE(ROLLBACK, 'database or disk is full'); END";
        raw.run(trigger).await.unwrap();
        // With the file's lock held elsewhere, all of them are waiting when the writer begins: one group, one commit.
        raw.run("BEGIN IMMEDIATE").await.unwrap();
        let targets: Vec<&str> = (0..12).map(|n| if n == 5 { "full" } else { "fine" }).collect();
        let requests = targets.iter().map(|target| db.outbox.enqueue(vec![NewMessage::new("a", "x").target(*target)]));
        let mut answers = Box::pin(join_all(requests));
        assert!(poll!(&mut answers).is_pending());
        raw.run("COMMIT").await.unwrap();
        let answers = answers.await;

        let mut there = Vec::new();
        for (target, answer) in targets.iter().zip(&answers) {
            match answer {
                Ok(entries) => there.push(entries[0].id),
                Err(error) => assert_eq!(error.effect, postrider::error::Effect::NotApplied, "{target}: {error}"),
            }
        }
        assert!(answers[5].is_err());
        assert!(answers[..5].iter().any(Result::is_err), "nothing shared the commit: the test tests nothing");
        assert!(answers[6..].iter().all(Result::is_ok), "those after it have a transaction of their own: {answers:?}");
        let rows = db.sql("SELECT id FROM outbox ORDER BY id").await;
        let rows: Vec<i64> = rows.iter().map(|row| row.int(0)).collect::<Result<_, _>>().unwrap();
        assert_eq!(rows, there, "an answer says what the file holds");
    })
    .await;
}
