//! The HTTP adapter against a real socket.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use postrider::Timestamp;
use postrider::outcome::Reach;
use postrider_orders::adapters::{Adapter, Answer, Found, HttpBroker, HttpSettings, Meaning, Sending};
use postrider_orders::decide::{Idempotency, Reason};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::harness::order;

/// Answers each connection with this text, once the request has come; empty: hangs up.
async fn serve(answer: &'static str) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let seen: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = seen.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            let mut part = [0; 4096];
            loop {
                let n = stream.read(&mut part).await.unwrap_or(0);
                request.extend_from_slice(&part[..n]);
                let text = String::from_utf8_lossy(&request).into_owned();
                if n == 0 || text.starts_with("GET") && text.ends_with("\r\n\r\n") || text.ends_with('}') {
                    break;
                }
            }
            log.lock().unwrap().push(String::from_utf8_lossy(&request).into_owned());
            if answer == "hang" {
                std::future::pending::<()>().await;
            }
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (url, seen)
}

fn settings(url: &str, idempotency: Idempotency) -> HttpSettings {
    HttpSettings {
        url: format!("{url}/orders"),
        look_up_url: Some(format!("{url}/orders/{{key}}")),
        headers: vec![("X-Api-Key".to_owned(), "s3cret".to_owned())],
        statuses: BTreeMap::from([(418, Meaning::Refused(Reason::AlreadyProcessed))]),
        idempotency,
        timeout: Duration::from_millis(400),
    }
}

async fn send(broker: &HttpBroker) -> Answer {
    let order = order("1.2500000000000000001");
    let headers = [("traceparent".to_owned(), "00-1-2-01".to_owned()), ("X-Other".to_owned(), "no".to_owned())];
    let sending = Sending { order: &order, key: "k 1", order_id: "o-1", now: Timestamp::default(), headers: &headers };
    broker.send(&sending).await
}

const LOOK_UP: Idempotency = Idempotency::LookUp { settling: Duration::ZERO };

#[tokio::test]
async fn an_order_arrives_exactly_and_with_its_key() {
    let (url, seen) =
        serve("HTTP/1.1 200 OK\r\ncontent-length: 63\r\n\r\n{\"order_ref\":\"r-1\",\"fills\":[{\"px\":\"10.5\",\"qty\":1.25,\"ts\":\"t\"}]}").await;
    let broker = HttpBroker::new(settings(&url, Idempotency::Key)).unwrap();
    let Answer::Executed(execution, None) = send(&broker).await else { panic!("executed") };
    assert_eq!((execution.order_ref.as_str(), execution.executed_qty().to_string().as_str()), ("r-1", "1.25"));
    let request = seen.lock().unwrap()[0].to_lowercase();
    assert!(request.starts_with("post /orders http/1.1"), "{request}");
    for part in [
        "idempotency-key: k 1",
        "x-api-key: s3cret",
        "traceparent: 00-1-2-01",
        "\"qty\":1.2500000000000000001",
        "\"side\":\"buy\"",
    ] {
        assert!(request.contains(part), "{part} in {request}");
    }
    assert!(!request.contains("x-other"), "only the trace goes on");
}

#[tokio::test]
async fn answers_have_their_meaning() {
    let refused = async |answer, idempotency| {
        let (url, _) = serve(answer).await;
        match send(&HttpBroker::new(settings(&url, idempotency)).unwrap()).await {
            Answer::Refused(refusal) => (refusal.reason, refusal.reach, refusal.retry_after),
            Answer::Executed(_, reason) => panic!("executed {reason:?}"),
        }
    };
    use Reach::*;
    let key = Idempotency::Key;
    assert_eq!(refused("HTTP/1.1 409 C\r\ncontent-length: 0\r\n\r\n", key).await, (Reason::Rejected, Answered, None));
    assert_eq!(
        refused("HTTP/1.1 401 U\r\ncontent-length: 0\r\n\r\n", key).await,
        (Reason::Unauthorized, Answered, None)
    );
    let busy = "HTTP/1.1 429 T\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(refused(busy, key).await, (Reason::RateLimited, Answered, Some(Duration::from_secs(7))));
    let failed = "HTTP/1.1 500 E\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(refused(failed, key).await, (Reason::ServerError, Answered, None));
    assert_eq!(refused(failed, LOOK_UP).await, (Reason::ServerError, Unknown, None), "it may have executed it");
    assert_eq!(
        refused("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone", key).await,
        (Reason::Unknown, Unknown, None)
    );
    assert_eq!(refused("hang", key).await, (Reason::Timeout, Unknown, None));
    assert_eq!(refused("", key).await, (Reason::Unknown, Unknown, None), "hung up after the request");

    let (url, _) = serve("HTTP/1.1 418 T\r\ncontent-length: 0\r\n\r\n").await;
    let mapped = send(&HttpBroker::new(settings(&url, key)).unwrap()).await;
    assert!(matches!(mapped, Answer::Executed(_, Some(Reason::AlreadyProcessed))), "{mapped:?}");

    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let nobody = HttpBroker::new(settings(&format!("http://{closed}"), key)).unwrap();
    let Answer::Refused(refusal) = send(&nobody).await else { panic!("nobody is there") };
    assert_eq!((refusal.reason, refusal.reach), (Reason::Unknown, NeverSent));
}

#[tokio::test]
async fn a_key_is_looked_up() {
    let (url, seen) = serve("HTTP/1.1 404 N\r\ncontent-length: 0\r\n\r\n").await;
    let broker = HttpBroker::new(settings(&url, LOOK_UP)).unwrap();
    assert_eq!(broker.look_up("a/b c").await.unwrap(), Found::Nothing);
    assert!(seen.lock().unwrap()[0].starts_with("GET /orders/a%2Fb%20c HTTP/1.1"), "{:?}", seen.lock().unwrap());
    let (url, _) = serve("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{\"id\":\"r\"} ").await;
    let found = HttpBroker::new(settings(&url, LOOK_UP)).unwrap().look_up("k").await.unwrap();
    assert!(matches!(found, Found::Executed(execution) if execution.order_ref == "r"));
    let (url, _) = serve("HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{\"status\":\"Rejected\"} ").await;
    let found = HttpBroker::new(settings(&url, LOOK_UP)).unwrap().look_up("k").await.unwrap();
    assert!(matches!(found, Found::Rejected(_)));
    let (url, _) = serve("HTTP/1.1 500 E\r\ncontent-length: 0\r\n\r\n").await;
    assert!(HttpBroker::new(settings(&url, LOOK_UP)).unwrap().look_up("k").await.is_err(), "no answer is no answer");
}

#[test]
fn what_cannot_work_is_refused_before_anything_starts() {
    let with = |change: fn(&mut HttpSettings)| {
        let mut settings = settings("http://127.0.0.1:1", LOOK_UP);
        change(&mut settings);
        HttpBroker::new(settings).err().map(|e| e.to_string())
    };
    assert!(with(|s| s.url = "ftp://x".to_owned()).is_some_and(|e| e.contains("http or https")));
    assert!(with(|s| s.look_up_url = None).is_some_and(|e| e.contains("look_up_url")));
    assert!(with(|s| s.look_up_url = Some("http://x/".to_owned())).is_some_and(|e| e.contains("{key}")));
    assert!(with(|s| s.headers[0].1 = "a\nb".to_owned()).is_some());
    assert!(with(|_| {}).is_none());
}
