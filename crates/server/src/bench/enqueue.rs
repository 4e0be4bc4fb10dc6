//! Batched enqueue on one connection, against the bare multi-row insert into a table of the same shape.

use mysql_async::prelude::Queryable;
use postrider::message::sha256;
use postrider::tx::Dialect;
use serde_json::{Value, json};

use super::scratch::{self, LANE, Scratch, fail, fill};
use super::{Bench, ROUNDS, bare, median, rate, timed};
use crate::failure::Result;

const COLUMNS: &str = "lane, due_at, payload, content_type, payload_sha, created_at, updated_at";

pub async fn run(bench: &Bench, scratch: &Scratch) -> Result<Value> {
    let messages = bench.messages.unwrap_or(200_000);
    bare::copy_outbox(scratch, false).await?;
    if scratch.dialect() == Dialect::Mysql {
        // The other two index active keys only where there are any; here every row has an entry.
        scratch.sql(&["ALTER TABLE bare ADD KEY bare_active_key (lane, active_key)"]).await?;
    }
    let outbox = scratch.outbox().await?;
    let (mut rates, mut limits) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        limits.push(insert_bare(scratch, messages, bench.payload_bytes).await?);
        let ((), took) = timed(fill(&outbox, messages, bench.payload_bytes)).await?;
        rates.push(rate(messages, took));
    }
    let (per_second, limit) = (median(&mut rates), median(&mut limits));
    Ok(json!({
        "bench": "enqueue", "messages": messages, "payload_bytes": bench.payload_bytes,
        "per_second": per_second, "limit_per_second": limit, "ratio": per_second / limit,
        "rounds": rates, "limit_rounds": limits,
    }))
}

async fn insert_bare(scratch: &Scratch, messages: usize, payload_bytes: usize) -> Result<f64> {
    let ((), took) = match scratch.dialect() {
        Dialect::Postgres => timed(insert_postgres(scratch, messages, payload_bytes)).await?,
        Dialect::Mysql => timed(insert_mysql(scratch, messages, payload_bytes)).await?,
        Dialect::Sqlite => {
            let file = scratch.file().to_owned();
            let work = tokio::task::spawn_blocking(move || insert_sqlite(&file, messages, payload_bytes));
            timed(async { work.await.map_err(fail)? }).await?
        }
    };
    Ok(rate(messages, took))
}

async fn insert_postgres(scratch: &Scratch, messages: usize, payload_bytes: usize) -> Result<()> {
    let client = scratch::postgres(scratch.url()).await?;
    let sql = format!(
        "INSERT INTO bare ({COLUMNS}) SELECT $1, clock_timestamp(), p, 'application/json', s, clock_timestamp(), clock_timestamp()
         FROM unnest($2::bytea[], $3::bytea[]) AS t(p, s) RETURNING id"
    );
    let insert = client.prepare(&sql).await.map_err(fail)?;
    for start in (0..messages).step_by(1000) {
        let payloads: Vec<Vec<u8>> =
            (start..messages.min(start + 1000)).map(|n| scratch::message(payload_bytes, n).payload.to_vec()).collect();
        let shas: Vec<Vec<u8>> = payloads.iter().map(|p| sha256(p).to_vec()).collect();
        client.query(&insert, &[&LANE, &payloads, &shas]).await.map_err(fail)?;
    }
    Ok(())
}

async fn insert_mysql(scratch: &Scratch, messages: usize, payload_bytes: usize) -> Result<()> {
    let mut conn = scratch::mysql(scratch.url()).await?;
    for start in (0..messages).step_by(1000) {
        let rows: Vec<usize> = (start..messages.min(start + 1000)).collect();
        let row = format!("('{LANE}', UTC_TIMESTAMP(6), ?, 'application/json', ?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))");
        let sql = format!("INSERT INTO bare ({COLUMNS}) VALUES {}", vec![row; rows.len()].join(", "));
        let mut params: Vec<mysql_async::Value> = Vec::with_capacity(rows.len() * 2);
        for n in rows {
            let payload = scratch::message(payload_bytes, n).payload.to_vec();
            let sha = sha256(&payload).to_vec();
            params.extend([payload.into(), sha.into()]);
        }
        conn.exec_drop(sql, params).await.map_err(fail)?;
    }
    Ok(())
}

fn insert_sqlite(file: &str, messages: usize, payload_bytes: usize) -> Result<()> {
    let connection = scratch::sqlite(file)?;
    let run = || -> rusqlite::Result<()> {
        let sql = format!("INSERT INTO bare ({COLUMNS}) VALUES (?1, ?2, ?3, 'application/json', ?4, ?2, ?2)");
        let mut insert = connection.prepare(&sql)?;
        for start in (0..messages).step_by(1000) {
            connection.execute_batch("BEGIN IMMEDIATE")?;
            let now = postrider::clock::wall().micros();
            for n in start..messages.min(start + 1000) {
                let payload = scratch::message(payload_bytes, n).payload;
                insert.execute(rusqlite::params![LANE, now, payload.as_ref(), sha256(&payload)])?;
            }
            connection.execute_batch("COMMIT")?;
        }
        Ok(())
    };
    run().map_err(fail)
}
