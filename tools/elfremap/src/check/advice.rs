//! What would cover more of a program, and what about it deserves a word.

use std::collections::BTreeSet;

use elfremap::class::Class;
use elfremap::plan::Reason;
use elfremap::policy::Merge;

use super::{Analysis, is_relocatable};
use crate::elf::Kind;

/// A linker and the flags that make it give every protection blocks of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Linker {
    /// Its name.
    pub(super) name: &'static str,
    /// Flags for the compiler driver, `SIZE` standing for the block size.
    flags: &'static str,
}

/// Segments aligned to the huge page size (max-page-size), text apart from read-only
/// data, and the end of relro aligned as well (common-page-size; lld aligns it anyway,
/// and with that flag makes programs whose loader fails to protect relro).
pub(super) const LINKERS: [Linker; 4] = [
    Linker {
        name: "bfd",
        flags: "-Wl,-z,max-page-size=SIZE -Wl,-z,common-page-size=SIZE -Wl,-z,separate-code",
    },
    Linker {
        name: "gold",
        flags: "-Wl,-z,max-page-size=SIZE -Wl,-z,common-page-size=SIZE -Wl,--rosegment",
    },
    Linker { name: "lld", flags: "-Wl,-z,max-page-size=SIZE -Wl,-z,separate-loadable-segments" },
    Linker {
        name: "mold",
        flags: "-Wl,-z,max-page-size=SIZE -Wl,-z,common-page-size=SIZE -Wl,-z,separate-code",
    },
];

impl Linker {
    /// The flags for a block size in bytes.
    #[must_use]
    pub(super) fn flags(&self, block: u64) -> String {
        self.flags.replace("SIZE", &format!("{block:#x}"))
    }
}

/// Whether linking differently would cover more: bytes of selected classes stay
/// because they share blocks with others.
#[must_use]
pub(super) fn linking_helps(analysis: &Analysis) -> bool {
    let Ok(estimate) = analysis.chosen() else { return false };
    let mixed = |reason| matches!(reason, Reason::MixedProtections | Reason::WriteExec);
    estimate.left.iter().any(|left| mixed(left.reason) && left.bytes.max > 0)
}

/// Facts about the program that its owner should know, each a sentence.
#[must_use]
pub fn notes(analysis: &Analysis) -> Vec<String> {
    let image = &analysis.image;
    let mut notes: Vec<String> = image.oddities.clone();
    if !image.is_native() || matches!(image.kind, Kind::Object | Kind::Core | Kind::Other(_)) {
        return notes;
    }
    symbol_notes(analysis, &mut notes);
    if image.notes.go {
        notes.push("built by Go: its runtime starts threads early and reads its own text".into());
    }
    if let Some(dynamic) = &image.dynamic
        && dynamic.writes_text(image)
    {
        notes
            .push("relocations change its text: every process has a copy of its own anyway".into());
    }
    if image.executable_stack {
        notes.push("it asks for an executable stack".into());
    }
    heap_note(analysis, &mut notes);
    level_notes(analysis, &mut notes);
    let missing: Vec<_> = analysis.dependencies.iter().filter(|d| d.path.is_none()).collect();
    if let Some(first) = missing.first() {
        notes.push(format!(
            "{} shared object(s) not found, {} first: the program will not start like this",
            missing.len(),
            first.name
        ));
    }
    notes
}

fn symbol_notes(analysis: &Analysis, notes: &mut Vec<String>) {
    let symbols = match &analysis.symbols {
        Ok(symbols) => symbols,
        Err(error) => return notes.push(format!("its symbols cannot be read: {error}")),
    };
    let among = |set: &BTreeSet<&'static str>, names: &[&'static str]| -> Vec<&'static str> {
        names.iter().copied().filter(|name| set.contains(name)).collect()
    };
    let own = among(
        &symbols.defined,
        &["malloc", "free", "memcpy", "memmove", "memset", "mmap", "munmap", "mprotect", "madvise"],
    );
    if !own.is_empty() {
        notes.push(format!("it defines its own {}", own.join(", ")));
    }
    let steps = among(&symbols.imported, &["mprotect", "pkey_mprotect", "madvise", "mremap"]);
    if !steps.is_empty() {
        notes.push(format!(
            "it calls {}: on pool pages a call for less than a huge page of its own data or bss \
             fails with EINVAL (not on THP: --backend text:hugetlb,data:thp,bss:thp)",
            steps.join(", ")
        ));
    }
    let children = among(&symbols.imported, &["fork", "__fork", "daemon"]);
    if !children.is_empty() {
        notes.push(format!(
            "it calls {}: data and bss on pool pages are copied to ordinary pages in each child \
             first (not on THP)",
            children.join(", ")
        ));
    }
    if symbols.imported.contains("clone") {
        notes.push(
            "it calls clone: a child made by it that shares no memory and writes to data on pool \
             pages needs pages of its own"
                .into(),
        );
    }
    let brk = among(&symbols.imported, &["brk", "sbrk"]);
    if !brk.is_empty() {
        notes.push(format!("it moves the break itself ({})", brk.join(", ")));
    }
    if symbols.imported.contains("mlockall") {
        notes.push("it may lock all its memory (mlockall)".into());
    }
    if symbols.imported.contains("dlopen") {
        notes.push("it loads further objects with dlopen: their text is not counted here".into());
    }
    let sanitizers = [
        "__asan_init",
        "__tsan_init",
        "__msan_init",
        "__hwasan_init",
        "__lsan_init",
        "__sanitizer_symbolize_code",
    ];
    if !among(&symbols.defined, &sanitizers).is_empty()
        || !among(&symbols.imported, &sanitizers).is_empty()
    {
        notes.push("it is built with a sanitizer: a test build, and slow".into());
    }
}

/// Where the heap begins.
fn heap_note(analysis: &Analysis, notes: &mut Vec<String>) {
    let image = &analysis.image;
    let block = analysis.block.bytes();
    let Some(last) = image.segments.last() else { return };
    if is_relocatable(image.kind) {
        return;
    }
    let rest = last.memory.end().next_multiple_of(block) - last.memory.end();
    notes.push(format!(
        "without ASLR the heap begins right behind its bss: the first {} kB of it move along",
        rest >> 10
    ));
}

/// What the merge levels cost.
fn level_notes(analysis: &Analysis, notes: &mut Vec<String>) {
    let relro = analysis.image.relro.is_some();
    match analysis.policy.merge {
        Merge::Relro if relro => {
            notes.push("at this level relro shares pages with data and is writable".into())
        }
        Merge::Rwx => {
            notes.push("at this level pages are writable and executable, and relro is lost".into())
        }
        _ => {}
    }
    let Ok(estimate) = analysis.chosen() else { return };
    if estimate.sometimes_refused {
        notes.push(
            "at some load addresses less than one huge page would be gained: it stays".into(),
        );
    }
    let large = estimate.left.iter().any(|left| left.reason == Reason::LargeBss);
    if large && estimate.class(Class::Bss).is_some() {
        notes.push(
            "its large bss stays small unless a backend is named for it (--backend thp)".into(),
        );
    }
}
