//! Help, completions, and readers that go away.

use std::io::{BufRead, BufReader};

use crate::home::Home;

#[test]
fn help_is_there_for_every_command() {
    let home = Home::sqlite();
    for args in [
        &["--help"][..],
        &["migrate", "--help"],
        &["enqueue", "--help"],
        &["worker", "--help"],
        &["outbox", "requeue", "--help"],
        &["demo", "--help"],
    ] {
        let answer = home.run(args).done();
        assert!(answer.stdout.contains("Usage: postrider"), "{answer:?}");
    }
    assert!(home.run(&["--version"]).done().stdout.starts_with("postrider "));
}

#[test]
fn completions_for_the_common_shells() {
    let home = Home::sqlite();
    for shell in ["bash", "zsh", "fish"] {
        assert!(home.run(&["completions", shell]).done().stdout.contains("ndjson"), "{shell}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let home = Home::sqlite();
    home.run_with(&["enqueue", "log", "--ndjson", "-"], &"{\"payload\": 1}\n".repeat(3000)).done();
    for args in [
        &["outbox", "list", "--limit", "3000"][..],
        &["outbox", "list", "--limit", "3000", "--json"],
        &["worker", "--once"],
    ] {
        let mut child = home.command(args).spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code().is_some() && !stderr.contains("panic"), "{args:?}: {output:?}");
    }
}
