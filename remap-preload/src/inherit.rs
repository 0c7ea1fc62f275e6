//! `ELFREMAP_INHERIT=0`: take ourselves out of LD_PRELOAD, so that children start
//! without us.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;

use core_lib::exec::is_same_file;

use crate::host;

/// Edits the entry `LD_PRELOAD=...` of the environment in place; an entry that would
/// become empty is removed.
///
/// # Safety
/// `environment` is a null-terminated array of writable C strings that nobody else
/// uses at this moment.
pub(crate) unsafe fn leave_ld_preload(environment: *mut *mut c_char) {
    const NAME: &[u8] = b"LD_PRELOAD=";
    let own = own_path();
    let mut at = environment;
    // SAFETY: the caller's promise; every access stays within the array up to its null
    // pointer, or within one string up to its null byte, and strings only shrink.
    unsafe {
        while !at.is_null() && !at.read().is_null() {
            let entry = at.read();
            let text = CStr::from_ptr(entry).to_bytes();
            let Some(list) = text.strip_prefix(NAME) else {
                at = at.add(1);
                continue;
            };
            let mut to = NAME.len();
            let mut start = NAME.len();
            let end = start + list.len();
            while start < end {
                let bytes = core::slice::from_raw_parts(entry.add(start).cast::<u8>(), end - start);
                let len = bytes.iter().position(|b| b" :".contains(b)).unwrap_or(bytes.len());
                let keep = len > 0 && !is_own(&bytes[..len], own);
                if keep {
                    if to > NAME.len() {
                        entry.add(to).cast::<u8>().write(b':');
                        to += 1;
                    }
                    ptr::copy(entry.add(start), entry.add(to), len);
                    to += len;
                }
                start += len + 1;
            }
            entry.add(to).write(0);
            if to > NAME.len() {
                at = at.add(1);
                continue;
            }
            let mut next = at;
            while !next.read().is_null() {
                next.write(next.add(1).read());
                next = next.add(1);
            }
        }
    }
}

/// Whether an entry of LD_PRELOAD names the library loaded from `own`: in whatever
/// folder, since the same one may be written in many ways ($LIB, //, links); or by the path
/// of the same file under another name, which the loader has not loaded twice.
fn is_own(entry: &[u8], own: &CStr) -> bool {
    let last = |path: &'_ [u8]| path.rsplit(|&b| b == b'/').next().map_or(0, <[u8]>::len);
    let name = own.to_bytes();
    if entry.ends_with(&name[name.len() - last(name)..]) && last(entry) == last(name) {
        return true;
    }
    let mut path = [0u8; libc::PATH_MAX as usize];
    if !entry.contains(&b'/') || entry.len() >= path.len() {
        return false;
    }
    path[..entry.len()].copy_from_slice(entry);
    CStr::from_bytes_until_nul(&path).is_ok_and(|path| is_same_file(path, own))
}

/// The path under which the loader knows this library.
fn own_path() -> &'static CStr {
    let mut own = c"libelfremap.so";
    // SAFETY: the callback matches the prototype and gets the pointer to `own`, which
    // outlives the call.
    unsafe { host::dl_iterate_phdr(take_own, (&raw mut own).cast()) };
    own
}

unsafe extern "C" fn take_own(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    data: *mut c_void,
) -> c_int {
    let here = (take_own as *const ()).addr() as u64;
    // SAFETY: the loader passes a valid structure, whose program headers are mapped and
    // whose name lives as long as the library is loaded, and the pointer that
    // `own_path` gave it.
    unsafe {
        let info = &*info;
        let headers = core::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
        let holds_us = headers.iter().any(|header| {
            let start = info.dlpi_addr.wrapping_add(header.p_vaddr);
            header.p_type == libc::PT_LOAD && here.wrapping_sub(start) < header.p_memsz
        });
        if !holds_us {
            return 0;
        }
        if !info.dlpi_name.is_null() {
            data.cast::<&'static CStr>().write(CStr::from_ptr(info.dlpi_name));
        }
    }
    1
}
