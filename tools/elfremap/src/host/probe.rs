//! Kernel facilities, found by trying them on scratch memory rather than by the
//! kernel's version: distributions backport, seccomp filters and policies forbid.

use std::ptr::{null_mut, without_provenance_mut};

use elfremap::hugepage::PageSize;

/// Whether something works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Facility {
    /// It does.
    Works,
    /// It does not, with this errno.
    Fails(i32),
}

impl Facility {
    /// Whether it works.
    #[must_use]
    pub const fn works(self) -> bool {
        matches!(self, Self::Works)
    }

    fn from(result: nix::Result<()>) -> Self {
        match result {
            Ok(()) => Self::Works,
            Err(errno) => Self::Fails(errno as i32),
        }
    }
}

/// The facilities that matter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Probes {
    /// `mmap(MAP_HUGETLB)` of the size in use.
    pub hugetlb: Facility,
    /// `mremap` of hugetlb mappings (Linux 5.16): the swap strategy.
    pub mremap_huge: Facility,
    /// `MADV_POPULATE_WRITE` (Linux 5.14).
    pub populate: Facility,
    /// `MADV_COLLAPSE` (Linux 6.1): transparent huge pages at once.
    pub collapse: Facility,
    /// Making written memory executable: fails under MDWE (Linux 6.3), some seccomp
    /// filters and SELinux without execmem.
    pub executable: Facility,
}

/// `MADV_POPULATE_WRITE` and `MADV_COLLAPSE` of asm-generic/mman-common.h.
const MADV_POPULATE_WRITE: i32 = 23;
const MADV_COLLAPSE: i32 = 25;

impl Probes {
    /// Tries them all. Takes no huge page: the probing mappings are never touched and
    /// reserve nothing.
    #[must_use]
    pub fn run(block: PageSize) -> Self {
        let (hugetlb, mremap_huge) = hugetlb(block);
        Self {
            hugetlb,
            mremap_huge,
            populate: advice(MADV_POPULATE_WRITE),
            collapse: advice(MADV_COLLAPSE),
            executable: Facility::from(executable()),
        }
    }
}

/// A private anonymous mapping of the probe's own, unmapped when dropped.
struct Scratch {
    start: *mut libc::c_void,
    length: usize,
}

impl Scratch {
    fn map(start: *mut libc::c_void, length: usize, flags: i32) -> nix::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags;
        // SAFETY: without MAP_FIXED (never passed in) mmap replaces no mapping; the
        // result belongs to the new value alone.
        let start =
            unsafe { libc::mmap(start, length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        nix::errno::Errno::result(start.addr().cast_signed())?;
        Ok(Self { start, length })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` (or moved there by mremap) for this
        // value and nothing else refers to it.
        unsafe { libc::munmap(self.start, self.length) };
    }
}

fn hugetlb(block: PageSize) -> (Facility, Facility) {
    let Ok(length) = usize::try_from(block.bytes()) else {
        return (Facility::Fails(libc::EINVAL), Facility::Fails(libc::EINVAL));
    };
    let flags = libc::MAP_HUGETLB | block.mmap_flags();
    let mapped = Scratch::map(null_mut(), length, flags)
        .and_then(|from| Ok((from, Scratch::map(null_mut(), length, flags)?)));
    let (from, to) = match mapped {
        Ok(both) => both,
        Err(errno) => return (Facility::Fails(errno as i32), Facility::Fails(errno as i32)),
    };
    // SAFETY: `from` and `to` are whole mappings of this function's own and of the
    // same length; MREMAP_FIXED replaces `to`, to which nothing refers.
    let moved = unsafe {
        libc::mremap(
            from.start,
            length,
            length,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            to.start,
        )
    };
    match nix::errno::Errno::result(moved.addr().cast_signed()) {
        Ok(_) => {
            // The mapping is now at `to`, which unmaps it.
            std::mem::forget(from);
            (Facility::Works, Facility::Works)
        }
        // Some failures unmap the target first; unmapping nothing is no error.
        Err(errno) => (Facility::Works, Facility::Fails(errno as i32)),
    }
}

/// Advice for no bytes at all: the kernel still checks that it knows the advice.
fn advice(advice: i32) -> Facility {
    // SAFETY: a length of zero touches no memory, whatever the address (page aligned).
    let result = unsafe { libc::madvise(without_provenance_mut(4096), 0, advice) };
    Facility::from(nix::errno::Errno::result(result).map(drop))
}

fn executable() -> nix::Result<()> {
    let scratch = Scratch::map(null_mut(), 4096, 0)?;
    // SAFETY: the range is the scratch mapping, which holds no data and no code.
    let result = unsafe { libc::mprotect(scratch.start, 4096, libc::PROT_READ | libc::PROT_EXEC) };
    nix::errno::Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probing_takes_no_page_and_unknown_advice_fails() {
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let first = Probes::run(PageSize::SIZE_2M);
        assert_eq!(first, Probes::run(PageSize::SIZE_2M));
        assert!(!maps().contains("anon_hugepage"));
        assert_eq!(advice(12345), Facility::Fails(libc::EINVAL));
        assert!(first.executable.works());
    }
}
