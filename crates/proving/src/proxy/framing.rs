//! The wire, cut into messages: bytes in, whole messages with a name out. Pure. TLS is not spoken on this hop.

use std::fmt;

/// Whose protocol it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    Postgres,
    /// MySQL and MariaDB.
    Mysql,
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Wire::Postgres => "PostgreSQL",
            Wire::Mysql => "MySQL",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    ToServer,
    ToClient,
}

/// One message, as it goes over the wire, and what it is to people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    pub bytes: Vec<u8>,
    pub name: String,
    /// The server told who serves this connection: what an administrator ends it by.
    pub backend: Option<u32>,
    /// After it the server answers; before, PostgreSQL may wait for more.
    pub ends_request: bool,
    /// The client asks whether encryption is to be had; answered by the proxy, never passed on.
    pub asks_for_tls: bool,
}

/// Cuts one direction of one connection.
pub struct Framer {
    wire: Wire,
    direction: Direction,
    buffer: Vec<u8>,
    /// Past PostgreSQL's first packet, which has no type; past MySQL's greeting.
    begun: bool,
}

const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;

impl Framer {
    pub fn new(wire: Wire, direction: Direction) -> Self {
        Framer { wire, direction, buffer: Vec::new(), begun: false }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, if there is one.
    pub fn next_message(&mut self) -> Option<Message> {
        match (self.wire, self.direction, self.begun) {
            (Wire::Postgres, Direction::ToServer, false) => self.first_of_postgres(),
            (Wire::Postgres, direction, _) => {
                let bytes = self.take(1 + long(self.buffer.get(1..5)?) as usize)?;
                let backend = match (direction, bytes[0]) {
                    (Direction::ToClient, b'K') => bytes.get(5..9).map(long),
                    _ => None,
                };
                let name = match direction {
                    Direction::ToServer => asked_of_postgres(&bytes),
                    Direction::ToClient => told_by_postgres(&bytes),
                };
                let ends_request = !matches!(bytes[0], b'P' | b'B' | b'E' | b'D' | b'C' | b'H');
                Some(Message { bytes, name, backend, ends_request, asks_for_tls: false })
            }
            (Wire::Mysql, direction, begun) => {
                let header = self.buffer.get(..4)?;
                let length = header[0] as usize | ((header[1] as usize) << 8) | ((header[2] as usize) << 16);
                let bytes = self.take(4 + length)?;
                self.begun = true;
                let greets = direction == Direction::ToClient && !begun;
                let name = match direction {
                    _ if greets => "Handshake".to_owned(),
                    Direction::ToServer => asked_of_mysql(&bytes),
                    Direction::ToClient => told_by_mysql(&bytes),
                };
                let backend = if greets { thread_of(&bytes[4..]) } else { None };
                Some(Message { bytes, name, backend, ends_request: true, asks_for_tls: false })
            }
        }
    }

    /// Length and code, without a type: a request for encryption, for a cancel, or the start.
    fn first_of_postgres(&mut self) -> Option<Message> {
        let (length, code) = (long(self.buffer.get(..4)?), long(self.buffer.get(4..8)?));
        let bytes = self.take(length as usize)?;
        let asks_for_tls = matches!(code, SSL_REQUEST | GSS_REQUEST);
        self.begun = !asks_for_tls;
        let name = match code {
            SSL_REQUEST => "SSLRequest",
            GSS_REQUEST => "GSSENCRequest",
            CANCEL_REQUEST => "CancelRequest",
            _ => "StartupMessage",
        };
        Some(Message { bytes, name: name.to_owned(), backend: None, ends_request: true, asks_for_tls })
    }

    fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        (self.buffer.len() >= length).then(|| self.buffer.drain(..length).collect())
    }
}

fn long(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |number, byte| (number << 8) | u32::from(*byte))
}

