//! Back onto ordinary pages: the mappings of the files as they were.
//!
//! What was moved is known from the memory map alone: where a file's headers say that its
//! pages are mapped, there is memory without that file.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use elfremap::errno::Errno;
use elfremap::facts::{Backing, Heap};
use elfremap::proc::{maps, smaps};
use elfremap::prot::Prot;
use elfremap::range::Range;

use super::helper::{Calls, Helper};
use super::session::Session;
use super::stage::{chunks, read_file};
use super::survey::{self, Found};
use super::swap::restore;
use super::{Target, failed, interrupted, is_interrupted, ptrace};
use crate::check::page_size;
use crate::elf::layout;
use crate::process::{self, Cache};

/// What became of one object.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Back {
    /// Its path as the kernel has it.
    pub path: String,
    /// Bytes that are mapped from the file again.
    pub from_file: u64,
    /// Bytes on small pages without the file: it is gone, or they never were the file's.
    pub private: u64,
    /// Bytes that stay on huge pages, and why.
    pub kept: Vec<(u64, String)>,
}

/// What became of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Returned {
    /// The objects of which something was on huge pages.
    pub objects: Vec<Back>,
    /// The longest time for which all threads were stopped.
    pub stall: Duration,
}

/// A mapping that takes the place of others.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Unit {
    range: Range,
    prot: Prot,
    /// Whether its pages are the pool's, which can be unmapped only as a whole.
    pool: bool,
    pieces: Vec<Piece>,
    gaps: Vec<Range>,
}

/// What belongs into a part of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    range: Range,
    prot: Prot,
    /// Offset in the file; `None` for anonymous memory.
    offset: Option<u64>,
}

/// Puts everything back that is on huge pages instead of its file, for the program and the
/// shared objects that `objects` (globs, separated by colons; `None`: all) names.
///
/// # Errors
/// Nothing could be begun, or the process ended.
pub fn detach(
    target: &Target,
    objects: Option<&str>,
    timeout: Duration,
    wrap: &super::Wrap<'_>,
) -> anyhow::Result<Returned> {
    let mut work = Vec::new();
    let text = fs::read(target.path("smaps"))?;
    let preloaded = is_preloaded(target, &text);
    for found in survey::survey(target, PAGE_BLOCK, objects)? {
        let units = units(&found, &text);
        if !units.is_empty() {
            work.push((found, units));
        }
    }
    let mut returned = Returned { objects: Vec::new(), stall: Duration::ZERO };
    if work.is_empty() {
        return Ok(returned);
    }
    ptrace::prepare_to_wait();
    let mut calls: Box<dyn Calls> = wrap(Box::new(Helper::create(target, None, timeout)?));
    let mut session = Session::begin(target, &mut *calls, None, timeout)?;
    for (found, units) in &work {
        let mut back =
            Back { path: found.path.clone(), from_file: 0, private: 0, kept: Vec::new() };
        let file = open(&mut session, found);
        for unit in units {
            if is_interrupted() {
                return Err(interrupted());
            }
            let is_guarded = preloaded && unit.prot.has(Prot::WRITE);
            let result = if is_guarded {
                Err(anyhow::anyhow!("the preload in the process looks after it"))
            } else {
                put_back(&mut session, found, unit, file)
            };
            match result {
                Ok(()) => {
                    for piece in &unit.pieces {
                        let is_file = piece.offset.is_some() && file.is_some();
                        let sum = if is_file { &mut back.from_file } else { &mut back.private };
                        *sum += piece.range.len();
                    }
                }
                Err(_) if !session.is_alive() => return Err(target.gone()),
                Err(error) => back.kept.push((unit.range.len(), format!("{error:#}"))),
            }
        }
        if let Some(fd) = file {
            session.close(fd);
        }
        returned.objects.push(back);
    }
    returned.stall = session.stall;
    drop(session);
    Ok(returned)
}

/// The huge page size up to which ranges may reach beyond an object.
const PAGE_BLOCK: u64 = 2 << 20;

fn is_preloaded(target: &Target, text: &[u8]) -> bool {
    let entries: Vec<_> = smaps::parse(text).filter_map(Result::ok).collect();
    let process = survey::living(target);
    let objects = process::objects(&process, &entries, &mut Cache::default());
    process::read_report(&process, &objects).is_some_and(|report| report.lines.is_some())
}

/// The mappings that were made huge on purpose (`hg` among the flags of smaps).
fn advised(text: &[u8]) -> BTreeSet<Range> {
    let mut found = BTreeSet::new();
    let mut range = None;
    for line in text.split(|&b| b == b'\n') {
        if let Some(Ok(mapping)) = maps::parse(line).next() {
            range = Some(mapping.range);
        } else if let Some(flags) = line.strip_prefix(b"VmFlags:")
            && flags.split(|&b| b == b' ').any(|flag| flag == b"hg")
        {
            found.extend(range);
        }
    }
    found
}

