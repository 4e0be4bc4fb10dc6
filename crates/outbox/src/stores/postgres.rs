//! PostgreSQL 13+. A claim is one statement whose UPDATE touches no indexed column (HOT); BEGIN, statement and COMMIT go
//! out together. Works through a transaction-mode pooler with notifications off.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::{
    TryStreamExt,
    future::{join, join4},
    pin_mut,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Config, RowStream, SimpleQueryMessage, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::pool::{Connect, Loan, Pool};
use super::postgres_timeline::{self as timeline, TOKEN_FLOOR};
use super::{Options, Skew, Turn, postgres_tls, rerun, settle_by_parts, without_password, without_values};
use crate::cold::{self, Register};
use crate::error::{Effect, Error, Kind, Result, advice, postgres_kind};
use crate::lanes::{LaneRules, Lanes};
use crate::lease::{LAST_TOKEN, Lease};
use crate::message::{Message, cut_error, parse_headers};
use crate::migrate::{self, Schema};
use crate::outcome::{GiveBack, LeaseState, Settled, Settlement, Verdict};
use crate::settle;
use crate::store::{Claim, Claimed, From, Mark, Mode, Store, Vitals, Walked, Work, transact};
use crate::time::{Timestamp, micros_of};
use crate::tx::{BoxFuture, Dialect, Now, Row, Tx, Value, numbered};

/// READ COMMITTED whatever the role's default.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";

/// The hot statements walk an index in its order or look ids up, always: with statistics from a smaller day PostgreSQL
/// would rather sort all that is due, for every claim.
#[doc(hidden)]
pub const BEGIN_BY_INDEX: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_seqscan = off";

/// A migration that we say nothing about for so long has been given up.
const MIGRATION_SILENCE: Duration = Duration::from_secs(5);

/// What bounds a transaction on the server, so that what we give up ends there, too: it waits for a lock of somebody else's
/// only for a moment, outlives our deadline by nothing, and if the network cuts it off it does not hold its locks for long.
#[derive(Clone)]
struct Limits([(&'static str, u128); 3]);

impl Limits {
    fn new(options: &Options) -> Self {
        Limits([
            ("lock_timeout", options.lock_wait().as_millis()),
            ("statement_timeout", options.deadline.as_millis().max(1)),
            ("idle_in_transaction_session_timeout", options.silence().as_millis()),
        ])
    }

    /// For one transaction.
    fn local(&self) -> String {
        self.0.map(|(name, ms)| format!("SET LOCAL {name} = {ms}")).join("; ")
    }

    /// The same connection, with a session that is to have them from its start.
    fn asked_for(&self, config: &Config) -> Config {
        let (given, ours) =
            (config.get_options().unwrap_or_default(), self.0.map(|(name, ms)| format!("-c {name}={ms}")));
        let mut config = config.clone();
        config.options(format!("{given} {}", ours.join(" ")).trim_start());
        config
    }

    /// Does the session have them?
    fn in_force(&self) -> String {
        let each = self.0.map(|(name, ms)| format!("current_setting('{name}')::interval = '{ms} ms'::interval"));
        format!("SELECT {}", each.join(" AND "))
    }
}

/// What begins a transaction: `plain` and `by_index` in a session that has the limits, else the next two; the last two where
/// the server may have become another.
struct Begin {
    plain: &'static str,
    by_index: &'static str,
    plain_limited: String,
    by_index_limited: String,
    plain_asking: String,
    by_index_asking: String,
    /// To migrate: what it changes takes as long as it takes.
    migration: String,
}

impl Begin {
    fn new(options: &Options) -> Self {
        let limits = Limits::new(options).local();
        let with = |begin: &str| format!("{begin}; {limits}");
        let asking = |begin: &str| format!("{begin}; {limits}; {}", timeline::or_end());
        // A change of a table that waits for somebody's lock keeps everybody behind it waiting.
        // Between its statements a busy machine may need a while, however short the leases are.
        let patience = options.silence().max(MIGRATION_SILENCE).as_millis();
        let migration = format!(
            "{BEGIN}; SET LOCAL lock_timeout = '5s'; SET LOCAL statement_timeout = 0; \
             SET LOCAL idle_in_transaction_session_timeout = {patience}"
        );
        Begin {
            plain: BEGIN,
            by_index: BEGIN_BY_INDEX,
            plain_limited: with(BEGIN),
            by_index_limited: with(BEGIN_BY_INDEX),
            plain_asking: asking(BEGIN),
            by_index_asking: asking(BEGIN_BY_INDEX),
            migration,
        }
    }

    fn of(&self, connection: &Connection, by_index: bool) -> &str {
        match (connection.limited, connection.asks, by_index) {
            (true, _, false) => self.plain,
            (true, _, true) => self.by_index,
            (false, false, false) => &self.plain_limited,
            (false, false, true) => &self.by_index_limited,
            (false, true, false) => &self.plain_asking,
            (false, true, true) => &self.by_index_asking,
        }
    }
}

pub struct PostgresStore {
    lanes: Arc<Lanes>,
    schema: Schema,
    skew: Arc<Skew>,
    pool: Pool<Connector>,
    begin: Begin,
    deadline: Duration,
    listener: Option<Arc<Listener>>,
}

/// Statements a connection keeps prepared.
const MOST_STATEMENTS: usize = 200;

struct Connector {
    config: Config,
    tls: MakeRustlsConnect,
    shown: String,
    limits: Limits,
    /// That nobody could lift ids and tokens after a failover.
    is_told: AtomicBool,
    /// A pooler stands between us and the server and takes no settings for a session.
    refuses_settings: AtomicBool,
}

pub(crate) struct Connection {
    client: Client,
    /// What the server says of its version.
    server: String,
    /// The session has our limits, so no transaction needs to set them. Not so behind a pooler.
    limited: bool,
    /// The server behind it may become another, so each transaction asks which it is.
    asks: bool,
    statements: HashMap<String, Statement>,
    driver: tokio::task::JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort(); // closes the socket now, whatever is under way on it
    }
}

#[async_trait]
impl Connect for Connector {
    type Connection = Connection;

    async fn connect(&self) -> Result<Connection> {
        let begun = async {
            let mut connection =
                self.begin_session().await.map_err(|e| Error { kind: Kind::Unreachable, ..classify(&e) })?;
            if is_too_old(&connection.server) {
                let text = format!("PostgreSQL {} is too old: 13 and newer will do", connection.server);
                return Err(Error::new(Kind::Schema, text));
            }
            connection.asks = timeline::look(&connection.client, &self.is_told).await? && !connection.limited;
            Ok(connection)
        };
        begun.await.map_err(|e: Error| e.during(&format!("cannot connect to {}", self.shown)))
    }

    fn is_open(connection: &Connection) -> bool {
        !connection.client.is_closed()
    }
}

impl Connector {
    /// With our limits if it can have them. They are asked for at its start, never by SET: behind a pooler that would
    /// leave them to somebody else.
    async fn begin_session(&self) -> Result<Connection, tokio_postgres::Error> {
        if self.refuses_settings.load(Ordering::Relaxed) {
            return open(&self.config, &self.tls).await;
        }
        match open(&self.limits.asked_for(&self.config), &self.tls).await {
            Ok(mut connection) => {
                // A pooler may also have taken no notice.
                let answer = connection.client.simple_query(&self.limits.in_force()).await?;
                connection.limited = answer.iter().any(is_true);
                Ok(connection)
            }
            Err(error) if refuses_settings(&error) => {
                self.refuses_settings.store(true, Ordering::Relaxed);
                open(&self.config, &self.tls).await
            }
            Err(error) => Err(error),
        }
    }
}

async fn open(config: &Config, tls: &MakeRustlsConnect) -> Result<Connection, tokio_postgres::Error> {
    let (client, connection) = config.connect(tls.clone()).await?;
    let server = connection.parameter("server_version").unwrap_or_default().to_owned();
    let driver = tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a PostgreSQL connection ended");
        }
    });
    Ok(Connection { client, server, limited: false, asks: false, statements: HashMap::new(), driver })
}

