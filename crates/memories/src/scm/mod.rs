//! The history of repositories: synchronised into our own tables up to a watermark, and turned into memories by a cursor
//! that knows nothing of it. Synchronising never touches the outbox, and a memory that is deferred never holds it up.

pub mod cards;
pub mod git;
pub mod gitlab;
pub mod svn;

mod consume;
mod rows;
mod walk;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::store::{Mode, transact};
use postrider::tx::{BoxFuture, Tx};
use postrider::{Error, Outbox, Result, Timestamp};
use serde::Serialize;
use serde_json::{Value as Json, json};

pub use self::consume::{Consumed, Point};
use self::rows::Stored;
use crate::kv;

/// Records of one transaction.
pub(crate) const BATCH: usize = 500;
/// How often a call over the network is made, in all.
const RETRIES: u32 = 3;
/// Where watermarks are kept.
const WATERMARKS: &str = "scm.sync";

/// Where a history comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Git,
    Svn,
    Gitlab,
}

impl Kind {
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Git => "git",
            Kind::Svn => "svn",
            Kind::Gitlab => "gitlab",
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Kind> {
        let all = [Kind::Git, Kind::Svn, Kind::Gitlab];
        let found = all.into_iter().find(|kind| kind.as_str() == text);
        found.ok_or_else(|| Error::database(format!("`{text}` is no kind of repository")))
    }
}

/// An address as it may be repeated: who writes a password or a token into it has it nowhere else then.
fn without_credentials(address: &str) -> String {
    match address.split_once("://").map(|(scheme, rest)| (scheme, rest.split_once('@'))) {
        Some((scheme, Some((_, host)))) => format!("{scheme}://***@{host}"),
        _ => address.to_owned(),
    }
}

/// What happens to a record that cannot be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// The run ends.
    #[default]
    Strict,
    /// It is left out, and told in the logbook.
    BestEffort,
}

/// What went wrong outside our database.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// Worth another try.
    #[error("{0}")]
    Network(String),
    #[error("{0}")]
    Authentication(String),
    /// Anything else: a wrong path, an answer nobody understands.
    #[error("{0}")]
    Source(String),
}

/// One piece of history.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    Commit {
        sha: String,
        author: String,
        authored_at: Timestamp,
        committed_at: Timestamp,
        message: String,
        parents: Vec<String>,
        stats: Option<Json>,
    },
    Revision {
        revision: i64,
        author: String,
        at: Timestamp,
        message: String,
        paths: Json,
    },
    MergeRequest {
        iid: i64,
        title: String,
        state: String,
        author: String,
        merged_at: Option<Timestamp>,
        raw: Json,
    },
}

/// A history that can be read from where a watermark says.
#[async_trait]
pub trait Source: Send + Sync {
    fn kind(&self) -> Kind;

    /// What makes it the same repository again.
    fn url(&self) -> &str;

    fn name(&self) -> &str;

    /// The name was chosen, and is not merely the last part of its address.
    fn is_named(&self) -> bool;

    /// What is new since the watermark, oldest first.
    async fn open(&self, watermark: Option<&Json>) -> Result<Box<dyn History>, Trouble>;

    /// A change as text, by the repository's own name for it; and where it can be found.
    async fn diff(&self, rev: &str) -> Result<Vec<u8>, Trouble>;

    fn uri(&self, rev: &str) -> String;
}

/// New records, batch by batch.
#[async_trait]
pub trait History: Send {
    /// How many there are in all, where that is known.
    fn total(&self) -> Option<u64> {
        None
    }

    /// The next ones; empty at the end. Asked again after a failure it goes on where it was.
    async fn next(&mut self) -> Result<Vec<Record>, Trouble>;

    /// Where the next run begins, once all was written.
    fn watermark(&self) -> Json;
}

/// What a run did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Synced {
    pub repo_id: i64,
    pub kind: Kind,
    pub seen: u64,
    pub new: u64,
    /// Left out, in best effort.
    pub skipped: u64,
    pub watermark: Json,
}

/// Why a run ended early. The watermark is where it was.
#[derive(Debug, thiserror::Error)]
pub enum Halt {
    #[error(transparent)]
    Store(#[from] Error),
    #[error(transparent)]
    Source(#[from] Trouble),
}

/// A repository, as it is known here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Repo {
    pub repo_id: i64,
    pub kind: Kind,
    pub url: String,
    pub name: String,
    pub target_space: Option<String>,
}

/// How far a repository has come.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RepoStatus {
    #[serde(flatten)]
    pub repo: Repo,
    pub records: i64,
    /// Without their digest yet.
    pub open_patches: i64,
    pub watermark: Option<Json>,
    pub cursor: Option<Json>,
    /// Records no memory was made of yet.
    pub unconsumed: i64,
}

/// What was materialised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Materialised {
    pub materialised: u64,
    pub failed: u64,
}

