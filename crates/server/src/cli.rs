//! The command line, as people type it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use postrider::Timestamp;
use postrider::store::Status;
use postrider_memories::Spaces;

use crate::config::parse_listen;
use crate::config::values::parse_duration;
use crate::logs::LogFormat;
use crate::tokens::Scope;

const EXAMPLES: &str = "\
Examples:
  postrider demo                                          see it work, nothing needed
  postrider enqueue log --payload 'hello'                 write a message
  postrider worker --once                                 deliver what is due
  postrider outbox stats                                  look at it
  postrider --database postgres://app@db/app migrate      the same on PostgreSQL

Exit codes: 0 done; 1 done, but a message or a check failed; 2 wrong usage or configuration;
3 the database is unreachable.";

/// Delivers what a database has promised: messages written in your own transaction, carried at least once, each with
/// exactly one recorded outcome.
#[derive(Debug, Parser)]
#[command(name = "postrider", version, after_help = EXAMPLES, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    /// Configuration file [default: postrider.toml, if there is one]
    #[arg(long, value_name = "FILE", global = true)]
    pub config: Option<PathBuf>,

    /// sqlite://FILE, postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE [default: sqlite://postrider.db]
    ///
    /// Order: this flag, POSTRIDER_DATABASE, the configuration file, POSTGRES_DSN, sqlite://postrider.db.
    #[arg(long, value_name = "URL", global = true, env = "POSTRIDER_DATABASE", hide_env_values = true)]
    pub database: Option<String>,

    /// Print one JSON document on stdout, for scripts
    #[arg(long, global = true)]
    pub json: bool,

    /// How logs are written to stderr: text or json [default: text, or `[telemetry] log`]; RUST_LOG chooses what is logged
    #[arg(long, value_enum, value_name = "FORMAT", global = true, hide_possible_values = true)]
    pub log: Option<LogFormat>,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create or upgrade the tables in the database
    Migrate(Migrate),
    /// Write messages into a lane, in a transaction of their own
    Enqueue(Enqueue),
    /// Run the API and the workers
    Serve(Serve),
    /// Deliver messages until stopped, or once
    Worker(Worker),
    /// Look at messages and lend a hand: requeue, release, purge
    #[command(subcommand)]
    Outbox(Outbox),
    /// Subscribe, publish, look at deliveries, bring dead letters back
    #[command(subcommand)]
    Webhooks(Webhooks),
    /// Place orders, see where they stand, bring back what failed, settle by hand
    #[command(subcommand)]
    Orders(Orders),
    /// Store and query memories, bring queued ones to OpenMemory, look at the audit
    #[command(subcommand)]
    Memory(Memory),
    /// Read the history of repositories, and make memories of it
    #[command(subcommand)]
    Scm(Scm),
    /// Say what works, and whether that is enough (exits with 1 if not)
    Gate(Gate),
    /// Look for what is not as it should be; --repair puts right what can be (exits with 1 if something is left)
    Doctor(Doctor),
    /// Check that an outage of OpenMemory costs nothing; --full makes one
    Verify(Verify),
    /// Serve the tools of the memory gateway over MCP, on standard input and output
    Mcp,
    /// Make, list and revoke access tokens for the API
    #[command(subcommand)]
    Token(Token),
    /// Check the configuration, or print it as it is understood
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Watch how things go, in the terminal (q leaves)
    ///
    /// Into a pipe, or with --json, it tells once how things are. It asks the database alone, so it needs no server; whether
    /// OpenMemory is there, the dashboard tells.
    Top,
    /// See it all at work on an embedded database: deliveries, retries, dead letters, an order, a memory outage
    Demo(Demo),
    /// Measure how fast this is here, as a ratio to bare SQL on the same database
    Bench(crate::bench::Bench),
    /// Play a service that is not there, for trials and tests
    #[command(subcommand, hide = true)]
    StandIn(StandIn),
    /// Print completions for a shell
    ///
    /// For example: postrider completions bash > ~/.local/share/bash-completion/completions/postrider
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write manual pages into a folder
    ///
    /// For example: postrider manual ~/.local/share/man/man1
    Manual { folder: PathBuf },
}

