//! Stage: everything that can fail, before anything of the program is touched.

use alloc::vec::Vec;
use core::cell::OnceCell;

use super::content::Contents;
use super::discover::{map_aligned, mappings_in};
use super::numa::Binding;
use super::program::{Populate, Source, Staged, Way};
use super::sys::{self, Fd, MADV_COLLAPSE, MADV_POPULATE_WRITE, Machine};
use super::verify::require_thp;
use crate::errno::Errno;
use crate::hugepage::{Files, PageSize, ThpMode, meminfo, thp};
use crate::plan::Move;
use crate::policy::{Backend, Policy, Strategy};
use crate::prot::Prot;
use crate::range::Range;

/// What the machine offers, read once.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Huge page sizes for `MAP_HUGETLB`, ascending.
    pub sizes: Vec<u64>,
    /// `None` in it when the kernel has none.
    thp: OnceCell<Option<Thp>>,
}

/// Transparent huge pages, as far as a move needs to know of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Thp {
    pub(super) size: u64,
    /// Whether the machine's mode for them is `never`.
    pub(super) is_never: bool,
}

impl Offer {
    pub(super) fn new(sizes: Vec<u64>) -> Self {
        Self { sizes, thp: OnceCell::new() }
    }

    /// Size of a transparent huge page; `None` when the kernel has none. Read when first asked
    /// for: what the pool serves needs none of it.
    #[must_use]
    pub fn thp(&self) -> Option<u64> {
        self.transparent().map(|thp| thp.size)
    }

    fn transparent(&self) -> Option<Thp> {
        *self.thp.get_or_init(read_thp)
    }
}

/// Where sysfs cannot be read, `/proc/meminfo` tells of transparent huge pages by its line
/// for them; their size is then taken to be 2 MiB.
fn read_thp() -> Option<Thp> {
    if let Some(thp) = thp::read(&Machine).ok().flatten() {
        let size = thp.size.unwrap_or(PageSize::SIZE_2M).bytes();
        return Some(Thp { size, is_never: thp.mode == ThpMode::Never });
    }
    let mut text = Vec::new();
    let read = Machine.read("/proc/meminfo", &mut text).unwrap_or(false);
    let are_there = read && meminfo::bytes(&text, "AnonHugePages").is_some();
    are_there.then_some(Thp { size: PageSize::SIZE_2M.bytes(), is_never: false })
}

/// What could not be had, and where.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shortage {
    /// What was asked for.
    pub source: Source,
    /// The call that failed.
    pub step: &'static str,
    /// Its error.
    pub errno: Errno,
}

/// The kernel that learnt to mremap hugetlb mappings.
const MOVES_HUGETLB: (u32, u32) = (5, 16);

/// The sources to try for a range, best first.
pub fn ladder(plan: &Move, block: u64, offer: &Offer) -> impl Iterator<Item = Source> {
    /// The size that is tried when a larger one cannot be had.
    const FALLBACK: u64 = 2 << 20;
    let wants_pool = plan.wants_hugetlb();
    let falls_back = wants_pool && block > FALLBACK && offer.sizes.contains(&FALLBACK);
    let pool = [wants_pool.then_some(block), falls_back.then_some(FALLBACK)];
    let backend = plan.backend;
    let thp = core::iter::once_with(move || {
        let thp = (backend != Backend::Hugetlb).then(|| offer.transparent()).flatten();
        thp.filter(|thp| thp.size <= block && !(thp.is_never && backend == Backend::Auto))
    });
    let pool = pool.into_iter().flatten().map(Source::Hugetlb);
    pool.chain(thp.flatten().map(|thp| Source::Thp(thp.size)))
}

/// Tools for staging, opened once.
#[derive(Debug)]
pub(super) struct Stager<'a> {
    page: u64,
    pub(super) offer: &'a Offer,
    strategy: Strategy,
    /// Where pages are to be taken, when that was asked for.
    binding: Option<Binding>,
    pub(super) contents: Contents,
    /// Whether the kernel can mremap huge mappings; `None` until tried.
    can_swap: Option<bool>,
    /// Whether what was written here may not become executable (PR_SET_MDWE, a filter).
    is_write_xor_exec: bool,
    /// `/dev/zero`, once `MADV_POPULATE_WRITE` has proved missing.
    zero: Option<Fd>,
}

