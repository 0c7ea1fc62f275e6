//! userfaultfd(2): filling huge pages without having them zeroed first.
//!
//! A page that is populated is written twice, once with zeros and once with its content.
//! `UFFDIO_COPY` takes a page of the pool and writes the content at once, and a shortage
//! is an error there as well (`ENOMEM`).

use super::sys::{self, Fd};
use crate::errno::Errno;
use crate::range::Range;

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)` and its siblings, linux/userfaultfd.h (Linux 4.3).
pub(super) const UFFDIO_API: usize = 0xc018_aa3f;
pub(super) const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_UNREGISTER: usize = 0x8010_aa01;
const UFFDIO_COPY: usize = 0xc028_aa03;
/// Linux 5.7.
pub(super) const UFFDIO_WRITEPROTECT: usize = 0xc018_aa06;

pub(super) const API_VERSION: u64 = 0xaa;
const REGISTER_MODE_MISSING: u64 = 1;
/// Nobody waits for the page.
const COPY_MODE_DONTWAKE: u64 = 1;

/// `struct uffdio_api`.
#[repr(C)]
pub(super) struct Api {
    pub(super) api: u64,
    pub(super) features: u64,
    pub(super) ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
pub(super) struct Register {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
struct Unregister {
    start: u64,
    len: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
pub(super) struct WriteProtect {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
}

#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// A descriptor for ranges of this process.
#[derive(Debug)]
pub(super) struct Userfault(Fd);

impl Userfault {
    /// `None` where the kernel or its rules have none to give, and under a seccomp
    /// filter: services' lists of calls often lack this one, and may answer it by a
    /// signal.
    pub(super) fn open() -> Option<Self> {
        if sys::is_filtered() {
            return None;
        }
        let fd = sys::userfault().ok()?;
        let mut api = Api { api: API_VERSION, features: 0, ioctls: 0 };
        // SAFETY: `Api` is the structure of this request, and nothing else is written.
        unsafe { fd.ioctl(UFFDIO_API, &mut api).ok()? };
        Some(Self(fd))
    }

    /// Takes charge of the missing pages of a range, which nobody may touch until it is
    /// let go: an access by the kernel would fail, and one by the process wait for ever.
    pub(super) fn register(&self, range: Range) -> Result<(), Errno> {
        let (start, len) = (range.start(), range.len());
        let mut register = Register { start, len, mode: REGISTER_MODE_MISSING, ioctls: 0 };
        // SAFETY: `Register` is the structure of this request, and nothing else is written.
        unsafe { self.0.ioctl(UFFDIO_REGISTER, &mut register)? };
        Ok(())
    }

    /// Lets a range go.
    pub(super) fn unregister(&self, range: Range) -> Result<(), Errno> {
        let mut unregister = Unregister { start: range.start(), len: range.len() };
        // SAFETY: `Unregister` is the structure of this request, and nothing is written.
        unsafe { self.0.ioctl(UFFDIO_UNREGISTER, &mut unregister)? };
        Ok(())
    }

    /// Makes the huge pages of `to`, which are missing, with the bytes of `from` in them.
    /// A byte of `from` that cannot be read is an error.
    ///
    /// # Safety
    /// `to` is ours, registered, whole huge pages, and as long as `from`.
    pub(super) unsafe fn copy(&self, to: Range, from: Range) -> Result<(), Errno> {
        let (to, from, len) = (to.start(), from.start(), to.len());
        let mut copy = Copy { to, from, len, mode: COPY_MODE_DONTWAKE, copied: 0 };
        // SAFETY: `Copy` is the structure of this request; the kernel writes into it and
        // to missing pages of `to`, ours by the caller's promise.
        unsafe { self.0.ioctl(UFFDIO_COPY, &mut copy)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the requests, as linux/ioctl.h puts them together.
    #[test]
    fn requests() {
        const fn request(direction: usize, number: usize, size: usize) -> usize {
            direction << 30 | size << 16 | 0xaa << 8 | number
        }
        assert_eq!(UFFDIO_API, request(3, 0x3f, size_of::<Api>()));
        assert_eq!(UFFDIO_REGISTER, request(3, 0, size_of::<Register>()));
        assert_eq!(UFFDIO_UNREGISTER, request(2, 1, size_of::<Unregister>()));
        assert_eq!(UFFDIO_COPY, request(3, 3, size_of::<Copy>()));
        assert_eq!(UFFDIO_WRITEPROTECT, request(3, 6, size_of::<WriteProtect>()));
    }
}
