//! The three databases. Their files hold what differs, in the same order: connect, migrate, claim, walk, settle.

#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod pool;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "postgres")]
mod postgres_timeline;
#[cfg(feature = "postgres")]
mod postgres_tls;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "sqlite")]
mod sqlite_threads;
#[cfg(any(feature = "sqlx-postgres", feature = "sqlx-mysql", feature = "sqlx-sqlite"))]
mod sqlx;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Class, Effect, Error, Kind, Result};
use crate::lanes::{LaneRules, Lanes};
use crate::lease::Hold;
use crate::migrate::Migration;
use crate::outcome::{Settled, Settlement};
use crate::settle;
use crate::store::{Mark, Mode, Seen, Store, transact};
use crate::time::{Timestamp, micros_of};
use crate::tx::{Dialect, Row};
#[cfg(any(feature = "mysql", feature = "postgres"))]
use crate::{
    cold,
    lease::Lease,
    outcome::{GiveBack, LeaseState},
};

/// How a store talks to its database.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most connections (PostgreSQL, MySQL).
    pub connections: usize,
    /// Past this an operation is given up and its connection closed.
    pub deadline: Duration,
    /// The shortest lease in use: a session that stops in the middle of a transaction is ended by the database within a
    /// third of it, so that it does not hold its locks for longer.
    pub lease: Duration,
    /// LISTEN/NOTIFY across processes (PostgreSQL); switch it off behind a transaction-mode pooler.
    pub notifications: bool,
    /// Migrations of parts that share the database, beyond the kernel's own.
    pub migrations: Vec<Migration>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            connections: 8,
            deadline: Duration::from_secs(10),
            lease: Duration::from_secs(60),
            notifications: true,
            migrations: vec![],
        }
    }
}

impl Options {
    /// What the worker asks for waits no longer than this for a lock that somebody else holds: a small part of a lease.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn lock_wait(&self) -> Duration {
        (self.lease / 30).clamp(Duration::from_millis(50), Duration::from_millis(250))
    }

    /// After this long in silence the database ends a session of ours.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn silence(&self) -> Duration {
        (self.lease / 3).clamp(Duration::from_millis(300), Duration::from_secs(60))
    }
}

/// Opens the store a URL names: `sqlite://file.db`, `postgres://…`, `mysql://…`. Nothing is created or migrated yet.
pub async fn open(url: &str, lanes: Lanes, options: Options) -> Result<Arc<dyn Store>> {
    lanes.check()?;
    let lanes = Arc::new(lanes);
    let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
    match scheme {
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(Arc::new(sqlite::SqliteStore::open(url, lanes, options)?)),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => Ok(Arc::new(postgres::PostgresStore::open(url, lanes, options)?)),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(Arc::new(mysql::MysqlStore::open(url, lanes, options)?)),
        _ => {
            let _ = (lanes, options);
            Err(Error::new(
                Kind::Invalid,
                format!(
                    "`{}` is no database URL this build knows: use sqlite://FILE, postgres://USER@HOST/DATABASE or mysql://USER@HOST/DATABASE",
                    without_password(url)
                ),
            ))
        }
    }
}

#[cfg(feature = "postgres")]
pub use postgres_tls::why_no_pem;

/// The parameters of a URL that may be shown; any other, a misspelt one too, may hold a password.
const SHOWN: [&str; 13] = [
    "application_name",
    "connect_timeout",
    "dbname",
    "host",
    "hostaddr",
    "mode",
    "port",
    "schema",
    "socket",
    "ssl-mode",
    "sslmode",
    "sslrootcert",
    "user",
];

/// A URL that may be shown. What is none is hidden rather too much than too little: a password may hold any character, and
/// some write it as a parameter.
pub fn without_password(url: &str) -> String {
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), url),
    };
    let shown = match rest.rsplit_once('@').map(|(user, host)| (user.split_once(':'), host)) {
        Some((Some((user, _)), host)) => format!("{scheme}{user}:***@{host}"),
        Some((None, _)) if scheme.is_empty() => "***".to_owned(),
        // No URL at all: it may be the password alone, unless it looks like a file.
        None if scheme.is_empty() && ![".db", ".sqlite", ".sqlite3"].iter().any(|end| url.ends_with(end)) => {
            "***".to_owned()
        }
        // What stands where a port would, and is none, is a password whose `@` was forgotten or written as %40.
        None if !scheme.starts_with("sqlite") => {
            let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
            match authority.rsplit_once(':').filter(|(_, port)| !port.bytes().all(|b| b.is_ascii_digit() || b == b']'))
            {
                Some(_) => format!("{scheme}{}:***", rest.split(':').next().unwrap_or_default()),
                None => url.to_owned(),
            }
        }
        _ => url.to_owned(),
    };
    let Some((place, parameters)) = shown.split_once('?') else { return shown };
    let told = |parameter: &str| match parameter.split_once('=') {
        Some((name, value)) if !SHOWN.contains(&name) || value.contains([';', '=', ',']) => format!("{name}=***"),
        None => "***".to_owned(),
        Some(_) => parameter.to_owned(),
    };
    format!("{place}?{}", parameters.split('&').map(told).collect::<Vec<_>>().join("&"))
}

