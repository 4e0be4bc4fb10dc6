//! MySQL 8.0.4+ and MariaDB 10.6+, one SQL for both. InnoDB locks every row it scans, so a claim first reads candidates
//! without locks and then locks those, by primary key, skipping what others hold.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder, Params};

use super::pool::{Connect, Loan, Pool};
use super::{Options, Skew, Turn, rerun, settle_by_parts, without_password, without_values};
use crate::active_keys;
use crate::cold::{self, Register};
use crate::error::{Effect, Error, Kind, Result, advice, mysql_kind};
use crate::lanes::{LaneRules, Lanes};
use crate::lease::{Hold, LAST_TOKEN, Lease};
use crate::message::{Message, cut_error, parse_headers};
use crate::migrate::{self, Migration, Schema};
use crate::outcome::{GiveBack, LeaseState, Settled, Settlement, Verdict};
use crate::settle;
use crate::store::{Claim, Claimed, From, Mark, Mode, Store, Vitals, Walked, Work, transact};
use crate::time::{Timestamp, micros_of};
use crate::tx::{BoxFuture, Dialect, Inserted, LAST_INSERT_ID, Now, Row, Tx, Value};

pub struct MysqlStore {
    lanes: Arc<Lanes>,
    schema: Schema,
    skew: Arc<Skew>,
    pool: Pool<Connector>,
    deadline: Duration,
}

struct Connector {
    opts: Opts,
    shown: String,
}

#[async_trait]
impl Connect for Connector {
    type Connection = Session;

    async fn connect(&self) -> Result<Session> {
        let connected = Conn::new(self.opts.clone()).await.map_err(|e| {
            let mut error = classify(&e);
            error.kind = Kind::Unreachable;
            error.during(&format!("cannot connect to {}", self.shown))
        });
        let mut session = Session(Some(connected?));
        // What it said first may have been a proxy's word, and one day MySQL may be at 10, too.
        if session.server_version() < (11, 0, 0) {
            let told: Option<String> =
                session.query_first("SELECT VERSION()").await.map_err(|e: mysql_async::Error| classify(&e))?;
            if let Some(text) = too_old(&told.unwrap_or_default()) {
                return Err(Error::new(Kind::Schema, text).during(&format!("cannot use {}", self.shown)));
            }
        }
        Ok(session)
    }

    fn is_open(_: &Session) -> bool {
        true // a dead one shows at its next use, and is then closed
    }
}

/// What skips no locked rows cannot be used, nor what was never tried.
fn too_old(version: &str) -> Option<String> {
    let (product, oldest) = match version.contains("MariaDB") {
        true => ("MariaDB", [10, 6, 0]),
        false => ("MySQL", [8, 0, 4]),
    };
    let numbers: Vec<u32> =
        version.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok()).take(3).collect();
    (!numbers.is_empty() && numbers[..] < oldest[..]).then(|| {
        let oldest = oldest.map(|n| n.to_string()).join(".");
        format!(
            "{product} {version} is too old: {oldest} and newer will do, which can skip rows that others have locked"
        )
    })
}

/// A connection whose socket is closed as soon as it is dropped. In a runtime the driver would first wait for what the
/// server has still to say, for ever if that is nothing; a thread without one closes it at once.
pub(crate) struct Session(Option<Conn>);

impl Drop for Session {
    fn drop(&mut self) {
        let conn = self.0.take();
        // If there is no thread to be had, the driver does it its own way.
        let _ = std::thread::Builder::new().spawn(move || drop(conn));
    }
}