/// A materialisation that ended early, and what was done before.
#[derive(Debug)]
pub struct Halted {
    pub done: Materialised,
    pub halt: Halt,
}

/// Told of progress: so many done, of so many, if that is known.
pub type Progress<'a> = &'a (dyn Fn(u64, Option<u64>) + Send + Sync);

/// The history of repositories on one outbox's database. Cheap to clone.
#[derive(Clone)]
pub struct Scm {
    pub(crate) outbox: Outbox,
}

impl Scm {
    pub fn new(outbox: Outbox) -> Self {
        Scm { outbox }
    }

    pub(crate) async fn transact<R, F>(&self, mode: Mode, work: F) -> Result<R>
    where
        R: Send + 'static,
        F: for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, Result<R>> + Send + 'static,
    {
        transact(&**self.outbox.store(), mode, work).await
    }

    /// Reads what is new into our tables. The watermark moves when all of it is there; what was written before a failure
    /// stays, and is met again.
    pub async fn sync(
        &self,
        source: &dyn Source,
        strictness: Strictness,
        space: Option<&str>,
        progress: Progress<'_>,
    ) -> Result<Synced, Halt> {
        let repo = self.register(source, space).await?;
        let synced = self.run(source, &repo, strictness, progress).await;
        if let Err(halt) = &synced {
            let what = json!({
                "repo_id": repo.repo_id, "kind": repo.kind, "url": source.url(), "error": halt.to_string(),
            });
            if let Err(error) = self.tell("scm_sync_failed", what).await {
                tracing::error!(%error, "the failure could not be told in the logbook");
            }
        }
        synced
    }

    async fn run(
        &self,
        source: &dyn Source,
        repo: &Repo,
        strictness: Strictness,
        progress: Progress<'_>,
    ) -> Result<Synced, Halt> {
        let key = rows::watermark_key(repo);
        let watermark = self.value(WATERMARKS, &key).await?;
        let mut history = persistently(async || source.open(watermark.as_ref()).await).await?;
        let (mut seen, mut new, mut skipped) = (0, 0, 0);
        loop {
            let mut tries = 1;
            let batch = loop {
                match history.next().await {
                    Err(Trouble::Network(why)) if tries <= RETRIES => {
                        tracing::warn!(why, tries, "the network failed; trying again");
                        tokio::time::sleep(pause(tries)).await;
                        tries += 1;
                    }
                    other => break other?,
                }
            };
            if batch.is_empty() {
                break;
            }
            seen += batch.len() as u64;
            let stored = self.write(repo, batch, strictness).await?;
            new += stored.new;
            skipped += stored.skipped;
            progress(seen, history.total());
        }
        let reached = history.watermark();
        if watermark.as_ref() != Some(&reached) {
            let work = Arc::new((key, reached.clone()));
            let moved = self.transact(Mode::Write, move |tx| {
                let work = work.clone();
                Box::pin(async move { kv::set(tx, WATERMARKS, &work.0, &work.1).await })
            });
            moved.await?;
        }
        Ok(Synced { repo_id: repo.repo_id, kind: repo.kind, seen, new, skipped, watermark: reached })
    }

    /// Writes a batch; in best effort what cannot be written is left out, one by one.
    async fn write(&self, repo: &Repo, batch: Vec<Record>, strictness: Strictness) -> Result<Stored> {
        let batch = Arc::new(batch);
        match self.write_all(repo, batch.clone(), 0..batch.len()).await {
            Err(error) if strictness == Strictness::BestEffort && rows::is_about_the_record(&error) => {}
            other => return other,
        }
        let mut all = Stored::default();
        for (n, record) in batch.iter().enumerate() {
            match self.write_all(repo, batch.clone(), n..n + 1).await {
                Ok(stored) => all.new += stored.new,
                Err(error) if rows::is_about_the_record(&error) => {
                    all.skipped += 1;
                    let rev = record.rev();
                    tracing::warn!(%error, rev, "a record cannot be written and is left out");
                    let what = json!({ "repo_id": repo.repo_id, "rev": rev, "error": error.to_string() });
                    self.tell("scm_record_skipped", what).await?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all)
    }

    async fn write_all(&self, repo: &Repo, batch: Arc<Vec<Record>>, part: Range<usize>) -> Result<Stored> {
        let work = Arc::new((repo.clone(), batch, part));
        self.transact(Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move { rows::insert(tx, &work.0, &work.1[work.2.clone()]).await })
        })
        .await
    }

