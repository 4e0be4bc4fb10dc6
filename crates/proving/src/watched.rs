//! A store that tells how much the database looked at for each question: rows on PostgreSQL and MySQL, steps of its virtual
//! machine on SQLite (some ten a row). What is bounded stays bounded however the tables grow.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::lanes::Lanes;
use postrider::lease::Lease;
use postrider::outcome::{GiveBack, LeaseState, Settled, Settlement};
use postrider::store::{Claim, Claimed, Mark, Mode, Store, Vitals, Walked, Work};
use postrider::tx::{BoxFuture, Dialect, Now, Row, Tx, Value};
use postrider::{Result, Schema};
use rusqlite::StatementStatus;

/// What SQLite does for a row it looks at and leaves out, at most.
const STEPS_A_ROW: u64 = 16;

/// A question, and what it cost.
#[derive(Clone, Debug)]
pub struct Look {
    pub sql: String,
    pub cost: u64,
}

/// A table `s` with the numbers `n` from 0 to 999,999, in words every database knows.
pub fn numbers() -> String {
    let digits = (0..10).map(|d| format!("SELECT {d} AS d")).collect::<Vec<_>>().join(" UNION ALL ");
    let places: Vec<String> = (0..6).map(|n| format!("({digits}) p{n}")).collect();
    let value: Vec<String> = (0..6).map(|n| format!("p{n}.d * {}", 10_u32.pow(n))).collect();
    format!("(SELECT {} AS n FROM {}) s", value.join(" + "), places.join(", "))
}

type Looks = Arc<Mutex<Vec<Look>>>;

/// Another store, watched.
pub struct Watched {
    inner: Arc<dyn Store>,
    /// SQLite counts for the connection that asks, so that what was asked is asked again on this one.
    again: Option<Arc<Mutex<rusqlite::Connection>>>,
    looks: Looks,
}

impl Watched {
    /// `url` is where `inner` has its database.
    pub fn over(inner: Arc<dyn Store>, url: &str) -> Arc<Self> {
        let again = url.strip_prefix("sqlite://").map(|path| {
            let connection = rusqlite::Connection::open(path).expect("the database's file");
            Arc::new(Mutex::new(connection))
        });
        Arc::new(Watched { inner, again, looks: Looks::default() })
    }

    /// What was asked since the last time.
    pub fn take(&self) -> Vec<Look> {
        std::mem::take(&mut self.looks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Nothing that was asked since the last time looked at more than so many rows.
    pub fn assert_bounded(&self, what: &str, rows: u64) {
        let most = if self.again.is_some() { rows * STEPS_A_ROW } else { rows };
        for Look { sql, cost } in self.take() {
            assert!(cost <= most, "{what}: {cost} looked at, {most} allowed, by {sql}");
        }
    }
}

#[async_trait]
impl Store for Watched {
    fn dialect(&self) -> Dialect {
        self.inner.dialect()
    }

    fn lanes(&self) -> &Arc<Lanes> {
        self.inner.lanes()
    }

    fn schema(&self) -> &Schema {
        self.inner.schema()
    }

    async fn migrate(&self) -> Result<Vec<String>> {
        self.inner.migrate().await
    }

    async fn claim(&self, claim: &Claim) -> Result<Claimed> {
        self.inner.claim(claim).await
    }

    async fn walk(&self, lane: &str, shard: u32, after: Option<Mark>, limit: u32) -> Result<Walked> {
        self.inner.walk(lane, shard, after, limit).await
    }

    async fn settle(&self, lane: &str, owner: &str, entries: &[Settlement]) -> Result<Vec<Settled>> {
        self.inner.settle(lane, owner, entries).await
    }

    async fn renew(&self, owner: &str, leases: &[Lease], lease: Duration) -> Result<Vec<LeaseState>> {
        self.inner.renew(owner, leases, lease).await
    }

    async fn defer(&self, owner: &str, leases: &[Lease], how: &GiveBack) -> Result<Vec<LeaseState>> {
        self.inner.defer(owner, leases, how).await
    }

    async fn transact(&self, mode: Mode, work: Work) -> Result<()> {
        let (work, again, looks) = (Arc::new(Mutex::new(work)), self.again.clone(), self.looks.clone());
        let watched: Work = Box::new(move |tx| {
            let (work, again, looks) = (work.clone(), again.clone(), looks.clone());
            Box::pin(async move {
                let mut tx = WatchedTx { tx, again, looks };
                let answer = work.lock().unwrap_or_else(PoisonError::into_inner)(&mut tx);
                answer.await
            })
        });
        self.inner.transact(mode, watched).await
    }

    async fn vitals(&self) -> Result<Vitals> {
        self.inner.vitals().await
    }

    fn advance_clock(&self, by: Duration) {
        self.inner.advance_clock(by);
    }
}

struct WatchedTx<'t> {
    tx: &'t mut (dyn Tx + Send),
    again: Option<Arc<Mutex<rusqlite::Connection>>>,
    looks: Looks,
}

impl WatchedTx<'_> {
    /// MySQL's count of rows handed over by its tables, for this session.
    async fn handed_over(&mut self) -> Result<u64> {
        let rows = self.tx.query("SHOW SESSION STATUS LIKE 'Handler_read%'", &[]).await?;
        rows.iter().map(|row| Ok(row.text(1)?.parse::<u64>().unwrap_or(0))).sum()
    }

