//! Publishing: the event, a saga for every subscription that wants it, and the first job where nothing holds it; all in
//! one transaction, the caller's own.

use std::collections::HashMap;

use bytes::Bytes;
use postrider::error::Kind;
use postrider::message::{Sha, sha256};
use postrider::store::Mode;
use postrider::tx::{Tx, Value};
use postrider::{Enqueued, Error, NewMessage, Result, Timestamp, bulk};
use serde::{Deserialize, Serialize};

use crate::decide::{Status, is_event_type};
use crate::{LANE, Webhooks};

/// Rows of one statement where keys are looked up.
const CHUNK: usize = 500;

/// Something that happened.
#[derive(Clone, Debug, Default)]
pub struct NewEvent {
    pub event_type: String,
    /// Any bytes; delivered as they are.
    pub payload: Bytes,
    /// `application/json` unless said otherwise.
    pub content_type: Option<String>,
    /// The same again with the same type and payload is the same event.
    pub external_id: Option<String>,
    pub correlation_id: Option<String>,
    /// `traceparent` and `tracestate` of the publisher.
    pub trace: Vec<(String, String)>,
}

impl NewEvent {
    pub fn new(event_type: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        NewEvent { event_type: event_type.into(), payload: payload.into(), ..NewEvent::default() }
    }

    pub fn external_id(mut self, id: impl Into<String>) -> Self {
        self.external_id = Some(id.into());
        self
    }
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Publishing {
    Created,
    /// It is there already, under its external id.
    Exists,
    /// The external id belongs to another event; nothing was written.
    Differs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub outcome: Publishing,
    pub event_id: i64,
    pub saga_ids: Vec<i64>,
}

/// The payload of a job.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub saga_id: i64,
    pub attempt: u32,
    pub event_id: i64,
    pub subscription_id: i64,
}

impl Job {
    pub fn message(self) -> NewMessage {
        // A struct of numbers is always JSON.
        let payload = serde_json::to_vec(&self).unwrap_or_default();
        NewMessage::new(LANE, payload)
            .active_key(format!("saga:{}", self.saga_id))
            .target(self.subscription_id.to_string())
    }

    pub fn parse(payload: &[u8]) -> Option<Job> {
        serde_json::from_slice(payload).ok()
    }
}

/// A saga to be written.
struct NewSaga {
    event: usize,
    subscription_id: i64,
    free: bool,
}

impl Webhooks {
    /// Publishes in the caller's own transaction; answers in the order given. If this fails, roll back. Call
    /// [`Webhooks::published`] after the commit to wake workers at once.
    pub async fn publish_in<T: Tx + ?Sized>(&self, tx: &mut T, events: &[NewEvent]) -> Result<Vec<Published>> {
        for event in events {
            check(event)?;
        }
        let (catalog, now) = self.catalog_in(tx).await?;
        let shas: Vec<Sha> = events.iter().map(|event| sha256(&event.payload)).collect();
        let mut answers = insert_events(tx, events, &shas, now).await?;

        let mut sagas = Vec::new();
        for (n, event) in events.iter().enumerate().filter(|(n, _)| answers[*n].outcome == Publishing::Created) {
            for subscription in catalog.wanting(&event.event_type) {
                let free = catalog.is_free(subscription, now);
                sagas.push(NewSaga { event: n, subscription_id: subscription.id, free });
            }
        }
        let ids = insert_sagas(tx, &sagas, &answers, now).await?;
        let mut jobs = Vec::new();
        for (saga, &saga_id) in sagas.iter().zip(&ids) {
            let answer = &mut answers[saga.event];
            answer.saga_ids.push(saga_id);
            if saga.free {
                let job = Job { saga_id, attempt: 1, event_id: answer.event_id, subscription_id: saga.subscription_id };
                let mut message = job.message();
                message.headers = events[saga.event].trace.clone();
                message.correlation_id = events[saga.event].correlation_id.clone();
                jobs.push(message);
            }
        }
        let receipt = self.0.outbox.enqueue_in(tx, &jobs).await?;
        if receipt.entries().iter().any(|entry| entry.outcome != Enqueued::Created) {
            return Err(Error::database("a new saga has a job already"));
        }
        Ok(answers)
    }

