//! Half-open ranges of addresses.

use core::fmt;

/// A half-open range of addresses, `start..end`, in bytes. Never ends before it starts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Range {
    start: u64,
    end: u64,
}

impl Range {
    /// No byte, at address 0.
    pub const EMPTY: Self = Self { start: 0, end: 0 };

    /// The range `start..end`; `None` when `end < start`.
    #[must_use]
    pub const fn new(start: u64, end: u64) -> Option<Self> {
        if start <= end { Some(Self { start, end }) } else { None }
    }

    /// `len` bytes from `start`; `None` when the end is beyond 2^64 - 1.
    #[must_use]
    pub const fn with_len(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// First address.
    #[must_use]
    pub const fn start(self) -> u64 {
        self.start
    }

    /// First address after the range.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.end
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether it holds no byte.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether `address` lies in the range.
    #[must_use]
    pub const fn contains(self, address: u64) -> bool {
        self.start <= address && address < self.end
    }

    /// Whether every byte of `other` lies in the range.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.is_empty() || (self.start <= other.start && other.end <= self.end)
    }

    /// The bytes in both ranges; empty when there are none.
    #[must_use]
    pub fn intersect(self, other: Self) -> Self {
        let start = self.start.max(other.start);
        Self { start, end: self.end.min(other.end).max(start) }
    }

    /// Whether the ranges share a byte.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        !self.intersect(other).is_empty()
    }

    /// The smallest range of whole pages that covers it; `None` when that ends
    /// beyond 2^64 - 1. `page` is a power of two.
    #[must_use]
    pub fn align_out(self, page: u64) -> Option<Self> {
        Some(Self { start: align_down(self.start, page), end: align_up(self.end, page)? })
    }

    /// The largest range of whole pages inside it; empty when there is none.
    /// `page` is a power of two.
    #[must_use]
    pub fn align_in(self, page: u64) -> Self {
        let start = align_up(self.start, page).unwrap_or(self.end).min(self.end);
        Self { start, end: align_down(self.end, page).max(start) }
    }

    /// The parts of the range before and after `hole` (each may be empty).
    #[must_use]
    pub fn subtract(self, hole: Self) -> (Self, Self) {
        if !self.overlaps(hole) {
            return (self, Self { start: self.end, end: self.end });
        }
        (
            Self { start: self.start, end: hole.start.max(self.start) },
            Self { start: hole.end.min(self.end), end: self.end },
        )
    }

    /// The range moved so that it starts at `start`; `None` on overflow.
    #[must_use]
    pub const fn rebase(self, start: u64) -> Option<Self> {
        Self::with_len(start, self.len())
    }

    /// The blocks of `size` bytes, aligned to their size, that the range touches.
    /// A block that would end beyond 2^64 - 1 is left out. `size` is a power of two.
    pub fn blocks(self, size: u64) -> impl Iterator<Item = Self> {
        let first = align_down(self.start, size);
        let end = self.end;
        let mut next = if self.is_empty() { None } else { Some(first) };
        core::iter::from_fn(move || {
            let start = next?;
            if start >= end {
                return None;
            }
            let block = Self::with_len(start, size)?;
            next = Some(block.end);
            Some(block)
        })
    }
}

/// `address` rounded down to a multiple of `page`, a power of two.
#[must_use]
pub const fn align_down(address: u64, page: u64) -> u64 {
    debug_assert!(page.is_power_of_two());
    address & !(page - 1)
}

/// `address` rounded up to a multiple of `page`, a power of two; `None` on overflow.
#[must_use]
pub const fn align_up(address: u64, page: u64) -> Option<u64> {
    match address.checked_add(page - 1) {
        Some(sum) => Some(align_down(sum, page)),
        None => None,
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}-{:#x}", self.start, self.end)
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn range() -> impl Strategy<Value = Range> {
        (any::<u64>(), any::<u64>()).prop_map(|(a, b)| Range::new(a.min(b), a.max(b)).unwrap())
    }

    fn small() -> impl Strategy<Value = Range> {
        (0u64..64, 0u64..64).prop_map(|(a, b)| Range::new(a.min(b), a.max(b)).unwrap())
    }

    proptest! {
        #[test]
        fn align_out_covers_and_is_aligned(r in range(), shift in 12u32..31) {
            let page = 1u64 << shift;
            if let Some(out) = r.align_out(page) {
                prop_assert!(out.covers(r));
                prop_assert_eq!(out.start() % page, 0);
                prop_assert_eq!(out.end() % page, 0);
                prop_assert!(r.start() - out.start() < page && out.end() - r.end() < page);
            }
        }

        #[test]
        fn align_in_is_covered_and_aligned(r in range(), shift in 12u32..31) {
            let page = 1u64 << shift;
            let inside = r.align_in(page);
            prop_assert!(r.covers(inside));
            if !inside.is_empty() {
                prop_assert_eq!(inside.start() % page, 0);
                prop_assert_eq!(inside.end() % page, 0);
            } else {
                prop_assert!(r.len() < 2 * page);
            }
        }

        #[test]
        fn intersect_and_subtract_agree_with_sets(a in small(), b in small()) {
            let (left, right) = a.subtract(b);
            for x in 0..64 {
                prop_assert_eq!(a.intersect(b).contains(x), a.contains(x) && b.contains(x));
                prop_assert_eq!(left.contains(x) || right.contains(x), a.contains(x) && !b.contains(x));
                prop_assert!(!(left.contains(x) && right.contains(x)));
            }
        }

        #[test]
        fn blocks_partition_the_aligned_cover(r in small()) {
            let blocks: Vec<_> = r.blocks(8).collect();
            for x in 0..72 {
                let n = blocks.iter().filter(|b| b.contains(x)).count();
                let want = !r.is_empty() && r.align_out(8).unwrap().contains(x);
                prop_assert_eq!(n, usize::from(want));
            }
        }
    }

    #[test]
    fn edges_of_the_address_space() {
        assert_eq!(Range::new(2, 1), None);
        assert_eq!(Range::with_len(u64::MAX, 2), None);
        let top = Range::new(u64::MAX - 10, u64::MAX).unwrap();
        assert_eq!(top.align_out(4096), None);
        assert!(top.align_in(4096).is_empty());
        assert_eq!(top.blocks(4096).count(), 0);
    }
}
