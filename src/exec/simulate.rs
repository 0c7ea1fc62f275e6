//! A model address space that runs the steps of a [`Program`] and injects failures, and
//! the comparison of the model with the kernel.

use std::collections::BTreeMap;

use elfremap_critical::{KIND_COPY, KIND_END, KIND_JUMP, KIND_SYNC, KIND_SYSCALL};
use proptest::prelude::*;

use super::numa::Binding;
use super::program::{Committed, Emergency, Populate, Program, Source, Staged, Way};
use super::sys::number;
use crate::facts::{Area, Backing, Facts, Heap, Object, Segment};
use crate::plan::{self, Move, Plan};
use crate::policy::{Backend, Backends, Merge, Numa, Policy, Segments};
use crate::prot::Prot;
use crate::range::Range;

const PAGE: u64 = 0x1000;
const BLOCK: u64 = 0x8000;
/// Where the model keeps staged copies and what was taken aside.
const ELSEWHERE: u64 = 0x7000_0000_0000;

const NOWHERE: Emergency = Emergency { message: (0, 0), zeros: 0, abort_set: 0, pid: 0, tid: 0 };

/// A page: its protection, and a number that stands for its content (0: zeros).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Page {
    prot: Prot,
    content: u64,
}

/// How the n-th system call fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    /// Before it did anything.
    Early,
    /// After it removed what it was to replace.
    Late,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Space {
    pages: BTreeMap<u64, Page>,
    torn: bool,
}

impl Space {
    fn map(&mut self, range: Range, prot: Prot, content: impl Fn(u64) -> u64) {
        for page in range.blocks(PAGE) {
            let page = page.start();
            self.pages.insert(page, Page { prot, content: content(page) });
        }
    }

    fn unmap(&mut self, range: Range) {
        self.pages.retain(|&page, _| !range.contains(page));
    }

    fn is_mapped(&self, range: Range) -> bool {
        range.blocks(PAGE).all(|page| self.pages.contains_key(&page.start()))
    }

    /// What the space looks like inside `range`.
    fn view(&self, range: Range) -> Vec<(u64, Page)> {
        self.pages.range(range.start()..range.end()).map(|(&at, &page)| (at, page)).collect()
    }

    /// One system call: its error number, 0 for success.
    fn call(&mut self, nr: usize, args: [usize; 6], fault: Option<Fault>) -> usize {
        let range = |at: usize, len: usize| Range::with_len(at as u64, len as u64).unwrap();
        let failed = |fault: Option<Fault>| fault.is_some();
        if nr == number(libc::SYS_mremap) {
            let (from, to) = (range(args[0], args[1]), range(args[4], args[1]));
            assert!(!from.overlaps(to));
            if fault == Some(Fault::Early) {
                return enomem();
            }
            self.unmap(to);
            if fault == Some(Fault::Late) {
                return enomem();
            }
            assert!(self.is_mapped(from), "mremap of a hole at {from}");
            for (at, page) in self.view(from) {
                self.pages.remove(&at);
                self.pages.insert(at - from.start() + to.start(), page);
            }
        } else if nr == number(libc::SYS_mmap)
            && args[3] & super::sys::flag(libc::MAP_FIXED_NOREPLACE) != 0
        {
            let range = range(args[0], args[1]);
            if failed(fault) || range.blocks(PAGE).any(|p| self.pages.contains_key(&p.start())) {
                return enomem();
            }
            self.map(range, Prot::NONE, |_| 0);
        } else if nr == number(libc::SYS_mmap) {
            if fault == Some(Fault::Early) {
                return enomem();
            }
            self.unmap(range(args[0], args[1]));
            if fault == Some(Fault::Late) {
                return enomem();
            }
            self.map(range(args[0], args[1]), Prot::RW, |_| 0);
        } else if nr == number(libc::SYS_munmap) {
            if failed(fault) {
                return enomem();
            }
            self.unmap(range(args[0], args[1]));
        } else if nr == number(libc::SYS_mprotect) {
            if failed(fault) {
                return enomem();
            }
            let range = range(args[0], args[1]);
            assert!(self.is_mapped(range));
            let prot = [Prot::READ, Prot::WRITE, Prot::EXEC]
                .into_iter()
                .filter(|p| super::sys::flag(p.to_raw()) & args[2] != 0)
                .fold(Prot::NONE, |sum, p| sum | p);
            for page in range.blocks(PAGE) {
                self.pages.get_mut(&page.start()).unwrap().prot = prot;
            }
        } else if nr == number(libc::SYS_madvise) || nr == number(libc::SYS_mbind) {
            if failed(fault) {
                return enomem();
            }
        } else if nr == number(libc::SYS_read) {
            if failed(fault) {
                return enomem();
            }
            let page = self.pages.get_mut(&(args[1] as u64)).expect("read into a hole");
            assert!(page.prot.has(Prot::WRITE));
            page.content = 0;
        } else if nr == number(libc::SYS_tgkill) {
            self.torn = true;
        }
        0
    }

