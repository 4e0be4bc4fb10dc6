//! A proxy between us and PostgreSQL or MySQL that knows where messages begin and end, counts them, and does one thing
//! wrong at the message a test names. Without a fault it only counts.

// The network takes real time.
#![allow(clippy::disallowed_methods)]

mod fault;
mod framing;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::task::JoinHandle;

use crate::kit::Session;
pub use fault::{Action, At, Fault, Seen};
pub use framing::{Direction, Framer, Message, Wire};

const POLL: Duration = Duration::from_millis(5);

/// One proxy to one server. Dropped, it ends its connections.
pub struct Proxy {
    url: String,
    shared: Arc<Shared>,
    acceptor: JoinHandle<()>,
}

struct Shared {
    wire: Wire,
    /// The server itself, for connections and for the administrator.
    server: (String, u16),
    direct: String,
    state: Mutex<State>,
    /// What is half-open ends when this moves on.
    released: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    fault: Option<Fault>,
    counts: [usize; 2],
    seen: Vec<Seen>,
    fired: Option<Fired>,
    /// Messages held back at the moment.
    held: usize,
    backends: Vec<Backend>,
    connections: usize,
}

/// Of transactions MariaDB tells what it knew the last time that nobody asked for a tenth of a second.
static ASKS_MYSQL: AsyncMutex<()> = AsyncMutex::const_new(());

/// The fault, once it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fired {
    pub connection: usize,
    /// The message and what was done to it: `PostgreSQL → client, message 7 (CommandComplete COMMIT): swallowed`.
    pub what: String,
}

/// A session at the server that the proxy brought about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    pub id: u32,
    pub connection: usize,
    pub link: Link,
    /// The client has closed its side.
    pub hung_up: bool,
    /// What went to the server last is not the end of a request: PostgreSQL waits for the rest, whatever its limits say.
    pub unfinished: bool,
    /// MySQL was told how long it bears its silence. Before that a session holds nothing.
    pub limited: bool,
}

/// How its connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    Open,
    /// Half-open: the server was not told that anything ended.
    Frozen,
    Closed,
}

impl Proxy {
    /// Stands before the server of this URL, on a port of its own.
    pub async fn start(url: &str) -> io::Result<Proxy> {
        let mut through = url::Url::parse(url).map_err(io::Error::other)?;
        let wire = if through.scheme().starts_with("postgres") { Wire::Postgres } else { Wire::Mysql };
        let port = through.port().ok_or_else(|| io::Error::other("the URL names no port"))?;
        let host = through.host_str().ok_or_else(|| io::Error::other("the URL names no host"))?.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let refused = |()| io::Error::other("this URL takes no port");
        through.set_port(Some(listener.local_addr()?.port())).map_err(refused)?;
        if wire == Wire::Mysql {
            // On one host its driver would rather go round us, by the server's socket.
            through.query_pairs_mut().append_pair("prefer_socket", "false");
        }
        let shared = Arc::new(Shared {
            wire,
            server: (host, port),
            direct: url.to_owned(),
            state: Mutex::default(),
            released: watch::Sender::new(0),
        });
        let acceptor = tokio::spawn(accept(listener, shared.clone()));
        Ok(Proxy { url: through.into(), shared, acceptor })
    }

    /// What a client is to be given.
    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn wire(&self) -> Wire {
        self.shared.wire
    }

    /// Counts from here; and the next message that meets the description has the fault happen to it, once.
    pub fn arm(&self, fault: Option<Fault>) {
        let mut state = self.shared.state();
        (state.fault, state.fired, state.counts) = (fault, None, [0, 0]);
        state.seen.clear();
    }

    /// What went wrong, if the fault was reached.
    pub fn fired(&self) -> Option<Fired> {
        self.shared.state().fired.clone()
    }

    /// Messages of a direction since it was armed.
    pub fn count(&self, direction: Direction) -> usize {
        self.shared.state().counts[direction as usize]
    }