impl Deref for Session {
    type Target = Conn;
    fn deref(&self) -> &Conn {
        self.0.as_ref().unwrap_or_else(|| unreachable!("only a drop takes it"))
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Conn {
        self.0.as_mut().unwrap_or_else(|| unreachable!("only a drop takes it"))
    }
}

pub(crate) fn classify(error: &mysql_async::Error) -> Error {
    let mysql_async::Error::Server(server) = error else {
        return Error::new(Kind::Unreachable, format!("MySQL: {error}"));
    };
    let kind = mysql_kind(server.code);
    let advice = advice(kind, &server.code.to_string());
    Error::new(kind, format!("MySQL: {} ({}){advice}", without_values(&server.message), server.code))
}

fn at_commit(error: &mysql_async::Error) -> Error {
    let classified = classify(error);
    if classified.kind == Kind::Unreachable { classified.unknown() } else { classified }
}

fn bind(value: &Value) -> mysql_async::Value {
    use mysql_async::Value as V;
    match value {
        Value::Null => V::NULL,
        Value::Bool(b) => V::Int(i64::from(*b)),
        Value::Int(n) => V::Int(*n),
        Value::Float(f) => V::Double(*f),
        Value::Text(t) => V::Bytes(t.as_bytes().to_vec()),
        Value::Bytes(b) => V::Bytes(b.to_vec()),
        Value::Time(t) => {
            let d = t.to_datetime();
            V::Date(d.year() as u16, u8::from(d.month()), d.day(), d.hour(), d.minute(), d.second(), d.microsecond())
        }
        _ => V::NULL, // arrays are refused by `run`
    }
}

fn unbind(value: mysql_async::Value, binary: bool) -> Value {
    use mysql_async::Value as V;
    match value {
        V::NULL => Value::Null,
        V::Int(n) => Value::Int(n),
        V::UInt(n) => Value::Int(n as i64),
        V::Float(f) => Value::Float(f.into()),
        V::Double(f) => Value::Float(f),
        V::Bytes(b) if binary => Value::Bytes(b.into()),
        V::Bytes(b) => {
            Value::Text(String::from_utf8(b).unwrap_or_else(|e| String::from_utf8_lossy(e.as_bytes()).into_owned()))
        }
        V::Date(y, mo, d, h, mi, s, us) => Value::Time(moment(y, mo, d, h, mi, s, us)),
        V::Time(..) => Value::Null,
    }
}

fn moment(year: u16, month: u8, day: u8, hour: u8, minute: u8, second: u8, micros: u32) -> Timestamp {
    let date = time::Month::try_from(month).and_then(|m| time::Date::from_calendar_date(i32::from(year), m, day));
    let clock = time::Time::from_hms_micro(hour, minute, second, micros);
    match date.and_then(|d| Ok(time::PrimitiveDateTime::new(d, clock?).assume_utc())) {
        Ok(moment) => Timestamp::from_micros((moment.unix_timestamp_nanos() / 1000) as i64),
        Err(_) => Timestamp::default(),
    }
}

/// Bytes, not text: the binary character set, which decimals (sums) have too.
fn is_binary(column: &mysql_async::Column) -> bool {
    column.character_set() == 63 && column.column_type() != mysql_async::consts::ColumnType::MYSQL_TYPE_NEWDECIMAL
}

/// The text protocol gives times and numbers as text.
fn unbind_text(column: &mysql_async::Column, value: mysql_async::Value) -> Value {
    use mysql_async::consts::ColumnType as C;
    let mysql_async::Value::Bytes(bytes) = &value else { return unbind(value, false) };
    let text = || std::str::from_utf8(bytes).unwrap_or_default();
    match column.column_type() {
        C::MYSQL_TYPE_TINY
        | C::MYSQL_TYPE_SHORT
        | C::MYSQL_TYPE_INT24
        | C::MYSQL_TYPE_LONG
        | C::MYSQL_TYPE_LONGLONG => text().parse().map_or(Value::Null, Value::Int),
        C::MYSQL_TYPE_FLOAT | C::MYSQL_TYPE_DOUBLE => text().parse().map_or(Value::Null, Value::Float),
        C::MYSQL_TYPE_DATETIME | C::MYSQL_TYPE_TIMESTAMP => parse_datetime(text()),
        _ => unbind(value, is_binary(column)),
    }
}

/// `2026-01-02 03:04:05.678901`
fn parse_datetime(text: &str) -> Value {
    let number = |range: std::ops::Range<usize>| text.get(range).and_then(|t| t.parse::<u32>().ok());
    let micros = text.get(20..).map_or(0, |f| format!("{f:0<6}").get(..6).and_then(|t| t.parse().ok()).unwrap_or(0));
    match (number(0..4), number(5..7), number(8..10), number(11..13), number(14..16), number(17..19)) {
        (Some(y), Some(mo), Some(d), Some(h), Some(mi), Some(s)) => {
            Value::Time(moment(y as u16, mo as u8, d as u8, h as u8, mi as u8, s as u8, micros))
        }
        _ => Value::Null,
    }
}

/// Statements without values go as text, so that a list of ids of any length leaves no prepared statement behind.
async fn run<Q: Queryable + Send>(conn: &mut Q, sql: &str, params: &[Value]) -> mysql_async::Result<(Vec<Row>, u64)> {
    if params.iter().any(Value::is_array) {
        return Err(mysql_async::Error::Other("a list of values was bound, which only PostgreSQL takes".into()));
    }
    if params.is_empty() {
        return Ok(run_text(conn, sql, 1).await?.pop().unwrap_or_default());
    }
    let mut rows = Vec::new();
    let mut result = conn.exec_iter(sql, Params::Positional(params.iter().map(bind).collect())).await?;
    let columns = result.columns();
    while let Some(row) = result.next().await? {
        let columns = columns.as_deref().unwrap_or_default();
        rows.push(Row(row.unwrap().into_iter().zip(columns).map(|(v, c)| unbind(v, is_binary(c))).collect()));
    }
    let changed = result.affected_rows();
    result.drop_result().await?;
    Ok((rows, changed))
}

/// So many statements in one text, and what each answers. The server stops at the first that fails.
async fn run_text<Q: Queryable + Send>(
    conn: &mut Q,
    sql: &str,
    statements: usize,
) -> mysql_async::Result<Vec<(Vec<Row>, u64)>> {
    let mut answers = Vec::with_capacity(statements);
    let mut result = conn.query_iter(sql).await?;
    for _ in 0..statements {
        let (columns, changed) = (result.columns(), result.affected_rows());
        let mut rows = Vec::new();
        // At its end this goes on to the next statement's answer.
        while let Some(row) = result.next().await? {
            let columns = columns.as_deref().unwrap_or_default();
            rows.push(Row(row.unwrap().into_iter().zip(columns).map(|(v, c)| unbind_text(c, v)).collect()));
        }
        answers.push((rows, changed));
    }
    result.drop_result().await?;
    Ok(answers)
}

/// Statements of many rows have a text of their own for each number of them: up to this many values they are prepared.
const FEW_VALUES: usize = 16;
/// What stands in a text stands there twice as long; beyond this it is bound all the same.
const INLINE_BYTES: usize = 128 << 10;

/// The statement with its values in its text, where preparing it would not pay.
fn inlined<'a>(sql: &'a str, params: &[Value]) -> Option<std::borrow::Cow<'a, str>> {
    if params.is_empty() {
        return Some(sql.into());
    }
    let bytes = |value: &Value| match value {
        Value::Text(text) => text.len(),
        Value::Bytes(bytes) => bytes.len(),
        _ => 0,
    };
    if params.len() <= FEW_VALUES || params.iter().map(bytes).sum::<usize>() > INLINE_BYTES {
        return None;
    }
    // Statements of ours hold no `?` in literals.
    let mut parts = sql.split('?');
    let mut text = parts.next().unwrap_or_default().to_owned();
    let mut values = params.iter();
    for part in parts {
        match values.next()? {
            Value::Null => text.push_str("NULL"),
            Value::Bool(value) => text.push(if *value { '1' } else { '0' }),
            Value::Int(value) => text.push_str(&value.to_string()),
            // As text of the connection, so that an index on text serves.
            Value::Text(value) => text.extend(["_utf8mb4 ", &literal(value)]),
            Value::Bytes(value) => text.extend(["X'", &crate::message::hex(value), "'"]),
            Value::Time(value) => text.push_str(&time_literal(*value)),
            _ => return None,
        }
        text.push_str(part);
    }
    values.next().is_none().then(|| text.into())
}

