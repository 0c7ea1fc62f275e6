//! Discover: from the running process to [`Facts`].

use alloc::vec::Vec;

use super::sys::{self, Fd};
use crate::errno::Errno;
use crate::facts::{Area, Backing, Facts, Heap, Object, Segment};
use crate::proc::{maps, smaps, stat};
use crate::prot::Prot;
use crate::range::{Range, align_down, align_up};

/// What the process looks like around the object.
#[derive(Debug)]
pub(super) struct Discovered {
    pub(super) facts: Facts,
    /// The object's file, opened and compared with what is mapped; `None` when it
    /// cannot be found any more.
    pub(super) file: Option<Fd>,
}

/// The identity of the file behind a mapping: device (major, minor) and inode.
pub type Identity = ((u32, u32), u64);

/// Reads the text of `/proc/self/maps`.
pub(super) fn read_maps() -> Result<Vec<u8>, Errno> {
    let mut text = Vec::new();
    sys::read_file(c"/proc/self/maps", &mut text)?;
    Ok(text)
}

/// The name that `/proc/self/maps` (`text`) gives to the object's file; empty when none.
pub(super) fn name<'a>(text: &'a [u8], object: &Object) -> &'a [u8] {
    first_mapping(text, object).map_or(b"", |m| m.name)
}

/// The mapping of the object's ELF header in the text of a maps file; of its first segment
/// when the header is not loaded.
#[must_use]
pub fn first_mapping<'a>(text: &'a [u8], object: &Object) -> Option<maps::Mapping<'a>> {
    let start = object.header().unwrap_or_else(|| object.span().start());
    maps::parse(text).filter_map(Result::ok).find(|m| m.range.contains(start))
}

/// Fills in the facts from the text of `/proc/self/maps`.
pub(super) fn discover(
    text: &[u8],
    object: Object,
    page: u64,
    block: u64,
) -> Result<Discovered, Errno> {
    let own =
        first_mapping(text, &object).filter(|m| !m.is_anonymous()).map(|m| (m.device, m.inode));
    let mut areas = areas(text, &object, block, own)?;
    if object.segments.iter().any(|segment| segment.prot.has(Prot::BTI)) {
        mark_bti(&mut areas)?;
    }
    let mut stat_text = Vec::new();
    sys::read_file(c"/proc/self/stat", &mut stat_text)?;
    let stat = stat::parse(&stat_text).ok_or(Errno(libc::EIO))?;
    let brk = sys::current_break()?;
    // Where the kernel hides the start, what it calls the heap must do.
    let start = if stat.start_brk > 0 { stat.start_brk } else { heap_start(text, brk) };
    let heap = (start <= brk).then_some(Heap { start, brk, may_grow: true });
    let file = own.and_then(|own| open_file(name(text, &object), own));
    let threaded = stat.threads != 1 || shares_memory()?;
    let limited = sys::is_memory_limited();
    let facts = Facts { page, block, object, areas, heap, threaded, limited, pinned: Vec::new() };
    Ok(Discovered { facts, file })
}

/// Whether a child of this thread shares its memory (clone(2) with `CLONE_VM`, without
/// `CLONE_THREAD`): it writes as a thread does, and is none. False where the kernel does not
/// tell of children.
fn shares_memory() -> Result<bool, Errno> {
    let mut text = Vec::new();
    match sys::read_file(c"/proc/thread-self/children", &mut text) {
        Err(Errno(libc::ENOENT)) => return Ok(false),
        other => other?,
    }
    let words = text.split(|&b| b == b' ').filter(|word| !word.is_empty());
    Ok(words.filter_map(crate::hugepage::number).any(sys::shares_memory_with))
}

fn heap_start(text: &[u8], brk: u64) -> u64 {
    let mappings = maps::parse(text).filter_map(Result::ok);
    mappings.filter(|m| m.name == b"[heap]").map(|m| m.range.start()).min().unwrap_or(brk)
}

/// The mappings in the text of a maps file that touch a block of one of the object's segments.
/// `own` is the object's file.
///
/// # Errors
/// The text is no maps file (EIO), or a block would end beyond 2^64 (EINVAL).
pub fn areas(
    text: &[u8],
    object: &Object,
    block: u64,
    own: Option<Identity>,
) -> Result<Vec<Area>, Errno> {
    let near = |segment: &Segment| segment.range.align_out(block).ok_or(Errno::EINVAL);
    let near = object.segments.iter().map(near).collect::<Result<Vec<_>, _>>()?;
    let mut areas = Vec::new();
    for mapping in maps::parse(text) {
        let mapping = mapping.map_err(|_| Errno(libc::EIO))?;
        if !near.iter().any(|range| range.overlaps(mapping.range)) {
            continue;
        }
        let is_own = own == Some((mapping.device, mapping.inode));
        let backing = if mapping.shared {
            Backing::Foreign
        } else if is_own {
            Backing::File(mapping.offset)
        } else if mapping.is_anonymous() && may_be_ours(mapping.name) {
            Backing::Anonymous
        } else {
            Backing::Foreign
        };
        areas.push(Area { range: mapping.range, prot: mapping.prot, backing });
    }
    Ok(areas)
}

