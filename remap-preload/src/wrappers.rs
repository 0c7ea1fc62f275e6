//! The calls by which a program works on its own memory, wrapped: a block of it that lies
//! on the pool goes back to ordinary pages first (see [`pool`]). All other calls go straight
//! on to the next definition, which may be another library's, or to the kernel when there is
//! none.

use core::ffi::{c_int, c_uint, c_void};
use core::mem::transmute;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use core_lib::errno::Errno;
use core_lib::exec::guard::system_call;

use crate::host;
use crate::pool;
use crate::symbols::{self, Function};

/// Addresses of the next definitions; 0 until they are looked up.
static NEXT: [AtomicUsize; symbols::COUNT] = [const { AtomicUsize::new(0) }; symbols::COUNT];

static LOOKED_UP: AtomicBool = AtomicBool::new(false);

/// Looks the next definitions up. May be repeated.
pub(crate) fn look_up() {
    let found = symbols::next();
    NEXT.iter().zip(found).for_each(|(slot, address)| slot.store(address, Ordering::Relaxed));
    LOOKED_UP.store(true, Ordering::Relaxed);
}

/// The next definition of `function`; 0 when there is none.
#[inline]
pub(crate) fn next(function: Function) -> usize {
    let address = NEXT[function as usize].load(Ordering::Relaxed);
    if address != 0 || LOOKED_UP.load(Ordering::Relaxed) { address } else { early(function) }
}

/// The same in another library's constructor, before ours.
#[cold]
fn early(function: Function) -> usize {
    look_up();
    NEXT[function as usize].load(Ordering::Relaxed)
}

/// Sets errno and returns -1.
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: errno of this thread.
    if let Some(slot) = unsafe { host::errno_location().as_mut() } {
        *slot = errno;
    }
    -1
}

/// What a wrapper in libc makes of a system call's result.
fn done(result: Result<usize, Errno>) -> usize {
    result.unwrap_or_else(|errno| {
        fail(errno.0);
        usize::MAX
    })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap)]
fn done_int(result: Result<usize, Errno>) -> c_int {
    done(result) as c_int
}

/// A flag word or descriptor as the kernel expects it.
#[allow(clippy::cast_sign_loss)]
const fn word(value: c_int) -> usize {
    value as isize as usize
}

/// Moves what these bytes touch back to ordinary pages.
#[inline]
fn clear(address: usize, len: usize) -> Result<(), Errno> {
    if pool::is_near(address, len) { pool::give_up(address, len) } else { Ok(()) }
}

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;

/// # Safety
/// As for mmap(2).
#[inline]
unsafe fn map(
    function: Function,
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    if flags & libc::MAP_FIXED != 0
        && let Err(errno) = clear(address.addr(), len)
    {
        fail(errno.0);
        return libc::MAP_FAILED;
    }
    // SAFETY: the next definition of this name has this type; the rest is the caller's.
    unsafe {
        match next(function) {
            0 => {
                let offset = usize::from_ne_bytes(offset.to_ne_bytes());
                let args = [address.addr(), len, word(prot), word(flags), word(fd), offset];
                let at = done(system_call(libc::SYS_mmap, args));
                core::ptr::with_exposed_provenance_mut(at)
            }
            next => transmute::<usize, Mmap>(next)(address, len, prot, flags, fd, offset),
        }
    }
}

#[unsafe(export_name = "mmap")]
unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's arguments.
    unsafe { map(Function::Mmap, address, len, prot, flags, fd, offset) }
}

#[unsafe(export_name = "mmap64")]
unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's arguments.
    unsafe { map(Function::Mmap64, address, len, prot, flags, fd, offset) }
}