/// What a database says of a statement, without the values it repeats: they are keys and payloads of other people.
pub(crate) fn without_values(message: &str) -> String {
    let hidden = |start: &str, end: &str| {
        let from = message.find(start)? + start.len();
        let to = message[from..].rfind(end).map_or(message.len(), |to| from + to);
        Some(format!("{}***{}", &message[..from], &message[to..]))
    };
    hidden("Duplicate entry '", "' for key")
        .or_else(|| hidden("value: '", "' for "))
        .or_else(|| hidden(": \"", "\""))
        .unwrap_or_else(|| message.to_owned())
}

/// What a store adds to the common settle: its fast way for entries that are nothing but a move.
#[async_trait]
pub(crate) trait Shortcut: Store {
    fn as_store(&self) -> &dyn Store;

    /// Settles plain `sent` entries in one transaction; answers in order. Lost leases are not audited here.
    async fn settle_sent(
        &self,
        rules: &LaneRules,
        lane: &str,
        owner: &str,
        entries: &[Settlement],
    ) -> Result<Vec<Settled>>;
}

/// The settle of every store. A message that stands twice is settled in as many rounds, so the fence decides.
pub(crate) async fn settle_by_parts<S: Shortcut + ?Sized>(
    store: &S,
    rules: LaneRules,
    lane: String,
    owner: String,
    entries: Vec<Settlement>,
) -> Result<Vec<Settled>> {
    let mut seen = HashSet::with_capacity(entries.len());
    if entries.iter().all(|e| seen.insert(e.lease.id)) {
        return settle_distinct(store, &rules, &lane, &owner, entries).await;
    }
    let mut answers = vec![Settled::LeaseLost; entries.len()];
    let mut left: Vec<usize> = (0..entries.len()).collect();
    let mut is_first = true;
    while !left.is_empty() {
        seen.clear();
        let (round, rest): (Vec<usize>, Vec<usize>) = left.into_iter().partition(|&i| seen.insert(entries[i].lease.id));
        let part = round.iter().map(|&i| entries[i].clone()).collect();
        let settled = settle_distinct(store, &rules, &lane, &owner, part).await;
        // What earlier rounds settled must be told.
        let settled = if is_first { settled? } else { or_refused(settled, round.len(), &lane)? };
        for (&i, answer) in round.iter().zip(settled) {
            answers[i] = answer;
        }
        (left, is_first) = (rest, false);
    }
    Ok(answers)
}

/// Plain `sent` by the short cut, the rest by the whole rule; what aborts as a batch is settled row by row, so one bad
/// entry harms no other.
async fn settle_distinct<S: Shortcut + ?Sized>(
    store: &S,
    rules: &LaneRules,
    lane: &str,
    owner: &str,
    entries: Vec<Settlement>,
) -> Result<Vec<Settled>> {
    let mut answers = vec![Settled::LeaseLost; entries.len()];
    let (mut plain, mut whole): (Vec<usize>, Vec<usize>) =
        (0..entries.len()).partition(|&i| settle::is_plain_sent(rules, &entries[i]));
    if !plain.is_empty() {
        plain.sort_by_key(|&i| entries[i].lease);
        let part: Vec<Settlement> = plain.iter().map(|&i| entries[i].clone()).collect();
        match store.settle_sent(rules, lane, owner, &part).await {
            Ok(settled) => plain.iter().zip(settled).for_each(|(&i, answer)| answers[i] = answer),
            Err(error) if waited_in_vain(store, &error) => plain.iter().for_each(|&i| answers[i] = Settled::Locked),
            Err(error) if goes_one_by_one(&error) => {
                tracing::debug!(%error, lane, "a batch could not be settled the short way");
                whole.append(&mut plain);
            }
            Err(error) => return Err(error),
        }
        let lost = plain.iter().filter(|&&i| answers[i] == Settled::LeaseLost);
        let losers: Vec<_> = lost.map(|&i| (entries[i].lease, entries[i].verdict.flush_code())).collect();
        if !losers.is_empty() {
            let owner = owner.to_owned();
            let audited = transact(store.as_store(), Mode::Work, move |tx| {
                let (owner, losers) = (owner.clone(), losers.clone());
                Box::pin(async move { crate::audit::conflicts(tx, &owner, &losers).await })
            });
            // The settle itself is done; its answer must not be lost with the audit.
            if let Err(error) = audited.await {
                tracing::error!(%error, "the audit of a conflict could not be written");
            }
        }
    }
    let part: Vec<Settlement> = whole.iter().map(|&i| entries[i].clone()).collect();
    let settled = match settle_whole(store.as_store(), rules, lane, owner, part.clone()).await {
        Err(error) if waited_in_vain(store, &error) => vec![Settled::Locked; part.len()],
        Err(error) if goes_one_by_one(&error) => {
            tracing::warn!(%error, lane, "a batch could not be settled; trying its entries one by one");
            let mut one_by_one = Vec::with_capacity(part.len());
            for entry in part {
                let settled = settle_whole(store.as_store(), rules, lane, owner, vec![entry]).await;
                one_by_one.extend(or_refused(settled, 1, lane)?);
            }
            one_by_one
        }
        // What the short cut settled must be told.
        settled if !plain.is_empty() => or_refused(settled, part.len(), lane)?,
        settled => settled?,
    };
    for (&i, answer) in whole.iter().zip(settled) {
        answers[i] = answer;
    }
    Ok(answers)
}