    /// Runs a program; the `nth` system call from 0 fails. Returns the number of calls.
    fn run(&mut self, program: &mut Program, fault: Option<(usize, Fault)>) -> usize {
        let (mut at, mut calls) = (0, 0);
        for _ in 0..10_000 {
            let op = program.ops[at];
            let mut result = 0;
            let mut next = at + 1;
            match op.kind {
                KIND_SYSCALL => {
                    let fault = fault.filter(|&(nth, _)| nth == calls).map(|(_, fault)| fault);
                    calls += 1;
                    result = self.call(op.number, op.args, fault);
                    if result != 0 {
                        next = op.target;
                    }
                }
                KIND_COPY => self.copy(op.args[0] as u64, op.args[1] as u64, op.args[2] as u64),
                KIND_SYNC => {
                    assert!(
                        self.is_mapped(
                            Range::with_len(op.args[0] as u64, op.args[1] as u64).unwrap()
                        )
                    );
                }
                KIND_JUMP => next = op.target,
                KIND_END => return calls,
                kind => panic!("unknown step {kind}"),
            }
            program.ops[at].result = result;
            at = next;
        }
        panic!("the program does not end");
    }

    fn copy(&mut self, to: u64, from: u64, len: u64) {
        for page in Range::with_len(from, len).unwrap().blocks(PAGE) {
            let source = self.pages[&page.start()];
            assert!(source.prot.has(Prot::READ), "copy from an unreadable page");
            let target = self.pages.get_mut(&(page.start() - from + to)).expect("copy to a hole");
            assert!(target.prot.has(Prot::WRITE), "copy to a read-only page");
            target.content = source.content;
        }
    }
}

fn enomem() -> usize {
    usize::try_from(libc::ENOMEM).unwrap()
}

/// A program as some linker may have laid it out, and the space around it.
#[derive(Clone, Debug)]
struct Layout {
    facts: Facts,
    policy: Policy,
}

fn layouts() -> impl Strategy<Value = Layout> {
    let segment = (1u64..40, 0u64..12, prop::sample::select(vec![4u32, 5, 6, 6]), 0u64..40);
    let merges = vec![Merge::None, Merge::Rx, Merge::Relro, Merge::Rwx];
    (
        0u64..16,
        prop::collection::vec(segment, 1..6),
        (prop::sample::select(merges), any::<bool>(), any::<bool>()),
        (any::<bool>(), 0u64..12, 0u64..24),
        any::<bool>(),
    )
        .prop_map(|(bias, segments, (merge, rodata, header), (heap, away, len), threaded)| {
            let mut at = 0x5555_0000_0000 + bias * PAGE;
            let mut offset = 0;
            let mut object = Object::default();
            let mut areas = Vec::new();
            let mut add = |start: u64, pages: u64, prot, backing| {
                if pages > 0 {
                    let range = Range::with_len(start, pages * PAGE).unwrap();
                    areas.push(Area { range, prot, backing });
                }
            };
            for (pages, gap, flags, bss) in segments {
                let prot = Prot::from_p_flags(flags);
                let bss = if prot.has(Prot::WRITE) { bss } else { 0 };
                object.segments.push(Segment {
                    range: Range::with_len(at, (pages + bss) * PAGE).unwrap(),
                    file_end: at + pages * PAGE,
                    offset,
                    prot,
                });
                let relro = if prot.has(Prot::WRITE) { pages / 3 } else { 0 };
                add(at, relro, Prot::READ, Backing::File(offset));
                let file = Backing::File(offset + relro * PAGE);
                add(at + relro * PAGE, pages - relro, prot, file);
                add(at + pages * PAGE, bss, prot, Backing::Anonymous);
                offset += pages * PAGE;
                at += (pages + bss + gap) * PAGE;
            }
            let end = object.span().end();
            let heap = heap.then(|| {
                let start = end + away * PAGE;
                add(start, len, Prot::RW, Backing::Anonymous);
                Heap { start, brk: start + len * PAGE, may_grow: true }
            });
            let facts = Facts {
                page: PAGE,
                block: BLOCK,
                object,
                areas,
                heap,
                threaded,
                limited: false,
                pinned: Vec::new(),
            };
            let mut segments: Segments = "text,data,bss".parse().unwrap();
            if rodata {
                segments = "text,rodata,data,bss".parse().unwrap();
            }
            segments.header = header;
            let backends = Backends::all(Backend::Hugetlb);
            Layout { facts, policy: Policy { segments, merge, backends, ..Policy::default() } }
        })
}