impl<'a> Stager<'a> {
    pub(super) fn new(page: u64, offer: &'a Offer, policy: &Policy, contents: Contents) -> Self {
        let (strategy, binding) = (policy.strategy, Binding::new(policy.numa));
        let (can_swap, is_write_xor_exec) = (None, false);
        Self { page, offer, strategy, binding, contents, can_swap, is_write_xor_exec, zero: None }
    }

    /// Makes huge pages ready for the range, with its content in them as far as it may
    /// be copied now. Nothing is left behind on failure.
    pub(super) fn stage<'p>(
        &mut self,
        plan: &'p Move,
        source: Source,
        threaded: bool,
    ) -> Result<Staged<'p>, Shortage> {
        let failed = |step| move |errno| Shortage { source, step, errno };
        // Ordinary memory can be moved by mremap on every kernel.
        let must_swap = threaded || matches!(source, Source::Thp(_));
        let wants_swap = match self.strategy {
            Strategy::Move => must_swap,
            Strategy::Swap => true,
            Strategy::Auto => must_swap || self.can_swap != Some(false),
        };
        if wants_swap && self.is_write_xor_exec && needs_file(plan, source) {
            let staged = self.stage_in_file(plan, source);
            let staged = staged.map_err(|(step, errno)| failed(step)(errno))?;
            let way = Way::Swap { staged };
            return Ok(Staged { plan, source, way, copies: Vec::new(), mappings: Vec::new() });
        }
        if wants_swap {
            let staged = map_staging(plan.range.len(), source).map_err(failed("mmap"))?;
            let filled = match self.is_swappable(staged, source) {
                Ok(true) => self.fill(plan, staged, source).map(Some),
                Ok(false) => Ok(None),
                Err(errno) => Err(("mremap", errno)),
            };
            if let Ok(Some(copies)) = filled {
                let way = Way::Swap { staged };
                return Ok(Staged { plan, source, way, copies, mappings: Vec::new() });
            }
            release(staged);
            if let Err((step, errno)) = filled {
                let is_refused =
                    step == "mprotect" && [libc::EACCES, libc::EPERM].contains(&errno.0);
                if is_refused && !self.is_write_xor_exec && needs_file(plan, source) {
                    self.is_write_xor_exec = true;
                    return self.stage(plan, source, threaded);
                }
                return Err(failed(step)(errno));
            }
            if must_swap || self.strategy == Strategy::Swap {
                return Err(failed("mremap")(Errno::EINVAL));
            }
        }
        self.prepare_move(plan, source).map_err(|(step, errno)| failed(step)(errno))
    }

    /// Stages code where memory that was writable may not become executable: in a file on
    /// pages of the pool, which is written through one mapping, and executed through
    /// another that never was writable. A private one, as the program's own; it needs no
    /// reservation, since nobody can write to it.
    fn stage_in_file(
        &mut self,
        plan: &Move,
        source: Source,
    ) -> Result<Range, (&'static str, Errno)> {
        let len = plan.range.len();
        let file = Fd::in_pool(len, source.size()).map_err(|errno| ("memfd_create", errno))?;
        let writable = file.map(len, Prot::RW, libc::MAP_SHARED).map_err(|e| ("mmap", e))?;
        let filled = self.fill_pages(plan, writable, source);
        release(writable);
        filled?;
        let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
        let staged = file.map(len, plan.prot, flags).map_err(|e| ("mmap", e))?;
        // So that the first instruction finds the page in the table.
        sys::require_readable(staged).map_err(|e| ("populate", e)).inspect_err(|_| {
            release(staged);
        })?;
        Ok(staged)
    }

    fn prepare_move<'p>(
        &mut self,
        plan: &'p Move,
        source: Source,
    ) -> Result<Staged<'p>, (&'static str, Errno)> {
        let copies = self.contents.prepare_move(plan).map_err(|errno| ("copy", errno))?;
        let (mappings, all) =
            mappings_in(plan.range, &plan.gaps).map_err(|errno| ("/proc/self/maps", errno))?;
        // To take mappings aside splits them, and to bring them home must not fail for
        // want of entries in the kernel's table: mremap refuses when it is nearly full.
        let room = max_map_count().saturating_sub(all as u64);
        if room < 2 * mappings.len() as u64 + 16 {
            return Err(("vm.max_map_count", Errno::ENOMEM));
        }
        let populate = self.populate_way().map_err(|errno| ("/dev/zero", errno))?;
        let aside = map_aligned(plan.range.len(), source.size(), Prot::NONE, libc::MAP_NORESERVE)
            .map_err(|errno| ("mmap", errno))?;
        let way = Way::Move { aside, populate, binding: self.binding };
        Ok(Staged { plan, source, way, copies, mappings })
    }

    /// Whether the kernel can move such a mapping: huge ones since Linux 5.16, or where a
    /// distribution's older one was given that. Of an older one it is found out by moving
    /// the still empty staging area once: where it can't, mremap removes its target before
    /// it fails, so this must not be tried on the program.
    fn is_swappable(&mut self, staged: Range, source: Source) -> Result<bool, Errno> {
        let Source::Hugetlb(size) = source else { return Ok(true) };
        if let Some(known) = self.can_swap {
            return Ok(known);
        }
        if sys::kernel_version().is_some_and(|version| version >= MOVES_HUGETLB) {
            self.can_swap = Some(true);
            return Ok(true);
        }
        let target = map_aligned(staged.len(), size, Prot::NONE, libc::MAP_NORESERVE)?;
        // SAFETY: both ranges were mapped just now and hold nothing yet; then back to
        // where the caller knows it.
        let (there, back) = unsafe {
            let there = sys::remap(staged, target.start()).is_ok();
            (there, there && sys::remap(target, staged.start()).is_ok())
        };
        if !back {
            release(target);
        }
        if there && !back {
            return Err(Errno::ENOMEM);
        }
        self.can_swap = Some(there);
        Ok(there)
    }

    fn populate_way(&mut self) -> Result<Populate, Errno> {
        if self.zero.is_none() {
            let probe = sys::map(self.page, Prot::RW, 0)?;
            let supported = sys::advise(probe, MADV_POPULATE_WRITE);
            release(probe);
            if supported != Err(Errno::EINVAL) {
                return Ok(Populate::Advice);
            }
            self.zero = Some(Fd::read_only(c"/dev/zero")?);
        }
        Ok(self.zero.as_ref().map_or(Populate::Advice, |fd| Populate::Read(fd.raw())))
    }

    /// Populates the staging area, copies into it, sets the final protection. Block by
    /// block, so that a page is copied into while the caches still hold the zeros that
    /// the kernel has just written there. Returns what is left for the window to copy.
    fn fill(
        &mut self,
        plan: &Move,
        staged: Range,
        source: Source,
    ) -> Result<Vec<Range>, (&'static str, Errno)> {
        self.fill_pages(plan, staged, source)?;
        if plan.prot != Prot::RW {
            // SAFETY: the area is ours. A range that is still to be copied into keeps
            // the right to be written.
            unsafe { sys::protect(staged, plan.prot) }.map_err(|errno| ("mprotect", errno))?;
        }
        if !plan.is_writable() {
            return Ok(Vec::new());
        }
        self.contents.prepare_swap(plan, staged).map_err(|errno| ("copy", errno))
    }

    /// Populates the staging area, and copies what is only read into it.
    fn fill_pages(
        &mut self,
        plan: &Move,
        staged: Range,
        source: Source,
    ) -> Result<(), (&'static str, Errno)> {
        if let Some(binding) = &self.binding {
            sys::bind(staged, binding).map_err(|errno| ("mbind", errno))?;
        }
        let read_only = !plan.is_writable();
        let mut all_huge = true;
        for page in staged.blocks(source.size()) {
            match source {
                Source::Hugetlb(_) => self.populate(page).map_err(|e| ("populate", e))?,
                Source::Thp(_) => {
                    all_huge &= self.make_thp(page).map_err(|e| ("collapse", e))?;
                }
            }
            if read_only {
                let home = page.rebase(plan.range.start() + (page.start() - staged.start()));
                // SAFETY: the page is ours, populated and writable, and stands for `home`.
                unsafe { self.contents.copy(plan, home.unwrap_or_default(), page) }
                    .map_err(|errno| ("copy", errno))?;
            }
            if read_only && plan.prot.has(Prot::EXEC) {
                let (start, len) = (sys::word(page.start()), sys::word(page.len()));
                // SAFETY: the page is mapped and readable.
                unsafe { elfremap_critical::arch::sync_code(start, len) };
            }
        }
        if !all_huge {
            require_thp(staged).map_err(|errno| ("populate", errno))?;
        }
        if self.binding.is_some() {
            // The pages are where they should be. What is written after a fork may
            // come from any node, as the program's own policy says.
            sys::bind(staged, &Binding::NONE).map_err(|errno| ("mbind", errno))?;
        }
        Ok(())
    }

    /// Takes a page of the pool: a shortage is an error, not a signal.
    fn populate(&mut self, page: Range) -> Result<(), Errno> {
        if self.zero.is_none() {
            match sys::advise(page, MADV_POPULATE_WRITE) {
                // Not known before Linux 5.14.
                Err(Errno::EINVAL) => self.zero = Some(Fd::read_only(c"/dev/zero")?),
                other => return other,
            }
        }
        let byte = Range::with_len(page.start(), 1).unwrap_or_default();
        match &self.zero {
            // The kernel's own write turns a missing page into EFAULT.
            // SAFETY: the page is ours and holds only zeros.
            Some(zero) => unsafe { zero.read_at_address(byte, 0) }.map(drop),
            None => Ok(()),
        }
    }

    /// Makes one transparent huge page. Its first small page is touched, which where
    /// memory is at hand gives the huge one; else `MADV_COLLAPSE` (Linux 6.1) makes it or
    /// fails with an error. To populate it as a whole could fall back to small pages one
    /// by one and, at a memory cgroup's limit, call the OOM killer. False when an old
    /// kernel leaves it unknown whether it is huge.
    fn make_thp(&mut self, page: Range) -> Result<bool, Errno> {
        let first = Range::with_len(page.start(), self.page).unwrap_or_default();
        self.populate(first)?;
        let is_huge = self.contents.is_huge(page);
        if is_huge == Some(true) {
            return Ok(true);
        }
        let collapsed = match sys::advise(page, MADV_COLLAPSE) {
            // A page was busy for a moment.
            Err(Errno(libc::EAGAIN)) => sys::advise(page, MADV_COLLAPSE),
            other => other,
        };
        match collapsed {
            Ok(()) => Ok(true),
            // Not known to the kernel, or transparent huge pages are off for the process.
            Err(Errno::EINVAL) if is_huge.is_none() => self.populate(page).map(|()| false),
            Err(errno) => Err(errno),
        }
    }
}

