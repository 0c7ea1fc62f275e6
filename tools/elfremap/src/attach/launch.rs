//! Starting a program with its code on huge pages though it loads no preload: the process that is
//! about to become the program is traced by a process forked from it, which moves the program
//! at its entry point and lets it go.
//!
//! # Safety
//! fork(2) in a process with one thread, so that the child may do anything.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::exit;
use std::time::{Duration, Instant};

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, setsid};

use super::ptrace::{self, Stop};
use super::{Options, Outcome, Target, attach, failed};

/// Leaves a process behind that traces this one from now on and moves the program that this
/// process becomes. It is no child of this process: a program must not find children
/// that it did not start. It calls `tell` with what became of the program while that is still
/// stopped, and `after` once it runs.
///
/// # Errors
/// There can be no such process, or it may not trace this one.
pub fn start(
    options: &Options,
    tell: &dyn Fn(anyhow::Result<Outcome>),
    after: &dyn Fn(u32),
) -> anyhow::Result<()> {
    let pid = std::process::id();
    let (mut here, mut there) = UnixStream::pair()?;
    // SAFETY: this process has one thread.
    match unsafe { fork()? } {
        ForkResult::Child => {
            drop(here);
            let _ = setsid();
            // SAFETY: as above.
            match unsafe { fork() } {
                Ok(ForkResult::Child) => {
                    if let Some((tid, signal, outcome)) = trace(pid, options, &mut there) {
                        tell(outcome);
                        let _ = ptrace::detach(tid, signal);
                        after(pid);
                    }
                    exit(0);
                }
                other => exit(i32::from(other.is_err())),
            }
        }
        ForkResult::Parent { child } => {
            drop(there);
            waitpid(child, None)?;
            let mut tracer = [0; 4];
            here.read_exact(&mut tracer)?;
            let tracer = u64::from(u32::from_ne_bytes(tracer));
            // Where Yama lets only a parent trace (ptrace_scope 1), this allows it.
            // SAFETY: the call changes who may trace this process, and touches no memory.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, tracer, 0, 0, 0) };
            here.write_all(&[1])?;
            let mut answer = [0; 4];
            here.read_exact(&mut answer)?;
            match i32::from_ne_bytes(answer) {
                0 => Ok(()),
                errno => Err(failed(format!(
                    "cannot trace the program: {}",
                    nix::errno::Errno::from_raw(errno).desc()
                ))),
            }
        }
    }
}

/// The program's thread, stopped; the signal that it is to get; and what became of the program.
/// `None` when it is not to be.
fn trace(
    pid: u32,
    options: &Options,
    parent: &mut UnixStream,
) -> Option<(i32, i32, anyhow::Result<Outcome>)> {
    let tid = i32::try_from(pid).ok()?;
    ptrace::prepare_to_wait();
    parent.write_all(&std::process::id().to_ne_bytes()).ok()?;
    parent.read_exact(&mut [0]).ok()?;
    let flags = ptrace::OPTIONS | libc::PTRACE_O_TRACEEXEC.cast_unsigned() as usize;
    let errno = ptrace::seize(tid, flags).err().map_or(0, |errno| errno.0);
    parent.write_all(&errno.to_ne_bytes()).ok()?;
    if errno != 0 {
        return None;
    }
    let signal = until_entry(tid)?;
    let outcome = if signal == 0 {
        at_entry(pid, options)
    } else {
        Ok(Outcome { reports: Vec::new(), stall: Duration::ZERO })
    };
    Some((tid, signal, outcome))
}

/// Waits until the process has become the program and stands before its first instruction.
/// `None` when it has ended; a signal other than 0 when that came first.
fn until_entry(tid: i32) -> Option<i32> {
    let mut is_program = false;
    loop {
        let stop = match ptrace::wait(tid, Instant::now() + Duration::from_secs(60)) {
            Ok(Some((_, stop))) => stop,
            Ok(None) => continue,
            Err(_) => return None,
        };
        match stop {
            Stop::Ended => return None,
            Stop::Event(libc::PTRACE_EVENT_EXEC) => {
                is_program = true;
                let _ = ptrace::interrupt(tid);
                ptrace::resume(tid, false, 0).ok()?;
            }
            Stop::Asked if is_program => return Some(0),
            Stop::Signal(signal) if is_program => return Some(signal),
            stop => ptrace::resume(tid, false, stop.signal()).ok()?,
        }
    }
}

fn at_entry(pid: u32, options: &Options) -> anyhow::Result<Outcome> {
    let mut target = Target::open(pid)?;
    // The filters that it has are those that this process has.
    target.filtered = false;
    let tid = i32::try_from(pid)?;
    attach(&target, options, Some(tid), &|calls| calls)
}
