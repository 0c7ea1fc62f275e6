//! The addresses at which the kernel may load a program, as far as the planner can
//! tell them apart.

use std::collections::BTreeSet;

use elfremap::range::align_down;

use crate::elf::{Image, Kind, layout};

/// A base in the middle of the region that x86-64 and arm64 kernels load PIEs into,
/// a multiple of every huge page size.
const BASE: u64 = 0x5500_0000_0000;

/// Load biases that stand for all others, given base page and block size in bytes,
/// both powers of two.
///
/// A program at fixed addresses has one. Of the others only the remainder modulo the
/// block size matters. The planner decides block by block, so that its decisions
/// change only where an edge of the program's pages crosses a block's edge, and its
/// amounts are linear in between: the remainders at which some edge falls onto a
/// block's edge, one page before and one page behind are enough for exact extremes.
#[must_use]
pub(super) fn biases(image: &Image, page: u64, block: u64) -> Vec<u64> {
    match image.kind {
        Kind::Pie | Kind::StaticPie | Kind::SharedObject => {}
        _ => return vec![0],
    }
    let Some(object) = layout::object(image, BASE) else { return Vec::new() };
    let (first, step) = (first(image, page, block), step(image, page).min(block));
    let mut remainders = BTreeSet::from([first]);
    for (area, _) in layout::pages(&object, page) {
        for edge in [area.range.start(), area.range.end()] {
            for at in [page.wrapping_neg(), 0, page] {
                let offset = at.wrapping_sub(edge).wrapping_sub(first) & (block - 1);
                // To the allowed remainders on both sides.
                for offset in [align_down(offset, step), offset.next_multiple_of(step)] {
                    remainders.insert(offset.wrapping_add(first) & (block - 1));
                }
            }
        }
    }
    remainders.into_iter().map(|remainder| BASE + remainder).collect()
}

/// Every load bias modulo the block size.
#[cfg(test)]
pub(super) fn all_biases(image: &Image, page: u64, block: u64) -> Vec<u64> {
    let first = first(image, page, block);
    let step = step(image, page).min(block);
    (0..block / step).map(|n| BASE + (first + n * step) % block).collect()
}

/// The alignment of the load address: the largest `p_align`, as the kernel has done
/// for programs since 5.10 and glibc for shared objects since 2.35. Values that are
/// no power of two do not count.
fn step(image: &Image, page: u64) -> u64 {
    let aligns = image.segments.iter().map(|s| s.align).filter(|a| a.is_power_of_two());
    aligns.max().unwrap_or(page).max(page)
}

/// The bias of the lowest allowed load address: the kernel aligns the address of the
/// first segment's page, not the bias.
fn first(image: &Image, page: u64, block: u64) -> u64 {
    let start = image.segments.first().map_or(0, |s| align_down(s.memory.start(), page));
    start.wrapping_neg() & (step(image, page).min(block) - 1)
}
