//! The requests of userfaultfd(2) and their structures, as linux/userfaultfd.h has them.

/// `_IOWR(0xaa, 0x3f, struct uffdio_api)` and its siblings (Linux 4.3).
pub(super) const UFFDIO_API: usize = 0xc018_aa3f;
pub(super) const UFFDIO_REGISTER: usize = 0xc020_aa00;
/// Linux 5.7.
pub(super) const UFFDIO_WRITEPROTECT: usize = 0xc018_aa06;

pub(super) const API_VERSION: u64 = 0xaa;

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

/// `struct uffdio_writeprotect`.
#[repr(C)]
pub(super) struct WriteProtect {
    pub(super) start: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
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
        assert_eq!(UFFDIO_WRITEPROTECT, request(3, 6, size_of::<WriteProtect>()));
    }
}
