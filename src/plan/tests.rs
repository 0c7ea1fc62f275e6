use super::*;
use crate::facts::{Area, Heap, Object, Segment};
use crate::policy::{Backends, Merge, Segments};

const M: u64 = 1 << 20;
const B: u64 = 2 * M;

fn r(start: u64, end: u64) -> Range {
    Range::new(start, end).unwrap()
}

/// A default link (R, RX, R, RW with relro) at `bias`: 1 MiB of headers and
/// read-only data, 8 MiB of text, 3 MiB of rodata, 1 MiB relro, 2 MiB data, 5 MiB bss.
fn program(bias: u64) -> Facts {
    let at = |x: u64| bias + x * M;
    let segment = |from, to, file_to, prot| Segment {
        range: r(at(from), at(to)),
        file_end: at(file_to),
        offset: from * M,
        prot,
    };
    let area = |from: u64, to, prot, backing| Area { range: r(at(from), at(to)), prot, backing };
    let file = |from: u64| Backing::File(from * M);
    Facts {
        page: 4096,
        block: B,
        object: Object {
            segments: vec![
                segment(0, 1, 1, Prot::READ),
                segment(1, 9, 9, Prot::RX),
                segment(9, 12, 12, Prot::READ),
                segment(12, 20, 15, Prot::RW),
            ],
            relro: Some(r(at(12), at(13))),
        },
        areas: vec![
            area(0, 1, Prot::READ, file(0)),
            area(1, 9, Prot::RX, file(1)),
            area(9, 12, Prot::READ, file(9)),
            area(12, 13, Prot::READ, file(12)),
            area(13, 15, Prot::RW, file(13)),
            area(15, 20, Prot::RW, Backing::Anonymous),
        ],
        heap: None,
        threaded: false,
        limited: false,
        pinned: Vec::new(),
    }
}

#[test]
fn default_level_moves_whole_blocks_of_one_protection() {
    let facts = program(0x5555_0000_0000);
    let plan = plan(&facts, &Policy::default()).unwrap();
    // Text 2..8 MiB; 12..14 mixes relro and data; data 14..16 and bss 16..20 are two
    // moves, since bss alone may become large.
    let found: Vec<_> =
        plan.moves.iter().map(|m| (m.range.start() % (1 << 32) / M, m.range.len() / M)).collect();
    assert_eq!(found, [(2, 6), (14, 2), (16, 4)]);
    assert_eq!(plan.moved().get(Class::Text), 6 * M);
    assert_eq!(plan.total.get(Class::Bss), 5 * M);
    assert_eq!(plan.total.get(Class::Relro), M);
    assert_eq!((plan.pages(), plan.pool_pages()), (6, 3));
    let reasons: Vec<_> = plan.left.iter().map(|l| l.reason).collect();
    assert_eq!(reasons, [Reason::Header, Reason::MixedProtections, Reason::MixedProtections]);
}

#[test]
fn merge_levels() {
    let facts = program(0x5555_0000_0000);
    let with = |merge| plan(&facts, &Policy { merge, ..Policy::default() }).unwrap();
    assert_eq!(with(Merge::Rx).moved().get(Class::Text), 7 * M);
    assert_eq!(with(Merge::Rx).moved().get(Class::Data), M);
    let relro = with(Merge::Relro);
    assert_eq!(relro.moved().get(Class::Data), 2 * M);
    assert!(relro.moves.iter().all(|m| !m.prot.is_write_exec()));
    // At rwx all but the header's block and the one that is rodata alone.
    let rwx = with(Merge::Rwx);
    assert_eq!(rwx.moved().total(), 16 * M);
}

#[test]
fn header_block_on_request() {
    let facts = program(0x5555_0000_0000);
    let segments: Segments = "text,rodata,header".parse().unwrap();
    let policy = Policy { segments, merge: Merge::Rx, ..Policy::default() };
    let plan = plan(&facts, &policy).unwrap();
    assert_eq!(plan.moves[0].range.start(), 0x5555_0000_0000);
}

#[test]
fn growth_into_nothing_but_not_over_others() {
    let mut facts = program(0x5555_0000_0000 + M);
    let span_end = facts.object.span().end();
    let policy = Policy::default();
    let planned = plan(&facts, &policy).unwrap();
    let last = planned.moves.last().unwrap();
    assert_eq!(last.range.end(), span_end + M);
    assert_eq!(last.gaps, [r(span_end, span_end + M)]);
    facts.areas.push(Area {
        range: r(span_end + 0x1000, span_end + 0x2000),
        prot: Prot::RW,
        backing: Backing::Anonymous,
    });
    let planned = plan(&facts, &policy).unwrap();
    assert!(planned.moves.iter().all(|m| m.gaps.is_empty()));
    assert!(planned.left.iter().any(|l| l.reason == Reason::ForeignMapping));
}