/// The caller's own transaction (or connection, with a transaction the caller began).
macro_rules! caller_tx {
    ($type:ty) => {
        impl Tx for $type {
            fn dialect(&self) -> Dialect {
                Dialect::Mysql
            }
            fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
                Box::pin(async move { Ok(run(self, sql, params).await.map_err(|e| classify(&e))?.0) })
            }
            fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
                Box::pin(async move { Ok(run(self, sql, params).await.map_err(|e| classify(&e))?.1) })
            }
        }
    };
}
caller_tx!(mysql_async::Transaction<'_>);
caller_tx!(Conn);

/// How long a session waits for a row, or for a table that somebody alters or has locked whole: what we have given up must
/// not go on waiting on the server.
const LOCK_WAITS: &str = "innodb_lock_wait_timeout = 1, lock_wait_timeout = 1";

/// Begins before the first statement, and where that goes as text, with it: a round trip less.
const BEGIN: &str = "START TRANSACTION";

/// A transaction of the store's own. Once a statement failed it refuses to commit.
struct MysqlTx<'c> {
    conn: &'c mut Conn,
    skew: i64,
    begun: bool,
    failed: bool,
}

impl MysqlTx<'_> {
    /// Several statements, in one text with the BEGIN if they are the first; answers for them alone.
    async fn run_text(&mut self, sql: &str, statements: usize) -> mysql_async::Result<Vec<(Vec<Row>, u64)>> {
        if std::mem::replace(&mut self.begun, true) {
            return run_text(self.conn, sql, statements).await;
        }
        let mut answers = run_text(self.conn, &format!("{BEGIN}; {sql}"), statements + 1).await?;
        answers.remove(0);
        Ok(answers)
    }

    async fn begin(&mut self) -> mysql_async::Result<()> {
        if std::mem::replace(&mut self.begun, true) { Ok(()) } else { self.conn.query_drop(BEGIN).await }
    }

    async fn run(&mut self, sql: &str, params: &[Value]) -> Result<(Vec<Row>, u64)> {
        let answer = async {
            match inlined(sql, params) {
                Some(text) => Ok(self.run_text(&text, 1).await?.pop().unwrap_or_default()),
                None => {
                    self.begin().await?;
                    run(self.conn, sql, params).await
                }
            }
        };
        let answer = answer.await.map_err(|e: mysql_async::Error| classify(&e));
        self.failed |= answer.is_err();
        answer
    }

    async fn insert(&mut self, sql: &str, params: &[Value]) -> Result<Inserted> {
        let Some(text) = inlined(sql, params) else {
            let count = self.run(sql, params).await?.1;
            let answer = self.run(LAST_INSERT_ID, &[]).await?.0;
            return Inserted::of(count, &answer);
        };
        let answers = self.run_text(&format!("{text}; {LAST_INSERT_ID}"), 2).await.map_err(|e| classify(&e));
        self.failed |= answers.is_err();
        match answers?.as_slice() {
            [(_, count), (answer, _)] => Inserted::of(*count, answer),
            _ => Err(Error::database("an insert without an answer")),
        }
    }
}

impl Tx for MysqlTx<'_> {
    fn dialect(&self) -> Dialect {
        Dialect::Mysql
    }

    fn now(&self) -> Now {
        Now::Expression(now_sql(self.skew))
    }

    fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        Box::pin(async move { Ok(self.run(sql, params).await?.0) })
    }

    fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
        Box::pin(async move { Ok(self.run(sql, params).await?.1) })
    }

    fn insert_at_once<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> Option<BoxFuture<'a, Result<Inserted>>> {
        Some(Box::pin(self.insert(sql, params)))
    }
}

fn now_sql(skew: i64) -> String {
    match skew {
        0 => "UTC_TIMESTAMP(6)".to_owned(),
        skew => format!("(UTC_TIMESTAMP(6) + INTERVAL {skew} MICROSECOND)"),
    }
}

/// A string literal no content can break out of, whatever the SQL mode.
fn literal(text: &str) -> String {
    format!("X'{}'", crate::message::hex(text.as_bytes()))
}

