//! Where ledger and outbox disagree, and orders that wait for nobody: found in bounded pages, mended where it is certain
//! what happened. What is parked and will never be looked at again is woken by the janitor too, without the doctor.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::doctor::{Ailment, Case, Check, Examine, MOST_CASES};
use postrider::error::Kind;
use postrider::message::sha256;
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::{Dialect, Row, Tx, Value, skip_locked};
use postrider::{Result, Timestamp};

use crate::decide::{Event, Status, code, http_status};
use crate::ledger::{self, By, Finish, in_keys};
use crate::request::Order;
use crate::result::{Execution, Frame, LatencyMs};
use crate::{LANE, Orders, PARKED_FOR};

static ENTRY_ALONE: Ailment = Ailment {
    check: Check::LedgerAgainstOutbox,
    part: "orders",
    message: "orders that are in progress for the ledger and have no message any more (the numbers stand for their keys: the first six bytes of the key's SHA-256)",
    advice: "ask the broker, then: postrider orders settle KEY --as succeeded|failed; docs/orders.md has the query that lists the keys",
};
static END_UNHEARD: Ailment = Ailment {
    check: Check::LedgerAgainstOutbox,
    part: "orders",
    message: "orders whose message has ended, while the ledger still calls them in progress",
    advice: "postrider doctor --repair writes the end into the ledger, unless the order may have been executed: then ask the broker, and postrider orders settle KEY --as succeeded|failed",
};
static LIVE_AFTER_END: Ailment = Ailment {
    check: Check::LedgerAgainstOutbox,
    part: "orders",
    message: "orders that have ended for the ledger, while their message waits parked",
    advice: "postrider doctor --repair makes the message due; a worker then ends it as the ledger says",
};
static FOR_NOBODY: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: "orders",
    message: "orders that are parked as if for a person, but listed for none",
    advice: "postrider doctor --repair makes them due; what is in doubt is asked about, or parked with an alert",
};

/// Entries of the ledger in one page.
const PAGE: usize = 5_000;
/// Parked messages in one page of the doctor's, and in one round of the janitor's; its next round goes on from there.
const PARKED: usize = 5_000;
const PARKED_A_ROUND: usize = 200;

#[derive(Debug, Default)]
pub(crate) struct Rounds {
    /// How far the janitor has come among the parked, by shard.
    parked: HashMap<u32, Place>,
}

/// Due time and id of a message.
type Place = (Timestamp, i64);

/// A key as a number: entries have no other.
fn number_of(key: &str) -> i64 {
    sha256(key.as_bytes())[..6].iter().fold(0, |number, byte| number << 8 | i64::from(*byte))
}

#[async_trait]
impl Examine for Orders {
    async fn look(&self, stood: Duration) -> Result<Vec<Case>> {
        let shards = self.0.outbox.lanes().get(LANE)?.shards;
        let mut cases = Vec::new();
        for shard in 0..shards {
            let mut after = None;
            loop {
                let (found, next) = self.parked_in_vain(shard, after, PARKED, stood).await?;
                cases.extend(found);
                after = next;
                if after.is_none() || cases.len() >= 2 * MOST_CASES as usize {
                    break;
                }
            }
        }
        let mut cases = capped(cases);
        let alone = self.alone(stood).await?;
        let heard: Vec<(i64, String)> = if alone.is_empty() { vec![] } else { self.ended_of(alone.clone()).await? };
        cases.extend(heard.iter().map(|(id, _)| Case { ailment: &END_UNHEARD, id: *id }));
        let explained: BTreeSet<&str> = heard.iter().map(|(_, key)| key.as_str()).collect();
        let alone = alone.iter().filter(|key| !explained.contains(key.as_str()));
        cases.extend(alone.map(|key| Case { ailment: &ENTRY_ALONE, id: number_of(key) }));
        Ok(cases)
    }