    /// The transaction of [`Webhooks::publish_in`] is committed: wakes workers.
    pub fn published(&self) {
        self.ring();
    }

    /// Publishes in a transaction of its own.
    pub async fn publish(&self, events: Vec<NewEvent>) -> Result<Vec<Published>> {
        let events = std::sync::Arc::new(events);
        for round in 0.. {
            let (webhooks, again) = (self.clone(), events.clone());
            let publish = self.transact(Mode::Write, move |tx| {
                let (webhooks, events) = (webhooks.clone(), again.clone());
                Box::pin(async move { webhooks.publish_in(tx, &events).await })
            });
            match publish.await {
                // Somebody published the same external id at the same moment: now it is there to be seen.
                Err(error) if error.kind == Kind::Conflict && round < 5 => {}
                Err(error) => return Err(error),
                Ok(published) => {
                    self.published();
                    return Ok(published);
                }
            }
        }
        unreachable!("the loop ends by returning")
    }
}

fn check(event: &NewEvent) -> Result<()> {
    if !is_event_type(&event.event_type) {
        let shown: String = event.event_type.chars().take(80).collect();
        return Err(Error::invalid(format!("`{shown}` is no event type; write words joined by dots, like order.paid")));
    }
    if event.payload.len() > 1 << 20 {
        let what = format!(
            "the payload has {} bytes, at most 1048576 are taken; send a reference instead",
            event.payload.len()
        );
        return Err(Error::invalid(what));
    }
    let short = |text: &Option<String>| text.as_ref().is_none_or(|text| (1..=255).contains(&text.len()));
    if !short(&event.external_id) || !short(&event.content_type) || !short(&event.correlation_id) {
        return Err(Error::invalid("external_id, content_type and correlation_id have 1 to 255 bytes"));
    }
    if event.content_type.as_ref().is_some_and(|text| http::HeaderValue::from_str(text).is_err()) {
        return Err(Error::invalid("the content_type cannot be sent as a header"));
    }
    Ok(())
}

const EVENT_COLUMNS: [bulk::Column; 7] = [
    ("event_type", "text"),
    ("external_id", "text"),
    ("payload", "bytea"),
    ("payload_sha", "bytea"),
    ("content_type", "text"),
    ("correlation_id", "text"),
    ("created_at", "timestamptz"),
];

/// Writes those that are new.
async fn insert_events<T: Tx + ?Sized>(
    tx: &mut T,
    events: &[NewEvent],
    shas: &[Sha],
    now: Timestamp,
) -> Result<Vec<Published>> {
    let row = |n: usize| -> Vec<Value> {
        let event = &events[n];
        vec![
            event.event_type.as_str().into(),
            event.external_id.clone().into(),
            event.payload.clone().into(),
            shas[n].as_slice().into(),
            event.content_type.clone().into(),
            event.correlation_id.clone().into(),
            now.into(),
        ]
    };
    let mut answers: Vec<Option<Published>> = vec![None; events.len()];
    let published = |outcome, event_id| Published { outcome, event_id, saga_ids: vec![] };
    // The first of each external id may be new; a second one in the same batch is compared with it below.
    let mut firsts: HashMap<&str, usize> = HashMap::new();
    for (n, event) in events.iter().enumerate() {
        if let Some(id) = &event.external_id {
            firsts.entry(id).or_insert(n);
        }
    }
    let mut known = named(tx, firsts.keys().copied()).await?;
    let new: Vec<usize> = (0..events.len())
        .filter(|&n| match &events[n].external_id {
            None => true,
            Some(id) => firsts.get(id.as_str()) == Some(&n) && !known.contains_key(id),
        })
        .collect();
    let rows: Vec<Vec<Value>> = new.iter().map(|&n| row(n)).collect();
    let ids = bulk::insert(tx, "events", &EVENT_COLUMNS, &rows, true).await?;
    for (&n, id) in new.iter().zip(ids) {
        answers[n] = Some(published(Publishing::Created, id));
        if let Some(external_id) = &events[n].external_id {
            known.insert(
                external_id.clone(),
                Known { id, event_type: events[n].event_type.clone(), sha: shas[n].to_vec(), sagas: vec![] },
            );
        }
    }
    for (n, event) in events.iter().enumerate() {
        if answers[n].is_some() {
            continue;
        }
        let first = event.external_id.as_ref().and_then(|id| known.get(id));
        let first = first.ok_or_else(|| Error::database("an event without an answer"))?;
        let same = first.event_type == event.event_type && first.sha == shas[n];
        let mut answer = published(if same { Publishing::Exists } else { Publishing::Differs }, first.id);
        answer.saga_ids = first.sagas.clone();
        answers[n] = Some(answer);
    }
    Ok(answers.into_iter().flatten().collect())
}