fn time_literal(time: Timestamp) -> String {
    let d = time.to_datetime();
    let (date, clock) = (d.date(), d.time());
    format!(
        "'{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:06}'",
        date.year(),
        u8::from(date.month()),
        date.day(),
        clock.hour(),
        clock.minute(),
        clock.second(),
        clock.microsecond()
    )
}

fn list(ids: impl IntoIterator<Item = i64>) -> String {
    let ids: Vec<String> = ids.into_iter().map(|id| id.to_string()).collect();
    if ids.is_empty() { "NULL".to_owned() } else { ids.join(",") }
}

impl MysqlStore {
    pub fn open(url: &str, lanes: Arc<Lanes>, options: Options) -> Result<Self> {
        let url_fixed = url.replacen("mariadb:", "mysql:", 1);
        let opts = Opts::from_url(&url_fixed).map_err(|e| {
            Error::invalid(format!(
                "`{}` is no MySQL URL: {e}; write mysql://USER:PASSWORD@HOST:3306/DATABASE",
                without_password(url)
            ))
        })?;
        if opts.db_name().is_none_or(str::is_empty) {
            return Err(Error::invalid(format!(
                "`{}` names no database; append one: mysql://…/DATABASE",
                without_password(url)
            )));
        }
        // A session cut off by the network must not hold its locks for long.
        let setup = vec![
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED".to_owned(),
            format!(
                "SET SESSION wait_timeout = {}, {LOCK_WAITS}, time_zone = '+00:00'",
                options.silence().as_secs().max(1)
            ),
        ];
        let opts =
            OptsBuilder::from_opts(opts).setup(setup).stmt_cache_size(64).tcp_nodelay(true).client_found_rows(true);
        // The driver would ask the server for the path of its socket and go there, on this machine: at best past a proxy, at
        // worst to another server.
        let opts = if url.contains("prefer_socket=") { opts } else { opts.prefer_socket(false) };
        let pool = Pool::new(Connector { opts: opts.into(), shown: without_password(url) }, &options);
        let (schema, deadline) = (Schema::with(&options.migrations), options.deadline);
        Ok(MysqlStore { lanes, schema, skew: Arc::default(), pool, deadline })
    }

    fn now(&self) -> String {
        now_sql(self.skew.micros())
    }

    fn keep_if_clean<R>(&self, loan: Loan<Connector>, answer: &Result<R>) {
        let clean = match answer {
            Ok(_) => true,
            Err(e) => e.effect == Effect::NotApplied && e.kind != Kind::Unreachable,
        };
        if clean {
            self.pool.give_back(loan);
        }
    }
}

async fn in_transaction(conn: &mut Conn, skew: i64, work: &mut Work) -> Result<()> {
    let mut tx = MysqlTx { conn, skew, begun: false, failed: false };
    let mut done = work(&mut tx).await;
    if done.is_ok() && tx.failed {
        done = Err(Error::database("a statement failed and its error was ignored; nothing was committed"));
    }
    if !tx.begun {
        return done; // it asked nothing, so nothing was begun
    }
    match done {
        Ok(()) => conn.query_drop("COMMIT").await.map_err(|e| at_commit(&e)),
        Err(error) => roll_back(conn, error).await,
    }
}

async fn roll_back<R>(conn: &mut Conn, error: Error) -> Result<R> {
    // A permit is a session variable, which no rollback takes back.
    for sql in ["ROLLBACK", "SET @postrider_permit = NULL"] {
        conn.query_drop(sql).await.map_err(|e| {
            let mut lost = classify(&e);
            lost.kind = Kind::Unreachable;
            lost
        })?;
    }
    Err(error)
}

const CLAIMED: &str = "id, shard_id, due_at, lease_token, attempts, crashes, maybe_sent, target, active_key, payload, content_type, headers, \
                       payload_sha, correlation_id, created_at, deliver_before, locked_by";

/// The unlocked look for candidates; also what the EXPLAIN test looks at.
#[doc(hidden)]
pub fn candidates_sql(claim: &Claim, now: &str) -> String {
    let owner = literal(&claim.owner);
    let free = format!("(lease_until IS NULL OR lease_until < {now})");
    let ordinary = format!("crashes + (locked_by IS NOT NULL AND locked_by <> {owner}) <= 1");
    let (mark, which) = match &claim.from {
        From::Mark(mark) => (*mark, format!("{free} AND {ordinary}")),
        From::Adopt { mark, known } => (
            *mark,
            format!(
                "({free} OR locked_by = {owner}) AND {ordinary} AND id NOT IN ({})",
                list(known.iter().copied().chain([0]))
            ),
        ),
        From::Ids(ids) => {
            let ids = list(ids.iter().copied());
            return format!(
                "SELECT id, due_at FROM outbox FORCE INDEX (PRIMARY) WHERE id IN ({ids}) AND lane = {} AND shard_id = {} AND due_at <= {now} AND ({free} OR locked_by = {owner}) ORDER BY due_at, id LIMIT {}",
                literal(&claim.lane),
                claim.shard,
                claim.limit
            );
        }
    };
    // `(due_at, id) >= (…)` as a row is no range for InnoDB; written out, its first half is.
    let from = mark.map_or(String::new(), |mark| {
        let due = time_literal(mark.due_at);
        format!(" AND due_at >= {due} AND (due_at > {due} OR id >= {})", mark.id)
    });
    format!(
        "SELECT id, due_at FROM outbox FORCE INDEX (idx_claim) WHERE lane = {} AND shard_id = {} AND due_at <= {now}{from} AND {which}
         ORDER BY due_at, id LIMIT {}",
        literal(&claim.lane), claim.shard, claim.limit
    )
}