#[test]
fn heap_tail_moves_along() {
    let mut facts = program(0x5555_0000_0000 + M);
    let end = facts.object.span().end();
    facts.areas.push(Area {
        range: r(end, end + 0x21000),
        prot: Prot::RW,
        backing: Backing::Anonymous,
    });
    facts.heap = Some(Heap { start: end, brk: end + 0x21000, may_grow: true });
    let planned = plan(&facts, &Policy::default()).unwrap();
    assert_eq!(planned.raise_break_to, Some(end + M));
    let last = planned.moves.last().unwrap();
    assert_eq!(last.bytes.get(Class::Heap), M);
    assert!(last.gaps.is_empty());
    // A heap that goes on beyond the block needs no higher break.
    facts.heap = Some(Heap { start: end, brk: end + 3 * M, may_grow: false });
    facts.areas.last_mut().unwrap().range = r(end, end + 3 * M);
    let planned = plan(&facts, &Policy::default()).unwrap();
    assert_eq!(planned.raise_break_to, None);
    assert_eq!(planned.moved().get(Class::Heap), M);
    // A break that can't be raised pins its block.
    facts.heap = Some(Heap { start: end, brk: end + 5, may_grow: false });
    facts.areas.pop();
    let planned = plan(&facts, &Policy::default()).unwrap();
    assert!(planned.left.iter().any(|l| l.reason == Reason::HeapLimit));
}

#[test]
fn nothing_below_the_lowest_address() {
    let facts = program(0);
    let policy = Policy {
        segments: "text,rodata,header".parse().unwrap(),
        merge: Merge::Rwx,
        ..Policy::default()
    };
    let planned = plan(&facts, &policy).unwrap();
    assert!(planned.moves.iter().all(|m| m.range.start() >= B));
}

#[test]
fn threads_leave_what_is_writable() {
    let mut facts = program(0x5555_0000_0000);
    facts.threaded = true;
    let planned = plan(&facts, &Policy { merge: Merge::Relro, ..Policy::default() }).unwrap();
    assert!(planned.moves.iter().all(|m| !m.is_writable()));
    assert!(planned.left.iter().any(|l| l.reason == Reason::Threads));
}

#[test]
fn small_programs_and_already_moved_ones_are_refused() {
    let mut facts = program(0x5555_0000_0000);
    for area in &mut facts.areas {
        area.backing = Backing::Foreign;
    }
    assert_eq!(plan(&facts, &Policy::default()), Err(Refusal::NoBlock(Reason::ForeignMapping)));
    let mut small = program(0x5555_0000_0000);
    small.object.segments.truncate(1);
    small.areas.truncate(1);
    assert_eq!(plan(&small, &Policy::default()), Err(Refusal::TooSmall));
    small.object.segments.clear();
    assert_eq!(plan(&small, &Policy::default()), Err(Refusal::TooSmall));
}

#[test]
fn large_bss_is_left_unless_the_pool_is_asked_for() {
    let mut facts = program(0x5555_0000_0000);
    let grown = facts.object.segments[3].range.end() + 4096 * M;
    let start = facts.object.segments[3].range.start();
    facts.object.segments[3].range = r(start, grown);
    facts.areas[5].range = r(facts.areas[5].range.start(), grown);
    let planned = plan(&facts, &Policy::default()).unwrap();
    assert!(planned.left.iter().any(|l| l.reason == Reason::LargeBss));
    assert_eq!(planned.moved().get(Class::Bss), M);
    let thp = |text: &str| Policy { backends: text.parse().unwrap(), ..Policy::default() };
    assert_eq!(plan(&facts, &thp("thp")).unwrap().moved().get(Class::Bss), M);
    assert!(plan(&facts, &thp("bss:thp")).unwrap().moved().get(Class::Bss) > 4096 * M);
    let hugetlb = Policy { backends: Backends::all(Backend::Hugetlb), ..Policy::default() };
    assert_eq!(plan(&facts, &hugetlb).unwrap().pool_pages(), 3 + 1 + 2 + 2048);
}

#[test]
fn a_mapping_that_disagrees_with_the_headers_stays() {
    let mut facts = program(0x5555_0000_0000);
    facts.areas[1].backing = Backing::File(0);
    let planned = plan(&facts, &Policy::default()).unwrap();
    assert_eq!(planned.moved().get(Class::Text), 0);
    assert!(planned.left.iter().any(|l| l.reason == Reason::NotFromFile));
}

#[test]
fn far_apart_segments_cost_nothing() {
    let mut facts = program(0x5555_0000_0000);
    let far = r(0x7e00_0000_0000, 0x7e00_0000_1000);
    facts.object.segments.push(Segment {
        range: far,
        file_end: far.end(),
        offset: 20 * M,
        prot: Prot::RW,
    });
    facts.areas.push(Area { range: far, prot: Prot::RW, backing: Backing::File(20 * M) });
    // With the gap between them walked block by block this takes minutes.
    let planned = plan(&facts, &Policy::default()).unwrap();
    assert_eq!(planned.moves.last().unwrap().range, far.align_out(B).unwrap());
}
