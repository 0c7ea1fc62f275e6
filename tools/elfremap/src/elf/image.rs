//! The ELF header and program headers: what the kernel looks at.

use elfremap::hugepage::PageSize;
use elfremap::prot::Prot;
use elfremap::range::Range;
use goblin::container::{Container, Ctx};
use goblin::elf::Elf;
use goblin::elf::header::{
    EI_CLASS, EI_DATA, ELFCLASS32, ELFCLASS64, ELFDATA2LSB, ELFDATA2MSB, EM_386, EM_AARCH64,
    EM_ARM, EM_PPC64, EM_RISCV, EM_S390, EM_X86_64, ET_CORE, ET_DYN, ET_EXEC, ET_REL, Header,
};
use goblin::elf::program_header::{
    PT_DYNAMIC, PT_GNU_RELRO, PT_GNU_STACK, PT_INTERP, PT_LOAD, ProgramHeader,
};

use super::{Dynamic, ElfError, NotElf, Notes, Source};

/// The most program headers the kernel accepts: `load_elf_phdrs` of fs/binfmt_elf.c
/// refuses tables of more than 64 KiB (Linux 2.6 to 6.18).
pub const MAX_PROGRAM_HEADERS: u16 = 1170;
/// `PATH_MAX`, the kernel's limit for PT_INTERP.
const MAX_INTERPRETER: u64 = 4096;
/// End of the user address space with 4-level page tables (x86-64); arm64's is
/// 2^48. A file whose segments lie beyond the larger one runs nowhere.
const MAX_ADDRESS: u64 = 1 << 48;
/// A script's first line, as far as the kernel reads it (`BINPRM_BUF_SIZE`).
const MAX_SCRIPT_LINE: u64 = 256;

/// Word size of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// ELFCLASS32.
    Bits32,
    /// ELFCLASS64.
    Bits64,
}

/// What kind of ELF file it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// ET_EXEC with an interpreter: a program at fixed addresses.
    Exec,
    /// ET_DYN with an interpreter: a program at an address of the kernel's choice.
    Pie,
    /// ET_EXEC without interpreter.
    Static,
    /// ET_DYN without interpreter that is a program all the same.
    StaticPie,
    /// A shared object (some, like libc, can be run too).
    SharedObject,
    /// ET_REL.
    Object,
    /// ET_CORE.
    Core,
    /// Another value of `e_type`.
    Other(u16),
}

impl Kind {
    /// In words.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::Exec => "ET_EXEC program at fixed addresses".into(),
            Self::Pie => "PIE program".into(),
            Self::Static => "static program at fixed addresses".into(),
            Self::StaticPie => "static-pie program".into(),
            Self::SharedObject => "shared object".into(),
            Self::Object => "relocatable object file".into(),
            Self::Core => "core dump".into(),
            Self::Other(e_type) => format!("ELF file of type {e_type:#x}"),
        }
    }

    /// For `--json`.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Exec => "exec",
            Self::Pie => "pie",
            Self::Static => "static",
            Self::StaticPie => "static-pie",
            Self::SharedObject => "shared-object",
            Self::Object => "object",
            Self::Core => "core",
            Self::Other(_) => "other",
        }
    }
}

/// One PT_LOAD. Addresses are the file's own, without load bias.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// `p_offset`, in bytes.
    pub offset: u64,
    /// `p_vaddr` and `p_memsz`.
    pub memory: Range,
    /// `p_filesz`, in bytes; never more than the memory.
    pub file_size: u64,
    /// Access rights.
    pub prot: Prot,
    /// `p_align`, as it stands in the file.
    pub align: u64,
}

/// What the headers of an ELF file say.
#[derive(Clone, Debug)]
pub struct Image {
    /// Kind of file.
    pub kind: Kind,
    /// Word size.
    pub class: Class,
    /// Byte order.
    pub little_endian: bool,
    /// `e_machine`.
    pub machine: u16,
    /// `e_entry`.
    pub entry: u64,
    /// The PT_LOAD segments with at least one byte, in the order of their addresses.
    pub segments: Vec<Segment>,
    /// PT_GNU_RELRO.
    pub relro: Option<Range>,
    /// PT_INTERP.
    pub interpreter: Option<String>,
    /// PT_GNU_STACK asks for an executable stack, or is missing.
    pub executable_stack: bool,
    /// PT_DYNAMIC.
    pub dynamic: Option<Dynamic>,
    /// What the notes say.
    pub notes: Notes,
    /// Oddities that the kernel tolerates, in words.
    pub oddities: Vec<String>,
    pub(super) context: Ctx,
}

