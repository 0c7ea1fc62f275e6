//! Lowering: from staged ranges to the steps that the critical section runs. Pure;
//! the same steps run in a model address space in the tests.

use alloc::vec::Vec;

use elfremap_critical::{KIND_COPY, KIND_END, KIND_JUMP, KIND_SYNC, KIND_SYSCALL, Op, RESULT_NONE};

use super::numa::Binding;
use super::sys::{MADV_POPULATE_WRITE, bind_args, flag, number, word};
use crate::errno::Errno;
use crate::plan::Move;
use crate::prot::Prot;
use crate::range::Range;

/// Where the pages of a range come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// The pool, pages of this many bytes.
    Hugetlb(u64),
    /// Transparent huge pages of this many bytes.
    Thp(u64),
}

impl Source {
    /// Bytes of one huge page.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::Hugetlb(size) | Self::Thp(size) => size,
        }
    }
}

/// How a range is brought onto them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Way {
    /// Its copy lies ready here; writable pages are still to be copied.
    Swap {
        /// The staged copy, as long as the range.
        staged: Range,
    },
    /// The old pages go here; the copy is made in their place.
    Move {
        /// Claimed address space, as long as the range.
        aside: Range,
        /// How to populate.
        populate: Populate,
        /// The memory policy under which that happens, unless it is the thread's own.
        binding: Option<Binding>,
    },
}

/// How pages are taken so that a shortage is an error number, not a signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Populate {
    /// `MADV_POPULATE_WRITE`.
    Advice,
    /// `read(2)` of one byte from this descriptor (of `/dev/zero`) into each page.
    Read(i32),
}

/// A range that is ready to be committed.
#[derive(Debug)]
pub(super) struct Staged<'a> {
    pub(super) plan: &'a Move,
    pub(super) source: Source,
    pub(super) way: Way,
    /// Parts of the range whose content has to be copied in the window.
    pub(super) copies: Vec<Range>,
    /// The mappings in the range: what `mremap` takes one by one.
    pub(super) mappings: Vec<Range>,
}

/// Memory that the emergency exit reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Emergency {
    /// The line to write: address and length.
    pub(super) message: (usize, usize),
    /// At least 64 bytes of zeros.
    pub(super) zeros: usize,
    /// A signal set with SIGABRT in it.
    pub(super) abort_set: usize,
    /// The process's and the thread's number.
    pub(super) pid: usize,
    pub(super) tid: usize,
}

/// What became of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Committed {
    /// It lies on huge pages.
    Moved,
    /// It was never away, or is back as it was.
    Untouched(Errno),
    /// The kernel removed it and failed; it was put back on ordinary pages.
    Restored(Errno),
}

/// The steps that run only with the outcome they are named after.
#[derive(Clone, Copy, Debug, Default)]
struct Marks {
    moved: usize,
    restored: Option<usize>,
}

/// The steps for one range.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) ops: Vec<Op>,
    marks: Marks,
}

/// A target that is not known yet.
const LATER: usize = usize::MAX;

impl Program {
    /// Lowers a staged range.
    pub(super) fn new(range: &Staged<'_>, page: u64, emergency: &Emergency) -> Self {
        let mut program = Self { ops: Vec::new(), marks: Marks::default() };
        let torn = match &range.way {
            Way::Swap { staged } => program.swap(range, *staged, page),
            Way::Move { aside, populate, binding } => {
                program.move_aside(range, *aside, *populate, binding.as_ref())
            }
        };
        program.push(KIND_END, 0, [0; 6]);
        program.land(torn);
        program.emergency_exit(emergency);
        program
    }

    /// What became of the range, after the program has run.
    pub(super) fn outcome(&self) -> Committed {
        let ran = |op: usize| self.ops.get(op).is_some_and(|op| op.result != RESULT_NONE);
        if ran(self.marks.moved) {
            return Committed::Moved;
        }
        let results = self.ops.iter().map(|op| op.result);
        let errno = results
            .filter(|&result| result != 0 && result != RESULT_NONE)
            .find_map(|result| i32::try_from(result).ok());
        let errno = Errno(errno.unwrap_or(libc::EIO));
        match self.marks.restored {
            Some(restored) if ran(restored) => Committed::Restored(errno),
            _ => Committed::Untouched(errno),
        }
    }

