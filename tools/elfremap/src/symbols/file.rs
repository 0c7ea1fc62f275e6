//! An ELF file read piece by piece: only the headers and the sections that are asked
//! for, never the whole file, and never through a mapping that a writer could cut short.

use std::fmt;
use std::io::Read;
use std::path::Path;

use elfremap::range::Range;
use goblin::container::Ctx;
use goblin::elf::compression_header::{CompressionHeader, ELFCOMPRESS_ZLIB, ELFCOMPRESS_ZSTD};
use goblin::elf::dynamic::{Dyn, Dynamic};
use goblin::elf::program_header::{PF_X, PT_DYNAMIC, PT_LOAD, PT_NOTE};
use goblin::elf::section_header::{
    SHF_ALLOC, SHF_COMPRESSED, SHF_EXECINSTR, SHN_XINDEX, SHT_NOBITS, SHT_NOTE,
};
use goblin::elf::{Elf, Header, ProgramHeader, SectionHeader};

use crate::elf::{ElfError, FileSource, NotElf, Source};

/// The largest section, packed or unpacked, that is read into memory: 2 GiB. No symbol
/// table comes near it; a damaged or hostile header may claim anything.
pub const MAX_SECTION: usize = 2 << 30;

type Result<T> = std::result::Result<T, ElfError>;

/// What goblin's parsers complain about.
pub(super) fn damaged(error: impl fmt::Display) -> ElfError {
    ElfError::Damaged(error.to_string())
}

/// A section header with the section's name.
#[derive(Clone, Debug)]
pub struct Section {
    /// The name; empty when the table of names is damaged.
    pub name: String,
    /// The header.
    pub header: SectionHeader,
}

impl Section {
    /// Addresses in the file's own terms, without load bias; `None` when damaged.
    #[must_use]
    pub fn addresses(&self) -> Option<Range> {
        Range::with_len(self.header.sh_addr, self.header.sh_size)
    }

    /// Whether it is loaded and holds code.
    #[must_use]
    pub fn is_code(&self) -> bool {
        let flags = u64::from(SHF_ALLOC | SHF_EXECINSTR);
        self.header.sh_flags & flags == flags
    }
}

/// An ELF file: an executable, a shared object or a separate debug file.
pub struct ElfFile {
    source: Box<dyn Source>,
    /// The file header.
    pub header: Header,
    /// Word size and byte order, for the parsers.
    pub ctx: Ctx,
    /// The program headers. Those of a separate debug file have offsets that mean nothing.
    pub programs: Vec<ProgramHeader>,
    /// The sections; empty when the file has none or their table is damaged.
    pub sections: Vec<Section>,
}

impl fmt::Debug for ElfFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ElfFile").field("header", &self.header).finish_non_exhaustive()
    }
}

