//! The HTTP courier against receivers on raw sockets: what goes out, what each answer means, and how little a hostile
//! one costs.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use postrider::couriers::exchange::MAX_BODY_BYTES;
use postrider::couriers::http::{Http, HttpSettings};
use postrider::outcome::{Fault, Reach};
use postrider::{Courier, Message, Outcome, Timestamp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};

/// Long enough that no test meets it by accident.
const PATIENT: Duration = Duration::from_secs(20);

/// A destination. Its port is its own, so whoever connects to it meant to.
struct Receiver {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
}

impl Receiver {
    fn url(&self) -> String {
        format!("http://{}/in", self.address)
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    fn courier(&self) -> Http {
        self.courier_within(PATIENT)
    }

    fn courier_within(&self, timeout: Duration) -> Http {
        Http::new(HttpSettings { timeout, ..HttpSettings::new(self.url(), "5e1f") }).unwrap()
    }
}

/// Hands every connection to `serve`.
async fn receiver<F, Fut>(serve: F) -> Receiver
where
    F: Fn(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let socket = TcpSocket::new_v4().unwrap();
    // Small, so that what was written was nearly all read at the other end.
    socket.set_send_buffer_size(16 * 1024).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(64).unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(serve(stream));
        }
    });
    Receiver { address, connections }
}

/// Gives every request the same answer, and the requests to the test.
async fn answering(answer: impl Into<String>) -> (Receiver, mpsc::UnboundedReceiver<String>) {
    let (seen, requests) = mpsc::unbounded_channel();
    let answer: Arc<str> = answer.into().into();
    let receiver = receiver(move |mut stream| {
        let (seen, answer) = (seen.clone(), answer.clone());
        async move {
            while let Some(request) = read_request(&mut stream).await {
                let _ = seen.send(request);
                if stream.write_all(answer.as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    });
    (receiver.await, requests)
}

/// One request, head and body; `None` at the end of the connection.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes);
        if let Some(end) = text.find("\r\n\r\n") {
            let length: usize = header(&text, "content-length").map_or(0, |value| value.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                return Some(text.into_owned());
            }
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}

fn header<'a>(request: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = request.split("\r\n").skip(1).take_while(|line| !line.is_empty());
    lines.find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name))).map(|(_, value)| value)
}

