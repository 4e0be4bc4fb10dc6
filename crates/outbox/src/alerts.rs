//! Alerts are messages too: written on a lane of their own in the transaction that saw the trouble, so they survive what a
//! message survives. One trouble is one alert: within `every`, what comes again is only counted, by all processes together.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value as Json, json};

use crate::error::Result;
use crate::message::NewMessage;
use crate::outbox::Outbox;
use crate::settle::for_update;
use crate::store::{Mode, transact};
use crate::time::{Timestamp, micros_of};
use crate::tx::{Dialect, Tx, Value};

/// A settle that has stamped its rows may commit a little later: the newest deaths are looked at once they have settled.
const SETTLING: Duration = Duration::from_secs(2);
/// More deaths than this at once are counted as this many.
const MOST_COUNTED: i64 = 100_000;

pub mod kind {
    pub const DEAD_MESSAGES: &str = "dead_messages";
    pub const LANE_TOO_OLD: &str = "lane_too_old";
}

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

/// Raises alerts on a lane.
#[derive(Clone)]
pub struct Alerts {
    outbox: Outbox,
    lane: Arc<str>,
    every: Duration,
}

impl Alerts {
    pub fn new(outbox: Outbox, lane: impl Into<Arc<str>>, every: Duration) -> Self {
        Alerts { outbox, lane: lane.into(), every }
    }

    /// Raises an alert in the given transaction; `false` if one like it went out within `every`, and it was only counted.
    pub async fn raise(&self, tx: &mut (dyn Tx + Send), alert: &Alert) -> Result<bool> {
        let (raised_at, suppressed, now) = self.lock(tx, alert.kind, &alert.subject).await?;
        let name = [alert.kind.into(), alert.subject.as_str().into()];
        if raised_at.is_some_and(|at| now.micros().saturating_sub(at.micros()) < micros_of(self.every)) {
            let [kind, subject] = name;
            let sql = "UPDATE outbox_alerts SET suppressed = suppressed + ? WHERE kind = ? AND subject = ?";
            tx.execute(sql, &[alert.count.into(), kind, subject]).await?;
            return Ok(false);
        }
        let mut params: Vec<Value> = vec![now.into()];
        params.extend(name);
        let sql = "UPDATE outbox_alerts SET raised_at = ?, suppressed = 0 WHERE kind = ? AND subject = ?";
        tx.execute(sql, &params).await?;
        self.write(tx, "raised", alert, suppressed, now).await?;
        Ok(true)
    }

    /// The trouble is over: says so, if it had been raised.
    pub async fn resolve(&self, tx: &mut (dyn Tx + Send), alert: &Alert) -> Result<bool> {
        let name = [alert.kind.into(), alert.subject.as_str().into()];
        let sql = "SELECT 1 FROM outbox_alerts WHERE kind = ? AND subject = ? AND raised_at IS NOT NULL";
        if tx.query(sql, &name).await?.is_empty() {
            return Ok(false);
        }
        let (raised_at, suppressed, now) = self.lock(tx, alert.kind, &alert.subject).await?;
        tx.execute("DELETE FROM outbox_alerts WHERE kind = ? AND subject = ?", &name).await?;
        if raised_at.is_some() {
            self.write(tx, "resolved", alert, suppressed, now).await?;
        }
        Ok(raised_at.is_some())
    }

    /// Looks at every lane nobody owns: have messages died since the last look?
    pub async fn look_for_the_dead(&self) -> Result<()> {
        let lanes = self.outbox.lanes().iter();
        let lanes = lanes.filter(|(lane, rules)| rules.owned_by.is_none() && *lane != &*self.lane);
        for lane in lanes.map(|(lane, _)| Arc::<str>::from(lane)).collect::<Vec<_>>() {
            let alerts = self.clone();
            let raised = transact(&**self.outbox.store(), Mode::Write, move |tx| {
                let (alerts, lane) = (alerts.clone(), lane.clone());
                Box::pin(async move { alerts.count_the_dead(tx, &lane).await })
            });
            if raised.await? {
                self.outbox.ring();
            }
        }
        Ok(())
    }

