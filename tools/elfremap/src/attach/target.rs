//! The process to attach to, as `/proc` shows it.

use std::fs;
use std::io;
use std::path::PathBuf;

use elfremap::hugepage::number;

use super::{failed, not_permitted, refused};
use crate::elf::{FileSource, Image, Source};
use crate::process::{Process, ProcessError};

/// A process that may be attached to.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its number.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Whether a seccomp filter may forbid what its threads are made to call.
    pub(super) filtered: bool,
}

impl Target {
    /// Looks whether the process can be attached to at all.
    ///
    /// # Errors
    /// It can't: the line says why, the hint what to do.
    pub fn open(pid: u32) -> anyhow::Result<Self> {
        let process = Process::by_pid(pid).map_err(|error| failed(error.to_string()))?;
        let Process { pid, name } = process;
        if pid == std::process::id() {
            return Err(refused(format!("process {pid} is elfremap itself"), None));
        }
        let mut target = Self { pid, name, filtered: false };
        let is_kernel = target.stat_field(9).is_some_and(|flags| flags & PF_KTHREAD != 0);
        if is_kernel {
            return Err(refused(ProcessError::KernelThread(pid).to_string(), None));
        }
        let Some(thread) = target.threads().first().copied() else {
            return Err(refused(ProcessError::Zombie(pid).to_string(), None));
        };
        let maps = fs::read(format!("/proc/{thread}/maps"));
        match maps {
            Ok(text) if !text.is_empty() => {}
            Ok(_) => return Err(failed(ProcessError::Gone(pid).to_string())),
            Err(error) => return Err(target.unreadable(&error)),
        }
        let status =
            Status::read(thread).ok_or_else(|| failed(ProcessError::Gone(pid).to_string()))?;
        let own = u64::from(std::process::id());
        if let Some(tracer) = status.number("TracerPid:").filter(|&t| t != 0 && t != own) {
            let who = fs::read_to_string(format!("/proc/{tracer}/comm")).unwrap_or_default();
            let message =
                format!("process {pid} is already traced, by process {tracer} ({})", who.trim());
            return Err(refused(message, Some("let that debugger detach first".into())));
        }
        target.filtered = status.number("Seccomp:").is_some_and(|mode| mode != 0)
            && !is_filtered_as_we_are(&status, thread);
        target.require_native(thread)?;
        Ok(target)
    }

    /// 32-bit and x32 programs have other system calls.
    fn require_native(&self, thread: i32) -> anyhow::Result<()> {
        let Ok(source) = FileSource::open(&PathBuf::from(format!("/proc/{thread}/exe"))) else {
            return Ok(());
        };
        match foreign(&source) {
            Some(what) => {
                Err(refused(format!("process {} runs a program for {what}", self.pid), None))
            }
            None => Ok(()),
        }
    }

