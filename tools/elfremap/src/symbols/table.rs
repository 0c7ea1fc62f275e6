//! Reading the symbols of code from `.symtab`, `.dynsym`, or the dynamic segment alone.

use elfremap::range::Range;
use goblin::elf::dynamic::{DT_GNU_HASH, DT_HASH, DT_STRSZ, DT_STRTAB, DT_SYMTAB};
use goblin::elf::section_header::{SHN_ABS, SHN_COMMON, SHN_UNDEF, SHT_DYNSYM, SHT_SYMTAB};
use goblin::elf::sym::{
    STB_GLOBAL, STB_GNU_UNIQUE, STB_LOCAL, STB_WEAK, STT_FUNC, STT_GNU_IFUNC, STT_NOTYPE,
};
use goblin::elf::{Sym, Symtab};

use super::file::{ElfFile, c_string, damaged};
use super::layout::{Binding, NameRef, Names, Symbol};
use crate::elf::ElfError;

/// A symbol table's raw entries and their names, undefined symbols included.
#[derive(Debug)]
pub struct Table {
    symbols: Vec<u8>,
    strings: Vec<u8>,
}

impl Table {
    /// `.symtab`; `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn symtab(elf: &ElfFile) -> Result<Option<Self>, ElfError> {
        Self::section(elf, SHT_SYMTAB)
    }

    /// `.dynsym`, found by its section or, without section headers, by the dynamic segment;
    /// `None` when there is none.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn dynsym(elf: &ElfFile) -> Result<Option<Self>, ElfError> {
        match Self::section(elf, SHT_DYNSYM)? {
            None => Self::dynamic_segment(elf),
            table => Ok(table),
        }
    }

    fn section(elf: &ElfFile, kind: u32) -> Result<Option<Self>, ElfError> {
        let Some(table) = elf.sections.iter().find(|s| s.header.sh_type == kind) else {
            return Ok(None);
        };
        let strings = elf.sections.get(table.header.sh_link as usize);
        let strings = strings.ok_or_else(|| damaged("the symbols have no string table"))?;
        let symbols = elf.section_data(table)?;
        Ok(Some(Self { symbols, strings: elf.section_data(strings)? }).filter(|t| !t.is_empty()))
    }

    /// What the dynamic linker goes by. The table's length is nowhere written; the hash
    /// tables tell it.
    fn dynamic_segment(elf: &ElfFile) -> Result<Option<Self>, ElfError> {
        let dynamic = elf.dynamic()?;
        let value = |tag| dynamic.iter().find(|d| d.d_tag == tag).map(|d| d.d_val);
        let (Some(table), Some(strings)) = (value(DT_SYMTAB), value(DT_STRTAB)) else {
            return Ok(None);
        };
        let count = match (value(DT_HASH), value(DT_GNU_HASH)) {
            (Some(hash), _) => Words { elf, at: hash }.get(1).map(u64::from),
            (None, Some(hash)) => gnu_hash_count(elf, hash),
            (None, None) => None,
        };
        let Some(count) = count else { return Ok(None) };
        let part = |address, length, what| {
            let offset = elf.offset_of(address, length);
            let offset =
                offset.ok_or_else(|| damaged(format!("{what} lie outside of the file")))?;
            elf.bytes_at(offset, length, what)
        };
        let length = count.saturating_mul(Sym::size(elf.ctx.container) as u64);
        Ok(Some(Self {
            symbols: part(table, length, "the dynamic symbols")?,
            strings: part(strings, value(DT_STRSZ).unwrap_or(0), "the dynamic strings")?,
        }))
    }

    fn is_empty(&self) -> bool {
        self.symbols.is_empty()
    }

    /// The entries, in the table's order. A part of an entry at the end is left out.
    ///
    /// # Errors
    /// Never for a table that was read; the parser's interface has one.
    pub fn entries(&self, elf: &ElfFile) -> Result<Symtab<'_>, ElfError> {
        let count = self.symbols.len() / Sym::size(elf.ctx.container);
        Symtab::parse(&self.symbols, 0, count, elf.ctx).map_err(damaged)
    }

    /// The name of an entry.
    #[must_use]
    pub fn name(&self, symbol: &Sym) -> &[u8] {
        c_string(&self.strings, symbol.st_name as u64)
    }

    /// Appends the symbols that name code in one of the `regions` (sorted) to `out`, and the
    /// string table to `names`. Returns how many there were.
    ///
    /// Code is what has the type of a function, an indirect function or no type. Dropped are
    /// undefined and absolute symbols, symbols without a name, and mapping symbols (`$x`,
    /// `$d.1`), with which assemblers mark code and data.
    ///
    /// # Errors
    /// As [`Table::entries`].
    pub fn collect(
        self,
        elf: &ElfFile,
        regions: &[Range],
        names: &mut Names,
        out: &mut Vec<Symbol>,
    ) -> Result<usize, ElfError> {
        let before = out.len();
        // The table's number: it is added below, when nothing borrows it any more.
        let table = names.next();
        for symbol in &self.entries(elf)? {
            let Some(binding) = code_binding(&symbol) else { continue };
            let start = code_address(elf, symbol.st_value);
            let region = regions.partition_point(|r| r.end() <= start);
            if regions.get(region).is_none_or(|r| !r.contains(start)) {
                continue;
            }
            let name = self.name(&symbol);
            if name.is_empty() || is_mapping_symbol(name) {
                continue;
            }
            let (Ok(offset), Ok(length)) =
                (u32::try_from(symbol.st_name), u32::try_from(name.len()))
            else {
                continue;
            };
            let name = NameRef { table, offset, length };
            out.push(Symbol { start, size: symbol.st_size, binding, name });
        }
        names.add(self.strings);
        Ok(out.len() - before)
    }
}

