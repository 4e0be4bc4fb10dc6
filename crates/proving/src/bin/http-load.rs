//! `http-load BINARY`: what a server's well-behaved clients notice of a crowd beside them. Thousands of idle HTTP/2
//! connections and clients that never read, all from one address, and clients that send nonsense; measured without them
//! and with them, in the same run.

// It measures, so it reads a clock.
#![allow(clippy::disallowed_methods)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proving::crowd;
use serde_json::{Value, json};

const CROWD: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const BABBLERS: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 3);
/// Clients that behave: each asks, waits for the answer, and rests.
const CLIENTS: usize = 16;
const REST: Duration = Duration::from_millis(40);
/// Whoever is hung up on comes back, but all together no more often than this.
const BACK_PER_SECOND: usize = 500;
const CONFIGURATION: &str = "[lane.work]\ncourier = \"noop\"\n";

struct Wish {
    binary: String,
    connections: usize,
    only_try: bool,
}

fn wish() -> Result<Wish, String> {
    let mut wish = Wish { binary: String::new(), connections: 10_000, only_try: false };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--connections" => {
                let number = args.next().and_then(|n| n.parse().ok());
                wish.connections = number.ok_or("--connections needs a number")?;
            }
            "--only-try" => wish.only_try = true,
            _ if !arg.starts_with('-') && wish.binary.is_empty() => wish.binary = arg,
            _ => return Err(format!("`{arg}` is not understood")),
        }
    }
    if wish.binary.is_empty() {
        return Err("usage: http-load BINARY [--connections N] [--only-try]".to_owned());
    }
    Ok(wish)
}

fn main() -> ExitCode {
    let told = wish().and_then(|wish| run(&wish).map_err(|e| e.to_string()));
    match told {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::from(2)
        }
    }
}

fn run(wish: &Wish) -> std::io::Result<bool> {
    raise_file_limit();
    let server = Server::start(&wish.binary)?;
    let time = Duration::from_secs(if wish.only_try { 4 } else { 20 });
    measure(server.address, Duration::from_secs(2)); // it has warmed up
    let alone = measure(server.address, time);
    let silent = wish.connections / 50;
    let babbling = (wish.connections / 200).max(1);
    let crowd = Crowd::gather(server.address, wish.connections, silent, babbling);
    let (idle_open, silent_open) = crowd.open();
    let beside = measure(server.address, time);
    let ratio = beside.per_second / alone.per_second;
    let (idle_now, silent_now) = crowd.open();
    drop(crowd);
    let told = json!({
        "idle": wish.connections, "idle_open": [idle_open, idle_now],
        "silent": silent, "silent_open": [silent_open, silent_now], "babbling": babbling,
        "alone": alone.told(), "beside": beside.told(), "throughput_ratio": ratio,
        "server_rss_mb": server.memory_mb(),
    });
    println!("{told:#}");
    let fine = beside.probes.p99() < 100.0 && beside.clients.p99() < 100.0 && ratio >= 0.9 && beside.failed == 0;
    let wanted = "p99 of probes and clients below 100 ms, throughput at least 0.9, no request lost";
    println!("{}: {wanted}", if fine { "held" } else { "not held" });
    // A machine that only tries promises no times; that nobody's request is lost it does.
    Ok(if wish.only_try { alone.failed + beside.failed == 0 } else { fine })
}

/// A server in a folder of its own, with an embedded database.
struct Server {
    child: Child,
    address: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Server {
    fn start(binary: &str) -> std::io::Result<Server> {
        let folder = tempfile::tempdir()?;
        std::fs::write(folder.path().join("postrider.toml"), CONFIGURATION)?;
        let mut command = Command::new(std::fs::canonicalize(binary)?);
        command.args(["serve", "--listen", "127.0.0.1:0"]).current_dir(folder.path());
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        let address = line.trim().rsplit_once("://").and_then(|(_, address)| address.parse().ok());
        let address = address.ok_or_else(|| std::io::Error::other(format!("it does not listen: {line:?}")))?;
        Ok(Server { child, address, _folder: folder })
    }

    fn memory_mb(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        kilobytes.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kb| kb / 1024)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How long things took, in milliseconds.
#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn percentile(&self, part: f64) -> f64 {
        let at = ((self.0.len() as f64 * part) as usize).min(self.0.len().saturating_sub(1));
        self.0.get(at).copied().unwrap_or(f64::INFINITY)
    }

    fn p99(&self) -> f64 {
        self.percentile(0.99)
    }

