//! The one place for ordinary system calls: raw, so that neither a libc wrapper that
//! the program overrides nor errno is touched.
//!
//! # Safety
//! The functions that only ask the kernel for something new, or read, are safe. Those
//! that change existing mappings or write through an address are unsafe.

use alloc::vec::Vec;
use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use elfremap_critical::arch;

use super::numa::{Binding, Mask};
use crate::errno::Errno;
use crate::hugepage::Files;
use crate::prot::Prot;
use crate::range::Range;

/// `MADV_POPULATE_READ`, Linux 5.14 (madvise(2)).
pub(super) const MADV_POPULATE_READ: i32 = 22;
/// `MADV_POPULATE_WRITE`, Linux 5.14.
pub(super) const MADV_POPULATE_WRITE: i32 = 23;
/// `MADV_COLLAPSE`, Linux 6.1.
pub(super) const MADV_COLLAPSE: i32 = 25;

/// An address or length as the processor's register holds it. Addresses of the
/// running process fit by nature.
#[allow(clippy::cast_possible_truncation)]
pub(super) const fn word(value: u64) -> usize {
    value as usize
}

/// A flag word or descriptor, sign-extended as the kernel expects it.
#[allow(clippy::cast_sign_loss)]
pub(super) const fn flag(value: i32) -> usize {
    value as isize as usize
}

/// A system call number of `libc`, which is never negative.
#[allow(clippy::cast_sign_loss, clippy::cast_possible_truncation)]
pub(super) const fn number(value: libc::c_long) -> usize {
    value as usize
}

/// # Safety
/// As for the system call.
pub(super) unsafe fn call(nr: libc::c_long, args: [usize; 6]) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    let value = unsafe { arch::syscall(number(nr), args) };
    let error = value.wrapping_neg();
    match i32::try_from(error) {
        Ok(error @ 1..=4095) => Err(Errno(error)),
        _ => Ok(value),
    }
}

/// The descriptors that are open, each plus one, for [`close_leftovers`]; 0 is free.
static OPEN: [AtomicI32; 8] = [const { AtomicI32::new(0) }; 8];

/// Closes what a panic, which unwinds nothing, has left open.
pub fn close_leftovers() {
    for slot in &OPEN {
        let open = slot.swap(0, Ordering::Relaxed);
        if open != 0 {
            close(open - 1);
        }
    }
}

pub(super) fn close(fd: i32) {
    // SAFETY: callers pass a descriptor of ours that is not used again.
    let _ = unsafe { call(libc::SYS_close, [flag(fd), 0, 0, 0, 0, 0]) };
}

/// A file descriptor, closed when dropped.
#[derive(Debug)]
pub struct Fd(i32);

