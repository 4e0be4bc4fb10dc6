//! SQLite: the process is the database. One writer thread per process takes several requests into one commit; reads have
//! threads and connections of their own (`sqlite_threads.rs`). Several processes may share a file.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, OpenFlags};
use tokio::sync::oneshot;

use super::sqlite_threads::{self as threads, Haste, Job, OpenFile, Queue, Request};
use super::{Options, Skew};
use crate::cold::{self, Register};
use crate::error::{Error, Kind, Result, advice, sqlite_kind};
use crate::lanes::{LaneRules, Lanes};
use crate::lease::{Hold, LAST_TOKEN, Lease};
use crate::message::{Message, parse_headers};
use crate::migrate::{self, Schema};
use crate::outcome::{GiveBack, LeaseState, Settled, Settlement, Verdict};
use crate::settle;
use crate::store::{Claim, Claimed, From, Mark, Mode, Store, Vitals, Walked, Work};
use crate::time::Timestamp;
use crate::tx::{BoxFuture, Dialect, Now, Row, Tx, Value, ready_now};

/// Older libraries can lose committed WAL frames when two processes write.
const OLDEST_SQLITE: i32 = 3_051_003;
/// Threads that read for the engine itself, and for people who look: what people page through keeps no delivery waiting.
const ENGINE_READERS: usize = 2;
const PEOPLE_READERS: usize = 2;

pub struct SqliteStore {
    lanes: Arc<Lanes>,
    schema: Schema,
    skew: Arc<Skew>,
    writer: Queue,
    /// In memory there is one connection for everything.
    readers: Option<Readers>,
    deadline: Duration,
    path: Option<PathBuf>,
}

struct Readers {
    engine: Queue,
    people: Queue,
}

impl SqliteStore {
    /// `sqlite://file.db`, `sqlite:///absolute/file.db` or `sqlite::memory:`.
    pub fn open(url: &str, lanes: Arc<Lanes>, options: Options) -> Result<Self> {
        check_library(rusqlite::version_number())?;
        Self::open_with(file_of(url)?, Arc::default(), lanes, options)
    }

    /// In memory, with a clock that moves only when it is told to: for simulators.
    #[doc(hidden)]
    pub fn simulated(start: Timestamp, lanes: Arc<Lanes>, options: Options) -> Result<Self> {
        Self::open_with(None, Arc::new(Skew::frozen_at(start)), lanes, options)
    }

    /// Sets the clock forward or back, by so many microseconds: for simulators.
    #[doc(hidden)]
    pub fn jump_clock(&self, micros: i64) {
        self.skew.jump(micros);
    }

    fn open_with(given: Option<PathBuf>, skew: Arc<Skew>, lanes: Arc<Lanes>, options: Options) -> Result<Self> {
        // The file itself, not a link to it: SQLite keeps its log beside the file, wherever it was opened from.
        let path = given.as_ref().map(resolved).transpose()?;
        let write = connect(path.as_ref(), &skew, false)?;
        let file = given.as_deref().zip(path.as_deref()).map(|(given, path)| OpenFile::at(given, path)).transpose()?;
        let writer = threads::write("postrider-sqlite-writer", write, file.clone())?;
        let readers = |name: &str, haste: Haste, count: usize| {
            let connections: Result<Vec<SqliteTx>> = (0..count).map(|_| connect(path.as_ref(), &skew, true)).collect();
            threads::read(name, haste, connections?, file.clone())
        };
        let readers = match &path {
            Some(_) => Some(Readers {
                engine: readers("postrider-sqlite-reader", Haste::Delivers, ENGINE_READERS)?,
                people: readers("postrider-sqlite-people", Haste::Looks, PEOPLE_READERS)?,
            }),
            None => None,
        };
        let schema = Schema::with(&options.migrations);
        Ok(SqliteStore {
            lanes,
            schema,
            skew,
            writer,
            readers,
            path,
            deadline: options.deadline.max(Duration::from_secs(15)),
        })
    }