/// `12.22 (Debian 12.22-1)`, `17beta1`; what is no number is somebody else's way to count.
fn is_too_old(version: &str) -> bool {
    let major = version.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    major.parse::<u32>().is_ok_and(|major| major < 13)
}

fn is_true(answer: &SimpleQueryMessage) -> bool {
    matches!(answer, SimpleQueryMessage::Row(row) if row.get(0) == Some("t"))
}

/// As pgbouncer and its kind answer `options` that they do not know.
fn refuses_settings(error: &tokio_postgres::Error) -> bool {
    let refusals = [SqlState::PROTOCOL_VIOLATION, SqlState::FEATURE_NOT_SUPPORTED, SqlState::UNDEFINED_OBJECT];
    error.code().is_some_and(|code| refusals.contains(code))
}

impl Connection {
    async fn prepared(&mut self, begin: &str, sql: &str) -> Result<Statement> {
        if let Some(statement) = self.statements.get(sql) {
            return Ok(statement.clone());
        }
        self.prepare(Some(begin), sql, &[]).await
    }

    /// In a transaction of its own, unless one is under way: it waits for locks on tables, too, and `begin` says for how
    /// long.
    async fn prepare(&mut self, begin: Option<&str>, sql: &str, types: &[Type]) -> Result<Statement> {
        let prepared = async {
            if let Some(begin) = begin {
                self.client.batch_execute(begin).await?;
            }
            self.client.prepare_typed(sql, types).await
        };
        let prepared = prepared.await.map_err(|e| classify(&e));
        if begin.is_some() {
            self.client.batch_execute("ROLLBACK").await.map_err(|e| {
                let mut lost = classify(&e);
                lost.kind = Kind::Unreachable;
                lost
            })?;
        }
        let statement = prepared?;
        self.statements.insert(sql.to_owned(), statement.clone());
        Ok(statement)
    }

