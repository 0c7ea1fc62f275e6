//! PT_NOTE and PT_GNU_PROPERTY.

use goblin::container::Ctx;
use goblin::elf::note::NoteDataIterator;
use goblin::elf::program_header::{PT_NOTE, ProgramHeader};

use super::Source;

/// Notes above this size are not looked at; real ones have some hundred bytes.
const MAX_NOTES: usize = 64 << 10;
/// `NT_GNU_BUILD_ID` and `NT_GNU_PROPERTY_TYPE_0` of elf.h.
const NT_GNU_BUILD_ID: u32 = 3;
const NT_GNU_PROPERTY_TYPE_0: u32 = 5;
/// Go's linker: the note named `Go` that holds its build id.
const NT_GO_BUILD_ID: u32 = 4;
/// `GNU_PROPERTY_AARCH64_FEATURE_1_AND` and its BTI bit of elf.h.
const PROPERTY_AARCH64_FEATURES: u32 = 0xc000_0000;
const FEATURE_BTI: u32 = 1;

/// What the notes say.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Notes {
    /// The build id, in hexadecimal.
    pub build_id: Option<String>,
    /// Linked by the Go toolchain.
    pub go: bool,
    /// The text accepts indirect branches only at landing pads (arm64).
    pub bti: bool,
}

impl Notes {
    /// Reads what can be read: notes that are damaged stop nothing from running.
    pub(super) fn read(source: &impl Source, headers: &[ProgramHeader], context: Ctx) -> Self {
        let mut notes = Self::default();
        for header in headers.iter().filter(|h| h.p_type == PT_NOTE).take(16) {
            let Ok(data) = source.take("notes", header.p_offset, header.p_filesz, MAX_NOTES) else {
                continue;
            };
            let align = if header.p_align == 8 { 8 } else { 4 };
            let size = data.len();
            let iterator = NoteDataIterator { data: &data, size, offset: 0, ctx: (align, context) };
            // Each note takes at least 12 bytes, so this ends, errors included.
            for note in iterator.take(size / 12).map_while(Result::ok) {
                match (note.name.trim_end_matches('\0'), note.n_type) {
                    ("GNU", NT_GNU_BUILD_ID) => notes.build_id = Some(hex(note.desc)),
                    ("GNU", NT_GNU_PROPERTY_TYPE_0) => notes.bti |= has_bti(note.desc),
                    ("Go", NT_GO_BUILD_ID) => notes.go = true,
                    _ => {}
                }
            }
        }
        notes
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().take(64).fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Looks through the properties (type, size, data padded to 8 bytes) of a 64-bit
/// little-endian file; others have no BTI.
fn has_bti(mut properties: &[u8]) -> bool {
    while let Some((head, rest)) = properties.split_at_checked(8) {
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let Ok(size) = usize::try_from(word(4)) else { return false };
        let Some(data) = rest.get(..size) else { return false };
        if word(0) == PROPERTY_AARCH64_FEATURES && size == 4 {
            let bits = u32::from_le_bytes([data[0], data[1], data[2], data[3]]);
            return bits & FEATURE_BTI != 0;
        }
        let padded = size.next_multiple_of(8);
        let Some(next) = rest.get(padded..) else { return false };
        properties = next;
    }
    false
}
