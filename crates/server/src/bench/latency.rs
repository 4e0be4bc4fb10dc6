//! Idle latency: one message at a time, from its committed enqueue to the start of its delivery. On SQLite the worker
//! runs in this process, on a server in another one.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use postrider::clock::Tick;
use postrider::tx::Dialect;
use postrider::worker::core::LaneSettings;
use postrider::{NewMessage, Outcome, Worker, courier};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::mpsc;

use super::scratch::{self, LANE, Scratch, fail};
use super::{Bench, percentile};
use crate::failure::{Failure, Result};

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(500);
    let outbox = scratch.outbox().await?;
    let (sender, mut arrivals) = mpsc::unbounded_channel::<(i64, Tick)>();
    let mut child = None;
    if scratch.dialect() == Dialect::Sqlite {
        let worker = Worker::new(outbox.clone()).lane_with(LaneSettings::new(LANE), Arc::new(reporter(sender)));
        tokio::spawn(worker.run(std::future::pending()));
    } else {
        child = Some(start_worker(scratch.url(), sender)?);
    }
    let mut samples = Vec::with_capacity(messages);
    // The first ones warm up connections and statements.
    for n in 0..messages + 20 {
        tokio::time::sleep(Duration::from_millis(10).mul_f64(0.5 + postrider::clock::chance())).await;
        let entries = outbox.enqueue(vec![NewMessage::new(LANE, format!("message {n}"))]).await?;
        let committed = Tick::now();
        let arrived = tokio::time::timeout(Duration::from_secs(10), async {
            while let Some((id, at)) = arrivals.recv().await {
                if id == entries[0].id {
                    return Some(at);
                }
            }
            None
        });
        let at = arrived.await.ok().flatten().ok_or_else(|| Failure::failed("a message did not arrive within 10 s"))?;
        if n >= 20 {
            samples.push(at.since(committed));
        }
    }
    if let Some(mut child) = child {
        let _ = child.kill().await;
    }
    Ok(json!({
        "bench": "latency", "messages": messages, "across_processes": scratch.dialect() != Dialect::Sqlite,
        "p50_ms": percentile(&mut samples, 0.5), "p99_ms": percentile(&mut samples, 0.99), "max_ms": percentile(&mut samples, 1.0),
    }))
}

fn reporter(sender: mpsc::UnboundedSender<(i64, Tick)>) -> impl postrider::Courier {
    courier(move |message| {
        let _ = sender.send((message.id, Tick::now()));
        std::future::ready(Outcome::sent())
    })
}

fn start_worker(url: &str, sender: mpsc::UnboundedSender<(i64, Tick)>) -> Result<tokio::process::Child> {
    let program = std::env::current_exe().map_err(fail)?;
    let mut child = tokio::process::Command::new(program)
        .args(["--database", url, "bench", "latency", "--latency-worker"])
        .stdout(Stdio::piped())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(fail)?;
    let mut lines = BufReader::new(child.stdout.take().ok_or_else(|| fail("no pipe"))?).lines();
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            let mut words = line.split(' ').filter_map(|w| w.parse::<u64>().ok());
            if let (Some(id), Some(at)) = (words.next(), words.next()) {
                let _ = sender.send((id as i64, Tick::from_micros(at)));
            }
        }
    });
    Ok(child)
}

/// The worker process: one line per delivery with its moment; the boot-time clock is the same for all processes.
pub async fn serve(url: &str) -> Result<Value> {
    let outbox = scratch::outbox(url).await?;
    let printer = courier(|message| async move {
        println!("{} {}", message.id, Tick::now().micros());
        Outcome::sent()
    });
    Worker::new(outbox).lane(LANE, printer).run(std::future::pending()).await?;
    Ok(Value::Null)
}
