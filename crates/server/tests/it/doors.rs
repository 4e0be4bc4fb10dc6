//! The doors: connections that do nothing, clients that do not read, and who is let in meanwhile.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use proving::crowd;

use crate::api::{Response, Server};
use crate::home::{Home, PATIENCE, wait_until};

const OTHER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const WIDE: u32 = 65_535;

fn server(home: &Home, http: &str) -> Server {
    home.write("postrider.toml", &format!("[http]\n{http}\n"));
    Server::start(home, &["--no-workers"])
}

fn connect(server: &Server, source: Ipv4Addr) -> TcpStream {
    let address: SocketAddr = server.address.parse().unwrap();
    let stream = crowd::connect_from(source, address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn idle(server: &Server, source: Ipv4Addr) -> TcpStream {
    let mut stream = connect(server, source);
    stream.write_all(&crowd::greeting(WIDE)).unwrap();
    stream
}

/// One request of another address, on a connection of its own.
fn ask(server: &Server, source: Ipv4Addr, path: &str) -> Response {
    let request = format!("GET {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", server.address);
    Server::send_on(connect(server, source), request.as_bytes())
}

/// Reads and answers frames as a client must; what came of it at the end.
fn listen(stream: &mut TcpStream, mut each: impl FnMut(&mut TcpStream, crowd::Head)) {
    loop {
        let mut head = [0; 9];
        if stream.read_exact(&mut head).is_err() {
            return;
        }
        let head = crowd::Head::of(head);
        let mut payload = vec![0; head.length];
        if stream.read_exact(&mut payload).is_err() {
            return;
        }
        if let Some(answer) = head.answer(&payload) {
            let _ = stream.write_all(&answer);
        }
        each(stream, head);
    }
}

#[test]
fn one_address_shuts_nobody_out() {
    let home = Home::sqlite();
    let server = server(&home, "max_connections = 60\nmax_connections_per_peer = 20\nidle_timeout_sec = 600");
    let crowd: Vec<_> = (0..200).map(|_| idle(&server, OTHER)).collect();
    for path in ["/livez", "/readyz", "/health", "/v1/outbox", "/"] {
        ask(&server, Ipv4Addr::LOCALHOST, path).answered(200);
    }
    for path in ["/livez", "/readyz", "/health"] {
        ask(&server, OTHER, path).answered(200);
    }
    drop(crowd);
    wait_until("their slots are free again", || ask(&server, OTHER, "/v1/outbox").status == 200);
}

#[test]
fn with_all_slots_taken_probes_are_answered_and_all_else_is_told() {
    let home = Home::sqlite();
    let server = server(&home, "max_connections = 60\nmax_connections_per_peer = 20\nidle_timeout_sec = 600");
    // Each of these has answered: it has its slot.
    let taken = |source: Ipv4Addr| {
        let mut stream = connect(&server, source);
        write!(stream, "GET /livez HTTP/1.1\r\nhost: {}\r\n\r\n", server.address).unwrap();
        let mut first = [0; 12];
        stream.read_exact(&mut first).unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
        stream
    };
    let peers = [2, 3, 4].map(|n| Ipv4Addr::new(127, 0, 0, n));
    let crowd: Vec<_> = peers.iter().flat_map(|peer| (0..20).map(|_| taken(*peer))).collect();
    // Some crowd even the reserve, and say nothing.
    let beyond: Vec<_> = peers.iter().flat_map(|peer| (0..100).map(|_| connect(&server, *peer))).collect();
    for _ in 0..20 {
        for path in ["/livez", "/readyz", "/health"] {
            ask(&server, Ipv4Addr::LOCALHOST, path).answered(200);
        }
        let refused = ask(&server, Ipv4Addr::LOCALHOST, "/v1/outbox");
        refused.refused(503, "OVERLOADED");
        assert!(refused.header("retry-after").is_some(), "{refused:?}");
    }
    drop((crowd, beyond));
    wait_until("there is room again", || ask(&server, Ipv4Addr::LOCALHOST, "/v1/outbox").status == 200);
    let (_, log) = server.stop();
    assert!(log.contains("max_connections"), "the operator is told: {log}");
}

#[test]
fn proxies_one_trusts_are_not_counted() {
    let home = Home::sqlite();
    let rules = "max_connections_per_peer = 2\nidle_timeout_sec = 600\ntrusted_proxies = [\"127.0.0.2/32\"]";
    let server = server(&home, rules);
    let hold = |source: Ipv4Addr| (0..5).map(|_| idle(&server, source)).collect::<Vec<_>>();
    let _proxy = hold(OTHER);
    ask(&server, OTHER, "/v1/outbox").answered(200);
    let stranger = Ipv4Addr::new(127, 0, 0, 3);
    let _crowd = hold(stranger);
    ask(&server, stranger, "/v1/outbox").refused(503, "OVERLOADED");
    ask(&server, stranger, "/livez").answered(200);
}

#[test]
fn http2_without_a_request_ends() {
    let home = Home::sqlite();
    let server = server(&home, "idle_timeout_sec = 1");
    let first_words = [
        (b"PRI ".to_vec(), "a word"),
        (crowd::greeting(WIDE), "a greeting"),
        ([crowd::greeting(WIDE), crowd::get(1, "/livez", true)].concat(), "an answered request"),
        ([crowd::greeting(WIDE), crowd::get(1, "/livez", false)].concat(), "half a head"),
    ];
    for (words, what) in first_words {
        for chatty in [false, true] {
            let mut stream = connect(&server, OTHER);
            stream.write_all(&words).unwrap();
            let mut writer = stream.try_clone().unwrap();
            let talking = std::thread::spawn(move || {
                // Pings are no use of a connection.
                while chatty && writer.write_all(&crowd::ping()).is_ok() {
                    std::thread::sleep(Duration::from_millis(100));
                }
            });
            let mut rest = Vec::new();
            match stream.read_to_end(&mut rest) {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("{what} keeps it open"),
                _ => {}
            }
            drop(stream);
            talking.join().unwrap();
        }
    }
}

#[test]
fn http2_with_a_request_under_way_stays() {
    let home = Home::sqlite();
    let server = server(&home, "idle_timeout_sec = 1\nwrite_timeout_sec = 1");
    let mut stream = connect(&server, OTHER);
    stream.write_all(&[crowd::greeting(WIDE), crowd::get(1, "/v1/live", true)].concat()).unwrap();
    let begun = Instant::now();
    let mut heard = Duration::ZERO;
    listen(&mut stream, |stream, head| {
        if head.is_data() && head.length > 0 {
            let length = head.length as u32;
            let _ = stream.write_all(&[crowd::window_update(0, length), crowd::window_update(1, length)].concat());
            heard = begun.elapsed();
        }
        if heard > Duration::from_secs(4) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    });
    assert!(heard > Duration::from_secs(4), "it was cut off after {heard:?}");
}

/// One slot for this peer: when it can ask again, the slot is free.
const ONE_SLOT: &str = "max_connections_per_peer = 1\nidle_timeout_sec = 600\nwrite_timeout_sec = 1";

#[test]
fn whoever_does_not_read_http1_loses_the_slot() {
    let home = Home::sqlite();
    let server = server(&home, ONE_SLOT);
    let mut stream = crowd::connect_narrowly(OTHER, server.address.parse().unwrap()).unwrap();
    let request = format!("GET /openapi.json HTTP/1.1\r\nhost: {}\r\n\r\n", server.address).repeat(100);
    stream.write_all(request.as_bytes()).unwrap();
    wait_until("it has the slot", || ask(&server, OTHER, "/v1/outbox").status == 503);
    wait_until("the slot is free", || ask(&server, OTHER, "/v1/outbox").status == 200);
    // What it left unread is not kept for it either.
    let mut rest = Vec::new();
    assert!(stream.read_to_end(&mut rest).is_err(), "it was reset");
}

#[test]
fn whoever_opens_no_window_loses_the_slot() {
    for window in [0, 1000] {
        let home = Home::sqlite();
        let server = server(&home, ONE_SLOT);
        let mut stream = connect(&server, OTHER);
        stream.write_all(&[crowd::greeting(window), crowd::get(1, "/openapi.json", true)].concat()).unwrap();
        wait_until("it has the slot", || ask(&server, OTHER, "/v1/outbox").status == 503);
        // It reads and answers all frames, asks how we are, and has another request answered now and then.
        let mut writer = stream.try_clone().unwrap();
        let talking = std::thread::spawn(move || {
            let mut next = 3;
            while writer.write_all(&[crowd::ping(), crowd::get(next, "/nothing", true)].concat()).is_ok() {
                next += 2;
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        let reading = std::thread::spawn(move || listen(&mut stream, |_, _| {}));
        wait_until("the slot is free", || ask(&server, OTHER, "/v1/outbox").status == 200);
        talking.join().unwrap();
        reading.join().unwrap();
    }
}

#[test]
fn whoever_reads_slowly_has_it_all() {
    let home = Home::sqlite();
    let server = server(&home, "idle_timeout_sec = 1\nwrite_timeout_sec = 1");
    let mut stream = server.connect();
    stream.write_all(&[crowd::greeting(8192), crowd::get(1, "/openapi.json", true)].concat()).unwrap();
    let (begun, mut whole) = (Instant::now(), false);
    listen(&mut stream, |stream, head| {
        if head.ends_stream() {
            whole = true;
            let _ = stream.shutdown(std::net::Shutdown::Both);
            return;
        }
        if !head.is_data() {
            return;
        }
        std::thread::sleep(Duration::from_millis(200));
        let length = head.length as u32;
        let _ = stream.write_all(&[crowd::window_update(0, length), crowd::window_update(1, length)].concat());
    });
    assert!(whole, "it was cut off after {:?}", begun.elapsed());
    assert!(begun.elapsed() > Duration::from_secs(2), "that was not slow: {:?}", begun.elapsed());
}