impl Fd {
    /// Opens a file; `flags` as in open(2), `O_CLOEXEC` is added.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open(path: &CStr, flags: i32, mode: u32) -> Result<Self, Errno> {
        let flags = flags | libc::O_CLOEXEC;
        // SAFETY: the path is a C string that outlives the call.
        let fd = unsafe {
            call(
                libc::SYS_openat,
                [flag(libc::AT_FDCWD), path.as_ptr().addr(), flag(flags), mode as usize, 0, 0],
            )?
        };
        Self::from_raw(fd)
    }

    fn from_raw(fd: usize) -> Result<Self, Errno> {
        let fd = i32::try_from(fd).map_err(|_| Errno(libc::EBADF))?;
        if let Some(free) = OPEN.iter().find(|slot| slot.load(Ordering::Relaxed) == 0) {
            free.store(fd + 1, Ordering::Relaxed);
        }
        Ok(Self(fd))
    }

    /// A file of `len` bytes in memory, on pages of the pool of `size` bytes
    /// (memfd_create(2), Linux 4.14).
    pub(super) fn in_pool(len: u64, size: u64) -> Result<Self, Errno> {
        /// Linux 6.3; `vm.memfd_noexec=2` asks for it. It is about execve(2) alone.
        const MFD_NOEXEC_SEAL: u32 = 8;
        let flags =
            libc::MFD_CLOEXEC | libc::MFD_HUGETLB | (size.trailing_zeros() << libc::MFD_HUGE_SHIFT);
        let name = c"elfremap".as_ptr().addr();
        let create = |flags: u32| {
            // SAFETY: the name is a C string.
            unsafe { call(libc::SYS_memfd_create, [name, flags as usize, 0, 0, 0, 0]) }
        };
        let fd = create(flags | MFD_NOEXEC_SEAL).or_else(|errno| match errno {
            Errno::EINVAL => create(flags),
            other => Err(other),
        })?;
        let fd = Self::from_raw(fd)?;
        // SAFETY: the descriptor is ours.
        unsafe { call(libc::SYS_ftruncate, [flag(fd.0), word(len), 0, 0, 0, 0])? };
        Ok(fd)
    }

    /// A new mapping of the file's first `len` bytes at an address the kernel chooses;
    /// `flags` must not hold `MAP_FIXED`.
    pub(super) fn map(&self, len: u64, prot: Prot, flags: i32) -> Result<Range, Errno> {
        debug_assert!(flags & libc::MAP_FIXED == 0);
        let args = [0, word(len), flag(prot.to_raw()), flag(flags), flag(self.0), 0];
        // SAFETY: without MAP_FIXED nothing that exists is changed.
        let start = unsafe { call(libc::SYS_mmap, args)? };
        Range::with_len(start as u64, len).ok_or(Errno::ENOMEM)
    }

    /// Opens a file for reading.
    pub(super) fn read_only(path: &CStr) -> Result<Self, Errno> {
        Self::open(path, libc::O_RDONLY, 0)
    }

    /// Its number, for as long as this value lives.
    pub(super) const fn raw(&self) -> i32 {
        self.0
    }

    /// Reads at the current position into `buffer`.
    pub(super) fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let (address, len) = (buffer.as_mut_ptr().addr(), buffer.len());
        // SAFETY: the buffer is ours to write for its length.
        retry(|| unsafe { call(libc::SYS_read, [flag(self.0), address, len, 0, 0, 0]) })
    }

    /// Reads at `offset` into `buffer`; less than its length only at the end of the file.
    pub(super) fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
        let range = Range::with_len(buffer.as_mut_ptr().addr() as u64, buffer.len() as u64);
        // SAFETY: the buffer is ours to write for its length.
        unsafe { self.read_at_address(range.unwrap_or_default(), offset) }
    }

    /// Reads at `offset` into memory; less than its length only at the end of the file.
    ///
    /// # Safety
    /// `to` is mapped, writable and ours.
    pub(super) unsafe fn read_at_address(&self, to: Range, offset: u64) -> Result<usize, Errno> {
        let mut done = 0;
        while done < word(to.len()) {
            let (address, left) = (word(to.start()) + done, word(to.len()) - done);
            let at = word(offset) + done;
            // SAFETY: by the caller's promise the rest of the range is writable.
            let n = retry(|| unsafe {
                call(libc::SYS_pread64, [flag(self.0), address, left, at, 0, 0])
            })?;
            if n == 0 {
                break;
            }
            done += n;
        }
        Ok(done)
    }

    /// Device (major, minor) and inode.
    pub(super) fn identity(&self) -> Result<((u32, u32), u64), Errno> {
        let mut stat = core::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: the kernel fills in a `struct stat`, for which there is room; all
        // its fields are integers, so zeros are valid too.
        let stat = unsafe {
            call(libc::SYS_fstat, [flag(self.0), stat.as_mut_ptr().addr(), 0, 0, 0, 0])?;
            stat.assume_init()
        };
        Ok(((libc::major(stat.st_dev), libc::minor(stat.st_dev)), stat.st_ino))
    }

    /// Writes `bytes`, in one call; what a closed or full descriptor refuses is lost.
    pub fn write(&self, bytes: &[u8]) {
        write_to(self.0, bytes);
    }

    /// ioctl(2) with a pointer to `argument`.
    ///
    /// # Safety
    /// `T` is the structure of the request, and the kernel writes only into it and
    /// into memory it points to.
    pub(super) unsafe fn ioctl<T>(&self, request: usize, argument: &mut T) -> Result<usize, Errno> {
        let address = core::ptr::from_mut(argument).addr();
        // SAFETY: the caller's promise.
        unsafe { call(libc::SYS_ioctl, [flag(self.0), request, address, 0, 0, 0]) }
    }

    /// The names in the directory, in one buffer each; linux_dirent64 of getdents64(2).
    fn list(&self, each: &mut dyn FnMut(&[u8])) -> Result<(), Errno> {
        /// Offsets of `d_reclen` and `d_name`.
        const RECORD: usize = 16;
        const NAME: usize = 19;
        let mut buffer = [0u8; 2048];
        loop {
            let (address, len) = (buffer.as_mut_ptr().addr(), buffer.len());
            // SAFETY: the buffer is ours to write for its length.
            let n = unsafe { call(libc::SYS_getdents64, [flag(self.0), address, len, 0, 0, 0])? };
            if n == 0 {
                return Ok(());
            }
            let mut rest = buffer.get(..n).unwrap_or_default();
            while let Some(&[low, high]) = rest.get(RECORD..RECORD + 2) {
                let len = usize::from(u16::from_ne_bytes([low, high]));
                let name = rest.get(NAME..len).unwrap_or_default();
                each(name.split(|&b| b == 0).next().unwrap_or_default());
                rest = rest.get(len.max(NAME)..).unwrap_or_default();
            }
        }
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let own = self.0 + 1;
        if let Some(slot) = OPEN.iter().find(|slot| slot.load(Ordering::Relaxed) == own) {
            slot.store(0, Ordering::Relaxed);
        }
        close(self.0);
    }
}

