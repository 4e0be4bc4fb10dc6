//! Prometheus metrics: what workers and the API count as they go, and gauges that are read when somebody looks.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::Outbox;
use postrider::clock::Tick;
use postrider::observe::{Observer, Phase, Standing, Told};
use postrider::outcome::FlushCode;
use postrider::store::Vitals;
use postrider_memories::Memories;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry};

use crate::logs;

/// Looking is not free: looks within this time share one answer.
const FRESH: Duration = Duration::from_secs(5);
/// Live messages are counted for about so long at a time; a deep backlog takes several looks.
const COUNTING: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Lane {
    lane: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Outcome {
    lane: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Attempt {
    lane: String,
    attempt: u32,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Timed {
    lane: String,
    phase: &'static str,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelValue)]
enum State {
    Pending,
    Leased,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Depth {
    lane: String,
    status: State,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Entry {
    status: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Stored {
    action: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Capability {
    capability: &'static str,
}

const OPENMEMORY: Capability = Capability { capability: "openmemory" };

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Connection {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Table {
    table: String,
}

type Seconds = Gauge<f64, std::sync::atomic::AtomicU64>;

/// All the numbers of one process.
pub struct Meters {
    registry: Registry,
    claimed: Family<Lane, Counter>,
    processed: Family<Outcome, Counter>,
    retries: Family<Attempt, Counter>,
    expired: Family<Lane, Counter>,
    latency: Family<Timed, Histogram, fn() -> Histogram>,
    held: Family<Lane, Gauge>,
    in_flight: Family<Lane, Gauge>,
    walk_bound: Family<Lane, Seconds>,
    depth: Family<Depth, Gauge>,
    oldest: Family<Lane, Seconds>,
    paused: Family<Lane, Gauge>,
    conflicts: Family<Lane, Counter>,
    ledger_writes: Family<Entry, Counter>,
    memory_stores: Family<Stored, Counter>,
    capability_up: Family<Capability, Gauge>,
    connections: Family<Connection, Gauge>,
    dead_tuples: Family<Table, Gauge>,
    xmin_age: Gauge,
    wal_bytes: Gauge,
    log_lines_dropped: Counter,
    doctor_findings: Gauge,
    looked_at: Mutex<Option<Tick>>,
    counting: tokio::sync::Mutex<postrider::Counting>,
}

impl Meters {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        fn kept<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
            let metric = M::default();
            registry.register(name, help, metric.clone());
            metric
        }
        let milliseconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.25, 2.0, 18));
        let latency = Family::<Timed, Histogram, fn() -> Histogram>::new_with_constructor(milliseconds);
        registry.register("outbox_latency_ms", "How long claims, deliveries and settles take", latency.clone());
        let r = &mut registry;
        Meters {
            claimed: kept(r, "outbox_claimed", "Messages claimed"),
            processed: kept(
                r,
                "outbox_processed",
                "Outcomes by what they were; db_timeout and db_error: not recorded at the first try",
            ),
            retries: kept(r, "outbox_retry", "Outcomes that wait for another attempt, by attempt"),
            expired: kept(r, "outbox_lock_lease_expired", "Messages taken over from a worker that never came back"),
            held: kept(r, "outbox_held", "Messages this process holds"),
            in_flight: kept(r, "outbox_in_flight", "Deliveries under way in this process"),
            walk_bound: kept(
                r,
                "outbox_walk_bound_seconds",
                "Within this time late commits and expired leases are found",
            ),
            depth: kept(r, "outbox_depth", "Live messages"),
            oldest: kept(r, "outbox_oldest_due_seconds", "Age of the oldest message that is due and not held"),
            paused: kept(r, "outbox_paused", "1 where the lane is paused"),
            conflicts: kept(r, "idempotency_conflicts", "Keys that came again with another content"),
            ledger_writes: kept(
                r,
                "idempo_ledger_writes",
                "Entries of the order ledger written, by where they then stood",
            ),
            memory_stores: kept(r, "memory_stores", "Memories handed in, by what became of them"),
            capability_up: kept(r, "memory_capability_up", "1 while it can be used, as this process knows it"),
            connections: kept(r, "outbox_pool_connections", "Connections to the database"),
            dead_tuples: kept(r, "outbox_postgres_dead_tuples", "Dead rows that vacuum has not taken away yet"),
            xmin_age: kept(
                r,
                "outbox_postgres_oldest_xmin_age",
                "Age of the oldest snapshot that holds vacuum up, in transactions",
            ),
            wal_bytes: kept(r, "outbox_sqlite_wal_bytes", "Size of the write-ahead log"),
            log_lines_dropped: kept(r, "postrider_log_lines_dropped", "Log lines nobody read in time"),
            doctor_findings: kept(r, "doctor_findings", "What the doctor's last round found and left as it was"),
            latency,
            registry,
            looked_at: Mutex::new(None),
            counting: tokio::sync::Mutex::default(),
        }
    }

    /// The page Prometheus reads.
    pub async fn page(&self, outbox: &Outbox, memories: Option<&Memories>) -> postrider::Result<String> {
        if let Some(memories) = memories {
            self.capability_up.get_or_create(&OPENMEMORY).set(i64::from(memories.capability().status == "ok"));
        }
        if self.stale() {
            self.show(&outbox.vitals().await?);
            let mut counting = self.counting.lock().await;
            outbox.count(&mut counting, COUNTING).await?;
            for (lane, age) in outbox.ages().await? {
                let by = |status| Depth { lane: lane.clone(), status };
                let depth = counting.depths().get(&lane).copied().unwrap_or_default();
                self.depth.get_or_create(&by(State::Pending)).set(depth.pending as i64);
                self.depth.get_or_create(&by(State::Leased)).set(depth.leased as i64);
                self.oldest.get_or_create(&Lane { lane: lane.clone() }).set(age.oldest_due_seconds);
                self.paused.get_or_create(&Lane { lane: lane.clone() }).set(i64::from(age.paused));
            }
        }
        let counted = self.log_lines_dropped.get();
        self.log_lines_dropped.inc_by(logs::dropped().saturating_sub(counted));
        let mut page = String::new();
        encode(&mut page, &self.registry).map_err(|e| postrider::Error::database(e.to_string()))?;
        Ok(page)
    }

    /// The doctor has made a round, and so many cases are left.
    pub fn diagnosed(&self, left: usize) {
        self.doctor_findings.set(left as i64);
    }

    /// A key came again with another content.
    pub fn conflict(&self, name: &str) {
        self.conflicts.get_or_create(&lane(name)).inc();
    }

    /// An entry of the order ledger was written, and stands so.
    pub fn ledger_write(&self, status: &'static str) {
        self.ledger_writes.get_or_create(&Entry { status }).inc();
    }

    /// A memory was handed in.
    pub fn memory_store(&self, action: &'static str) {
        self.memory_stores.get_or_create(&Stored { action }).inc();
    }

    fn show(&self, vitals: &Vitals) {
        if let Some(pool) = vitals.pool {
            for (state, number) in [("most", pool.most), ("in_use", pool.in_use), ("idle", pool.idle)] {
                self.connections.get_or_create(&Connection { state }).set(number as i64);
            }
        }
        for (table, tuples) in &vitals.dead_tuples {
            self.dead_tuples.get_or_create(&Table { table: table.clone() }).set(*tuples);
        }
        self.xmin_age.set(vitals.oldest_xmin_age.unwrap_or(0));
        self.wal_bytes.set(vitals.wal_bytes.unwrap_or(0) as i64);
    }

    fn stale(&self) -> bool {
        let mut looked_at = self.looked_at.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Tick::now();
        let stale = looked_at.is_none_or(|at| now.since(at) >= FRESH);
        if stale {
            *looked_at = Some(now);
        }
        stale
    }
}

/// What somebody may see of a page who does not see all of it: the numbers of their lanes, and of the parts these belong to.
/// What is the whole server's is left out.
pub fn seen(page: &str, sees_lane: impl Fn(&str) -> bool, sees_memories: bool) -> String {
    let is_seen = |line: &str| match line.split_once("lane=\"").and_then(|(_, rest)| rest.split_once('"')) {
        Some((lane, _)) => sees_lane(lane),
        None if line.starts_with("memory_") => sees_memories,
        None => line.starts_with("idempo_ledger_") && sees_lane(postrider_orders::LANE),
    };
    let (mut own, mut about) = (String::new(), String::new());
    for line in page.lines() {
        if line == "# EOF" {
            own.push_str("# EOF\n");
        } else if line.starts_with('#') {
            // Of a family that is not seen not even the name is told.
            if line.starts_with("# HELP") {
                about.clear();
            }
            about.push_str(&format!("{line}\n"));
        } else if is_seen(line) {
            own.push_str(&std::mem::take(&mut about));
            own.push_str(&format!("{line}\n"));
        }
    }
    own
}

fn lane(lane: &str) -> Lane {
    Lane { lane: lane.to_owned() }
}

impl Observer for Meters {
    fn claimed(&self, name: &str, messages: u64, taken_over: u64) {
        self.claimed.get_or_create(&lane(name)).inc_by(messages);
        self.expired.get_or_create(&lane(name)).inc_by(taken_over);
    }

    fn settled(&self, told: &Told<'_>) {
        let lane = told.lane.to_owned();
        self.processed.get_or_create(&Outcome { lane: lane.clone(), outcome: told.outcome.as_str() }).inc();
        if told.lane == postrider_orders::LANE {
            match told.outcome {
                FlushCode::Success => self.ledger_write("succeeded"),
                FlushCode::Dead => self.ledger_write("failed"),
                _ => {}
            }
        }
        if told.outcome == FlushCode::Retry {
            self.retries.get_or_create(&Attempt { lane, attempt: told.attempt }).inc();
        }
    }

    fn unrecorded(&self, lane: &str, trouble: FlushCode, messages: u64) {
        let outcome = Outcome { lane: lane.to_owned(), outcome: trouble.as_str() };
        self.processed.get_or_create(&outcome).inc_by(messages);
    }

    fn took(&self, lane: &str, phase: Phase, time: Duration) {
        let timed = Timed { lane: lane.to_owned(), phase: phase.as_str() };
        self.latency.get_or_create(&timed).observe(time.as_secs_f64() * 1000.0);
    }

    fn standing(&self, name: &str, standing: Standing) {
        self.held.get_or_create(&lane(name)).set(standing.held as i64);
        self.in_flight.get_or_create(&lane(name)).set(standing.in_flight as i64);
        self.walk_bound.get_or_create(&lane(name)).set(standing.walk_bound.as_secs_f64());
    }
}

/// Meters that several workers and the API share.
pub type Shared = Arc<Meters>;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Words that look like a metric of ours.
    fn metrics_in(text: &str) -> BTreeSet<String> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        // Outcome codes look the same, and so do fields of the log.
        let ours = |word: &&str| {
            ["outbox_", "idempo", "memory_"].iter().any(|start| word.starts_with(start))
                && !word.starts_with("outbox_flush_")
                && !["outbox_id", "idempotency_key"].contains(word)
        };
        words.filter(ours).map(str::to_owned).collect()
    }

    #[test]
    fn of_other_lanes_nothing_is_seen() {
        let meters = Meters::new();
        for name in ["a", "aa", "memory", "orders"] {
            meters.claimed(name, 1, 0);
        }
        meters.ledger_write("succeeded");
        meters.memory_store("allow");
        let mut page = String::new();
        encode(&mut page, &meters.registry).unwrap();
        let of_a = seen(&page, |lane| lane == "a", false);
        assert!(of_a.contains("outbox_claimed_total{lane=\"a\"} 1\n"), "{of_a}");
        assert!(of_a.contains("# TYPE outbox_claimed counter\n") && of_a.ends_with("# EOF\n"), "{of_a}");
        for foreign in ["\"aa\"", "memory", "orders", "ledger", "pool", "wal", "log_lines"] {
            assert!(!of_a.contains(foreign), "{foreign}: {of_a}");
        }
        let of_orders = seen(&page, |lane| lane == "orders", false);
        assert!(of_orders.contains("idempo_ledger_writes_total") && !of_orders.contains("memory"), "{of_orders}");
        assert!(seen(&page, |_| true, true).contains("memory_stores_total"));
    }

    #[test]
    fn dashboard_rules_and_documentation_name_metrics_that_exist() {
        let mut page = String::new();
        // A family is told from its first number on.
        let meters = Meters::new();
        meters.claimed("l", 1, 1);
        let outcome = FlushCode::Retry;
        meters.settled(&Told { lane: "l", outbox_id: 1, outcome, attempt: 1, reason_code: None, took: None });
        meters.took("l", Phase::Send, Duration::ZERO);
        meters.standing("l", Standing::default());
        meters.conflict("l");
        meters.ledger_write("succeeded");
        meters.memory_store("allow");
        meters.capability_up.get_or_create(&OPENMEMORY).set(1);
        let (pool, dead_tuples) = (Some(Default::default()), vec![("outbox".to_owned(), 1)]);
        meters.show(&Vitals { pool, dead_tuples, ..Vitals::default() });
        meters.depth.get_or_create(&Depth { lane: "l".to_owned(), status: State::Pending }).set(1);
        meters.oldest.get_or_create(&lane("l")).set(1.0);
        meters.paused.get_or_create(&lane("l")).set(1);
        encode(&mut page, &meters.registry).unwrap();
        let known: Vec<&str> =
            page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        assert!(known.len() > 12, "{page}");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for file in ["deploy/grafana/postrider.json", "deploy/prometheus/postrider.rules.yml", "docs/operating.md"] {
            let text = std::fs::read_to_string(root.join(file)).unwrap();
            let named = metrics_in(&text);
            assert!(named.len() > 5, "{file} names few metrics: {named:?}");
            for name in named {
                let base = ["_total", "_bucket", "_count", "_sum"]
                    .iter()
                    .fold(name.as_str(), |n, end| n.strip_suffix(end).unwrap_or(n));
                assert!(known.contains(&base), "{file} names {name}, which does not exist: {known:?}");
            }
        }
    }
}
