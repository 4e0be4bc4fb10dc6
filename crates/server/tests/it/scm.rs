//! Repositories with all their oddities, read by the real binary: from the real `git` and `svn`, and from a server that
//! answers as GitLab's API is documented. What holds is looked up in the tables.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::memory::{OpenMemory, configured, on_every_database};
use crate::scratch::Database;

/// The distribution's program, installed if it is missing.
fn program(name: &str, package: &str) {
    if Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_err() {
        proving::servers::install(&[package]).unwrap();
    }
}

fn run(folder: &Path, command: &[&str], input: &[u8]) -> String {
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::scope(|scope| {
        let writing = scope.spawn(move || stdin.write_all(input).is_ok());
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "{command:?}");
        (writing.join().unwrap(), text)
    });
    writer.1.trim().to_owned()
}

/// A bare repository with this history.
fn imported(home: &Home, name: &str, stream: &[u8]) -> PathBuf {
    program("git", "git");
    let path = home.path(name);
    std::fs::create_dir(&path).unwrap();
    run(&path, &["git", "init", "--quiet", "--bare", "."], b"");
    run(&path, &["git", "fast-import", "--quiet"], stream);
    path
}

/// So many commits: merges, renames, empty messages, messages that are no UTF-8, and dates from before Unix.
fn history(commits: usize) -> Vec<u8> {
    let mut stream = Vec::new();
    for n in 1..=commits {
        let message: Vec<u8> = match n % 10 {
            1 => vec![],
            2 => b"latin \xe9\xe8 and a \xff byte".to_vec(),
            _ => format!("commit {n}: 修正 the thing\n\nWith a body that says more.\n").into_bytes(),
        };
        let when = if n % 50 == 3 { 0 } else { 1_600_000_000 + n as u64 * 60 };
        let who = format!("Ann Author {n} <ann@example.org> {when} +0200\n");
        stream.extend(
            format!("commit refs/heads/main\nmark :{n}\nauthor {who}committer {who}data {}\n", message.len()).bytes(),
        );
        stream.extend(&message);
        stream.push(b'\n');
        if n > 1 {
            stream.extend(format!("from :{}\n", n - 1).bytes());
        }
        if n > 20 && n % 10 == 0 {
            stream.extend(format!("merge :{}\n", n - 15).bytes());
        }
        match n {
            1 => stream.extend(b"M 100644 inline a.txt\ndata 2\nhi\n"),
            // The one that was a.txt goes by another name each time.
            _ if n % 20 == 7 => {
                let before = if n == 7 { "a.txt".to_owned() } else { format!("b{}.txt", n - 20) };
                stream.extend(format!("R {before} b{n}.txt\n").bytes());
            }
            // Some change nothing at all.
            _ if n % 10 == 5 => {}
            _ => {
                let text = format!("line {n}");
                stream.extend(format!("M 100644 inline f{}.txt\ndata {}\n{text}\n", n % 40, text.len()).bytes());
            }
        }
        stream.push(b'\n');
    }
    stream
}

