//! What the preload's guards do long after the constructor: on the stack and by raw
//! system calls alone, in whatever state the program is.

use elfremap_critical::arch;

use super::discover::map_aligned;
use super::stage::{hugetlb_flags, release};
use super::sys::{self, Fd, MADV_POPULATE_WRITE};
use super::userfault::{
    API_VERSION, Api, Register, UFFDIO_API, UFFDIO_REGISTER, UFFDIO_WRITEPROTECT, WriteProtect,
};
use crate::errno::Errno;
use crate::prot::Prot;
use crate::range::Range;

/// Makes those who write to a range wait, threads and system calls alike: a
/// userfaultfd(2) that write-protects pages of the pool too (Linux 5.19) and catches the
/// kernel's own accesses, which needs CAP_SYS_PTRACE, `vm.unprivileged_userfaultfd=1`, or
/// the right to open `/dev/userfaultfd` (Linux 6.1). One that catches only the program's
/// will not do: its system calls would fail with EFAULT.
#[derive(Debug)]
pub struct Freezer(Fd);

/// `UFFDIO_REGISTER_MODE_WP`.
const REGISTER_WP: u64 = 2;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1;

impl Freezer {
    /// A new one, which holds nothing yet.
    ///
    /// # Errors
    /// The kernel has none that is good enough, or does not grant it.
    pub fn new() -> Result<Self, Errno> {
        const WRITE_FAULTS: u64 = 1;
        const HUGETLB: u64 = 1 << 12;
        /// Linux 6.4: pages that are not there yet as well.
        const UNPOPULATED: u64 = 1 << 13;
        let ask = |features| {
            let fd = sys::userfault_for_all()?;
            let mut api = Api { api: API_VERSION, features, ioctls: 0 };
            // SAFETY: the kernel reads and writes the structure of this request.
            unsafe { fd.ioctl(UFFDIO_API, &mut api)? };
            Ok(Self(fd))
        };
        ask(WRITE_FAULTS | HUGETLB | UNPOPULATED).or_else(|error| match error {
            Errno::EINVAL => ask(WRITE_FAULTS | HUGETLB),
            other => Err(other),
        })
    }

    /// Whether there will be one when it is needed. Not under a seccomp filter: services'
    /// lists of calls often lack this one, and may answer it by a signal.
    ///
    /// # Errors
    /// As for [`Freezer::new`]; `EPERM` under a filter.
    pub fn probe() -> Result<(), Errno> {
        if sys::is_filtered() { Err(Errno(libc::EPERM)) } else { Self::new().map(drop) }
    }

    /// From now on whoever writes to `range` waits, until this value is dropped.
    fn freeze(&self, range: Range) -> Result<(), Errno> {
        let (start, len) = (range.start(), range.len());
        let mut register = Register { start, len, mode: REGISTER_WP, ioctls: 0 };
        let mut protect = WriteProtect { start, len, mode: PROTECT };
        // SAFETY: the kernel reads and writes the structure of each request; content and
        // rights of the memory stay as they are.
        unsafe {
            self.0.ioctl(UFFDIO_REGISTER, &mut register)?;
            self.0.ioctl(UFFDIO_WRITEPROTECT, &mut protect)?;
        }
        Ok(())
    }

    /// Lets them go on. (The kernel does so by itself when the descriptor is closed; before
    /// Linux 6.13 it leaves the marks of protection in place, which then cost a fault.)
    fn thaw(&self, range: Range) {
        let mut protect = WriteProtect { start: range.start(), len: range.len(), mode: 0 };
        // SAFETY: as in `freeze`.
        let _ = unsafe { self.0.ioctl(UFFDIO_WRITEPROTECT, &mut protect) };
    }
}

/// What a range is to lie on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pages {
    /// Ordinary pages, aligned to this many bytes.
    Ordinary(u64),
    /// The same, and transparent huge ones where they are to be had: fewer page faults.
    Transparent(u64),
    /// Pages of the pool of this many bytes.
    Pool(u64),
}

/// Puts a range onto other pages, with the same content and the protection `prot`, in one
/// step for whoever else uses it. On an error the range is as it was.
///
/// # Errors
/// The kernel's: no memory, or an empty pool.
///
/// # Safety
/// `range` is mapped with `prot`, with which it can be read. When it is writable, nothing
/// but the threads of this process writes to it, and none does while no `freezer` is given.
/// The stack that this runs on lies elsewhere.
pub unsafe fn exchange(
    range: Range,
    prot: Prot,
    to: Pages,
    freezer: Option<&Freezer>,
) -> Result<(), Errno> {
    let staged = stage(range.len(), to)?;
    // SAFETY: the staging area is ours, and as long as the range; it replaces the range
    // when it holds every byte, which stays so: nobody writes meanwhile.
    let moved = unsafe {
        freezer.map_or(Ok(()), |freezer| freezer.freeze(range)).and_then(|()| {
            arch::copy(sys::word(staged.start()), sys::word(range.start()), sys::word(range.len()));
            put(staged, range, prot)
        })
    };
    if moved.is_err() {
        if let Some(freezer) = freezer {
            freezer.thaw(range);
        }
        release(staged);
    }
    moved
}

