//! The private servers keep their promises: data survive a crash, and nothing survives their owner.
#![allow(clippy::disallowed_methods)]

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use proving::servers::{Engine, MariaDb, Postgres, Server};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

#[test]
fn postgres_comes_back_with_its_data() {
    comes_back_with_its_data(|server: &Postgres, sql| {
        let mut psql = Command::new("psql");
        psql.args(["--no-psqlrc", "--tuples-only", "--no-align", "--dbname", &server.url(), "--command", sql]);
        psql
    });
}

#[test]
fn mariadb_comes_back_with_its_data() {
    comes_back_with_its_data(|server: &MariaDb, sql| {
        let mut mariadb = Command::new("mariadb");
        mariadb.args(["--no-defaults", "--host=127.0.0.1", "--user=root", "--database=mysql", "--skip-column-names"]);
        mariadb.arg(format!("--port={}", server.port())).args(["--execute", sql]);
        mariadb
    });
}

fn comes_back_with_its_data<E: Engine + Send + 'static>(client: impl Fn(&Server<E>, &str) -> Command) {
    let ask = |server: &Server<E>, sql| {
        let output = client(server, sql).output().expect("the client comes with the server");
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
    };
    // In a thread that ends: the server must outlive it.
    let mut server = std::thread::spawn(|| Server::<E>::start().unwrap()).join().unwrap();
    let url = server.url();
    ask(&server, "CREATE TABLE letters (name varchar(9)); INSERT INTO letters VALUES ('first')").unwrap();

    server.stop_immediate();
    assert_eq!(ask(&server, "SELECT name FROM letters"), None);

    server.start_again().unwrap();
    assert_eq!(server.url(), url);
    assert_eq!(ask(&server, "SELECT name FROM letters").as_deref(), Some("first"));
    assert_eq!(server.died(), None);
}

#[test]
fn wrapper_passes_the_exit_code_on() {
    let folder = folder();
    let status = wrapper(&folder).args(["sh", "-c", "exit 7"]).status().unwrap();
    assert_eq!(status.code(), Some(7));
    assert_eq!(leftovers(&folder), 0);
}

#[test]
fn wrapper_cleans_up_on_sigterm() {
    let folder = folder();
    let (mut wrapper, port) = running_wrapper(&folder);
    kill_process(Pid::from_child(&wrapper), Signal::TERM).unwrap();
    assert_eq!(wrapper.wait().unwrap().code(), Some(128 + 15));
    assert_eq!((leftovers(&folder), answers(port)), (0, false));
}

#[test]
fn killed_wrapper_leaves_nothing_behind() {
    let folder = folder();
    let (mut wrapper, port) = running_wrapper(&folder);
    assert_eq!((leftovers(&folder), answers(port)), (1, true));
    wrapper.kill().unwrap();
    wrapper.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while (leftovers(&folder), answers(port)) != (0, false) {
        assert!(Instant::now() < deadline, "the server or its folder is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Where the wrapper puts its folder, so that what is left of it can be counted.
fn folder() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::set_permissions(&folder, Permissions::from_mode(0o711)).unwrap();
    folder
}

fn wrapper(folder: &TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_with-databases"));
    command.env("TMPDIR", folder.path()).env_remove("POSTRIDER_TEST_POSTGRES").args(["--postgres-only", "--"]);
    command
}

/// A wrapper around a command that lasts as long as its standard input, and its server's port.
fn running_wrapper(folder: &TempDir) -> (Child, u16) {
    let mut command = wrapper(folder);
    command.args(["sh", "-c", "echo $POSTRIDER_TEST_POSTGRES; cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut wrapper = command.spawn().unwrap();
    let mut url = String::new();
    BufReader::new(wrapper.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let port =
        url.trim().strip_prefix("postgres://postrider@127.0.0.1:").and_then(|rest| rest.strip_suffix("/postgres"));
    (wrapper, port.expect("a URL of the promised form").parse().unwrap())
}

fn leftovers(folder: &TempDir) -> usize {
    fs::read_dir(folder).unwrap().count()
}

fn answers(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}
