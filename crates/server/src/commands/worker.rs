//! `postrider worker`: serves lanes until a signal, or once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use postrider::Outbox;
use postrider::observe::Observer;
use postrider::worker::Report;
use postrider::worker::core::Tally;
use postrider_memories::Memories;
use postrider_orders::Orders;
use postrider_webhooks::{LANE, Webhooks};
use serde_json::json;

use super::serve::check_access;
use crate::alerts;
use crate::cli::Worker;
use crate::config::{ALERTS, Broker, Config, Lane};
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::http::Scrape;
use crate::metrics::Meters;
use crate::output::Output;
use crate::parts::Parts;
use crate::roll::Roll;
use crate::secret;
use crate::signals::stop_signal;
use crate::table::Table;
use crate::traces::Traces;

/// How often orders past their time are looked for.
const REAP_EVERY: Duration = Duration::from_secs(60);
/// How often new commits are looked for.
const CONSUME_EVERY: Duration = Duration::from_secs(5);

pub async fn run(config: &mut Config, args: Worker, output: Output) -> Result<Ending> {
    let shutdown = stop_signal()?;
    let names: Vec<String> = chosen(config, &args)?.iter().map(|(name, _)| (*name).to_owned()).collect();
    // Before the store is opened: how long its sessions may be silent goes by the shortest lease.
    for (name, lane) in config.lanes.iter_mut().filter(|(name, _)| names.contains(name)) {
        if !args.shards.is_empty() {
            lane.settings.shards = shards(name, lane, &args.shards)?;
        }
        let settings = &mut lane.settings;
        settings.concurrency = args.concurrency.map_or(settings.concurrency, |n| n as usize);
        settings.batch = args.batch.map_or(settings.batch, |n| n as usize);
        settings.lease = args.lease_seconds.map_or(settings.lease, |n| Duration::from_secs(n.into()));
    }
    let lanes = chosen(config, &args)?;
    let outbox = database::open_ready(config).await?;
    database::register_lanes(&outbox).await?;
    database::warn(config);
    let traces = Traces::configured(config)?;
    let parts = Parts::open(config, &outbox).await?;
    let webhooks = &parts.webhooks;
    let mut worker = build(config, &outbox, &parts, &lanes, output, traces.as_ref()).await?;
    let orchestrates = lanes.iter().any(|(name, _)| *name == LANE);
    let reaps = lanes.iter().any(|(name, _)| *name == postrider_orders::LANE);
    if let Some(name) = &args.worker_id {
        worker = worker.name(name);
    }
    if args.once {
        worker = worker.once();
    }
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let served: Vec<&str> = lanes.iter().map(|(name, _)| *name).collect();
    let calls = config.enabled && !args.once;
    let (roll, calling) = calls.then(|| Roll::start(&outbox, worker.owner(), &served, stopped.clone())).unzip();
    let meters = Arc::new(Meters::new());
    let scraping = match args.metrics {
        Some(address) => Some(scrape(config, &outbox, &parts, &meters, address, stopped.clone()).await?),
        None => None,
    };
    let mut observers: Vec<Arc<dyn Observer>> = vec![meters];
    observers.extend(roll.map(|roll| roll as Arc<dyn Observer>));
    observers.extend(traces.clone().map(|traces| traces as Arc<dyn Observer>));
    worker = worker.observer(Arc::new(observers));
    announce(config, &args, &lanes);
    let report: Report = if config.enabled {
        let watch = if args.once { None } else { alerts::watch(config, &outbox) };
        if args.once && orchestrates {
            while webhooks.pass().await? > 0 {}
        }
        let orchestrator = (orchestrates && !args.once).then(|| orchestrate(webhooks, stopped.clone()));
        let tends = lanes.iter().any(|(name, _)| *name == postrider_memories::LANE) && !args.once;
        let tending = parts.memories.as_ref().filter(|_| tends).map(|memories| tend(memories, false, stopped));
        let reaper = (reaps && !args.once).then(|| reap(&parts.orders));
        let consumer = if tends { consume(config, &outbox, &parts) } else { None };
        let report = worker.run(shutdown).await;
        let _ = stop.send(true);
        for task in [orchestrator, tending, calling, scraping].into_iter().flatten() {
            let _ = task.await;
        }
        for task in [reaper, consumer].into_iter().flatten() {
            task.abort();
        }
        if orchestrates {
            // What was delivered last is applied too.
            while webhooks.pass().await? > 0 {}
        }
        if let Some(watch) = watch {
            watch.abort();
        }
        report?
    } else {
        tracing::warn!("the outbox is switched off (OUTBOX_ENABLED or [outbox] enabled): nothing is claimed");
        if !args.once {
            shutdown.await;
        }
        lanes.iter().map(|(name, _)| ((*name).to_owned(), Tally::default())).collect()
    };
    if let Some(traces) = traces {
        traces.end().await;
    }
    finish(&report, &args, output)
}