    async fn register(&self, source: &dyn Source, space: Option<&str>) -> Result<Repo> {
        for (what, text, most) in [("address", source.url(), 500), ("name", source.name(), 200)] {
            if text.is_empty() || text.len() > most || text.contains('\0') {
                return Err(Error::invalid(format!("the {what} of a repository has 1 to {most} bytes")));
            }
        }
        let names = (source.name().to_owned(), source.is_named());
        let work = Arc::new((source.kind(), source.url().to_owned(), names, space.map(str::to_owned)));
        self.transact(Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move { rows::register(tx, work.0, &work.1, (&work.2.0, work.2.1), work.3.as_deref()).await })
        })
        .await
    }

    async fn value(&self, namespace: &'static str, key: &str) -> Result<Option<Json>> {
        let key: Arc<str> = key.into();
        self.transact(Mode::Read, move |tx| {
            let key = key.clone();
            Box::pin(async move { kv::get(tx, namespace, &key).await })
        })
        .await
    }

    /// One line in the logbook.
    async fn tell(&self, event_type: &'static str, payload: Json) -> Result<()> {
        let payload = Arc::new(payload);
        self.transact(Mode::Write, move |tx| {
            let payload = payload.clone();
            Box::pin(async move { rows::tell(tx, event_type, &payload).await })
        })
        .await
    }

    /// All repositories, and how far each has come.
    pub async fn status(&self) -> Result<Vec<RepoStatus>> {
        self.transact(Mode::Read, |tx| Box::pin(rows::status(tx))).await
    }

    pub(crate) async fn repos(&self) -> Result<Vec<Repo>> {
        self.transact(Mode::Read, |tx| Box::pin(rows::repos(tx))).await
    }

    /// Finds out the digests of changes that have none yet; one that fails stays open.
    pub async fn materialise(
        &self,
        source: &dyn Source,
        limit: usize,
        progress: Progress<'_>,
    ) -> Result<Materialised, Halted> {
        let mut done = Materialised::default();
        match self.materialise_into(source, limit, progress, &mut done).await {
            Ok(()) => Ok(done),
            Err(halt) => Err(Halted { done, halt }),
        }
    }

    async fn materialise_into(
        &self,
        source: &dyn Source,
        limit: usize,
        progress: Progress<'_>,
        done: &mut Materialised,
    ) -> Result<(), Halt> {
        let repo = self.register(source, None).await?;
        let mut after = 0;
        while done.materialised + done.failed < limit as u64 {
            let most = BATCH.min(limit - (done.materialised + done.failed) as usize);
            let asked = repo.clone();
            let open = self.transact(Mode::Read, move |tx| {
                let repo = asked.clone();
                Box::pin(async move { rows::open_patches(tx, &repo, after, most).await })
            });
            let open = open.await?;
            let Some((last, _)) = open.last() else { break };
            after = *last;
            for (id, rev) in open {
                match persistently(async || source.diff(&rev).await).await {
                    Ok(patch) => {
                        let found = Arc::new((source.uri(&rev), patch));
                        let written = self.transact(Mode::Write, move |tx| {
                            let found = found.clone();
                            Box::pin(async move { rows::fill_patch(tx, id, &found.0, &found.1).await })
                        });
                        written.await?;
                        done.materialised += 1;
                    }
                    // Neither will let the next one in.
                    Err(trouble @ (Trouble::Authentication(_) | Trouble::Network(_))) => {
                        let what = json!({ "repo_id": repo.repo_id, "rev": rev, "error": trouble.to_string() });
                        self.tell("scm_diff_failed", what).await?;
                        return Err(trouble.into());
                    }
                    Err(trouble) => {
                        tracing::warn!(%trouble, rev, "a change could not be fetched; it stays to be materialised");
                        done.failed += 1;
                    }
                }
                progress(done.materialised + done.failed, None);
            }
        }
        Ok(())
    }
}

fn pause(tries: u32) -> Duration {
    Duration::from_millis(200 << tries)
}

/// Network failures are tried three times more; anything else ends it at once.
async fn persistently<T>(mut call: impl AsyncFnMut() -> Result<T, Trouble>) -> Result<T, Trouble> {
    let mut tries = 1;
    loop {
        match call().await {
            Err(Trouble::Network(why)) if tries <= RETRIES => {
                tracing::warn!(why, tries, "the network failed; trying again");
                tokio::time::sleep(pause(tries)).await;
                tries += 1;
            }
            other => return other,
        }
    }
}

impl Record {
    /// The repository's own name for it.
    pub fn rev(&self) -> String {
        match self {
            Record::Commit { sha, .. } => sha.clone(),
            Record::Revision { revision, .. } => revision.to_string(),
            Record::MergeRequest { iid, .. } => iid.to_string(),
        }
    }
}

/// Text our databases take: no U+0000, and not without end.
pub(crate) fn storable(text: &str, most_bytes: usize) -> String {
    let mut text = text.replace('\0', "\u{FFFD}");
    if text.len() > most_bytes {
        let end = (0..=most_bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// A moment within what all three databases can hold.
pub(crate) fn moment(seconds: i64) -> Timestamp {
    // The years 1001 to 9998.
    Timestamp::from_micros(seconds.clamp(-30_578_000_000, 253_370_000_000).saturating_mul(1_000_000))
}
