//! What the MCP SDK passes over in silence is answered here: JSON that is none, requests that are too long or nested too
//! deeply, arguments of the wrong shape. Whoever asks gets an answer; a client that waits for one would hang.

use std::io;

use rmcp::model::{ClientJsonRpcMessage, ClientRequest, JsonRpcMessage};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt, BufReader, DuplexStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The longest request that is taken: as over HTTP.
const MOST: usize = 16 << 20;
/// The longest whose id is still looked for.
const MOST_READ: usize = 4 * MOST;
/// Room between us and the SDK.
const ROOM: usize = 64 << 10;

const PARSE_ERROR: i64 = -32700;
const INVALID_REQUEST: i64 = -32600;
pub const INVALID_PARAMS: i64 = -32602;

/// A message as far as we must know it; what is inside stays as it is written.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default, deserialize_with = "given")]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    method: Option<&'a RawValue>,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "given")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "given")]
    error: Option<&'a RawValue>,
}

/// `null` is given, too.
fn given<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// What `tools/call` must have.
#[derive(Deserialize)]
struct Call<'a> {
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

fn error(id: Option<&RawValue>, code: i64, message: impl Into<String>) -> Value {
    let id: Value = id.and_then(|id| serde_json::from_str(id.get()).ok()).unwrap_or(Value::Null);
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": code, "message": message.into() } })
}

/// An error for whoever sent this, whatever it was.
pub fn told(bytes: &[u8], message: &str) -> Value {
    let envelope: Option<Envelope> = serde_json::from_slice(bytes).ok();
    error(envelope.and_then(|envelope| envelope.id), INVALID_REQUEST, message)
}

/// The answer to what the SDK would not answer, or not rightly.
pub fn refusal(bytes: &[u8]) -> Option<Value> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => return Some(error(None, PARSE_ERROR, format!("this is no UTF-8: {e}"))),
    };
    let envelope: Envelope = match serde_json::from_str(text) {
        Ok(envelope) => envelope,
        Err(e) if e.is_data() => {
            return Some(error(None, INVALID_REQUEST, format!("one request at a time, as a JSON object: {e}")));
        }
        Err(e) => return Some(error(None, PARSE_ERROR, format!("this is no JSON: {e}"))),
    };
    let Envelope { id, method, params, result, error: failure } = envelope;
    let is_id = |id: &RawValue| id.get().starts_with('"') || id.get().parse::<i64>().is_ok();
    match id {
        // Answers to questions of ours, and notifications, which nobody waits for.
        _ if result.is_some() || failure.is_some() => return None,
        None if method.is_some() => return None,
        Some(wrong) if !is_id(wrong) => {
            return Some(error(None, INVALID_REQUEST, "an id is a text or a whole number"));
        }
        _ => {}
    }
    if bytes.len() > MOST {
        let what = format!("the request has {} bytes; at most {MOST} are taken", bytes.len());
        return Some(error(id, INVALID_REQUEST, what));
    }
    let Some(method) = method.and_then(|method| serde_json::from_str::<String>(method.get()).ok()) else {
        return Some(error(id, INVALID_REQUEST, "a request has a method"));
    };
    if method == "tools/call"
        && let Err(what) = check_call(params)
    {
        return Some(error(id, INVALID_PARAMS, what));
    }
    match serde_json::from_str::<ClientJsonRpcMessage>(text) {
        Err(e) => Some(error(id, INVALID_REQUEST, format!("the request cannot be read: {e}"))),
        // A method the SDK knows, with parameters it does not.
        Ok(JsonRpcMessage::Request(request)) => match &request.request {
            ClientRequest::CustomRequest(_) if KNOWN.contains(&method.as_str()) => {
                Some(error(id, INVALID_PARAMS, format!("the parameters of {method} have another shape")))
            }
            _ => None,
        },
        Ok(_) => None,
    }
}

/// Methods whose parameters are known.
const KNOWN: [&str; 4] = ["initialize", "ping", "tools/list", "tools/call"];

fn check_call(params: Option<&RawValue>) -> Result<(), &'static str> {
    let wrong = "tools/call wants {\"name\", \"arguments\"?}";
    let call: Call = serde_json::from_str(params.ok_or(wrong)?.get()).map_err(|_| wrong)?;
    if !call.name.is_some_and(|name| name.get().starts_with('"')) {
        return Err("the name of a tool is a text");
    }
    match call.arguments {
        Some(arguments) if !arguments.get().starts_with('{') => Err("the arguments of a tool are an object"),
        _ => Ok(()),
    }
}

