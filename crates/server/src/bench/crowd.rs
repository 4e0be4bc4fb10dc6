//! Webhooks in a crowd: one subscription paused with much waiting, one limited to ten a second, one that never answers,
//! and a healthy one beside them. The healthy one's latency against its own without the crowd, the rows the crowd makes
//! the database write, the limited one's rate, and how fast the paused one drains when it goes on.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use postrider::clock::Tick;
use postrider::tx::Dialect;
use postrider_webhooks::NewSubscription;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::scratch::{Scratch, fail, mysql, postgres};
use super::webhooks::{PACE_PER_SECOND, Running, paced, publish, receiver, seen, until};
use super::{Bench, percentile, rate};
use crate::failure::{Failure, Result};

const PER_SECOND: f64 = 10.0;
/// How long the crowd is watched.
const WATCHED: usize = 30;

pub async fn run(bench: &Bench, scratch: &Scratch, paused: usize) -> Result<Value> {
    let others = (paused / 4).max(2 * WATCHED * PER_SECOND as usize);
    let bytes = bench.payload_bytes;
    let running = Running::start(scratch).await?;
    let webhooks = &running.webhooks;
    let mut receivers = Vec::new();
    for name in ["healthy", "paused", "limited"] {
        let (url, arrivals) = receiver().await?;
        let limit = Some(PER_SECOND).filter(|_| name == "limited");
        let event_types = vec![format!("bench.{name}")];
        let new = NewSubscription { url, event_types, rate_per_sec: limit, ..NewSubscription::default() };
        receivers.push((webhooks.subscribe(new).await?.0.id, arrivals));
    }
    let [(_, healthy), (paused_id, held), (_, limited)] = &receivers[..] else { return Err(fail("three receivers")) };
    let (_open, dark) = black_hole().await?;
    let event_types = vec!["bench.dark".to_owned()];
    let new = NewSubscription { url: dark, event_types, timeout_ms: Some(5000), ..NewSubscription::default() };
    webhooks.subscribe(new).await?;

    // Alone.
    let numbers = PACE_PER_SECOND * WATCHED;
    let written = Written::now(scratch).await?;
    let mut alone = paced(webhooks, healthy, "bench.healthy", 0..numbers, bytes).await?;
    let alone_written = Written::now(scratch).await?.since(written);

    // The crowd gathers.
    webhooks.pause(*paused_id).await?;
    for (name, events) in [("paused", paused), ("limited", others), ("dark", others)] {
        publish(webhooks, &format!("bench.{name}"), 0..events, bytes).await?;
    }
    let beyond = seen(limited).len();
    until(Duration::from_secs(60), "the limited one has begun", || seen(limited).len() > beyond).await?;

    // Beside it.
    let (begun, before) = (Tick::now(), seen(limited).len());
    let written = Written::now(scratch).await?;
    let mut beside = paced(webhooks, healthy, "bench.healthy", numbers..2 * numbers, bytes).await?;
    let beside_written = Written::now(scratch).await?.since(written);
    let limited_rate = (seen(limited).len() - before) as f64 / Tick::now().since(begun).as_secs_f64();
    if !seen(held).is_empty() {
        return Err(Failure::failed("a paused subscription was sent to"));
    }

    // And on.
    let begun = Tick::now();
    webhooks.resume(*paused_id).await?;
    until(Duration::from_secs(600), "the paused one has everything", || seen(held).len() >= paused).await?;
    let drained = Tick::now().since(begun);
    running.stop().await?;

    let (p99_alone, p99) = (percentile(&mut alone, 0.99), percentile(&mut beside, 0.99));
    Ok(json!({
        "bench": "webhooks", "crowd": true, "payload_bytes": bytes,
        "messages": paused, "limited": others, "dark": others,
        "p50_ms": percentile(&mut beside, 0.5), "p99_ms": p99,
        "alone_p50_ms": percentile(&mut alone, 0.5), "alone_p99_ms": p99_alone,
        "updates_per_second": beside_written.map(|rows| rows / WATCHED as f64),
        "alone_updates_per_second": alone_written.map(|rows| rows / WATCHED as f64),
        "limited_per_second": limited_rate, "limit_per_second": PER_SECOND, "ratio": limited_rate / PER_SECOND,
        "per_second": rate(paused, drained),
    }))
}

/// Takes connections and never answers.
async fn black_hole() -> Result<(tokio::task::JoinHandle<()>, String)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.map_err(fail)?;
    let url = format!("http://{}/", listener.local_addr().map_err(fail)?);
    let open = tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            held.push(stream);
        }
    });
    Ok((open, url))
}

/// Rows updated so far, by the server's own count; SQLite keeps none.
#[derive(Clone, Copy)]
struct Written(Option<f64>);

impl Written {
    async fn now(scratch: &Scratch) -> Result<Written> {
        let rows = match scratch.dialect() {
            Dialect::Sqlite => None,
            Dialect::Postgres => {
                // Counts reach the view when a session has been idle for a moment.
                tokio::time::sleep(Duration::from_millis(1500)).await;
                let client = postgres(scratch.url()).await?;
                let sql = "SELECT COALESCE(sum(n_tup_upd), 0)::float8 FROM pg_stat_user_tables WHERE schemaname = current_schema()";
                Some(client.query_one(sql, &[]).await.map_err(fail)?.get(0))
            }
            Dialect::Mysql => {
                let mut conn = mysql(scratch.url()).await?;
                let sql = "SHOW GLOBAL STATUS LIKE 'Handler_update'";
                conn.query_first::<(String, f64), _>(sql).await.map_err(fail)?.map(|row| row.1)
            }
        };
        Ok(Written(rows))
    }

    fn since(self, before: Written) -> Option<f64> {
        self.0.zip(before.0).map(|(after, before)| after - before)
    }
}