    async fn count_the_dead(&self, tx: &mut (dyn Tx + Send), lane: &str) -> Result<bool> {
        let (raised_at, suppressed, now) = self.lock(tx, kind::DEAD_MESSAGES, lane).await?;
        let name: [Value; 2] = [kind::DEAD_MESSAGES.into(), lane.into()];
        let seen = "SELECT seen_until FROM outbox_alerts WHERE kind = ? AND subject = ?";
        let since = tx.query(seen, &name).await?.first().map(|row| row.opt_time(0)).transpose()?.flatten();
        let until = Timestamp::from_micros(now.micros() - micros_of(SETTLING));
        let mut params: Vec<Value> = vec![until.into()];
        params.extend(name);
        tx.execute("UPDATE outbox_alerts SET seen_until = ? WHERE kind = ? AND subject = ?", &params).await?;
        // The first look only notes where it begins: what died before anybody watched is history.
        let Some(since) = since else { return Ok(false) };
        let of_lane = "FROM outbox_done WHERE lane = ? AND status = 'dead' AND finished_at > ? AND finished_at <= ?";
        let between: [Value; 3] = [lane.into(), since.into(), until.into()];
        let count = format!("SELECT COUNT(*) FROM (SELECT id {of_lane} LIMIT {MOST_COUNTED}) AS died");
        let count = tx.query(&count, &between).await?.first().map_or(Ok(0), |row| row.int(0))?;
        let waiting = suppressed > 0
            && raised_at.is_none_or(|at| now.micros().saturating_sub(at.micros()) >= micros_of(self.every));
        if count == 0 && !waiting {
            return Ok(false);
        }
        let last = format!("SELECT id, last_error_code {of_lane} ORDER BY finished_at DESC, id DESC LIMIT 1");
        let last = tx.query(&last, &between).await?;
        let last = last.first().map(|row| Ok::<_, crate::Error>((row.int(0)?, row.opt_text(1)?))).transpose()?;
        let died = count + suppressed;
        let words = if died == 1 { "a message" } else { "messages" };
        let alert = Alert {
            kind: kind::DEAD_MESSAGES,
            subject: lane.to_owned(),
            message: format!(
                "{died} {words} of lane `{lane}` died; look: postrider outbox list --lane {lane} --status dead, bring back: postrider outbox requeue --lane {lane} --dead"
            ),
            count,
            details: json!({ "last_id": last.as_ref().map(|l| l.0), "last_error_code": last.and_then(|l| l.1) }),
        };
        self.raise(tx, &alert).await
    }

    /// Is the oldest due message of each lane older than its limit? Paused lanes are held on purpose.
    pub async fn look_at_ages(&self, limit: impl Fn(&str) -> Duration) -> Result<()> {
        let paused = self.outbox.paused_lanes().await?;
        for (lane, depth) in self.outbox.depths().await? {
            let limit = limit(&lane);
            let too_old = !limit.is_zero() && depth.oldest_due_seconds > limit.as_secs_f64() && !paused.contains(&lane);
            let (age, limit) = (depth.oldest_due_seconds.round(), limit.as_secs());
            let message = match too_old {
                true => format!(
                    "the oldest due message of lane `{lane}` has waited {age} s, its limit is {limit} s ({} wait); are its workers running, is its destination up?",
                    depth.pending
                ),
                false => format!("lane `{lane}` is within its limit of {limit} s again"),
            };
            let details = json!({ "oldest_due_seconds": age, "limit_seconds": limit, "pending": depth.pending });
            let alert = Alert { kind: kind::LANE_TOO_OLD, subject: lane, message, count: 1, details };
            self.tell(alert, too_old).await?;
        }
        Ok(())
    }

    /// Raises or resolves in a transaction of its own.
    pub async fn tell(&self, alert: Alert, trouble: bool) -> Result<()> {
        let work = Arc::new((self.clone(), alert));
        let told = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                if trouble { work.0.raise(tx, &work.1).await } else { work.0.resolve(tx, &work.1).await }
            })
        });
        if told.await? {
            self.outbox.ring();
        }
        Ok(())
    }

    /// The trouble's row, made if need be and locked: when it was raised, what was suppressed since, and now.
    async fn lock(
        &self,
        tx: &mut (dyn Tx + Send),
        kind: &str,
        subject: &str,
    ) -> Result<(Option<Timestamp>, i64, Timestamp)> {
        let name: [Value; 2] = [kind.into(), subject.into()];
        let make = match tx.dialect() {
            Dialect::Mysql => "INSERT IGNORE INTO outbox_alerts (kind, subject) VALUES (?, ?)",
            _ => "INSERT INTO outbox_alerts (kind, subject) VALUES (?, ?) ON CONFLICT DO NOTHING",
        };
        tx.execute(make, &name).await?;
        let mut params = Vec::new();
        let now = tx.now().plus(0, &mut params);
        params.extend(name);
        let sql = format!(
            "SELECT raised_at, suppressed, {now} FROM outbox_alerts WHERE kind = ? AND subject = ?{}",
            for_update(tx.dialect())
        );
        let rows = tx.query(&sql, &params).await?;
        let row = rows.first().ok_or_else(|| crate::Error::database("an alert's row is gone"))?;
        Ok((row.opt_time(0)?, row.int(1)?, row.time(2)?))
    }

    async fn write(
        &self,
        tx: &mut (dyn Tx + Send),
        state: &str,
        alert: &Alert,
        suppressed: i64,
        at: Timestamp,
    ) -> Result<()> {
        let body = json!({
            "kind": alert.kind, "subject": alert.subject, "state": state, "message": alert.message,
            // Chat programs show this one.
            "text": format!("Postrider: {}", alert.message),
            "count": alert.count, "suppressed": suppressed, "details": alert.details, "at": at.to_string(),
        });
        let message = NewMessage::json(&*self.lane, &body).target(alert.subject.clone());
        self.outbox.enqueue_in(tx, &[message]).await.map(drop)
    }
}
