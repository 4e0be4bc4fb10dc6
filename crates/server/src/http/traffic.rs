//! What goes on on one connection, noted by whoever sees it: requests under way, answers that wait for their client, bytes
//! the socket does not take. From that it is judged whether a connection is worth its slot.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use postrider::clock::Tick;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// An answer is handed over in pieces of this size: of what HTTP/2 has in hand nobody can tell whether it moves. It is also
/// the least a client must take within its patience.
const PIECE: usize = 4 << 10;

/// How long a connection may do nothing.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Without a request under way.
    pub idle: Duration,
    /// With an answer of which the client takes nothing.
    pub write: Duration,
}

/// What is to become of a connection.
#[derive(Debug, PartialEq)]
pub enum Judgement {
    /// It stays, and is to be looked at again after this time.
    Stays(Duration),
    /// Nobody uses it.
    Idle,
    /// The client does not read.
    Stalled,
}

/// What an answer waits for.
#[derive(Clone, Copy, Debug)]
enum Waits {
    ForUs,
    /// A piece was handed over, and no more was asked for since.
    ForClient(Tick),
}

#[derive(Debug)]
struct Seen {
    next: u64,
    under_way: BTreeMap<u64, Waits>,
    /// When the last request ended.
    idle_since: Tick,
    /// Since when the socket has taken nothing.
    blocked_since: Option<Tick>,
    /// What was not read is not worth keeping.
    reset: bool,
}

impl Seen {
    fn judge(&self, now: Tick, patience: Patience) -> Judgement {
        let for_client = self.under_way.values().filter_map(|waits| match waits {
            Waits::ForClient(since) => Some(*since),
            Waits::ForUs => None,
        });
        // Frames that ask for nothing (PING) are no use of a connection, and answering them is no progress of an answer.
        let idle = (self.under_way.is_empty() && self.blocked_since.is_none()).then_some(self.idle_since);
        let left = |since: Tick, patience: Duration| patience.saturating_sub(now.since(since));
        let stalled = for_client.chain(self.blocked_since).min().map(|since| left(since, patience.write));
        let idle = idle.map(|since| left(since, patience.idle));
        if stalled.is_some_and(|left| left.is_zero()) {
            return Judgement::Stalled;
        }
        if idle.is_some_and(|left| left.is_zero()) {
            return Judgement::Idle;
        }
        // What begins meanwhile has all its time before it: nothing is due earlier than this, and little is seen late.
        let soon = (patience.idle.min(patience.write) / 4).max(Duration::from_millis(20));
        Judgement::Stays(stalled.into_iter().chain(idle).fold(soon, Duration::min).max(Duration::from_millis(1)))
    }
}

/// One connection's traffic.
pub struct Traffic(Mutex<Seen>);

impl Traffic {
    pub fn new(now: Tick) -> Arc<Traffic> {
        let seen = Seen { next: 0, under_way: BTreeMap::new(), idle_since: now, blocked_since: None, reset: false };
        Arc::new(Traffic(Mutex::new(seen)))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn judge(&self, now: Tick, patience: Patience) -> Judgement {
        self.seen().judge(now, patience)
    }

    /// A request came; it is under way until the answer's last piece was taken, or nobody works on it any more.
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        let mut seen = self.seen();
        let id = seen.next;
        seen.next += 1;
        seen.under_way.insert(id, Waits::ForUs);
        UnderWay { traffic: self.clone(), id }
    }

    /// The connection is to end at once, with what was not read.
    pub fn reset_at_end(&self) {
        self.seen().reset = true;
    }

    fn wrote(&self, taken: bool) {
        let mut seen = self.seen();
        match (taken, seen.blocked_since) {
            (true, Some(_)) => seen.blocked_since = None,
            (false, None) => seen.blocked_since = Some(Tick::now()),
            _ => {}
        }
    }
}

/// A request and its answer.
pub struct UnderWay {
    traffic: Arc<Traffic>,
    id: u64,
}

impl UnderWay {
    fn waits(&self, waits: Waits) {
        self.traffic.seen().under_way.insert(self.id, waits);
    }

    /// The answer, as it goes out.
    pub fn sends(self, body: axum::body::Body) -> Outgoing {
        Outgoing { body, rest: Bytes::new(), under_way: self }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut seen = self.traffic.seen();
        seen.under_way.remove(&self.id);
        seen.idle_since = Tick::now();
    }
}

/// An answer's body on its way out.
pub struct Outgoing {
    body: axum::body::Body,
    /// Of the frame that goes out piece by piece.
    rest: Bytes,
    under_way: UnderWay,
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        // It is asked for when the last piece has found room.
        self.under_way.waits(Waits::ForUs);
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => self.rest = data,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        let length = self.rest.len().min(PIECE);
        let piece = self.rest.split_to(length);
        self.under_way.waits(Waits::ForClient(Tick::now()));
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (of_body, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(of_body.lower() + rest);
        if let Some(upper) = of_body.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

/// A client's socket, below TLS.
pub struct Wire {
    stream: TcpStream,
    traffic: Arc<Traffic>,
}

impl Wire {
    pub fn new(stream: TcpStream, traffic: Arc<Traffic>) -> Wire {
        Wire { stream, traffic }
    }

    fn noted<T>(&self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.traffic.wrote(written.is_ready());
        written
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.traffic.seen().reset {
            // The kernel would go on offering what nobody reads.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.noted(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.noted(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { idle: Duration::from_secs(15), write: Duration::from_secs(30) };

    fn at(seconds: u64) -> Tick {
        Tick::default().plus(Duration::from_secs(seconds))
    }

    fn seen(under_way: &[Waits], blocked: Option<u64>) -> Seen {
        let under_way = under_way.iter().copied().enumerate().map(|(n, waits)| (n as u64, waits)).collect();
        Seen { next: 9, under_way, idle_since: at(100), blocked_since: blocked.map(at), reset: false }
    }

    fn stays(seen: &Seen, now: u64) -> bool {
        matches!(seen.judge(at(now), PATIENCE), Judgement::Stays(_))
    }

    #[test]
    fn without_a_request_a_connection_stays_for_a_while() {
        let seen = seen(&[], None);
        assert!(stays(&seen, 114));
        assert_eq!(seen.judge(at(115), PATIENCE), Judgement::Idle);
    }

    #[test]
    fn a_request_keeps_it_however_long_we_take() {
        assert!(stays(&seen(&[Waits::ForUs], None), 100_000));
    }

    #[test]
    fn a_client_that_takes_nothing_ends_it_whatever_else_it_does() {
        let one = seen(&[Waits::ForUs, Waits::ForClient(at(200)), Waits::ForClient(at(220))], None);
        assert!(stays(&one, 229));
        assert_eq!(one.judge(at(230), PATIENCE), Judgement::Stalled);
        let socket = seen(&[], Some(300));
        assert!(stays(&socket, 329), "what is still being sent is not idle");
        assert_eq!(socket.judge(at(330), PATIENCE), Judgement::Stalled);
    }

    #[test]
    fn it_is_looked_at_when_something_may_be_due() {
        let Judgement::Stays(left) = seen(&[], None).judge(at(113), PATIENCE) else { panic!("it stays") };
        assert_eq!(left, Duration::from_secs(2));
        let Judgement::Stays(busy) = seen(&[Waits::ForUs], None).judge(at(113), PATIENCE) else { panic!("it stays") };
        assert!(busy < PATIENCE.idle / 2, "what begins meanwhile is seen in time: {busy:?}");
    }
}
