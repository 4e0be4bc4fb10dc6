//! PostgreSQL: another server was promoted, or a backup restored. What it had not received is gone, and with it the memory
//! of ids and lease tokens that were given out: given again they would look like something a receiver has seen. So both go
//! on far above, and it is told.
//!
//! The server counts such events itself, in its timeline. The last one we know of stands in `postrider_meta`, and every
//! session looks before it does anything else; behind a pooler, where a session outlives its server, every transaction does.
//! A server in recovery gets no session: one from before its promotion would not look again.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, SimpleQueryMessage, SimpleQueryRow};

use super::postgres::{chain, classify};
use crate::error::{Error, Kind, Result};
use crate::migrate::Schema;
use crate::tx::Dialect;

/// Nobody claims a message so often between two failovers.
const TOKENS_APART: i64 = 1 << 32;
/// Nor does a standby lag behind by so many rows.
const IDS_APART: i64 = 1_000_000_000;

/// What every lease token that is given out is above.
pub(super) const TOKEN_FLOOR: &str =
    "(SELECT coalesce(max(value::bigint), 0) FROM postrider_meta WHERE name = 'token_floor')";

/// The first eight digits of the log's file are the timeline. Without an answer where there is none: in recovery.
const CURRENT: &str = "CASE WHEN NOT pg_is_in_recovery() THEN
    ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint END";

/// What a session sees when it looks.
enum Seen {
    InRecovery,
    /// The timeline the server is on, and the one we know of.
    Timeline {
        current: i64,
        known: i64,
    },
    /// A server without timelines (not every one that speaks PostgreSQL's language has them), or a database without our tables.
    Nothing,
}

/// Looks, and acts if the timeline has changed. Is the server on the timeline we know of, so that transactions may ask for it?
pub(super) async fn look(client: &Client, is_told: &AtomicBool) -> Result<bool> {
    let seen = match see(client, "").await {
        Err(error) if is_denied(&error) => return Ok(false),
        seen => seen.map_err(|e| classify(&e))?,
    };
    match seen {
        Seen::InRecovery => {
            Err(Error::new(Kind::Unavailable, "the server is a standby, or recovers: nothing can be written"))
        }
        Seen::Timeline { current, known } if current != known => match take_note(client).await {
            Ok(()) => Ok(true),
            Err(error) if is_denied(&error) => {
                if !is_told.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        error = chain(&error),
                        "PostgreSQL was promoted or restored, and ids and lease tokens may be given out a second time: run `postrider migrate` as the owner of the tables"
                    );
                }
                client.batch_execute("ROLLBACK").await.map_err(|e| classify(&e))?;
                Ok(false)
            }
            // This session is of no use; the next one looks again.
            Err(error) => Err(classify(&error)),
        },
        Seen::Timeline { .. } => Ok(true),
        Seen::Nothing => Ok(false),
    }
}

/// For transactions through a pooler, where a session outlives its server: one that finds itself on another timeline ends.
pub(super) fn or_end() -> String {
    format!(
        "SELECT pg_terminate_backend(pg_backend_pid()) FROM postrider_meta WHERE name = 'timeline' AND value IS DISTINCT FROM ({CURRENT})::text"
    )
}

/// After a migration: from here on changes are noticed, and whoever notices knows all tables that have been made.
pub(super) async fn remember(client: &Client, schema: &Schema) {
    let tables: Vec<&str> = schema.tables(Dialect::Postgres).collect();
    let sql = format!(
        "INSERT INTO postrider_meta SELECT 'timeline', ({CURRENT})::text ON CONFLICT (name) DO NOTHING;
         INSERT INTO postrider_meta VALUES ('tables', '{}') ON CONFLICT (name) DO UPDATE SET value = (
             SELECT string_agg(DISTINCT made, ',') FROM unnest(string_to_array(postrider_meta.value || ',' || excluded.value, ',')) AS made)",
        tables.join(",")
    );
    let _ = client.batch_execute(&sql).await; // without timelines there is nothing to remember
}

fn is_denied(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE)
}

async fn see(client: &Client, locking: &str) -> std::result::Result<Seen, tokio_postgres::Error> {
    let sql = format!(
        "SET LOCAL lock_timeout = '1s';
         SELECT pg_is_in_recovery(), {CURRENT}, value FROM postrider_meta WHERE name = 'timeline' {locking}"
    );
    let answer = match client.simple_query(&sql).await {
        Ok(answer) => answer,
        // Somebody is in the way, for now or for good.
        Err(error) if is_denied(&error) || error.as_db_error().is_none() => return Err(error),
        Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => return Err(error),
        Err(_) => return Ok(Seen::Nothing),
    };
    let row = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    Ok(row.map_or(Seen::Nothing, of_row))
}

fn of_row(row: &SimpleQueryRow) -> Seen {
    let number = |n: usize| row.get(n).and_then(|text| text.parse().ok());
    match (row.get(0), number(1), number(2)) {
        (Some("t"), ..) => Seen::InRecovery,
        (_, Some(current), Some(known)) => Seen::Timeline { current, known },
        _ => Seen::Nothing,
    }
}

/// One session does it, under the lock of the row; the others find it done.
async fn take_note(client: &Client) -> std::result::Result<(), tokio_postgres::Error> {
    client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED").await?;
    let (current, known) = match see(client, "FOR UPDATE").await? {
        Seen::Timeline { current, known } if current != known => (current, known),
        _ => return client.batch_execute("COMMIT").await,
    };
    client
        .batch_execute(&format!(
            "UPDATE postrider_meta SET value = '{current}' WHERE name = 'timeline';
             INSERT INTO postrider_meta VALUES ('token_floor', '{TOKENS_APART}')
             ON CONFLICT (name) DO UPDATE SET value = (postrider_meta.value::bigint + {TOKENS_APART})::text;
             SELECT setval(s.seqrelid::regclass, coalesce(pg_sequence_last_value(s.seqrelid), 0) + {IDS_APART})
             FROM pg_sequence s JOIN pg_depend d ON d.objid = s.seqrelid AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
             WHERE d.refobjid IN (
                 SELECT to_regclass(made) FROM postrider_meta, unnest(string_to_array(value, ',')) AS made WHERE name = 'tables');
             COMMIT"
        ))
        .await?;
    tracing::warn!(
        from = known,
        to = current,
        "PostgreSQL was promoted or restored: what this server had not received is lost with the rest of your data, and what it had not seen settled is delivered again; ids and lease tokens go on far above those given before"
    );
    Ok(())
}