/// Whether a file on the pool can stand for a range that was refused: code that nobody
/// writes to.
fn needs_file(plan: &Move, source: Source) -> bool {
    matches!(source, Source::Hugetlb(_)) && !plan.is_writable() && plan.prot.has(Prot::EXEC)
}

fn map_staging(len: u64, source: Source) -> Result<Range, Errno> {
    match source {
        Source::Hugetlb(size) => sys::map(len, Prot::RW, hugetlb_flags(size)),
        Source::Thp(size) => {
            let range = map_aligned(len, size, Prot::RW, 0)?;
            sys::advise(range, libc::MADV_HUGEPAGE).inspect_err(|_| release(range))?;
            Ok(range)
        }
    }
}

/// The limit of mappings for a process (`vm.max_map_count`); the kernel's default when
/// it cannot be read.
fn max_map_count() -> u64 {
    let mut text = Vec::new();
    let _ = sys::read_file(c"/proc/sys/vm/max_map_count", &mut text);
    crate::hugepage::number(&text).unwrap_or(65530)
}

/// Flags for `mmap` that ask for huge pages of `size` bytes (mmap(2), Linux 3.8).
pub(super) fn hugetlb_flags(size: u64) -> i32 {
    libc::MAP_HUGETLB | (size.trailing_zeros() << libc::MAP_HUGE_SHIFT).cast_signed()
}

/// Gives a mapping of ours back.
pub(super) fn release(range: Range) {
    // SAFETY: callers pass what they mapped themselves and do not use any more.
    let _ = unsafe { sys::unmap(range) };
}