    async fn ask<R: Send + 'static>(
        &self,
        mode: Mode,
        work: impl FnOnce(&mut SqliteTx) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        self.ask_for(mode, false, work).await
    }

    async fn ask_for<R: Send + 'static>(
        &self,
        mode: Mode,
        hot: bool,
        work: impl FnOnce(&mut SqliteTx) -> Result<R> + Send + 'static,
    ) -> Result<R> {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |tx| {
            // Whoever asked has gone: a claim made now would be nobody's.
            if reply.is_closed() {
                return (true, Box::new(drop));
            }
            let run = |tx: &mut SqliteTx| {
                // A panic of the work must not take the thread with it.
                catch_unwind(AssertUnwindSafe(|| in_request(tx, work))).unwrap_or_else(|panic| {
                    Err(Error::database(format!("{}; nothing was changed", crate::error::panicked(&*panic))))
                })
            };
            let result = tx.map_or_else(|| Err(Error::database("no transaction")), run);
            (result.is_ok(), Box::new(move |committed: Result<()>| drop(reply.send(committed.and(result)))))
        });
        let queue = match (mode, &self.readers) {
            (Mode::Write | Mode::Work, _) | (_, None) => &self.writer,
            (Mode::Read, Some(readers)) => &readers.engine,
            (Mode::Look | Mode::Count, Some(readers)) => &readers.people,
        };
        let closed = || Error::new(Kind::Unreachable, "the SQLite thread is gone");
        queue.send(Request { job, hot }).map_err(|_| closed())?;
        match tokio::time::timeout(self.deadline, answer).await {
            Ok(answer) => answer.map_err(|_| closed().unknown())?,
            Err(_) => {
                let late = Error::new(
                    Kind::Timeout,
                    "SQLite did not answer in time; is another process holding a write lock?",
                );
                Err(if mode.writes() { late.unknown() } else { late })
            }
        }
    }
}

fn in_request<R>(tx: &mut SqliteTx, work: impl FnOnce(&mut SqliteTx) -> Result<R>) -> Result<R> {
    tx.failed = false;
    let answer = work(tx)?;
    if tx.failed {
        return Err(Error::database("a statement failed and its error was ignored; nothing was committed"));
    }
    Ok(answer)
}

fn check_library(version: i32) -> Result<()> {
    if version >= OLDEST_SQLITE {
        return Ok(());
    }
    Err(Error::new(
        Kind::Schema,
        format!(
            "this build links SQLite {}.{}.{}, which can lose committed writes when two processes share a file; build with SQLite 3.51.3 or newer (feature `bundled` of rusqlite)",
            version / 1_000_000,
            version / 1000 % 1000,
            version % 1000
        ),
    ))
}

/// The file a URL names; `None` for a database in memory.
fn file_of(url: &str) -> Result<Option<PathBuf>> {
    let rest = url.strip_prefix("sqlite:").unwrap_or(url);
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    let path = rest.split('?').next().unwrap_or(rest);
    match path {
        "" => {
            Err(Error::invalid("the URL names no file: write sqlite://postrider.db or sqlite:///var/lib/postrider.db"))
        }
        ":memory:" => Ok(None),
        path => Ok(Some(PathBuf::from(path))),
    }
}

/// Where the file is, which is made if it is not there yet.
fn resolved(path: &PathBuf) -> Result<PathBuf> {
    create_private(path)?;
    path.canonicalize()
        .map_err(|e| Error::new(Kind::Unreachable, format!("cannot use the SQLite file {}: {e}", path.display())))
}

fn connect(path: Option<&PathBuf>, skew: &Arc<Skew>, read_only: bool) -> Result<SqliteTx> {
    let connection = match path {
        None => Connection::open_in_memory(),
        Some(path) => {
            let flags = if read_only { OpenFlags::SQLITE_OPEN_READ_ONLY } else { OpenFlags::SQLITE_OPEN_READ_WRITE };
            Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)
        }
    };
    let named = |e: rusqlite::Error| {
        let file = path.map_or(":memory:".into(), |p| p.display().to_string());
        let mut error = classify(&e);
        error.kind = if error.kind == Kind::Busy { Kind::Busy } else { Kind::Unreachable };
        error.during(&format!("cannot use the SQLite file {file}"))
    };
    let connection = connection.map_err(named)?;
    connection.busy_handler(Some(wait_for_other_process)).map_err(named)?;
    connection.set_prepared_statement_cache_capacity(128);
    let pragmas = if read_only {
        "PRAGMA query_only = ON; PRAGMA cache_size = -16000;"
    } else {
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; PRAGMA temp_store = MEMORY;
         PRAGMA cache_size = -64000; PRAGMA wal_autocheckpoint = 8000;"
    };
    // The change to WAL needs the file for itself and does not wait: another process may be making it right now.
    let mut round = 0;
    while let Err(error) = connection.execute_batch(pragmas) {
        let busy = error.sqlite_error().is_some_and(|e| e.code == rusqlite::ErrorCode::DatabaseBusy);
        if !busy || !wait_for_other_process(round) {
            return Err(named(error));
        }
        round += 1;
    }
    Ok(SqliteTx { connection, skew: skew.clone(), failed: false })
}

