//! Orders as a list, the newest first: messages of the lane with what the ledger says of them. Every question is bounded
//! by an index of the outbox; the ledger itself has none but its key.

use std::collections::HashMap;
use std::sync::Arc;

use postrider::paging::{self, Candidates, Page, Rows, Wanted};
use postrider::store::{Filter, Mode, Shown, Status as MessageStatus};
use postrider::tx::Value;
use postrider::{Result, Timestamp};

use crate::decide::code;
use crate::ledger::{self, Entry};
use crate::{LANE, Orders, PARKED_FOR};

/// Which orders are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    All,
    /// Ended without being executed.
    Failed,
    /// Parked until a person says what became of them at the broker.
    NeedsPerson,
}

/// An order: its message, and its entry unless the key belongs to another order.
#[derive(Clone, Debug)]
pub struct Listed {
    pub message: Shown,
    pub entry: Option<Entry>,
}

impl Orders {
    /// Those with messages below `before`, at most `limit`.
    pub async fn list(&self, which: Which, before: Option<i64>, limit: u32) -> Result<Page<Listed>> {
        let lane = Filter { lane: Some(LANE.to_owned()), before, limit, ..Filter::default() };
        let outbox = &self.0.outbox;
        let conflict = |message: &Shown| message.last_error_code.as_deref() == Some(code::CONFLICT);
        let Page { items: messages, next } = match which {
            Which::All => outbox.list(lane).await?,
            Which::Failed => outbox.list(Filter { status: Some(MessageStatus::Dead), ..lane }).await?,
            Which::NeedsPerson => {
                let Page { items, next } = self.parked(before, limit).await?;
                let mut messages = Vec::new();
                for id in items {
                    messages.extend(outbox.show(id).await?.map(|(message, _)| message));
                }
                Page { items: messages, next }
            }
        };
        let keys: Vec<String> = messages.iter().filter(|m| !conflict(m)).filter_map(|m| m.active_key.clone()).collect();
        let mut entries = self.entries(keys).await?;
        let listed = messages.into_iter().map(|message| {
            let own = message.active_key.as_ref().filter(|_| !conflict(&message));
            let entry = own.and_then(|key| entries.remove(key));
            Listed { message, entry }
        });
        Ok(Page { items: listed.collect(), next })
    }

    async fn entries(&self, keys: Vec<String>) -> Result<HashMap<String, Entry>> {
        let keys = Arc::new(keys);
        let found = self.transact(Mode::Look, move |tx| {
            let keys = keys.clone();
            Box::pin(async move {
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                if keys.is_empty() { Ok(vec![]) } else { ledger::find(tx, &keys, false).await }
            })
        });
        Ok(found.await?.into_iter().map(|entry| (entry.idempotency_key.clone(), entry)).collect())
    }

    /// Nothing else is due that far ahead.
    async fn parked(&self, before: Option<i64>, limit: u32) -> Result<Page<i64>> {
        let shards = self.0.outbox.lanes().get(LANE)?.shards;
        let found = self.transact(Mode::Look, move |tx| {
            Box::pin(async move {
                let ahead = (PARKED_FOR / 2).as_micros() as i64;
                let mut candidates = Vec::new();
                for shard in 0..shards {
                    let mut params: Vec<Value> = vec![LANE.into(), shard.into()];
                    let far = tx.now().bound(ahead, &mut params);
                    let sql = format!(
                        "SELECT id FROM outbox WHERE lane = ? AND shard_id = ? AND due_at > {far} ORDER BY due_at, id"
                    );
                    candidates.push(Candidates::new(sql, params));
                }
                let few = paging::few(tx, &candidates).await?;
                let mut params = Vec::new();
                let far = tx.now().bound(ahead, &mut params);
                let wanted = Wanted::default()
                    .is("lane", Some(LANE))
                    .is("last_error_code", Some(code::NEEDS_RECONCILE))
                    .and(&format!("COALESCE(due_at, due_at) > {far}"), params);
                let rows = Rows { table: "outbox", id: "id", columns: "id".to_owned(), bound: vec![], wanted };
                paging::page(tx, &rows, few, before, limit).await?.read(|row| row.int(0))
            })
        });
        found.await
    }
}

impl Listed {
    /// Where it stands, in one word.
    pub fn status(&self) -> &'static str {
        match (&self.entry, self.message.last_error_code.as_deref()) {
            (Some(entry), Some(code::NEEDS_RECONCILE)) if entry.finished_at.is_none() => "needs_person",
            (Some(entry), _) => entry.status.as_str(),
            (None, Some(code::CONFLICT)) => "conflict",
            (None, _) => "unknown",
        }
    }

    pub fn seen_at(&self) -> Timestamp {
        self.entry.as_ref().map_or(self.message.created_at, |entry| entry.first_seen_at)
    }
}