    async fn repair(&self, cases: &[Case]) -> Result<Vec<Case>> {
        let mut repaired = Vec::new();
        for case in cases {
            let (orders, id) = (self.clone(), case.id);
            let done = if *case.ailment == END_UNHEARD {
                self.transact(Mode::Write, move |tx| {
                    let orders = orders.clone();
                    Box::pin(async move { orders.write_end(tx, id).await })
                })
                .await
            } else if *case.ailment == LIVE_AFTER_END || *case.ailment == FOR_NOBODY {
                self.transact(Mode::Write, move |tx| Box::pin(wake(tx, id))).await
            } else {
                Ok(false)
            };
            match done {
                Ok(true) => repaired.push(case.clone()),
                Ok(false) => {}
                // Somebody has it: the others are not to wait for that.
                Err(error) if error.kind == Kind::Locked => {}
                Err(error) => return Err(error),
            }
        }
        if !repaired.is_empty() {
            self.committed();
        }
        Ok(repaired)
    }
}

impl Orders {
    /// Parked messages that nobody will ever look at: what `look` tells and the janitor wakes. Answers how far it looked.
    async fn parked_in_vain(
        &self,
        shard: u32,
        after: Option<Place>,
        limit: usize,
        stood: Duration,
    ) -> Result<(Vec<Case>, Option<Place>)> {
        self.transact(Mode::Read, move |tx| Box::pin(parked_in_vain(tx, shard, after, limit, stood))).await
    }

    /// Wakes them, a few in each round; answers how many.
    pub(crate) async fn wake_stranded(&self) -> Result<usize> {
        let mut cases = Vec::new();
        for shard in 0..self.0.outbox.lanes().get(LANE)?.shards {
            let after = self.0.rounds.lock().unwrap_or_else(PoisonError::into_inner).parked.get(&shard).copied();
            let (found, next) = self.parked_in_vain(shard, after, PARKED_A_ROUND, Duration::from_secs(60)).await?;
            cases.extend(found);
            let mut rounds = self.0.rounds.lock().unwrap_or_else(PoisonError::into_inner);
            match next {
                Some(next) => drop(rounds.parked.insert(shard, next)),
                None => drop(rounds.parked.remove(&shard)),
            }
        }
        let woken = self.repair(&cases).await?;
        for case in &woken {
            tracing::warn!(outbox_id = case.id, lane = LANE, what = case.ailment.message, "woken");
        }
        Ok(woken.len())
    }

    /// Keys of entries in progress without a live message, looked for through the whole ledger.
    async fn alone(&self, stood: Duration) -> Result<Vec<String>> {
        let (mut alone, mut from) = (Vec::new(), String::new());
        loop {
            let begin: Arc<str> = from.into();
            let page = self.transact(Mode::Read, move |tx| {
                let begin = begin.clone();
                Box::pin(async move { page_of_ledger(tx, &begin, stood).await })
            });
            let (found, end) = page.await?;
            alone.extend(found);
            match end {
                Some(end) if alone.len() < MOST_CASES as usize => from = end,
                _ => break,
            }
        }
        alone.truncate(MOST_CASES as usize);
        Ok(alone)
    }

    /// The messages that have ended of these keys. There is no index for it, and hardly ever a key to ask about.
    pub(crate) async fn ended_of(&self, keys: Vec<String>) -> Result<Vec<(i64, String)>> {
        let keys = Arc::new(keys);
        self.transact(Mode::Read, move |tx| {
            let keys = keys.clone();
            Box::pin(async move {
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                let mut params = Vec::new();
                let list = in_keys(tx.dialect(), &keys, &mut params);
                let sql = format!("SELECT MIN(first_seen_at) FROM idempo_ledger WHERE idempotency_key {list}");
                let rows = tx.query(&sql, &params).await?;
                let Some(first) = rows.first().map(|row| row.opt_time(0)).transpose()?.flatten() else {
                    return Ok(vec![]);
                };
                let mut ended = Vec::new();
                for status in ["sent", "dead"] {
                    let mut params: Vec<Value> = vec![LANE.into(), first.into()];
                    let list = in_keys(tx.dialect(), &keys, &mut params);
                    let sql = format!(
                        "SELECT d.id, d.active_key, d.payload, l.request_digest
                         FROM outbox_done d JOIN idempo_ledger l ON l.idempotency_key = d.active_key
                         WHERE d.lane = ? AND d.status = '{status}' AND d.finished_at >= ? AND d.active_key {list}
                         ORDER BY d.finished_at LIMIT {MOST_CASES}"
                    );
                    for row in tx.query(&sql, &params).await? {
                        if is_of(&row.bytes(2)?, &row.text(3)?) {
                            ended.push((row.int(0)?, row.text(1)?));
                        }
                    }
                }
                Ok(ended)
            })
        })
        .await
    }

