//! Replays: events of a time range are sent to a subscription again, as sagas of the next generation. A replay is a row of
//! its own with a cursor, so it goes on after a restart, and can be cancelled. What is still under way is not sent twice.

use std::time::Duration;

use postrider::clock::Tick;
use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, Value};
use postrider::{Error, Result, Timestamp, bulk};
use serde::{Deserialize, Serialize};

use crate::dead_letters::next_generation;
use crate::decide::{Status, is_pattern, matches};
use crate::publish::{SAGA_COLUMNS, saga_row};
use crate::subscriptions::MOST_PATTERNS;
use crate::{Webhooks, catalog};

/// Events looked at in one transaction.
const BATCH: i64 = 500;
/// The same where they are only counted.
const COUNTED: i64 = 5_000;
/// How long somebody waits for a count; a replay begins without it.
const COUNTING: Duration = Duration::from_secs(3);

/// How many events a replay would send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Counted {
    pub count: i64,
    /// Counting was given up there: it is at least so many.
    pub at_least: bool,
}

/// What to replay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NewReplay {
    pub subscription_id: i64,
    pub from: Timestamp,
    pub to: Timestamp,
    /// Patterns; without, those of the subscription.
    #[serde(default)]
    pub event_types: Option<Vec<String>>,
    /// Only events whose latest saga for the subscription has one of these states.
    #[serde(default)]
    pub statuses: Option<Vec<String>>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Replay {
    pub id: i64,
    pub subscription_id: i64,
    pub from: Timestamp,
    pub to: Timestamp,
    pub status: String,
    pub count: i64,
    pub created_at: Timestamp,
}

const COLUMNS: &str = "id, subscription_id, from_at, to_at, status, count, created_at";

fn columns(dialect: Dialect) -> String {
    if dialect == Dialect::Mysql { COLUMNS.replace("count", "`count`") } else { COLUMNS.to_owned() }
}

fn replay(row: &Row) -> Result<Replay> {
    Ok(Replay {
        id: row.int(0)?,
        subscription_id: row.int(1)?,
        from: row.time(2)?,
        to: row.time(3)?,
        status: row.text(4)?,
        count: row.int(5)?,
        created_at: row.time(6)?,
    })
}

/// Events of one page that match, and where the next page begins; `None` at the end.
async fn page(
    tx: &mut (dyn Tx + Send),
    wanted: &NewReplay,
    patterns: &[String],
    after: i64,
    limit: i64,
) -> Result<(Vec<i64>, Option<i64>)> {
    let sql = format!(
        "SELECT e.id, e.event_type, (SELECT s.status FROM webhook_delivery_sagas s WHERE s.event_id = e.id AND s.subscription_id = ?
                                     ORDER BY s.generation DESC LIMIT 1)
         FROM events e WHERE e.id > ? AND e.created_at >= ? AND e.created_at < ? ORDER BY e.id LIMIT {limit}"
    );
    let params: [Value; 4] = [wanted.subscription_id.into(), after.into(), wanted.from.into(), wanted.to.into()];
    let rows = tx.query(&sql, &params).await?;
    let mut ids = Vec::new();
    for row in &rows {
        let (event_type, latest) = (row.text(1)?, row.opt_text(2)?);
        // One that is still being delivered comes anyway.
        let under_way = latest.as_deref().and_then(Status::parse).is_some_and(|status| !status.has_ended());
        let chosen = wanted.statuses.as_ref().is_none_or(|all| latest.is_some_and(|latest| all.contains(&latest)));
        if !under_way && chosen && patterns.iter().any(|pattern| matches(pattern, &event_type)) {
            ids.push(row.int(0)?);
        }
    }
    let next = (rows.len() as i64 == limit).then(|| rows.last().map(|row| row.int(0)).transpose()).transpose()?;
    Ok((ids, next.flatten()))
}

impl Webhooks {
    /// How many events a replay would send, as far as a few seconds allow; `None` if there is no such subscription.
    pub async fn count_replay(&self, wanted: NewReplay) -> Result<Option<Counted>> {
        let Some(patterns) = self.patterns(&wanted).await? else { return Ok(None) };
        let work = std::sync::Arc::new((wanted, patterns));
        let begun = Tick::now();
        let (mut count, mut after) = (0, Some(0));
        while let Some(from) = after {
            if Tick::now().since(begun) > COUNTING {
                return Ok(Some(Counted { count, at_least: true }));
            }
            let work = work.clone();
            let (ids, next) = self
                .transact(Mode::Read, move |tx| {
                    let work = work.clone();
                    Box::pin(async move { page(tx, &work.0, &work.1, from, COUNTED).await })
                })
                .await?;
            count += ids.len() as i64;
            after = next;
        }
        Ok(Some(Counted { count, at_least: false }))
    }

