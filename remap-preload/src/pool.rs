//! What of the program lies on pages of the pool. The kernel works on such mappings in
//! whole huge pages only, so what the program does to its memory by smaller steps is
//! preceded by moving the blocks concerned back to ordinary pages.
//!
//! And what of it is read-only and lies no longer in its file, on pages of whatever kind:
//! to discard such a page (`MADV_DONTNEED`) brings zeros, and used to bring the file's bytes.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use core_lib::errno::Errno;
use core_lib::exec::guard::{
    Freezer, Pages, Pipe, exchange, futex_wait, futex_wake, is_single_threaded,
};
use core_lib::exec::{Source, block_signals, restore_signals};
use core_lib::prot::Prot;
use core_lib::range::Range;
use core_lib::report::{Moved, Report};
use elfremap_critical::arch;

/// Programs have a handful of ranges; one block taken from the middle makes two of one.
const MOST: usize = 64;

/// A range that has moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) range: Range,
    pub(crate) prot: Prot,
    /// Bytes of a page of the pool; 0 when it lies on other pages (then it is read-only).
    pub(crate) size: u64,
    /// For the time of a fork it lies on ordinary pages.
    pub(crate) is_away: bool,
}

impl Entry {
    const NONE: Self = Self { range: Range::EMPTY, prot: Prot::NONE, size: 0, is_away: false };

    const fn new(moved: &Moved, size: u64) -> Self {
        Self { range: moved.range, prot: moved.prot, size, is_away: false }
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.prot.has(Prot::WRITE)
    }

    const fn is_on_pool(&self) -> bool {
        self.size > 0
    }
}

/// The ranges, and what a fork under way has to remember.
#[derive(Debug)]
pub(crate) struct Table {
    entries: [Entry; MOST],
    count: usize,
    /// Where the parent waits for its child.
    pub(crate) pipe: Option<Pipe>,
    /// The signal mask before the fork.
    pub(crate) mask: u64,
}

struct Shared<T>(UnsafeCell<T>);

// SAFETY: accessed by the constructor's one thread, and later only by the thread that
// holds the lock, or by the one thread of a forked child.
unsafe impl<T> Sync for Shared<T> {}

static TABLE: Shared<Table> =
    Shared(UnsafeCell::new(Table { entries: [Entry::NONE; MOST], count: 0, pipe: None, mask: 0 }));

/// The stack to work on: the caller's may lie in what is moved.
#[repr(align(64))]
struct Stack([u8; STACK]);
const STACK: usize = 32 << 10;
static WORK: Shared<Stack> = Shared(UnsafeCell::new(Stack([0; STACK])));

/// The bounds of all entries, for a glance without the lock: nothing at first.
static LOW: AtomicUsize = AtomicUsize::new(usize::MAX);
static HIGH: AtomicUsize = AtomicUsize::new(0);

/// Whether forks are to be guarded. Changes in the constructor and in a forked child only.
static GUARDS_FORK: AtomicBool = AtomicBool::new(false);

/// 0 free, 1 taken, 2 taken and somebody sleeps.
static LOCK: AtomicI32 = AtomicI32::new(0);

/// Takes over what has moved. (What is too much to remember is left to the kernel.)
pub(crate) fn remember(report: &Report, guard_fork: bool) {
    let known = || {
        let entries = report.moved.iter().filter_map(|moved| match moved.source {
            Some(Source::Hugetlb(size)) => Some(Entry::new(moved, size)),
            Some(Source::Thp(_)) if !moved.prot.has(Prot::WRITE) => Some(Entry::new(moved, 0)),
            _ => None,
        });
        entries.take(MOST)
    };
    // SAFETY: the constructor's thread; the wrappers do not look at the table yet.
    let table = unsafe { &mut *TABLE.0.get() };
    for (slot, entry) in table.entries.iter_mut().zip(known()) {
        *slot = entry;
        table.count += 1;
    }
    let has_writable = known().any(|entry| entry.is_writable());
    GUARDS_FORK.store(guard_fork && has_writable, Ordering::Relaxed);
    let address = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
    let low = known().map(|entry| address(entry.range.start())).min();
    let high = known().map(|entry| address(entry.range.end())).max();
    LOW.store(low.unwrap_or(usize::MAX), Ordering::Relaxed);
    HIGH.store(high.unwrap_or(0), Ordering::Release);
}

