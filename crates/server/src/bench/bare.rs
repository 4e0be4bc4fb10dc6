//! The limit: the barest SQL of the same scheme. Batch claim, batch settle with the move to a second table; tables of the
//! same columns and claim index, without guards, keys, peers or anything else.

use mysql_async::prelude::Queryable;
use postrider::tx::Dialect;

use super::scratch::{self, LANE, Scratch, fail};
use crate::failure::Result;

const MOVED: &str = "id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, locked_at, target, active_key, \
                     payload, content_type, headers, payload_sha, last_error_code, last_error, correlation_id, created_at, updated_at, deliver_before";

/// Makes `bare` and `bare_done` with the rows now in `outbox`; their payloads in the row, or in `bare_payloads` beside it.
pub async fn copy_outbox(scratch: &Scratch, beside: bool) -> Result<()> {
    let nothing = if scratch.dialect() == Dialect::Sqlite { "X''" } else { "''" };
    // One shard, however many the lane has.
    let taken = MOVED.replacen("shard_id,", "0,", 1);
    let taken = if beside { taken.replacen("payload,", &format!("{nothing},"), 1) } else { taken };
    let copy = format!("INSERT INTO bare ({MOVED}) SELECT {taken} FROM outbox ORDER BY id");
    match scratch.dialect() {
        Dialect::Postgres => {
            scratch
                .sql(&[
                    "DROP TABLE IF EXISTS bare, bare_done, bare_payloads",
                    "CREATE TABLE bare (LIKE outbox INCLUDING DEFAULTS INCLUDING STORAGE) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)",
                    "ALTER TABLE bare ADD PRIMARY KEY (id)",
                    "CREATE INDEX ON bare (lane, shard_id, due_at, id)",
                    "CREATE TABLE bare_done (LIKE outbox_done INCLUDING STORAGE)",
                    "ALTER TABLE bare_done ADD PRIMARY KEY (id)",
                    &copy,
                ])
                .await?;
        }
        Dialect::Mysql => {
            scratch
                .sql(&[
                    "DROP TABLE IF EXISTS bare",
                    "DROP TABLE IF EXISTS bare_done",
                    "DROP TABLE IF EXISTS bare_payloads",
                    "CREATE TABLE bare LIKE outbox",
                    "ALTER TABLE bare DROP KEY idx_outbox_active_key",
                    "CREATE TABLE bare_done LIKE outbox_done",
                    "ALTER TABLE bare_done DROP KEY idx_done",
                    &copy,
                ])
                .await?;
        }
        Dialect::Sqlite => {
            let connection = scratch::sqlite(scratch.file())?;
            // The columns as they are; a table that was renamed has its name in quotes.
            let like = |table: &str, name: &str| -> Result<String> {
                let query = "SELECT substr(sql, instr(sql, '(')) FROM sqlite_master WHERE name = ?1";
                let columns: String = connection.query_row(query, [table], |row| row.get(0)).map_err(fail)?;
                Ok(format!("CREATE TABLE {name} {columns}"))
            };
            let (bare, done) = (like("outbox", "bare")?, like("outbox_done", "bare_done")?);
            connection
                .execute_batch(&format!(
                    "DROP TABLE IF EXISTS bare; DROP TABLE IF EXISTS bare_done; DROP TABLE IF EXISTS bare_payloads; {bare}; {done};
                     CREATE INDEX bare_claim ON bare (lane, shard_id, due_at, id); {copy}"
                ))
                .map_err(fail)?;
        }
    }
    if beside {
        let columns = match scratch.dialect() {
            Dialect::Postgres => "id BIGINT PRIMARY KEY, payload BYTEA",
            Dialect::Mysql => "id BIGINT PRIMARY KEY, payload LONGBLOB",
            Dialect::Sqlite => "id INTEGER PRIMARY KEY, payload BLOB",
        };
        let fill = "INSERT INTO bare_payloads SELECT id, payload FROM outbox";
        scratch.sql(&[&format!("CREATE TABLE bare_payloads ({columns})"), fill]).await?;
    }
    scratch.analyze(&["bare"]).await
}

/// Drains `bare` with two connections (SQLite: one, there is one writer); answers how many went through.
pub async fn drain(scratch: &Scratch, batch: usize, beside: bool) -> Result<usize> {
    match scratch.dialect() {
        Dialect::Postgres => {
            let (one, two) = tokio::join!(
                tokio::spawn(drain_postgres(scratch.url().to_owned(), batch, beside, "bare-1")),
                tokio::spawn(drain_postgres(scratch.url().to_owned(), batch, beside, "bare-2"))
            );
            Ok(one.map_err(fail)?? + two.map_err(fail)??)
        }
        Dialect::Mysql => {
            let (one, two) = tokio::join!(
                tokio::spawn(drain_mysql(scratch.url().to_owned(), batch, beside, "bare-1")),
                tokio::spawn(drain_mysql(scratch.url().to_owned(), batch, beside, "bare-2"))
            );
            Ok(one.map_err(fail)?? + two.map_err(fail)??)
        }
        Dialect::Sqlite => {
            let file = scratch.file().to_owned();
            tokio::task::spawn_blocking(move || drain_sqlite(&file, batch, beside)).await.map_err(fail)?
        }
    }
}