    /// The same with the types of its values; none once there are so many texts that keeping them would not pay.
    async fn prepared_typed(&mut self, begin: Option<&str>, sql: &str, types: &[Type]) -> Result<Option<Statement>> {
        if let Some(statement) = self.statements.get(sql).filter(|known| known.params() == types) {
            return Ok(Some(statement.clone()));
        }
        if self.statements.len() >= MOST_STATEMENTS {
            return Ok(None);
        }
        self.prepare(begin, sql, types).await.map(Some)
    }

    /// BEGIN, one statement and COMMIT in one round trip.
    async fn run_one(
        &mut self,
        begin: &str,
        sql: &str,
        params: &[&(dyn ToSql + Sync)],
    ) -> Result<(Vec<tokio_postgres::Row>, Timestamp)> {
        let statement = self.prepared(begin, sql).await?;
        let clock = self.prepared(begin, "SELECT clock_timestamp()").await?;
        let (begun, rows, clock, committed) = join4(
            self.client.batch_execute(begin),
            self.client.query(&statement, params),
            self.client.query_one(&clock, &[]),
            self.client.batch_execute("COMMIT"),
        )
        .await;
        // Everything was on its way when the BEGIN failed, and without it the statement was a transaction of its own.
        begun.map_err(|e| classify(&e).unknown())?;
        // An error of the statement itself is definite; a broken connection is not: the COMMIT was on its way.
        let rows = rows.map_err(|e| at_commit(&e))?;
        committed.map_err(|e| at_commit(&e))?;
        let now = clock.map_err(|e| at_commit(&e))?.try_get::<_, Timestamp>(0).map_err(|e| classify(&e))?;
        Ok((rows, now))
    }
}

fn at_commit(error: &tokio_postgres::Error) -> Error {
    let classified = classify(error);
    if error.as_db_error().is_some() && classified.kind != Kind::Unreachable {
        classified
    } else {
        classified.unknown()
    }
}

pub(crate) fn classify(error: &tokio_postgres::Error) -> Error {
    let Some(db) = error.as_db_error() else {
        return Error::new(Kind::Unreachable, format!("PostgreSQL: {}", chain(error)));
    };
    let code = db.code().code();
    let kind = postgres_kind(code);
    Error::new(kind, format!("PostgreSQL: {} ({code}){}", without_values(db.message()), advice(kind, code)))
}

pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// Microseconds between 1970 and 2000, PostgreSQL's epoch.
const EPOCH: i64 = 946_684_800_000_000;

impl ToSql for Timestamp {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(&(self.micros() - EPOCH).to_be_bytes());
        Ok(IsNull::No)
    }
    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
    to_sql_checked!();
}

impl<'a> FromSql<'a> for Timestamp {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Timestamp::from_micros(i64::from_be_bytes(raw.try_into()?).saturating_add(EPOCH)))
    }
    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TIMESTAMPTZ | Type::TIMESTAMP)
    }
}

impl ToSql for Value {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        match self {
            Value::Null => Ok(IsNull::Yes),
            Value::Bool(v) => v.to_sql(ty, out),
            Value::Int(v) => v.to_sql(ty, out),
            Value::Float(v) => v.to_sql(ty, out),
            Value::Text(v) => v.to_sql(ty, out),
            Value::Bytes(v) => v.as_ref().to_sql(ty, out),
            Value::Time(v) => v.to_sql(ty, out),
            Value::Ints(v) => v.to_sql(ty, out),
            Value::Texts(v) => v.to_sql(ty, out),
            Value::Blobs(v) => v.iter().map(|b| b.as_deref()).collect::<Vec<_>>().to_sql(ty, out),
            Value::Times(v) => v.to_sql(ty, out),
        }
    }
    fn accepts(_: &Type) -> bool {
        true // the type always comes from `type_of`
    }
    to_sql_checked!();
}

fn type_of(value: &Value) -> Type {
    match value {
        Value::Null => Type::UNKNOWN,
        Value::Bool(_) => Type::BOOL,
        Value::Int(_) => Type::INT8,
        Value::Float(_) => Type::FLOAT8,
        Value::Text(_) => Type::TEXT,
        Value::Bytes(_) => Type::BYTEA,
        Value::Time(_) => Type::TIMESTAMPTZ,
        Value::Ints(_) => Type::INT8_ARRAY,
        Value::Texts(_) => Type::TEXT_ARRAY,
        Value::Blobs(_) => Type::BYTEA_ARRAY,
        Value::Times(_) => Type::TIMESTAMPTZ_ARRAY,
    }
}

