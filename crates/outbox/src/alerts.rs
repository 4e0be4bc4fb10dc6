//! Alerts are messages too: written on a lane of their own in the transaction that saw the trouble, so they survive what a
//! message survives. One trouble is one alert: within `every`, what comes again is only counted, by all processes together,
//! also when the trouble was over in between. What is told of one trouble is told in order, and only the last word of it:
//! see [`Alerts::place`]. Nobody's work waits for somebody else's alert: where the row of a trouble is locked, or not there
//! yet, the alert is written as a note, and whether it is told is decided when it is about to be sent.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use crate::clock::{self, Tick};
use crate::error::Result;
use crate::message::{Message, NewMessage};
use crate::outbox::Outbox;
use crate::settle::{for_update, skip_locked};
use crate::store::{Mode, transact};
use crate::time::{Timestamp, micros_of};
use crate::tx::{Dialect, Row, Tx, Value};

/// A settle that has stamped its rows may commit later: deaths are looked for again for so long.
const LATE: Duration = Duration::from_secs(60);
/// Deaths read by one look; the next one goes on from there. And those remembered, to be looked for again.
const READ: usize = 10_000;
const REMEMBERED: usize = 2_000;
/// Where nobody dies, a look is noted only so often.
const NOTED: Duration = Duration::from_secs(20);
/// What was told so long ago is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(30 * 24 * 3600);
/// Waiting messages of a lane are counted up to this.
const MOST_WAITING: u64 = 10_000;

/// Who owns the lane of alerts, where the server makes it: nobody else writes on it.
pub const OWNER: &str = "[alerts] in postrider.toml";

pub mod kind {
    pub const DEAD_MESSAGES: &str = "dead_messages";
    pub const LANE_TOO_OLD: &str = "lane_too_old";
}

const RAISED: &str = "UPDATE outbox_alerts SET raised_at = ?, resolved_at = NULL, suppressed = 0, waiting_json = NULL WHERE kind = ? AND subject = ?";
const LAST_WORD: &str = "UPDATE outbox_alerts SET message_id = ? WHERE kind = ? AND subject = ?";

/// Something an operator should hear of.
#[derive(Clone, Debug)]
pub struct Alert {
    /// What kind of trouble; with `subject` it makes the trouble one.
    pub kind: &'static str,
    pub subject: String,
    /// One sentence, with what to do.
    pub message: String,
    pub count: i64,
    pub details: Json,
}

/// Where an alert stands among those of its trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It is the last word: to be sent.
    Last,
    /// A later one says more: not to be sent.
    Overtaken(i64),
    /// The one before it has not ended yet.
    Waits,
}

/// What was last told of a trouble.
#[derive(Clone, Copy, Debug, Default)]
struct Standing {
    raised_at: Option<Timestamp>,
    /// Set once the end of what was raised is told.
    resolved_at: Option<Timestamp>,
    suppressed: i64,
    message_id: Option<i64>,
    /// What an alert counted that is still on its way, and that the next one overtakes.
    untold: i64,
    now: Timestamp,
}

impl Standing {
    /// Was one like it raised within `every`?
    fn raised_within(&self, every: Duration) -> bool {
        self.raised_at.is_some_and(|at| self.now.micros().saturating_sub(at.micros()) < micros_of(every))
    }

    /// Is the last word that there is trouble?
    fn is_raised(&self) -> bool {
        self.raised_at.is_some() && self.resolved_at.is_none()
    }
}

/// The deaths of a lane that were counted lately.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Recent {
    /// Microseconds: nothing that died before is looked at again.
    floor: i64,
    ids: Vec<i64>,
}

#[derive(Clone, Debug)]
struct Death {
    id: i64,
    at: Timestamp,
    code: Option<String>,
}

impl Recent {
    /// The deaths that are new among those a look has read (in their order), until when it has seen all, and what it will
    /// remember.
    fn tell<'a>(&self, read: &'a [Death], now: Timestamp) -> (Vec<&'a Death>, Timestamp, Recent) {
        let known: HashSet<i64> = self.ids.iter().copied().collect();
        let new = read.iter().filter(|death| !known.contains(&death.id)).collect();
        let until = if read.len() < READ { now } else { read.last().map_or(now, |death| death.at) };
        let mut floor = until.micros().saturating_sub(micros_of(LATE)).max(self.floor);
        let again: Vec<&Death> = read.iter().filter(|death| death.at.micros() > floor).collect();
        let (left_out, kept) = again.split_at(again.len().saturating_sub(REMEMBERED));
        if let Some(last) = left_out.last() {
            floor = last.at.micros();
        }
        (new, until, Recent { floor, ids: kept.iter().map(|death| death.id).collect() })
    }
}

