//! Merge requests of a GitLab project, by its REST API: page by page in the order they were changed, waiting when it says
//! that it was asked too often.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use http_body_util::Full;
use postrider::Timestamp;
use postrider::couriers::exchange::{Answer, Exchange, System, retry_after};
use serde_json::{Value as Json, json};
use url::Url;

use super::{History, Kind, Record, Source, Trouble, storable};

const PER_PAGE: usize = 100;
/// Most bytes of one page.
const MOST_BODY: usize = 64 << 20;
/// Longest wait when it was asked too often, and how often that is borne in a row.
const LONGEST_WAIT: Duration = Duration::from_secs(120);
const MOST_WAITS: u32 = 20;
/// Before the last change that was seen: what was changed in the same moment is met again.
const OVERLAP: Duration = Duration::from_secs(1);
/// Between two runs: a change carries the time it was begun at, and may have been committed much later. What is met again
/// unchanged is left alone.
const LATE: Duration = Duration::from_secs(300);

pub struct Gitlab {
    client: Arc<Client>,
    /// The project's own page.
    url: String,
    name: String,
    named: bool,
}

struct Client {
    exchange: Exchange,
    /// `…/api/v4/projects/GROUP%2FPROJECT`.
    api: String,
    token: Option<HeaderValue>,
    timeout: Duration,
}

impl Gitlab {
    /// `url`: the project's page, like `https://gitlab.example/group/project`.
    pub fn new(url: &str, token: Option<&str>, name: Option<String>) -> Result<Self, Trouble> {
        let shown = super::without_credentials(url);
        let wrong = || Trouble::Source(format!("`{shown}` is no project, like https://gitlab.example/group/project"));
        let parsed = Url::parse(url).map_err(|_| wrong())?;
        let project = parsed.path().trim_matches('/').trim_end_matches(".git").to_owned();
        if !matches!(parsed.scheme(), "http" | "https") || project.is_empty() || !parsed.username().is_empty() {
            return Err(wrong());
        }
        let origin = parsed.origin().ascii_serialization();
        let encoded: String = url::form_urlencoded::byte_serialize(project.as_bytes()).collect();
        let token = token.map(|token| HeaderValue::from_str(token.trim())).transpose();
        let token = token.map_err(|_| Trouble::Authentication("the token cannot stand in a header".to_owned()))?;
        let timeout = Duration::from_secs(30);
        let exchange = Exchange::new(Arc::new(System), timeout).map_err(|e| Trouble::Source(e.to_string()))?;
        let api = format!("{origin}/api/v4/projects/{encoded}");
        let last = project.rsplit('/').next().unwrap_or("project").to_owned();
        let client = Arc::new(Client { exchange, api, token, timeout });
        Ok(Gitlab { client, url: format!("{origin}/{project}"), named: name.is_some(), name: name.unwrap_or(last) })
    }
}

impl Client {
    async fn get(&self, path: &str) -> Result<(HeaderMap, Vec<u8>), Trouble> {
        let mut waits = 0;
        loop {
            let mut request =
                Request::get(format!("{}{path}", self.api)).header("accept", "application/json, text/plain");
            if let Some(token) = &self.token {
                request = request.header("private-token", token.clone());
            }
            let request = request.body(Full::new(Bytes::new())).map_err(|e| Trouble::Source(e.to_string()))?;
            let (status, headers, body, whole) = match self.exchange.ask(request, self.timeout, MOST_BODY).await {
                Answer::Answered { status, headers, body, whole, .. } => (status.as_u16(), headers, body, whole),
                Answer::Unanswered { code, cause, .. } => return Err(Trouble::Network(format!("{code}: {cause}"))),
            };
            let said = || String::from_utf8_lossy(&body).chars().take(300).collect::<String>();
            match status {
                200..=299 if whole => return Ok((headers, body)),
                200..=299 => return Err(Trouble::Network("the answer broke off".to_owned())),
                401 | 403 => return Err(Trouble::Authentication(format!("GitLab answered {status}: {}", said()))),
                429 if waits < MOST_WAITS => {
                    waits += 1;
                    let wait = retry_after(&headers).unwrap_or(Duration::from_secs(10)).min(LONGEST_WAIT);
                    tracing::info!(seconds = wait.as_secs(), "GitLab was asked too often; waiting as it says");
                    tokio::time::sleep(wait).await;
                }
                408 | 429 | 500..=599 => return Err(Trouble::Network(format!("GitLab answered {status}: {}", said()))),
                _ => return Err(Trouble::Source(format!("GitLab answered {status}: {}", said()))),
            }
        }
    }
}

/// Pages by the time of the last change, not by number: what is changed meanwhile moves to the end and shifts nothing.
struct MergeRequests {
    client: Arc<Client>,
    since: Option<String>,
    /// Counts only while all of a page was changed in the same moment.
    page: usize,
    ended: bool,
    /// What was read since `since`, so that the overlap is not read twice.
    seen: HashSet<(i64, String)>,
    /// The newest change seen.
    newest: Option<String>,
}

