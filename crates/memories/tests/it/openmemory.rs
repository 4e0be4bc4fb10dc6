//! An OpenMemory in a hundred lines: it keeps what it is given, takes alike texts for one, shows a memory only to the key
//! it was written with, and answers as it is told.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

#[derive(Clone, Debug, PartialEq)]
pub enum Mood {
    Well,
    /// Adding is answered so, and does nothing.
    Adding(u16, Value),
    /// Everything is answered so.
    All(u16, Value),
    /// Adding is applied, and its answer is lost.
    LoseAnswer,
    /// Adding is applied so much later, and not answered before.
    Late(Duration),
    /// Adding is not applied, and not answered for so long.
    Silent(Duration),
}

#[derive(Clone, Debug)]
pub struct Memory {
    pub id: String,
    pub key: String,
    pub content: String,
    pub metadata: Value,
}

#[derive(Debug)]
pub struct Mind {
    pub mood: Mood,
    pub memories: Vec<Memory>,
    pub adds: usize,
    pub requests: usize,
    pub made: usize,
}

#[derive(Clone)]
pub struct OpenMemory {
    pub url: String,
    mind: Arc<Mutex<Mind>>,
}

impl OpenMemory {
    pub async fn start() -> OpenMemory {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mind = Mind { mood: Mood::Well, memories: vec![], adds: 0, requests: 0, made: 0 };
        let this = OpenMemory { url, mind: Arc::new(Mutex::new(mind)) };
        let serving = this.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        this
    }

    pub fn mind(&self) -> MutexGuard<'_, Mind> {
        self.mind.lock().unwrap()
    }

    pub fn be(&self, mood: Mood) {
        self.mind().mood = mood;
    }

    pub fn contents(&self) -> Vec<String> {
        self.mind().memories.iter().map(|memory| memory.content.clone()).collect()
    }

    async fn serve(self, stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).await.ok().filter(|n| *n > 0)?;
            let mut words = line.split(' ');
            let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
            let (mut length, mut key) = (0, String::new());
            loop {
                line.clear();
                reader.read_line(&mut line).await.ok()?;
                let Some((name, value)) = line.trim_end().split_once(": ") else { break };
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => length = value.parse().unwrap(),
                    "authorization" => key = value.to_owned(),
                    _ => {}
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).await.ok()?;
            let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
            let (status, answer) = self.answer(&method, &path, &key, &body).await?;
            let answer = answer.to_string();
            let head = format!("HTTP/1.1 {status} Because\r\ncontent-type: application/json\r\n");
            let words = format!("{head}content-length: {}\r\n\r\n{answer}", answer.len());
            reader.get_mut().write_all(words.as_bytes()).await.ok()?;
        }
    }

    /// `None`: it hangs up.
    async fn answer(&self, method: &str, path: &str, key: &str, body: &Value) -> Option<(u16, Value)> {
        if path == "/health" {
            return Some((200, json!({ "ok": true })));
        }
        let mood = {
            let mut mind = self.mind();
            mind.requests += 1;
            mind.mood.clone()
        };
        if let Mood::All(status, answer) = mood {
            return Some((status, answer));
        }
        if path == "/memory/add" {
            self.mind().adds += 1;
            return match mood {
                Mood::Adding(status, answer) => Some((status, answer)),
                Mood::LoseAnswer => {
                    self.mind().add(key, body);
                    None
                }
                Mood::Late(delay) => {
                    let (this, key, body) = (self.clone(), key.to_owned(), body.clone());
                    let applied = tokio::spawn(async move {
                        tokio::time::sleep(delay).await;
                        this.mind().add(&key, &body)
                    });
                    Some((200, applied.await.unwrap()))
                }
                Mood::Silent(delay) => {
                    tokio::time::sleep(delay).await;
                    None
                }
                _ => Some((200, self.mind().add(key, body))),
            };
        }
        Some(self.mind().look(method, path, key, body))
    }
}

impl Mind {
    fn add(&mut self, key: &str, body: &Value) -> Value {
        let content = body["content"].as_str().unwrap().to_owned();
        let likeness = |text: &str| -> Vec<String> {
            let words = text.split_whitespace().filter(|word| word.len() > 1 && word.parse::<u64>().is_err());
            words.map(str::to_lowercase).collect()
        };
        let alike = self.memories.iter().find(|memory| likeness(&memory.content) == likeness(&content));
        if let Some(known) = alike {
            return json!({ "id": known.id, "deduplicated": true });
        }
        self.made += 1;
        let id = format!("m-{}", self.made);
        let metadata = body["metadata"].clone();
        self.memories.push(Memory { id: id.clone(), key: key.to_owned(), content, metadata });
        json!({ "id": id, "sectors": ["semantic"] })
    }

    fn look(&mut self, method: &str, path: &str, key: &str, body: &Value) -> (u16, Value) {
        let show = |memory: &Memory| json!({ "id": memory.id, "content": memory.content, "metadata": memory.metadata });
        let own = |memory: &&Memory| memory.key == key;
        if path == "/memory/query" {
            let words: Vec<String> = body["query"].as_str().unwrap().split(' ').map(str::to_lowercase).collect();
            let fits = |memory: &&Memory| words.iter().any(|word| memory.content.to_lowercase().contains(word));
            let found: Vec<Value> = self.memories.iter().filter(own).filter(fits).map(show).collect();
            return (200, json!({ "matches": found }));
        }
        if path.starts_with("/memory/all") {
            let items: Vec<Value> = self.memories.iter().rev().filter(own).map(show).collect();
            return (200, json!({ "items": items }));
        }
        let id = path.trim_start_matches("/memory/");
        match self.memories.iter().find(|memory| memory.id == id) {
            None => (404, json!({ "err": "nf" })),
            Some(memory) if memory.key != key => (403, json!({ "err": "forbidden" })),
            Some(memory) => {
                let shown = show(memory);
                if method == "DELETE" {
                    self.memories.retain(|memory| memory.id != id);
                }
                (200, shown)
            }
        }
    }
}
