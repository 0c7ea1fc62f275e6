//! The helper: a thread of the target's process that runs no code of the program. It makes
//! the system calls that change the target's memory, one by one as it is told, so that
//! no thread of the program has to.
//!
//! A thread of the program is borrowed once, for the clone(2) that makes the helper. What it runs
//! for that, [`arch::borrow`], stands at the end of the vdso's last page until the helper ends.
//! Should this process be killed, the thread goes on where it was, and the helper ends: behind its
//! system call instruction stands an exit(2).

use std::time::{Duration, Instant};

use elfremap::errno::Errno;
use elfremap::proc::maps;
use elfremap::prot::Prot;

use super::arch::{self, Registers};
use super::halt::{is_resumed, made_again};
use super::memory;
use super::ptrace::{self, Stop};
use super::target::{Target, state};
use super::{failed, refused};

/// System calls made inside of the target.
pub trait Calls {
    /// Makes one call; `arguments` as syscall(2) takes them.
    ///
    /// # Errors
    /// What the kernel returns; ESRCH as well when the process is gone.
    fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, Errno>;

    /// The thread that makes them.
    fn thread(&self) -> i32;

    /// From now on calls are made by the copy of the helper's code at this address of
    /// the target, or (`None`) by the one that it began with.
    fn move_to(&mut self, code: Option<u64>);

    /// Ends the helper.
    fn end(&mut self);
}

/// How long a thread that is told to stop or to make a call may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The helper thread.
#[derive(Debug)]
pub(super) struct Helper {
    tid: i32,
    /// Where it began.
    place: Place,
    /// Its code there, and where it was told to move to.
    born: u64,
    code: Option<u64>,
    registers: Registers,
    gone: bool,
}

impl Helper {
    /// Makes the helper, by the thread `held` when there is one that stands already.
    pub(super) fn create(
        target: &Target,
        held: Option<i32>,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        let place = Place::find(target)?;
        let until = Instant::now() + timeout;
        for attempt in 0.. {
            let thread = match held {
                Some(thread) => thread,
                None => choose(target, attempt, until)?,
            };
            let mut loan = Loan::take(target, thread, held.is_some(), until)?;
            let made = loan.make_helper(target, place);
            loan.give_back(place, matches!(made, Ok(Some(_))));
            if let Some(helper) = made? {
                return Ok(helper);
            }
            // A signal came first. It is delivered, and the next attempt is made.
            if Instant::now() >= until || held.is_some() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(failed(format!(
            "no thread of process {} can be borrowed: signals keep coming",
            target.pid
        )))
    }

    fn expect_call_stop(&mut self) -> Result<(), Errno> {
        loop {
            match ptrace::wait(self.tid, Instant::now() + PATIENCE)? {
                Some((_, Stop::Call)) => return Ok(()),
                Some((_, Stop::Ended)) => {
                    self.gone = true;
                    return Err(Errno(libc::ESRCH));
                }
                // The whole process was stopped or continued.
                Some((_, Stop::Asked)) => ptrace::resume(self.tid, true, 0)?,
                Some((_, Stop::Event(_))) => ptrace::resume(self.tid, true, 0)?,
                // It blocks all signals but SIGSTOP, which is for the whole process.
                Some((_, Stop::Signal(signal))) => ptrace::resume(self.tid, true, signal)?,
                None => {}
            }
        }
    }
}

impl Helper {
    /// Makes a call. That the helper does not stand where it was left is `ESRCH`.
    fn try_call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, Errno> {
        /// A call that was interrupted is made again; signals are blocked, so that not
        /// even two in a row are to be expected.
        const ATTEMPTS: usize = 100;
        let number = u64::try_from(number).map_err(|_| Errno(libc::ENOSYS))?;
        for _ in 0..ATTEMPTS {
            if self.gone {
                return Err(Errno(libc::ESRCH));
            }
            let at = self.code.unwrap_or(self.born);
            ptrace::set_registers(self.tid, &self.registers.with_call(at, number, arguments))?;
            for _entry_and_exit in 0..2 {
                ptrace::resume(self.tid, true, 0)?;
                self.expect_call_stop()?;
            }
            let result = ptrace::registers(self.tid)?.ok_or(Errno(libc::EIO))?.result();
            match i32::try_from(result.wrapping_neg()) {
                Ok(libc::EINTR | 512..=516) => {}
                Ok(errno @ 1..=4095) => return Err(Errno(errno)),
                _ => return Ok(result),
            }
        }
        Err(Errno(libc::EINTR))
    }