    /// Writes the end of a message that has ended into its entry, if it is certain. The entry's lock is held meanwhile.
    async fn write_end(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
        let sql = "SELECT active_key, payload, status, maybe_sent, result_ref, last_error_code, created_at, finished_at FROM outbox_done WHERE id = ? AND lane = ?";
        let rows = tx.query(sql, &[id.into(), LANE.into()]).await?;
        let Some(row) = rows.first() else { return Ok(false) };
        let (Some(key), payload) = (row.opt_text(0)?, row.bytes(1)?) else { return Ok(false) };
        let Some(entry) = ledger::find_one(tx, &key, true).await? else { return Ok(false) };
        let (executed, in_doubt) = (row.text(2)? == "sent", row.bool(3)?);
        if entry.status != Status::InProgress || entry.live || !is_of(&payload, &entry.request_digest) {
            return Ok(false);
        }
        // Called dead, and perhaps executed: that is for a person.
        if !executed && in_doubt {
            return Ok(false);
        }
        let Ok(order) = Order::parse(&payload) else { return Ok(false) };
        let (reference, reason) = (row.opt_text(4)?, row.opt_text(5)?);
        let finish = self.end_of(&order, (&key, id), executed, (reference, reason), (row.time(6)?, row.time(7)?));
        let by = By { actor: "doctor".to_owned(), reason: Some("its message had ended".to_owned()) };
        ledger::finish(tx, (&key, Some(id)), &finish, self.0.settings.ledger_ttl, &by).await
    }

    fn end_of(
        &self,
        order: &Order,
        (key, id): (&str, i64),
        executed: bool,
        (broker_ref, reason): (Option<String>, Option<String>),
        (received_at, completed_at): (Timestamp, Timestamp),
    ) -> Finish {
        let reason = if executed { None } else { Some(reason.unwrap_or_else(|| "INTERNAL_ERROR".to_owned())) };
        let order_id = self.order_id(order, id);
        let (broker, latency) = (self.0.adapter.name(), LatencyMs::default());
        let frame = Frame { order, order_id: &order_id, key, received_at, completed_at, broker, latency };
        let done = Execution { order_ref: broker_ref.clone().unwrap_or_default(), fills: vec![] };
        let response = frame.result(executed.then_some(&done), reason.as_deref());
        Finish {
            event: if executed { Event::Executed } else { Event::Refused },
            http_status: reason.as_deref().map_or(200, http_status),
            response,
            broker_ref,
            reason_code: reason,
        }
    }
}

/// Whether a message is the one its entry was written with.
fn is_of(payload: &[u8], digest: &str) -> bool {
    Order::parse(payload).is_ok_and(|order| order.digest == digest)
}

fn capped(mut cases: Vec<Case>) -> Vec<Case> {
    let mut counts = HashMap::new();
    cases.retain(|case| {
        let count = counts.entry(case.ailment.message).or_insert(0);
        *count += 1;
        *count <= MOST_CASES
    });
    cases
}

/// Why a parked message waits in vain, if it does.
fn in_vain(last_code: Option<&str>, ledger: Option<&str>) -> Option<&'static Ailment> {
    match ledger.and_then(Status::parse) {
        Some(Status::Succeeded | Status::Failed) => Some(&LIVE_AFTER_END),
        _ if last_code != Some(code::NEEDS_RECONCILE) => Some(&FOR_NOBODY),
        _ => None,
    }
}

/// Due so far ahead that nobody will see the day.
fn far() -> i64 {
    micros_of(PARKED_FOR / 2)
}

