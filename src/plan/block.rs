//! One block: what lies in it, and whether it may move.

use alloc::vec::Vec;

use super::{LOWEST, Move, Piece, Reason};
use crate::class::{Class, ClassBytes};
use crate::facts::{Area, Backing, Facts, Segment};
use crate::policy::{Backend, Merge, Policy};
use crate::prot::Prot;
use crate::range::{Range, align_down, align_up};

/// A part of the address space around the object.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// The object's own bytes, or the heap's.
    Own(Piece),
    /// Something else: in the object's place (with the class that its headers name
    /// there) or beside it.
    Other(Range, Reason, Option<Class>),
}

impl Part {
    const fn range(&self) -> Range {
        match self {
            Self::Own(piece) => piece.range,
            Self::Other(range, ..) => *range,
        }
    }
}

/// Cuts every mapping at the edges of segments, of file content and of the heap, and
/// says of each part what it is. In the order of addresses.
pub(super) fn parts(facts: &Facts) -> Vec<Part> {
    let mut parts = Vec::new();
    for area in &facts.areas {
        let mut at = area.range.start();
        while at < area.range.end() {
            let end = next_edge(facts, at).min(area.range.end());
            let Some(range) = Range::new(at, end) else {
                break;
            };
            parts.push(part(facts, area, range));
            at = end;
        }
    }
    parts
}

/// Bytes of the object by class.
pub(super) fn object_bytes(parts: &[Part]) -> ClassBytes {
    let mut bytes = ClassBytes::default();
    for part in parts {
        match part {
            Part::Own(piece) if piece.class != Class::Heap => {
                bytes.add(piece.class, piece.range.len());
            }
            Part::Other(range, _, Some(class)) => bytes.add(*class, range.len()),
            Part::Own(_) | Part::Other(..) => {}
        }
    }
    bytes
}

/// The page range of a segment, and where in it file content ends and bss begins.
fn segment_pages(facts: &Facts, segment: &Segment) -> Option<(Range, u64)> {
    let file_end = if segment.file_end > segment.range.start() {
        align_up(segment.file_end, facts.page)?
    } else {
        align_down(segment.range.start(), facts.page)
    };
    Some((segment.range.align_out(facts.page)?, file_end))
}

fn heap_pages(facts: &Facts) -> Option<Range> {
    let heap = facts.heap?;
    Range::new(align_up(heap.start, facts.page)?, align_up(heap.brk, facts.page)?)
}

/// The first edge above `at`.
fn next_edge(facts: &Facts, at: u64) -> u64 {
    let mut edge = u64::MAX;
    let mut take = |x: u64| {
        if x > at && x < edge {
            edge = x;
        }
    };
    for segment in &facts.object.segments {
        if let Some((pages, file_end)) = segment_pages(facts, segment) {
            take(pages.start());
            take(pages.end());
            take(file_end);
        }
    }
    if let Some(heap) = heap_pages(facts) {
        take(heap.start());
        take(heap.end());
    }
    edge
}

