//! What people ask: events, sagas and the attempts of each.

use postrider::paging::{self, Candidates, Page, Rows, Wanted};
use postrider::store::Mode;
use postrider::tx::{Row, Value};
use postrider::{Error, Result, Timestamp};
use serde::Serialize;

use crate::Webhooks;

/// An event, without its payload.
#[derive(Clone, Debug, Serialize)]
pub struct EventShown {
    pub id: i64,
    pub event_type: String,
    pub external_id: Option<String>,
    pub payload_bytes: i64,
    pub content_type: Option<String>,
    pub correlation_id: Option<String>,
    pub created_at: Timestamp,
}

#[derive(Clone, Debug, Serialize)]
pub struct Saga {
    pub id: i64,
    pub event_id: i64,
    pub subscription_id: i64,
    pub status: String,
    pub attempt_count: i64,
    /// None while it is in progress or has ended, or is held by its subscription's gate.
    pub next_attempt_at: Option<Timestamp>,
    pub held: bool,
    pub final_error_code: Option<String>,
    pub generation: i64,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

#[derive(Clone, Debug, Serialize)]
pub struct Attempt {
    pub job_id: i64,
    pub attempt: i64,
    pub started_at: Timestamp,
    pub duration_ms: i64,
    pub error_class: Option<String>,
    pub error_code: Option<String>,
    pub response_status: Option<i64>,
    pub response_headers: Option<serde_json::Value>,
    pub response_body: Option<String>,
    pub remote_address: Option<String>,
    /// Of TLS_FAILED: why.
    pub error_detail: Option<String>,
}

/// A job that is live.
#[derive(Clone, Debug, Serialize)]
pub struct LiveJob {
    pub id: i64,
    pub status: String,
    pub lease_until: Option<Timestamp>,
}

/// Sagas, and attempts, of one answer: an attempt may have kept 20 kB of what was answered to it.
const MOST_SAGAS: usize = 100;
const MOST_ATTEMPTS: usize = 200;

/// What became of an event.
#[derive(Clone, Debug)]
pub struct Timeline {
    pub event: EventShown,
    pub sagas: Vec<(Saga, Vec<Attempt>)>,
    /// There are more sagas, or more attempts, than are told here.
    pub more: bool,
}

#[derive(Clone, Debug, Default)]
pub struct SagaFilter {
    pub status: Option<String>,
    pub subscription_id: Option<i64>,
    pub event_id: Option<i64>,
    pub before: Option<i64>,
    pub limit: u32,
}

const SAGA: &str = "id, event_id, subscription_id, status, attempt_count, next_attempt_at, final_error_code, generation, created_at, updated_at";

fn saga(row: &Row) -> Result<Saga> {
    let status = row.text(3)?;
    let next = row.opt_time(5)?.filter(|_| status != "InProgress");
    let held = next == Some(Timestamp::FAR_FUTURE);
    Ok(Saga {
        id: row.int(0)?,
        event_id: row.int(1)?,
        subscription_id: row.int(2)?,
        status,
        attempt_count: row.int(4)?,
        next_attempt_at: next.filter(|_| !held),
        held,
        final_error_code: row.opt_text(6)?,
        generation: row.int(7)?,
        created_at: row.time(8)?,
        updated_at: row.time(9)?,
    })
}

const EVENT: &str = "id, event_type, external_id, LENGTH(payload), content_type, correlation_id, created_at";

fn event(row: &Row) -> Result<EventShown> {
    Ok(EventShown {
        id: row.int(0)?,
        event_type: row.text(1)?,
        external_id: row.opt_text(2)?,
        payload_bytes: row.int(3)?,
        content_type: row.opt_text(4)?,
        correlation_id: row.opt_text(5)?,
        created_at: row.time(6)?,
    })
}

impl Webhooks {
    async fn rows(&self, sql: String, params: Vec<Value>) -> Result<Vec<Row>> {
        let work = std::sync::Arc::new((sql, params));
        self.transact(Mode::Look, move |tx| {
            let work = work.clone();
            Box::pin(async move { tx.query(&work.0, &work.1).await })
        })
        .await
    }

