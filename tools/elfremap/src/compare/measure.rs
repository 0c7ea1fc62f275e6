//! Running a command and what it cost.
//!
//! # Safety
//! wait4(2), the only call that returns the usage of one child, has no safe wrapper here.
#![allow(unsafe_code)]

use std::io::{self, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;

use crate::interrupt;

/// What a process and its waited-for children cost.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Cost {
    /// From the start to the end.
    pub wall_seconds: f64,
    /// Processor time in user space.
    pub user_seconds: f64,
    /// Processor time in the kernel.
    pub system_seconds: f64,
    /// Page faults without reading a file.
    pub minor_faults: i64,
    /// Page faults that read from a disk.
    pub major_faults: i64,
    /// Largest resident set of a single process, without hugetlb pages, in bytes.
    pub max_resident: i64,
}

/// A process that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// How.
    pub status: ExitStatus,
    /// What it cost.
    pub cost: Cost,
}

/// Runs the command to its end.
///
/// # Errors
/// It cannot be started, or this command was interrupted: then it is killed.
pub fn run(command: &mut Command) -> io::Result<Ended> {
    let start = Instant::now();
    let child = command.spawn()?;
    wait(&child, start)
}

/// Waits for a child started at `start`.
///
/// # Errors
/// This command was interrupted: the child is killed.
pub fn wait(child: &Child, start: Instant) -> io::Result<Ended> {
    loop {
        match wait4(child, 0) {
            Ok(Some((status, usage))) => return Ok(ended(status, &usage, start)),
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {
                if interrupt::requested().is_some() {
                    let _ = kill(pid(child), Signal::SIGKILL);
                    let _ = wait4(child, 0);
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
    }
}

/// Waits for a child for at most `patience`; `None`: it is still running.
///
/// # Errors
/// It has been waited for already.
pub fn wait_for(child: &Child, start: Instant, patience: Duration) -> io::Result<Option<Ended>> {
    let begin = Instant::now();
    loop {
        match wait4(child, libc::WNOHANG) {
            Ok(Some((status, usage))) => return Ok(Some(ended(status, &usage, start))),
            Ok(None) if begin.elapsed() >= patience => return Ok(None),
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            _ => std::thread::sleep(Duration::from_millis(20).min(patience)),
        }
    }
}

/// The child's process id.
#[must_use]
pub fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

fn ended(status: ExitStatus, usage: &libc::rusage, start: Instant) -> Ended {
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ended {
        status,
        cost: Cost {
            wall_seconds: start.elapsed().as_secs_f64(),
            user_seconds: seconds(usage.ru_utime),
            system_seconds: seconds(usage.ru_stime),
            minor_faults: usage.ru_minflt,
            major_faults: usage.ru_majflt,
            max_resident: usage.ru_maxrss.saturating_mul(1024),
        },
    }
}

fn wait4(child: &Child, options: i32) -> io::Result<Option<(ExitStatus, libc::rusage)>> {
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: both pointers are to live variables of the types that wait4(2) writes.
    let found =
        unsafe { libc::wait4(pid(child).as_raw(), &raw mut status, options, usage.as_mut_ptr()) };
    match found {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        // SAFETY: all bytes were zero before the call, which is a valid rusage, and the call
        // wrote nothing but one.
        _ => Ok(Some((ExitStatus::from_raw(status), unsafe { usage.assume_init() }))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_and_cost() {
        let mut command = Command::new("sh");
        command.args(["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; exit 3"]);
        let ended = run(&mut command).unwrap();
        assert_eq!(ended.status.code(), Some(3));
        let Cost { wall_seconds, user_seconds, minor_faults, max_resident, .. } = ended.cost;
        assert!(user_seconds > 0.0 && wall_seconds > 0.0, "{:?}", ended.cost);
        assert!(minor_faults > 10 && max_resident > 100_000, "{:?}", ended.cost);
        let ended = run(Command::new("sh").args(["-c", "kill -9 $$"])).unwrap();
        assert_eq!(ended.status.signal(), Some(9));
        assert!(run(&mut Command::new("/nonexistent")).is_err());
    }

    #[test]
    fn a_limited_wait() {
        let start = Instant::now();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(wait_for(&child, start, Duration::from_millis(30)).unwrap().is_none());
        child.kill().unwrap();
        let ended = wait_for(&child, start, Duration::from_secs(10)).unwrap().unwrap();
        assert_eq!(ended.status.signal(), Some(9));
        // It has been waited for, so nobody else can.
        assert!(child.wait().is_err());
    }
}
