//! Wrong clocks for real processes: libfaketime shifts the wall clock, a time namespace the one that counts since boot.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use crate::servers::install;

/// What shows a process another wall clock than the machine's, when it is preloaded.
fn library() -> io::Result<PathBuf> {
    let found = || {
        let folders = std::fs::read_dir("/usr/lib").ok()?.flatten();
        folders.map(|folder| folder.path().join("faketime/libfaketime.so.1")).find(|file| file.exists())
    };
    if found().is_none() {
        install(&["libfaketime"])?;
    }
    found().ok_or_else(|| io::Error::other("libfaketime is installed and nowhere below /usr/lib"))
}

/// The environment of a process whose wall clock goes wrong by so many seconds. What measures how long something lasted goes
/// on as it is.
pub fn wall_clock_off_by(seconds: i64) -> io::Result<Vec<(&'static str, OsString)>> {
    Ok(with([("FAKETIME", format!("{seconds:+}").into())], library()?))
}

/// The same for one that reads its error from a file, again and again: see [`set`].
pub fn wall_clock_set_by(file: &Path) -> io::Result<Vec<(&'static str, OsString)>> {
    set(file, 0)?;
    Ok(with([("FAKETIME_TIMESTAMP_FILE", file.into())], library()?))
}

/// From now on the clocks that read this file are off by so many seconds.
pub fn set(file: &Path, seconds: i64) -> io::Result<()> {
    // Never half a line for whoever reads it.
    let aside = file.with_extension("new");
    std::fs::write(&aside, format!("{seconds:+}\n"))?;
    std::fs::rename(aside, file)
}

/// The wall clock of a process with this environment, in seconds since 1970: to see that it is wrong.
pub fn wall_clock_of(environment: &[(&'static str, OsString)]) -> io::Result<i64> {
    let mut date = std::process::Command::new("date");
    date.arg("+%s").envs(environment.iter().map(|(name, value)| (name, value)));
    number(&date.output()?.stdout)
}

/// How long ago a process below these words believes that its machine was booted, in seconds.
pub fn time_since_boot_of(words: &[String]) -> io::Result<i64> {
    let told = std::process::Command::new(&words[0]).args(&words[1..]).args(["cat", "/proc/uptime"]).output()?;
    number(told.stdout.split(|byte| *byte == b'.').next().unwrap_or_default())
}

fn number(text: &[u8]) -> io::Result<i64> {
    let text = String::from_utf8_lossy(text);
    text.trim().parse().map_err(|_| io::Error::other(format!("not a number of seconds: {text:?}")))
}

fn with<const N: usize>(named: [(&'static str, OsString); N], library: PathBuf) -> Vec<(&'static str, OsString)> {
    let always = [
        ("LD_PRELOAD", library.into()),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ("FAKETIME_NO_CACHE", "1".into()),
    ];
    named.into_iter().chain(always).collect()
}

/// The words before a command that then counts from a boot so many seconds earlier or later than the machine's.
pub fn booted(seconds: i64) -> Vec<String> {
    ["unshare", "--time", "--boottime", &seconds.to_string()].map(str::to_owned).to_vec()
}
