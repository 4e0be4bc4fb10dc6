//! Migrations: `.sql` files with the same numbers and names on all three databases, embedded in the binary. The specs'
//! views are dropped before and recreated after. How a database makes a run safe is the store's business.

use crate::error::{Error, Kind, Result};
use crate::tx::{Dialect, Tx};

pub(crate) struct Migration {
    pub version: i64,
    pub name: &'static str,
    sqlite: &'static str,
    postgres: &'static str,
    mysql: &'static str,
}

macro_rules! migrations {
    ($($version:literal $name:literal),* $(,)?) => {
        &[$(Migration {
            version: $version,
            name: $name,
            sqlite: include_str!(concat!("../migrations/sqlite/", $name, ".sql")),
            postgres: include_str!(concat!("../migrations/postgres/", $name, ".sql")),
            mysql: include_str!(concat!("../migrations/mysql/", $name, ".sql")),
        }),*]
    };
}

pub(crate) const MIGRATIONS: &[Migration] = migrations![1 "V001__outbox", 2 "V002__enqueue_from_sql"];

impl Migration {
    pub fn sql(&self, dialect: Dialect) -> &'static str {
        match dialect {
            Dialect::Sqlite => self.sqlite,
            Dialect::Postgres => self.postgres,
            Dialect::Mysql => self.mysql,
        }
    }
}

macro_rules! per_dialect {
    ($name:ident, $file:literal) => {
        pub(crate) fn $name(dialect: Dialect) -> &'static str {
            match dialect {
                Dialect::Sqlite => include_str!(concat!("../migrations/sqlite/", $file)),
                Dialect::Postgres => include_str!(concat!("../migrations/postgres/", $file)),
                Dialect::Mysql => include_str!(concat!("../migrations/mysql/", $file)),
            }
        }
    };
}
per_dialect!(views, "views.sql");
per_dialect!(drop_views, "drop_views.sql");

/// The bookkeeping table. `steps` counts statements done: MySQL commits at each one.
pub(crate) const BOOKKEEPING: &str = "CREATE TABLE IF NOT EXISTS postrider_migrations (version BIGINT PRIMARY KEY, name VARCHAR(255) NOT NULL, steps BIGINT NOT NULL)";

/// MySQL files are split at `-- step` lines, one statement each.
#[cfg(feature = "mysql")]
pub(crate) fn steps(sql: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = sql;
    while let Some(at) = rest.find("\n-- step") {
        parts.push(&rest[..at]);
        rest = rest[at + 1..].split_once('\n').map_or("", |(_, tail)| tail);
    }
    parts.push(rest);
    parts.into_iter().map(|s| s.trim().trim_end_matches(';')).filter(|s| !s.is_empty()).collect()
}

/// The migrations this schema still lacks; an error if it is newer than this binary.
pub(crate) fn missing(applied: &[i64]) -> Result<Vec<&'static Migration>> {
    let newest = MIGRATIONS.iter().map(|m| m.version).max().unwrap_or(0);
    if let Some(newer) = applied.iter().copied().filter(|v| *v > newest).max() {
        return Err(Error::new(
            Kind::Schema,
            format!(
                "the database's schema is at version {newer}, this binary knows only {newest}: run a newer postrider (nothing was changed)"
            ),
        ));
    }
    Ok(MIGRATIONS.iter().filter(|m| !applied.contains(&m.version)).collect())
}

/// The same, from rows of (version, steps). What was begun and not finished is missing, and too new is too new.
pub(crate) fn missing_of(rows: &[(i64, i64)]) -> Result<Vec<&'static Migration>> {
    missing(&rows.iter().map(|row| row.0).collect::<Vec<_>>())?;
    missing(&rows.iter().filter(|row| row.1 >= 0).map(|row| row.0).collect::<Vec<_>>())
}

/// The names of what `migrate` would run, without changing anything.
pub(crate) async fn pending(tx: &mut (dyn Tx + Send)) -> Result<Vec<String>> {
    let exists = match tx.dialect() {
        Dialect::Sqlite => "SELECT count(*) FROM sqlite_master WHERE name = 'postrider_migrations'",
        Dialect::Postgres => "SELECT count(*) FROM pg_class WHERE oid = to_regclass('postrider_migrations')",
        Dialect::Mysql => {
            "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'postrider_migrations'"
        }
    };
    let mut applied = Vec::new();
    if tx.query(exists, &[]).await?.first().map(|r| r.int(0)).transpose()?.unwrap_or(0) > 0 {
        for row in tx.query("SELECT version, steps FROM postrider_migrations", &[]).await? {
            applied.push((row.int(0)?, row.int(1)?));
        }
    }
    Ok(missing_of(&applied)?.iter().map(|m| m.name.to_owned()).collect())
}

#[cfg(all(test, feature = "mysql"))]
mod tests {
    use super::*;

    #[test]
    fn mysql_files_split_into_single_statements() {
        for migration in MIGRATIONS {
            let steps = steps(migration.mysql);
            assert!(!steps.is_empty());
            for step in steps {
                let verbs = step.matches("\nCREATE TABLE").count();
                assert!(verbs <= 1, "two statements in one step of {}:\n{step}", migration.name);
            }
        }
    }

    #[test]
    fn a_newer_schema_is_refused() {
        assert!(missing(&[1, 2, 99]).is_err_and(|e| e.kind == Kind::Schema && e.message.contains("99")));
        assert_eq!(missing(&[]).map(|m| m.len()).unwrap_or(0), MIGRATIONS.len());
    }
}
