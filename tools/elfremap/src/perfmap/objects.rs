//! Which ELF file each executable range of a process came from, and at which load bias.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use elfremap::prot::Prot;
use elfremap::range::{Range, align_down, align_up};
use goblin::elf::dynamic::DT_DEBUG;
use goblin::elf::header::ET_EXEC;
use goblin::elf::program_header::{PT_DYNAMIC, PT_PHDR};
use goblin::elf::section_header::SHN_UNDEF;

use super::process::{Mapping, Memory, Process, deleted};
use crate::symbols::file::ElfFile;
use crate::symbols::table::Table;

/// An ELF file loaded into a process.
#[derive(Debug)]
pub struct Object {
    /// Its path as the process knows it.
    pub path: PathBuf,
    /// The file.
    pub elf: Rc<ElfFile>,
    /// What is added to the file's addresses: 0 for a program of fixed address.
    pub bias: u64,
    /// The wanted ranges, as far as they lie in its executable segments.
    pub ranges: Vec<Range>,
}

/// What [`find`] gives.
#[derive(Debug, Default)]
pub struct Found {
    /// Objects with a part of the wanted ranges, by address.
    pub objects: Vec<Object>,
    /// Wanted ranges that belong to no file: generated code.
    pub orphans: Vec<Range>,
    /// Files that were loaded, but cannot be used now; one sentence each.
    pub rejected: Vec<String>,
}

/// Executable ranges whose file perf would not find: those without one, on huge pages of the
/// hugetlb pool, or from a deleted or replaced file. With `all`, every executable range.
#[must_use]
pub fn wanted(process: &Process, mappings: &[Mapping], all: bool) -> Vec<Range> {
    let executable = mappings.iter().filter(|m| m.prot.has(Prot::EXEC));
    let wanted = executable.filter(|m| all || !perf_finds(process, m));
    // The kernel's own page; its code is not in a file, and not in the process.
    wanted.filter(|m| m.name != Path::new("[vsyscall]")).map(|m| m.range).collect()
}

fn perf_finds(process: &Process, mapping: &Mapping) -> bool {
    let name = mapping.name.as_os_str().as_bytes();
    // perf brings a copy of the vdso along; shared memory and anonymous memory have names
    // that look like paths.
    if name.starts_with(b"[v") {
        return true;
    }
    let no_file = ["/anon_hugepage", "/dev/zero", "/memfd:", "/SYSV", "//anon"];
    if !name.starts_with(b"/") || no_file.iter().any(|n| name.starts_with(n.as_bytes())) {
        return false;
    }
    if deleted(&mapping.name).is_none() {
        return true;
    }
    // A file may really be called so.
    fs::metadata(process.rooted(&mapping.name)).is_ok_and(|m| m.ino() == mapping.inode)
}

/// A file that may be loaded at some bias, and how well that agrees with the mappings.
#[derive(Debug)]
struct Candidate {
    path: PathBuf,
    elf: Rc<ElfFile>,
    bias: u64,
    /// Whether the file was opened through the kernel's own link to it.
    exact: bool,
}

/// Finds the files that the `wanted` ranges came from.
///
/// A file is known by the mappings it still has (its header, its constants), and those tell
/// its load bias. The main program is also known by the auxiliary vector, and a shared object
/// without any mapping left by the dynamic linker's list.
#[must_use]
pub fn find(process: &Process, mappings: &[Mapping], wanted: &[Range]) -> Found {
    let memory = process.memory();
    let mut left = wanted.to_vec();
    let mut search = Search {
        process,
        mappings,
        memory: memory.as_ref(),
        objects: Vec::new(),
        rejected: Vec::new(),
    };

    search.claim(search.by_mappings(), &mut left);
    if !left.is_empty() {
        search.claim(search.main_program().into_iter().collect(), &mut left);
    }
    if !left.is_empty() {
        search.claim(search.vdso().into_iter().collect(), &mut left);
    }
    if !left.is_empty() {
        search.claim(search.by_link_map(), &mut left);
    }
    let Search { mut objects, rejected, .. } = search;
    objects.sort_by_key(|o| o.ranges.first().map(|r| r.start()));
    // A file that fits at another address was misread at this one.
    let misread = |path: &Path| objects.iter().any(|o| o.path == path);
    let rejected = rejected.iter().filter(|(path, _)| !misread(path));
    let rejected = rejected.map(|(path, why)| format!("passed over {}: {why}", path.display()));
    let rejected = rejected.collect();
    Found { objects, orphans: left, rejected }
}

struct Search<'a> {
    process: &'a Process,
    mappings: &'a [Mapping],
    memory: Option<&'a Memory>,
    objects: Vec<Object>,
    rejected: Vec<(PathBuf, &'static str)>,
}

