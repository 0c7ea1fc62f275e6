//! The fork guard: writable ranges on pages of the pool.
//!
//! After a fork parent and child share a private huge page until one of them writes to
//! it, and the write takes another page of the pool. With none left the kernel ends a
//! child that writes by SIGBUS, and has a parent's write take the page away from a child
//! that only reads. Transparent huge pages need none of this.
//!
//! - The parent has one thread: the child puts these ranges onto ordinary pages before
//!   anything else of it runs, and the parent waits for that; afterwards the parent's pages
//!   are its own again.
//! - The parent has several, which go on writing: it puts the ranges onto ordinary pages
//!   itself before the fork, and takes them back to the pool after it. Nobody waits for
//!   anybody's lock meanwhile; other threads only wait for the copies.
//! - It has several and the kernel does not grant what makes them wait (privileges that
//!   were dropped since the start): as with one thread, and when a page is lost to a thread
//!   that wrote to it while the child was copying, and the pool was empty, the child
//!   leaves at once with status [`LOST`], and the fork fails with ENOMEM: never a signal,
//!   never a wrong byte.
//!
//! fork(3), forkpty(3), daemon(3) come here as fork handlers; `_Fork` and clone(2) without
//! `CLONE_VM` by wrappers. fork(3) has a wrapper too, for its result; the two that call it within
//! libc see a child that left. vfork(2) and posix_spawn(3) share memory and need nothing. A
//! clone(2) made through syscall(2) is not seen.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use core_lib::exec::guard::{
    Pipe, is_single_threaded, leave, thread_id, to_small_pages, wait_for_child,
};

use crate::pool::{self, guards_fork, with_table};
use crate::symbols::Function;
use crate::wrappers::{fail, next};

/// The status of a child that could not be given its memory.
const LOST: u8 = 127;

/// The threads whose child was lost and whose fork has not returned yet; 0 for none. (With no
/// place left the fork succeeds, with a child that has left.)
static LOSERS: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];