impl ElfFile {
    /// Reads the headers of the file at `path`. Nothing but a regular file is opened.
    ///
    /// # Errors
    /// When it cannot be read, is not ELF, or has its program headers outside of the file.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(Box::new(FileSource::open(path)?))
    }

    /// Reads the headers of an ELF image in memory.
    ///
    /// # Errors
    /// As [`ElfFile::open`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        Self::read(Box::new(bytes))
    }

    fn read(source: Box<dyn Source>) -> Result<Self> {
        let start = source.take("ELF header", 0, source.size().min(64), 64)?;
        let not_elf = || ElfError::NotElf(NotElf::Other);
        if !start.starts_with(b"\x7fELF") {
            return Err(not_elf());
        }
        let header = Elf::parse_header(&start).map_err(|_| not_elf())?;
        let ctx =
            Ctx::new(header.container().map_err(damaged)?, header.endianness().map_err(damaged)?);
        let mut elf = Self { source, header, ctx, programs: Vec::new(), sections: Vec::new() };
        // A broken section table is as good as none: loading does not need it.
        elf.sections = elf.read_sections().unwrap_or_default();
        elf.programs = elf.read_programs()?;
        Ok(elf)
    }

    fn read_programs(&self) -> Result<Vec<ProgramHeader>> {
        /// More than 65534 program headers: the number is in the first section header.
        const PN_XNUM: u16 = 0xffff;
        let count = match (self.header.e_phnum, self.sections.first()) {
            (PN_XNUM, Some(first)) => u64::from(first.header.sh_info),
            (count, _) => u64::from(count),
        };
        let entry = ProgramHeader::size(self.ctx);
        if count == 0 || usize::from(self.header.e_phentsize) != entry {
            return Ok(Vec::new());
        }
        let table =
            self.bytes_at(self.header.e_phoff, count * entry as u64, "program header table")?;
        ProgramHeader::parse(&table, 0, table.len() / entry, self.ctx).map_err(damaged)
    }

    fn read_sections(&self) -> Result<Vec<Section>> {
        const WHAT: &str = "section header table";
        let entry = SectionHeader::size(self.ctx);
        let offset = self.header.e_shoff;
        if offset == 0 || usize::from(self.header.e_shentsize) != entry {
            return Ok(Vec::new());
        }
        let first = self.bytes_at(offset, entry as u64, WHAT)?;
        let first = SectionHeader::parse_from(&first, 0, 1, self.ctx).map_err(damaged)?.remove(0);
        // Numbers that do not fit into the file header are in the first section header.
        let count = match self.header.e_shnum {
            0 => first.sh_size,
            count => u64::from(count),
        };
        let names = match u32::from(self.header.e_shstrndx) {
            SHN_XINDEX => first.sh_link as usize,
            index => index as usize,
        };
        let length = count.checked_mul(entry as u64).ok_or_else(|| damaged("too many sections"))?;
        if length == 0 {
            return Ok(Vec::new());
        }
        let table = self.bytes_at(offset, length, WHAT)?;
        let headers =
            SectionHeader::parse_from(&table, 0, table.len() / entry, self.ctx).map_err(damaged)?;
        let names = headers
            .get(names)
            .and_then(|h| self.bytes_at(h.sh_offset, h.sh_size, "section names").ok())
            .unwrap_or_default();
        let name = |h: &SectionHeader| {
            String::from_utf8_lossy(c_string(&names, h.sh_name as u64)).into_owned()
        };
        Ok(headers.into_iter().map(|header| Section { name: name(&header), header }).collect())
    }

    /// `length` bytes at `offset` of the file; `what` names them in the error.
    ///
    /// # Errors
    /// When they lie outside the file, are more than [`MAX_SECTION`], or reading fails.
    pub fn bytes_at(&self, offset: u64, length: u64, what: &'static str) -> Result<Vec<u8>> {
        self.source.take(what, offset, length, MAX_SECTION)
    }

    /// The first section of that name.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.name == name)
    }

    /// The content of a section, unpacked when it is compressed (zlib or zstd).
    /// Empty when it has none in this file.
    ///
    /// # Errors
    /// When it lies outside the file, is larger than [`MAX_SECTION`], or cannot be unpacked.
    pub fn section_data(&self, section: &Section) -> Result<Vec<u8>> {
        let header = &section.header;
        if header.sh_type == SHT_NOBITS {
            return Ok(Vec::new());
        }
        let data = self.bytes_at(header.sh_offset, header.sh_size, "a section")?;
        if header.sh_flags & u64::from(SHF_COMPRESSED) == 0 {
            return Ok(data);
        }
        let packing = CompressionHeader::parse(&data, 0, self.ctx).map_err(damaged)?;
        let packed = &data[CompressionHeader::size(self.ctx)..];
        if packing.ch_size > MAX_SECTION as u64 {
            return Err(damaged("a compressed section is too large"));
        }
        match packing.ch_type {
            ELFCOMPRESS_ZLIB => unpack(flate2::read::ZlibDecoder::new(packed), packing.ch_size),
            ELFCOMPRESS_ZSTD => {
                let decoder = ruzstd::decoding::StreamingDecoder::new(packed).map_err(damaged)?;
                unpack(decoder, packing.ch_size)
            }
            other => Err(damaged(format!("a section is packed in an unknown way, {other}"))),
        }
    }

    /// The loaded segments.
    pub fn loads(&self) -> impl Iterator<Item = &ProgramHeader> {
        self.programs.iter().filter(|p| p.p_type == PT_LOAD)
    }

    /// Addresses of the executable segments, without load bias.
    pub fn code_segments(&self) -> impl Iterator<Item = Range> {
        self.loads()
            .filter(|p| p.p_flags & PF_X != 0)
            .filter_map(|p| Range::with_len(p.p_vaddr, p.p_memsz))
    }

    /// What code may lie in, sorted by address, without load bias: the executable
    /// sections, or the executable segments where there are no sections.
    #[must_use]
    pub fn code_regions(&self) -> Vec<Range> {
        let sections = self.sections.iter().filter(|s| s.is_code());
        let mut regions: Vec<_> =
            sections.filter_map(Section::addresses).filter(|r| !r.is_empty()).collect();
        if regions.is_empty() {
            regions = self.code_segments().filter(|r| !r.is_empty()).collect();
        }
        regions.sort_unstable();
        regions
    }

    /// Offset in the file of `length` bytes at the address `address` (without load bias).
    #[must_use]
    pub fn offset_of(&self, address: u64, length: u64) -> Option<u64> {
        let wanted = Range::with_len(address, length)?;
        let load = self.loads().find(|p| {
            Range::with_len(p.p_vaddr, p.p_filesz).is_some_and(|range| range.covers(wanted))
        })?;
        load.p_offset.checked_add(address - load.p_vaddr)
    }

    /// The entries of the dynamic segment; empty when there is none.
    ///
    /// # Errors
    /// When it lies outside the file.
    pub fn dynamic(&self) -> Result<Vec<Dyn>> {
        let Some(segment) = self.programs.iter().find(|p| p.p_type == PT_DYNAMIC) else {
            return Ok(Vec::new());
        };
        let data = self.bytes_at(segment.p_offset, segment.p_filesz, "the dynamic segment")?;
        let at_start = ProgramHeader { p_offset: 0, ..segment.clone() };
        Ok(Dynamic::parse(&data, &[at_start], self.ctx)
            .map_err(damaged)?
            .map(|d| d.dyns)
            .unwrap_or_default())
    }

    /// The GNU build id.
    #[must_use]
    pub fn build_id(&self) -> Option<Vec<u8>> {
        self.notes().find_map(|(offset, length, align)| {
            let data = self.bytes_at(offset, length, "a note").ok()?;
            build_id_in(&data, align, self.ctx)
        })
    }

    /// The loaded note segment that holds the build id: its address and content.
    #[must_use]
    pub fn loaded_build_id(&self) -> Option<(u64, Vec<u8>)> {
        let mut notes = self.programs.iter().filter(|p| p.p_type == PT_NOTE);
        notes.find_map(|p| {
            let data = self.bytes_at(p.p_offset, p.p_filesz, "a note").ok()?;
            build_id_in(&data, p.p_align, self.ctx)?;
            Some((p.p_vaddr, data))
        })
    }

    /// Note sections, else note segments, as (offset, length, alignment). Sections first: the
    /// segments of a separate debug file point nowhere.
    fn notes(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let sections = self.sections.iter().map(|s| &s.header);
        let sections = sections.filter(|h| h.sh_type == SHT_NOTE);
        let segments = self.programs.iter().filter(|p| p.p_type == PT_NOTE);
        sections
            .map(|h| (h.sh_offset, h.sh_size, h.sh_addralign))
            .chain(segments.map(|p| (p.p_offset, p.p_filesz, p.p_align)))
    }
}

