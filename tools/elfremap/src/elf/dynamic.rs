//! PT_DYNAMIC: what the loader looks at.

use elfremap::prot::Prot;
use goblin::elf::dynamic::{
    DF_1_NOW, DF_BIND_NOW, DF_TEXTREL, DT_BIND_NOW, DT_DEBUG, DT_FLAGS, DT_FLAGS_1, DT_GNU_HASH,
    DT_HASH, DT_INIT, DT_JMPREL, DT_NEEDED, DT_RELA, DT_RPATH, DT_RUNPATH, DT_SONAME, DT_STRSZ,
    DT_STRTAB, DT_SYMTAB, DT_TEXTREL, DT_VERDEF, DT_VERNEED, DT_VERSYM, Dyn,
};
use goblin::elf::program_header::{PT_DYNAMIC, ProgramHeader};

use super::image::printable;
use super::{ElfError, Image, Source};

/// No linker makes a table anywhere near it (mysqld's has 40 entries of 16 bytes).
const MAX_TABLE: usize = 1 << 20;
/// Longest name or search path that is read.
const MAX_STRING: u64 = 64 << 10;
/// Most DT_NEEDED entries that are followed.
const MAX_NEEDED: usize = 1024;
/// `DF_1_NODEFLIB` and `DF_1_PIE` of elf.h.
const DF_1_NODEFLIB: u64 = 0x800;
const DF_1_PIE: u64 = 0x0800_0000;

/// The tags that hold addresses of tables a linker may put after the symbols.
const TABLES: [u64; 9] = [
    DT_HASH,
    DT_GNU_HASH,
    DT_STRTAB,
    DT_RELA,
    DT_JMPREL,
    DT_VERSYM,
    DT_VERNEED,
    DT_VERDEF,
    DT_INIT,
];

/// The dynamic table, as far as it matters here.
#[derive(Clone, Default, Debug)]
pub struct Dynamic {
    /// DT_NEEDED, in order.
    pub needed: Vec<String>,
    /// DT_SONAME.
    pub soname: Option<String>,
    /// DT_RPATH, unless there is a DT_RUNPATH (the loader then ignores it).
    pub rpath: Option<String>,
    /// DT_RUNPATH.
    pub runpath: Option<String>,
    /// All symbols are bound at start.
    pub bind_now: bool,
    /// Relocations change the text.
    pub text_relocations: bool,
    /// DF_1_NODEFLIB: the default directories are not searched.
    pub no_default_directories: bool,
    /// DF_1_PIE.
    pub flags_1_pie: bool,
    /// DT_DEBUG is there, as in every program.
    pub debug: bool,
    /// DT_STRTAB and DT_STRSZ.
    pub(super) strings: Option<(u64, u64)>,
    /// DT_SYMTAB.
    pub(super) symbols: Option<u64>,
    /// Address at which the table after the symbols begins. The symbol table has no
    /// length of its own.
    pub(super) symbols_end: Option<u64>,
}

impl Dynamic {
    pub(super) fn read(
        source: &impl Source,
        header: &ProgramHeader,
        image: &Image,
    ) -> Result<Self, ElfError> {
        let table = source.take("PT_DYNAMIC", header.p_offset, header.p_filesz, MAX_TABLE)?;
        let local = ProgramHeader {
            p_type: PT_DYNAMIC,
            p_offset: 0,
            p_filesz: table.len() as u64,
            ..ProgramHeader::default()
        };
        let entries = goblin::elf::Dynamic::parse(&table, &[local], image.context)
            .map_err(|error| ElfError::Damaged(format!("PT_DYNAMIC: {error}")))?
            .map(|dynamic| dynamic.dyns)
            .unwrap_or_default();
        let last = |tag| entries.iter().rev().find(|e| e.d_tag == tag).map(|e| e.d_val);
        let mut dynamic = Self {
            bind_now: last(DT_BIND_NOW).is_some()
                || last(DT_FLAGS).is_some_and(|f| f & DF_BIND_NOW != 0)
                || last(DT_FLAGS_1).is_some_and(|f| f & DF_1_NOW != 0),
            text_relocations: last(DT_TEXTREL).is_some()
                || last(DT_FLAGS).is_some_and(|f| f & DF_TEXTREL != 0),
            no_default_directories: last(DT_FLAGS_1).is_some_and(|f| f & DF_1_NODEFLIB != 0),
            flags_1_pie: last(DT_FLAGS_1).is_some_and(|f| f & DF_1_PIE != 0),
            debug: last(DT_DEBUG).is_some(),
            strings: last(DT_STRTAB).zip(last(DT_STRSZ)),
            symbols: last(DT_SYMTAB),
            symbols_end: last(DT_SYMTAB).and_then(|symbols| {
                let tables = entries.iter().filter(|e| TABLES.contains(&e.d_tag));
                tables.map(|e| e.d_val).filter(|&table| table > symbols).min()
            }),
            ..Self::default()
        };
        let string = |entry: &Dyn| dynamic.string(source, image, entry.d_val);
        let needed: Vec<_> = entries
            .iter()
            .filter(|e| e.d_tag == DT_NEEDED)
            .take(MAX_NEEDED)
            .map(string)
            .collect::<Result<_, _>>()?;
        let find = |tag| entries.iter().find(|e| e.d_tag == tag).map(string).transpose();
        let (soname, rpath, runpath) = (find(DT_SONAME)?, find(DT_RPATH)?, find(DT_RUNPATH)?);
        dynamic.needed = needed;
        dynamic.soname = soname;
        dynamic.rpath = rpath.filter(|_| runpath.is_none());
        dynamic.runpath = runpath;
        Ok(dynamic)
    }

    /// The NUL-terminated string at `index` of the string table.
    fn string(&self, source: &impl Source, image: &Image, index: u64) -> Result<String, ElfError> {
        let damaged =
            || ElfError::Damaged("PT_DYNAMIC names a string outside its string table".into());
        let (table, size) = self.strings.ok_or_else(damaged)?;
        let left = size.checked_sub(index).filter(|&left| left > 0).ok_or_else(damaged)?;
        let address = table.checked_add(index).ok_or_else(damaged)?;
        let length = left.min(image.file_bytes_from(address)).min(MAX_STRING);
        let offset = image.offset_of(address, length).filter(|_| length > 0).ok_or_else(damaged)?;
        // Most names are short: read little first.
        for length in [length.min(256), length] {
            let bytes = source.take("string table", offset, length, 64 << 10)?;
            if let Some(end) = bytes.iter().position(|&b| b == 0) {
                return Ok(printable(&bytes[..end]));
            }
        }
        Err(damaged())
    }

    /// Whether relocations are applied to read-only segments of `image`, which the
    /// loader then has to make writable for a while.
    #[must_use]
    pub fn writes_text(&self, image: &Image) -> bool {
        self.text_relocations && image.segments.iter().any(|s| !s.prot.has(Prot::WRITE))
    }
}
