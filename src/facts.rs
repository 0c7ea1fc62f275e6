//! The snapshot of a program that the planner reads: filled from a live process by
//! the preload, from a file by `elfremap-check`.

use alloc::vec::Vec;

use crate::prot::Prot;
use crate::range::Range;

/// One PT_LOAD segment at the address where it is loaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// `p_vaddr .. p_vaddr + p_memsz`, load bias applied.
    pub range: Range,
    /// End of the bytes that come from the file: `p_vaddr + p_filesz`, biased.
    pub file_end: u64,
    /// `p_offset`.
    pub offset: u64,
    /// `p_flags`.
    pub prot: Prot,
}

/// A program or shared object as its program headers describe it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Object {
    /// PT_LOAD segments with a size, in the order of their addresses.
    pub segments: Vec<Segment>,
    /// PT_GNU_RELRO, biased.
    pub relro: Option<Range>,
}

impl Object {
    /// From the lowest to the highest address of its segments; empty without any.
    #[must_use]
    pub fn span(&self) -> Range {
        let start = self.segments.iter().map(|s| s.range.start()).min().unwrap_or(0);
        let end = self.segments.iter().map(|s| s.range.end()).max().unwrap_or(0);
        Range::new(start, end).unwrap_or_default()
    }

    /// The blocks of `size` bytes that its segments touch, ascending, each once.
    pub fn blocks(&self, size: u64) -> impl Iterator<Item = Range> + '_ {
        let mut done = 0;
        self.segments.iter().flat_map(move |segment| segment.range.blocks(size)).filter(move |b| {
            let is_new = b.start() >= done;
            done = done.max(b.end());
            is_new
        })
    }

    /// The address of the ELF header: where file offset 0 is loaded.
    #[must_use]
    pub fn header(&self) -> Option<u64> {
        let first = self.segments.iter().find(|s| s.offset == 0 && s.file_end > s.range.start())?;
        Some(first.range.start())
    }
}

/// What a mapping inside or beside the object is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// The object's own file, from this offset in bytes.
    File(u64),
    /// Private anonymous memory.
    Anonymous,
    /// Anything else: another file, shared or huge pages.
    Foreign,
}

/// A mapping as it is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Area {
    /// Addresses, whole pages.
    pub range: Range,
    /// Rights.
    pub prot: Prot,
    /// What is behind it.
    pub backing: Backing,
}

/// The brk heap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Heap {
    /// Where it begins (`start_brk`), whether or not anything is mapped there.
    pub start: u64,
    /// The break: its end, to the byte.
    pub brk: u64,
    /// Whether the break may be raised (false after RLIMIT_DATA forbade it).
    pub may_grow: bool,
}

/// What the planner knows of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Facts {
    /// Base page size in bytes.
    pub page: u64,
    /// Size of a block in bytes: the huge page size to plan for.
    pub block: u64,
    /// The object to move.
    pub object: Object,
    /// All mappings near the object (at least those that touch a block of its
    /// span), in the order of their addresses.
    pub areas: Vec<Area>,
    /// The brk heap; `None` when it is known to be elsewhere.
    pub heap: Option<Heap>,
    /// Whether more than one thread runs.
    pub threaded: bool,
    /// Whether the process has a limit of address space or data (RLIMIT_AS, RLIMIT_DATA):
    /// then nothing may grow, since the program would have that much less.
    pub limited: bool,
    /// Ranges that must stay as they are, each with the reason.
    pub pinned: Vec<(Range, crate::plan::Reason)>,
}
