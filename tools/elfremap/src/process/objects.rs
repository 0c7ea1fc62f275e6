//! The ELF objects in a process, each with its load bias.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use elfremap::facts::Object;
use elfremap::proc::smaps::Entry;
use elfremap::prot::Prot;
use elfremap::range::align_down;

use super::{Process, auxv};
use crate::elf::{FileSource, Image, Kind, find_symbol, layout, printable};

/// The symbol that the preload exports for us; see [`super::report`].
pub(super) const REPORT_SYMBOL: &str = "elfremap_report";

/// An ELF object as it is mapped.
#[derive(Clone, Debug)]
pub struct Mapped {
    /// Its path as the kernel has it (inside the process's mount namespace).
    pub path: String,
    /// Whether it is the program itself.
    pub main: bool,
    /// Segments at their addresses.
    pub object: Object,
    /// Address and size of the preload's report, when it is the preload.
    pub report: Option<(u64, u64)>,
}

/// What is kept of a file: many processes map the same ones.
#[derive(Debug)]
struct Known {
    image: Image,
    report: Option<(u64, u64)>,
}

/// Files that were read before, by device and inode.
#[derive(Default, Debug)]
pub struct Cache(HashMap<(u64, u64), Option<Rc<Known>>>);

impl Cache {
    /// The ELF headers of the file at `path`, when it is this machine's.
    fn open(&mut self, path: &Path) -> Option<((u64, u64), Rc<Known>)> {
        let source = FileSource::open(path).ok()?;
        let identity = source.identity();
        let known = self.0.entry(identity).or_insert_with(|| {
            let image = Image::read(&source).ok().filter(Image::is_native)?;
            let report = find_symbol(&source, &image, REPORT_SYMBOL).ok().flatten();
            Some(Rc::new(Known { image, report }))
        });
        Some((identity, Rc::clone(known.as_ref()?)))
    }
}

/// The objects that `process`, whose smaps are `entries`, has mapped: the program
/// first, then the others by address. Objects whose files cannot be read (another
/// user's, in another mount namespace) are left out.
#[must_use]
pub fn objects(process: &Process, entries: &[Entry<'_>], cache: &mut Cache) -> Vec<Mapped> {
    let mut found = Vec::new();
    let mut program = None;
    if let Some((identity, known, bias)) = program_of(process, cache)
        && let Some(object) = layout::object(&known.image, bias)
    {
        let path = process.exe().unwrap_or_default();
        let path = printable(path.as_os_str().as_encoded_bytes());
        found.push(Mapped { path, main: true, object, report: None });
        program = Some(identity);
    }
    let mut files: BTreeMap<(u32, u32, u64), Vec<&Entry<'_>>> = BTreeMap::new();
    for entry in entries {
        let mapping = &entry.mapping;
        if mapping.inode != 0 && !mapping.shared && mapping.name.starts_with(b"/") {
            files
                .entry((mapping.device.0, mapping.device.1, mapping.inode))
                .or_default()
                .push(entry);
        }
    }
    let mut others: Vec<Mapped> =
        files.values().filter_map(|mappings| mapped(process, mappings, program, cache)).collect();
    others.sort_by_key(|other| other.object.span().start());
    // Started as `ld.so PROGRAM`: the kernel calls the loader the program.
    if found.is_empty() {
        let main = others.iter().position(|other| other.main);
        found.extend(main.map(|index| others.remove(index)));
    }
    others.iter_mut().for_each(|other| other.main = false);
    found.extend(others);
    found
}

/// The program's file and load bias, by what the kernel told the program.
fn program_of(process: &Process, cache: &mut Cache) -> Option<((u64, u64), Rc<Known>, u64)> {
    let (identity, known) = cache.open(&process.path("exe"))?;
    if known.image.kind == Kind::SharedObject {
        return None;
    }
    let auxv = fs::read(process.path("auxv")).ok()?;
    let bias = auxv::entry(&auxv)?.wrapping_sub(known.image.entry);
    (bias % 4096 == 0).then_some((identity, known, bias))
}

/// The object of one file, unless it is no ELF file or the program (which has been
/// found already).
fn mapped(
    process: &Process,
    mappings: &[&Entry<'_>],
    program: Option<(u64, u64)>,
    cache: &mut Cache,
) -> Option<Mapped> {
    let header = mappings.iter().find(|entry| entry.mapping.offset == 0);
    let text = mappings.iter().find(|entry| entry.mapping.prot.has(Prot::EXEC));
    let entry = header.or(text)?;
    let (identity, known) = cache.open(&file_of(process, entry)?)?;
    if program == Some(identity) {
        return None;
    }
    let mapping = &entry.mapping;
    let segment = known.image.segments.iter().find(|segment| {
        let start = align_down(segment.offset, 4096);
        let in_file = (start..segment.offset + segment.file_size).contains(&mapping.offset);
        in_file && (mapping.offset == 0 || segment.prot.has(Prot::EXEC))
    })?;
    let into = mapping.offset - align_down(segment.offset, 4096);
    let address = align_down(segment.memory.start(), 4096) + into;
    let bias = mapping.range.start().wrapping_sub(address);
    let place = |(value, size): (u64, u64)| Some((value.checked_add(bias)?, size));
    Some(Mapped {
        path: printable(name_of(process, entry)),
        main: matches!(known.image.kind, Kind::Pie | Kind::Exec),
        object: layout::object(&known.image, bias)?,
        report: known.report.and_then(place),
    })
}

/// The mapping's name without the mark of a removed file, unless the file is really
/// called like that.
fn name_of<'a>(process: &Process, entry: &Entry<'a>) -> &'a [u8] {
    let name = entry.mapping.name;
    let Some(bare) = name.strip_suffix(b" (deleted)") else { return name };
    let root = process.path("root");
    let here = Path::new(OsStr::from_bytes(name)).strip_prefix("/").map(|path| root.join(path));
    let is_there = here.is_ok_and(|path| {
        path.metadata().is_ok_and(|metadata| metadata.ino() == entry.mapping.inode)
    });
    if is_there { name } else { bare }
}

/// A path at which the mapping's file can be opened from here: by the mapping
/// (needs CAP_CHECKPOINT_RESTORE, finds deleted files too), else by its name in the
/// process's root, when it is still the same file.
fn file_of(process: &Process, entry: &Entry<'_>) -> Option<PathBuf> {
    let range = entry.mapping.range;
    let by_mapping = process.path(&format!("map_files/{:x}-{:x}", range.start(), range.end()));
    if by_mapping.metadata().is_ok() {
        return Some(by_mapping);
    }
    let name = std::str::from_utf8(entry.mapping.name).ok()?;
    [process.path(&format!("root{name}")), name.into()]
        .into_iter()
        .find(|path| path.metadata().is_ok_and(|metadata| metadata.ino() == entry.mapping.inode))
}
