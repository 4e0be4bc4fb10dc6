//! Finds the servers' programs, and installs the distribution's packages when they are missing.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use super::account::is_root;
use super::succeeds;

/// `policy-rc.d` keeps the packages from starting services of their own, which nobody here needs.
const INSTALL: &str = r#"
    set -e
    export DEBIAN_FRONTEND=noninteractive
    policy=/usr/sbin/policy-rc.d
    if [ ! -e $policy ]; then
        trap 'rm -f $policy' EXIT
        trap 'exit 1' HUP INT TERM
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod 755 $policy
    fi
    apt-get update -q || true
    apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
"#;

/// Installs packages with apt-get, as root or by a sudo that asks nothing.
pub fn install(packages: &[&str]) -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock();

    let list = packages.join(" ");
    let advice = |problem: &str| {
        io::Error::other(format!(
            "{problem}. Install what is missing with\n\n    apt-get install {list}\n\n\
             (as root; other systems have packages of similar names), or set POSTRIDER_TEST_POSTGRES and \
             POSTRIDER_TEST_MYSQL to the URLs of servers of yours"
        ))
    };
    if program("apt-get", &[]).is_none() {
        return Err(advice("there is no apt-get here to install database servers"));
    }
    let sudo: &[&str] = match is_root() {
        true => &[],
        false if succeeds(Command::new("sudo").args(["-n", "true"])) => &["sudo", "-n"],
        false => return Err(advice("installing database servers needs root, and sudo wants a password or is missing")),
    };
    eprintln!("installing {list}");
    let words: Vec<&str> = sudo.iter().copied().chain(["sh", "-c", INSTALL, "install"]).collect();
    let mut command = Command::new(words[0]);
    // The standard output belongs to whatever runs on the servers.
    command.args(&words[1..]).args(packages).stdin(Stdio::null()).stdout(io::stderr());
    match command.status()?.success() {
        true => Ok(()),
        false => Err(advice(&format!("apt-get could not install {list}"))),
    }
}

/// Looks for a program in the folders given, then where programs usually are. An ordinary user's `PATH` has no `sbin`
/// on Debian, yet servers live there.
pub fn program(name: &str, first: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    first.iter().cloned().chain(usual).map(|folder| folder.join(name)).find(|file| Path::is_file(file))
}