fn sync(home: &Home, args: &[&str]) -> Value {
    home.run(&[&["scm", "sync"], args, &["--json"]].concat()).done().json()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_large_history_with_all_its_oddities_is_read_whole_and_once() {
    on_every_database(|home| {
        let repo = imported(&home, "large.git", &history(20_000));
        home.run(&["migrate"]).done();
        let first = sync(&home, &["git", text(&repo)]);
        assert_eq!((&first["seen"], &first["new"], &first["repo_id"]), (&json!(20_000), &json!(20_000), &json!(1)));
        let told: Vec<&String> = first.as_object().unwrap().keys().collect();
        assert!(told.iter().all(|name| !name.contains("outbox") && !name.contains("memor")), "{first}");
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_git_commits"), 20_000);
        assert_eq!(home.number("SELECT COUNT(DISTINCT sha) FROM scm_git_commits"), 20_000);
        let merges = run(&repo, &["git", "rev-list", "--count", "--merges", "main"], b"");
        assert_eq!(home.text("SELECT COUNT(*) FROM scm_git_commits WHERE parents LIKE '% %'"), merges);
        let last = run(&repo, &["git", "rev-parse", "main"], b"");
        assert_eq!(home.text("SELECT sha FROM scm_git_commits ORDER BY id DESC LIMIT 1"), last, "oldest first");
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_git_commits WHERE message = ''"), 2000);
        assert!(home.number("SELECT COUNT(*) FROM scm_git_commits WHERE message LIKE 'latin %'") == 2000);
        assert_eq!(
            home.number("SELECT COUNT(*) FROM scm_patch_blobs WHERE uri = ''"),
            20_000,
            "still to be materialised"
        );
        let again = sync(&home, &["git", text(&repo)]);
        assert_eq!((&again["seen"], &again["new"]), (&json!(0), &json!(0)), "nothing is walked twice: {again}");
        assert_eq!(again["watermark"], first["watermark"]);
        assert_eq!(home.number("SELECT COUNT(*) FROM kv WHERE namespace = 'scm.sync'"), 1);
        // The boundary: reading history is no business of the outbox.
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox") + home.number("SELECT COUNT(*) FROM write_audit"), 0);
        if matches!(home.database, Database::Postgres { .. }) {
            assert_eq!(home.number("SELECT COUNT(*) FROM scm.git_commits"), 20_000);
        }
    });
}

#[test]
fn this_very_repository_is_read() {
    program("git", "git");
    let home = Home::sqlite();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let copy = home.path("copy.git");
    let clone = ["git", "-c", "safe.directory=*", "clone", "--quiet", "--bare", text(&here), text(&copy)];
    run(&home.path("."), &clone, b"");
    let count: i64 = run(&copy, &["git", "rev-list", "--count", "--branches", "HEAD"], b"").parse().unwrap();
    assert!(count > 0);
    let synced = sync(&home, &["git", text(&copy), "--name", "postrider"]);
    assert_eq!(synced["new"], count);
    assert_eq!(home.number("SELECT COUNT(*) FROM scm_git_commits"), count);
}

#[test]
fn a_sync_that_is_killed_goes_on_and_keeps_each_commit_once() {
    let in_time = AtomicUsize::new(0);
    on_every_database(|home| {
        let commits = 20_000;
        let repo = imported(&home, "killed.git", &history(commits));
        home.run(&["migrate"]).done();
        let running = home.start_silent(&["scm", "sync", "git", text(&repo)]);
        wait_until("some of it is there", || home.number("SELECT COUNT(*) FROM scm_git_commits") > 0);
        running.signal(Signal::KILL);
        drop(running);
        let killed_at = home.number("SELECT COUNT(*) FROM scm_git_commits");
        let again = if killed_at < commits as i64 {
            in_time.fetch_add(1, Ordering::Relaxed);
            assert_eq!(home.number("SELECT COUNT(*) FROM kv"), 0, "the watermark has not moved");
            let again = sync(&home, &["git", text(&repo)]);
            assert_eq!(again["seen"], commits);
            again
        } else {
            sync(&home, &["git", text(&repo)])
        };
        assert!(again["new"].as_i64().unwrap() <= commits as i64 - killed_at, "what was there is met again: {again}");
        assert_eq!(home.number("SELECT COUNT(DISTINCT sha) FROM scm_git_commits"), commits as i64);
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_git_commits"), commits as i64);
    });
    assert!(in_time.load(Ordering::Relaxed) > 0, "on no database was it killed in the middle");
}

#[test]
fn commits_become_memories_once_through_kills_and_outages() {
    on_every_database(|home| {
        let mut memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "[lane.memory]\nbackoff_sec = [1]\n");
        let commits = 120;
        let repo = imported(&home, "cards.git", &history(commits));
        home.run(&["migrate"]).done();
        sync(&home, &["git", text(&repo), "--space", "team:cards", "--name", "shop"]);
        let watermark = home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'");
        let cursor = "SELECT COUNT(*) FROM kv WHERE namespace = 'gateway.consume'";
        assert_eq!(home.number(cursor), 0);

        // Killed in the middle.
        memory.told(json!({ "mode": "slow", "delay_ms": 20 }));
        let running = home.start_silent(&["scm", "consume"]);
        wait_until("some cards are stored", || memory.contents().len() > 10);
        running.signal(Signal::KILL);
        drop(running);
        assert!(memory.contents().len() < commits);
        // An outage defers the rest of it, and the cursor goes on.
        memory.stop();
        let made = home.run(&["scm", "consume", "--json"]).done().json();
        let deferred = made["deferred"].as_i64().unwrap();
        assert!(deferred > 0, "{made}");
        let why = "status = 'redirected' AND action = 'redirect' AND reason LIKE 'openmemory_write_failed:%'";
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox WHERE lane = 'memory'"), deferred, "by the usual way");
        assert!(home.number(&format!("SELECT COUNT(*) FROM write_audit WHERE {why}")) >= deferred);
        assert_eq!(home.run(&["scm", "status", "--json"]).done().json()["items"][0]["unconsumed"], 0);
        // Meanwhile reading goes on: neither waits for the other.
        let more = history(commits + 1).split_off(history(commits).len());
        let more = String::from_utf8_lossy(&more).replace(&format!("from :{commits}"), "from refs/heads/main^0");
        run(&repo, &["git", "fast-import", "--quiet", "--force"], more.as_bytes());
        let consumed = || home.text("SELECT value_json FROM kv WHERE namespace = 'gateway.consume'");
        let before = consumed();
        assert_eq!(sync(&home, &["git", text(&repo)])["new"], 1);
        assert_eq!(consumed(), before, "a sync leaves the consumer's cursor alone");
        assert_ne!(home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'"), watermark);
        let watermark = home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'");

        memory.start_again(&home);
        home.run(&["scm", "consume"]).done();
        wait_until("all is written", || {
            home.run(&["memory", "reconcile"]).done();
            home.run(&["memory", "flush"]);
            home.number("SELECT COUNT(*) FROM memory_writes WHERE state <> 'stored'") == 0
        });
        let cards = memory.contents();
        // What has no message and changed nothing may look like another; every commit names itself, though.
        assert_eq!(cards.len(), commits + 1, "each commit is one memory");
        assert!(cards.iter().all(|card| card.starts_with("# ") && card.contains("in shop by Ann Author")), "{cards:?}");
        assert!(cards.iter().all(|card| card.len() < 3000 && !card.contains("@@")), "never the change itself");
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit WHERE status = 'pending'"), 0);
        assert_eq!(
            home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'"),
            watermark,
            "a cursor of its own"
        );

        // Once more from a chosen point: the same cards are the same memories.
        let sha = home.text("SELECT sha FROM scm_git_commits ORDER BY id LIMIT 1 OFFSET 100");
        let replayed = home.run(&["scm", "consume", "--from", &sha, "--json"]).done().json();
        assert_eq!((&replayed["cards"], &replayed["known"]), (&json!(21), &json!(21)), "{replayed}");
        assert_eq!(home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'"), watermark);
        assert_eq!(memory.contents().len(), commits + 1);
        let short = home.run(&["scm", "consume", "--from", &sha[..12], "--json"]).done().json();
        assert_eq!(short["cards"], 21, "the beginning of a sha is enough");
        home.run(&["scm", "consume", "--from", "00000000"]).refused(2, &["no repository has a record 00000000"]);
        assert_eq!(home.number("SELECT COUNT(*) FROM knowledge_candidates"), commits as i64 + 1);
        home.run(&["scm", "consume", "--repo", "9"]).refused(2, &["no repository 9"]);
    });
}

#[test]
fn changes_are_known_by_their_digest() {
    on_every_database(|home| {
        home.run(&["migrate"]).done();
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "");
        let repo = imported(&home, "diffs.git", &history(30));
        let synced = sync(&home, &["git", text(&repo), "--diffs"]);
        assert_eq!(synced["diffs"], json!({"materialised": 30, "failed": 0}));
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_patch_blobs WHERE uri <> '' AND length(sha256) = 64"), 30);
        home.run(&["scm", "consume"]).done();
        let refs = home.text("SELECT evidence_refs_json FROM memory_writes ORDER BY id DESC LIMIT 1");
        assert!(refs.contains("git+file://") && refs.contains("sha256"), "{refs}");
        // The repository is away: what is open stays open.
        home.execute("UPDATE scm_patch_blobs SET uri = '', sha256 = NULL, size = NULL WHERE id > 28");
        let objects = repo.join("objects");
        std::fs::rename(&objects, repo.join("away")).unwrap();
        std::fs::create_dir(&objects).unwrap();
        let failed = home.run(&["scm", "materialize", "--json"]).ended(1).json();
        assert_eq!(failed, json!({"materialised": 0, "failed": 2}));
        std::fs::remove_dir(&objects).unwrap();
        std::fs::rename(repo.join("away"), &objects).unwrap();
        assert_eq!(home.run(&["scm", "materialize", "--json"]).done().json(), json!({"materialised": 2, "failed": 0}));
    });
}

/// What was neither written nor queued is not passed by.
#[test]
fn the_cursor_waits_for_what_could_not_be_audited() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "");
        let repo = imported(&home, "waits.git", &history(12));
        home.run(&["migrate"]).done();
        sync(&home, &["git", text(&repo)]);
        let (break_it, mend_it) = home.database.refuse("INSERT", "write_audit");
        home.execute(&break_it);
        assert_ne!(home.run(&["scm", "consume"]).code, 0);
        assert_eq!(home.number("SELECT COUNT(*) FROM kv WHERE namespace = 'gateway.consume'"), 0);
        home.execute(&mend_it);
        home.run(&["scm", "consume"]).done();
        assert_eq!(memory.contents().len(), 12);
    });
}

