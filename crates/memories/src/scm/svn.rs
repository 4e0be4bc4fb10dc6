//! A Subversion repository, read with the `svn` command: its log as XML, page by page.

use std::process::Stdio;
use std::time::Duration;

use async_trait::async_trait;
use postrider::Timestamp;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use serde_json::{Value as Json, json};
use tokio::process::Command;

use super::rows::paths_json;
use super::{BATCH, History, Kind, Record, Source, Trouble, moment, storable};

/// Longest message that is kept, in bytes.
const MOST_MESSAGE: usize = 256 * 1024;
/// Paths named of one revision.
const MOST_PATHS: usize = 200;
/// For one call of `svn`.
const PATIENCE: Duration = Duration::from_secs(120);

pub struct Svn {
    url: String,
    name: String,
    named: bool,
}

impl Svn {
    pub fn new(url: &str, name: Option<String>) -> Result<Self, Trouble> {
        let known = ["svn://", "svn+ssh://", "http://", "https://", "file://"];
        if !known.iter().any(|scheme| url.starts_with(scheme)) {
            let what =
                format!("`{url}` is no address of a Subversion repository, like svn://host/repo or file:///srv/repo");
            return Err(Trouble::Source(what));
        }
        let authority = url.split_once("://").map_or("", |(_, rest)| rest.split('/').next().unwrap_or(""));
        if authority.split_once('@').is_some_and(|(user, _)| user.contains(':')) {
            // It would stand in the database, in evidence, and on the command line of `svn`.
            let what = "the address holds a password; leave it out, and let `svn` keep it (svn auth, ~/.subversion)";
            return Err(Trouble::Source(what.to_owned()));
        }
        let url = url.trim_end_matches('/').to_owned();
        let last = url.rsplit('/').next().unwrap_or("repository").to_owned();
        Ok(Svn { url, named: name.is_some(), name: name.unwrap_or(last) })
    }

    async fn svn(&self, args: &[&str]) -> Result<Vec<u8>, Trouble> {
        let mut command = Command::new("svn");
        // What it says is in English, so that it can be understood here.
        command.args(["--non-interactive"]).args(args).env("LC_ALL", "C.UTF-8").kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let missing = |e: std::io::Error| {
            Trouble::Source(format!("cannot run `svn`: {e}; install Subversion (apt-get install subversion)"))
        };
        let output = tokio::time::timeout(PATIENCE, command.output()).await;
        let output = output.map_err(|_| Trouble::Network(format!("svn did not end within {PATIENCE:?}")))?;
        let output = output.map_err(missing)?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        Err(classify(&String::from_utf8_lossy(&output.stderr)))
    }

    /// The address as of a revision; what it says itself after an `@` is part of it.
    fn at(&self, revision: impl std::fmt::Display) -> String {
        format!("{}@{revision}", self.url)
    }

    async fn head(&self) -> Result<i64, Trouble> {
        let text = self.svn(&["info", "--show-item", "revision", &self.at("HEAD")]).await?;
        let text = String::from_utf8_lossy(&text);
        text.trim().parse().map_err(|_| Trouble::Source(format!("svn info said `{}`", text.trim())))
    }
}

/// By Subversion's own numbers.
fn classify(said: &str) -> Trouble {
    let what: String = said.trim().chars().take(500).collect();
    let has = |codes: &[&str]| codes.iter().any(|code| said.contains(code));
    if has(&["E170001", "E215004", "E175013", "E170011"]) {
        return Trouble::Authentication(what);
    }
    if has(&[
        "E170013", "E175002", "E175012", "E210002", "E210005", "E120108", "E000104", "E000110", "E000111", "E670002",
    ]) {
        return Trouble::Network(what);
    }
    Trouble::Source(what)
}

struct Revisions {
    svn: Svn,
    next: i64,
    head: i64,
    first: i64,
    /// Revisions asked for at once.
    page: usize,
}

#[async_trait]
impl History for Revisions {
    fn total(&self) -> Option<u64> {
        Some((self.head + 1 - self.first).max(0) as u64)
    }

    async fn next(&mut self) -> Result<Vec<Record>, Trouble> {
        if self.next > self.head {
            return Ok(vec![]);
        }
        let (range, most) = (format!("{}:{}", self.next, self.head), self.page.to_string());
        let at = self.svn.at(self.head);
        let asked = self.svn.svn(&["log", "--xml", "--verbose", "--limit", &most, "--revision", &range, &at]).await;
        if matches!(&asked, Err(Trouble::Network(_))) {
            // Perhaps it was too much at once.
            self.page = (self.page / 4).max(1);
        }
        let records = parse(&asked?)?;
        let last = records.last().and_then(|record| record.rev().parse::<i64>().ok());
        self.next = last.filter(|_| records.len() >= self.page).map_or(self.head + 1, |last| last + 1);
        Ok(records)
    }

    fn watermark(&self) -> Json {
        json!({ "last_rev": self.head })
    }
}

#[async_trait]
impl Source for Svn {
    fn kind(&self) -> Kind {
        Kind::Svn
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
        let last = watermark.and_then(|watermark| watermark.get("last_rev")?.as_i64()).unwrap_or(0);
        let head = self.head().await?;
        let svn = Svn { url: self.url.clone(), name: self.name.clone(), named: self.named };
        Ok(Box::new(Revisions { svn, next: last + 1, head: head.max(last), first: last + 1, page: BATCH }))
    }

    async fn diff(&self, rev: &str) -> Result<Vec<u8>, Trouble> {
        self.svn(&["diff", "--change", rev, &self.at(rev)]).await
    }

