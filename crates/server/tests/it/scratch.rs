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
        Database::postgres_at(&server("POSTRIDER_TEST_POSTGRES"))
    }

    pub fn postgres_at(server: &str) -> Self {
        let (server, name) = (server.to_owned(), fresh_name());
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

    /// What a query answers, every value as text.
    pub fn rows(&self, folder: &std::path::Path, sql: &str) -> Vec<Vec<String>> {
        match self {
            Database::Sqlite => sqlite_rows(&folder.join("postrider.db"), sql),
            Database::Postgres { url, .. } => postgres_rows(url, sql),
            Database::Mysql { url, .. } => mysql_rows(url, sql),
        }
    }

    /// A moment a day from now, as SQL.
    pub fn in_a_day(&self) -> String {
        match self {
            Database::Sqlite => "(SELECT MAX(first_seen_at) + 86400000000 FROM idempo_ledger)".to_owned(),
            Database::Postgres { .. } => "clock_timestamp() + INTERVAL '1 day'".to_owned(),
            Database::Mysql { .. } => "UTC_TIMESTAMP(6) + INTERVAL 1 DAY".to_owned(),
        }
    }

    /// Bytes, as SQL.
    pub fn bytes(&self, text: &str) -> String {
        match self {
            Database::Postgres { .. } => format!("'{text}'::bytea"),
            _ => format!("'{text}'"),
        }
    }

    /// SQL that makes every update of a table fail, and SQL that ends it.
    pub fn no_updates(&self, table: &str) -> (String, String) {
        self.refuse("UPDATE", table)
    }

    /// The same for `INSERT` or `UPDATE`.
    pub fn refuse(&self, verb: &str, table: &str) -> (String, String) {
        match self {
            Database::Sqlite => (
                format!("CREATE TRIGGER broken BEFORE {verb} ON {table} BEGIN SELECT RAISE(ABORT, 'broken'); END"),
                "DROP TRIGGER broken".to_owned(),
            ),
            Database::Postgres { .. } => (
                format!(
                    "CREATE OR REPLACE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'broken'; END $$;
                     CREATE TRIGGER broken BEFORE {verb} ON {table} FOR EACH ROW EXECUTE FUNCTION broken()"
                ),
                format!("DROP TRIGGER broken ON {table}"),
            ),
            Database::Mysql { .. } => (
                format!(
                    "CREATE TRIGGER broken BEFORE {verb} ON {table} FOR EACH ROW IF TRUE THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'broken'; END IF"
                ),
                "DROP TRIGGER broken".to_owned(),
            ),
        }
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

fn sqlite_rows(file: &std::path::Path, sql: &str) -> Vec<Vec<String>> {
    use rusqlite::types::ValueRef;
    let connection = rusqlite::Connection::open(file).unwrap();
    connection.busy_timeout(std::time::Duration::from_secs(30)).unwrap();
    let mut statement = connection.prepare(sql).unwrap();
    let columns = statement.column_count();
    let text = |value: ValueRef<'_>| match value {
        ValueRef::Null => String::new(),
        ValueRef::Integer(n) => n.to_string(),
        ValueRef::Real(n) => n.to_string(),
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => String::from_utf8_lossy(bytes).into_owned(),
    };
    let rows = statement.query_map([], |row| (0..columns).map(|i| row.get_ref(i).map(text)).collect()).unwrap();
    rows.collect::<Result<_, _>>().unwrap()
}

fn postgres_rows(url: &str, sql: &str) -> Vec<Vec<String>> {
    block_on(async {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
        let connection = tokio::spawn(connection);
        let answer = client.simple_query(sql).await.unwrap();
        drop(client);
        connection.await.unwrap().unwrap();
        let row = |message: &tokio_postgres::SimpleQueryMessage| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => {
                Some((0..row.len()).map(|i| row.get(i).unwrap_or_default().to_owned()).collect())
            }
            _ => None,
        };
        answer.iter().filter_map(row).collect()
    })
}

fn mysql_rows(url: &str, sql: &str) -> Vec<Vec<String>> {
    block_on(async {
        let mut connection = proving::kit::mysql(url).await.unwrap();
        let rows: Vec<mysql_async::Row> = connection.query(sql).await.unwrap();
        connection.disconnect().await.unwrap();
        let text = |value: mysql_async::Value| match value {
            mysql_async::Value::NULL => String::new(),
            mysql_async::Value::Bytes(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            other => other.as_sql(true).trim_matches('\'').to_owned(),
        };
        rows.into_iter().map(|row| row.unwrap().into_iter().map(text).collect()).collect()
    })
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
        let mut connection = proving::kit::mysql(url).await.unwrap();
        connection.query_drop(sql).await.unwrap();
        connection.disconnect().await.unwrap();
    });
}

/// Nobody is in the middle of a write to a SQLite file, or comes to its end within a second.
pub fn takes_writes(file: &std::path::Path) -> bool {
    let database = rusqlite::Connection::open(file).unwrap();
    database.busy_timeout(std::time::Duration::from_secs(1)).unwrap();
    database.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_ok()
}

/// A SQLite file has nothing wrong with it.
pub fn is_whole(file: &std::path::Path) {
    let database = rusqlite::Connection::open(file).unwrap();
    let told: String = database.query_row("PRAGMA integrity_check", (), |row| row.get(0)).unwrap();
    assert_eq!(told, "ok", "{}", file.display());
}