fn replace_loser(old: usize, new: usize) -> bool {
    let replace = |slot: &AtomicUsize| {
        slot.compare_exchange(old, new, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    };
    LOSERS.iter().any(replace)
}

/// Whether this thread's last fork lost its child; asks once. Nearly always no fork has, and then
/// no system call is made.
fn has_lost() -> bool {
    if LOSERS.iter().all(|slot| slot.load(Ordering::Relaxed) == 0) {
        return false;
    }
    match thread_id() {
        // A filter forbids to ask.
        0 => false,
        own => replace_loser(own, 0),
    }
}

/// A fork as its caller is to see it: one that lost its child has failed.
fn outcome(pid: libc::pid_t) -> libc::pid_t {
    if pid != 0 && guards_fork() && has_lost() && pid > 0 {
        wait_for_child(pid);
        return fail(libc::ENOMEM);
    }
    pid
}

type Handler = extern "C" fn();
type Register =
    extern "C" fn(Option<Handler>, Option<Handler>, Option<Handler>, *const c_void) -> c_int;

/// Our handlers are registered.
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// Registers our handlers, once; false when libc has no place for them. Before all others,
/// so that `prepare` runs last and the others first, and no handler of anybody's runs while
/// the ranges are not what they should be.
pub(crate) fn register() -> bool {
    if REGISTERED.load(Ordering::Relaxed) {
        return true;
    }
    let register = next(Function::RegisterAtfork);
    if register == 0 {
        return false;
    }
    // SAFETY: this is what libc defines under that name.
    let register = unsafe { core::mem::transmute::<usize, Register>(register) };
    // This library stays loaded: a preload is never unloaded, and a null object means that
    // nobody takes the handlers back.
    let registered = register(Some(prepare), Some(parent), Some(child), ptr::null()) == 0;
    REGISTERED.store(registered, Ordering::Relaxed);
    registered
}

/// What pthread_atfork(3) calls in libc: whoever comes first, we come before.
#[unsafe(export_name = "__register_atfork")]
extern "C" fn register_atfork(
    before: Option<Handler>,
    in_parent: Option<Handler>,
    in_child: Option<Handler>,
    object: *const c_void,
) -> c_int {
    register();
    match next(Function::RegisterAtfork) {
        0 => libc::ENOMEM,
        // SAFETY: as above.
        register => unsafe {
            core::mem::transmute::<usize, Register>(register)(before, in_parent, in_child, object)
        },
    }
}

/// Before the fork, in the thread that forks.
extern "C" fn prepare() {
    if guards_fork() {
        let mask = pool::lock();
        // One within libc, whose caller did not ask.
        has_lost();
        // SAFETY: the lock is held, until `parent` or `child`.
        unsafe {
            with_table(|table| {
                table.mask = mask;
                if table.writable().next().is_none() {
                    return;
                }
                if is_single_threaded() {
                    table.pipe = Pipe::new();
                }
                if table.pipe.is_none() && !table.step_aside() {
                    table.pipe = Pipe::new();
                }
            });
        }
    }
}

/// After the fork, in the parent: waits until the child needs its pages no more. A fork
/// that failed leaves no child, and the pipe ends at once.
extern "C" fn parent() {
    if guards_fork() {
        // SAFETY: the lock is held since `prepare`.
        let mask = unsafe {
            with_table(|table| {
                if table.pipe.take().is_some_and(|pipe| !pipe.wait()) {
                    replace_loser(0, thread_id());
                }
                table.step_back();
                table.mask
            })
        };
        pool::unlock(mask.unwrap_or(0));
    }
}

/// After the fork, in the child.
extern "C" fn child() {
    if guards_fork() {
        // SAFETY: the child has one thread, this one. Each range is mapped with these
        // rights since the constructor; signals are blocked, and we are on our own stack.
        let mask = unsafe {
            with_table(|table| {
                for entry in table.writable().filter(|entry| !entry.is_away) {
                    if to_small_pages(entry.range, entry.prot, entry.size).is_err() {
                        leave(LOST);
                    }
                }
                // Ordinary pages from now on, for its own children too.
                table.forget_writable();
                if let Some(pipe) = table.pipe.take() {
                    pipe.tell();
                }
                table.mask
            })
        };
        pool::unlock(mask.unwrap_or(0));
    }
}

type Fork = extern "C" fn() -> libc::pid_t;

/// fork(3), which runs the handlers.
#[unsafe(export_name = "fork")]
extern "C" fn fork() -> libc::pid_t {
    match next(Function::Fork) {
        0 => fail(libc::ENOSYS),
        // SAFETY: this is what libc defines under that name.
        fork => outcome(unsafe { core::mem::transmute::<usize, Fork>(fork) }()),
    }
}

/// `_Fork` (glibc 2.34), which runs no handlers.
#[unsafe(export_name = "_Fork")]
extern "C" fn fork_only() -> libc::pid_t {
    let fork = next(Function::ForkOnly);
    if fork == 0 {
        return fail(libc::ENOSYS);
    }
    // SAFETY: this is what libc defines under that name.
    let fork = unsafe { core::mem::transmute::<usize, Fork>(fork) };
    prepare();
    let pid = fork();
    if pid == 0 {
        child()
    } else {
        parent()
    }
    outcome(pid)
}

type Start = extern "C" fn(*mut c_void) -> c_int;

/// clone(2) as libc has it. It takes four arguments or up to seven, as the flags say; what
/// was not passed is passed on unread.
#[unsafe(export_name = "clone")]
unsafe extern "C" fn clone(
    start: Option<Start>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent_tid: usize,
    tls: usize,
    child_tid: usize,
) -> c_int {
    type Clone = unsafe extern "C" fn(
        Option<Start>,
        *mut c_void,
        c_int,
        *mut c_void,
        usize,
        usize,
        usize,
    ) -> c_int;
    let next = next(Function::Clone);
    if next == 0 {
        return fail(libc::ENOSYS);
    }
    // SAFETY: this is what libc defines under that name.
    let next = unsafe { core::mem::transmute::<usize, Clone>(next) };
    let (Some(begin), false, true) = (start, flags & libc::CLONE_VM != 0, guards_fork()) else {
        // SAFETY: the caller's arguments.
        return unsafe { next(start, stack, flags, argument, parent_tid, tls, child_tid) };
    };
    let mask = pool::lock();
    // The child may share our descriptors, so nobody waits at a pipe here.
    // SAFETY: the lock is held, until `parent` or `child`.
    let aside = unsafe {
        with_table(|table| {
            table.mask = mask;
            let aside = table.step_aside();
            if !aside {
                table.step_back();
            }
            aside
        })
    };
    if aside != Some(true) {
        pool::unlock(mask);
        return fail(libc::ENOMEM);
    }
    let mut job = Job { begin, argument };
    let job = (&raw mut job).cast();
    // SAFETY: the caller's arguments, but for the function; the child has its own copy of
    // `job`, which is made before this function returns.
    let pid = unsafe { next(Some(begin_child), stack, flags, job, parent_tid, tls, child_tid) };
    parent();
    pid
}

struct Job {
    begin: Start,
    argument: *mut c_void,
}

extern "C" fn begin_child(job: *mut c_void) -> c_int {
    // SAFETY: `clone` passes its `Job`, of which this is the child's copy.
    let Job { begin, argument } = unsafe { job.cast::<Job>().read() };
    child();
    begin(argument)
}
