//! The demo comes out as told, quickly, and leaves nothing behind.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use serde_json::json;

use crate::api::exchange;
use crate::home::{Home, wait_until};

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

#[test]
fn staying_it_shows_the_dashboard_until_it_is_told_to_go() {
    let home = Home::sqlite();
    let mut child = home.command(&["demo", "--stay"]).stderr(std::process::Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address =
        lines.into_iter().find_map(|line| Some(line.split_once("http://")?.1.split_once("/ and")?.0.to_owned()));
    let address = address.expect("it tells where the dashboard is");
    assert!(exchange(&address, "GET", "/", &[], b"").answered(200).body.contains("Postrider"));
    let sent =
        || exchange(&address, "GET", "/v1/outbox?lane=invoices&status=sent&limit=1", &[], b"").answered(200).json();
    let newest = || sent()["items"][0]["id"].as_i64().unwrap();
    let before = newest();
    wait_until("there is something to see", || newest() > before);
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    wait_until("it goes", || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
