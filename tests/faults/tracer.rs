//! ptrace(2): stops at every system call and changes those that come from the preload.

#[cfg_attr(target_arch = "x86_64", path = "tracer/x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "tracer/aarch64.rs")]
mod arch;

use anyhow::{Context, Result, bail};
use elfremap::proc::maps;
use elfremap::range::Range;
use elfremap_tests::run::Output;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// What is done to the preload's system calls, counted from 0.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// One call fails.
    Once {
        /// Which.
        nth: usize,
        /// With which error.
        errno: i32,
    },
    /// All calls of one number fail.
    Kind {
        /// The number.
        number: i64,
        /// With which error.
        errno: i32,
    },
    /// The process is killed instead of one call.
    Kill {
        /// Which.
        nth: usize,
    },
    /// Somebody takes all pages that the pool has left, before one call.
    Drain {
        /// Which.
        nth: usize,
    },
}

/// What was seen.
#[derive(Debug)]
pub(crate) struct Traced {
    /// Output and status.
    pub(crate) output: Output,
    /// The numbers of the preload's calls, in order.
    pub(crate) calls: Vec<i64>,
    /// The number of the (last) call that was made to fail.
    pub(crate) failed: Option<i64>,
}

/// Runs `program` under the preload with a fault.
///
/// # Errors
/// When the program cannot be run or traced.
pub(crate) fn trace(
    program: &Path,
    library: &Path,
    options: &[(&str, &str)],
    aslr: bool,
    fault: Option<Fault>,
) -> Result<Traced> {
    // Output goes to files, so that nobody has to read a pipe meanwhile.
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("LC_ALL", "C")
        .env("LD_PRELOAD", library)
        .envs(options.iter().copied())
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?);
    // SAFETY: personality and ptrace are plain system calls, which may be made between
    // fork and exec.
    unsafe {
        command.pre_exec(move || {
            if !aslr {
                nix::sys::personality::set(nix::sys::personality::Persona::ADDR_NO_RANDOMIZE)?;
            }
            ptrace::traceme().map_err(Into::into)
        });
    }
    let child = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let mut watch = Watch { pid, library, text: None, calls: Vec::new(), failed: None, fault };
    let status = watch.run()?;
    let read = |file: &mut File| -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        file.rewind()?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let output = Output { status, stdout: read(&mut stdout)?, stderr: read(&mut stderr)? };
    Ok(Traced { output, calls: watch.calls, failed: watch.failed })
}

struct Watch<'a> {
    pid: Pid,
    library: &'a Path,
    /// The library's executable mapping, once it is there.
    text: Option<Range>,
    calls: Vec<i64>,
    failed: Option<i64>,
    fault: Option<Fault>,
}

impl Watch<'_> {
    fn run(&mut self) -> Result<ExitStatus> {
        // The stop after exec.
        waitpid(self.pid, None)?;
        ptrace::setoptions(self.pid, Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL)?;
        // The error to put in place of the result of the call under way.
        let mut replace: Option<i32> = None;
        let mut inside = false;
        let mut signal = None;
        loop {
            match ptrace::syscall(self.pid, signal.take()) {
                // Killed while it was stopped.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(errno) => return Err(errno).context("cannot go on tracing"),
            }
            match waitpid(self.pid, None)? {
                WaitStatus::Exited(_, code) => return Ok(ExitStatus::from_raw(code << 8)),
                WaitStatus::Signaled(_, signal, _) => {
                    return Ok(ExitStatus::from_raw(signal as i32));
                }
                WaitStatus::PtraceSyscall(_) if inside => {
                    inside = false;
                    if let Some(errno) = replace.take() {
                        arch::set_result(self.pid, i64::from(-errno))?;
                    }
                }
                WaitStatus::PtraceSyscall(_) => {
                    inside = true;
                    replace = self.enter()?;
                }
                WaitStatus::Stopped(_, Signal::SIGTRAP) => {}
                WaitStatus::Stopped(_, other) => signal = Some(other),
                other => bail!("unexpected stop {other:?}"),
            }
        }
    }

    /// At the entry of a call: the error it is to fail with, if any.
    fn enter(&mut self) -> Result<Option<i32>> {
        let (address, number) = arch::call(self.pid)?;
        if !self.is_preload(address)? {
            return Ok(None);
        }
        let nth = self.calls.len();
        self.calls.push(number);
        let errno = match self.fault {
            Some(Fault::Once { nth: wanted, errno }) if wanted == nth => errno,
            Some(Fault::Kind { number: wanted, errno }) if wanted == number => errno,
            Some(Fault::Kill { nth: wanted }) if wanted == nth => {
                kill(self.pid, Signal::SIGKILL)?;
                return Ok(None);
            }
            Some(Fault::Drain { nth: wanted }) if wanted == nth => {
                elfremap_tests::pool::drain()?;
                return Ok(None);
            }
            _ => return Ok(None),
        };
        self.failed = Some(number);
        // A number that does not exist keeps the call from having an effect. close(2)
        // gives the descriptor up whatever it returns.
        if number != libc::SYS_close {
            arch::set_number(self.pid, -1)?;
        }
        Ok(Some(errno))
    }

    fn is_preload(&mut self, address: u64) -> Result<bool> {
        if self.text.is_none() {
            let text = std::fs::read(format!("/proc/{}/maps", self.pid))?;
            let name = self.library.as_os_str().as_bytes();
            self.text = maps::parse(&text)
                .filter_map(Result::ok)
                .find(|m| m.name == name && m.prot.has(elfremap::prot::Prot::EXEC))
                .map(|m| m.range);
        }
        Ok(self.text.is_some_and(|text| text.contains(address)))
    }
}
