//! The names of a program's functions: from its own symbol table, or from wherever else they
//! were put when the program was stripped.

pub mod debug;
pub mod demangle;
pub mod file;
pub mod layout;
pub mod plt;
pub mod table;

use std::fmt::Display;
use std::path::PathBuf;

use elfremap::range::Range;

use debug::Search;
use file::ElfFile;
use layout::{Names, Piece, Symbol};
use table::Table;

use crate::elf::ElfError;

/// Where the names come from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Source {
    /// `.symtab` of the file itself.
    Own,
    /// A separate debug file, and the dynamic symbols.
    Debug(PathBuf),
    /// `.gnu_debugdata`, and the dynamic symbols.
    Mini,
    /// The dynamic symbols alone: exported functions, with gaps between them.
    Dynamic,
    /// There are none.
    None,
}

/// The named code of one file.
#[derive(Debug)]
pub struct CodeNames {
    /// The pieces, sorted, without overlaps, in the file's own addresses.
    pub pieces: Vec<Piece>,
    /// What their names point into.
    pub names: Names,
    /// Where the names come from.
    pub source: Source,
    /// What could not be used, one sentence each.
    pub rejected: Vec<String>,
}

/// Reads the names of the code in `elf`, in this order of preference: its own `.symtab`; a
/// separate debug file; `.gnu_debugdata`. The latter two are completed by the dynamic symbols,
/// which stand alone where there is none of the three. PLT entries get names in every case.
/// A table that cannot be read is passed over.
#[must_use]
pub fn read(elf: &ElfFile, search: &Search) -> CodeNames {
    let mut all = Collected { regions: elf.code_regions(), ..Collected::default() };
    let mut source = Source::None;
    if all.take(elf, ".symtab", Table::symtab(elf)) > 0 {
        source = Source::Own;
    } else {
        if all.take(elf, "the dynamic symbols", Table::dynsym(elf)) > 0 {
            source = Source::Dynamic;
        }
        if let Some(debug) = debug::find(elf, search, &mut all.rejected)
            && all.take(&debug.elf, debug.path.display(), Table::symtab(&debug.elf)) > 0
        {
            source = Source::Debug(debug.path);
        } else if all.take_mini(elf) > 0 {
            source = Source::Mini;
        }
    }
    if let Err(error) = plt::collect(elf, &mut all.names, &mut all.symbols) {
        all.reject("the PLT", &error);
    }
    let pieces = layout::pieces(all.symbols, &all.regions, &all.names);
    CodeNames { pieces, names: all.names, source, rejected: all.rejected }
}

#[derive(Default)]
struct Collected {
    regions: Vec<Range>,
    symbols: Vec<Symbol>,
    names: Names,
    rejected: Vec<String>,
}

impl Collected {
    /// Takes the symbols of code out of `table`, which belongs to `elf`; returns how many.
    fn take(
        &mut self,
        elf: &ElfFile,
        what: impl Display,
        table: Result<Option<Table>, ElfError>,
    ) -> usize {
        let taken = table.and_then(|table| {
            table.map_or(Ok(0), |table| {
                table.collect(elf, &self.regions, &mut self.names, &mut self.symbols)
            })
        });
        taken.unwrap_or_else(|error| {
            self.reject(what, &error);
            0
        })
    }

    fn take_mini(&mut self, elf: &ElfFile) -> usize {
        match debug::mini_debug_data(elf) {
            Ok(Some(mini)) => self.take(&mini, ".gnu_debugdata", Table::symtab(&mini)),
            Ok(None) => 0,
            Err(error) => {
                self.reject(".gnu_debugdata", &error);
                0
            }
        }
    }

    fn reject(&mut self, what: impl Display, why: &ElfError) {
        self.rejected.push(format!("passed over {what}: {why}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::OnceLock;

    /// This test's own C library: sections, PLTs, notes, a link to a debug file.
    fn library() -> &'static [u8] {
        static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
        BYTES.get_or_init(|| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let path = maps.lines().find_map(|line| {
                line.split_once('/')
                    .filter(|(_, p)| p.contains("libgcc_s") || p.contains("libc.so"))
            });
            std::fs::read(format!("/{}", path.expect("a library").1)).unwrap()
        })
    }

    #[test]
    fn the_library_has_names() {
        let elf = ElfFile::from_bytes(library().to_vec()).unwrap();
        let code = read(&elf, &Search::default());
        assert_eq!(code.rejected, [""; 0]);
        assert!(code.pieces.len() > 50 && code.source != Source::None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// Damage anywhere, most of it in the headers: an error or other names, no panic and
        /// no endless loop.
        #[test]
        fn damaged_files_do_no_harm(
            header in proptest::collection::vec((0usize..0x400, any::<u8>()), 0..4),
            sections in proptest::collection::vec((0usize..0x1200, any::<u8>()), 0..8),
            anywhere in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..50),
            cut in proptest::option::weighted(0.2, any::<proptest::sample::Index>()),
        ) {
            let mut bytes = library().to_vec();
            let table = usize::try_from(u64::from_le_bytes(bytes[0x28..0x30].try_into().unwrap())).unwrap();
            for (at, byte) in anywhere {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            for (at, byte) in header {
                bytes[at] = byte;
            }
            for (at, byte) in sections {
                if let Some(place) = bytes.get_mut(table + at) {
                    *place = byte;
                }
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(elf) = ElfFile::from_bytes(bytes) {
                let code = read(&elf, &Search::default());
                prop_assert!(code.pieces.windows(2).all(|p| p[0].range.end() <= p[1].range.start()));
            }
        }
    }
}