fn status(line: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {line}\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

fn message() -> Message {
    let at = Timestamp::from_micros(0);
    Message {
        id: 42,
        lane: "invoices".into(),
        shard_id: 0,
        due_at: at,
        lease_until: at,
        lease_token: 9,
        attempts: 0,
        crashes: 0,
        maybe_sent: false,
        target: None,
        active_key: None,
        payload: Bytes::from_static(b"{\"invoice\":7}"),
        content_type: Some("application/json".into()),
        headers: Vec::new(),
        payload_sha: None,
        correlation_id: None,
        created_at: at,
        deliver_before: None,
        taken_over_from: None,
    }
}

/// The fault of an outcome that asks for another attempt.
fn retry(outcome: Outcome) -> Fault {
    match outcome {
        Outcome::Retry { fault, .. } => fault,
        other => panic!("{other:?}"),
    }
}

/// Waits for the courier to let go of the connection.
async fn closed(stream: &mut TcpStream) {
    let mut sink = [0; 4096];
    let end = async { while matches!(stream.read(&mut sink).await, Ok(n) if n > 0) {} };
    timeout(Duration::from_secs(5), end).await.expect("the connection is still open");
}

#[tokio::test]
async fn headers_are_as_promised_and_the_key_is_the_same_on_every_attempt() {
    let (receiver, mut requests) = answering(status("200 OK", "", "")).await;
    let settings = HttpSettings {
        headers: vec![("Authorization".into(), "Bearer of-the-lane".into())],
        ..HttpSettings::new(receiver.url() + "?tenant=1", "5e1f")
    };
    let courier = Http::new(settings).unwrap();
    let own =
        [("X-Own", "yes"), ("Host", "evil"), ("Idempotency-Key", "forged"), ("X-Split", "a\r\nEvil: 1"), ("a b", "c")];
    let first = Message {
        headers: own.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        correlation_id: Some("corr-1".into()),
        ..message()
    };
    let second = Message { attempts: 1, lease_token: 10, ..first.clone() };
    assert_eq!(courier.deliver(&first).await, Outcome::sent());
    assert_eq!(courier.deliver(&second).await, Outcome::sent());

    let first = requests.recv().await.unwrap();
    assert!(first.starts_with("POST /in?tenant=1 HTTP/1.1\r\n"), "{first}");
    assert!(first.ends_with("\r\n\r\n{\"invoice\":7}"), "{first}");
    let address = receiver.address.to_string();
    for (name, value) in [
        ("host", address.as_str()),
        ("content-type", "application/json"),
        ("content-length", "13"),
        ("idempotency-key", "5e1f-invoices-42"),
        ("postrider-message-id", "42"),
        ("postrider-attempt", "1"),
        ("postrider-lease-token", "9"),
        ("x-correlation-id", "corr-1"),
        ("x-own", "yes"),
        ("authorization", "Bearer of-the-lane"),
    ] {
        assert_eq!(header(&first, name), Some(value), "{name} in {first}");
    }
    assert!(header(&first, "user-agent").unwrap().starts_with("postrider/"));
    for absent in ["evil", "forged", "transfer-encoding", "accept-encoding", "x-split"] {
        assert!(!first.to_lowercase().contains(absent), "{absent} in {first}");
    }
    let second = requests.recv().await.unwrap();
    assert_eq!(header(&second, "idempotency-key"), Some("5e1f-invoices-42"));
    assert_eq!(
        (header(&second, "postrider-attempt"), header(&second, "postrider-lease-token")),
        (Some("2"), Some("10"))
    );
}

#[tokio::test]
async fn an_empty_payload_without_a_type_is_still_a_whole_request() {
    let (receiver, mut requests) = answering(status("204 No Content", "", "")).await;
    let empty = Message { payload: Bytes::new(), content_type: None, ..message() };
    assert_eq!(receiver.courier().deliver(&empty).await, Outcome::sent());
    let request = requests.recv().await.unwrap();
    assert_eq!(header(&request, "content-length"), Some("0"));
    assert_eq!(header(&request, "content-type"), Some("application/octet-stream"));
    assert_eq!(header(&request, "x-correlation-id"), None);
}

#[tokio::test]
async fn every_status_has_its_class() {
    async fn outcome(line: &str) -> Outcome {
        let (receiver, _requests) = answering(status(line, "", "because\nI say so")).await;
        receiver.courier().deliver(&message()).await
    }
    for line in ["200 OK", "201 Created", "202 Accepted", "299 Odd"] {
        assert_eq!(outcome(line).await, Outcome::sent(), "{line}");
    }
    for line in ["408 Request Timeout", "425 Too Early", "429 Too Many Requests", "500 Oops", "503 Busy", "599 Odd"] {
        let fault = retry(outcome(line).await);
        assert_eq!((fault.code.as_ref(), fault.reach), (format!("HTTP_{}", &line[..3]).as_str(), Reach::Answered));
        assert!(fault.error.contains(&line[..3]) && fault.error.contains("because I say so"), "{}", fault.error);
    }
    for line in
        ["400 Bad Request", "401 Unauthorized", "404 Not Found", "409 Conflict", "410 Gone", "422 No", "700 Odd"]
    {
        let Outcome::Dead(fault) = outcome(line).await else { panic!("{line} must end it") };
        assert_eq!((fault.code.as_ref(), fault.reach), (format!("HTTP_{}", &line[..3]).as_str(), Reach::Answered));
    }
}

#[tokio::test]
async fn retry_after_is_honoured_where_it_counts() {
    async fn asked(line: &str, value: &str) -> Option<Duration> {
        let (receiver, _requests) = answering(status(line, &format!("retry-after: {value}\r\n"), "")).await;
        match receiver.courier().deliver(&message()).await {
            Outcome::Retry { retry_after, .. } => retry_after,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(asked("429 Too Many Requests", "120").await, Some(Duration::from_secs(120)));
    let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(300));
    let wait = asked("503 Service Unavailable", &date).await.unwrap().as_secs();
    assert!((290..=300).contains(&wait), "{wait}");
    assert_eq!(asked("500 Internal Server Error", "120").await, None);
    assert_eq!(asked("429 Too Many Requests", "presently").await, None);
}

#[tokio::test]
async fn a_redirect_is_refused_and_its_target_never_connected_to() {
    let (bait, _) = answering(status("200 OK", "", "")).await;
    for line in ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"] {
        let (receiver, _requests) = answering(status(line, &format!("location: {}\r\n", bait.url()), "")).await;
        let Outcome::Dead(fault) = receiver.courier().deliver(&message()).await else { panic!("{line} must end it") };
        assert_eq!((fault.code.as_ref(), fault.reach), ("REDIRECT_REFUSED", Reach::Answered));
        assert!(fault.error.contains("configure the final url"), "{}", fault.error);
    }
    sleep(Duration::from_millis(100)).await;
    assert_eq!(bait.connections(), 0);
}

#[tokio::test]
async fn a_refused_connection_sent_nothing() {
    let address = {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        socket.local_addr().unwrap()
    };
    let courier = Http::new(HttpSettings::new(format!("http://{address}/secret-path"), "5e1f")).unwrap();
    let fault = retry(courier.deliver(&message()).await);
    assert_eq!((fault.code.as_ref(), fault.reach), ("CONNECT_REFUSED", Reach::NeverSent));
    assert!(fault.error.contains(&address.to_string()) && !fault.error.contains("secret-path"), "{}", fault.error);
}

#[tokio::test]
async fn an_unresolvable_host_sent_nothing() {
    // A label of 64 letters fails in the resolver itself: no network is asked.
    let url = format!("http://{}.invalid/", "a".repeat(64));
    let courier = Http::new(HttpSettings { timeout: PATIENT, ..HttpSettings::new(url, "5e1f") }).unwrap();
    let fault = retry(courier.deliver(&message()).await);
    assert_eq!((fault.code.as_ref(), fault.reach), ("DNS_FAILED", Reach::NeverSent), "{}", fault.error);
}

#[tokio::test]
async fn a_reset_or_a_close_after_the_request_leaves_it_unknown() {
    for reset in [true, false] {
        let receiver = receiver(move |mut stream| async move {
            read_request(&mut stream).await;
            if reset {
                stream.set_zero_linger().unwrap();
            }
        });
        let fault = retry(receiver.await.courier().deliver(&message()).await);
        assert_eq!((fault.code.as_ref(), fault.reach), ("CONNECTION_RESET", Reach::Unknown), "reset: {reset}");
        assert!(fault.error.contains("may have been received"), "{}", fault.error);
    }
}

#[tokio::test]
async fn a_missing_answer_ends_at_the_deadline_and_leaves_it_unknown() {
    let (gone, mut let_go) = mpsc::unbounded_channel();
    let receiver = receiver(move |mut stream| {
        let gone = gone.clone();
        async move {
            read_request(&mut stream).await;
            closed(&mut stream).await;
            let _ = gone.send(());
        }
    });
    let courier = receiver.await.courier_within(Duration::from_millis(300));
    let begun = Instant::now();
    let fault = retry(courier.deliver(&message()).await);
    assert!((300..5000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!((fault.code.as_ref(), fault.reach), ("TIMEOUT", Reach::Unknown));
    assert!(fault.error.contains("300ms"), "{}", fault.error);
    timeout(PATIENT, let_go.recv()).await.expect("the connection is closed");
}

#[tokio::test]
async fn a_receiver_that_never_reads_holds_nobody_beyond_the_deadline() {
    let (gone, mut let_go) = mpsc::unbounded_channel();
    let given_up = Arc::new(Notify::new());
    let read_now = given_up.clone();
    let receiver = receiver(move |mut stream| {
        let (gone, read_now) = (gone.clone(), read_now.clone());
        async move {
            read_now.notified().await;
            closed(&mut stream).await;
            let _ = gone.send(());
        }
    });
    let courier = receiver.await.courier_within(Duration::from_millis(300));
    let huge = Message { payload: Bytes::from(vec![b'x'; 32 << 20]), ..message() };
    let fault = timeout(PATIENT, async { retry(courier.deliver(&huge).await) }).await.expect("the deadline holds");
    assert_eq!((fault.code.as_ref(), fault.reach), ("TIMEOUT", Reach::Unknown));
    given_up.notify_one();
    timeout(PATIENT, let_go.recv()).await.expect("the connection is closed");
}

#[tokio::test]
async fn a_2xx_is_sent_whatever_its_body_does() {
    // Trickles for ever; falls silent; breaks off; is not what it says it is.
    for (head, bytes_a_second) in [("content-length: 1000000", 50), ("transfer-encoding: chunked", 0)] {
        let (gone, mut let_go) = mpsc::unbounded_channel();
        let receiver = receiver(move |mut stream| {
            let gone = gone.clone();
            async move {
                read_request(&mut stream).await;
                stream.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n").as_bytes()).await.unwrap();
                let (mut reader, mut writer) = stream.into_split();
                let trickle = tokio::spawn(async move {
                    while bytes_a_second > 0 && writer.write_all(b"x").await.is_ok() {
                        sleep(Duration::from_millis(1000 / bytes_a_second)).await;
                    }
                    std::future::pending::<()>().await;
                });
                let _ = reader.read(&mut [0]).await;
                trickle.abort();
                let _ = gone.send(());
            }
        });
        let courier = receiver.await.courier_within(Duration::from_secs(3));
        let begun = Instant::now();
        assert_eq!(courier.deliver(&message()).await, Outcome::sent(), "{head}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
        timeout(PATIENT, let_go.recv()).await.expect("the connection is cut");
    }
    for answer in [
        "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ] {
        let receiver = receiver(move |mut stream| async move {
            read_request(&mut stream).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
        });
        assert_eq!(receiver.await.courier().deliver(&message()).await, Outcome::sent(), "{answer}");
    }
}

#[tokio::test]
async fn a_refusal_stands_though_its_body_never_ends() {
    let receiver = receiver(|mut stream| async move {
        read_request(&mut stream).await;
        stream.write_all(b"HTTP/1.1 422 No\r\ncontent-length: 100\r\n\r\nno such invoice").await.unwrap();
        closed(&mut stream).await;
    });
    let Outcome::Dead(fault) = receiver.await.courier_within(Duration::from_millis(300)).deliver(&message()).await
    else {
        panic!("422 must end it")
    };
    assert_eq!((fault.code.as_ref(), fault.reach), ("HTTP_422", Reach::Answered));
    assert!(fault.error.ends_with("no such invoice"), "{}", fault.error);
}

#[tokio::test]
async fn a_gibibyte_of_body_is_not_read() {
    for line in ["200 OK", "500 Oops"] {
        let (written, mut how_much) = mpsc::unbounded_channel();
        let receiver = receiver(move |mut stream| {
            let written = written.clone();
            async move {
                read_request(&mut stream).await;
                let head = format!("HTTP/1.1 {line}\r\ncontent-length: {}\r\n\r\n", 1 << 30);
                stream.write_all(head.as_bytes()).await.unwrap();
                let (chunk, mut total) = ([b'x'; 4096], 0);
                while let Ok(n) = stream.write(&chunk).await {
                    total += n;
                }
                let _ = written.send(total);
            }
        });
        let outcome = receiver.await.courier().deliver(&message()).await;
        match line {
            "200 OK" => assert_eq!(outcome, Outcome::sent()),
            _ => assert_eq!(retry(outcome).code, "HTTP_500"),
        }
        let total = timeout(PATIENT, how_much.recv()).await.expect("the connection is dropped").unwrap();
        assert!((MAX_BODY_BYTES..500_000).contains(&total), "{total} bytes were taken");
    }
}

#[tokio::test]
async fn too_much_of_a_head_or_no_http_at_all_is_an_invalid_response() {
    let long = format!("HTTP/1.1 200 OK\r\nx-long: {}\r\n\r\n", "a".repeat(64 * 1024));
    let endless = format!("HTTP/1.1 200 OK\r\nx-endless: {}", "a".repeat(64 * 1024));
    let many: String = (0..101).map(|n| format!("x-{n}: v\r\n")).collect();
    let many = format!("HTTP/1.1 200 OK\r\n{many}\r\n");
    for answer in [long, endless, many, "SSH-2.0-OpenSSH_9.9\r\n".into()] {
        let start = answer[..20].to_owned();
        let (receiver, _requests) = answering(answer).await;
        let fault =
            timeout(PATIENT / 2, async { retry(receiver.courier().deliver(&message()).await) }).await.expect("no hang");
        assert_eq!((fault.code.as_ref(), fault.reach), ("RESPONSE_INVALID", Reach::Unknown), "{start}");
    }
}

#[tokio::test]
async fn tls_to_a_plain_port_sends_nothing() {
    let (gruff, _) = answering("").await;
    let plain = receiver(|mut stream| async move {
        let _ = stream.read(&mut [0; 4096]).await;
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        closed(&mut stream).await;
    })
    .await;
    let closing = receiver(|mut stream| async move { drop(stream.read(&mut [0; 4096]).await) }).await;
    for (receiver, timeout, code) in [
        (plain, PATIENT, "TLS_FAILED"),
        (closing, PATIENT, "TLS_FAILED"),
        (gruff, Duration::from_millis(300), "TIMEOUT"),
    ] {
        let url = receiver.url().replace("http:", "https:");
        let courier = Http::new(HttpSettings { timeout, ..HttpSettings::new(url, "5e1f") }).unwrap();
        let fault = retry(courier.deliver(&message()).await);
        assert_eq!((fault.code.as_ref(), fault.reach), (code, Reach::NeverSent), "{}", fault.error);
    }
}

#[tokio::test]
async fn connections_are_kept_for_the_next_message() {
    for answer in [
        status("200 OK", "", "{\"ok\":true}"),
        "HTTP/1.1 202 Accepted\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n".into(),
        status("500 Oops", "", "oops"),
    ] {
        let (receiver, mut requests) = answering(answer).await;
        let courier = receiver.courier();
        for _ in 0..3 {
            courier.deliver(&message()).await;
            requests.recv().await.unwrap();
            // The connection goes back to the pool from a task of its own.
            sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(receiver.connections(), 1);
    }
}

#[tokio::test]
async fn nothing_is_sent_again_without_an_outcome() {
    let (seen, mut requests) = mpsc::unbounded_channel();
    let receiver = receiver(move |mut stream| {
        let seen = seen.clone();
        async move {
            let _ = seen.send(read_request(&mut stream).await);
            stream.write_all(status("200 OK", "", "").as_bytes()).await.unwrap();
            let _ = seen.send(read_request(&mut stream).await);
        }
    });
    let receiver = receiver.await;
    let courier = receiver.courier();
    assert_eq!(courier.deliver(&message()).await, Outcome::sent());
    sleep(Duration::from_millis(50)).await;
    let fault = retry(courier.deliver(&message()).await);
    assert_eq!((fault.code.as_ref(), fault.reach), ("CONNECTION_RESET", Reach::Unknown));
    sleep(Duration::from_millis(100)).await;
    assert_eq!(receiver.connections(), 1);
    assert!(requests.try_recv().unwrap().is_some() && requests.try_recv().unwrap().is_some());
    assert!(requests.try_recv().is_err(), "a third request");
}

#[tokio::test]
async fn an_echo_brings_no_secret_into_the_error() {
    let receiver = receiver(|mut stream| async move {
        let request = read_request(&mut stream).await.unwrap();
        let line = request.lines().next().unwrap();
        let own = header(&request, "x-card").unwrap_or_default();
        let echo = format!("cannot {line} as {} with {own}", header(&request, "authorization").unwrap());
        stream.write_all(status("500 Oops", "", &echo).as_bytes()).await.unwrap();
        closed(&mut stream).await;
    });
    let settings = HttpSettings {
        headers: vec![("Authorization".into(), "Bearer canary-one".into())],
        ..HttpSettings::new(receiver.await.url() + "?token=canary-two", "5e1f")
    };
    let message = Message { headers: vec![("X-Card".to_owned(), "canary-three".to_owned())], ..message() };
    let fault = retry(Http::new(settings).unwrap().deliver(&message).await);
    assert!(fault.error.ends_with("cannot POST /in?*** HTTP/1.1 as *** with ***"), "{}", fault.error);
}