/// Raises alerts on a lane.
#[derive(Clone)]
pub struct Alerts {
    outbox: Outbox,
    lane: Arc<str>,
    every: Duration,
    begun: Tick,
}

impl Alerts {
    /// From now on somebody watches: the first look, whenever it comes, tells of what has died since.
    pub fn new(outbox: Outbox, lane: impl Into<Arc<str>>, every: Duration) -> Self {
        Alerts { outbox: outbox.owning(OWNER), lane: lane.into(), every, begun: Tick::now() }
    }

    /// Raises an alert in the given transaction, which waits for nobody; `false` if one like it went out within `every`, and
    /// it was only counted. A trouble that comes back within `every` after it was over is told after that time, unless it is
    /// over by then.
    pub async fn raise(&self, tx: &mut (dyn Tx + Send), alert: &Alert) -> Result<bool> {
        let standing = match tx.dialect() {
            Dialect::Sqlite => Some(self.lock(tx, alert.kind, &alert.subject).await?),
            dialect => self.standing(tx, alert.kind, &alert.subject, skip_locked(dialect)).await?,
        };
        match standing {
            Some(standing) => self.raise_locked(tx, alert.kind, alert, standing).await,
            None => self.enqueue(tx, note(alert), alert).await.map(|_| true),
        }
    }

    /// The same for what happened in one batch: of each trouble one alert, the last, with the counts of all.
    pub async fn raise_all(&self, tx: &mut (dyn Tx + Send), alerts: Vec<Alert>) -> Result<()> {
        let mut merged: BTreeMap<(&str, String), Alert> = BTreeMap::new();
        for mut alert in alerts {
            let name = (alert.kind, alert.subject.clone());
            alert.count += merged.get(&name).map_or(0, |earlier| earlier.count);
            merged.insert(name, alert);
        }
        for alert in merged.values() {
            self.raise(tx, alert).await?;
        }
        Ok(())
    }

    async fn raise_locked(
        &self,
        tx: &mut (dyn Tx + Send),
        kind: &str,
        alert: &Alert,
        standing: Standing,
    ) -> Result<bool> {
        if standing.raised_within(self.every) {
            return only_count(tx, kind, alert, &standing).await.map(|()| false);
        }
        tx.execute(RAISED, &[standing.now.into(), kind.into(), alert.subject.as_str().into()]).await?;
        self.write(tx, "raised", kind, alert, &standing).await?;
        Ok(true)
    }

    /// The trouble is over: says so, if its last word was that there is trouble.
    pub async fn resolve(&self, tx: &mut (dyn Tx + Send), alert: &Alert) -> Result<bool> {
        let name = [alert.kind.into(), alert.subject.as_str().into()];
        let sql = "SELECT 1 FROM outbox_alerts WHERE kind = ? AND subject = ? AND raised_at IS NOT NULL
                   AND (resolved_at IS NULL OR waiting_json IS NOT NULL)";
        if tx.query(sql, &name).await?.is_empty() {
            return Ok(false);
        }
        let standing = self.lock(tx, alert.kind, &alert.subject).await?;
        if !standing.is_raised() {
            // It came back and went before that was told.
            let sql = "UPDATE outbox_alerts SET waiting_json = NULL WHERE kind = ? AND subject = ?";
            tx.execute(sql, &name).await?;
            return Ok(false);
        }
        let mut params: Vec<Value> = vec![standing.now.into()];
        params.extend(name);
        let sql = "UPDATE outbox_alerts SET resolved_at = ?, suppressed = 0 WHERE kind = ? AND subject = ?";
        tx.execute(sql, &params).await?;
        self.write(tx, "resolved", alert.kind, alert, &standing).await?;
        Ok(true)
    }

