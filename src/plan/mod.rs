//! The planner: a pure function from what a program looks like and what the user
//! asked to the ranges that move, and to the reason for each block that stays.

mod block;

use alloc::vec::Vec;
use core::fmt;

use crate::class::{Class, ClassBytes};
use crate::facts::{Backing, Facts};
use crate::policy::{Backend, Policy};
use crate::prot::Prot;
use crate::range::Range;

/// Bss that no one has touched costs nothing; on huge pages it costs its size. A range of
/// more than this many bytes that holds nothing else stays, unless the pool or bss itself
/// was asked for by name. (To have it become huge where it is touched is no way out: a program that
/// touches a large table here and there would take up to 512 times its memory.)
pub const LARGE_BSS: u64 = 32 << 20;

/// Nothing is ever mapped below this address, so that a null pointer with an offset
/// still faults (the usual vm.mmap_min_addr).
pub const LOWEST: u64 = 64 << 10;

/// A part of a block: a run of pages that now have one protection and backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Addresses, whole pages.
    pub range: Range,
    /// Rights now.
    pub prot: Prot,
    /// What the bytes are.
    pub class: Class,
    /// Where they come from: never [`Backing::Foreign`].
    pub backing: Backing,
}

/// A run of blocks that ends up under one protection: the unit of a commit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Move {
    /// Addresses, whole blocks.
    pub range: Range,
    /// Rights afterwards.
    pub prot: Prot,
    /// What is mapped there now, in the order of addresses.
    pub pieces: Vec<Piece>,
    /// What is not mapped there now; to be claimed before anything else.
    pub gaps: Vec<Range>,
    /// Bytes by class.
    pub bytes: ClassBytes,
    /// Where to take huge pages from.
    pub backend: Backend,
}

impl Move {
    /// Whether the copy has to be made while nothing of the program runs.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.prot.has(Prot::WRITE) || self.pieces.iter().any(|p| p.prot.has(Prot::WRITE))
    }

    /// Number of huge pages of `size` bytes.
    #[must_use]
    pub const fn pages(&self, size: u64) -> u64 {
        self.range.len() / size
    }

    /// Whether the range asks the pool for pages first.
    #[must_use]
    pub fn wants_hugetlb(&self) -> bool {
        match self.backend {
            Backend::Hugetlb => true,
            Backend::Auto => !self.is_writable(),
            Backend::Thp => false,
        }
    }

    fn is_bss_only(&self) -> bool {
        self.pieces.iter().all(|p| p.class == Class::Bss)
    }
}

/// Why a block stays as it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reason {
    /// Its bytes have several protections that the merge level does not join.
    MixedProtections,
    /// It holds the ELF header, by which symbolizers find the program's file.
    Header,
    /// A mapping that is not the program's lies in it.
    ForeignMapping,
    /// It would be writable and executable.
    WriteExec,
    /// It is writable and other threads run.
    Threads,
    /// It lies below the lowest address that may be mapped.
    LowAddress,
    /// The heap begins in it and the break cannot be raised.
    HeapLimit,
    /// Bss beyond [`LARGE_BSS`].
    LargeBss,
    /// It would grow, and the process has a limit of memory.
    Limited,
    /// Part of it cannot be read.
    Unreadable,
    /// Its text differs from the file: an armed uprobe, or patched code.
    TextModified,
    /// Its memory is not what the program headers say.
    NotFromFile,
    /// It is written to, and transparent huge pages are larger than its blocks (2 MiB
    /// pages from the pool of an arm64 kernel with 16 KiB pages).
    ThpSize,
    /// It was changed while it was being copied.
    Changed,
    /// Its memory has attributes that a library gave it before us (mlock, madvise, a
    /// protection key), and that would be lost.
    Attributes,
    /// The kernel had no memory for it, or no room in its tables.
    NoMemory,
}

