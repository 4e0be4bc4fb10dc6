//! A folder of its own to run the binary in, with nothing of the tester's environment, and its answers.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::scratch::Database;

/// Nothing here takes this long unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Home {
    folder: TempDir,
    pub database: Database,
}

/// What a run answered.
#[derive(Debug)]
pub struct Answer {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Home {
    pub fn sqlite() -> Self {
        Home::on(Database::sqlite())
    }

    pub fn on(database: Database) -> Self {
        Home { folder: TempDir::new().unwrap(), database }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> &Self {
        std::fs::write(self.path(name), text).unwrap();
        self
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_postrider"));
        command.args(args).current_dir(self.folder.path());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("OUTBOX_")
                || name.starts_with("POSTRIDER_")
                || name == "POSTGRES_DSN"
                || name == "RUST_LOG"
            {
                command.env_remove(name.as_ref());
            }
        }
        if let Some(url) = self.database.url() {
            command.env("POSTRIDER_DATABASE", url);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, args: &[&str]) -> Answer {
        Answer::from(self.command(args).output().unwrap())
    }

    /// Runs with this on standard input.
    pub fn run_with(&self, args: &[&str], input: &str) -> Answer {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // The command may end without having read all.
        let _ = stdin.write_all(input.as_bytes());
        drop(stdin);
        Answer::from(child.wait_with_output().unwrap())
    }

    pub fn start(&self, args: &[&str]) -> Running {
        Running(Some(self.command(args).spawn().unwrap()))
    }

    /// Without logs: nobody reads the pipe, and a process that has much to say would block on it.
    pub fn start_silent(&self, args: &[&str]) -> Running {
        Running(Some(self.command(args).stderr(Stdio::null()).spawn().unwrap()))
    }

    /// With its log in a file of this name.
    pub fn start_logging(&self, args: &[&str], log: &str) -> Running {
        let log = std::fs::File::create(self.path(log)).unwrap();
        Running(Some(self.command(args).stdout(Stdio::null()).stderr(log).spawn().unwrap()))
    }

    /// A silent one below another program, such as `unshare`, and with this in its environment.
    pub fn start_below(&self, program: &[&str], environment: &[(&str, &str)], args: &[&str]) -> Running {
        let usual = self.command(args);
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(usual.get_program()).args(usual.get_args());
        command.current_dir(usual.get_current_dir().unwrap());
        for (name, value) in usual.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Running(Some(command.spawn().unwrap()))
    }

    /// What a query behind the command's back answers, as text.
    pub fn rows(&self, sql: &str) -> Vec<Vec<String>> {
        self.database.rows(self.folder.path(), sql)
    }

    pub fn text(&self, sql: &str) -> String {
        self.rows(sql).first().and_then(|row| row.first().cloned()).unwrap_or_else(|| panic!("no row: {sql}"))
    }

    pub fn number(&self, sql: &str) -> i64 {
        self.text(sql).parse().unwrap()
    }

    pub fn execute(&self, sql: &str) {
        self.database.sql(self.folder.path(), sql);
    }

    /// `outbox stats --json` of one lane.
    /// The last step of a test with several processes: the doctor finds nothing.
    pub fn is_healthy(&self) {
        proving::kit::is_healthy(|| {
            let mut command = self.command(&["doctor", "--json"]);
            let answer = Answer::from(command.envs(proving::kit::SHORT_LEASE).output().unwrap());
            (answer.code == 0, answer.stdout + &answer.stderr)
        });
    }

    pub fn stats(&self, lane: &str) -> Value {
        self.run(&["outbox", "stats", "--json"]).done().json()["lanes"][lane].clone()
    }

    pub fn show(&self, id: i64) -> Value {
        self.run(&["outbox", "show", &id.to_string(), "--json"]).done().json()
    }

    pub fn enqueue(&self, args: &[&str]) -> i64 {
        let answer = self.run(&[&["enqueue"], args].concat()).done().json();
        assert_eq!(answer["outcome"], "created", "{answer}");
        answer["id"].as_i64().unwrap()
    }
}

impl From<Output> for Answer {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let answer = Answer {
            code: output.status.code().unwrap_or(-1),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        };
        assert!(!answer.stderr.contains("panicked"), "{answer:?}");
        answer
    }
}

impl Answer {
    /// It ended with 0.
    pub fn done(self) -> Self {
        self.ended(0)
    }

    pub fn ended(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:#?}");
        self
    }

    /// Refused with this code, one `error:` line that says this, and nothing on stdout.
    pub fn refused(self, code: i32, says: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (code, ""), "{self:#?}");
        assert!(self.stderr.lines().any(|line| line.starts_with("error: ")), "{self:#?}");
        for text in says {
            assert!(self.stderr.contains(text), "it should say {text:?}: {self:#?}");
        }
    }

    /// Standard output is one JSON document and nothing else.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:#?}"))
    }
}

/// A process of ours; it is killed when the test forgets it.
pub struct Running(Option<Child>);

impl Running {
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.0.as_ref().unwrap())
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Waits for the end, at most this long.
    pub fn ends_within(mut self, limit: Duration) -> Answer {
        let mut child = self.0.take().unwrap();
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if begun.elapsed() > limit {
                child.kill().unwrap();
                panic!("still running after {limit:?}: {:?}", child.wait_with_output());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Answer::from(child.wait_with_output().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Waits until the condition holds.
pub fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_long_until(what, PATIENCE, holds);
}

pub fn wait_long_until(what: &str, patience: Duration, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < patience, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
