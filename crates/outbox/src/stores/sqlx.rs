//! The caller's own transaction, when the caller uses sqlx: its connections as [`Tx`] (a `Transaction` and a
//! `PoolConnection` deref to one). Nothing here opens a connection or begins a transaction.

use ::sqlx::error::DatabaseError;
use ::sqlx::{AssertSqlSafe, Row as _, ValueRef as _};

#[cfg(feature = "sqlx-mysql")]
use crate::error::mysql_kind;
#[cfg(feature = "sqlx-postgres")]
use crate::error::postgres_kind;
#[cfg(feature = "sqlx-sqlite")]
use crate::error::sqlite_kind;
use crate::error::{Error, Kind, Result, advice};
use crate::tx::{BoxFuture, Dialect, Row, Tx, Value};

/// Runs a statement on a connection of sqlx. Statements are of ours or a peer's; values are always bound.
macro_rules! caller_tx {
    ($connection:ty, $dialect:expr, $classify:path, $bind:path, $cell:path, $sql:path, persistent = $persistent:literal) => {
        impl Tx for $connection {
            fn dialect(&self) -> Dialect {
                $dialect
            }

            fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
                Box::pin(async move {
                    refuse_arrays($dialect, params)?;
                    let statement = ::sqlx::query(AssertSqlSafe($sql(sql))).persistent($persistent);
                    let statement = params.iter().fold(statement, $bind);
                    let rows = statement.fetch_all(self).await.map_err(|e| $classify(&e))?;
                    let cells =
                        |row| (0..::sqlx::Row::len(row)).map(|i| $cell(row, i)).collect::<Result<_, _>>().map(Row);
                    rows.iter().map(cells).collect::<Result<_, _>>().map_err(|e| $classify(&e))
                })
            }

            fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
                Box::pin(async move {
                    refuse_arrays($dialect, params)?;
                    let statement = ::sqlx::query(AssertSqlSafe($sql(sql))).persistent($persistent);
                    let statement = params.iter().fold(statement, $bind);
                    Ok(statement.execute(self).await.map_err(|e| $classify(&e))?.rows_affected())
                })
            }
        }
    };
}

/// Only PostgreSQL takes a list as one value; elsewhere it would be lost.
fn refuse_arrays(dialect: Dialect, params: &[Value]) -> Result<()> {
    #[cfg(any(feature = "mysql", feature = "sqlx-mysql", feature = "sqlx-sqlite"))]
    if dialect != Dialect::Postgres && params.iter().any(Value::is_array) {
        return Err(Error::database("a list of values was bound, which only PostgreSQL takes"));
    }
    let _ = (dialect, params);
    Ok(())
}

/// What sqlx says, in our words; `kind` knows the database's own codes.
fn classify(product: &str, error: &::sqlx::Error, kind: impl FnOnce(&dyn DatabaseError) -> Kind) -> Error {
    use ::sqlx::Error as E;
    let kind = match error {
        E::Database(db) => kind(db.as_ref()),
        E::Io(_) | E::Tls(_) | E::PoolClosed | E::WorkerCrashed => Kind::Unreachable,
        E::PoolTimedOut => Kind::Overloaded,
        _ => Kind::Database,
    };
    let text = error.as_database_error().map_or_else(|| error.to_string(), |db| super::without_values(db.message()));
    Error::new(kind, format!("{product}: {text}{}", advice(kind, "")))
}

// ---- PostgreSQL ----

