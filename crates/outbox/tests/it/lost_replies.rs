//! PostgreSQL commits, and its answer never arrives: a proxy forwards what is asked and swallows the reply.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use postrider::error::Effect;
use postrider::outcome::{Settled, Settlement, Verdict};
use postrider::store::From;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{self, claim_of, lanes, secs};

/// Answers the URL through the proxy, and the switch: once it is on, the next COMMIT is the last thing that happens on
/// its connection.
async fn proxy(url: &str) -> (String, Arc<AtomicBool>) {
    let mut url = url::Url::parse(url).unwrap();
    let server = (url.host_str().unwrap().to_owned(), url.port().unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
    let switch = Arc::new(AtomicBool::new(false));
    let swallow = switch.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (server, swallow) = (server.clone(), swallow.clone());
            tokio::spawn(async move {
                let server = TcpStream::connect(server).await.unwrap();
                let ((mut asked, mut told), (mut answers, mut asks)) = (client.into_split(), server.into_split());
                tokio::spawn(async move { copy(&mut asked, &mut asks).await });
                let (mut chunk, mut swallowed) = (vec![0; 65536], Vec::new());
                while let Ok(n @ 1..) = answers.read(&mut chunk).await {
                    if !swallow.load(Ordering::SeqCst) {
                        told.write_all(&chunk[..n]).await.unwrap();
                        continue;
                    }
                    swallowed.extend_from_slice(&chunk[..n]);
                    if swallowed.windows(7).any(|part| part == b"COMMIT\0") {
                        swallow.store(false, Ordering::SeqCst);
                        return; // both halves are dropped: the connection breaks
                    }
                }
            });
        }
    });
    (url.into(), switch)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_committed_without_an_answer_is_unknown() {
    harness::case(harness::postgres().await, |db| async move {
        let (url, swallow) = proxy(&db.url).await;
        let far = postrider::Outbox::open(&url, lanes()).await.unwrap();
        let id = db.put("a", "x").await;
        let claim = claim_of("a", "w", 10, secs(60), From::Mark(None));
        // Connected, and the statement prepared: only the answer itself will be missing.
        far.store().claim(&claim_of("b", "w", 10, secs(60), From::Mark(None))).await.unwrap();
        swallow.store(true, Ordering::SeqCst);
        let error = far.store().claim(&claim).await.unwrap_err();
        assert_eq!(error.effect, Effect::Unknown, "{error}");
        assert_eq!(db.show(id).await.locked_by.as_deref(), Some("w"), "the claim was committed");

        let adopted = far.store().claim(&claim_of("a", "w", 10, secs(60), From::Ids(vec![id]))).await.unwrap().messages;
        let mut entry = Settlement::new(adopted[0].lease(), Verdict::sent());
        db.put("b", "x").await;
        let other = far.store().claim(&claim_of("b", "w", 10, secs(60), From::Mark(None))).await.unwrap().messages;
        let warm = Settlement::new(other[0].lease(), Verdict::sent());
        assert_eq!(far.store().settle("b", "w", &[warm]).await.unwrap(), [Settled::Applied]);
        swallow.store(true, Ordering::SeqCst);
        let error = far.store().settle("a", "w", &[entry.clone()]).await.unwrap_err();
        assert_eq!(error.effect, Effect::Unknown, "{error}");
        entry.again = true;
        assert_eq!(far.store().settle("a", "w", &[entry]).await.unwrap(), [Settled::Applied], "it finds its proof");
    })
    .await;
}
