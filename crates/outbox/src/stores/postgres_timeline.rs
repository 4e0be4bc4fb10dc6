//! PostgreSQL: another server was promoted, or a backup restored. What it had not received is gone, and with it the memory
//! of ids and lease tokens that were given out: given again they would look like something a receiver has seen. So both go
//! on far above, and it is told.
//!
//! The server counts such events itself, in its timeline. The last one we know of stands in `postrider_meta`, and every
//! session looks before it does anything else. A server in recovery gets no session: one from before its promotion would
//! not look again.

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

/// Looks, and acts if the timeline has changed.
pub(super) async fn look(client: &Client, schema: &Schema) -> Result<()> {
    match see(client, "").await {
        Seen::InRecovery => {
            Err(Error::new(Kind::Unavailable, "the server is a standby, or recovers: nothing can be written"))
        }
        Seen::Timeline { current, known } if current != known => {
            if let Err(error) = take_note(client, schema).await {
                tracing::error!(
                    error = chain(&error),
                    "PostgreSQL was promoted or restored, and ids and lease tokens may be given out a second time: run `postrider migrate` as the owner of the tables"
                );
                client.batch_execute("ROLLBACK").await.map_err(|e| classify(&e))?;
            }
            Ok(())
        }
        Seen::Timeline { .. } | Seen::Nothing => Ok(()),
    }
}

/// After a migration: from here on changes are noticed.
pub(super) async fn remember(client: &Client) {
    let sql = format!("INSERT INTO postrider_meta SELECT 'timeline', ({CURRENT})::text ON CONFLICT (name) DO NOTHING");
    let _ = client.batch_execute(&sql).await; // without timelines there is nothing to remember
}

async fn see(client: &Client, locking: &str) -> Seen {
    let sql =
        format!("SELECT pg_is_in_recovery(), {CURRENT}, value FROM postrider_meta WHERE name = 'timeline' {locking}");
    let Ok(answer) = client.simple_query(&sql).await else { return Seen::Nothing };
    let row = answer.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    row.map_or(Seen::Nothing, of_row)
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
async fn take_note(client: &Client, schema: &Schema) -> std::result::Result<(), tokio_postgres::Error> {
    client.batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '5s'").await?;
    let (current, known) = match see(client, "FOR UPDATE").await {
        Seen::Timeline { current, known } if current != known => (current, known),
        _ => return client.batch_execute("COMMIT").await, // fails if the look did
    };
    client
        .batch_execute(&format!(
            "UPDATE postrider_meta SET value = '{current}' WHERE name = 'timeline';
             INSERT INTO postrider_meta VALUES ('token_floor', '{TOKENS_APART}')
             ON CONFLICT (name) DO UPDATE SET value = (postrider_meta.value::bigint + {TOKENS_APART})::text;
             SELECT setval(s.seqrelid::regclass, coalesce(pg_sequence_last_value(s.seqrelid), 0) + {IDS_APART})
             FROM pg_sequence s JOIN pg_depend d ON d.objid = s.seqrelid AND d.classid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
             WHERE d.refobjid IN ({});
             COMMIT",
            ours(schema)
        ))
        .await?;
    tracing::warn!(
        from = known,
        to = current,
        "PostgreSQL was promoted or restored: what this server had not received is lost with the rest of your data, and what it had not seen settled is delivered again; ids and lease tokens go on far above those given before"
    );
    Ok(())
}

/// Our tables, for an IN.
fn ours(schema: &Schema) -> String {
    let tables: Vec<String> = schema.tables(Dialect::Postgres).map(|table| format!("to_regclass('{table}')")).collect();
    tables.join(", ")
}
