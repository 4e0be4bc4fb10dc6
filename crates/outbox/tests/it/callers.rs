//! Connections of the caller's own, one per driver, as the port sees them; each with a transaction the caller begins.

use postrider::tx::{Dialect, Tx};

use proving::kit::scratch::{self, Scratch};

pub type Caller = Box<dyn Tx + Send>;

/// One driver and its way to connect.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Driver {
    TokioPostgres,
    MysqlAsync,
    #[cfg(feature = "sqlx-postgres")]
    SqlxPostgres,
    #[cfg(feature = "sqlx-mysql")]
    SqlxMysql,
    #[cfg(feature = "sqlx-sqlite")]
    SqlxSqlite,
}

pub const DRIVERS: &[Driver] = &[
    Driver::TokioPostgres,
    Driver::MysqlAsync,
    #[cfg(feature = "sqlx-postgres")]
    Driver::SqlxPostgres,
    #[cfg(feature = "sqlx-mysql")]
    Driver::SqlxMysql,
    #[cfg(feature = "sqlx-sqlite")]
    Driver::SqlxSqlite,
];

impl Driver {
    pub fn dialect(self) -> Dialect {
        match self {
            Driver::TokioPostgres => Dialect::Postgres,
            Driver::MysqlAsync => Dialect::Mysql,
            #[cfg(feature = "sqlx-postgres")]
            Driver::SqlxPostgres => Dialect::Postgres,
            #[cfg(feature = "sqlx-mysql")]
            Driver::SqlxMysql => Dialect::Mysql,
            #[cfg(feature = "sqlx-sqlite")]
            Driver::SqlxSqlite => Dialect::Sqlite,
        }
    }

    pub async fn scratch(self) -> Scratch {
        match self.dialect() {
            Dialect::Postgres => scratch::postgres().await,
            Dialect::Mysql => scratch::mysql().await,
            Dialect::Sqlite => scratch::sqlite(),
        }
    }

    pub async fn connect(self, url: &str) -> Caller {
        match self {
            Driver::TokioPostgres => {
                let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
                tokio::spawn(connection);
                Box::new(client)
            }
            Driver::MysqlAsync => Box::new(mysql_async::Conn::from_url(url).await.unwrap()),
            #[cfg(feature = "sqlx-postgres")]
            Driver::SqlxPostgres => Box::new(<sqlx::PgConnection as sqlx::Connection>::connect(url).await.unwrap()),
            #[cfg(feature = "sqlx-mysql")]
            Driver::SqlxMysql => Box::new(<sqlx::MySqlConnection as sqlx::Connection>::connect(url).await.unwrap()),
            #[cfg(feature = "sqlx-sqlite")]
            Driver::SqlxSqlite => {
                let url = format!("{url}?mode=rwc");
                Box::new(<sqlx::SqliteConnection as sqlx::Connection>::connect(&url).await.unwrap())
            }
        }
    }

    pub async fn begin(self, url: &str) -> Caller {
        let mut caller = self.connect(url).await;
        let begin = if self.dialect() == Dialect::Sqlite { "BEGIN IMMEDIATE" } else { "BEGIN" };
        run(&mut caller, begin).await;
        caller
    }
}

pub async fn run(caller: &mut Caller, sql: &str) {
    caller.execute(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
}