/// mremap(2), whose last argument counts with `MREMAP_FIXED` only.
#[unsafe(export_name = "mremap")]
unsafe extern "C" fn mremap(
    address: *mut c_void,
    old_len: usize,
    new_len: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    type Mremap =
        unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;
    let fixed = flags & libc::MREMAP_FIXED != 0;
    // It may also be meant to grow in place, over what follows: the kernel refuses that.
    let cleared = clear(address.addr(), old_len.max(1))
        .and_then(|()| if fixed { clear(to.addr(), new_len) } else { Ok(()) });
    if let Err(errno) = cleared {
        fail(errno.0);
        return libc::MAP_FAILED;
    }
    // SAFETY: the next definition of this name has this type; the rest is the caller's.
    unsafe {
        match next(Function::Mremap) {
            0 => {
                let args = [address.addr(), old_len, new_len, word(flags), to.addr(), 0];
                let at = done(system_call(libc::SYS_mremap, args));
                core::ptr::with_exposed_provenance_mut(at)
            }
            next => transmute::<usize, Mremap>(next)(address, old_len, new_len, flags, to),
        }
    }
}

#[unsafe(export_name = "munmap")]
unsafe extern "C" fn munmap(address: *mut c_void, len: usize) -> c_int {
    type Munmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
    if let Err(errno) = clear(address.addr(), len) {
        return fail(errno.0);
    }
    // SAFETY: as above.
    unsafe {
        match next(Function::Munmap) {
            0 => done_int(system_call(libc::SYS_munmap, [address.addr(), len, 0, 0, 0, 0])),
            next => transmute::<usize, Munmap>(next)(address, len),
        }
    }
}

#[unsafe(export_name = "mprotect")]
unsafe extern "C" fn mprotect(address: *mut c_void, len: usize, prot: c_int) -> c_int {
    type Mprotect = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
    // A protection that is there already changes nothing, for the kernel neither.
    if pool::is_near(address.addr(), len)
        && !pool::covers(address.addr(), len, Some(prot))
        && let Err(errno) = pool::give_up(address.addr(), len)
    {
        return fail(errno.0);
    }
    // SAFETY: as above.
    unsafe {
        match next(Function::Mprotect) {
            0 => {
                let args = [address.addr(), len, word(prot), 0, 0, 0];
                done_int(system_call(libc::SYS_mprotect, args))
            }
            next => transmute::<usize, Mprotect>(next)(address, len, prot),
        }
    }
}

#[unsafe(export_name = "pkey_mprotect")]
unsafe extern "C" fn pkey_mprotect(
    address: *mut c_void,
    len: usize,
    prot: c_int,
    key: c_int,
) -> c_int {
    type PkeyMprotect = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int) -> c_int;
    if let Err(errno) = clear(address.addr(), len) {
        return fail(errno.0);
    }
    // SAFETY: as above.
    unsafe {
        match next(Function::PkeyMprotect) {
            0 => {
                let args = [address.addr(), len, word(prot), word(key), 0, 0];
                done_int(system_call(libc::SYS_pkey_mprotect, args))
            }
            next => transmute::<usize, PkeyMprotect>(next)(address, len, prot, key),
        }
    }
}

/// Whether the advice is about speed, and pages of the pool have what it could give.
const fn is_fulfilled(advice: c_int) -> bool {
    matches!(
        advice,
        libc::MADV_NORMAL
            | libc::MADV_RANDOM
            | libc::MADV_SEQUENTIAL
            | libc::MADV_WILLNEED
            | libc::MADV_HUGEPAGE
            | libc::MADV_COLD
            | libc::MADV_PAGEOUT
            | libc::MADV_POPULATE_READ
            | libc::MADV_POPULATE_WRITE
            | MADV_COLLAPSE
    )
}

/// Linux 6.1.
const MADV_COLLAPSE: c_int = 25;
/// Linux 5.18.
const MADV_DONTNEED_LOCKED: c_int = 24;

