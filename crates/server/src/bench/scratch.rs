//! A scratch database beside the configured one: a file in the same folder, a schema, a database. Nothing of the user's
//! is read or written.

use mysql_async::prelude::Queryable;
use postrider::tx::Dialect;
use postrider::{LaneRules, Lanes, NewMessage, Options, Outbox, stores};

use crate::failure::{Failure, Result};

/// The lane all measurements use.
pub const LANE: &str = "bench";

pub struct Scratch {
    url: String,
    dialect: Dialect,
    name: String,
    admin: String,
    _folder: Option<tempfile::TempDir>,
}

impl Scratch {
    pub async fn create(database: &str) -> Result<Scratch> {
        let name = format!("postrider_bench_{:08x}", fastrand::u32(..));
        let scheme = database.split(':').next().unwrap_or_default();
        let admin = database.to_owned();
        let made =
            |url, dialect, folder| Scratch { url, dialect, name: name.clone(), admin: admin.clone(), _folder: folder };
        let scratch = match scheme {
            "postgres" | "postgresql" => {
                let client = postgres(database).await?;
                client.batch_execute(&format!("CREATE SCHEMA {name}")).await.map_err(fail)?;
                let separator = if database.contains('?') { '&' } else { '?' };
                made(format!("{database}{separator}options=-csearch_path%3D{name}"), Dialect::Postgres, None)
            }
            "mysql" | "mariadb" => {
                let mut conn = mysql(database).await?;
                conn.query_drop(format!("CREATE DATABASE {name}")).await.map_err(fail)?;
                let mut url = url::Url::parse(database).map_err(fail)?;
                url.set_path(&name);
                made(url.to_string(), Dialect::Mysql, None)
            }
            "sqlite" => {
                let path = database.trim_start_matches("sqlite:").trim_start_matches("//");
                let parent = std::path::Path::new(path).parent().filter(|p| !p.as_os_str().is_empty());
                let folder = tempfile::tempdir_in(parent.unwrap_or(std::path::Path::new("."))).map_err(fail)?;
                made(format!("sqlite://{}", folder.path().join("bench.db").display()), Dialect::Sqlite, Some(folder))
            }
            // The kernel knows what to say.
            _ => return Err(outbox(database).await.err().unwrap_or_else(|| fail("an unknown kind of database"))),
        };
        let outbox = scratch.outbox().await?;
        outbox.migrate().await?;
        Ok(scratch)
    }

    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The database beside which this one is.
    pub fn admin(&self) -> &str {
        &self.admin
    }

    pub fn file(&self) -> &str {
        self.url.trim_start_matches("sqlite://")
    }

    pub async fn outbox(&self) -> Result<Outbox> {
        outbox(&self.url).await
    }

    /// Runs SQL statements, one by one, on a connection of its own.
    pub async fn sql(&self, statements: &[&str]) -> Result<()> {
        match self.dialect {
            Dialect::Postgres => {
                let client = postgres(&self.url).await?;
                for sql in statements {
                    client.batch_execute(sql).await.map_err(fail)?;
                }
            }
            Dialect::Mysql => {
                let mut conn = mysql(&self.url).await?;
                for sql in statements {
                    conn.query_drop(*sql).await.map_err(fail)?;
                }
            }
            Dialect::Sqlite => {
                let connection = sqlite(self.file())?;
                for sql in statements {
                    connection.execute_batch(sql).map_err(fail)?;
                }
            }
        }
        Ok(())
    }

    /// Fresh statistics, as a database in use has them.
    pub async fn analyze(&self, tables: &[&str]) -> Result<()> {
        for table in tables {
            let sql = match self.dialect {
                Dialect::Postgres => format!("VACUUM (ANALYZE) {table}"),
                Dialect::Mysql => format!("ANALYZE TABLE {table}"),
                Dialect::Sqlite => format!("ANALYZE {table}"),
            };
            self.sql(&[&sql]).await?;
        }
        Ok(())
    }