async fn drain_postgres(url: String, batch: usize, beside: bool, worker: &'static str) -> Result<usize> {
    let client = scratch::postgres(&url).await?;
    let claim = client
        .prepare(
            "WITH c AS MATERIALIZED (
                 SELECT id FROM bare WHERE lane = $1 AND shard_id = 0 AND due_at <= (SELECT clock_timestamp())
                 AND (due_at, id) >= ($4, $5) AND (lease_until IS NULL OR lease_until < (SELECT clock_timestamp()))
                 ORDER BY due_at, id LIMIT $3 FOR NO KEY UPDATE SKIP LOCKED)
             UPDATE bare o SET lease_token = o.lease_token + 1, locked_by = $2, lease_until = clock_timestamp() + INTERVAL '60 s'
             FROM c WHERE o.id = c.id RETURNING o.id, o.lease_token, o.due_at, o.payload",
        )
        .await
        .map_err(fail)?;
    let settle = client
        .prepare(&format!(
            "WITH gone AS (DELETE FROM bare o USING unnest($1::bigint[], $2::bigint[]) AS t(id, token)
                           WHERE o.id = t.id AND o.lease_token = t.token AND o.locked_by = $3 RETURNING o.*)
             INSERT INTO bare_done ({MOVED}, status, finished_at) SELECT {MOVED}, 'sent', clock_timestamp() FROM gone"
        ))
        .await
        .map_err(fail)?;
    let mut mark = (postrider::Timestamp::default(), 0_i64);
    let mut done = 0;
    loop {
        let rows = client.query(&claim, &[&LANE, &worker, &(batch as i64), &mark.0, &mark.1]).await.map_err(fail)?;
        if rows.is_empty() {
            return Ok(done);
        }
        let mut ids: Vec<i64> = Vec::with_capacity(rows.len());
        let mut tokens: Vec<i64> = Vec::with_capacity(rows.len());
        for row in &rows {
            ids.push(row.try_get(0).map_err(fail)?);
            tokens.push(row.try_get(1).map_err(fail)?);
            mark = mark.max((row.try_get(2).map_err(fail)?, ids[ids.len() - 1]));
        }
        if beside {
            let sql = "SELECT id, payload FROM bare_payloads WHERE id = ANY($1)";
            client.query(sql, &[&ids]).await.map_err(fail)?;
        }
        done += client.execute(&settle, &[&ids, &tokens, &worker]).await.map_err(fail)? as usize;
    }
}

async fn drain_mysql(url: String, batch: usize, beside: bool, worker: &'static str) -> Result<usize> {
    let mut conn = scratch::mysql(&url).await?;
    conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.map_err(fail)?;
    let mut mark = "'1970-01-01'".to_owned();
    let mut done = 0;
    loop {
        let candidates: Vec<(i64, String)> = conn
            .query(format!(
                "SELECT id, CAST(due_at AS CHAR) FROM bare FORCE INDEX (idx_claim) WHERE lane = '{LANE}' AND shard_id = 0
                 AND due_at <= UTC_TIMESTAMP(6) AND due_at >= {mark} AND (lease_until IS NULL OR lease_until < UTC_TIMESTAMP(6))
                 ORDER BY due_at, id LIMIT {}",
                batch * 2
            ))
            .await
            .map_err(fail)?;
        if candidates.is_empty() {
            return Ok(done);
        }
        let ids: Vec<i64> = candidates.iter().map(|c| c.0).collect();
        let claimed = loop {
            match claim_mysql(&mut conn, &ids, batch, worker).await {
                Err(error) if deadlocked(&error) => {}
                claimed => break claimed.map_err(fail)?,
            }
        };
        if claimed.is_empty() {
            continue;
        }
        if beside {
            let sql = format!("SELECT id, payload FROM bare_payloads WHERE id IN ({})", list(&claimed));
            let _payloads: Vec<(i64, Vec<u8>)> = conn.query(sql).await.map_err(fail)?;
        }
        if let Some(first) = candidates.first() {
            mark = format!("'{}'", first.1);
        }
        done += loop {
            match settle_mysql(&mut conn, &claimed, worker).await {
                Err(error) if deadlocked(&error) => {}
                settled => break settled.map_err(fail)?,
            }
        };
    }
}

fn list(ids: &[i64]) -> String {
    ids.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}

