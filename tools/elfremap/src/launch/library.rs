//! Where the preload library is, and the value of LD_PRELOAD.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::elf::{ElfError, FileSource, Image, Kind};

const NAME: &str = "libelfremap.so";
/// Relative to the directory of the command: a build tree, then install prefixes.
const PLACES: [&str; 4] = [".", "../lib", "../lib/x86_64-linux-gnu", "../lib64"];
const PLACES_ARM64: [&str; 4] = [".", "../lib", "../lib/aarch64-linux-gnu", "../lib64"];

/// Why there is no library to preload.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// It is at none of the usual places.
    #[error("cannot find {NAME} beside the command or in its prefix")]
    NotFound,
    /// The file is not usable.
    #[error("cannot use {}: {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ElfError,
    },
    /// The file is an ELF file, but not a library for this machine.
    #[error("cannot use {}: not a shared library for this machine", .0.display())]
    NotLibrary(PathBuf),
    /// LD_PRELOAD is a list separated by colons and blanks, without any escape.
    #[error("cannot use {}: the loader takes no path with colons or blanks", .0.display())]
    Unusable(PathBuf),
}

/// The absolute path of the library: `given`, or the one that belongs to this command.
///
/// # Errors
/// [`LibraryError`].
pub fn find(given: Option<&Path>) -> Result<PathBuf, LibraryError> {
    let path = match given {
        Some(path) => path.to_path_buf(),
        None => beside_command().ok_or(LibraryError::NotFound)?,
    };
    let unreadable = |source| LibraryError::Unreadable { path: path.clone(), source };
    let source = FileSource::open(&path).map_err(unreadable)?;
    let image = Image::read(&source).map_err(unreadable)?;
    if image.kind != Kind::SharedObject || !image.is_native() {
        return Err(LibraryError::NotLibrary(path));
    }
    let path = std::path::absolute(&path).unwrap_or(path);
    let is_plain = |b: &u8| !matches!(b, b':' | b' ' | b'\t' | b'\n');
    if !path.as_os_str().as_bytes().iter().all(is_plain) {
        return Err(LibraryError::Unusable(path));
    }
    Ok(path)
}

fn beside_command() -> Option<PathBuf> {
    let command = env::current_exe().ok()?;
    let directory = command.parent()?;
    let places = if cfg!(target_arch = "aarch64") { PLACES_ARM64 } else { PLACES };
    let mut candidates = places.iter().map(|place| directory.join(place).join(NAME));
    let path = candidates.find(|path| path.is_file())?;
    path.canonicalize().ok()
}

/// The value of LD_PRELOAD: what is there already stays in front, so that a library
/// which has to be the first (a sanitizer's) still is.
#[must_use]
pub fn preload_value(existing: Option<&OsStr>, library: &Path) -> OsString {
    let existing = existing.filter(|existing| !existing.is_empty());
    let Some(existing) = existing else { return library.into() };
    let separated = existing.as_bytes().split(|b| b": \t\n".contains(b));
    if separated.into_iter().any(|name| name == library.as_os_str().as_bytes()) {
        return existing.into();
    }
    let mut value = existing.to_os_string();
    value.push(":");
    value.push(library);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_kept_and_ours_comes_once() {
        let value =
            |existing: &str| preload_value(Some(OsStr::new(existing)), Path::new("/l/e.so"));
        assert_eq!(preload_value(None, Path::new("/l/e.so")), "/l/e.so");
        assert_eq!(value(""), "/l/e.so");
        assert_eq!(value("/a.so"), "/a.so:/l/e.so");
        assert_eq!(value("/a.so /l/e.so"), "/a.so /l/e.so");
        assert_eq!(value("/x/l/e.so"), "/x/l/e.so:/l/e.so");
    }

    #[test]
    fn what_is_no_library() {
        assert!(matches!(find(Some(Path::new("/bin/sh"))), Err(LibraryError::NotLibrary(_))));
        assert!(matches!(find(Some(Path::new("/nowhere"))), Err(LibraryError::Unreadable { .. })));
        let directory = tempfile::Builder::new().prefix("a b").tempdir().unwrap();
        let copy = directory.path().join("x.so");
        std::fs::copy(libc_path(), &copy).unwrap();
        assert!(matches!(find(Some(&copy)), Err(LibraryError::Unusable(_))));
    }

    /// A shared object that every test process has.
    fn libc_path() -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|line| line.contains("/libc.so.6")).unwrap();
        line[line.find('/').unwrap()..].into()
    }
}