/// Any column of ours as a [`Value`].
impl<'a> FromSql<'a> for Value {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(match *ty {
            Type::BOOL => Value::Bool(bool::from_sql(ty, raw)?),
            Type::INT2 => Value::Int(i16::from_sql(ty, raw)?.into()),
            Type::INT4 => Value::Int(i32::from_sql(ty, raw)?.into()),
            Type::INT8 => Value::Int(i64::from_sql(ty, raw)?),
            Type::FLOAT4 => Value::Float(f32::from_sql(ty, raw)?.into()),
            Type::FLOAT8 => Value::Float(f64::from_sql(ty, raw)?),
            Type::BYTEA => Value::Bytes(Bytes::copy_from_slice(raw)),
            Type::TIMESTAMPTZ | Type::TIMESTAMP => Value::Time(Timestamp::from_sql(ty, raw)?),
            Type::JSONB => Value::Text(String::from_utf8_lossy(raw.get(1..).unwrap_or_default()).into_owned()),
            _ => Value::Text(String::from_utf8_lossy(raw).into_owned()),
        })
    }
    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Value::Null)
    }
    fn accepts(_: &Type) -> bool {
        true
    }
}

/// One statement in one round trip, without a named statement left behind in the caller's session.
async fn run_typed<C: tokio_postgres::GenericClient>(
    client: &C,
    sql: &str,
    params: &[Value],
) -> Result<(Vec<Row>, u64)> {
    let typed: Vec<(&Value, Type)> = params.iter().map(|v| (v, type_of(v))).collect();
    let sql = numbered(sql);
    read(client.query_typed_raw(&sql, typed).await.map_err(|e| classify(&e))?).await
}

async fn read(stream: RowStream) -> Result<(Vec<Row>, u64)> {
    pin_mut!(stream);
    let mut rows = Vec::new();
    while let Some(row) = stream.try_next().await.map_err(|e| classify(&e))? {
        let values = (0..row.len()).map(|i| row.try_get::<_, Value>(i)).collect::<Result<Vec<_>, _>>();
        rows.push(Row(values.map_err(|e| classify(&e))?));
    }
    Ok((rows, stream.rows_affected().unwrap_or(0)))
}

/// The caller's own transaction (or client, with a transaction the caller began).
macro_rules! caller_tx {
    ($type:ty) => {
        impl Tx for $type {
            fn dialect(&self) -> Dialect {
                Dialect::Postgres
            }
            fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
                Box::pin(async move { Ok(run_typed(self, sql, params).await?.0) })
            }
            fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
                Box::pin(async move { Ok(run_typed(self, sql, params).await?.1) })
            }
        }
    };
}
caller_tx!(tokio_postgres::Transaction<'_>);
caller_tx!(Client);

/// A transaction of the store's own. Its BEGIN goes out with the first statement; once one failed it refuses to commit.
struct PostgresTx<'c> {
    connection: &'c mut Connection,
    skew: i64,
    begin: Option<String>,
    failed: bool,
}

impl PostgresTx<'_> {
    async fn run(&mut self, sql: &str, params: &[Value]) -> Result<(Vec<Row>, u64)> {
        let begin = self.begin.take();
        let client = &self.connection.client;
        let answer = begun_with(client, begin, run_typed(client, sql, params)).await;
        self.failed |= answer.is_err();
        answer
    }

    async fn run_often(&mut self, sql: &str, params: &[Value]) -> Result<(Vec<Row>, u64)> {
        let types: Vec<Type> = params.iter().map(type_of).collect();
        let statement = match self.connection.prepared_typed(self.begin.as_deref(), &numbered(sql), &types).await {
            Ok(Some(statement)) => statement,
            Ok(None) => return self.run(sql, params).await,
            Err(error) => {
                self.failed = true;
                return Err(error);
            }
        };
        let begin = self.begin.take();
        let client = &self.connection.client;
        let run = async { read(client.query_raw(&statement, params).await.map_err(|e| classify(&e))?).await };
        let answer = begun_with(client, begin, run).await;
        self.failed |= answer.is_err();
        answer
    }
}

/// A statement, and the BEGIN before it if it is the first: both are on their way at once.
async fn begun_with<R>(client: &Client, begin: Option<String>, run: impl Future<Output = Result<R>>) -> Result<R> {
    let Some(begin) = begin else { return run.await };
    let (begun, answer) = join(client.batch_execute(&begin), run).await;
    // Without its BEGIN the statement was a transaction of its own.
    begun.map_err(|e| classify(&e).unknown()).and(answer)
}

impl Tx for PostgresTx<'_> {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    fn now(&self) -> Now {
        Now::Expression(now_sql(self.skew))
    }

    fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        Box::pin(async move { Ok(self.run(sql, params).await?.0) })
    }

    fn query_often<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        Box::pin(async move { Ok(self.run_often(sql, params).await?.0) })
    }

    fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
        Box::pin(async move { Ok(self.run(sql, params).await?.1) })
    }
}

fn now_sql(skew: i64) -> String {
    match skew {
        0 => "clock_timestamp()".to_owned(),
        // Before PostgreSQL 15 a literal of microseconds takes 31 bits.
        skew => format!("(clock_timestamp() + {skew} * INTERVAL '1 microsecond')"),
    }
}

