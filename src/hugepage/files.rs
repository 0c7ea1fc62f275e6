//! Access to the files of sysfs and `/proc`.

use alloc::string::String;
use alloc::vec::Vec;

/// Reads files and directories. Paths are absolute, as on the running machine
/// (`/sys/...`, `/proc/...`); an implementation may put a root in front.
pub trait Files {
    /// Why a file could not be read.
    type Error;

    /// Appends the content of the file to `out`; false when there is no such file.
    ///
    /// # Errors
    /// Whatever else keeps it from being read to its end.
    fn read(&self, path: &str, out: &mut Vec<u8>) -> Result<bool, Self::Error>;

    /// Calls `each` with every name in the directory, in any order, `.` and `..` left
    /// out or not; false when there is no such directory.
    ///
    /// # Errors
    /// Whatever else keeps it from being listed to its end.
    fn list(&self, path: &str, each: &mut dyn FnMut(&[u8])) -> Result<bool, Self::Error>;
}

/// Why a value could not be had.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError<E> {
    /// The file or directory could not be read.
    #[error("cannot read {path}: {error}")]
    Access {
        /// Its path, without the root.
        path: String,
        /// The cause.
        error: E,
    },
    /// The file's content is not what the kernel writes there.
    #[error("cannot read {path}: unexpected content")]
    Content {
        /// Its path, without the root.
        path: String,
    },
}

/// What `parse` makes of the content of `path`; `None` when there is no such file.
pub(super) fn value<F: Files, T>(
    files: &F,
    path: String,
    parse: impl FnOnce(&[u8]) -> Option<T>,
) -> Result<Option<T>, ReadError<F::Error>> {
    let mut content = Vec::new();
    match files.read(&path, &mut content) {
        Ok(true) => parse(&content).map(Some).ok_or(ReadError::Content { path }),
        Ok(false) => Ok(None),
        Err(error) => Err(ReadError::Access { path, error }),
    }
}
