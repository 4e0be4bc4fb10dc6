//! Asking for memories: the service first; when it cannot be asked, what we have ourselves, by keywords, and the answer
//! says so.

use std::collections::HashMap;
use std::sync::Arc;

use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value, in_ids};
use postrider::{Error, Result, Timestamp};
use serde::Serialize;

use crate::copies::{self, Found, State};
use crate::index::{self, Source};
use crate::note::check_space;
use crate::upstream::{Fault, Match};
use crate::{Memories, index::BATCH};

/// Most results.
const MOST: usize = 100;
/// Longest question, in bytes.
const LONGEST: usize = 8 * 1024;

#[derive(Clone, Debug, Default)]
pub struct Question {
    pub query: String,
    /// `None`, or one of them `*`: all.
    pub spaces: Option<Vec<String>>,
    pub top_k: Option<usize>,
    pub correlation_id: String,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recalled {
    pub memory_id: Option<String>,
    pub content: String,
    pub score: Option<f64>,
    pub space: Option<String>,
    /// `openmemory`; degraded: `memory_writes` (our copy), `outbox_memory` (not delivered yet), `knowledge_candidates`,
    /// `logbook_events`.
    pub source: &'static str,
    pub kind: Option<String>,
    pub outbox_id: Option<i64>,
    pub created_at: Option<Timestamp>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    pub ok: bool,
    pub results: Vec<Recalled>,
    pub total: usize,
    pub spaces_searched: Vec<String>,
    pub degraded: bool,
    pub message: String,
    pub correlation_id: String,
}

impl Memories {
    pub async fn query(&self, question: Question) -> Result<Answer> {
        let text = question.query.trim().to_owned();
        if text.is_empty() || text.len() > LONGEST {
            return Err(Error::invalid(format!("query has 1 to {LONGEST} bytes")));
        }
        let top_k = question.top_k.unwrap_or(10);
        if !(1..=MOST).contains(&top_k) {
            return Err(Error::invalid(format!("top_k is from 1 to {MOST}")));
        }
        if question.spaces.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::invalid("spaces names at least one space; leave it out to search all"));
        }
        let spaces = question.spaces.filter(|spaces| !spaces.iter().any(|space| space == "*"));
        for space in spaces.iter().flatten() {
            check_space(space).map_err(Error::invalid)?;
        }
        let asked = self.ask(&text, top_k, spaces.is_some()).await;
        let spaces_searched = spaces.clone().unwrap_or_else(|| vec!["*".to_owned()]);
        let (results, degraded, message) = match asked {
            Ok(matches) => {
                let mut results = self.ours(matches, spaces.clone(), top_k).await?;
                let mut message = "ok".to_owned();
                // The service knows no spaces: others' memories may have taken the places of these.
                if spaces.is_some() && results.len() < top_k {
                    let more = self.fall_back(text, spaces, top_k).await?;
                    let known = |found: &Recalled| results.iter().any(|result| result.content == found.content);
                    let more: Vec<Recalled> = more.into_iter().filter(|found| !known(found)).collect();
                    if !more.is_empty() {
                        message = "ok; what OpenMemory did not rank high enough was added from local copies".to_owned();
                    }
                    results.extend(more);
                    results.truncate(top_k);
                }
                (results, false, message)
            }
            Err(why) => {
                let results = self.fall_back(text, spaces, top_k).await?;
                let message = format!(
                    "degraded: OpenMemory is not available ({why}); these come from local copies by keywords and may be incomplete. Rely less on memory, and verify before acting on it"
                );
                (results, true, message)
            }
        };
        let total = results.len();
        let correlation_id = question.correlation_id;
        Ok(Answer { ok: true, results, total, spaces_searched, degraded, message, correlation_id })
    }

    async fn ask(&self, text: &str, top_k: usize, filtered: bool) -> std::result::Result<Vec<Match>, String> {
        if self.0.settings.upstream.url.is_none() {
            return Err("not_configured".to_owned());
        }
        let Some(permit) = self.0.breaker.permit() else { return Err("breaker_open".to_owned()) };
        // The service knows no spaces: what is not ours is taken out afterwards.
        let k = if filtered { (top_k * 4).min(MOST * 2) } else { top_k };
        let asked = self.0.upstream.query(text, k).await;
        permit.answered(asked.as_ref().is_err_and(Fault::counts));
        self.note_trouble(asked.as_ref().err());
        asked.map_err(|fault| fault.class())
    }

    /// What the service found, told by our own copies: the whole text, and whose it is.
    async fn ours(&self, matches: Vec<Match>, spaces: Option<Vec<String>>, top_k: usize) -> Result<Vec<Recalled>> {
        let ids: Arc<Vec<String>> = Arc::new(matches.iter().map(|found| found.id.clone()).collect());
        let copies = self.transact(Mode::Read, move |tx| {
            let ids = ids.clone();
            Box::pin(async move {
                let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                copies::by_memory_ids(tx, &ids).await
            })
        });
        let mut by_memory: HashMap<String, Vec<Found>> = HashMap::new();
        for copy in copies.await? {
            by_memory.entry(copy.memory_id.clone().unwrap_or_default()).or_default().push(copy);
        }
        let mut results = Vec::new();
        for found in matches {
            let copies = by_memory.remove(&found.id).unwrap_or_default();
            let known = !copies.is_empty();
            let allowed = |copy: &Found| spaces.as_ref().is_none_or(|spaces| spaces.contains(&copy.space));
            let copy = copies.into_iter().find(allowed);
            // A memory that is not ours is in no space of ours.
            if copy.is_none() && (known || spaces.is_some()) {
                continue;
            }
            results.push(Recalled {
                memory_id: Some(found.id),
                content: copy.as_ref().map_or(found.content, |copy| copy.payload_md.clone()),
                score: found.score,
                space: copy.as_ref().map(|copy| copy.space.clone()),
                source: "openmemory",
                kind: copy.as_ref().and_then(|copy| copy.kind.clone()),
                outbox_id: copy.as_ref().and_then(|copy| copy.outbox_id),
                created_at: copy.as_ref().map(|copy| copy.created_at),
            });
        }
        results.truncate(top_k);
        Ok(results)
    }

    async fn fall_back(&self, text: String, spaces: Option<Vec<String>>, top_k: usize) -> Result<Vec<Recalled>> {
        if let Err(error) = self.catch_up(5).await {
            tracing::warn!(%error, "what is new in the logbook is not found yet");
        }
        let work = Arc::new((text, spaces));
        let found = self.transact(Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let hits = index::search(tx, &work.0, work.1.as_deref(), top_k).await?;
                recall(tx, &hits).await
            })
        });
        found.await
    }

    /// Takes into the index what others wrote, at most so many rounds.
    pub(crate) async fn catch_up(&self, rounds: usize) -> Result<()> {
        for _ in 0..rounds {
            if self.transact(Mode::Write, |tx| Box::pin(index::catch_up(tx))).await? < BATCH {
                break;
            }
        }
        Ok(())
    }
}

