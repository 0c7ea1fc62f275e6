//! `/proc/<pid>/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`): which pages of a
//! private mapping hold something of their own.

use alloc::vec::Vec;
use core::ffi::CStr;

use super::sys::Fd;
use crate::errno::Errno;
use crate::range::Range;

/// Bits of an entry. 61 is set for pages of a file, and clear for anonymous ones,
/// such as the copy that a write to a private file mapping makes (Linux 3.5).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
/// A guard region (Linux 6.14), which cannot be read.
const GUARD: u64 = 1 << 58;

/// What a run of pages of a private mapping holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// What is behind the mapping: the file's bytes, or zeros.
    Backing,
    /// Pages of the process's own.
    Own,
}

/// An open pagemap.
#[derive(Debug)]
pub struct Pagemap {
    fd: Fd,
    page: u64,
}

impl Pagemap {
    pub(super) fn open(page: u64) -> Result<Self, Errno> {
        Self::open_at(c"/proc/self/pagemap", page)
    }

    /// Opens the pagemap file at `path`. `page` is the base page size in bytes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn open_at(path: &CStr, page: u64) -> Result<Self, Errno> {
        Ok(Self { fd: Fd::read_only(path)?, page })
    }

    /// The runs of pages in `range` (whole pages), in order.
    ///
    /// # Errors
    /// The kernel's; EIO when the process has ended.
    pub fn runs(&self, range: Range) -> Result<Vec<(Range, Content)>, Errno> {
        if self.has_own(range) == Some(false) {
            return Ok([(range, Content::Backing)].into());
        }
        self.runs_by_entries(range)
    }

    fn runs_by_entries(&self, range: Range) -> Result<Vec<(Range, Content)>, Errno> {
        let mut runs: Vec<(Range, Content)> = Vec::new();
        self.entries(range, &mut |page, entry| {
            let is_own = entry & (SWAPPED | GUARD) != 0 || entry & (PRESENT | OF_FILE) == PRESENT;
            let content = if is_own { Content::Own } else { Content::Backing };
            match runs.last_mut() {
                Some((run, last)) if *last == content => {
                    *run = Range::new(run.start(), page.end()).unwrap_or(*run);
                }
                _ => runs.push((page, content)),
            }
        })?;
        Ok(runs)
    }

    /// Calls `each` with every page of `range` (whole pages) and its entry.
    fn entries(&self, range: Range, each: &mut dyn FnMut(Range, u64)) -> Result<(), Errno> {
        /// Entries read at a time: a block of 2 MiB. On the stack, since the allocator
        /// takes nothing back.
        const CHUNK: usize = 512;
        let mut bytes = [0u8; CHUNK * 8];
        let mut at = range.start();
        while at < range.end() {
            let pages = usize::try_from((range.end() - at) / self.page).unwrap_or(CHUNK).min(CHUNK);
            let buffer = bytes.get_mut(..pages * 8).unwrap_or_default();
            let n = self.fd.read_at(buffer, at / self.page * 8)?;
            if n < buffer.len() {
                return Err(Errno(libc::EIO));
            }
            for entry in buffer.chunks_exact(8) {
                let entry = entry.iter().rev().fold(0u64, |sum, &b| sum << 8 | u64::from(b));
                each(Range::with_len(at, self.page).unwrap_or_default(), entry);
                at += self.page;
            }
        }
        Ok(())
    }

    /// Whether every page of `range` is mapped by a huge entry; `None` where the kernel
    /// cannot tell (before Linux 6.7).
    #[must_use]
    pub fn is_huge(&self, range: Range) -> Option<bool> {
        const PAGE_IS_HUGE: u64 = 1 << 6;
        let huge = Scan { category_mask: PAGE_IS_HUGE, ..Scan::default() };
        let (found, first) = self.scan(range, huge)?;
        Some(found == 1 && first.start == range.start() && first.end == range.end())
    }

    /// Whether any page of `range` is the process's own: one call where the entries take one
    /// for each block, and for most of a program's text there are none to look at. `None`
    /// where the kernel cannot tell (before Linux 6.7).
    fn has_own(&self, range: Range) -> Option<bool> {
        const PAGE_IS_FILE: u64 = 1 << 2;
        const PAGE_IS_PRESENT: u64 = 1 << 3;
        /// Guard regions too: they are entries of the same kind.
        const PAGE_IS_SWAPPED: u64 = 1 << 4;
        let own = Scan {
            category_inverted: PAGE_IS_FILE,
            category_mask: PAGE_IS_FILE,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            max_pages: 1,
            ..Scan::default()
        };
        Some(self.scan(range, own)?.0 > 0)
    }

    /// `PAGEMAP_SCAN`: how many regions of `range` (two at most) are what `scan` asks for,
    /// and the first one; `None` where the kernel cannot tell (before Linux 6.7).
    fn scan(&self, range: Range, scan: Scan) -> Option<(usize, Region)> {
        /// `_IOWR('f', 16, struct pm_scan_arg)` with its 96 bytes.
        const PAGEMAP_SCAN: usize = 0xc060_6610;
        let mut regions: [Region; 2] = Default::default();
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: range.start(),
            end: range.end(),
            vec: regions.as_mut_ptr().addr() as u64,
            vec_len: regions.len() as u64,
            return_mask: scan.category_mask,
            ..scan
        };
        // SAFETY: the kernel reads and updates the 96-byte structure of this request
        // and writes at most `vec_len` regions at `vec`, which outlives the call.
        let found = unsafe { self.fd.ioctl(PAGEMAP_SCAN, &mut scan).ok()? };
        let [first, _] = regions;
        Some((found, first))
    }
}

