//! The roll of workers: each process calls out every few seconds that it lives and what it holds, for people to see.
//! Leases alone decide who holds what; nothing here does.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::observe::{Observer, Standing};
use postrider::store::{Mode, transact};
use postrider::tx::{Row, Value};
use postrider::{Outbox, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use utoipa::ToSchema;

use crate::writes;

const EVERY: Duration = Duration::from_secs(5);
/// Who was not heard of for so long is gone.
const GONE: Duration = Duration::from_secs(20);
/// And is forgotten after this time.
const FORGOTTEN: Duration = Duration::from_secs(15 * 60);

/// What a worker has of a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Load {
    /// Claimed and not yet settled.
    pub held: usize,
    /// Being delivered.
    pub in_flight: usize,
}

/// A worker as it last called.
#[derive(Clone, Debug, Serialize)]
pub struct Called {
    pub worker: String,
    pub lanes: BTreeMap<String, Load>,
    pub started_at: Timestamp,
    pub seen_at: Timestamp,
    /// It has called within the last seconds.
    pub alive: bool,
}

/// One process's own line on the roll.
#[derive(Default)]
pub struct Roll(Mutex<BTreeMap<String, Load>>);

impl Observer for Roll {
    fn standing(&self, lane: &str, standing: Standing) {
        let load = Load { held: standing.held, in_flight: standing.in_flight };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(lane.to_owned(), load);
    }
}

impl Roll {
    /// Calls until told to stop, then takes its line away.
    pub fn start(
        outbox: &Outbox,
        worker: &str,
        lanes: &[&str],
        mut stopped: watch::Receiver<bool>,
    ) -> (Arc<Roll>, tokio::task::JoinHandle<()>) {
        let idle = lanes.iter().map(|lane| ((*lane).to_owned(), Load::default()));
        let roll = Arc::new(Roll(Mutex::new(idle.collect())));
        let (outbox, worker, own) = (outbox.clone(), worker.to_owned(), roll.clone());
        let calling = tokio::spawn(async move {
            loop {
                let lanes = own.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let called = call(&outbox, &worker, &lanes).await;
                writes::note(&called);
                if let Err(error) = called {
                    tracing::debug!(%error, "this worker is not on the roll");
                }
                tokio::select! {
                    () = tokio::time::sleep(EVERY) => {}
                    _ = stopped.wait_for(|stop| *stop) => break,
                }
            }
            let _ = leave(&outbox, &worker).await;
        });
        (roll, calling)
    }
}

async fn call(outbox: &Outbox, worker: &str, lanes: &BTreeMap<String, Load>) -> postrider::Result<()> {
    let work = Arc::new((worker.to_owned(), serde_json::to_string(lanes).unwrap_or_default()));
    transact(&**outbox.store(), Mode::Write, move |tx| {
        let work = work.clone();
        Box::pin(async move {
            let (worker, lanes) = &*work;
            let mut params: Vec<Value> = vec![lanes.into()];
            let now = tx.now().plus(0, &mut params);
            params.push(worker.into());
            let known = format!("UPDATE workers SET lanes_json = ?, seen_at = {now} WHERE worker = ?");
            if tx.execute(&known, &params).await? == 0 {
                let mut params: Vec<Value> = vec![worker.into(), lanes.into()];
                let (started, seen) = (tx.now().plus(0, &mut params), tx.now().plus(0, &mut params));
                let new = format!(
                    "INSERT INTO workers (worker, lanes_json, started_at, seen_at) VALUES (?, ?, {started}, {seen})"
                );
                tx.execute(&new, &params).await?;
                let mut params = Vec::new();
                let old = tx.now().plus(-(FORGOTTEN.as_micros() as i64), &mut params);
                tx.execute(&format!("DELETE FROM workers WHERE seen_at < {old}"), &params).await?;
            }
            Ok(())
        })
    })
    .await
}

async fn leave(outbox: &Outbox, worker: &str) -> postrider::Result<()> {
    let worker = worker.to_owned();
    transact(&**outbox.store(), Mode::Write, move |tx| {
        let worker = worker.clone();
        Box::pin(async move { tx.execute("DELETE FROM workers WHERE worker = ?", &[worker.into()]).await.map(drop) })
    })
    .await
}

/// Who has called lately, the longest serving first.
pub async fn roll(outbox: &Outbox) -> postrider::Result<Vec<Called>> {
    transact(&**outbox.store(), Mode::Read, |tx| {
        Box::pin(async move {
            let mut params = Vec::new();
            let now = tx.now().plus(0, &mut params);
            let old = tx.now().plus(-(FORGOTTEN.as_micros() as i64), &mut params);
            let sql = format!(
                "SELECT worker, lanes_json, started_at, seen_at, {now} FROM workers WHERE seen_at > {old} ORDER BY started_at, worker LIMIT 500"
            );
            tx.query(&sql, &params).await?.iter().map(called).collect()
        })
    })
    .await
}

fn called(row: &Row) -> postrider::Result<Called> {
    let seen_at = row.time(3)?;
    Ok(Called {
        worker: row.text(0)?,
        lanes: serde_json::from_str(&row.text(1)?).unwrap_or_default(),
        started_at: row.time(2)?,
        seen_at,
        alive: row.time(4)?.since(seen_at) < GONE,
    })
}