impl Search<'_> {
    /// Gives each candidate the part of `left` that lies in its executable segments, after
    /// checking that it is the file that was loaded.
    fn claim(&mut self, candidates: Vec<Candidate>, left: &mut Vec<Range>) {
        let page = page_size();
        for candidate in candidates {
            let segments: Vec<_> = candidate
                .elf
                .code_segments()
                .filter_map(|s| {
                    let start = align_down(s.start(), page).wrapping_add(candidate.bias);
                    let end = align_up(s.end(), page)?.wrapping_add(candidate.bias);
                    Range::new(start, end)
                })
                .collect();
            if !segments.iter().any(|s| left.iter().any(|r| r.overlaps(*s))) {
                continue;
            }
            let why_not = match self.loaded_from(&candidate) {
                Some(true) => None,
                // Its own link: it is the file, unless its content was exchanged in place.
                None if candidate.exact => None,
                Some(false) => Some("it is not the file that was loaded (build id or code differ)"),
                None => Some(
                    "cannot tell whether it is the file that was loaded without the right to read \
                     the process's memory",
                ),
            };
            if let Some(why_not) = why_not {
                self.rejected.push((candidate.path, why_not));
                continue;
            }
            let mut ranges = Vec::new();
            for segment in segments {
                ranges.extend(left.iter().map(|r| r.intersect(segment)).filter(|r| !r.is_empty()));
                let rest = left.iter().flat_map(|r| {
                    let (before, after) = r.subtract(segment);
                    [before, after]
                });
                *left = rest.filter(|r| !r.is_empty()).collect();
            }
            ranges.sort_unstable();
            let Candidate { path, elf, bias, .. } = candidate;
            self.objects.push(Object { path, elf, bias, ranges });
        }
    }

    /// Whether the process's memory holds what the candidate says: its build id, or without
    /// one the first page of its code. `None` when the memory cannot be read.
    fn loaded_from(&self, candidate: &Candidate) -> Option<bool> {
        let memory = self.memory?;
        let (elf, bias) = (&candidate.elf, candidate.bias);
        if let Some((address, note)) = elf.loaded_build_id() {
            let loaded = memory.read(address.wrapping_add(bias), note.len())?;
            return Some(loaded == note);
        }
        let code = elf.code_segments().next()?;
        let length = code.len().min(4096);
        let offset = elf.offset_of(code.start(), length)?;
        let file = elf.bytes_at(offset, length, "code").ok()?;
        let loaded = memory.read(code.start().wrapping_add(bias), file.len())?;
        // A breakpoint or two may differ.
        let differing = file.iter().zip(&loaded).filter(|(a, b)| a != b).count();
        Some(differing <= 16)
    }

    /// Files that are still mapped somewhere, with the load biases that their mappings tell.
    fn by_mappings(&self) -> Vec<Candidate> {
        let mut files: BTreeMap<_, Vec<&Mapping>> = BTreeMap::new();
        for mapping in self.mappings.iter().filter(|m| m.inode != 0) {
            files.entry((mapping.device, mapping.inode)).or_default().push(mapping);
        }
        let mut candidates = Vec::new();
        for mappings in files.values() {
            let Some(elf) = self.open_mapped(mappings[0]) else { continue };
            let path = deleted(&mappings[0].name).unwrap_or(&mappings[0].name);
            let elf = Rc::new(elf);
            for bias in biases(&elf, mappings) {
                let elf = Rc::clone(&elf);
                candidates.push(Candidate { path: path.to_owned(), elf, bias, exact: true });
            }
        }
        candidates
    }

    /// Opens the file behind a mapping: by the kernel's link to it (needs CAP_SYS_ADMIN or
    /// CAP_CHECKPOINT_RESTORE), by the link to the program, or by its name, if that still
    /// means the same file.
    fn open_mapped(&self, mapping: &Mapping) -> Option<ElfFile> {
        let range = mapping.range;
        let link = format!("map_files/{:x}-{:x}", range.start(), range.end());
        if let Ok(elf) = ElfFile::open(&self.process.path(&link)) {
            return Some(elf);
        }
        let same = |path: &Path| fs::metadata(path).is_ok_and(|m| m.ino() == mapping.inode);
        let program = self.process.path("exe");
        let is_program = fs::read_link(&program).is_ok_and(|path| path == mapping.name);
        let paths = [is_program.then_some(program), Some(self.process.rooted(&mapping.name))];
        let path = paths.into_iter().flatten().find(|path| same(path))?;
        ElfFile::open(&path).ok()
    }

    /// The main program, whose program headers the kernel told where they are.
    fn main_program(&self) -> Option<Candidate> {
        let program = self.process.path("exe");
        let elf = ElfFile::open(&program).ok()?;
        let headers = self.process.auxv(libc::AT_PHDR, elf_word(&elf))?;
        let own = elf.programs.iter().find(|p| p.p_type == PT_PHDR).map(|p| p.p_vaddr);
        let own = own.or_else(|| {
            let offset = elf.header.e_phoff;
            let mut loads = elf.loads();
            loads.find_map(|p| {
                let inside = offset.checked_sub(p.p_offset).filter(|&o| o < p.p_filesz)?;
                p.p_vaddr.checked_add(inside)
            })
        })?;
        let path = fs::read_link(&program).ok()?;
        let path = deleted(&path).map(Path::to_owned).unwrap_or(path);
        Some(Candidate { path, bias: headers.wrapping_sub(own), elf: Rc::new(elf), exact: true })
    }

    /// The kernel's shared object, which is in memory only.
    fn vdso(&self) -> Option<Candidate> {
        let path = Path::new("[vdso]");
        let mapping = self.mappings.iter().find(|m| m.name == path)?;
        let length = usize::try_from(mapping.range.len()).ok()?;
        let elf = ElfFile::from_bytes(self.memory?.read(mapping.range.start(), length)?).ok()?;
        let bias = mapping.range.start().wrapping_sub(elf.loads().next()?.p_vaddr);
        Some(Candidate { path: path.to_owned(), elf: Rc::new(elf), bias, exact: true })
    }

    /// The dynamic linker's list of loaded objects (`struct r_debug` and `struct link_map` of
    /// link.h).
    fn by_link_map(&self) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let Some((debug, word)) = self.r_debug() else { return candidates };
        let read = |address: u64| self.word(address, word);
        // r_debug: version, then the list. link_map: bias, name, dynamic segment, next.
        let mut entry = read(debug.wrapping_add(word as u64));
        for _ in 0..10_000 {
            let Some(at) = entry.filter(|&at| at != 0) else { break };
            let field = |index: u64| read(at.wrapping_add(index * word as u64));
            if let (Some(bias), Some(name)) = (field(0), field(1))
                && let Some(name) = self.memory.and_then(|m| m.string(name))
            {
                let file = |name: Vec<u8>| {
                    let path = PathBuf::from(OsStr::from_bytes(&name));
                    let elf = Rc::new(ElfFile::open(&self.process.rooted(&path)).ok()?);
                    Some(Candidate { path, elf, bias, exact: false })
                };
                if name.is_empty() {
                    // The main program has no name here. When it was started by hand, it is
                    // one of the arguments; which one, its content tells.
                    let guesses = self.process.arguments().into_iter().filter_map(file);
                    candidates.extend(guesses.filter(|c| self.loaded_from(c) == Some(true)));
                } else {
                    candidates.extend(file(name));
                }
            }
            entry = field(3);
        }
        candidates
    }

    /// Address of `struct r_debug`, and the size of a word: from the program's DT_DEBUG, or from
    /// the dynamic linker's symbol when it was started by hand (`ld.so ./program`).
    fn r_debug(&self) -> Option<(u64, usize)> {
        let program = self.main_program()?;
        let word = elf_word(&program.elf);
        let dynamic = program.elf.programs.iter().find(|p| p.p_type == PT_DYNAMIC)?;
        let entry = 2 * word as u64;
        let entries = (0..dynamic.p_memsz / entry).map(|i| {
            let at = dynamic.p_vaddr.wrapping_add(program.bias).wrapping_add(i * entry);
            Some((self.word(at, word)?, self.word(at.wrapping_add(word as u64), word)?))
        });
        let debug = entries.map_while(|e| e).find(|&(tag, _)| tag == DT_DEBUG);
        if let Some((_, address)) = debug.filter(|&(_, address)| address != 0) {
            return Some((address, word));
        }
        let table = Table::dynsym(&program.elf).ok()??;
        let entries = table.entries(&program.elf).ok()?;
        let symbol = entries
            .iter()
            .find(|s| s.st_shndx != SHN_UNDEF as usize && table.name(s) == b"_r_debug")?;
        Some((symbol.st_value.wrapping_add(program.bias), word))
    }

    fn word(&self, address: u64, size: usize) -> Option<u64> {
        let bytes = self.memory?.read(address, size)?;
        Some(match size {
            4 => u32::from_ne_bytes(bytes.try_into().ok()?).into(),
            _ => u64::from_ne_bytes(bytes.try_into().ok()?),
        })
    }
}

