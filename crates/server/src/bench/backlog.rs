//! What a deep table costs: claims among many leased and many in backoff, drains with much waiting.

use std::time::Duration;

use postrider::clock::Tick;
use postrider::lease::Lease;
use postrider::outcome::LeaseState;
use postrider::store::{Claim, From, Mark, Store};
use postrider::tx::Dialect;
use serde_json::{Value, json};

use super::drain::drain_with_worker;
use super::scratch::{LANE, Scratch, fill};
use super::{Bench, median, percentile, rate, timed};
use crate::failure::{Failure, Result};

/// Holds the rows others hold.
const HOLDER: &str = "other:1:x";
const LEASED: usize = 50_000;
const BACKOFF: usize = 1_000_000;

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let waiting = bench.messages.unwrap_or(1_000_000);
    // Rates with a little and with much waiting.
    let outbox = scratch.outbox().await?;
    fill(&outbox, 10_000, bench.payload_bytes).await?;
    drain_with_worker(outbox.clone(), 10_000, bench.batch).await?;
    let mut few = Vec::new();
    for _ in 0..5 {
        fill(&outbox, 10_000, bench.payload_bytes).await?;
        let ((), took) = timed(drain_with_worker(outbox.clone(), 10_000, bench.batch)).await?;
        few.push(rate(10_000, took));
    }
    let few = median(&mut few);
    fill(&outbox, waiting, bench.payload_bytes).await?;
    scratch.analyze(&["outbox"]).await?;
    let (memory_before, ((), took)) =
        (resident_kib(), timed(drain_with_worker(outbox.clone(), waiting, bench.batch)).await?);
    let (many, memory) = (rate(waiting, took), resident_kib());

    // Claims of 100 with nothing in the way, then behind rows that others hold and rows in backoff.
    let empty = claim_cost(&outbox, scratch).await?;
    add_rows(scratch, BACKOFF, "backoff").await?;
    add_rows(scratch, LEASED, "leased").await?;
    scratch.analyze(&["outbox"]).await?;
    let deep = claim_cost(&outbox, scratch).await?;
    let (alone, beside) = renewal_cost(scratch).await?;
    Ok(json!({
        "bench": "backlog", "messages": waiting,
        "per_second_10k_waiting": few, "per_second_all_waiting": many, "flat_ratio": many / few,
        "per_second": many, "worker_rss_kib": memory, "worker_rss_before_kib": memory_before,
        "claim_100_empty_ms": empty.0, "claim_100_deep_ms": deep.0, "claim_cost_ratio": deep.0 / empty.0,
        "renew_500_alone_p99_ms": alone, "renew_500_beside_claims_p99_ms": beside,
        "first_claim_deep_ms": deep.1, "leased": LEASED, "backoff": BACKOFF,
    }))
}

/// Median of claims of 100 fresh rows each, as a fetcher makes them: with its mark. Also the very first, from the head.
async fn claim_cost(outbox: &postrider::Outbox, scratch: &Scratch) -> Result<(f64, f64)> {
    let store: &dyn Store = &**outbox.store();
    let rounds = 40;
    let mut mark: Option<Mark> = None;
    let mut samples = Vec::new();
    let mut first = 0.0;
    fill(outbox, rounds * 100, 256).await?;
    for round in 0..rounds {
        let claim = Claim {
            lane: LANE.to_owned(),
            shard: 0,
            limit: 100,
            lease: Duration::from_secs(600),
            owner: "bench:1:claims".to_owned(),
            max_crashes: 5,
            send_begun: false,
            from: From::Mark(mark),
        };
        let start = Tick::now();
        let claimed = store.claim(&claim).await?;
        let took = Tick::now().since(start);
        if claimed.messages.len() != 100 {
            return Err(Failure::failed(format!("a claim of 100 got {}", claimed.messages.len())));
        }
        mark = claimed.messages.last().map(|m| Mark { due_at: m.due_at, id: m.id + 1 });
        if round == 0 {
            first = took.as_secs_f64() * 1000.0;
        } else {
            samples.push(took);
        }
    }
    scratch.sql(&["DELETE FROM outbox WHERE locked_by = 'bench:1:claims'"]).await?;
    Ok((percentile(&mut samples, 0.5), first))
}

