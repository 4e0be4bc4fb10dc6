//! The SQL of repositories and their history.

use postrider::error::{Class, Kind as ErrorKind};
use postrider::message::{hex, sha256};
use postrider::tx::{Dialect, Row, Tx, Value, for_update};
use postrider::{Error, Result};
use serde_json::{Value as Json, json};

use super::consume::{self, CURSORS};
use super::{Kind, Record, Repo, RepoStatus, WATERMARKS};
use crate::kv;

/// What became of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stored {
    pub new: u64,
    pub skipped: u64,
}

/// Rows of one statement.
const CHUNK: usize = 100;

/// A column: its name, and how PostgreSQL is told its type.
type Column = (&'static str, &'static str);

pub(super) fn watermark_key(repo: &Repo) -> String {
    format!("{}_cursor:{}", repo.kind.as_str(), repo.repo_id)
}

/// The table of a kind, and the column with the repository's own names.
pub(super) fn table(kind: Kind) -> (&'static str, &'static str) {
    match kind {
        Kind::Git => ("scm_git_commits", "sha"),
        Kind::Svn => ("scm_svn_revisions", "revision"),
        Kind::Gitlab => ("scm_merge_requests", "iid"),
    }
}

/// Would another record have been written?
pub(super) fn is_about_the_record(error: &Error) -> bool {
    error.class() != Class::Retryable && error.kind != ErrorKind::Schema
}

fn repo(row: &Row) -> Result<Repo> {
    Ok(Repo {
        repo_id: row.int(0)?,
        kind: Kind::parse(&row.text(1)?)?,
        url: row.text(2)?,
        name: row.text(3)?,
        target_space: row.opt_text(4)?,
    })
}

const REPO: &str = "repo_id, kind, url, name, target_space";

/// The repository of this address, made if need be; a space that is named is its space from now on.
pub(super) async fn register(
    tx: &mut (dyn Tx + Send),
    kind: Kind,
    url: &str,
    (name, chosen): (&str, bool),
    space: Option<&str>,
) -> Result<Repo> {
    let mut params: Vec<Value> = vec![kind.as_str().into(), url.into(), name.into()];
    let created = tx.now().plus(0, &mut params);
    let (verb, tail) = match tx.dialect() {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT (kind, url) DO NOTHING"),
    };
    let sql = format!("{verb} INTO scm_repos (kind, url, name, created_at) VALUES (?, ?, ?, {created}){tail}");
    tx.execute(&sql, &params).await?;
    if chosen {
        let named = "UPDATE scm_repos SET name = ? WHERE kind = ? AND url = ?";
        tx.execute(named, &[name.into(), kind.as_str().into(), url.into()]).await?;
    }
    if let Some(space) = space {
        let sql = "UPDATE scm_repos SET target_space = ? WHERE kind = ? AND url = ?";
        tx.execute(sql, &[space.into(), kind.as_str().into(), url.into()]).await?;
    }
    let sql = format!("SELECT {REPO} FROM scm_repos WHERE kind = ? AND url = ?");
    let rows = tx.query(&sql, &[kind.as_str().into(), url.into()]).await?;
    repo(rows.first().ok_or_else(|| Error::database("a repository without a row"))?)
}

pub(super) async fn repos(tx: &mut (dyn Tx + Send)) -> Result<Vec<Repo>> {
    let sql = format!("SELECT {REPO} FROM scm_repos ORDER BY repo_id");
    tx.query(&sql, &[]).await?.iter().map(repo).collect()
}

/// Writes records that are not there yet. One batch of a repository at a time, so that ids grow in the order of commits.
pub(super) async fn insert(tx: &mut (dyn Tx + Send), repo: &Repo, records: &[Record]) -> Result<Stored> {
    let lock = format!("SELECT repo_id FROM scm_repos WHERE repo_id = ?{}", for_update(tx.dialect()));
    tx.query(&lock, &[repo.repo_id.into()]).await?;
    let new = match repo.kind {
        Kind::Gitlab => merge_requests(tx, repo, records).await?,
        Kind::Git => {
            let columns = [
                ("repo_id", "bigint"),
                ("sha", "text"),
                ("author", "text"),
                ("authored_at", "timestamptz"),
                ("committed_at", "timestamptz"),
                ("message", "text"),
                ("parents", "text"),
                ("stats_json", "text"),
            ];
            insert_new(tx, "scm_git_commits", "(repo_id, sha)", &columns, &values(repo, records)).await?
        }
        Kind::Svn => {
            let columns = [
                ("repo_id", "bigint"),
                ("revision", "bigint"),
                ("author", "text"),
                ("at", "timestamptz"),
                ("message", "text"),
                ("paths_json", "text"),
            ];
            insert_new(tx, "scm_svn_revisions", "(repo_id, revision)", &columns, &values(repo, records)).await?
        }
    };
    let patches: Vec<Vec<Value>> = records
        .iter()
        .map(|record| vec![repo.kind.as_str().into(), source_id(repo, &record.rev()).into(), "".into()])
        .collect();
    let columns = [("source_type", "text"), ("source_id", "text"), ("uri", "text")];
    insert_new(tx, "scm_patch_blobs", "(source_type, source_id)", &columns, &patches).await?;
    Ok(Stored { new, skipped: 0 })
}

