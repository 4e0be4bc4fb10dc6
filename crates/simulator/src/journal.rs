//! What the database did, told by itself: triggers write down every change of `outbox` and `outbox_done`, and the part of a
//! lane writes down what it heard. The checker reads it after every step.

use async_trait::async_trait;
use postrider::outcome::Verdict;
use postrider::store::{Mode, Store, transact};
use postrider::tx::{Row, Tx};
use postrider::{OnSettled, Result, Winner};

/// Rows of a shard beyond this are not there for anybody: their transaction is still open, or somebody has them locked.
pub const HIDDEN: i64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Insert,
    Update,
    Delete,
    Done,
    Undone,
}

/// One change of one row, as it is after it (before it, where the row is gone).
#[derive(Clone, Debug)]
pub struct Change {
    pub kind: Kind,
    pub id: i64,
    pub lane: String,
    pub shard: i64,
    pub due_at: i64,
    pub lease_until: Option<i64>,
    pub attempts: u32,
    pub crashes: u32,
    pub maybe_sent: bool,
    pub token: i64,
    pub locked_by: Option<String>,
    pub code: Option<String>,
    /// Which message of the plan it is.
    pub correlation: Option<String>,
    /// `sent` or `dead`, of what has ended.
    pub status: Option<String>,
}

/// One winner of a settle, as a part heard of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Heard {
    pub id: i64,
    pub token: i64,
    pub ends: bool,
}

/// Hears of settles through the same door a part has: in the settle's own transaction, for winners only.
pub struct Listener;

#[async_trait]
impl OnSettled for Listener {
    async fn on_settled(&self, tx: &mut (dyn Tx + Send), winners: &[Winner]) -> Result<()> {
        for winner in winners {
            let ends = !matches!(winner.verdict, Verdict::Retry { .. });
            let params = [winner.id.into(), winner.lease_token.into(), i64::from(ends).into()];
            tx.execute("INSERT INTO sim_heard (id, token, ends) VALUES (?, ?, ?)", &params).await?;
        }
        Ok(())
    }
}

const COLUMNS: &str = "id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, last_error_code, correlation_id";

fn statements() -> Vec<String> {
    let of = |row: &str| COLUMNS.split(", ").map(|column| format!("{row}.{column}")).collect::<Vec<_>>().join(", ");
    let trigger = |name: &str, when: &str, kind: i64, row: &str, status: &str| {
        format!(
            "CREATE TRIGGER sim_{name} AFTER {when} BEGIN
                 INSERT INTO sim_journal (kind, {COLUMNS}, status) VALUES ({kind}, {}, {status}); END",
            of(row)
        )
    };
    vec![
        format!("CREATE TABLE sim_journal (seq INTEGER PRIMARY KEY, kind, {COLUMNS}, status)"),
        "CREATE TABLE sim_heard (seq INTEGER PRIMARY KEY, id, token, ends)".to_owned(),
        // As a server skips a locked row.
        format!(
            "CREATE TRIGGER sim_locked BEFORE UPDATE ON outbox WHEN OLD.shard_id >= {HIDDEN} AND OLD.shard_id = NEW.shard_id
             BEGIN SELECT RAISE(IGNORE); END"
        ),
        trigger("insert", "INSERT ON outbox", 0, "NEW", "NULL"),
        // What is hidden or shown again was not changed by anybody.
        trigger("update", "UPDATE ON outbox WHEN OLD.shard_id = NEW.shard_id", 1, "NEW", "NULL"),
        trigger("delete", "DELETE ON outbox", 2, "OLD", "NULL"),
        trigger("done", "INSERT ON outbox_done", 3, "NEW", "NEW.status"),
        trigger("undone", "DELETE ON outbox_done", 4, "OLD", "OLD.status"),
    ]
}

pub async fn install(store: &dyn Store) -> Result<()> {
    transact(store, Mode::Write, |tx| {
        Box::pin(async move {
            for statement in statements() {
                tx.execute(&statement, &[]).await?;
            }
            Ok(())
        })
    })
    .await
}

/// What happened since the last look.
pub async fn read(store: &dyn Store) -> Result<(Vec<Change>, Vec<Heard>)> {
    transact(store, Mode::Write, |tx| {
        Box::pin(async move {
            let sql = "SELECT kind, id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, last_error_code, correlation_id, status FROM sim_journal ORDER BY seq";
            let changes = tx.query(sql, &[]).await?.iter().map(change).collect::<Result<Vec<_>>>()?;
            if changes.is_empty() {
                return Ok((changes, vec![]));
            }
            tx.execute("DELETE FROM sim_journal", &[]).await?;
            let heard = tx.query("SELECT id, token, ends FROM sim_heard ORDER BY seq", &[]).await?;
            let heard = heard.iter().map(|row| Ok(Heard { id: row.int(0)?, token: row.int(1)?, ends: row.bool(2)? }));
            let heard = heard.collect::<Result<Vec<_>>>()?;
            if !heard.is_empty() {
                tx.execute("DELETE FROM sim_heard", &[]).await?;
            }
            Ok((changes, heard))
        })
    })
    .await
}

/// Every row there is, as the journal would tell of it.
pub async fn everything(store: &dyn Store) -> Result<Vec<Change>> {
    transact(store, Mode::Read, |tx| {
        Box::pin(async move {
            let sql = "SELECT 0, id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, last_error_code, correlation_id, NULL FROM outbox
                       UNION ALL
                       SELECT 3, id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, last_error_code, correlation_id, status FROM outbox_done ORDER BY 2";
            tx.query(sql, &[]).await?.iter().map(change).collect()
        })
    })
    .await
}

fn change(row: &Row) -> Result<Change> {
    let kind = [Kind::Insert, Kind::Update, Kind::Delete, Kind::Done, Kind::Undone][row.int(0)? as usize];
    Ok(Change {
        kind,
        id: row.int(1)?,
        lane: row.text(2)?,
        shard: row.int(3)?,
        due_at: row.int(4)?,
        lease_until: row.opt_int(5)?,
        attempts: row.int(6)? as u32,
        crashes: row.int(7)? as u32,
        maybe_sent: row.bool(8)?,
        token: row.int(9)?,
        locked_by: row.opt_text(10)?,
        code: row.opt_text(11)?,
        correlation: row.opt_text(12)?,
        status: row.opt_text(13)?,
    })
}
