//! The command is killed at each of its steps: the program goes on.

use crate::states::PAGES;
use crate::with_pool;
use anyhow::{Context, Result, bail, ensure};
use elfremap_tests::attach::{Subject, subject, succeed};
use elfremap_tests::lab::wait_until;
use elfremap_tests::library::tool;
use elfremap_tests::run::Run;
use libtest_mimic::Trial;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        with_pool("kills::attach", 2 * PAGES, |_| killed("attach", &["--backend", "thp"])),
        with_pool("kills::detach", 2 * PAGES, |_| killed("detach", &[])),
    ]
}

/// How the command ended.
enum End {
    /// By itself, after so many ptrace calls.
    Itself(usize),
    /// Killed.
    Killed,
}

/// Runs the command up to its ptrace call number `last` (counted from 0) and kills it before
/// that is made.
fn run(command: &str, pid: u32, options: &[&str], last: usize) -> Result<End> {
    let run = Run::new(tool("elfremap")?).args([command, &pid.to_string()]).args(options).traced();
    let running = run.start_waiting()?;
    let tracee = Pid::from_raw(i32::try_from(running.pid())?);
    // The stop after exec.
    waitpid(tracee, None)?;
    ptrace::setoptions(tracee, Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL)?;
    let (mut calls, mut inside, mut signal) = (0, false, None);
    loop {
        ptrace::syscall(tracee, signal.take())?;
        match waitpid(tracee, None)? {
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Ok(End::Itself(calls)),
            WaitStatus::PtraceSyscall(_) => {
                inside = !inside;
                if !inside || entered(&ptrace::getregs(tracee)?) != libc::SYS_ptrace {
                    continue;
                }
                if calls == last {
                    kill(tracee, Signal::SIGKILL)?;
                    waitpid(tracee, None)?;
                    return Ok(End::Killed);
                }
                calls += 1;
            }
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {}
            WaitStatus::Stopped(_, other) => signal = Some(other),
            other => bail!("unexpected stop {other:?}"),
        }
    }
}

/// The number of the system call that a thread has entered.
const fn entered(registers: &libc::user_regs_struct) -> libc::c_long {
    #[cfg(target_arch = "x86_64")]
    return registers.orig_rax.cast_signed();
    #[cfg(target_arch = "aarch64")]
    return registers.regs[8].cast_signed();
}

fn killed(command: &str, options: &[&str]) -> Result<()> {
    let mut step = 0;
    loop {
        // A thread is borrowed that sleeps, or one that runs.
        let threads =
            if step % 2 == 0 { &["caller", "nanosleep", "poll"][..] } else { &["caller"] };
        let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(threads))?;
        if command == "detach" {
            succeed("attach", subject.pid(), &["--backend", "thp"])?;
        }
        let at = || format!("killed before ptrace call {step}");
        match run(command, subject.pid(), options, step).with_context(at)? {
            End::Itself(calls) => {
                ensure!(calls > 100, "only {calls} calls of ptrace were made");
                return subject.finish().map(drop);
            }
            End::Killed => {
                // The helper ends when its call does.
                wait_until(|| Ok(subject.expect_no_trace().is_ok())).with_context(at)?;
                subject.finish().with_context(at)?;
            }
        }
        // All of the beginning; what follows is the same again and again.
        step += if step < 90 { 1 } else { 23 };
    }
}