/// The space before anything: every page with a content of its own, every third page of
/// anonymous memory untouched.
fn initial(facts: &Facts, plan: &Plan) -> Space {
    let mut space = Space::default();
    for area in &facts.areas {
        space.map(area.range, area.prot, |page| content(area.backing, page));
    }
    if let (Some(to), Some(heap)) = (plan.raise_break_to, facts.heap) {
        let room = Range::new(heap.brk, to).unwrap();
        space.map(room, Prot::RW, |_| 0);
    }
    space
}

fn content(backing: Backing, page: u64) -> u64 {
    if backing == Backing::Anonymous && (page / PAGE).is_multiple_of(3) { 0 } else { page }
}

/// The ways to commit a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Swap,
    Move,
    MoveByRead,
}

/// Stages a range in the model as the stager does on the machine.
fn staged<'a>(space: &mut Space, plan: &'a Move, way: Kind) -> Staged<'a> {
    let area = Range::with_len(ELSEWHERE, plan.range.len()).unwrap();
    for &gap in &plan.gaps {
        space.map(gap, Prot::NONE, |_| 0);
    }
    let mut copies = Vec::new();
    for piece in &plan.pieces {
        for page in piece.range.blocks(PAGE) {
            if space.pages[&page.start()].content != 0 {
                copies.push(page);
            }
        }
    }
    if way == Kind::Swap {
        let read_only = !plan.is_writable();
        space.map(area, plan.prot, |_| 0);
        if read_only {
            for page in copies.drain(..) {
                let content = space.pages[&page.start()].content;
                let at = page.start() - plan.range.start() + area.start();
                space.pages.get_mut(&at).unwrap().content = content;
            }
        }
        let way = Way::Swap { staged: area };
        return Staged { plan, source: Source::Hugetlb(BLOCK), way, copies, mappings: Vec::new() };
    }
    space.map(area, Prot::NONE, |_| 0);
    let mappings = plan.pieces.iter().map(|piece| piece.range).collect();
    let (populate, source, binding) = match way {
        Kind::MoveByRead => (Populate::Read(0), Source::Hugetlb(BLOCK), Binding::new(Numa::Local)),
        _ => (Populate::Advice, Source::Hugetlb(BLOCK), None),
    };
    Staged { plan, source, way: Way::Move { aside: area, populate, binding }, copies, mappings }
}

/// The pages of a range that are the program's, without what merely fills gaps.
fn own_pages(space: &Space, plan: &Move) -> Vec<(u64, Page)> {
    plan.pieces.iter().flat_map(|piece| space.view(piece.range)).collect()
}

