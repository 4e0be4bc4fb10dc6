//! Whoever reads our output may stop reading: nothing is held up by it, and signals are heard all the same.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::api::exchange;
use crate::home::{Home, PATIENCE, wait_until};
use crate::receiver::Receiver;

/// Killed when the test forgets it.
struct Stuck(Child);

impl Stuck {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Its exit code, once it has ended.
    fn ends(&mut self) -> i32 {
        let mut code = None;
        wait_until("it ends", || {
            code = self.0.try_wait().unwrap();
            code.is_some()
        });
        code.and_then(|status| status.code()).unwrap_or(-1)
    }
}

impl Drop for Stuck {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server whose log nobody reads, and its address.
fn unread_server(home: &Home) -> (Stuck, String) {
    let mut child = home.command(&["serve", "--listen", "127.0.0.1:0"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().rsplit_once("://").map(|(_, address)| address.to_owned());
    (Stuck(child), address.unwrap_or_else(|| panic!("no address in {line:?}")))
}

fn batch(address: &str, lane: &str, messages: usize) {
    let messages: Vec<String> = (0..messages).map(|n| format!("{{\"payload\": {n}}}")).collect();
    let body = format!("{{\"messages\": [{}]}}", messages.join(","));
    let headers = [("content-type", "application/json")];
    exchange(address, "POST", &format!("/v1/outbox/{lane}/batch"), &headers, body.as_bytes()).answered(200);
}

#[test]
fn a_log_nobody_reads_stops_no_delivery_and_no_stop() {
    let fails = Receiver::start(|_| Some(400));
    let works = Receiver::start(|_| Some(200));
    let home = Home::sqlite();
    let lane = |name: &str, url: &str| format!("[lane.{name}]\ncourier = \"http\"\nurl = \"{url}\"\n");
    home.write("postrider.toml", &(lane("fails", &fails.url) + &lane("works", &works.url)));
    let (mut server, address) = unread_server(&home);
    // Each failure is a line of the log: far more than a pipe holds.
    for _ in 0..4 {
        batch(&address, "fails", 1000);
    }
    wait_until("all have failed", || home.stats("fails")["dead"] == 4000);
    batch(&address, "works", 20);
    wait_until("another lane delivers", || works.requests().len() == 20);
    assert_eq!(exchange(&address, "GET", "/livez", &[], b"").status, 200);
    server.signal(Signal::TERM);
    assert_eq!(server.ends(), 0);
    let mut log = String::new();
    server.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(log.len() > 30_000, "the pipe was full: {} bytes", log.len());
}

#[test]
fn what_was_dropped_is_counted() {
    let fails = Receiver::start(|_| Some(400));
    let home = Home::sqlite();
    home.write("postrider.toml", &format!("[lane.fails]\ncourier = \"http\"\nurl = \"{}\"\n", fails.url));
    let (mut server, address) = unread_server(&home);
    let dropped = || {
        let page = exchange(&address, "GET", "/metrics", &[], b"").answered(200).body;
        let line = page.lines().find(|line| line.starts_with("postrider_log_lines_dropped_total "));
        line.and_then(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).unwrap_or_else(|| panic!("{page}"))
    };
    assert_eq!(dropped(), 0);
    wait_until("more was logged than may wait", || {
        batch(&address, "fails", 1000);
        dropped() > 0
    });
    let mut stderr = server.0.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut log = String::new();
        stderr.read_to_string(&mut log).unwrap();
        log
    });
    server.signal(Signal::TERM);
    assert_eq!(server.ends(), 0);
    let log = reader.join().unwrap();
    assert!(log.contains("log lines were dropped"), "{}", &log[log.len().saturating_sub(500)..]);
}

#[test]
fn a_second_signal_ends_it_though_nobody_reads_the_log() {
    let fails = Receiver::start(|_| Some(400));
    let hangs = Receiver::start(|_| None);
    let home = Home::sqlite();
    let lane =
        |name: &str, url: &str| format!("[lane.{name}]\ncourier = \"http\"\nurl = \"{url}\"\ntimeout_ms = 600000\n");
    let config = lane("fails", &fails.url) + &lane("hangs", &hangs.url) + "[outbox]\ndrain_timeout_sec = 600\n";
    home.write("postrider.toml", &config);
    let (mut server, address) = unread_server(&home);
    for _ in 0..4 {
        batch(&address, "fails", 1000);
    }
    wait_until("all have failed", || home.stats("fails")["dead"] == 4000);
    batch(&address, "hangs", 1);
    wait_until("one is under way", || hangs.requests().len() == 1);
    server.signal(Signal::TERM);
    wait_until("it has heard the first", || std::net::TcpStream::connect(&address).is_err());
    assert!(server.0.try_wait().unwrap().is_none(), "it waits for what is under way");
    server.signal(Signal::TERM);
    assert_eq!(server.ends(), 1);
}

/// Where it was to say that it listens, too: it serves all the same, and hears what it is told.
#[test]
fn a_server_whose_output_takes_nothing_serves() {
    let home = Home::sqlite();
    home.run(&["migrate"]).done();
    for (what, before) in [
        ("full", "head -c 65536 /dev/zero; exec"),
        ("closed", "exec >&-; exec"),
        ("out of space", "exec >/dev/full; exec"),
    ] {
        let (port, _) = crate::receiver::free_port();
        let address = format!("127.0.0.1:{port}");
        let serve = home.command(&["serve", "--listen", &address]);
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("{before} \"$0\" \"$@\"")]).arg(serve.get_program()).args(serve.get_args());
        shell.current_dir(serve.get_current_dir().unwrap());
        let shell = shell.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut server = Stuck(shell.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
        wait_until(&format!("it listens, with its output {what}"), || std::net::TcpStream::connect(&address).is_ok());
        batch(&address, "log", 1);
        server.signal(Signal::TERM);
        assert_eq!(server.ends(), 0, "{what}");
    }
}

