//! Commit: with all threads stopped, the copy is compared with what it stands for, and takes
//! its place.

use elfremap::class::ClassBytes;
use elfremap::errno::Errno;
use elfremap::exec::pagemap::Content;
use elfremap::facts::{Area, Backing};
use elfremap::plan::{Move, Piece};
use elfremap::proc::maps;
use elfremap::prot::Prot;
use elfremap::range::Range;

use super::session::Session;
use super::stage::{Staged, chunks};
use super::survey::Found;

/// What became of a range.
#[derive(Debug, Default)]
pub(super) struct Swapped {
    /// Parts, whole blocks, that are huge now.
    pub(super) moved: Vec<Range>,
    /// Blocks that had changed since they were copied, and stay.
    pub(super) changed: Vec<Range>,
    /// The error of the step that failed.
    pub(super) error: Option<(&'static str, Errno)>,
}

/// Swaps a staged range. Afterwards the copy, or what was not used of it, is gone.
pub(super) fn swap(
    session: &mut Session<'_>,
    found: &Found,
    plan: &Move,
    staged: &Staged,
    block: u64,
) -> anyhow::Result<Swapped> {
    let result = session.with_all_stopped(plan.is_writable(), |session, halt| {
        let mut swapped = Swapped::default();
        let good = loop {
            let good = match compare(session, found, plan, staged, block) {
                Ok(good) => good,
                Err(errno) => {
                    swapped.error = Some(("compare", errno));
                    return Ok(swapped);
                }
            };
            // A thread that slept through all this has written nothing.
            if halt.is_complete()? {
                break good;
            }
        };
        let is_good = |b: &Range| good.iter().any(|g| g.covers(*b));
        swapped.changed = plan.range.blocks(block).filter(|b| !is_good(b)).collect();
        for home in good {
            match exchange(session, plan, staged, home) {
                Ok(()) => swapped.moved.push(home),
                Err((step, errno)) => {
                    swapped.error = Some((step, errno));
                    break;
                }
            }
        }
        Ok(swapped)
    });
    session.discard(staged.range);
    result
}

/// The runs of blocks that are what was copied.
fn compare(
    session: &Session<'_>,
    found: &Found,
    plan: &Move,
    staged: &Staged,
    block: u64,
) -> Result<Vec<Range>, Errno> {
    let maps = session.target.maps().map_err(|_| Errno(libc::ESRCH))?;
    if found.file.as_ref().is_some_and(|file| !file.is_unchanged()) {
        return Ok(Vec::new());
    }
    let (now, then) = (found.areas_in(&maps, plan.range), found.planned_in(plan.range));
    let mut changed = Vec::new();
    if now != then {
        let in_block = |areas: &[Area], b: Range| super::survey::pages_of(areas, b);
        changed
            .extend(plan.range.blocks(block).filter(|&b| in_block(&now, b) != in_block(&then, b)));
    }
    if !plan.is_writable() {
        for piece in &plan.pieces {
            changed_pages(session, plan, staged, piece, &mut changed)?;
        }
    }
    let mut good: Vec<Range> = Vec::new();
    for home in plan.range.blocks(block).filter(|b| !changed.iter().any(|c| c.overlaps(*b))) {
        match good.last_mut() {
            Some(last) if last.end() == home.start() => {
                *last = Range::new(last.start(), home.end()).unwrap_or(*last);
            }
            _ => good.push(home),
        }
    }
    Ok(good)
}

/// Finds the pages that do not read as they did. Those that are the file's still are, and the
/// others are compared byte by byte. (Writable ones are copied anew instead.)
fn changed_pages(
    session: &Session<'_>,
    plan: &Move,
    staged: &Staged,
    piece: &Piece,
    changed: &mut Vec<Range>,
) -> Result<(), Errno> {
    for (run, content) in session.pagemap.runs(piece.range)? {
        if !then(staged, run, content) {
            changed.push(run);
            continue;
        }
        if content == Content::Own {
            for part in chunks(run) {
                let length = usize::try_from(part.len()).map_err(|_| Errno::ENOMEM)?;
                let (mut a, mut b) = (vec![0; length], vec![0; length]);
                session.read(part.start(), &mut a)?;
                session.read(staged.place(plan, part).start(), &mut b)?;
                changed.extend((a != b).then_some(part));
            }
        }
    }
    Ok(())
}

/// Whether all of `run` had that content when it was copied.
fn then(staged: &Staged, run: Range, content: Content) -> bool {
    let alike = staged.contents.iter().filter(|(_, c)| *c == content);
    alike.map(|(r, _)| r.intersect(run).len()).sum::<u64>() == run.len()
}

fn exchange(
    session: &mut Session<'_>,
    plan: &Move,
    staged: &Staged,
    home: Range,
) -> Result<(), (&'static str, Errno)> {
    let copy = staged.place(plan, home);
    if plan.is_writable() {
        copy_now(session, plan, staged, home).map_err(|errno| ("copy", errno))?;
    }
    // The last call on the range is mremap: perf recordings that are under way keep the names.
    session.show_to_children(copy).map_err(|errno| ("madvise", errno))?;
    let moved = session.remap(copy, home.start());
    match moved {
        Ok(()) => {
            session.gave(copy);
            Ok(())
        }
        Err(errno) => {
            put_back(session, plan, home, copy)?;
            Err(("mremap", errno))
        }
    }
}

/// Copies what is the program's own in a writable range, and what was not copied before.
fn copy_now(session: &Session<'_>, plan: &Move, staged: &Staged, home: Range) -> Result<(), Errno> {
    for piece in &plan.pieces {
        for (run, content) in session.pagemap.runs(piece.range.intersect(home))? {
            let is_there = staged.filled.iter().any(|filled| filled.covers(run));
            let is_zero = piece.backing == Backing::Anonymous;
            if content == Content::Backing && (is_there || is_zero) {
                continue;
            }
            for part in chunks(run) {
                let mut bytes = vec![0; usize::try_from(part.len()).map_err(|_| Errno::ENOMEM)?];
                session.read(part.start(), &mut bytes)?;
                session.write(staged.place(plan, part).start(), &bytes)?;
            }
        }
    }
    Ok(())
}

/// After a failed mremap: where it has removed its target, that is put back on small pages, with
/// every piece's rights, from the copy.
fn put_back(
    session: &mut Session<'_>,
    plan: &Move,
    home: Range,
    copy: Range,
) -> Result<(), (&'static str, Errno)> {
    let text = session.target.maps().map_err(|_| ("maps", Errno(libc::ESRCH)))?;
    let is_there = |part: Range| {
        let inside =
            maps::parse(&text).filter_map(Result::ok).map(|m| m.range.intersect(part).len());
        inside.sum::<u64>() == part.len()
    };
    for piece in &plan.pieces {
        let part = piece.range.intersect(home);
        if part.is_empty() || is_there(part) {
            continue;
        }
        restore(session, part, copy.start() + (part.start() - home.start()), piece.prot)
            .map_err(|errno| ("restore", errno))?;
    }
    Ok(())
}

/// Small pages at `part` with what is at `from`.
pub(super) fn restore(
    session: &mut Session<'_>,
    part: Range,
    from: u64,
    prot: Prot,
) -> Result<(), Errno> {
    session.map_over(part, Prot::RW, None)?;
    for chunk in chunks(part) {
        let mut bytes = vec![0; usize::try_from(chunk.len()).map_err(|_| Errno::ENOMEM)?];
        session.read(from + (chunk.start() - part.start()), &mut bytes)?;
        session.write(chunk.start(), &bytes)?;
    }
    if prot == Prot::RW { Ok(()) } else { session.protect(part, prot) }
}

/// The part of a planned range at `home`, as a range of its own.
pub(super) fn part_of(plan: &Move, home: Range) -> Move {
    let mut bytes = ClassBytes::default();
    let mut pieces = Vec::new();
    for piece in &plan.pieces {
        let range = piece.range.intersect(home);
        if !range.is_empty() {
            bytes.add(piece.class, range.len());
            pieces.push(Piece { range, ..*piece });
        }
    }
    Move { range: home, bytes, pieces, gaps: Vec::new(), ..plan.clone() }
}
