//! Mappings of a chosen kind of pages, populated.

use anyhow::{Context, Result, ensure};
use elfremap::proc::smaps;
use std::fs::{self, File};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Base pages.
    Small,
    Hugetlb,
    Thp,
}

/// Size and alignment of the huge pages used here: those of the default size on x86-64
/// and on AArch64 with 4 KiB pages.
const BLOCK: usize = 2 << 20;

/// A mapping that is removed when dropped.
#[derive(Debug)]
pub(crate) struct Memory {
    map: *mut libc::c_void,
    map_len: usize,
    /// The aligned part of it.
    start: *mut u8,
    pub len: usize,
}

impl Memory {
    /// All of a file, from the page cache, with every page of it mapped.
    pub(crate) fn of_file(file: &File) -> Result<Self> {
        let len = usize::try_from(file.metadata()?.len())?;
        ensure!(len > 0, "the file is empty");
        let flags = libc::MAP_PRIVATE | libc::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory
        // of ours; the descriptor is open.
        let map = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, flags, file.as_raw_fd(), 0)
        };
        ensure!(map != libc::MAP_FAILED, "cannot map: {}", last_error());
        Ok(Self { map, map_len: len, start: map.cast(), len })
    }

    /// `bytes` (rounded up to whole blocks) on populated pages.
    pub(crate) fn anonymous(bytes: usize, kind: Kind) -> Result<Self> {
        let len = bytes.next_multiple_of(BLOCK);
        let (map_len, flags) = match kind {
            Kind::Hugetlb => (len, libc::MAP_HUGETLB),
            Kind::Small | Kind::Thp => (len + BLOCK, 0),
        };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let map = unsafe { libc::mmap(std::ptr::null_mut(), map_len, prot, flags, -1, 0) };
        ensure!(map != libc::MAP_FAILED, "cannot map {len} bytes: {}", last_error());
        let skip = map.addr().next_multiple_of(BLOCK) - map.addr();
        // SAFETY: the mapping is longer than `len` by at least `skip`: hugetlb mappings are
        // aligned (`skip` is 0), the other one has a block to spare.
        let start = unsafe { map.cast::<u8>().add(skip) };
        let memory = Self { map, map_len, start, len };
        match kind {
            Kind::Thp => memory.advise(libc::MADV_HUGEPAGE)?,
            // A kernel without transparent huge pages does not know the advice.
            Kind::Small => drop(memory.advise(libc::MADV_NOHUGEPAGE)),
            Kind::Hugetlb => {}
        }
        memory.advise(libc::MADV_POPULATE_WRITE)?;
        Ok(memory)
    }

    fn advise(&self, advice: libc::c_int) -> Result<()> {
        // SAFETY: the range lies in our own mapping, and neither advice used here changes
        // what can be read from it.
        let done = unsafe { libc::madvise(self.start.cast(), self.len, advice) };
        ensure!(done == 0, "cannot populate {} bytes: {}", self.len, last_error());
        Ok(())
    }

    pub(crate) fn fill_from(&self, source: &Self) {
        let mut at = 0;
        while at < self.len {
            let n = source.len.min(self.len - at);
            // SAFETY: `n` bytes are readable at the start of the source's mapping and
            // writable from `at` in ours, which is another mapping.
            unsafe { std::ptr::copy_nonoverlapping(source.start, self.start.add(at), n) };
            at += n;
        }
    }

    /// The same bytes by read(2), block by block.
    pub(crate) fn read_from(&self, file: &File, file_len: usize) -> Result<()> {
        for at in (0..self.len).step_by(BLOCK) {
            // SAFETY: the block lies in our own mapping, which is writable; no other
            // reference to it exists.
            let block = unsafe { std::slice::from_raw_parts_mut(self.start.add(at), BLOCK) };
            let mut done = 0;
            while done < BLOCK {
                let n = file.read_at(&mut block[done..], ((at + done) % file_len) as u64)?;
                ensure!(n > 0, "the file has become shorter");
                done += n;
            }
        }
        Ok(())
    }

    /// The memory as numbers.
    pub(crate) fn words(&mut self) -> &mut [usize] {
        // SAFETY: the range is mapped, writable and aligned to a block, any bits are a usize, and
        // no other reference to it exists: this one borrows `self` mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.len / size_of::<usize>()) }
    }

    /// Whether the kernel did give pages of this kind, by smaps.
    pub(crate) fn check(&self, kind: Kind) -> Result<()> {
        let text = fs::read("/proc/self/smaps").context("cannot read /proc/self/smaps")?;
        let start = self.start.addr() as u64;
        for entry in smaps::parse(&text) {
            let entry = entry?;
            if entry.mapping.range.contains(start) {
                let huge = match kind {
                    Kind::Hugetlb => entry.hugetlb,
                    Kind::Small | Kind::Thp => entry.anon_huge,
                };
                let wanted = if kind == Kind::Small { 0 } else { self.len as u64 };
                ensure!(huge == wanted, "{huge} of {} bytes are huge, not {wanted}", self.len);
                return Ok(());
            }
        }
        anyhow::bail!("cannot find the mapping at {start:#x}")
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, and no reference into it exists.
        unsafe { libc::munmap(self.map, self.map_len) };
    }
}

fn last_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_whole_blocks_with_the_sources_bytes_repeated() {
        let file = File::open("/proc/self/exe").unwrap();
        let source = Memory::of_file(&file).unwrap();
        // Not huge everywhere this test runs: only the filling is under test.
        let target = Memory::anonymous(3 << 20, Kind::Thp).unwrap();
        target.fill_from(&source);
        assert_eq!(target.len, 4 << 20);
        // SAFETY: both mappings are readable over their lengths and live until the end of
        // the test; nothing writes to them any more.
        let (from, to) = unsafe {
            (
                std::slice::from_raw_parts(source.start, source.len),
                std::slice::from_raw_parts(target.start, target.len),
            )
        };
        assert!(to.iter().eq(from.iter().cycle().take(to.len())));
        let again = Memory::anonymous(3 << 20, Kind::Thp).unwrap();
        again.read_from(&file, source.len).unwrap();
        // SAFETY: as above.
        let again = unsafe { std::slice::from_raw_parts(again.start, again.len) };
        assert!(to == again);
    }
}
