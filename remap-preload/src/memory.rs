//! The allocator of the constructor: a pile that only grows, on memory of its own, all
//! given back at the end. The program's malloc, which may be its own and not
//! initialised yet, is never called.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::UnsafeCell;
use core::ptr;

use core_lib::exec::{map_private, unmap_private};

/// Bytes mapped at a time, at least: more than a whole run takes, so that memory is
/// short at the beginning or not at all. What is not touched costs nothing; where transparent
/// huge pages are set to `always`, the first touch of 2 MiB or more would cost a whole one.
const CHUNK: usize = (2 << 20) - (256 << 10);

/// Written at the start of a chunk: the chunk before it.
struct Header {
    previous: *mut Header,
    len: usize,
}

struct Pile {
    last: *mut Header,
    next: usize,
    end: usize,
}

/// The allocator.
pub(crate) struct Memory(UnsafeCell<Pile>);

// SAFETY: only the constructor allocates, and the loader runs it in one thread, once.
unsafe impl Sync for Memory {}

#[global_allocator]
static MEMORY: Memory = Memory(UnsafeCell::new(Pile { last: ptr::null_mut(), next: 0, end: 0 }));

impl Pile {
    fn take(&mut self, layout: Layout) -> *mut u8 {
        let start = self.next.next_multiple_of(layout.align());
        match start.checked_add(layout.size()) {
            Some(end) if end <= self.end && !self.last.is_null() => {
                self.next = end;
                // Within the chunk, so the chunk's pointer may be used for it.
                self.last.cast::<u8>().with_addr(start)
            }
            _ => self.grow(layout),
        }
    }

    fn grow(&mut self, layout: Layout) -> *mut u8 {
        let room = layout.size().saturating_add(layout.align()).saturating_add(size_of::<Header>());
        let Some(len) = room.checked_next_multiple_of(CHUNK) else { return ptr::null_mut() };
        let Ok(chunk) = map_private(len) else { return ptr::null_mut() };
        let header = chunk.cast::<Header>();
        // SAFETY: the mapping is new, page-aligned and longer than a header.
        unsafe { header.write(Header { previous: self.last, len }) };
        self.last = header;
        self.next = chunk.addr() + size_of::<Header>();
        self.end = chunk.addr() + len;
        self.take(layout)
    }
}

// SAFETY: `alloc` returns memory of a mapping made for the purpose, aligned, given out
// once, and valid until `release`; on failure null. Nothing unwinds.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: one thread only (see `Sync` above), and no call below comes back here.
        unsafe { (*self.0.get()).take(layout) }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let pile = unsafe { &mut *self.0.get() };
        // The most recent piece grows where it lies.
        if old.addr() + layout.size() == pile.next
            && old.addr().checked_add(size).is_some_and(|end| end <= pile.end)
        {
            pile.next = old.addr() + size;
            return old;
        }
        // SAFETY: the caller vouches for `old` and for a size that fits the layout's
        // rules; the new piece is at least as long as what is copied.
        unsafe {
            let new = pile.take(Layout::from_size_align_unchecked(size, layout.align()));
            if !new.is_null() {
                ptr::copy_nonoverlapping(old, new, layout.size().min(size));
            }
            new
        }
    }
}

/// Takes the first chunk; false when there is no memory.
pub(crate) fn prepare() -> bool {
    // SAFETY: a layout of one byte is valid; the byte goes with the chunk.
    let first = unsafe { MEMORY.alloc(Layout::new::<u8>()) };
    !first.is_null()
}

/// Gives everything back.
///
/// # Safety
/// Nothing that was allocated is used any more.
pub(crate) unsafe fn release() {
    // SAFETY: one thread only; the chunks are ours, each with its header, and by the
    // caller's promise nothing in them is used.
    unsafe {
        let pile = &mut *MEMORY.0.get();
        while !pile.last.is_null() {
            let Header { previous, len } = pile.last.read();
            unmap_private(pile.last.cast(), len);
            pile.last = previous;
        }
        pile.next = 0;
        pile.end = 0;
    }
}
