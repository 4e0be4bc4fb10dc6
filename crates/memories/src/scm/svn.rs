//! A Subversion repository, read with the `svn` command: its log as XML, page by page.

use std::cell::Cell;
use std::io::{BufReader, Read};
use std::process::Stdio;
use std::rc::Rc;
use std::time::Duration;

use async_trait::async_trait;
use postrider::Timestamp;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use serde_json::{Value as Json, json};

use super::rows::paths_json;
use super::{BATCH, History, Kind, Record, Source, Trouble, moment, storable};

/// Longest message that is kept, in bytes.
const MOST_MESSAGE: usize = 256 * 1024;
/// Paths named of one revision.
const MOST_PATHS: usize = 200;
/// Most bytes of a message or a path, as it is printed.
const MOST_PIECE: usize = 16 << 20;
/// Most bytes of a difference, and of what `svn` says of a failure.
const MOST_PRINTED: u64 = 64 << 20;
const MOST_SAID: u64 = 64 << 10;
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
        let has_password = |user: &str| user.contains(':') || user.to_ascii_lowercase().contains("%3a");
        if authority.split_once('@').is_some_and(|(user, _)| has_password(user)) {
            // It would stand in the database, in evidence, and on the command line of `svn`.
            let what = "the address holds a password; leave it out, and let `svn` keep it (svn auth, ~/.subversion)";
            return Err(Trouble::Source(what.to_owned()));
        }
        if url.contains('?') {
            let what = "the address of a repository has no `?`; what follows it would be kept, and shown";
            return Err(Trouble::Source(what.to_owned()));
        }
        let url = url.trim_end_matches('/').to_owned();
        let last = url.rsplit('/').next().unwrap_or("repository").to_owned();
        Ok(Svn { url, named: name.is_some(), name: name.unwrap_or(last) })
    }

    /// All that a command prints, within a bound.
    async fn svn(&self, args: &[&str]) -> Result<Vec<u8>, Trouble> {
        let whole = |printed: &mut dyn Read| {
            let mut bytes = Vec::new();
            printed.take(MOST_PRINTED + 1).read_to_end(&mut bytes).map_err(|e| Trouble::Network(e.to_string()))?;
            match bytes.len() as u64 > MOST_PRINTED {
                true => Err(Trouble::Source(format!("svn printed more than {MOST_PRINTED} bytes"))),
                false => Ok(bytes),
            }
        };
        self.run(args, whole).await
    }

    /// Runs a command and reads what it prints while it prints: a log may be larger than this machine's memory.
    async fn run<T, R>(&self, args: &[&str], read: R) -> Result<T, Trouble>
    where
        T: Send + 'static,
        R: FnOnce(&mut dyn Read) -> Result<T, Trouble> + Send + 'static,
    {
        let mut command = std::process::Command::new("svn");
        // What it says is in English, so that it can be understood here.
        command.args(["--non-interactive"]).args(args).env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Killed(command.spawn().map_err(|e| {
            Trouble::Source(format!("cannot run `svn`: {e}; install Subversion (apt-get install subversion)"))
        })?);
        let (printed, said) = (child.0.stdout.take(), child.0.stderr.take());
        let reading = tokio::task::spawn_blocking(move || printed.map(|mut printed| read(&mut printed)));
        let hearing = tokio::task::spawn_blocking(move || {
            let mut text = Vec::new();
            let _ = said.map(|said| said.take(MOST_SAID).read_to_end(&mut text));
            text
        });
        let strange = |what: &dyn std::fmt::Display| Trouble::Source(format!("svn cannot be read: {what}"));
        // Whoever gives up kills it, and so ends both readers.
        let ended = tokio::time::timeout(PATIENCE, async {
            let read = reading.await.map_err(|e| strange(&e))?.ok_or_else(|| strange(&"no output"))?;
            if read.is_err() {
                child.end();
            }
            let said = hearing.await.map_err(|e| strange(&e))?;
            Ok::<_, Trouble>((read, said))
        });
        let (read, said) =
            ended.await.map_err(|_| Trouble::Network(format!("svn did not end within {PATIENCE:?}")))??;
        // It has closed its output: its end is near.
        let status = tokio::task::spawn_blocking(move || child.0.wait()).await.map_err(|e| strange(&e))?;
        match (status.map_err(|e| strange(&e))?.success(), read) {
            (true, read) => read,
            // What was cut off by its failure is no fault of its own.
            (false, _) if !said.is_empty() => Err(classify(&String::from_utf8_lossy(&said))),
            (false, Err(trouble)) => Err(trouble),
            (false, Ok(_)) => Err(strange(&"it failed without a word")),
        }
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
        let log = ["log", "--xml", "--verbose", "--limit", &most, "--revision", &range, &at];
        let asked = self.svn.run(&log, |printed| parse(printed)).await;
        if matches!(&asked, Err(Trouble::Network(_))) {
            // Perhaps it was too much at once.
            self.page = (self.page / 4).max(1);
        }
        let records = asked?;
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

/// A child that does not outlive whoever runs it.
struct Killed(std::process::Child);

impl Killed {
    fn end(&mut self) {
        let _ = self.0.kill();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // One that has ended is not there to be killed.
        self.end();
        let _ = self.0.wait();
    }
}

/// Counts what is read, and ends where one piece of a log is larger than any that is honest.
struct Metered<R> {
    inner: R,
    since: Rc<Cell<usize>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.since.set(self.since.get() + read);
        if self.since.get() > MOST_PIECE {
            return Err(std::io::Error::other(format!("one piece of it is larger than {MOST_PIECE} bytes")));
        }
        Ok(read)
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

/// Reads a log as it comes: of one entry, what is kept of it is all that is held.
fn parse(xml: impl Read) -> Result<Vec<Record>, Trouble> {
    let strange = |e: &dyn std::fmt::Display| Trouble::Source(format!("the log of Subversion cannot be read: {e}"));
    let since = Rc::new(Cell::new(0));
    let mut reader = Reader::from_reader(BufReader::new(Metered { inner: xml, since: since.clone() }));
    let mut buffer = Vec::new();
    let mut records = Vec::new();
    let (mut entry, mut text) = (None::<Entry>, String::new());
    loop {
        buffer.clear();
        since.set(0);
        match reader.read_event_into(&mut buffer).map_err(|e| strange(&e))? {
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
            // What is longer than is kept of it need not be held.
            Event::Text(_) | Event::CData(_) | Event::GeneralRef(_) if text.len() > MOST_MESSAGE => {}
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
        for bad in ["https://ann%3Asecret@svn.example/repo", "https://svn.example/repo?token=secret"] {
            assert!(Svn::new(bad, None).is_err_and(|e| !e.to_string().contains("secret")), "{bad}");
        }
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
        assert!(parse(&b"<log><logentry></logentry></log>"[..]).is_err());
    }

    /// Thirty megabytes of one revision, of which next to nothing is held.
    #[test]
    fn a_log_is_read_as_it_comes() {
        let head = &b"<log><logentry revision=\"1\"><author>ann</author><date>2026-01-02T03:04:05Z</date><paths>"[..];
        let path = b"<path action=\"A\" kind=\"file\">/trunk/a/rather/long/name/of/a/file/among/many.txt</path>";
        struct Paths(&'static [u8], usize, usize);
        impl Read for Paths {
            fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
                if self.1 == 0 {
                    return Ok(0);
                }
                let read = (&self.0[self.2..]).read(buffer)?;
                self.2 += read;
                if self.2 == self.0.len() {
                    (self.1, self.2) = (self.1 - 1, 0);
                }
                Ok(read)
            }
        }
        let tail = &b"</paths><msg>all of them</msg></logentry></log>"[..];
        let records = parse(head.chain(Paths(path, 400_000, 0)).chain(tail)).unwrap();
        let [Record::Revision { paths, message, .. }] = &records[..] else { panic!("{}", records.len()) };
        assert_eq!((&paths["count"], message.as_str()), (&json!(400_000), "all of them"));
        // One message without an end is refused, not held.
        let endless = b"<log><logentry revision=\"1\"><msg>".chain(std::io::repeat(b'a'));
        assert!(parse(endless).is_err());
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