/// Whether there is a fork to guard.
pub(crate) fn guards_fork() -> bool {
    GUARDS_FORK.load(Ordering::Relaxed)
}

/// Takes the lock, with signals blocked; returns the mask before.
pub(crate) fn lock() -> u64 {
    let mask = block_signals().unwrap_or(0);
    if LOCK.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_err() {
        while LOCK.swap(2, Ordering::Acquire) != 0 {
            futex_wait(&LOCK, 2);
        }
    }
    mask
}

/// Gives it back.
pub(crate) fn unlock(mask: u64) {
    if LOCK.swap(0, Ordering::Release) == 2 {
        futex_wake(&LOCK);
    }
    restore_signals(mask);
}

/// Runs `f` on the table, on a stack of our own.
///
/// # Safety
/// The caller holds the lock, or is the one thread of a forked child.
pub(crate) unsafe fn with_table<T, F: FnOnce(&mut Table) -> T>(f: F) -> Option<T> {
    struct Call<F, T> {
        f: Option<F>,
        result: Option<T>,
    }
    unsafe extern "C" fn run<F: FnOnce(&mut Table) -> T, T>(call: *mut u8) {
        // SAFETY: `with_table` passes its `Call`; the lock is held.
        let (call, table) = unsafe { (&mut *call.cast::<Call<F, T>>(), &mut *TABLE.0.get()) };
        call.result = call.f.take().map(|f| f(table));
    }
    let mut call = Call { f: Some(f), result: None };
    // Nothing is written to the caller's stack between the start of `f` and its end.
    // SAFETY: the stack is used by the holder of the lock only; `call` outlives the call.
    unsafe {
        let bottom = &raw mut (*WORK.0.get()).0;
        arch::on_stack(bottom.addr() + STACK, run::<F, T>, (&raw mut call).cast());
    }
    call.result
}

/// Whether a call on these bytes has to wait for [`give_up`]: a glance without the lock.
#[inline]
pub(crate) fn is_near(address: usize, len: usize) -> bool {
    address < HIGH.load(Ordering::Relaxed)
        && address.saturating_add(len) > LOW.load(Ordering::Relaxed)
}

/// Moves the blocks that these bytes touch back to ordinary pages.
///
/// # Errors
/// The kernel's: no memory; or other threads run, and nothing can make them wait.
pub(crate) fn give_up(address: usize, len: usize) -> Result<(), Errno> {
    let end = address.saturating_add(len);
    let Some(range) = Range::new(address as u64, end as u64) else { return Ok(()) };
    let mask = lock();
    // SAFETY: the lock is held.
    let done = unsafe { with_table(|table| table.give_up(range)) };
    unlock(mask);
    done.unwrap_or(Ok(()))
}

/// Whether all of these bytes lie on the pool, with this protection.
pub(crate) fn covers(address: usize, len: usize, prot: Option<i32>) -> bool {
    let end = address.saturating_add(len);
    let Some(range) = Range::new(address as u64, end as u64) else { return false };
    let mask = lock();
    let covered = |table: &mut Table| {
        let mut entries = table.entries[..table.count].iter();
        entries.any(|e| {
            e.is_on_pool()
                && e.range.covers(range)
                && prot.is_none_or(|prot| prot == e.prot.to_raw())
        })
    };
    // SAFETY: the lock is held.
    let covered = unsafe { with_table(covered) };
    unlock(mask);
    covered == Some(true)
}

