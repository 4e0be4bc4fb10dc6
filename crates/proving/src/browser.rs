//! A real Chromium, driven over its DevTools protocol: what a person at the dashboard does and sees. Installed from the
//! distribution when it is missing.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use base64::prelude::{BASE64_STANDARD, Engine};
use postrider::clock::Tick;
use serde_json::{Value, json};
use tempfile::TempDir;
use tungstenite::{Message, WebSocket};

use crate::servers::{install, program};

const PATIENCE: Duration = Duration::from_secs(30);

/// Where the browser is; installs it first if need be.
pub fn chromium() -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let find = || ["chromium", "chromium-browser", "google-chrome"].iter().find_map(|name| program(name, &[]));
    find().unwrap_or_else(|| {
        install(&["chromium", "fonts-dejavu-core"]).expect("the browser tests need Chromium");
        find().expect("chromium is installed")
    })
}

/// The script of axe-core, which finds what people with a screen reader or a keyboard stumble over; from npm, once.
pub fn axe() -> String {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();
    let tools = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/axe");
    let script = tools.join("node_modules/axe-core/axe.min.js");
    if !script.is_file() {
        if program("npm", &[]).is_none() {
            install(&["nodejs", "npm"]).expect("axe-core comes from npm");
        }
        std::fs::create_dir_all(&tools).unwrap();
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"]).arg(&tools).arg("axe-core@4.14.0");
        assert!(npm.status().unwrap().success(), "npm cannot install axe-core");
    }
    std::fs::read_to_string(script).unwrap()
}

/// One browser with one page.
pub struct Browser {
    process: Child,
    socket: WebSocket<TcpStream>,
    session: String,
    calls: u64,
    /// What the page said since it was last asked.
    events: VecDeque<Value>,
    requests: Vec<String>,
    /// Where the mouse is.
    mouse: (f64, f64),
    _profile: TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Browser {
    pub fn start() -> Browser {
        let profile = TempDir::new().unwrap();
        let mut process = Command::new(chromium())
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"])
            .args(["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"])
            .args(["--remote-debugging-port=0", "--hide-scrollbars", "--window-size=1280,900"])
            // For servers whose certificates the test signed itself.
            .arg("--ignore-certificate-errors")
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap());
        let mut told = String::new();
        let address = loop {
            let mut line = String::new();
            assert!(log.read_line(&mut line).unwrap() > 0, "Chromium did not start: {told}");
            told.push_str(&line);
            if let Some(address) = line.trim().strip_prefix("DevTools listening on ") {
                break address.to_owned();
            }
        };
        // It goes on talking, and must not block over it.
        std::thread::spawn(move || std::io::copy(&mut log.take(u64::MAX), &mut std::io::sink()));
        let host = address.strip_prefix("ws://").and_then(|rest| rest.split('/').next()).unwrap();
        let stream = TcpStream::connect(host).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (socket, _) = tungstenite::client(address.as_str(), stream).unwrap();
        let mut browser = Browser {
            process,
            socket,
            session: String::new(),
            calls: 0,
            events: VecDeque::new(),
            requests: vec![],
            mouse: (0.0, 0.0),
            _profile: profile,
        };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log", "Network", "Performance"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// One command of the protocol; what the page says meanwhile is kept.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let id = self.calls;
        let mut message = json!({"id": id, "method": method, "params": params});
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.socket.send(Message::text(message.to_string())).unwrap();
        loop {
            let answer = match self.socket.read().unwrap() {
                Message::Text(text) => serde_json::from_str::<Value>(&text).unwrap(),
                _ => continue,
            };
            if answer["id"] == id {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
            if answer["method"] == "Network.requestWillBeSent" {
                self.requests.push(answer["params"]["request"]["url"].as_str().unwrap_or_default().to_owned());
            }
            self.events.push_back(answer);
        }
    }

    pub fn goto(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
        self.wait("document.readyState === 'complete'");
    }

    /// The value of an expression, which may be a promise.
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", params);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].clone()
    }