/// The GNU build id among the notes in `data`, which are aligned to `align` bytes.
fn build_id_in(data: &[u8], align: u64, ctx: Ctx) -> Option<Vec<u8>> {
    const NT_GNU_BUILD_ID: u32 = 3;
    let word = |at: usize| {
        let bytes: [u8; 4] = data.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(if ctx.is_little_endian() {
            u32::from_le_bytes(bytes)
        } else {
            u32::from_be_bytes(bytes)
        })
    };
    let align = if align == 8 { 8 } else { 4 };
    let mut at = 0usize;
    loop {
        let name_size = word(at)? as usize;
        let size = word(at + 4)? as usize;
        let kind = word(at + 8)?;
        let name = at + 12;
        let content = name.checked_add(name_size)?.checked_next_multiple_of(align)?;
        let end = content.checked_add(size)?;
        if kind == NT_GNU_BUILD_ID && data.get(name..name + name_size)? == b"GNU\0" {
            return Some(data.get(content..end)?.to_vec());
        }
        at = end.checked_next_multiple_of(align)?;
    }
}

/// The bytes from `offset` of a string table up to the next NUL or the table's end.
#[must_use]
pub fn c_string(table: &[u8], offset: u64) -> &[u8] {
    let rest = usize::try_from(offset).ok().and_then(|at| table.get(at..)).unwrap_or_default();
    let end = rest.iter().position(|&b| b == 0).unwrap_or(rest.len());
    &rest[..end]
}

/// Everything `packed` gives, which must be `size` bytes.
fn unpack(packed: impl Read, size: u64) -> Result<Vec<u8>> {
    let mut data = Vec::new();
    packed.take(size + 1).read_to_end(&mut data).map_err(damaged)?;
    if data.len() as u64 == size {
        Ok(data)
    } else {
        Err(damaged("a compressed section has another size than it says"))
    }
}