impl Reason {
    /// A stable code for machines.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::MixedProtections => "mixed-protections",
            Self::Header => "elf-header",
            Self::ForeignMapping => "foreign-mapping",
            Self::WriteExec => "write-exec",
            Self::Threads => "threads",
            Self::LowAddress => "low-address",
            Self::HeapLimit => "heap-limit",
            Self::LargeBss => "large-bss",
            Self::Limited => "memory-limit",
            Self::Unreadable => "unreadable",
            Self::TextModified => "text-modified",
            Self::NotFromFile => "not-from-file",
            Self::ThpSize => "thp-size",
            Self::Changed => "changed",
            Self::Attributes => "memory-attributes",
            Self::NoMemory => "no-memory",
        }
    }

    /// Whether it is worth a warning: something was left that usually moves.
    #[must_use]
    pub const fn is_notable(self) -> bool {
        !matches!(self, Self::MixedProtections | Self::Header | Self::LowAddress | Self::Limited)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MixedProtections => "bytes of several protections share the block",
            Self::Header => "the block holds the ELF header",
            Self::ForeignMapping => "another mapping lies in the block",
            Self::WriteExec => "the block would be writable and executable",
            Self::Threads => "other threads are running and may write to it",
            Self::LowAddress => "the block reaches below the lowest address",
            Self::HeapLimit => "the break cannot be raised (RLIMIT_DATA or RLIMIT_AS)",
            Self::LargeBss => "bss above 32 MB moves on request only (ELFREMAP_BACKEND=bss:thp)",
            Self::Limited => "to fill its last block would count against RLIMIT_AS or RLIMIT_DATA",
            Self::Unreadable => "part of it may not be read",
            Self::TextModified => "text differs from the file (uprobe or patched code)",
            Self::NotFromFile => "memory is not what the program headers say",
            Self::ThpSize => {
                "transparent huge pages are too large here (ELFREMAP_BACKEND=hugetlb takes the pool's)"
            }
            Self::Changed => "it was changed while it was being copied",
            Self::Attributes => {
                "a library has locked its memory, kept it from forks or dumps, or the like"
            }
            Self::NoMemory => "the kernel has no memory for it (vm.max_map_count, or a limit)",
        })
    }
}

/// A run of blocks that stays, with the bytes of the object in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    /// Addresses, whole blocks.
    pub range: Range,
    /// Why.
    pub reason: Reason,
    /// Bytes by class.
    pub bytes: ClassBytes,
}

/// Why a whole program is left alone: a healthy answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Less than one block's worth to gain. Silent, so that shells and small
    /// helpers may inherit the preload.
    TooSmall,
    /// There is enough of the program, but its blocks stay, most bytes for this
    /// reason.
    NoBlock(Reason),
}

impl Refusal {
    /// A stable code for machines.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::TooSmall => "too-small",
            Self::NoBlock(reason) => reason.code(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall => f.write_str("less than one huge page to gain"),
            Self::NoBlock(reason) => write!(f, "less than one huge page can move: {reason}"),
        }
    }
}

/// What moves.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Block size in bytes.
    pub block: u64,
    /// The ranges, in the order of their addresses.
    pub moves: Vec<Move>,
    /// What stays, in the order of addresses; blocks without a byte of a selected
    /// class are not listed.
    pub left: Vec<Left>,
    /// Where the break has to be before the commit, when the heap begins in the
    /// last block and ends in it.
    pub raise_break_to: Option<u64>,
    /// Bytes of the whole object by class, moved or not.
    pub total: ClassBytes,
}

impl Plan {
    /// Bytes that move, by class.
    #[must_use]
    pub fn moved(&self) -> ClassBytes {
        let mut sum = ClassBytes::default();
        self.moves.iter().for_each(|m| sum.add_all(&m.bytes));
        sum
    }

    /// Number of huge pages of the block size, from the pool or not.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.moves.iter().map(|m| m.pages(self.block)).sum()
    }

    /// Number of huge pages that the pool is asked for.
    #[must_use]
    pub fn pool_pages(&self) -> u64 {
        self.moves.iter().filter(|m| m.wants_hugetlb()).map(|m| m.pages(self.block)).sum()
    }
}