#[doc(hidden)]
pub fn walk_sql(lane: &str, shard: u32, after: Option<Mark>, limit: u32, now: &str) -> String {
    let from = after.map_or(String::new(), |mark| {
        let due = time_literal(mark.due_at);
        format!(" AND due_at >= {due} AND (due_at > {due} OR id > {})", mark.id)
    });
    format!(
        "SELECT due_at, id, lease_token, locked_by, lease_until, crashes FROM outbox FORCE INDEX (idx_claim)
         WHERE lane = {} AND shard_id = {shard} AND due_at <= {now}{from} ORDER BY due_at, id LIMIT {limit}",
        literal(lane)
    )
}

/// How often a claim looks further where others have rows locked, and at how many at first; each time at twice as many.
const LOOKS: u32 = 8;
const FURTHER: u32 = 64;

/// Candidates, lock by primary key, update: one READ COMMITTED transaction.
async fn claim_on(conn: &mut Conn, claim: &Claim, now: &str) -> Result<Claimed> {
    let candidates = look(conn, claim, now).await?;
    if candidates.is_empty() {
        let (rows, _) = run(conn, &format!("SELECT {now}"), &[]).await.map_err(|e| classify(&e))?;
        let now = rows.first().map_or(Ok(Timestamp::default()), |row| row.time(0))?;
        return Ok(Claimed { messages: vec![], now, exhausted: true });
    }
    conn.query_drop(BEGIN).await.map_err(|e| classify(&e))?;
    let claimed = async {
        let (messages, exhausted) = lock_candidates(conn, claim, now, candidates).await?;
        Ok(Claimed { exhausted, ..update_claimed(conn, claim, now, messages).await? })
    };
    match claimed.await {
        Ok(claimed) => {
            conn.query_drop("COMMIT").await.map_err(|e| at_commit(&e))?;
            Ok(claimed)
        }
        Err(error) => roll_back(conn, error).await,
    }
}

async fn look(conn: &mut Conn, claim: &Claim, now: &str) -> Result<Vec<Mark>> {
    let (rows, _) = run(conn, &candidates_sql(claim, now), &[]).await.map_err(|e| classify(&e))?;
    rows.iter().map(|row| Ok(Mark { id: row.int(0)?, due_at: row.time(1)? })).collect()
}

/// Locks candidates in their order, skipping what others hold; looks further on while some are missing. Answers also
/// whether it came to the end of them.
async fn lock_candidates(
    conn: &mut Conn,
    claim: &Claim,
    now: &str,
    mut candidates: Vec<Mark>,
) -> Result<(Vec<Message>, bool)> {
    let own = if claim.from.adopts() { format!(" OR locked_by = {}", literal(&claim.owner)) } else { String::new() };
    let mut messages: Vec<Message> = Vec::with_capacity(candidates.len());
    let (mut wanted, mut missing) = (claim.limit, claim.limit);
    for round in 0..LOOKS {
        let sql = format!(
            "SELECT {CLAIMED} FROM outbox FORCE INDEX (PRIMARY) WHERE id IN ({}) AND due_at <= {now}
             AND (lease_until IS NULL OR lease_until < {now}{own}) AND lease_token < {LAST_TOKEN} LIMIT {missing} FOR UPDATE SKIP LOCKED",
            list(candidates.iter().map(|c| c.id))
        );
        let (rows, _) = run(conn, &sql, &[]).await.map_err(|e| classify(&e))?;
        for row in &rows {
            messages.push(message_of(row, claim)?);
        }
        missing = claim.limit.saturating_sub(messages.len() as u32);
        if missing == 0 {
            return Ok((messages, false));
        }
        let Some(last) = candidates.last().filter(|_| candidates.len() as u32 >= wanted) else {
            return Ok((messages, true));
        };
        if !matches!(claim.from, From::Mark(_)) {
            return Ok((messages, false));
        }
        let further = Mark { due_at: last.due_at, id: last.id + 1 };
        // However little is wanted: somebody may have a thousand rows locked.
        wanted = missing.max(FURTHER << round);
        let next = Claim { limit: wanted, from: From::Mark(Some(further)), ..claim.clone() };
        candidates = look(conn, &next, now).await?;
        if candidates.is_empty() {
            return Ok((messages, true));
        }
    }
    // Whoever found nothing so far does not look again at once.
    let nothing = messages.is_empty();
    Ok((messages, nothing))
}