impl Image {
    /// Reads the headers, PT_INTERP, PT_DYNAMIC and notes.
    ///
    /// # Errors
    /// [`ElfError::NotElf`] without ELF magic; the other kinds for a file that the
    /// kernel would not run or that ends too early.
    pub fn read(source: &impl Source) -> Result<Self, ElfError> {
        let header = read_header(source)?;
        let class = match header.e_ident[EI_CLASS] {
            ELFCLASS32 => Class::Bits32,
            ELFCLASS64 => Class::Bits64,
            other => return Err(ElfError::Damaged(format!("unknown class {other}"))),
        };
        let little_endian = match header.e_ident[EI_DATA] {
            ELFDATA2LSB => true,
            ELFDATA2MSB => false,
            other => return Err(ElfError::Damaged(format!("unknown byte order {other}"))),
        };
        let container = if class == Class::Bits64 { Container::Big } else { Container::Little };
        let endian = if little_endian {
            goblin::container::Endian::Little
        } else {
            goblin::container::Endian::Big
        };
        let context = Ctx::new(container, endian);
        let headers = read_program_headers(source, &header, context)?;

        let mut image = Self {
            kind: Kind::Other(header.e_type),
            class,
            little_endian,
            machine: header.e_machine,
            entry: header.e_entry,
            segments: Vec::new(),
            relro: None,
            interpreter: None,
            executable_stack: true,
            dynamic: None,
            notes: Notes::default(),
            oddities: Vec::new(),
            context,
        };
        if matches!(header.e_type, ET_REL | ET_CORE) {
            image.kind = if header.e_type == ET_REL { Kind::Object } else { Kind::Core };
            return Ok(image);
        }
        image.read_segments(source, &headers)?;
        for header in &headers {
            match header.p_type {
                PT_INTERP if image.interpreter.is_none() => {
                    image.interpreter = Some(read_interpreter(source, header)?);
                }
                PT_INTERP => image.oddities.push("a second PT_INTERP, which is not used".into()),
                PT_GNU_RELRO if header.p_memsz > 0 => {
                    let range = Range::with_len(header.p_vaddr, header.p_memsz);
                    let inside = range
                        .filter(|range| image.segments.iter().any(|s| s.memory.overlaps(*range)));
                    if inside.is_none() {
                        return Err(ElfError::Damaged(
                            "PT_GNU_RELRO lies outside the segments".into(),
                        ));
                    }
                    image.relro = inside;
                }
                PT_GNU_STACK => image.executable_stack = header.p_flags & 1 != 0,
                _ => {}
            }
        }
        if let Some(header) = headers.iter().find(|h| h.p_type == PT_DYNAMIC) {
            image.dynamic = Some(Dynamic::read(source, header, &image)?);
        }
        image.notes = Notes::read(source, &headers, context);
        image.kind = kind(header.e_type, header.e_entry, &image);
        Ok(image)
    }

    /// A 64-bit image of this machine without any segment, to be filled by tests.
    #[cfg(test)]
    pub(crate) fn empty(kind: Kind) -> Self {
        Self {
            kind,
            class: Class::Bits64,
            little_endian: true,
            machine: EM_X86_64,
            entry: 0,
            segments: Vec::new(),
            relro: None,
            interpreter: None,
            executable_stack: false,
            dynamic: None,
            notes: Notes::default(),
            oddities: Vec::new(),
            context: Ctx::new(Container::Big, goblin::container::Endian::Little),
        }
    }

