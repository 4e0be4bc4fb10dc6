//! A small port over the three drivers: run this statement with these values, give rows. The kernel's enqueue and audit
//! and the peers' own tables are written once on it; hot statements are written per database in `stores/`.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::time::Timestamp;

/// Which SQL the other side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    Sqlite,
    Postgres,
    /// MySQL and MariaDB.
    Mysql,
}

impl Dialect {
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Sqlite => "sqlite",
            Dialect::Postgres => "postgres",
            Dialect::Mysql => "mysql",
        }
    }
}

/// A value in a statement or a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Bytes(Bytes),
    Time(Timestamp),
    /// Arrays, for PostgreSQL's `unnest` and `= ANY` only.
    Ints(Vec<i64>),
    Texts(Vec<Option<String>>),
    Blobs(Vec<Option<Bytes>>),
    Times(Vec<Option<Timestamp>>),
}

impl Value {
    /// Only PostgreSQL takes these; anywhere else they would be lost.
    #[cfg(any(feature = "mysql", feature = "sqlx-mysql", feature = "sqlx-sqlite"))]
    pub(crate) fn is_array(&self) -> bool {
        matches!(self, Value::Ints(_) | Value::Texts(_) | Value::Blobs(_) | Value::Times(_))
    }
}

macro_rules! value_from {
    ($($type:ty => $variant:ident),*) => {$(
        impl From<$type> for Value { fn from(v: $type) -> Value { Value::$variant(v.into()) } }
        impl From<Option<$type>> for Value { fn from(v: Option<$type>) -> Value { v.map_or(Value::Null, Value::from) } }
    )*};
}
value_from!(bool => Bool, i64 => Int, u32 => Int, i32 => Int, f64 => Float, String => Text, &str => Text, Bytes => Bytes, Timestamp => Time);

impl From<&String> for Value {
    fn from(v: &String) -> Value {
        Value::Text(v.clone())
    }
}
impl From<&[u8]> for Value {
    fn from(v: &[u8]) -> Value {
        Value::Bytes(Bytes::copy_from_slice(v))
    }
}

/// One row of an answer, by position.
#[derive(Clone, Debug, PartialEq)]
pub struct Row(pub Vec<Value>);

impl Row {
    fn at(&self, index: usize) -> Result<&Value> {
        self.0.get(index).ok_or_else(|| Error::database(format!("the row has no column {index}")))
    }

    pub fn int(&self, index: usize) -> Result<i64> {
        self.opt_int(index)?.ok_or_else(|| unexpected(index, "a number", &Value::Null))
    }

    pub fn opt_int(&self, index: usize) -> Result<Option<i64>> {
        match self.at(index)? {
            Value::Null => Ok(None),
            Value::Int(n) => Ok(Some(*n)),
            Value::Bool(b) => Ok(Some(i64::from(*b))),
            Value::Float(f) => Ok(Some(*f as i64)),
            // Decimal results (SUM in MySQL) arrive as text.
            Value::Text(t) => {
                t.parse().map(Some).map_err(|_| unexpected(index, "a number", self.at(index).unwrap_or(&Value::Null)))
            }
            other => Err(unexpected(index, "a number", other)),
        }
    }

    pub fn opt_float(&self, index: usize) -> Result<Option<f64>> {
        match self.at(index)? {
            Value::Float(n) => Ok(Some(*n)),
            _ => Ok(self.opt_int(index)?.map(|n| n as f64)),
        }
    }

    pub fn text(&self, index: usize) -> Result<String> {
        self.opt_text(index)?.ok_or_else(|| unexpected(index, "text", &Value::Null))
    }

    pub fn opt_text(&self, index: usize) -> Result<Option<String>> {
        match self.at(index)? {
            Value::Null => Ok(None),
            Value::Text(t) => Ok(Some(t.clone())),
            Value::Bytes(b) => Ok(Some(String::from_utf8_lossy(b).into_owned())),
            other => Err(unexpected(index, "text", other)),
        }
    }

    pub fn opt_bytes(&self, index: usize) -> Result<Option<Bytes>> {
        match self.at(index)? {
            Value::Null => Ok(None),
            Value::Bytes(b) => Ok(Some(b.clone())),
            Value::Text(t) => Ok(Some(Bytes::copy_from_slice(t.as_bytes()))),
            // SQLite keeps what was inserted by hand as a number.
            Value::Int(n) => Ok(Some(n.to_string().into())),
            Value::Float(f) => Ok(Some(f.to_string().into())),
            other => Err(unexpected(index, "bytes", other)),
        }
    }

    pub fn bytes(&self, index: usize) -> Result<Bytes> {
        self.opt_bytes(index)?.ok_or_else(|| unexpected(index, "bytes", &Value::Null))
    }

    /// A time; SQLite keeps microseconds as a number.
    pub fn opt_time(&self, index: usize) -> Result<Option<Timestamp>> {
        match self.at(index)? {
            Value::Null => Ok(None),
            Value::Time(t) => Ok(Some(*t)),
            Value::Int(micros) => Ok(Some(Timestamp::from_micros(*micros))),
            Value::Float(micros) => Ok(Some(Timestamp::from_micros(*micros as i64))),
            other => Err(unexpected(index, "a time", other)),
        }
    }

    pub fn time(&self, index: usize) -> Result<Timestamp> {
        self.opt_time(index)?.ok_or_else(|| unexpected(index, "a time", &Value::Null))
    }

