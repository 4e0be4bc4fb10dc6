//! From rows to memories: new records of each repository, oldest first, become cards that are stored like any other memory.
//! The cursor moves behind what was stored or deferred; a card made twice is one memory.

use std::sync::Arc;

use postrider::store::Mode;
use postrider::tx::{Row, Tx, Value};
use postrider::{Error, Result};
use serde::Serialize;
use serde_json::{Map, Value as Json, json};

use super::cards::{self, Change};
use super::rows::{source_id, table};
use super::{Kind, Repo, Scm, storable};
use crate::answer::Action;
use crate::candidates::NewCandidate;
use crate::note::NewMemory;
use crate::{Memories, kv};

/// Where cursors are kept.
pub(super) const CURSORS: &str = "gateway.consume";
/// Rows read at once.
const BATCH: usize = 50;

/// Where to begin again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Point {
    Start,
    /// The repository's own name for a record: a sha, a revision, a number. It is the first to be made again.
    Rev(String),
}

/// What was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Consumed {
    pub cards: u64,
    pub stored: u64,
    pub deferred: u64,
    /// Stored before.
    pub known: u64,
    /// Taken for another memory by the service; found in our own copies.
    pub merged: u64,
    /// Not taken by the project's rules or by the service.
    pub rejected: u64,
}

impl Consumed {
    fn add(&mut self, other: Consumed) {
        self.cards += other.cards;
        self.stored += other.stored;
        self.deferred += other.deferred;
        self.known += other.known;
        self.merged += other.merged;
        self.rejected += other.rejected;
    }
}

pub(super) fn cursor_key(repo: &Repo) -> String {
    format!("scm_consume:{}", repo.repo_id)
}

/// The row a cursor stands behind.
pub(super) fn position(cursor: Option<&Json>) -> i64 {
    cursor.and_then(|cursor| cursor.get("last_processed_id")).and_then(Json::as_i64).unwrap_or(0)
}

/// A record that is to become a card.
#[derive(Clone, Debug)]
struct Item {
    id: i64,
    change: Change,
    uri: String,
    patch: Option<(String, String, i64)>,
}

impl Scm {
    /// Makes memories of all that is new, of every repository or of one.
    pub async fn consume(&self, memories: &Memories, only: Option<i64>, from: Option<&Point>) -> Result<Consumed> {
        let mut all = Consumed::default();
        let repos: Vec<Repo> =
            self.repos().await?.into_iter().filter(|repo| only.is_none_or(|id| id == repo.repo_id)).collect();
        if let (Some(id), true) = (only, repos.is_empty()) {
            return Err(Error::invalid(format!("there is no repository {id}; scm status tells which there are")));
        }
        let rewound: Vec<(Repo, i64)> = match from {
            None => vec![],
            Some(Point::Start) => repos.iter().map(|repo| (repo.clone(), 1)).collect(),
            Some(Point::Rev(rev)) => vec![self.locate(&repos, rev).await?],
        };
        for (repo, id) in &rewound {
            self.rewind(repo, *id).await?;
        }
        // What is wrong with one keeps none of the others.
        let mut wrong = None;
        for repo in repos.iter().filter(|repo| from.is_none() || rewound.iter().any(|(r, _)| r == *repo)) {
            loop {
                match self.consume_some(memories, repo).await {
                    Ok((made, more)) => {
                        all.add(made);
                        if !more {
                            break;
                        }
                    }
                    Err(error) => {
                        wrong = Some(error);
                        break;
                    }
                }
            }
        }
        wrong.map_or(Ok(all), Err)
    }