    /// Waits until an expression is true, and says what the page showed if it never is.
    pub fn wait(&mut self, condition: &str) {
        let begun = Tick::now();
        while self.eval(&format!("Boolean({condition})")) != json!(true) {
            if Tick::now().since(begun) > PATIENCE {
                let (shown, said) = (self.eval("document.body.innerText"), self.complaints());
                let at = self.eval("location.hash");
                panic!("waited in vain for {condition}; the page {at} shows\n{shown}\nand said {said:?}");
            }
            std::thread::sleep(Duration::from_millis(25));
        }
    }

    /// Waits for this text to be seen.
    pub fn sees(&mut self, text: &str) {
        self.wait(&format!("document.body.innerText.includes({})", json!(text)));
    }

    /// With a real mouse, at the middle of what the selector finds.
    pub fn click(&mut self, selector: &str) {
        self.press_on(selector);
        self.release();
    }

    /// The first half of a click.
    pub fn press_on(&mut self, selector: &str) {
        let find = format!("document.querySelector({})", json!(selector));
        self.wait(&format!("{find} && !{find}.disabled"));
        let place = self.eval(&format!(
            "(() => {{ const e = {find}; e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); \
             return {{x: r.x + r.width / 2, y: r.y + r.height / 2}}; }})()"
        ));
        self.mouse = (place["x"].as_f64().unwrap(), place["y"].as_f64().unwrap());
        self.button("mousePressed");
    }

    /// The second, at the same place.
    pub fn release(&mut self) {
        self.button("mouseReleased");
    }

    fn button(&mut self, kind: &str) {
        let (x, y) = self.mouse;
        self.call("Input.dispatchMouseEvent", json!({"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}));
    }

    /// Writes where the focus is.
    pub fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({ "text": text }));
    }

    pub fn press(&mut self, key: &str) {
        let code = match key {
            "Enter" => 13,
            "Tab" => 9,
            "Escape" => 27,
            _ => 0,
        };
        let text = if key == "Enter" { "\r" } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let params = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.call("Input.dispatchKeyEvent", params);
        }
    }

    /// Another screen: its size, and whether it is dark.
    pub fn screen(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let feature = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", feature);
    }

    /// The screen as it is, as PNG.
    pub fn picture(&mut self) -> Vec<u8> {
        let answer = self.call("Page.captureScreenshot", json!({"format": "png"}));
        BASE64_STANDARD.decode(answer["data"].as_str().unwrap()).unwrap()
    }

    /// What went wrong in the page since it was last asked: exceptions, errors on its console, requests that failed.
    pub fn complaints(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        for event in self.events.drain(..) {
            let params = &event["params"];
            match event["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown" => said.push(params["exceptionDetails"].to_string()),
                "Runtime.consoleAPICalled" if params["type"] == "error" => said.push(params["args"].to_string()),
                "Log.entryAdded" if params["entry"]["level"] == "error" => said.push(params["entry"].to_string()),
                _ => {}
            }
        }
        said
    }

    /// What axe finds on the page as it is now, of the worse kinds: the rule, and where.
    pub fn faults(&mut self, axe: &str) -> Vec<String> {
        // From outside the page's own policy, as the protocol's evaluation is.
        self.eval(&format!("{axe}; true"));
        let found = self.eval("axe.run(document).then(found => found.violations)");
        let worse = |fault: &&Value| ["serious", "critical"].iter().any(|impact| fault["impact"] == *impact);
        let told = |fault: &Value| {
            let places: Vec<String> =
                fault["nodes"].as_array().into_iter().flatten().map(|n| n["html"].to_string()).collect();
            format!("{}: {}", fault["id"], places.join(" | "))
        };
        found.as_array().into_iter().flatten().filter(worse).map(told).collect()
    }

    /// Every address the page asked for.
    pub fn requests(&self) -> &[String] {
        &self.requests
    }
}
