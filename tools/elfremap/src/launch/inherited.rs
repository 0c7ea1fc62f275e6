//! What Rust's runtime changes before `main`, put back before another program is
//! executed: it ignores SIGPIPE, and opens `/dev/null` for closed standard
//! descriptors. A program started by us shall find both as our caller left them.
//!
//! # Safety
//! The recording function runs before Rust's runtime, among the constructors. It
//! makes two kinds of system calls through libc and stores two integers; it needs
//! nothing of the runtime.

use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

static SIGPIPE_IGNORED: AtomicBool = AtomicBool::new(false);
/// Bit N is set when descriptor N was closed.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// Run by the loader before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD: extern "C" fn() = record;

extern "C" fn record() {
    for descriptor in 0..3u8 {
        // SAFETY: F_GETFD only asks; a closed descriptor is an error and no harm.
        if unsafe { libc::fcntl(descriptor.into(), libc::F_GETFD) } == -1 {
            CLOSED.fetch_or(1 << descriptor, Relaxed);
        }
    }
    let mut old = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: with a null new action nothing is changed; `old` has room for one.
    if unsafe { libc::sigaction(libc::SIGPIPE, null(), old.as_mut_ptr()) } == 0 {
        // SAFETY: the successful call has filled it.
        let old = unsafe { old.assume_init() };
        SIGPIPE_IGNORED.store(old.sa_sigaction == libc::SIG_IGN, Relaxed);
    }
}

/// Puts the process back into the state in which it was started. Nothing may be
/// printed afterwards.
pub fn restore() {
    if !SIGPIPE_IGNORED.load(Relaxed) {
        // SAFETY: setting the default action involves no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    for descriptor in 0..3u8 {
        if CLOSED.load(Relaxed) & 1 << descriptor != 0 {
            // SAFETY: this is the `/dev/null` of the runtime's own opening; std's
            // handles for it are not used any more (the caller's promise).
            unsafe { libc::close(descriptor.into()) };
        }
    }
}