    fn told(&self) -> Value {
        json!({ "count": self.0.len(), "p50_ms": self.percentile(0.5), "p99_ms": self.p99(), "max_ms": self.percentile(1.0) })
    }
}

/// What well-behaved clients saw.
struct Measured {
    probes: Times,
    clients: Times,
    per_second: f64,
    failed: usize,
}

impl Measured {
    fn told(&self) -> Value {
        json!({ "probes": self.probes.told(), "clients": self.clients.told(), "per_second": self.per_second, "failed": self.failed })
    }
}

/// Probes on connections of their own and clients on ones they keep, for so long.
fn measure(address: SocketAddr, time: Duration) -> Measured {
    let (begun, failed) = (Instant::now(), Arc::new(AtomicUsize::new(0)));
    let ask_for = |work: fn(SocketAddr, usize, &mut Option<TcpStream>) -> std::io::Result<()>, number: usize| {
        let failed = failed.clone();
        std::thread::spawn(move || {
            let (mut times, mut connection) = (Vec::new(), None);
            while begun.elapsed() < time {
                let asked = Instant::now();
                match work(address, number, &mut connection) {
                    Ok(()) => times.push(asked.elapsed().as_secs_f64() * 1000.0),
                    Err(error) => {
                        eprintln!("a request failed after {:?}: {error}", asked.elapsed());
                        failed.fetch_add(1, Ordering::Relaxed);
                        connection = None;
                    }
                }
                std::thread::sleep(REST);
            }
            times
        })
    };
    let probes: Vec<_> = (0..4).map(|number| ask_for(probe, number)).collect();
    let clients: Vec<_> = (0..CLIENTS).map(|number| ask_for(publish, number)).collect();
    let all = |threads: Vec<JoinHandle<Vec<f64>>>| {
        let mut times: Vec<f64> = threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect();
        times.sort_by(f64::total_cmp);
        Times(times)
    };
    let (probes, clients) = (all(probes), all(clients));
    let per_second = clients.0.len() as f64 / begun.elapsed().as_secs_f64();
    Measured { probes, clients, per_second, failed: failed.load(Ordering::Relaxed) }
}

fn probe(address: SocketAddr, number: usize, _: &mut Option<TcpStream>) -> std::io::Result<()> {
    let path = ["/livez", "/readyz"][number % 2];
    let mut stream = connect(Ipv4Addr::LOCALHOST, address)?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n")?;
    wants(answer(&mut stream)?, 200)
}

fn publish(address: SocketAddr, number: usize, connection: &mut Option<TcpStream>) -> std::io::Result<()> {
    let stream = match connection {
        Some(stream) => stream,
        none => none.insert(connect(Ipv4Addr::LOCALHOST, address)?),
    };
    let event = format!("{{\"event_type\":\"load.tried\",\"payload\":{{\"client\":{number}}}}}");
    post(stream, address, &event)?;
    wants(answer(stream)?, 202)
}