    async fn patterns(&self, wanted: &NewReplay) -> Result<Option<Vec<String>>> {
        if wanted.from >= wanted.to {
            return Err(Error::invalid("`from` must be before `to`"));
        }
        if wanted.statuses.as_ref().is_some_and(|statuses| statuses.len() > Status::ALL.len()) {
            return Err(Error::invalid("statuses names one of them twice"));
        }
        if let Some(status) = wanted.statuses.iter().flatten().find(|status| Status::parse(status).is_none()) {
            return Err(Error::invalid(format!(
                "`{status}` is no status; there are Pending, InProgress, PendingRetry, Completed, DeadLettered"
            )));
        }
        if let Some(types) = &wanted.event_types {
            if types.is_empty() {
                return Err(Error::invalid("event_types has no entry; leave it out for those of the subscription"));
            }
            if types.len() > MOST_PATTERNS {
                return Err(Error::invalid(format!("event_types has more than {MOST_PATTERNS} entries")));
            }
            if let Some(pattern) = types.iter().find(|pattern| !is_pattern(pattern)) {
                return Err(Error::invalid(format!(
                    "`{}` is no event type; write `order.paid`, `order.*` or `*`",
                    pattern.chars().filter(|c| !c.is_control()).take(80).collect::<String>()
                )));
            }
        }
        let Some(subscription) = self.subscription(wanted.subscription_id).await? else { return Ok(None) };
        Ok(Some(wanted.event_types.clone().unwrap_or(subscription.event_types)))
    }

    /// Begins a replay; the orchestrators carry it out.
    pub async fn replay(&self, wanted: NewReplay) -> Result<Option<Replay>> {
        let Some(patterns) = self.patterns(&wanted).await? else { return Ok(None) };
        let filled = NewReplay { event_types: Some(patterns), ..wanted };
        let filter = serde_json::to_string(&filled).map_err(|e| Error::invalid(e.to_string()))?;
        let begun = self
            .transact(Mode::Write, move |tx| {
                let (wanted, filter) = (filled.clone(), filter.clone());
                Box::pin(async move {
                    let now = catalog::now(tx).await?;
                    let columns = [
                        ("subscription_id", "bigint"),
                        ("from_at", "timestamptz"),
                        ("to_at", "timestamptz"),
                        ("filter_json", "text"),
                        ("status", "text"),
                        ("created_at", "timestamptz"),
                    ];
                    let row = vec![
                        wanted.subscription_id.into(),
                        wanted.from.into(),
                        wanted.to.into(),
                        filter.into(),
                        "running".into(),
                        now.into(),
                    ];
                    let ids = bulk::insert(tx, "replays", &columns, &[row], true).await?;
                    find(tx, ids.first().copied().unwrap_or(0)).await
                })
            })
            .await?;
        self.ring();
        Ok(begun)
    }

    pub async fn replay_of(&self, id: i64) -> Result<Option<Replay>> {
        self.transact(Mode::Read, move |tx| Box::pin(async move { find(tx, id).await })).await
    }

    /// Stops it where it is; what it made is delivered.
    pub async fn cancel_replay(&self, id: i64) -> Result<Option<Replay>> {
        self.transact(Mode::Write, move |tx| {
            Box::pin(async move {
                tx.execute("UPDATE replays SET status = 'cancelled' WHERE id = ? AND status = 'running'", &[id.into()])
                    .await?;
                find(tx, id).await
            })
        })
        .await
    }

    /// One page of one running replay.
    pub(crate) async fn replay_step(&self) -> Result<usize> {
        let running = self
            .transact(Mode::Read, |tx| {
                Box::pin(async move {
                    Ok(!tx.query("SELECT 1 FROM replays WHERE status = 'running' LIMIT 1", &[]).await?.is_empty())
                })
            })
            .await?;
        if !running {
            return Ok(0);
        }
        self.transact(Mode::Work, |tx| Box::pin(async move { step(tx).await })).await
    }
}

async fn find(tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<Replay>> {
    let sql = format!("SELECT {} FROM replays WHERE id = ?", columns(tx.dialect()));
    tx.query(&sql, &[id.into()]).await?.first().map(replay).transpose()
}

async fn step(tx: &mut (dyn Tx + Send)) -> Result<usize> {
    let lock = if tx.dialect() == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" };
    let sql =
        format!("SELECT id, filter_json, cursor_id FROM replays WHERE status = 'running' ORDER BY id LIMIT 1{lock}");
    let rows = tx.query(&sql, &[]).await?;
    let Some(row) = rows.first() else { return Ok(0) };
    let (id, cursor) = (row.int(0)?, row.int(2)?);
    let wanted: NewReplay =
        serde_json::from_str(&row.text(1)?).map_err(|e| Error::database(format!("replay {id} cannot be read: {e}")))?;
    let now = catalog::now(tx).await?;
    let patterns = wanted.event_types.clone().unwrap_or_default();
    let (ids, next) = page(tx, &wanted, &patterns, cursor, BATCH).await?;
    let mut sagas = Vec::new();
    for &event_id in &ids {
        let generation = next_generation(tx, event_id, wanted.subscription_id).await?;
        sagas.push(saga_row(event_id, wanted.subscription_id, Status::Pending, generation, Some(id), now));
    }
    bulk::insert(tx, "webhook_delivery_sagas", &SAGA_COLUMNS, &sagas, false).await?;
    let last = ids.last().copied().unwrap_or(cursor).max(next.unwrap_or(0));
    let status = if next.is_some() { "running" } else { "done" };
    let count = if tx.dialect() == Dialect::Mysql { "`count`" } else { "count" };
    let sql = format!("UPDATE replays SET status = ?, cursor_id = ?, {count} = {count} + ? WHERE id = ?");
    let params: [Value; 4] = [status.into(), last.into(), (ids.len() as i64).into(), id.into()];
    tx.execute(&sql, &params).await?;
    Ok(ids.len().max(1))
}
