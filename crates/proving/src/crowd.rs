//! Clients that misbehave: from any address of loopback, with HTTP/2 spoken byte by byte.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};

use rustix::net::{AddressFamily, SocketType, bind, connect, socket, sockopt};

/// A connection that comes from `source`.
pub fn connect_from(source: Ipv4Addr, address: SocketAddr) -> io::Result<TcpStream> {
    begin(source, address, None)
}

/// The same with a small buffer of its own, so that what it does not read is soon felt.
pub fn connect_narrowly(source: Ipv4Addr, address: SocketAddr) -> io::Result<TcpStream> {
    begin(source, address, Some(4096))
}

fn begin(source: Ipv4Addr, address: SocketAddr, buffer: Option<usize>) -> io::Result<TcpStream> {
    let own = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    if let Some(bytes) = buffer {
        sockopt::set_socket_recv_buffer_size(&own, bytes)?;
    }
    bind(&own, &SocketAddr::from((source, 0)))?;
    connect(&own, &address)?;
    Ok(TcpStream::from(own))
}

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const INITIAL_WINDOW_SIZE: u8 = 4;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// One frame of HTTP/2.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The first bytes of a client, with the window it opens for answers.
pub fn greeting(window: u32) -> Vec<u8> {
    let mut setting = vec![0, INITIAL_WINDOW_SIZE];
    setting.extend(window.to_be_bytes());
    [PREFACE, &frame(SETTINGS, 0, 0, &setting)].concat()
}

pub fn ping() -> Vec<u8> {
    frame(PING, 0, 0, b"are you?")
}

/// A request without a body; `whole` unless the rest of its head never comes.
pub fn get(stream: u32, path: &str, whole: bool) -> Vec<u8> {
    // By HPACK's static table: GET, http, then path and authority as they are.
    let mut head = vec![0x82, 0x86];
    for (name, value) in [(0x04, path), (0x01, "127.0.0.1")] {
        head.extend([name, value.len() as u8]);
        head.extend(value.as_bytes());
    }
    frame(HEADERS, END_STREAM | if whole { END_HEADERS } else { 0 }, stream, &head)
}

/// Room for so many bytes more, of one stream or (0) of the connection.
pub fn window_update(stream: u32, bytes: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())
}

/// What a frame's first nine bytes say.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    pub length: usize,
    kind: u8,
    flags: u8,
}

impl Head {
    pub fn of(bytes: [u8; 9]) -> Head {
        let [a, b, c, kind, flags, ..] = bytes;
        Head { length: u32::from_be_bytes([0, a, b, c]) as usize, kind, flags }
    }

    pub fn is_data(self) -> bool {
        self.kind == DATA
    }

    pub fn ends_stream(self) -> bool {
        self.kind <= HEADERS && self.flags & END_STREAM != 0
    }

    /// What a client must answer to it, given the frame's payload.
    pub fn answer(self, payload: &[u8]) -> Option<Vec<u8>> {
        let asks = self.flags & ACK == 0;
        match self.kind {
            SETTINGS if asks => Some(frame(SETTINGS, ACK, 0, b"")),
            PING if asks => Some(frame(PING, ACK, 0, payload)),
            _ => None,
        }
    }
}