fn post(stream: &mut TcpStream, address: SocketAddr, body: &str) -> std::io::Result<()> {
    let request = format!(
        "POST /v1/events HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes())
}

fn wants(status: u16, wanted: u16) -> std::io::Result<()> {
    if status == wanted { Ok(()) } else { Err(std::io::Error::other(format!("{status}, not {wanted}"))) }
}

fn connect(source: Ipv4Addr, address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = crowd::connect_from(source, address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    Ok(stream)
}

/// Reads one answer to its end, whose length it tells; its status.
fn answer(stream: &mut TcpStream) -> std::io::Result<u16> {
    let (mut read, mut some) = (Vec::new(), [0; 4096]);
    loop {
        let length = stream.read(&mut some)?;
        if length == 0 {
            return Err(std::io::Error::other("it was hung up on"));
        }
        read.extend_from_slice(&some[..length]);
        let text = String::from_utf8_lossy(&read);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let told = head.lines().filter_map(|line| line.split_once(": "));
        let told = told.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
        let whole = told.and_then(|(_, length)| length.parse().ok()).unwrap_or(0);
        if body.len() >= whole {
            return head.split(' ').nth(1).and_then(|s| s.parse().ok()).ok_or(std::io::Error::other("no status"));
        }
    }
}

/// The others.
struct Crowd {
    stop: Arc<AtomicBool>,
    idle: Arc<AtomicUsize>,
    silent: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Crowd {
    /// Comes back when all have been there once.
    fn gather(address: SocketAddr, idle: usize, silent: usize, babbling: usize) -> Crowd {
        let mut crowd = Crowd { stop: Arc::default(), idle: Arc::default(), silent: Arc::default(), threads: vec![] };
        let greet = move |_: usize| greeting_of_idle();
        let (stop, open) = (crowd.stop.clone(), crowd.idle.clone());
        let come = Arc::new(AtomicUsize::new(0));
        let came = come.clone();
        crowd.threads.push(std::thread::spawn(move || hold(address, (idle, true), greet, &stop, &open, &came)));
        let (stop, open) = (crowd.stop.clone(), crowd.silent.clone());
        let came = come.clone();
        let ask = move |number: usize| words_of_silent(address, number);
        crowd.threads.push(std::thread::spawn(move || hold(address, (silent, false), ask, &stop, &open, &came)));
        for number in 0..babbling {
            let stop = crowd.stop.clone();
            crowd.threads.push(std::thread::spawn(move || babble(address, number, &stop)));
        }
        while come.load(Ordering::Relaxed) < 2 {
            std::thread::sleep(Duration::from_millis(50));
        }
        crowd
    }

    fn open(&self) -> (usize, usize) {
        (self.idle.load(Ordering::Relaxed), self.silent.load(Ordering::Relaxed))
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Holds so many connections open, each with its first words; whoever is hung up on comes back, unhurried.
fn hold(
    address: SocketAddr,
    (wanted, reads): (usize, bool),
    words: impl Fn(usize) -> Vec<u8>,
    stop: &AtomicBool,
    open: &AtomicUsize,
    come: &AtomicUsize,
) {
    let mut held: Vec<Option<TcpStream>> = (0..wanted).map(|_| None).collect();
    let mut first = true;
    while !stop.load(Ordering::Relaxed) {
        let mut left = if first { wanted } else { BACK_PER_SECOND };
        for (number, place) in held.iter_mut().enumerate() {
            let gone = place.as_ref().is_none_or(|stream| is_gone(stream, reads));
            if gone {
                *place = None;
            }
            if gone && left > 0 && !stop.load(Ordering::Relaxed) {
                left -= 1;
                *place = crowd::connect_narrowly(CROWD, address).ok().and_then(|mut stream| {
                    stream.set_nonblocking(true).ok()?;
                    // Who is not let in hears it later.
                    let _ = stream.write(&words(number));
                    Some(stream)
                });
            }
        }
        open.store(held.iter().flatten().count(), Ordering::Relaxed);
        if first {
            come.fetch_add(1, Ordering::Relaxed);
            first = false;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn greeting_of_idle() -> Vec<u8> {
    crowd::greeting(65_535)
}

/// Much is asked for: half of them in HTTP/1 and read nothing, half in HTTP/2 and open no window.
fn words_of_silent(address: SocketAddr, number: usize) -> Vec<u8> {
    if number.is_multiple_of(2) {
        return format!("GET /openapi.json HTTP/1.1\r\nhost: {address}\r\n\r\n").repeat(50).into_bytes();
    }
    let asked = (0..50).flat_map(|n| crowd::get(2 * n + 1, "/openapi.json", true));
    crowd::greeting(0).into_iter().chain(asked).collect()
}

/// Was it hung up on? The idle ones read what comes, for their end stands behind it; the silent ones take nothing, and
/// hear of theirs by a reset.
fn is_gone(mut stream: &TcpStream, reads: bool) -> bool {
    let mut some = [0; 4096];
    loop {
        match if reads { stream.read(&mut some) } else { stream.peek(&mut some[..1]) } {
            Ok(0) => return true,
            Ok(_) if reads => {}
            Ok(_) => return false,
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

/// Ten events a second that are none.
fn babble(address: SocketAddr, number: usize, stop: &AtomicBool) {
    let nonsense = [
        "{\"event_type\":\"load.tried\",\"payload\"",
        "{\"payload\":{}}",
        "{\"event_type\":\"a b\",\"payload\":{}}",
        "{\"event_type\":\"load.tried\",\"payload\":{},\"external_id\":\"a\\u0000b\"}",
        "[]",
    ];
    let (mut connection, mut next) = (None, number);
    while !stop.load(Ordering::Relaxed) {
        let begun = Instant::now();
        let mut stream = match connection.take() {
            Some(stream) => stream,
            None => match connect(BABBLERS, address) {
                Ok(stream) => stream,
                Err(_) => continue,
            },
        };
        let sent = post(&mut stream, address, nonsense[next % nonsense.len()]);
        if sent.and_then(|()| answer(&mut stream)).is_ok() {
            connection = Some(stream);
        }
        next += 1;
        std::thread::sleep(Duration::from_millis(100).saturating_sub(begun.elapsed()));
    }
}

fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let most = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most });
}
