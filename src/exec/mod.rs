//! Carrying a plan out on the running process: discover, stage, commit, verify.
//!
//! # Safety
//! The modules below change the process they run in. What makes that sound is said at
//! each block: only memory that was mapped here is written before the commit; the
//! commit runs in the critical section with every signal blocked and, for writable
//! ranges, no second thread; afterwards every byte reads as before.
#![allow(unsafe_code)]

mod content;
mod discover;
pub mod guard;
mod numa;
pub mod pagemap;
mod program;
#[cfg(test)]
mod simulate;
mod stage;
mod sys;
pub mod tryout;
mod userfault;
pub mod verify;

use alloc::vec::Vec;

use elfremap_critical::{Op, run};

use crate::errno::Errno;
use crate::facts::{Facts, Object};
use crate::hugepage::{PageSize, pool};
use crate::plan::{self, Left, Move, Plan, Reason, Refusal};
use crate::policy::Policy;
use crate::range::Range;
use crate::report::{Moved, Report, Verdict};
use content::Contents;
use pagemap::Pagemap;
use program::{Committed, Emergency, Program, Staged, Way};
use stage::{Stager, release};

pub use discover::{Identity, areas, first_mapping};
pub use numa::{Remaining, remaining};
pub use program::Source;
pub use stage::{Offer, Shortage, ladder};
pub use sys::{
    Fd, Machine, abort_raw, block_signals, close_leftovers, is_same_file, map_private, monotonic,
    process_id, restore_signals, unmap_private, write_to,
};

/// What the machine offers. Where sysfs cannot be read (a chroot without it),
/// `/proc/meminfo` tells of the default size.
#[must_use]
pub fn offer() -> Offer {
    let mut sizes = pool::sizes(&Machine).unwrap_or_default();
    if sizes.is_empty() {
        sizes.extend(pool::default_size(&Machine).ok().flatten());
    }
    Offer::new(sizes.into_iter().map(PageSize::bytes).collect())
}

/// Whether the pool of pages of `size` bytes holds none and may not grow.
#[must_use]
pub fn is_void(size: u64) -> bool {
    let pool = PageSize::new(size).and_then(|s| pool::read_global(&Machine, s).ok()?);
    pool.is_none_or(|pool| pool.total == 0 && pool.overcommit == 0)
}

/// What only the process's libc can do.
pub trait Libc {
    /// sbrk(3): moves the break by `delta` bytes; false when it cannot. It goes
    /// through libc so that its own idea of the break stays right.
    fn move_break(&self, delta: isize) -> bool;

    /// The address of the function that does it: the program may have one of its own,
    /// which must not run before the program does.
    fn break_function(&self) -> u64;
}

/// Written when a commit and its compensation both failed.
const TORN: &str = "elfremap: fatal: a range could be neither moved nor restored\n";

/// The process, as far as this crate looks at it before it decides.
#[derive(Debug)]
pub struct Process {
    object: Object,
    maps: Vec<u8>,
    page: u64,
}

impl Process {
    /// Takes a look at the process around `object`. `page` is the base page size.
    ///
    /// # Errors
    /// `/proc/self/maps` cannot be read.
    pub fn new(object: Object, page: u64) -> Result<Self, Errno> {
        Ok(Self { object, maps: discover::read_maps()?, page })
    }

