//! Asking the service for what we believe it has, memory by memory, and writing again from our copies what it has not. A
//! look that is stopped goes on where it was; what it found stays marked until it is written.

use std::sync::Arc;
use std::time::Duration;

use postrider::Result;
use postrider::store::Mode;
use postrider::tx::{Row, Tx, Value};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;

use crate::copies::{self, State};
use crate::store::Waits;
use crate::upstream::{Blame, Sight};
use crate::{Memories, kv};

const NAMESPACE: &str = "gateway.upstream";
const KEY: &str = "deep";
/// Memories of one page, and of those how many are asked for at once.
const PAGE: usize = 100;
const AT_ONCE: usize = 8;
/// Memories queued in one transaction.
const BATCH: usize = 50;
/// A limit of the service is waited for so often in a row.
const LIMITS: usize = 5;
const LONGEST_WAIT: Duration = Duration::from_secs(65);

/// How far a look has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Deep {
    pub asked: u64,
    pub present: u64,
    /// It has nothing under their ids.
    pub missing: u64,
    /// Of those, what it has and does not show: another key's.
    pub hidden: u64,
    /// Everything was asked for.
    pub finished: bool,
    /// Why it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
}

/// What was written again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Resent {
    /// What the service was found not to have.
    pub missing: u64,
    pub queued: u64,
    /// Our copy is damaged too.
    pub damaged: u64,
}

/// One memory to ask for.
#[derive(Clone, Debug)]
struct Wanted {
    copy: i64,
    memory_id: String,
    payload_sha: String,
    merged: bool,
}

/// What was seen of one.
enum Verdict {
    Present,
    Missing,
    Hidden,
    /// It could not be asked.
    Stopped(String),
}

impl Memories {
    /// Asks for at most `limit` memories, going on where the last look stopped.
    pub async fn deep(&self, limit: u64, progress: &(dyn Fn(&Deep) + Send + Sync)) -> Result<Deep> {
        let known = self.transact(Mode::Read, |tx| Box::pin(kv::get(tx, NAMESPACE, KEY))).await?.unwrap_or_default();
        let number = |name: &str| known[name].as_u64().unwrap_or(0);
        let mut after = known["after"].as_i64().unwrap_or(0);
        let mut deep = match after {
            0 => Deep::default(),
            _ => Deep {
                asked: number("asked"),
                present: number("present"),
                missing: number("missing"),
                hidden: number("hidden"),
                ..Deep::default()
            },
        };
        let mut left = limit;
        while left > 0 {
            let size = left.min(PAGE as u64) as usize;
            let page = self.transact(Mode::Read, move |tx| Box::pin(page(tx, after, size))).await?;
            let Some(last) = page.last().map(|wanted| wanted.copy) else {
                deep.finished = true;
                break;
            };
            let (count, done) = (page.len() as u64, deep.clone());
            if let Some(why) = self.ask_for(page, &mut deep).await? {
                // The page is asked for once more by the next look.
                return Ok(Deep { stopped: Some(why), ..done });
            }
            (after, left) = (last, left - count);
            self.note_deep(after, &deep).await?;
            progress(&deep);
        }
        if deep.finished {
            self.note_deep(0, &deep).await?;
            // What it answered may have changed what we think of it.
            self.doubt_recognition();
        }
        Ok(deep)
    }

    async fn note_deep(&self, after: i64, deep: &Deep) -> Result<()> {
        let value = Arc::new(json!({
            "after": after, "asked": deep.asked, "present": deep.present, "missing": deep.missing, "hidden": deep.hidden,
        }));
        self.transact(Mode::Write, move |tx| {
            let value = value.clone();
            Box::pin(async move { kv::set(tx, NAMESPACE, KEY, &value).await })
        })
        .await
    }

    /// Asks for a page and marks what is not there; `Some`: why it could not be.
    async fn ask_for(&self, page: Vec<Wanted>, deep: &mut Deep) -> Result<Option<String>> {
        let mut rest = page.into_iter();
        let mut asking = JoinSet::new();
        let (mut lost, mut there) = (Vec::new(), Vec::new());
        loop {
            while asking.len() < AT_ONCE
                && let Some(wanted) = rest.next()
            {
                let memories = self.clone();
                asking.spawn(async move {
                    let verdict = memories.see_patiently(&wanted).await;
                    (wanted.copy, verdict)
                });
            }
            let Some(asked) = asking.join_next().await else { break };
            let (copy, verdict) = asked.map_err(|e| postrider::Error::database(e.to_string()))?;
            deep.asked += 1;
            match verdict {
                Verdict::Present => {
                    deep.present += 1;
                    there.push(copy);
                }
                Verdict::Missing | Verdict::Hidden => {
                    deep.missing += 1;
                    deep.hidden += u64::from(matches!(verdict, Verdict::Hidden));
                    lost.push(copy);
                }
                Verdict::Stopped(why) => return Ok(Some(why)),
            }
        }
        let marks = Arc::new((lost, there));
        self.transact(Mode::Write, move |tx| {
            let marks = marks.clone();
            Box::pin(async move {
                copies::set_lost(tx, &marks.0, true).await?;
                copies::set_lost(tx, &marks.1, false).await
            })
        })
        .await?;
        Ok(None)
    }