/// InnoDB has rolled the transaction back: it may be run again.
fn deadlocked(error: &mysql_async::Error) -> bool {
    matches!(error, mysql_async::Error::Server(e) if matches!(e.code, 1213 | 1205))
}

async fn claim_mysql(
    conn: &mut mysql_async::Conn,
    ids: &[i64],
    batch: usize,
    worker: &str,
) -> mysql_async::Result<Vec<i64>> {
    conn.query_drop("START TRANSACTION").await?;
    let rows: Vec<(i64, i64, Vec<u8>)> = conn
        .query(format!(
            "SELECT id, lease_token, payload FROM bare FORCE INDEX (PRIMARY) WHERE id IN ({})
             AND (lease_until IS NULL OR lease_until < UTC_TIMESTAMP(6)) LIMIT {batch} FOR UPDATE SKIP LOCKED",
            list(ids)
        ))
        .await?;
    let ids: Vec<i64> = rows.iter().map(|r| r.0).collect();
    if !ids.is_empty() {
        let update = format!(
            "UPDATE bare FORCE INDEX (PRIMARY) SET lease_token = lease_token + 1, locked_by = '{worker}',
                    lease_until = UTC_TIMESTAMP(6) + INTERVAL 60 SECOND WHERE id IN ({})",
            list(&ids)
        );
        conn.query_drop(update).await?;
    }
    conn.query_drop("COMMIT").await?;
    Ok(ids)
}

async fn settle_mysql(conn: &mut mysql_async::Conn, claimed: &[i64], worker: &str) -> mysql_async::Result<usize> {
    conn.query_drop("START TRANSACTION").await?;
    let lock = format!(
        "SELECT id, lease_token FROM bare FORCE INDEX (PRIMARY) WHERE id IN ({}) AND locked_by = '{worker}' FOR UPDATE",
        list(claimed)
    );
    let held: Vec<(i64, i64)> = conn.query(lock).await?;
    let won = list(&held.iter().map(|h| h.0).collect::<Vec<_>>());
    let moved = format!(
        "INSERT INTO bare_done ({MOVED}, status, finished_at) SELECT {MOVED}, 'sent', UTC_TIMESTAMP(6) FROM bare FORCE INDEX (PRIMARY) WHERE id IN ({won})"
    );
    conn.query_drop(moved).await?;
    conn.query_drop(format!("DELETE FROM bare WHERE id IN ({won})")).await?;
    conn.query_drop("COMMIT").await?;
    Ok(held.len())
}

fn drain_sqlite(file: &str, batch: usize, beside: bool) -> Result<usize> {
    let connection = scratch::sqlite(file)?;
    let mut mark = (0_i64, 0_i64);
    let mut done = 0;
    let run = |done: &mut usize, mark: &mut (i64, i64)| -> rusqlite::Result<bool> {
        let now = postrider::clock::wall().micros();
        let mut claim = connection.prepare_cached(
            "UPDATE bare SET lease_token = lease_token + 1, locked_by = 'bare', lease_until = ?2 + 60000000 WHERE id IN (
                 SELECT id FROM bare WHERE lane = ?1 AND shard_id = 0 AND due_at <= ?2 AND (due_at, id) >= (?4, ?5)
                 AND (lease_until IS NULL OR lease_until < ?2) ORDER BY due_at, id LIMIT ?3)
             RETURNING id, lease_token, due_at, payload",
        )?;
        connection.execute_batch("BEGIN IMMEDIATE")?;
        let mut rows = claim.query(rusqlite::params![LANE, now, batch as i64, mark.0, mark.1])?;
        let mut leases: Vec<(i64, i64)> = Vec::with_capacity(batch);
        while let Some(row) = rows.next()? {
            leases.push((row.get(0)?, row.get(1)?));
            *mark = (*mark).max((row.get(2)?, row.get(0)?));
            let _payload: Vec<u8> = row.get(3)?;
        }
        drop(rows);
        if beside {
            let mut payload = connection.prepare_cached("SELECT payload FROM bare_payloads WHERE id = ?1")?;
            for (id, _) in &leases {
                let _payload: Vec<u8> = payload.query_row([id], |row| row.get(0))?;
            }
        }
        connection.execute_batch("COMMIT; BEGIN IMMEDIATE")?;
        let mut moved = connection.prepare_cached(&format!(
            "INSERT INTO bare_done ({MOVED}, status, finished_at) SELECT {MOVED}, 'sent', ?3 FROM bare WHERE id = ?1 AND lease_token = ?2 AND locked_by = 'bare'"
        ))?;
        let mut gone = connection.prepare_cached("DELETE FROM bare WHERE id = ?1")?;
        for (id, token) in &leases {
            moved.execute((id, token, now))?;
            *done += gone.execute([id])?;
        }
        connection.execute_batch("COMMIT")?;
        Ok(leases.is_empty())
    };
    while !run(&mut done, &mut mark).map_err(fail)? {}
    Ok(done)
}
