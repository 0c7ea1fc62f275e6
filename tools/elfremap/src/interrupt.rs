//! Ctrl-C and the other polite requests to end, noted instead of obeyed at once, so that
//! a command can put things back first.
//!
//! # Safety
//! The module installs a signal handler, which only stores into an atomic.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicI32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static CAUGHT: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    CAUGHT.store(signal, Ordering::Relaxed);
}

/// From now on SIGINT, SIGTERM and SIGHUP are only noted. They still interrupt system calls:
/// the kernel ends a long allocation of huge pages early, and says how many it made.
///
/// # Errors
/// The kernel refuses a handler, which it does for no valid signal.
pub fn catch() -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler is async-signal-safe, since all it does is to store into a
        // lock-free atomic; nothing in this program relies on the replaced actions.
        unsafe { sigaction(signal, &action) }?;
    }
    Ok(())
}

/// The number of the last signal noted, if any.
#[must_use]
pub fn requested() -> Option<i32> {
    Some(CAUGHT.load(Ordering::Relaxed)).filter(|&signal| signal != 0)
}