/// What `serve` and `worker` do by themselves with `consume_scm`.
#[test]
fn a_server_makes_memories_of_commits_as_they_come() {
    let home = Home::sqlite();
    let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
    configured(&home, &memory, "consume_scm = true\n");
    let repo = imported(&home, "live.git", &history(12));
    let server = Server::start(&home, &[]);
    sync(&home, &["git", text(&repo), "--name", "live"]);
    wait_until("every commit is a memory", || memory.contents().len() == 12);
    assert_eq!(home.run(&["scm", "status", "--json"]).done().json()["items"][0]["unconsumed"], 0);
    assert_eq!(server.stop().0, 0);
}

#[test]
fn tags_deepened_clones_and_other_work_trees_are_one_history() {
    let home = Home::sqlite();
    let repo = imported(&home, "origin.git", &history(30));
    let at = |rev: &str| run(&repo, &["git", "rev-parse", rev], b"");
    // Only a tag leads to this one.
    let tree = at("main^{tree}");
    let commit =
        ["git", "-c", "user.name=t", "-c", "user.email=t@x", "commit-tree", &tree, "-m", "tagged", "-p", "main"];
    let tagged = run(&repo, &commit, b"");
    run(&repo, &["git", "tag", "v1", &tagged], b"");
    assert_eq!(sync(&home, &["git", text(&repo)])["new"], 31);

    let shallow = home.path("shallow");
    let url = format!("file://{}", text(&repo));
    run(&home.path("."), &["git", "clone", "--quiet", "--depth", "2", "--branch", "main", &url, text(&shallow)], b"");
    let few = sync(&home, &["git", text(&shallow)])["new"].as_i64().unwrap();
    assert!(few < 10, "{few}");
    run(&shallow, &["git", "fetch", "--quiet", "--unshallow"], b"");
    let rest = sync(&home, &["git", text(&shallow)])["new"].as_i64().unwrap();
    assert_eq!(few + rest, 30, "what lies beyond the boundary is read once it is there");
    // By another name it is the same repository.
    assert_eq!(sync(&home, &["git", text(&shallow.join(".git"))])["new"], 0);
    assert_eq!(home.number("SELECT COUNT(*) FROM scm_repos"), 2);
}