    /// Lets what was written before be written out, so that it is not measured with what comes after.
    pub async fn settle_down(&self) -> Result<()> {
        match self.dialect {
            // Not every role may, and then it is only less exact.
            Dialect::Postgres => self.sql(&["CHECKPOINT"]).await.or(Ok(())),
            Dialect::Sqlite => self.sql(&["PRAGMA wal_checkpoint(TRUNCATE)"]).await,
            Dialect::Mysql => {
                let mut conn = mysql(&self.url).await?;
                let before: Option<f64> =
                    conn.query_first("SELECT @@innodb_max_dirty_pages_pct").await.map_err(fail)?;
                // Only an administrator may; for others the figures are less exact.
                if conn.query_drop("SET GLOBAL innodb_max_dirty_pages_pct = 0").await.is_err() {
                    return Ok(());
                }
                for _ in 0..120 {
                    let sql = "SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_pages_dirty'";
                    let dirty: Option<(String, u64)> = conn.query_first(sql).await.map_err(fail)?;
                    if dirty.is_none_or(|(_, pages)| pages < 500) {
                        break;
                    }
                    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
                }
                let restore = format!("SET GLOBAL innodb_max_dirty_pages_pct = {}", before.unwrap_or(90.0));
                conn.query_drop(restore).await.map_err(fail)
            }
        }
    }

    pub async fn remove(&self) -> Result<()> {
        match self.dialect {
            Dialect::Postgres => {
                let sql = format!("DROP SCHEMA {} CASCADE", self.name);
                postgres(&self.admin).await?.batch_execute(&sql).await.map_err(fail)
            }
            Dialect::Mysql => {
                mysql(&self.admin).await?.query_drop(format!("DROP DATABASE {}", self.name)).await.map_err(fail)
            }
            Dialect::Sqlite => Ok(()), // its folder goes with it
        }
    }
}

pub async fn outbox(url: &str) -> Result<Outbox> {
    outbox_with(url, LaneRules::default()).await
}

pub async fn outbox_with(url: &str, rules: LaneRules) -> Result<Outbox> {
    let lanes = Lanes::new().with(LANE, LaneRules { max_payload_bytes: 16 << 20, ..rules });
    let options = Options { migrations: crate::schema::migrations(), ..Options::default() };
    Ok(Outbox::new(stores::open(url, lanes, options).await?))
}

/// A plain message of this size, as an application would write it.
pub fn message(payload_bytes: usize, n: usize) -> NewMessage {
    let mut payload = format!("{{\"n\":{n},\"fill\":\"").into_bytes();
    payload.resize(payload_bytes.max(16).saturating_sub(2), b'x');
    payload.extend_from_slice(b"\"}");
    NewMessage::new(LANE, payload).content_type("application/json")
}

/// Enqueues many, in batches.
pub async fn fill(outbox: &Outbox, messages: usize, payload_bytes: usize) -> Result<()> {
    // Without anything to go by, all would be in the first shard.
    let sharded = outbox.lanes().get(LANE)?.shards > 1;
    let message = |n: usize| {
        let plain = message(payload_bytes, n);
        if sharded { plain.target(format!("target {}", n % 512)) } else { plain }
    };
    for start in (0..messages).step_by(1000) {
        let batch = (start..messages.min(start + 1000)).map(message).collect();
        outbox.enqueue(batch).await?;
    }
    Ok(())
}

pub fn fail(error: impl std::fmt::Display) -> Failure {
    Failure::unreachable(format!("the benchmark's own SQL failed: {error}"))
}

pub async fn postgres(url: &str) -> Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.map_err(fail)?;
    tokio::spawn(connection);
    Ok(client)
}

pub async fn mysql(url: &str) -> Result<mysql_async::Conn> {
    mysql_async::Conn::from_url(url.replacen("mariadb:", "mysql:", 1)).await.map_err(fail)
}

pub fn sqlite(file: &str) -> Result<rusqlite::Connection> {
    let connection = rusqlite::Connection::open(file).map_err(fail)?;
    connection.busy_timeout(std::time::Duration::from_secs(30)).map_err(fail)?;
    connection
        .execute_batch("PRAGMA synchronous = FULL; PRAGMA cache_size = -64000; PRAGMA wal_autocheckpoint = 8000;")
        .map_err(fail)?;
    Ok(connection)
}
