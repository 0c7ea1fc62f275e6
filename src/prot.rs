//! Memory protections.

use core::fmt;
use core::ops::BitOr;

/// A set of access rights of a mapping or segment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Prot(u8);

impl Prot {
    /// No access.
    pub const NONE: Self = Self(0);
    /// May be read.
    pub const READ: Self = Self(1);
    /// May be written.
    pub const WRITE: Self = Self(2);
    /// May be executed.
    pub const EXEC: Self = Self(4);
    /// Executable pages accept indirect branches only at landing pads (arm64 `PROT_BTI`).
    pub const BTI: Self = Self(8);
    /// Read and write.
    pub const RW: Self = Self(3);
    /// Read and execute.
    pub const RX: Self = Self(5);

    /// Whether every right of `other` is in `self`.
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether the mapping could be both written and executed.
    #[must_use]
    pub const fn is_write_exec(self) -> bool {
        self.has(Self::WRITE) && self.has(Self::EXEC)
    }

    /// The rights in an ELF segment's `p_flags` (PF_X 1, PF_W 2, PF_R 4).
    #[must_use]
    pub const fn from_p_flags(flags: u32) -> Self {
        let read = if flags & 4 != 0 { Self::READ.0 } else { 0 };
        let write = if flags & 2 != 0 { Self::WRITE.0 } else { 0 };
        let exec = if flags & 1 != 0 { Self::EXEC.0 } else { 0 };
        Self(read | write | exec)
    }

    /// The value for `mmap(2)` and `mprotect(2)`.
    #[must_use]
    pub const fn to_raw(self) -> i32 {
        /// `PROT_BTI` of `arch/arm64/include/uapi/asm/mman.h`, Linux 5.8.
        const PROT_BTI: i32 = 0x10;
        let mut raw = 0;
        if self.has(Self::READ) {
            raw |= libc::PROT_READ;
        }
        if self.has(Self::WRITE) {
            raw |= libc::PROT_WRITE;
        }
        if self.has(Self::EXEC) {
            raw |= libc::PROT_EXEC;
        }
        if self.has(Self::BTI) {
            raw |= PROT_BTI;
        }
        raw
    }
}

impl BitOr for Prot {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Display for Prot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.has(Self::READ) { "r" } else { "-" })?;
        f.write_str(if self.has(Self::WRITE) { "w" } else { "-" })?;
        f.write_str(if self.has(Self::EXEC) { "x" } else { "-" })
    }
}

impl fmt::Debug for Prot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}{}", if self.has(Self::BTI) { "+bti" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p_flags_and_raw_agree_with_the_headers() {
        assert_eq!(Prot::from_p_flags(5), Prot::RX);
        assert_eq!(Prot::from_p_flags(6), Prot::RW);
        assert_eq!(Prot::RX.to_raw(), libc::PROT_READ | libc::PROT_EXEC);
        assert!(Prot::from_p_flags(7).is_write_exec());
        assert_eq!(Prot::RX.to_string(), "r-x");
    }
}
