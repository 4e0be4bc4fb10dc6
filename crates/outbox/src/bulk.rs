//! Many rows in one statement, for the peers' own tables: arrays on PostgreSQL, a list of values elsewhere.

use crate::error::{Error, Result};
use crate::time::Timestamp;
use crate::tx::{Dialect, Tx, Value};

/// Rows of one statement.
const CHUNK: usize = 500;
/// SQLite has no round trip to save, and a short statement stays prepared.
const SQLITE_CHUNK: usize = 8;

/// A column: its name and its type in PostgreSQL (`bigint`, `text`, `bytea`, `timestamptz`; others are cast from `text`).
pub type Column = (&'static str, &'static str);

/// Inserts the rows; answers their ids in order if the table hands out ids (`id`).
pub async fn insert<T: Tx + ?Sized>(
    tx: &mut T,
    table: &str,
    columns: &[Column],
    rows: &[Vec<Value>],
    ids: bool,
) -> Result<Vec<i64>> {
    let chunk = if tx.dialect() == Dialect::Sqlite { SQLITE_CHUNK } else { CHUNK };
    let mut answer = Vec::with_capacity(if ids { rows.len() } else { 0 });
    for part in rows.chunks(chunk) {
        let mut new = match tx.dialect() {
            Dialect::Postgres => with_arrays(tx, table, columns, part, ids).await?,
            _ => with_values(tx, table, columns, part, ids).await?,
        };
        if ids && new.len() != part.len() {
            return Err(Error::database(format!(
                "{} rows of {table} were inserted instead of {}",
                new.len(),
                part.len()
            )));
        }
        new.sort_unstable(); // handed out in order; RETURNING promises none
        answer.append(&mut new);
    }
    Ok(answer)
}

fn names(columns: &[Column]) -> String {
    columns.iter().map(|column| column.0).collect::<Vec<_>>().join(", ")
}

async fn with_values<T: Tx + ?Sized>(
    tx: &mut T,
    table: &str,
    columns: &[Column],
    rows: &[Vec<Value>],
    ids: bool,
) -> Result<Vec<i64>> {
    let row = format!("({})", vec!["?"; columns.len()].join(", "));
    let values = vec![row.as_str(); rows.len()].join(", ");
    let params: Vec<Value> = rows.concat();
    let sql = format!("INSERT INTO {table} ({}) VALUES {values}", names(columns));
    if !ids {
        return tx.execute(&sql, &params).await.map(|_| vec![]);
    }
    if tx.dialect() == Dialect::Sqlite {
        return tx.query(&format!("{sql} RETURNING id"), &params).await?.iter().map(|row| row.int(0)).collect();
    }
    crate::enqueue::insert_ids(tx, &sql, &params).await
}

async fn with_arrays<T: Tx + ?Sized>(
    tx: &mut T,
    table: &str,
    columns: &[Column],
    rows: &[Vec<Value>],
    ids: bool,
) -> Result<Vec<i64>> {
    let mut params = Vec::with_capacity(columns.len());
    let (mut arrays, mut chosen) = (Vec::new(), Vec::new());
    for (n, (name, pg_type)) in columns.iter().enumerate() {
        let values = rows.iter().map(|row| &row[n]);
        let (array, kind) = match *pg_type {
            "bigint" if values.clone().all(|v| matches!(v, Value::Int(_))) => (ints(values), "bigint"),
            "bytea" => (
                Value::Blobs(values.map(|v| if let Value::Bytes(b) = v { Some(b.clone()) } else { None }).collect()),
                "bytea",
            ),
            "timestamptz" => (Value::Times(values.map(time).collect()), "timestamptz"),
            _ => (Value::Texts(values.map(text).collect()), "text"),
        };
        params.push(array);
        arrays.push(format!("${}::{kind}[]", params.len()));
        chosen.push(if kind == *pg_type { (*name).to_owned() } else { format!("{name}::{pg_type}") });
    }
    let columns = names(columns);
    let returning = if ids { " RETURNING id" } else { "" };
    let sql = format!(
        "INSERT INTO {table} ({columns}) SELECT {} FROM unnest({}) AS t({columns}){returning}",
        chosen.join(", "),
        arrays.join(", ")
    );
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

fn ints<'a>(values: impl Iterator<Item = &'a Value>) -> Value {
    Value::Ints(values.map(|v| if let Value::Int(n) = v { *n } else { 0 }).collect())
}

fn time(value: &Value) -> Option<Timestamp> {
    if let Value::Time(time) = value { Some(*time) } else { None }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::Text(text) => Some(text.clone()),
        Value::Int(n) => Some(n.to_string()),
        Value::Float(n) => Some(n.to_string()),
        Value::Bool(b) => Some(b.to_string()),
        _ => None,
    }
}