/// Creates the file readable by its owner only.
fn create_private(path: &PathBuf) -> Result<()> {
    let mut options = std::fs::OpenOptions::new();
    options.create(true).truncate(false).append(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path);
    file.map(drop).map_err(|e| {
        Error::new(
            Kind::Unreachable,
            format!("cannot write the SQLite file {}: {e}; choose a folder this user may write to (--database sqlite:///path/file.db)", path.display()),
        )
    })
}

/// Waits in short steps while another process writes; ten seconds in all.
fn wait_for_other_process(round: i32) -> bool {
    std::thread::sleep(Duration::from_micros(if round < 10 { 200 } else { 2000 }));
    round < 5000
}

/// The connection, as a transaction: the thread has begun one before anybody sees it.
pub struct SqliteTx {
    pub(super) connection: Connection,
    skew: Arc<Skew>,
    /// A statement of the request at hand failed: it must not be committed.
    failed: bool,
}

impl SqliteTx {
    fn now_moment(&self) -> Timestamp {
        self.skew.now()
    }

    pub(super) fn batch(&self, sql: &str) -> Result<()> {
        self.connection.execute_batch(sql).map_err(|e| classify(&e))
    }
}

impl rusqlite::ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self {
            Value::Null => ToSqlOutput::Borrowed(ValueRef::Null),
            Value::Bool(b) => ToSqlOutput::Borrowed(ValueRef::Integer(i64::from(*b))),
            Value::Int(n) => ToSqlOutput::Borrowed(ValueRef::Integer(*n)),
            Value::Float(f) => ToSqlOutput::Borrowed(ValueRef::Real(*f)),
            Value::Text(t) => ToSqlOutput::Borrowed(ValueRef::Text(t.as_bytes())),
            Value::Bytes(b) => ToSqlOutput::Borrowed(ValueRef::Blob(b)),
            Value::Time(t) => ToSqlOutput::Borrowed(ValueRef::Integer(t.micros())),
            _ => return Err(rusqlite::Error::InvalidParameterName("arrays are for PostgreSQL".into())),
        })
    }
}

fn query(connection: &Connection, sql: &str, params: &[Value]) -> Result<Vec<Row>> {
    let run = || -> rusqlite::Result<Vec<Row>> {
        let mut statement = connection.prepare_cached(sql)?;
        let columns = statement.column_count();
        let mut rows = statement.query(rusqlite::params_from_iter(params))?;
        let mut answer = Vec::new();
        while let Some(row) = rows.next()? {
            let mut values = Vec::with_capacity(columns);
            for i in 0..columns {
                values.push(match row.get_ref(i)? {
                    ValueRef::Null => Value::Null,
                    ValueRef::Integer(n) => Value::Int(n),
                    ValueRef::Real(f) => Value::Float(f),
                    ValueRef::Text(t) => Value::Text(String::from_utf8_lossy(t).into_owned()),
                    ValueRef::Blob(b) => Value::Bytes(Bytes::copy_from_slice(b)),
                });
            }
            answer.push(Row(values));
        }
        Ok(answer)
    };
    run().map_err(|e| classify(&e))
}

fn execute(connection: &Connection, sql: &str, params: &[Value]) -> Result<u64> {
    let run = || connection.prepare_cached(sql)?.execute(rusqlite::params_from_iter(params));
    run().map(|n| n as u64).map_err(|e| classify(&e))
}

impl Tx for SqliteTx {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    fn now(&self) -> Now {
        Now::Moment(self.now_moment())
    }

    fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        let answer = query(&self.connection, sql, params);
        self.failed |= answer.is_err();
        Box::pin(std::future::ready(answer))
    }

    fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
        let answer = execute(&self.connection, sql, params);
        self.failed |= answer.is_err();
        Box::pin(std::future::ready(answer))
    }
}

/// The caller's own connection, with a transaction of the caller's open on it.
struct Borrowed<'c>(&'c Connection);

impl Tx for Borrowed<'_> {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        Box::pin(std::future::ready(query(self.0, sql, params)))
    }

    fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
        Box::pin(std::future::ready(execute(self.0, sql, params)))
    }
}

/// Runs a piece of portable SQL on a rusqlite connection (a `Transaction` is one), without a runtime.
pub(crate) fn on_connection<R>(connection: &Connection, work: impl AsyncFnOnce(&mut dyn Tx) -> R) -> R {
    let mut tx = Borrowed(connection);
    ready_now(work(&mut tx))
}

pub(super) fn classify(error: &rusqlite::Error) -> Error {
    let code = error.sqlite_error().map_or(1, |e| e.extended_code);
    let kind = sqlite_kind(code, &error.to_string());
    Error::new(kind, format!("SQLite: {error}{}", advice(kind, "")))
}

const CLAIMED: &str = "id, shard_id, due_at, lease_token, attempts, crashes, maybe_sent, target, active_key, payload, content_type, headers, \
                       payload_sha, correlation_id, created_at, deliver_before, locked_by";

/// The look for claimable rows, as text: also what the EXPLAIN test looks at. ?1 lane, ?2 shard, ?3 now, ?4 owner,
/// ?5/?6 mark, ?7 ids as JSON, ?8 limit.
#[doc(hidden)]
pub fn claim_sql(from: &From) -> String {
    let free = "(lease_until IS NULL OR lease_until < ?3)";
    let ordinary = "crashes + (locked_by IS NOT NULL AND locked_by <> ?4) <= 1";
    // Ids are found by primary key; everything else is one range on the claim index.
    let (index, which) = match from {
        From::Mark(_) => ("INDEXED BY idx_claim", format!("{free} AND {ordinary}")),
        From::Adopt { .. } => (
            "INDEXED BY idx_claim",
            format!("({free} OR locked_by = ?4) AND {ordinary} AND id NOT IN (SELECT value FROM json_each(?7))"),
        ),
        From::Ids(_) => {
            ("NOT INDEXED", format!("({free} OR locked_by = ?4) AND id IN (SELECT value FROM json_each(?7))"))
        }
    };
    format!(
        "SELECT {CLAIMED} FROM outbox {index} WHERE lane = ?1 AND shard_id = ?2 AND due_at <= ?3 AND (due_at, id) >= (?5, ?6)
         AND {which} AND lease_token < {LAST_TOKEN} AND ?4 <> '' AND ?7 IS NOT NULL ORDER BY due_at, id LIMIT ?8"
    )
}

fn claim(tx: &mut SqliteTx, claim: &Claim) -> Result<Claimed> {
    let now = tx.now_moment();
    let (mark, ids) = match &claim.from {
        From::Mark(mark) => (*mark, String::new()),
        From::Adopt { mark, known } => (*mark, serde_json::json!(known).to_string()),
        From::Ids(wanted) => (None, serde_json::json!(wanted).to_string()),
    };
    let mark = mark.unwrap_or(Mark::FIRST);
    let sql = claim_sql(&claim.from);
    let lease_until = now.plus(claim.lease);
    let run = || -> rusqlite::Result<Vec<Message>> {
        let mut messages = Vec::new();
        let mut select = tx.connection.prepare_cached(&sql)?;
        let mut rows = select.query(rusqlite::params![
            claim.lane,
            claim.shard,
            now.micros(),
            claim.owner,
            mark.due_at.micros(),
            mark.id,
            ids,
            claim.limit
        ])?;
        while let Some(row) = rows.next()? {
            messages.push(message_of(row, claim, lease_until)?);
        }
        let mut update = tx.connection.prepare_cached(
            "UPDATE outbox SET lease_token = ?1, locked_by = ?2, locked_at = ?3, lease_until = ?4, crashes = ?5, maybe_sent = ?6, updated_at = ?3 WHERE id = ?7",
        )?;
        for m in &messages {
            let updated = update.execute(rusqlite::params![
                m.lease_token,
                claim.owner,
                now.micros(),
                lease_until.micros(),
                m.crashes,
                m.maybe_sent,
                m.id
            ])?;
            // A row that does not take its lock must not be handed out: nothing is claimed then.
            if updated != 1 {
                return Err(rusqlite::Error::StatementChangedRows(updated));
            }
        }
        Ok(messages)
    };
    let messages = run().map_err(|e| classify(&e))?;
    for m in &messages {
        if let Some(from) = &m.taken_over_from {
            ready_now(settle::record_attempt(tx, m.id, m.lease_token, "takeover", m.attempts, None, from))?;
        }
    }
    let exhausted = (messages.len() as u32) < claim.limit;
    Ok(Claimed { messages, now, exhausted })
}