/// Shows the process's numbers to Prometheus.
async fn scrape(
    config: &Config,
    outbox: &Outbox,
    parts: &Parts,
    meters: &Arc<Meters>,
    address: SocketAddr,
    stopped: tokio::sync::watch::Receiver<bool>,
) -> Result<tokio::task::JoinHandle<()>> {
    let tokens_required = check_access(config, address, outbox).await?;
    let (outbox, memories, meters) = (outbox.clone(), parts.memories.clone(), meters.clone());
    let scrape = Scrape { outbox, memories, meters, tokens_required };
    let (address, task) = scrape.start(address, stopped).await.map_err(|e| {
        Failure::usage(format!("cannot listen on {address}: {e}; choose another address with --metrics"))
    })?;
    tracing::info!("metrics on http://{address}/metrics");
    Ok(task)
}

/// A worker for these lanes, as they are configured.
pub async fn build(
    config: &Config,
    outbox: &Outbox,
    parts: &Parts,
    lanes: &[(&str, &Lane)],
    output: Output,
    traces: Option<&Arc<Traces>>,
) -> Result<postrider::Worker> {
    if lanes.iter().any(|(name, _)| *name == postrider_orders::LANE)
        && matches!(config.orders.broker, Broker::Paper { chosen: false, .. })
    {
        tracing::warn!(
            "orders go to the paper broker, which executes nothing real; say which broker in [orders] adapter"
        );
    }
    let mut worker = postrider::Worker::new(outbox.clone()).drain(config.drain);
    for (name, lane) in lanes {
        let mut courier = lane.destination.courier(outbox, Some(parts), output).await?;
        if *name == ALERTS {
            courier = alerts::in_order(config, outbox, courier);
        }
        let courier = traces.map_or(courier.clone(), |traces| traces.around(courier));
        worker = worker.lane_with(lane.settings.clone(), courier);
    }
    Ok(worker)
}

/// Moves sagas until told to stop.
pub fn orchestrate(
    webhooks: &Webhooks,
    mut stopped: tokio::sync::watch::Receiver<bool>,
) -> tokio::task::JoinHandle<()> {
    let webhooks = webhooks.clone();
    tokio::spawn(async move { webhooks.orchestrate(async move { drop(stopped.wait_for(|stop| *stop).await) }).await })
}

/// Looks after the memory service until told to stop; `flush`: and begins by waking what is queued.
pub fn tend(
    memories: &Memories,
    flush: bool,
    mut stopped: tokio::sync::watch::Receiver<bool>,
) -> tokio::task::JoinHandle<()> {
    let memories = memories.clone();
    tokio::spawn(async move {
        if flush && let Err(error) = memories.wake().await {
            tracing::warn!(%error, "queued memories could not be woken; they come by themselves");
        }
        let tended = memories.tend(async move { drop(stopped.wait_for(|stop| *stop).await) });
        tokio::select! {
            () = tended => {}
            () = secret::follow(|| memories.renew_key()) => {}
        }
    })
}

/// Makes memories of new commits now and then, where that is configured, until aborted.
pub fn consume(config: &Config, outbox: &Outbox, parts: &Parts) -> Option<tokio::task::JoinHandle<()>> {
    let memories = parts.memories.clone().filter(|_| config.memory.as_ref().is_some_and(|m| m.consume_scm))?;
    let scm = postrider_memories::scm::Scm::new(outbox.clone());
    Some(tokio::spawn(async move {
        loop {
            if let Err(error) = scm.consume(&memories, None, None).await {
                tracing::warn!(%error, "commits could not be made memories of; it will be tried again");
            }
            tokio::time::sleep(CONSUME_EVERY.mul_f64(0.75 + postrider::clock::chance() / 2.0)).await;
        }
    }))
}

