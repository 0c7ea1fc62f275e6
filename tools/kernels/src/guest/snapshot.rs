//! A process at one moment, and what the plain run of a program says should move.
//! Written apart from the product's planner, so that both can be held against each
//! other.

use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use elfremap::proc::smaps;
use elfremap::prot::Prot;
use elfremap::range::Range;
use std::path::Path;

/// A mapping.
#[derive(Clone, Debug)]
pub(crate) struct Area {
    pub(crate) range: Range,
    pub(crate) prot: Prot,
    offset: u64,
    /// Whether it is of the program's file.
    own_file: bool,
    anonymous: bool,
    heap: bool,
    anon_huge: u64,
    page_size: u64,
}

/// All mappings of a process.
#[derive(Clone, Debug)]
pub(crate) struct Snapshot {
    pub(crate) areas: Vec<Area>,
    /// Bytes from the program's first segment to its last one's end.
    program_len: u64,
}

/// Where a block's pages come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Hugetlb(PageSize),
    Thp,
}

impl Snapshot {
    pub(crate) fn take(pid: u32, program: &Path) -> Result<Self> {
        let path = format!("/proc/{pid}/smaps");
        let text = std::fs::read(&path).with_context(|| format!("cannot read {path}"))?;
        let program_len = loaded_len(program).context("cannot read the program's headers")?;
        let program = program.as_os_str().as_encoded_bytes();
        let mut areas = Vec::new();
        for entry in smaps::parse(&text) {
            let entry = entry.with_context(|| format!("cannot parse {path}"))?;
            let mapping = entry.mapping;
            areas.push(Area {
                range: mapping.range,
                prot: mapping.prot,
                offset: mapping.offset,
                own_file: mapping.name == program,
                anonymous: mapping.inode == 0 && mapping.name.is_empty(),
                heap: mapping.name == b"[heap]",
                anon_huge: entry.anon_huge,
                page_size: entry.kernel_page_size,
            });
        }
        Ok(Self { areas, program_len })
    }

    /// The program's own memory in a plain run, by protection: its file's mappings, and
    /// the anonymous one right behind them up to the end of bss (the kernel may have
    /// joined bss and heap).
    fn own(&self) -> Vec<(Range, Prot)> {
        let Some(first) = self.areas.iter().find(|area| area.own_file) else { return Vec::new() };
        let span = Range::with_len(first.range.start(), self.program_len).unwrap_or_default();
        let mut end = None;
        let mut own = Vec::new();
        for area in &self.areas {
            let is_bss = (area.anonymous || area.heap) && end == Some(area.range.start());
            let range = area.range.intersect(span);
            if (area.own_file || is_bss) && !range.is_empty() {
                end = Some(area.range.end());
                own.push((range, area.prot));
            }
        }
        own
    }

    /// Where the ELF header is loaded.
    fn header(&self) -> Option<u64> {
        let first = self.areas.iter().find(|area| area.own_file && area.offset == 0)?;
        Some(first.range.start())
    }

    /// The mappings around the program, for messages.
    pub(crate) fn describe(&self) -> String {
        let below_libraries = self.areas.iter().filter(|area| area.range.start() < 1 << 46);
        let line =
            |area: &Area| format!("{} {:?} {}K", area.range, area.prot, area.page_size >> 10);
        below_libraries.map(line).collect::<Vec<_>>().join(", ")
    }

    /// The blocks of `size` bytes of this plain run whose bytes all have one
    /// protection and are the program's (or its heap's), except the one with the ELF
    /// header; together with those that hold only constants, which may go either way.
    pub(crate) fn movable(&self, size: PageSize) -> Movable {
        let own = self.own();
        let mut blocks: Vec<Range> =
            own.iter().flat_map(|(range, _)| range.blocks(size.bytes())).collect();
        blocks.dedup();
        let mut movable = Movable::default();
        for block in blocks {
            let inside: Vec<&Area> =
                self.areas.iter().filter(|area| area.range.overlaps(block)).collect();
            let is_own =
                |area: &&Area| area.heap || own.iter().any(|(own, _)| own.overlaps(area.range));
            let one_protection = inside.iter().all(|area| area.prot == inside[0].prot);
            let has_header = self.header().is_some_and(|address| block.contains(address));
            if !inside.iter().all(is_own) || !one_protection || has_header {
                continue;
            }
            let bytes = own.iter().map(|(range, _)| range.intersect(block).len()).sum::<u64>();
            if inside[0].prot == Prot::READ {
                movable.undecided.push(block);
            } else {
                movable.certain.push(block);
                movable.bytes += bytes;
            }
        }
        // Less than one page to gain is not worth a page.
        if movable.bytes < size.bytes() {
            movable.undecided.append(&mut movable.certain);
        }
        movable
    }

    /// Every byte of the plain run has the same rights here.
    pub(crate) fn same_rights_as(&self, plain: &Self) -> Result<()> {
        for (range, had) in plain.own() {
            let mut at = range.start();
            while at < range.end() {
                let now = self.areas.iter().find(|now| now.range.contains(at));
                let now = now.with_context(|| format!("{at:#x} is not mapped any more"))?;
                ensure!(now.prot == had, "{at:#x}: {had:?} became {:?}", now.prot);
                at = now.range.end();
            }
        }
        let write_exec = |s: &Self| s.areas.iter().filter(|a| a.prot.is_write_exec()).count();
        ensure!(write_exec(self) == write_exec(plain), "writable and executable memory");
        Ok(())
    }

