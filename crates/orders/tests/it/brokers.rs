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
        statuses: BTreeMap::from([(418, Meaning::Refused(Reason::AlreadyProcessed)), (599, Meaning::NothingDone)]),
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
            other => panic!("{other:?}"),
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
    for idempotency in [key, LOOK_UP, Idempotency::None] {
        let answer = refused(failed, idempotency).await;
        assert_eq!(answer, (Reason::ServerError, Unknown, None), "it may have executed it");
        let busy = "HTTP/1.1 503 B\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(refused(busy, idempotency).await, (Reason::ServerError, Unknown, None), "so may this one");
        let later = "HTTP/1.1 503 B\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n";
        let answer = refused(later, idempotency).await;
        assert_eq!(answer, (Reason::ServerError, Answered, Some(Duration::from_secs(7))), "it says when to come back");
        let configured = "HTTP/1.1 599 B\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(refused(configured, idempotency).await, (Reason::ServerError, Answered, None), "as configured");
    }
    assert_eq!(refused("hang", key).await, (Reason::Timeout, Unknown, None));
    assert_eq!(refused("", key).await, (Reason::Unknown, Unknown, None), "hung up after the request");

    for babble in [
        "HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone",
        "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 201 C\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 22\r\n\r\n{\"status\":\"not_found\"}",
    ] {
        let (url, _) = serve(babble).await;
        let answer = send(&HttpBroker::new(settings(&url, key)).unwrap()).await;
        assert!(matches!(answer, Answer::Nonsense(_)), "{answer:?}");
    }

    let (url, _) = serve("HTTP/1.1 418 T\r\ncontent-length: 0\r\n\r\n").await;
    let mapped = send(&HttpBroker::new(settings(&url, key)).unwrap()).await;
    assert!(matches!(mapped, Answer::Executed(_, Some(Reason::AlreadyProcessed))), "{mapped:?}");

    // Whatever the status means, the words beside it count.
    let told = async |status: &str, body: &str| {
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        let (url, _) = serve(Box::leak(answer.into_boxed_str())).await;
        send(&HttpBroker::new(settings(&url, key)).unwrap()).await
    };
    let another = r#"{"order_ref":"r","idempotency_key":"of-another"}"#;
    for status in ["200 OK", "409 C", "418 T", "422 U", "500 E"] {
        let answer = told(status, another).await;
        assert!(matches!(answer, Answer::Nonsense(_)), "{status}: {answer:?}");
    }
    let refused_before = told("418 T", r#"{"status":"rejected"}"#).await;
    assert!(
        matches!(&refused_before, Answer::Refused(refusal) if refusal.reason == Reason::Rejected),
        "{refused_before:?}"
    );
    let Answer::Executed(done, Some(Reason::AlreadyProcessed)) = told("418 T", r#"{"order_ref":"r-1"}"#).await else {
        panic!("it was executed before")
    };
    assert_eq!(done.order_ref, "r-1");

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
    let (url, _) = serve("HTTP/1.1 404 N\r\ncontent-length: 18\r\n\r\n404 page not found").await;
    let found = HttpBroker::new(settings(&url, LOOK_UP)).unwrap().look_up("k").await.unwrap();
    assert!(matches!(found, Found::Nonsense(_)), "a proxy knows nothing of orders: {found:?}");
    let (url, seen) = serve("HTTP/1.1 404 N\r\ncontent-length: 0\r\n\r\n").await;
    for dots in [".", ".."] {
        let found = HttpBroker::new(settings(&url, LOOK_UP)).unwrap().look_up(dots).await.unwrap();
        assert!(matches!(found, Found::Nonsense(_)), "{found:?}");
    }
    assert_eq!(seen.lock().unwrap().len(), 0, "another path is not asked");
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

/// Secrets are references: what they refer to may change under way.
#[tokio::test]
async fn refused_credentials_are_read_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 8192];
            let n = stream.read(&mut request).await.unwrap_or(0);
            let known = String::from_utf8_lossy(&request[..n]).to_lowercase().contains("x-api-key: new");
            let answer = if known {
                "200 OK\r\ncontent-length: 10\r\n\r\n{\"id\":\"r\"}"
            } else {
                "401 U\r\ncontent-length: 0\r\n\r\n"
            };
            let _ = stream.write_all(format!("HTTP/1.1 {answer}").as_bytes()).await;
        }
    });
    let (secret, readings) = (Arc::new(Mutex::new("s3cret".to_owned())), Arc::new(Mutex::new(0)));
    let source = {
        let (secret, readings) = (secret.clone(), readings.clone());
        Arc::new(move || {
            *readings.lock().unwrap() += 1;
            match secret.lock().unwrap().as_str() {
                "" => Err("the vault is closed".to_owned()),
                secret => Ok(vec![("X-Api-Key".to_owned(), secret.to_owned())]),
            }
        })
    };
    let broker = HttpBroker::new(settings(&url, Idempotency::Key)).unwrap().with_credentials(source);
    let wait = async || match send(&broker).await {
        Answer::Refused(refusal) => (refusal.reason, refusal.retry_after),
        other => panic!("{other:?}"),
    };
    assert_eq!(wait().await, (Reason::Unauthorized, None), "they are what they were");
    assert_eq!(wait().await, (Reason::Unauthorized, None));
    assert_eq!(*readings.lock().unwrap(), 1, "not again for every order");
    secret.lock().unwrap().clear();
    assert!(!broker.renew().await, "what cannot be read changes nothing");
    "new".clone_into(&mut secret.lock().unwrap());
    assert!(broker.renew().await && !broker.renew().await, "when somebody asks for it");
    assert!(matches!(send(&broker).await, Answer::Executed(..)));

    let mut old = settings(&url, Idempotency::Key);
    old.headers[0].1 = "old".to_owned();
    let secret = Arc::new(|| Ok(vec![("X-Api-Key".to_owned(), "new".to_owned())]));
    let broker = HttpBroker::new(old).unwrap().with_credentials(secret);
    let Answer::Refused(refusal) = send(&broker).await else { panic!("the old ones are refused") };
    assert_eq!(refusal.retry_after, Some(Duration::ZERO), "there are others: at once");
    assert!(matches!(send(&broker).await, Answer::Executed(..)));
}
