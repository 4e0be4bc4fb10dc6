//! A receiver that answers as it is told, and remembers what it got.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

#[derive(Clone, Debug, Default)]
pub struct Got {
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Got {
    pub fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(n, _)| n == name).map_or("", |(_, value)| value)
    }
}

type Answer = Arc<dyn Fn(&Got, usize) -> String + Send + Sync>;

#[derive(Clone)]
pub struct Receiver {
    pub url: String,
    got: Arc<Mutex<Vec<Got>>>,
}

impl Receiver {
    /// Answers the nth request (from 0) with these bytes; empty: hangs up without a word.
    pub async fn start(answer: impl Fn(&Got, usize) -> String + Send + Sync + 'static) -> Receiver {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let got: Arc<Mutex<Vec<Got>>> = Arc::default();
        let (log, answer): (_, Answer) = (got.clone(), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, log.clone(), answer.clone()));
            }
        });
        Receiver { url, got }
    }

    /// Answers all with this status.
    pub async fn with_status(status: u16) -> Receiver {
        Receiver::start(move |_, _| status_line(status, "")).await
    }

    pub fn got(&self) -> Vec<Got> {
        self.got.lock().unwrap().clone()
    }
}

pub fn status_line(status: u16, headers: &str) -> String {
    format!("HTTP/1.1 {status} Because\r\n{headers}content-length: 0\r\n\r\n")
}

async fn serve(stream: TcpStream, log: Arc<Mutex<Vec<Got>>>, answer: Answer) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let mut got = Got::default();
        let mut line = String::new();
        reader.read_line(&mut line).await.ok().filter(|n| *n > 0)?;
        got.path = line.split(' ').nth(1)?.to_owned();
        loop {
            line.clear();
            reader.read_line(&mut line).await.ok()?;
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            got.headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        got.body = vec![0; got.header("content-length").parse().unwrap_or(0)];
        reader.read_exact(&mut got.body).await.ok()?;
        let nth = {
            let mut log = log.lock().unwrap();
            log.push(got.clone());
            log.len() - 1
        };
        let words = answer(&got, nth);
        if words.is_empty() {
            return None;
        }
        reader.get_mut().write_all(words.as_bytes()).await.ok()?;
    }
}