/// Plans the move of `facts.object` under `policy`.
///
/// # Errors
/// A [`Refusal`] when nothing would be gained.
pub fn plan(facts: &Facts, policy: &Policy) -> Result<Plan, Refusal> {
    let outcome = survey(facts, policy);
    let moved = outcome.moved();
    if moved.total() - moved.get(Class::Heap) < facts.block {
        return Err(refusal(&outcome));
    }
    Ok(outcome)
}

/// The plan without the question whether it is worth it: for `elfremap-check`, which
/// shows coverage and reasons for programs that are refused as well.
#[must_use]
pub fn survey(facts: &Facts, policy: &Policy) -> Plan {
    let parts = block::parts(facts);
    let mut plan = Plan {
        block: facts.block,
        moves: Vec::new(),
        left: Vec::new(),
        raise_break_to: None,
        total: block::object_bytes(&parts),
    };
    for range in facts.object.blocks(facts.block) {
        let block = block::Block::new(facts, range, &parts);
        if !block.is_selected(policy) {
            continue;
        }
        match block.judge(facts, policy) {
            Ok(prot) => {
                plan.raise_break_to = plan.raise_break_to.max(block.raise_break_to(facts));
                push_move(&mut plan.moves, block.into_move(prot, policy));
            }
            Err(reason) => {
                push_left(&mut plan.left, Left { range, reason, bytes: block.bytes });
            }
        }
    }
    drop_large_bss(&mut plan, policy);
    plan
}

/// `a` and the range right after it as one.
fn joined(a: Range, b: Range) -> Range {
    Range::new(a.start(), b.end()).unwrap_or(a)
}

fn push_move(moves: &mut Vec<Move>, next: Move) {
    if let Some(last) = moves.last_mut() {
        let alike = last.range.end() == next.range.start()
            && (last.prot, last.backend) == (next.prot, next.backend)
            && last.is_writable() == next.is_writable()
            && last.is_bss_only() == next.is_bss_only();
        if alike {
            last.range = joined(last.range, next.range);
            next.pieces.into_iter().for_each(|piece| push_piece(&mut last.pieces, piece));
            last.gaps.extend(next.gaps);
            last.bytes.add_all(&next.bytes);
            return;
        }
    }
    moves.push(next);
}

/// Joins a piece to its predecessor when a block's edge was all that parted them.
fn push_piece(pieces: &mut Vec<Piece>, next: Piece) {
    if let Some(last) = pieces.last_mut() {
        let continues = match (last.backing, next.backing) {
            (Backing::File(a), Backing::File(b)) => a.checked_add(last.range.len()) == Some(b),
            (a, b) => a == b,
        };
        let alike = (last.prot, last.class) == (next.prot, next.class);
        if continues && alike && last.range.end() == next.range.start() {
            last.range = joined(last.range, next.range);
            return;
        }
    }
    pieces.push(next);
}

fn push_left(left: &mut Vec<Left>, next: Left) {
    if let Some(last) = left.last_mut()
        && last.range.end() == next.range.start()
        && last.reason == next.reason
    {
        last.range = joined(last.range, next.range);
        last.bytes.add_all(&next.bytes);
        return;
    }
    left.push(next);
}

fn drop_large_bss(plan: &mut Plan, policy: &Policy) {
    if policy.backends.any_bss {
        return;
    }
    let is_large =
        |m: &Move| m.is_bss_only() && m.backend != Backend::Hugetlb && m.range.len() > LARGE_BSS;
    for m in plan.moves.iter().filter(|m| is_large(m)) {
        plan.left.push(Left { range: m.range, reason: Reason::LargeBss, bytes: m.bytes });
    }
    plan.moves.retain(|m| !is_large(m));
    plan.left.sort_by_key(|l| l.range);
}

/// Too small, unless the bytes that stay would have been worth a block; then the
/// reason that most of them have.
fn refusal(plan: &Plan) -> Refusal {
    let left: u64 = plan.left.iter().map(|l| l.bytes.total()).sum();
    match plan.left.iter().max_by_key(|l| l.bytes.total()) {
        Some(most) if left >= plan.block => Refusal::NoBlock(most.reason),
        _ => Refusal::TooSmall,
    }
}

#[cfg(test)]
mod tests;