    fn push(&mut self, kind: usize, number: usize, args: [usize; 6]) -> usize {
        self.ops.push(Op { kind, target: LATER, number, args, result: RESULT_NONE });
        self.ops.len() - 1
    }

    fn patch(&mut self, op: usize, target: usize) {
        if let Some(op) = self.ops.get_mut(op) {
            op.target = target;
        }
    }

    /// Points the failures of `ops` to the next step.
    fn land(&mut self, ops: Vec<usize>) {
        let here = self.ops.len();
        ops.into_iter().for_each(|op| self.patch(op, here));
    }

    /// Makes a failure of `op` go to the step after it: to be ignored.
    fn ignore_failure(&mut self, op: usize) {
        self.patch(op, op + 1);
    }

    fn jump(&mut self) -> usize {
        self.push(KIND_JUMP, 0, [0; 6])
    }

    fn syscall(&mut self, nr: libc::c_long, args: [usize; 6]) -> usize {
        self.push(KIND_SYSCALL, number(nr), args)
    }

    fn copy(&mut self, to: u64, from: u64, len: u64) {
        self.push(KIND_COPY, 0, [word(to), word(from), word(len), 0, 0, 0]);
    }

    fn remap(&mut self, from: Range, to: u64) -> usize {
        let flags = flag(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        let (len, to) = (word(from.len()), word(to));
        self.syscall(libc::SYS_mremap, [word(from.start()), len, len, flags, to, 0])
    }

    fn map_fixed(&mut self, range: Range, flags: i32) -> usize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | flags;
        let (start, len) = (word(range.start()), word(range.len()));
        let prot = flag(Prot::RW.to_raw());
        self.syscall(libc::SYS_mmap, [start, len, prot, flag(flags), flag(-1), 0])
    }

    fn claim(&mut self, range: Range) -> usize {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let (start, len) = (word(range.start()), word(range.len()));
        self.syscall(libc::SYS_mmap, [start, len, 0, flag(flags), flag(-1), 0])
    }

    fn unmap(&mut self, range: Range) -> usize {
        self.syscall(libc::SYS_munmap, [word(range.start()), word(range.len()), 0, 0, 0, 0])
    }

    fn protect(&mut self, range: Range, prot: Prot) -> usize {
        let args = [word(range.start()), word(range.len()), flag(prot.to_raw()), 0, 0, 0];
        self.syscall(libc::SYS_mprotect, args)
    }

    fn advise(&mut self, range: Range, advice: i32) -> usize {
        let args = [word(range.start()), word(range.len()), flag(advice), 0, 0, 0];
        self.syscall(libc::SYS_madvise, args)
    }

    fn sync_if_code(&mut self, range: Range, prot: Prot) {
        if prot.has(Prot::EXEC) {
            self.push(KIND_SYNC, 0, [word(range.start()), word(range.len()), 0, 0, 0, 0]);
        }
    }

    /// Copies what is writable into the staged range, then drops that onto the range
    /// by one call. When the kernel fails after it removed the target (it says
    /// ENOMEM then), the staged copy still has every byte.
    fn swap(&mut self, range: &Staged<'_>, staged: Range, page: u64) -> Vec<usize> {
        let home = range.plan.range;
        let mut torn = Vec::new();
        for part in &range.copies {
            let offset = part.start() - home.start();
            self.copy(staged.start() + offset, part.start(), part.len());
        }
        let swap = self.remap(staged, home.start());
        if !range.copies.is_empty() {
            // Code among what is writable (merge level rwx) was copied just now.
            self.sync_if_code(home, range.plan.prot);
        }
        let moved = self.jump();
        self.land([swap].into());
        // Only what is gone can be claimed; every error means that it is still there.
        let first_page = Range::with_len(home.start(), page).unwrap_or(home);
        let claim = self.claim(first_page);
        let gone = self.jump();
        self.land([claim].into());
        let untouched = self.jump();
        self.land([gone].into());
        torn.push(self.map_fixed(home, 0));
        for piece in &range.plan.pieces {
            let offset = piece.range.start() - home.start();
            self.copy(piece.range.start(), staged.start() + offset, piece.range.len());
            self.sync_if_code(piece.range, piece.prot);
            torn.push(self.protect(piece.range, piece.prot));
        }
        for &gap in &range.plan.gaps {
            let unmap = self.unmap(gap);
            self.ignore_failure(unmap);
        }
        let restored = self.jump();
        self.land([moved, untouched, restored].into());
        self.marks = Marks { moved, restored: Some(restored) };
        torn
    }

