//! The key for secrets at rest in a file: made whole or not at all, and never over one that is there.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use postrider::{Error, Result};
use postrider_webhooks::keyring::Source;

pub struct KeyFile(PathBuf);

impl KeyFile {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        KeyFile(path.into())
    }

    fn folder(&self) -> &Path {
        self.0.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// What is in the file; nothing if it is not there, or empty.
    fn text(&self) -> io::Result<Option<String>> {
        match std::fs::read_to_string(&self.0) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            text => Ok(Some(text?).filter(|text| !text.trim().is_empty())),
        }
    }

    /// Under a name of its own first, and on the disk, so that nobody ever sees half of it.
    fn write_aside(&self, text: &str) -> io::Result<PathBuf> {
        let name = self.0.file_name().map_or_else(|| "key".into(), |name| name.to_string_lossy().into_owned());
        let aside = self.folder().join(format!(".{name}.{:016x}", postrider::clock::seed()));
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.inspect_err(|_| drop(std::fs::remove_file(&aside)))?;
        Ok(aside)
    }

    /// Puts it in its place, unless there is something; an empty file counts as nothing.
    fn place_it(&self, aside: &Path) -> io::Result<()> {
        match std::fs::hard_link(aside, &self.0) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            // A file system without links: the database lets only one process come here.
            Err(_) if !self.0.exists() => return std::fs::rename(aside, &self.0),
            Err(e) => return Err(e),
        }
        // Left behind by a crash of an older version. Whoever else sees it waits, and then sees what is there.
        let old = File::open(&self.0)?;
        old.lock()?;
        if self.text()?.is_none() {
            tracing::warn!(file = %self.0.display(), "the file of the key for secrets was empty, as a crash leaves it; a key was made in its place");
            std::fs::rename(aside, &self.0)?;
        }
        Ok(())
    }

    fn make(&self, fresh: &str) -> io::Result<()> {
        let aside = self.write_aside(fresh)?;
        let placed = self.place_it(&aside);
        let _ = std::fs::remove_file(&aside);
        placed?;
        // The name is on the disk too, before anything is sealed with it.
        File::open(self.folder())?.sync_all()
    }
}

impl Source for KeyFile {
    fn read(&self) -> Result<Option<String>> {
        self.text().map_err(|e| Error::invalid(format!("[secrets] key: cannot read {}: {e}", self.0.display())))
    }

    fn keep(&self, fresh: &str) -> Result<String> {
        let wrong = |e: io::Error| {
            let file = self.0.display();
            Error::invalid(format!("cannot make the key for secrets {file}: {e}; say in [secrets] key where it is"))
        };
        if self.text().map_err(wrong)?.is_none() {
            self.make(fresh).map_err(wrong)?;
        }
        let made = self.text().map_err(wrong)?;
        made.ok_or_else(|| wrong(io::Error::new(ErrorKind::UnexpectedEof, "it is empty")))
    }

    fn place(&self) -> String {
        let whole = std::path::absolute(&self.0).unwrap_or_else(|_| self.0.clone());
        whole.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn many_who_make_it_at_once_get_one_and_the_same() {
        for leftover in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("postrider.key");
            if leftover {
                File::create(&path).unwrap();
                assert_eq!(KeyFile::new(&path).read().unwrap(), None, "an empty file is no key");
            }
            let made: Vec<String> = std::thread::scope(|scope| {
                let makers: Vec<_> = (0..16)
                    .map(|n| {
                        let file = KeyFile::new(&path);
                        scope.spawn(move || file.keep(&format!("key {n}")).unwrap())
                    })
                    .collect();
                makers.into_iter().map(|maker| maker.join().unwrap()).collect()
            });
            let kept = std::fs::read_to_string(&path).unwrap();
            assert!(made.iter().all(|text| *text == kept), "{made:?}");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
            assert_eq!(KeyFile::new(&path).keep("another").unwrap(), kept, "what is there stays");
        }
    }
}
