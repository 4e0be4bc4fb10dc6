//! MCP answers whatever comes: over standard input and output, and over HTTP.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::api::Server;
use crate::home::Home;

fn call(id: Value, arguments: &str) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"outbox_status","arguments":{arguments}}}}}"#
    )
}

#[test]
fn standard_input_is_always_answered() {
    let home = Home::sqlite();
    let mut child = home.command(&["mcp"]).stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut ask = |line: &[u8]| {
        input.write_all(line).unwrap();
        input.write_all(b"\n").unwrap();
        input.flush().unwrap();
        let mut answer = String::new();
        output.read_line(&mut answer).unwrap();
        serde_json::from_str::<Value>(&answer).unwrap_or_else(|e| panic!("{e}: {answer:?}"))
    };
    let code = |answer: &Value| (answer["id"].clone(), answer["error"]["code"].as_i64());
    // Before anybody has said who he is, too.
    assert_eq!(code(&ask(b"{\"jsonrpc\":")), (Value::Null, Some(-32700)));
    let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}});
    assert_eq!(ask(hello.to_string().as_bytes())["result"]["serverInfo"]["name"], "postrider");
    assert_eq!(code(&ask(b"{\"jsonrpc\":\"2.0\",\"id\":2,")), (Value::Null, Some(-32700)), "no JSON");
    assert_eq!(
        code(&ask(b"{\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"\xff\xfe\"}")),
        (Value::Null, Some(-32700)),
        "no UTF-8"
    );
    let long = call(json!(4), &format!("{{\"lane\":\"{}\"}}", "x".repeat(17 << 20)));
    assert_eq!(code(&ask(long.as_bytes())), (json!(4), Some(-32600)), "17 MB");
    let deep = call(json!(5), &format!("{{\"lane\":{}1{}}}", "[".repeat(125), "]".repeat(125)));
    assert_eq!(code(&ask(deep.as_bytes())).0, json!(5), "nested 125 deep");
    assert_eq!(code(&ask(call(json!("six"), "[1]").as_bytes())), (json!("six"), Some(-32602)));
    assert_eq!(code(&ask(b"[]")), (Value::Null, Some(-32600)));
    assert_eq!(ask(call(json!(7), "{}").as_bytes())["id"], 7, "and what is right is answered as ever");
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[test]
fn over_http_errors_are_json() {
    let home = Home::sqlite();
    let server = Server::start(&home, &["--no-workers"]);
    let json_type = ("content-type", "application/json");
    let accept = ("accept", "application/json, text/event-stream");
    let post = |body: &str| server.post("/mcp", &[json_type, accept], body);
    for (body, status, code) in [
        ("{", 400, -32700),
        ("hello", 400, -32700),
        ("[]", 400, -32600),
        (call(json!(1), "[1]").as_str(), 200, -32602),
        (r#"{"jsonrpc":"2.0","id":1}"#, 400, -32600),
    ] {
        let answer = post(body).answered(status);
        assert_eq!(answer.json()["error"]["code"], code, "{body}: {answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/json"), "{body}");
    }
    let raw = server.request("POST", "/mcp", &[json_type, accept], b"{\"id\":1,\"method\":\"\xff\"}");
    assert_eq!(raw.answered(400).json()["error"]["code"], -32700);
    server.post("/mcp", &[("content-type", "text/plain"), accept], "{}").refused(415, "UNSUPPORTED_MEDIA_TYPE");
    // What the SDK says of headers, too.
    let of_the_future = ("mcp-protocol-version", "2999-01-01");
    for (headers, status, id) in [
        (vec![json_type], 406, json!("seven")),
        (vec![json_type, ("accept", "application/json")], 406, json!("seven")),
        (vec![json_type, accept, of_the_future], 400, json!("seven")),
    ] {
        let answer = server.post("/mcp", &headers, &call(json!("seven"), "{}")).answered(status);
        assert_eq!(
            (&answer.json()["id"], answer.header("content-type")),
            (&id, Some("application/json")),
            "{answer:?}"
        );
        assert!(answer.json()["error"]["message"].as_str().is_some_and(|said| !said.is_empty()), "{answer:?}");
    }
    for wrong in ["application/jsonx", "application/json-rpc"] {
        server.post("/mcp", &[("content-type", wrong), accept], "{}").refused(415, "UNSUPPORTED_MEDIA_TYPE");
    }
    // As anybody may write them.
    let loud = [
        ("content-type", "Application/JSON; charset=utf-8"),
        ("accept", "Application/JSON"),
        ("accept", "Text/Event-Stream"),
    ];
    assert_eq!(server.post("/mcp", &loud, &call(json!(2), "{}")).answered(200).json()["id"], 2);
    let fine = post(&call(json!(1), "{}")).answered(200).json();
    assert_eq!(fine["id"], 1, "{fine}");
}