/// The binding of a symbol that may name code; `None` for any other symbol.
fn code_binding(symbol: &Sym) -> Option<Binding> {
    let nowhere = [SHN_UNDEF, SHN_ABS, SHN_COMMON];
    if u32::try_from(symbol.st_shndx).is_ok_and(|index| nowhere.contains(&index))
        || !matches!(symbol.st_type(), STT_FUNC | STT_GNU_IFUNC | STT_NOTYPE)
    {
        return None;
    }
    match symbol.st_bind() {
        STB_GLOBAL | STB_GNU_UNIQUE => Some(Binding::Global),
        STB_WEAK => Some(Binding::Weak),
        STB_LOCAL => Some(Binding::Local),
        _ => None,
    }
}

/// The address of code that a symbol's value stands for: 32-bit Arm marks Thumb code by the
/// lowest bit.
fn code_address(elf: &ElfFile, value: u64) -> u64 {
    if elf.header.e_machine == goblin::elf::header::EM_ARM { value & !1 } else { value }
}

fn is_mapping_symbol(name: &[u8]) -> bool {
    matches!(name, [b'$', b'a' | b'd' | b't' | b'x'] | [b'$', b'a' | b'd' | b't' | b'x', b'.', ..])
}

/// 32-bit words of a loaded part of the file.
struct Words<'a> {
    elf: &'a ElfFile,
    at: u64,
}

impl Words<'_> {
    fn get(&self, index: u64) -> Option<u32> {
        let address = self.at.checked_add(index.checked_mul(4)?)?;
        let offset = self.elf.offset_of(address, 4)?;
        let bytes: [u8; 4] = self.elf.bytes_at(offset, 4, "a hash table").ok()?.try_into().ok()?;
        Some(if self.elf.ctx.is_little_endian() {
            u32::from_le_bytes(bytes)
        } else {
            u32::from_be_bytes(bytes)
        })
    }
}

/// Number of symbols that a `DT_GNU_HASH` table at `address` covers: one more than the last
/// of the chain that begins latest. The layout is the one of the GNU linkers: a header of
/// four words (buckets, first symbol, words of the Bloom filter, shift), the filter, the
/// buckets, and a chain word per symbol, whose lowest bit ends a chain.
fn gnu_hash_count(elf: &ElfFile, address: u64) -> Option<u64> {
    let words = Words { elf, at: address };
    let (buckets, first, filter) = (words.get(0)?, words.get(1)?, words.get(2)?);
    let filter_words = u64::from(filter) * if elf.ctx.is_big() { 2 } else { 1 };
    let table = 4 + filter_words;
    let offset = elf.offset_of(address.checked_add(table * 4)?, u64::from(buckets) * 4)?;
    let data = elf.bytes_at(offset, u64::from(buckets) * 4, "a hash table").ok()?;
    let word = |bytes: &[u8]| {
        let bytes: [u8; 4] = bytes.try_into().expect("chunks of 4");
        if elf.ctx.is_little_endian() {
            u32::from_le_bytes(bytes)
        } else {
            u32::from_be_bytes(bytes)
        }
    };
    let last = data.chunks_exact(4).map(word).max().unwrap_or(0);
    if last < first {
        return Some(u64::from(first));
    }
    let chains = table + u64::from(buckets);
    // A longer chain is damage, not a hash table.
    for last in (u64::from(last)..).take(1 << 16) {
        if words.get(chains + last - u64::from(first))? & 1 == 1 {
            return Some(last + 1);
        }
    }
    None
}