    pub async fn events(
        &self,
        event_type: Option<String>,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Page<EventShown>> {
        if event_type.as_ref().is_some_and(|text| text.contains('\0')) {
            return Err(Error::invalid("an event_type has no NUL character"));
        }
        let mut params: Vec<Value> = vec![before.unwrap_or(i64::MAX).into()];
        let of_type = if event_type.is_some() { " AND event_type = ?" } else { "" };
        params.extend(event_type.map(Value::from));
        let sql = format!(
            "SELECT {EVENT} FROM events WHERE id < ?{of_type} ORDER BY id DESC LIMIT {}",
            limit.saturating_add(1)
        );
        let events = self.rows(sql, params).await?.iter().map(event).collect::<Result<Vec<_>>>()?;
        Ok(Page::of(events, limit as usize, |event| event.id))
    }

    /// One event with its first sagas and their last attempts, as many as an answer bears; `more`: that is not all of them.
    pub async fn event(&self, id: i64) -> Result<Option<Timeline>> {
        let rows = self.rows(format!("SELECT {EVENT} FROM events WHERE id = ?"), vec![id.into()]).await?;
        let Some(event) = rows.first().map(event).transpose()? else { return Ok(None) };
        let sql = format!(
            "SELECT {SAGA} FROM webhook_delivery_sagas WHERE event_id = ? ORDER BY id LIMIT {}",
            MOST_SAGAS + 1
        );
        let rows = self.rows(sql, vec![id.into()]).await?;
        let mut timeline = Timeline { event, sagas: Vec::new(), more: rows.len() > MOST_SAGAS };
        let mut left = MOST_ATTEMPTS;
        for row in rows.iter().take(MOST_SAGAS) {
            let saga = saga(row)?;
            let (attempts, more) = self.attempts(saga.id, left).await?;
            left -= attempts.len();
            timeline.more |= more;
            timeline.sagas.push((saga, attempts));
        }
        Ok(Some(timeline))
    }

    pub async fn sagas(&self, filter: SagaFilter) -> Result<Page<Saga>> {
        let SagaFilter { status, subscription_id, event_id, before, limit } = filter;
        let asked = (status, subscription_id, event_id);
        self.transact(Mode::Look, move |tx| {
            let (status, subscription_id, event_id) = asked.clone();
            Box::pin(async move {
                let by = |condition: &str, params: Vec<Value>| {
                    vec![Candidates::new(format!("SELECT id FROM webhook_delivery_sagas WHERE {condition}"), params)]
                };
                let candidates = match (event_id, subscription_id, status.clone()) {
                    (Some(id), ..) => by("event_id = ? ORDER BY subscription_id", vec![id.into()]),
                    (None, Some(id), Some(status)) => by(
                        "subscription_id = ? AND status = ? ORDER BY next_attempt_at, id",
                        vec![id.into(), status.into()],
                    ),
                    (None, Some(id), None) => {
                        by("subscription_id = ? ORDER BY status, next_attempt_at, id", vec![id.into()])
                    }
                    (None, None, Some(status)) => by("status = ? ORDER BY next_attempt_at", vec![status.into()]),
                    (None, None, None) => vec![],
                };
                let few = paging::few(tx, &candidates).await?;
                let wanted = Wanted::default().is("status", status).is("subscription_id", subscription_id);
                let wanted = wanted.is("event_id", event_id);
                let table = "webhook_delivery_sagas";
                let rows = Rows { table, id: "id", columns: SAGA.to_owned(), bound: vec![], wanted };
                paging::page(tx, &rows, few, before, limit).await?.read(saga)
            })
        })
        .await
    }

    /// One saga with its live job, if any, and its last attempts.
    pub async fn saga(&self, id: i64) -> Result<Option<(Saga, Vec<LiveJob>, Vec<Attempt>)>> {
        let rows =
            self.rows(format!("SELECT {SAGA} FROM webhook_delivery_sagas WHERE id = ?"), vec![id.into()]).await?;
        let Some(saga) = rows.first().map(saga).transpose()? else { return Ok(None) };
        let sql = "SELECT id, CASE WHEN locked_by IS NULL THEN 'Pending' ELSE 'Leased' END, lease_until FROM outbox WHERE lane = 'webhooks' AND active_key = ?";
        let rows = self.rows(sql.to_owned(), vec![format!("saga:{id}").into()]).await?;
        let job = |row: &Row| Ok(LiveJob { id: row.int(0)?, status: row.text(1)?, lease_until: row.opt_time(2)? });
        let jobs = rows.iter().map(job).collect::<Result<_>>()?;
        Ok(Some((saga, jobs, self.attempts(id, MOST_ATTEMPTS).await?.0)))
    }

    /// The last attempts of a saga, the oldest of them first; `true`: there are more.
    async fn attempts(&self, saga_id: i64, most: usize) -> Result<(Vec<Attempt>, bool)> {
        let sql = format!(
            "SELECT job_id, attempt, started_at, duration_ms, error_class, error_code, response_status, response_headers, response_body, remote_address, error_detail
                   FROM webhook_attempts WHERE saga_id = ? ORDER BY attempt DESC, id DESC LIMIT {}",
            most + 1
        );
        let attempt = |row: &Row| {
            Ok(Attempt {
                job_id: row.int(0)?,
                attempt: row.int(1)?,
                started_at: row.time(2)?,
                duration_ms: row.int(3)?,
                error_class: row.opt_text(4)?,
                error_code: row.opt_text(5)?,
                response_status: row.opt_int(6)?,
                response_headers: row.opt_text(7)?.and_then(|text| serde_json::from_str(&text).ok()),
                response_body: row.opt_bytes(8)?.map(|body| String::from_utf8_lossy(&body).into_owned()),
                remote_address: row.opt_text(9)?,
                error_detail: row.opt_text(10)?,
            })
        };
        let rows = self.rows(sql, vec![saga_id.into()]).await?;
        let mut attempts = rows.iter().take(most).map(attempt).collect::<Result<Vec<_>>>()?;
        attempts.reverse();
        Ok((attempts, rows.len() > most))
    }
}