/// Standard input and output for the SDK, with what it would not answer answered; and what ends when all is written.
pub fn stdio() -> ((DuplexStream, DuplexStream), JoinHandle<()>) {
    between(BufReader::new(tokio::io::stdin()), tokio::io::stdout())
}

fn between(
    from: impl AsyncBufRead + Unpin + Send + 'static,
    to: impl AsyncWrite + Unpin + Send + 'static,
) -> ((DuplexStream, DuplexStream), JoinHandle<()>) {
    let (ours_in, theirs_in) = tokio::io::duplex(ROOM);
    let (theirs_out, ours_out) = tokio::io::duplex(ROOM);
    let (refuse, refused) = mpsc::channel(16);
    tokio::spawn(async move {
        if let Err(error) = read(from, ours_in, refuse).await {
            tracing::warn!(%error, "standard input broke off");
        }
    });
    let writing = tokio::spawn(async move {
        if let Err(error) = write(ours_out, refused, to).await {
            tracing::warn!(%error, "standard output broke off");
        }
    });
    ((theirs_in, theirs_out), writing)
}

/// Hands lines on, but those that are refused.
async fn read(
    mut from: impl AsyncBufRead + Unpin,
    mut to: DuplexStream,
    refuse: mpsc::Sender<Value>,
) -> io::Result<()> {
    let mut line = Vec::new();
    while let Some(whole) = next_line(&mut from, &mut line).await? {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let refusal = match whole {
            true => refusal(&line),
            false => {
                let what = format!("the request has more than {MOST_READ} bytes; at most {MOST} are taken");
                Some(error(id_before(&line), INVALID_REQUEST, what))
            }
        };
        match refusal {
            Some(refusal) => {
                let _ = refuse.send(refusal).await;
            }
            None => {
                line.push(b'\n');
                to.write_all(&line).await?;
            }
        }
    }
    to.shutdown().await
}

/// The next line without its end; `false` if only its beginning was kept. None at the end.
async fn next_line(from: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    line.clear();
    let mut whole = true;
    loop {
        let available = from.fill_buf().await?;
        if available.is_empty() {
            // A last line without its end is one all the same.
            return Ok((!line.is_empty()).then_some(whole));
        }
        let end = available.iter().position(|byte| *byte == b'\n');
        let part = &available[..end.unwrap_or(available.len())];
        let room = MOST_READ - line.len();
        whole &= part.len() <= room;
        line.extend_from_slice(&part[..part.len().min(room)]);
        let used = part.len() + usize::from(end.is_some());
        from.consume(used);
        if end.is_some() {
            return Ok(Some(whole));
        }
    }
}

/// The id of a message whose end is not known, if it stands at its beginning.
fn id_before(beginning: &[u8]) -> Option<&RawValue> {
    struct Seen<'a, 'de>(&'a mut Option<&'de RawValue>);
    impl<'de> serde::de::Visitor<'de> for Seen<'_, 'de> {
        type Value = ();

        fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
            while let Some(key) = map.next_key::<String>()? {
                if key == "id" {
                    *self.0 = Some(map.next_value()?);
                } else {
                    map.next_value::<serde::de::IgnoredAny>()?;
                }
            }
            Ok(())
        }
    }
    // Cut inside a character, its beginning is text all the same.
    let text = match std::str::from_utf8(beginning) {
        Ok(text) => text,
        Err(e) => std::str::from_utf8(&beginning[..e.valid_up_to()]).unwrap_or_default(),
    };
    let mut id = None;
    let _ = serde::Deserializer::deserialize_map(&mut serde_json::Deserializer::from_str(text), Seen(&mut id));
    id.filter(|id| id.get().starts_with('"') || id.get().parse::<i64>().is_ok())
}

