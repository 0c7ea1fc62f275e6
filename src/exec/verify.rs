//! Verify: what really lies on huge pages, from `/proc/self/smaps`.

use alloc::vec::Vec;

use super::pagemap::Pagemap;
use super::program::Source;
use super::sys;
use crate::errno::Errno;
use crate::proc::smaps;
use crate::range::Range;
use crate::report::Report;

/// Bytes of a range on huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OnHuge {
    /// On pages of the pool.
    pub hugetlb: u64,
    /// On transparent huge pages.
    pub thp: u64,
}

/// Corrects a report of the running process by what the kernel says: a range that does
/// not lie on huge pages as a whole counts as not moved.
///
/// # Errors
/// `/proc/self` cannot be read.
pub fn confirm(report: &mut Report) -> Result<(), Errno> {
    let smaps = read_smaps()?;
    let pagemap = Pagemap::open(report.page)?;
    for moved in &mut report.moved {
        let is_huge = |bytes: u64| bytes == moved.range.len();
        let is_there = match moved.source {
            Some(Source::Hugetlb(_)) => is_huge(on_huge(&smaps, moved.range).hugetlb),
            // Two ranges may have become one mapping, of which smaps gives the sum.
            Some(Source::Thp(_)) => pagemap
                .is_huge(moved.range)
                .unwrap_or_else(|| is_huge(on_huge(&smaps, moved.range).thp)),
            None => true,
        };
        if !is_there {
            moved.source = None;
        }
    }
    Ok(())
}

/// Reads the text of `/proc/self/smaps`.
pub(super) fn read_smaps() -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    sys::read_file(c"/proc/self/smaps", &mut text)?;
    Ok(text)
}

/// What the text of an smaps file says of `range`. Transparent huge pages of a mapping
/// that is only partly inside count up to the part's length.
#[must_use]
pub fn on_huge(text: &[u8], range: Range) -> OnHuge {
    let mut sum = OnHuge::default();
    for entry in smaps::parse(text).filter_map(Result::ok) {
        let inside = entry.mapping.range.intersect(range).len();
        sum.hugetlb += entry.hugetlb.min(inside);
        sum.thp += entry.anon_huge.min(inside);
    }
    sum
}

/// An error unless all of `range` lies on transparent huge pages.
pub(super) fn require_thp(range: Range) -> Result<(), Errno> {
    let text = read_smaps()?;
    if on_huge(&text, range).thp == range.len() { Ok(()) } else { Err(Errno::ENOMEM) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_only_what_is_inside() {
        let text = b"200000-600000 r-xp 0 00:0f 7  /anon_hugepage (deleted)\n\
            KernelPageSize:     2048 kB\nPrivate_Hugetlb:    4096 kB\n\
            600000-a00000 rw-p 0 00:00 0 \nAnonHugePages:      4096 kB\n";
        let range = |a, b| Range::new(a, b).unwrap();
        let all = on_huge(text, range(0, 0x1000_0000));
        assert_eq!(all, OnHuge { hugetlb: 4 << 20, thp: 4 << 20 });
        let part = on_huge(text, range(0x40_0000, 0x80_0000));
        assert_eq!(part, OnHuge { hugetlb: 2 << 20, thp: 2 << 20 });
    }
}