/// Create or upgrade the tables in the database.
///
/// On SQLite this also happens by itself when a command first needs the tables; on PostgreSQL and MySQL only here.
#[derive(Debug, Args)]
pub struct Migrate {
    /// Change nothing; exit with 1 if something is to be done
    #[arg(long)]
    pub check: bool,
    /// Also make the roles for the parts of webhooks (PostgreSQL and MySQL), with exactly the rights each needs
    #[arg(long, conflicts_with = "check")]
    pub roles: bool,
}

const ENQUEUE_EXAMPLES: &str = "\
Examples:
  postrider enqueue invoices --payload '{\"invoice\":7}' --key invoice-7 --target erp
  postrider enqueue invoices --payload-file invoice.pdf --delay 5m
  postrider enqueue invoices --ndjson messages.ndjson

A line of --ndjson: {\"payload\": any, \"key\"?, \"target\"?, \"active_key\"?, \"delay\"?: \"5s\", \"headers\"?: {}}
A payload that is a string is sent as text, anything else as its JSON.

Prints {\"id\":1,\"outcome\":\"created\"}. The outcome is `exists` when the same message is there already under its key,
and `differs` (exit code 1, nothing written) when the key belongs to another message.";

/// Write messages into a lane, in a transaction of their own.
#[derive(Debug, Args)]
#[command(after_help = ENQUEUE_EXAMPLES)]
pub struct Enqueue {
    /// A lane of postrider.toml, or `log`, which prints
    pub lane: String,

    #[command(flatten)]
    pub source: Source,

    /// Idempotency key: the same key and content again is the same message
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,

    /// Where it goes, as far as the lane tells destinations apart
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,

    /// At most one undelivered message of the lane has this key
    #[arg(long, value_name = "KEY")]
    pub active_key: Option<String>,

    /// Not before this has passed: 500ms, 5s, 10m, 2h, 1d
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub delay: Option<Duration>,

    /// Past this moment it is not worth delivering, e.g. 2026-03-01T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub deliver_before: Option<Timestamp>,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct Source {
    /// The payload itself
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub payload: Option<String>,

    /// A file with the payload; `-` is standard input
    #[arg(long, value_name = "FILE")]
    pub payload_file: Option<PathBuf>,

    /// A file with one message a line; `-` is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["key", "target", "active_key", "delay", "deliver_before"])]
    pub ndjson: Option<PathBuf>,
}

/// Run the API and the workers.
///
/// Migrates the database first; several servers may start at once. SIGTERM or Ctrl-C: takes no more requests, finishes
/// what is under way within drain_timeout_sec.
#[derive(Debug, Args)]
pub struct Serve {
    /// Address and port [default: 127.0.0.1:8787, or `listen` of the configuration]
    #[arg(long, value_name = "ADDR", value_parser = parse_listen)]
    pub listen: Option<SocketAddr>,

    /// Only the API: messages are delivered by other processes
    #[arg(long)]
    pub no_workers: bool,
}

#[derive(Debug, Subcommand)]
pub enum Token {
    /// Make a token; it is printed once and never again
    Create(CreateToken),
    /// List tokens: what they allow, not what they are
    List,
    /// Make a token worthless, within a second
    Revoke {
        /// Its id, the number after `pr_`
        id: i64,
    },
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  postrider token create --scope enqueue,read --lane invoices --expires 90d --name shop"
)]
pub struct CreateToken {
    /// What it allows: enqueue, read, payload, operate, admin (several with commas)
    #[arg(long = "scope", value_name = "SCOPES", required = true, value_delimiter = ',')]
    pub scopes: Vec<Scope>,
    /// Only on this lane; several times for several [default: all]
    #[arg(long = "lane", value_name = "LANE")]
    pub lanes: Vec<String>,
    /// Only memories of this space, or of a kind of them (team:*); several times for several [default: all]
    #[arg(long = "space", value_name = "SPACE", value_parser = parse_space)]
    pub spaces: Vec<String>,
    /// Worthless after this time: 12h, 90d [default: never]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub expires: Option<Duration>,
    /// For whom it is
    #[arg(long, value_name = "NAME", default_value = "")]
    pub name: String,
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say whether the configuration can be used; exit with 2 and the line if not
    Check,
    /// Print the configuration in force, secrets masked
    Print,
    /// Print what may be configured, as Markdown
    Reference,
}

/// Subscribe, publish, look at deliveries, bring dead letters back.
#[derive(Debug, Subcommand)]
pub enum Webhooks {
    /// Make a subscription; prints the secret its receiver verifies with, once
    Subscribe(Subscribe),
    /// List subscriptions
    Subscriptions,
    /// Publish an event to all that want it
    Publish(Publish),
    /// Show one delivery with all its attempts
    Saga { id: i64 },
    /// List deliveries that were given up, the newest first
    DeadLetters {
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Only of this subscription
        #[arg(long, value_name = "ID")]
        subscription: Option<i64>,
    },
    /// Bring a dead letter back, as a new delivery
    Requeue { id: i64 },
    /// Send events of a time range to a subscription again
    Replay(ReplayArgs),
    /// Delete deliveries that ended long ago, with their attempts and dead letters, and events nobody needs any more
    Purge {
        /// Only what ended at least this long ago: 12h, 7d
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        older_than: Duration,
    },
    /// Bring secrets over to the first key of [secrets] key, after a new one was put in front
    Reseal,
}

/// Place orders, see where they stand, bring back what failed, settle by hand.
#[derive(Debug, Subcommand)]
pub enum Orders {
    /// Take an order in; the same key and order again shows where it stands
    Place(PlaceOrder),
    /// Show where an order stands: accepted, or its result
    Show { key: String },
    /// Show the ledger's entry of an order, and how it came about
    Ledger { key: String },
    /// Bring an order back that failed
    Requeue { key: String },
    /// Say what became of an order that waits for a person (NEEDS_RECONCILE)
    Settle {
        key: String,
        /// What the broker says
        #[arg(long = "as", value_enum, value_name = "STATUS")]
        ended: EndedAs,
        /// What the broker calls it
        #[arg(long, value_name = "REF")]
        broker_ref: Option<String>,
        /// Why, for the ledger's events
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EndedAs {
    Succeeded,
    Failed,
}

/// Store and query memories, bring queued ones to OpenMemory, look at the audit.
#[derive(Debug, Subcommand)]
pub enum Memory {
    /// Store a memory; what OpenMemory cannot take now is queued
    Store(StoreMemory),
    /// Look into memory
    Query {
        query: String,
        /// Only this space; may be given several times [default: all]
        #[arg(long = "space", value_name = "SPACE")]
        spaces: Vec<String>,
        /// At most so many results
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100))]
        top_k: u32,
    },
    /// Bring all queued memories to OpenMemory now, also those that wait for a retry (exits with 1 if one could not be)
    Flush,
    /// Bring memories back that were given up
    Requeue {
        #[arg(value_name = "ID", required_unless_present = "dead", conflicts_with = "dead")]
        ids: Vec<i64>,
        /// All that were given up
        #[arg(long)]
        dead: bool,
        /// Only count, bring nothing back
        #[arg(long)]
        dry_run: bool,
    },
    /// Complete the audit: writes without theirs, audits without their end
    Reconcile {
        /// Only count, repair nothing
        #[arg(long)]
        report: bool,
        /// Also ask OpenMemory for every memory it should have; a look that was stopped goes on (exits with 1 if one is missing)
        #[arg(long)]
        deep: bool,
        /// Ask for at most so many now
        #[arg(long, value_name = "N", requires = "deep", value_parser = clap::value_parser!(u64).range(1..))]
        limit: Option<u64>,
    },
    /// Write again, from our copies, what OpenMemory no longer has
    Resend {
        /// All it was found not to have; it is asked first
        #[arg(long, required = true)]
        missing: bool,
        /// Only count, write nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Delete messages of memories that ended long ago; the memories themselves stay
    Purge {
        /// Only what ended at least this long ago: 12h, 7d
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        older_than: Duration,
        /// Only count, delete nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Show the audit of writes, newest first
    Audit {
        #[arg(long, value_name = "ID")]
        correlation_id: Option<String>,
        #[arg(long, value_name = "ID")]
        outbox_id: Option<i64>,
        /// At most so many rows
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        limit: u32,
    },
    /// Knowledge candidates, which are found when OpenMemory is away
    #[command(subcommand)]
    Candidates(Candidates),
    /// Show what a project allows, or change it
    Govern(Govern),
}

#[derive(Debug, Args)]
pub struct StoreMemory {
    /// What to remember, in Markdown; - reads it from standard input
    #[arg(value_name = "TEXT")]
    pub text: String,
    /// Who shares it, like team:payments
    #[arg(long = "space", value_name = "SPACE")]
    pub space: Option<String>,
    /// What it is: fact, decision, lesson, …
    #[arg(long, value_name = "KIND")]
    pub kind: Option<String>,
    /// Where it comes from, like mr://project/123; may be given several times
    #[arg(long = "evidence", value_name = "URI")]
    pub evidence: Vec<String>,
    /// On whose behalf
    #[arg(long, value_name = "USER")]
    pub actor: Option<String>,
    /// Anything else to keep with it, as a JSON object
    #[arg(long, value_name = "JSON")]
    pub meta: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Candidates {
    /// Take candidates in from JSON lines: {"title", "content_md", "kind"?, "confidence"?, "evidence_refs"?, "target_space"?}
    Import {
        /// A file, or - for standard input
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct Govern {
    /// The project of a space: payments of team:payments
    pub project: String,
    /// May memories be written into its team space?
    #[arg(long, value_name = "true|false")]
    pub team_write: Option<bool>,
    /// Only memories of these kinds: fact,decision; `any` lifts it
    #[arg(long, value_name = "KINDS")]
    pub kinds: Option<String>,
    /// Longest memory, in characters; 0 lifts it
    #[arg(long, value_name = "N")]
    pub max_length: Option<u64>,
}

/// Read the history of repositories, and make memories of it.
#[derive(Debug, Subcommand)]
pub enum Scm {
    /// Read what is new since the last time
    #[command(subcommand)]
    Sync(ScmSource),
    /// Find out the digests of changes that have none yet
    Materialize {
        /// At most so many
        #[arg(long, value_name = "N", default_value_t = 100_000)]
        limit: u32,
        /// Only this repository
        #[arg(long, value_name = "ID")]
        repo: Option<i64>,
        /// Where GitLab's token is kept: env:NAME, file:PATH or exec:COMMAND
        #[arg(long, value_name = "REFERENCE")]
        token: Option<String>,
    },
    /// Make memories of what is new
    Consume {
        /// Once more from here: a sha, a revision, a number, or `start`
        #[arg(long, value_name = "POINT")]
        from: Option<String>,
        /// Only this repository
        #[arg(long, value_name = "ID")]
        repo: Option<i64>,
    },
    /// Show repositories and how far each has come
    Status,
}

#[derive(Debug, Subcommand)]
pub enum ScmSource {
    /// A Git repository on this machine, bare or not
    Git {
        path: PathBuf,
        #[command(flatten)]
        options: SyncOptions,
    },
    /// A Subversion repository, read with the command `svn`
    Svn {
        url: String,
        #[command(flatten)]
        options: SyncOptions,
    },
    /// The merge requests of a GitLab project
    Gitlab {
        /// The project's page, like https://gitlab.example/group/project
        url: String,
        /// Where the token is kept: env:NAME, file:PATH or exec:COMMAND
        #[arg(long, value_name = "REFERENCE")]
        token: Option<String>,
        #[command(flatten)]
        options: SyncOptions,
    },
}

#[derive(Debug, Args)]
pub struct SyncOptions {
    /// What happens to a record that cannot be written: strict ends the run, best_effort leaves it out
    #[arg(long, value_enum, value_name = "MODE", default_value = "strict")]
    pub mode: SyncMode,
    /// What to call it [default: the last part of its address]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The space its memories go to [default: the gateway's]
    #[arg(long, value_name = "SPACE")]
    pub space: Option<String>,
    /// Find out the digests of changes, too
    #[arg(long)]
    pub diffs: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SyncMode {
    Strict,
    #[value(name = "best_effort")]
    BestEffort,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Repair what can be repaired safely
    #[arg(long)]
    pub repair: bool,
}

#[derive(Debug, Args)]
pub struct Gate {
    /// FULL: everything must work; DEGRADED: what can [default: of the configuration, else FULL]
    #[arg(long, value_name = "MODE")]
    pub mode: Option<GateMode>,
    /// Leave out a capability; may be given several times
    #[arg(long, value_name = "CAPABILITY")]
    pub skip: Vec<String>,
}

/// FULL or DEGRADED, however it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GateMode(pub postrider_memories::gate::Mode);

impl std::str::FromStr for GateMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        use postrider_memories::gate::Mode;
        match text.to_ascii_uppercase().as_str() {
            "FULL" => Ok(GateMode(Mode::Full)),
            "DEGRADED" => Ok(GateMode(Mode::Degraded)),
            _ => Err("FULL or DEGRADED".to_owned()),
        }
    }
}

#[derive(Debug, Args)]
pub struct Verify {
    /// Stop OpenMemory, store, start it, flush, and look at each step
    #[arg(long)]
    pub full: bool,
}

#[derive(Debug, Subcommand)]
pub enum StandIn {
    /// An OpenMemory that keeps what it is given and misbehaves on request
    Openmemory(crate::stand_in::Settings),
}

#[derive(Debug, Args)]
pub struct PlaceOrder {
    /// A key of your own for this order, the same for every attempt
    #[arg(long, value_name = "KEY")]
    pub key: String,
    /// Like AAPL
    #[arg(long, value_name = "NAME")]
    pub instrument: Option<String>,
    /// BUY or SELL
    #[arg(long, value_name = "SIDE")]
    pub side: Option<String>,
    #[arg(long, value_name = "N")]
    pub qty: Option<String>,
    /// [default: at the market]
    #[arg(long, value_name = "N")]
    pub price: Option<String>,
    /// IOC, FOK or GTC
    #[arg(long, value_name = "WORD", default_value = "IOC")]
    pub time_in_force: String,
    #[arg(long, value_name = "ID")]
    pub order_id: Option<String>,
    /// The whole order, as JSON
    #[arg(long, value_name = "JSON", conflicts_with_all = ["payload_file", "instrument"])]
    pub payload: Option<String>,
    #[arg(long, value_name = "FILE", conflicts_with = "instrument")]
    pub payload_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Subscribe {
    /// Where events are posted; https unless [webhooks] allow_http
    pub url: String,
    /// `order.paid`, `order.*` or `*` [default: *]
    #[arg(long = "event-type", value_name = "TYPE")]
    pub event_types: Vec<String>,
    #[arg(long)]
    pub description: Option<String>,
    /// Sent with every event: 'Name: value'
    #[arg(long = "header", value_name = "HEADER")]
    pub headers: Vec<String>,
    /// Sign with ed25519 instead of HMAC-SHA256
    #[arg(long)]
    pub v1a: bool,
    #[arg(long, value_name = "N")]
    pub max_retry_limit: Option<u32>,
    #[arg(long, value_name = "MS")]
    pub timeout_ms: Option<u32>,
    #[arg(long, value_name = "N")]
    pub rate_per_sec: Option<f64>,
    #[arg(long, value_name = "N")]
    pub max_in_flight: Option<u32>,
}

#[derive(Debug, Args)]
pub struct Publish {
    /// Like order.paid
    pub event_type: String,
    #[arg(long, value_name = "TEXT", conflicts_with = "payload_file")]
    pub payload: Option<String>,
    #[arg(long, value_name = "FILE")]
    pub payload_file: Option<PathBuf>,
    /// The same again with the same payload is the same event
    #[arg(long, value_name = "ID")]
    pub external_id: Option<String>,
    /// [default: application/json]
    #[arg(long, value_name = "TYPE")]
    pub content_type: Option<String>,
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    #[arg(long, value_name = "ID")]
    pub subscription: i64,
    /// Events from this moment on, like 2026-01-31T00:00:00Z
    #[arg(long, value_name = "TIME")]
    pub from: Timestamp,
    /// and before this one [default: all]
    #[arg(long, value_name = "TIME")]
    pub to: Option<Timestamp>,
    /// [default: what the subscription wants]
    #[arg(long = "event-type", value_name = "TYPE")]
    pub event_types: Vec<String>,
    /// Only events whose latest delivery has this status
    #[arg(long = "status", value_name = "STATUS")]
    pub statuses: Vec<String>,
    /// Only count
    #[arg(long)]
    pub dry_run: bool,
}

/// Deliver messages until stopped, or once.
///
/// SIGTERM or Ctrl-C: claims no more, finishes what is under way within drain_timeout_sec, gives the rest back.
#[derive(Debug, Args)]
pub struct Worker {
    /// Serve only this lane (may be repeated) [default: all of the configuration, and `log`]
    #[arg(long = "lane", value_name = "LANE")]
    pub lanes: Vec<String>,

    /// Serve only this shard (may be repeated) [default: all]
    #[arg(long = "shard", value_name = "N")]
    pub shards: Vec<u32>,

    /// Handle all that is due, print a summary, exit (with 1 if a message ended in retry or dead)
    #[arg(long)]
    pub once: bool,

    /// A name for this worker, shown as the holder of its messages [default: host name]
    #[arg(long, value_name = "ID")]
    pub worker_id: Option<String>,

    /// Deliveries at once, per lane
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: Option<u32>,

    /// Most messages taken in one claim
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub batch: Option<u32>,

    /// How long a message is held before others may take it over
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub lease_seconds: Option<u32>,

    /// Serve this process's metrics for Prometheus at http://ADDR/metrics
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<SocketAddr>,
}

#[derive(Debug, Subcommand)]
pub enum Outbox {
    /// Count messages per lane
    Stats,
    /// List messages, newest first
    List(List),
    /// Show one message and its history
    Show(Show),
    /// Bring dead messages back, under their ids, with all attempts before them
    Requeue(Requeue),
    /// Give messages back that a worker holds, to be delivered by anybody now
    Release(Release),
    /// Delete messages that ended (sent or dead) long enough ago
    Purge(Purge),
}

#[derive(Debug, Args)]
pub struct List {
    /// Only this lane
    #[arg(long, value_name = "LANE")]
    pub lane: Option<String>,
    /// Only pending, leased, sent or dead
    #[arg(long, value_name = "STATUS")]
    pub status: Option<Status>,
    /// Only the message with this key or active key
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Only this target
    #[arg(long, value_name = "TARGET")]
    pub target: Option<String>,
    /// At most this many
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Only ids below this one: the next page
    #[arg(long, value_name = "ID")]
    pub before: Option<i64>,
}

#[derive(Debug, Args)]
pub struct Show {
    pub id: i64,
    /// Write the payload, as it is, and nothing else
    #[arg(long, conflicts_with = "json")]
    pub payload: bool,
}

#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  postrider outbox requeue 17 18\n  postrider outbox requeue --lane invoices --dead --dry-run"
)]
pub struct Requeue {
    /// Messages to bring back
    #[arg(value_name = "ID", required_unless_present = "dead", conflicts_with = "dead")]
    pub ids: Vec<i64>,
    /// All dead ones of this lane (with --dead)
    #[arg(long, value_name = "LANE", requires = "dead")]
    pub lane: Option<String>,
    /// All that are dead; needs --lane
    #[arg(long, requires = "lane")]
    pub dead: bool,
    /// Only say what would be done
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Release {
    /// Messages to give back, whoever holds them
    #[arg(value_name = "ID", required_unless_present = "expired", conflicts_with = "expired")]
    pub ids: Vec<i64>,
    /// All whose lease ran out and that nobody has taken over yet
    #[arg(long)]
    pub expired: bool,
    /// Only this lane (with --expired)
    #[arg(long, value_name = "LANE", requires = "expired")]
    pub lane: Option<String>,
    /// Only say what would be done
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Purge {
    /// Only what ended at least this long ago: 12h, 7d
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub older_than: Duration,
    /// Only this lane
    #[arg(long, value_name = "LANE")]
    pub lane: Option<String>,
    /// Only count
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct Demo {
    /// Keep worker, receiver and database until Ctrl-C, to look around
    #[arg(long)]
    pub stay: bool,
}

/// A space a token may be for.
fn parse_space(text: &str) -> Result<String, String> {
    Spaces::check(text).map(|()| text.to_owned())
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    text.parse()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