struct Known {
    id: i64,
    event_type: String,
    sha: Vec<u8>,
    sagas: Vec<i64>,
}

/// Events that have these external ids, with their first sagas.
async fn named<'a, T: Tx + ?Sized>(tx: &mut T, ids: impl Iterator<Item = &'a str>) -> Result<HashMap<String, Known>> {
    let mut ids: Vec<&str> = ids.collect();
    ids.sort_unstable();
    let mut known = HashMap::new();
    for part in ids.chunks(CHUNK) {
        let marks = vec!["?"; part.len()].join(", ");
        let sql = format!("SELECT external_id, id, event_type, payload_sha FROM events WHERE external_id IN ({marks})");
        let params: Vec<Value> = part.iter().map(|id| (*id).into()).collect();
        for row in tx.query(&sql, &params).await? {
            let sql =
                "SELECT id FROM webhook_delivery_sagas WHERE event_id = ? AND generation = 0 ORDER BY subscription_id";
            let sagas = tx.query(sql, &[row.int(1)?.into()]).await?;
            let sagas = sagas.iter().map(|saga| saga.int(0)).collect::<Result<_>>()?;
            known.insert(
                row.text(0)?,
                Known { id: row.int(1)?, event_type: row.text(2)?, sha: row.bytes(3)?.to_vec(), sagas },
            );
        }
    }
    Ok(known)
}

pub(crate) const SAGA_COLUMNS: [bulk::Column; 9] = [
    ("event_id", "bigint"),
    ("subscription_id", "bigint"),
    ("status", "text"),
    ("attempt_count", "int"),
    ("next_attempt_at", "timestamptz"),
    ("generation", "int"),
    ("replay_id", "bigint"),
    ("created_at", "timestamptz"),
    ("updated_at", "timestamptz"),
];

async fn insert_sagas<T: Tx + ?Sized>(
    tx: &mut T,
    sagas: &[NewSaga],
    answers: &[Published],
    now: Timestamp,
) -> Result<Vec<i64>> {
    let row = |saga: &NewSaga| {
        let status = if saga.free { Status::InProgress } else { Status::Pending };
        let event_id = answers[saga.event].event_id;
        saga_row(event_id, saga.subscription_id, status, 0, None, now)
    };
    let rows: Vec<Vec<Value>> = sagas.iter().map(row).collect();
    bulk::insert(tx, "webhook_delivery_sagas", &SAGA_COLUMNS, &rows, true).await
}

pub(crate) fn saga_row(
    event_id: i64,
    subscription_id: i64,
    status: Status,
    generation: i64,
    replay_id: Option<i64>,
    now: Timestamp,
) -> Vec<Value> {
    vec![
        event_id.into(),
        subscription_id.into(),
        status.as_str().into(),
        0_i64.into(),
        now.into(),
        generation.into(),
        replay_id.into(),
        now.into(),
        now.into(),
    ]
}
