//! The demo comes out as told, quickly, and leaves nothing behind.

use std::time::Duration;

use serde_json::json;

use crate::home::Home;

#[test]
fn the_demo_comes_out_as_told() {
    let home = Home::sqlite();
    let mut command = home.command(&["demo", "--json"]);
    std::fs::create_dir(home.path("tmp")).unwrap();
    let output = command.env("TMPDIR", home.path("tmp")).output().unwrap();
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_eq!((output.status.code(), &said["passed"]), (Some(0), &json!(true)), "{said:#}");
    assert_eq!(std::fs::read_dir(home.path("tmp")).unwrap().count(), 0, "the folder is removed");
}

#[test]
fn without_a_terminal_it_tells_plain_lines() {
    let home = Home::sqlite();
    let answer = home.start(&["demo"]).ends_within(Duration::from_secs(50)).done();
    assert!(answer.stdout.contains("All came out as told.") && !answer.stdout.contains('\x1b'), "{answer:?}");
}
