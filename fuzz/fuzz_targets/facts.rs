//! The planner on a program of any shape: segments, mappings, heap, and policy as the
//! bytes say. A plan never touches what is somebody else's, and gives no right away.
#![no_main]

use elfremap::class::Class;
use elfremap::facts::{Area, Backing, Facts, Heap, Object, Segment};
use elfremap::plan::{LOWEST, plan, survey};
use elfremap::policy::{Backends, Merge, Policy};
use elfremap::prot::Prot;
use elfremap::range::Range;
use libfuzzer_sys::fuzz_target;

const PAGE: u64 = 4096;
const BLOCK: u64 = 2 << 20;

/// The bytes, taken from the front; zeros at their end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        *first
    }

    /// A number of pages: small ones, and some of several blocks.
    fn pages(&mut self) -> u64 {
        let (low, high) = (u64::from(self.byte()), u64::from(self.byte()));
        if high & 1 == 0 { low } else { low << (high >> 5) }
    }

    fn prot(&mut self) -> Prot {
        Prot::from_p_flags(u32::from(self.byte()) & 7)
    }
}

fn facts(bytes: &mut Bytes<'_>) -> Option<Facts> {
    let mut at = bytes.pages() * PAGE + (u64::from(bytes.byte()) << 39);
    let (mut segments, mut areas) = (Vec::new(), Vec::new());
    for _ in 0..bytes.byte() % 6 {
        at += bytes.pages() * PAGE;
        let range = Range::with_len(at, bytes.pages() * PAGE + u64::from(bytes.byte()))?;
        let file = u64::from(bytes.byte()) * range.len() / 255;
        let offset = bytes.pages() * PAGE;
        let prot = bytes.prot();
        if !range.is_empty() {
            segments.push(Segment { range, file_end: range.start() + file, offset, prot });
        }
        // As the kernel maps it, or not at all so.
        let mapped = range.align_out(PAGE)?;
        let mut start = mapped.start();
        while start < mapped.end() {
            let end = mapped.end().min(start + (1 + bytes.pages()) * PAGE);
            let backing = match bytes.byte() % 8 {
                0 => Backing::Foreign,
                1 => Backing::Anonymous,
                _ if start < range.start() + file => {
                    Backing::File(offset + (start - mapped.start()))
                }
                _ => Backing::Anonymous,
            };
            let prot = if bytes.byte() % 4 == 0 { bytes.prot() } else { prot };
            if bytes.byte() % 8 != 0 {
                areas.push(Area { range: Range::new(start, end)?, prot, backing });
            }
            start = end;
        }
        at = mapped.end();
    }
    let heap = match bytes.byte() % 3 {
        0 => None,
        _ => {
            let start = at + bytes.pages() * PAGE;
            let brk = start + bytes.pages() * 100;
            let range = Range::new(start, brk)?.align_out(PAGE)?;
            if !range.is_empty() {
                areas.push(Area { range, prot: Prot::RW, backing: Backing::Anonymous });
            }
            Some(Heap { start, brk, may_grow: bytes.byte() % 2 == 0 })
        }
    };
    let relro = (bytes.byte() % 2 == 0).then(|| segments.last().map(|s: &Segment| s.range)).flatten();
    let flags = bytes.byte();
    Some(Facts {
        page: PAGE,
        block: BLOCK,
        object: Object { segments, relro },
        areas,
        heap,
        threaded: flags & 1 != 0,
        limited: flags & 2 != 0,
        pinned: Vec::new(),
    })
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = Bytes(bytes);
    let merge = [Merge::None, Merge::Rx, Merge::Relro, Merge::Rwx][usize::from(bytes.byte() % 4)];
    let backends: Backends =
        ["auto", "hugetlb", "thp", "text:thp,bss:hugetlb"][usize::from(bytes.byte() % 4)]
            .parse()
            .unwrap();
    let segments = ["text,data,bss", "text", "bss", "text,rodata,data,bss,header"]
        [usize::from(bytes.byte() % 4)]
    .parse()
    .unwrap();
    let policy = Policy { merge, backends, segments, ..Policy::default() };
    let Some(facts) = facts(&mut bytes) else { return };
    let outcome = survey(&facts, &policy);
    if let Ok(planned) = plan(&facts, &policy) {
        assert_eq!(planned, outcome);
        assert!(planned.moved().total() - planned.moved().get(Class::Heap) >= BLOCK);
    }
    assert!(outcome.pool_pages() <= outcome.pages());
    let mut end = LOWEST;
    for moved in &outcome.moves {
        let range = moved.range;
        assert!(range.start() >= end && range.start() % BLOCK == 0 && range.len() % BLOCK == 0);
        assert!(!range.is_empty());
        end = range.end();
        assert!(merge == Merge::Rwx || !moved.prot.is_write_exec());
        assert!(!(facts.threaded && moved.is_writable()));
        for area in facts.areas.iter().filter(|area| area.range.overlaps(range)) {
            assert!(area.backing != Backing::Foreign);
        }
        // Pieces and gaps are the range, each part once.
        let parts = moved.pieces.iter().map(|piece| piece.range).chain(moved.gaps.iter().copied());
        assert_eq!(parts.clone().map(|part| part.len()).sum::<u64>(), range.len());
        assert!(parts.clone().all(|part| range.covers(part)));
        assert!(!facts.limited || moved.gaps.is_empty());
        for piece in &moved.pieces {
            assert!(moved.prot.has(piece.prot), "a right is lost");
            assert!(merge != Merge::None || moved.prot == piece.prot, "a right is won");
            assert!(moved.prot.has(Prot::WRITE) <= (piece.prot.has(Prot::WRITE) || merge >= Merge::Relro));
        }
    }
});
