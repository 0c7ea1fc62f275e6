//! A program's loadable segments, read from its file.

use crate::PAGE;
use anyhow::{Context, Result, ensure};
use elfremap::prot::Prot;
use elfremap::range::{Range, align_up};
use goblin::elf::Elf;
use goblin::elf::program_header::{PT_GNU_RELRO, PT_LOAD};
use std::fmt;
use std::path::Path;

/// What kind of bytes a program has at an address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Class {
    /// R-X.
    Text,
    /// R-- from the file.
    Rodata,
    /// Read-only after relocation (PT_GNU_RELRO).
    Relro,
    /// RW- from the file, to the end of the file's last page.
    Data,
    /// RW- beyond the file.
    Bss,
    /// The start of the brk heap, in the last block of bss.
    HeapTail,
    /// RWX.
    WriteExec,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Rodata => "rodata",
            Self::Relro => "relro",
            Self::Data => "data",
            Self::Bss => "bss",
            Self::HeapTail => "heap tail",
            Self::WriteExec => "wx",
        })
    }
}

/// The program's segments by the addresses in its file.
#[derive(Clone, Debug)]
pub struct Image {
    /// Address of the first instruction, by the file.
    pub entry: u64,
    /// Whether the load address is the kernel's choice (ET_DYN).
    pub pie: bool,
    /// Every byte of the PT_LOADs by its class, sorted by address, by the file's addresses.
    pub parts: Vec<(Range, Class)>,
    /// Whole PT_LOADs, sorted by address, with their protections.
    pub loads: Vec<(Range, Prot)>,
    /// Where the file's first byte, the ELF header, is loaded; none when it is not.
    pub header: Option<u64>,
}

impl Image {
    /// Reads the program headers of `path`.
    ///
    /// # Errors
    /// When the file cannot be read, or is no ELF program with PT_LOADs.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&bytes).with_context(|| format!("cannot use {}", path.display()))
    }

    /// Reads the program headers of the ELF file `bytes`. Section headers are not looked at.
    ///
    /// # Errors
    /// When the bytes are no ELF program with PT_LOADs.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let header = Elf::parse_header(bytes)?;
        let ctx = goblin::container::Ctx::new(header.container()?, header.endianness()?);
        let headers = goblin::elf::ProgramHeader::parse(
            bytes,
            usize::try_from(header.e_phoff)?,
            usize::from(header.e_phnum),
            ctx,
        )?;
        let relro = headers
            .iter()
            .find(|h| h.p_type == PT_GNU_RELRO)
            .and_then(|h| Range::with_len(h.p_vaddr, h.p_memsz))
            .unwrap_or_default();
        let mut image = Self {
            entry: header.e_entry,
            pie: header.e_type == goblin::elf::header::ET_DYN,
            parts: Vec::new(),
            loads: Vec::new(),
            header: None,
        };
        for h in headers.iter().filter(|h| h.p_type == PT_LOAD && h.p_memsz > 0) {
            let whole = Range::with_len(h.p_vaddr, h.p_memsz).context("segment wraps around")?;
            let file = Range::with_len(h.p_vaddr, h.p_filesz.min(h.p_memsz)).unwrap_or_default();
            let prot = Prot::from_p_flags(h.p_flags);
            if h.p_offset == 0 && h.p_filesz > 0 {
                image.header = Some(h.p_vaddr);
            }
            image.loads.push((whole, prot));
            let class = match (prot.has(Prot::WRITE), prot.has(Prot::EXEC)) {
                (true, true) => Class::WriteExec,
                (false, true) => Class::Text,
                (false, false) => Class::Rodata,
                (true, false) => Class::Data,
            };
            // The rest of the file's last page is cleared and stays the file's.
            let border = match align_up(file.end(), PAGE) {
                Some(end) if !file.is_empty() => end.min(whole.end()),
                _ => whole.start(),
            };
            let before = Range::new(whole.start(), border).unwrap_or_default();
            let bss = Range::new(border, whole.end()).unwrap_or_default();
            let tail = if class == Class::Data { Class::Bss } else { class };
            for (range, class) in [(before, class), (bss, tail)] {
                if class != Class::Data && class != Class::Bss {
                    image.add(range, class);
                    continue;
                }
                let (left, right) = range.subtract(relro);
                image.add(left, class);
                image.add(range.intersect(relro), Class::Relro);
                image.add(right, class);
            }
        }
        ensure!(!image.loads.is_empty(), "no loadable segment");
        image.loads.sort_unstable();
        image.parts.sort_unstable();
        Ok(image)
    }

    fn add(&mut self, range: Range, class: Class) {
        if !range.is_empty() {
            self.parts.push((range, class));
        }
    }

    /// From the first segment's first byte to the last one's end, by the file's addresses.
    #[must_use]
    pub fn span(&self) -> Range {
        let start = self.loads.iter().map(|(r, _)| r.start()).min().unwrap_or(0);
        let end = self.loads.iter().map(|(r, _)| r.end()).max().unwrap_or(0);
        Range::new(start, end).unwrap_or_default()
    }
}