fn elf_word(elf: &ElfFile) -> usize {
    if elf.ctx.is_big() { 8 } else { 4 }
}

/// Segments are mapped in whole pages of this size, in bytes.
fn page_size() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    size.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096)
}

/// The load biases at which the file's segments agree with mappings of it, the one with most
/// mappings first. A page may belong to two segments, so that a mapping alone can be misread.
fn biases(elf: &ElfFile, mappings: &[&Mapping]) -> Vec<u64> {
    let page = page_size();
    let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
    for mapping in mappings {
        for load in elf.loads() {
            let first = align_down(load.p_offset, page);
            let inside = load.p_offset.checked_add(load.p_filesz);
            if mapping.offset < first || inside.is_none_or(|end| mapping.offset >= end) {
                continue;
            }
            // Both are whole pages: the segment's address and offset agree modulo the page.
            let address = align_down(load.p_vaddr, page).wrapping_add(mapping.offset - first);
            *votes.entry(mapping.range.start().wrapping_sub(address)).or_default() += 1;
        }
    }
    let mut votes: Vec<_> = votes.into_iter().collect();
    // A program of fixed address that is mapped elsewhere is not loaded: somebody reads it.
    votes.retain(|&(bias, _)| bias == 0 || elf.header.e_type != ET_EXEC);
    votes.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    votes.into_iter().map(|(bias, _)| bias).collect()
}
