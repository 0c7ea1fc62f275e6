//! The command is killed at each of its steps: the program goes on, but for the moments that
//! docs/attach.md names.

use crate::registers::{entered, next};
use crate::states::PAGES;
use crate::with_pool;
use anyhow::{Context, Result, bail, ensure};
use elfremap::proc::maps;
use elfremap::range::Range;
use elfremap_tests::attach::{Subject, subject, succeed};
use elfremap_tests::library::tool;
use elfremap_tests::run::Run;
use libtest_mimic::Trial;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::Duration;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        with_pool("kills::attach", 2 * PAGES, |_| killed("attach", &["--backend", "thp"])),
        with_pool("kills::detach", 2 * PAGES, |_| killed("detach", &[])),
    ]
}

/// What a kill of the command could do to the program, by the registers that it has set.
#[derive(Default, Debug)]
struct Danger {
    /// The thread that is borrowed, while it has the registers of the call that makes the
    /// helper.
    borrowed: Option<u64>,
    /// The helper is made, and has no registers of its own.
    newborn: bool,
    /// The helper makes a call by the kernel's instruction, behind which it has nothing to do.
    adrift: bool,
}

impl Danger {
    fn is_there(&self) -> bool {
        self.borrowed.is_some() || self.newborn || self.adrift
    }

    /// The command sets the registers of a thread. `vdso`: where the kernel's instruction is.
    fn note(&mut self, thread: u64, registers: &libc::user_regs_struct, vdso: Range) {
        let (call, instruction) = next(registers);
        if call == libc::SYS_clone && vdso.contains(instruction) {
            self.borrowed = Some(thread);
        } else if self.borrowed == Some(thread) {
            self.borrowed = None;
            self.newborn = true;
        } else if vdso.contains(instruction) {
            self.newborn = false;
            self.adrift = call != libc::SYS_exit;
        } else {
            self.newborn = false;
            self.adrift = false;
        }
    }
}

/// How the command ended.
enum End {
    /// By itself, after so many ptrace calls.
    Itself(usize),
    /// Killed.
    Killed(Danger),
}

/// Runs the command up to its ptrace call number `last` (counted from 0) and kills it before
/// that is made.
fn run(command: &str, pid: u32, options: &[&str], last: usize) -> Result<End> {
    /// `PTRACE_SETREGSET`.
    const SETREGSET: u64 = 0x4205;
    let text = std::fs::read(format!("/proc/{pid}/maps"))?;
    let vdso = maps::parse(&text).filter_map(Result::ok).find(|m| m.name == b"[vdso]");
    let vdso = vdso.context("no vdso")?.range;
    let run = Run::new(tool("elfremap")?).args([command, &pid.to_string()]).args(options).traced();
    let running = run.start_waiting()?;
    let tracee = Pid::from_raw(i32::try_from(running.pid())?);
    // The stop after exec.
    waitpid(tracee, None)?;
    ptrace::setoptions(tracee, Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL)?;
    let memory = File::open(format!("/proc/{tracee}/mem"))?;
    let mut danger = Danger::default();
    let (mut calls, mut inside, mut signal) = (0, false, None);
    loop {
        ptrace::syscall(tracee, signal.take())?;
        match waitpid(tracee, None)? {
            WaitStatus::Exited(..) | WaitStatus::Signaled(..) => return Ok(End::Itself(calls)),
            WaitStatus::PtraceSyscall(_) => {
                inside = !inside;
                let (call, [request, thread, _, data]) = entered(&ptrace::getregs(tracee)?);
                if !inside || call != libc::SYS_ptrace {
                    continue;
                }
                if calls == last {
                    kill(tracee, Signal::SIGKILL)?;
                    waitpid(tracee, None)?;
                    return Ok(End::Killed(danger));
                }
                calls += 1;
                if request == SETREGSET {
                    danger.note(thread, &registers(&memory, data)?, vdso);
                }
            }
            WaitStatus::Stopped(_, Signal::SIGTRAP) => {}
            WaitStatus::Stopped(_, other) => signal = Some(other),
            other => bail!("unexpected stop {other:?}"),
        }
    }
}

/// The registers that an iovec at `vector` in the command's memory points to.
fn registers(memory: &File, vector: u64) -> Result<libc::user_regs_struct> {
    let mut base = [0; 8];
    memory.read_exact_at(&mut base, vector)?;
    let mut bytes = [0u8; size_of::<libc::user_regs_struct>()];
    memory.read_exact_at(&mut bytes, u64::from_ne_bytes(base))?;
    // SAFETY: the structure consists of integers, for which all bytes are valid, and is as
    // long as the array.
    Ok(unsafe {
        std::mem::transmute::<[u8; size_of::<libc::user_regs_struct>()], libc::user_regs_struct>(
            bytes,
        )
    })
}

fn killed(command: &str, options: &[&str]) -> Result<()> {
    let (mut unharmed, mut dangerous, mut step) = (0, 0, 0);
    loop {
        let subject =
            Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "nanosleep", "poll"]))?;
        if command == "detach" {
            succeed("attach", subject.pid(), &["--backend", "thp"])?;
        }
        match run(command, subject.pid(), options, step)? {
            End::Itself(calls) => {
                ensure!(calls > 100, "only {calls} calls of ptrace were made");
                subject.finish()?;
                break;
            }
            End::Killed(danger) if danger.is_there() => {
                // Nothing is promised for these moments.
                dangerous += 1;
                drop(subject);
            }
            End::Killed(_) => {
                unharmed += 1;
                sleep(Duration::from_millis(20));
                let at = || format!("killed before ptrace call {step}");
                subject.expect_no_trace().with_context(at)?;
                subject.finish().with_context(at)?;
            }
        }
        // All of the beginning; what follows is the same again and again.
        step += if step < 70 { 1 } else { 23 };
    }
    ensure!(unharmed > 40 && dangerous < unharmed, "{unharmed} unharmed, {dangerous} dangerous");
    Ok(())
}
