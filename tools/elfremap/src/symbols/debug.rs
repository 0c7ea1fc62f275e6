//! Finding the symbols that are not in the file itself: separate debug files and the packed
//! symbol table of `.gnu_debugdata`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::file::{ElfFile, MAX_SECTION, c_string, damaged};
use crate::elf::ElfError;

/// Where separate debug files may be.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Folders like `/usr/lib/debug`, in order.
    pub debug_dirs: Vec<PathBuf>,
    /// Folders that the program itself lies in (as seen from here, and from its container).
    pub program_dirs: Vec<PathBuf>,
}

/// A debug file that was found and fits.
#[derive(Debug)]
pub struct DebugFile {
    /// Where it is.
    pub path: PathBuf,
    /// It, opened.
    pub elf: ElfFile,
}

/// The debug file that belongs to `elf`: by build id under each debug folder, then by the name
/// in `.gnu_debuglink` beside the program, in `.debug` beside it, and under each debug folder.
/// A file that is there but does not fit (build id, checksum) is passed over and named in
/// `rejected`, with the reason.
pub fn find(elf: &ElfFile, search: &Search, rejected: &mut Vec<String>) -> Option<DebugFile> {
    let build_id = elf.build_id();
    let by_id = build_id.iter().filter(|id| id.len() >= 2).flat_map(|id| {
        let hex: String = id.iter().map(|b| format!("{b:02x}")).collect();
        let name = format!(".build-id/{}/{}.debug", &hex[..2], &hex[2..]);
        search.debug_dirs.iter().map(move |dir| dir.join(&name))
    });
    let mut no_checksum = |path| open(path, build_id.as_deref(), None, rejected);
    if let Some(found) = by_id.into_iter().find_map(&mut no_checksum) {
        return Some(found);
    }

    let (name, checksum) = debug_link(elf)?;
    let beside = search.program_dirs.iter();
    let beside = beside.flat_map(|dir| [dir.join(&name), dir.join(".debug").join(&name)]);
    let under = search.debug_dirs.iter().flat_map(|debug| {
        let name = &name;
        search
            .program_dirs
            .iter()
            .map(move |dir| debug.join(dir.strip_prefix("/").unwrap_or(dir)).join(name))
    });
    // --debug-dir may also name the folder that holds the files themselves.
    let flat = search.debug_dirs.iter().map(|dir| dir.join(&name));
    beside
        .chain(under)
        .chain(flat)
        .find_map(|path| open(path, build_id.as_deref(), Some(checksum), rejected))
}

/// The file name and the CRC-32 in `.gnu_debuglink`. The name is a plain file name: anything
/// else could lead out of the debug folders.
fn debug_link(elf: &ElfFile) -> Option<(PathBuf, u32)> {
    let data = elf.section_data(elf.section(".gnu_debuglink")?).ok()?;
    let name = c_string(&data, 0);
    let checksum = data.get((name.len() + 1).next_multiple_of(4)..)?.first_chunk::<4>()?;
    let checksum = if elf.ctx.is_little_endian() {
        u32::from_le_bytes(*checksum)
    } else {
        u32::from_be_bytes(*checksum)
    };
    let plain = !name.is_empty() && !name.contains(&b'/') && name != b"." && name != b"..";
    plain.then(|| (PathBuf::from(OsStr::from_bytes(name)), checksum))
}

/// Opens `path` when it is a debug file that fits; a reason why not goes to `rejected`, unless
/// there is no such file.
fn open(
    path: PathBuf,
    build_id: Option<&[u8]>,
    checksum: Option<u32>,
    rejected: &mut Vec<String>,
) -> Option<DebugFile> {
    let mut reject = |path: &Path, why: &dyn std::fmt::Display| {
        rejected.push(format!("passed over {}: {why}", path.display()));
    };
    if !fs::metadata(&path).ok()?.is_file() {
        return None;
    }
    let elf = match ElfFile::open(&path) {
        Ok(elf) => elf,
        Err(error) => {
            reject(&path, &error);
            return None;
        }
    };
    let found = elf.build_id();
    if build_id.zip(found.as_deref()).is_some_and(|(a, b)| a != b) {
        reject(&path, &"its build id belongs to another build");
        return None;
    }
    match checksum {
        // Found by build id alone: it must have that one.
        None if found.is_none() => {
            reject(&path, &"it has no build id");
            return None;
        }
        Some(wanted) if !crc32(&path).is_ok_and(|crc| crc == wanted) => {
            reject(&path, &"its checksum is not the one in .gnu_debuglink");
            return None;
        }
        _ => {}
    }
    Some(DebugFile { path, elf })
}

fn crc32(path: &Path) -> io::Result<u32> {
    let mut file = File::open(path)?;
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize()),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// The ELF file packed into `.gnu_debugdata` (xz), which holds the local functions that
/// `.dynsym` leaves out; `None` when there is no such section.
///
/// # Errors
/// When it cannot be unpacked, or gives more than [`MAX_SECTION`] bytes.
pub fn mini_debug_data(elf: &ElfFile) -> Result<Option<ElfFile>, ElfError> {
    /// No real one asks for a dictionary near this size.
    const MAX_DICTIONARY_KIB: u32 = 128 << 10;
    let Some(section) = elf.section(".gnu_debugdata") else { return Ok(None) };
    let packed = elf.section_data(section)?;
    let reader = lzma_rust2::XzReader::new_mem_limit(&packed[..], true, MAX_DICTIONARY_KIB);
    let mut data = Vec::new();
    reader.take(MAX_SECTION as u64 + 1).read_to_end(&mut data).map_err(damaged)?;
    if data.len() > MAX_SECTION {
        return Err(damaged("it unpacks to too much"));
    }
    ElfFile::from_bytes(data).map(Some)
}
