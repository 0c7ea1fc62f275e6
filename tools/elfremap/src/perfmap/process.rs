//! A running process as `/proc` shows it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use elfremap::proc::maps;
use elfremap::prot::Prot;
use elfremap::range::Range;

use crate::exit::{Failure, Status};

/// A process, held by a handle on its `/proc` folder: what is read through it never comes from
/// a later process with the same number.
#[derive(Debug)]
pub struct Process {
    /// Its number in our pid namespace.
    pub pid: u32,
    /// Its number in its own pid namespace.
    pub inner_pid: u32,
    /// Its effective user, as seen from here.
    pub user: u32,
    folder: File,
}

/// A mapping, with its name as a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// Addresses.
    pub range: Range,
    /// Access rights.
    pub prot: Prot,
    /// Offset into the file, in bytes.
    pub offset: u64,
    /// Device number, major and minor.
    pub device: (u32, u32),
    /// Inode; 0 without a file.
    pub inode: u64,
    /// Name as the kernel prints it.
    pub name: PathBuf,
}

impl Process {
    /// Finds the process that `id`, a process or thread number, belongs to.
    ///
    /// # Errors
    /// When there is none, or it is one without memory of its own: a kernel thread, a zombie.
    pub fn find(id: u32) -> anyhow::Result<Self> {
        let status = Fields::read(Path::new(&format!("/proc/{id}")))
            .map_err(|error| gone_or(error, id, "read the status of"))?;
        let pid = status.number("Tgid").unwrap_or(id);
        let status = Fields::read(Path::new(&format!("/proc/{pid}")))
            .map_err(|error| gone_or(error, pid, "read the status of"))?;
        let name = status.text("Name").unwrap_or_default().to_owned();
        // The first thread may have ended before the others; then it has no memory to show.
        let thread = if status.state() == 'Z' { living_thread(pid) } else { Some(pid) };
        let Some(thread) = thread else {
            return fail(
                format!("process {pid} ({name}) has ended: a zombie has no code to name"),
                Some(format!(
                    "wait for its parent, process {}",
                    status.text("PPid").unwrap_or("?")
                )),
            );
        };
        let folder = fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(format!("/proc/{thread}"))
            .map_err(|error| gone_or(error, pid, "open the folder of"))?;
        let status = Fields::read(&folder_path(&folder))
            .map_err(|error| gone_or(error, pid, "read the status of"))?;
        // Real, effective, saved and file system user.
        let user = status.text("Uid").and_then(|ids| ids.split_whitespace().nth(1)?.parse().ok());
        let process = Self {
            pid,
            inner_pid: status.last_number("NStgid").unwrap_or(pid),
            user: user.unwrap_or(0),
            folder,
        };
        if process.is_kernel_thread() {
            return fail(
                format!("process {pid} ({name}) is a kernel thread: it has no code of its own"),
                Some("perf names kernel code by itself".into()),
            );
        }
        Ok(process)
    }

    /// `PF_KTHREAD` (include/linux/sched.h) among the flags, field 9 of proc_pid_stat(5).
    fn is_kernel_thread(&self) -> bool {
        const PF_KTHREAD: u64 = 0x0020_0000;
        self.stat_field(9).is_some_and(|flags| flags & PF_KTHREAD != 0)
    }

    /// A field of proc_pid_stat(5), numbered from 1 as there; not the first three.
    fn stat_field(&self, number: usize) -> Option<u64> {
        let stat = fs::read(self.path("stat")).ok()?;
        // The name in field 2 may hold blanks and parentheses.
        let after_name = stat.iter().rposition(|&b| b == b')')? + 1;
        let fields = String::from_utf8_lossy(&stat[after_name..]).into_owned();
        fields.split_whitespace().nth(number - 3)?.parse().ok()
    }

    /// When it was started, in seconds since 1970, rounded down.
    #[must_use]
    pub fn started(&self) -> Option<i64> {
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let boot: i64 = stat.lines().find_map(|l| l.strip_prefix("btime "))?.trim().parse().ok()?;
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
        Some(boot + i64::try_from(self.stat_field(22)?).ok()? / ticks)
    }

    /// Whether it holds a file of that name open.
    #[must_use]
    pub fn holds_open(&self, path: &Path) -> bool {
        let Ok(descriptors) = fs::read_dir(self.path("fd")) else { return false };
        let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.into_iter().any(|link| link == path)
    }