/// The row as it will be once claimed.
fn message_of(row: &rusqlite::Row<'_>, claim: &Claim, lease_until: Timestamp) -> rusqlite::Result<Message> {
    let text = |i: usize| -> rusqlite::Result<Option<String>> {
        Ok(match row.get_ref(i)? {
            ValueRef::Text(t) | ValueRef::Blob(t) => Some(String::from_utf8_lossy(t).into_owned()),
            _ => None,
        })
    };
    let bytes = |i: usize| -> rusqlite::Result<Bytes> {
        Ok(match row.get_ref(i)? {
            ValueRef::Text(b) | ValueRef::Blob(b) => Bytes::copy_from_slice(b),
            // Inserted by hand, as a number.
            ValueRef::Integer(n) => n.to_string().into(),
            ValueRef::Real(f) => f.to_string().into(),
            ValueRef::Null => Bytes::new(),
        })
    };
    // Never an error: one row that is not as it should be would hold up all the others.
    let number = |i: usize| -> rusqlite::Result<i64> {
        Ok(match row.get_ref(i)? {
            ValueRef::Integer(n) => n,
            ValueRef::Real(f) => f as i64,
            _ => 0,
        })
    };
    let hold = Hold { token: number(3)?, locked_by: text(16)?, lease_until: None, crashes: number(5)? as u32 };
    let takeover = hold.takeover(&claim.owner);
    Ok(Message {
        id: row.get(0)?,
        lane: claim.lane.clone(),
        shard_id: number(1)? as u32,
        due_at: Timestamp::from_micros(number(2)?),
        lease_until,
        lease_token: hold.mint(),
        attempts: number(4)? as u32,
        crashes: hold.suspicion(&claim.owner).min(claim.max_crashes.max(hold.crashes)),
        maybe_sent: number(6)? != 0 || (takeover && !claim.send_begun),
        target: text(7)?,
        active_key: text(8)?,
        payload: bytes(9)?,
        content_type: text(10)?,
        headers: parse_headers(text(11)?.as_deref()),
        payload_sha: bytes(12)?.as_ref().try_into().ok(),
        correlation_id: text(13)?,
        created_at: Timestamp::from_micros(number(14)?),
        deliver_before: match row.get_ref(15)? {
            ValueRef::Null => None,
            _ => Some(Timestamp::from_micros(number(15)?)),
        },
        taken_over_from: if takeover { hold.locked_by } else { None },
    })
}

#[doc(hidden)]
pub const WALK_SQL: &str =
    "SELECT due_at, id, lease_token, locked_by, lease_until, crashes FROM outbox INDEXED BY idx_claim
    WHERE lane = ? AND shard_id = ? AND due_at <= ? AND (due_at, id) > (?, ?) ORDER BY due_at, id LIMIT ?";

fn walk(tx: &mut SqliteTx, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
    let now = tx.now_moment();
    let after = after.unwrap_or(Mark::FIRST);
    let params: [Value; 6] =
        [lane.into(), shard.into(), now.into(), after.due_at.into(), after.id.into(), limit.into()];
    let seen = query(&tx.connection, WALK_SQL, &params)?.iter().map(super::seen_of).collect::<Result<_>>()?;
    Ok(Walked { seen, now })
}