    /// The object's file as `/proc/self/maps` names it.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        discover::name(&self.maps, &self.object)
    }

    /// The huge page size, up to the program's own length, of whose pool most bytes of the
    /// program could be had now: what the layout allows and the pool
    /// holds. `None` when that is nothing. For two alike, the larger.
    ///
    /// # Errors
    /// `/proc/self` cannot be read.
    pub fn best_block(&self, policy: &Policy, offer: &Offer) -> Result<Option<u64>, Errno> {
        let len =
            self.object.segments.iter().fold(0u64, |sum, s| sum.saturating_add(s.range.len()));
        let mut best = (0, None);
        for &size in offer.sizes.iter().filter(|&&size| size <= len) {
            let pool = PageSize::new(size).and_then(|s| pool::read_global(&Machine, s).ok()?);
            let pages = pool.map_or(0, |pool| pool.available().saturating_add(pool.may_grow()));
            let wanted = if pages > 0 { self.pool_pages(size, policy)? } else { 0 };
            let bytes = wanted.min(pages).saturating_mul(size);
            if bytes > 0 && bytes >= best.0 {
                best = (bytes, Some(size));
            }
        }
        Ok(best.1)
    }

    /// Whether anything moves when planned for blocks of this size.
    ///
    /// # Errors
    /// `/proc/self` cannot be read.
    pub fn fits(&self, block: u64, policy: &Policy) -> Result<bool, Errno> {
        Ok(self.plan_for(block, policy)?.is_some())
    }

    fn pool_pages(&self, block: u64, policy: &Policy) -> Result<u64, Errno> {
        Ok(self.plan_for(block, policy)?.map_or(0, |plan| plan.pool_pages()))
    }

    fn plan_for(&self, block: u64, policy: &Policy) -> Result<Option<Plan>, Errno> {
        let found = discover::discover(&self.maps, self.object.clone(), self.page, block)?;
        Ok(plan::plan(&found.facts, policy).ok())
    }

    /// Moves what the policy selects. `block` is the huge page size to plan for.
    ///
    /// # Errors
    /// `/proc/self` cannot be read. Nothing was touched.
    ///
    /// # Safety
    /// Every signal is blocked ([`block_signals`]). The caller is no part of `object`,
    /// whose program headers are true, and returns to nothing in it before this is over.
    /// Memory of `object` that is writable is not borrowed by anybody.
    pub unsafe fn remap(
        self,
        block: u64,
        policy: &Policy,
        offer: &Offer,
        libc: &dyn Libc,
    ) -> Result<Report, Errno> {
        let started = monotonic();
        let name = Vec::from(self.name());
        let mut found = discover::discover(&self.maps, self.object, self.page, block)?;
        let attributes = discover::with_attributes(&found.facts.object, block)?.into_iter();
        found.facts.pinned.extend(attributes.map(|range| (range, Reason::Attributes)));
        let contents = Contents::new(Pagemap::open(self.page)?, found.file);
        let stager = Stager::new(self.page, offer, policy, contents);
        let mut work = Work { facts: found.facts, policy, libc, stager, raised_from: None };
        let mut report = work.run();
        report.program = name;
        report.nanoseconds = monotonic().saturating_sub(started);
        Ok(report)
    }
}

/// One remap under way.
struct Work<'a> {
    facts: Facts,
    policy: &'a Policy,
    libc: &'a dyn Libc,
    stager: Stager<'a>,
    /// The break before it was raised.
    raised_from: Option<u64>,
}