    /// The user and group that are root in its user namespace, as seen from here; `None` when
    /// nobody is.
    #[must_use]
    pub fn root_inside(&self) -> Option<(u32, u32)> {
        let outside = |map: &str| {
            let text = fs::read_to_string(self.path(map)).ok()?;
            // A line holds the first number inside, the first outside, and how many there are.
            let line = text.lines().find(|l| l.split_whitespace().next() == Some("0"))?;
            line.split_whitespace().nth(1)?.parse().ok()
        };
        Some((outside("uid_map")?, outside("gid_map")?))
    }

    /// Path of an entry of the process's `/proc` folder.
    #[must_use]
    pub fn path(&self, entry: &str) -> PathBuf {
        folder_path(&self.folder).join(entry)
    }

    /// Path of `path`, as the process sees it, from here.
    #[must_use]
    pub fn rooted(&self, path: &Path) -> PathBuf {
        match path.strip_prefix("/") {
            Ok(path) => self.path("root").join(path),
            Err(_) => self.path("cwd").join(path),
        }
    }

    /// The first few of its arguments.
    #[must_use]
    pub fn arguments(&self) -> Vec<Vec<u8>> {
        let line = fs::read(self.path("cmdline")).unwrap_or_default();
        line.split(|&b| b == 0).filter(|a| !a.is_empty()).take(10).map(<[u8]>::to_vec).collect()
    }

    /// Turns an error of reading this process into the line for its user.
    #[must_use]
    pub fn failure(&self, error: io::Error, what: &str) -> anyhow::Error {
        gone_or(error, self.pid, what)
    }

    /// Whether it still runs: what was read before is then all its own.
    ///
    /// # Errors
    /// The line that says it does not.
    pub fn check_alive(&self) -> anyhow::Result<()> {
        // A process that has ended may be there as a zombie: without memory, and without this.
        let alive = fs::read(self.path("auxv")).and_then(|auxv| {
            if auxv.is_empty() { Err(io::Error::from_raw_os_error(libc::ESRCH)) } else { Ok(()) }
        });
        alive.map_err(|error| self.failure(error, "look once more at"))
    }

    /// Its mappings, by address.
    ///
    /// # Errors
    /// When they may not be read, or the process has ended.
    pub fn mappings(&self) -> anyhow::Result<Vec<Mapping>> {
        let text = fs::read(self.path("maps"))
            .map_err(|error| self.failure(error, "read the mappings of"))?;
        if text.is_empty() {
            let ended = io::Error::from_raw_os_error(libc::ESRCH);
            return Err(self.failure(ended, "read the mappings of"));
        }
        maps::parse(&text)
            .map(|mapping| {
                let m = mapping?;
                Ok(Mapping {
                    range: m.range,
                    prot: m.prot,
                    offset: m.offset,
                    device: m.device,
                    inode: m.inode,
                    name: PathBuf::from(std::ffi::OsString::from_vec(unescape(m.name))),
                })
            })
            .collect()
    }

    /// The auxiliary vector's value for `key`, as getauxval(3) gives it; for a program of
    /// `word` bytes (4 or 8) per word.
    #[must_use]
    pub fn auxv(&self, key: u64, word: usize) -> Option<u64> {
        let data = fs::read(self.path("auxv")).ok()?;
        let number = |bytes: &[u8]| match word {
            4 => bytes.try_into().ok().map(|b| u64::from(u32::from_ne_bytes(b))),
            _ => bytes.try_into().ok().map(u64::from_ne_bytes),
        };
        data.chunks_exact(2 * word)
            .find(|pair| number(&pair[..word]) == Some(key))
            .and_then(|pair| number(&pair[word..]))
    }

    /// Its memory; `None` when it may not be read, which needs the rights of a debugger.
    #[must_use]
    pub fn memory(&self) -> Option<Memory> {
        File::open(self.path("mem")).ok().map(Memory)
    }

    /// Whether `path` means the same here as for the process.
    #[must_use]
    pub fn shares_our_root(&self) -> bool {
        let root = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        let namespace = |path: &Path| fs::read_link(path).ok();
        namespace(&self.path("ns/mnt")) == namespace(Path::new("/proc/self/ns/mnt"))
            && root(&self.path("root")) == root(Path::new("/"))
    }
}

/// The memory of a process.
#[derive(Debug)]
pub struct Memory(File);

impl Memory {
    /// `length` bytes at `address`; `None` when they cannot all be read.
    #[must_use]
    pub fn read(&self, address: u64, length: usize) -> Option<Vec<u8>> {
        let mut data = vec![0; length];
        self.0.read_exact_at(&mut data, address).ok()?;
        Some(data)
    }

