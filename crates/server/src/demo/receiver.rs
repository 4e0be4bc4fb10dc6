//! A small HTTP receiver that keeps a log of its own. It is moody: some invoices it takes only at the second or third
//! attempt, and one it does not understand until it is mended.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::failure::{Failure, Result};

/// One request as the receiver saw it, and what it answered.
#[derive(Clone, Debug)]
pub struct Arrival {
    pub idempotency_key: String,
    pub invoice: u64,
    pub status: u16,
}

impl Arrival {
    pub fn taken(&self) -> bool {
        self.status == 200
    }
}

/// The receiver's side of the story.
#[derive(Clone, Default)]
pub struct Receiver {
    log: Arc<Mutex<(Vec<Arrival>, bool)>>,
    pub url: String,
}

impl Receiver {
    pub async fn start() -> Result<Self> {
        let trouble =
            |e: std::io::Error| Failure::failed(format!("cannot listen on 127.0.0.1: {e}; the demo needs a free port"));
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(trouble)?;
        let url = format!("http://{}/invoices", listener.local_addr().map_err(trouble)?);
        let receiver = Receiver { url, ..Receiver::default() };
        let serving = receiver.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let receiver = serving.clone();
                tokio::spawn(async move { receiver.serve(stream).await });
            }
        });
        Ok(receiver)
    }

    pub fn arrivals(&self) -> Vec<Arrival> {
        self.lock().0.clone()
    }

    /// From now on it understands everything.
    pub fn mend(&self) {
        self.lock().1 = true;
    }

    fn lock(&self) -> MutexGuard<'_, (Vec<Arrival>, bool)> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One connection, request after request, until it is closed.
    async fn serve(&self, stream: TcpStream) -> Option<()> {
        let mut stream = BufReader::new(stream);
        loop {
            let (mut key, mut attempt, mut length) = (String::new(), 1, 0);
            for line in 0.. {
                let mut text = String::new();
                if stream.read_line(&mut text).await.ok()? == 0 {
                    return None;
                }
                if line > 0 && text.trim().is_empty() {
                    break;
                }
                let (name, value) = text.split_once(':').unwrap_or(("", ""));
                match name.to_ascii_lowercase().as_str() {
                    "idempotency-key" => key = value.trim().to_owned(),
                    "postrider-attempt" => attempt = value.trim().parse().ok()?,
                    "content-length" => length = value.trim().parse().ok()?,
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await.ok()?;
            tokio::time::sleep(Duration::from_millis(10)).await; // it has work to do, too
            let (status, reason) = self.judge(key, attempt, &body);
            let answer = format!("HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\n\r\n");
            stream.get_mut().write_all(answer.as_bytes()).await.ok()?;
        }
    }

    fn judge(&self, idempotency_key: String, attempt: u32, body: &[u8]) -> (u16, &'static str) {
        let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let invoice = body["invoice"].as_u64().unwrap_or(0);
        let mut log = self.lock();
        let (status, reason) = match invoice {
            _ if body["amount"].is_null() && !log.1 => (422, "Unprocessable Content"),
            n if n % 7 == 0 && attempt == 1 => (503, "Service Unavailable"),
            n if n % 11 == 0 && attempt <= 2 => (500, "Internal Server Error"),
            _ => (200, "OK"),
        };
        log.0.push(Arrival { idempotency_key, invoice, status });
        (status, reason)
    }
}