#[cfg(feature = "sqlx-postgres")]
mod postgres {
    use ::sqlx::encode::{Encode, IsNull};
    use ::sqlx::error::BoxDynError;
    use ::sqlx::postgres::types::Oid;
    use ::sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgRow, PgTypeInfo};
    use ::sqlx::{PgConnection, Postgres, Type};

    use super::*;
    use crate::time::Timestamp;

    // Not persistent: a named statement left in the session would not survive a transaction-mode pooler.
    caller_tx!(PgConnection, Dialect::Postgres, classify_postgres, bind, cell, numbered, persistent = false);

    type Query<'q> = ::sqlx::query::Query<'q, Postgres, ::sqlx::postgres::PgArguments>;

    /// Microseconds between 1970 and 2000, PostgreSQL's epoch.
    const EPOCH: i64 = 946_684_800_000_000;
    /// Types by number, so that sqlx need not ask the server for them.
    const UNSPECIFIED: PgTypeInfo = PgTypeInfo::with_oid(Oid(0));
    const TIMESTAMPTZ: PgTypeInfo = PgTypeInfo::with_oid(Oid(1184));
    const TIMESTAMPTZ_ARRAY: PgTypeInfo = PgTypeInfo::with_oid(Oid(1185));

    fn numbered(sql: &str) -> String {
        crate::tx::numbered(sql).into_owned()
    }

    fn classify_postgres(error: &::sqlx::Error) -> Error {
        classify("PostgreSQL", error, |db| db.code().map_or(Kind::Database, |code| postgres_kind(&code)))
    }

    struct Null;

    impl Type<Postgres> for Null {
        fn type_info() -> PgTypeInfo {
            UNSPECIFIED // the server infers it; a typed NULL would not fit every column
        }
    }
    impl Encode<'_, Postgres> for Null {
        fn encode_by_ref(&self, _: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
            Ok(IsNull::Yes)
        }
    }

    struct Moment(Timestamp);

    impl Type<Postgres> for Moment {
        fn type_info() -> PgTypeInfo {
            TIMESTAMPTZ
        }
    }
    impl PgHasArrayType for Moment {
        fn array_type_info() -> PgTypeInfo {
            TIMESTAMPTZ_ARRAY
        }
    }
    impl Encode<'_, Postgres> for Moment {
        fn encode_by_ref(&self, out: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
            out.extend_from_slice(&(self.0.micros() - EPOCH).to_be_bytes());
            Ok(IsNull::No)
        }
    }

    fn bind<'q>(statement: Query<'q>, value: &'q Value) -> Query<'q> {
        match value {
            Value::Null => statement.bind(Null),
            Value::Bool(v) => statement.bind(v),
            Value::Int(v) => statement.bind(v),
            Value::Float(v) => statement.bind(v),
            Value::Text(v) => statement.bind(v),
            Value::Bytes(v) => statement.bind(&v[..]),
            Value::Time(v) => statement.bind(Moment(*v)),
            Value::Ints(v) => statement.bind(v),
            Value::Texts(v) => statement.bind(v),
            Value::Blobs(v) => statement.bind(v.iter().map(|b| b.as_deref()).collect::<Vec<_>>()),
            Value::Times(v) => statement.bind(v.iter().map(|t| t.map(Moment)).collect::<Vec<_>>()),
        }
    }

    fn cell(row: &PgRow, index: usize) -> Result<Value, ::sqlx::Error> {
        let raw = row.try_get_raw(index)?;
        if raw.is_null() {
            return Ok(Value::Null);
        }
        let oid = raw.type_info().oid().map_or(0, |oid| oid.0);
        let bytes = raw.as_bytes().map_err(::sqlx::Error::Decode)?;
        let text = |bytes: &[u8]| Value::Text(String::from_utf8_lossy(bytes).into_owned());
        Ok(match oid {
            16 => Value::Bool(row.try_get(index)?),
            20 => Value::Int(row.try_get(index)?),
            21 => Value::Int(row.try_get::<i16, _>(index)?.into()),
            23 => Value::Int(row.try_get::<i32, _>(index)?.into()),
            700 => Value::Float(row.try_get::<f32, _>(index)?.into()),
            701 => Value::Float(row.try_get(index)?),
            17 => Value::Bytes(bytes.to_vec().into()),
            1114 | 1184 => {
                let micros =
                    bytes.try_into().map(i64::from_be_bytes).map_err(|e| ::sqlx::Error::Decode(Box::new(e)))?;
                Value::Time(Timestamp::from_micros(micros.saturating_add(EPOCH)))
            }
            3802 => text(bytes.get(1..).unwrap_or_default()), // jsonb has a version byte
            _ => text(bytes),
        })
    }
}

// ---- MySQL, MariaDB ----

#[cfg(feature = "sqlx-mysql")]
mod mysql {
    use ::sqlx::mysql::{MySqlDatabaseError, MySqlRow};
    use ::sqlx::{MySql, MySqlConnection, TypeInfo as _};
    use ::time::{OffsetDateTime, PrimitiveDateTime};

    use super::*;
    use crate::time::Timestamp;

    // Persistent, in sqlx's bounded cache: otherwise each statement ends with a packet nobody answers, and the next one
    // waits 40 ms for its acknowledgement (Nagle).
    caller_tx!(MySqlConnection, Dialect::Mysql, classify_mysql, bind, cell, str::to_owned, persistent = true);