async fn update_claimed(conn: &mut Conn, claim: &Claim, now: &str, mut messages: Vec<Message>) -> Result<Claimed> {
    let (owner, lease) = (literal(&claim.owner), micros_of(claim.lease));
    let ids = list(messages.iter().map(|m| m.id));
    let (max_crashes, unsure) = (claim.max_crashes, !claim.send_begun);
    // `crashes` and `maybe_sent` before `locked_by`: assignments run from left to right.
    let update = format!(
        "UPDATE outbox FORCE INDEX (PRIMARY) SET crashes = GREATEST(crashes, LEAST(crashes + (locked_by IS NOT NULL AND locked_by <> {owner}), {max_crashes})),
                maybe_sent = maybe_sent OR ({unsure} AND locked_by IS NOT NULL AND locked_by <> {owner}), lease_token = lease_token + 1,
                locked_by = {owner}, locked_at = {now}, lease_until = {now} + INTERVAL {lease} MICROSECOND, updated_at = {now}
         WHERE id IN ({ids})"
    );
    if !messages.is_empty() {
        let (_, changed) = run(conn, &update, &[]).await.map_err(|e| classify(&e))?;
        if changed != messages.len() as u64 {
            return Err(Error::database(format!("a claim locked {} rows and changed {changed}", messages.len())));
        }
    }
    for m in messages.iter().filter(|m| m.taken_over_from.is_some()) {
        let sql = format!(
            "INSERT INTO outbox_attempts (outbox_id, lease_token, kind, attempt, worker, at) VALUES ({}, {}, 'takeover', {}, {}, {now})",
            m.id,
            m.lease_token,
            m.attempts,
            literal(m.taken_over_from.as_deref().unwrap_or_default())
        );
        run(conn, &sql, &[]).await.map_err(|e| classify(&e))?;
    }
    let first = messages.first().map_or(0, |m| m.id);
    let sql = format!("SELECT {now}, (SELECT lease_until FROM outbox WHERE id = {first})");
    let (rows, _) = run(conn, &sql, &[]).await.map_err(|e| classify(&e))?;
    let row = rows.first().ok_or_else(|| Error::database("the database told no time"))?;
    let lease_until = row.opt_time(1)?.unwrap_or_default();
    messages.iter_mut().for_each(|m| m.lease_until = lease_until);
    messages.sort_unstable_by_key(|m| (m.due_at, m.id));
    Ok(Claimed { messages, now: row.time(0)?, exhausted: false })
}

/// The row as it will be once claimed.
fn message_of(row: &Row, claim: &Claim) -> Result<Message> {
    let hold =
        Hold { token: row.int(3)?, locked_by: row.opt_text(16)?, lease_until: None, crashes: row.int(5)? as u32 };
    let takeover = hold.takeover(&claim.owner);
    Ok(Message {
        id: row.int(0)?,
        lane: claim.lane.clone(),
        shard_id: row.int(1)? as u32,
        due_at: row.time(2)?,
        lease_until: Timestamp::default(),
        lease_token: hold.mint(),
        attempts: row.int(4)? as u32,
        crashes: hold.suspicion(&claim.owner).min(claim.max_crashes.max(hold.crashes)),
        maybe_sent: row.bool(6)? || (takeover && !claim.send_begun),
        target: row.opt_text(7)?,
        active_key: row.opt_text(8)?,
        payload: row.opt_bytes(9)?.unwrap_or_else(Bytes::new),
        content_type: row.opt_text(10)?,
        headers: parse_headers(row.opt_text(11)?.as_deref()),
        payload_sha: row.opt_bytes(12)?.and_then(|sha| sha.as_ref().try_into().ok()),
        correlation_id: row.opt_text(13)?,
        created_at: row.time(14)?,
        deliver_before: row.opt_time(15)?,
        taken_over_from: if takeover { hold.locked_by } else { None },
    })
}

/// The short cut: lock, compare in Rust, move the winners with one INSERT … SELECT and one DELETE.
async fn settle_sent_on(
    conn: &mut Conn,
    now: &str,
    keep: bool,
    lane: &str,
    owner: &str,
    entries: &[Settlement],
) -> Result<Vec<Settled>> {
    conn.query_drop(BEGIN).await.map_err(|e| classify(&e))?;
    match move_sent(conn, now, keep, lane, owner, entries).await {
        Ok(answers) => {
            conn.query_drop("COMMIT").await.map_err(|e| at_commit(&e))?;
            Ok(answers)
        }
        Err(error) => roll_back(conn, error).await,
    }
}

