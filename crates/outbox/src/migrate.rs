//! Migrations: `.sql` files with the same numbers and names on all three databases, embedded in the binary. The specs'
//! views are dropped before and recreated after. How a database makes a run safe is the store's business.

use crate::error::{Error, Kind, Result};
use crate::tx::{Dialect, Tx};

/// One step of a schema: the same number and name on all three databases. A MySQL file is split at `-- step` lines, one
/// statement each, because every one commits.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    pub version: i64,
    pub name: &'static str,
    pub sqlite: &'static str,
    pub postgres: &'static str,
    pub mysql: &'static str,
}

/// The migrations of the kernel and of the parts that share its database. Each part has a hundred versions of its own
/// (the kernel 1 to 99, the others up to [`LAST_PART`]), so that one may be there that this binary does not have.
#[derive(Clone, Debug)]
pub struct Schema(Vec<Migration>);

/// The steps of a part: their numbers and the names of their files, in `migrations/sqlite`, `postgres` and `mysql` beside
/// the folder of the file this is written in.
#[macro_export]
macro_rules! migrations {
    ($($version:literal $name:literal),* $(,)?) => {
        [$($crate::Migration {
            version: $version,
            name: $name,
            sqlite: include_str!(concat!("../migrations/sqlite/", $name, ".sql")),
            postgres: include_str!(concat!("../migrations/postgres/", $name, ".sql")),
            mysql: include_str!(concat!("../migrations/mysql/", $name, ".sql")),
        }),*]
    };
}

const MIGRATIONS: &[Migration] = &migrations![1 "V001__outbox", 2 "V002__enqueue_from_sql", 3 "V003__pauses", 4 "V004__alerts", 5 "V005__keys_by_lane", 6 "V006__enqueue_without_locks", 7 "V007__times_are_numbers", 8 "V008__former_keys", 9 "V009__alerts_in_order", 10 "V010__alerts_that_wait", 11 "V011__active_keys", 12 "V012__cheaper_checks", 13 "V013__messages_newer_than_a_snapshot", 14 "V014__active_keys_of_all"];

/// The kernel's own migrations.
pub fn kernel_migrations() -> Vec<Migration> {
    MIGRATIONS.to_vec()
}

/// Versions beyond its hundred are of a time this binary knows nothing about.
const LAST_PART: i64 = 5;

impl Schema {
    pub(crate) fn with(parts: &[Migration]) -> Self {
        let mut all: Vec<Migration> = MIGRATIONS.iter().chain(parts).copied().collect();
        all.sort_by_key(|m| m.version);
        Schema(all)
    }

    /// The names of all tables that it makes.
    #[cfg(feature = "postgres")]
    pub(crate) fn tables(&self, dialect: Dialect) -> impl Iterator<Item = &'static str> {
        let lines = self.0.iter().flat_map(move |migration| migration.sql(dialect).lines());
        let name =
            |rest: &'static str| rest.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '.')).next();
        lines.filter_map(|line| line.strip_prefix("CREATE TABLE ")).filter_map(name).filter(|name| !name.is_empty())
    }

    /// The migrations this schema still lacks; an error if a part of it is newer than this binary.
    pub(crate) fn missing(&self, applied: &[i64]) -> Result<Vec<Migration>> {
        for &version in applied {
            let part = |m: &&Migration| m.version / 100 == version / 100 || version / 100 > LAST_PART;
            let newest = self.0.iter().filter(part).map(|m| m.version).max();
            if let Some(newest) = newest.filter(|newest| version > *newest) {
                return Err(Error::new(
                    Kind::Schema,
                    format!(
                        "the database's schema is at version {version}, this binary knows only {newest}: run a newer postrider (nothing was changed)"
                    ),
                ));
            }
        }
        Ok(self.0.iter().filter(|m| !applied.contains(&m.version)).copied().collect())
    }

    /// The same, from rows of (version, steps). What was begun and not finished is missing, and too new is too new.
    pub(crate) fn missing_of(&self, rows: &[(i64, i64)]) -> Result<Vec<Migration>> {
        self.missing(&rows.iter().map(|row| row.0).collect::<Vec<_>>())?;
        self.missing(&rows.iter().filter(|row| row.1 >= 0).map(|row| row.0).collect::<Vec<_>>())
    }
}

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

/// The names of what `migrate` would run, without changing anything.
pub(crate) async fn pending(tx: &mut (dyn Tx + Send), schema: &Schema) -> Result<Vec<String>> {
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
    Ok(schema.missing_of(&applied)?.iter().map(|m| m.name.to_owned()).collect())
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
        let schema = Schema::with(&[]);
        assert!(schema.missing(&[1, 2, 99]).is_err_and(|e| e.kind == Kind::Schema && e.message.contains("99")));
        assert_eq!(schema.missing(&[]).map(|m| m.len()).unwrap_or(0), MIGRATIONS.len());
        assert!(schema.missing(&[1, 2, 101]).is_ok(), "a part that this binary does not have");
        assert!(schema.missing(&[1, 2, 999]).is_err());
        let server = Migration { version: 101, ..MIGRATIONS[0] };
        assert!(Schema::with(&[server]).missing(&[1, 2, 102]).is_err());
    }
}
