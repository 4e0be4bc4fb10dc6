//! Asking for memories: the service, and beside it our own index for what the service does not have: what it merged away,
//! and what is still on its way. When it cannot be asked, or is not the one we know, what we have ourselves is all there is,
//! and the answer says so.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value, in_ids};
use postrider::{Error, Result, Timestamp};
use serde::Serialize;

use crate::copies;
use crate::index::{self, BATCH, Source};
use crate::recognise::FRESH;
use crate::spaces::Spaces;
use crate::upstream::Match;
use crate::{Memories, ranking};

/// Most results.
const MOST: usize = 100;
/// Most bytes of text in one answer; the first result is always whole.
const MOST_TEXT: usize = 4 * 1024 * 1024;
/// As many of our own copies are looked at, at least, for what the service does not have.
const LOCAL: usize = 50;
/// Most spaces a question may name.
pub const MOST_SPACES: usize = 100;
/// Longest question, in bytes.
const LONGEST: usize = 8 * 1024;

#[derive(Clone, Debug, Default)]
pub struct Question {
    pub query: String,
    /// Each a space, or all of a kind (`team:*`). `None`, or one of them `*`: all.
    pub spaces: Option<Vec<String>>,
    /// The spaces whoever asks may look into. What the question names is to lie within them: it is not asked here.
    pub within: Spaces,
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
    /// `openmemory`; `memory_writes` (our copy: merged away there, or degraded), `outbox_memory` (not delivered yet);
    /// degraded also `knowledge_candidates`, `logbook_events`.
    pub source: &'static str,
    pub kind: Option<String>,
    pub outbox_id: Option<i64>,
    pub created_at: Option<Timestamp>,
    /// The service keeps this memory in its place.
    pub merged_with: Option<String>,
    pub evidence_refs: Vec<serde_json::Value>,
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

/// As many of the best as fit, and how many were left out.
fn within(mut results: Vec<Recalled>, most: usize) -> (Vec<Recalled>, usize) {
    let all = results.len();
    let mut left = most;
    let fits = |found: &Recalled| {
        let fits = found.content.len() <= left;
        left = left.saturating_sub(found.content.len());
        fits
    };
    let kept = results.iter().map(fits).position(|fits| !fits).unwrap_or(all).max(1).min(all);
    results.truncate(kept);
    (results, all - kept)
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
        if question.spaces.as_ref().is_some_and(|spaces| spaces.len() > MOST_SPACES) {
            return Err(Error::invalid(format!(
                "spaces names at most {MOST_SPACES} spaces; leave it out to search all"
            )));
        }
        let named = question.spaces.filter(|spaces| !spaces.iter().any(|space| space == "*"));
        for space in named.iter().flatten() {
            Spaces::check(space).map_err(Error::invalid)?;
        }
        let spaces = named.map_or(question.within, Spaces::these);
        // A task of its own: who hangs up has not found out how the service is, and the answer still tells us.
        let (handle, question_text, filtered) = (self.clone(), text.clone(), !spaces.are_all());
        let asked = tokio::spawn(async move { handle.ask(&question_text, top_k, filtered).await });
        let asked = asked.await.unwrap_or_else(|_| Err("internal".to_owned()));
        let spaces_searched = if spaces.are_all() { vec!["*".to_owned()] } else { spaces.names() };
        let (results, degraded, message) = match asked {
            Ok(matches) => {
                let (results, message) = self.beside(matches, text, spaces, top_k).await?;
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
        let (results, left_out) = within(results, MOST_TEXT);
        let message = match left_out {
            0 => message,
            _ => format!(
                "{message}; {left_out} more were left out, their texts are too long for one answer: ask for fewer (top_k)"
            ),
        };
        let total = results.len();
        let correlation_id = question.correlation_id;
        Ok(Answer { ok: true, results, total, spaces_searched, degraded, message, correlation_id })
    }

    async fn ask(&self, text: &str, top_k: usize, filtered: bool) -> std::result::Result<Vec<Match>, String> {
        if self.0.settings.upstream.url.is_none() {
            return Err("not_configured".to_owned());
        }
        if self.limited().is_some() {
            return Err("rate_limited".to_owned());
        }
        let Some(permit) = self.0.breaker.permit() else { return Err("breaker_open".to_owned()) };
        // The service knows no spaces: what is not ours is taken out afterwards.
        let k = if filtered { (top_k * 4).min(MOST * 2) } else { top_k };
        let (asked, known) = tokio::join!(self.0.upstream.query(text, k), self.recognise(FRESH));
        permit.tell(self.sign_of(asked.as_ref().err()));
        self.note_answer(asked.as_ref().err());
        let matches = asked.map_err(|fault| fault.class())?;
        // With a key that was read again just now, or after silence where we know better, it is asked once more.
        let known = match known {
            Ok(false) if matches.is_empty() => self.recognise(Duration::ZERO).await,
            _ => self.recognise(FRESH).await,
        };
        match known {
            Ok(true) => Err("it does not have the memories it had".to_owned()),
            // It answered the question: that one memory cannot be asked for says nothing against it.
            Ok(false) | Err(_) => Ok(matches),
        }
    }

    /// What the service found, and beside it what only we have of it.
    async fn beside(
        &self,
        matches: Vec<Match>,
        text: String,
        spaces: Spaces,
        top_k: usize,
    ) -> Result<(Vec<Recalled>, String)> {
        let work = Arc::new((matches, text, spaces));
        let found = self.transact(Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let (matches, text, spaces) = &*work;
                let ids: Vec<&str> = matches.iter().map(|found| found.id.as_str()).collect();
                let copies = copies::by_memory_ids(tx, &ids).await?;
                let hits = index::search(tx, text, spaces, (4 * top_k).max(LOCAL)).await?;
                let own = copies::by_ids(tx, &of_source(&hits, Source::Memory)).await?;
                Ok(ranking::merge(matches, copies, own, &hits, spaces, top_k))
            })
        });
        let ranking::Merged { results, added, crowded_out } = found.await?;
        let mut message = "ok".to_owned();
        if added > 0 {
            message.push_str(
                "; what OpenMemory merged with other memories or does not have yet was added from local copies",
            );
        }
        if crowded_out > 0 {
            message.push_str("; what OpenMemory did not rank high enough was added from local copies");
        }
        Ok((results, message))
    }

    async fn fall_back(&self, text: String, spaces: Spaces, top_k: usize) -> Result<Vec<Recalled>> {
        if let Err(error) = self.catch_up(5).await {
            tracing::warn!(%error, "what is new in the logbook is not found yet");
        }
        let work = Arc::new((text, spaces));
        let found = self.transact(Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let hits = index::search(tx, &work.0, &work.1, top_k).await?;
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

fn of_source(hits: &[(Source, i64, f64)], wanted: Source) -> Vec<i64> {
    hits.iter().filter(|(source, ..)| *source == wanted).map(|(_, id, _)| *id).collect()
}

/// What the index found, in its order.
async fn recall(tx: &mut (dyn Tx + Send), hits: &[(Source, i64, f64)]) -> Result<Vec<Recalled>> {
    let ids = |wanted: Source| of_source(hits, wanted);
    let mut found: HashMap<(Source, i64), Recalled> = HashMap::new();
    for copy in copies::by_ids(tx, &ids(Source::Memory)).await? {
        let id = copy.id;
        if let Some(recalled) = ranking::own(copy) {
            found.insert((Source::Memory, id), recalled);
        }
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
                merged_with: None,
                evidence_refs: vec![],
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_as_many_texts_as_fit_and_always_one() {
        let found = |bytes: usize| Recalled {
            memory_id: None,
            content: "x".repeat(bytes),
            score: None,
            space: None,
            source: "memory_writes",
            kind: None,
            outbox_id: None,
            created_at: None,
            merged_with: None,
            evidence_refs: vec![],
        };
        for (sizes, kept, left_out) in
            [(&[][..], 0, 0), (&[9], 1, 0), (&[4, 4, 4], 2, 1), (&[4, 5, 1], 1, 2), (&[9, 1], 1, 1), (&[8, 0, 0], 3, 0)]
        {
            let results = sizes.iter().map(|bytes| found(*bytes)).collect();
            let (results, out) = within(results, 8);
            assert_eq!((results.len(), out), (kept, left_out), "{sizes:?}");
        }
    }
}