    /// Moves every mapping aside, maps pages of the pool in their place, copies back. On a
    /// shortage the originals go home.
    fn move_aside(
        &mut self,
        range: &Staged<'_>,
        aside: Range,
        populate: Populate,
        binding: Option<&Binding>,
    ) -> Vec<usize> {
        let home = range.plan.range;
        let away = |part: Range| part.start() - home.start() + aside.start();
        let mut torn = Vec::new();
        let taken: Vec<usize> =
            range.mappings.iter().map(|&part| self.remap(part, away(part))).collect();
        let mut failed = Vec::new();
        let size = range.source.size();
        let flags =
            libc::MAP_HUGETLB | (size.trailing_zeros() << libc::MAP_HUGE_SHIFT).cast_signed();
        failed.push(self.map_fixed(home, flags));
        if let Some(binding) = binding {
            failed.push(self.syscall(libc::SYS_mbind, bind_args(home, binding)));
        }
        match populate {
            Populate::Advice => failed.push(self.advise(home, MADV_POPULATE_WRITE)),
            Populate::Read(fd) => {
                for page in home.blocks(size) {
                    let args = [flag(fd), word(page.start()), 1, 0, 0, 0];
                    failed.push(self.syscall(libc::SYS_read, args));
                }
            }
        }
        if binding.is_some() {
            failed.push(self.syscall(libc::SYS_mbind, bind_args(home, &Binding::NONE)));
        }
        for &part in &range.copies {
            self.copy(part.start(), away(part), part.len());
        }
        self.sync_if_code(home, range.plan.prot);
        if range.plan.prot != Prot::RW {
            failed.push(self.protect(home, range.plan.prot));
        }
        let moved = self.jump();
        // Something failed: give the huge pages back, then what was taken aside. A
        // mapping that could not be taken aside is still at home, and so are those
        // after it.
        self.land(failed);
        let unmap = self.unmap(home);
        torn.push(unmap);
        for (index, &part) in range.mappings.iter().enumerate().rev() {
            let next =
                self.remap(Range::with_len(away(part), part.len()).unwrap_or(part), part.start());
            torn.push(next);
            // The failure of taking mapping `index` aside enters after its own return.
            let entry = self.ops.len();
            if let Some(&op) = taken.get(index) {
                self.patch(op, entry);
            }
        }
        let untouched = self.jump();
        self.land([moved, untouched].into());
        self.marks = Marks { moved, restored: None };
        torn
    }

    /// Both the commit and its compensation failed: say so in one line and end, with
    /// nothing of the program's or of libc's code involved.
    fn emergency_exit(&mut self, emergency: &Emergency) {
        let (text, len) = emergency.message;
        let abort = flag(libc::SIGABRT);
        let calls = [
            (libc::SYS_write, [2, text, len, 0, 0, 0]),
            (libc::SYS_rt_sigaction, [abort, emergency.zeros, 0, 8, 0, 0]),
            (libc::SYS_rt_sigprocmask, [flag(libc::SIG_UNBLOCK), emergency.abort_set, 0, 8, 0, 0]),
            (libc::SYS_tgkill, [emergency.pid, emergency.tid, abort, 0, 0, 0]),
            (libc::SYS_exit_group, [134, 0, 0, 0, 0, 0]),
        ];
        for (nr, args) in calls {
            let op = self.syscall(nr, args);
            self.ignore_failure(op);
        }
        self.push(KIND_END, 0, [0; 6]);
    }
}
