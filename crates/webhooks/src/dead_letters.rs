//! Dead letters, and their requeue: a new saga of the next generation. The dead one stays as it is.

use postrider::error::Kind;
use postrider::paging::{self, Candidates, Page, Rows, Wanted};
use postrider::store::Mode;
use postrider::tx::{Dialect, Row, Tx, Value};
use postrider::{Error, Result, Timestamp, bulk};
use serde::Serialize;

use crate::decide::Status;
use crate::publish::{SAGA_COLUMNS, saga_row};
use crate::{Webhooks, catalog};

#[derive(Clone, Debug, Serialize)]
pub struct DeadLetter {
    pub id: i64,
    pub saga_id: i64,
    pub event_id: i64,
    pub subscription_id: i64,
    pub final_error_code: Option<String>,
    pub payload_bytes: i64,
    pub failed_at: Timestamp,
    pub requeued_saga_id: Option<i64>,
}

/// Which dead letters.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterFilter {
    pub subscription_id: Option<i64>,
    pub event_type: Option<String>,
    pub error_code: Option<String>,
    pub from: Option<Timestamp>,
    pub to: Option<Timestamp>,
    /// Only those nobody has requeued yet.
    pub waiting: bool,
}

/// What became of a requeue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requeued {
    Created(i64),
    /// It was requeued before: the same saga.
    Exists(i64),
    NotFound,
    /// There is no subscription to deliver to any more.
    NoSubscription,
}

const COLUMNS: &str = "d.id, d.saga_id, d.event_id, d.subscription_id, d.final_error_code, LENGTH(d.payload_snapshot), d.failed_at, d.requeued_saga_id";

fn dead_letter(row: &Row) -> Result<DeadLetter> {
    Ok(DeadLetter {
        id: row.int(0)?,
        saga_id: row.int(1)?,
        event_id: row.int(2)?,
        subscription_id: row.int(3)?,
        final_error_code: row.opt_text(4)?,
        payload_bytes: row.int(5)?,
        failed_at: row.time(6)?,
        requeued_saga_id: row.opt_int(7)?,
    })
}

const OF_TYPE: &str = "EXISTS (SELECT 1 FROM events e WHERE e.id = d.event_id AND e.event_type = ?)";
const WAITING: &str = "d.requeued_saga_id IS NULL";

impl DeadLetterFilter {
    /// What no text of ours has is found nowhere, and some databases cannot even be asked for it.
    fn check(&self) -> Result<()> {
        let texts = [&self.event_type, &self.error_code];
        match texts.into_iter().flatten().any(|text| text.contains('\0')) {
            true => Err(Error::invalid("event_type and error_code have no NUL character")),
            false => Ok(()),
        }
    }

    /// As SQL on `dead_letters d`, and its values.
    fn sql(&self, params: &mut Vec<Value>) -> String {
        let mut wheres = String::new();
        let mut and = |sql: &str, value: Option<Value>| {
            if let Some(value) = value {
                wheres.push_str(&format!(" AND {sql}"));
                params.push(value);
            }
        };
        and("d.subscription_id = ?", self.subscription_id.map(Value::from));
        and("d.final_error_code = ?", self.error_code.clone().map(Value::from));
        and("d.failed_at >= ?", self.from.map(Value::from));
        and("d.failed_at < ?", self.to.map(Value::from));
        and(OF_TYPE, self.event_type.clone().map(Value::from));
        if self.waiting {
            wheres.push_str(&format!(" AND {WAITING}"));
        }
        wheres
    }

    /// The same for a page of a list.
    fn wanted(&self) -> Wanted {
        let mut wanted = Wanted::default()
            .is("d.subscription_id", self.subscription_id)
            .is("d.final_error_code", self.error_code.clone());
        let moments = [
            ("COALESCE(d.failed_at, d.failed_at) >= ?", self.from),
            ("COALESCE(d.failed_at, d.failed_at) < ?", self.to),
        ];
        for (condition, moment) in moments {
            wanted = if moment.is_some() { wanted.and(condition, moment.map(Value::from)) } else { wanted };
        }
        if let Some(event_type) = &self.event_type {
            wanted = wanted.and(OF_TYPE, [Value::from(event_type)]);
        }
        if self.waiting { wanted.and(WAITING, []) } else { wanted }
    }

    fn candidates(&self) -> Vec<Candidates> {
        let by = |condition: &str, params: Vec<Value>| {
            vec![Candidates::new(format!("SELECT id FROM dead_letters WHERE {condition}"), params)]
        };
        match (self.subscription_id, self.from, self.to) {
            (Some(id), ..) => by("subscription_id = ? ORDER BY id DESC", vec![id.into()]),
            (None, None, None) => vec![],
            (None, from, to) => {
                let (from, to) = (from.unwrap_or_default(), to.unwrap_or(Timestamp::FAR_FUTURE));
                by("failed_at >= ? AND failed_at < ? ORDER BY failed_at DESC, id DESC", vec![from.into(), to.into()])
            }
        }
    }
}

