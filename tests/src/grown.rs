//! Copies of programs with more bss, so that a small program has whole blocks of memory
//! that it writes.

use crate::library::copy_program;
use anyhow::{Context, Result};
use goblin::elf::program_header::{PT_LOAD, ProgramHeader, program_header64};
use std::fs;
use std::path::Path;

/// Copies the program `from` to `to`, with `bytes` more of bss behind its last segment.
/// Whatever the program itself knows of lies where it lay.
///
/// # Errors
/// When `from` is no 64-bit ELF program, or the copy cannot be made.
pub fn copy_with_more_bss(from: &Path, to: &Path, bytes: u64) -> Result<()> {
    let mut image = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    let (start, count) = {
        let header = goblin::elf::Elf::parse_header(&image)?;
        (usize::try_from(header.e_phoff)?, usize::from(header.e_phnum))
    };
    let size = size_of::<program_header64::ProgramHeader>();
    let table = image.get(start..start + size * count).context("no program headers")?;
    let headers: Vec<ProgramHeader> = program_header64::ProgramHeader::from_bytes(table, count)
        .iter()
        .map(|&header| header.into())
        .collect();
    let loads = headers.iter().enumerate().filter(|(_, header)| header.p_type == PT_LOAD);
    let (last, header) = loads.max_by_key(|(_, header)| header.p_vaddr).context("no PT_LOAD")?;
    // p_memsz is the sixth of the structure's fields (elf(5)).
    let field = start + size * last + 40;
    image[field..field + 8].copy_from_slice(&(header.p_memsz + bytes).to_ne_bytes());
    let scratch = tempfile::NamedTempFile::new()?;
    fs::write(scratch.path(), image)?;
    fs::set_permissions(scratch.path(), fs::metadata(from)?.permissions())?;
    copy_program(scratch.path(), to)
}