/// Takes orders away that are past their time, until aborted; a transaction under way ends by itself.
pub fn reap(orders: &Orders) -> tokio::task::JoinHandle<()> {
    let (orders, followed) = (orders.clone(), orders.clone());
    let followed = secret::follow(move || {
        let orders = followed.clone();
        async move {
            orders.renew_credentials().await;
        }
    });
    let reaped = async move {
        loop {
            tokio::time::sleep(REAP_EVERY.mul_f64(0.75 + postrider::clock::chance() / 2.0)).await;
            if let Err(error) = orders.reap().await {
                tracing::warn!(%error, "orders past their time could not be taken away; it will be tried again");
            }
        }
    };
    tokio::spawn(async move { tokio::join!(followed, reaped).0 })
}

fn chosen<'a>(config: &'a Config, args: &Worker) -> Result<Vec<(&'a str, &'a Lane)>> {
    if args.lanes.is_empty() {
        return Ok(config.lanes.iter().map(|(name, lane)| (name.as_str(), lane)).collect());
    }
    let mut lanes: Vec<(&str, &Lane)> = Vec::new();
    for wanted in &args.lanes {
        let lane = config.lane(wanted)?;
        if !lanes.iter().any(|(name, _)| name == wanted) {
            lanes.push((lane.settings.lane.as_str(), lane));
        }
    }
    Ok(lanes)
}

fn shards(name: &str, lane: &Lane, wanted: &[u32]) -> Result<Vec<u32>> {
    if let Some(wrong) = wanted.iter().find(|n| **n >= lane.rules.shards) {
        let last = lane.rules.shards - 1;
        return Err(Failure::usage(format!(
            "lane `{name}` has no shard {wrong}, only 0 to {last}; name other lanes with --lane, or set shards in [lane.{name}]"
        )));
    }
    let mut shards = wanted.to_vec();
    shards.sort_unstable();
    shards.dedup();
    Ok(shards)
}

fn announce(config: &Config, args: &Worker, lanes: &[(&str, &Lane)]) {
    let names: Vec<String> = lanes.iter().map(|(name, lane)| format!("{name} ({})", lane.destination.name())).collect();
    // The holder's name as others see it, but for the random part each run adds.
    let holder = postrider::clock::incarnation(args.worker_id.as_deref());
    let worker_id = holder.rsplit_once(':').map_or(holder.as_str(), |(name, _)| name);
    tracing::info!(lanes = names.join(", "), database = database::shown(config), worker_id, "worker started");
}

fn finish(report: &Report, args: &Worker, output: Output) -> Result<Ending> {
    for (lane, tally) in report.iter().filter(|_| !args.once) {
        tracing::info!(lane, sent = tally.sent, retried = tally.retried, dead = tally.dead, "worker stopped");
    }
    if args.once || output.json {
        let lanes: serde_json::Map<String, serde_json::Value> =
            report.iter().map(|(lane, tally)| (lane.clone(), as_json(tally))).collect();
        output.show(&json!({ "lanes": lanes }), || as_table(report))?;
    }
    Ok(Ending::failed_if(args.once && report.iter().any(|(_, tally)| tally.retried + tally.dead > 0)))
}

fn as_json(tally: &Tally) -> serde_json::Value {
    json!({
        "claimed": tally.claimed, "sent": tally.sent, "dedup_hits": tally.dedup_hits, "retried": tally.retried,
        "dead": tally.dead, "deferred": tally.deferred, "takeovers": tally.takeovers, "conflicts": tally.conflicts,
        "unknown": tally.unknown,
    })
}

fn as_table(report: &Report) -> String {
    let mut table = Table::new(["lane", "sent", "retry", "dead", "deferred", "taken over"]);
    for (lane, t) in report {
        let numbers = [t.sent, t.retried, t.dead, t.deferred, t.takeovers].map(|n| n.to_string());
        let [sent, retried, dead, deferred, takeovers] = numbers;
        table.row([lane.clone(), sent, retried, dead, deferred, takeovers]);
    }
    table.render()
}
