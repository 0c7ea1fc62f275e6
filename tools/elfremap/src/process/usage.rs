//! How much of an object lies on which kind of page.

use elfremap::class::Class;
use elfremap::facts::Object;
use elfremap::proc::smaps::Entry;
use elfremap::range::Range;

use crate::elf::layout;

/// Bytes by kind of page.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Pages {
    /// All bytes, touched or not.
    pub size: u64,
    /// On pages of the huge page pool.
    pub hugetlb: u64,
    /// On transparent huge pages.
    pub thp: u64,
    /// On huge pages of the page cache: the kernel's own doing.
    pub file_thp: u64,
}

impl Pages {
    /// Bytes on huge pages of any kind.
    #[must_use]
    pub const fn huge(&self) -> u64 {
        self.hugetlb + self.thp + self.file_thp
    }

    /// Bytes that are on base pages, or on none yet.
    #[must_use]
    pub const fn small(&self) -> u64 {
        self.size.saturating_sub(self.huge())
    }

    /// Adds the amounts of `other`.
    pub const fn add(&mut self, other: &Self) {
        self.size += other.size;
        self.hugetlb += other.hugetlb;
        self.thp += other.thp;
        self.file_thp += other.file_thp;
    }
}

/// The pages of one object.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// By class, only those the object has.
    pub classes: Vec<(Class, Pages)>,
    /// Huge pages beyond the object's own bytes: the rest of its first and last
    /// blocks, and gaps between its segments.
    pub padding: Pages,
}

impl Usage {
    /// All classes together, without the padding.
    #[must_use]
    pub fn total(&self) -> Pages {
        let mut total = Pages::default();
        self.classes.iter().for_each(|(_, pages)| total.add(pages));
        total
    }
}

/// What the kernel's account `entries` says of `object`. `page` is the base page
/// size; `block` the huge page size up to which pages may reach beyond the object.
///
/// The kernel counts by mapping. Where a mapping that is huge only in part holds
/// several classes, its huge bytes are shared out in proportion; sums are exact.
#[must_use]
pub fn usage(object: &Object, entries: &[Entry<'_>], page: u64, block: u64) -> Usage {
    let ranges: Vec<(Range, Class)> =
        layout::pages(object, page).into_iter().map(|(area, class)| (area.range, class)).collect();
    let span = object.span().align_out(block).unwrap_or_default();
    let mut usage = Usage::default();
    for class in Class::ALL {
        let size: u64 = ranges.iter().filter(|(_, c)| *c == class).map(|(r, _)| r.len()).sum();
        if size > 0 {
            usage.classes.push((class, Pages { size, ..Pages::default() }));
        }
    }
    for entry in entries.iter().filter(|entry| entry.mapping.range.overlaps(span)) {
        let mapping = entry.mapping.range;
        let huge = [entry.hugetlb, entry.anon_huge, entry.file_pmd];
        if huge == [0; 3] {
            continue;
        }
        let mut shares = Shares { left: mapping.len(), huge };
        for (range, class) in &ranges {
            let bytes = range.intersect(mapping).len();
            let pages = usage.classes.iter_mut().find(|(c, _)| c == class);
            if let Some((_, pages)) = pages.filter(|_| bytes > 0) {
                shares.take(bytes, pages);
            }
        }
        // Of a large foreign mapping only what lies in the object's blocks counts.
        let owned: u64 = ranges.iter().map(|(range, _)| range.intersect(mapping).len()).sum();
        let beside = mapping.intersect(span).len() - owned;
        if owned > 0 && beside > 0 {
            let before = usage.padding.huge();
            shares.take(beside, &mut usage.padding);
            usage.padding.size += usage.padding.huge() - before;
        }
    }
    usage
}

/// The huge bytes of a mapping that are still to be shared out over the rest of it.
struct Shares {
    left: u64,
    huge: [u64; 3],
}

impl Shares {
    /// Gives `bytes` of the rest their part, to the byte without rest at the end.
    fn take(&mut self, bytes: u64, pages: &mut Pages) {
        let targets = [&mut pages.hugetlb, &mut pages.thp, &mut pages.file_thp];
        for (left, target) in self.huge.iter_mut().zip(targets) {
            let part = u128::from(*left) * u128::from(bytes) / u128::from(self.left.max(1));
            let part = u64::try_from(part).unwrap_or(*left).min(*left);
            *left -= part;
            *target += part;
        }
        self.left = self.left.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use elfremap::facts::Segment;
    use elfremap::proc::smaps;
    use elfremap::prot::Prot;

    const M: u64 = 1 << 20;

    #[test]
    fn a_moved_program() {
        let range = |from: u64, to: u64| Range::new(from * M, to * M).unwrap();
        let segment = |from, to, prot| Segment {
            range: range(from, to),
            file_end: to * M,
            offset: (from - 4) * M,
            prot,
        };
        let mut data = segment(10, 13, Prot::RW);
        data.file_end = 11 * M;
        let object = Object { segments: vec![segment(4, 9, Prot::RX), data], relro: None };
        let text = b"400000-800000 r-xp 00000000 00:0f 7  /anon_hugepage (deleted)\n\
            Private_Hugetlb: 4096 kB\n\
            800000-900000 r-xp 00400000 fe:01 7  /prog\nRss: 1024 kB\n\
            a00000-e00000 rw-p 00000000 00:00 0\nAnonHugePages: 4096 kB\n";
        let entries: Vec<_> = smaps::parse(text).map(Result::unwrap).collect();
        let usage = usage(&object, &entries, 4096, 2 * M);
        let pages = |size, hugetlb, thp| Pages {
            size: size * M,
            hugetlb: hugetlb * M,
            thp: thp * M,
            file_thp: 0,
        };
        assert_eq!(
            usage.classes,
            [
                (Class::Text, pages(5, 4, 0)),
                (Class::Data, pages(1, 0, 1)),
                (Class::Bss, pages(2, 0, 2))
            ]
        );
        assert_eq!(usage.padding, pages(1, 0, 1));
        assert_eq!(usage.total().small(), M);
    }
}