fn values(repo: &Repo, records: &[Record]) -> Vec<Vec<Value>> {
    let row = |record: &Record| -> Option<Vec<Value>> {
        let id = Value::from(repo.repo_id);
        Some(match record {
            Record::Commit { sha, author, authored_at, committed_at, message, parents, stats } => vec![
                id,
                sha.into(),
                author.into(),
                (*authored_at).into(),
                (*committed_at).into(),
                message.into(),
                parents.join(" ").into(),
                stats.as_ref().map(Json::to_string).into(),
            ],
            Record::Revision { revision, author, at, message, paths } => {
                vec![id, (*revision).into(), author.into(), (*at).into(), message.into(), paths.to_string().into()]
            }
            Record::MergeRequest { .. } => return None,
        })
    };
    records.iter().filter_map(row).collect()
}

async fn insert_new(
    tx: &mut (dyn Tx + Send),
    table: &str,
    key: &str,
    columns: &[Column],
    rows: &[Vec<Value>],
) -> Result<u64> {
    let dialect = tx.dialect();
    let names: Vec<&str> = columns.iter().map(|column| column.0).collect();
    let marks: Vec<String> = columns
        .iter()
        .map(|(_, kind)| if dialect == Dialect::Postgres { format!("?::{kind}") } else { "?".to_owned() })
        .collect();
    let row = format!("({})", marks.join(", "));
    let tail = match dialect {
        // Not IGNORE, which leaves out what cannot be written without a word.
        Dialect::Mysql => format!("ON DUPLICATE KEY UPDATE {0} = {table}.{0}", names[0]),
        _ => format!("ON CONFLICT {key} DO NOTHING"),
    };
    let mut new = 0;
    for part in rows.chunks(CHUNK) {
        let list = vec![row.as_str(); part.len()].join(", ");
        let sql = format!("INSERT INTO {table} ({}) VALUES {list} {tail}", names.join(", "));
        let before = if dialect == Dialect::Mysql { known(tx, table, &names, part).await? } else { 0 };
        let written = tx.execute(&sql, &part.concat()).await?;
        // MySQL counts what was there, too.
        new += if dialect == Dialect::Mysql { part.len() as u64 - before } else { written };
    }
    Ok(new)
}

/// How many of these rows are there already; the first two columns are their key.
async fn known(tx: &mut (dyn Tx + Send), table: &str, names: &[&str], rows: &[Vec<Value>]) -> Result<u64> {
    let Some(first) = rows.first() else { return Ok(0) };
    let marks = vec!["?"; rows.len()].join(", ");
    let sql = format!("SELECT COUNT(*) FROM {table} WHERE {} = ? AND {} IN ({marks})", names[0], names[1]);
    let params: Vec<Value> = std::iter::once(&first[0]).chain(rows.iter().map(|row| &row[1])).cloned().collect();
    Ok(tx.query(&sql, &params).await?.first().map_or(Ok(0), |row| row.int(0))? as u64)
}

