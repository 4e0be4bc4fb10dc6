//! Secrets are references, not values: `env:NAME`, `file:PATH` or `exec:COMMAND` (a secrets manager's own client).

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use postrider::clock::Tick;
use rustix::process::{Pid, Signal};

/// A command of `exec:` is ended after this.
const LONGEST: Duration = Duration::from_secs(10);
/// A secret that is read again must be there within this time; until then the one we have is used.
const PATIENCE: Duration = Duration::from_secs(5);
/// A destination that refuses us makes us read its secrets again, but not more often than this.
const AGAIN: Duration = Duration::from_secs(2);

/// How often it was said that secrets may have changed.
static TOLD: AtomicU64 = AtomicU64::new(0);

/// What a parser says of a text where something else belongs, without the text: it may be a secret.
pub fn without_value(message: &str) -> String {
    match (message.find("string \""), message.rfind("\", expected")) {
        (Some(from), Some(to)) if from < to => format!("{}string{}", &message[..from], &message[to + 1..]),
        _ => message.to_owned(),
    }
}

/// Secrets may have changed: whoever uses one reads it again before its next use.
pub fn read_again() {
    TOLD.fetch_add(1, Ordering::SeqCst);
    tracing::info!("secrets are read again");
}

/// Grows whenever secrets may have changed.
pub fn told() -> u64 {
    TOLD.load(Ordering::SeqCst)
}

/// For a part that keeps its own secret: has it read again whenever secrets may have changed.
pub async fn follow<R: Future<Output = ()>>(renew: impl Fn() -> R) {
    let mut known = told();
    loop {
        tokio::time::sleep(Duration::from_millis(500)).await;
        if known != told() {
            known = told();
            renew().await;
        }
    }
}

/// Does this text refer to a secret kept elsewhere?
pub fn is_reference(text: &str) -> bool {
    ["env:", "file:", "exec:"].iter().any(|scheme| text.starts_with(scheme))
}

/// The value a reference stands for; any other text stands for itself. The error says what to do, never the value.
pub fn resolve(text: &str) -> Result<String, String> {
    if let Some(name) = text.strip_prefix("env:") {
        std::env::var(name).map_err(|_| format!("the environment has no variable {name}; set it"))
    } else if let Some(path) = text.strip_prefix("file:") {
        let value = std::fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))?;
        Ok(value.trim_end().to_owned())
    } else if let Some(command) = text.strip_prefix("exec:") {
        run(command)
    } else {
        Ok(text.to_owned())
    }
}

type Build<T> = Box<dyn Fn(&[String]) -> Result<T, String> + Send + Sync>;

/// Something made of texts that may be references, and made again when what they stand for has changed.
pub struct Fresh<T> {
    texts: Vec<String>,
    build: Build<T>,
    made: RwLock<Arc<T>>,
    /// As of when it was read: what was told, the values, and the time of the last reading after a refusal.
    read: tokio::sync::Mutex<(u64, Vec<String>, Option<Tick>)>,
}

impl<T: Send + Sync + 'static> Fresh<T> {
    pub fn new(
        texts: Vec<String>,
        build: impl Fn(&[String]) -> Result<T, String> + Send + Sync + 'static,
    ) -> Result<Self, String> {
        let values = all(&texts)?;
        let made = RwLock::new(Arc::new(build(&values)?));
        Ok(Fresh { texts, build: Box::new(build), made, read: tokio::sync::Mutex::new((told(), values, None)) })
    }

    fn made(&self) -> Arc<T> {
        self.made.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As it is now: read again if somebody said that secrets may have changed.
    pub async fn get(&self) -> Arc<T> {
        let mut read = self.read.lock().await;
        let told = told();
        if read.0 != told {
            read.0 = told;
            self.renew(&mut read.1).await;
        }
        self.made()
    }

    /// The destination refused the one that was used: reads again. `Some` if there is another one now.
    pub async fn refused(&self, used: &Arc<T>) -> Option<Arc<T>> {
        let mut read = self.read.lock().await;
        let due = read.2.is_none_or(|at| Tick::now().since(at) >= AGAIN);
        if Arc::ptr_eq(&self.made(), used) && due {
            read.2 = Some(Tick::now());
            self.renew(&mut read.1).await;
        }
        Some(self.made()).filter(|made| !Arc::ptr_eq(made, used))
    }

    /// Whatever goes wrong, the one we have stays.
    async fn renew(&self, values: &mut Vec<String>) {
        let texts = self.texts.clone();
        let reading = tokio::task::spawn_blocking(move || all(&texts));
        let renewed = match tokio::time::timeout(PATIENCE, reading).await {
            Ok(Ok(Ok(new))) if new == *values => return,
            Ok(Ok(Ok(new))) => (self.build)(&new).map(|made| (made, new)),
            Ok(Ok(Err(error))) => Err(error),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("it was not there in time".to_owned()),
        };
        match renewed {
            Ok((made, new)) => {
                *self.made.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(made);
                *values = new;
                tracing::info!("a secret has changed; the new one is used");
            }
            Err(error) => tracing::warn!(error, "a secret could not be read again; the one we have is used"),
        }
    }
}