/// MySQL waits for a lock for a second at least, and whoever waits keeps the rows of the whole batch from being renewed. So
/// once is enough: each entry is asked for again, alone.
fn waited_in_vain<S: Shortcut + ?Sized>(store: &S, error: &Error) -> bool {
    error.kind == Kind::Locked && store.as_store().dialect() == Dialect::Mysql
}

/// One entry may be to blame, or somebody's lock on a row that only one of them needs.
fn goes_one_by_one(error: &Error) -> bool {
    error.kind == Kind::Locked || error.class() != Class::Retryable
}

/// Where others of the batch are settled already, an error would be told for them too: what was certainly not applied is
/// answered as refused instead.
fn or_refused(settled: Result<Vec<Settled>>, entries: usize, lane: &str) -> Result<Vec<Settled>> {
    match settled {
        Err(error) if error.kind == Kind::Locked => Ok(vec![Settled::Locked; entries]),
        Err(error) if error.effect == Effect::NotApplied => {
            tracing::error!(%error, lane, "a message could not be settled");
            Ok(vec![Settled::Refused; entries])
        }
        settled => settled,
    }
}

async fn settle_whole(
    store: &dyn Store,
    rules: &LaneRules,
    lane: &str,
    owner: &str,
    entries: Vec<Settlement>,
) -> Result<Vec<Settled>> {
    if entries.is_empty() {
        return Ok(vec![]);
    }
    let work = Arc::new((rules.clone(), lane.to_owned(), owner.to_owned(), entries));
    transact(store, Mode::Work, move |tx| {
        let work = work.clone();
        Box::pin(async move { settle::settle(tx, &work.0, &work.1, &work.2, &work.3).await })
    })
    .await
}