/// A repository may be anybody's: what it links to is not read without an end, and a pipe is not waited for.
#[test]
fn a_boundary_without_an_end_is_refused() {
    let home = Home::sqlite();
    let repo = imported(&home, "odd.git", &history(3));
    let shallow = repo.join("shallow");
    let refused = || {
        let running = home.start(&["scm", "sync", "git", text(&repo)]);
        running.ends_within(crate::home::PATIENCE).refused(2, &["shallow is no plain file"]);
        std::fs::remove_file(&shallow).unwrap();
    };
    std::os::unix::fs::symlink("/dev/zero", &shallow).unwrap();
    refused();
    run(&repo, &["mkfifo", "shallow"], b"");
    refused();
    assert_eq!(sync(&home, &["git", text(&repo)])["new"], 3);
}

#[test]
fn a_record_that_cannot_be_written_ends_a_strict_run_and_no_other() {
    on_every_database(strict_and_best_effort);
}

fn strict_and_best_effort(home: Home) {
    let repo = imported(&home, "odd.git", &history(30));
    home.run(&["migrate"]).done();
    home.execute(if home.database.is_server() {
        "ALTER TABLE scm_git_commits ADD CONSTRAINT odd CHECK (message NOT LIKE 'commit 13:%')"
    } else {
        "CREATE TRIGGER odd BEFORE INSERT ON scm_git_commits WHEN NEW.message LIKE 'commit 13:%' BEGIN SELECT RAISE(ABORT, 'odd'); END"
    });
    let strict = home.run(&["scm", "sync", "git", text(&repo)]);
    assert_eq!(strict.code, 1, "{strict:?}");
    assert_eq!(home.number("SELECT COUNT(*) FROM kv"), 0, "the watermark stays");
    assert_eq!(home.text("SELECT event_type FROM logbook_events"), "scm_sync_failed");
    let effort = home.run(&["scm", "sync", "git", text(&repo), "--mode", "best_effort", "--json"]).ended(1).json();
    assert_eq!((&effort["new"], &effort["skipped"]), (&json!(29), &json!(1)), "{effort}");
    assert_eq!(home.number("SELECT COUNT(*) FROM logbook_events WHERE event_type = 'scm_record_skipped'"), 1);
    assert_eq!(home.number("SELECT COUNT(*) FROM write_audit"), 0, "errors of reading are the logbook's");
    assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0);
    home.run(&["scm", "sync", "git", "/no/such/place"]).refused(2, &["/no/such/place"]);
    home.run(&["scm", "sync", "git", text(&home.path("."))]).refused(2, &["git"]);
}