/// What is to be put back of an object, from the text of smaps.
fn units(found: &Found, text: &[u8]) -> Vec<Unit> {
    let page = page_size();
    let layout = layout::pages(&found.facts.object, page);
    let advised = advised(text);
    let mut units = Vec::new();
    for entry in smaps::parse(text).filter_map(Result::ok) {
        let m = &entry.mapping;
        let pool = entry.kernel_page_size > page && m.name.starts_with(b"/anon_hugepage");
        let anonymous = m.is_anonymous() && (m.name.is_empty() || m.name.starts_with(b"[anon:"));
        if m.shared || !(pool || anonymous) {
            continue;
        }
        let inside = layout.iter().filter(|(area, _)| area.range.overlaps(m.range));
        let replaces_file =
            inside.clone().any(|(area, _)| matches!(area.backing, Backing::File(_)));
        let is_ours = pool || replaces_file || (entry.anon_huge > 0 && advised.contains(&m.range));
        if inside.count() > 0 && is_ours {
            units.push(unit(&layout, m.range, m.prot, pool, found.facts.heap));
        }
    }
    units
}

fn unit(
    layout: &[(elfremap::facts::Area, elfremap::class::Class)],
    range: Range,
    prot: Prot,
    pool: bool,
    heap: Option<Heap>,
) -> Unit {
    let mut unit = Unit { range, prot, pool, pieces: Vec::new(), gaps: Vec::new() };
    let mut at = range.start();
    let add_hole = |unit: &mut Unit, from: u64, to: u64| {
        let Some(hole) = Range::new(from, to).filter(|hole| !hole.is_empty()) else { return };
        // The heap's first part moves along with the last block of bss.
        let of_heap = heap.and_then(|heap| Range::new(heap.start, u64::MAX)).unwrap_or_default();
        let part = hole.intersect(of_heap);
        let (before, _) = hole.subtract(part);
        unit.gaps.extend((!before.is_empty()).then_some(before));
        if !part.is_empty() {
            unit.pieces.push(Piece { range: part, prot: unit.prot, offset: None });
        }
    };
    for (area, _) in layout {
        let inside = area.range.intersect(range);
        if inside.is_empty() {
            continue;
        }
        add_hole(&mut unit, at, inside.start());
        at = inside.end();
        let offset = match area.backing {
            Backing::File(offset) => Some(offset + (inside.start() - area.range.start())),
            _ => None,
        };
        // No more rights than there are now, and no more than the file's headers say.
        let rights = [Prot::READ, Prot::WRITE, Prot::EXEC].into_iter();
        let both = rights.filter(|&right| area.prot.has(right) && prot.has(right));
        let both = both.fold(Prot::NONE, |sum, right| sum | right);
        let bti = if prot.has(Prot::BTI) && both.has(Prot::EXEC) { Prot::BTI } else { Prot::NONE };
        unit.pieces.push(Piece { range: inside, prot: both | bti, offset });
    }
    add_hole(&mut unit, at, range.end());
    unit
}

/// Opens the object's file in the target: by its name there, when that is still the same file.
fn open(session: &mut Session<'_>, found: &Found) -> Option<i32> {
    let known = found.file.as_ref()?.file.metadata().ok()?;
    for path in [found.path.as_str(), "/proc/self/exe"] {
        let Ok(fd) = session.open(&CString::new(path).ok()?) else { continue };
        let link = format!("/proc/{}/fd/{fd}", session.calls.thread());
        let is_it =
            fs::metadata(link).is_ok_and(|m| (m.dev(), m.ino()) == (known.dev(), known.ino()));
        if is_it {
            return Some(fd);
        }
        session.close(fd);
    }
    None
}

fn put_back(
    session: &mut Session<'_>,
    found: &Found,
    unit: &Unit,
    file: Option<i32>,
) -> anyhow::Result<()> {
    let mut room = Range::EMPTY;
    let mut copy = Range::EMPTY;
    let result = prepare(session, found, unit, file, &mut room, &mut copy)
        .map_err(|(step, errno)| failed(format!("{step} failed: {errno}")))
        .and_then(|()| exchange(session, found, unit, file, room, copy));
    session.discard(room);
    session.discard(copy);
    result
}

/// Where a part of the unit is prepared.
fn place(unit: &Unit, room: Range, part: Range) -> Range {
    part.rebase(room.start() + (part.start() - unit.range.start())).unwrap_or_default()
}