    /// Whether all of `block` lies on pages of this kind.
    fn is_on(&self, block: Range, kind: Kind) -> bool {
        let covered: u64 = self
            .areas
            .iter()
            .filter(|area| match kind {
                Kind::Hugetlb(size) => area.page_size == size.bytes(),
                // As many bytes as lie in the mapping's whole pages.
                Kind::Thp => area.anon_huge > 0,
            })
            .map(|area| area.range.intersect(block).len())
            .sum();
        covered == block.len()
    }

    /// All of these blocks lie on pages of this kind.
    pub(crate) fn all_on(&self, blocks: &[Range], kind: Kind) -> Result<()> {
        for &block in blocks {
            ensure!(self.is_on(block, kind), "{block} is not on {kind:?}");
        }
        Ok(())
    }

    /// None of these blocks holds a huge page.
    pub(crate) fn none_huge(&self, blocks: &[Range]) -> Result<()> {
        let is_huge = |area: &&Area| area.page_size > base_page(self) || area.anon_huge > 0;
        let huge = self.areas.iter().filter(is_huge);
        let found: Vec<Range> = huge.map(|area| area.range).collect();
        let hit = blocks.iter().find(|block| found.iter().any(|range| range.overlaps(**block)));
        ensure!(hit.is_none(), "huge pages in {hit:?}");
        Ok(())
    }

    /// Exactly the blocks that should move lie on pages of this kind.
    pub(crate) fn moved_exactly(&self, movable: &Movable, kind: Kind) -> Result<()> {
        ensure!(!movable.certain.is_empty(), "the program has nothing to move");
        self.all_on(&movable.certain, kind)?;
        self.nothing_else(movable, kind)
    }

    /// No block but those that may move lies on pages of this kind.
    pub(crate) fn nothing_else(&self, movable: &Movable, kind: Kind) -> Result<()> {
        let all = movable.all();
        let allowed =
            |range: Range| all.iter().map(|block| block.intersect(range).len()).sum::<u64>();
        for area in &self.areas {
            let huge = match kind {
                Kind::Hugetlb(_) if area.page_size > base_page(self) => area.range.len(),
                Kind::Hugetlb(_) => 0,
                Kind::Thp => area.anon_huge,
            };
            ensure!(huge <= allowed(area.range), "{} is on huge pages", area.range);
        }
        Ok(())
    }

    /// Bytes of the pools that the process has mapped.
    pub(crate) fn hugetlb_bytes(&self) -> u64 {
        let page = base_page(self);
        let huge = self.areas.iter().filter(|area| area.page_size > page);
        huge.map(|area| area.range.len()).sum()
    }
}

/// Bytes from the first loadable segment's first page to the last one's end, to whole
/// pages of the memory manager (elf(5), 64-bit, of this machine's byte order).
fn loaded_len(program: &Path) -> Result<u64> {
    const PT_LOAD: u64 = 1;
    const BASE_PAGE: u64 = 4096;
    let bytes = std::fs::read(program)?;
    let number = |offset: usize, len: usize| -> Result<u64> {
        let field = bytes.get(offset..offset + len).context("the file is too short")?;
        let mut word = [0; 8];
        word[..len].copy_from_slice(field);
        Ok(u64::from_le_bytes(word))
    };
    let table = usize::try_from(number(32, 8)?)?;
    let entry_size = usize::try_from(number(54, 2)?)?;
    let (mut start, mut end) = (u64::MAX, 0);
    for index in 0..usize::try_from(number(56, 2)?)? {
        let at = table + index * entry_size;
        if number(at, 4)? == PT_LOAD {
            let address = number(at + 16, 8)?;
            start = start.min(address / BASE_PAGE * BASE_PAGE);
            end = end.max(address + number(at + 40, 8)?);
        }
    }
    ensure!(start < end, "no loadable segment");
    Ok((end - start).next_multiple_of(BASE_PAGE))
}

fn base_page(snapshot: &Snapshot) -> u64 {
    snapshot.areas.iter().map(|area| area.page_size).min().unwrap_or(4096)
}

/// What should move.
#[derive(Clone, Default, Debug)]
pub(crate) struct Movable {
    /// Blocks that must.
    pub(crate) certain: Vec<Range>,
    /// Blocks that may.
    pub(crate) undecided: Vec<Range>,
    bytes: u64,
}

impl Movable {
    /// Those that must, in `plain`: what is written, and what is only read.
    pub(crate) fn certain_by_right(&self, plain: &Snapshot) -> (Vec<Range>, Vec<Range>) {
        self.certain.iter().partition(|block| {
            let mut areas = plain.areas.iter();
            areas.any(|area| area.range.overlaps(**block) && area.prot.has(Prot::WRITE))
        })
    }

    /// Every block that may lie on huge pages.
    pub(crate) fn all(&self) -> Vec<Range> {
        [self.certain.as_slice(), &self.undecided].concat()
    }
}