#[test]
fn subversion_is_read_revision_by_revision() {
    program("svn", "subversion");
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "");
        home.run(&["migrate"]).done();
        let (repo, work) = (home.path("svn"), home.path("work"));
        run(&home.path("."), &["svnadmin", "create", text(&repo)], b"");
        let url = format!("file://{}", text(&repo));
        run(&home.path("."), &["svn", "checkout", "--quiet", &url, text(&work)], b"");
        let commit = |n: usize| {
            std::fs::write(work.join(format!("天 {n} & <x>.txt")), format!("{n}\n")).unwrap();
            run(&work, &["svn", "add", "--quiet", "--force", "."], b"");
            let message = format!("change {n} <&> 修正\n\nmore");
            run(&work, &["svn", "commit", "--quiet", "--username", "ann", "--encoding", "UTF-8", "-m", &message], b"");
        };
        for n in 1..=5 {
            commit(n);
        }
        let first = sync(&home, &["svn", &url, "--diffs"]);
        assert_eq!((&first["new"], &first["watermark"]), (&json!(5), &json!({"last_rev": 5})), "{first}");
        assert_eq!(first["diffs"], json!({"materialised": 5, "failed": 0}));
        assert_eq!(home.text("SELECT message FROM scm_svn_revisions WHERE revision = 3"), "change 3 <&> 修正\n\nmore");
        assert!(home.text("SELECT paths_json FROM scm_svn_revisions WHERE revision = 3").contains("天 3 & <x>.txt"));
        assert_eq!(home.text("SELECT author FROM scm_svn_revisions WHERE revision = 3"), "ann");
        assert_eq!(sync(&home, &["svn", &url])["seen"], 0);
        commit(6);
        assert_eq!(sync(&home, &["svn", &url])["new"], 1);
        home.run(&["scm", "consume"]).done();
        assert_eq!(memory.contents().len(), 6);
        let cursor = home.text("SELECT value_json FROM kv WHERE namespace = 'gateway.consume'");
        assert!(serde_json::from_str::<Value>(&cursor).unwrap()["last_processed_rev"] == 6, "{cursor}");
        let keys =
            home.rows("SELECT namespace, kv.key FROM kv WHERE namespace <> 'gateway.upstream' ORDER BY namespace");
        let keys: Vec<(&str, &str)> = keys.iter().map(|row| (row[0].as_str(), row[1].as_str())).collect();
        assert_eq!(keys, [("gateway.consume", "scm_consume:1"), ("scm.sync", "svn_cursor:1")]);
        let watermark = home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'");
        assert_eq!(serde_json::from_str::<Value>(&watermark).unwrap(), json!({"last_rev": 6}));
        if matches!(home.database, Database::Postgres { .. }) {
            assert_eq!(home.number("SELECT COUNT(*) FROM scm.svn_revisions"), 6);
            let cursor = "namespace = 'scm.sync' AND key = 'svn_cursor:1'";
            assert_eq!(home.text(&format!("SELECT value_json->>'last_rev' FROM logbook.kv WHERE {cursor}")), "6");
            assert_eq!(home.text("SELECT key FROM logbook.kv WHERE namespace = 'gateway.consume'"), "scm_consume:1");
        }
        commit(7);
        assert_eq!(sync(&home, &["svn", &url])["new"], 1);
        let audited = home.number("SELECT COUNT(*) FROM write_audit");
        // Nobody is there: three more tries, an error, and the watermark where it was.
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let away = home.run(&["scm", "sync", "svn", &format!("svn://{nobody}/repo")]);
        assert_eq!(away.code, 3, "{away:?}");
        assert_eq!(away.stderr.matches("the network failed").count(), 3, "{away:?}");
        assert_eq!(home.number("SELECT COUNT(*) FROM kv WHERE namespace = 'scm.sync'"), 1);
        assert_eq!(home.number("SELECT COUNT(*) FROM logbook_events WHERE event_type = 'scm_sync_failed'"), 1);
        if matches!(home.database, Database::Postgres { .. }) {
            assert_eq!(home.number("SELECT COUNT(*) FROM logbook.events WHERE event_type = 'scm_sync_failed'"), 1);
        }
        // The gateway hears nothing of it, and what was read before goes on.
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox"), 0);
        assert_eq!(home.number("SELECT COUNT(*) FROM write_audit"), audited);
        home.run(&["scm", "consume"]).done();
        assert_eq!(memory.contents().len(), 7);
        home.run(&["scm", "sync", "svn", "ftp://x"]).refused(2, &["svn://host/repo"]);
    });
}