    /// A thread that a tracer has stopped leaves that state by a SIGKILL alone (ptrace(2)): its
    /// process ends. It is waited for, so that nobody takes it for one that lives.
    fn expect_end(&mut self) {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until
            && !matches!(ptrace::wait(self.tid, until), Ok(Some((_, Stop::Ended))) | Err(_))
        {
        }
        self.gone = true;
    }
}

impl Calls for Helper {
    fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, Errno> {
        let result = self.try_call(number, arguments);
        // None of the calls that are made here has such an error of its own.
        if result == Err(Errno(libc::ESRCH)) && !self.gone {
            self.expect_end();
        }
        result
    }

    fn thread(&self) -> i32 {
        self.tid
    }

    fn move_to(&mut self, code: Option<u64>) {
        self.code = code;
    }

    fn end(&mut self) {
        if self.gone {
            return;
        }
        self.gone = true;
        // By the vdso's own instruction, so that its code can be taken away.
        let _ = self.prepare_to_end(self.place.instruction);
        let _ = self.place.clear(self.tid);
        // It is not let go before it has ended: while its process is stopped as a whole it
        // would stay.
        let until = Instant::now() + PATIENCE;
        while ptrace::resume(self.tid, false, 0).is_ok() {
            match ptrace::wait(self.tid, until) {
                Ok(Some((_, Stop::Ended)) | None) | Err(_) => return,
                Ok(Some(_)) => {}
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.end();
    }
}

/// A thread of the program, stopped and borrowed.
struct Loan {
    tid: i32,
    /// Whether it stays stopped afterwards.
    held: bool,
    /// What it has in its registers, when they have to be put back.
    own: Registers,
    /// The signal that it is to get.
    signal: i32,
    /// Whether the stop lies where the kernel resumes an interrupted call.
    resumable: bool,
}

impl Loan {
    fn take(target: &Target, tid: i32, held: bool, until: Instant) -> anyhow::Result<Self> {
        let mut signal = 0;
        let was_elsewhere = state(tid) == Some(b'R') || is_resumed(tid);
        if !held {
            let seccomp = if target.filtered { ptrace::SUSPEND_SECCOMP } else { 0 };
            // Not yet told of clones: it would stop in the middle of its own.
            seize(target, tid, ptrace::TELL_CALLS | seccomp)?;
            ptrace::interrupt(tid).map_err(|_| target.gone())?;
            signal = wait_for_stop(target, tid, until)?;
            let options = ptrace::OPTIONS | seccomp;
            ptrace::set_options(tid, options).map_err(|_| target.gone())?;
        }
        let registers = ptrace::registers(tid).map_err(|_| target.gone())?;
        let Some(own) = registers else {
            let _ = ptrace::detach(tid, signal);
            let message = format!("process {} runs 32-bit code", target.pid);
            return Err(refused(message, None));
        };
        let own = made_again(tid, was_elsewhere).filter(|_| signal == 0).unwrap_or(own);
        let own = aborted(tid, own.address()).map_or(own, |abort| own.at(abort));
        Ok(Self { tid, held, own, signal, resumable: true })
    }

    /// `None` when a signal came first.
    fn make_helper(&mut self, target: &Target, place: Place) -> anyhow::Result<Option<Helper>> {
        if self.signal != 0 {
            return Ok(None);
        }
        let (code, helper) = arch::borrow(&self.own);
        ptrace::poke(self.tid, place.room, &code).map_err(|errno| {
            failed(format!("cannot write into process {}: {errno}", target.pid))
        })?;
        match self.clone_thread(place.room) {
            Ok(Some(tid)) => {
                let (born, registers) = (place.room + helper as u64, self.own);
                let mut helper = Helper { tid, place, born, code: None, registers, gone: false };
                helper.begin().map_err(|_| target.gone())?;
                Ok(Some(helper))
            }
            Ok(None) => Ok(None),
            Err(Errno(libc::ESRCH)) => Err(target.gone()),
            Err(errno) => Err(failed(format!(
                "cannot make a thread in process {}: clone failed: {errno}",
                target.pid
            ))),
        }
    }

    fn clone_thread(&mut self, code: u64) -> Result<Option<i32>, Errno> {
        /// Shares all that a thread has to share, and the file system's.
        const FLAGS: i32 = libc::CLONE_VM
            | libc::CLONE_FS
            | libc::CLONE_FILES
            | libc::CLONE_SIGHAND
            | libc::CLONE_THREAD
            | libc::CLONE_SYSVSEM;
        /// `ERESTARTNOINTR`: a signal came first (fork/clone are made again by the kernel).
        const INTERRUPTED: u64 = 513u64.wrapping_neg();
        let number = u64::try_from(libc::SYS_clone).map_err(|_| Errno(libc::ENOSYS))?;
        let flags = u64::from(FLAGS.cast_unsigned());
        let borrowed = self.own.with_call(code, number, [flags, 0, 0, 0, 0, 0]);
        ptrace::set_registers(self.tid, &borrowed)?;
        let mut made = None;
        let mut entered = false;
        loop {
            ptrace::resume(self.tid, true, 0)?;
            let stop = loop {
                if let Some((_, stop)) = ptrace::wait(self.tid, Instant::now() + PATIENCE)? {
                    break stop;
                }
            };
            match stop {
                Stop::Call if !entered => entered = true,
                Stop::Call => {
                    self.resumable = false;
                    let registers = ptrace::registers(self.tid)?.ok_or(Errno(libc::EIO))?;
                    let result = registers.result();
                    // As good as its own, should nothing follow.
                    ptrace::set_registers(self.tid, &self.own.resumed())?;
                    return match i32::try_from(result.wrapping_neg()) {
                        _ if made.is_some() => Ok(made),
                        _ if result == INTERRUPTED => Ok(None),
                        Ok(errno @ 1..=4095) => Err(Errno(errno)),
                        _ => Err(Errno(libc::EIO)),
                    };
                }
                Stop::Event(libc::PTRACE_EVENT_CLONE) => {
                    made = Some(ptrace::new_thread(self.tid)?);
                }
                // A program that has not begun has no handler: what is ignored by default is.
                Stop::Signal(libc::SIGCHLD | libc::SIGCONT | libc::SIGURG | libc::SIGWINCH)
                    if self.held => {}
                Stop::Signal(signal) => {
                    self.signal = signal;
                    return Ok(None);
                }
                Stop::Asked | Stop::Event(_) => {}
                Stop::Ended => return Err(Errno(libc::ESRCH)),
            }
        }
    }

    /// The thread goes on (unless it is to stay stopped) as if nothing had been. Without a helper
    /// the code is taken away.
    fn give_back(mut self, place: Place, has_helper: bool) {
        if !self.resumable {
            // The kernel resumes the call that the thread was in where it looks for signals:
            // there the registers have to be what they were.
            let _ = ptrace::interrupt(self.tid);
            let _ = ptrace::resume(self.tid, false, 0);
            if let Ok(Some((_, stop))) = ptrace::wait(self.tid, Instant::now() + PATIENCE) {
                self.signal = stop.signal();
            }
        }
        let _ = ptrace::set_registers(self.tid, &self.own);
        if !has_helper {
            let _ = place.clear(self.tid);
        }
        if !self.held {
            let _ = ptrace::detach(self.tid, self.signal);
        } else if self.signal != 0
            && let Ok(signal) = nix::sys::signal::Signal::try_from(self.signal)
        {
            // For when it is let go.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.tid), signal);
        }
    }
}

impl Helper {
    /// From its birth to where it waits for the first call.
    fn begin(&mut self) -> Result<(), Errno> {
        while ptrace::wait(self.tid, Instant::now() + PATIENCE)?.is_none() {}
        self.prepare_to_end(self.born)?;
        ptrace::block_signals(self.tid)
    }

    /// Left alone, it ends from now on, by the instruction at `at`.
    fn prepare_to_end(&self, at: u64) -> Result<(), Errno> {
        let exit = u64::try_from(libc::SYS_exit).map_err(|_| Errno(libc::ENOSYS))?;
        ptrace::set_registers(self.tid, &self.registers.with_call(at, exit, [0; 6]))
    }
}

fn seize(target: &Target, tid: i32, options: usize) -> anyhow::Result<()> {
    match ptrace::seize(tid, options) {
        Ok(()) => Ok(()),
        Err(Errno(libc::ESRCH)) => Err(target.gone()),
        Err(Errno(libc::EPERM)) if target.filtered => Err(super::not_permitted(
            format!(
                "process {} is under seccomp, which may forbid what is to be done in it or \
                 end it for that; to suspend its filter takes CAP_SYS_ADMIN",
                target.pid
            ),
            Some(format!("sudo elfremap attach {}", target.pid)),
        )),
        Err(Errno(libc::EPERM)) => Err(target.forbidden()),
        Err(errno) => Err(failed(format!("cannot trace process {}: {errno}", target.pid))),
    }
}

/// Waits for the thread to stop; returns the signal that it is about to get.
fn wait_for_stop(target: &Target, tid: i32, until: Instant) -> anyhow::Result<i32> {
    loop {
        match ptrace::wait(tid, until) {
            Ok(Some((_, Stop::Ended))) | Err(_) => return Err(target.gone()),
            Ok(Some((_, stop))) => return Ok(stop.signal()),
            Ok(None) if super::is_interrupted() => return Err(super::interrupted()),
            Ok(None) if Instant::now() >= until => {
                return Err(super::busy(target, tid, state(tid).map_or('?', char::from)));
            }
            Ok(None) => {}
        }
    }
}

/// The thread that is disturbed least: one that sleeps in a call which the kernel resumes by
/// itself; else one that runs; else one whose call may be made again. Each attempt takes another
/// one: a thread may be busy with signals all the time.
fn choose(target: &Target, attempt: usize, until: Instant) -> anyhow::Result<i32> {
    loop {
        let mut threads: Vec<(u8, i32)> = Vec::new();
        for tid in target.threads() {
            let rank = match state(tid) {
                Some(b'S') if is_resumed(tid) => 0,
                Some(b'R' | b'T') => 1,
                Some(b'S') => 2,
                _ => continue,
            };
            threads.push((rank, tid));
        }
        threads.sort_unstable();
        if !threads.is_empty() {
            return Ok(threads[attempt % threads.len()].1);
        }
        let first = target.threads().first().copied().ok_or_else(|| target.gone())?;
        if super::is_interrupted() {
            return Err(super::interrupted());
        }
        if Instant::now() >= until {
            return Err(super::busy(target, first, state(first).map_or('?', char::from)));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Where a section of code leads that is to be begun anew whenever its thread is disturbed
/// (rseq(2)), when `address` is in it. The kernel forgets the section as soon as it sees the thread
/// run something else.
fn aborted(tid: i32, address: u64) -> Option<u64> {
    /// Of `rseq_cs` in `struct rseq`; of the fields of `struct rseq_cs`.
    const SECTION: u64 = 8;
    const START: u64 = 8;
    let words = |from: u64, buffer: &mut [u8]| memory::read(tid, from, buffer).ok();
    let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).ok();
    let (mut section, mut fields) = ([0; 8], [0; 24]);
    words(ptrace::rseq(tid)?.checked_add(SECTION)?, &mut section)?;
    let section = Some(u64::from_ne_bytes(section)).filter(|&address| address != 0)?;
    words(section.checked_add(START)?, &mut fields)?;
    let (start, length, abort) = (word(&fields[..8])?, word(&fields[8..16])?, word(&fields[16..])?);
    (address.wrapping_sub(start) < length).then_some(abort)
}

/// Memory of the target for the first code of the helper.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Unused bytes, [`arch::ROOM`], of executable memory.
    room: u64,
    /// An instruction for system calls.
    instruction: u64,
}

impl Place {
    /// In the vdso; where there is none, in an executable mapping of the loader or libc. What
    /// a mapping's last page has behind its content is zeros, and stays as it was found
    /// where an earlier command was killed.
    fn find(target: &Target) -> anyhow::Result<Self> {
        let text = target.maps()?;
        let mut mappings: Vec<_> = maps::parse(&text)
            .filter_map(Result::ok)
            .filter(|m| m.prot == Prot::RX && !m.shared)
            .collect();
        mappings.sort_by_key(|m| (m.name != b"[vdso]", m.range.len()));
        let thread = target.threads().first().copied().unwrap_or_default();
        for mapping in mappings {
            let mut code = vec![0; usize::try_from(mapping.range.len()).unwrap_or(0)];
            if memory::read(thread, mapping.range.start(), &mut code).is_err() {
                continue;
            }
            let page = code.len() - code.len().min(4096);
            let slots = code[page..].rchunks_exact(arch::ROOM);
            let free = slots.enumerate().find(|(_, slot)| slot.iter().all(|&b| b == 0));
            if let Some((nth, _)) = free
                && let Some(instruction) = arch::find(&code, mapping.range.start())
            {
                let room = mapping.range.end() - (nth as u64 + 1) * arch::ROOM as u64;
                return Ok(Self { room, instruction });
            }
        }
        Err(failed(format!("process {} has no room for code in its vdso", target.pid)))
    }

    /// Takes away what was written, by a stopped thread.
    fn clear(self, tid: i32) -> Result<(), Errno> {
        ptrace::poke(tid, self.room, &[0; arch::ROOM])
    }
}
