//! Private database servers on free loopback ports, for tests and benchmarks.
//!
//! A server lives in a temporary [`Folder`] and ends with its value; when the process that holds it is killed,
//! the kernel stops the server and a janitor removes the folder. So a test may as well keep one in a `static`.

// Real processes take real time.
#![allow(clippy::disallowed_methods)]

mod account;
mod folder;
mod install;
mod mariadb;
mod pgbouncer;
mod postgres;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub use folder::Folder;
pub use install::{install, program};
pub use pgbouncer::Pooler;

pub type Postgres = Server<postgres::Engine>;
pub type MariaDb = Server<mariadb::Engine>;

const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const PING_INTERVAL: Duration = Duration::from_millis(50);

/// What the database engines differ in; starting, waiting and stopping are the same for all.
pub trait Engine: Sized {
    const NAME: &'static str;
    /// The distribution's package that brings its programs.
    const PACKAGE: &'static str;
    /// Ends the server at once, as a crash would: the data are thrown away, or a test wants to see the recovery.
    const STOP: Signal;

    fn installed() -> bool;
    /// Fills the empty `folder` with a fresh database.
    fn create(folder: &Path) -> io::Result<Self>;
    /// The server in the foreground, logging to stderr.
    fn serve(&self, port: u16) -> Command;
    /// Succeeds once the server takes connections on `port`.
    fn ping(&self, port: u16) -> Command;
    fn url(port: u16) -> String;
    /// What its programs find in their environment from now on.
    fn set_environment(&mut self, environment: Vec<(String, OsString)>);
}

/// One running server; dropping it stops it.
pub struct Server<E: Engine> {
    engine: E,
    port: u16,
    process: Option<Child>,
    log: PathBuf,
    _folder: Arc<Folder>,
}

impl<E: Engine> Server<E> {
    /// The package to install before a server can start, if that is still to be done.
    pub fn missing_package() -> Option<&'static str> {
        (!E::installed()).then_some(E::PACKAGE)
    }

    /// Starts a server in a folder of its own, installing the engine's package if it is missing.
    pub fn start() -> io::Result<Self> {
        Self::start_in(Arc::new(Folder::new()?))
    }

    /// Starts the one server of this engine in a folder that others may share.
    pub fn start_in(folder: Arc<Folder>) -> io::Result<Self> {
        if let Some(package) = Self::missing_package() {
            install(&[package])?;
        }
        let home = folder.subfolder(E::NAME)?;
        let log = home.with_extension("log");
        let engine = E::create(&home)?;
        let mut server = Self { engine, port: free_port()?, process: None, log, _folder: folder };
        // Between our look and the server's bind another process may take the port; twice is no accident any more.
        server.start_again().or_else(|error| match error.kind() {
            io::ErrorKind::AddrInUse => {
                server.port = free_port()?;
                server.start_again()
            }
            _ => Err(error),
        })?;
        Ok(server)
    }

    /// The administrator's URL; it stays the same over [`stop_immediate`](Self::stop_immediate) and
    /// [`start_again`](Self::start_again).
    pub fn url(&self) -> String {
        E::url(self.port)
    }

    /// For command-line clients that take no URL. Always on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Ends the server as a crash would. Committed data survive, everything else does not.
    pub fn stop_immediate(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        // Only fails if it is gone already.
        let _ = kill_process(Pid::from_child(&process), E::STOP);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while Instant::now() < deadline {
            match process.try_wait() {
                Ok(None) => sleep(Duration::from_millis(5)),
                Ok(Some(_)) | Err(_) => return,
            }
        }
        let _ = process.kill();
        let _ = process.wait();
    }

    /// Starts a stopped server on its old port and data, and waits until it takes connections.
    pub fn start_again(&mut self) -> io::Result<()> {
        self.stop_immediate();
        let log = File::create(&self.log)?;
        let mut serve = self.engine.serve(self.port);
        serve.stdout(log.try_clone()?).stderr(log);
        self.process = Some(account::spawn_for_good(serve)?);
        self.wait_until_ready().inspect_err(|_| self.stop_immediate())
    }

    /// Starts it again with this in its environment.
    pub fn start_again_with(&mut self, environment: &[(&str, &OsStr)]) -> io::Result<()> {
        let owned = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        self.engine.set_environment(owned.collect());
        self.start_again()
    }

    /// The end of the log, if the server ended without being told to.
    pub fn died(&mut self) -> Option<String> {
        let status = self.process.as_mut()?.try_wait().ok()??;
        Some(format!("{} ended by itself ({status})\n{}", E::NAME, self.log_tail()))
    }

    fn wait_until_ready(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while Instant::now() < deadline {
            // In this order, since the ping may be answered by somebody else who got the port.
            let answered = succeeds(&mut self.engine.ping(self.port));
            if let Some(report) = self.died() {
                let taken = report.contains("Address already in use");
                let kind = if taken { io::ErrorKind::AddrInUse } else { io::ErrorKind::Other };
                return Err(io::Error::new(kind, report));
            }
            if answered {
                return Ok(());
            }
            sleep(PING_INTERVAL);
        }
        let waited = START_TIMEOUT.as_secs();
        Err(io::Error::other(format!("{} did not come up within {waited} s\n{}", E::NAME, self.log_tail())))
    }

    fn log_tail(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(30)..];
        format!("the end of {}:\n  {}", self.log.display(), tail.join("\n  "))
    }
}

impl<E: Engine> Drop for Server<E> {
    fn drop(&mut self) {
        self.stop_immediate();
    }
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Runs a command that prepares something; what it printed is only of interest when it fails.
fn run(command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let printed = [output.stdout, output.stderr].concat();
    Err(io::Error::other(format!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&printed))))
}

fn succeeds(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
