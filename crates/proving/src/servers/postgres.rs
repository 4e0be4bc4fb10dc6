//! PostgreSQL: where its programs are, how a fresh cluster is made, and the settings tests and benchmarks share.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use rustix::process::Signal;

use super::Folder;
use super::account::Account;
use super::install::program;
use super::run;

/// As durable as a production server: what is measured here must be true there.
const SETTINGS: &str = "
listen_addresses = '127.0.0.1'
max_connections = 300
shared_buffers = 512MB
fsync = on
synchronous_commit = on
full_page_writes = on
wal_level = replica
max_wal_size = 4GB
checkpoint_timeout = 15min
";

/// An immediate shutdown. Not SIGKILL, which would leave shared memory behind.
const DEATH_SIGNAL: &str = "QUIT";

pub struct Engine {
    programs: Programs,
    account: Account,
    home: PathBuf,
}

struct Programs {
    initdb: PathBuf,
    postgres: PathBuf,
    pg_isready: PathBuf,
    pg_basebackup: PathBuf,
}

impl super::Engine for Engine {
    const NAME: &'static str = "postgres";
    const PACKAGE: &'static str = "postgresql";
    const STOP: Signal = Signal::QUIT;

    fn installed() -> bool {
        programs().is_some()
    }

    fn create(home: &Path) -> io::Result<Self> {
        let programs = programs().ok_or_else(missing)?;
        let account = Account::choose("postgres")?;
        account.give(home)?;
        let engine = Self { programs, account, home: home.into() };
        let mut initdb = engine.command(&engine.programs.initdb);
        initdb.args(["--username=postrider", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]);
        run(initdb.arg("--pgdata").arg(engine.data()))?;
        let mut settings = OpenOptions::new().append(true).open(engine.data().join("postgresql.conf"))?;
        settings.write_all(SETTINGS.as_bytes())?;
        writeln!(settings, "unix_socket_directories = '{}'", home.display())?;
        Ok(engine)
    }

    fn serve(&self, port: u16) -> Command {
        let mut command = self.command(&self.programs.postgres);
        command.arg("-D").arg(self.data()).args(["-p", &port.to_string()]);
        command
    }

    fn ping(&self, port: u16) -> Command {
        let mut command = self.command(&self.programs.pg_isready);
        command.args(["-h", "127.0.0.1", "-U", "postrider", "-d", "postgres", "-p", &port.to_string()]);
        command
    }

    fn url(port: u16) -> String {
        format!("postgres://postrider@127.0.0.1:{port}/postgres")
    }

    fn set_environment(&mut self, environment: Vec<(String, OsString)>) {
        self.account.environment = environment;
    }
}

impl Engine {
    fn data(&self) -> PathBuf {
        self.home.join("data")
    }

    fn command(&self, program: &Path) -> Command {
        self.account.command(program, DEATH_SIGNAL, &self.home)
    }
}

fn programs() -> Option<Programs> {
    let places = version_folders();
    let find = |name| program(name, &places);
    Some(Programs {
        initdb: find("initdb")?,
        postgres: find("postgres")?,
        pg_isready: find("pg_isready")?,
        pg_basebackup: find("pg_basebackup")?,
    })
}

fn missing() -> io::Error {
    io::Error::other("initdb, postgres, pg_isready or pg_basebackup is missing")
}

/// Debian keeps the servers of each version apart and out of `PATH`; newest first.
fn version_folders() -> Vec<PathBuf> {
    let entries = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut versions: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    versions.sort_unstable_by(|a, b| b.cmp(a));
    versions.into_iter().map(|version| format!("/usr/lib/postgresql/{version}/bin").into()).collect()
}

impl super::Server<Engine> {
    /// A standby that receives what this server writes, as soon as it can and without anybody waiting for it.
    pub fn standby(&self) -> io::Result<Self> {
        let folder = Arc::new(Folder::new()?);
        let home = folder.subfolder("standby")?;
        let engine = Engine { programs: programs().ok_or_else(missing)?, account: Account::choose("postgres")?, home };
        engine.account.give(&engine.home)?;
        let mut copy = engine.command(&engine.programs.pg_basebackup);
        copy.args(["-h", "127.0.0.1", "-U", "postrider", "-p", &self.port.to_string(), "--write-recovery-conf"]);
        run(copy.args(["--wal-method=stream", "--checkpoint=fast", "--no-sync", "--pgdata"]).arg(engine.data()))?;
        let mut settings = OpenOptions::new().append(true).open(engine.data().join("postgresql.conf"))?;
        writeln!(settings, "unix_socket_directories = '{}'", engine.home.display())?;
        let log = engine.home.with_extension("log");
        let port = super::free_port()?;
        let mut server = Self { engine, port, process: None, log, _folder: folder };
        server.start_again()?;
        Ok(server)
    }

    /// Starts it again where that other one was, so that its clients come here.
    pub fn take_the_place_of(&mut self, other: &mut Self) -> io::Result<()> {
        other.stop_immediate();
        self.port = other.port;
        self.start_again()
    }

    /// Restarts the server with a certificate of the caller's, so that it also speaks TLS.
    pub fn speak_tls(&mut self, certificate_pem: &str, key_pem: &str) -> io::Result<()> {
        use std::os::unix::fs::OpenOptionsExt;
        let data = self.engine.data();
        for (name, pem) in [("server.crt", certificate_pem), ("server.key", key_pem)] {
            let path = data.join(name);
            // It refuses a key that others could read.
            let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path)?;
            file.write_all(pem.as_bytes())?;
            self.engine.account.give(&path)?;
        }
        self.start_with("ssl = on")
    }

    /// Restarts the server with one more line of its configuration.
    pub fn start_with(&mut self, setting: &str) -> io::Result<()> {
        let path = self.engine.data().join("postgresql.conf");
        writeln!(OpenOptions::new().append(true).open(path)?, "{setting}")?;
        self.start_again()
    }
}