/// Memory of this kind, all of it there.
fn stage(len: u64, to: Pages) -> Result<Range, Errno> {
    let (staged, must_be_there) = match to {
        Pages::Ordinary(align) => (map_aligned(len, align, Prot::RW, 0)?, false),
        Pages::Transparent(align) => (map_transparent(len, align)?, false),
        Pages::Pool(size) => (map_movable(len, size)?, true),
    };
    match sys::advise(staged, MADV_POPULATE_WRITE) {
        // Not known before Linux 5.14: ordinary pages come as they are touched.
        Err(Errno::EINVAL) if !must_be_there => Ok(staged),
        Err(errno) => {
            release(staged);
            Err(errno)
        }
        Ok(()) => Ok(staged),
    }
}

/// Pages of the pool that can be moved, which is found out by moving them once: where the
/// kernel cannot (before Linux 5.16), mremap removes its target before it fails.
fn map_movable(len: u64, size: u64) -> Result<Range, Errno> {
    let target = map_aligned(len, size, Prot::NONE, libc::MAP_NORESERVE)?;
    let moved = sys::map(len, Prot::RW, hugetlb_flags(size)).and_then(|staged| {
        // SAFETY: both were mapped just now, and nobody uses them.
        unsafe { sys::remap(staged, target.start()) }.inspect_err(|_| release(staged))
    });
    moved.inspect_err(|_| release(target)).map(|()| target)
}

fn map_transparent(len: u64, align: u64) -> Result<Range, Errno> {
    let range = map_aligned(len, align, Prot::RW, 0)?;
    let _ = sys::advise(range, libc::MADV_HUGEPAGE);
    Ok(range)
}

/// Drops a filled staging area onto the range that it stands for.
///
/// # Safety
/// As for `exchange`; `staged` is ours.
unsafe fn put(staged: Range, range: Range, prot: Prot) -> Result<(), Errno> {
    // SAFETY: the caller's promise. Where the first try took the range away before it
    // failed, the second one finds its place free.
    unsafe {
        if prot.has(Prot::EXEC) {
            arch::sync_code(sys::word(staged.start()), sys::word(staged.len()));
        }
        if prot != Prot::RW {
            sys::protect(staged, prot)?;
        }
        sys::remap(staged, range.start()).or_else(|_| sys::remap(staged, range.start()))
    }
}

/// Puts a writable range of a forked child onto ordinary pages (or transparent huge ones),
/// with the same content and the protection `prot`. It is read in a way for which a page
/// that the kernel took away (a parent that writes when the pool is empty takes its child's)
/// is an error and no signal. On an error the range is as it was.
///
/// # Errors
/// The kernel's: no memory, or a page is lost.
///
/// # Safety
/// `range` is mapped with `prot`, nothing writes to it meanwhile, and the stack that this
/// runs on lies elsewhere.
pub unsafe fn to_small_pages(range: Range, prot: Prot, align: u64) -> Result<(), Errno> {
    let staged = map_transparent(range.len(), align)?;
    // SAFETY: the staging area is ours; it replaces the range when it holds every byte.
    let moved = unsafe { sys::read_own(staged, range).and_then(|()| put(staged, range, prot)) };
    if moved.is_err() {
        release(staged);
    }
    moved
}

/// Whether this is the process's only thread: `/proc/self/task` has a link for each
/// (proc_task_getattr() in fs/proc/base.c). False when that cannot be read.
#[must_use]
pub fn is_single_threaded() -> bool {
    sys::links(c"/proc/self/task") == Ok(3)
}

/// A pipe to wait at.
#[derive(Clone, Copy, Debug)]
pub struct Pipe([i32; 2]);

impl Pipe {
    /// A new pipe, closed on exec; `None` when there is no descriptor left.
    #[must_use]
    pub fn new() -> Option<Self> {
        sys::pipe().ok().map(Self)
    }

    /// Tells the other side that all went well, and closes this side's ends.
    pub fn tell(self) {
        sys::write_to(self.0[1], b"1");
        self.0.into_iter().for_each(sys::close);
    }

    /// Waits until the other side has told, or is gone: then false.
    #[must_use]
    pub fn wait(self) -> bool {
        sys::close(self.0[1]);
        let told = sys::read_byte(self.0[0]);
        sys::close(self.0[0]);
        told
    }
}

/// Ends the process at once with this status; nothing of the program runs.
pub fn leave(status: u8) -> ! {
    sys::exit_group(status)
}

/// Waits for the end of a child that has nothing to tell. (Another thread of the program's that
/// waits for any child may be told of it first.)
pub fn wait_for_child(pid: libc::pid_t) {
    sys::reap(pid);
}

pub use sys::{futex_wait, futex_wake, thread_id};

/// Makes a system call; what the kernel returns.
///
/// # Safety
/// As for the system call.
pub unsafe fn system_call(number: libc::c_long, args: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { sys::call(number, args) }
}