fn retry(mut f: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Errno> {
    loop {
        match f() {
            Err(Errno(libc::EINTR)) => {}
            other => return other,
        }
    }
}

/// Writes to a descriptor of the process, in one call. Errors are ignored; the signal
/// that goes with two of them (a broken pipe, a file at RLIMIT_FSIZE) is taken back, so
/// signals must be blocked.
pub fn write_to(fd: i32, bytes: &[u8]) {
    let pending = pending_signals();
    // SAFETY: the bytes are readable for their length.
    let written = retry(|| unsafe {
        call(libc::SYS_write, [flag(fd), bytes.as_ptr().addr(), bytes.len(), 0, 0, 0])
    });
    let signal = match written {
        Err(Errno(libc::EPIPE)) => libc::SIGPIPE,
        Err(Errno(libc::EFBIG)) => libc::SIGXFSZ,
        _ => return,
    };
    let set = 1u64 << (signal - 1);
    if pending & set == 0 {
        let at_once = [0u64; 2];
        let (set, at_once) = ((&raw const set).addr(), (&raw const at_once).addr());
        // SAFETY: the kernel reads a signal set of 8 bytes and a `struct timespec`.
        let _ = unsafe { call(libc::SYS_rt_sigtimedwait, [set, 0, at_once, 8, 0, 0]) };
    }
}

fn pending_signals() -> u64 {
    let mut set = 0u64;
    // SAFETY: the kernel writes its 8-byte signal set.
    let _ = unsafe { call(libc::SYS_rt_sigpending, [(&raw mut set).addr(), 8, 0, 0, 0, 0]) };
    set
}

/// Appends the whole content of a file to `out`.
pub(super) fn read_file(path: &CStr, out: &mut Vec<u8>) -> Result<(), Errno> {
    let fd = Fd::read_only(path)?;
    // On the stack: most files are short, and the allocator takes nothing back.
    let mut chunk = [0u8; 4096];
    loop {
        let n = fd.read(&mut chunk)?;
        if n == 0 {
            return Ok(());
        }
        out.extend_from_slice(chunk.get(..n).unwrap_or_default());
    }
}

/// The running machine's sysfs and `/proc`.
#[derive(Clone, Copy, Debug)]
pub struct Machine;

impl Machine {
    fn with_path<T>(path: &str, f: impl FnOnce(&CStr) -> Result<T, Errno>) -> Result<T, Errno> {
        let mut bytes = Vec::with_capacity(path.len() + 1);
        bytes.extend_from_slice(path.as_bytes());
        bytes.push(0);
        f(CStr::from_bytes_with_nul(&bytes).map_err(|_| Errno(libc::ENOENT))?)
    }

    fn found(result: Result<(), Errno>) -> Result<bool, Errno> {
        match result {
            Ok(()) => Ok(true),
            Err(Errno(libc::ENOENT)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Files for Machine {
    type Error = Errno;

    fn read(&self, path: &str, out: &mut Vec<u8>) -> Result<bool, Errno> {
        Self::found(Self::with_path(path, |path| read_file(path, out)))
    }

    fn list(&self, path: &str, each: &mut dyn FnMut(&[u8])) -> Result<bool, Errno> {
        let list = |path: &CStr| Fd::open(path, libc::O_RDONLY | libc::O_DIRECTORY, 0)?.list(each);
        Self::found(Self::with_path(path, list))
    }
}

/// A new mapping at an address the kernel chooses; `flags` must not hold `MAP_FIXED`.
pub(super) fn map(len: u64, prot: Prot, flags: i32) -> Result<Range, Errno> {
    debug_assert!(flags & libc::MAP_FIXED == 0);
    // SAFETY: without MAP_FIXED nothing that exists is changed.
    unsafe { map_at(0, len, prot, flags) }
}

/// New private memory of `len` bytes, readable and writable.
///
/// # Errors
/// The kernel's.
pub fn map_private(len: usize) -> Result<*mut u8, Errno> {
    let range = map(len as u64, Prot::RW, 0)?;
    Ok(core::ptr::with_exposed_provenance_mut(word(range.start())))
}

/// Gives memory from [`map_private`] back.
///
/// # Safety
/// `start` and `len` are what was mapped, and nobody uses it any more.
pub unsafe fn unmap_private(start: *mut u8, len: usize) {
    let range = Range::with_len(start.expose_provenance() as u64, len as u64);
    // SAFETY: the caller's promise.
    let _ = unsafe { unmap(range.unwrap_or_default()) };
}

/// A userfaultfd(2) that catches the kernel's own accesses too: by the system call, else
/// from `/dev/userfaultfd` (Linux 6.1).
pub(super) fn userfault_for_all() -> Result<Fd, Errno> {
    /// `USERFAULTFD_IOC_NEW` of linux/userfaultfd.h.
    const NEW: usize = 0xaa00;
    let flags = flag(libc::O_CLOEXEC | libc::O_NONBLOCK);
    // SAFETY: both calls make a new descriptor and touch no memory.
    let fd = unsafe {
        call(libc::SYS_userfaultfd, [flags, 0, 0, 0, 0, 0]).or_else(|errno| {
            let device = Fd::open(c"/dev/userfaultfd", libc::O_RDWR, 0).map_err(|_| errno)?;
            call(libc::SYS_ioctl, [flag(device.0), NEW, flags, 0, 0, 0])
        })?
    };
    Fd::from_raw(fd)
}

/// Major and minor number of the kernel (uname(2)). Newer ones may say that they are 2.6
/// (personality `UNAME26`), never the other way round.
pub(super) fn kernel_version() -> Option<(u32, u32)> {
    let mut name = core::mem::MaybeUninit::<libc::utsname>::zeroed();
    // SAFETY: the kernel fills in a `struct utsname`, for which there is room; all its
    // fields are bytes, so zeros are valid too.
    let name = unsafe {
        call(libc::SYS_uname, [name.as_mut_ptr().addr(), 0, 0, 0, 0, 0]).ok()?;
        name.assume_init()
    };
    // A C string's characters are signed on some processors.
    let release = name.release.map(|c| c.to_ne_bytes()[0]);
    let mut numbers = release.split(|byte| !byte.is_ascii_digit()).map(|digits| {
        digits
            .iter()
            .fold(0u32, |sum, digit| sum.saturating_mul(10).saturating_add(u32::from(digit - b'0')))
    });
    Some((numbers.next()?, numbers.next()?))
}

/// Whether a seccomp filter looks at the process's calls (`Seccomp` in
/// proc_pid_status(5), Linux 3.8); true when unknown.
pub(super) fn is_filtered() -> bool {
    /// 0 when not looked at yet, 1 for no, 2 for yes.
    static KNOWN: AtomicU8 = AtomicU8::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let is = look_for_filter();
            KNOWN.store(1 + u8::from(is), Ordering::Relaxed);
            is
        }
        known => known == 2,
    }
}

fn look_for_filter() -> bool {
    let mut text = Vec::new();
    let read = read_file(c"/proc/self/status", &mut text);
    let mut lines = text.split(|&b| b == b'\n');
    let value = lines.find_map(|line| line.strip_prefix(b"Seccomp:"));
    read.is_err() || value.is_none_or(|value| value.trim_ascii() != b"0")
}

/// Claims `range`, which must be free, with memory that cannot be accessed.
pub(super) fn claim(range: Range) -> Result<(), Errno> {
    let flags = libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE replaces nothing.
    let got = unsafe { map_at(range.start(), range.len(), Prot::NONE, flags)? };
    if got == range {
        return Ok(());
    }
    // Before Linux 4.17 the flag is unknown and the address a mere hint.
    // SAFETY: the mapping was made just now, elsewhere, and is not used.
    unsafe { unmap(got)? };
    Err(Errno(libc::EEXIST))
}

/// # Safety
/// With `MAP_FIXED` in `flags`, what is mapped at `address` may go.
unsafe fn map_at(address: u64, len: u64, prot: Prot, flags: i32) -> Result<Range, Errno> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
    // SAFETY: the caller's promise.
    let start = unsafe {
        call(
            libc::SYS_mmap,
            [word(address), word(len), flag(prot.to_raw()), flag(flags), flag(-1), 0],
        )?
    };
    Range::with_len(start as u64, len).ok_or(Errno::ENOMEM)
}

/// # Safety
/// Nobody uses the memory any more.
pub(super) unsafe fn unmap(range: Range) -> Result<(), Errno> {
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_munmap, [word(range.start()), word(range.len()), 0, 0, 0, 0])? };
    Ok(())
}

