//! The receiving end: remembers which messages were handled, in the transaction that handles them, so that a message
//! delivered twice takes effect once.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::message::{MAX_KEY_BYTES, check_text};
use crate::time::micros_of;
use crate::tx::{Dialect, Tx, Value};

/// Rows one [`Inbox::forget`] deletes at most, so that its transaction stays short.
const FORGET_ROWS: i64 = 1000;
/// A hundred years: as long ago as every database can subtract.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// What a receiver has handled.
///
/// ```no_run
/// # #[cfg(feature = "postgres")]
/// # async fn receive(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
/// use postrider::Inbox;
/// let mut tx = client.transaction().await?;
/// if Inbox::first_time(&mut tx, "billing", "1042").await? {
///     tx.execute("UPDATE account SET balance = balance - 10", &[]).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
///
/// Two transactions with the same message: the second waits at the unique index for the first. If that commits, the
/// second is told `false`; if it rolls back, the second takes over and is told `true`. Where the database cannot let it
/// wait (a deadlock, a snapshot that is too old, SQLite's busy timeout) the answer is an error of
/// [`Kind::Busy`](crate::error::Kind::Busy): roll back and handle the message again from the start.
pub struct Inbox;

impl Inbox {
    /// Whether this message was not handled before. Handle it in the same transaction, and commit: from then on the
    /// answer is `false`. `source` is who sent it, `message_id` what they call it; 1 to 255 bytes each.
    pub async fn first_time<T: Tx + ?Sized>(tx: &mut T, source: &str, message_id: &str) -> Result<bool> {
        check("source", source)?;
        check("message id", message_id)?;
        let mut params: Vec<Value> = vec![source.into(), message_id.into()];
        let now = tx.now().plus(0, &mut params);
        // Inserts see what others have committed even in an old snapshot (REPEATABLE READ); a SELECT first would not.
        let (verb, tail) = match tx.dialect() {
            Dialect::Mysql => ("INSERT IGNORE", ""),
            _ => ("INSERT", " ON CONFLICT (source, message_id) DO NOTHING"),
        };
        let sql = format!("{verb} INTO inbox (source, message_id, received_at) VALUES (?, ?, {now}){tail}");
        Ok(tx.execute(&sql, &params).await? == 1)
    }

    /// [`Inbox::first_time`] inside a transaction of rusqlite, without a runtime. Begin it `IMMEDIATE`: one that has
    /// read before it writes cannot wait for another writer.
    #[cfg(feature = "sqlite")]
    pub fn first_time_in_sqlite(connection: &rusqlite::Connection, source: &str, message_id: &str) -> Result<bool> {
        crate::stores::sqlite::on_connection(connection, async |tx: &mut dyn Tx| {
            Inbox::first_time(tx, source, message_id).await
        })
    }

    /// Deletes up to a thousand of the oldest entries received longer ago than this; answers how many. Call it until it
    /// answers 0, each time in a transaction of its own. A message that comes again afterwards counts as new: keep
    /// entries for longer than any sender goes on trying.
    pub async fn forget<T: Tx + ?Sized>(tx: &mut T, older_than: Duration) -> Result<u64> {
        let mut params = Vec::with_capacity(2);
        let before = tx.now().bound(-micros_of(older_than.min(LONGEST)), &mut params);
        params.push(FORGET_ROWS.into());
        let oldest = format!("WHERE received_at < {before} ORDER BY received_at LIMIT ?");
        let sql = match tx.dialect() {
            Dialect::Mysql => format!("DELETE FROM inbox {oldest}"),
            _ => format!(
                "DELETE FROM inbox WHERE (source, message_id) IN (SELECT source, message_id FROM inbox {oldest})"
            ),
        };
        tx.execute(&sql, &params).await
    }

    /// [`Inbox::forget`] inside a transaction of rusqlite, without a runtime.
    #[cfg(feature = "sqlite")]
    pub fn forget_in_sqlite(connection: &rusqlite::Connection, older_than: Duration) -> Result<u64> {
        crate::stores::sqlite::on_connection(connection, async |tx: &mut dyn Tx| Inbox::forget(tx, older_than).await)
    }
}

/// Checked here because MySQL's INSERT IGNORE cuts what is too long, and two messages would become one.
fn check(what: &str, text: &str) -> Result<()> {
    if text.is_empty() {
        return Err(Error::invalid(format!("the {what} is empty; without it no message can be told from another")));
    }
    check_text(what, Some(text), MAX_KEY_BYTES)
}