    /// Everything since it was armed.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.state().seen.clone()
    }

    /// Every session there was.
    pub fn backends(&self) -> Vec<Backend> {
        self.shared.state().backends.clone()
    }

    /// Waits until nothing is held back any more.
    pub async fn quiet(&self) {
        while self.shared.state().held > 0 {
            tokio::time::sleep(POLL).await;
        }
    }

    /// Ends what is half-open, and forgets sessions that have ended.
    pub fn release(&self) {
        self.shared.released.send_modify(|round| *round += 1);
        self.shared.state().backends.retain(|backend| backend.link == Link::Open);
    }

    /// Open connections whose session is in a transaction now, as `left_behind` tells of PostgreSQL already.
    pub async fn in_transaction(&self) -> Vec<Backend> {
        let mut open = self.backends();
        open.retain(|backend| backend.link == Link::Open);
        if self.shared.wire == Wire::Postgres || open.is_empty() {
            return vec![];
        }
        let mut admin = Session::to(&self.shared.direct).await;
        let Session::Mysql(conn) = &mut admin else { return vec![] };
        let _turn = ASKS_MYSQL.lock().await;
        let busy = Session::in_transaction_on_mysql(conn).await;
        open.retain(|backend| busy.contains(&u64::from(backend.id)));
        open
    }

    /// Sessions that are still at the server after `patience` though their connection has ended, or in a transaction though
    /// nobody asks anything. What the network cut off in the middle of a request is ended by us: only TCP could tell
    /// PostgreSQL.
    pub async fn left_behind(&self, patience: Duration) -> Vec<Backend> {
        if self.backends().iter().any(|backend| backend.link == Link::Frozen && backend.unfinished) {
            self.shared.released.send_modify(|round| *round += 1);
        }
        let mut admin = Session::to(&self.shared.direct).await;
        let begun = Instant::now();
        loop {
            let mut left = Vec::new();
            for backend in self.backends() {
                if self.shared.is_left(&mut admin, backend).await {
                    left.push(backend);
                }
            }
            if left.is_empty() || begun.elapsed() > patience {
                return left;
            }
            tokio::time::sleep(POLL * 4).await;
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.release();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn note(&self, connection: usize, note: impl Fn(&mut Backend)) {
        self.state().backends.iter_mut().filter(|backend| backend.connection == connection).for_each(note);
    }

    /// Counts a message; answers what is to happen to it.
    fn see(&self, connection: usize, direction: Direction, message: &Message, name: String) -> Option<Action> {
        let mut state = self.state();
        state.counts[direction as usize] += 1;
        let number = state.counts[direction as usize];
        if let Some(id) = message.backend {
            state.backends.push(Backend {
                id,
                connection,
                link: Link::Open,
                hung_up: false,
                unfinished: false,
                limited: false,
            });
        }
        let seen = Seen { wire: self.wire, direction, connection, number, name };
        let hit = state.fault.as_ref().is_some_and(|fault| {
            fault.direction == direction
                && match fault.at {
                    At::Nth(n) => n == number,
                    At::Named(part) => seen.name.contains(part),
                }
        });
        let action = if hit { state.fault.take().map(|fault| fault.action) } else { None };
        if let Some(action) = action {
            state.fired = Some(Fired { connection, what: format!("{seen}: {}", action.name()) });
        }
        state.seen.push(seen);
        action
    }

    /// Is this session at the server though it should not be? Of open ones MySQL tells too slowly to be asked each time.
    async fn is_left(&self, admin: &mut Session, Backend { id, link, limited, .. }: Backend) -> bool {
        let sql = match (self.wire, link) {
            (Wire::Postgres, Link::Closed) => format!("SELECT COUNT(*) FROM pg_stat_activity WHERE pid = {id}"),
            (Wire::Postgres, _) => {
                format!("SELECT COUNT(*) FROM pg_stat_activity WHERE pid = {id} AND xact_start IS NOT NULL")
            }
            (Wire::Mysql, Link::Open) => return false,
            (Wire::Mysql, Link::Frozen) if !limited => return false,
            // It ends silent sessions, with a transaction or without.
            (Wire::Mysql, Link::Closed | Link::Frozen) => return admin.is_there(u64::from(id)).await,
        };
        admin.number(&sql).await > 0
    }

    /// As an administrator would, from a connection of his own; comes back when the session is gone.
    async fn terminate(&self, connection: usize) {
        let backend = self.state().backends.iter().find(|b| b.connection == connection).copied();
        let Some(backend) = backend else { return };
        let mut admin = Session::to(&self.direct).await;
        let id = backend.id;
        let end = match self.wire {
            Wire::Postgres => format!("SELECT pg_terminate_backend({id})"),
            Wire::Mysql => format!("KILL {id}"),
        };
        // It may have ended by itself meanwhile.
        let _ = admin.run(&end).await;
        let is_there = async |admin: &mut Session| match self.wire {
            Wire::Postgres => {
                admin.number(&format!("SELECT COUNT(*) FROM pg_stat_activity WHERE pid = {id}")).await > 0
            }
            Wire::Mysql => admin.is_there(u64::from(id)).await,
        };
        while is_there(&mut admin).await {
            tokio::time::sleep(POLL).await;
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((client, _)) = listener.accept().await {
        let connection = {
            let mut state = shared.state();
            state.connections += 1;
            state.connections
        };
        tokio::spawn(serve(client, connection, shared.clone()));
    }
}

async fn serve(client: TcpStream, connection: usize, shared: Arc<Shared>) {
    let Ok(server) = TcpStream::connect(&shared.server).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let to_client = Arc::new(AsyncMutex::new(to_client));
    let line = Arc::new(Line { connection, frozen: watch::Sender::new(false), asked: Mutex::default(), shared });
    let up = pump(line.clone(), Direction::ToServer, from_client, Sink::Server(to_server), to_client.clone());
    let down = pump(line.clone(), Direction::ToClient, from_server, Sink::Client(to_client.clone()), to_client.clone());
    // Whichever ends first takes both sockets with it.
    tokio::select! { () = up => {} () = down => {} () = line.is_released() => {} }
    line.shared.note(connection, |backend| backend.link = Link::Closed);
}

/// What both directions of a connection share.
struct Line {
    connection: usize,
    frozen: watch::Sender<bool>,
    /// What the client asked last, to name the answers of a protocol that does not.
    asked: Mutex<String>,
    shared: Arc<Shared>,
}

impl Line {
    /// Half-open until the test lets go of it.
    async fn is_released(&self) {
        let mut released = self.shared.released.subscribe();
        while released.changed().await.is_ok() {
            if *self.frozen.borrow() {
                return;
            }
        }
    }

    fn name(&self, direction: Direction, message: &Message) -> String {
        let mut asked = self.asked.lock().unwrap_or_else(|e| e.into_inner());
        match direction {
            Direction::ToServer => {
                asked.clone_from(&message.name);
                message.name.clone()
            }
            Direction::ToClient if self.shared.wire == Wire::Mysql => format!("{}, of {asked}", message.name),
            Direction::ToClient => message.name.clone(),
        }
    }
}

enum Sink {
    Server(OwnedWriteHalf),
    Client(Arc<AsyncMutex<OwnedWriteHalf>>),
}

impl Sink {
    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Sink::Server(half) => half.write_all(bytes).await,
            Sink::Client(half) => half.lock().await.write_all(bytes).await,
        }
    }
}

/// Carries one direction until it ends; then the connection does.
async fn pump(
    line: Arc<Line>,
    direction: Direction,
    mut from: OwnedReadHalf,
    mut to: Sink,
    to_client: Arc<AsyncMutex<OwnedWriteHalf>>,
) {
    let mut framer = Framer::new(line.shared.wire, direction);
    let mut chunk = vec![0; 65536];
    let mut swallows = false;
    loop {
        let Ok(n @ 1..) = from.read(&mut chunk).await else {
            if direction == Direction::ToServer {
                line.shared.note(line.connection, |backend| backend.hung_up = true);
            }
            // Nobody is told of the end of what is half-open.
            let frozen = *line.frozen.borrow();
            if frozen {
                std::future::pending::<()>().await;
            }
            return;
        };
        framer.push(&chunk[..n]);
        while let Some(message) = framer.next_message() {
            if message.asks_for_tls {
                if to_client.lock().await.write_all(b"N").await.is_err() {
                    return;
                }
                continue;
            }
            let name = line.name(direction, &message);
            let action = line.shared.see(line.connection, direction, &message, name);
            let mut _held = None;
            match action {
                Some(Action::CutBefore) => return,
                Some(Action::CutAfter) => {
                    let _ = to.write(&message.bytes).await;
                    return;
                }
                Some(Action::Delay(by)) => {
                    _held = Some(Held::new(&line.shared));
                    tokio::time::sleep(by).await;
                }
                Some(Action::Swallow) => swallows = true,
                Some(Action::HalfOpen) => {
                    line.shared.note(line.connection, |backend| backend.link = Link::Frozen);
                    line.frozen.send_replace(true);
                }
                Some(Action::Terminate) => line.shared.terminate(line.connection).await,
                None => {}
            }
            let lost = swallows || *line.frozen.borrow();
            if !lost && direction == Direction::ToServer {
                line.shared.note(line.connection, |backend| {
                    backend.unfinished = !message.ends_request;
                    backend.limited |= message.name.contains("SET SESSION wait_timeout");
                });
            }
            // A client that has gone must not keep what it asked for from arriving.
            if !lost && to.write(&message.bytes).await.is_err() && direction == Direction::ToServer {
                return;
            }
        }
    }
}

/// A message that is held back, until it has gone on or its connection has ended.
struct Held<'a>(&'a Shared);

impl<'a> Held<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.state().held += 1;
        Held(shared)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.state().held -= 1;
    }
}
