//! A small pool for one purpose: a connection comes back only if its last operation ended cleanly. One that failed, timed
//! out or was abandoned half-way is closed, never handed to the next borrower.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

use super::Options;
use crate::clock::Tick;
use crate::error::{Error, Kind, Result};
use crate::store::{Connections, Mode};

#[async_trait]
pub(crate) trait Connect: Send + Sync + 'static {
    type Connection: Send;

    async fn connect(&self) -> Result<Self::Connection>;

    fn is_open(connection: &Self::Connection) -> bool;
}

pub(crate) struct Pool<C: Connect> {
    connector: C,
    /// With the moment each came back: the database ends sessions that are silent for long.
    idle: Mutex<Vec<(C::Connection, Tick)>>,
    longest_idle: Duration,
    permits: Arc<Semaphore>,
    /// For whom the engine does not wait: however many wait for somebody's lock, it has connections left.
    guests: Arc<Semaphore>,
    size: usize,
    deadline: Duration,
}

/// A connection on loan. Dropped without [`Pool::give_back`], it is closed.
pub(crate) struct Loan<C: Connect> {
    pub connection: C::Connection,
    _permits: [Option<OwnedSemaphorePermit>; 2],
}

/// Connections that guests leave to the engine.
fn reserve(size: usize) -> usize {
    match size {
        0 | 1 => 0,
        2 | 3 => 1,
        _ => 2,
    }
}

impl<C: Connect> Pool<C> {
    pub fn new(connector: C, options: &Options) -> Self {
        let (size, deadline, longest_idle) =
            (options.connections.max(1), options.deadline, options.silence().max(Duration::from_secs(1)) / 2);
        Pool {
            connector,
            longest_idle,
            idle: Mutex::default(),
            permits: Arc::new(Semaphore::new(size)),
            guests: Arc::new(Semaphore::new(size - reserve(size))),
            size,
            deadline,
        }
    }

    pub async fn take(&self) -> Result<Loan<C>> {
        self.take_as(false).await
    }

    /// For the engine, or for a guest: what people and applications ask for, which may wait for somebody's lock.
    pub async fn take_for(&self, mode: Mode) -> Result<Loan<C>> {
        self.take_as(matches!(mode, Mode::Write | Mode::Look | Mode::Count)).await
    }

    async fn take_as(&self, guest: bool) -> Result<Loan<C>> {
        let permits = async {
            let guest = if guest { Some(self.guests.clone().acquire_owned().await?) } else { None };
            Ok::<_, AcquireError>([guest, Some(self.permits.clone().acquire_owned().await?)])
        };
        // Half of it: there must be time left for the work itself.
        let wait = tokio::time::timeout(self.deadline / 2, permits);
        let busy = || {
            Error::new(
                Kind::Overloaded,
                format!(
                    "all {} database connections are busy; raise the connection limit or lower the load",
                    self.size
                ),
            )
        };
        let permits = wait.await.map_err(|_| busy())?.map_err(|_| busy())?;
        loop {
            let idle = self.idle.lock().unwrap_or_else(|e| e.into_inner()).pop();
            match idle {
                Some((connection, since))
                    if C::is_open(&connection) && Tick::now().since(since) < self.longest_idle =>
                {
                    return Ok(Loan { connection, _permits: permits });
                }
                Some(_) => {}
                None => break,
            }
        }
        let connecting = tokio::time::timeout(self.deadline, self.connector.connect());
        let connection = connecting
            .await
            .map_err(|_| Error::new(Kind::Unreachable, "the database did not accept a connection in time"))??;
        Ok(Loan { connection, _permits: permits })
    }

    pub fn connections(&self) -> Connections {
        let idle = self.idle.lock().unwrap_or_else(|e| e.into_inner()).len();
        Connections { most: self.size, in_use: self.size - self.permits.available_permits().min(self.size), idle }
    }

    pub fn give_back(&self, loan: Loan<C>) {
        if C::is_open(&loan.connection) {
            self.idle.lock().unwrap_or_else(|e| e.into_inner()).push((loan.connection, Tick::now()));
        }
    }

    /// Runs one operation under the deadline. `work` answers with its result and whether the connection is clean (no
    /// transaction open on it).
    pub async fn timed<R>(&self, work: impl Future<Output = R>) -> Result<R> {
        tokio::time::timeout(self.deadline, work).await.map_err(|_| {
            let limit = self.deadline.as_secs_f32();
            Error::new(
                Kind::Timeout,
                format!("the database did not answer within {limit} s; the connection was closed"),
            )
            .unknown()
        })
    }
}
