//! A database of its own for one test, on the servers `make test` brings; dropped at the end.

use std::sync::atomic::{AtomicU32, Ordering};

use mysql_async::prelude::Queryable;

use super::Session;

pub struct Scratch {
    pub url: String,
    /// What drops it: the server's URL and the statement.
    cleanup: Option<(String, String)>,
    _folder: Option<tempfile::TempDir>,
}

pub fn sqlite() -> Scratch {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let url = format!("sqlite://{}", folder.path().join("scratch.db").display());
    Scratch { url, cleanup: None, _folder: Some(folder) }
}

pub async fn postgres() -> Scratch {
    on_server("POSTRIDER_TEST_POSTGRES", " WITH (FORCE)").await
}

pub async fn mysql() -> Scratch {
    on_server("POSTRIDER_TEST_MYSQL", "").await
}

async fn on_server(variable: &str, force: &str) -> Scratch {
    let server = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: run `make test`"));
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("scratch_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
    let drop = format!("DROP DATABASE IF EXISTS {name}{force}");
    run(&server, &drop).await; // of an earlier run that was killed
    run(&server, &format!("CREATE DATABASE {name}")).await;
    Scratch { url: with_database(&server, &name), cleanup: Some((server, drop)), _folder: None }
}

async fn run(server: &str, sql: &str) {
    if server.starts_with("postgres") {
        let (client, connection) = tokio_postgres::connect(server, tokio_postgres::NoTls).await.expect("PostgreSQL");
        let connection = tokio::spawn(connection);
        client.batch_execute(sql).await.expect(sql);
        connection.abort();
    } else {
        let mut conn = super::session::mysql(server).await.expect("MySQL");
        // A connection a test left open would keep its tables locked for ever. (PostgreSQL: FORCE.)
        if let Some(name) = sql.strip_prefix("DROP DATABASE IF EXISTS ") {
            for (id, database) in Session::of_mysql(&mut conn).await {
                if database.as_deref() == Some(name) {
                    let _ = conn.query_drop(format!("KILL {id}")).await;
                }
            }
        }
        // MariaDB cannot remove the folder while a file of a connection just ended is still there.
        for _ in 0..20 {
            match conn.query_drop(sql).await {
                Err(mysql_async::Error::Server(error)) if error.code == 1010 => {
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
                other => {
                    other.expect(sql);
                    break;
                }
            }
        }
        conn.disconnect().await.expect("MySQL");
    }
}

/// The same server, another database.
fn with_database(server: &str, name: &str) -> String {
    let (address, options) = server.split_once('?').map_or((server, ""), |(address, options)| (address, options));
    let host = address.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
    if options.is_empty() { format!("{host}/{name}") } else { format!("{host}/{name}?{options}") }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let Some((server, sql)) = self.cleanup.take() else { return };
        // A thread of its own: the test's runtime is busy running the test.
        let drop = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(run(&server, &sql));
        });
        if drop.join().is_err() && !std::thread::panicking() {
            panic!("a scratch database could not be dropped");
        }
    }
}