fn part(facts: &Facts, area: &Area, range: Range) -> Part {
    let own = |class, backing| Part::Own(Piece { range, prot: area.prot, class, backing });
    // Where two segments touch one page, the later one's mapping replaced the earlier's.
    let segment = facts.object.segments.iter().rev().find_map(|segment| {
        let (pages, file_end) = segment_pages(facts, segment)?;
        pages.contains(range.start()).then_some((segment, file_end))
    });
    let Some((segment, file_end)) = segment else {
        let in_heap = heap_pages(facts).is_some_and(|heap| heap.covers(range));
        return if in_heap && area.backing == Backing::Anonymous {
            own(Class::Heap, Backing::Anonymous)
        } else {
            Part::Other(range, Reason::ForeignMapping, None)
        };
    };
    let other = |reason| {
        let class = if segment.prot.has(Prot::EXEC) {
            Class::Text
        } else if !segment.prot.has(Prot::WRITE) {
            Class::Rodata
        } else if range.start() < file_end {
            Class::Data
        } else {
            Class::Bss
        };
        Part::Other(range, reason, Some(class))
    };
    match area.backing {
        Backing::File(offset) if range.start() < file_end => {
            let offset = offset + (range.start() - area.range.start());
            let into_segment = range.start() - align_down(segment.range.start(), facts.page);
            if offset != align_down(segment.offset, facts.page) + into_segment {
                return other(Reason::NotFromFile);
            }
            let class = if area.prot.has(Prot::EXEC) {
                Class::Text
            } else if area.prot.has(Prot::WRITE) {
                Class::Data
            } else if segment.prot.has(Prot::WRITE) {
                Class::Relro
            } else {
                Class::Rodata
            };
            own(class, Backing::File(offset))
        }
        Backing::Anonymous if range.start() >= file_end && segment.prot.has(Prot::WRITE) => {
            let class = if area.prot == Prot::READ { Class::Relro } else { Class::Bss };
            own(class, Backing::Anonymous)
        }
        Backing::Foreign => other(Reason::ForeignMapping),
        Backing::File(_) | Backing::Anonymous => other(Reason::NotFromFile),
    }
}

/// A block with what lies in it.
#[derive(Debug)]
pub(super) struct Block {
    range: Range,
    pub(super) bytes: ClassBytes,
    pieces: Vec<Piece>,
    gaps: Vec<Range>,
    other: Option<Reason>,
}

impl Block {
    pub(super) fn new(facts: &Facts, range: Range, parts: &[Part]) -> Self {
        let mut block = Self {
            range,
            bytes: ClassBytes::default(),
            pieces: Vec::new(),
            gaps: Vec::new(),
            other: facts.pinned.iter().find(|(r, _)| r.overlaps(range)).map(|&(_, why)| why),
        };
        let heap_room = block.heap_room(facts);
        let mut at = range.start();
        let first = parts.partition_point(|p| p.range().end() <= range.start());
        for part in parts[first..].iter().take_while(|p| p.range().start() < range.end()) {
            let inside = part.range().intersect(range);
            block.add_hole(at, inside.start(), heap_room);
            at = inside.end();
            match part {
                Part::Other(_, reason, class) => {
                    block.other = block.other.or(Some(*reason));
                    if let Some(class) = class {
                        block.bytes.add(*class, inside.len());
                    }
                }
                Part::Own(piece) => {
                    let skipped = inside.start() - piece.range.start();
                    let backing = match piece.backing {
                        Backing::File(offset) => Backing::File(offset + skipped),
                        other => other,
                    };
                    block.add_piece(Piece { range: inside, backing, ..*piece });
                }
            }
        }
        block.add_hole(at, range.end(), heap_room);
        block
    }

    fn add_piece(&mut self, piece: Piece) {
        self.bytes.add(piece.class, piece.range.len());
        super::push_piece(&mut self.pieces, piece);
    }

    /// `start..end` is not mapped: a gap, except where the heap will be once the
    /// break is raised.
    fn add_hole(&mut self, start: u64, end: u64, heap_room: Range) {
        let Some(hole) = Range::new(start, end) else {
            return;
        };
        let room = hole.intersect(heap_room);
        let (before, after) = hole.subtract(room);
        self.gaps.extend((!before.is_empty()).then_some(before));
        if !room.is_empty() {
            let (prot, class) = (Prot::RW, Class::Heap);
            self.add_piece(Piece { range: room, prot, class, backing: Backing::Anonymous });
        }
        self.gaps.extend((!after.is_empty()).then_some(after));
    }

    /// The part of the block that the heap fills when the break is raised to the
    /// block's end: empty unless the break lies in the block.
    fn heap_room(&self, facts: &Facts) -> Range {
        let room = facts
            .heap
            .filter(|heap| self.range.contains(heap.brk))
            .and_then(|heap| Range::new(align_up(heap.brk, facts.page)?, self.range.end()));
        room.unwrap_or_default()
    }