    /// PostgreSQL does not tell of entries of an index that it read and left out. It does so where a question names a column
    /// of the index but not one before it.
    async fn assert_no_gap(&mut self, sql: &str, plan: &[String]) -> Result<()> {
        for (scan, condition) in plan.iter().zip(plan.iter().skip(1)) {
            // Forwards, backwards, or of the index alone.
            let name = scan.split(" using ").nth(1).and_then(|rest| rest.split(' ').next());
            let (Some(index), Some(condition)) = (name, condition.trim().strip_prefix("Index Cond: ")) else {
                continue;
            };
            let columns = "SELECT attname::text FROM pg_attribute WHERE attrelid = ?::text::regclass ORDER BY attnum";
            let columns = self.tx.query(columns, &[index.into()]).await?;
            let named = |column: &str| {
                condition.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').any(|word| word == column)
            };
            let named: Vec<bool> = columns.iter().map(|row| Ok(named(&row.text(0)?))).collect::<Result<_>>()?;
            let gap = named.iter().position(|named| !named).is_some_and(|gap| named[gap..].contains(&true));
            assert!(
                !gap,
                "{sql} searches {index} by {condition} and reads all that lies between:\n{}",
                plan.join("\n")
            );
        }
        Ok(())
    }

    /// What a question costs that is asked beside the real one.
    async fn cost_beside(&mut self, sql: &str, params: &[Value]) -> Result<u64> {
        match &self.again {
            Some(connection) => {
                let connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(steps(&connection, sql, params).unwrap_or_else(|e| panic!("{sql}: {e}")))
            }
            None => {
                let sql = format!("EXPLAIN (ANALYZE, TIMING OFF, SUMMARY OFF) {sql}");
                let plan: Vec<String> =
                    self.tx.query(&sql, params).await?.iter().map(|row| row.text(0)).collect::<Result<_>>()?;
                self.assert_no_gap(&sql, &plan).await?;
                Ok(rows_looked_at(&plan))
            }
        }
    }
}

impl Tx for WatchedTx<'_> {
    fn dialect(&self) -> Dialect {
        self.tx.dialect()
    }

    fn now(&self) -> Now {
        self.tx.now()
    }

    fn query<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<Vec<Row>>> {
        Box::pin(async move {
            let (cost, rows) = if self.dialect() == Dialect::Mysql {
                let before = self.handed_over().await?;
                let rows = self.tx.query(sql, params).await?;
                (self.handed_over().await? - before, rows)
            } else {
                (self.cost_beside(sql, params).await?, self.tx.query(sql, params).await?)
            };
            self.looks.lock().unwrap_or_else(PoisonError::into_inner).push(Look { sql: sql.to_owned(), cost });
            Ok(rows)
        })
    }

    fn execute<'a>(&'a mut self, sql: &'a str, params: &'a [Value]) -> BoxFuture<'a, Result<u64>> {
        self.tx.execute(sql, params)
    }
}

fn steps(connection: &rusqlite::Connection, sql: &str, params: &[Value]) -> rusqlite::Result<u64> {
    use rusqlite::types::Value as Bound;
    let bound = params.iter().map(|value| match value {
        Value::Null => Bound::Null,
        Value::Bool(yes) => Bound::Integer((*yes).into()),
        Value::Int(n) => Bound::Integer(*n),
        Value::Float(n) => Bound::Real(*n),
        Value::Text(text) => Bound::Text(text.clone()),
        Value::Bytes(bytes) => Bound::Blob(bytes.to_vec()),
        Value::Time(at) => Bound::Integer(at.micros()),
        _ => panic!("arrays are PostgreSQL's"),
    });
    let mut statement = connection.prepare(sql)?;
    let mut rows = statement.query(rusqlite::params_from_iter(bound))?;
    while rows.next()?.is_some() {}
    drop(rows);
    Ok(statement.get_status(StatementStatus::VmStep) as u64)
}

/// The rows all scans of a plan went through: those they gave, and those they left out.
fn rows_looked_at(plan: &[String]) -> u64 {
    let number = |line: &str, after: &str| {
        let rest = &line[line.find(after)? + after.len()..];
        rest.split(|c: char| !c.is_ascii_digit() && c != '.').next()?.parse::<f64>().ok()
    };
    let (mut rows, mut loops, mut scans) = (0.0, 1.0, false);
    for line in plan {
        if let Some(actual) = line.find("(actual ") {
            // What an index tells of the heap is counted there.
            (scans, loops) = (
                line.contains("Scan") && !line.contains("Bitmap Index Scan"),
                number(&line[actual..], "loops=").unwrap_or(1.0),
            );
            rows += if scans { loops * number(&line[actual..], "rows=").unwrap_or(0.0) } else { 0.0 };
        } else if scans && line.contains("Rows Removed by") {
            rows += loops * number(line, ": ").unwrap_or(0.0);
        }
    }
    rows as u64
}
