//! The main program as the loader knows it: dl_iterate_phdr(3).

use alloc::vec::Vec;
use core::ffi::{c_int, c_void};

use crate::host;

use core_lib::facts::{Object, Segment};
use core_lib::property::{PT_GNU_PROPERTY, supports_bti};
use core_lib::prot::Prot;
use core_lib::range::Range;

/// A loaded object's program headers, which stay mapped while it is loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Headers {
    bias: u64,
    headers: &'static [libc::Elf64_Phdr],
}

/// The main program: the first entry, also when it was started as `ld.so ./program`.
pub(crate) fn main_program() -> Option<Headers> {
    let mut found: Option<Headers> = None;
    // SAFETY: the callback matches the prototype and gets the pointer to `found`, which
    // outlives the call.
    unsafe { host::dl_iterate_phdr(take_first, (&raw mut found).cast()) };
    found
}

unsafe extern "C" fn take_first(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    // SAFETY: the loader passes a valid structure and the pointer that `main_program`
    // gave it. The main program's headers are never unmapped.
    unsafe {
        let info = &*info;
        if !info.dlpi_phdr.is_null() {
            let headers = core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
            data.cast::<Option<Headers>>().write(Some(Headers { bias: info.dlpi_addr, headers }));
        }
    }
    1
}

impl Headers {
    /// Bytes of all segments together: more than this cannot move.
    pub(crate) fn bytes(&self) -> u64 {
        let loads = self.headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
        loads.fold(0, |sum, header| sum.saturating_add(header.p_memsz))
    }

    /// The object that they describe; `None` when a header makes no sense.
    pub(crate) fn object(&self) -> Option<Object> {
        let mut segments = Vec::new();
        let mut relro = None;
        for header in self.headers {
            let start = self.bias.wrapping_add(header.p_vaddr);
            match header.p_type {
                libc::PT_LOAD if header.p_memsz > 0 => segments.push(Segment {
                    range: Range::with_len(start, header.p_memsz)?,
                    file_end: start.checked_add(header.p_filesz.min(header.p_memsz))?,
                    offset: header.p_offset,
                    prot: Prot::from_p_flags(header.p_flags),
                }),
                libc::PT_GNU_RELRO => relro = Some(Range::with_len(start, header.p_memsz)?),
                _ => {}
            }
        }
        segments.sort_by_key(|segment| segment.range.start());
        if self.has_bti(&segments) {
            let code = segments.iter_mut().filter(|segment| segment.prot.has(Prot::EXEC));
            code.for_each(|segment| segment.prot = segment.prot | Prot::BTI);
        }
        Some(Object { segments, relro })
    }

    /// Whether the file says that its code has landing pads for indirect branches.
    fn has_bti(&self, segments: &[Segment]) -> bool {
        if !cfg!(target_arch = "aarch64") {
            return false;
        }
        let note = self.headers.iter().find(|header| header.p_type == PT_GNU_PROPERTY);
        let note = note.and_then(|header| {
            Range::with_len(self.bias.wrapping_add(header.p_vaddr), header.p_memsz)
        });
        let is_loaded = |note: &Range| {
            let readable = segments.iter().filter(|segment| segment.prot.has(Prot::READ));
            let mut loaded = readable.filter_map(|s| Range::new(s.range.start(), s.file_end));
            loaded.any(|range| range.covers(*note))
        };
        let Some(note) = note.filter(is_loaded) else { return false };
        let (Ok(start), Ok(len)) = (usize::try_from(note.start()), usize::try_from(note.len()))
        else {
            return false;
        };
        // SAFETY: the note lies in a segment that the loader has mapped readable, and
        // nobody writes to it.
        supports_bti(unsafe {
            core::slice::from_raw_parts(core::ptr::with_exposed_provenance(start), len)
        })
    }
}
