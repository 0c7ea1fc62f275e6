//! The files of sysfs and `/proc`, on the running machine or below another root (a
//! copy of another machine's files, or a tree made for a test).

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use elfremap::hugepage::Files;

/// Where `/sys` and `/proc` are looked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct System {
    root: PathBuf,
}

/// The option that chooses the root, the same for all commands that read the machine's state.
#[derive(clap::Args, Clone, Debug)]
pub struct RootArg {
    /// Read and write sysfs and /proc below DIR instead of /
    #[arg(long, value_name = "DIR", default_value = "/", hide_default_value = true)]
    pub sysfs_root: PathBuf,
}

impl RootArg {
    /// The files below the chosen root.
    #[must_use]
    pub fn system(&self) -> System {
        System::below(&self.sysfs_root)
    }
}

impl System {
    /// The running machine.
    #[must_use]
    pub fn running() -> Self {
        Self::below("/")
    }

    /// The files below `root`.
    #[must_use]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Whether the root is the running machine's own.
    #[must_use]
    pub fn is_running_machine(&self) -> bool {
        self.root == Path::new("/")
    }

    /// Where the file is that has the absolute path `path` on the machine.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    /// The file's content; `None` when there is no such file.
    ///
    /// # Errors
    /// Whatever else keeps it from being read.
    pub fn content(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        let mut content = Vec::new();
        Ok(self.read(path, &mut content)?.then_some(content))
    }
}

/// Files that can be written as well: the kernel's knobs.
pub trait Knobs: Files<Error = io::Error> {
    /// Writes `text` in a single write(2) into a file that is there, as the kernel wants it.
    ///
    /// # Errors
    /// There is no such file, it may not be written, or the kernel refuses the value.
    fn write(&self, path: &str, text: &str) -> io::Result<()>;
}

impl Files for System {
    type Error = io::Error;

    fn read(&self, path: &str, out: &mut Vec<u8>) -> io::Result<bool> {
        match fs::File::open(self.path(path)) {
            Ok(mut file) => file.read_to_end(out).map(|_| true),
            Err(error) => absent(error),
        }
    }

    fn list(&self, path: &str, each: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        let entries = match fs::read_dir(self.path(path)) {
            Ok(entries) => entries,
            Err(error) => return absent(error),
        };
        for entry in entries {
            each(entry?.file_name().as_bytes());
        }
        Ok(true)
    }
}

impl Knobs for System {
    fn write(&self, path: &str, text: &str) -> io::Result<()> {
        let file = fs::OpenOptions::new().write(true).truncate(true).open(self.path(path));
        let text = text.as_bytes();
        if file?.write(text)? == text.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
    }
}

fn absent(error: io::Error) -> io::Result<bool> {
    if error.kind() == ErrorKind::NotFound { Ok(false) } else { Err(error) }
}
