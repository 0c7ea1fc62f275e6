//! Names for the entries of procedure linkage tables: `puts@plt`.
//!
//! The entries have no symbols. Each jumps through a slot of the global offset table, and a
//! relocation says which symbol that slot belongs to. The jump instructions are decoded, so
//! that it does not matter which linker laid the table out, and in which order.

use std::collections::HashMap;

use goblin::elf::RelocSection;
use goblin::elf::header::{EM_AARCH64, EM_X86_64};
use goblin::elf::reloc::{R_AARCH64_IRELATIVE, R_X86_64_IRELATIVE};
use goblin::elf::section_header::{SHF_ALLOC, SHT_REL, SHT_RELA};

use super::file::{ElfFile, Section, damaged};
use super::layout::{Binding, NameRef, Names, Symbol, better};
use super::table::Table;
use crate::elf::ElfError;

/// An entry of a procedure linkage table and what it goes by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Entry {
    start: u64,
    by: By,
}

/// How an entry tells its function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    /// Jumps through the slot at this address.
    Slot(u64),
    /// Pushes this index into `.rela.plt` (the first half of an entry whose other half is in
    /// `.plt.sec`).
    Index(u32),
}

/// Appends a symbol for each entry of the tables in `elf` whose function is known. `out` holds
/// the symbols of code found so far: a function chosen at run time (IFUNC) has its name there.
///
/// # Errors
/// When a section cannot be read.
pub fn collect(elf: &ElfFile, names: &mut Names, out: &mut Vec<Symbol>) -> Result<(), ElfError> {
    let mut entries = Vec::new();
    for section in elf.sections.iter().filter(|s| is_plt(s)) {
        let code = elf.section_data(section)?;
        match elf.header.e_machine {
            EM_X86_64 => decode_x86_64(&code, section.header.sh_addr, &mut entries),
            EM_AARCH64 => decode_aarch64(&code, section.header.sh_addr, &mut entries),
            _ => {}
        }
    }
    if entries.is_empty() {
        return Ok(());
    }

    let dynsym = Table::dynsym(elf)?;
    let mut made = Vec::new();
    // Names are copied into a table of their own: the tables in `names` have given theirs up.
    let mut text = Vec::new();
    let table = names.next();
    let mut name_of = |target: Target| {
        let offset = u32::try_from(text.len()).ok()?;
        match target {
            Target::Symbol(index) => {
                let dynsym = dynsym.as_ref()?;
                let symbol = dynsym.entries(elf).ok()?.get(index)?;
                text.extend_from_slice(dynsym.name(&symbol));
            }
            Target::Address(address) => {
                let here = out.iter().filter(|s| s.start == address);
                let best = here.reduce(|a, b| if better(b, a, names) { b } else { a })?;
                return Some(best.name);
            }
        }
        let length = u32::try_from(text.len()).ok()? - offset;
        (length > 0).then_some(NameRef { table, offset, length })
    };

    let relocations = Relocations::read(elf)?;
    for entry in entries {
        let target = match entry.by {
            By::Slot(slot) => relocations.by_slot.get(&slot).copied(),
            By::Index(index) => relocations.jumps.get(index as usize).copied().flatten(),
        };
        if let Some(name) = target.and_then(&mut name_of) {
            made.push(Symbol { start: entry.start, size: 0, binding: Binding::Plt, name });
        }
    }
    names.add(text);
    out.append(&mut made);
    Ok(())
}

fn is_plt(section: &Section) -> bool {
    section.is_code() && (section.name.starts_with(".plt") || section.name == ".iplt")
}

/// What a slot of the global offset table is filled with.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// The address of the dynamic symbol of this index.
    Symbol(usize),
    /// What the function at this address returns.
    Address(u64),
}

#[derive(Default)]
struct Relocations {
    by_slot: HashMap<u64, Target>,
    /// Those of `.rela.plt`, in order.
    jumps: Vec<Option<Target>>,
}

impl Relocations {
    fn read(elf: &ElfFile) -> Result<Self, ElfError> {
        let mut all = Self::default();
        for section in &elf.sections {
            let header = &section.header;
            let loaded = header.sh_flags & u64::from(SHF_ALLOC) != 0;
            if !loaded || !matches!(header.sh_type, SHT_RELA | SHT_REL) {
                continue;
            }
            let data = elf.section_data(section)?;
            let is_rela = header.sh_type == SHT_RELA;
            let parsed =
                RelocSection::parse(&data, 0, data.len(), is_rela, elf.ctx).map_err(damaged)?;
            let jumps = section.name.ends_with(".plt");
            for relocation in &parsed {
                let indirect = match elf.header.e_machine {
                    EM_X86_64 => R_X86_64_IRELATIVE,
                    _ => R_AARCH64_IRELATIVE,
                };
                let target = if relocation.r_type == indirect {
                    relocation.r_addend.map(|a| Target::Address(a.cast_unsigned()))
                } else {
                    (relocation.r_sym != 0).then_some(Target::Symbol(relocation.r_sym))
                };
                if jumps {
                    all.jumps.push(target);
                }
                if let Some(target) = target {
                    all.by_slot.insert(relocation.r_offset, target);
                }
            }
        }
        Ok(all)
    }
}

