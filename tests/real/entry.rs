//! Stops a program where the constructors of its libraries have run and its own
//! first instruction comes next: what a preload did must be there by then, and
//! nothing of the program has changed it yet.

#[cfg_attr(target_arch = "x86_64", path = "entry/x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "entry/aarch64.rs")]
mod arch;

use crate::subject::Moment;
use anyhow::{Context, Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::run::Run;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs;

/// Starts `run`, a run of the program `image`, up to its entry point, and looks at it
/// there. The program is then killed.
///
/// # Errors
/// When it does not come to its entry point.
pub(crate) fn at_entry(run: Run, image: &Image) -> Result<Moment> {
    let running = run.traced().start_waiting()?;
    let pid = Pid::from_raw(i32::try_from(running.pid())?);
    let stopped = waitpid(pid, None)?;
    ensure!(stopped == WaitStatus::Stopped(pid, Signal::SIGTRAP), "no stop at exec: {stopped:?}");
    let entry = entry_point(running.pid())?;
    arch::stop_at(pid, entry)?;
    let mut signal = None;
    loop {
        ptrace::cont(pid, signal)?;
        signal = match waitpid(pid, None)? {
            WaitStatus::Stopped(_, Signal::SIGTRAP) => break,
            WaitStatus::Stopped(_, other) => Some(other),
            ended => anyhow::bail!("ended before its entry point: {ended:?}"),
        };
    }
    let at = arch::stopped_at(pid)?;
    ensure!(at == entry, "stopped at {at:#x}, not at the entry point {entry:#x}");
    let moment = Moment::now("entry", running.pid(), image)?;
    running.kill()?;
    Ok(moment)
}

/// AT_ENTRY of getauxval(3).
fn entry_point(pid: u32) -> Result<u64> {
    let bytes = fs::read(format!("/proc/{pid}/auxv"))?;
    let words: Vec<u64> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default()))
        .collect();
    let pair = words.chunks_exact(2).find(|pair| pair[0] == libc::AT_ENTRY);
    Ok(pair.context("no AT_ENTRY")?[1])
}
