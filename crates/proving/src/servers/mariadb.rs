//! MariaDB, or MySQL where that is what there is: its programs, a fresh data folder, and the shared settings.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;

use super::account::Account;
use super::install::program;
use super::run;

/// As durable as a production server: what is measured here must be true there. `loose` is for what only one of
/// MariaDB and MySQL knows.
const SETTINGS: &str = "[server]
bind-address = 127.0.0.1
skip-name-resolve
skip-log-bin
performance-schema = OFF
max-connections = 400
max-allowed-packet = 64M
character-set-server = utf8mb4
innodb-buffer-pool-size = 512M
innodb-flush-log-at-trx-commit = 1
loose-innodb-log-file-size = 1G
loose-mysqlx = OFF
";

/// Read at every start. MySQL makes only `root@localhost`, which without name resolution is not who comes by TCP.
const ROOT_BY_TCP: &str = "\
CREATE USER IF NOT EXISTS 'root'@'127.0.0.1';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;
";

const DEATH_SIGNAL: &str = "KILL";

pub struct Engine {
    programs: Programs,
    account: Account,
    home: PathBuf,
}

struct Programs {
    server: PathBuf,
    /// MySQL's server initialises its data folder itself.
    install_db: Option<PathBuf>,
    admin: PathBuf,
}

impl super::Engine for Engine {
    const NAME: &'static str = "mariadb";
    const PACKAGE: &'static str = "mariadb-server";
    const STOP: Signal = Signal::KILL;

    fn installed() -> bool {
        programs().is_some()
    }

    fn create(home: &Path) -> io::Result<Self> {
        let programs = programs().ok_or_else(|| io::Error::other("mariadbd or mariadb-admin is missing"))?;
        let account = Account::choose("mysql")?;
        account.give(home)?;
        let engine = Self { programs, account, home: home.into() };
        fs::write(engine.settings(), engine.settings_text())?;
        fs::write(engine.root_by_tcp(), ROOT_BY_TCP)?;
        run(&mut engine.initialise())?;
        Ok(engine)
    }

    fn serve(&self, port: u16) -> Command {
        let mut command = self.command(&self.programs.server);
        command.arg(format!("--port={port}")).arg(format!("--init-file={}", self.root_by_tcp().display()));
        command
    }

    /// Asks for the status: a bare `ping` is content with "access denied".
    fn ping(&self, port: u16) -> Command {
        let mut command = self.account.command(&self.programs.admin, DEATH_SIGNAL, &self.home);
        command.args(["--no-defaults", "--protocol=tcp", "--host=127.0.0.1", "--user=root", "--connect-timeout=5"]);
        command.arg(format!("--port={port}")).arg("status");
        command
    }

    fn url(port: u16) -> String {
        format!("mysql://root@127.0.0.1:{port}/mysql")
    }

    fn set_environment(&mut self, environment: Vec<(String, OsString)>) {
        self.account.environment = environment;
    }
}

impl Engine {
    fn initialise(&self) -> Command {
        match &self.programs.install_db {
            Some(install_db) => {
                let mut command = self.command(install_db);
                command.args(["--auth-root-authentication-method=normal", "--skip-test-db"]);
                command
            }
            None => {
                let mut command = self.command(&self.programs.server);
                command.arg("--initialize-insecure");
                command
            }
        }
    }

    fn settings(&self) -> PathBuf {
        self.home.join("my.cnf")
    }

    fn settings_text(&self) -> String {
        let home = self.home.display();
        format!("{SETTINGS}datadir = {home}/data\nsocket = {home}/socket\npid-file = {home}/pid\ntmpdir = {home}\n")
    }

    fn root_by_tcp(&self) -> PathBuf {
        self.home.join("root-by-tcp.sql")
    }

    /// The settings file must be the first argument.
    fn command(&self, program: &Path) -> Command {
        let mut command = self.account.command(program, DEATH_SIGNAL, &self.home);
        command.arg(format!("--defaults-file={}", self.settings().display()));
        command
    }
}

fn programs() -> Option<Programs> {
    let find = |name| program(name, &[]);
    if let (Some(server), Some(install_db)) = (find("mariadbd"), find("mariadb-install-db")) {
        return Some(Programs { server, install_db: Some(install_db), admin: find("mariadb-admin")? });
    }
    Some(Programs { server: find("mysqld")?, install_db: None, admin: find("mysqladmin")? })
}