    /// Whether an alert that is about to be sent is still the last word on its trouble. What is overtaken is not sent: a
    /// trouble that is over is no news. And no two of one trouble are on their way at once, so that they arrive in order.
    pub async fn place(&self, message: &Message) -> Result<Place> {
        let Ok(body) = serde_json::from_slice::<Json>(&message.payload) else { return Ok(Place::Last) };
        let (Some(kind), Some(subject)) = (body["kind"].as_str(), body["subject"].as_str()) else {
            return Ok(Place::Last);
        };
        let told = Told {
            id: message.id,
            tried: message.attempts > 0,
            name: [kind.to_owned(), subject.to_owned()],
            previous: body["previous_id"].as_i64(),
            note: body["note"].as_bool().unwrap_or(false).then(|| alert_of(subject, &body)),
        };
        let work = Arc::new((self.clone(), told));
        transact(&**self.outbox.store(), Mode::Work, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let (alerts, told) = &*work;
                match &told.note {
                    Some(note) => alerts.place_note(tx, told, note).await,
                    None => place(tx, told).await,
                }
            })
        })
        .await
    }

    /// A note is told like any other alert, or only counted, as it would have been when it was written.
    async fn place_note(&self, tx: &mut (dyn Tx + Send), told: &Told, note: &Alert) -> Result<Place> {
        let [kind, subject] = &told.name;
        let standing = self.lock(tx, kind, subject).await?;
        if let Some(last) = standing.message_id {
            if last == told.id {
                return Ok(Place::Last);
            }
            // It had its turn, and something newer was told since.
            if told.tried {
                return Ok(Place::Overtaken(last));
            }
            if standing.raised_within(self.every) || (standing.is_raised() && is_live(tx, last).await?) {
                only_count(tx, kind, note, &standing).await?;
                return Ok(Place::Overtaken(last));
            }
            if hurry(tx, last).await? {
                return Ok(Place::Waits);
            }
        }
        // What was counted before stays so: the note was written without it, and the next alert tells it.
        let sql = "UPDATE outbox_alerts SET raised_at = ?, resolved_at = NULL, waiting_json = NULL WHERE kind = ? AND subject = ?";
        tx.execute(sql, &[standing.now.into(), kind.into(), subject.into()]).await?;
        tx.execute(LAST_WORD, &[told.id.into(), kind.into(), subject.into()]).await?;
        Ok(Place::Last)
    }

    /// Looks at every lane nobody owns: have messages died since the last look? What keeps one lane's from being told is not
    /// the others'.
    pub async fn look_for_the_dead(&self) -> Result<()> {
        let lanes = self.outbox.lanes().iter();
        let lanes = lanes.filter(|(lane, rules)| rules.owned_by.is_none() && *lane != &*self.lane);
        let mut all = Ok(());
        for lane in lanes.map(|(lane, _)| Arc::<str>::from(lane)).collect::<Vec<_>>() {
            let looked = self.look_for_the_dead_of(lane).await;
            all = all.and(looked);
        }
        all
    }

    async fn look_for_the_dead_of(&self, lane: Arc<str>) -> Result<()> {
        let (alerts, of_lane) = (self.clone(), lane.clone());
        let look = transact(&**self.outbox.store(), Mode::Look, move |tx| {
            let (alerts, lane) = (alerts.clone(), of_lane.clone());
            Box::pin(async move { alerts.has_news(tx, &lane).await })
        });
        if !look.await? {
            return Ok(());
        }
        let alerts = self.clone();
        let raised = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let (alerts, lane) = (alerts.clone(), lane.clone());
            Box::pin(async move { alerts.count_the_dead(tx, &lane).await })
        });
        if raised.await? {
            self.outbox.ring();
        }
        Ok(())
    }

    /// Is there anything to write down about a lane? Most looks find nothing, and then nothing is written.
    async fn has_news(&self, tx: &mut (dyn Tx + Send), lane: &str) -> Result<bool> {
        let standing = self.standing(tx, kind::DEAD_MESSAGES, lane, "").await?;
        let (since, recent) = seen(tx, lane).await?;
        let (Some(standing), Some(since)) = (standing, since) else { return Ok(true) };
        if self.was_only_counted(&standing) || standing.now.since(since) >= NOTED {
            return Ok(true);
        }
        let read = deaths(tx, lane, since, &recent).await?;
        Ok(!recent.tell(&read, standing.now).0.is_empty())
    }

    /// Did more die than was told, long enough ago to tell it now?
    fn was_only_counted(&self, standing: &Standing) -> bool {
        standing.suppressed > 0 && !standing.raised_within(self.every)
    }

    async fn count_the_dead(&self, tx: &mut (dyn Tx + Send), lane: &str) -> Result<bool> {
        let standing = self.lock(tx, kind::DEAD_MESSAGES, lane).await?;
        let (since, mut recent) = seen(tx, lane).await?;
        let from = since.unwrap_or_else(|| {
            // What died before anybody watched is history.
            let begun = standing.now.micros() - micros_of(Tick::now().since(self.begun));
            recent.floor = begun;
            Timestamp::from_micros(begun)
        });
        let read = deaths(tx, lane, from, &recent).await?;
        let (new, until, recent) = recent.tell(&read, standing.now);
        let recent = serde_json::to_string(&recent).unwrap_or_default();
        let sql = "UPDATE outbox_alerts SET seen_until = ?, recent_json = ? WHERE kind = ? AND subject = ?";
        tx.execute(sql, &[until.into(), recent.into(), kind::DEAD_MESSAGES.into(), lane.into()]).await?;
        let count = new.len() as i64;
        if count == 0 && !self.was_only_counted(&standing) {
            return Ok(false);
        }
        let last = new.last();
        let died = count + standing.suppressed + standing.untold;
        let words = if died == 1 { "message" } else { "messages" };
        let alert = Alert {
            kind: kind::DEAD_MESSAGES,
            subject: lane.to_owned(),
            message: format!(
                "{died} {words} of lane `{lane}` died; look: postrider outbox list --lane {lane} --status dead, bring back: postrider outbox requeue --lane {lane} --dead"
            ),
            count,
            details: json!({ "last_id": last.map(|l| l.id), "last_error_code": last.and_then(|l| l.code.clone()) }),
        };
        self.raise_locked(tx, alert.kind, &alert, standing).await
    }

    /// Is the oldest due message of each lane older than its limit? Paused lanes are held on purpose. It costs a bounded
    /// amount, whatever the backlog.
    pub async fn look_at_ages(&self, limit: impl Fn(&str) -> Duration) -> Result<()> {
        for (lane, age) in self.outbox.ages().await? {
            let limit = limit(&lane);
            let too_old = !limit.is_zero() && age.oldest_due_seconds > limit.as_secs_f64() && !age.paused;
            let (age, limit) = (age.oldest_due_seconds.round(), limit.as_secs());
            let mut details = json!({ "oldest_due_seconds": age, "limit_seconds": limit });
            let message = match too_old {
                true => {
                    let waiting = self.outbox.waiting(&lane, MOST_WAITING).await?;
                    details["pending"] = waiting.into();
                    let more = if waiting >= MOST_WAITING { "more than " } else { "" };
                    format!(
                        "the oldest due message of lane `{lane}` has waited {age} s, its limit is {limit} s ({more}{waiting} wait); are its workers running, is its destination up?"
                    )
                }
                false => format!("lane `{lane}` is within its limit of {limit} s again"),
            };
            let alert = Alert { kind: kind::LANE_TOO_OLD, subject: lane, message, count: 1, details };
            self.tell(alert, too_old).await?;
        }
        Ok(())
    }

    /// Tells of troubles that came back too soon to be told then, and are still there.
    pub async fn tell_what_waits(&self) -> Result<()> {
        let every = micros_of(self.every);
        let due = transact(&**self.outbox.store(), Mode::Read, move |tx| {
            Box::pin(async move {
                let mut params = Vec::new();
                let before = tx.now().plus(-every, &mut params);
                let sql = format!(
                    "SELECT kind, subject FROM outbox_alerts WHERE waiting_json IS NOT NULL AND raised_at <= {before} LIMIT 100"
                );
                let rows = tx.query(&sql, &params).await?;
                rows.iter().map(|row| Ok((row.text(0)?, row.text(1)?))).collect::<Result<Vec<_>>>()
            })
        });
        for name in due.await? {
            let work = Arc::new((self.clone(), name));
            let told = transact(&**self.outbox.store(), Mode::Write, move |tx| {
                let work = work.clone();
                Box::pin(async move { work.0.tell_waiting(tx, &work.1.0, &work.1.1).await })
            });
            if told.await? {
                self.outbox.ring();
            }
        }
        Ok(())
    }

    async fn tell_waiting(&self, tx: &mut (dyn Tx + Send), kind: &str, subject: &str) -> Result<bool> {
        let standing = self.lock(tx, kind, subject).await?;
        let sql = "SELECT waiting_json FROM outbox_alerts WHERE kind = ? AND subject = ?";
        let rows = tx.query(sql, &[kind.into(), subject.into()]).await?;
        let waiting = rows.first().map(|row| row.opt_text(0)).transpose()?.flatten();
        let Some(waiting) = waiting.and_then(|text| serde_json::from_str::<Json>(&text).ok()) else { return Ok(false) };
        // It is counted among what was suppressed already.
        let alert = alert_of(subject, &waiting);
        self.raise_locked(tx, kind, &alert, standing).await
    }

    /// Forgets troubles that nobody has heard of for a month; answers how many.
    pub async fn forget(&self) -> Result<u64> {
        let old = micros_of(FORGOTTEN.max(self.every.saturating_mul(2)));
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            Box::pin(async move {
                let mut params = Vec::new();
                let conditions = ["raised_at", "resolved_at", "seen_until"].map(|column| {
                    let before = tx.now().plus(-old, &mut params);
                    format!("({column} IS NULL OR {column} < {before})")
                });
                tx.execute(&format!("DELETE FROM outbox_alerts WHERE {}", conditions.join(" AND ")), &params).await
            })
        })
        .await
    }

    /// Raises or resolves in a transaction of its own.
    pub async fn tell(&self, alert: Alert, trouble: bool) -> Result<()> {
        let work = Arc::new((self.clone(), alert));
        let told = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let (alerts, alert) = &*work;
                if !trouble {
                    return alerts.resolve(tx, alert).await;
                }
                let standing = alerts.lock(tx, alert.kind, &alert.subject).await?;
                alerts.raise_locked(tx, alert.kind, alert, standing).await
            })
        });
        if told.await? {
            self.outbox.ring();
        }
        Ok(())
    }

    /// The trouble's row, made if need be and locked.
    async fn lock(&self, tx: &mut (dyn Tx + Send), kind: &str, subject: &str) -> Result<Standing> {
        let name: [Value; 2] = [kind.into(), subject.into()];
        let make = match tx.dialect() {
            Dialect::Mysql => "INSERT IGNORE INTO outbox_alerts (kind, subject) VALUES (?, ?)",
            _ => "INSERT INTO outbox_alerts (kind, subject) VALUES (?, ?) ON CONFLICT DO NOTHING",
        };
        tx.execute(make, &name).await?;
        let lock = for_update(tx.dialect());
        let standing = self.standing(tx, kind, subject, lock).await?;
        standing.ok_or_else(|| crate::Error::database("an alert's row is gone"))
    }

    /// What the last alert counted, if it is still on its way: the next one overtakes it, and speaks for both.
    async fn untold(&self, tx: &mut (dyn Tx + Send), standing: &Standing) -> Result<i64> {
        let Some(last) = standing.message_id.filter(|_| standing.is_raised() && !standing.raised_within(self.every))
        else {
            return Ok(0);
        };
        // One that is just being sent is told.
        let sql = "SELECT payload FROM outbox WHERE id = ? AND locked_by IS NULL";
        let rows = tx.query(sql, &[last.into()]).await?;
        let body = rows.first().and_then(|row| serde_json::from_slice::<Json>(&row.bytes(0).ok()?).ok());
        Ok(body.map_or(0, |body| ["count", "suppressed"].iter().filter_map(|name| body[name].as_i64()).sum()))
    }

    async fn standing(
        &self,
        tx: &mut (dyn Tx + Send),
        kind: &str,
        subject: &str,
        lock: &str,
    ) -> Result<Option<Standing>> {
        let mut params = Vec::new();
        let now = tx.now().plus(0, &mut params);
        params.extend([kind.into(), subject.into()]);
        let sql = format!(
            "SELECT raised_at, resolved_at, suppressed, message_id, {now} FROM outbox_alerts WHERE kind = ? AND subject = ?{lock}"
        );
        let standing = |row: &Row| {
            Ok(Standing {
                raised_at: row.opt_time(0)?,
                resolved_at: row.opt_time(1)?,
                suppressed: row.int(2)?,
                message_id: row.opt_int(3)?,
                untold: 0,
                now: row.time(4)?,
            })
        };
        let Some(mut standing) = tx.query(&sql, &params).await?.first().map(standing).transpose()? else {
            return Ok(None);
        };
        standing.untold = self.untold(tx, &standing).await?;
        Ok(Some(standing))
    }

    async fn write(
        &self,
        tx: &mut (dyn Tx + Send),
        state: &str,
        kind: &str,
        alert: &Alert,
        standing: &Standing,
    ) -> Result<()> {
        let mut body = body(state, kind, alert);
        body["suppressed"] = (standing.suppressed + standing.untold).into();
        body["at"] = standing.now.to_string().into();
        body["previous_id"] = standing.message_id.into();
        let id = self.enqueue(tx, body, alert).await?;
        tx.execute(LAST_WORD, &[id.into(), kind.into(), alert.subject.as_str().into()]).await.map(drop)
    }

    async fn enqueue(&self, tx: &mut (dyn Tx + Send), body: Json, alert: &Alert) -> Result<Option<i64>> {
        let message = NewMessage::json(&*self.lane, &body).target(alert.subject.clone());
        Ok(self.outbox.enqueue_in(tx, &[message]).await?.ids().first().copied())
    }
}