    /// The one record of that name among these repositories.
    async fn locate(&self, repos: &[Repo], rev: &str) -> Result<(Repo, i64)> {
        let work = Arc::new((repos.to_vec(), rev.to_owned()));
        let found = self.transact(Mode::Read, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let mut found = Vec::new();
                for repo in &work.0 {
                    found.extend(find(tx, repo, &work.1).await?.into_iter().map(|id| (repo.clone(), id)));
                }
                Ok(found)
            })
        });
        let mut found = found.await?;
        match (found.pop(), found.is_empty()) {
            (Some(one), true) => Ok(one),
            (Some(_), false) => {
                Err(Error::invalid(format!("{rev} names several records; say which repository: --repo ID")))
            }
            (None, _) => {
                Err(Error::invalid(format!("no repository has a record {rev}; scm status tells which there are")))
            }
        }
    }

    async fn consume_some(&self, memories: &Memories, repo: &Repo) -> Result<(Consumed, bool)> {
        let asked = repo.clone();
        let items = self.transact(Mode::Read, move |tx| {
            let repo = asked.clone();
            Box::pin(async move { items(tx, &repo).await })
        });
        let (items, epoch) = items.await?;
        let (count, mut made) = (items.len(), Consumed::default());
        for item in items {
            let memory = memory_of(repo, &item, memories.max_bytes());
            let candidate = candidate_of(&memory, &item);
            let stored = memories.store(memory).await;
            made.cards += 1;
            match (stored.action, stored.again) {
                (Action::Error, _) if stored.error == Some(crate::code::INVALID_MEMORY) => {
                    tracing::warn!(
                        rev = item.change.rev,
                        why = stored.message,
                        "a change cannot be remembered as it is"
                    );
                    made.rejected += 1;
                }
                (Action::Allow | Action::Deferred, true) => made.known += 1,
                (Action::Allow, _) if stored.merged_with.is_some() => made.merged += 1,
                (Action::Allow, _) => made.stored += 1,
                (Action::Deferred, _) => made.deferred += 1,
                (Action::Reject, _) => made.rejected += 1,
                // It waits here: the next run goes on with it.
                (Action::Error, _) => return Err(Error::new(postrider::error::Kind::Unavailable, stored.message)),
            }
            if let (Some(candidate), true) = (candidate, stored.error.is_none()) {
                memories.import(vec![candidate]).await?;
            }
            if !self.advance(repo, &item, epoch).await? {
                // Somebody began again elsewhere: that cursor is the one.
                break;
            }
        }
        Ok((made, count == BATCH))
    }

    /// Moves the cursor behind a record, unless it was set elsewhere meanwhile; never back, whoever else consumes.
    async fn advance(&self, repo: &Repo, item: &Item, epoch: i64) -> Result<bool> {
        let rev = item.change.rev.parse::<i64>().map_or_else(|_| json!(item.change.rev), |number| json!(number));
        let cursor = json!({ "last_processed_rev": rev, "last_processed_id": item.id, "epoch": epoch });
        let work = Arc::new((cursor_key(repo), item.id, cursor));
        self.transact(Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let now = kv::get_locked(tx, CURSORS, &work.0).await?;
                if epoch_of(now.as_ref()) != epoch {
                    return Ok(false);
                }
                if position(now.as_ref()) < work.1 {
                    kv::set(tx, CURSORS, &work.0, &work.2).await?;
                }
                Ok(true)
            })
        })
        .await
    }

    /// Sets the cursor right before a record.
    async fn rewind(&self, repo: &Repo, id: i64) -> Result<()> {
        let key: Arc<str> = cursor_key(repo).into();
        self.transact(Mode::Write, move |tx| {
            let key = key.clone();
            Box::pin(async move {
                let epoch = epoch_of(kv::get_locked(tx, CURSORS, &key).await?.as_ref()) + 1;
                let cursor = json!({ "last_processed_rev": null, "last_processed_id": id - 1, "epoch": epoch });
                kv::set(tx, CURSORS, &key, &cursor).await
            })
        })
        .await
    }
}

/// How often a cursor was set by hand.
fn epoch_of(cursor: Option<&Json>) -> i64 {
    cursor.and_then(|cursor| cursor.get("epoch")).and_then(Json::as_i64).unwrap_or(0)
}

/// Records of that name; of a commit the beginning of its sha is enough.
async fn find(tx: &mut (dyn Tx + Send), repo: &Repo, rev: &str) -> Result<Vec<i64>> {
    let (table, column) = table(repo.kind);
    let (condition, named): (&str, Value) = match (repo.kind, rev.parse::<i64>()) {
        (Kind::Git, _) if rev.len() < 4 || !rev.chars().all(|c| c.is_ascii_hexdigit()) => return Ok(vec![]),
        (Kind::Git, _) => ("LIKE ?", format!("{}%", rev.to_ascii_lowercase()).into()),
        (_, Ok(number)) => ("= ?", number.into()),
        (_, Err(_)) => return Ok(vec![]),
    };
    let sql = format!("SELECT id FROM {table} WHERE repo_id = ? AND {column} {condition} LIMIT 2");
    tx.query(&sql, &[repo.repo_id.into(), named]).await?.iter().map(|row| row.int(0)).collect()
}

