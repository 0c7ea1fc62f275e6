//! Reading ELF files with goblin, within bounds of our own.
//!
//! Files are untrusted. Each table is read at its own offset and only up to a
//! limit stated beside it, so that neither a damaged nor a hostile file costs more
//! than some tens of megabytes, and goblin's parsers only ever see bytes that exist.

mod dynamic;
mod image;
pub mod layout;
mod ldcache;
mod loader;
mod notes;
mod source;
mod symbols;

use std::io;

pub use dynamic::Dynamic;
pub use image::{
    Class, Image, Kind, MAX_PROGRAM_HEADERS, Segment, huge_page_sizes, machine_name, printable,
};
pub use ldcache::LdCache;
pub use loader::{Dependency, Loader, Search};
pub use notes::Notes;
pub use source::{FileSource, Source};
pub use symbols::{NAMES, Symbols, find as find_symbol};

/// Why a file cannot be read as an ELF program. The path is the caller's to add.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file could not be opened.
    #[error("{source}")]
    Open {
        /// What open(2) or stat(2) said.
        source: io::Error,
    },
    /// Not a regular file.
    #[error("it is {what}")]
    NotRegular {
        /// What it is instead.
        what: &'static str,
    },
    /// Reading failed.
    #[error("cannot read the {what}: {source}")]
    Read {
        /// The part that was to be read.
        what: &'static str,
        /// What read(2) said.
        source: io::Error,
    },
    /// No ELF magic at the beginning.
    #[error("not an ELF file: {}", .0.describe())]
    NotElf(NotElf),
    /// A table lies beyond the end of the file.
    #[error(
        "damaged ELF file: {what} at offset {offset:#x}, {length} bytes, ends beyond the file's {size} bytes"
    )]
    Truncated {
        /// The part that is missing.
        what: &'static str,
        /// Offset in bytes at which it should be.
        offset: u64,
        /// Length in bytes it should have.
        length: u64,
        /// The file's size in bytes.
        size: u64,
    },
    /// A table is larger than any real program's.
    #[error("damaged ELF file: {what} of {length} bytes, more than the {limit} this tool reads")]
    TooLarge {
        /// The table.
        what: &'static str,
        /// Length in bytes the file gives.
        length: u64,
        /// The limit in bytes.
        limit: usize,
    },
    /// Something the kernel or the loader would refuse as well.
    #[error("damaged ELF file: {0}")]
    Damaged(String),
}

/// What a file without ELF magic looks like.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NotElf {
    /// No byte at all.
    Empty,
    /// `#!`, with the interpreter named there.
    Script(String),
    /// Anything else.
    Other,
}

impl NotElf {
    /// In words, for a message.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::Empty => "the file is empty".into(),
            Self::Script(interpreter) => {
                format!("a script; what runs is its interpreter {interpreter}")
            }
            Self::Other => "no ELF header".into(),
        }
    }
}