/// The short cut: plain `sent`, many rows a statement. If one of them is refused, that statement is undone and all are
/// tried one by one: a row in the way of one message must not cost the others their commit.
fn settle_sent(
    tx: &mut SqliteTx,
    rules: &LaneRules,
    lane: &str,
    owner: &str,
    entries: &[Settlement],
) -> Result<Vec<Settled>> {
    let together = |part: &[Settlement]| move_sent(tx, rules, lane, owner, part);
    let refused = |e: &rusqlite::Error| e.sqlite_error_code() == Some(rusqlite::ErrorCode::ConstraintViolation);
    match together(entries) {
        Err(error) if refused(&error) => {}
        answers => return answers.map_err(|e| classify(&e)),
    }
    let mut answers = Vec::with_capacity(entries.len());
    for entry in entries {
        answers.push(match together(std::slice::from_ref(entry)) {
            Err(error) if refused(&error) => {
                tracing::error!(%error, lane, outbox_id = entry.lease.id, "a message could not be settled");
                Settled::Refused
            }
            answer => answer.map_err(|e| classify(&e))?.first().copied().unwrap_or(Settled::LeaseLost),
        });
    }
    Ok(answers)
}

fn move_sent(
    tx: &SqliteTx,
    rules: &LaneRules,
    lane: &str,
    owner: &str,
    entries: &[Settlement],
) -> rusqlite::Result<Vec<Settled>> {
    let ids = |ids: &[i64]| serde_json::json!(ids).to_string();
    let asked: Vec<i64> = entries.iter().map(|e| e.lease.id).collect();
    let mut lock = tx.connection.prepare_cached(
        "SELECT id, lease_token FROM outbox WHERE id IN (SELECT value FROM json_each(?1)) AND locked_by = ?2 AND lane = ?3",
    )?;
    let held: HashMap<i64, i64> =
        lock.query_map((ids(&asked), owner, lane), |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?;
    let won = |entry: &Settlement| held.get(&entry.lease.id) == Some(&entry.lease.token);
    let winners: Vec<i64> = entries.iter().filter(|e| won(e)).map(|e| e.lease.id).collect();
    let all = ids(&winners);
    if rules.retention.is_zero() {
        // A lane that keeps nothing of what was sent keeps no history of it either.
        let sql = "DELETE FROM outbox_attempts WHERE outbox_id IN (SELECT value FROM json_each(?1))";
        tx.connection.prepare_cached(sql)?.execute([&all])?;
    } else {
        let references: serde_json::Map<String, serde_json::Value> = entries
            .iter()
            .filter_map(|e| match &e.verdict {
                Verdict::Sent { result_ref: Some(reference), .. } => {
                    Some((e.lease.id.to_string(), crate::message::cut_error(reference).into()))
                }
                _ => None,
            })
            .collect();
        // Looked up by name only where there are any: most couriers have none.
        let reference = if references.is_empty() { "nullif(?3, ?3)" } else { "json_extract(?3, '$.\"' || id || '\"')" };
        let moved = settle::MOVED;
        let sql = format!(
            "INSERT INTO outbox_done ({moved}, attempts, last_error_code, last_error, maybe_sent, crashes, updated_at, finished_at, status, result_ref)
             SELECT {moved}, attempts, last_error_code, last_error, maybe_sent, crashes, ?2, ?2, 'sent', {reference}
             FROM outbox WHERE id IN (SELECT value FROM json_each(?1))"
        );
        let references = serde_json::Value::Object(references).to_string();
        let now = tx.now_moment().micros();
        tx.connection.prepare_cached(&sql)?.execute((&all, now, references))?;
    }
    tx.connection
        .prepare_cached("DELETE FROM outbox WHERE id IN (SELECT value FROM json_each(?1))")?
        .execute([&all])?;
    Ok(entries.iter().map(|e| if won(e) { Settled::Applied } else { Settled::LeaseLost }).collect())
}

#[async_trait]
impl Store for SqliteStore {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    fn lanes(&self) -> &Arc<Lanes> {
        &self.lanes
    }

    fn schema(&self) -> &Schema {
        &self.schema
    }

    async fn migrate(&self) -> Result<Vec<String>> {
        let (lanes, schema) = (self.lanes.clone(), self.schema.clone());
        self.ask(Mode::Write, move |tx| {
            tx.batch(migrate::BOOKKEEPING)?;
            let applied: Vec<i64> = query(&tx.connection, "SELECT version FROM postrider_migrations", &[])?
                .iter()
                .map(|row| row.int(0))
                .collect::<Result<_>>()?;
            let missing = schema.missing(&applied)?;
            if !missing.is_empty() {
                tx.batch(migrate::drop_views(Dialect::Sqlite))?;
                for migration in &missing {
                    tx.batch(migration.sql(Dialect::Sqlite)).map_err(|e| e.during(migration.name))?;
                    let sql = "INSERT INTO postrider_migrations VALUES (?, ?, 0)";
                    execute(&tx.connection, sql, &[migration.version.into(), migration.name.into()])?;
                }
                tx.batch(migrate::views(Dialect::Sqlite))?;
            }
            ready_now(cold::register_lanes(tx, &lanes, Register::Missing))?;
            Ok(missing.iter().map(|m| m.name.to_owned()).collect())
        })
        .await
    }

    async fn claim(&self, request: &Claim) -> Result<Claimed> {
        let request = request.clone();
        self.ask_for(Mode::Write, true, move |tx| claim(tx, &request)).await
    }

    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
        let lane = lane.to_owned();
        self.ask(Mode::Read, move |tx| walk(tx, &lane, shard, after, limit)).await
    }

    async fn settle(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Result<Vec<Settled>> {
        let rules = self.lanes.get(lane)?.clone();
        let (lane, owner, entries) = (lane.to_owned(), owner.to_owned(), entries.to_vec());
        super::settle_by_parts(self, rules, lane, owner, entries).await
    }

    async fn renew(&self, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>> {
        let (owner, leases) = (owner.to_owned(), leases.to_vec());
        self.ask(Mode::Write, move |tx| ready_now(cold::renew(tx, &owner, &leases, lease))).await
    }

    async fn defer(&self, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>> {
        let (owner, leases, how) = (owner.to_owned(), leases.to_vec(), how.clone());
        self.ask(Mode::Write, move |tx| ready_now(cold::defer(tx, &owner, &leases, &how))).await
    }

    async fn transact(&self, mode: Mode, work: Work) -> Result<()> {
        let work = Arc::new(std::sync::Mutex::new(work));
        super::rerun(self.deadline, true, || {
            let (work, runtime) = (work.clone(), tokio::runtime::Handle::current());
            self.ask(mode, move |tx| {
                let mut work = work.lock().unwrap_or_else(|e| e.into_inner());
                runtime.block_on(work(tx))
            })
        })
        .await
    }

    async fn vitals(&self) -> Result<Vitals> {
        // In memory there is no log, and right after a checkpoint perhaps no file.
        let log = self.path.as_ref().map(|path| {
            let mut log = path.clone().into_os_string();
            log.push("-wal");
            std::fs::metadata(log).map_or(0, |file| file.len())
        });
        Ok(Vitals { wal_bytes: log, ..Vitals::default() })
    }

    fn advance_clock(&self, by: Duration) {
        self.skew.advance(by);
    }
}

#[async_trait]
impl super::Shortcut for SqliteStore {
    fn as_store(&self) -> &dyn Store {
        self
    }

    async fn settle_sent(
        &self,
        rules: &LaneRules,
        lane: &str,
        owner: &str,
        entries: &[Settlement],
    ) -> Result<Vec<Settled>> {
        let (rules, lane, owner, entries) = (rules.clone(), lane.to_owned(), owner.to_owned(), entries.to_vec());
        self.ask_for(Mode::Write, true, move |tx| settle_sent(tx, &rules, &lane, &owner, &entries)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_library_is_refused() {
        assert!(check_library(rusqlite::version_number()).is_ok(), "the bundled one must be good enough");
        let error = check_library(3_050_004).unwrap_err();
        assert!(error.message.contains("3.50.4") && error.message.contains("3.51.3"), "{error}");
    }

    #[test]
    fn urls_name_files() {
        assert_eq!(file_of("sqlite://a.db").unwrap(), Some("a.db".into()));
        assert_eq!(file_of("sqlite:///var/a.db?x=1").unwrap(), Some("/var/a.db".into()));
        assert_eq!(file_of("sqlite::memory:").unwrap(), None);
        assert!(file_of("sqlite://").is_err());
    }
}