/// More revisions than one page of the log has, some of them without a message, one from the first moment.
#[test]
fn a_long_subversion_history_is_read_page_by_page() {
    program("svn", "subversion");
    let home = Home::sqlite();
    home.run(&["migrate"]).done();
    let mut dump = String::from("SVN-fs-dump-format-version: 2\n\n");
    for revision in 1..=1_203 {
        let at = if revision == 7 { "1970-01-01T00:00:00.000000Z" } else { "2020-01-02T03:04:05.000000Z" };
        let log = if revision % 100 == 9 { String::new() } else { format!("change {revision}") };
        let mut properties = String::new();
        for (name, value) in [("svn:log", log.as_str()), ("svn:author", "ann"), ("svn:date", at)] {
            properties.push_str(&format!("K {}\n{name}\nV {}\n{value}\n", name.len(), value.len()));
        }
        properties.push_str("PROPS-END\n");
        let length = properties.len();
        dump.push_str(&format!(
            "Revision-number: {revision}\nProp-content-length: {length}\nContent-length: {length}\n\n{properties}\n"
        ));
    }
    let repo = home.path("svn");
    run(&home.path("."), &["svnadmin", "create", text(&repo)], b"");
    run(&home.path("."), &["svnadmin", "load", "--quiet", text(&repo)], dump.as_bytes());
    let url = format!("file://{}", text(&repo));
    let first = sync(&home, &["svn", &url]);
    assert_eq!((&first["new"], &first["watermark"]), (&json!(1_203), &json!({"last_rev": 1_203})), "{first}");
    assert_eq!(home.number("SELECT COUNT(DISTINCT revision) FROM scm_svn_revisions"), 1_203);
    assert_eq!(home.text("SELECT message FROM scm_svn_revisions WHERE revision = 1203"), "change 1203");
    assert!(home.number("SELECT at FROM scm_svn_revisions WHERE revision = 7") == 0, "the first moment");
    assert_eq!(sync(&home, &["svn", &url])["seen"], 0);
}

/// What the stand-in for GitLab has and does.
#[derive(Default)]
struct GitlabState {
    merge_requests: Vec<Value>,
    requests: Vec<String>,
    /// Statuses for the next requests, before it answers well.
    statuses: Vec<u16>,
    token: Option<String>,
    /// Diffs cannot be had.
    no_diffs: bool,
    /// After the first page the one at this place is changed, in that minute.
    touch_after: Option<(usize, usize)>,
}

/// After GitLab's documented API: merge requests of one project, paged, with its headers.
fn gitlab(state: &Arc<Mutex<GitlabState>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let state = state.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let (mut line, mut token) = (String::new(), None);
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            reader.read_line(&mut line).unwrap_or(0);
            loop {
                let mut header = String::new();
                if reader.read_line(&mut header).unwrap_or(0) == 0 || header == "\r\n" {
                    break;
                }
                if let Some(value) = header.to_ascii_lowercase().strip_prefix("private-token: ") {
                    token = Some(value.trim().to_owned());
                }
            }
            let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
            let answer = gitlab_answer(&mut state.lock().unwrap(), &target, token.as_deref());
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    url
}

