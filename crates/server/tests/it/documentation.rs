//! The documentation is true: every command and block of code in README and getting-started is run, and the HTTP reference
//! is what the server itself describes.
//!
//! `console` blocks are run command by command and their output compared (`…` stands for anything within a line), `sh`
//! blocks as a script, `toml` blocks are the configuration from there on, `sql` blocks go to PostgreSQL, and `rust` blocks
//! stand line by line in an example that other tests run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use proving::servers::{install, program};
use serde_json::Value;

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::receiver::{Receiver, free_port};
use crate::scratch::Database;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A fenced block, or a word to the test between them.
#[derive(Debug)]
enum Part {
    Block { language: String, text: String },
    Word(String),
}

fn parts(file: &str) -> Vec<Part> {
    let text = std::fs::read_to_string(root().join(file)).unwrap();
    let mut parts = Vec::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            parts.push(Part::Block { language: language.to_owned(), text: block.join("\n") });
        } else if let Some(word) = line.strip_prefix("<!-- test: ") {
            parts.push(Part::Word(word.trim_end_matches(" -->").to_owned()));
        }
    }
    assert!(parts.len() > 3, "{file} has few blocks: {parts:?}");
    parts
}

/// A reader's machine: a folder, the binary on the path, and ports of its own in place of those in the text.
struct Reader {
    home: Home,
    port: u16,
    receiver_port: u16,
    postgres: Database,
    mysql: Database,
    receivers: Vec<Receiver>,
}

impl Reader {
    fn new() -> Reader {
        let (port, receiver_port) = (free_port().0, free_port().0);
        if program("curl", &[]).is_none() {
            install(&["curl"]).unwrap();
        }
        let home = Home::sqlite();
        std::fs::create_dir(home.path("bin")).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_postrider"), home.path("bin/postrider")).unwrap();
        Reader {
            home,
            port,
            receiver_port,
            postgres: Database::postgres(),
            mysql: Database::mysql(),
            receivers: vec![],
        }
    }

    fn own(&self, text: &str) -> String {
        text.replace("localhost:8787", &format!("127.0.0.1:{}", self.port))
            .replace("127.0.0.1:8787", &format!("127.0.0.1:{}", self.port))
            .replace("127.0.0.1:9000", &format!("127.0.0.1:{}", self.receiver_port))
            .replace("postrider serve", &format!("postrider serve --listen 127.0.0.1:{}", self.port))
            .replace("postgres://app:secret@localhost/app", self.postgres.url().unwrap())
            .replace("mysql://app:secret@localhost/app", self.mysql.url().unwrap())
    }

