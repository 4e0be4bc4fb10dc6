//! A session the product knows nothing of, as an application or a forgotten `psql` has it: it may hold a lock or a
//! transaction open for as long as it likes.

use std::time::Duration;

use mysql_async::prelude::Queryable;
use postrider::tx::Dialect;

/// A connection by driver.
pub enum Session {
    Sqlite(rusqlite::Connection),
    Postgres(tokio_postgres::Client),
    Mysql(mysql_async::Conn),
}

/// A connection to this address and no other: by itself the driver would ask the server for its socket and go there.
pub async fn mysql(url: &str) -> mysql_async::Result<mysql_async::Conn> {
    let opts = mysql_async::OptsBuilder::from_opts(mysql_async::Opts::from_url(url)?).prefer_socket(false);
    let mut connection = mysql_async::Conn::new(opts).await?;
    // MariaDB refuses callers with an old snapshot from 11.6 on (1020), unless they do without; others know no such word.
    let _ = connection.query_drop("SET SESSION innodb_snapshot_isolation = OFF").await;
    Ok(connection)
}

impl Session {
    pub async fn connect(dialect: Dialect, url: &str) -> Session {
        match dialect {
            Dialect::Sqlite => {
                let path = url.strip_prefix("sqlite://").expect("a file");
                let connection = rusqlite::Connection::open(path).expect("open");
                connection.busy_timeout(Duration::from_secs(10)).expect("timeout");
                Session::Sqlite(connection)
            }
            Dialect::Postgres => Session::to_postgres(url).await.expect("connect to PostgreSQL"),
            Dialect::Mysql => Session::Mysql(mysql(url).await.expect("connect to MySQL")),
        }
    }

    /// To a server that may not let anybody in.
    pub async fn to_postgres(url: &str) -> Result<Session, tokio_postgres::Error> {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
        tokio::spawn(connection);
        Ok(Session::Postgres(client))
    }

    /// The same by URL.
    pub async fn to(url: &str) -> Session {
        let dialect = match url.split(':').next() {
            Some("sqlite") => Dialect::Sqlite,
            Some("mysql") => Dialect::Mysql,
            _ => Dialect::Postgres,
        };
        Session::connect(dialect, url).await
    }

    /// Begins a transaction that locks these rows (`outbox WHERE id = 1`), and stays open. On SQLite it is the one writer.
    pub async fn holding(url: &str, rows: &str) -> Session {
        let mut session = Session::to(url).await;
        if matches!(session, Session::Sqlite(_)) {
            session.run("BEGIN IMMEDIATE").await.expect("begin");
        } else {
            session.run("BEGIN").await.expect("begin");
            session.run(&format!("SELECT 1 FROM {rows} FOR UPDATE")).await.expect("lock");
        }
        session
    }

    /// Runs statements; what they answer is dropped.
    pub async fn run(&mut self, sql: &str) -> Result<(), String> {
        match self {
            Session::Sqlite(connection) => connection.execute_batch(sql).map_err(|e| e.to_string()),
            Session::Postgres(client) => client
                .batch_execute(sql)
                .await
                .map_err(|e| e.as_db_error().map_or(e.to_string(), |db| db.message().to_owned())),
            Session::Mysql(conn) => conn.query_drop(sql).await.map_err(|e| e.to_string()),
        }
    }

    /// The one number a query answers.
    pub async fn number(&mut self, sql: &str) -> i64 {
        self.try_number(sql).await.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    pub async fn try_number(&mut self, sql: &str) -> Result<i64, String> {
        match self {
            Session::Sqlite(connection) => connection.query_row(sql, [], |row| row.get(0)).map_err(|e| e.to_string()),
            Session::Postgres(client) => {
                client.query_one(sql, &[]).await.and_then(|row| row.try_get(0)).map_err(|e| e.to_string())
            }
            Session::Mysql(conn) => {
                conn.query_first(sql).await.map_err(|e| e.to_string())?.ok_or_else(|| "no row".to_owned())
            }
        }
    }

    /// The sessions of a MySQL server, and the databases they are in. Its table of them cannot be asked: MySQL fails where a
    /// statement that runs has bytes in it that are no text.
    pub async fn of_mysql(conn: &mut mysql_async::Conn) -> Vec<(u64, Option<String>)> {
        let rows: Vec<mysql_async::Row> = conn.query("SHOW PROCESSLIST").await.expect("the process list");
        rows.into_iter().map(|mut row| (row.take("Id").expect("an id"), row.take("db").expect("a database"))).collect()
    }

    /// The sessions of a MySQL server that have a transaction open. MariaDB is asked as everywhere; MySQL fails that
    /// question while somebody's statement has bytes in it that are no text, and is asked another one.
    pub async fn in_transaction_on_mysql(conn: &mut mysql_async::Conn) -> Vec<u64> {
        let version: Option<String> = conn.query_first("SELECT VERSION()").await.expect("a version");
        let sql = if version.is_some_and(|version| version.contains("MariaDB")) {
            // Told at most every tenth of a second, as it was the last time that nobody asked for so long.
            tokio::time::sleep(std::time::Duration::from_millis(120)).await;
            "SELECT CAST(trx_mysql_thread_id AS UNSIGNED) FROM information_schema.innodb_trx"
        } else {
            "SELECT CAST(t.processlist_id AS UNSIGNED) FROM performance_schema.events_transactions_current e
             JOIN performance_schema.threads t ON t.thread_id = e.thread_id
             WHERE e.state = 'ACTIVE' AND t.processlist_id IS NOT NULL"
        };
        conn.query(sql).await.expect("who is in a transaction")
    }

    /// How many others in the same database of a MySQL server have a transaction open.
    pub async fn others_in_transaction_on_mysql(&mut self) -> i64 {
        let Session::Mysql(conn) = self else { panic!("a session of MySQL") };
        let (own, busy) = (u64::from(conn.id()), Session::in_transaction_on_mysql(conn).await);
        let all = Session::of_mysql(conn).await;
        let here = all.iter().find(|(id, _)| *id == own).and_then(|(_, database)| database.clone());
        all.iter().filter(|(id, database)| *id != own && *database == here && busy.contains(id)).count() as i64
    }

    /// Is this session of a MySQL server there?
    pub async fn is_there(&mut self, id: u64) -> bool {
        let Session::Mysql(conn) = self else { panic!("no session of MySQL") };
        Session::of_mysql(conn).await.iter().any(|(of, _)| *of == id)
    }

    /// The first column of a query, as text.
    pub async fn texts(&mut self, sql: &str) -> Vec<String> {
        match self {
            Session::Sqlite(connection) => {
                let mut statement = connection.prepare(sql).expect(sql);
                let rows = statement.query_map([], |row| row.get(0)).expect(sql);
                rows.collect::<Result<_, _>>().expect(sql)
            }
            Session::Postgres(client) => {
                client.query(sql, &[]).await.expect(sql).iter().map(|row| row.get(0)).collect()
            }
            Session::Mysql(conn) => conn.query(sql).await.expect(sql),
        }
    }
}