impl Work<'_> {
    fn run(&mut self) -> Report {
        let foreign = self.libc.break_function();
        let is_programs = self.facts.object.segments.iter().any(|s| s.range.contains(foreign));
        if let Some(heap) = self.facts.heap.as_mut().filter(|_| is_programs) {
            heap.may_grow = false;
        }
        let plan = match self.settle_plan() {
            Ok(plan) => plan,
            Err(refusal) => {
                return Report::new(Verdict::Refused(refusal), self.facts.page, self.facts.block);
            }
        };
        let mut report = Report::new(Verdict::Planned, self.facts.page, plan.block);
        // Text first: when pages are short it gains most.
        let mut moves: Vec<&Move> = plan.moves.iter().collect();
        moves.sort_by_key(|m| (m.is_writable(), !m.prot.has(crate::prot::Prot::EXEC)));
        for &range in &moves {
            let source = self.try_move(range, &mut report);
            report.moved.push(Moved::new(range, source));
        }
        self.lower_break_unless_needed(&plan, &report);
        report.total = plan.total;
        report.left.extend(plan.left);
        report
    }

    /// Plans, and claims what the plan needs from nobody: gaps at the edges of blocks,
    /// room above the break. What cannot be had pins its block, and the plan is made
    /// anew; every round pins at least one more block, so this ends.
    fn settle_plan(&mut self) -> Result<Plan, Refusal> {
        loop {
            let plan = plan::plan(&self.facts, self.policy)?;
            if self.pin_modified_text(&plan) {
                continue;
            }
            if let Some(to) = plan.raise_break_to
                && !self.raise_break(to)
            {
                if let Some(heap) = &mut self.facts.heap {
                    heap.may_grow = false;
                }
                continue;
            }
            let gaps: Vec<Range> = plan.moves.iter().flat_map(|m| m.gaps.clone()).collect();
            let Some((refused, errno)) = claim_all(&gaps) else { return Ok(plan) };
            self.lower_break();
            let is_taken = errno == Errno(libc::EEXIST);
            let reason = if is_taken { Reason::ForeignMapping } else { Reason::NoMemory };
            self.facts.pinned.push((refused, reason));
        }
    }

    /// Pins blocks whose code is not the file's. The kernel's own breakpoints for uprobes
    /// must stay in the file's mapping, since a copied one kills the program; a
    /// debugger's are as good there.
    fn pin_modified_text(&mut self, plan: &Plan) -> bool {
        let before = self.facts.pinned.len();
        for range in &plan.moves {
            match self.stager.contents.modified_text(range, plan.block) {
                Ok(blocks) => {
                    let pins = blocks.into_iter().map(|block| (block, Reason::TextModified));
                    self.facts.pinned.extend(pins);
                }
                Err(_) => self.facts.pinned.push((range.range, Reason::TextModified)),
            }
        }
        self.facts.pinned.len() > before
    }

    fn raise_break(&mut self, to: u64) -> bool {
        let Ok(from) = sys::current_break() else { return false };
        let delta = to.checked_sub(from).and_then(|d| isize::try_from(d).ok());
        if !delta.is_some_and(|delta| self.libc.move_break(delta)) {
            return false;
        }
        self.raised_from = Some(from);
        if sys::current_break() == Ok(to) {
            return true;
        }
        self.lower_break();
        false
    }

    /// Sets the break back to where the program left it.
    fn lower_break(&mut self) {
        let Some(from) = self.raised_from.take() else { return };
        let now = sys::current_break().unwrap_or(from);
        if let Some(delta) = now.checked_sub(from).and_then(|d| isize::try_from(d).ok()) {
            self.libc.move_break(-delta);
        }
    }

    fn lower_break_unless_needed(&mut self, plan: &Plan, report: &Report) {
        let is_needed = plan.raise_break_to.is_some_and(|to| {
            report.moved.iter().any(|m| m.source.is_some() && m.range.end() == to)
        });
        if !is_needed {
            self.lower_break();
        }
    }

    /// Tries one source after the other.
    fn try_move(&mut self, range: &Move, report: &mut Report) -> Option<Source> {
        let offer = self.stager.offer;
        let mut has_source = false;
        for source in stage::ladder(range, self.facts.block, offer) {
            has_source = true;
            match self.try_source(range, source) {
                Ok(()) => return Some(source),
                Err(shortage) => report.shortages.push((range.range, shortage)),
            }
        }
        if !has_source && offer.thp().is_some_and(|size| size > self.facts.block) {
            let Move { range, bytes, .. } = *range;
            report.left.push(Left { range, reason: Reason::ThpSize, bytes });
        }
        // The claims are still there, or gone with the range; either way the gaps are
        // as free as they were.
        range.gaps.iter().for_each(|&gap| release(gap));
        None
    }

    fn try_source(&mut self, range: &Move, source: Source) -> Result<(), Shortage> {
        let staged = self.stager.stage(range, source, self.facts.threaded)?;
        let committed = commit(&staged, self.facts.page);
        match &staged.way {
            Way::Swap { staged } if committed != Committed::Moved => release(*staged),
            Way::Swap { .. } => {}
            Way::Move { aside, .. } => release(*aside),
        }
        match committed {
            Committed::Moved => Ok(()),
            Committed::Untouched(errno) | Committed::Restored(errno) => {
                // A range that went away and came back has lost its claims.
                for &gap in &range.gaps {
                    let _ = sys::claim(gap);
                }
                Err(Shortage { source, step: "commit", errno })
            }
        }
    }
}

/// Claims every gap, or none: then the one that could not be had, and why.
fn claim_all(gaps: &[Range]) -> Option<(Range, Errno)> {
    let (failed, error) =
        gaps.iter().enumerate().find_map(|(at, &gap)| Some((at, sys::claim(gap).err()?)))?;
    gaps.iter().take(failed).for_each(|&gap| release(gap));
    Some((*gaps.get(failed)?, error))
}

/// Runs the critical section on a staged range.
fn commit(staged: &Staged<'_>, page: u64) -> Committed {
    let zeros = [0u64; 8];
    let abort_set = 1u64 << (libc::SIGABRT - 1);
    let emergency = Emergency {
        message: (TORN.as_ptr().addr(), TORN.len()),
        zeros: (&raw const zeros).addr(),
        abort_set: (&raw const abort_set).addr(),
        pid: process_id() as usize,
        tid: sys::thread_id(),
    };
    let mut program = Program::new(staged, page, &emergency);
    let ops: *mut Op = program.ops.as_mut_ptr();
    // SAFETY: the program was lowered from a plan for a range that holds neither this
    // code nor our stack nor our memory (none of them is part of the object); its
    // targets are indices in it and it ends. Signals are blocked; nothing else runs
    // that could write to the range, since writable ranges are planned for a single
    // thread only. Afterwards every byte of the range reads as before.
    unsafe { run(ops) };
    program.outcome()
}
