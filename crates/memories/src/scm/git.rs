//! A Git repository on this machine: a work tree or a bare one. All branches are read, each commit once.

use std::collections::BTreeMap;
use std::path::Path;

use async_trait::async_trait;
use git2::{Commit, DiffFormat, DiffOptions, ErrorCode, Oid, Repository, Sort};
use serde_json::{Value as Json, json};
use tokio::sync::mpsc;

use super::{BATCH, History, Kind, Record, Source, Trouble, moment, storable};

/// Longest message that is kept, in bytes.
const MOST_MESSAGE: usize = 256 * 1024;
/// Files named of one commit.
const MOST_NAMES: usize = 50;
/// Longest author, in bytes.
const MOST_AUTHOR: usize = 1000;

/// A repository and its name.
pub struct Git {
    path: String,
    name: String,
}

impl Git {
    pub fn new(path: &Path, name: Option<String>) -> Result<Self, Trouble> {
        let wrong = |e: std::io::Error| Trouble::Source(format!("cannot read {}: {e}", path.display()));
        let path = path.canonicalize().map_err(wrong)?;
        let repository = Repository::open(&path).map_err(|e| trouble(&e))?;
        let bare = repository.is_bare();
        let last = path.file_name().map_or_else(|| "repository".into(), |name| name.to_string_lossy().into_owned());
        let usual = if bare { last.trim_end_matches(".git").to_owned() } else { last };
        let path = path.to_str().ok_or_else(|| Trouble::Source("the path is no text".to_owned()))?.to_owned();
        Ok(Git { path, name: name.unwrap_or(usual) })
    }
}

fn trouble(error: &git2::Error) -> Trouble {
    match error.code() {
        ErrorCode::Auth => Trouble::Authentication(error.message().to_owned()),
        _ => Trouble::Source(format!("git: {}", error.message())),
    }
}

/// Branches and what they point to.
fn tips(repository: &Repository) -> Result<BTreeMap<String, String>, git2::Error> {
    let mut tips = BTreeMap::new();
    for reference in repository.references()? {
        let reference = reference?;
        let name = String::from_utf8_lossy(reference.name_bytes()).into_owned();
        let branch = name.starts_with("refs/heads/") || name.starts_with("refs/remotes/");
        if branch && let Ok(commit) = reference.peel_to_commit() {
            tips.insert(name, commit.id().to_string());
        }
    }
    // A work tree may stand beside every branch.
    if let Ok(head) = repository.head().and_then(|head| head.peel_to_commit()) {
        tips.insert("HEAD".to_owned(), head.id().to_string());
    }
    Ok(tips)
}

/// Commits that are reachable now and were not before, oldest first. Only their ids: twenty bytes each.
fn new_commits(
    repository: &Repository,
    tips: &BTreeMap<String, String>,
    known: &[String],
) -> Result<Vec<Oid>, git2::Error> {
    let mut walk = repository.revwalk()?;
    walk.set_sorting(Sort::TOPOLOGICAL | Sort::TIME)?;
    for tip in tips.values() {
        walk.push(Oid::from_str(tip)?)?;
    }
    for tip in known {
        // What was rewritten since may be gone; then it hides nothing.
        if let Ok(id) = Oid::from_str(tip)
            && repository.find_commit(id).is_ok()
        {
            walk.hide(id)?;
        }
    }
    let mut ids: Vec<Oid> = walk.collect::<Result<_, _>>()?;
    ids.reverse();
    Ok(ids)
}

fn record(repository: &Repository, id: Oid) -> Result<Record, git2::Error> {
    let commit = repository.find_commit(id)?;
    let author = commit.author();
    let name = String::from_utf8_lossy(author.name_bytes());
    let email = String::from_utf8_lossy(author.email_bytes());
    Ok(Record::Commit {
        sha: id.to_string(),
        author: storable(&format!("{name} <{email}>"), MOST_AUTHOR),
        authored_at: moment(author.when().seconds()),
        committed_at: moment(commit.time().seconds()),
        message: storable(&String::from_utf8_lossy(commit.message_bytes()), MOST_MESSAGE),
        parents: commit.parent_ids().map(|id| id.to_string()).collect(),
        // What cannot be compared has no numbers; its commit is kept all the same.
        stats: stats(repository, &commit).ok(),
    })
}