/// # Safety
/// Nobody relies on a right that goes.
pub(super) unsafe fn protect(range: Range, prot: Prot) -> Result<(), Errno> {
    let args = [word(range.start()), word(range.len()), flag(prot.to_raw()), 0, 0, 0];
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_mprotect, args)? };
    Ok(())
}

/// Advice that changes no content: populate, collapse, huge.
pub(super) fn advise(range: Range, advice: i32) -> Result<(), Errno> {
    debug_assert!(
        [MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE, libc::MADV_HUGEPAGE]
            .contains(&advice)
    );
    let args = [word(range.start()), word(range.len()), flag(advice), 0, 0, 0];
    // SAFETY: none of these pieces of advice changes what the memory holds.
    retry(|| unsafe { call(libc::SYS_madvise, args) })?;
    Ok(())
}

/// An error unless every page of `range` can be read: no signal for a page without the
/// right to be read, a guard page, or one beyond the end of its file.
pub(super) fn require_readable(range: Range) -> Result<(), Errno> {
    match advise(range, MADV_POPULATE_READ) {
        // Not known before Linux 5.14.
        Err(Errno::EINVAL) => probe_readable(range),
        other => other,
    }
}

/// The same by process_vm_readv(2) on ourselves, of the first byte of every page.
fn probe_readable(range: Range) -> Result<(), Errno> {
    /// No page is smaller.
    const STRIDE: u64 = 4096;
    /// At most `IOV_MAX` pieces in a call.
    const PIECES: usize = 256;
    let mut bytes = [0u8; PIECES];
    let pid = process_id() as usize;
    let mut remote = [[0usize; 2]; PIECES];
    let mut at = range.start();
    while at < range.end() {
        let mut count = 0;
        for piece in &mut remote {
            if at < range.end() {
                *piece = [word(at), 1];
                count += 1;
                at = at.saturating_add(STRIDE);
            }
        }
        let local = [bytes.as_mut_ptr().addr(), count];
        let (local, remote) = ((&raw const local).addr(), (&raw const remote).addr());
        // SAFETY: `struct iovec` is an address and a length; the local one is a buffer of
        // ours, long enough for one byte of each piece.
        let read = unsafe { call(libc::SYS_process_vm_readv, [pid, local, 1, remote, count, 0])? };
        if read < count {
            return Err(Errno(libc::EFAULT));
        }
    }
    Ok(())
}

