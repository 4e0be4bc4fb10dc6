//! Taking orders in: ledger entry and outbox message in one transaction, the caller's own if it likes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use postrider::enqueue::Admit;
use postrider::error::Kind;
use postrider::failpoint::reach;
use postrider::store::{Mode, repeat};
use postrider::tx::{Dialect, Tx};
use postrider::{Error, NewMessage, Result};

use crate::ledger::{self, Entry};
use crate::request::Order;
use crate::{LANE, Orders, conflicts, janitor};

/// An order to be taken in under its key.
#[derive(Clone, Debug)]
pub struct NewOrder {
    pub key: String,
    pub order: Arc<Order>,
    pub correlation_id: Option<String>,
    /// The trace it belongs to, as headers.
    pub trace: Vec<(String, String)>,
}

impl NewOrder {
    pub fn new(key: impl Into<String>, order: impl Into<Arc<Order>>) -> Self {
        NewOrder { key: key.into(), order: order.into(), correlation_id: None, trace: vec![] }
    }

    /// Its key is the message's active key: one live message per key, without a row of its own for it.
    fn message(&self) -> NewMessage {
        let mut message = NewMessage::new(LANE, self.order.canonical().to_owned())
            .content_type("application/json")
            .active_key(&self.key)
            .target(&self.order.instrument);
        message.correlation_id = self.correlation_id.clone();
        message.headers = self.trace.clone();
        message.headers.extend(self.order.trace_id.clone().map(|id| ("trace_id".to_owned(), id)));
        message
    }
}

/// What became of an order that was handed in.
#[derive(Clone, Debug, PartialEq)]
pub enum Placed {
    /// Taken in.
    Accepted { outbox_id: i64 },
    /// It was before: this is where it stands.
    Replayed(Box<Entry>),
    /// The key belongs to another order; nothing was taken in, and the conflict is noted.
    Conflict,
}

impl Orders {
    /// Takes an order in, in a transaction of its own. The key makes it safe to ask again after a lost answer.
    pub async fn place(&self, orders: Vec<NewOrder>) -> Result<Vec<Placed>> {
        self.place_as(Mode::Write, orders).await
    }

    /// The same, and with [`Mode::Work`] somebody else's lock on a key is waited for only for a moment.
    #[doc(hidden)]
    pub async fn place_as(&self, mode: Mode, orders: Vec<NewOrder>) -> Result<Vec<Placed>> {
        let work = Arc::new(orders);
        let placed = repeat(|_| {
            let (handle, work) = (self.clone(), work.clone());
            self.transact(mode, move |tx| {
                let (orders, work) = (handle.clone(), work.clone());
                Box::pin(async move { orders.place_in(tx, &work).await })
            })
        })
        .await?;
        reach("placed");
        self.committed();
        Ok(placed)
    }

    /// To be called after the caller's own COMMIT: wakes workers.
    pub fn committed(&self) {
        self.0.outbox.ring();
    }