    /// Why its maps cannot be read.
    fn unreadable(&self, error: &io::Error) -> anyhow::Error {
        match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => self.forbidden(),
            Some(libc::ESRCH | libc::ENOENT) => failed(ProcessError::Gone(self.pid).to_string()),
            _ => failed(format!("cannot read the memory map of process {}: {error}", self.pid)),
        }
    }

    /// The kernel does not let us trace it: says what would be needed.
    pub(super) fn forbidden(&self) -> anyhow::Error {
        let pid = self.pid;
        let user = |id: &str| {
            Status::read(id.parse().ok()?)?
                .text("Uid:")?
                .split_whitespace()
                .next()
                .map(str::to_owned)
        };
        let (own, others) = (nix::unistd::getuid().to_string(), user(&pid.to_string()));
        let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
        let why = why_forbidden(&own, others.as_deref(), scope.trim());
        not_permitted(
            format!("not permitted to trace process {pid}: {why}"),
            Some(format!("sudo elfremap attach {pid}")),
        )
    }

    /// Its threads that live.
    #[must_use]
    pub fn threads(&self) -> Vec<i32> {
        let entries = fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten();
        let tids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        tids.filter(|&tid| !matches!(state(tid), None | Some(b'Z' | b'X'))).collect()
    }

    /// A file of `/proc` of the process. The first thread may have ended before the others;
    /// then it has no memory to show.
    pub(super) fn path(&self, file: &str) -> PathBuf {
        let first = i32::try_from(self.pid).unwrap_or_default();
        let is_alive = !matches!(state(first), None | Some(b'Z' | b'X'));
        let thread = if is_alive { Some(first) } else { self.threads().first().copied() };
        format!("/proc/{}/{file}", thread.unwrap_or(first)).into()
    }

    /// The text of its maps.
    pub(super) fn maps(&self) -> anyhow::Result<Vec<u8>> {
        match fs::read(self.path("maps")) {
            Ok(text) if !text.is_empty() => Ok(text),
            Ok(_) => Err(self.gone()),
            Err(error) => Err(self.unreadable(&error)),
        }
    }

    pub(super) fn gone(&self) -> anyhow::Error {
        failed(format!("process {} ended, or became another program", self.pid))
    }

    /// What came of work on the process; where it has ended meanwhile, that is the reason,
    /// whatever it was that failed.
    ///
    /// # Errors
    /// The result's own, or that the process has ended.
    pub fn explain<T>(&self, result: anyhow::Result<T>) -> anyhow::Result<T> {
        result.map_err(|error| {
            let has_ended = !super::is_interrupted() && self.has_ended();
            if has_ended { self.gone() } else { error }
        })
    }

    /// Whether the process has ended, or is just about it: its memory and its first thread go
    /// before others do.
    fn has_ended(&self) -> bool {
        const ATTEMPTS: u32 = 100;
        for _ in 0..ATTEMPTS {
            if self.threads().is_empty() {
                return true;
            }
            if self.is_ending() == Some(false) {
                return false;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        false
    }

    /// Whether a thread that lives is on its way out, or has a SIGKILL waiting.
    fn is_ending(&self) -> Option<bool> {
        /// `PF_EXITING` of include/linux/sched.h.
        const PF_EXITING: u64 = 4;
        const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
        let (flags, pending) = (self.stat_field(9)?, self.stat_field(31)?);
        Some(flags & PF_EXITING != 0 || pending & SIGKILL != 0)
    }

    /// A field of proc_pid_stat(5), numbered from 1 as there; not the first three.
    pub(super) fn stat_field(&self, number: usize) -> Option<u64> {
        let stat = fs::read_to_string(self.path("stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(number - 3)?.parse().ok()
    }

    /// Whether the process has a limit of address space or data.
    pub(super) fn is_limited(&self) -> bool {
        let limits = fs::read_to_string(self.path("limits")).unwrap_or_default();
        let of = |name: &str| limits.lines().find_map(|line| line.strip_prefix(name));
        ["Max address space", "Max data size"]
            .iter()
            .any(|name| of(name).is_some_and(|rest| !rest.trim_start().starts_with("unlimited")))
    }
}

/// The machine that a program is for, when it is another one.
fn foreign(source: &impl Source) -> Option<String> {
    let image = Image::read(source).ok().filter(|image| !image.is_native())?;
    Some(crate::elf::machine_name(image.machine, image.class))
}

/// Why the kernel may refuse a process of user `others` to user `own`; `scope` is the
/// setting of Yama, empty where there is no Yama.
fn why_forbidden(own: &str, others: Option<&str>, scope: &str) -> String {
    match (others, scope) {
        (Some(others), _) if others != own => {
            format!("it belongs to user {others}, and CAP_SYS_PTRACE is missing here")
        }
        (_, "1" | "2") => {
            format!("kernel.yama.ptrace_scope is {scope}, and CAP_SYS_PTRACE is missing here")
        }
        (_, "3") => "kernel.yama.ptrace_scope is 3: nobody may, until the next boot".into(),
        _ => "it is not dumpable, has capabilities of its own, or a security module \
              forbids it; CAP_SYS_PTRACE is missing here"
            .into(),
    }
}

/// `PF_KTHREAD` of include/linux/sched.h.
const PF_KTHREAD: u64 = 0x0020_0000;

/// `/proc/<tid>/status`.
#[derive(Debug)]
pub(super) struct Status(String);

impl Status {
    pub(super) fn read(tid: i32) -> Option<Self> {
        fs::read_to_string(format!("/proc/{tid}/status")).ok().map(Self)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
    }

    fn number(&self, name: &str) -> Option<u64> {
        number(self.text(name)?.as_bytes())
    }

    /// Whether a signal waits to be delivered.
    pub(super) fn has_signal(&self) -> bool {
        let mask = |name| self.text(name).and_then(|text| u64::from_str_radix(text, 16).ok());
        let pending = mask("SigPnd:").unwrap_or(0) | mask("ShdPnd:").unwrap_or(0);
        pending & !mask("SigBlk:").unwrap_or(0) & !mask("SigIgn:").unwrap_or(0) != 0
    }
}

/// Whether the thread's seccomp filters are those that this process has too, as everything in
/// a container does: there are as many, and both live in one cgroup. (Filters are inherited, and
/// only ever added.)
fn is_filtered_as_we_are(status: &Status, thread: i32) -> bool {
    let own = i32::try_from(std::process::id()).ok().and_then(Status::read);
    let count = |status: &Status| status.number("Seccomp_filters:").filter(|&count| count > 0);
    let cgroup = |pid: &str| fs::read(format!("/proc/{pid}/cgroup")).ok();
    count(status).is_some()
        && own.is_some_and(|own| count(&own) == count(status))
        && cgroup("self") == cgroup(&thread.to_string())
}

/// The letter for a thread's state of proc_pid_stat(5).
pub(super) fn state(tid: i32) -> Option<u8> {
    let stat = fs::read(format!("/proc/{tid}/stat")).ok()?;
    let after_name = stat.iter().rposition(|&b| b == b')')? + 2;
    stat.get(after_name).copied()
}

/// The number of the system call that a thread sleeps in; `None` when it sleeps in none, or
/// does not sleep.
pub(super) fn call_under_way(tid: i32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// A number that changes whenever the thread gets a processor.
pub(super) fn turns(tid: i32) -> Option<u64> {
    if let Ok(text) = fs::read_to_string(format!("/proc/{tid}/schedstat")) {
        return text.split_whitespace().nth(2)?.parse().ok();
    }
    let status = Status::read(tid)?;
    let switches = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"];
    switches.iter().map(|name| status.number(name)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that loads nothing: one program header, of type `PT_NULL`.
    fn program(class: u8, machine: u16) -> Vec<u8> {
        let (size, entry, offset) = if class == 1 { (52u8, 32u8, 28) } else { (64, 56, 32) };
        let mut bytes = vec![0; usize::from(size) + usize::from(entry)];
        bytes[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', class, 1, 1]);
        bytes[16..21].copy_from_slice(&[2, 0, machine.to_le_bytes()[0], 0, 1]);
        bytes[offset] = size;
        let sizes = usize::from(size) - 12;
        bytes[sizes..sizes + 5].copy_from_slice(&[size, 0, entry, 0, 1]);
        bytes
    }

    #[test]
    fn programs_for_other_machines_are_told() {
        let of = |class, machine| foreign(&program(class, machine));
        assert_eq!(of(1, 62).as_deref(), Some("x32"));
        assert_eq!(of(1, 3).as_deref(), Some("i386"));
        let (own, other) = if cfg!(target_arch = "aarch64") {
            (183, (62, "x86-64"))
        } else {
            (62, (183, "arm64"))
        };
        assert_eq!(of(2, own), None);
        assert_eq!(of(2, other.0).as_deref(), Some(other.1));
    }

    #[test]
    fn what_forbids_is_named() {
        let why = |others, scope| why_forbidden("1000", others, scope);
        assert!(why(Some("0"), "1").starts_with("it belongs to user 0, and CAP_SYS_PTRACE"));
        assert!(why(Some("1000"), "1").starts_with("kernel.yama.ptrace_scope is 1, and CAP"));
        assert!(why(Some("1000"), "3").contains("until the next boot"));
        assert!(why(Some("1000"), "").starts_with("it is not dumpable"));
        assert!(why(None, "0").starts_with("it is not dumpable"));
    }
}