async fn move_sent(
    conn: &mut Conn,
    now: &str,
    keep: bool,
    lane: &str,
    owner: &str,
    entries: &[Settlement],
) -> Result<Vec<Settled>> {
    let sql = format!(
        "SELECT id, lease_token, active_key FROM outbox FORCE INDEX (PRIMARY) WHERE id IN ({}) AND locked_by = {} AND lane = {} ORDER BY id FOR UPDATE SKIP LOCKED",
        list(entries.iter().map(|e| e.lease.id)),
        literal(owner),
        literal(lane)
    );
    // Never INSERT … SELECT without this lock: under READ COMMITTED it takes none, and a message ends up live and done.
    let rows: Vec<(i64, i64, Option<Vec<u8>>)> = Queryable::query(conn, sql).await.map_err(|e| classify(&e))?;
    if rows.len() < entries.len() {
        // Lost, or locked by somebody else, who is not waited for: the whole rule tells which.
        return Err(Error::new(Kind::Conflict, "not every row of the batch can be had at once"));
    }
    let text = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
    let held: HashMap<(i64, i64), Option<Vec<u8>>> = rows.into_iter().map(|row| ((row.0, row.1), row.2)).collect();
    let is_held = |e: &Settlement| held.contains_key(&(e.lease.id, e.lease.token));
    let key = |e: &Settlement| held.get(&(e.lease.id, e.lease.token))?.as_deref().map(text);
    let keys: Vec<_> = entries.iter().filter_map(|e| Some((e.lease.id, key(e)?))).collect();
    let locked = active_keys::free(&mut MysqlTx { conn, skew: 0, begun: true, failed: false }, lane, &keys).await?;
    let won: Vec<&Settlement> = entries.iter().filter(|e| is_held(e) && !locked.contains(&e.lease.id)).collect();
    if !won.is_empty() {
        let won_ids: Vec<i64> = won.iter().map(|e| e.lease.id).collect();
        let gone = |of| settle::delete_by(Dialect::Mysql, of, &won_ids, &mut Vec::new());
        if keep {
            let ids = list(won_ids.iter().copied());
            let references: String = won
                .iter()
                .filter_map(|e| match &e.verdict {
                    Verdict::Sent { result_ref: Some(reference), .. } => Some(format!(
                        " WHEN {} THEN CONVERT({} USING utf8mb4)",
                        e.lease.id,
                        literal(&cut_error(reference))
                    )),
                    _ => None,
                })
                .collect();
            let reference = if references.is_empty() { "NULL".to_owned() } else { format!("CASE id{references} END") };
            let moved = settle::MOVED;
            let sql = format!(
                "INSERT INTO outbox_done ({moved}, attempts, last_error_code, last_error, maybe_sent, crashes, result_ref, status, updated_at, finished_at)
                 SELECT {moved}, attempts, last_error_code, last_error, maybe_sent, crashes, {reference}, 'sent', {now}, {now}
                 FROM outbox FORCE INDEX (PRIMARY) WHERE id IN ({ids}) ORDER BY id"
            );
            expect_all(conn, &sql, won.len()).await?;
        }
        if !keep {
            // A lane that keeps nothing of what was sent keeps no history of it either.
            run(conn, &gone(("outbox_attempts", "outbox_id")), &[]).await.map_err(|e| classify(&e))?;
        }
        expect_all(conn, &gone(("outbox", "id")), won.len()).await?;
    }
    let answer = |e: &Settlement| match (is_held(e), locked.contains(&e.lease.id)) {
        (true, false) => Settled::Applied,
        (true, true) => Settled::Locked,
        (false, _) => Settled::LeaseLost,
    };
    Ok(entries.iter().map(answer).collect())
}

async fn expect_all(conn: &mut Conn, sql: &str, expected: usize) -> Result<()> {
    let (_, changed) = run(conn, sql, &[]).await.map_err(|e| classify(&e))?;
    if changed == expected as u64 {
        return Ok(());
    }
    Err(Error::database(format!("a settle changed {changed} rows instead of {expected}; it was rolled back")))
}

/// Errors that say "this step was done already": the process died between the statement and its bookkeeping.
const ALREADY_DONE: [u16; 7] = [1050, 1304, 1359, 1060, 1061, 1062, 1091];

async fn lock_to_migrate(conn: &mut Conn) -> Result<bool> {
    let lock = "SELECT GET_LOCK(CONCAT('postrider:', DATABASE()), 0)";
    let got: Option<Option<i64>> = conn.query_first(lock).await.map_err(|e| classify(&e))?;
    Ok(got.flatten() == Some(1))
}

/// Migrations that are missing, with how far each has got, if it was begun.
type Missing = Vec<(Migration, Option<i64>)>;

async fn missing_on(conn: &mut Conn, schema: &Schema) -> Result<Missing> {
    let fail = |e: mysql_async::Error| classify(&e).of_migration();
    conn.query_drop(migrate::BOOKKEEPING).await.map_err(fail)?;
    let rows: Vec<(i64, i64)> =
        Queryable::query(conn, "SELECT version, steps FROM postrider_migrations").await.map_err(fail)?;
    // A negative count is how far a run got that did not finish.
    let stopped = |of: &Migration| rows.iter().find(|(version, _)| *version == of.version).map(|(_, steps)| -steps - 1);
    Ok(schema.missing_of(&rows)?.into_iter().map(|missing| (missing, stopped(&missing))).collect())
}

async fn migrate_on(conn: &mut Conn, missing: Missing) -> Result<Vec<String>> {
    let fail = |e: mysql_async::Error| classify(&e);
    if missing.is_empty() {
        return Ok(vec![]);
    }
    // A change of a table that waits for somebody's transaction keeps everybody behind it waiting.
    conn.query_drop("SET SESSION innodb_lock_wait_timeout = 5, lock_wait_timeout = 5").await.map_err(fail)?;
    for step in migrate::steps(migrate::drop_views(Dialect::Mysql)) {
        conn.query_drop(step).await.map_err(fail)?;
    }
    for (migration, stopped) in &missing {
        let stopped = *stopped;
        let begun = stopped.unwrap_or(0);
        let (version, name) = (migration.version, migration.name);
        let start = "INSERT IGNORE INTO postrider_migrations VALUES (?, ?, -1)";
        conn.exec_drop(start, (version, name)).await.map_err(fail)?;
        for (n, step) in migrate::steps(migration.sql(Dialect::Mysql)).into_iter().enumerate().skip(begun as usize) {
            match conn.query_drop(step).await {
                Err(mysql_async::Error::Server(e)) if stopped == Some(n as i64) && ALREADY_DONE.contains(&e.code) => {}
                other => other.map_err(fail)?,
            }
            let done = -(n as i64) - 2;
            conn.exec_drop("UPDATE postrider_migrations SET steps = ? WHERE version = ?", (done, version))
                .await
                .map_err(fail)?;
        }
    }
    for step in migrate::steps(migrate::views(Dialect::Mysql)) {
        conn.query_drop(step).await.map_err(fail)?;
    }
    // Only now: a run that dies before its views are back must be taken up again.
    conn.query_drop("UPDATE postrider_migrations SET steps = 0 WHERE steps < 0").await.map_err(fail)?;
    conn.query_drop(format!("SET SESSION {LOCK_WAITS}")).await.map_err(fail)?;
    Ok(missing.iter().map(|(migration, _)| migration.name.to_owned()).collect())
}

