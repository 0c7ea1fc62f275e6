//! ptrace(2) on single threads.
//!
//! # Safety
//! The requests here only concern threads that this process traces; what a thread is made
//! to do is decided by the callers. No request writes into memory of this process other than
//! the buffers passed.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use elfremap::errno::Errno;

use super::arch::Registers;

/// `PTRACE_O_SUSPEND_SECCOMP` (Linux 4.3).
pub(super) const SUSPEND_SECCOMP: usize = 1 << 21;
/// System call stops are told from other traps.
pub(super) const TELL_CALLS: usize = libc::PTRACE_O_TRACESYSGOOD.cast_unsigned() as usize;
/// The same, and new threads are traced from their birth.
pub(super) const OPTIONS: usize = TELL_CALLS | libc::PTRACE_O_TRACECLONE.cast_unsigned() as usize;
/// `PTRACE_EVENT_STOP`.
const EVENT_STOP: i32 = 128;
/// `PTRACE_GETSIGMASK` and `PTRACE_SETSIGMASK` (Linux 3.11).
const SETSIGMASK: libc::c_uint = 0x420b;

/// Why a thread has stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stop {
    /// It was asked to (`PTRACE_INTERRUPT`), was born, or is stopped as its whole process.
    Asked,
    /// Another `PTRACE_EVENT_*`.
    Event(i32),
    /// At the entry to or the exit from a system call.
    Call,
    /// A signal is about to be delivered.
    Signal(i32),
    /// It has ended.
    Ended,
}

impl Stop {
    fn of(status: i32) -> Self {
        if !libc::WIFSTOPPED(status) {
            return Self::Ended;
        }
        match (status >> 16, libc::WSTOPSIG(status)) {
            (0, signal) if signal == libc::SIGTRAP | 0x80 => Self::Call,
            (0, signal) => Self::Signal(signal),
            (EVENT_STOP, _) => Self::Asked,
            (event, _) => Self::Event(event),
        }
    }

    /// The signal that the thread is to get when it is let go.
    pub(super) const fn signal(self) -> i32 {
        match self {
            Self::Signal(signal) => signal,
            _ => 0,
        }
    }
}

fn last_error() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// # Safety
/// As for the request: `data` is a number, or points to what the request reads or writes.
unsafe fn request(
    request: libc::c_uint,
    tid: i32,
    address: usize,
    data: usize,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    let result = unsafe { libc::ptrace(request, tid, address, data) };
    if result == -1 { Err(last_error()) } else { Ok(()) }
}

/// Begins to trace a thread without stopping it.
pub(super) fn seize(tid: i32, options: usize) -> Result<(), Errno> {
    // SAFETY: `data` is a set of flags.
    unsafe { request(libc::PTRACE_SEIZE, tid, 0, options) }
}

/// Sets the options of a stopped thread.
pub(super) fn set_options(tid: i32, options: usize) -> Result<(), Errno> {
    // SAFETY: `data` is a set of flags.
    unsafe { request(libc::PTRACE_SETOPTIONS, tid, 0, options) }
}

/// Asks a thread to stop.
pub(super) fn interrupt(tid: i32) -> Result<(), Errno> {
    // SAFETY: no argument.
    unsafe { request(libc::PTRACE_INTERRUPT, tid, 0, 0) }
}

/// Lets a stopped thread go on, to the next system call when `to_call`.
pub(super) fn resume(tid: i32, to_call: bool, signal: i32) -> Result<(), Errno> {
    let how = if to_call { libc::PTRACE_SYSCALL } else { libc::PTRACE_CONT };
    // SAFETY: `data` is a signal's number.
    unsafe { request(how, tid, 0, signal.cast_unsigned() as usize) }
}

/// Lets a stopped thread go for good.
pub(super) fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    // SAFETY: `data` is a signal's number.
    unsafe { request(libc::PTRACE_DETACH, tid, 0, signal.cast_unsigned() as usize) }
}

/// The number of the thread that a stopped one has just made.
pub(super) fn new_thread(tid: i32) -> Result<i32, Errno> {
    let mut message: libc::c_ulong = 0;
    let data = (&raw mut message).expose_provenance();
    // SAFETY: the kernel writes one word to `message`.
    unsafe { request(libc::PTRACE_GETEVENTMSG, tid, 0, data) }?;
    i32::try_from(message).map_err(|_| Errno(libc::EIO))
}

