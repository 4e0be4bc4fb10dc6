//! A database for one test: the default SQLite file of its folder, or a new one on the servers of `make test`.

use std::sync::atomic::{AtomicU32, Ordering};

use mysql_async::prelude::Queryable;

pub enum Database {
    /// `postrider.db` in the test's folder: what one gets without any configuration.
    Sqlite,
    Postgres {
        server: String,
        url: String,
        name: String,
    },
    Mysql {
        server: String,
        url: String,
        name: String,
    },
}

impl Database {
    pub fn sqlite() -> Self {
        Database::Sqlite
    }

    pub fn postgres() -> Self {
        let (server, name) = (server("POSTRIDER_TEST_POSTGRES"), fresh_name());
        on_postgres(&server, &format!("CREATE DATABASE {name}"));
        Database::Postgres { url: with_path(&server, &name), server, name }
    }

    pub fn mysql() -> Self {
        let (server, name) = (server("POSTRIDER_TEST_MYSQL"), fresh_name());
        on_mysql(&server, &format!("CREATE DATABASE {name}"));
        Database::Mysql { url: with_path(&server, &name), server, name }
    }

    pub fn url(&self) -> Option<&str> {
        match self {
            Database::Sqlite => None,
            Database::Postgres { url, .. } | Database::Mysql { url, .. } => Some(url),
        }
    }

    pub fn is_server(&self) -> bool {
        self.url().is_some()
    }

    /// Runs SQL behind the command's back.
    pub fn sql(&self, folder: &std::path::Path, sql: &str) {
        match self {
            Database::Sqlite => {
                rusqlite::Connection::open(folder.join("postrider.db")).unwrap().execute_batch(sql).unwrap();
            }
            Database::Postgres { url, .. } => on_postgres(url, sql),
            Database::Mysql { url, .. } => on_mysql(url, sql),
        }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return; // kept for a look, as long as the server lives
        }
        match self {
            Database::Sqlite => {}
            Database::Postgres { server, name, .. } => {
                on_postgres(server, &format!("DROP DATABASE {name} WITH (FORCE)"))
            }
            Database::Mysql { server, name, .. } => on_mysql(server, &format!("DROP DATABASE {name}")),
        }
    }
}

/// The servers must be there: a database that could not be started is a failure, never a skipped test.
fn server(variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: run make test"))
}

fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("cli_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn with_path(server: &str, name: &str) -> String {
    let mut url = url::Url::parse(server).unwrap();
    url.set_path(name);
    url.into()
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn on_postgres(url: &str, sql: &str) {
    block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        let connection = tokio::spawn(connection);
        client.batch_execute(sql).await.unwrap();
        drop(client);
        connection.await.unwrap().unwrap();
    });
}

pub fn on_mysql(url: &str, sql: &str) {
    block_on(async {
        let mut connection = mysql_async::Conn::from_url(url).await.unwrap();
        connection.query_drop(sql).await.unwrap();
        connection.disconnect().await.unwrap();
    });
}