#[test]
fn a_printer_nobody_reads_holds_up_its_own_lane_alone() {
    let works = Receiver::start(|_| Some(200));
    let home = Home::sqlite();
    let lane = format!("[lane.works]\ncourier = \"http\"\nurl = \"{}\"\n", works.url);
    home.write("postrider.toml", &(lane + "[lane.log]\nbackoff_sec = [1]\n"));
    let lines: String = (0..4000).map(|n| format!("{{\"payload\": \"{n}\"}}\n")).collect();
    home.run_with(&["enqueue", "log", "--ndjson", "-"], &lines).done();
    let mut worker = Stuck(home.command(&["worker"]).stderr(Stdio::null()).spawn().unwrap());
    // A pipe holds about a thousand such lines.
    wait_until("the pipe is full", || {
        home.number("SELECT COUNT(*) FROM outbox WHERE last_error_code = 'OUTPUT_BLOCKED'") > 0
    });
    home.run_with(&["enqueue", "works", "--ndjson", "-"], &lines[..lines.match_indices('\n').nth(19).unwrap().0])
        .done();
    wait_until("another lane delivers", || works.requests().len() == 20);
    assert_eq!(home.stats("log")["dead"], 0, "what could not be printed waits");
    // Once it is read again, all of it comes.
    let stdout = BufReader::new(worker.0.stdout.take().unwrap());
    let reader = std::thread::spawn(move || {
        let ids = stdout.lines().map(|line| line.unwrap().split(' ').nth(1).unwrap().to_owned());
        ids.collect::<std::collections::HashSet<String>>()
    });
    crate::home::wait_long_until("all is printed", PATIENCE + Duration::from_secs(120), || {
        home.stats("log")["sent"] == 4000
    });
    worker.signal(Signal::TERM);
    assert_eq!(worker.ends(), 0);
    assert_eq!(reader.join().unwrap().len(), 4000);
}
