//! What the kernel and the loader make of a file's segments in memory: the mappings
//! that a process begins its life with.

use elfremap::class::Class;
use elfremap::facts::{Area, Backing, Object, Segment};
use elfremap::prot::Prot;
use elfremap::range::{Range, align_down, align_up};

use super::Image;

/// The image at a load bias; `None` when it does not fit below 2^64.
#[must_use]
pub fn object(image: &Image, bias: u64) -> Option<Object> {
    let place = |range: Range| range.rebase(range.start().checked_add(bias)?);
    let segments = image.segments.iter().map(|segment| {
        let range = place(segment.memory)?;
        let file_end = range.start().checked_add(segment.file_size)?;
        Some(Segment { range, file_end, offset: segment.offset, prot: segment.prot })
    });
    let relro = match image.relro {
        Some(relro) => Some(place(relro)?),
        None => None,
    };
    Some(Object { segments: segments.collect::<Option<_>>()?, relro })
}

/// The pages of `object`, each run with its class, rights and backing, as they are
/// once relocation is done; in the order of addresses, without overlaps. `page` is
/// the base page size. Empty when an address would be beyond 2^64.
#[must_use]
pub fn pages(object: &Object, page: u64) -> Vec<(Area, Class)> {
    let mut pages: Vec<(Area, Class)> = Vec::new();
    for segment in &object.segments {
        let Some(new) = segment_pages(segment, page) else { return Vec::new() };
        // Where two segments touch one page, the later mapping replaces the earlier.
        for (area, _) in &new {
            pages = pages.into_iter().flat_map(|old| without(old, area.range)).collect();
        }
        pages.extend(new);
    }
    pages.sort_by_key(|(area, _)| area.range);
    match object.relro {
        Some(relro) => protect(pages, relro, page),
        None => pages,
    }
}

fn segment_pages(segment: &Segment, page: u64) -> Option<Vec<(Area, Class)>> {
    let whole = segment.range.align_out(page)?;
    let file_end = if segment.file_end > segment.range.start() {
        align_up(segment.file_end, page)?
    } else {
        whole.start()
    };
    let from_file = whole.intersect(Range::new(whole.start(), file_end)?);
    let (_, beyond) = whole.subtract(from_file);
    let beyond = if from_file.is_empty() { whole } else { beyond };
    let class = if segment.prot.has(Prot::EXEC) {
        Class::Text
    } else if segment.prot.has(Prot::WRITE) {
        Class::Data
    } else {
        Class::Rodata
    };
    let backing = Backing::File(align_down(segment.offset, page));
    let file_area = Area { range: from_file, prot: segment.prot, backing };
    let bss_area = Area { range: beyond, prot: segment.prot, backing: Backing::Anonymous };
    let bss = if segment.prot.has(Prot::WRITE) { Class::Bss } else { class };
    let both = [(file_area, class), (bss_area, bss)];
    Some(both.into_iter().filter(|(area, _)| !area.range.is_empty()).collect())
}

/// What is left of `old` beside `hole`.
fn without((area, class): (Area, Class), hole: Range) -> impl Iterator<Item = (Area, Class)> {
    let (before, after) = area.range.subtract(hole);
    [before, after]
        .into_iter()
        .filter(|r| !r.is_empty())
        .map(move |range| (part(area, range), class))
}

/// The part of `area` at `range`, which lies in it.
fn part(area: Area, range: Range) -> Area {
    let backing = match area.backing {
        Backing::File(offset) => Backing::File(offset + (range.start() - area.range.start())),
        other => other,
    };
    Area { range, backing, ..area }
}

/// Splits off what the loader write-protects: both ends rounded down to a page, as
/// `_dl_protect_relro` of glibc does.
fn protect(pages: Vec<(Area, Class)>, relro: Range, page: u64) -> Vec<(Area, Class)> {
    let rounded = Range::new(align_down(relro.start(), page), align_down(relro.end(), page));
    let Some(relro) = rounded.filter(|r| !r.is_empty()) else { return pages };
    let split = |(area, class): (Area, Class)| {
        let inside = area.range.intersect(relro);
        let (before, after) = area.range.subtract(inside);
        [(before, false), (inside, true), (after, false)].into_iter().filter_map(
            move |(range, in_relro)| {
                if range.is_empty() {
                    return None;
                }
                let mut area = part(area, range);
                let mut class = class;
                if in_relro && matches!(class, Class::Data | Class::Bss) {
                    area.prot = Prot::READ;
                    class = Class::Relro;
                }
                Some((area, class))
            },
        )
    };
    pages.into_iter().flat_map(split).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn r(start: u64, end: u64) -> Range {
        Range::new(start, end).unwrap()
    }

    fn segment(start: u64, file_end: u64, end: u64, offset: u64, prot: Prot) -> Segment {
        Segment { range: r(start, end), file_end, offset, prot }
    }

    fn listed(object: &Object) -> Vec<(u64, u64, &'static str, String, Backing)> {
        pages(object, 4096)
            .into_iter()
            .map(|(a, class)| {
                (a.range.start(), a.range.end(), class.name(), a.prot.to_string(), a.backing)
            })
            .collect()
    }

    #[test]
    fn the_default_link() {
        let object = Object {
            segments: vec![
                segment(0x400000, 0x4006a0, 0x4006a0, 0, Prot::READ),
                segment(0x401000, 0x4025d1, 0x4025d1, 0x1000, Prot::RX),
                segment(0x405db8, 0x407010, 0x40a018, 0x3db8, Prot::RW),
            ],
            relro: Some(r(0x405db8, 0x406000)),
        };
        let (r__, rx, rw) = ("r--".to_owned(), "r-x".to_owned(), "rw-".to_owned());
        assert_eq!(
            listed(&object),
            [
                (0x400000, 0x401000, "rodata", r__.clone(), Backing::File(0)),
                (0x401000, 0x403000, "text", rx, Backing::File(0x1000)),
                (0x405000, 0x406000, "relro", r__, Backing::File(0x3000)),
                (0x406000, 0x408000, "data", rw.clone(), Backing::File(0x4000)),
                (0x408000, 0x40b000, "bss", rw, Backing::Anonymous),
            ]
        );
    }

    #[test]
    fn segments_that_share_a_page_and_bss_alone() {
        let object = Object {
            segments: vec![
                segment(0x10000, 0x11800, 0x11800, 0, Prot::RX),
                segment(0x11900, 0x12000, 0x12000, 0x1900, Prot::RW),
                segment(0x20000, 0x20000, 0x21001, 0x9000, Prot::RW),
            ],
            relro: None,
        };
        let found = listed(&object);
        let ranges: Vec<_> = found.iter().map(|p| (p.0, p.1, p.2)).collect();
        assert_eq!(
            ranges,
            [(0x10000, 0x11000, "text"), (0x11000, 0x12000, "data"), (0x20000, 0x22000, "bss")]
        );
    }
}
