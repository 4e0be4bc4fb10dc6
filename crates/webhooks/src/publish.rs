//! Publishing: the event, a saga for every subscription that wants it, and the first job where nothing holds it; all in
//! one transaction, the caller's own.

use std::collections::HashMap;

use bytes::Bytes;
use postrider::error::Kind;
use postrider::message::{Sha, sha256};
use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value};
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

    /// Refuses what cannot be published, before anything is written. Publishing asks this too.
    pub fn check(&self) -> Result<()> {
        check(self)
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
        self.read_holds(tx).await?;
        let shas: Vec<Sha> = events.iter().map(|event| sha256(&event.payload)).collect();
        let mut answers = self.insert_events(tx, events, &shas, now).await?;

        let mut sagas = Vec::with_capacity(events.len());
        for (n, event) in events.iter().enumerate().filter(|(n, _)| answers[*n].outcome == Publishing::Created) {
            for subscription in catalog.wanting(&event.event_type, now) {
                let free = self.is_free(subscription);
                sagas.push(NewSaga { event: n, subscription_id: subscription.id, free });
            }
        }
        let ids = insert_sagas(tx, &sagas, &answers, now).await?;
        let mut jobs = Vec::with_capacity(sagas.len());
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
        self.publish_as(Mode::Write, events).await
    }

    /// The same, and with [`Mode::Work`] somebody else's lock on an external id is waited for only for a moment.
    #[doc(hidden)]
    pub async fn publish_as(&self, mode: Mode, events: Vec<NewEvent>) -> Result<Vec<Published>> {
        let events = std::sync::Arc::new(events);
        for round in 0.. {
            let (webhooks, again) = (self.clone(), events.clone());
            let publish = self.transact(mode, move |tx| {
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
    let is_header = |text: &Option<String>| text.as_ref().is_none_or(|text| http::HeaderValue::from_str(text).is_ok());
    if !is_header(&event.content_type) || !is_header(&event.correlation_id) {
        return Err(Error::invalid("content_type and correlation_id are sent as headers, and this cannot be one"));
    }
    if event.external_id.as_ref().is_some_and(|text| text.contains('\0')) {
        return Err(Error::invalid("the external_id contains a NUL character"));
    }
    if event.external_id.as_ref().is_some_and(|text| text.ends_with(' ')) {
        // MySQL compares texts without the blanks at their end.
        return Err(Error::invalid("the external_id ends with a blank; not every database tells it from one without"));
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

struct Known {
    id: i64,
    event_type: String,
    sha: Vec<u8>,
    sagas: Vec<i64>,
}

impl Webhooks {
    /// Writes those that are new. Who publishes the same external id at the same time waits until the first one has
    /// committed, and is told that it exists: nothing of the caller's own transaction fails for it.
    async fn insert_events<T: Tx + ?Sized>(
        &self,
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
        // The first of each external id may be new; a second one in the same batch is compared with it below.
        let mut firsts: HashMap<&str, usize> = HashMap::new();
        for (n, event) in events.iter().enumerate() {
            if let Some(id) = &event.external_id {
                firsts.entry(id).or_insert(n);
            }
        }
        let mut known = named(tx, firsts.keys().copied(), Sight::Snapshot).await?;
        let mut created: HashMap<usize, i64> = HashMap::new();
        let plain: Vec<usize> = (0..events.len()).filter(|&n| events[n].external_id.is_none()).collect();
        let rows: Vec<Vec<Value>> = plain.iter().map(|&n| row(n)).collect();
        let ids = bulk::insert(tx, "events", &EVENT_COLUMNS, &rows, true).await?;
        created.extend(plain.iter().copied().zip(ids));

        let mut keyed: Vec<(usize, &str)> =
            firsts.iter().filter(|(id, _)| !known.contains_key(**id)).map(|(id, n)| (*n, *id)).collect();
        keyed.sort_unstable();
        let rows: Vec<Vec<Value>> = keyed.iter().map(|(n, _)| row(*n)).collect();
        let mine = insert_unless_taken(tx, &rows).await?;
        let mut taken = Vec::new();
        for ((n, external_id), id) in keyed.iter().zip(mine) {
            let Some(id) = id else {
                taken.push(*external_id);
                continue;
            };
            created.insert(*n, id);
            let (event_type, sha) = (events[*n].event_type.clone(), shas[*n].to_vec());
            known.insert((*external_id).to_owned(), Known { id, event_type, sha, sagas: vec![] });
        }
        if !taken.is_empty() {
            let mut theirs = named(tx, taken.into_iter(), Sight::Current).await?;
            self.see_sagas(tx.dialect(), &mut theirs).await?;
            known.extend(theirs);
        }
        let answer = |(n, event): (usize, &NewEvent)| {
            if let Some(id) = created.get(&n) {
                return Ok(Published { outcome: Publishing::Created, event_id: *id, saga_ids: vec![] });
            }
            let first = event.external_id.as_ref().and_then(|id| known.get(id));
            let first = first.ok_or_else(|| Error::new(Kind::Busy, "an event of the same external_id went away"))?;
            let same = first.event_type == event.event_type && first.sha == shas[n];
            let outcome = if same { Publishing::Exists } else { Publishing::Differs };
            Ok(Published { outcome, event_id: first.id, saga_ids: first.sagas.clone() })
        };
        events.iter().enumerate().map(answer).collect()
    }

    /// A caller's transaction on MySQL may see things as they were when it began, before these were published: their sagas
    /// are asked for outside of it. A lock would see them too, and keep them from being delivered until the caller commits.
    async fn see_sagas(&self, dialect: Dialect, theirs: &mut HashMap<String, Known>) -> Result<()> {
        if dialect != Dialect::Mysql || theirs.values().all(|known| !known.sagas.is_empty()) {
            return Ok(());
        }
        let ids: Vec<i64> = theirs.values().map(|known| known.id).collect();
        let seen = self
            .transact(Mode::Read, move |tx| {
                let ids = ids.clone();
                Box::pin(async move {
                    let mut seen: HashMap<i64, Vec<i64>> = HashMap::new();
                    for id in ids {
                        seen.insert(id, first_sagas(tx, id).await?);
                    }
                    Ok(seen)
                })
            })
            .await?;
        for known in theirs.values_mut() {
            known.sagas = seen.get(&known.id).cloned().unwrap_or_default();
        }
        Ok(())
    }
}

/// Inserts events that have external ids; answers the id of each that is new, nothing where another has it.
async fn insert_unless_taken<T: Tx + ?Sized>(tx: &mut T, rows: &[Vec<Value>]) -> Result<Vec<Option<i64>>> {
    let mut ids = Vec::with_capacity(rows.len());
    for part in rows.chunks(CHUNK) {
        match tx.dialect() {
            // Whoever writes is alone, and has just looked.
            Dialect::Sqlite => {
                ids.extend(bulk::insert(tx, "events", &EVENT_COLUMNS, part, true).await?.into_iter().map(Some));
            }
            Dialect::Postgres => ids.extend(insert_postgres(tx, part).await?),
            Dialect::Mysql => ids.extend(insert_mysql(tx, part).await?),
        }
    }
    Ok(ids)
}

fn names() -> String {
    EVENT_COLUMNS.map(|column| column.0).join(", ")
}

fn text_of(value: &Value) -> Option<String> {
    if let Value::Text(text) = value { Some(text.clone()) } else { None }
}

async fn insert_postgres<T: Tx + ?Sized>(tx: &mut T, rows: &[Vec<Value>]) -> Result<Vec<Option<i64>>> {
    let column = |n: usize| rows.iter().map(move |row| &row[n]);
    let (mut params, mut arrays) = (Vec::new(), Vec::new());
    for (n, (_, kind)) in EVENT_COLUMNS.iter().enumerate() {
        params.push(match *kind {
            "bytea" => {
                Value::Blobs(column(n).map(|v| if let Value::Bytes(b) = v { Some(b.clone()) } else { None }).collect())
            }
            "timestamptz" => {
                Value::Times(column(n).map(|v| if let Value::Time(t) = v { Some(*t) } else { None }).collect())
            }
            _ => Value::Texts(column(n).map(text_of).collect()),
        });
        arrays.push(format!("?::{kind}[]"));
    }
    let (names, arrays) = (names(), arrays.join(", "));
    let sql = format!(
        "INSERT INTO events ({names}) SELECT {names} FROM unnest({arrays}) AS t({names})
         ON CONFLICT (external_id) DO NOTHING RETURNING external_id, id"
    );
    let made = tx.query(&sql, &params).await?;
    let made = made.iter().map(|row| Ok((row.text(0)?, row.int(1)?))).collect::<Result<HashMap<String, i64>>>()?;
    Ok(column(1).map(|id| text_of(id).and_then(|id| made.get(&id).copied())).collect())
}

/// MySQL does not say which rows it ignored. Their ids do: a statement sets aside as many in a row as it has rows, so what
/// lies among them is ours.
async fn insert_mysql<T: Tx + ?Sized>(tx: &mut T, rows: &[Vec<Value>]) -> Result<Vec<Option<i64>>> {
    let row = format!("({})", vec!["?"; EVENT_COLUMNS.len()].join(", "));
    let values = vec![row.as_str(); rows.len()].join(", ");
    let sql = format!("INSERT IGNORE INTO events ({}) VALUES {values}", names());
    let inserted = tx.execute(&sql, &rows.concat()).await? as usize;
    if inserted == 0 {
        return Ok(vec![None; rows.len()]);
    }
    let last = tx.query("SELECT LAST_INSERT_ID(), @@auto_increment_increment", &[]).await?;
    let (first, step) = last.first().map(|row| Ok((row.int(0)?, row.int(1)?))).transpose()?.unwrap_or((0, 1));
    if inserted == rows.len() {
        return Ok((0..rows.len() as i64).map(|n| Some(first + n * step)).collect());
    }
    let external: Vec<String> = rows.iter().filter_map(|row| text_of(&row[1])).collect();
    let marks = vec!["?"; external.len()].join(", ");
    let sql = format!("SELECT external_id, id FROM events WHERE external_id IN ({marks})");
    let params: Vec<Value> = external.iter().map(Value::from).collect();
    let there = tx.query(&sql, &params).await?;
    let there = there.iter().map(|row| Ok((row.text(0)?, row.int(1)?))).collect::<Result<HashMap<String, i64>>>()?;
    let ours = first..=first + (rows.len() as i64 - 1) * step;
    let mine = |id: &String| there.get(id).copied().filter(|id| ours.contains(id));
    let ids: Vec<Option<i64>> = external.iter().map(mine).collect();
    if ids.iter().flatten().count() != inserted {
        return Err(Error::new(Kind::Busy, "the same external_id was published at the same time; try again"));
    }
    Ok(ids)
}

/// As the transaction sees it, or as it is now.
#[derive(Clone, Copy, PartialEq)]
enum Sight {
    Snapshot,
    Current,
}

/// Events that have these external ids, with their first sagas.
async fn named<'a, T: Tx + ?Sized>(
    tx: &mut T,
    ids: impl Iterator<Item = &'a str>,
    sight: Sight,
) -> Result<HashMap<String, Known>> {
    let mut ids: Vec<&str> = ids.collect();
    ids.sort_unstable();
    let mut known = HashMap::new();
    for part in ids.chunks(CHUNK) {
        let marks = vec!["?"; part.len()].join(", ");
        // An event never changes, so nobody but a prune waits for this lock.
        let current =
            if sight == Sight::Current && tx.dialect() == Dialect::Mysql { " LOCK IN SHARE MODE" } else { "" };
        let sql = format!(
            "SELECT external_id, id, event_type, payload_sha FROM events WHERE external_id IN ({marks}){current}"
        );
        let params: Vec<Value> = part.iter().map(|id| (*id).into()).collect();
        for row in tx.query(&sql, &params).await? {
            let sagas = first_sagas(tx, row.int(1)?).await?;
            known.insert(
                row.text(0)?,
                Known { id: row.int(1)?, event_type: row.text(2)?, sha: row.bytes(3)?.to_vec(), sagas },
            );
        }
    }
    Ok(known)
}

async fn first_sagas<T: Tx + ?Sized>(tx: &mut T, event_id: i64) -> Result<Vec<i64>> {
    let sql = "SELECT id FROM webhook_delivery_sagas WHERE event_id = ? AND generation = 0 ORDER BY subscription_id";
    tx.query(sql, &[event_id.into()]).await?.iter().map(|saga| saga.int(0)).collect()
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