/// The first words of a statement, in one line.
fn words(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let text = text.trim_end_matches('\0').split_whitespace().collect::<Vec<_>>().join(" ");
    if text.chars().count() <= 60 { text } else { format!("{}…", text.chars().take(60).collect::<String>()) }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn asked_of_postgres(bytes: &[u8]) -> String {
    let body = bytes.get(5..).unwrap_or_default();
    match bytes[0] {
        b'Q' => format!("Query {}", words(body)),
        b'P' => {
            let statement = body.splitn(2, |byte| *byte == 0).nth(1).unwrap_or_default();
            format!("Parse {}", words(until_nul(statement)))
        }
        b'B' => "Bind".into(),
        b'E' => "Execute".into(),
        b'D' => "Describe".into(),
        b'C' => "Close".into(),
        b'H' => "Flush".into(),
        b'S' => "Sync".into(),
        b'X' => "Terminate".into(),
        b'p' => "Password".into(),
        other => format!("`{}`", other as char),
    }
}

fn told_by_postgres(bytes: &[u8]) -> String {
    let body = bytes.get(5..).unwrap_or_default();
    match bytes[0] {
        b'C' => format!("CommandComplete {}", words(body)),
        b'Z' => format!("ReadyForQuery {}", body.first().map_or('?', |state| *state as char)),
        b'E' => format!("ErrorResponse {}", sqlstate(body)),
        b'N' => format!("NoticeResponse {}", sqlstate(body)),
        b'T' => "RowDescription".into(),
        b'D' => "DataRow".into(),
        b'1' => "ParseComplete".into(),
        b'2' => "BindComplete".into(),
        b'3' => "CloseComplete".into(),
        b't' => "ParameterDescription".into(),
        b'n' => "NoData".into(),
        b'I' => "EmptyQueryResponse".into(),
        b'S' => format!("ParameterStatus {}", words(until_nul(body))),
        b'K' => "BackendKeyData".into(),
        b'R' => "Authentication".into(),
        b'A' => "NotificationResponse".into(),
        other => format!("`{}`", other as char),
    }
}

/// Fields are a letter and a text each; `C` is the code.
fn sqlstate(body: &[u8]) -> String {
    let code = body.split(|byte| *byte == 0).find(|field| field.first() == Some(&b'C'));
    code.map_or_else(String::new, |field| String::from_utf8_lossy(&field[1..]).into_owned())
}

fn asked_of_mysql(bytes: &[u8]) -> String {
    let (number, body) = (bytes[3], bytes.get(5..).unwrap_or_default());
    match (number, bytes.get(4)) {
        (0, Some(0x01)) => "COM_QUIT".into(),
        (0, Some(0x02)) => "COM_INIT_DB".into(),
        (0, Some(0x03)) => format!("COM_QUERY {}", words(body)),
        (0, Some(0x0e)) => "COM_PING".into(),
        (0, Some(0x16)) => format!("COM_STMT_PREPARE {}", words(body)),
        (0, Some(0x17)) => "COM_STMT_EXECUTE".into(),
        (0, Some(0x18)) => "COM_STMT_SEND_LONG_DATA".into(),
        (0, Some(0x19)) => "COM_STMT_CLOSE".into(),
        (0, Some(0x1f)) => "COM_RESET_CONNECTION".into(),
        (0, Some(other)) => format!("command {other:#04x}"),
        (_, _) => "HandshakeResponse".into(),
    }
}

/// Rows and counts of columns cannot be told apart without following every answer; what ends one can.
fn told_by_mysql(bytes: &[u8]) -> String {
    let length = bytes.len() - 4;
    match bytes.get(4) {
        Some(0x00) if length >= 7 => "OK".into(),
        Some(0xfe) if length < 9 => "EOF".into(),
        Some(0xff) => match bytes.get(5..7) {
            Some(code) => format!("ERR {}", u16::from(code[0]) | (u16::from(code[1]) << 8)),
            None => "ERR".into(),
        },
        _ => "row or column".into(),
    }
}

/// Protocol version, the server's version up to a NUL, then the number of the thread.
fn thread_of(greeting: &[u8]) -> Option<u32> {
    let after = 1 + until_nul(greeting.get(1..)?).len() + 1;
    let number = greeting.get(after..after + 4)?;
    Some(number.iter().rev().fold(0, |all, byte| (all << 8) | u32::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(wire: Wire, direction: Direction, pieces: &[&[u8]]) -> Vec<Message> {
        let mut framer = Framer::new(wire, direction);
        let mut messages = Vec::new();
        for piece in pieces {
            framer.push(piece);
            while let Some(message) = framer.next_message() {
                messages.push(message);
            }
        }
        messages
    }

    fn names(messages: &[Message]) -> Vec<&str> {
        messages.iter().map(|message| message.name.as_str()).collect()
    }

    fn typed(kind: u8, body: &[u8]) -> Vec<u8> {
        [&[kind][..], &(body.len() as u32 + 4).to_be_bytes(), body].concat()
    }

    fn packet(number: u8, body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32).to_le_bytes()[..3], &[number], body].concat()
    }

    #[test]
    fn postgres_begins_without_a_type() {
        let ssl = [&8u32.to_be_bytes()[..], &SSL_REQUEST.to_be_bytes()].concat();
        let startup = [&11u32.to_be_bytes()[..], &196_608u32.to_be_bytes(), b"u\0\0"].concat();
        let messages = all(Wire::Postgres, Direction::ToServer, &[&ssl, &startup, &typed(b'Q', b"COMMIT\0")]);
        assert_eq!(names(&messages), ["SSLRequest", "StartupMessage", "Query COMMIT"]);
        assert_eq!(messages.iter().map(|m| m.asks_for_tls).collect::<Vec<_>>(), [true, false, false]);
    }

    #[test]
    fn messages_are_whole_whatever_the_pieces() {
        let stream = [typed(b'K', &[0, 0, 1, 2, 9, 9, 9, 9]), typed(b'C', b"COMMIT\0"), typed(b'Z', b"I")].concat();
        for cut in 0..stream.len() {
            let messages = all(Wire::Postgres, Direction::ToClient, &[&stream[..cut], &stream[cut..]]);
            assert_eq!(names(&messages), ["BackendKeyData", "CommandComplete COMMIT", "ReadyForQuery I"]);
            assert_eq!(messages[0].backend, Some(258));
            assert_eq!(messages.into_iter().flat_map(|m| m.bytes).collect::<Vec<_>>(), stream);
        }
    }

    #[test]
    fn postgres_tells_statements_and_codes() {
        let parse = typed(b'P', b"s1\0SELECT  1\n FROM a\0\0\0");
        let startup = [&8u32.to_be_bytes()[..], &196_608u32.to_be_bytes()].concat();
        let messages = all(Wire::Postgres, Direction::ToServer, &[&startup, &parse, &typed(b'S', b"")]);
        assert_eq!(names(&messages)[1..], ["Parse SELECT 1 FROM a", "Sync"]);
        assert_eq!(messages.iter().map(|m| m.ends_request).collect::<Vec<_>>(), [true, false, true]);
        let error = typed(b'E', b"SFATAL\0C57P01\0Mbye\0\0");
        assert_eq!(names(&all(Wire::Postgres, Direction::ToClient, &[&error])), ["ErrorResponse 57P01"]);
    }

    #[test]
    fn mysql_greets_and_counts() {
        let greeting = packet(0, b"\x0a11.4-MariaDB\0\x2a\x01\0\0rest");
        let ok = packet(1, &[0, 0, 0, 2, 0, 0, 0]);
        let error = packet(1, b"\xff\xb5\x04#HY000late");
        let messages = all(Wire::Mysql, Direction::ToClient, &[&greeting, &ok, &error]);
        assert_eq!(names(&messages), ["Handshake", "OK", "ERR 1205"]);
        assert_eq!(messages[0].backend, Some(298));
        let asked = [packet(1, b"login"), packet(0, b"\x03COMMIT"), packet(0, b"\x16SELECT ?")].concat();
        let messages = all(Wire::Mysql, Direction::ToServer, &[&asked]);
        assert_eq!(names(&messages), ["HandshakeResponse", "COM_QUERY COMMIT", "COM_STMT_PREPARE SELECT ?"]);
    }
}