fn stats(repository: &Repository, commit: &Commit<'_>) -> Result<Json, git2::Error> {
    let before = commit.parent(0).ok().map(|parent| parent.tree()).transpose()?;
    let mut options = DiffOptions::new();
    options.skip_binary_check(true);
    let diff = repository.diff_tree_to_tree(before.as_ref(), Some(&commit.tree()?), Some(&mut options))?;
    let names: Vec<String> = diff
        .deltas()
        .take(MOST_NAMES)
        .filter_map(|delta| delta.new_file().path_bytes().or_else(|| delta.old_file().path_bytes()))
        .map(|path| storable(&String::from_utf8_lossy(path), 1000))
        .collect();
    Ok(json!({ "files": diff.deltas().len(), "names": names }))
}

/// What is sent from the thread that reads: a batch, or why there is none.
type Sent = Result<Vec<Record>, Trouble>;

struct Commits {
    batches: mpsc::Receiver<Sent>,
    total: u64,
    watermark: Json,
}

#[async_trait]
impl History for Commits {
    fn total(&self) -> Option<u64> {
        Some(self.total)
    }

    async fn next(&mut self) -> Result<Vec<Record>, Trouble> {
        self.batches.recv().await.unwrap_or_else(|| Ok(vec![]))
    }

    fn watermark(&self) -> Json {
        self.watermark.clone()
    }
}

#[async_trait]
impl Source for Git {
    fn kind(&self) -> Kind {
        Kind::Git
    }

    fn url(&self) -> &str {
        &self.path
    }

    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self, watermark: Option<&Json>) -> Result<Box<dyn History>, Trouble> {
        let known: Vec<String> = watermark
            .and_then(|watermark| watermark.get("tips")?.as_object())
            .map(|tips| tips.values().filter_map(|tip| tip.as_str().map(str::to_owned)).collect())
            .unwrap_or_default();
        let path = self.path.clone();
        let (send, batches) = mpsc::channel(2);
        let (opened_send, opened) = tokio::sync::oneshot::channel();
        // The library waits for the disk: a thread of its own, a few batches ahead of the database.
        tokio::task::spawn_blocking(move || {
            let begun = (|| {
                let repository = Repository::open(&path)?;
                let tips = tips(&repository)?;
                let ids = new_commits(&repository, &tips, &known)?;
                Ok::<_, git2::Error>((repository, tips, ids))
            })();
            let (repository, tips, ids) = match begun {
                Ok(begun) => begun,
                Err(error) => return drop(opened_send.send(Err(trouble(&error)))),
            };
            if opened_send.send(Ok((tips, ids.len() as u64))).is_err() {
                return;
            }
            for part in ids.chunks(BATCH) {
                let batch: Result<Vec<Record>, git2::Error> = part.iter().map(|id| record(&repository, *id)).collect();
                if send.blocking_send(batch.map_err(|e| trouble(&e))).is_err() {
                    return;
                }
            }
        });
        let gone = |_| Trouble::Source("reading the repository ended early".to_owned());
        let (tips, total) = opened.await.map_err(gone)??;
        Ok(Box::new(Commits { batches, total, watermark: json!({ "tips": tips }) }))
    }

    async fn diff(&self, rev: &str) -> Result<Vec<u8>, Trouble> {
        let (path, rev) = (self.path.clone(), rev.to_owned());
        let made = tokio::task::spawn_blocking(move || patch(&path, &rev)).await;
        made.map_err(|e| Trouble::Source(e.to_string()))?.map_err(|e| trouble(&e))
    }

    fn uri(&self, rev: &str) -> String {
        format!("git+file://{}?commit={rev}", self.path)
    }
}

/// A commit against its first parent, as a unified diff.
fn patch(path: &str, rev: &str) -> Result<Vec<u8>, git2::Error> {
    let repository = Repository::open(path)?;
    let commit = repository.find_commit(Oid::from_str(rev)?)?;
    let before = commit.parent(0).ok().map(|parent| parent.tree()).transpose()?;
    let diff = repository.diff_tree_to_tree(before.as_ref(), Some(&commit.tree()?), None)?;
    let mut text = Vec::new();
    diff.print(DiffFormat::Patch, |_, _, line| {
        if matches!(line.origin(), '+' | '-' | ' ') {
            text.push(line.origin() as u8);
        }
        text.extend_from_slice(line.content());
        true
    })?;
    Ok(text)
}
