//! Stage: huge pages with the content of a range, elsewhere in the target, while its program
//! runs.

use std::os::unix::fs::FileExt;

use elfremap::errno::Errno;
use elfremap::exec::pagemap::Content;
use elfremap::exec::{Shortage, Source};
use elfremap::facts::Backing;
use elfremap::plan::{Move, Piece};
use elfremap::prot::Prot;
use elfremap::range::Range;

use super::session::Session;
use super::survey::Found;
use crate::check::page_size;

/// `MADV_POPULATE_WRITE` (Linux 5.14) and `MADV_COLLAPSE` (Linux 6.1).
const MADV_POPULATE_WRITE: i32 = 23;
const MADV_COLLAPSE: i32 = 25;

/// How much is copied at a time.
const CHUNK: u64 = 2 << 20;

/// A range's copy.
#[derive(Debug)]
pub(super) struct Staged {
    /// Where in the target, as long as the range.
    pub(super) range: Range,
    /// What every page of the range held when it was copied.
    pub(super) contents: Vec<(Range, Content)>,
    /// The parts of the range whose copy is there. All of it, unless the range is writable: then
    /// what equals the file.
    pub(super) filled: Vec<Range>,
}

impl Staged {
    /// Where the copy of a part of the range is.
    pub(super) fn place(&self, plan: &Move, part: Range) -> Range {
        let start = self.range.start() + (part.start() - plan.range.start());
        part.rebase(start).unwrap_or_default()
    }
}

/// Makes the copy. On failure nothing is left behind.
pub(super) fn stage(
    session: &mut Session<'_>,
    found: &Found,
    plan: &Move,
    source: Source,
) -> Result<Staged, Shortage> {
    let failed = |(step, errno)| Shortage { source, step, errno };
    let range = map(session, plan.range.len(), source).map_err(|errno| failed(("mmap", errno)))?;
    let staged = fill(session, found, plan, source, range);
    if staged.is_err() {
        session.discard(range);
    }
    staged.map_err(failed)
}

fn map(session: &mut Session<'_>, len: u64, source: Source) -> Result<Range, Errno> {
    let range = match source {
        Source::Hugetlb(size) => {
            let shift = (size.trailing_zeros() << libc::MAP_HUGE_SHIFT).cast_signed();
            session.map(len, Prot::RW, libc::MAP_HUGETLB | shift)?
        }
        Source::Thp(size) => session.map_aligned(len, size, Prot::RW)?,
    };
    // A child that is forked meanwhile has no use for it.
    let advised = match source {
        Source::Hugetlb(_) => Ok(()),
        Source::Thp(_) => session.advise(range, libc::MADV_HUGEPAGE),
    };
    let advised = advised.and_then(|()| session.hide_from_children(range));
    if advised.is_err() {
        session.discard(range);
    }
    advised.map(|()| range)
}

fn fill(
    session: &mut Session<'_>,
    found: &Found,
    plan: &Move,
    source: Source,
    range: Range,
) -> Result<Staged, (&'static str, Errno)> {
    let mut staged = Staged { range, contents: Vec::new(), filled: Vec::new() };
    for page in range.blocks(source.size()) {
        if super::is_interrupted() {
            return Err(("copy", Errno(libc::EINTR)));
        }
        match source {
            Source::Hugetlb(_) => populate(session, page).map_err(|errno| ("populate", errno))?,
            Source::Thp(_) => make_thp(session, page).map_err(|errno| ("collapse", errno))?,
        }
        let home = page.rebase(plan.range.start() + (page.start() - range.start()));
        copy(session, found, plan, home.unwrap_or_default(), &mut staged)
            .map_err(|errno| ("copy", errno))?;
    }
    if plan.prot != Prot::RW {
        session.protect(range, plan.prot).map_err(|errno| ("mprotect", errno))?;
    }
    Ok(staged)
}

/// Takes a page of the pool. The helper does it, since what memory it may have (cpuset, memory
/// policy, hugetlb cgroup) is the target's.
fn populate(session: &mut Session<'_>, page: Range) -> Result<(), Errno> {
    match session.advise(page, MADV_POPULATE_WRITE) {
        // Not known to the kernel: then the copy takes it, or fails.
        Err(Errno::EINVAL) => Ok(()),
        other => other,
    }
}

/// Makes one transparent huge page: by its first touch where memory is at hand, else by
/// `MADV_COLLAPSE`, which fails with an error where a fault would give small pages.
fn make_thp(session: &mut Session<'_>, page: Range) -> Result<(), Errno> {
    let first = Range::with_len(page.start(), page_size()).unwrap_or_default();
    populate(session, first)?;
    if session.pagemap.is_huge(page) == Some(true) {
        return Ok(());
    }
    match session.advise(page, MADV_COLLAPSE) {
        // A page was busy for a moment.
        Err(Errno(libc::EAGAIN)) => session.advise(page, MADV_COLLAPSE),
        other => other,
    }
}

/// Copies what the range has at `home`; of a writable one only what equals the file.
fn copy(
    session: &Session<'_>,
    found: &Found,
    plan: &Move,
    home: Range,
    staged: &mut Staged,
) -> Result<(), Errno> {
    for piece in &plan.pieces {
        for (run, content) in session.pagemap.runs(piece.range.intersect(home))? {
            staged.contents.push((run, content));
            let is_stable = content == Content::Backing;
            if plan.is_writable() && !(is_stable && found.file.is_some()) {
                continue;
            }
            for part in chunks(run) {
                let bytes = bytes_of(session, found, piece, part, content)?;
                if let Some(bytes) = bytes {
                    session.write(staged.place(plan, part).start(), &bytes)?;
                }
            }
            staged.filled.push(run);
        }
    }
    Ok(())
}

/// A run in parts of at most [`CHUNK`] bytes.
pub(super) fn chunks(run: Range) -> impl Iterator<Item = Range> {
    run.blocks(CHUNK).map(move |block| block.intersect(run))
}

/// What a part of a piece holds; `None` for zeros.
fn bytes_of(
    session: &Session<'_>,
    found: &Found,
    piece: &Piece,
    part: Range,
    content: Content,
) -> Result<Option<Vec<u8>>, Errno> {
    let mut bytes = vec![0; usize::try_from(part.len()).map_err(|_| Errno::ENOMEM)?];
    match (content, piece.backing, &found.file) {
        (Content::Backing, Backing::Anonymous, _) => return Ok(None),
        (Content::Backing, Backing::File(offset), Some(file)) => {
            let offset = offset + (part.start() - piece.range.start());
            read_file(&file.file, offset, &mut bytes)?;
        }
        _ => session.read(part.start(), &mut bytes)?,
    }
    Ok(Some(bytes))
}

/// Reads from `offset` on; what lies beyond the end of the file stays zero, as in a mapping.
pub(super) fn read_file(file: &std::fs::File, offset: u64, bytes: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Errno(error.raw_os_error().unwrap_or(libc::EIO))),
        }
    }
    Ok(())
}
