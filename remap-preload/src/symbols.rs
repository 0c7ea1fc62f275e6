//! What the loaded objects define and import: their dynamic symbol tables, read as the
//! loader does. (dlsym(3) is not for constructors: the program may have one of its own,
//! and it allocates.)

use core::ffi::{c_int, c_void};
use core::ptr;

use crate::host;

/// The functions that this library wraps.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
pub(crate) enum Function {
    Mmap,
    Mmap64,
    Munmap,
    Mremap,
    Mprotect,
    PkeyMprotect,
    Madvise,
    PosixMadvise,
    Mlock,
    Mlock2,
    Fork,
    ForkOnly,
    Clone,
    RegisterAtfork,
}

/// How many they are.
pub(crate) const COUNT: usize = 14;

/// Their names, in the same order.
const NAMES: [&[u8]; COUNT] = [
    b"mmap",
    b"mmap64",
    b"munmap",
    b"mremap",
    b"mprotect",
    b"pkey_mprotect",
    b"madvise",
    b"posix_madvise",
    b"mlock",
    b"mlock2",
    b"fork",
    b"_Fork",
    b"clone",
    b"__register_atfork",
];

/// Functions by which threads come into being, or others write into the program's memory.
const THREADS: [&[u8]; 9] = [
    b"pthread_create",
    b"thrd_create",
    b"clone",
    b"__clone",
    b"syscall",
    b"timer_create",
    b"aio_read",
    b"aio_read64",
    b"lio_listio",
];

/// The addresses of the next definitions, as dlsym(RTLD_NEXT) finds them; 0 where there is
/// none.
pub(crate) fn next() -> [usize; COUNT] {
    let (mut next, mut is_after_us) = ([0; COUNT], false);
    each(&mut |object| {
        if object.holds((each as *const ()).addr()) {
            is_after_us = true;
        } else if is_after_us {
            let missing = next.iter_mut().zip(NAMES).filter(|(slot, _)| **slot == 0);
            missing.for_each(|(slot, name)| *slot = object.definition(name).unwrap_or(0));
        }
        next.contains(&0)
    });
    next
}

/// Whether an object imports a function by which more than one thread may come to write to
/// the program's memory.
pub(crate) fn may_have_threads() -> bool {
    let mut found = false;
    each(&mut |object| {
        found |= object.imports(&THREADS);
        !found
    });
    found
}

/// Calls `f` for each loaded object with a symbol table, in the order of the search, until
/// it returns false.
fn each(f: &mut dyn FnMut(&Symbols) -> bool) {
    let mut f = f;
    // SAFETY: the callback matches the prototype and gets the pointer to `f`, which
    // outlives the call.
    unsafe { host::dl_iterate_phdr(visit, (&raw mut f).cast()) };
}

unsafe extern "C" fn visit(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the loader passes a valid structure and the pointer that `each` gave it.
    let (object, f) =
        unsafe { (Symbols::of(&*info), &mut *data.cast::<&mut dyn FnMut(&Symbols) -> bool>()) };
    object.is_some_and(|object| !f(&object)).into()
}

/// `Elf64_Sym`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

/// The symbol table of an object. All addresses lie in the object, whose tables stay
/// mapped and unchanged while it is loaded.
struct Symbols {
    bias: usize,
    start: usize,
    end: usize,
    symbols: usize,
    strings: usize,
    /// 0 when it has none.
    hash: usize,
    gnu_hash: usize,
    versions: usize,
}

