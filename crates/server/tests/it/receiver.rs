//! An HTTP receiver that answers as told and remembers what it got.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: String,
    /// The body as it came, for what is no text.
    pub bytes: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value)
    }
}

pub struct Receiver {
    pub url: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

/// A port nobody listens on, and the URL of whoever will. It is none of those the system hands out by itself, so that nobody
/// gets it meanwhile, and nobody who connects in vain is connected to himself.
pub fn free_port() -> (u16, String) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 20_000 + (n % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return (port, format!("http://127.0.0.1:{port}/in"));
        }
    }
}

impl Receiver {
    /// Answers each request with the status this gives, or never if it gives none.
    pub fn start(answer: impl Fn(&Request) -> Option<u16> + Send + Sync + 'static) -> Self {
        Receiver::listen(0, move |request| answer(request).map(|status| (status, String::new())))
    }

    /// Answers with a status and a body.
    pub fn answering(answer: impl Fn(&Request) -> (u16, String) + Send + Sync + 'static) -> Self {
        Receiver::answering_on(0, answer)
    }

    pub fn answering_on(port: u16, answer: impl Fn(&Request) -> (u16, String) + Send + Sync + 'static) -> Self {
        Receiver::listen(port, move |request| Some(answer(request)))
    }

    fn listen(port: u16, answer: impl Fn(&Request) -> Option<(u16, String)> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        let url = format!("http://{}/in", listener.local_addr().unwrap());
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (log, answer) = (requests.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (log, answer) = (log.clone(), answer.clone());
                std::thread::spawn(move || serve(stream, &log, &*answer));
            }
        });
        Receiver { url, requests }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(
    stream: TcpStream,
    log: &Mutex<Vec<Request>>,
    answer: &dyn Fn(&Request) -> Option<(u16, String)>,
) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut request = Request::default();
        let mut line = String::new();
        while reader.read_line(&mut line).ok()? > 0 && !line.trim().is_empty() {
            if let Some(rest) = line.strip_prefix("POST ") {
                request.path = rest.split(' ').next().unwrap_or_default().to_owned();
            } else if let Some((name, value)) = line.split_once(": ") {
                request.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
            line.clear();
        }
        if request.headers.is_empty() {
            return None;
        }
        let mut body = vec![0; request.header("content-length").parse().unwrap_or(0)];
        reader.read_exact(&mut body).ok()?;
        request.body = String::from_utf8_lossy(&body).into_owned();
        request.bytes = body;
        log.lock().unwrap().push(request.clone());
        match answer(&request) {
            Some((status, body)) => {
                let length = body.len();
                write!(reader.get_mut(), "HTTP/1.1 {status} Because\r\ncontent-length: {length}\r\n\r\n{body}").ok()?
            }
            None => drop(reader.read_line(&mut line)), // until the other side gives up
        }
    }
}
