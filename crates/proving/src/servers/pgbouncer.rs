//! PgBouncer in transaction mode, and otherwise as it comes: each transaction gets whatever session is free.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::Instant;

use super::account::{Account, spawn_for_good};
use super::{Folder, PING_INTERVAL, START_TIMEOUT, free_port};

pub struct Pooler {
    port: u16,
    process: Child,
    _folder: Folder,
}

impl Pooler {
    /// In front of the PostgreSQL on this port of 127.0.0.1, whose user is `user` and needs no password.
    pub fn before(port: u16, user: &str) -> io::Result<Self> {
        let words = std::env::var("POSTRIDER_TEST_PGBOUNCER")
            .map_err(|_| io::Error::other("POSTRIDER_TEST_PGBOUNCER does not say how to start a PgBouncer"))?;
        let mut words = words.split(' ');
        let binary = words.next().unwrap_or_default();
        let folder = Folder::new()?;
        let home = folder.subfolder("pgbouncer")?;
        let account = Account::choose("postgres")?;
        let (config, users, listens) = (home.join("pgbouncer.ini"), home.join("users.txt"), free_port()?);
        fs::write(&users, format!("\"{user}\" \"\"\n"))?;
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {listens}\n\
             unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\ndefault_pool_size = 10\n",
            users.display()
        );
        fs::write(&config, text)?;
        for path in [&home, &config, &users] {
            account.give(path)?;
        }
        let mut command = account.command(Path::new(binary), "KILL", &home);
        command.args(words);
        let log = File::create(home.join("log"))?;
        command.arg(&config).stdout(log.try_clone()?).stderr(log);
        let mut process = spawn_for_good(command)?;
        let deadline = Instant::now() + START_TIMEOUT;
        while std::net::TcpStream::connect(("127.0.0.1", listens)).is_err() {
            if process.try_wait()?.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(home.join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("pgbouncer did not come up: {log}")));
            }
            sleep(PING_INTERVAL);
        }
        Ok(Pooler { port: listens, process, _folder: folder })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
