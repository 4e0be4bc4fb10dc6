//! A Git repository on this machine: a work tree or a bare one. All branches are read, each commit once.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use async_trait::async_trait;
use git2::{Commit, DiffFormat, DiffOptions, ErrorCode, Oid, Repository, Sort};
use postrider::message::{hex, sha256};
use serde_json::{Value as Json, json};
use tokio::sync::mpsc;

use super::{BATCH, History, Kind, Record, Source, Trouble, moment, storable};

/// Longest message that is kept, in bytes.
const MOST_MESSAGE: usize = 256 * 1024;
/// Messages of one batch, in bytes.
const MOST_BATCH: usize = 4 << 20;
/// Commits read before the repository is opened anew.
const REOPEN_EVERY: usize = 20_000;
/// Files named of one commit.
const MOST_NAMES: usize = 50;
/// Longest author, in bytes.
const MOST_AUTHOR: usize = 1000;

/// A repository and its name.
pub struct Git {
    path: String,
    name: String,
    named: bool,
}

impl Git {
    pub fn new(path: &Path, name: Option<String>) -> Result<Self, Trouble> {
        let given = path.display().to_string();
        let wrong = |e: std::io::Error| Trouble::Source(format!("cannot read {given}: {e}"));
        if !path.exists() {
            return Err(Trouble::Source(format!("there is nothing at {given}")));
        }
        let repository = Repository::open(path).map_err(|e| trouble(&e))?;
        // However it is named, and from whichever of its work trees: it is one repository.
        let path = repository.commondir().canonicalize().map_err(wrong)?;
        let bare = !path.ends_with(".git");
        let named = if bare { Some(path.as_path()) } else { path.parent() };
        let last = named
            .and_then(Path::file_name)
            .map_or_else(|| "repository".into(), |name| name.to_string_lossy().into_owned());
        let usual = if bare { last.trim_end_matches(".git").to_owned() } else { last };
        let path = path.to_str().ok_or_else(|| Trouble::Source("the path is no text".to_owned()))?.to_owned();
        Ok(Git { path, named: name.is_some(), name: name.unwrap_or(usual) })
    }
}

fn trouble(error: &git2::Error) -> Trouble {
    match error.code() {
        ErrorCode::Auth => Trouble::Authentication(error.message().to_owned()),
        _ => Trouble::Source(format!("git: {}", error.message())),
    }
}

fn copied(error: &git2::Error) -> git2::Error {
    git2::Error::new(error.code(), error.class(), error.message())
}

/// Branches and tags, and what they point to.
fn tips(repository: &Repository) -> Result<BTreeMap<String, String>, git2::Error> {
    let mut tips = BTreeMap::new();
    for reference in repository.references()? {
        let reference = reference?;
        let name = String::from_utf8_lossy(reference.name_bytes()).into_owned();
        let ours = ["refs/heads/", "refs/remotes/", "refs/tags/"].iter().any(|kind| name.starts_with(kind));
        if ours && let Ok(commit) = reference.peel_to_commit() {
            tips.insert(name, commit.id().to_string());
        }
    }
    // A work tree may stand beside every branch.
    if let Ok(head) = repository.head().and_then(|head| head.peel_to_commit()) {
        tips.insert("HEAD".to_owned(), head.id().to_string());
    }
    Ok(tips)
}

/// Where a shallow clone ends; what lies beyond may come later.
fn boundary(repository: &Repository) -> String {
    let file = std::fs::read(repository.commondir().join("shallow")).unwrap_or_default();
    if file.is_empty() { String::new() } else { hex(&sha256(&file)) }
}

/// Commits that are reachable now and were not before, oldest first. Only their ids: twenty bytes each.
fn new_commits(path: &str, tips: &BTreeMap<String, String>, known: &[String]) -> Result<Vec<Oid>, git2::Error> {
    let repository = Repository::open(path)?;
    let known: Vec<Oid> = (known.iter())
        .filter_map(|tip| Oid::from_str(tip).ok())
        // What was rewritten since may be gone; then it hides nothing.
        .filter(|id| repository.find_commit(*id).is_ok())
        .collect();
    if known.is_empty() {
        return whole_history(path, repository, tips);
    }
    let mut walk = repository.revwalk()?;
    walk.set_sorting(Sort::TOPOLOGICAL | Sort::TIME)?;
    for tip in tips.values() {
        walk.push(Oid::from_str(tip)?)?;
    }
    for id in known {
        walk.hide(id)?;
    }
    let mut ids: Vec<Oid> = walk.collect::<Result<_, _>>()?;
    ids.reverse();
    Ok(ids)
}