impl PostgresStore {
    pub fn open(url: &str, lanes: Arc<Lanes>, options: Options) -> Result<Self> {
        let (mut config, tls) = postgres_tls::configure(url)?;
        config.application_name("postrider").connect_timeout(options.deadline).keepalives(true);
        config.keepalives_idle(Duration::from_secs(30)).tcp_user_timeout(options.deadline);
        let shown = without_password(url);
        let limits = Limits::new(&options);
        let listener = options.notifications.then(|| Arc::new(Listener::new(&config, tls.clone(), limits.clone())));
        let schema = Schema::with(&options.migrations);
        let refuses_settings = AtomicBool::new(false);
        let connector = Connector { config, tls, shown, limits, is_told: AtomicBool::new(false), refuses_settings };
        let pool = Pool::new(connector, &options);
        let (begin, deadline) = (Begin::new(&options), options.deadline);
        Ok(PostgresStore { lanes, schema, skew: Arc::default(), pool, begin, deadline, listener })
    }

    fn now(&self) -> String {
        now_sql(self.skew.micros())
    }

    /// Runs one statement in one transaction, again after a deadlock.
    async fn one(&self, sql: &str, params: &[&(dyn ToSql + Sync)]) -> Result<(Vec<tokio_postgres::Row>, Timestamp)> {
        rerun(self.deadline, false, || async {
            let mut loan = self.pool.take().await?;
            let begin = self.begin.of(&loan.connection, true);
            let answer = self.pool.timed(loan.connection.run_one(begin, sql, params)).await?;
            self.keep_if_clean(loan, &answer);
            answer
        })
        .await
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

async fn in_transaction(connection: &mut Connection, begin: &str, skew: i64, work: &mut Work) -> Result<()> {
    let mut tx = PostgresTx { connection, skew, begin: Some(begin.to_owned()), failed: false };
    let mut done = work(&mut tx).await;
    if done.is_ok() && tx.failed {
        done = Err(Error::database("a statement failed and its error was ignored; nothing was committed"));
    }
    if tx.begin.is_some() {
        return done; // it asked nothing, so nothing was begun
    }
    let client = &tx.connection.client;
    match done {
        Ok(()) => client.batch_execute("COMMIT").await.map_err(|e| at_commit(&e)),
        Err(error) => {
            client.batch_execute("ROLLBACK").await.map_err(|e| {
                // The connection will be closed, and the server rolls back.
                let mut lost = classify(&e);
                lost.kind = Kind::Unreachable;
                lost
            })?;
            Err(error)
        }
    }
}

const CLAIMED: &str = "o.id, o.shard_id, o.due_at, o.lease_until, o.lease_token, o.attempts, o.crashes, o.maybe_sent, o.target, o.active_key, \
                       o.payload, o.content_type, o.headers, o.payload_sha, o.correlation_id, o.created_at, o.deliver_before, c.previous";

/// The claim, as text: also what the EXPLAIN test looks at. $1 lane, $2 shard, $3 owner, $4 limit, $5 lease in
/// microseconds, $6/$7 mark, $8 ids, $9 the most crashes counted, $10 does the lane commit *send begun*?
#[doc(hidden)]
pub fn claim_sql(from: &From, now: &str) -> String {
    let free = format!("(lease_until IS NULL OR lease_until < (SELECT {now}))");
    let ordinary = "crashes + CASE WHEN locked_by <> $3 THEN 1 ELSE 0 END <= 1";
    // The bare call is volatile and never an index condition; as a subquery it is.
    let which = match from {
        From::Mark(_) => format!("(due_at, id) >= ($6, $7) AND {free} AND {ordinary} AND $8::bigint[] IS NOT NULL"),
        From::Adopt { .. } => {
            format!(
                "(due_at, id) >= ($6, $7) AND ({free} OR locked_by = $3) AND {ordinary} AND id <> ALL($8::bigint[])"
            )
        }
        From::Ids(_) => {
            format!("({free} OR locked_by = $3) AND id = ANY($8::bigint[]) AND (due_at, id) >= ($6, $7)")
        }
    };
    let own = if from.adopts() { " OR o.locked_by = $3" } else { "" };
    let again = format!("(o.lease_until IS NULL OR o.lease_until < {now}{own})");
    format!(
        "WITH c AS MATERIALIZED (
             SELECT id, locked_by AS previous, lease_token, attempts FROM outbox
             WHERE lane = $1 AND shard_id = $2 AND due_at <= (SELECT {now}) AND {which} AND lease_token < {LAST_TOKEN}
             ORDER BY due_at, id LIMIT $4 FOR NO KEY UPDATE SKIP LOCKED),
         taken AS (
             INSERT INTO outbox_attempts (outbox_id, lease_token, kind, attempt, worker, at)
             SELECT id, GREATEST(lease_token, {TOKEN_FLOOR}) + 1, 'takeover', attempts, previous, {now} FROM c WHERE previous <> $3)
         UPDATE outbox o SET lease_token = GREATEST(o.lease_token, {TOKEN_FLOOR}) + 1, locked_by = $3, locked_at = {now},
                lease_until = {now} + $5::bigint * INTERVAL '1 microsecond', updated_at = {now},
                crashes = GREATEST(o.crashes, LEAST(o.crashes + CASE WHEN o.locked_by <> $3 THEN 1 ELSE 0 END, $9)),
                maybe_sent = o.maybe_sent OR (coalesce(o.locked_by <> $3, FALSE) AND NOT $10::boolean)
         FROM c WHERE o.id = c.id AND {again}
         RETURNING {CLAIMED}"
    )
}

/// $1 lane, $2 shard, $3/$4 the last place seen, $5 limit.
#[doc(hidden)]
pub fn walk_sql(now: &str) -> String {
    format!(
        "SELECT due_at, id, lease_token, locked_by, lease_until, crashes FROM outbox
         WHERE lane = $1 AND shard_id = $2 AND due_at <= (SELECT {now}) AND (due_at, id) > ($3, $4) ORDER BY due_at, id LIMIT $5"
    )
}

/// $1 ids, $2 tokens, $3 references, $4 owner, $5 lane.
#[doc(hidden)]
pub fn settle_sent_sql(keep: bool, now: &str) -> String {
    let moved = settle::MOVED;
    // Entries come in id order and are looked up one by one, so rows are locked in that order.
    let gone = "DELETE FROM outbox o USING unnest($1::bigint[], $2::bigint[], $3::text[]) AS t(id, token, reference)
                WHERE o.id = t.id AND o.lease_token = t.token AND o.locked_by = $4 AND o.lane = $5";
    if !keep {
        return // A lane that keeps nothing of what was sent keeps no history of it either.
        format!(
            "WITH gone AS ({gone} RETURNING o.id),
                  attempts AS (DELETE FROM outbox_attempts a USING gone WHERE a.outbox_id = gone.id)
             SELECT id FROM gone"
        );
    }
    format!(
        "WITH gone AS ({gone} RETURNING o.*, t.reference)
         INSERT INTO outbox_done ({moved}, attempts, last_error_code, last_error, maybe_sent, crashes, result_ref, status, updated_at, finished_at)
         SELECT {moved}, attempts, last_error_code, last_error, maybe_sent, crashes, reference, 'sent', {now}, {now} FROM gone RETURNING id"
    )
}

fn message_of(row: &tokio_postgres::Row, claim: &Claim) -> Result<Message, tokio_postgres::Error> {
    let previous: Option<String> = row.try_get(17)?;
    Ok(Message {
        id: row.try_get(0)?,
        lane: claim.lane.clone(),
        shard_id: row.try_get::<_, i32>(1)? as u32,
        due_at: row.try_get(2)?,
        lease_until: row.try_get(3)?,
        lease_token: row.try_get(4)?,
        attempts: row.try_get::<_, i32>(5)? as u32,
        crashes: row.try_get::<_, i32>(6)? as u32,
        maybe_sent: row.try_get(7)?,
        target: row.try_get(8)?,
        active_key: row.try_get(9)?,
        payload: Bytes::copy_from_slice(row.try_get::<_, &[u8]>(10)?),
        content_type: row.try_get(11)?,
        headers: parse_headers(row.try_get::<_, Option<&str>>(12)?),
        payload_sha: row.try_get::<_, Option<&[u8]>>(13)?.and_then(|sha| sha.try_into().ok()),
        correlation_id: row.try_get(14)?,
        created_at: row.try_get(15)?,
        deliver_before: row.try_get(16)?,
        taken_over_from: previous.filter(|holder| *holder != claim.owner),
    })
}

#[async_trait]
impl Store for PostgresStore {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    fn lanes(&self) -> &Arc<Lanes> {
        &self.lanes
    }