/// A merge request changes: what is new of it is a new row, so that it is remembered anew.
async fn merge_requests(tx: &mut (dyn Tx + Send), repo: &Repo, records: &[Record]) -> Result<u64> {
    let mut new = 0;
    for record in records {
        let Record::MergeRequest { iid, title, state, author, merged_at, raw } = record else { continue };
        let known = "SELECT raw_json FROM scm_merge_requests WHERE repo_id = ? AND iid = ?";
        let rows = tx.query(known, &[repo.repo_id.into(), (*iid).into()]).await?;
        let raw = raw.to_string();
        match rows.first() {
            Some(row) if row.text(0)? == raw => continue,
            Some(_) => {
                let gone = "DELETE FROM scm_merge_requests WHERE repo_id = ? AND iid = ?";
                tx.execute(gone, &[repo.repo_id.into(), (*iid).into()]).await?;
                // Its change may be another now.
                let reopen = "UPDATE scm_patch_blobs SET uri = '', sha256 = NULL, size = NULL WHERE source_type = 'gitlab' AND source_id = ?";
                tx.execute(reopen, &[source_id(repo, &iid.to_string()).into()]).await?;
            }
            None => {}
        }
        let time = if tx.dialect() == Dialect::Postgres { "?::timestamptz" } else { "?" };
        let sql = format!(
            "INSERT INTO scm_merge_requests (repo_id, iid, title, state, author, merged_at, raw_json) VALUES (?, ?, ?, ?, ?, {time}, ?)"
        );
        let params: [Value; 7] = [
            repo.repo_id.into(),
            (*iid).into(),
            title.into(),
            state.into(),
            author.into(),
            (*merged_at).into(),
            raw.into(),
        ];
        new += tx.execute(&sql, &params).await?;
    }
    Ok(new)
}

pub(super) fn source_id(repo: &Repo, rev: &str) -> String {
    format!("{}:{rev}", repo.repo_id)
}

/// Changes of a repository without their digest: the row, and the repository's name for it.
pub(super) async fn open_patches(
    tx: &mut (dyn Tx + Send),
    repo: &Repo,
    after: i64,
    limit: usize,
) -> Result<Vec<(i64, String)>> {
    let prefix = source_id(repo, "");
    let sql = format!(
        "SELECT id, source_id FROM scm_patch_blobs WHERE uri = '' AND id > ? AND source_type = ? AND source_id LIKE ? ORDER BY id LIMIT {limit}"
    );
    let rows = tx.query(&sql, &[after.into(), repo.kind.as_str().into(), format!("{prefix}%").into()]).await?;
    let open = |row: &Row| Ok((row.int(0)?, row.text(1)?.trim_start_matches(prefix.as_str()).to_owned()));
    rows.iter().map(open).collect()
}

pub(super) async fn fill_patch(tx: &mut (dyn Tx + Send), id: i64, uri: &str, patch: &[u8]) -> Result<()> {
    let sql = "UPDATE scm_patch_blobs SET uri = ?, sha256 = ?, size = ? WHERE id = ? AND uri = ''";
    let params: [Value; 4] = [uri.into(), hex(&sha256(patch)).into(), (patch.len() as i64).into(), id.into()];
    tx.execute(sql, &params).await.map(drop)
}

pub(super) async fn tell(tx: &mut (dyn Tx + Send), event_type: &str, payload: &Json) -> Result<()> {
    let mut params: Vec<Value> = vec![event_type.into(), payload.to_string().into()];
    let now = tx.now().plus(0, &mut params);
    let json = if tx.dialect() == Dialect::Postgres { "?::text::jsonb" } else { "?" };
    let sql = format!(
        "INSERT INTO logbook_events (event_type, source, payload_json, created_at) VALUES (?, 'scm', {json}, {now})"
    );
    tx.execute(&sql, &params).await.map(drop)
}

pub(super) async fn status(tx: &mut (dyn Tx + Send)) -> Result<Vec<RepoStatus>> {
    let mut all = Vec::new();
    for repo in repos(tx).await? {
        let (table, _) = table(repo.kind);
        let count = |rows: &[Row]| rows.first().map_or(Ok(0), |row| row.int(0));
        let records = format!("SELECT COUNT(*) FROM {table} WHERE repo_id = ?");
        let records = count(&tx.query(&records, &[repo.repo_id.into()]).await?)?;
        let open = "SELECT COUNT(*) FROM scm_patch_blobs WHERE uri = '' AND source_type = ? AND source_id LIKE ?";
        let prefix = format!("{}%", source_id(&repo, ""));
        let open_patches = count(&tx.query(open, &[repo.kind.as_str().into(), prefix.into()]).await?)?;
        let watermark = kv::get(tx, WATERMARKS, &watermark_key(&repo)).await?;
        let cursor = kv::get(tx, CURSORS, &consume::cursor_key(&repo)).await?;
        let left = format!("SELECT COUNT(*) FROM {table} WHERE repo_id = ? AND id > ?");
        let after = consume::position(cursor.as_ref());
        let unconsumed = count(&tx.query(&left, &[repo.repo_id.into(), after.into()]).await?)?;
        all.push(RepoStatus { repo, records, open_patches, watermark, cursor, unconsumed });
    }
    Ok(all)
}

/// Paths as they are kept, with a limit.
pub(super) fn paths_json(count: usize, paths: Vec<Json>) -> Json {
    json!({ "count": count, "paths": paths })
}