fn all(texts: &[String]) -> Result<Vec<String>, String> {
    texts.iter().map(|text| resolve(text)).collect()
}

fn run(command: &str) -> Result<String, String> {
    run_for(command, LONGEST)
}

fn run_for(command: &str, longest: Duration) -> Result<String, String> {
    // Neither the command nor what it says is repeated: a secret may stand in both.
    let cannot = |e: std::io::Error| format!("the command of exec: cannot be run: {e}");
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // In a group of its own, so that it ends with whatever it has started.
    let mut child = shell.process_group(0).spawn().map_err(cannot)?;
    let group = Pid::from_child(&child);
    let printed = child.stdout.take().map(|mut pipe| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            pipe.read_to_end(&mut text).map(|_| text)
        })
    });
    let begun = Tick::now();
    let status = loop {
        // What it leaves running may go on printing.
        let silent = printed.as_ref().is_none_or(|printed| printed.is_finished());
        match child.try_wait().map_err(cannot)? {
            Some(status) if silent => break status,
            _ if Tick::now().since(begun) >= longest => {
                let _ = rustix::process::kill_process_group(group, Signal::KILL);
                let _ = child.wait();
                return Err(format!("the command of exec: did not end within {longest:?}; run it by hand to see why"));
            }
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    if !status.success() {
        return Err(format!("the command of exec: failed with {status}; run it by hand to see why"));
    }
    let text = printed.and_then(|printed| printed.join().ok()).transpose().map_err(cannot)?.unwrap_or_default();
    let value = String::from_utf8(text).map_err(|_| "the command of exec: printed something that is no text")?;
    Ok(value.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_has_changed_is_made_again_when_told_or_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |text: &str| std::fs::write(file.path(), text).unwrap();
        write("old\n");
        let texts = vec![format!("file:{}", file.path().display()), "plain".to_owned()];
        let fresh = Fresh::new(texts, |values| Ok(values.join(" "))).unwrap();
        let used = fresh.get().await;
        assert_eq!(*used, "old plain");
        assert_eq!(fresh.refused(&used).await, None, "nothing has changed");
        write("new");
        assert_eq!(*fresh.get().await, "old plain", "nobody said so");
        read_again();
        assert_eq!(*fresh.get().await, "new plain");
        assert_eq!(fresh.refused(&used).await.as_deref().map(String::as_str), Some("new plain"), "another has read it");
        std::fs::remove_file(file.path()).unwrap();
        read_again();
        assert_eq!(*fresh.get().await, "new plain", "the one we have is better than none");
    }

    /// With all that it has started: what a shell leaves behind would hold the pipe for ever.
    #[test]
    fn a_command_that_hangs_is_ended() {
        for then in ["wait", "echo x"] {
            let command = |left: &str| format!("sleep 600 & echo $! > {left}; {then}");
            is_ended(command);
        }
    }

    fn is_ended(command: impl Fn(&str) -> String) {
        let left = tempfile::NamedTempFile::new().unwrap();
        let command = command(&left.path().display().to_string());
        let refused = run_for(&command, Duration::from_millis(500)).unwrap_err();
        assert!(refused.contains("did not end within 500ms"), "{refused}");
        let pid = std::fs::read_to_string(left.path()).unwrap();
        let status = || std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        let gone = || status().map_or(true, |stat| stat.contains(") Z "));
        for _ in 0..200 {
            if gone() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("what it started goes on: {:?}", status());
    }

    #[test]
    fn references_are_resolved_and_plain_text_is_itself() {
        assert_eq!(resolve("exec:echo hush"), Ok("hush".into()));
        assert_eq!(resolve("plain"), Ok("plain".into()));
        assert!(resolve("env:POSTRIDER_NO_SUCH_VARIABLE").unwrap_err().contains("POSTRIDER_NO_SUCH_VARIABLE"));
        assert!(resolve("file:/no/such/file").unwrap_err().contains("/no/such/file"));
        let failed = resolve("exec:echo canary >&2; exit 3 # canary").unwrap_err();
        assert!(failed.contains("exit status: 3") && !failed.contains("canary"), "{failed}");
    }
}