    /// Where the break has to be for the block to move: its end, when the break lies
    /// in it. (The kernel refuses to raise a break across a foreign mapping, and to
    /// lower it by less than a huge page inside one.)
    pub(super) fn raise_break_to(&self, facts: &Facts) -> Option<u64> {
        facts.heap.filter(|heap| self.range.contains(heap.brk)).map(|_| self.range.end())
    }

    /// Whether it holds a byte of a class that is to move.
    pub(super) fn is_selected(&self, policy: &Policy) -> bool {
        let selected = policy.segments.classes;
        Class::ALL.iter().any(|&class| selected.has(class) && self.bytes.get(class) > 0)
    }

    /// The protection it can have as a huge page, or why it stays.
    pub(super) fn judge(&self, facts: &Facts, policy: &Policy) -> Result<Prot, Reason> {
        if let Some(reason) = self.other {
            return Err(reason);
        }
        if self.range.start() < LOWEST {
            return Err(Reason::LowAddress);
        }
        if self.pieces.iter().any(|piece| !piece.prot.has(Prot::READ)) {
            return Err(Reason::Unreadable);
        }
        let header = facts.object.header();
        if !policy.segments.header && header.is_some_and(|h| self.range.contains(h)) {
            return Err(Reason::Header);
        }
        let prot = self.merged(policy.merge).ok_or(Reason::MixedProtections)?;
        if prot.is_write_exec() && policy.merge != Merge::Rwx {
            return Err(Reason::WriteExec);
        }
        if facts.threaded && self.pieces.iter().any(|p| p.prot.has(Prot::WRITE)) {
            return Err(Reason::Threads);
        }
        if facts.threaded && prot.has(Prot::WRITE) {
            return Err(Reason::Threads);
        }
        if facts.limited && !(self.gaps.is_empty() && self.raise_break_to(facts).is_none()) {
            return Err(Reason::Limited);
        }
        let heap_is_fixed = facts.heap.is_some_and(|heap| !heap.may_grow);
        if heap_is_fixed && self.raise_break_to(facts).is_some() {
            return Err(Reason::HeapLimit);
        }
        Ok(prot)
    }

    /// The one protection for all pieces at a merge level.
    fn merged(&self, merge: Merge) -> Option<Prot> {
        let first = self.pieces.first()?.prot;
        let all = |test: fn(&Piece) -> bool| self.pieces.iter().all(test);
        if self.pieces.iter().all(|p| p.prot == first) {
            return Some(first);
        }
        let is_code = |p: &Piece| match p.class {
            Class::Rodata => p.prot == Prot::READ,
            Class::Text => !p.prot.has(Prot::WRITE),
            _ => false,
        };
        let is_data = |p: &Piece| match p.class {
            Class::Relro => p.prot == Prot::READ,
            Class::Data | Class::Bss | Class::Heap => p.prot == Prot::RW,
            _ => false,
        };
        let joins = match merge {
            Merge::None => false,
            Merge::Rx => all(is_code),
            Merge::Relro => all(is_code) || all(is_data),
            Merge::Rwx => true,
        };
        joins.then(|| self.pieces.iter().fold(Prot::NONE, |sum, p| sum | p.prot))
    }

    pub(super) fn into_move(self, prot: Prot, policy: &Policy) -> Move {
        let class = self.pieces.iter().map(|p| p.class).min().unwrap_or(Class::Bss);
        let mut backend = policy.backends.of(class);
        if policy.writable_off_pool && backend == Backend::Hugetlb && prot.has(Prot::WRITE) {
            backend = Backend::Auto;
        }
        Move {
            range: self.range,
            prot,
            backend,
            pieces: self.pieces,
            gaps: self.gaps,
            bytes: self.bytes,
        }
    }
}