/// The 99th percentile of renewals of 500 leases, alone and while another worker claims from the same lane without pause.
async fn renewal_cost(scratch: &Scratch) -> Result<(f64, f64)> {
    let outbox = scratch.outbox().await?;
    let rows = outbox.store().walk(LANE, 0, None, 500).await?.seen;
    let leases: Vec<Lease> = rows.iter().map(|seen| Lease { id: seen.mark.id, token: seen.hold.token }).collect();
    let renewals = async || -> Result<f64> {
        let mut samples = Vec::new();
        for _ in 0..100 {
            let start = Tick::now();
            let kept = outbox.store().renew(HOLDER, &leases, Duration::from_secs(3600)).await?;
            samples.push(Tick::now().since(start));
            if !kept.iter().all(|kept| *kept == LeaseState::Held) {
                return Err(Failure::failed("a lease was lost that nobody took"));
            }
        }
        Ok(percentile(&mut samples, 0.99))
    };
    let alone = renewals().await?;
    let claimer = scratch.outbox().await?;
    fill(&claimer, 20_000, 256).await?;
    let claims = tokio::spawn(async move {
        let claim = Claim {
            lane: LANE.to_owned(),
            shard: 0,
            limit: 100,
            lease: Duration::from_secs(600),
            owner: "bench:1:claims".to_owned(),
            max_crashes: 5,
            send_begun: false,
            from: From::Mark(None),
        };
        // From the head every time: past all that is held.
        while claimer.store().claim(&claim).await.is_ok_and(|claimed| !claimed.messages.is_empty()) {}
    });
    let beside = renewals().await?;
    claims.abort();
    Ok((alone, beside))
}

/// Rows others hold, due before everything else; or rows that wait for a retry.
async fn add_rows(scratch: &Scratch, rows: usize, kind: &str) -> Result<()> {
    let leased = kind == "leased";
    let sql = match scratch.dialect() {
        Dialect::Postgres => {
            let (due, lock) = if leased {
                ("- INTERVAL '1 hour'", "'other:1:x', now() + INTERVAL '1 hour'")
            } else {
                ("+ INTERVAL '1 hour'", "NULL, NULL")
            };
            format!(
                "INSERT INTO outbox (lane, due_at, locked_by, lease_until, payload) SELECT '{LANE}', now() {due}, {lock}, 'x' FROM generate_series(1, {rows})"
            )
        }
        Dialect::Mysql => {
            let (due, lock) = if leased {
                ("- INTERVAL 1 HOUR", "'other:1:x', UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
            } else {
                ("+ INTERVAL 1 HOUR", "NULL, NULL")
            };
            format!(
                "INSERT INTO outbox (lane, due_at, locked_by, lease_until, payload, created_at, updated_at)
                 WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000), m (i) AS (SELECT i FROM n WHERE i <= {})
                 SELECT '{LANE}', UTC_TIMESTAMP(6) {due}, {lock}, 'x', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) FROM n JOIN m",
                rows / 1000
            )
        }
        Dialect::Sqlite => {
            let now = postrider::clock::wall().micros();
            let (due, lock) = if leased {
                (now - 3_600_000_000, format!("'other:1:x', {}", now + 3_600_000_000))
            } else {
                (now + 3_600_000_000, "NULL, NULL".to_owned())
            };
            format!(
                "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
                 INSERT INTO outbox (lane, due_at, locked_by, lease_until, payload) SELECT '{LANE}', {due}, {lock}, X'78' FROM n"
            )
        }
    };
    scratch.sql(&[&sql]).await
}

/// Multiplies what is in `outbox_done` until there are this many rows.
pub async fn add_history(scratch: &Scratch, rows: usize) -> Result<()> {
    let columns = "lane, shard_id, due_at, attempts, crashes, maybe_sent, lease_token, payload, payload_sha, created_at, updated_at, status, finished_at";
    let series = match scratch.dialect() {
        Dialect::Postgres => format!("generate_series(1, {}) AS g(i)", rows / 1000),
        _ => format!(
            "(WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) SELECT i FROM n) g",
            rows / 1000
        ),
    };
    let depth = if scratch.dialect() == Dialect::Mysql {
        "SET SESSION max_recursive_iterations = 10000000"
    } else {
        "SELECT 1"
    };
    // Ids below zero: they never meet real ones.
    let sql = format!(
        "INSERT INTO outbox_done (id, {columns}) SELECT -(g.i * 1000 + d.n), {columns}
         FROM {series} JOIN (SELECT ROW_NUMBER() OVER (ORDER BY id) AS n, {columns} FROM outbox_done WHERE id > 0 ORDER BY id LIMIT 1000) d ON 1 = 1"
    );
    scratch.sql(&[depth, &sql]).await?;
    scratch.analyze(&["outbox_done"]).await
}

/// Resident memory of this process.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}