    fn read_segments(
        &mut self,
        source: &impl Source,
        headers: &[ProgramHeader],
    ) -> Result<(), ElfError> {
        for header in headers.iter().filter(|h| h.p_type == PT_LOAD) {
            let memory = Range::with_len(header.p_vaddr, header.p_memsz)
                .filter(|memory| memory.end() <= MAX_ADDRESS)
                .ok_or_else(|| {
                    ElfError::Damaged(format!(
                        "segment at {:#x} of {:#x} bytes lies beyond the address space",
                        header.p_vaddr, header.p_memsz
                    ))
                })?;
            if header.p_filesz > header.p_memsz {
                return Err(ElfError::Damaged(format!(
                    "segment at {:#x} has more bytes in the file than in memory",
                    header.p_vaddr
                )));
            }
            if memory.is_empty() {
                self.oddities.push(format!("an empty segment at {:#x}", header.p_vaddr));
                continue;
            }
            let end = header.p_offset.checked_add(header.p_filesz);
            if header.p_filesz > 0 && end.is_none_or(|end| end > source.size()) {
                return Err(ElfError::Truncated {
                    what: "segment",
                    offset: header.p_offset,
                    length: header.p_filesz,
                    size: source.size(),
                });
            }
            if header.p_align > 1 && !header.p_align.is_power_of_two() {
                self.oddities.push(format!(
                    "the alignment {:#x} of the segment at {:#x} is not a power of two",
                    header.p_align, header.p_vaddr
                ));
            }
            if header.p_filesz > 0 && header.p_offset % 4096 != header.p_vaddr % 4096 {
                return Err(ElfError::Damaged(format!(
                    "segment at {:#x}: offset {:#x} and address differ within a page",
                    header.p_vaddr, header.p_offset
                )));
            }
            self.segments.push(Segment {
                offset: header.p_offset,
                memory,
                file_size: header.p_filesz,
                prot: Prot::from_p_flags(header.p_flags),
                align: header.p_align,
            });
        }
        if !self.segments.is_sorted_by_key(|s| s.memory.start()) {
            self.oddities.push("the segments are not in the order of their addresses".into());
            self.segments.sort_by_key(|s| s.memory.start());
        }
        if let Some(pair) = self.segments.windows(2).find(|w| w[0].memory.overlaps(w[1].memory)) {
            return Err(ElfError::Damaged(format!(
                "segments {} and {} overlap",
                pair[0].memory, pair[1].memory
            )));
        }
        Ok(())
    }

    /// Offset in the file of `length` bytes at `address`; `None` when they are not
    /// all in the file's part of one segment.
    #[must_use]
    pub fn offset_of(&self, address: u64, length: u64) -> Option<u64> {
        let end = address.checked_add(length)?;
        self.segments.iter().find_map(|segment| {
            let start = segment.memory.start();
            let inside = start <= address && end <= start + segment.file_size;
            if inside { segment.offset.checked_add(address - start) } else { None }
        })
    }

    /// Number of bytes in the file from `address` to the end of its segment.
    #[must_use]
    pub fn file_bytes_from(&self, address: u64) -> u64 {
        self.segments
            .iter()
            .filter(|s| s.memory.contains(address))
            .map(|s| (s.memory.start() + s.file_size).saturating_sub(address))
            .max()
            .unwrap_or(0)
    }

    /// Bytes in executable segments.
    #[must_use]
    pub fn text_bytes(&self) -> u64 {
        let text = self.segments.iter().filter(|s| s.prot.has(Prot::EXEC));
        text.map(|s| s.memory.len()).sum()
    }

    /// Whether this machine's kernel runs it natively and our planner knows it.
    #[must_use]
    pub fn is_native(&self) -> bool {
        let machine = if cfg!(target_arch = "aarch64") { EM_AARCH64 } else { EM_X86_64 };
        self.is_supported() && self.machine == machine
    }

    /// Whether it is for the other of the architectures that the preload exists for.
    #[must_use]
    pub fn is_for_other(&self) -> bool {
        self.is_supported() && !self.is_native()
    }

    /// Whether it is for one of the architectures that the preload exists for.
    #[must_use]
    pub fn is_supported(&self) -> bool {
        let known = matches!(self.machine, EM_AARCH64 | EM_X86_64);
        self.class == Class::Bits64 && self.little_endian && known
    }
}

/// Huge page sizes of the machines that a program is for, whatever their base page: those of the
/// pools and of transparent huge pages, ascending. Empty for architectures that the preload
/// does not know.
#[must_use]
pub fn huge_page_sizes(machine: u16) -> Vec<PageSize> {
    // arm64, with a base page of 4 KiB: 64K, 2M, 32M, 1G; of 16 KiB: 2M, 32M, 1G; of 64 KiB:
    // 2M, 512M, 16G (Documentation/arch/arm64/hugetlbpage.rst).
    let sizes: &[u64] = match machine {
        EM_X86_64 => &[2 << 20, 1 << 30],
        EM_AARCH64 => &[64 << 10, 2 << 20, 32 << 20, 512 << 20, 1 << 30, 16 << 30],
        _ => &[],
    };
    sizes.iter().copied().filter_map(PageSize::new).collect()
}