    fn bash(&self, script: &str) -> Command {
        let mut command = Command::new("bash");
        let path = format!("{}:{}", self.home.path("bin").display(), std::env::var("PATH").unwrap());
        command.arg("-c").arg(script).current_dir(self.home.path(".")).env("PATH", path);
        ["POSTRIDER_DATABASE", "POSTGRES_DSN", "RUST_LOG"].iter().for_each(|name| {
            command.env_remove(name);
        });
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// As a script that ends at the first failure. What it leaves in the background ends with it.
    fn script(&self, text: &str) {
        let text = self.own(text);
        let waits = format!(
            "for _ in $(seq 200); do (exec 3<>/dev/tcp/127.0.0.1/{}) 2>/dev/null && break; sleep 0.05; done",
            self.port
        );
        let text: String = text
            .lines()
            .map(|line| match line.starts_with("postrider serve") {
                true => format!(
                    "postrider {} >/dev/null 2>serve.log &\n{waits}\n",
                    line.trim_start_matches("postrider ").split('&').next().unwrap().trim()
                ),
                false => format!("{line}\n"),
            })
            .collect();
        // curl says nothing of a refusal by itself.
        let script = format!(
            "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\ncurl() {{ command curl -f \"$@\"; echo; }}\n{text}"
        );
        let output = self.bash(&script).process_group(0).output().unwrap();
        let log = std::fs::read_to_string(self.home.path("serve.log")).unwrap_or_default();
        assert!(
            output.status.success(),
            "{script}\n{}\n{}\n{log}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }

    /// Each command, and what it prints.
    fn session(&self, text: &str) {
        let mut lines = text.lines().peekable();
        while let Some(line) = lines.next() {
            let command = line.strip_prefix("$ ").unwrap_or_else(|| panic!("not a command: {line}"));
            let mut wanted = Vec::new();
            while let Some(line) = lines.next_if(|line| !line.starts_with("$ ")) {
                wanted.push(self.own(line));
            }
            let output = self.bash(&self.own(command)).output().unwrap();
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            let printed: Vec<&str> = printed.lines().collect();
            let same =
                printed.len() == wanted.len() && printed.iter().zip(&wanted).all(|(line, wanted)| fits(line, wanted));
            assert!(
                same,
                "{command} printed\n{}\nnot\n{}\n{}",
                printed.join("\n"),
                wanted.join("\n"),
                String::from_utf8_lossy(&output.stderr)
            );
        }
    }

    fn sql(&self, text: &str) {
        self.postgres
            .sql(&self.home.path("."), "CREATE TABLE IF NOT EXISTS orders (id BIGINT PRIMARY KEY, item TEXT NOT NULL)");
        self.postgres.sql(&self.home.path("."), text);
    }

    fn heed(&mut self, word: &str) {
        match word {
            "listen 9000" => self.receivers.push(Receiver::answering_on(self.receiver_port, |_| (200, String::new()))),
            "wait for due" => wait_until("a message is due", || {
                let lanes = self.home.run(&["outbox", "stats", "--json"]).done().json();
                lanes["lanes"].as_object().unwrap().values().any(|lane| lane["oldest_due_seconds"].as_f64() > Some(0.0))
            }),
            other => panic!("no test knows `{other}`"),
        }
    }

    fn follow(&mut self, file: &str) {
        for part in parts(file) {
            match part {
                Part::Word(word) => self.heed(&word),
                Part::Block { language, text } => match language.as_str() {
                    "toml" => drop(self.home.write("postrider.toml", &self.own(&text))),
                    "console" => self.session(&text),
                    "sh" if text.contains("make test") => text.lines().for_each(|line| {
                        let command = line.split('#').next().unwrap().trim();
                        assert!(is_run_elsewhere(command), "nobody runs `{command}`");
                    }),
                    "sh" => self.script(&text),
                    "sql" => self.sql(&text),
                    "rust" => stands_in_an_example(&text),
                    other => panic!("{file}: nobody runs blocks of `{other}`"),
                },
            }
        }
        let commands = in_sentences(file);
        assert!(commands.len() >= 3, "{file}: {commands:?}");
        commands.iter().filter(|command| !is_run_elsewhere(command)).for_each(|command| self.script(command));
    }
}

/// `…` stands for anything.
fn fits(line: &str, wanted: &str) -> bool {
    let mut pieces = wanted.trim_end().split('…');
    let Some(mut rest) = line.trim_end().strip_prefix(pieces.next().unwrap_or_default()) else { return false };
    let mut open = false;
    for piece in pieces {
        open = true;
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
        open &= piece.is_empty();
    }
    rest.is_empty() || open
}

#[test]
fn ellipses_stand_for_anything_and_only_they() {
    assert!(fits("a 12 b", "a … b") && fits("a 12", "a …") && fits("a", "a"));
    assert!(!fits("a 12 c", "a … b") && !fits("a b", "a") && !fits("x a", "a"));
}

/// What takes too long for this test, or does not come to an end by itself: who runs it instead, and in which words.
const RUN_ELSEWHERE: [(&str, &[(&str, &str)]); 10] = [
    ("make test", &[("Makefile", "ci: lint test ")]),
    ("make bench", &[("Makefile", "MESSAGES=50 $(MAKE) bench")]),
    ("make databases", &[("Makefile", "$(MAKE) databases NAMES=\"--kernel mysql-9.7 postgres-18\"")]),
    (
        "cargo run --release -- demo",
        &[("Makefile", "$(MAKE) demo"), ("Makefile", "cargo run --locked --release -- demo")],
    ),
    ("cargo run --release -- demo --stay", &[("crates/server/tests/it/demo.rs", r#"["demo", "--stay"]"#)]),
    ("postrider demo --stay", &[("crates/server/tests/it/demo.rs", r#"["demo", "--stay"]"#)]),
    ("postrider bench", &[("scripts/bench.sh", r#"--json bench "$bench""#)]),
    ("postrider serve", &[("crates/server/tests/it/api.rs", r#"["serve""#)]),
    ("postrider worker", &[("crates/server/tests/it/worker.rs", r#"["worker""#)]),
    (
        "cargo install --locked --path crates/server",
        &[
            ("Makefile", "$(MAKE) packaging"),
            ("Dockerfile", "RUN cargo install --locked --path crates/server --root"),
            ("scripts/check-packaging.sh", r"RUN \(cargo install --locked --path crates\/server\)"),
        ],
    ),
];

fn is_run_elsewhere(command: &str) -> bool {
    let Some((_, places)) = RUN_ELSEWHERE.iter().find(|(known, _)| *known == command) else { return false };
    for (file, words) in *places {
        let text = std::fs::read_to_string(root().join(file)).unwrap();
        assert!(text.contains(words), "{file} does not run `{command}` any more: no {words}");
    }
    true
}

/// The commands that stand in a page's sentences.
fn in_sentences(file: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(file)).unwrap();
    let sentences = text.split("```").step_by(2);
    let code = sentences.flat_map(|text| text.split('`').skip(1).step_by(2));
    let is_command = |code: &&str| ["cargo ", "make ", "postrider "].iter().any(|start| code.starts_with(start));
    code.filter(is_command).map(str::to_owned).collect()
}

fn stands_in_an_example(block: &str) {
    let example = std::fs::read_to_string(root().join("crates/outbox/examples/enqueue_tokio_postgres.rs")).unwrap();
    let mut rest = example.as_str();
    for line in block.lines() {
        let code = line.split("//").next().unwrap().trim().trim_end_matches(';');
        let at = rest.find(code).unwrap_or_else(|| panic!("the example does not have `{code}` there"));
        rest = &rest[at + code.len()..];
    }
}

#[test]
fn the_readme_does_what_it_says() {
    let mut reader = Reader::new();
    // The statement for other languages needs the tables there.
    let url = reader.postgres.url().unwrap().to_owned();
    reader.home.write("lanes.toml", "[lane.emails]\ncourier = \"noop\"\n");
    reader.home.run(&["--config", "lanes.toml", "--database", &url, "migrate"]).done();
    reader.home.run(&["--config", "lanes.toml", "--database", &url, "worker", "--once"]).done();
    reader.follow("README.md");
}

#[test]
fn getting_started_does_what_it_says() {
    Reader::new().follow("docs/getting-started.md");
}

// ---- the HTTP reference ----

fn resolved<'a>(description: &'a Value, schema: &'a Value) -> &'a Value {
    let named = schema["$ref"].as_str().and_then(|name| description.pointer(name.trim_start_matches('#')));
    named.unwrap_or(schema)
}

fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        return name.rsplit('/').next().unwrap().to_owned();
    }
    if let Some(of) = schema["oneOf"].as_array() {
        return of.iter().map(kind).collect::<Vec<_>>().join(" or ");
    }
    let words = match &schema["type"] {
        Value::String(word) => vec![word.clone()],
        Value::Array(words) => words.iter().filter_map(|word| word.as_str().map(str::to_owned)).collect(),
        _ => vec!["any".to_owned()],
    };
    let one = |word: String| if word == "array" { format!("list of {}", kind(&schema["items"])) } else { word };
    words.into_iter().map(one).collect::<Vec<_>>().join(" or ")
}

fn line(text: &Value) -> String {
    text.as_str().unwrap_or_default().replace('\n', " ").replace('|', "\\|")
}

fn fields(description: &Value, schema: &Value, text: &mut String) {
    let schema = resolved(description, schema);
    let Some(properties) = schema["properties"].as_object() else { return };
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    text.push_str("\n| field | type | |\n| --- | --- | --- |\n");
    for (name, field) in properties {
        let must = if required.contains(&name.as_str()) { "" } else { "optional. " };
        let _ = writeln!(text, "| `{name}` | {} | {must}{} |", kind(field), line(&field["description"]));
    }
}

fn reference(description: &Value) -> String {
    let mut text = String::from(
        "# HTTP reference\n\nMade from the server's own description (`GET /openapi.json`); a test keeps it so. On loopback no token is \
         needed; elsewhere `Authorization: Bearer pr_…`. Errors are `{\"error\":{\"code\",\"message\",\"details\"}}`, but for orders, \
         whose errors are flat. Every answer carries `X-Correlation-ID`. Lists are `{\"items\":[…],\"next_cursor\":…}`.\n\n\
         Besides what is told with each route any may answer 400 `INVALID_REQUEST`, 401 `UNAUTHORIZED`, 403 `FORBIDDEN`, 404 \
         `NOT_FOUND` or `UNKNOWN_LANE`, 408 `TIMEOUT`, 413 `PAYLOAD_TOO_LARGE`, 415 `UNSUPPORTED_MEDIA_TYPE`, 422 \
         `INVALID_MESSAGE`, 500 `INTERNAL`, and 503 `STORE_UNAVAILABLE`, `OVERLOADED`, `LOCKED`, `OUTCOME_UNKNOWN` or `SECRETS_KEY_MISSING` with `Retry-After`.\n\n\
         Not in the description, as its answer never ends: `GET /v1/live` (scope `read`) streams how things go as server-sent \
         events `sample`, with the fields of `Sample`. `GET /` is the dashboard, `GET /docs` a page like this one.\n",
    );
    let mut tags: BTreeMap<&str, Vec<(&str, &str, &Value)>> = BTreeMap::new();
    for (path, item) in description["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            tags.entry(operation["tags"][0].as_str().unwrap()).or_default().push((path, method, operation));
        }
    }
    for tag in description["tags"].as_array().unwrap() {
        let _ = writeln!(text, "\n## {}\n\n{}", tag["name"].as_str().unwrap(), line(&tag["description"]));
        for (path, method, operation) in tags.get(tag["name"].as_str().unwrap()).into_iter().flatten() {
            let _ = writeln!(text, "\n### {} {path}\n\n{}", method.to_uppercase(), line(&operation["summary"]));
            if let Some(more) = operation["description"].as_str() {
                let _ = writeln!(text, "\n{}", more.replace('\n', " "));
            }
            let parameters: Vec<&Value> = operation["parameters"].as_array().into_iter().flatten().collect();
            if !parameters.is_empty() {
                text.push_str("\n| parameter | in | |\n| --- | --- | --- |\n");
                for one in parameters {
                    let _ = writeln!(
                        text,
                        "| `{}` | {} | {} |",
                        one["name"].as_str().unwrap(),
                        one["in"].as_str().unwrap(),
                        line(&one["description"])
                    );
                }
            }
            for (media, content) in operation["requestBody"]["content"].as_object().into_iter().flatten() {
                let _ = writeln!(
                    text,
                    "\nBody: `{media}`{}",
                    content["schema"]["$ref"]
                        .as_str()
                        .map_or(String::new(), |name| format!(", {}", name.rsplit('/').next().unwrap()))
                );
                fields(description, &content["schema"], &mut text);
            }
            text.push_str("\n| status | |\n| --- | --- |\n");
            // What any route may answer is told once, in the page's head.
            for (status, answer) in operation["responses"].as_object().unwrap() {
                let schema = answer["content"]
                    .as_object()
                    .and_then(|content| content.values().next())
                    .map(|content| &content["schema"]);
                if schema.is_some_and(|schema| schema["$ref"].as_str().is_some_and(|name| name.ends_with("/ErrorBody")))
                {
                    continue;
                }
                let of =
                    schema.map(kind).filter(|kind| kind != "any").map_or(String::new(), |kind| format!(" ({kind})"));
                let _ = writeln!(text, "| {status} | {}{of} |", line(&answer["description"]));
            }
        }
    }
    text.push_str("\n## Shapes\n");
    for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
        if schema["properties"].is_object() {
            let _ = writeln!(text, "\n### {name}\n\n{}", line(&schema["description"]));
            fields(description, schema, &mut text);
        }
    }
    let mut tidy = text.replace("\n\n\n", "\n\n");
    while tidy.contains("\n\n\n") {
        tidy = tidy.replace("\n\n\n", "\n\n");
    }
    tidy
}

/// `POSTRIDER_WRITE_DOCS=1 cargo test … the_http_reference` writes it anew.
#[test]
fn the_http_reference_is_what_the_server_describes() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    let described = reference(&server.get("/openapi.json").answered(200).json());
    let file = root().join("docs/http.md");
    if std::env::var_os("POSTRIDER_WRITE_DOCS").is_some() {
        std::fs::write(&file, &described).unwrap();
    }
    assert!(
        std::fs::read_to_string(&file).unwrap_or_default() == described,
        "docs/http.md is old; write it anew with POSTRIDER_WRITE_DOCS=1"
    );
}

/// A demand is asserted by a test that is there and runs, and none stands alone.
#[test]
fn every_demand_of_the_specifications_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/specifications.md")).unwrap();
    let (mut demands, mut columns) = (0, 0);
    for line in page.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        match cells.as_slice() {
            _ if !line.starts_with('|') => columns = 0,
            ["demand", "asserted by"] => columns = 2,
            ["demand", "what we do", "why"] => columns = 3,
            [dashes, ..] if dashes.starts_with("---") => {}
            [_, tests] if columns == 2 => {
                let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
                assert!(!named.is_empty(), "nothing asserts: {line}");
                named.iter().for_each(|name| assert!(is_a_test(&root, name), "there is no test `{name}`: {line}"));
                demands += 1;
            }
            [_, _, _] if columns == 3 => demands += 1,
            _ => panic!("not a row of {columns} columns: {line}"),
        }
    }
    assert!(demands > 450, "only {demands} demands");
}

/// `crate::file::test`, as a test of its own or as a case that runs on every database.
fn is_a_test(root: &Path, name: &str) -> bool {
    let [of, file, test] = name.split("::").collect::<Vec<_>>()[..] else { return false };
    let read = |folder: &str| std::fs::read_to_string(root.join(format!("crates/{of}/{folder}/{file}.rs")));
    let Ok(text) = read("tests/it").or_else(|_| read("src")) else { return false };
    let Some(before) = text.split(&format!("fn {test}(")).next().filter(|before| before.len() < text.len()) else {
        return false;
    };
    let attribute = before.trim_end_matches("async ").trim_end().lines().last().unwrap_or_default().trim();
    let is_test = attribute.starts_with("#[test]") || attribute.starts_with("#[tokio::test");
    let of_a_list = |cases: &str| {
        let list = cases.split(['}', ')']).next().unwrap_or_default();
        list.split([',', '{', '(']).any(|case| case.trim() == test)
    };
    is_test || ["on_every_store!", "on_every_server!"].iter().any(|many| text.split(many).skip(1).any(of_a_list))
}

/// Every fault and every invariant has its test, or says that it has none.
#[test]
fn every_guarantee_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/guarantees.md")).unwrap();
    let (mut guarded, mut missing) = (Vec::new(), 0);
    for line in page.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, _, tests] = cells[..] else { continue };
        if !name.chars().last().is_some_and(|last| last.is_ascii_digit()) {
            continue;
        }
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        named.iter().for_each(|name| assert!(is_a_test(&root, name), "there is no test `{name}`: {line}"));
        assert_eq!(named.is_empty(), tests == "none yet", "{line}");
        missing += usize::from(named.is_empty());
        guarded.push(name.to_owned());
    }
    let (faults, safe, live) = (1..=52, 1..=28, 1..=10);
    let all = faults.map(|n| n.to_string()).chain(safe.map(|n| format!("S{n}"))).chain(live.map(|n| format!("L{n}")));
    assert_eq!(guarded, all.collect::<Vec<_>>());
    assert!(missing <= MOST_UNGUARDED, "{missing} have no test");
}

/// Faults and invariants without a test: it may only become less.
const MOST_UNGUARDED: usize = 1;

#[test]
fn every_link_between_pages_leads_somewhere() {
    let mut pages: Vec<PathBuf> =
        std::fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"].map(|name| root().join(name)));
    let mut links = 0;
    for page in pages.iter().filter(|page| page.extension().is_some_and(|end| end == "md")) {
        let text = std::fs::read_to_string(page).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {link} leads nowhere", page.display());
            if !anchor.is_empty() {
                let slug = |line: &str| {
                    line.trim_start_matches('#')
                        .trim()
                        .to_lowercase()
                        .replace(' ', "-")
                        .replace(|c: char| !(c.is_alphanumeric() || c == '-'), "")
                };
                let known = std::fs::read_to_string(&target)
                    .unwrap()
                    .lines()
                    .filter(|line| line.starts_with('#'))
                    .any(|line| slug(line) == anchor);
                assert!(known, "{}: {link} names no heading", page.display());
            }
            links += 1;
        }
    }
    assert!(links > 50, "{links} links");
}
