//! Where the bytes of an ELF file come from: a regular file, or memory in tests.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::ElfError;

/// Bytes that can be read at any offset.
pub trait Source {
    /// Number of bytes there are.
    fn size(&self) -> u64;

    /// Fills `buffer` from `offset` on; fails when the bytes end before it is full.
    ///
    /// # Errors
    /// As [`FileExt::read_exact_at`].
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;

    /// `length` bytes from `offset` on. Allocates nothing for bytes that are not there.
    ///
    /// # Errors
    /// [`ElfError::Truncated`] when the source ends before, [`ElfError::TooLarge`] when
    /// `length` is above `limit`, else what reading failed with.
    fn take(
        &self,
        what: &'static str,
        offset: u64,
        length: u64,
        limit: usize,
    ) -> Result<Vec<u8>, ElfError> {
        let end = offset.checked_add(length).filter(|&end| end <= self.size());
        if end.is_none() {
            return Err(ElfError::Truncated { what, offset, length, size: self.size() });
        }
        let length = usize::try_from(length)
            .ok()
            .filter(|&length| length <= limit)
            .ok_or(ElfError::TooLarge { what, length, limit })?;
        let mut bytes = vec![0; length];
        self.read_exact_at(&mut bytes, offset).map_err(|source| ElfError::Read { what, source })?;
        Ok(bytes)
    }
}

impl Source for &[u8] {
    fn size(&self) -> u64 {
        self.len() as u64
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..)?.get(..buffer.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

impl Source for Vec<u8> {
    fn size(&self) -> u64 {
        self.as_slice().size()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.as_slice().read_exact_at(buffer, offset)
    }
}

/// A regular file, opened for reading.
#[derive(Debug)]
pub struct FileSource {
    file: File,
    metadata: std::fs::Metadata,
}

impl FileSource {
    /// Opens `path`. Never waits (a FIFO without a writer) and never touches a device.
    ///
    /// # Errors
    /// [`ElfError::Open`], or [`ElfError::NotRegular`] for a directory, FIFO, socket or device.
    pub fn open(path: &Path) -> Result<Self, ElfError> {
        let open = |source| ElfError::Open { source };
        // Looking before opening: opening a device can have effects of its own.
        require_regular(&path.metadata().map_err(open)?)?;
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(open)?;
        let metadata = file.metadata().map_err(open)?;
        require_regular(&metadata)?;
        Ok(Self { file, metadata })
    }

    /// Whether it has the extended attribute `name` (xattr(7)).
    #[must_use]
    pub fn has_attribute(&self, name: &CStr) -> bool {
        // SAFETY: `name` is a C string that outlives the call, the descriptor is open
        // while `self` lives, and a size of zero asks for the length alone.
        let length = unsafe {
            libc::fgetxattr(self.file.as_raw_fd(), name.as_ptr(), std::ptr::null_mut(), 0)
        };
        length >= 0
    }

    /// Permission bits of the file, setuid and setgid among them.
    #[must_use]
    pub fn mode(&self) -> u32 {
        self.metadata.mode()
    }

    /// Device and inode, which tell one file from another.
    #[must_use]
    pub fn identity(&self) -> (u64, u64) {
        (self.metadata.dev(), self.metadata.ino())
    }
}

fn require_regular(metadata: &std::fs::Metadata) -> Result<(), ElfError> {
    let kind = metadata.file_type();
    let what = if kind.is_file() {
        return Ok(());
    } else if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else if kind.is_char_device() {
        "a character device"
    } else if kind.is_block_device() {
        "a block device"
    } else {
        "not a regular file"
    };
    Err(ElfError::NotRegular { what })
}

impl Source for FileSource {
    fn size(&self) -> u64 {
        self.metadata.len()
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.file, buffer, offset)
    }
}
