//! What is taken from the program's C library, by weak references: a program may have a
//! loader and no C library (Go's position-independent programs), and the loader would not
//! start it for want of a symbol of ours.

use core::ffi::{c_char, c_int, c_ulong, c_void};

type Visit = unsafe extern "C" fn(*mut libc::dl_phdr_info, usize, *mut c_void) -> c_int;

/// The symbols as the loader resolved them.
#[repr(C)]
pub(crate) struct Host {
    dl_iterate_phdr: Option<unsafe extern "C" fn(Option<Visit>, *mut c_void) -> c_int>,
    sbrk: Option<unsafe extern "C" fn(isize) -> *mut c_void>,
    getauxval: Option<unsafe extern "C" fn(c_ulong) -> c_ulong>,
    errno_location: Option<unsafe extern "C" fn() -> *mut c_int>,
    environ: *mut *mut *mut c_char,
}

// SAFETY: written by the loader before anything here runs, and never again.
unsafe impl Sync for Host {}

core::arch::global_asm!(
    ".pushsection .data.rel.ro.elfremap_host,\"aw\"",
    ".balign 8",
    ".weak dl_iterate_phdr",
    ".weak sbrk",
    ".weak getauxval",
    ".weak __errno_location",
    ".weak environ",
    ".hidden elfremap_host",
    ".globl elfremap_host",
    "elfremap_host:",
    ".quad dl_iterate_phdr",
    ".quad sbrk",
    ".quad getauxval",
    ".quad __errno_location",
    ".quad environ",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "elfremap_host"]
    static HOST: Host;
}

fn host() -> &'static Host {
    // SAFETY: the table above has this layout: five addresses of 8 bytes.
    unsafe { &HOST }
}

/// Whether the program has a C library that offers all that is needed.
pub(crate) fn is_complete() -> bool {
    let host = host();
    host.dl_iterate_phdr.is_some()
        && host.sbrk.is_some()
        && host.getauxval.is_some()
        && host.errno_location.is_some()
        && !host.environ.is_null()
}

/// dl_iterate_phdr(3).
///
/// # Safety
/// As for the function itself: `visit` gets `data`.
pub(crate) unsafe fn dl_iterate_phdr(visit: Visit, data: *mut c_void) {
    if let Some(function) = host().dl_iterate_phdr {
        // SAFETY: the caller's promise.
        unsafe { function(Some(visit), data) };
    }
}

/// getauxval(3); 0 for what the kernel has not passed.
pub(crate) fn getauxval(kind: c_ulong) -> c_ulong {
    // SAFETY: getauxval has no precondition.
    host().getauxval.map_or(0, |function| unsafe { function(kind) })
}

/// The calling thread's errno; null without a C library.
pub(crate) fn errno_location() -> *mut c_int {
    // SAFETY: it has no precondition.
    host().errno_location.map_or(core::ptr::null_mut(), |function| unsafe { function() })
}

/// sbrk(3): the break before, or all ones.
///
/// # Safety
/// A negative `delta` gives up memory that nobody uses.
pub(crate) unsafe fn sbrk(delta: isize) -> *mut c_void {
    // SAFETY: the caller's promise.
    host().sbrk.map_or(libc::MAP_FAILED, |function| unsafe { function(delta) })
}

/// Where sbrk is.
pub(crate) fn sbrk_address() -> u64 {
    host().sbrk.map_or(0, |function| (function as *const ()).addr() as u64)
}

/// The variable `environ`'s value; null without a C library.
pub(crate) fn environ() -> *mut *mut c_char {
    // SAFETY: a variable of the C library, or the program's copy of it.
    unsafe { host().environ.as_ref().map_or(core::ptr::null_mut(), |environ| *environ) }
}