impl Symbols {
    /// # Safety
    /// What the loader says of an object that stays loaded.
    unsafe fn of(info: &libc::dl_phdr_info) -> Option<Self> {
        /// Tags of the dynamic section (elf.h).
        const DT_HASH: u64 = 4;
        const DT_STRTAB: u64 = 5;
        const DT_SYMTAB: u64 = 6;
        const DT_GNU_HASH: u64 = 0x6fff_fef5;
        const DT_VERSYM: u64 = 0x6fff_fff0;
        if info.dlpi_phdr.is_null() {
            return None;
        }
        let bias = usize::try_from(info.dlpi_addr).ok()?;
        // SAFETY: the program headers of a loaded object.
        let headers =
            unsafe { core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let address = |value: u64| Some(bias.wrapping_add(usize::try_from(value).ok()?));
        let (mut start, mut end, mut dynamic) = (usize::MAX, 0, None);
        for header in headers {
            let from = address(header.p_vaddr)?;
            match header.p_type {
                libc::PT_LOAD => {
                    start = start.min(from);
                    end = end.max(from.checked_add(usize::try_from(header.p_memsz).ok()?)?);
                }
                libc::PT_DYNAMIC => dynamic = Some((from, header.p_memsz / 16)),
                _ => {}
            }
        }
        let (dynamic, count) = dynamic?;
        let mut found =
            Self { bias, start, end, symbols: 0, strings: 0, hash: 0, gnu_hash: 0, versions: 0 };
        if !found.holds(dynamic) {
            return None;
        }
        for index in 0..usize::try_from(count).ok()? {
            // SAFETY: the dynamic section has this many entries.
            let [tag, value] = unsafe { read::<[u64; 2]>(dynamic + index * 16) };
            let slot = match tag {
                0 => break,
                DT_HASH => &mut found.hash,
                DT_STRTAB => &mut found.strings,
                DT_SYMTAB => &mut found.symbols,
                DT_GNU_HASH => &mut found.gnu_hash,
                DT_VERSYM => &mut found.versions,
                _ => continue,
            };
            // glibc has added the load address already, except for the vdso; musl never.
            let value = usize::try_from(value).ok()?;
            *slot = if value >= start && value < end { value } else { bias.wrapping_add(value) };
            if *slot < start || *slot >= end {
                return None;
            }
        }
        (found.symbols != 0 && found.strings != 0).then_some(found)
    }

    fn holds(&self, address: usize) -> bool {
        address >= self.start && address < self.end
    }

    /// # Safety
    /// The object has a symbol of this index.
    unsafe fn symbol(&self, index: usize) -> Symbol {
        // SAFETY: the caller's promise.
        unsafe { read(self.symbols + index * size_of::<Symbol>()) }
    }

    /// Whether the symbol's name is `name`.
    fn is_named(&self, symbol: &Symbol, name: &[u8]) -> bool {
        let at = self.strings + symbol.name as usize;
        // SAFETY: a symbol's name is a C string in the object's string table; nothing is
        // read beyond its end.
        name.iter().chain(b"\0").enumerate().all(|(i, &byte)| unsafe { read::<u8>(at + i) } == byte)
    }

    /// Where the object defines the function, in its default version.
    fn definition(&self, name: &[u8]) -> Option<usize> {
        // SAFETY: the tables are those of a loaded object.
        unsafe { if self.gnu_hash != 0 { self.find_gnu(name) } else { self.find_sysv(name) } }
    }

    /// # Safety
    /// The object has a table of this kind, when its address is not 0.
    unsafe fn find_gnu(&self, name: &[u8]) -> Option<usize> {
        let hash = name.iter().fold(5381u32, |h, &b| h.wrapping_mul(33).wrapping_add(u32::from(b)));
        // SAFETY: the layout of DT_GNU_HASH: number of buckets, first symbol, words of the
        // Bloom filter, its shift; the filter, the buckets, a word for each symbol.
        unsafe {
            let [buckets, first, words, shift] = read::<[u32; 4]>(self.gnu_hash);
            if buckets == 0 || words == 0 {
                return None;
            }
            let filter = self.gnu_hash + 16;
            let word = read::<u64>(filter + (hash / 64 % words) as usize * 8);
            let bits = 1 << (hash % 64) | 1 << (hash.checked_shr(shift).unwrap_or(0) % 64);
            if word & bits != bits {
                return None;
            }
            let bucket = filter + words as usize * 8;
            let chain = bucket + buckets as usize * 4;
            let mut index = read::<u32>(bucket + (hash % buckets) as usize * 4);
            while index >= first && index != 0 {
                let value = read::<u32>(chain + (index - first) as usize * 4);
                if value | 1 == hash | 1
                    && let Some(found) = self.defined(index as usize, name)
                {
                    return Some(found);
                }
                if value & 1 != 0 {
                    break;
                }
                index += 1;
            }
        }
        None
    }

    /// # Safety
    /// As above.
    unsafe fn find_sysv(&self, name: &[u8]) -> Option<usize> {
        let count = self.count()?;
        // SAFETY: every index is below the number of symbols.
        (1..count).find_map(|index| unsafe { self.defined(index, name) })
    }

    /// The address of the function when the symbol defines it.
    ///
    /// # Safety
    /// The object has a symbol of this index.
    unsafe fn defined(&self, index: usize, name: &[u8]) -> Option<usize> {
        const FUNCTION: u8 = 2;
        /// Not the default version.
        const HIDDEN: u16 = 1 << 15;
        // SAFETY: the caller's promise; the table of versions has an entry for each symbol.
        let (symbol, version) = unsafe {
            let at = self.versions + index * 2;
            (self.symbol(index), if self.versions == 0 { 0 } else { read::<u16>(at) })
        };
        let is_it = symbol.section != 0
            && symbol.info & 15 == FUNCTION
            && symbol.info >> 4 != 0
            && version & HIDDEN == 0
            && self.is_named(&symbol, name);
        is_it.then(|| self.bias.wrapping_add(symbol.value))
    }

    /// The number of symbols, as far as it can be known.
    fn count(&self) -> Option<usize> {
        if self.hash != 0 {
            // SAFETY: DT_HASH begins with the numbers of buckets and of symbols.
            return Some(unsafe { read::<[u32; 2]>(self.hash) }[1] as usize);
        }
        // The strings follow the symbols, in what every linker writes.
        self.strings.checked_sub(self.symbols).map(|bytes| bytes / size_of::<Symbol>())
    }

    /// Whether the object imports one of the names; true when that is unknown.
    fn imports(&self, names: &[&[u8]]) -> bool {
        let count = if self.gnu_hash == 0 {
            self.count()
        } else {
            // SAFETY: as in `find_gnu`. What is imported stands before the first symbol of
            // the table, which of an object that defines nothing means nothing.
            let first = unsafe { read::<[u32; 4]>(self.gnu_hash) }[1] as usize;
            if first > 1 { Some(first) } else { self.count() }
        };
        let Some(count) = count else { return true };
        (1..count).any(|index| {
            // SAFETY: the index is below the number of symbols.
            let symbol = unsafe { self.symbol(index) };
            symbol.section == 0 && names.iter().any(|name| self.is_named(&symbol, name))
        })
    }
}

/// Reads a value at an address.
///
/// # Safety
/// A value of this kind lies there, which nobody changes.
unsafe fn read<T: Copy>(address: usize) -> T {
    // SAFETY: the caller's promise.
    unsafe { ptr::with_exposed_provenance::<T>(address).read_unaligned() }
}