    fn uri(&self, rev: &str) -> String {
        format!("{}?c={rev}", self.url)
    }
}

/// One `<logentry>` while it is being read.
#[derive(Default)]
struct Entry {
    revision: i64,
    author: String,
    date: String,
    message: String,
    paths: Vec<Json>,
    count: usize,
    action: String,
}

impl Entry {
    fn record(self) -> Record {
        let at = self.date.parse::<Timestamp>().unwrap_or_else(|_| moment(0));
        let author = if self.author.is_empty() { "(no author)".to_owned() } else { self.author };
        Record::Revision {
            revision: self.revision,
            author: storable(&author, 1000),
            at,
            message: storable(&self.message, MOST_MESSAGE),
            paths: paths_json(self.count, self.paths),
        }
    }
}

fn attribute(tag: &BytesStart<'_>, name: &str) -> Option<String> {
    let found = tag.try_get_attribute(name).ok().flatten()?;
    Some(found.value.into_owned())
}

fn parse(xml: &[u8]) -> Result<Vec<Record>, Trouble> {
    let strange = |e: &dyn std::fmt::Display| Trouble::Source(format!("the log of Subversion cannot be read: {e}"));
    let xml = String::from_utf8_lossy(xml);
    let mut reader = Reader::from_str(&xml);
    let mut records = Vec::new();
    let (mut entry, mut text) = (None::<Entry>, String::new());
    loop {
        match reader.read_event().map_err(|e| strange(&e))? {
            Event::Eof => return Ok(records),
            Event::Start(tag) => {
                text.clear();
                match tag.name().as_ref() {
                    "logentry" => {
                        let revision = attribute(&tag, "revision").and_then(|text| text.parse().ok());
                        let revision = revision.ok_or_else(|| strange(&"an entry without a revision"))?;
                        entry = Some(Entry { revision, ..Entry::default() });
                    }
                    "path" => {
                        if let Some(entry) = &mut entry {
                            entry.action = attribute(&tag, "action").unwrap_or_default();
                        }
                    }
                    _ => {}
                }
            }
            Event::Text(piece) => text.push_str(&piece),
            Event::CData(piece) => text.push_str(&piece),
            Event::GeneralRef(name) => {
                text.push_str(&entity(&name).ok_or_else(|| strange(&format!("&{};", &*name)))?);
            }
            Event::End(tag) => {
                let Some(current) = &mut entry else { continue };
                match tag.name().as_ref() {
                    "author" => current.author = std::mem::take(&mut text),
                    "date" => current.date = std::mem::take(&mut text),
                    "msg" => current.message = std::mem::take(&mut text),
                    "path" => {
                        current.count += 1;
                        if current.paths.len() < MOST_PATHS {
                            let path = storable(&text, 1000);
                            current.paths.push(json!({ "path": path, "action": current.action }));
                        }
                        text.clear();
                    }
                    "logentry" => records.extend(entry.take().map(Entry::record)),
                    _ => {}
                }
            }
            _ => {}
        }
    }
}

fn entity(name: &str) -> Option<String> {
    let known = match name {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        _ => {
            let code = name.strip_prefix('#')?;
            let code = match code.strip_prefix('x') {
                Some(hex) => u32::from_str_radix(hex, 16).ok()?,
                None => code.parse().ok()?,
            };
            char::from_u32(code)?
        }
    };
    Some(known.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_a_password_is_not_kept() {
        let refused = Svn::new("https://ann:secret@svn.example/repo", None).err().unwrap().to_string();
        assert!(refused.contains("password") && !refused.contains("secret"), "{refused}");
        assert!(Svn::new("svn+ssh://ann@svn.example/repo", None).is_ok());
        assert!(Svn::new("file:///srv/a:b@c/repo", None).is_ok());
    }

    #[test]
    fn a_log_is_read() {
        let xml = r#"<?xml version="1.0" encoding="UTF-8"?>
<log>
<logentry revision="7"><author>ann &amp; bob</author><date>2026-01-02T03:04:05.678901Z</date>
<paths><path action="M" kind="file">/trunk/a &lt;b&gt;.txt</path><path action="A" kind="dir">/trunk/天</path></paths>
<msg>first line
&#x5929; second</msg></logentry>
<logentry revision="8"><date>2026-01-02T03:04:06.000000Z</date><msg></msg></logentry>
</log>"#;
        let records = parse(xml.as_bytes()).unwrap();
        let Record::Revision { revision, author, message, paths, at } = &records[0] else { panic!() };
        assert_eq!((*revision, author.as_str(), message.as_str()), (7, "ann & bob", "first line\n天 second"));
        assert_eq!(paths["paths"][0]["path"], "/trunk/a <b>.txt");
        assert_eq!((&paths["count"], at.to_string().as_str()), (&json!(2), "2026-01-02T03:04:05.678901Z"));
        let Record::Revision { author, message, .. } = &records[1] else { panic!() };
        assert_eq!((author.as_str(), message.as_str()), ("(no author)", ""));
        assert!(parse(b"<log><logentry></logentry></log>").is_err());
    }

    #[test]
    fn what_svn_says_is_understood() {
        assert!(matches!(classify("svn: E170001: Authentication failed"), Trouble::Authentication(_)));
        assert!(matches!(
            classify("svn: E170013: Unable to connect\nsvn: E000111: Can't connect"),
            Trouble::Network(_)
        ));
        assert!(matches!(classify("svn: E170000: URL doesn't exist"), Trouble::Source(_)));
    }
}