/// The next records behind the cursor, with what is known of their changes.
async fn items(tx: &mut (dyn Tx + Send), repo: &Repo) -> Result<(Vec<Item>, i64)> {
    let cursor = kv::get(tx, CURSORS, &cursor_key(repo)).await?;
    let (after, epoch) = (position(cursor.as_ref()), epoch_of(cursor.as_ref()));
    let columns = match repo.kind {
        Kind::Git => "id, sha, author, message, stats_json, authored_at, NULL",
        Kind::Svn => "id, revision, author, message, paths_json, at, NULL",
        Kind::Gitlab => "id, iid, author, title, raw_json, merged_at, state",
    };
    let (table, _) = table(repo.kind);
    let sql = format!("SELECT {columns} FROM {table} WHERE repo_id = ? AND id > ? ORDER BY id LIMIT {BATCH}");
    let rows = tx.query(&sql, &[repo.repo_id.into(), after.into()]).await?;
    let mut items = Vec::with_capacity(rows.len());
    for row in &rows {
        let rev = if repo.kind == Kind::Git { row.text(1)? } else { row.int(1)?.to_string() };
        let sql = "SELECT uri, sha256, size FROM scm_patch_blobs WHERE source_type = ? AND source_id = ? AND uri <> ''";
        let patch = tx.query(sql, &[repo.kind.as_str().into(), source_id(repo, &rev).into()]).await?;
        let patch = patch.first().map(|p| Ok::<_, Error>((p.text(0)?, p.text(1)?, p.int(2)?))).transpose()?;
        items.push(Item { id: row.int(0)?, change: change(repo, row, &rev)?, uri: uri(repo, &rev), patch });
    }
    Ok((items, epoch))
}

fn change(repo: &Repo, row: &Row, rev: &str) -> Result<Change> {
    let known: Option<Json> = row.opt_text(4)?.and_then(|text| serde_json::from_str(&text).ok());
    let more = known.as_ref().and_then(|known| known.get("description")?.as_str()).map(str::to_owned);
    let files = known.and_then(|known| {
        let (count, names) = match repo.kind {
            Kind::Svn => ("count", "paths"),
            _ => ("files", "names"),
        };
        let name = |entry: &Json| entry.as_str().or_else(|| entry.get("path")?.as_str()).map(str::to_owned);
        let names = known.get(names)?.as_array()?.iter().filter_map(name).collect();
        Some((known.get(count)?.as_u64()?, names))
    });
    let kind = match repo.kind {
        Kind::Git => "scm_commit",
        Kind::Svn => "scm_revision",
        Kind::Gitlab => "scm_merge_request",
    };
    Ok(Change {
        kind,
        repo: repo.name.clone(),
        rev: rev.to_owned(),
        author: row.text(2)?,
        at: row.opt_time(5)?.map(|at| at.to_string()),
        message: more.map_or_else(|| row.text(3), |more| Ok(format!("{}\n\n{more}", row.text(3)?)))?,
        files,
        state: row.opt_text(6)?,
    })
}

/// The address of a record, where its change has none yet.
fn uri(repo: &Repo, rev: &str) -> String {
    let what = match repo.kind {
        Kind::Git => "commit",
        Kind::Svn => "revision",
        Kind::Gitlab => "merge_request",
    };
    format!("scm://{}/{what}/{rev}", repo.repo_id)
}

/// The same as a candidate, so that it is found by its words when the memory service is away.
fn candidate_of(memory: &NewMemory, item: &Item) -> Option<NewCandidate> {
    let title: String = item.change.message.trim().lines().next().unwrap_or_default().chars().take(200).collect();
    let candidate = NewCandidate {
        title: if title.trim().is_empty() { item.change.rev.clone() } else { title },
        content_md: memory.payload_md.clone(),
        kind: memory.kind.clone(),
        confidence: None,
        evidence_refs: memory.evidence_refs.clone(),
        target_space: memory.target_space.clone(),
    };
    candidate.check().is_ok().then_some(candidate)
}

fn memory_of(repo: &Repo, item: &Item, most_bytes: usize) -> NewMemory {
    let patch = item.patch.as_ref().map(|(uri, sha256, size)| (uri.as_str(), sha256.as_str(), *size));
    let meta = json!({ "repo_id": repo.repo_id, "repo": repo.name, "scm": repo.kind, "rev": item.change.rev });
    let meta_json = if let Json::Object(meta) = meta { meta } else { Map::new() };
    NewMemory {
        payload_md: storable(&cards::card(&item.change), most_bytes),
        target_space: repo.target_space.clone(),
        meta_json,
        kind: Some(item.change.kind.to_owned()),
        evidence_refs: vec![cards::evidence(&item.uri, &item.change, patch)],
        actor_user_id: None,
        correlation_id: format!("scm-{}-{}", repo.repo_id, item.id),
        skip_openmemory: false,
    }
}