/// Sets the memory policy of a range: where pages are taken that are not there yet.
pub(super) fn bind(range: Range, binding: &Binding) -> Result<(), Errno> {
    // SAFETY: a policy changes no content; the kernel reads the mask.
    unsafe { call(libc::SYS_mbind, bind_args(range, binding))? };
    Ok(())
}

/// The arguments of mbind(2). The mask stays borrowed by address.
pub(super) fn bind_args(range: Range, binding: &Binding) -> [usize; 6] {
    // The kernel wants one more than the number of bits (get_nodes() in mm/mempolicy.c);
    // no mask at all for a policy without nodes.
    let empty = binding.mask.iter().all(|&word| word == 0);
    let (mask, bits) = if empty {
        (0, 0)
    } else {
        (binding.mask.as_ptr().addr(), size_of_val(&binding.mask) * 8 + 1)
    };
    [word(range.start()), word(range.len()), binding.mode, mask, bits, 0]
}

/// The nodes that the cpuset allows to the thread (get_mempolicy(2)).
pub(super) fn allowed_nodes() -> Result<Mask, Errno> {
    const MPOL_F_MEMS_ALLOWED: usize = 4;
    get_policy(MPOL_F_MEMS_ALLOWED).map(|(_, mask)| mask)
}

/// The thread's own memory policy: mode (without its flags) and nodes.
pub(super) fn thread_policy() -> Result<(usize, Mask), Errno> {
    /// The mode flags of `uapi/linux/mempolicy.h` take bits 13 to 15.
    const MODE: usize = (1 << 13) - 1;
    get_policy(0).map(|(mode, mask)| (mode & MODE, mask))
}