/// `jmp *slot(%rip)`, `ff 25` and a signed 32-bit distance, after an optional `bnd` prefix (`f2`)
/// and `endbr64`. With `endbr64` and `push $index` (`68`) in front it is the lazy half.
fn decode_x86_64(code: &[u8], address: u64, out: &mut Vec<Entry>) {
    const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
    let operand = |at: usize| Some(i32::from_le_bytes(code.get(at..at + 4)?.try_into().ok()?));
    let mut at = 0;
    while at + 6 <= code.len() {
        if code[at..].starts_with(&[0xff, 0x25]) {
            let Some(distance) = operand(at + 2) else { return };
            let next = address.wrapping_add(at as u64 + 6);
            let slot = next.wrapping_add_signed(i64::from(distance));
            let mut start = at;
            if code[..start].ends_with(&[0xf2]) {
                start -= 1;
            }
            if code[..start].ends_with(&ENDBR64) {
                start -= ENDBR64.len();
            }
            out.push(Entry { start: address.wrapping_add(start as u64), by: By::Slot(slot) });
            at += 6;
        } else if code[at..].starts_with(&ENDBR64) && code.get(at + 4) == Some(&0x68) {
            let Some(index) = operand(at + 5) else { return };
            let start = address.wrapping_add(at as u64);
            out.push(Entry { start, by: By::Index(index.cast_unsigned()) });
            at += 9;
        } else {
            at += 1;
        }
    }
}

/// `adrp x16, page` and `ldr x17, [x16, #offset]`, after an optional `bti c`.
fn decode_aarch64(code: &[u8], address: u64, out: &mut Vec<Entry>) {
    const BTI_C: u32 = 0xd503_245f;
    let words: Vec<u32> = code
        .chunks_exact(4)
        .map(|w| u32::from_le_bytes(w.try_into().expect("chunks of 4")))
        .collect();
    for (index, pair) in words.windows(2).enumerate() {
        let (adrp, ldr) = (pair[0], pair[1]);
        if adrp & 0x9f00_001f != 0x9000_0010 || ldr & 0xffc0_03ff != 0xf940_0211 {
            continue;
        }
        let at = address.wrapping_add(index as u64 * 4);
        // 21 bits, signed, in pages of 4 KiB: immhi is bits 5-23, immlo bits 29-30.
        let pages = (adrp >> 5 & 0x7_ffff) << 2 | adrp >> 29 & 3;
        let pages = i64::from(pages << 11) << 32 >> 43;
        let page = (at & !0xfff).wrapping_add_signed(pages << 12);
        let slot = page.wrapping_add(u64::from(ldr >> 10 & 0xfff) * 8);
        let guarded = index > 0 && words[index - 1] == BTI_C;
        out.push(Entry { start: if guarded { at - 4 } else { at }, by: By::Slot(slot) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn x86(code: &[u8]) -> Vec<Entry> {
        let mut out = Vec::new();
        decode_x86_64(code, 0x1000, &mut out);
        out
    }

    #[test]
    fn x86_64_in_all_its_dresses() {
        let slot = |start, slot| Entry { start, by: By::Slot(slot) };
        // .plt, lazy: jmp *0x2fe2(%rip); push $0; jmp plt0
        let lazy = [0xff, 0x25, 0xe2, 0x2f, 0, 0, 0x68, 0, 0, 0, 0, 0xe9, 0xe0, 0xff, 0xff, 0xff];
        assert_eq!(x86(&lazy), [slot(0x1000, 0x3fe8)]);
        // .plt.sec: endbr64; bnd jmp *0x2ff5(%rip); nopl
        let sec =
            [0xf3, 0x0f, 0x1e, 0xfa, 0xf2, 0xff, 0x25, 0xf5, 0x2f, 0, 0, 0x0f, 0x1f, 0x44, 0, 0];
        assert_eq!(x86(&[sec, sec].concat()), [slot(0x1000, 0x4000), slot(0x1010, 0x4010)]);
        // .plt with .plt.sec: endbr64; push $7; bnd jmp plt0
        let half =
            [0xf3, 0x0f, 0x1e, 0xfa, 0x68, 7, 0, 0, 0, 0xf2, 0xe9, 0xe1, 0xff, 0xff, 0xff, 0x90];
        assert_eq!(x86(&half), [Entry { start: 0x1000, by: By::Index(7) }]);
        // .plt.got: jmp *-6(%rip); xchg %ax,%ax
        assert_eq!(x86(&[0xff, 0x25, 0xfa, 0xff, 0xff, 0xff, 0x66, 0x90]), [slot(0x1000, 0x1000)]);
        assert_eq!(x86(&[0xff, 0x25, 0]), []);
    }

    #[test]
    fn aarch64_with_and_without_bti() {
        let code = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        // adrp x16, +0x10 pages; ldr x17, [x16, #0xfa8]; add x16, ...; br x17
        let plain = [0x9000_0090, 0xf947_d611, 0x913e_a210, 0xd61f_0220];
        let mut out = Vec::new();
        decode_aarch64(&code(&plain), 0x40_0620, &mut out);
        assert_eq!(out, [Entry { start: 0x40_0620, by: By::Slot(0x41_0fa8) }]);
        // bti c; adrp x16, -1 page; ldr x17, [x16]
        out.clear();
        decode_aarch64(&code(&[0xd503_245f, 0xf0ff_fff0, 0xf940_0211]), 0x40_0620, &mut out);
        assert_eq!(out, [Entry { start: 0x40_0620, by: By::Slot(0x3f_f000) }]);
    }
}