fn read_header(source: &impl Source) -> Result<Header, ElfError> {
    let size = source.size();
    let start = source.take("file header", 0, size.min(64), 64)?;
    if !start.starts_with(b"\x7fELF") {
        return Err(ElfError::NotElf(not_elf(source, &start)?));
    }
    let needed = if start.get(EI_CLASS) == Some(&ELFCLASS32) { 52 } else { 64 };
    if size < needed {
        return Err(ElfError::Truncated { what: "file header", offset: 0, length: needed, size });
    }
    Elf::parse_header(&start).map_err(|error| ElfError::Damaged(format!("file header: {error}")))
}

fn not_elf(source: &impl Source, start: &[u8]) -> Result<NotElf, ElfError> {
    if start.is_empty() {
        return Ok(NotElf::Empty);
    }
    if !start.starts_with(b"#!") {
        return Ok(NotElf::Other);
    }
    let line = source.take("script", 0, source.size().min(MAX_SCRIPT_LINE), 256)?;
    let line = line[2..].split(|&b| b == b'\n').next().unwrap_or_default();
    let interpreter = line.trim_ascii().split(|b| b.is_ascii_whitespace()).next();
    Ok(NotElf::Script(printable(interpreter.unwrap_or_default())))
}

fn read_program_headers(
    source: &impl Source,
    header: &Header,
    context: Ctx,
) -> Result<Vec<ProgramHeader>, ElfError> {
    if matches!(header.e_type, ET_REL | ET_CORE) {
        return Ok(Vec::new());
    }
    let size = u16::try_from(ProgramHeader::size(context)).unwrap_or(u16::MAX);
    if header.e_phentsize != size {
        return Err(ElfError::Damaged(format!(
            "program headers of {} bytes instead of {size}",
            header.e_phentsize
        )));
    }
    let count = header.e_phnum;
    if count == 0 {
        return Err(ElfError::Damaged("no program headers".into()));
    }
    if count > MAX_PROGRAM_HEADERS {
        return Err(ElfError::Damaged(format!(
            "{count} program headers, the kernel takes at most {MAX_PROGRAM_HEADERS}"
        )));
    }
    let length = u64::from(count) * u64::from(size);
    let table = source.take("program headers", header.e_phoff, length, 1 << 16)?;
    ProgramHeader::parse(&table, 0, usize::from(count), context)
        .map_err(|error| ElfError::Damaged(format!("program headers: {error}")))
}

fn read_interpreter(source: &impl Source, header: &ProgramHeader) -> Result<String, ElfError> {
    if !(2..=MAX_INTERPRETER).contains(&header.p_filesz) {
        return Err(ElfError::Damaged(format!("PT_INTERP of {} bytes", header.p_filesz)));
    }
    let bytes = source.take("PT_INTERP", header.p_offset, header.p_filesz, 4096)?;
    match bytes.split_last() {
        Some((0, _)) => {}
        _ => return Err(ElfError::Damaged("PT_INTERP does not end with a NUL byte".into())),
    }
    // The kernel takes it as a C string.
    let path = bytes.split(|&b| b == 0).next().unwrap_or_default();
    Ok(printable(path))
}

/// The bytes as text; what could upset a terminal is replaced.
#[must_use]
pub fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

fn kind(e_type: u16, entry: u64, image: &Image) -> Kind {
    let dynamic = image.dynamic.as_ref();
    // DF_1_PIE came with binutils 2.26; programs linked before have DT_DEBUG at
    // least, which shared objects have not.
    let program = dynamic.is_some_and(|d| d.flags_1_pie || d.debug);
    match (e_type, &image.interpreter) {
        (ET_EXEC, Some(_)) => Kind::Exec,
        (ET_EXEC, None) => Kind::Static,
        (ET_DYN, Some(_)) if program => Kind::Pie,
        (ET_DYN, None) if program && entry != 0 => Kind::StaticPie,
        (ET_DYN, _) => Kind::SharedObject,
        _ => Kind::Other(e_type),
    }
}

/// The common name of an `e_machine` value.
#[must_use]
pub fn machine_name(machine: u16, class: Class) -> String {
    match (machine, class) {
        (EM_X86_64, Class::Bits64) => "x86-64".into(),
        (EM_X86_64, Class::Bits32) => "x32".into(),
        (EM_386, _) => "i386".into(),
        (EM_AARCH64, _) => "arm64".into(),
        (EM_ARM, _) => "arm".into(),
        (EM_RISCV, _) => "riscv".into(),
        (EM_PPC64, _) => "ppc64".into(),
        (EM_S390, _) => "s390".into(),
        _ => format!("machine {machine}"),
    }
}