#[unsafe(export_name = "madvise")]
unsafe extern "C" fn madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    /// No page is smaller; an address off it is the kernel's to refuse.
    const PAGE: usize = 4096;
    let start = address.addr();
    if pool::is_near(start, len) && start.is_multiple_of(PAGE) {
        let len = len.checked_next_multiple_of(PAGE).unwrap_or(len);
        match advice {
            // As for pages of a file.
            libc::MADV_FREE if pool::first_read_only(start, len).is_some() => {
                return fail(libc::EINVAL);
            }
            // SAFETY: the caller's arguments.
            libc::MADV_DONTNEED | MADV_DONTNEED_LOCKED => unsafe {
                return discard(start, start.saturating_add(len), advice);
            },
            _ if is_fulfilled(advice) && pool::covers(start, len, None) => return 0,
            _ => {}
        }
        if let Err(errno) = pool::give_up(start, len) {
            return fail(errno.0);
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { advise(address, len, advice) }
}

/// The same for what is to be discarded: what is read-only holds what its file holds, and
/// keeps it.
///
/// # Safety
/// As for madvise(2).
unsafe fn discard(start: usize, end: usize, advice: c_int) -> c_int {
    let mut at = start;
    while at < end {
        let (stop, next) = pool::first_read_only(at, end - at).unwrap_or((end, end));
        if stop > at {
            if let Err(errno) = pool::give_up(at, stop - at) {
                return fail(errno.0);
            }
            // SAFETY: a part of the caller's range.
            let done = unsafe { advise(core::ptr::without_provenance_mut(at), stop - at, advice) };
            if done != 0 {
                return done;
            }
        }
        at = next;
    }
    0
}

/// # Safety
/// As for madvise(2).
unsafe fn advise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    type Madvise = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
    // SAFETY: as above.
    unsafe {
        match next(Function::Madvise) {
            0 => {
                let args = [address.addr(), len, word(advice), 0, 0, 0];
                done_int(system_call(libc::SYS_madvise, args))
            }
            next => transmute::<usize, Madvise>(next)(address, len, advice),
        }
    }
}

/// posix_madvise(3): returns an error number. What it advises is about speed alone.
#[unsafe(export_name = "posix_madvise")]
unsafe extern "C" fn posix_madvise(address: *mut c_void, len: usize, advice: c_int) -> c_int {
    type PosixMadvise = unsafe extern "C" fn(*mut c_void, usize, c_int) -> c_int;
    if let Err(errno) = clear(address.addr(), len) {
        return errno.0;
    }
    // SAFETY: as above.
    unsafe {
        match next(Function::PosixMadvise) {
            // Discarding is advice that libc does not pass on.
            0 if advice == libc::POSIX_MADV_DONTNEED => 0,
            0 => {
                let args = [address.addr(), len, word(advice), 0, 0, 0];
                system_call(libc::SYS_madvise, args).err().map_or(0, |errno| errno.0)
            }
            next => transmute::<usize, PosixMadvise>(next)(address, len, advice),
        }
    }
}

#[unsafe(export_name = "mlock")]
unsafe extern "C" fn mlock(address: *const c_void, len: usize) -> c_int {
    type Mlock = unsafe extern "C" fn(*const c_void, usize) -> c_int;
    if let Err(errno) = clear(address.addr(), len) {
        return fail(errno.0);
    }
    // SAFETY: as above.
    unsafe {
        match next(Function::Mlock) {
            0 => done_int(system_call(libc::SYS_mlock, [address.addr(), len, 0, 0, 0, 0])),
            next => transmute::<usize, Mlock>(next)(address, len),
        }
    }
}

#[unsafe(export_name = "mlock2")]
unsafe extern "C" fn mlock2(address: *const c_void, len: usize, flags: c_uint) -> c_int {
    type Mlock2 = unsafe extern "C" fn(*const c_void, usize, c_uint) -> c_int;
    if let Err(errno) = clear(address.addr(), len) {
        return fail(errno.0);
    }
    // SAFETY: as above.
    unsafe {
        match next(Function::Mlock2) {
            0 => {
                let args = [address.addr(), len, flags as usize, 0, 0, 0];
                done_int(system_call(libc::SYS_mlock2, args))
            }
            next => transmute::<usize, Mlock2>(next)(address, len, flags),
        }
    }
}
