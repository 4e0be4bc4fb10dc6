//! Real processes of the product on one database, each in a folder of its own with a configuration of its own, as they
//! run on several hosts.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::{SHORT_LEASE, http, wait_until};

pub struct Fleet {
    binary: PathBuf,
    database: String,
    members: Vec<Member>,
}

struct Member {
    folder: TempDir,
    args: Vec<String>,
    environment: Vec<(&'static str, OsString)>,
    process: Option<Child>,
}

impl Fleet {
    /// `binary` is the product's; `database` a URL that means the same from every folder.
    pub fn new(binary: impl AsRef<Path>, database: &str) -> Fleet {
        Fleet { binary: binary.as_ref().to_owned(), database: database.to_owned(), members: vec![] }
    }

    /// A folder with this `postrider.toml` to run commands in; answers its number.
    pub fn folder(&mut self, config: &str) -> usize {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("postrider.toml"), config).expect("postrider.toml");
        self.members.push(Member { folder, args: vec![], environment: vec![], process: None });
        self.members.len() - 1
    }

    /// Starts one more, in an empty folder with this `postrider.toml`; answers its number.
    pub fn start(&mut self, config: &str, args: &[&str]) -> usize {
        self.start_with(config, args, vec![])
    }

    /// The same with something in its environment, such as another clock.
    pub fn start_with(&mut self, config: &str, args: &[&str], environment: Vec<(&'static str, OsString)>) -> usize {
        let n = self.folder(config);
        self.members[n].args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.members[n].environment = environment;
        self.restart(n);
        n
    }

    /// Starts one again that has ended, in its folder as it is.
    pub fn restart(&mut self, n: usize) {
        let args = self.members[n].args.clone();
        let mut command = self.command(n, &args.iter().map(String::as_str).collect::<Vec<_>>());
        let file = |name: &str| File::create(self.members[n].folder.path().join(name)).expect("a log");
        command.stdout(file("stdout")).stderr(file("stderr")).envs(self.members[n].environment.iter().cloned());
        self.members[n].process = Some(command.spawn().expect("the product's binary"));
    }

    /// A command in the folder of one of them, with nothing of the tester's environment.
    pub fn command(&self, n: usize, args: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(args).current_dir(self.members[n].folder.path()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("OUTBOX_") || name.starts_with("POSTRIDER_") || name == "POSTGRES_DSN" {
                command.env_remove(name.as_ref());
            }
        }
        command.env("POSTRIDER_DATABASE", &self.database);
        command
    }

    /// Runs a command to its end in the folder of one of them; answers its code and what it printed, as JSON.
    pub fn run(&self, n: usize, args: &[&str]) -> (i32, Value) {
        self.ends(self.command(n, args))
    }

    fn ends(&self, mut command: Command) -> (i32, Value) {
        let output = command.output().expect("the product's binary");
        let printed = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&output.stderr).into_owned()));
        (output.status.code().unwrap_or(-1), printed)
    }

    /// Where one of them listens, once it does.
    pub fn address(&self, n: usize) -> String {
        wait_until("it listens", || self.listens(n).is_some());
        self.listens(n).unwrap_or_default()
    }

    /// Where one of them listens, if it does so far.
    pub fn listens(&self, n: usize) -> Option<String> {
        let said = std::fs::read_to_string(self.members[n].folder.path().join("stdout")).unwrap_or_default();
        said.lines().find_map(|line| Some(line.split_once("://")?.1.trim().to_owned()))
    }

    /// Has one of them ended, whoever wanted it?
    pub fn has_ended(&mut self, n: usize) -> bool {
        let process = self.members[n].process.as_mut();
        process.is_none_or(|process| process.try_wait().expect("a process").is_some())
    }

    /// Asks the API of one of them.
    pub fn ask(&self, n: usize, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        http::ask(&self.address(n), method, path, body.as_ref()).expect("an answer")
    }

    /// What one of them answers to a GET, as text.
    pub fn text(&self, n: usize, path: &str) -> String {
        http::exchange(&self.address(n), "GET", path, None).expect("an answer").1
    }

    /// What one of them has logged.
    pub fn log(&self, n: usize) -> String {
        std::fs::read_to_string(self.members[n].folder.path().join("stderr")).unwrap_or_default()
    }

    pub fn signal(&self, n: usize, signal: Signal) {
        if let Some(process) = &self.members[n].process {
            kill_process(Pid::from_child(process), signal).expect("a signal");
        }
    }

    /// Tells one of them to stop, and waits; answers its code.
    pub fn stop(&mut self, n: usize) -> Option<i32> {
        self.signal(n, Signal::TERM);
        let mut process = self.members[n].process.take()?;
        wait_until("it has stopped", || process.try_wait().expect("a process").is_some());
        process.wait().ok()?.code()
    }

    /// The last step of a test with several processes: the doctor finds nothing.
    pub fn is_healthy(&self, n: usize) {
        super::is_healthy(|| {
            let mut command = self.command(n, &["doctor", "--json"]);
            command.envs(SHORT_LEASE);
            let (code, report) = self.ends(command);
            (code == 0 && report["ok"] == true, format!("{report}\n{}", self.log(n)))
        });
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for member in &mut self.members {
            if let Some(mut process) = member.process.take() {
                let _ = process.kill();
                let _ = process.wait();
            }
        }
    }
}
