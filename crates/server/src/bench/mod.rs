//! `postrider bench`: how fast this is here, as a ratio to the barest SQL of the same scheme on the same database in the
//! same run. Everything happens in a scratch database of its own (a file, a schema, a database) that is removed again.

mod backlog;
mod bare;
mod crowd;
mod drain;
mod enqueue;
mod http;
mod latency;
mod readers;
mod scratch;
mod watched;
mod webhooks;

use std::time::Duration;

use clap::{Args, ValueEnum};
use postrider::clock::Tick;
use serde_json::{Value, json};

use crate::failure::{Failure, Result};
use crate::signals::end_signal;
use scratch::Scratch;

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Which {
    /// The barest SQL: batch claim, batch settle with the move, nothing else
    Limit,
    /// Batched enqueue, against a bare multi-row insert
    Enqueue,
    /// A worker with a courier that does nothing, against the limit
    Drain,
    /// From a committed enqueue to the start of its delivery, with nothing else to do
    Latency,
    /// Claims and drains with much waiting, leased, in backoff, or in history
    Backlog,
    /// Single messages posted to the API, against the library in this process; and deliveries by HTTP
    Http,
    /// Events published to a subscription in this process, everything recorded; and the latency of single ones
    Webhooks,
}

/// Measure this machine and database.
#[derive(Debug, Args)]
pub struct Bench {
    #[arg(value_enum)]
    pub which: Which,

    /// How many messages [default: as fits the measurement]
    #[arg(long, value_name = "N", value_parser = count)]
    pub messages: Option<usize>,

    #[arg(long, value_name = "N", default_value_t = 256)]
    pub payload_bytes: usize,

    /// Messages per claim and per settle
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = count)]
    pub batch: usize,

    /// Sent messages in history; measures with and without them (drain only)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub history: usize,

    /// Rows settled just before by the same worker and not yet vacuumed; measures with and without them (drain only)
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub storm: usize,

    /// Somebody looks at the dashboard meanwhile; measures with and without (drain only)
    #[arg(long)]
    pub watched: bool,

    /// Workers that share the drain, each with its own connections (drain only)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub workers: usize,

    /// Shards of the lane, dealt out to the workers (drain only)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub shards: u32,

    /// Keep no sent messages: settle deletes instead of moving (drain only)
    #[arg(long)]
    pub delete: bool,

    /// Keep payloads in a table of their own: measures the bare SQL both ways (limit only)
    #[arg(long)]
    pub payload_beside: bool,

    /// Fill factor of the live table (drain on PostgreSQL only)
    #[arg(long, value_name = "PERCENT")]
    pub fillfactor: Option<u8>,

    /// A healthy subscription beside one paused with N events, and one limited and one black hole with N/4 (webhooks only)
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "200000", value_parser = count)]
    pub crowd: Option<usize>,

    /// N readers page without pause through a lane of --messages messages meanwhile; measures with and without (webhooks only)
    #[arg(long, value_name = "N", conflicts_with = "crowd", value_parser = count)]
    pub readers: Option<usize>,

    /// The worker process of `bench latency` on a server
    #[arg(long, hide = true)]
    pub latency_worker: bool,
}

/// Runs a measurement and answers with its figures.
pub async fn run(bench: &Bench, database: &str) -> Result<Value> {
    if bench.latency_worker {
        return latency::serve(database).await;
    }
    let scratch = Scratch::create(database).await?;
    let measured = async {
        match bench.which {
            Which::Limit => drain::limit_only(bench, &scratch).await,
            Which::Enqueue => enqueue::run(bench, &scratch).await,
            Which::Drain if bench.watched => watched::run(bench, &scratch).await,
            Which::Drain => drain::run(bench, &scratch).await,
            Which::Latency => latency::run(bench, &scratch).await,
            Which::Backlog => backlog::run(bench, &scratch).await,
            Which::Http => http::run(bench, &scratch).await,
            Which::Webhooks => match (bench.crowd, bench.readers) {
                (Some(paused), _) => crowd::run(bench, &scratch, paused).await,
                (_, Some(readers)) => readers::run(bench, &scratch, readers).await,
                _ => webhooks::run(bench, &scratch).await,
            },
        }
    };
    // Interrupted or not, nothing of it stays behind.
    let figures = tokio::select! {
        figures = measured => figures,
        () = end_signal()? => Err(Failure::failed("interrupted; the scratch database is removed")),
    };
    scratch.remove().await?;
    let mut figures = figures?;
    figures["database"] = json!(scratch.dialect().name());
    // Every benchmark has the same fields; what one does not measure is null.
    for field in ["per_second", "limit_per_second", "ratio", "p50_ms", "p99_ms"] {
        if figures.get(field).is_none() {
            figures[field] = Value::Null;
        }
    }
    Ok(figures)
}

fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| format!("`{text}` is no whole number from 1 on"))
}

/// The figures for people: one per line.
pub fn show(figures: &Value) -> String {
    let mut lines = String::new();
    for (name, value) in figures.as_object().into_iter().flatten() {
        let text = match value {
            Value::Number(n) if n.is_f64() => format!("{:.3}", n.as_f64().unwrap_or_default()),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        lines.push_str(&format!("{:<28} {text}\n", name.replace('_', " ")));
    }
    lines
}

/// Runs something and answers how long it took.
async fn timed<T>(work: impl Future<Output = Result<T>>) -> Result<(T, Duration)> {
    let start = Tick::now();
    let answer = work.await?;
    Ok((answer, Tick::now().since(start)))
}

fn rate(messages: usize, took: Duration) -> f64 {
    messages as f64 / took.as_secs_f64().max(1e-9)
}

/// How often what is compared is measured, in turns.
const ROUNDS: usize = 5;

fn median(rates: &mut [f64]) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or_default()
}

/// The value below which this part of the samples lies.
fn percentile(samples: &mut [Duration], part: f64) -> f64 {
    samples.sort_unstable();
    let index = ((samples.len() as f64 * part).ceil() as usize).clamp(1, samples.len().max(1)) - 1;
    samples.get(index).map_or(0.0, |d| d.as_secs_f64() * 1000.0)
}
