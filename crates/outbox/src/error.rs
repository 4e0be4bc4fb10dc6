//! What can go wrong at the store, classified once: is it worth another try, and was the write applied?

use std::fmt;

/// What kind of trouble it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No connection, or it broke.
    Unreachable,
    /// The deadline passed; the connection was closed.
    Timeout,
    /// Deadlock, serialisation failure, busy: the same again may succeed at once.
    Busy,
    /// Somebody else holds a lock and did not let go of it in the short time we wait.
    Locked,
    /// All of our own connections are in use.
    Overloaded,
    /// The database refuses writes for now (read-only, in recovery, disk full).
    Unavailable,
    /// Another row stands in the way (a unique key).
    Conflict,
    /// The caller's input is wrong.
    Invalid,
    /// The key for secrets at rest is not here: once it is brought, the same may succeed.
    KeyMissing,
    /// The lane is not configured.
    UnknownLane,
    /// The lane belongs to a peer, which has verbs of its own for it.
    LaneOwned,
    /// Not migrated yet, or migrated by a newer version, or not what it should be.
    Schema,
    /// The database's user may not do this: it lacks a role or a right.
    Denied,
    /// Anything else the database said.
    Database,
}

/// Worth a retry, a conflict to report, or the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Retryable,
    Conflict,
    Fatal,
}

/// Whether a failed write took effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Certainly not.
    NotApplied,
    /// The commit was asked for and its answer was lost; or what failed came after something that was applied.
    Unknown,
}

/// An error of the store: what happened and what to do, for people; kind and effect, for code.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Error {
    pub kind: Kind,
    pub effect: Effect,
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if self.effect == Effect::Unknown {
            f.write_str(" (whether the write was applied is unknown)")?;
        }
        Ok(())
    }
}

impl Error {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, effect: Effect::NotApplied, message: message.into() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Error::new(Kind::Invalid, message)
    }

    pub fn database(message: impl Into<String>) -> Self {
        Error::new(Kind::Database, message)
    }

    pub(crate) fn unknown(mut self) -> Self {
        self.effect = Effect::Unknown;
        self
    }

    /// The same error, of something that had a part before it which was, or may have been, applied.
    pub(crate) fn after(self, applied: bool) -> Self {
        if applied { self.unknown() } else { self }
    }

    /// A read changes nothing, however it ended.
    pub(crate) fn of_read(mut self) -> Self {
        self.effect = Effect::NotApplied;
        self
    }

    /// The same error, saying what was being done.
    pub(crate) fn during(mut self, what: &str) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }

    /// The same error, of a migration.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn of_migration(mut self) -> Self {
        if self.kind == Kind::Locked {
            self.message.push_str("; a transaction of somebody's holds our tables: run it again when that has ended");
        }
        self.during("migration")
    }

    pub fn class(&self) -> Class {
        match self.kind {
            Kind::Unreachable
            | Kind::Timeout
            | Kind::Busy
            | Kind::Locked
            | Kind::Overloaded
            | Kind::Unavailable
            | Kind::KeyMissing => Class::Retryable,
            Kind::Conflict | Kind::LaneOwned => Class::Conflict,
            Kind::Invalid | Kind::UnknownLane | Kind::Schema | Kind::Denied | Kind::Database => Class::Fatal,
        }
    }

    /// Running the very same statements again is safe and may succeed, after so many rounds.
    pub(crate) fn worth_rerunning(&self, rounds: u32) -> bool {
        self.kind == Kind::Busy && self.effect == Effect::NotApplied && rounds < 8
    }
}

/// What a PostgreSQL SQLSTATE means to us. The one place that knows which errors are worth another try, as are the next two.
#[cfg(any(feature = "postgres", feature = "sqlx-postgres"))]
pub(crate) fn postgres_kind(code: &str) -> Kind {
    match code {
        "40001" | "40P01" => Kind::Busy,
        "55P03" => Kind::Locked,
        "25006" | "25P03" => Kind::Unavailable,
        "57014" => Kind::Timeout,
        "23505" => Kind::Conflict,
        "22023" | "22021" => Kind::Invalid,
        "42P01" | "42703" | "42883" => Kind::Schema,
        "42501" => Kind::Denied,
        _ if code.starts_with("08") || code.starts_with("57P") || code.starts_with("28") || code == "3D000" => {
            Kind::Unreachable
        }
        _ if code.starts_with("53") => Kind::Unavailable,
        _ => Kind::Database,
    }
}

/// What an error number of MySQL or MariaDB means to us.
#[cfg(any(feature = "mysql", feature = "sqlx-mysql"))]
pub(crate) fn mysql_kind(number: u16) -> Kind {
    match number {
        1213 | 1020 => Kind::Busy,
        1205 | 3572 => Kind::Locked,
        1062 => Kind::Conflict,
        1290 | 1792 | 1836 | 1021 | 1041 | 1040 | 1114 => Kind::Unavailable,
        1044 | 1045 | 1049 | 1053 | 1927 => Kind::Unreachable,
        1146 | 1054 | 1305 => Kind::Schema,
        1142 | 1143 | 1227 | 1370 => Kind::Denied,
        1317 | 3024 | 1969 => Kind::Timeout,
        1644 => Kind::Invalid,
        _ => Kind::Database,
    }
}

/// What a result code of SQLite (extended or not) means to us.
#[cfg(any(feature = "sqlite", feature = "sqlx-sqlite"))]
pub(crate) fn sqlite_kind(code: i32, message: &str) -> Kind {
    match code & 0xff {
        5 | 6 => Kind::Busy,               // BUSY, LOCKED
        8 | 13 => Kind::Unavailable,       // READONLY, FULL
        10 | 14 | 26 => Kind::Unreachable, // IOERR, CANTOPEN, NOTADB
        19 => Kind::Conflict,              // CONSTRAINT
        _ if message.contains("no such table") => Kind::Schema,
        _ => Kind::Database,
    }
}

/// What to do about it, where we know; `code` as the server says it.
pub(crate) fn advice(kind: Kind, code: &str) -> &'static str {
    match code {
        _ if kind == Kind::Schema => "; run `postrider migrate` first",
        "26000" | "42P05" => {
            "; a pooler that changes sessions must know prepared statements: PgBouncer 1.21 or newer, with max_prepared_statements = 200"
        }
        "53300" | "1040" => "; raise its max_connections, or let fewer processes connect (each has up to eight)",
        _ => "",
    }
}

/// What a panic said.
pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    format!("panicked: {words}")
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
