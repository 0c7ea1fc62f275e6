//! Looking into a running process: which ELF objects it has, what of them lies on
//! which kind of page, and what the preload in it says.

mod auxv;
mod objects;
mod report;
mod usage;

use std::fs;
use std::io;
use std::path::PathBuf;

pub use objects::{Cache, Mapped, objects};
pub use report::{Report, read as read_report};
pub use usage::{Pages, Usage, usage};

/// Why a process cannot be looked into.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// There is none with this number.
    #[error("no process {0}")]
    NoPid(u32),
    /// There is none with this name.
    #[error("no process is named {0}")]
    NoName(String),
    /// It has ended and waits for its parent.
    #[error("process {0} has ended (a zombie)")]
    Zombie(u32),
    /// It has no memory of its own.
    #[error("process {0} is a kernel thread")]
    KernelThread(u32),
    /// It ended while it was being read.
    #[error("process {0} ended while it was being read")]
    Gone(u32),
    /// The kernel does not let us look.
    #[error("not permitted to read the memory map of process {0}")]
    NotPermitted(u32),
    /// Any other failure.
    #[error("cannot read {}: {source}", .path.display())]
    Read {
        /// The file of `/proc`.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel's text was not understood.
    #[error("cannot read the memory map of process {pid}: {source}")]
    Parse {
        /// The process.
        pid: u32,
        /// Where.
        source: elfremap::proc::maps::ParseError,
    },
}

/// A process by its number.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// Process id (of the whole process, not of a thread).
    pub pid: u32,
    /// Name as in `/proc/<pid>/comm`.
    pub name: String,
}

impl Process {
    /// The process `pid`, or the one that the thread `pid` belongs to.
    ///
    /// # Errors
    /// [`ProcessError::NoPid`].
    pub fn by_pid(pid: u32) -> Result<Self, ProcessError> {
        let status =
            fs::read(format!("/proc/{pid}/status")).map_err(|_| ProcessError::NoPid(pid))?;
        let field = |name| status_field(&status, name);
        let tgid = field(b"Tgid:").and_then(|text| text.trim().parse().ok());
        let pid = tgid.ok_or(ProcessError::NoPid(pid))?;
        Ok(Self { pid, name: field(b"Name:").unwrap_or_default() })
    }

    /// All processes of that name: as the kernel has it (cut at 15 bytes), or the
    /// last part of the program's path or of its first argument.
    ///
    /// # Errors
    /// [`ProcessError::NoName`] when there is none.
    pub fn by_name(name: &str) -> Result<Vec<Self>, ProcessError> {
        let mut found: Vec<_> = Self::all();
        found.retain(|process| process.is_named(name));
        if found.is_empty() { Err(ProcessError::NoName(name.into())) } else { Ok(found) }
    }

    /// Every process that can be seen, in the order of their numbers.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut found: Vec<_> = pids.filter_map(|pid| Self::by_pid(pid).ok()).collect();
        found.sort_by_key(|process| process.pid);
        found
    }

    fn is_named(&self, name: &str) -> bool {
        let last = |path: &[u8]| path.rsplit(|&b| b == b'/').next() == Some(name.as_bytes());
        if self.pid == std::process::id() {
            return false;
        }
        if self.name == name
            || self.exe().is_some_and(|exe| last(exe.as_os_str().as_encoded_bytes()))
        {
            return true;
        }
        let arguments = fs::read(self.path("cmdline")).unwrap_or_default();
        arguments.split(|&b| b == 0).next().is_some_and(last)
    }

    /// `/proc/<pid>/<file>`.
    #[must_use]
    pub fn path(&self, file: &str) -> PathBuf {
        format!("/proc/{}/{file}", self.pid).into()
    }

    /// The program's path, when the kernel tells.
    #[must_use]
    pub fn exe(&self) -> Option<PathBuf> {
        fs::read_link(self.path("exe")).ok()
    }

    /// The value of a variable in the environment that the program was started with.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<String> {
        let environment = fs::read(self.path("environ")).ok()?;
        let mut entries = environment.split(|&b| b == 0);
        let value =
            entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
        Some(crate::elf::printable(value))
    }

    /// The text of smaps, never empty.
    ///
    /// # Errors
    /// [`ProcessError::NotPermitted`], [`ProcessError::Gone`], or why there is no memory map.
    pub fn smaps(&self) -> Result<Vec<u8>, ProcessError> {
        let path = self.path("smaps");
        match fs::read(&path) {
            Ok(text) if !text.is_empty() => Ok(text),
            Ok(_) => Err(self.without_memory()),
            Err(source) => Err(match source.raw_os_error() {
                Some(libc::EACCES | libc::EPERM) => ProcessError::NotPermitted(self.pid),
                Some(libc::ESRCH | libc::ENOENT) => self.without_memory(),
                _ => ProcessError::Read { path, source },
            }),
        }
    }

    fn without_memory(&self) -> ProcessError {
        let Ok(status) = fs::read(self.path("status")) else { return ProcessError::Gone(self.pid) };
        match status_field(&status, b"State:") {
            Some(state) if state.starts_with(['Z', 'X']) => ProcessError::Zombie(self.pid),
            Some(_) => ProcessError::KernelThread(self.pid),
            None => ProcessError::Gone(self.pid),
        }
    }
}

/// The value of a line such as `Tgid: 42` of `/proc/<pid>/status`.
fn status_field(status: &[u8], name: &[u8]) -> Option<String> {
    let line = status.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(name))?;
    Some(crate::elf::printable(line.trim_ascii()))
}