/// `Store::renew` of the servers.
#[cfg(any(feature = "mysql", feature = "postgres"))]
async fn renew(store: &dyn Store, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>> {
    let work = Arc::new((owner.to_owned(), leases.to_vec()));
    transact(store, Mode::Work, move |tx| {
        let work = work.clone();
        Box::pin(async move { cold::renew(tx, &work.0, &work.1, lease).await })
    })
    .await
}

/// `Store::defer` of the servers.
#[cfg(any(feature = "mysql", feature = "postgres"))]
async fn defer(store: &dyn Store, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>> {
    let work = Arc::new((owner.to_owned(), leases.to_vec(), how.clone()));
    transact(store, Mode::Work, move |tx| {
        let work = work.clone();
        Box::pin(async move { cold::defer(tx, &work.0, &work.1, &work.2).await })
    })
    .await
}

/// How long a migration waits for another process that migrates, and how often it asks.
#[cfg(any(feature = "mysql", feature = "postgres"))]
const OTHERS_MIGRATE: Duration = Duration::from_secs(120);
#[cfg(any(feature = "mysql", feature = "postgres"))]
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The wait for one's turn to migrate. Not at the server: whoever waits there cannot tell a lock from a server that does not
/// answer.
#[cfg(any(feature = "mysql", feature = "postgres"))]
struct Turn(crate::clock::Tick);

#[cfg(any(feature = "mysql", feature = "postgres"))]
impl Turn {
    fn begin() -> Self {
        Turn(crate::clock::Tick::now())
    }

    /// Another process migrates: a moment later it may have done so.
    async fn is_anothers(&self) -> Result<()> {
        if crate::clock::Tick::now().since(self.0) >= OTHERS_MIGRATE {
            return Err(Error::new(Kind::Busy, "another process has been migrating for two minutes; try again"));
        }
        tokio::time::sleep(ASK_AGAIN).await;
        Ok(())
    }
}

/// How far a test moved the clock of a store.
#[derive(Debug, Default)]
pub(crate) struct Skew {
    micros: AtomicI64,
    /// The clock stands still but for what is added: a simulator's.
    frozen: bool,
}

impl Skew {
    pub fn frozen_at(start: Timestamp) -> Self {
        Skew { micros: AtomicI64::new(start.micros()), frozen: true }
    }

    pub fn advance(&self, by: Duration) {
        self.jump(micros_of(by));
    }

    pub fn jump(&self, micros: i64) {
        self.micros.fetch_add(micros, Ordering::SeqCst);
    }

    pub fn micros(&self) -> i64 {
        self.micros.load(Ordering::Relaxed)
    }

    /// The time of a database that has no clock but the host's.
    pub fn now(&self) -> Timestamp {
        let base = if self.frozen { 0 } else { crate::clock::wall().micros() };
        Timestamp::from_micros(base + self.micros())
    }
}

/// Runs again what deadlocked, a little later each time, as long as it has not taken half of `deadline`. With `waits`
/// also what met somebody else's lock.
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) async fn rerun<T, F>(deadline: Duration, waits: bool, mut run: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let begun = crate::clock::Tick::now();
    for round in 0u32.. {
        let in_time = crate::clock::Tick::now().since(begun) < deadline / 2;
        match run().await {
            Err(e) if in_time && (e.worth_rerunning(round) || (waits && e.kind == Kind::Locked)) => {
                tokio::time::sleep(Duration::from_micros(2000 << round.min(6)).mul_f64(crate::clock::chance())).await;
            }
            other => return other,
        }
    }
    unreachable!("the loop ends by returning")
}

/// due_at, id, lease_token, locked_by, lease_until, crashes.
pub(crate) fn seen_of(row: &Row) -> Result<Seen> {
    Ok(Seen {
        mark: Mark { due_at: row.time(0)?, id: row.int(1)? },
        hold: Hold {
            token: row.int(2)?,
            locked_by: row.opt_text(3)?,
            lease_until: row.opt_time(4)?,
            crashes: row.int(5)? as u32,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_not_repeated() {
        for (said, told) in [
            (
                "Duplicate entry 'orders-it's me' for key 'outbox_keys.PRIMARY'",
                "Duplicate entry '***' for key 'outbox_keys.PRIMARY'",
            ),
            (
                "Incorrect string value: '\\xE0 secret' for column 'key' at row 1",
                "Incorrect string value: '***' for column 'key' at row 1",
            ),
            ("Truncated incorrect DOUBLE value: 'secret'", "Truncated incorrect DOUBLE value: '***"),
            ("invalid input syntax for type bigint: \"secret\"", "invalid input syntax for type bigint: \"***\""),
            ("Table 'app.outbox' doesn't exist", "Table 'app.outbox' doesn't exist"),
        ] {
            assert_eq!(without_values(said), told);
        }
    }

    #[test]
    fn passwords_are_not_shown() {
        for (url, shown) in [
            ("postgres://app:s3cr@t@db:5432/app?x=1", "postgres://app:***@db:5432/app?x=***"),
            ("mysql://root@db/app", "mysql://root@db/app"),
            ("sqlite://a:b@c.db", "sqlite://a:***@c.db"),
            ("nonsense", "***"),
            ("postrider.db", "postrider.db"),
            ("postgres://u@db/app?passwd=s3cret", "postgres://u@db/app?passwd=***"),
            ("postgres://app:s3/cr?et@db/app", "postgres://app:***@db/app"),
            ("postgres://db/app?user=a&password=s3cret&x=1", "postgres://db/app?user=a&password=***&x=***"),
            ("host=db password=s3cret", "***"),
            ("postgres://db/app?pasword=s3cret&sslmode=require", "postgres://db/app?pasword=***&sslmode=require"),
            ("postgres://db/app?s3cret", "postgres://db/app?***"),
            ("postgres://db/app?host=x;password=s3cret", "postgres://db/app?host=***"),
            ("app:s3cret@db", "app:***@db"),
            ("postgres://app:s3cret%40db/app", "postgres://app:***"),
            ("mysql://app:s3cret", "mysql://app:***"),
            ("postgres://db:5432/app", "postgres://db:5432/app"),
            ("postgres://[::1]:5432/app", "postgres://[::1]:5432/app"),
            ("mysql://[::1]/app", "mysql://[::1]/app"),
            ("sqlite://a:b/c.db", "sqlite://a:b/c.db"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }
}