/// Blocks every signal for a stopped thread.
pub(super) fn block_signals(tid: i32) -> Result<(), Errno> {
    let mask = u64::MAX;
    // SAFETY: the kernel reads the eight bytes of `mask`.
    unsafe { request(SETSIGMASK, tid, 8, (&raw const mask).expose_provenance()) }
}

/// The registers of a stopped thread; `None` when it is in 32-bit mode.
pub(super) fn registers(tid: i32) -> Result<Option<Registers>, Errno> {
    let mut set = std::mem::MaybeUninit::<libc::user_regs_struct>::zeroed();
    let length = size_of::<libc::user_regs_struct>();
    let mut vector = libc::iovec { iov_base: set.as_mut_ptr().cast(), iov_len: length };
    let data = (&raw mut vector).expose_provenance();
    // SAFETY: the kernel writes at most `iov_len` bytes to the structure.
    unsafe { request(libc::PTRACE_GETREGSET, tid, 1, data) }?;
    // SAFETY: it consists of integers, all of which were zero at least.
    Ok(Registers::new(unsafe { set.assume_init() }, vector.iov_len))
}

/// Sets the registers of a stopped thread.
pub(super) fn set_registers(tid: i32, registers: &Registers) -> Result<(), Errno> {
    let mut set = *registers.set();
    let mut vector = libc::iovec { iov_base: (&raw mut set).cast(), iov_len: size_of_val(&set) };
    let data = (&raw mut vector).expose_provenance();
    // SAFETY: the kernel reads `iov_len` bytes of the structure.
    unsafe { request(libc::PTRACE_SETREGSET, tid, 1, data) }
}

/// Writes words into the memory of a stopped thread, whatever its rights there, as a debugger
/// sets a breakpoint.
pub(super) fn poke(tid: i32, address: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut at = usize::try_from(address).map_err(|_| Errno(libc::EFAULT))?;
    for chunk in bytes.chunks(size_of::<usize>()) {
        let mut word = [0; size_of::<usize>()];
        word[..chunk.len()].copy_from_slice(chunk);
        // SAFETY: `data` is the word itself.
        unsafe { request(libc::PTRACE_POKEDATA, tid, at, usize::from_ne_bytes(word)) }?;
        at += size_of::<usize>();
    }
    Ok(())
}

/// Where the thread has its `struct rseq` (rseq(2)); `None` when it has none, or the kernel does
/// not tell (before Linux 5.13).
pub(super) fn rseq(tid: i32) -> Option<u64> {
    /// `PTRACE_GET_RSEQ_CONFIGURATION`, and `struct ptrace_rseq_configuration`.
    const GET: libc::c_uint = 0x420f;
    let mut found = [0u64; 3];
    let size = size_of_val(&found);
    let data = found.as_mut_ptr().expose_provenance();
    // SAFETY: the kernel writes at most `size` bytes, to `found`.
    unsafe { request(GET, tid, size, data) }.ok()?;
    Some(found[0]).filter(|&address| address != 0)
}

fn child_signal() -> libc::sigset_t {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset fills in the whole set, sigaddset then adds a valid signal.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
        set.assume_init()
    }
}

/// Makes SIGCHLD what [`wait`] waits by: blocked, and not ignored as the caller may have
/// left it.
pub(super) fn prepare_to_wait() {
    let set = child_signal();
    // SAFETY: the default action involves no handler; the set outlives the call.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// The next stop of the thread, or of any thread for -1; `None` when there is none until
/// then, or a signal for this process has come.
pub(super) fn wait(tid: i32, until: Instant) -> Result<Option<(i32, Stop)>, Errno> {
    let set = child_signal();
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes one integer to `status`.
        let found = unsafe { libc::waitpid(tid, &raw mut status, libc::WNOHANG | libc::__WALL) };
        match found {
            0 => {}
            -1 => match last_error() {
                Errno(libc::EINTR) => continue,
                Errno(libc::ECHILD) => return Err(Errno(libc::ESRCH)),
                errno => return Err(errno),
            },
            tid => return Ok(Some((tid, Stop::of(status)))),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        // Should the signal go astray, the next look comes soon.
        let left = left.min(Duration::from_millis(20));
        let time = libc::timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        // SAFETY: the set and the time outlive the call; no information is asked for.
        let signal =
            unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), &raw const time) };
        if signal == -1 && last_error() == Errno(libc::EINTR) {
            return Ok(None);
        }
    }
}