/// Adds the right that maps does not show: whether the loader has made use of what the
/// file says is up to it and to the processor.
fn mark_bti(areas: &mut [Area]) -> Result<(), Errno> {
    let text = super::verify::read_smaps()?;
    for entry in smaps::parse(&text) {
        let mapping = entry.map_err(|_| Errno(libc::EIO))?.mapping;
        if mapping.prot.has(Prot::BTI) {
            let inside = areas.iter_mut().filter(|area| mapping.range.covers(area.range));
            inside.for_each(|area| area.prot = area.prot | Prot::BTI);
        }
    }
    Ok(())
}

/// What of the object's blocks has attributes that somebody gave it
/// ([`smaps::Entry::attributes`]).
pub(super) fn with_attributes(object: &Object, block: u64) -> Result<Vec<Range>, Errno> {
    /// About one entry.
    const CHUNK: usize = 1024;
    let end = object.span().align_out(block).ok_or(Errno::EINVAL)?.end();
    let is_beyond = |line: &[u8]| maps::parse_line(line).is_some_and(|m| m.range.start() >= end);
    let mut text = Vec::new();
    let fd = Fd::read_only(c"/proc/self/smaps")?;
    // The kernel counts pages as it is read: no further than to the object's end. It makes
    // whole entries until there is enough for the buffer, and each costs as much as a file.
    loop {
        let start = text.len();
        text.resize(start + CHUNK, 0);
        let n = fd.read(text.get_mut(start..).unwrap_or_default());
        text.truncate(start + n.unwrap_or(0));
        let from = text.get(..start).unwrap_or_default().iter().rposition(|&b| b == b'\n');
        let fresh = text.get(from.map_or(0, |newline| newline + 1)..).unwrap_or_default();
        if n? == 0 || maps::lines(fresh).any(is_beyond) {
            break;
        }
    }
    let entries = smaps::parse(&text).map_while(Result::ok).filter(|entry| entry.attributes);
    Ok(entries.map(|entry| entry.mapping.range).collect())
}

/// Anonymous memory that may be bss or heap, by its name; the stack, the vdso and
/// other special mappings have names of their own.
fn may_be_ours(name: &[u8]) -> bool {
    name.is_empty() || name == b"[heap]" || name.starts_with(b"[anon:")
}

/// The mappings inside `range` now, except those that only claim the gaps; and the number
/// of all mappings of the process.
pub(super) fn mappings_in(range: Range, gaps: &[Range]) -> Result<(Vec<Range>, usize), Errno> {
    let text = read_maps()?;
    let (mut found, mut all) = (Vec::new(), 0);
    for mapping in maps::parse(&text) {
        all += 1;
        let inside = mapping.map_err(|_| Errno(libc::EIO))?.range.intersect(range);
        if !inside.is_empty() && !gaps.iter().any(|gap| gap.covers(inside)) {
            found.push(inside);
        }
    }
    Ok((found, all))
}

/// The object's file: what the process executes, or (under `ld.so ./program`, for a
/// shared object) the path in the maps; whichever is the very file that is mapped.
/// The kernel's device number in the maps differs from stat(2)'s on some file systems
/// (btrfs, overlayfs); the file then counts as not found.
fn open_file(name: &[u8], own: Identity) -> Option<Fd> {
    let is_it = |fd: &Fd| fd.identity() == Ok(own);
    if let Some(fd) = Fd::read_only(c"/proc/self/exe").ok().filter(is_it) {
        return Some(fd);
    }
    let mut path = Vec::from(name);
    path.push(0);
    let path = core::ffi::CStr::from_bytes_with_nul(&path).ok()?;
    if !name.starts_with(b"/") {
        return None;
    }
    Fd::read_only(path).ok().filter(is_it)
}

/// A free range of `len` bytes aligned to `align`, mapped with `prot` and `flags`.
pub(super) fn map_aligned(len: u64, align: u64, prot: Prot, flags: i32) -> Result<Range, Errno> {
    let room = sys::map(len.checked_add(align).ok_or(Errno::ENOMEM)?, prot, flags)?;
    let start = align_up(room.start(), align).ok_or(Errno::ENOMEM)?;
    let range = Range::with_len(start, len).ok_or(Errno::ENOMEM)?;
    debug_assert!(align_down(start, align) == start);
    let (before, after) = room.subtract(range);
    // SAFETY: both are parts of the mapping made just now, and nobody uses them.
    unsafe {
        sys::unmap(before)?;
        sys::unmap(after)?;
    }
    Ok(range)
}