#[async_trait]
impl Store for MysqlStore {
    fn dialect(&self) -> Dialect {
        Dialect::Mysql
    }

    fn lanes(&self) -> &Arc<Lanes> {
        &self.lanes
    }

    fn schema(&self) -> &Schema {
        &self.schema
    }

    async fn migrate(&self) -> Result<Vec<String>> {
        let lanes = self.lanes.clone();
        let mut loan = self.pool.take().await?;
        let conn: &mut Conn = &mut loan.connection;
        let turn = Turn::begin();
        while !self.pool.timed(lock_to_migrate(conn)).await?? {
            turn.is_anothers().await?;
        }
        let missing = self.pool.timed(missing_on(conn, &self.schema)).await??;
        // Every statement of it is its own transaction: what failed comes after something that was applied.
        let ran = migrate_on(conn, missing).await.map_err(|error| error.of_migration().after(true));
        let unlock = self.pool.timed(conn.query_drop("DO RELEASE_LOCK(CONCAT('postrider:', DATABASE()))")).await;
        let ran = ran?;
        unlock?.map_err(|e| classify(&e).after(!ran.is_empty()))?;
        self.pool.give_back(loan);
        let changed = !ran.is_empty();
        transact(self, Mode::Write, move |tx| {
            let lanes = lanes.clone();
            Box::pin(async move { cold::register_lanes(tx, &lanes, Register::Missing).await })
        })
        .await
        .map_err(|error| error.after(changed))?;
        Ok(ran)
    }

    async fn claim(&self, claim: &Claim) -> Result<Claimed> {
        let now = self.now();
        rerun(self.deadline, false, || async {
            let mut loan = self.pool.take().await?;
            let answer = self.pool.timed(claim_on(&mut loan.connection, claim, &now)).await?;
            self.keep_if_clean(loan, &answer);
            answer
        })
        .await
    }

    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
        let now = self.now();
        let sql = walk_sql(lane, shard, after, limit, &now);
        let mut loan = self.pool.take().await?;
        let answer = self.pool.timed(async {
            let conn: &mut Conn = &mut loan.connection;
            let (rows, _) = run(conn, &sql, &[]).await.map_err(|e| classify(&e))?;
            let (clock, _) = run(conn, &format!("SELECT {now}"), &[]).await.map_err(|e| classify(&e))?;
            let now = clock.first().map_or(Ok(Timestamp::default()), |row| row.time(0))?;
            Ok(Walked { seen: rows.iter().map(super::seen_of).collect::<Result<_>>()?, now })
        });
        let answer = answer.await?;
        self.keep_if_clean(loan, &answer);
        answer
    }

    async fn settle(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Result<Vec<Settled>> {
        let rules = self.lanes.get(lane)?.clone();
        settle_by_parts(self, rules, lane.to_owned(), owner.to_owned(), entries.to_vec()).await
    }

    async fn renew(&self, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>> {
        super::renew(self, owner, leases, lease).await
    }

    async fn defer(&self, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>> {
        super::defer(self, owner, leases, how).await
    }

    async fn transact(&self, mode: Mode, work: Work) -> Result<()> {
        let work = Arc::new(tokio::sync::Mutex::new(work));
        let done = rerun(self.deadline, mode != Mode::Work, || async {
            let mut loan = self.pool.take_for(mode).await?;
            let mut work = work.lock().await;
            let skew = self.skew.micros();
            let answer = self.pool.timed(in_transaction(&mut loan.connection, skew, &mut work)).await?;
            self.keep_if_clean(loan, &answer);
            answer
        });
        done.await.map_err(|error| if mode.writes() { error } else { error.of_read() })
    }

    async fn vitals(&self) -> Result<Vitals> {
        Ok(Vitals { pool: Some(self.pool.connections()), ..Vitals::default() })
    }

    fn advance_clock(&self, by: Duration) {
        self.skew.advance(by);
    }
}

#[async_trait]
impl super::Shortcut for MysqlStore {
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
        let (now, keep) = (self.now(), !rules.retention.is_zero());
        rerun(self.deadline, false, || async {
            let mut loan = self.pool.take().await?;
            let work = settle_sent_on(&mut loan.connection, &now, keep, lane, owner, entries);
            let answer = self.pool.timed(work).await?;
            self.keep_if_clean(loan, &answer);
            answer
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_servers_are_refused() {
        for version in
            ["10.6.0-MariaDB", "10.11.19-MariaDB-0+deb12u1-log", "8.0.4-rc-log", "9.7.4-2", "10.5.0", "other"]
        {
            assert_eq!(too_old(version), None);
        }
        let says = |version| too_old(version).unwrap();
        assert!(says("10.5.29-MariaDB").starts_with("MariaDB 10.5.29-MariaDB is too old: 10.6.0 and newer will do"));
        assert!(says("5.7.44-log").starts_with("MySQL 5.7.44-log is too old: 8.0.4 and newer will do"));
    }
}
