//! A running `postrider serve`, and requests to it byte by byte: nothing between the test and the wire.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::home::{Home, PATIENCE};

pub struct Server {
    child: Child,
    pub address: String,
    log: Option<std::thread::JoinHandle<String>>,
}

/// What came back.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:#?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.into_iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }

    /// Refused with this status and code, in the shape of all errors.
    pub fn refused(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{self:#?}");
        let error = self.json()["error"].clone();
        assert_eq!(error["code"], code, "{self:#?}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["details"].is_object(), "{self:#?}");
        assert!(self.header("x-correlation-id").is_some(), "{self:#?}");
        assert_eq!(self.json()["correlation_id"].as_str(), self.header("x-correlation-id"), "{self:#?}");
        error
    }

    pub fn answered(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:#?}");
        self
    }
}

impl Server {
    /// Starts it on a free port and waits until it says that it listens.
    pub fn start(home: &Home, args: &[&str]) -> Server {
        Server::start_with(home, args, &[])
    }

    pub fn start_with(home: &Home, args: &[&str], environment: &[(&str, &str)]) -> Server {
        let listen: &[&str] = if args.contains(&"--listen") { &[] } else { &["--listen", "127.0.0.1:0"] };
        let mut command = home.command(&[&["serve"], listen, args].concat());
        command.envs(environment.iter().copied());
        Server::listening(command)
    }

    /// Another build of it.
    pub fn start_binary(home: &Home, binary: &std::path::Path, args: &[&str]) -> Server {
        let usual = home.command(&[]);
        let mut command = std::process::Command::new(binary);
        command.args(["serve", "--listen", "127.0.0.1:0"]).args(args).stdin(Stdio::null());
        command.current_dir(usual.get_current_dir().unwrap());
        if let Some(url) = home.database.url() {
            command.env("POSTRIDER_DATABASE", url);
        }
        Server::listening(command)
    }

    fn listening(command: std::process::Command) -> Server {
        Server::unless_it_dies(command).unwrap_or_else(|log| panic!("it does not listen: {log}"))
    }

    /// One that may end before it listens: then its log.
    pub fn unless_it_dies(mut command: std::process::Command) -> Result<Server, String> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = child.stderr.take().unwrap();
        // Somebody must read it, or it blocks on a full pipe.
        let log = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit_once("://").map(|(_, address)| address.to_owned());
        let Some(address) = address else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(log.join().unwrap());
        };
        Ok(Server { child, address, log: Some(log) })
    }

    /// Has it ended by itself?
    pub fn is_gone(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn connect(&self) -> TcpStream {
        connect(&self.address)
    }

    /// Sends these bytes on a connection of their own and reads to the end.
    pub fn raw(&self, bytes: &[u8]) -> Response {
        self.send(bytes, false)
    }

    /// The same, and says no more.
    pub fn cut_short(&self, bytes: &[u8]) -> Response {
        self.send(bytes, true)
    }

    fn send(&self, bytes: &[u8], cut: bool) -> Response {
        send(self.connect(), bytes, cut)
    }

    /// The same on a connection that is there already.
    pub fn send_on(stream: TcpStream, bytes: &[u8]) -> Response {
        send(stream, bytes, false)
    }

    pub fn request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        exchange(&self.address, method, path, headers, body)
    }

    pub fn get(&self, path: &str) -> Response {
        self.request("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
        self.request("POST", path, headers, body.as_bytes())
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }

    /// Tells it to stop; its exit code and its log.
    pub fn stop(mut self) -> (i32, String) {
        self.signal(rustix::process::Signal::TERM);
        let begun = std::time::Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "it does not stop");
            std::thread::sleep(Duration::from_millis(10));
        }
        let code = self.child.wait().unwrap().code().unwrap_or(-1);
        let log = self.log.take().unwrap().join().unwrap();
        assert!(!log.contains("panicked"), "{log}");
        (code, log)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn send(mut stream: TcpStream, bytes: &[u8], cut: bool) -> Response {
    // It may answer and close before it has read all.
    let _ = stream.write_all(bytes);
    if cut {
        let _ = stream.shutdown(Shutdown::Write);
    }
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    parse(&String::from_utf8_lossy(&answer))
}

/// One request to whoever listens there, on a connection of its own.
pub fn exchange(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    try_exchange(address, method, path, headers, body).unwrap_or_else(|error| panic!("{address}: {error}"))
}

/// The same to somebody who may not be there. Whoever hangs up without an answer has status 0.
pub fn try_exchange(
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<Response> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(send(stream, &[head.as_bytes(), body].concat(), false))
}

fn parse(answer: &str) -> Response {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Response { status, head: head.to_owned(), body: body.to_owned() }
}