/// A little before a moment.
fn before(moment: &str) -> String {
    earlier(moment, OVERLAP)
}

fn earlier(moment: &str, by: Duration) -> String {
    moment.parse::<Timestamp>().map_or_else(|_| moment.to_owned(), |at| at.minus(by).to_string())
}

#[async_trait]
impl History for MergeRequests {
    async fn next(&mut self) -> Result<Vec<Record>, Trouble> {
        loop {
            if self.ended {
                return Ok(vec![]);
            }
            let since = self.since.as_ref().map_or(String::new(), |since| {
                format!("&updated_after={}", url::form_urlencoded::byte_serialize(since.as_bytes()).collect::<String>())
            });
            let path = format!(
                "/merge_requests?scope=all&state=all&order_by=updated_at&sort=asc&per_page={PER_PAGE}&page={}{since}",
                self.page
            );
            let (_, body) = self.client.get(&path).await?;
            let strange = |e: serde_json::Error| Trouble::Source(format!("GitLab's answer cannot be read: {e}"));
            let found: Vec<Json> = serde_json::from_slice(&body).map_err(strange)?;
            let (full, last) = (found.len() >= PER_PAGE, found.last().and_then(|mr| mr.get("updated_at")?.as_str()));
            let next = last.map(before);
            self.ended = !full;
            if next > self.since {
                (self.since, self.page) = (next, 1);
            } else {
                self.page += 1;
            }
            let records = self.records(found)?;
            if !records.is_empty() || self.ended {
                return Ok(records);
            }
        }
    }

    fn watermark(&self) -> Json {
        let newest = self.newest.clone().or_else(|| self.since.clone());
        json!({ "updated_after": newest })
    }
}

impl MergeRequests {
    fn records(&mut self, found: Vec<Json>) -> Result<Vec<Record>, Trouble> {
        let mut records = Vec::with_capacity(found.len());
        for raw in found {
            let text = |name: &str| raw.get(name).and_then(Json::as_str).map(str::to_owned);
            let Some(iid) = raw.get("iid").and_then(Json::as_i64) else {
                return Err(Trouble::Source("a merge request of GitLab has no iid".to_owned()));
            };
            let updated_at = text("updated_at").unwrap_or_default();
            if !self.seen.insert((iid, updated_at.clone())) {
                continue;
            }
            self.newest = Some(updated_at).max(self.newest.take());
            let author = raw.get("author").and_then(|author| author.get("username")?.as_str()).unwrap_or("unknown");
            records.push(Record::MergeRequest {
                iid,
                title: storable(&text("title").unwrap_or_default(), 2000),
                state: storable(&text("state").unwrap_or_default(), 32),
                author: storable(author, 1000),
                merged_at: text("merged_at").and_then(|at| at.parse::<Timestamp>().ok()),
                raw: kept(&raw),
            });
        }
        let since = self.since.clone().unwrap_or_default();
        self.seen.retain(|(_, at)| before(at) >= since);
        Ok(records)
    }
}

/// What is kept of a merge request: what says something about it, not what changes with every look.
fn kept(raw: &Json) -> Json {
    let names = [
        "iid",
        "title",
        "description",
        "state",
        "created_at",
        "updated_at",
        "merged_at",
        "closed_at",
        "source_branch",
        "target_branch",
        "labels",
        "sha",
        "merge_commit_sha",
        "squash_commit_sha",
        "web_url",
        "draft",
    ];
    let mut kept = serde_json::Map::new();
    for name in names {
        if let Some(value) = raw.get(name) {
            let value = match value {
                Json::String(text) => json!(storable(text, 64 * 1024)),
                other => other.clone(),
            };
            kept.insert(name.to_owned(), value);
        }
    }
    for who in ["author", "merge_user"] {
        if let Some(name) = raw.get(who).and_then(|user| user.get("username")) {
            kept.insert(who.to_owned(), name.clone());
        }
    }
    Json::Object(kept)
}

#[async_trait]
impl Source for Gitlab {
    fn kind(&self) -> Kind {
        Kind::Gitlab
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn is_named(&self) -> bool {
        self.named
    }

    async fn open(&self, watermark: Option<&Json>) -> Result<Box<dyn History>, Trouble> {
        let last = watermark.and_then(|watermark| watermark.get("updated_after")?.as_str()).map(str::to_owned);
        Ok(Box::new(MergeRequests {
            client: self.client.clone(),
            since: last.as_deref().map(|last| earlier(last, LATE)),
            page: 1,
            ended: false,
            seen: HashSet::new(),
            newest: last,
        }))
    }

    async fn diff(&self, rev: &str) -> Result<Vec<u8>, Trouble> {
        Ok(self.client.get(&format!("/merge_requests/{rev}/raw_diffs")).await?.1)
    }

    fn uri(&self, rev: &str) -> String {
        format!("{}/-/merge_requests/{rev}.diff", self.url)
    }
}
