//! Which of the symbols that matter to a remap the program imports or defines.

use std::collections::{BTreeSet, HashMap};

use goblin::elf::sym::{STB_LOCAL, Sym};

use super::{ElfError, Image, Source};

/// The string table is read whole, up to this size (libLLVM's has 5 MB).
const MAX_STRINGS: usize = 32 << 20;
/// Symbols are read in pieces, at most this many in all.
const MAX_SYMBOLS: u64 = 2_000_000;
const PIECE: usize = 4096;
/// Longer than any name that is looked for; keeps hostile tables cheap.
const MAX_NAME: usize = 32;

/// The names that are looked for.
pub const NAMES: [&str; 38] = [
    // own allocators and memory functions: they run inside our constructor
    "malloc",
    "calloc",
    "realloc",
    "free",
    "aligned_alloc",
    "posix_memalign",
    "mallctl",
    "malloc_usable_size",
    "_Znwm",
    "memcpy",
    "memmove",
    "memset",
    // calls that hugetlb mappings answer with EINVAL at 4 KiB steps
    "mmap",
    "mmap64",
    "munmap",
    "mremap",
    "mprotect",
    "pkey_mprotect",
    "madvise",
    "mlockall",
    // the break
    "brk",
    "sbrk",
    // children
    "fork",
    "__fork",
    "vfork",
    "posix_spawn",
    "posix_spawnp",
    "clone",
    "daemon",
    "system",
    "popen",
    // objects that come later
    "dlopen",
    // sanitizers
    "__asan_init",
    "__tsan_init",
    "__msan_init",
    "__hwasan_init",
    "__lsan_init",
    // what a runtime that is linked in imports
    "__sanitizer_symbolize_code",
];

/// The symbols of [`NAMES`] that occur.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Symbols {
    /// Undefined in the file: taken from a shared object.
    pub imported: BTreeSet<&'static str>,
    /// Defined in the file and visible to others.
    pub defined: BTreeSet<&'static str>,
}

impl Symbols {
    /// Reads the dynamic symbol table of `image`.
    ///
    /// # Errors
    /// When the tables are damaged or too large. The program may run all the same:
    /// the loader looks at few of the entries.
    pub fn read(source: &impl Source, image: &Image) -> Result<Self, ElfError> {
        let mut found = Self::default();
        let names: HashMap<&[u8], &'static str> =
            NAMES.iter().map(|&name| (name.as_bytes(), name)).collect();
        for_each(source, image, |name, symbol| {
            if let Some(&name) = names.get(name) {
                let defined = symbol.st_shndx != 0;
                let set = if defined { &mut found.defined } else { &mut found.imported };
                set.insert(name);
            }
        })?;
        Ok(found)
    }
}

/// Address (without load bias) and size in bytes of the symbol `name` that `image`
/// defines.
///
/// # Errors
/// As [`Symbols::read`].
pub fn find(
    source: &impl Source,
    image: &Image,
    name: &str,
) -> Result<Option<(u64, u64)>, ElfError> {
    let mut found = None;
    for_each(source, image, |symbol_name, symbol| {
        if symbol_name == name.as_bytes() && symbol.st_shndx != 0 {
            found = Some((symbol.st_value, symbol.st_size));
        }
    })?;
    Ok(found)
}

/// Calls `visit` with each symbol that is visible to other objects and has a name
/// shorter than [`MAX_NAME`].
fn for_each(
    source: &impl Source,
    image: &Image,
    mut visit: impl FnMut(&[u8], &Sym),
) -> Result<(), ElfError> {
    let Some(dynamic) = &image.dynamic else { return Ok(()) };
    let (Some((table, length)), Some(symbols)) = (dynamic.strings, dynamic.symbols) else {
        return Ok(());
    };
    let damaged = |what| ElfError::Damaged(format!("{what} lies outside the segments"));
    let offset = image.offset_of(table, length).ok_or_else(|| damaged("DT_STRTAB"))?;
    let strings = source.take("dynamic string table", offset, length, MAX_STRINGS)?;

    let size = Sym::size(image.context.container) as u64;
    let room = image.file_bytes_from(symbols);
    let length = dynamic.symbols_end.map_or(room, |end| room.min(end - symbols));
    let count = (length / size).min(MAX_SYMBOLS);
    let offset = image.offset_of(symbols, count * size).ok_or_else(|| damaged("DT_SYMTAB"))?;
    for first in (0..count).step_by(PIECE) {
        let count = (count - first).min(PIECE as u64);
        let piece = source.take("dynamic symbols", offset + first * size, count * size, 1 << 17)?;
        let count = usize::try_from(count).unwrap_or(0);
        let symbols = Sym::parse(&piece, 0, count, image.context)
            .map_err(|error| ElfError::Damaged(format!("dynamic symbols: {error}")))?;
        for symbol in symbols.iter().filter(|s| s.st_name != 0 && s.st_bind() != STB_LOCAL) {
            let name = strings.get(symbol.st_name..).unwrap_or_default();
            let name = &name[..name.len().min(MAX_NAME)];
            if let Some(end) = name.iter().position(|&b| b == 0) {
                visit(&name[..end], symbol);
            }
        }
    }
    Ok(())
}