/// Lines of the SDK and refusals, each whole.
async fn write(
    from: DuplexStream,
    mut refused: mpsc::Receiver<Value>,
    mut to: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    let (mut answering, mut refusing) = (true, true);
    while answering || refusing {
        tokio::select! {
            // What was read of a line so far stays in `line` when the other side is quicker.
            read = from.read_until(b'\n', &mut line), if answering => {
                answering = read? > 0;
                to.write_all(&line).await?;
                line.clear();
            }
            refusal = refused.recv(), if refusing => match refusal {
                None => refusing = false,
                Some(refusal) => to.write_all(format!("{refusal}\n").as_bytes()).await?,
            },
        }
        to.flush().await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    fn code(text: &str) -> Option<(Value, i64)> {
        refusal(text.as_bytes()).map(|answer| (answer["id"].clone(), answer["error"]["code"].as_i64().unwrap()))
    }

    #[test]
    fn what_nobody_would_answer_is_answered() {
        assert_eq!(code("{"), Some((Value::Null, PARSE_ERROR)));
        assert_eq!(code("hello"), Some((Value::Null, PARSE_ERROR)));
        assert_eq!(refusal(b"{\"id\":\"\xff\"}").unwrap()["error"]["code"], PARSE_ERROR);
        for odd in ["[]", "7", "null", "\"x\"", "{}", r#"{"id":null,"method":"ping"}"#, r#"{"id":{},"method":"ping"}"#]
        {
            assert_eq!(code(odd), Some((Value::Null, INVALID_REQUEST)), "{odd}");
        }
        assert_eq!(code(r#"{"jsonrpc":"2.0","id":7}"#), Some((json!(7), INVALID_REQUEST)));
        for params in ["", r#","params":[1]"#, r#","params":{"name":7}"#, r#","params":{"arguments":{}}"#] {
            let call = format!(r#"{{"jsonrpc":"2.0","id":"a","method":"tools/call"{params}}}"#);
            assert_eq!(code(&call), Some((json!("a"), INVALID_PARAMS)), "{call}");
        }
        for arguments in ["[1]", "7", "\"x\""] {
            let params = format!(r#"{{"name":"memory_query","arguments":{arguments}}}"#);
            let call = format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{params}}}"#);
            assert_eq!(code(&call), Some((json!(7), INVALID_PARAMS)), "{call}");
        }
        let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
        let params = format!(r#"{{"name":"memory_query","arguments":{{"query":{deep}}}}}"#);
        let call = format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{params}}}"#);
        assert_eq!(code(&call), Some((json!(7), INVALID_REQUEST)));
        let long = format!(r#"{{"jsonrpc":"2.0","method":"ping","params":{{"x":"{}"}},"id":7}}"#, "x".repeat(MOST));
        assert_eq!(code(&long), Some((json!(7), INVALID_REQUEST)));
        assert_eq!(id_before(&long.as_bytes()[..1000]).map(RawValue::get), None);
        assert_eq!(id_before(br#"{"id":7,"method":"p"#).map(RawValue::get), Some("7"));
    }

    #[test]
    fn what_the_sdk_answers_is_left_to_it() {
        for fine in [
            r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"no/such"}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"memory_query","arguments":{"query":"x"}}}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"reliability_report"}}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
            r#"{"jsonrpc":"2.0","method":"notifications/of_tomorrow","params":[1]}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
            r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"c","version":"1"}}}"#,
        ] {
            assert_eq!(refusal(fine.as_bytes()), None, "{fine}");
        }
    }

    #[tokio::test]
    async fn every_line_gets_through_or_is_answered() {
        let long = format!("{{\"id\":9,\"x\":\"{}\"}}\n", "x".repeat(MOST_READ));
        let ping = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}";
        let input = format!("{{\n\n{long}{ping}\n{ping}");
        let (written, mut output) = tokio::io::duplex(1 << 20);
        let ((mut theirs_in, mut theirs_out), writing) =
            between(BufReader::new(std::io::Cursor::new(input.into_bytes())), written);
        let mut passed = String::new();
        theirs_in.read_to_string(&mut passed).await.unwrap();
        assert_eq!(passed, format!("{ping}\n{ping}\n"), "a last line without its end, too");
        theirs_out.write_all(b"answer 1\nanswer 2\n").await.unwrap();
        drop(theirs_out);
        writing.await.unwrap();
        let mut said = String::new();
        output.read_to_string(&mut said).await.unwrap();
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 4, "{said}");
        assert!(lines.iter().any(|line| line.contains("-32700")) && lines.contains(&"answer 2"), "{said}");
        assert!(lines.iter().any(|line| line.contains("\"id\":9") && line.contains("-32600")), "{said}");
    }
}