fn check(layout: &Layout, way: Kind) -> Result<(), TestCaseError> {
    let plan = plan::survey(&layout.facts, &layout.policy);
    let before = initial(&layout.facts, &plan);
    for range in &plan.moves {
        let mut fault = None;
        let mut calls = 1;
        let mut nth = 0;
        // First without a fault, which tells the number of calls; then each call fails.
        loop {
            let mut space = before.clone();
            let staged = staged(&mut space, range, way);
            let mut program = Program::new(&staged, PAGE, &NOWHERE);
            let made = space.run(&mut program, fault);
            if fault.is_none() {
                calls = made;
                prop_assert_eq!(program.outcome(), Committed::Moved);
            }
            prop_assert!(!space.torn, "torn by one fault: {:?}", fault);
            let outside = |space: &Space| {
                let mut rest = space.clone();
                rest.unmap(range.range);
                rest.unmap(Range::with_len(ELSEWHERE, range.range.len()).unwrap());
                rest
            };
            prop_assert_eq!(outside(&space), outside(&before), "something else was touched");
            let now = own_pages(&space, range);
            let then = own_pages(&before, range);
            if program.outcome() == Committed::Moved {
                let moved: Vec<_> = then
                    .iter()
                    .map(|&(at, page)| (at, Page { prot: range.prot, ..page }))
                    .collect();
                prop_assert_eq!(now, moved);
            } else {
                prop_assert_eq!(now, then, "not as before after {:?}", fault);
            }
            fault = match fault {
                None => Some((0, Fault::Early)),
                Some((n, Fault::Early)) => Some((n, Fault::Late)),
                Some(_) => {
                    nth += 1;
                    Some((nth, Fault::Early))
                }
            };
            if nth >= calls {
                break;
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn swap_is_whole_or_untouched(layout in layouts()) {
        check(&layout, Kind::Swap)?;
    }

    #[test]
    fn moving_aside_is_whole_or_untouched(layout in layouts()) {
        check(&layout, Kind::Move)?;
    }

    #[test]
    fn populating_by_read_is_whole_or_untouched(layout in layouts()) {
        check(&layout, Kind::MoveByRead)?;
    }

    #[test]
    fn plans_keep_the_promises(layout in layouts()) {
        let facts = &layout.facts;
        let plan = plan::survey(facts, &layout.policy);
        let mut end = 0;
        for range in &plan.moves {
            prop_assert!(range.range.start() >= end, "ranges overlap");
            end = range.range.end();
            prop_assert_eq!(range.range.start() % BLOCK, 0);
            prop_assert_eq!(range.range.len() % BLOCK, 0);
            // Pieces and gaps partition the range.
            let mut parts: Vec<_> = range.pieces.iter().map(|p| p.range).chain(range.gaps.iter().copied()).collect();
            parts.sort();
            let mut at = range.range.start();
            for part in parts {
                prop_assert_eq!(part.start(), at);
                at = part.end();
            }
            prop_assert_eq!(at, range.range.end());
            for piece in &range.pieces {
                match layout.policy.merge {
                    Merge::None => prop_assert_eq!(piece.prot, range.prot),
                    Merge::Rx => prop_assert!(!range.prot.has(Prot::WRITE) || piece.prot == range.prot),
                    Merge::Relro => prop_assert!(!range.prot.is_write_exec()),
                    Merge::Rwx => {}
                }
                prop_assert!(range.prot.has(piece.prot), "a right was lost");
            }
            // Gaps are nobody's.
            for gap in &range.gaps {
                prop_assert!(facts.areas.iter().all(|area| !area.range.overlaps(*gap)));
                prop_assert!(!facts.heap.is_some_and(|heap| gap.contains(heap.brk)));
            }
            prop_assert!(!(facts.threaded && range.is_writable()));
            if let Some(header) = facts.object.header() {
                prop_assert!(layout.policy.segments.header || !range.range.contains(header));
            }
        }
        // The break stays usable: it never lies inside a moved range.
        if let Some(heap) = facts.heap {
            let brk = plan.raise_break_to.unwrap_or(heap.brk);
            prop_assert!(plan.moves.iter().all(|m| !(m.range.start() < brk && brk < m.range.end())));
        }
        // At the strictest level every block of one protection that may move does.
        if layout.policy.merge == Merge::None && !facts.threaded {
            for block in facts.object.blocks(BLOCK) {
                let inside: Vec<_> = facts.areas.iter().filter(|a| a.range.overlaps(block)).collect();
                let one = inside.iter().all(|a| a.prot == inside[0].prot && a.prot.has(Prot::EXEC));
                let header = facts.object.header().is_some_and(|h| block.contains(h));
                // Where the break lies behind code, its block stays.
                let has_break = facts.heap.is_some_and(|h| block.start() < h.brk && h.brk < block.end());
                let stays = header || has_break || inside.is_empty() || inside[0].prot.has(Prot::WRITE);
                if one && !stays {
                    prop_assert!(plan.moves.iter().any(|m| m.range.covers(block)));
                }
            }
        }
    }

    #[test]
    fn planning_a_remapped_process_is_empty(layout in layouts()) {
        let plan = plan::survey(&layout.facts, &layout.policy);
        let mut after = layout.facts.clone();
        // What moved to the pool is a mapping of its own kind now.
        let mut areas = Vec::new();
        for area in &after.areas {
            let mut rest = vec![area.range];
            for moved in &plan.moves {
                rest = rest.into_iter().flat_map(|r| <[Range; 2]>::from(r.subtract(moved.range))).collect();
            }
            for range in rest.into_iter().filter(|r| !r.is_empty()) {
                let backing = match area.backing {
                    Backing::File(offset) => Backing::File(offset + range.start() - area.range.start()),
                    other => other,
                };
                areas.push(Area { range, prot: area.prot, backing });
            }
        }
        for moved in &plan.moves {
            areas.push(Area { range: moved.range, prot: moved.prot, backing: Backing::Foreign });
        }
        areas.sort_by_key(|area| area.range);
        after.areas = areas;
        if let (Some(heap), Some(to)) = (&mut after.heap, plan.raise_break_to) {
            heap.brk = to;
        }
        prop_assert_eq!(plan::survey(&after, &layout.policy).moves, vec![]);
    }
}

/// The same steps on the model and on real memory, with transparent huge pages.
#[test]
fn the_model_agrees_with_the_kernel() {
    use super::{content, discover, pagemap, stage, sys};
    use crate::class::{Class, ClassBytes};
    use crate::proc::maps;

    const HUGE: u64 = 2 << 20;
    let word = |address: u64| core::ptr::with_exposed_provenance_mut::<u64>(sys::word(address));
    for prot in [Prot::RW, Prot::READ] {
        let home = discover::map_aligned(HUGE, HUGE, Prot::RW, 0).unwrap();
        let at = |page: u64| home.start() + page * PAGE;
        let gap = Range::new(at(10), at(20)).unwrap();
        let pieces: Vec<_> = [(at(0), at(10)), (at(20), at(512))]
            .map(|(start, end)| plan::Piece {
                range: Range::new(start, end).unwrap(),
                prot,
                class: Class::Bss,
                backing: Backing::Anonymous,
            })
            .into();
        let mut space = Space::default();
        for piece in &pieces {
            space.map(piece.range, prot, |page| content(Backing::Anonymous, page));
        }
        let real = |page: u64| {
            // SAFETY: callers pass pages of the mapping above, readable at that time.
            unsafe { word(page).read() }
        };
        for (page, wanted) in space.view(home) {
            if wanted.content != 0 {
                // SAFETY: as above, and still writable.
                unsafe { word(page).write(wanted.content) };
            }
        }
        // SAFETY: nobody uses the gap, or writes to the rest.
        unsafe {
            sys::unmap(gap).unwrap();
            pieces.iter().for_each(|piece| sys::protect(piece.range, prot).unwrap());
        }
        sys::claim(gap).unwrap();
        space.map(gap, Prot::NONE, |_| 0);
        let range = Move {
            range: home,
            prot,
            pieces,
            gaps: vec![gap],
            bytes: ClassBytes::default(),
            backend: Backend::Thp,
        };
        let offer = stage::Offer::new(Vec::new());
        let contents = content::Contents::new(pagemap::Pagemap::open(PAGE).unwrap(), None);
        let mut stager = stage::Stager::new(PAGE, &offer, &Policy::default(), contents);
        let ready = stager.stage(&range, Source::Thp(HUGE), false).unwrap();
        let Way::Swap { staged: elsewhere } = ready.way else { panic!("THP are swapped") };
        // Into the model goes what the stager made ready.
        let copied_early = !range.is_writable();
        let before = space.clone();
        space.map(elsewhere, prot, |page| {
            let original = before.pages[&(page - elsewhere.start() + home.start())].content;
            if copied_early { original } else { 0 }
        });
        let mut program = Program::new(&ready, PAGE, &NOWHERE);
        space.run(&mut program, None);
        assert_eq!(program.outcome(), Committed::Moved);
        let mut program = Program::new(&ready, PAGE, &NOWHERE);
        // SAFETY: the steps replace `home` by its copy; both are mappings of this test,
        // and no reference into them exists.
        unsafe { elfremap_critical::run(program.ops.as_mut_ptr()) };
        assert_eq!(program.outcome(), Committed::Moved);
        let text = discover::read_maps().unwrap();
        for (page, wanted) in space.view(home) {
            let mapping = maps::parse(&text).map(Result::unwrap).find(|m| m.range.contains(page));
            assert_eq!(mapping.unwrap().prot, wanted.prot);
            assert_eq!(real(page), wanted.content, "page {page:#x}");
        }
        stage::release(home);
    }
}
