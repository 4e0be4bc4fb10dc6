//! An HTTP receiver with a log of its own: the other side of the wire, independent of what the engine says of itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// One request as it arrived.
#[derive(Clone, Debug)]
pub struct Request {
    pub id: i64,
    pub attempt: u32,
    pub token: i64,
    pub idempotency_key: String,
    pub body: Vec<u8>,
    /// The status it is answered with.
    pub answered: u16,
}

/// What to answer, and when.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    pub status: u16,
    pub after: Duration,
}

impl Answer {
    pub const OK: Answer = Answer { status: 200, after: Duration::ZERO };
}

type Rule = dyn Fn(&Request) -> Answer + Send + Sync;

/// Listens on a free loopback port until dropped.
pub struct Receiver {
    port: u16,
    log: Arc<Mutex<Vec<Request>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Receiver {
    pub async fn start(rule: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> std::io::Result<Receiver> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let log: Arc<Mutex<Vec<Request>>> = Arc::default();
        let (entries, rule): (_, Arc<Rule>) = (log.clone(), Arc::new(rule));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (entries, rule) = (entries.clone(), rule.clone());
                tokio::spawn(async move {
                    let _ = serve(stream, &entries, &*rule).await; // a worker killed half-way is no news
                });
            }
        });
        Ok(Receiver { port, log, task })
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// All requests so far, in order of arrival.
    pub fn log(&self) -> Vec<Request> {
        self.log.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub fn count(&self) -> usize {
        self.log.lock().unwrap_or_else(|e| e.into_inner()).len()
    }

    /// The requests by message.
    pub fn by_message(&self) -> HashMap<i64, Vec<Request>> {
        let mut by_message: HashMap<i64, Vec<Request>> = HashMap::new();
        for request in self.log() {
            by_message.entry(request.id).or_default().push(request);
        }
        by_message
    }
}

async fn serve(stream: TcpStream, log: &Mutex<Vec<Request>>, rule: &Rule) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).await? == 0 {
            return Ok(());
        }
        let mut headers: HashMap<String, String> = HashMap::new();
        loop {
            line.clear();
            stream.read_line(&mut line).await?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let number = |name: &str| headers.get(name).and_then(|v| v.parse::<i64>().ok()).unwrap_or(0);
        let mut body = vec![0; number("content-length") as usize];
        stream.read_exact(&mut body).await?;
        let mut request = Request {
            id: number("postrider-message-id"),
            attempt: number("postrider-attempt") as u32,
            token: number("postrider-lease-token"),
            idempotency_key: headers.remove("idempotency-key").unwrap_or_default(),
            body,
            answered: 0,
        };
        let answer = rule(&request);
        request.answered = answer.status;
        // Logged when received, whether or not the sender lives to hear the answer.
        log.lock().unwrap_or_else(|e| e.into_inner()).push(request);
        if !answer.after.is_zero() {
            tokio::time::sleep(answer.after).await;
        }
        let head = format!("HTTP/1.1 {} x\r\ncontent-length: 0\r\n\r\n", answer.status);
        stream.write_all(head.as_bytes()).await?;
    }
}