    /// Takes orders in inside the caller's own transaction; answers in their order. If this fails, roll back; once it is
    /// committed, call [`Orders::committed`].
    pub async fn place_in(&self, tx: &mut (dyn Tx + Send), orders: &[NewOrder]) -> Result<Vec<Placed>> {
        for order in orders {
            check_key(&order.key)?;
        }
        // In the order of keys, so that two batches cannot deadlock; the first of equal keys is the one taken in.
        let mut first: Vec<usize> = (0..orders.len()).collect();
        first.sort_by(|&a, &b| orders[a].key.cmp(&orders[b].key).then(a.cmp(&b)));
        first.dedup_by(|later, earlier| orders[*later].key == orders[*earlier].key);
        let mut placed: Vec<Option<Placed>> = vec![None; orders.len()];
        self.take_in(tx, orders, &first, &mut placed).await?;

        let seen: Vec<usize> = (0..orders.len()).filter(|&i| placed[i].is_none()).collect();
        let mut keys: Vec<&str> = seen.iter().map(|&i| orders[i].key.as_str()).collect();
        keys.sort_unstable();
        keys.dedup();
        let found = if keys.is_empty() { vec![] } else { ledger::find(tx, &keys, true).await? };
        let over: Vec<&Entry> = found.iter().filter(|entry| entry.expired).collect();
        if !over.is_empty() {
            // A key past its time starts clean.
            janitor::reap(tx, &over).await?;
            let over: HashSet<&str> = over.iter().map(|entry| entry.idempotency_key.as_str()).collect();
            let again: Vec<usize> = first
                .iter()
                .copied()
                .filter(|&i| placed[i].is_none() && over.contains(orders[i].key.as_str()))
                .collect();
            self.take_in(tx, orders, &again, &mut placed).await?;
        }
        let mut standing: HashMap<String, Entry> = found
            .into_iter()
            .filter(|entry| !entry.expired)
            .map(|entry| (entry.idempotency_key.clone(), entry))
            .collect();
        for i in seen.into_iter().filter(|&i| placed[i].is_none()).collect::<Vec<_>>() {
            let order = &orders[i];
            if !standing.contains_key(&order.key) {
                // A second one of this very batch: the first has just been taken in.
                let entry = ledger::find_one(tx, &order.key, true).await?;
                // Or it was reaped just now: what waits for it starts again.
                let gone = || Error::new(Kind::Busy, "an order under this key was reaped meanwhile; try again");
                let entry = entry.ok_or_else(gone)?;
                standing.insert(order.key.clone(), entry);
            }
            let Some(entry) = standing.get_mut(&order.key) else { continue };
            let digest = order.order.digest.as_str();
            placed[i] = Some(if entry.request_digest == digest {
                entry.replays += 1;
                note_replay(tx, &order.key).await?;
                Placed::Replayed(Box::new(entry.clone().intact()?))
            } else {
                conflicts::note(tx, &order.key, digest, Some(&order.order.instrument), None).await?;
                Placed::Conflict
            });
        }
        let placed =
            placed.into_iter().map(|p| p.ok_or_else(|| Error::database("an order was left without an answer")));
        placed.collect()
    }

    /// Those whose key nobody has; the others are left without an answer.
    async fn take_in(
        &self,
        tx: &mut (dyn Tx + Send),
        orders: &[NewOrder],
        wanted: &[usize],
        placed: &mut [Option<Placed>],
    ) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let entries: Vec<(&str, &str)> =
            wanted.iter().map(|&i| (orders[i].key.as_str(), orders[i].order.digest.as_str())).collect();
        // On PostgreSQL entries and messages are one statement: a round trip less.
        let statement = (tx.dialect() == Dialect::Postgres).then(|| ledger::insert_statement(&entries));
        let (admit, wanted) = match &statement {
            Some((sql, params)) => (Admit::By { sql, params }, wanted.to_vec()),
            None => {
                let new: HashSet<String> = ledger::insert_new(tx, &entries).await?.into_iter().collect();
                (Admit::All, wanted.iter().copied().filter(|&i| new.contains(&orders[i].key)).collect())
            }
        };
        let messages: Vec<NewMessage> = wanted.iter().map(|&i| orders[i].message()).collect();
        let entries = self.0.outbox.enqueue_admitted_in(tx, admit, &messages).await?;
        for (i, entry) in wanted.into_iter().zip(entries) {
            placed[i] = entry.map(|entry| Placed::Accepted { outbox_id: entry.id });
        }
        reach("placing");
        Ok(())
    }
}

async fn note_replay(tx: &mut (dyn Tx + Send), key: &str) -> Result<()> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    params.push(key.into());
    let sql = format!("UPDATE idempo_ledger SET replays = replays + 1, last_seen_at = {now} WHERE idempotency_key = ?");
    tx.execute(&sql, &params).await.map(drop)
}

/// 1 to 255 bytes without control characters.
pub fn check_key(key: &str) -> Result<()> {
    if key.is_empty() || key.len() > postrider::message::MAX_KEY_BYTES || key.chars().any(char::is_control) {
        return Err(Error::invalid("an idempotency key has 1 to 255 bytes and no control characters"));
    }
    Ok(())
}
