//! `with-databases -- COMMAND…` runs a command with database servers of its own and leaves nothing behind.

use std::io::{self, IsTerminal};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;

use proving::servers::{Folder, MariaDb, Postgres, install};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

const USAGE: &str = "\
Usage: with-databases [--postgres-only | --mysql-only] [--] COMMAND [ARGUMENT]...

Starts a private PostgreSQL and a private MariaDB, runs COMMAND with their URLs in
POSTRIDER_TEST_POSTGRES and POSTRIDER_TEST_MYSQL, and exits with COMMAND's code.
A server whose variable is already set is not started. Exits with 2 when it could
not do its own part.";

const POSTGRES: &str = "POSTRIDER_TEST_POSTGRES";
const MYSQL: &str = "POSTRIDER_TEST_MYSQL";
const ABOUT_US: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (postgres, mysql, rest) = match arguments.first().map(String::as_str) {
        Some("--postgres-only") => (true, false, &arguments[1..]),
        Some("--mysql-only") => (false, true, &arguments[1..]),
        _ => (true, true, &arguments[..]),
    };
    // `cargo run --` keeps the first `--` to itself.
    let command = if rest.first().is_some_and(|word| word == "--") { &rest[1..] } else { rest };
    if command.first().is_none_or(|word| word.starts_with('-')) {
        return failed(USAGE);
    }
    match run(postgres && is_unset(POSTGRES), mysql && is_unset(MYSQL), command) {
        Ok(code) => code,
        Err(error) => failed(&format!("with-databases: {error}")),
    }
}

fn failed(message: &str) -> ExitCode {
    eprintln!("{message}");
    ExitCode::from(2)
}

fn is_unset(variable: &str) -> bool {
    std::env::var_os(variable).is_none_or(|url| url.is_empty())
}

fn run(postgres: bool, mysql: bool, words: &[String]) -> io::Result<ExitCode> {
    // From here on a signal waits until there is somebody to pass it to, or everything is cleaned up.
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM, SIGCHLD])?;
    let (mut postgres, mut mysql) = start(postgres, mysql)?;
    if let Some(signal) = signals.pending().find(|signal| *signal != SIGCHLD) {
        return Ok(code_of_signal(signal));
    }
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    // What `cargo run` told us of our own package. To build scripts that watch such variables a cargo below us would seem
    // another one than a cargo beside us, and each of the two would build half of the dependencies again.
    for (name, _) in std::env::vars_os() {
        if ABOUT_US.iter().any(|start| name.as_encoded_bytes().starts_with(start.as_bytes())) {
            command.env_remove(name);
        }
    }
    if let Some(postgres) = &postgres {
        command.env(POSTGRES, postgres.url());
    }
    if let Some(mysql) = &mysql {
        command.env(MYSQL, mysql.url());
    }
    let status = Foreground::spawn(command)?.wait(&mut signals)?;
    let died = [postgres.as_mut().and_then(Postgres::died), mysql.as_mut().and_then(MariaDb::died)];
    died.into_iter().flatten().for_each(|report| eprintln!("with-databases: {report}"));
    Ok(status.code().map_or_else(|| code_of_signal(status.signal().unwrap_or(0)), |code| ExitCode::from(code as u8)))
}

fn start(postgres: bool, mysql: bool) -> io::Result<(Option<Postgres>, Option<MariaDb>)> {
    let missing = [postgres.then(Postgres::missing_package), mysql.then(MariaDb::missing_package)];
    let mut missing: Vec<&str> = missing.into_iter().flatten().flatten().collect();
    // What the documentation shows in Python is run by tests.
    let python = Command::new("python3").args(["-c", "import ensurepip, sqlite3"]).stderr(Stdio::null()).status();
    if !python.is_ok_and(|status| status.success()) {
        missing.push("python3-venv");
    }
    if !missing.is_empty() {
        install(&missing)?;
    }
    let folder = Arc::new(Folder::new()?);
    let (postgres, mysql) = thread::scope(|scope| {
        let postgres = scope.spawn(|| postgres.then(|| Postgres::start_in(folder.clone())).transpose());
        let mysql = mysql.then(|| MariaDb::start_in(folder.clone())).transpose();
        (postgres.join().expect("starting returns its errors"), mysql)
    });
    Ok((postgres?, mysql?))
}

/// As shells do it.
fn code_of_signal(signal: i32) -> ExitCode {
    ExitCode::from(128 + signal as u8)
}

/// The command while it runs, and our signals' way to it.
struct Foreground {
    child: Child,
    /// Without a terminal it gets a process group, so that a signal reaches what it has started, too: `cargo test`
    /// alone would die and leave the tests running. At a terminal a group of its own could not read the keyboard.
    has_group: bool,
}

impl Foreground {
    fn spawn(mut command: Command) -> io::Result<Self> {
        let has_group = !io::stdin().is_terminal();
        if has_group {
            command.process_group(0);
        }
        let child =
            command.spawn().map_err(|error| io::Error::other(format!("{:?}: {error}", command.get_program())))?;
        Ok(Self { child, has_group })
    }

    fn wait(mut self, signals: &mut Signals) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            for signal in signals.wait() {
                self.pass_on(signal);
            }
        }
    }

    fn pass_on(&self, signal: i32) {
        let signal = match signal {
            SIGHUP => Signal::HUP,
            SIGTERM => Signal::TERM,
            // The terminal has sent it to everybody already.
            SIGINT if self.has_group => Signal::INT,
            _ => return,
        };
        let pid = Pid::from_child(&self.child);
        // Only fails if it is gone already, and then the next `try_wait` tells.
        let _ = if self.has_group { kill_process_group(pid, signal) } else { kill_process(pid, signal) };
    }
}