    /// The string at `address`, up to 4096 bytes.
    #[must_use]
    pub fn string(&self, address: u64) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        let mut at = address;
        while text.len() < 4096 {
            // Up to the end of the page: what follows may be unmapped.
            let length = usize::try_from(0x1000 - (at & 0xfff)).ok()?;
            let part = self.read(at, length)?;
            if let Some(end) = part.iter().position(|&b| b == 0) {
                text.extend_from_slice(&part[..end]);
                return Some(text);
            }
            text.extend_from_slice(&part);
            at = at.checked_add(length as u64)?;
        }
        None
    }
}

/// `/proc/<pid>/status`: lines of a key, a colon and a value.
struct Fields(String);

impl Fields {
    fn read(folder: &Path) -> io::Result<Self> {
        let mut text = Vec::new();
        File::open(folder.join("status"))?.read_to_end(&mut text)?;
        Ok(Self(String::from_utf8_lossy(&text).into_owned()))
    }

    fn text(&self, key: &str) -> Option<&str> {
        let lines = self.0.lines().filter_map(|line| line.split_once(':'));
        lines.into_iter().find(|&(k, _)| k == key).map(|(_, value)| value.trim())
    }

    fn number(&self, key: &str) -> Option<u32> {
        self.text(key)?.parse().ok()
    }

    fn last_number(&self, key: &str) -> Option<u32> {
        self.text(key)?.split_whitespace().last()?.parse().ok()
    }

    fn state(&self) -> char {
        self.text("State").and_then(|s| s.chars().next()).unwrap_or('?')
    }
}

/// A thread of `pid` that has not ended.
fn living_thread(pid: u32) -> Option<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let ids = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.into_iter().find(|id| {
        Fields::read(Path::new(&format!("/proc/{id}"))).is_ok_and(|s| !"ZX".contains(s.state()))
    })
}

fn folder_path(folder: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd()))
}

/// Undoes the one escape the kernel writes into the names of maps: `\012` for a newline.
fn unescape(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, tail)) = rest.split_first() {
        rest = if let Some(tail) = rest.strip_prefix(b"\\012") {
            out.push(b'\n');
            tail
        } else {
            out.push(first);
            tail
        };
    }
    out
}

/// Whether a name from maps says that the file was deleted; the name without that.
#[must_use]
pub fn deleted(name: &Path) -> Option<&Path> {
    let name = name.as_os_str().as_bytes().strip_suffix(b" (deleted)")?;
    Some(Path::new(std::ffi::OsStr::from_bytes(name)))
}

fn fail<T>(message: String, hint: Option<String>) -> anyhow::Result<T> {
    Err(Failure { status: Status::Failed, message, hint }.into())
}

fn gone_or(error: io::Error, pid: u32, what: &str) -> anyhow::Error {
    let (status, message, hint) = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => (
            Status::Failed,
            format!("cannot {what} process {pid}: there is no such process (any more)"),
            "pgrep -l NAME lists processes by name".to_owned(),
        ),
        Some(libc::EACCES | libc::EPERM) => (
            Status::NotPermitted,
            format!("cannot {what} process {pid}: not permitted: it belongs to another user"),
            format!("sudo elfremap perfmap {pid}"),
        ),
        _ => (
            Status::Failed,
            format!("cannot {what} process {pid}: {error}"),
            "elfremap needs /proc mounted".to_owned(),
        ),
    };
    Failure { status, message, hint: Some(hint) }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_itself_and_its_mappings() {
        let process = Process::find(std::process::id()).unwrap();
        assert_eq!(process.pid, std::process::id());
        assert!(process.shares_our_root());
        process.check_alive().unwrap();
        let here = Process::find as *const () as u64;
        let mappings = process.mappings().unwrap();
        let own = mappings.iter().find(|m| m.range.contains(here)).unwrap();
        assert_eq!(own.name, std::env::current_exe().unwrap());
        let memory = process.memory().unwrap();
        let header = mappings.iter().find(|m| m.name == own.name && m.offset == 0).unwrap();
        assert_eq!(memory.read(header.range.start(), 4).unwrap(), b"\x7fELF");
        // SAFETY: no preconditions.
        let entry = unsafe { libc::getauxval(libc::AT_ENTRY) };
        assert_eq!(process.auxv(libc::AT_ENTRY, 8), Some(entry));
    }

    #[test]
    fn names_from_maps() {
        assert_eq!(unescape(b"/a\\012b\\01"), b"/a\nb\\01");
        assert_eq!(deleted(Path::new("/a b (deleted)")), Some(Path::new("/a b")));
        assert_eq!(deleted(Path::new("/a")), None);
    }
}