/// Maps in `room` what belongs into the unit. Where that has several parts and the pool's pages
/// can go only as a whole, there is also a `copy` on small pages.
fn prepare(
    session: &mut Session<'_>,
    found: &Found,
    unit: &Unit,
    file: Option<i32>,
    room: &mut Range,
    copy: &mut Range,
) -> Result<(), (&'static str, Errno)> {
    let at = |step| move |errno| (step, errno);
    let len = unit.range.len();
    *room = session.map(len, Prot::NONE, libc::MAP_NORESERVE).map_err(at("mmap"))?;
    session.advise(*room, libc::MADV_DONTFORK).map_err(at("madvise"))?;
    for piece in &unit.pieces {
        let file = file.zip(piece.offset);
        let here = place(unit, *room, piece.range);
        session.map_over(here, Prot::RW, file).map_err(at("mmap"))?;
        session.advise(here, libc::MADV_DONTFORK).map_err(at("madvise"))?;
    }
    if unit.pool && unit.pieces.len() + unit.gaps.len() > 1 {
        *copy = session.map(len, Prot::RW, 0).map_err(at("mmap"))?;
        session.advise(*copy, libc::MADV_DONTFORK).map_err(at("madvise"))?;
    }
    if !unit.prot.has(Prot::WRITE) {
        fill(session, found, unit, file.is_some(), *room, *copy).map_err(at("copy"))?;
    }
    Ok(())
}

/// Copies what differs from the file, and sets the rights.
fn fill(
    session: &mut Session<'_>,
    found: &Found,
    unit: &Unit,
    has_file: bool,
    room: Range,
    copy: Range,
) -> Result<(), Errno> {
    let page = usize::try_from(page_size()).unwrap_or(4096);
    for piece in &unit.pieces {
        for part in chunks(piece.range) {
            let length = usize::try_from(part.len()).map_err(|_| Errno::ENOMEM)?;
            let (mut now, mut then) = (vec![0; length], vec![0; length]);
            session.read(part.start(), &mut now)?;
            if let (Some(offset), Some(file), true) = (piece.offset, &found.file, has_file) {
                read_file(&file.file, offset + (part.start() - piece.range.start()), &mut then)?;
            }
            let to = place(unit, room, part).start();
            for (index, (a, b)) in now.chunks(page).zip(then.chunks(page)).enumerate() {
                if a != b {
                    session.write(to + (index * page) as u64, a)?;
                }
            }
        }
        if piece.prot != Prot::RW {
            session.protect(place(unit, room, piece.range), piece.prot)?;
        }
    }
    if !copy.is_empty() {
        for part in chunks(unit.range) {
            let mut bytes = vec![0; usize::try_from(part.len()).map_err(|_| Errno::ENOMEM)?];
            session.read(part.start(), &mut bytes)?;
            session.write(place(unit, copy, part).start(), &bytes)?;
        }
        if unit.prot != Prot::RW {
            session.protect(copy, unit.prot)?;
        }
    }
    Ok(())
}

fn exchange(
    session: &mut Session<'_>,
    found: &Found,
    unit: &Unit,
    file: Option<i32>,
    room: Range,
    copy: Range,
) -> anyhow::Result<()> {
    let writable = unit.prot.has(Prot::WRITE);
    let result = session.with_all_stopped(writable, |session, halt| {
        loop {
            if !is_as_before(session, unit) {
                return Ok(Err(("compare", Errno(libc::EBUSY))));
            }
            if halt.is_complete()? {
                break;
            }
        }
        if writable && let Err(errno) = fill(session, found, unit, file.is_some(), room, copy) {
            return Ok(Err(("copy", errno)));
        }
        Ok(swap(session, unit, room, copy))
    })?;
    result.map_err(|(step, errno)| failed(format!("{step} failed: {errno}")))
}

fn is_as_before(session: &Session<'_>, unit: &Unit) -> bool {
    let Ok(text) = session.target.maps() else { return false };
    let bare = |prot: Prot| (prot.has(Prot::READ), prot.has(Prot::WRITE), prot.has(Prot::EXEC));
    maps::parse(&text)
        .filter_map(Result::ok)
        .any(|m| m.range == unit.range && bare(m.prot) == bare(unit.prot))
}

fn swap(
    session: &mut Session<'_>,
    unit: &Unit,
    room: Range,
    copy: Range,
) -> Result<(), (&'static str, Errno)> {
    if !copy.is_empty() {
        over(session, copy, unit.range, unit.prot)?;
    }
    for piece in &unit.pieces {
        over(session, place(unit, room, piece.range), piece.range, piece.prot)?;
    }
    for &gap in &unit.gaps {
        session.unmap(gap).map_err(|errno| ("munmap", errno))?;
    }
    Ok(())
}

/// Moves a mapping home. Should that fail after its target was removed, what is in it is put
/// there by other means.
fn over(
    session: &mut Session<'_>,
    from: Range,
    home: Range,
    prot: Prot,
) -> Result<(), (&'static str, Errno)> {
    session.advise(from, libc::MADV_DOFORK).map_err(|errno| ("madvise", errno))?;
    let Err(errno) = session.remap(from, home.start()) else {
        session.gave(from);
        return Ok(());
    };
    let text = session.target.maps().map_err(|_| ("maps", Errno(libc::ESRCH)))?;
    let is_there = maps::parse(&text).filter_map(Result::ok).any(|m| m.range.overlaps(home));
    if !is_there {
        restore(session, home, from.start(), prot).map_err(|errno| ("restore", errno))?;
    }
    Err(("mremap", errno))
}