    pub fn bool(&self, index: usize) -> Result<bool> {
        Ok(self.int(index)? != 0)
    }
}

fn unexpected(index: usize, wanted: &str, seen: &Value) -> Error {
    let seen = match seen {
        Value::Null => "NULL",
        Value::Bool(_) => "a boolean",
        Value::Int(_) | Value::Float(_) => "a number",
        Value::Text(_) => "text",
        Value::Bytes(_) => "bytes",
        Value::Time(_) => "a time",
        _ => "an array",
    };
    Error::database(format!("column {index} should be {wanted}, but is {seen}"))
}

/// How a statement says "now".
#[derive(Clone, Debug)]
pub enum Now {
    /// SQL the database evaluates.
    Expression(String),
    /// A value to bind: on SQLite the process is the database.
    Moment(Timestamp),
}

impl Now {
    /// SQL for now plus so many microseconds; binds what it needs. No farther back than a thousand years: MySQL's times
    /// begin in the year 1000, and what lies before is no time to it but NULL.
    pub fn plus(&self, micros: i64, params: &mut Vec<Value>) -> String {
        let micros = micros.max(-1000 * 365 * 24 * 3_600_000_000);
        match self {
            Now::Moment(now) => {
                params.push(Value::Time(Timestamp::from_micros(now.micros().saturating_add(micros))));
                "?".to_owned()
            }
            Now::Expression(sql) if micros == 0 => sql.clone(),
            // Bound, not written into the text, so that one prepared statement serves every delay.
            Now::Expression(sql) => {
                params.push(Value::Int(micros));
                match sql.contains("UTC_TIMESTAMP") {
                    true => format!("({sql} + INTERVAL ? MICROSECOND)"),
                    false => format!("({sql} + ?::bigint * INTERVAL '1 microsecond')"),
                }
            }
        }
    }

    /// The same, to compare an indexed column with. PostgreSQL searches no index for what may change from row to row, as
    /// its clock may; it does for what a statement asks once.
    pub fn bound(&self, micros: i64, params: &mut Vec<Value>) -> String {
        let moment = self.plus(micros, params);
        if moment.contains("clock_timestamp") { format!("(SELECT {moment})") } else { moment }
    }
}

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// MySQL: the first id of the last insert, and the step between ids (more than 1 on Galera).
pub(crate) const LAST_INSERT_ID: &str =
    "SELECT CAST(LAST_INSERT_ID() AS SIGNED), CAST(@@auto_increment_increment AS SIGNED)";

/// MySQL: what an insert of several rows wrote. Their number is known in advance, so InnoDB hands out consecutive ids in
/// every lock mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inserted {
    pub count: u64,
    pub first_id: i64,
    pub step: i64,
}

impl Inserted {
    /// From the answer to [`LAST_INSERT_ID`].
    pub(crate) fn of(count: u64, answer: &[Row]) -> Result<Inserted> {
        let row = answer.first().ok_or_else(|| crate::error::Error::database("no last insert id"))?;
        Ok(Inserted { count, first_id: row.int(0)?, step: row.int(1)? })
    }

    pub(crate) fn ids(self) -> Vec<i64> {
        (0..self.count as i64).map(|n| self.first_id + n * self.step).collect()
    }
}

/// An open transaction: the caller's own, or the store's. Placeholders are `?` everywhere.
pub trait Tx {
    fn dialect(&self) -> Dialect;

    /// The database's clock, never the transaction's start.
    fn now(&self) -> Now {
        match self.dialect() {
            Dialect::Sqlite => Now::Moment(crate::clock::wall()),
            Dialect::Postgres => Now::Expression("clock_timestamp()".to_owned()),
            Dialect::Mysql => Now::Expression("UTC_TIMESTAMP(6)".to_owned()),
        }
    }

    /// Runs a statement that answers with rows.
    fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>>;

    /// The same, for a statement that comes often with few texts: where it pays, it stays prepared.
    fn query_often<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        self.query(sql, params)
    }

    /// MySQL: runs an insert and asks for its ids in one round trip, where the driver can.
    #[doc(hidden)]
    fn insert_at_once<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> Option<BoxFuture<'a, Result<Inserted>>> {
        let _ = (sql, params);
        None
    }

    /// Runs a statement and answers how many rows it changed. (An UPDATE that leaves a row as it was counts it on
    /// SQLite, PostgreSQL and, through sqlx, MySQL; mysql_async does not count it. Rely on it only where no row stays.)
    fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>>;
}

/// Turns `?` into `$1`, `$2`, … for PostgreSQL. Statements of ours hold no `?` in literals.
#[cfg(any(feature = "postgres", feature = "sqlx-postgres"))]
pub(crate) fn numbered(sql: &str) -> std::borrow::Cow<'_, str> {
    if !sql.contains('?') {
        return sql.into();
    }
    let mut out = String::with_capacity(sql.len() + 16);
    let mut n = 0;
    for c in sql.chars() {
        if c == '?' {
            n += 1;
            out.push_str(&format!("${n}"));
        } else {
            out.push(c);
        }
    }
    out.into()
}

pub use crate::settle::{delete_by, for_update, in_ids, skip_locked};

/// Drives a future whose every step is ready at once (statements on an in-process SQLite connection).
#[cfg(feature = "sqlite")]
pub(crate) fn ready_now<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(output) => output,
        std::task::Poll::Pending => unreachable!("a statement on an in-process connection never waits"),
    }
}