    type Query<'q> = ::sqlx::query::Query<'q, MySql, ::sqlx::mysql::MySqlArguments>;

    fn classify_mysql(error: &::sqlx::Error) -> Error {
        let number =
            |db: &dyn DatabaseError| db.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number);
        classify("MySQL", error, |db| number(db).map_or(Kind::Database, mysql_kind))
    }

    fn bind<'q>(statement: Query<'q>, value: &'q Value) -> Query<'q> {
        match value {
            Value::Bool(v) => statement.bind(i64::from(*v)),
            Value::Int(v) => statement.bind(v),
            Value::Float(v) => statement.bind(v),
            Value::Text(v) => statement.bind(v),
            Value::Bytes(v) => statement.bind(&v[..]),
            Value::Time(v) => {
                let moment = v.to_datetime();
                statement.bind(PrimitiveDateTime::new(moment.date(), moment.time()))
            }
            _ => statement.bind(None::<i64>), // NULL; arrays are for PostgreSQL
        }
    }

    fn cell(row: &MySqlRow, index: usize) -> Result<Value, ::sqlx::Error> {
        let raw = row.try_get_raw(index)?;
        if raw.is_null() {
            return Ok(Value::Null);
        }
        let info = raw.type_info();
        Ok(match info.name() {
            "BOOLEAN" | "TINYINT" | "SMALLINT" | "MEDIUMINT" | "INT" | "BIGINT" => {
                Value::Int(row.try_get_unchecked(index)?)
            }
            name if name.ends_with("UNSIGNED") => Value::Int(row.try_get_unchecked::<u64, _>(index)? as i64),
            "FLOAT" => Value::Float(row.try_get_unchecked::<f32, _>(index)?.into()),
            "DOUBLE" => Value::Float(row.try_get_unchecked(index)?),
            "DATETIME" | "TIMESTAMP" => {
                let moment = row.try_get_unchecked::<OffsetDateTime, _>(index)?.unix_timestamp_nanos() / 1000;
                Value::Time(Timestamp::from_micros(moment as i64))
            }
            name if name.contains("BINARY") || name.contains("BLOB") => {
                Value::Bytes(row.try_get_unchecked::<Vec<u8>, _>(index)?.into())
            }
            _ => Value::Text(String::from_utf8_lossy(row.try_get_unchecked::<&[u8], _>(index)?).into_owned()),
        })
    }
}

// ---- SQLite ----

#[cfg(feature = "sqlx-sqlite")]
mod sqlite {
    use ::sqlx::sqlite::SqliteRow;
    use ::sqlx::{Sqlite, SqliteConnection, TypeInfo as _};

    use super::*;

    // Persistent: many rows are inserted by the same statement, one after the other.
    caller_tx!(SqliteConnection, Dialect::Sqlite, classify_sqlite, bind, cell, str::to_owned, persistent = true);

    type Query<'q> = ::sqlx::query::Query<'q, Sqlite, ::sqlx::sqlite::SqliteArguments>;

    fn classify_sqlite(error: &::sqlx::Error) -> Error {
        let extended = |db: &dyn DatabaseError| db.code().and_then(|code| code.parse::<i32>().ok()).unwrap_or(1);
        classify("SQLite", error, |db| sqlite_kind(extended(db), db.message()))
    }

    fn bind<'q>(statement: Query<'q>, value: &'q Value) -> Query<'q> {
        match value {
            Value::Bool(v) => statement.bind(i64::from(*v)),
            Value::Int(v) => statement.bind(v),
            Value::Float(v) => statement.bind(v),
            Value::Text(v) => statement.bind(v),
            Value::Bytes(v) => statement.bind(&v[..]),
            Value::Time(v) => statement.bind(v.micros()),
            _ => statement.bind(None::<i64>), // NULL; arrays are for PostgreSQL
        }
    }

    fn cell(row: &SqliteRow, index: usize) -> Result<Value, ::sqlx::Error> {
        let raw = row.try_get_raw(index)?;
        if raw.is_null() {
            return Ok(Value::Null);
        }
        let info = raw.type_info(); // of the value, not of the column
        Ok(match info.name() {
            "INTEGER" | "BOOLEAN" => Value::Int(row.try_get_unchecked(index)?),
            "REAL" => Value::Float(row.try_get_unchecked(index)?),
            "BLOB" => Value::Bytes(row.try_get_unchecked::<Vec<u8>, _>(index)?.into()),
            _ => Value::Text(row.try_get_unchecked(index)?),
        })
    }
}