/// The first part of these bytes that is read-only and no longer the file's.
pub(crate) fn first_read_only(address: usize, len: usize) -> Option<(usize, usize)> {
    let range = Range::new(address as u64, address.saturating_add(len) as u64)?;
    let mask = lock();
    let first = |table: &mut Table| {
        let entries = table.entries[..table.count].iter().filter(|e| !e.is_writable());
        let parts = entries.map(|e| e.range.intersect(range)).filter(|part| !part.is_empty());
        parts.min_by_key(|part| part.start())
    };
    // SAFETY: the lock is held.
    let part = unsafe { with_table(first) }.flatten();
    unlock(mask);
    let part = part?;
    Some((usize::try_from(part.start()).ok()?, usize::try_from(part.end()).ok()?))
}

/// How to make other threads wait: not at all when there are none. An error when that takes
/// what the kernel does not grant.
fn freezer() -> Result<Option<Freezer>, Errno> {
    if is_single_threaded() { Ok(None) } else { Freezer::new().map(Some) }
}

impl Table {
    /// The writable ranges.
    pub(crate) fn writable(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.entries.iter_mut().take(self.count).filter(|entry| entry.is_writable())
    }

    fn give_up(&mut self, range: Range) -> Result<(), Errno> {
        let mut index = 0;
        while index < self.count {
            let entry = self.entries[index];
            let touched = entry.range.intersect(range);
            if touched.is_empty() || !entry.is_on_pool() {
                index += 1;
                continue;
            }
            let blocks = touched.align_out(entry.size).unwrap_or(entry.range);
            let mut blocks = blocks.intersect(entry.range);
            // One entry becomes up to three.
            if self.count + 2 > MOST {
                blocks = entry.range;
            }
            move_back(blocks, &entry, Pages::Ordinary(entry.size))?;
            let (before, after) = entry.range.subtract(blocks);
            self.remove(index);
            self.add(Entry { range: before, ..entry });
            self.add(Entry { range: after, ..entry });
            if !entry.is_writable() {
                self.add(Entry { range: blocks, size: 0, ..entry });
            }
        }
        Ok(())
    }

    fn add(&mut self, entry: Entry) {
        if !entry.range.is_empty() && self.count < MOST {
            self.entries[self.count] = entry;
            self.count += 1;
        }
    }

    fn remove(&mut self, index: usize) {
        self.count -= 1;
        self.entries[index] = self.entries[self.count];
    }

    /// Puts the writable ranges onto ordinary pages for the time of a fork; false when one
    /// of them has to stay.
    pub(crate) fn step_aside(&mut self) -> bool {
        let mut all = true;
        for entry in self.writable() {
            entry.is_away = move_back(entry.range, entry, Pages::Transparent(entry.size)).is_ok();
            all &= entry.is_away;
        }
        all
    }

    /// Takes the ranges that stepped aside back to the pool. What finds no pages any more
    /// stays where it is.
    pub(crate) fn step_back(&mut self) {
        let mut index = 0;
        while index < self.count {
            let entry = self.entries[index];
            if entry.is_away && to_pool(&entry).is_err() {
                self.remove(index);
                continue;
            }
            self.entries[index].is_away = false;
            index += 1;
        }
    }

    /// Forgets the writable ranges of a forked child.
    pub(crate) fn forget_writable(&mut self) {
        let mut index = 0;
        while index < self.count {
            if self.entries[index].is_writable() {
                self.remove(index);
            } else {
                index += 1;
            }
        }
        GUARDS_FORK.store(false, Ordering::Relaxed);
    }
}

/// Moves blocks of an entry off the pool.
fn move_back(blocks: Range, entry: &Entry, to: Pages) -> Result<(), Errno> {
    let freezer = if entry.is_writable() { freezer()? } else { None };
    // SAFETY: the entry is mapped with these rights since the constructor, and every range
    // that moves can be read. Other threads wait, or there are none. We are on our own stack.
    unsafe { exchange(blocks, entry.prot, to, freezer.as_ref()) }
}

fn to_pool(entry: &Entry) -> Result<(), Errno> {
    let freezer = freezer()?;
    // SAFETY: as above; the entry lies on ordinary pages since `step_aside`, and what the
    // program does to its memory waits for the lock.
    unsafe { exchange(entry.range, entry.prot, Pages::Pool(entry.size), freezer.as_ref()) }
}