fn gitlab_answer(state: &mut GitlabState, target: &str, token: Option<&str>) -> String {
    state.requests.push(target.to_owned());
    let answer = |status: &str, headers: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n{body}", body.len())
    };
    if !state.statuses.is_empty() {
        let status = state.statuses.remove(0);
        return answer(&format!("{status} x"), "retry-after: 1\r\n", r#"{"message":"as told"}"#);
    }
    if state.token.as_deref().is_some_and(|wanted| token != Some(wanted)) {
        return answer("401 Unauthorized", "", r#"{"message":"401 Unauthorized"}"#);
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let parameter = |name: &str| {
        query.split('&').find_map(|pair| pair.strip_prefix(&format!("{name}="))).map(|value| value.replace("%3A", ":"))
    };
    if path.ends_with("/raw_diffs") && state.no_diffs {
        return answer("500 Internal Server Error", "", r#"{"message":"as told"}"#);
    }
    if path.ends_with("/raw_diffs") {
        return answer("200 OK", "", "diff --git a b\n");
    }
    if path != "/api/v4/projects/group%2Fproject/merge_requests" {
        return answer("404 Not Found", "", r#"{"message":"404 Project Not Found"}"#);
    }
    let (page, size): (usize, usize) =
        (parameter("page").unwrap().parse().unwrap(), parameter("per_page").unwrap().parse().unwrap());
    let since = parameter("updated_after").unwrap_or_default();
    let mut found: Vec<&Value> =
        state.merge_requests.iter().filter(|mr| mr["updated_at"].as_str().unwrap() > since.as_str()).collect();
    found.sort_by_key(|mr| mr["updated_at"].as_str().unwrap().to_owned());
    let shown: Vec<&&Value> = found.iter().skip((page - 1) * size).take(size).collect();
    let next = if page * size < found.len() { (page + 1).to_string() } else { String::new() };
    let body = json!(shown).to_string();
    if let Some((place, minute)) = state.touch_after.take() {
        let mut touched = merge_request(place + 1, "opened", minute);
        touched["title"] = json!("changed meanwhile");
        state.merge_requests[place] = touched;
    }
    answer("200 OK", &format!("x-next-page: {next}\r\n"), &body)
}

fn merge_request(iid: usize, state: &str, minute: usize) -> Value {
    json!({
        "iid": iid, "title": format!("合并 {iid}"), "state": state, "author": {"username": "ann"},
        "updated_at": format!("2026-01-{:02}T10:{:02}:00.000Z", 1 + minute / 60, minute % 60),
        "merged_at": if state == "merged" { json!("2026-01-09T10:00:00.000Z") } else { Value::Null },
        "web_url": format!("https://gitlab.example/group/project/-/merge_requests/{iid}"),
    })
}

#[test]
fn gitlab_is_read_page_by_page_and_waited_for() {
    on_every_database(|home| {
        let memory = OpenMemory::start(&home, &["--keep-duplicates"]);
        configured(&home, &memory, "");
        home.run(&["migrate"]).done();
        let state = Arc::new(Mutex::new(GitlabState {
            merge_requests: (1..=250).map(|iid| merge_request(iid, "opened", iid)).collect(),
            token: Some("right".to_owned()),
            ..GitlabState::default()
        }));
        let url = format!("{}/group/project", gitlab(&state));
        home.write("token", "right\n");
        let sync = |args: &[&str]| {
            home.run(&[&["scm", "sync", "gitlab", &url, "--json", "--token", "file:token"], args].concat())
        };

        // Refused at once, without another try.
        home.write("token", "wrong\n");
        let refused = sync(&[]);
        assert_eq!(refused.code, 1, "{refused:?}");
        assert_eq!(state.lock().unwrap().requests.len(), 1, "authentication is not tried again");
        home.write("token", "right\n");
        // Too often, then broken once: it waits, tries again, and goes on.
        state.lock().unwrap().statuses = vec![429, 500];
        // And one is changed while it is being read: it moves, and takes no other's place.
        state.lock().unwrap().touch_after = Some((4, 300));
        let first = sync(&[]).done().json();
        assert_eq!(first["new"], 251, "!5 was read twice: {first}");
        assert_eq!(home.number("SELECT COUNT(DISTINCT iid) FROM scm_merge_requests"), 250, "none was lost");
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_merge_requests"), 250);
        assert_eq!(home.text("SELECT title FROM scm_merge_requests WHERE iid = 7"), "合并 7");
        let again = sync(&[]).done().json();
        assert_eq!(again["new"], 0, "{again}");
        assert_eq!(again["watermark"], first["watermark"]);
        home.run(&["scm", "consume"]).done();
        assert_eq!(memory.contents().len(), 250);

        // One was merged: it is read anew, and remembered anew.
        state.lock().unwrap().merge_requests[6] = merge_request(7, "merged", 400);
        // Its diff cannot be had: it is read all the same, and its diff stays to be fetched.
        state.lock().unwrap().no_diffs = true;
        let without = sync(&["--diffs"]);
        assert_eq!(without.json()["new"], 1, "{without:?}");
        let open = "SELECT COUNT(*) FROM scm_patch_blobs WHERE uri = ''";
        assert_eq!(home.number(open), home.number("SELECT COUNT(*) FROM scm_patch_blobs"), "an empty URI for each");
        assert_eq!(home.number("SELECT COUNT(*) FROM outbox WHERE lane = 'memory'"), 0, "and nothing of it is queued");
        state.lock().unwrap().no_diffs = false;
        home.run(&["scm", "materialize", "--token", "file:token"]).done();
        assert_eq!(home.number(open), 0);
        assert_eq!(home.text("SELECT state FROM scm_merge_requests WHERE iid = 7"), "merged");
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_merge_requests"), 250);
        assert_eq!(home.number("SELECT COUNT(*) FROM scm_patch_blobs WHERE uri LIKE '%/-/merge_requests/7.diff'"), 1);
        home.run(&["scm", "consume"]).done();
        assert_eq!(memory.contents().len(), 251);

        // Broken for good: tried three times more, and the watermark stays.
        let watermark = home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'");
        {
            let mut state = state.lock().unwrap();
            state.merge_requests.push(merge_request(251, "opened", 500));
            state.requests.clear();
            state.statuses = vec![500, 502, 503, 500];
        }
        let broken = sync(&[]);
        assert_eq!(broken.code, 3, "{broken:?}");
        assert_eq!(state.lock().unwrap().requests.len(), 4);
        assert_eq!(home.text("SELECT value_json FROM kv WHERE namespace = 'scm.sync'"), watermark);
        assert_eq!(sync(&[]).done().json()["new"], 1, "and the next run brings it");
        sync(&["--token", "plain"]).ended(2);
    });
}

/// A branch that was rewritten, in the real binary: what it left behind stays, what replaced it comes.
#[test]
fn a_rewritten_branch_is_read_on() {
    let home = Home::sqlite();
    let repo = imported(&home, "rewritten.git", &history(60));
    home.run(&["migrate"]).done();
    assert_eq!(sync(&home, &["git", text(&repo)])["new"], 60);
    run(&repo, &["git", "update-ref", "refs/heads/main", "main~5"], b"");
    let other = b"commit refs/heads/main\ncommitter Ben <ben@example.org> 1700000000 +0000\ndata 5\nother\nfrom refs/heads/main^0\n\n";
    run(&repo, &["git", "fast-import", "--quiet"], other);
    let again = sync(&home, &["git", text(&repo)]);
    assert_eq!((&again["seen"], &again["new"]), (&json!(1), &json!(1)), "{again}");
    run(&repo, &["git", "reflog", "expire", "--expire=now", "--all"], b"");
    run(&repo, &["git", "gc", "--quiet", "--prune=now"], b"");
    let after = sync(&home, &["git", text(&repo)]);
    assert_eq!(after["new"], 0, "what was known and is gone hides nothing, and nothing comes twice");
    assert_eq!(home.number("SELECT COUNT(*) FROM scm_git_commits"), 61);
}

/// The most memory of its own a run of the release build had, in KiB, over a history of so many commits.
fn memory_of_reading(commits: usize) -> u64 {
    let binary = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/release/postrider");
    assert!(binary.is_file(), "build the release first: cargo build --release");
    let home = Home::sqlite();
    let mut stream = Vec::new();
    for n in 1..=commits {
        let message = format!("commit {n}: the message of an ordinary commit, of ordinary length");
        let who = format!("committer Ann <ann@example.org> {} +0000", 1_000_000_000 + n);
        let (from, merge) = (n.saturating_sub(1), n.saturating_sub(7));
        stream.extend(format!("commit refs/heads/main\nmark :{n}\n{who}\ndata {}\n{message}\n", message.len()).bytes());
        if n > 1 {
            stream.extend(format!("from :{from}\n").bytes());
        }
        if n > 10 && n % 10 == 0 {
            stream.extend(format!("merge :{merge}\n").bytes());
        }
        stream.extend(format!("M 100644 inline f{}.txt\ndata 7\n{n:07}\n\n", n % 100).bytes());
    }
    let repo = imported(&home, "long.git", &stream);
    drop(stream);
    home.run(&["migrate"]).done();
    let mut child = Command::new(binary)
        .args(["scm", "sync", "git", text(&repo), "--json"])
        .current_dir(home.path("."))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut most = 0;
    let status = loop {
        let page = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let anonymous = page.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = anonymous.and_then(|text| text.trim().trim_end_matches(" kB").parse().ok());
        most = most.max(kib.unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    assert!(status.success());
    assert_eq!(home.number("SELECT COUNT(*) FROM scm_git_commits"), commits as i64);
    most
}

/// `make scm-million`: once its caches are full, reading takes no more memory, however long the history.
#[test]
#[ignore = "takes minutes and measures; make scm-million runs it"]
fn a_million_commits_are_read_in_bounded_memory() {
    let (some, million) = (memory_of_reading(250_000), memory_of_reading(1_000_000));
    println!("250,000 commits: {} MiB, 1,000,000: {} MiB", some >> 10, million >> 10);
    assert!(million < some + (24 << 10), "{some} KiB for 250,000 commits, {million} KiB for 1,000,000");
}
