//! Who runs a server (both refuse to be root) and how it ends with us: everything `setpriv` does.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, mpsc};

use super::install::program;

/// The user a server runs as: ourselves, or an ordinary one when we are root; and what its programs find in their environment.
pub(super) struct Account {
    ids: Option<(u32, u32)>,
    pub(super) environment: Vec<(String, OsString)>,
}

impl Account {
    /// Prefers the user of the server's package.
    pub(super) fn choose(preferred: &str) -> io::Result<Self> {
        if !is_root() {
            return Ok(Self { ids: None, environment: vec![] });
        }
        let found = [preferred, "nobody"].into_iter().find_map(|name| Some((id("-u", name)?, id("-g", name)?)));
        match found {
            ids @ Some(_) => Ok(Self { ids, environment: vec![] }),
            None => Err(io::Error::other(format!("neither {preferred} nor nobody is a user here to run the server"))),
        }
    }

    /// Makes `folder` the account's own.
    pub(super) fn give(&self, folder: &Path) -> io::Result<()> {
        let Some((user, group)) = self.ids else { return Ok(()) };
        chown(folder, Some(user), Some(group))
    }

    /// A command of this account that gets `death_signal` when we are gone, in `folder` and without our environment:
    /// `PGPORT` and the like mean other servers, and our working directory may be closed to it.
    pub(super) fn command(&self, program_path: &Path, death_signal: &str, folder: &Path) -> Command {
        let mut words: Vec<OsString> = Vec::new();
        // Only Linux has it; elsewhere a killed test leaves its servers behind.
        if let Some(setpriv) = program("setpriv", &[]) {
            words.extend([setpriv.into(), "--pdeathsig".into(), death_signal.into()]);
            if let Some((user, group)) = self.ids {
                words.extend([format!("--reuid={user}").into(), format!("--regid={group}").into()]);
                words.push("--clear-groups".into());
            }
        }
        // For the program alone: what is preloaded into it would prepare things as root if `setpriv` had it, too.
        if !self.environment.is_empty() {
            words.push("env".into());
            words.extend(self.environment.iter().map(|(name, value)| {
                let mut word = OsString::from(format!("{name}="));
                word.push(value);
                word
            }));
        }
        words.push(program_path.into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(folder).stdin(Stdio::null());
        command
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin");
        // Ctrl-C is for us: we stop the servers when the tests have ended, not before.
        command.process_group(0);
        command
    }
}

pub(super) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn id(option: &str, name: &str) -> Option<u32> {
    let output = Command::new("id").args([option, name]).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Spawns from a thread that never ends: the death signal comes when the *thread* that spawned is gone, and a test's
/// thread ends before the server it started for all.
pub(super) fn spawn_for_good(command: Command) -> io::Result<Child> {
    static SPAWNER: LazyLock<Mutex<mpsc::Sender<Order>>> = LazyLock::new(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, reply) in inbox {
                let _ = reply.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let (reply, answer) = mpsc::channel();
    let orders = SPAWNER.lock().expect("nothing panics while it is held").clone();
    orders.send((command, reply)).expect("the spawner runs for good");
    answer.recv().expect("the spawner answers every order")
}