    fn schema(&self) -> &Schema {
        &self.schema
    }

    async fn migrate(&self) -> Result<Vec<String>> {
        let lanes = self.lanes.clone();
        let loan = self.pool.take().await?;
        let client = &loan.connection.client;
        let turn = Turn::begin();
        while !self.pool.timed(begin_to_migrate(client, &self.begin.migration)).await?? {
            turn.is_anothers().await?;
        }
        let applied = self.pool.timed(migrations_applied(client)).await??;
        let missing = self.schema.missing(&applied)?;
        let run = async {
            if !missing.is_empty() {
                client.batch_execute(migrate::drop_views(Dialect::Postgres)).await?;
                for migration in &missing {
                    client.batch_execute(migration.sql(Dialect::Postgres)).await?;
                    let sql = "INSERT INTO postrider_migrations VALUES ($1, $2, 0)";
                    client.execute(sql, &[&migration.version, &migration.name]).await?;
                }
                client.batch_execute(migrate::views(Dialect::Postgres)).await?;
            }
            Ok::<(), tokio_postgres::Error>(())
        };
        run.await.map_err(|e| classify(&e).of_migration())?;
        self.pool.timed(client.batch_execute("COMMIT")).await?.map_err(|e| at_commit(&e).of_migration())?;
        self.pool.timed(timeline::remember(client, &self.schema)).await?;
        self.pool.give_back(loan);
        transact(self, Mode::Write, move |tx| {
            let lanes = lanes.clone();
            Box::pin(async move { cold::register_lanes(tx, &lanes, Register::Missing).await })
        })
        .await
        .map_err(|error| error.after(!missing.is_empty()))?;
        Ok(missing.iter().map(|m| m.name.to_owned()).collect())
    }

