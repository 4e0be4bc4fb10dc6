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
use super::{Kind, Repo, Scm};
use crate::note::NewMemory;
use crate::store::Action;
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
    /// Not taken by the project's rules or by the service.
    pub rejected: u64,
}

impl Consumed {
    fn add(&mut self, other: Consumed) {
        self.cards += other.cards;
        self.stored += other.stored;
        self.deferred += other.deferred;
        self.known += other.known;
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
        for repo in repos {
            if let Some(point) = from {
                self.rewind(&repo, point).await?;
            }
            loop {
                let (made, more) = self.consume_some(memories, &repo).await?;
                all.add(made);
                if !more {
                    break;
                }
            }
        }
        Ok(all)
    }

    async fn consume_some(&self, memories: &Memories, repo: &Repo) -> Result<(Consumed, bool)> {
        let asked = repo.clone();
        let items = self.transact(Mode::Read, move |tx| {
            let repo = asked.clone();
            Box::pin(async move { items(tx, &repo).await })
        });
        let items = items.await?;
        let (count, mut made) = (items.len(), Consumed::default());
        for item in items {
            let stored = memories.store(memory_of(repo, &item)).await;
            made.cards += 1;
            match (stored.action, stored.deduplicated) {
                (Action::Allow | Action::Deferred, true) => made.known += 1,
                (Action::Allow, false) => made.stored += 1,
                (Action::Deferred, false) => made.deferred += 1,
                (Action::Reject, _) => made.rejected += 1,
                // It waits here: the next run goes on with it.
                (Action::Error, _) => return Err(Error::new(postrider::error::Kind::Unavailable, stored.message)),
            }
            self.advance(repo, &item).await?;
        }
        Ok((made, count == BATCH))
    }

    /// Moves the cursor behind a record; never back, whoever else consumes.
    async fn advance(&self, repo: &Repo, item: &Item) -> Result<()> {
        let rev = item.change.rev.parse::<i64>().map_or_else(|_| json!(item.change.rev), |number| json!(number));
        let work =
            Arc::new((cursor_key(repo), item.id, json!({ "last_processed_rev": rev, "last_processed_id": item.id })));
        self.transact(Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                if position(kv::get(tx, CURSORS, &work.0).await?.as_ref()) < work.1 {
                    kv::set(tx, CURSORS, &work.0, &work.2).await?;
                }
                Ok(())
            })
        })
        .await
    }

    /// Sets the cursor right before a record.
    async fn rewind(&self, repo: &Repo, point: &Point) -> Result<()> {
        let work = Arc::new((repo.clone(), point.clone()));
        self.transact(Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let (repo, point) = &*work;
                let id = match point {
                    Point::Start => 1,
                    Point::Rev(rev) => find(tx, repo, rev).await?,
                };
                let cursor = json!({ "last_processed_rev": null, "last_processed_id": id - 1 });
                kv::set(tx, CURSORS, &cursor_key(repo), &cursor).await
            })
        })
        .await
    }
}

async fn find(tx: &mut (dyn Tx + Send), repo: &Repo, rev: &str) -> Result<i64> {
    let (table, column) = table(repo.kind);
    let unknown = || Error::invalid(format!("repository {} has no {column} {rev}", repo.repo_id));
    let named: Value = match repo.kind {
        Kind::Git => rev.into(),
        Kind::Svn | Kind::Gitlab => rev.parse::<i64>().map_err(|_| unknown())?.into(),
    };
    let sql = format!("SELECT id FROM {table} WHERE repo_id = ? AND {column} = ?");
    let rows = tx.query(&sql, &[repo.repo_id.into(), named]).await?;
    rows.first().ok_or_else(unknown)?.int(0)
}

/// The next records behind the cursor, with what is known of their changes.
async fn items(tx: &mut (dyn Tx + Send), repo: &Repo) -> Result<Vec<Item>> {
    let after = position(kv::get(tx, CURSORS, &cursor_key(repo)).await?.as_ref());
    let columns = match repo.kind {
        Kind::Git => "id, sha, author, message, stats_json, authored_at, NULL",
        Kind::Svn => "id, revision, author, message, paths_json, at, NULL",
        Kind::Gitlab => "id, iid, author, title, NULL, merged_at, state",
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
    Ok(items)
}

fn change(repo: &Repo, row: &Row, rev: &str) -> Result<Change> {
    let known: Option<Json> = row.opt_text(4)?.and_then(|text| serde_json::from_str(&text).ok());
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
        message: row.text(3)?,
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

fn memory_of(repo: &Repo, item: &Item) -> NewMemory {
    let patch = item.patch.as_ref().map(|(uri, sha256, size)| (uri.as_str(), sha256.as_str(), *size));
    let meta = json!({ "repo_id": repo.repo_id, "repo": repo.name, "scm": repo.kind, "rev": item.change.rev });
    let meta_json = if let Json::Object(meta) = meta { meta } else { Map::new() };
    NewMemory {
        payload_md: cards::card(&item.change),
        target_space: repo.target_space.clone(),
        meta_json,
        kind: Some(item.change.kind.to_owned()),
        evidence_refs: vec![cards::evidence(&item.uri, patch)],
        actor_user_id: None,
        correlation_id: format!("scm-{}-{}", repo.repo_id, item.id),
    }
}