/// What the index found, in its order.
async fn recall(tx: &mut (dyn Tx + Send), hits: &[(Source, i64, f64)]) -> Result<Vec<Recalled>> {
    let ids = |wanted: Source| -> Vec<i64> {
        hits.iter().filter(|(source, ..)| *source == wanted).map(|(_, id, _)| *id).collect()
    };
    let mut found: HashMap<(Source, i64), Recalled> = HashMap::new();
    for copy in copies::by_ids(tx, &ids(Source::Memory)).await? {
        // What the service refused when it was stored was never taken.
        if copy.state == State::Dead && copy.outbox_id.is_none() {
            continue;
        }
        let delivered = matches!(copy.state, State::Stored | State::Writing);
        let recalled = Recalled {
            memory_id: copy.memory_id,
            content: copy.payload_md,
            score: None,
            space: Some(copy.space),
            source: if delivered { "memory_writes" } else { "outbox_memory" },
            kind: copy.kind,
            outbox_id: copy.outbox_id,
            created_at: Some(copy.created_at),
        };
        found.insert((Source::Memory, copy.id), recalled);
    }
    let payload = if tx.dialect() == Dialect::Postgres { "payload_json::text" } else { "payload_json" };
    let candidates = (
        Source::Candidate,
        "candidate_id, target_space, kind, title, content_md, created_at FROM knowledge_candidates WHERE candidate_id",
    );
    let events =
        format!("event_id, target_space, event_type, NULL, {payload}, created_at FROM logbook_events WHERE event_id");
    for (source, what) in [candidates, (Source::Event, events.as_str())] {
        let mut params: Vec<Value> = Vec::new();
        let list = in_ids(tx.dialect(), &ids(source), &mut params);
        for row in tx.query(&format!("SELECT {what} {list}"), &params).await? {
            let content = row.opt_text(4)?.unwrap_or_default();
            // A commit is a candidate and a memory: once is enough.
            if found.values().any(|known| known.content == content) {
                continue;
            }
            let has_title = content.starts_with("# ");
            let title = row.opt_text(3)?.filter(|_| !has_title).map_or(String::new(), |title| format!("# {title}\n\n"));
            let recalled = Recalled {
                memory_id: None,
                content: format!("{title}{content}"),
                score: None,
                space: row.opt_text(1)?,
                source: source.as_str(),
                kind: row.opt_text(2)?,
                outbox_id: None,
                // Others write these rows, and may have written anything.
                created_at: row.opt_time(5).ok().flatten(),
            };
            found.insert((source, row.int(0)?), recalled);
        }
    }
    let in_order = hits.iter().filter_map(|(source, id, score)| {
        let recalled = found.remove(&(*source, *id))?;
        Some(Recalled { score: Some(*score), ..recalled })
    });
    Ok(in_order.collect())
}
