//! A client of the API that needs nothing: one request a connection; and a reader that pages without pause.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value;

/// Status and body of one request.
pub fn ask(address: &str, method: &str, path: &str, body: Option<&Value>) -> std::io::Result<(u16, Value)> {
    let (status, body) = exchange(address, method, path, body)?;
    // In chunks or not: a JSON document begins at its first bracket and ends at its last.
    let json = body.find(['{', '[']).and_then(|at| Some(&body[at..=body.rfind(['}', ']'])?]));
    Ok((status, json.and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null)))
}

/// The same, with the body as it came.
pub fn exchange(address: &str, method: &str, path: &str, body: Option<&Value>) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    let body = body.map_or(String::new(), Value::to_string);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Ok((status, body.to_owned()))
}

/// Pages through a list from its beginning to its end, over and over, until dropped.
pub struct Pager {
    stop: Arc<AtomicBool>,
    pages: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Pager {
    /// `list` is a path with a query, like `/v1/outbox?lane=a&limit=500`.
    pub fn start(address: &str, list: &str) -> Pager {
        let (stop, pages) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, turned) = (stop.clone(), pages.clone());
        let (address, list) = (address.to_owned(), list.to_owned());
        let thread = std::thread::spawn(move || {
            let mut cursor: Option<String> = None;
            while !stopped.load(Ordering::Relaxed) {
                let path = cursor.as_ref().map_or(list.clone(), |cursor| format!("{list}&cursor={cursor}"));
                let Ok((200, page)) = ask(&address, "GET", &path, None) else { continue };
                turned.fetch_add(1, Ordering::Relaxed);
                cursor = page["next_cursor"].as_str().map(str::to_owned);
            }
        });
        Pager { stop, pages, thread: Some(thread) }
    }

    /// Pages it has had so far.
    pub fn pages(&self) -> u64 {
        self.pages.load(Ordering::Relaxed)
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