/// Everything below these tips, parents before their children. The library's own walk keeps what it has read of every
/// commit until its end; this one keeps ids alone, some hundred bytes a commit.
fn whole_history(
    path: &str,
    mut repository: Repository,
    tips: &BTreeMap<String, String>,
) -> Result<Vec<Oid>, git2::Error> {
    let shallow = repository.is_shallow();
    let (mut seen, mut ids, mut stack) = (HashSet::new(), Vec::new(), Vec::new());
    for tip in tips.values() {
        stack.push((Oid::from_str(tip)?, false));
        while let Some((id, parents_done)) = stack.pop() {
            if parents_done {
                ids.push(id);
                continue;
            }
            if !seen.insert(id) {
                continue;
            }
            // The library keeps what it has read; opened anew it forgets.
            if seen.len() % REOPEN_EVERY == 0 {
                repository = Repository::open(path)?;
            }
            let commit = match repository.find_commit(id) {
                // Beyond the end of a shallow clone.
                Err(error) if shallow && error.code() == ErrorCode::NotFound => continue,
                commit => commit?,
            };
            stack.push((id, true));
            // The first parent's side comes first.
            let parents: Vec<Oid> = commit.parent_ids().filter(|parent| !seen.contains(parent)).collect();
            stack.extend(parents.into_iter().rev().map(|parent| (parent, false)));
        }
    }
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

    fn is_named(&self) -> bool {
        self.named
    }

    async fn open(&self, watermark: Option<&Json>) -> Result<Box<dyn History>, Trouble> {
        let known: Vec<String> = watermark
            .and_then(|watermark| watermark.get("tips")?.as_object())
            .map(|tips| tips.values().filter_map(|tip| tip.as_str().map(str::to_owned)).collect())
            .unwrap_or_default();
        let boundary_then = watermark.and_then(|w| w.get("boundary")?.as_str()).unwrap_or_default().to_owned();
        let path = self.path.clone();
        let (send, batches) = mpsc::channel(2);
        let (opened_send, opened) = tokio::sync::oneshot::channel();
        // The library waits for the disk: a thread of its own, a few batches ahead of the database.
        tokio::task::spawn_blocking(move || {
            let begun = (|| {
                let repository = Repository::open(&path)?;
                let tips = tips(&repository)?;
                let boundary = boundary(&repository);
                // A clone that was deepened has ancestors nobody has read.
                let known = if boundary == boundary_then { known } else { vec![] };
                let ids = new_commits(&path, &tips, &known)?;
                Ok::<_, git2::Error>((tips, boundary, ids))
            })();
            let (tips, boundary, ids) = match begun {
                Ok(begun) => begun,
                Err(error) => return drop(opened_send.send(Err(trouble(&error)))),
            };
            if opened_send.send(Ok((tips, boundary, ids.len() as u64))).is_err() {
                return;
            }
            let (mut batch, mut bytes) = (Vec::new(), 0);
            let mut repository = Repository::open(&path);
            for (n, id) in ids.iter().enumerate() {
                // The library keeps what it has read; opened anew it forgets.
                if n % REOPEN_EVERY == REOPEN_EVERY - 1 {
                    repository = Repository::open(&path);
                }
                match repository.as_ref().map_err(copied).and_then(|repository| record(repository, *id)) {
                    Err(error) => return drop(send.blocking_send(Err(trouble(&error)))),
                    Ok(record) => {
                        bytes += if let Record::Commit { message, .. } = &record { message.len() } else { 0 };
                        batch.push(record);
                    }
                }
                let full = batch.len() == BATCH || bytes > MOST_BATCH || n + 1 == ids.len();
                if full && send.blocking_send(Ok(std::mem::take(&mut batch))).is_err() {
                    return;
                }
                bytes = if full { 0 } else { bytes };
            }
        });
        let gone = |_| Trouble::Source("reading the repository ended early".to_owned());
        let (tips, boundary, total) = opened.await.map_err(gone)??;
        let mut watermark = json!({ "tips": tips });
        if !boundary.is_empty() {
            watermark["boundary"] = json!(boundary);
        }
        Ok(Box::new(Commits { batches, total, watermark }))
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