impl Webhooks {
    pub async fn dead_letters(
        &self,
        filter: DeadLetterFilter,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Page<DeadLetter>> {
        filter.check()?;
        self.transact(Mode::Look, move |tx| {
            let filter = filter.clone();
            Box::pin(async move {
                let few = paging::few(tx, &filter.candidates()).await?;
                let columns = COLUMNS.to_owned();
                let rows =
                    Rows { table: "dead_letters d", id: "d.id", columns, bound: vec![], wanted: filter.wanted() };
                paging::page(tx, &rows, few, before, limit).await?.read(dead_letter)
            })
        })
        .await
    }

    /// Brings one back, as a new saga that begins anew. Asked again, it answers with the same saga.
    pub async fn requeue(&self, id: i64) -> Result<Requeued> {
        for round in 0.. {
            let requeued =
                self.transact(Mode::Write, move |tx| Box::pin(async move { requeue_one(tx, id).await })).await;
            match requeued {
                // Somebody took the same generation: look again.
                Err(error) if error.kind == Kind::Conflict && round < 5 => {}
                other => {
                    self.ring();
                    return other;
                }
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// How many of those that wait match and could be sent, and their ids in order, at most `limit`. Those of subscriptions
    /// that are disabled or gone could not.
    pub async fn requeueable(&self, filter: DeadLetterFilter, limit: u32) -> Result<(i64, Vec<i64>)> {
        filter.check()?;
        let filter = DeadLetterFilter { waiting: true, ..filter };
        self.transact(Mode::Read, move |tx| {
            let filter = filter.clone();
            Box::pin(async move {
                let mut params: Vec<Value> = Vec::new();
                let wheres = filter.sql(&mut params);
                let from =
                    "FROM dead_letters d JOIN subscriptions s ON s.id = d.subscription_id WHERE s.status <> 'disabled'";
                let count = format!("SELECT COUNT(*) {from}{wheres}");
                let count = tx.query(&count, &params).await?.first().map_or(Ok(0), |row| row.int(0))?;
                let sql = format!("SELECT d.id {from}{wheres} ORDER BY d.id LIMIT {limit}");
                let ids = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<Result<_>>()?;
                Ok((count, ids))
            })
        })
        .await
    }
}

async fn requeue_one(tx: &mut (dyn Tx + Send), id: i64) -> Result<Requeued> {
    let lock = if tx.dialect() == Dialect::Sqlite { "" } else { " FOR UPDATE" };
    let sql = format!("SELECT event_id, subscription_id, requeued_saga_id FROM dead_letters WHERE id = ?{lock}");
    let rows = tx.query(&sql, &[id.into()]).await?;
    let Some(row) = rows.first() else { return Ok(Requeued::NotFound) };
    if let Some(saga_id) = row.opt_int(2)? {
        return Ok(Requeued::Exists(saga_id));
    }
    let (event_id, subscription_id) = (row.int(0)?, row.int(1)?);
    let now = catalog::now(tx).await?;
    let subscription = tx.query("SELECT status FROM subscriptions WHERE id = ?", &[subscription_id.into()]).await?;
    if subscription.first().map(|row| row.text(0)).transpose()?.is_none_or(|status| status == "disabled") {
        return Ok(Requeued::NoSubscription);
    }
    let generation = next_generation(tx, event_id, subscription_id).await?;
    let row = saga_row(event_id, subscription_id, Status::Pending, generation, None, now);
    let saga_id = bulk::insert(tx, "webhook_delivery_sagas", &SAGA_COLUMNS, &[row], true).await?;
    let saga_id = *saga_id.first().ok_or_else(|| Error::database("the insert gave no id"))?;
    let sql = "UPDATE dead_letters SET requeued_saga_id = ? WHERE id = ?";
    tx.execute(sql, &[saga_id.into(), id.into()]).await?;
    Ok(Requeued::Created(saga_id))
}

/// One more than the highest; two who ask at once meet at the unique index.
pub(crate) async fn next_generation(tx: &mut (dyn Tx + Send), event_id: i64, subscription_id: i64) -> Result<i64> {
    let sql = "SELECT COALESCE(MAX(generation), -1) + 1 FROM webhook_delivery_sagas WHERE event_id = ? AND subscription_id = ?";
    tx.query(sql, &[event_id.into(), subscription_id.into()]).await?.first().map_or(Ok(0), |row| row.int(0))
}