fn get_policy(flags: usize) -> Result<(usize, Mask), Errno> {
    let (mut mode, mut mask) = (0i32, Mask::default());
    let bits = size_of_val(&mask) * 8 + 1;
    let args = [(&raw mut mode).addr(), mask.as_mut_ptr().addr(), bits, 0, flags, 0];
    // SAFETY: the kernel writes an int and the mask, for which there is room.
    unsafe { call(libc::SYS_get_mempolicy, args)? };
    Ok((usize::try_from(mode).unwrap_or(0), mask))
}

/// Moves a mapping onto `to`, which it replaces.
///
/// # Safety
/// `from` is ours and is not used at its old address any more; `to` may go.
pub(super) unsafe fn remap(from: Range, to: u64) -> Result<(), Errno> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    let (len, to) = (word(from.len()), word(to));
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_mremap, [word(from.start()), len, len, flag(flags), to, 0])? };
    Ok(())
}

/// The break as the kernel knows it; an error where a filter forbids to ask.
pub(super) fn current_break() -> Result<u64, Errno> {
    // SAFETY: brk(0) changes nothing and returns the break.
    unsafe { call(libc::SYS_brk, [0; 6]) }.map(|brk| brk as u64)
}

/// Copies `from` of this process to `to` through `/proc/self/mem`: a page that is not
/// there is an error and no signal. (process_vm_readv(2) would do the same, but it pins
/// the pages, and to pin a page that is shared with a parent takes a page of the pool,
/// Linux 5.19.) A process that has changed its user may not open that file, and there may be
/// no `/proc`: process_vm_writev(2) to itself pins what it writes to, and no page that it reads.
/// Where a filter forbids that as well, the memory is read as it is.
///
/// # Safety
/// `to` is ours, writable and as long as `from`; without both ways nobody takes pages of `from`
/// away.
pub(super) unsafe fn read_own(to: Range, from: Range) -> Result<(), Errno> {
    let whole = |read: usize| match read as u64 == from.len() {
        true => Ok(()),
        false => Err(Errno(libc::EFAULT)),
    };
    if let Ok(memory) = Fd::read_only(c"/proc/self/mem") {
        // SAFETY: the caller's promise.
        return whole(unsafe { memory.read_at_address(to, from.start())? });
    }
    let piece = |range: Range| [word(range.start()), word(range.len())];
    let (local, remote) = (piece(from), piece(to));
    let [local, remote] = [(&raw const local).addr(), (&raw const remote).addr()];
    let args = [process_id() as usize, local, 1, remote, 1, 0];
    // SAFETY: one piece each, of which the kernel writes to `to` alone.
    match unsafe { call(libc::SYS_process_vm_writev, args) } {
        Err(Errno(libc::ENOSYS | libc::EPERM | libc::EACCES)) => {}
        other => return other.and_then(whole),
    }
    advise(from, MADV_POPULATE_READ)?;
    // SAFETY: the caller's promise; every page could be read just now.
    unsafe { arch::copy(word(to.start()), word(from.start()), word(to.len())) };
    Ok(())
}

/// A pipe whose ends are closed on exec.
pub(super) fn pipe() -> Result<[i32; 2], Errno> {
    let mut ends = [0i32; 2];
    let address = (&raw mut ends).addr();
    // SAFETY: the kernel writes two descriptors.
    unsafe { call(libc::SYS_pipe2, [address, flag(libc::O_CLOEXEC), 0, 0, 0, 0])? };
    Ok(ends)
}

/// Whether a byte could be read.
pub(super) fn read_byte(fd: i32) -> bool {
    let mut byte = 0u8;
    let address = (&raw mut byte).addr();
    // SAFETY: the kernel writes at most one byte.
    retry(|| unsafe { call(libc::SYS_read, [flag(fd), address, 1, 0, 0, 0]) }) == Ok(1)
}

/// Ends the process.
pub(super) fn exit_group(status: u8) -> ! {
    loop {
        // SAFETY: exit_group(2) has no precondition.
        let _ = unsafe { call(libc::SYS_exit_group, [usize::from(status), 0, 0, 0, 0, 0]) };
    }
}

