//! `postrider top` in a real terminal, as `script` of the distribution makes one.

use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::home::{Home, wait_until};

const ENTER_SCREEN: &str = "\x1b[?1049h";
const LEAVE_SCREEN: &str = "\x1b[?1049l";

/// The process whose parent this is.
fn child_of(parent: u32) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    children.split_whitespace().next()?.parse().ok()
}

#[test]
fn told_to_end_it_leaves_the_terminal_as_it_was() {
    if std::fs::OpenOptions::new().read(true).write(true).open("/dev/ptmx").is_err() {
        println!("skipped: this machine has no pseudo-terminals (/dev/ptmx cannot be opened)");
        return;
    }
    for signal in [Signal::TERM, Signal::HUP] {
        let home = Home::sqlite();
        home.run(&["migrate"]).done();
        let seen = home.path("seen");
        let mut terminal = Command::new("script")
            .args(["--quiet", "--flush", "--return", "--command"])
            .arg(format!("stty rows 24 cols 80; exec {} top", env!("CARGO_BIN_EXE_postrider")))
            .arg(&seen)
            .current_dir(home.path("."))
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let shown = || String::from_utf8_lossy(&std::fs::read(&seen).unwrap_or_default()).into_owned();
        wait_until("the screen is drawn", || shown().contains(ENTER_SCREEN) && shown().contains("leave"));
        let top = child_of(terminal.id()).expect("it runs in the terminal");
        kill_process(Pid::from_raw(top as i32).unwrap(), signal).unwrap();
        assert!(terminal.wait().unwrap().success(), "{}", shown());
        assert!(shown().contains(LEAVE_SCREEN), "{signal:?}: {}", shown());
    }
}