fn body(state: &str, kind: &str, alert: &Alert) -> Json {
    json!({
        "kind": kind, "subject": alert.subject, "state": state, "message": alert.message,
        // Chat programs show this one.
        "text": format!("Postrider: {}", alert.message),
        "count": alert.count, "suppressed": 0, "details": alert.details,
    })
}

/// An alert of which nobody has decided yet whether it is told.
fn note(alert: &Alert) -> Json {
    let mut body = body("raised", alert.kind, alert);
    body["note"] = true.into();
    body["at"] = clock::wall().to_string().into();
    body
}

fn waiting_json(alert: &Alert) -> String {
    json!({ "message": alert.message, "count": alert.count, "details": alert.details }).to_string()
}

/// An alert as it was written down; what kind it is stands beside it.
fn alert_of(subject: &str, written: &Json) -> Alert {
    Alert {
        kind: "",
        subject: subject.to_owned(),
        message: written["message"].as_str().unwrap_or_default().to_owned(),
        count: written["count"].as_i64().unwrap_or(1),
        details: written["details"].clone(),
    }
}

/// Counts what is not told now. If the trouble was over meanwhile, what came back is kept, to be told after `every`.
async fn only_count(tx: &mut (dyn Tx + Send), kind: &str, alert: &Alert, standing: &Standing) -> Result<()> {
    let waiting = (!standing.is_raised()).then(|| waiting_json(alert));
    let sql = "UPDATE outbox_alerts SET suppressed = suppressed + ?, waiting_json = ? WHERE kind = ? AND subject = ?";
    let params = [alert.count.into(), waiting.into(), kind.into(), alert.subject.as_str().into()];
    tx.execute(sql, &params).await.map(drop)
}