/// A child that shares nothing with this process (clone(2) without flags); the kernel
/// tells nobody of its end. Returns its number, or 0 in the child, where nothing but
/// system calls may be done.
pub(super) fn fork_silently() -> Result<usize, Errno> {
    // SAFETY: as fork(2): the child has a copy of this thread's memory, and no handler of
    // libc's runs.
    unsafe { call(libc::SYS_clone, [0; 6]) }
}

/// Waits for the end of a child of [`fork_silently`]; 0 when it ended with status 0.
pub(super) fn wait_for(child: usize) -> Result<i32, Errno> {
    let mut status = 0i32;
    let args = [child, (&raw mut status).addr(), flag(libc::__WALL), 0, 0, 0];
    // SAFETY: `status` is written, nothing else.
    unsafe { call(libc::SYS_wait4, args)? };
    Ok(status)
}

/// Waits for the end of a child of fork(2), whatever it is, unless somebody else has.
pub(super) fn reap(child: i32) {
    // SAFETY: nothing is written.
    let _ = retry(|| unsafe { call(libc::SYS_wait4, [flag(child), 0, 0, 0, 0, 0]) });
}

/// Has the kernel write no core file of this process (RLIMIT_CORE 0).
pub(super) fn no_core_file() {
    let none = [0u64; 2];
    let kind = libc::RLIMIT_CORE as usize;
    // SAFETY: a `struct rlimit64` of zeros is read.
    let _ = unsafe { call(libc::SYS_prlimit64, [0, kind, (&raw const none).addr(), 0, 0, 0]) };
}

/// Every kind of call that changes memory or looks at it, with arguments for which it
/// does nothing: no length, or no such descriptor. For [`super::tryout`].
pub(super) fn make_calls_without_effect() {
    let nowhere = flag(-1);
    let calls: [(libc::c_long, [usize; 6]); 9] = [
        (libc::SYS_mremap, [0; 6]),
        (libc::SYS_mmap, [0; 6]),
        (libc::SYS_munmap, [1, 0, 0, 0, 0, 0]),
        (libc::SYS_mprotect, [0; 6]),
        (libc::SYS_madvise, [0, 0, flag(MADV_POPULATE_WRITE), 0, 0, 0]),
        (libc::SYS_process_vm_readv, [process_id() as usize, 0, 0, 0, 0, 0]),
        (libc::SYS_ioctl, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_pread64, [nowhere, 0, 0, 0, 0, 0]),
        (libc::SYS_brk, [0; 6]),
    ];
    for (nr, args) in calls {
        // SAFETY: with these arguments none of them changes anything (their man pages:
        // a length of 0 or a descriptor that is none; brk(0) returns the break).
        let _ = unsafe { call(nr, args) };
    }
}

/// Sleeps while `word` holds `value`, until it is woken (futex(2), within the process).
pub fn futex_wait(word: &AtomicI32, value: i32) {
    let op = flag(libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG);
    // SAFETY: the kernel compares the word, which outlives the call.
    let _ = unsafe { call(libc::SYS_futex, [word.as_ptr().addr(), op, flag(value), 0, 0, 0]) };
}

/// Wakes one who sleeps at `word`.
pub fn futex_wake(word: &AtomicI32) {
    let op = flag(libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG);
    // SAFETY: the kernel takes the word's address only.
    let _ = unsafe { call(libc::SYS_futex, [word.as_ptr().addr(), op, 1, 0, 0, 0]) };
}

fn status(path: &CStr) -> Result<libc::stat, Errno> {
    let mut stat = core::mem::MaybeUninit::<libc::stat>::zeroed();
    let (path, to) = (path.as_ptr().addr(), stat.as_mut_ptr().addr());
    // SAFETY: the path is a C string; the kernel fills in a `struct stat`, for which there
    // is room and of which zeros are a value too.
    unsafe {
        call(libc::SYS_newfstatat, [flag(libc::AT_FDCWD), path, to, 0, 0, 0])?;
        Ok(stat.assume_init())
    }
}

/// Whether both paths lead to the same file.
#[must_use]
pub fn is_same_file(a: &CStr, b: &CStr) -> bool {
    match (status(a), status(b)) {
        (Ok(a), Ok(b)) => (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino),
        _ => false,
    }
}

/// The number of links of a file.
pub(super) fn links(path: &CStr) -> Result<u64, Errno> {
    let stat = status(path)?;
    #[allow(clippy::useless_conversion)] // 32 bits wide on arm64
    Ok(u64::from(stat.st_nlink))
}