async fn parked_in_vain(
    tx: &mut (dyn Tx + Send),
    shard: u32,
    after: Option<Place>,
    limit: usize,
    stood: Duration,
) -> Result<(Vec<Case>, Option<Place>)> {
    let mut params: Vec<Value> = Vec::new();
    let old = tx.now().plus(-micros_of(stood), &mut params);
    params.extend([LANE.into(), shard.into()]);
    let behind = match after {
        None => format!("due_at > {}", tx.now().bound(far(), &mut params)),
        Some((due_at, id)) => {
            params.extend([due_at.into(), due_at.into(), id.into()]);
            "due_at >= ? AND (due_at > ? OR id > ?)".to_owned()
        }
    };
    let sql = format!(
        "SELECT o.id, o.due_at, o.last_error_code, l.status, CASE WHEN o.locked_by IS NULL AND o.updated_at <= {old} THEN 1 ELSE 0 END
         FROM (SELECT id, due_at, last_error_code, active_key, locked_by, updated_at FROM outbox
               WHERE lane = ? AND shard_id = ? AND {behind} ORDER BY due_at, id LIMIT {limit}) o
         LEFT JOIN idempo_ledger l ON l.idempotency_key = o.active_key ORDER BY o.due_at, o.id"
    );
    let rows = tx.query(&sql, &params).await?;
    let mut cases = Vec::new();
    for row in &rows {
        let (last_code, status) = (row.opt_text(2)?, row.opt_text(3)?);
        match in_vain(last_code.as_deref(), status.as_deref()) {
            Some(ailment) if row.int(4)? == 1 => cases.push(Case { ailment, id: row.int(0)? }),
            _ => {}
        }
    }
    let full = rows.last().filter(|_| rows.len() == limit);
    Ok((cases, full.map(|row| Ok::<Place, postrider::Error>((row.time(1)?, row.int(0)?))).transpose()?))
}

/// Makes a message due that waits in vain, if it still does.
async fn wake(tx: &mut (dyn Tx + Send), id: i64) -> Result<bool> {
    let mut params: Vec<Value> = vec![id.into(), LANE.into()];
    let far = tx.now().bound(far(), &mut params);
    let sql = format!(
        "SELECT last_error_code, active_key FROM outbox WHERE id = ? AND lane = ? AND due_at > {far} AND locked_by IS NULL{}",
        skip_locked(tx.dialect())
    );
    let rows = tx.query(&sql, &params).await?;
    let Some(row) = rows.first() else { return Ok(false) };
    let status = match row.opt_text(1)? {
        Some(key) => ledger::find_one(tx, &key, false).await?.map(|entry| entry.status.as_str()),
        None => None,
    };
    if in_vain(row.opt_text(0)?.as_deref(), status).is_none() {
        return Ok(false);
    }
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(id.into());
    Ok(tx.execute(&format!("UPDATE outbox SET due_at = {now} WHERE id = ?"), &params).await? == 1)
}

/// Those of one page of the ledger, and where the next begins.
async fn page_of_ledger(
    tx: &mut (dyn Tx + Send),
    from: &str,
    stood: Duration,
) -> Result<(Vec<String>, Option<String>)> {
    let sql = format!(
        "SELECT idempotency_key FROM idempo_ledger WHERE idempotency_key > ? ORDER BY idempotency_key LIMIT 1 OFFSET {}",
        PAGE - 1
    );
    let rows = tx.query(&sql, &[from.into()]).await?;
    let end = rows.first().map(|row| row.text(0)).transpose()?;
    let mut params: Vec<Value> = vec![from.into()];
    let mut range = "l.idempotency_key > ?".to_owned();
    if let Some(end) = &end {
        range.push_str(" AND l.idempotency_key <= ?");
        params.push(end.into());
    }
    Ok((without_message(tx, &range, params, stood).await?, end))
}

async fn without_message(
    tx: &mut (dyn Tx + Send),
    which: &str,
    mut params: Vec<Value>,
    stood: Duration,
) -> Result<Vec<String>> {
    let then = tx.now().plus(-micros_of(stood), &mut params);
    // MySQL would look for live messages by the lane otherwise.
    let live = if tx.dialect() == Dialect::Mysql { "outbox o FORCE INDEX (idx_outbox_active_key)" } else { "outbox o" };
    let sql = format!(
        "SELECT l.idempotency_key FROM idempo_ledger l WHERE {which} AND l.status = 'in_progress' AND l.last_seen_at <= {then}
           AND NOT EXISTS (SELECT 1 FROM {live} WHERE o.lane = '{LANE}' AND o.active_key = l.idempotency_key)
         ORDER BY l.idempotency_key LIMIT {MOST_CASES}"
    );
    tx.query(&sql, &params).await?.iter().map(|row: &Row| row.text(0)).collect()
}