    async fn claim(&self, claim: &Claim) -> Result<Claimed> {
        let (mark, ids) = match &claim.from {
            From::Mark(mark) => (*mark, vec![]),
            From::Adopt { mark, known } => (*mark, known.clone()),
            From::Ids(ids) => (None, ids.clone()),
        };
        let mark = mark.unwrap_or(Mark::FIRST);
        let (shard, limit, lease) = (claim.shard as i32, i64::from(claim.limit), micros_of(claim.lease));
        let sql = claim_sql(&claim.from, &self.now());
        let max_crashes = claim.max_crashes as i32;
        let params: [&(dyn ToSql + Sync); 10] = [
            &claim.lane,
            &shard,
            &claim.owner,
            &limit,
            &lease,
            &mark.due_at,
            &mark.id,
            &ids,
            &max_crashes,
            &claim.send_begun,
        ];
        let (rows, now) = self.one(&sql, &params).await?;
        let mut messages =
            rows.iter().map(|row| message_of(row, claim)).collect::<Result<Vec<_>, _>>().map_err(|e| classify(&e))?;
        messages.sort_unstable_by_key(|m| (m.due_at, m.id));
        // What was skipped is locked by another claim, which takes it.
        let exhausted = (messages.len() as u32) < claim.limit;
        Ok(Claimed { messages, now: Timestamp::from_micros(now.micros() + self.skew.micros()), exhausted })
    }

    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
        let after = after.unwrap_or(Mark::FIRST);
        let sql = walk_sql(&self.now());
        let (shard, limit) = (shard as i32, i64::from(limit));
        let params: [&(dyn ToSql + Sync); 5] = [&lane, &shard, &after.due_at, &after.id, &limit];
        let (rows, now) = self.one(&sql, &params).await?;
        let mut seen = Vec::with_capacity(rows.len());
        for row in &rows {
            let values = (0..row.len()).map(|i| row.try_get::<_, Value>(i)).collect::<Result<Vec<_>, _>>();
            seen.push(super::seen_of(&Row(values.map_err(|e| classify(&e))?))?);
        }
        Ok(Walked { seen, now: Timestamp::from_micros(now.micros() + self.skew.micros()) })
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
        let skew = self.skew.micros();
        let done = rerun(self.deadline, mode != Mode::Work, || async {
            let mut loan = self.pool.take_for(mode).await?;
            let mut work = work.lock().await;
            let begin = self.begin.of(&loan.connection, mode == Mode::Look);
            let answer = self.pool.timed(in_transaction(&mut loan.connection, begin, skew, &mut work)).await?;
            self.keep_if_clean(loan, &answer);
            answer
        });
        done.await.map_err(|error| if mode.writes() { error } else { error.of_read() })
    }

    async fn notified(&self) {
        match &self.listener {
            Some(listener) => listener.clone().wait().await,
            None => std::future::pending().await,
        }
    }

    async fn notify(&self) -> Result<()> {
        if self.listener.is_none() {
            return Ok(());
        }
        let loan = self.pool.take().await?;
        // A hint is not worth a flush of the log: lost, the poll finds the message.
        let sql = "BEGIN; SET LOCAL synchronous_commit = off; NOTIFY postrider; COMMIT";
        let run = async { loan.connection.client.batch_execute(sql).await.map_err(|e| classify(&e)) };
        self.pool.timed(run).await??;
        // Only now: one that failed may have left its transaction open.
        self.pool.give_back(loan);
        Ok(())
    }

    async fn vitals(&self) -> Result<Vitals> {
        let pool = Some(self.pool.connections());
        let (dead_tuples, oldest_xmin_age) =
            transact(self, Mode::Read, |tx| Box::pin(async move { vacuum_standing(tx).await })).await?;
        Ok(Vitals { pool, dead_tuples, oldest_xmin_age, ..Vitals::default() })
    }

    fn advance_clock(&self, by: Duration) {
        self.skew.advance(by);
    }
}

/// Begins, if no other process migrates; then there is nothing to roll back either.
async fn begin_to_migrate(client: &Client, begin: &str) -> Result<bool> {
    let run = async {
        client.batch_execute(begin).await?;
        let row = client.query_one("SELECT pg_try_advisory_xact_lock(7305811283405)", &[]).await?;
        let ours: bool = row.try_get(0)?;
        if !ours {
            client.batch_execute("ROLLBACK").await?;
        }
        Ok::<bool, tokio_postgres::Error>(ours)
    };
    run.await.map_err(|e| classify(&e))
}

async fn migrations_applied(client: &Client) -> Result<Vec<i64>> {
    let run = async {
        client.batch_execute(migrate::BOOKKEEPING).await?;
        let rows = client.query("SELECT version FROM postrider_migrations", &[]).await?;
        rows.iter().map(|row| row.try_get::<_, i64>(0)).collect::<Result<Vec<i64>, _>>()
    };
    run.await.map_err(|e| classify(&e))
}