/// Until when the dead of a lane were seen, and which of them lately.
async fn seen(tx: &mut (dyn Tx + Send), lane: &str) -> Result<(Option<Timestamp>, Recent)> {
    let sql = "SELECT seen_until, recent_json FROM outbox_alerts WHERE kind = ? AND subject = ?";
    let rows = tx.query(sql, &[kind::DEAD_MESSAGES.into(), lane.into()]).await?;
    let Some(row) = rows.first() else { return Ok((None, Recent::default())) };
    let recent = row.opt_text(1)?.and_then(|text| serde_json::from_str(&text).ok());
    Ok((row.opt_time(0)?, recent.unwrap_or_default()))
}

/// Those of a lane that died since then, and those of a while before: they may have been stamped and not committed then.
async fn deaths(tx: &mut (dyn Tx + Send), lane: &str, since: Timestamp, recent: &Recent) -> Result<Vec<Death>> {
    let after = since.micros().saturating_sub(micros_of(LATE)).max(recent.floor);
    let sql = format!(
        "SELECT id, finished_at, last_error_code FROM outbox_done WHERE lane = ? AND status = 'dead' AND finished_at > ?
         ORDER BY finished_at, id LIMIT {READ}"
    );
    let rows = tx.query(&sql, &[lane.into(), Timestamp::from_micros(after).into()]).await?;
    rows.iter().map(|row| Ok(Death { id: row.int(0)?, at: row.time(1)?, code: row.opt_text(2)? })).collect()
}