    async fn see_patiently(&self, wanted: &Wanted) -> Verdict {
        for _ in 0..LIMITS {
            let seen = self.0.upstream.see(&wanted.memory_id).await;
            self.note_answer(seen.as_ref().err());
            match seen {
                // What it was merged with has a digest of its own.
                Ok(Sight::Seen(held)) if wanted.merged || held.may_be(&wanted.payload_sha) => return Verdict::Present,
                Ok(Sight::Seen(_) | Sight::Missing) => return Verdict::Missing,
                // What it was merged with is another key's, and would be again.
                Ok(Sight::Hidden) if wanted.merged => return Verdict::Present,
                Ok(Sight::Hidden) => return Verdict::Hidden,
                Ok(Sight::Unaskable) => {
                    return Verdict::Stopped("this OpenMemory cannot be asked for one memory by its id".to_owned());
                }
                Err(fault) if fault.blame == Blame::Limit => {
                    tokio::time::sleep(fault.retry_after.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT)).await;
                }
                Err(fault) => return Verdict::Stopped(format!("{} {}", fault.code, fault.message)),
            }
        }
        Verdict::Stopped("OpenMemory takes no more requests for now".to_owned())
    }

    /// Queues what the service was found not to have; with `dry_run` it is only counted.
    pub async fn resend(&self, dry_run: bool) -> Result<Resent> {
        let count = self.transact(Mode::Read, |tx| Box::pin(count_lost(tx))).await?;
        let mut all = Resent { missing: count, ..Resent::default() };
        if dry_run {
            return Ok(all);
        }
        let mut after = 0;
        loop {
            let lost = self.transact(Mode::Read, move |tx| Box::pin(lost(tx, after))).await?;
            let Some(last) = lost.last().copied() else { break };
            let (handle, ids) = (self.clone(), Arc::new(lost));
            let queued = self.transact(Mode::Write, move |tx| {
                let (handle, ids) = (handle.clone(), ids.clone());
                Box::pin(async move {
                    let (mut queued, mut damaged) = (0, 0);
                    for id in ids.iter() {
                        match handle.queue_lost(tx, *id).await? {
                            Some(true) => queued += 1,
                            Some(false) => damaged += 1,
                            None => {}
                        }
                    }
                    Ok((queued, damaged))
                })
            });
            let (queued, damaged) = queued.await?;
            all.queued += queued;
            all.damaged += damaged;
            after = last;
        }
        if all.queued > 0 {
            self.0.outbox.ring();
        }
        Ok(all)
    }

    /// Queues one that is still lost; `false`: our copy is damaged.
    async fn queue_lost(&self, tx: &mut (dyn Tx + Send), id: i64) -> Result<Option<bool>> {
        let Some(copy) = copies::by_id(tx, id).await?.filter(|copy| copy.state == State::Stored) else {
            return Ok(None);
        };
        let Some(note) = copies::note_of(tx, copy.id).await? else { return Ok(None) };
        if !note.is_intact() {
            return Ok(Some(false));
        }
        copies::forget_delivery(tx, &note).await?;
        self.queue(tx, &note, copy.id, Waits::default(), "openmemory_lost_it").await?;
        Ok(Some(true))
    }
}

async fn page(tx: &mut (dyn Tx + Send), after: i64, size: usize) -> Result<Vec<Wanted>> {
    let sql = format!(
        "SELECT id, memory_id, payload_sha, merged FROM memory_writes WHERE id > ? AND state = 'stored' ORDER BY id LIMIT {size}"
    );
    let rows = tx.query(&sql, &[after.into()]).await?;
    let wanted = |row: &Row| {
        Ok(Wanted { copy: row.int(0)?, memory_id: row.text(1)?, payload_sha: row.text(2)?, merged: row.bool(3)? })
    };
    rows.iter().map(wanted).collect()
}

async fn count_lost(tx: &mut (dyn Tx + Send)) -> Result<u64> {
    let rows = tx.query("SELECT COUNT(*) FROM memory_writes WHERE lost_at IS NOT NULL", &[] as &[Value]).await?;
    Ok(rows.first().map(|row| row.int(0)).transpose()?.unwrap_or(0).max(0) as u64)
}

async fn lost(tx: &mut (dyn Tx + Send), after: i64) -> Result<Vec<i64>> {
    let sql = format!("SELECT id FROM memory_writes WHERE lost_at IS NOT NULL AND id > ? ORDER BY id LIMIT {BATCH}");
    tx.query(&sql, &[after.into()]).await?.iter().map(|row| row.int(0)).collect()
}