/// What vacuum has still to do in our tables, and what keeps it from that.
async fn vacuum_standing(tx: &mut (dyn Tx + Send)) -> Result<(Vec<(String, i64)>, Option<i64>)> {
    let tables = "SELECT relname::text, n_dead_tup FROM pg_stat_user_tables
                  WHERE relid IN (to_regclass('outbox'), to_regclass('outbox_done')) ORDER BY relname";
    let rows = tx.query(tables, &[]).await?;
    let dead = rows.iter().map(|row| Ok((row.text(0)?, row.int(1)?))).collect::<Result<_>>()?;
    let oldest = "SELECT max(age(xmin)) FROM (
                      SELECT backend_xmin AS xmin FROM pg_stat_activity WHERE pid <> pg_backend_pid()
                      UNION ALL SELECT xmin FROM pg_replication_slots UNION ALL SELECT transaction FROM pg_prepared_xacts) AS pins";
    let oldest = tx.query(oldest, &[]).await?;
    Ok((dead, oldest.first().map_or(Ok(None), |row| row.opt_int(0))?))
}

#[async_trait]
impl super::Shortcut for PostgresStore {
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
        let ids: Vec<i64> = entries.iter().map(|e| e.lease.id).collect();
        let tokens: Vec<i64> = entries.iter().map(|e| e.lease.token).collect();
        let references: Vec<Option<String>> = entries
            .iter()
            .map(|e| match &e.verdict {
                Verdict::Sent { result_ref, .. } => result_ref.as_deref().map(cut_error),
                _ => None,
            })
            .collect();
        let sql = settle_sent_sql(!rules.retention.is_zero(), &self.now());
        let params: [&(dyn ToSql + Sync); 5] = [&ids, &tokens, &references, &owner, &lane];
        let (rows, _) = self.one(&sql, &params).await?;
        let won: std::collections::HashSet<i64> =
            rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>().map_err(|e| classify(&e))?;
        Ok(ids.iter().map(|id| if won.contains(id) { Settled::Applied } else { Settled::LeaseLost }).collect())
    }
}

/// A connection of its own that LISTENs, reconnecting for ever; started when somebody first waits.
struct Listener {
    config: Config,
    tls: MakeRustlsConnect,
    limits: Limits,
    heard: Arc<Notify>,
    task: std::sync::OnceLock<tokio::task::JoinHandle<()>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

impl Listener {
    fn new(config: &Config, tls: MakeRustlsConnect, limits: Limits) -> Self {
        let (config, heard, task) = (limits.asked_for(config), Arc::default(), std::sync::OnceLock::new());
        Listener { config, tls, limits, heard, task }
    }

    async fn wait(self: Arc<Self>) {
        let listen = || listen(self.config.clone(), self.tls.clone(), self.limits.clone(), self.heard.clone());
        self.task.get_or_init(|| tokio::spawn(listen()));
        self.heard.notified().await;
    }
}

async fn listen(config: Config, tls: MakeRustlsConnect, limits: Limits, heard: Arc<Notify>) {
    loop {
        let is_pooled = match config.connect(tls.clone()).await {
            Ok((client, connection)) => hear(client, connection, &limits, &heard).await.is_ok_and(|listens| !listens),
            Err(error) => refuses_settings(&error),
        };
        if is_pooled {
            // There a LISTEN would be left to a session that serves others, and bring nothing.
            tracing::warn!(
                "a pooler stands before PostgreSQL, so it tells nobody of new messages: those of other processes are found when their lane is polled"
            );
            return;
        }
        tokio::time::sleep(Duration::from_secs(1).mul_f64(0.5 + crate::clock::chance())).await;
    }
}

/// Listens until the connection ends. Not at all, and so answers no, where a session does not have what it was asked to have.
async fn hear<S, T>(
    client: Client,
    mut connection: tokio_postgres::Connection<S, T>,
    limits: &Limits,
    heard: &Notify,
) -> Result<bool, tokio_postgres::Error>
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    let listening = async {
        if !client.simple_query(&limits.in_force()).await?.iter().any(is_true) {
            return Ok(false);
        }
        client.batch_execute("LISTEN postrider").await?;
        // What was sent while nobody listened was not heard: look once.
        heard.notify_one();
        std::future::pending().await
    };
    let messages = async {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if matches!(message, tokio_postgres::AsyncMessage::Notification(_)) {
                heard.notify_one();
            }
        }
    };
    tokio::select! {
        answer = listening => answer,
        () = messages => Ok(true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_servers_are_refused() {
        for version in ["13.23", "15.13 (Debian 15.13-0+deb12u1)", "19beta1", "", "CockroachDB"] {
            assert!(!is_too_old(version), "{version}");
        }
        for version in ["12.22 (Debian 12.22-1)", "9.6.24"] {
            assert!(is_too_old(version), "{version}");
        }
    }
}
