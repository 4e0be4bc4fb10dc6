//! A temporary folder that goes away with its owner, even when that one is killed.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::account::is_root;

/// Waits for the end of its input, which is the end of the folder's owner, then removes the folder. Several times,
/// since a server may still write files while it goes down.
const JANITOR: &str = r#"
    read -r _
    for _ in 1 2 3 4 5 6 7 8 9 10; do rm -rf -- "$1" 2>/dev/null && exit; sleep 1; done
"#;

/// Paths of Unix sockets end at 107 bytes, and the engines' names for them come after this.
const LONGEST: usize = 60;

pub struct Folder {
    janitor: Child,
    dir: TempDir,
}

impl Folder {
    pub fn new() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("postrider-").tempdir_in(parent()?)?;
        if is_root() {
            fs::set_permissions(&dir, Permissions::from_mode(0o711))?;
        }
        let mut command = Command::new("sh");
        command.args(["-c", JANITOR, "janitor"]).arg(dir.path()).current_dir("/").process_group(0);
        let janitor = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        Ok(Self { janitor, dir })
    }

    pub(super) fn subfolder(&self, name: &str) -> io::Result<PathBuf> {
        let path = self.dir.path().join(name);
        fs::create_dir(&path)?;
        Ok(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
    }
}

/// Where temporary folders may be: on a disk, since `/tmp` is memory on many machines and benchmarks would measure that,
/// and in the reach of the user who runs the servers.
fn parent() -> io::Result<PathBuf> {
    let wish = std::env::var_os("TMPDIR").map(PathBuf::from).into_iter();
    let mut places = wish.chain(["/var/tmp".into(), "/tmp".into()]).filter_map(|place| place.canonicalize().ok());
    let fits = |place: &PathBuf| place.as_os_str().len() <= LONGEST && (!is_root() || open_to_all(place));
    places.find(fits).ok_or_else(|| io::Error::other("no folder for temporary files: set TMPDIR to a short path"))
}

fn open_to_all(place: &Path) -> bool {
    place.ancestors().all(|folder| folder.metadata().is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0))
}