/// An alert that is about to be sent.
struct Told {
    id: i64,
    /// It was sent before, and not taken.
    tried: bool,
    /// Kind and subject.
    name: [String; 2],
    previous: Option<i64>,
    note: Option<Alert>,
}

async fn is_live(tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
    Ok(!tx.query("SELECT 1 FROM outbox WHERE id = ?", &[id.into()]).await?.is_empty())
}

/// Whether this alert has not ended yet. It has nothing to wait for any more, so it is made due: it ends as soon as it is
/// met.
async fn hurry(tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
    if !is_live(tx, id).await? {
        return Ok(false);
    }
    let mut params: Vec<Value> = vec![id.into()];
    let now = tx.now().plus(0, &mut params);
    let skip = skip_locked(tx.dialect());
    let waits = format!("SELECT id FROM outbox WHERE id = ? AND locked_by IS NULL AND due_at > {now}{skip}");
    if !tx.query(&waits, &params).await?.is_empty() {
        let mut params = Vec::new();
        let due = tx.now().plus(0, &mut params);
        params.push(id.into());
        tx.execute(&format!("UPDATE outbox SET due_at = {due} WHERE id = ?"), &params).await?;
    }
    Ok(true)
}

async fn place(tx: &mut (dyn Tx + Send), told: &Told) -> Result<Place> {
    if let Some(previous) = told.previous
        && hurry(tx, previous).await?
    {
        return Ok(Place::Waits);
    }
    let [kind, subject] = &told.name;
    let sql = "SELECT message_id FROM outbox_alerts WHERE kind = ? AND subject = ?";
    let rows = tx.query(sql, &[kind.into(), subject.into()]).await?;
    let newest = rows.first().map(|row| row.opt_int(0)).transpose()?.flatten();
    Ok(newest.filter(|newest| *newest > told.id).map_or(Place::Last, Place::Overtaken))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn death(id: i64, at: i64) -> Death {
        Death { id, at: Timestamp::from_micros(at), code: None }
    }

    #[test]
    fn what_was_committed_late_is_new_and_what_was_counted_is_not() {
        let minute = micros_of(LATE);
        let now = Timestamp::from_micros(10 * minute);
        let first = [death(1, 10 * minute - 5), death(2, 10 * minute - 3)];
        let (new, until, recent) = Recent::default().tell(&first, now);
        assert_eq!((new.len(), until), (2, now));
        // One stamped before both is seen only now.
        let second = [death(3, 10 * minute - 9), death(1, 10 * minute - 5), death(2, 10 * minute - 3)];
        let (new, _, recent) = recent.tell(&second, Timestamp::from_micros(10 * minute + 100));
        assert_eq!(new.iter().map(|death| death.id).collect::<Vec<_>>(), [3]);
        assert_eq!(recent.tell(&second, now).0.len(), 0);
    }

    #[test]
    fn of_very_many_the_newest_are_remembered_and_none_is_counted_twice() {
        let minute = micros_of(LATE);
        let many: Vec<Death> = (0..READ as i64).map(|n| death(n, 100 * minute + n)).collect();
        let (new, until, recent) = Recent::default().tell(&many, Timestamp::from_micros(101 * minute));
        assert_eq!((new.len(), until), (READ, many[READ - 1].at), "the next look goes on from there");
        assert_eq!(recent.ids.len(), REMEMBERED);
        let again: Vec<Death> = many.iter().filter(|death| death.at.micros() > recent.floor).cloned().collect();
        assert_eq!(again.len(), REMEMBERED, "the next look reads no more than it remembers");
        assert!(recent.tell(&again, until).0.is_empty());
    }
}