/// Whether RLIMIT_AS or RLIMIT_DATA is set (getrlimit(2)); true when unknown.
pub(super) fn is_memory_limited() -> bool {
    let is_limited = |resource: u32| {
        let mut limit = [0u64; 2];
        let address = (&raw mut limit).addr();
        // SAFETY: the kernel writes a `struct rlimit64`, two 8-byte integers.
        let got = unsafe { call(libc::SYS_prlimit64, [0, resource as usize, 0, address, 0, 0]) };
        got.is_err() || limit[0] != u64::MAX
    };
    is_limited(libc::RLIMIT_AS) || is_limited(libc::RLIMIT_DATA)
}

/// Blocks every signal that can be blocked; returns the mask as it was.
///
/// # Errors
/// The kernel's; a seccomp filter may forbid it.
pub fn block_signals() -> Result<u64, Errno> {
    let all = u64::MAX;
    let mut before = 0u64;
    let (new, old) = ((&raw const all).addr(), (&raw mut before).addr());
    // SAFETY: the kernel reads and writes its 8-byte signal set (rt_sigprocmask(2)).
    unsafe {
        call(libc::SYS_rt_sigprocmask, [flag(libc::SIG_SETMASK), new, old, 8, 0, 0])?;
    }
    Ok(before)
}

/// Sets the signal mask back.
pub fn restore_signals(mask: u64) {
    let new = (&raw const mask).addr();
    // It cannot fail with these arguments, unless a filter or tracer makes it fail; to go
    // on with signals blocked would change the program, so it is tried again.
    for _ in 0..3 {
        // SAFETY: the kernel reads its 8-byte signal set.
        let set =
            unsafe { call(libc::SYS_rt_sigprocmask, [flag(libc::SIG_SETMASK), new, 0, 8, 0, 0]) };
        if set.is_ok() {
            return;
        }
    }
}

/// The process's number.
#[must_use]
pub fn process_id() -> u32 {
    // SAFETY: getpid(2) has no precondition.
    let pid = unsafe { call(libc::SYS_getpid, [0; 6]) };
    pid.ok().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0)
}

/// The thread's number; 0, which tgkill(2) refuses, when a filter forbids to ask.
pub fn thread_id() -> usize {
    // SAFETY: gettid(2) has no precondition.
    unsafe { call(libc::SYS_gettid, [0; 6]) }.unwrap_or(0)
}

/// Whether the process `pid` has the same memory as this one (kcmp(2)); true when the
/// kernel does not say.
pub(super) fn shares_memory_with(pid: u64) -> bool {
    /// `KCMP_VM` of linux/kcmp.h.
    const KCMP_VM: usize = 1;
    let own = process_id() as usize;
    // SAFETY: kcmp(2) compares two processes and touches no memory.
    let order = unsafe { call(libc::SYS_kcmp, [own, word(pid), KCMP_VM, 0, 0, 0]) };
    match order {
        Ok(order) => order == 0,
        // It is gone.
        Err(Errno(libc::ESRCH)) => false,
        Err(_) => true,
    }
}

/// Nanoseconds of the monotonic clock.
#[must_use]
pub fn monotonic() -> u64 {
    let mut time = [0u64; 2];
    let address = (&raw mut time).addr();
    // SAFETY: the kernel writes a `struct timespec`, two 8-byte integers.
    let _ = unsafe {
        call(libc::SYS_clock_gettime, [flag(libc::CLOCK_MONOTONIC), address, 0, 0, 0, 0])
    };
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

/// Ends the process by SIGABRT without running any of its handlers' code.
pub fn abort_raw() -> ! {
    let none = [0u64; 8];
    let abort = 1u64 << (libc::SIGABRT - 1);
    let (none, abort_set) = ((&raw const none).addr(), (&raw const abort).addr());
    loop {
        // SAFETY: zeros are a `struct sigaction` with the default action and no
        // flags; the calls end the process, in the last resort by exit_group(2).
        unsafe {
            let _ = call(libc::SYS_rt_sigaction, [flag(libc::SIGABRT), none, 0, 8, 0, 0]);
            let unblock = [flag(libc::SIG_UNBLOCK), abort_set, 0, 8, 0, 0];
            let _ = call(libc::SYS_rt_sigprocmask, unblock);
            let pid = process_id() as usize;
            let _ = call(libc::SYS_tgkill, [pid, thread_id(), flag(libc::SIGABRT), 0, 0, 0]);
            let _ = call(libc::SYS_exit_group, [134, 0, 0, 0, 0, 0]);
        }
    }
}
