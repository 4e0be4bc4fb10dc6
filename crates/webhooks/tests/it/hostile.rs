//! Receivers that misbehave, names that change their mind: each attempt is classified as it went, and nobody else waits.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use postrider_webhooks::Settings;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, UdpSocket};

use crate::harness::{Home, settings, wait_until};
use crate::receiver::{Receiver, status_line};
use proving::kit::scratch;

/// A receiver that writes this and then, if told, goes on writing for ever or says nothing more.
async fn raw(first: Vec<u8>, then: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let first = first.clone();
            tokio::spawn(async move {
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(&first).await;
                while !then.is_empty() && stream.write_all(then).await.is_ok() {
                    tokio::task::yield_now().await;
                }
                tokio::time::sleep(Duration::from_secs(30)).await;
            });
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_misbehaviour_has_its_code() {
    let quick = Settings { timeout: Duration::from_secs(3), max_retry_limit: 1, ..settings() };
    let home = Home::on(scratch::sqlite(), quick).await;
    let _working = home.work();
    let many_headers = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x-a: b\r\n".repeat(9000));
    let closed = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        format!("http://{}/", listener.local_addr().unwrap())
    };
    let head = |status: u16, more: &str| format!("HTTP/1.1 {status} X\r\n{more}\r\n").into_bytes();
    let ok = "content-length: 1073741824\r\n";
    let cases: Vec<(&str, String, &str, Option<&str>)> = vec![
        ("refuses", closed, "CONNECT_REFUSED", Some("never_sent")),
        ("hangs up", Receiver::start(|_, _| String::new()).await.url, "CONNECTION_RESET", Some("unknown")),
        ("stalls in the head", raw(b"HTTP/1.1 200".to_vec(), b"").await, "TIMEOUT", Some("unknown")),
        ("says nothing", raw(vec![], b"").await, "TIMEOUT", Some("unknown")),
        ("64k headers", raw(many_headers.into_bytes(), b"").await, "RESPONSE_INVALID", Some("unknown")),
        ("no TLS", raw(head(400, ""), b"").await.replace("http:", "https:"), "TLS_FAILED", Some("never_sent")),
        ("no HTTP", raw(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(), b"").await, "RESPONSE_INVALID", Some("unknown")),
        (
            "redirects",
            raw(head(301, "location: http://169.254.169.254/\r\n"), b"").await,
            "REDIRECT_REFUSED",
            Some("answered"),
        ),
        ("a gibibyte of error", raw(head(500, ok), &[b'x'; 65536]).await, "HTTP_500", Some("answered")),
        ("a gibibyte of success", raw(head(200, ok), &[b'x'; 65536]).await, "", None),
        ("trickles for ever", raw(head(200, "transfer-encoding: chunked\r\n"), b"").await, "", None),
        (
            "a gzip bomb",
            raw(head(200, "content-encoding: gzip\r\ncontent-length: 99999\r\n"), &[0x1f; 4096]).await,
            "",
            None,
        ),
        ("teapot", Receiver::with_status(418).await.url, "HTTP_418", Some("answered")),
    ];
    let mut sagas = Vec::new();
    for (n, (_, url, ..)) in cases.iter().enumerate() {
        home.subscribe(url, &[&format!("case.{n}")]).await;
        sagas.push(home.publish(&format!("case.{n}"), "x").await.1[0]);
    }
    for ((what, _, code, class), saga) in cases.iter().zip(sagas) {
        let status = if code.is_empty() { "Completed" } else { "DeadLettered" };
        wait_until(&format!("`{what}` is {status}"), async || home.status(saga).await == status).await;
        let (_, _, attempts) = home.webhooks.saga(saga).await.unwrap().unwrap();
        assert_eq!(attempts[0].error_code.as_deref().unwrap_or(""), *code, "{what}");
        assert_eq!(attempts[0].error_class.as_deref(), *class, "{what}");
        if *code == "TLS_FAILED" {
            assert!(attempts[0].error_detail.as_ref().is_some_and(|why| why.len() > 5), "{what}: {:?}", attempts[0]);
        }
        assert!(
            attempts[0].response_body.as_ref().is_none_or(|body| body.len() <= 60_000),
            "{what}: at most 20 kB are kept"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_date_in_the_year_9999_is_cut_and_others_go_on() {
    let home = Home::on(scratch::sqlite(), settings()).await;
    let far = Receiver::start(|_, _| status_line(429, "retry-after: Fri, 31 Dec 9999 23:59:59 GMT\r\n")).await;
    let near = Receiver::with_status(200).await;
    home.subscribe(&far.url, &["far"]).await;
    home.subscribe(&near.url, &["near"]).await;
    let _working = home.work();
    let (_, held) = home.publish("far", "x").await;
    home.ends(held[0], "PendingRetry").await;
    let (saga, ..) = home.webhooks.saga(held[0]).await.unwrap().unwrap();
    let wait = saga.next_attempt_at.unwrap().since(saga.updated_at);
    assert!((Duration::from_secs(86_000)..=Duration::from_secs(86_400)).contains(&wait), "{wait:?}");
    let (_, other) = home.publish("near", "x").await;
    home.ends(other[0], "Completed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_hole_delays_nobody() {
    let home = Home::on(scratch::sqlite(), Settings { timeout: Duration::from_secs(5), ..settings() }).await;
    let hole = raw(vec![], b"").await;
    let healthy = Receiver::with_status(200).await;
    home.subscribe(&hole, &["*"]).await;
    home.subscribe(&healthy.url, &["good"]).await;
    let events = (0..3000).map(|n| postrider_webhooks::NewEvent::new("bad", n.to_string())).collect();
    home.webhooks.publish(events).await.unwrap();
    let _working = home.work();
    let mut slowest = Duration::ZERO;
    for n in 0..10 {
        let begun = Instant::now();
        home.publish("good", &n.to_string()).await;
        wait_until("it arrives", async || healthy.got().len() > n).await;
        slowest = slowest.max(begun.elapsed());
    }
    assert!(slowest < Duration::from_secs(4), "a healthy one waited {slowest:?} behind a hole that takes 5 s each");
}

/// Who asks for a test over HTTP has an answer in time, however long the subscription may wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_test_waits_no_longer_than_it_may() {
    let home = Home::on(scratch::sqlite(), settings()).await;
    let hole = raw(vec![], b"").await;
    let (subscription, _) = home.subscribe_with(&hole, &["*"], |s| s.timeout_ms = Some(120_000)).await;
    let seen = home.webhooks.test_within(subscription.id, Duration::from_millis(200)).await.unwrap().unwrap();
    assert_eq!((&seen["success"], &seen["error_code"]), (&false.into(), &"TIMEOUT".into()), "{seen}");
}

/// A thousand subscriptions are no longer under way than the one that never answers may take for a single attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_41_one_black_hole_among_a_thousand() {
    let timeout = Duration::from_secs(20);
    let home = Home::on(scratch::sqlite(), Settings { timeout, ..settings() }).await;
    let hole = raw(vec![], b"").await;
    let healthy = Receiver::with_status(200).await;
    home.subscribe(&hole, &["*"]).await;
    for n in 0..1000 {
        home.subscribe(&format!("{}/{n}", healthy.url), &[&format!("good.{n}")]).await;
    }
    let bad = (0..1000).map(|n| postrider_webhooks::NewEvent::new("bad", n.to_string())).collect();
    home.webhooks.publish(bad).await.unwrap();
    let working = home.work();
    let good = |n: usize| postrider_webhooks::NewEvent::new(format!("good.{n}"), n.to_string());
    let begun = Instant::now();
    home.webhooks.publish((0..1000).map(good).collect()).await.unwrap();
    wait_until("each of the others has its own", async || healthy.got().len() == 1000).await;
    assert!(begun.elapsed() < timeout, "nobody waited for an attempt at the hole: {:?}", begun.elapsed());
    let mut paths: Vec<String> = healthy.got().into_iter().map(|got| got.path).collect();
    paths.sort();
    paths.dedup();
    assert_eq!(paths.len(), 1000, "one each");
    drop(working);
}

/// A name server that answers every A query with the next of these, and AAAA with nothing.
async fn dns(answers: Vec<Vec<Ipv4Addr>>) -> (SocketAddr, Arc<AtomicUsize>) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    tokio::spawn(async move {
        let mut packet = [0; 512];
        while let Ok((n, from)) = socket.recv_from(&mut packet).await {
            let query = &packet[..n];
            let Some(end) = query[12..].iter().position(|b| *b == 0) else { continue };
            let question = &query[12..12 + end + 5];
            let is_a = question[question.len() - 4..question.len() - 2] == [0, 1];
            let addresses = match is_a {
                true => answers[count.fetch_add(1, Ordering::SeqCst).min(answers.len() - 1)].as_slice(),
                false => &[],
            };
            let mut answer = Vec::from(&query[..2]);
            answer.extend([0x81, 0x80, 0, 1, 0, addresses.len() as u8, 0, 0, 0, 0]);
            answer.extend(question);
            for address in addresses {
                // Good for no time at all: it is asked again for every connection.
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
                answer.extend(address.octets());
            }
            let _ = socket.send_to(&answer, from).await;
        }
    });
    (address, asked)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_changes_its_mind_gets_nothing() {
    // First an address that may be used, then one that must not.
    let (server, asked) = dns([Ipv4Addr::LOCALHOST, Ipv4Addr::new(169, 254, 169, 254), Ipv4Addr::new(10, 0, 0, 1)]
        .map(|a| vec![a])
        .into())
    .await;
    let strict = Settings { dns: vec![server], max_retry_limit: 1, ..settings() };
    let home = Home::on(scratch::sqlite(), strict).await;
    // It closes after each answer, so that every delivery connects anew.
    let receiver = Receiver::start(|_, _| status_line(200, "connection: close\r\n")).await;
    let port = receiver.url.rsplit(':').next().unwrap().split('/').next().unwrap().to_owned();
    home.subscribe(&format!("http://rebinding.example.com:{port}/hook"), &["*"]).await;
    let _working = home.work();
    let (_, first) = home.publish("a", "1").await;
    home.ends(first[0], "Completed").await;
    for _ in 0..2 {
        let (_, next) = home.publish("a", "2").await;
        home.ends(next[0], "DeadLettered").await;
        let (_, _, attempts) = home.webhooks.saga(next[0]).await.unwrap().unwrap();
        assert_eq!(attempts[0].error_code.as_deref(), Some("ADDRESS_FORBIDDEN"));
        assert_eq!((attempts[0].error_class.as_deref(), &attempts[0].remote_address), (Some("never_sent"), &None));
    }
    assert_eq!(receiver.got().len(), 1);
    assert!(asked.load(Ordering::SeqCst) >= 3, "it is asked at every connect");
}

/// A name that resolves to a good address and to a forbidden one is not sent to at all, whatever their order: which of them
/// the next connection would go to is its owner's choice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_forbidden_address_refuses_the_lot() {
    let (good, forbidden) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 0, 0, 1));
    let (server, _) = dns(vec![vec![good, forbidden], vec![forbidden, good], vec![good]]).await;
    let strict = Settings { dns: vec![server], max_retry_limit: 1, ..settings() };
    let home = Home::on(scratch::sqlite(), strict).await;
    let receiver = Receiver::with_status(200).await;
    let port = receiver.url.rsplit(':').next().unwrap().split('/').next().unwrap().to_owned();
    home.subscribe(&format!("http://mixed.example.com:{port}/hook"), &["*"]).await;
    let _working = home.work();
    for _ in 0..2 {
        let (_, sagas) = home.publish("a", "1").await;
        home.ends(sagas[0], "DeadLettered").await;
        let (_, _, attempts) = home.webhooks.saga(sagas[0]).await.unwrap().unwrap();
        assert_eq!(attempts[0].error_code.as_deref(), Some("ADDRESS_FORBIDDEN"));
    }
    assert!(receiver.got().is_empty());
    // Only now it is one that may be used.
    let (_, sagas) = home.publish("a", "1").await;
    home.ends(sagas[0], "Completed").await;
}
