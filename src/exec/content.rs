//! What the pages of a range hold, and how it gets into the huge pages that stand for it.

use alloc::vec::Vec;

use super::pagemap::{Content, Pagemap};
use super::sys::{self, Fd};
use crate::errno::Errno;
use crate::facts::Backing;
use crate::plan::{Move, Piece};
use crate::prot::Prot;
use crate::range::Range;

/// Reads the program's pages: from its file where they equal it, else from memory.
#[derive(Debug)]
pub(super) struct Contents {
    pagemap: Pagemap,
    /// The object's file; without it all is read from memory.
    file: Option<Fd>,
}

impl Contents {
    pub(super) const fn new(pagemap: Pagemap, file: Option<Fd>) -> Self {
        Self { pagemap, file }
    }

    /// Whether all of `range` is mapped by huge entries; `None` where that is unknown.
    pub(super) fn is_huge(&self, range: Range) -> Option<bool> {
        self.pagemap.is_huge(range)
    }

    /// Copies what `plan` has at `home` to `page`, which stands for it. What equals the
    /// file is read from the file: that is cheaper than to fault the old mapping in page
    /// by page.
    ///
    /// # Safety
    /// `page` is ours, populated and writable, and as long as `home`, which lies in the
    /// range of `plan`.
    pub(super) unsafe fn copy(&self, plan: &Move, home: Range, page: Range) -> Result<(), Errno> {
        for piece in &plan.pieces {
            for (run, content) in self.pagemap.runs(piece.range.intersect(home))? {
                let to = run.rebase(page.start() + (run.start() - home.start()));
                let to = to.ok_or(Errno::EINVAL)?;
                // SAFETY: `to` is a part of `page`.
                if content == Content::Own || !unsafe { self.read_backing(piece, run, to) } {
                    sys::require_readable(run)?;
                    // SAFETY: as above, and the run can be read.
                    unsafe { copy(to, run) };
                }
            }
        }
        Ok(())
    }

    /// The last look at a writable range, with signals blocked and nothing else running:
    /// reads what equals the file into the staging area; returns what the window has to
    /// copy, all of which can be read.
    pub(super) fn prepare_swap(&self, plan: &Move, staged: Range) -> Result<Vec<Range>, Errno> {
        let mut copies = Vec::new();
        for piece in &plan.pieces {
            for (run, content) in self.pagemap.runs(piece.range)? {
                let to = run.rebase(staged.start() + (run.start() - plan.range.start()));
                let to = to.ok_or(Errno::EINVAL)?;
                // SAFETY: the staging area is ours, and a writable range's is writable.
                if content == Content::Own || !unsafe { self.read_backing(piece, run, to) } {
                    sys::require_readable(run)?;
                    copies.push(run);
                }
            }
        }
        Ok(copies)
    }

    /// What the window has to copy when the whole range is taken away first.
    pub(super) fn prepare_move(&self, plan: &Move) -> Result<Vec<Range>, Errno> {
        let mut copies = Vec::new();
        for piece in &plan.pieces {
            for (run, content) in self.pagemap.runs(piece.range)? {
                if content == Content::Own || piece.backing != Backing::Anonymous {
                    sys::require_readable(run)?;
                    copies.push(run);
                }
            }
        }
        Ok(copies)
    }

    /// Puts what is behind an unmodified run into `to`, which is still zero: nothing for
    /// anonymous memory, else the file's bytes (what lies beyond its end stays zero, as
    /// in the mapping). False when that can't be done.
    ///
    /// # Safety
    /// `to` is ours, writable and as long as `run`, which lies in `piece`.
    unsafe fn read_backing(&self, piece: &Piece, run: Range, to: Range) -> bool {
        match (piece.backing, &self.file) {
            (Backing::Anonymous, _) => true,
            (Backing::File(offset), Some(file)) => {
                let offset = offset + (run.start() - piece.range.start());
                // SAFETY: the caller's promise.
                unsafe { file.read_at_address(to, offset) }.is_ok()
            }
            (Backing::File(_) | Backing::Foreign, _) => false,
        }
    }

    /// Blocks of `size` bytes whose code differs from the file.
    pub(super) fn modified_text(&self, plan: &Move, size: u64) -> Result<Vec<Range>, Errno> {
        let mut blocks = Vec::new();
        for piece in &plan.pieces {
            if piece.prot.has(Prot::EXEC) && piece.backing != Backing::Anonymous {
                let runs = self.pagemap.runs(piece.range)?.into_iter();
                let own = runs.filter(|&(_, content)| content == Content::Own);
                own.for_each(|(run, _)| blocks.extend(run.blocks(size)));
            }
        }
        Ok(blocks)
    }
}

/// # Safety
/// `to` is ours and writable, `from` readable, of the same length.
unsafe fn copy(to: Range, from: Range) {
    let len = sys::word(from.len().min(to.len()));
    // SAFETY: the caller's promise; a staging area never overlaps what it stands for.
    unsafe { elfremap_critical::arch::copy(sys::word(to.start()), sys::word(from.start()), len) }
}
