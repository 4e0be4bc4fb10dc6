//! A Git repository on this machine: a work tree or a bare one. All branches are read, each commit once.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use async_trait::async_trait;
use git2::{Commit, DiffFormat, DiffOptions, ErrorCode, Oid, Repository};
use postrider::message::{hex, sha256};
use serde_json::{Value as Json, json};
use tokio::sync::mpsc;

use super::walk::{Forgetful, Walk};
use super::{BATCH, History, Kind, Record, Source, Trouble, moment, storable};

/// Longest message that is kept, in bytes.
const MOST_MESSAGE: usize = 256 * 1024;
/// Messages of one batch, in bytes.
const MOST_BATCH: usize = 4 << 20;
/// Files named of one commit.
const MOST_NAMES: usize = 50;
/// Most bytes of the file that says where a shallow clone ends.
const MOST_SHALLOW: u64 = 64 << 20;
/// Of a diff, as of what Subversion prints.
const MOST_PRINTED: usize = 64 << 20;
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
        let given = super::without_credentials(&path.display().to_string());
        let wrong = |e: std::io::Error| Trouble::Source(format!("cannot read {given}: {e}"));
        if !path.exists() {
            // A parameter may be a secret, and a folder of this machine has none.
            let shown = given.split('?').next().unwrap_or_default();
            return Err(Trouble::Source(format!("there is nothing at {shown}")));
        }
        let repository = open(path)?;
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

pub(super) fn trouble(error: &git2::Error) -> Trouble {
    match error.code() {
        ErrorCode::Auth => Trouble::Authentication(error.message().to_owned()),
        _ => Trouble::Source(format!("git: {}", error.message())),
    }
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

/// Opening reads where a shallow clone ends, too, and would wait for a pipe: that is looked at first.
fn open(path: &Path) -> Result<Repository, Trouble> {
    for place in [".git/shallow", "shallow"] {
        plain(&path.join(place))?;
    }
    Repository::open(path).map_err(|e| trouble(&e))
}

/// Where a shallow clone ends; what lies beyond may come later.
fn boundary(repository: &Repository) -> Result<String, Trouble> {
    let file = plain(&repository.commondir().join("shallow"))?;
    Ok(if file.is_empty() { String::new() } else { hex(&sha256(&file)) })
}

/// A file of a repository that may be anybody's: one that is none, or has no end, is refused. Nothing if it is not there.
fn plain(path: &Path) -> Result<Vec<u8>, Trouble> {
    let strange = || Trouble::Source(format!("{} is no plain file of a repository; look at it", path.display()));
    match std::fs::metadata(path) {
        Err(_) => return Ok(vec![]),
        Ok(file) if file.is_file() => {}
        Ok(_) => return Err(strange()),
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(MOST_SHALLOW + 1).read_to_end(&mut bytes));
    match read {
        Ok(read) if read as u64 <= MOST_SHALLOW => Ok(bytes),
        _ => Err(strange()),
    }
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

/// What is sent from the thread that reads: a batch, an empty one at the end, or why there is none.
type Sent = Result<Vec<Record>, Trouble>;

/// The branches, where a shallow clone ends, and what is new.
fn begin(
    path: &str,
    known: Vec<String>,
    boundary_then: &str,
) -> Result<(BTreeMap<String, String>, String, Walk, u64), Trouble> {
    let repository = open(Path::new(path))?;
    let tips = tips(&repository).map_err(|e| trouble(&e))?;
    let boundary = boundary(&repository)?;
    // A clone that was deepened has ancestors nobody has read.
    let known = if boundary == boundary_then { known } else { vec![] };
    let walk = Walk::new(path, &tips, &known)?;
    let total = walk.total()?;
    Ok((tips, boundary, walk, total))
}

/// Sends what was found, batch by batch, until nobody listens.
fn read(path: &str, walk: &Walk, send: &mpsc::Sender<Sent>) -> Result<(), Trouble> {
    let mut repository = Forgetful::open(path)?;
    let mut done = 0;
    loop {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        for id in walk.after(done, BATCH)? {
            let record = record(repository.get()?, id).map_err(|e| trouble(&e))?;
            bytes += if let Record::Commit { message, .. } = &record { message.len() } else { 0 };
            batch.push(record);
            if bytes > MOST_BATCH {
                break;
            }
        }
        done += batch.len() as u64;
        let last = batch.is_empty();
        if send.blocking_send(Ok(batch)).is_err() || last {
            return Ok(());
        }
    }
}

struct Commits {
    batches: mpsc::Receiver<Sent>,
    total: u64,
    watermark: Json,
    ended: bool,
}

#[async_trait]
impl History for Commits {
    fn total(&self) -> Option<u64> {
        Some(self.total)
    }

    async fn next(&mut self) -> Result<Vec<Record>, Trouble> {
        if self.ended {
            return Ok(vec![]);
        }
        // Silence is no end: whoever read may have died in the middle, and the watermark must not pass what is left.
        let early = || Err(Trouble::Source("reading the repository ended early".to_owned()));
        let batch = self.batches.recv().await.unwrap_or_else(early)?;
        self.ended = batch.is_empty();
        Ok(batch)
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
            let begun = begin(&path, known, &boundary_then);
            let (tips, boundary, walk, total) = match begun {
                Ok(begun) => begun,
                Err(trouble) => return drop(opened_send.send(Err(trouble))),
            };
            if opened_send.send(Ok((tips, boundary, total))).is_ok()
                && let Err(trouble) = read(&path, &walk, &send)
            {
                drop(send.blocking_send(Err(trouble)));
            }
        });
        let gone = |_| Trouble::Source("reading the repository ended early".to_owned());
        let (tips, boundary, total) = opened.await.map_err(gone)??;
        let mut watermark = json!({ "tips": tips });
        if !boundary.is_empty() {
            watermark["boundary"] = json!(boundary);
        }
        Ok(Box::new(Commits { batches, total, watermark, ended: false }))
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
    let printed = diff.print(DiffFormat::Patch, |_, _, line| {
        if matches!(line.origin(), '+' | '-' | ' ') {
            text.push(line.origin() as u8);
        }
        text.extend_from_slice(line.content());
        text.len() <= MOST_PRINTED
    });
    if text.len() > MOST_PRINTED {
        return Err(git2::Error::from_str(&format!("the diff of {rev} has more than {MOST_PRINTED} bytes")));
    }
    printed.map(|()| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reader_that_dies_is_no_end_of_the_history() {
        let (send, batches) = mpsc::channel(2);
        let mut commits = Commits { batches, total: 2, watermark: Json::Null, ended: false };
        drop(send);
        assert!(commits.next().await.is_err(), "nobody said that it ended");
        let (send, batches) = mpsc::channel(2);
        let mut commits = Commits { batches, total: 0, watermark: Json::Null, ended: false };
        send.send(Ok(vec![])).await.unwrap();
        drop(send);
        assert_eq!((commits.next().await, commits.next().await), (Ok(vec![]), Ok(vec![])));
    }
}