/// `struct page_region` of linux/fs.h.
#[derive(Default)]
#[repr(C)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg` of linux/fs.h.
#[derive(Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[cfg(test)]
mod tests {
    use super::super::sys;
    use super::*;
    use crate::prot::Prot;

    const PAGE: u64 = 4096;

    /// What a scan finds out at once is what the entries say page by page.
    fn check(range: Range, own: &[u64]) {
        let pagemap = Pagemap::open(PAGE).unwrap();
        let slow = pagemap.runs_by_entries(range).unwrap();
        assert_eq!(pagemap.runs(range).unwrap(), slow);
        let is_own = |run: &&(Range, Content)| run.1 == Content::Own;
        let pages = slow.iter().filter(is_own).flat_map(|(run, _)| run.blocks(PAGE));
        let pages: Vec<u64> = pages.map(|page| (page.start() - range.start()) / PAGE).collect();
        assert_eq!(pages, own);
        if let Some(has_own) = pagemap.has_own(range) {
            assert_eq!(has_own, !own.is_empty());
        }
    }

    fn page_of(range: Range, index: u64) -> Range {
        Range::with_len(range.start() + index * PAGE, PAGE).unwrap()
    }

    #[test]
    fn a_page_of_a_file_is_own_once_it_was_written() {
        let file = Fd::read_only(c"/proc/self/exe").unwrap();
        let range = file.map(8 * PAGE, Prot::RW, libc::MAP_PRIVATE).unwrap();
        check(range, &[]);
        sys::advise(range, sys::MADV_POPULATE_READ).unwrap();
        check(range, &[]);
        for index in [5, 2] {
            sys::advise(page_of(range, index), sys::MADV_POPULATE_WRITE).unwrap();
            let own = if index == 5 { &[5][..] } else { &[2, 5] };
            check(range, own);
        }
        // SAFETY: mapped above, and not used any more.
        unsafe { sys::unmap(range).unwrap() };
    }

    #[test]
    fn a_page_of_memory_is_own_once_it_was_touched() {
        let range = sys::map(8 * PAGE, Prot::RW, 0).unwrap();
        check(range, &[]);
        sys::advise(page_of(range, 7), sys::MADV_POPULATE_WRITE).unwrap();
        check(range, &[7]);
        // SAFETY: mapped above, and not used any more.
        unsafe { sys::unmap(range).unwrap() };
    }

    #[test]
    fn a_guard_page_is_own() {
        /// Linux 6.13; of a file's mapping 6.15.
        const MADV_GUARD_INSTALL: usize = 102;
        let file = Fd::read_only(c"/proc/self/exe").unwrap();
        let of_file = file.map(8 * PAGE, Prot::READ, libc::MAP_PRIVATE).unwrap();
        for range in [sys::map(8 * PAGE, Prot::RW, 0).unwrap(), of_file] {
            let (start, len) = (sys::word(page_of(range, 3).start()), sys::word(PAGE));
            let args = [start, len, MADV_GUARD_INSTALL, 0, 0, 0];
            // SAFETY: the mapping is the test's own, and nobody reads the page.
            if unsafe { sys::call(libc::SYS_madvise, args) }.is_ok() {
                check(range, &[3]);
            }
            // SAFETY: mapped above, and not used any more.
            unsafe { sys::unmap(range).unwrap() };
        }
    }
}
