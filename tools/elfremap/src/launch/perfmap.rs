//! Writing the perf map of a program that this process is about to become: a helper
//! waits until the preload has done its work in there.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio, exit};
use std::thread::sleep;
use std::time::{Duration, Instant};

use elfremap::proc::smaps;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, setsid};

use crate::process::{self, Cache, Process};

/// How long the helper waits for the program to be remapped.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// Leaves a helper behind that runs `elfremap perfmap` on this process once it has
/// become a remapped program. The helper is no child of this process: a program must
/// not find children that it did not start.
///
/// # Errors
/// fork(2) failed.
pub fn write_later() -> nix::Result<()> {
    let pid = std::process::id();
    let command = env::current_exe().unwrap_or_else(|_| OsString::from("elfremap").into());
    // SAFETY: this process has one thread, so that the child may do anything.
    match unsafe { fork()? } {
        ForkResult::Parent { child } => waitpid(child, None).map(drop),
        ForkResult::Child => {
            let _ = setsid();
            // SAFETY: as above.
            let result = unsafe { fork() };
            if !matches!(result, Ok(ForkResult::Child)) {
                exit(i32::from(result.is_err()));
            }
            if !wait_for(pid) {
                exit(1);
            }
            let error = Command::new(command)
                .arg("perfmap")
                .arg(pid.to_string())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .exec();
            eprintln!("elfremap: warning: cannot write the perf map: {error}");
            exit(1);
        }
    }
}

/// Waits until the preload in the process has reported; false when that does not
/// happen (it is a static program, or has ended).
fn wait_for(pid: u32) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        sleep(PAUSE);
        let Ok(process) = Process::by_pid(pid) else { return false };
        let Ok(text) = process.smaps() else { return false };
        let Ok(entries) = smaps::parse(&text).collect::<Result<Vec<_>, _>>() else { continue };
        let objects = process::objects(&process, &entries, &mut Cache::default());
        let report = process::read_report(&process, &objects);
        if report.is_some_and(|report| report.lines.is_some()) {
            return true;
        }
    }
    false
}
