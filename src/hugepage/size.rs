//! Page sizes, as users, sysfs, mmap(2) and the hugetlb cgroup write them.

use core::fmt;
use core::str::FromStr;

/// The size of a page: a power of two of at least 4 KiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageSize(u64);

/// A text that is no page size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a page size: write a power of two such as 64K, 2M or 1G")]
pub struct ParseSizeError;

impl PageSize {
    /// 4 KiB, the smallest page of every supported machine.
    pub const SIZE_4K: Self = Self(4 << 10);
    /// 2 MiB, the usual huge page with 4 KiB base pages.
    pub const SIZE_2M: Self = Self(2 << 20);
    /// 1 GiB.
    pub const SIZE_1G: Self = Self(1 << 30);

    /// A size in bytes; `None` when it isn't a power of two of at least 4 KiB.
    #[must_use]
    pub const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= Self::SIZE_4K.0 { Some(Self(bytes)) } else { None }
    }

    /// In bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// In units of 1024 bytes, as sysfs and smaps count.
    #[must_use]
    pub const fn kilobytes(self) -> u64 {
        self.0 >> 10
    }

    /// Pages needed for `bytes`, rounded up.
    #[must_use]
    pub const fn pages_for(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.0)
    }

    /// The flag bits that ask mmap(2) for this size of `MAP_HUGETLB` page: the binary
    /// logarithm, shifted by `MAP_HUGE_SHIFT` (Linux 3.8, `uapi/asm-generic/hugetlb_encode.h`).
    #[must_use]
    pub const fn mmap_flags(self) -> i32 {
        const MAP_HUGE_SHIFT: u32 = 26;
        // The logarithm of a u64 is at most 63, which fits the six bits of the field;
        // only sizes from 2^32 up reach the sign bit.
        (self.0.trailing_zeros() << MAP_HUGE_SHIFT).cast_signed()
    }

    /// The size in the name of a directory such as `hugepages-2048kB`; `None` for other names.
    #[must_use]
    pub fn from_sysfs_name(name: &[u8]) -> Option<Self> {
        let digits = name.strip_prefix(b"hugepages-")?.strip_suffix(b"kB")?;
        Self::new(super::number(digits)?.checked_mul(1024)?)
    }

    /// Writes the name of its sysfs directory, such as `hugepages-2048kB`.
    #[must_use]
    pub const fn sysfs_name(self) -> impl fmt::Display {
        SysfsName(self)
    }

    /// The number and the binary prefix (`""`, `K`, `M`, `G`, `T`, `P` or `E`) of the largest
    /// unit that divides the size.
    #[must_use]
    pub const fn in_unit(self) -> (u64, &'static str) {
        let unit = self.0.trailing_zeros() / 10;
        let prefix = match unit {
            0 => "",
            1 => "K",
            2 => "M",
            3 => "G",
            4 => "T",
            5 => "P",
            _ => "E",
        };
        (self.0 >> (unit * 10), prefix)
    }
}

struct SysfsName(PageSize);

impl fmt::Display for SysfsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hugepages-{}kB", self.0.kilobytes())
    }
}

/// As people write it: `2M`, `1G`, `64K`. With `#` as the hugetlb cgroup does: `2MB`.
impl fmt::Display for PageSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, prefix) = self.in_unit();
        let mut text = [0u8; 8];
        let tail = if f.alternate() { "B" } else { "" };
        f.pad(compose(&mut text, number, prefix, tail))
    }
}

/// Puts the parts (at most 4 digits and 2 letters) together without a heap, for `pad`.
fn compose<'a>(text: &'a mut [u8; 8], number: u64, prefix: &str, tail: &str) -> &'a str {
    use core::fmt::Write;
    struct Cursor<'b>(&'b mut [u8; 8], usize);
    impl Write for Cursor<'_> {
        fn write_str(&mut self, s: &str) -> fmt::Result {
            let room = self.0.get_mut(self.1..self.1 + s.len()).ok_or(fmt::Error)?;
            room.copy_from_slice(s.as_bytes());
            self.1 += s.len();
            Ok(())
        }
    }
    let mut cursor = Cursor(text, 0);
    let length = if write!(cursor, "{number}{prefix}{tail}").is_ok() { cursor.1 } else { 0 };
    core::str::from_utf8(&text[..length]).unwrap_or("")
}

/// Accepts a number with an optional binary unit in either case: `2M`, `2MB`, `2MiB`,
/// `2048kB`, `2097152`. Decimal units do not exist here: the kernel's `kB` is 1024 bytes too.
impl FromStr for PageSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<Self, ParseSizeError> {
        parse_bytes(text).and_then(Self::new).ok_or(ParseSizeError)
    }
}

/// An amount of memory in bytes, written as a number with an optional binary unit.
#[must_use]
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim().as_bytes();
    let digits = text.iter().take_while(|b| b.is_ascii_digit()).count();
    let (number, unit) = text.split_at(digits);
    let number = super::number(number)?;
    let mut unit = unit.trim_ascii_start();
    if let [rest @ .., b'b' | b'B'] = unit {
        unit = rest;
    }
    let shift = match unit {
        [] => 0,
        [prefix] | [prefix, b'i' | b'I'] => match prefix.to_ascii_uppercase() {
            b'K' => 10,
            b'M' => 20,
            b'G' => 30,
            b'T' => 40,
            _ => return None,
        },
        _ => return None,
    };
    number.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn users_spellings() {
        for text in ["2M", "2m", "2MB", "2MiB", "2 MB", "2048kB", "2048K", "2097152", " 2M\n"] {
            assert_eq!(text.parse(), Ok(PageSize::SIZE_2M), "{text}");
        }
        assert_eq!("1G".parse(), Ok(PageSize::SIZE_1G));
        assert_eq!("64K".parse::<PageSize>().unwrap().bytes(), 65536);
        for text in ["", "M", "0", "3M", "2X", "2MM", "-2M", "2iB", "99999999999G", "1K", "2.0M"] {
            assert_eq!(text.parse::<PageSize>(), Err(ParseSizeError), "{text}");
        }
    }

    #[test]
    fn printed_as_the_readers_expect() {
        assert_eq!(PageSize::SIZE_2M.to_string(), "2M");
        assert_eq!(format!("{:#}", PageSize::SIZE_1G), "1GB");
        assert_eq!(format!("{:>6}|", PageSize::new(64 << 10).unwrap()), "   64K|");
        assert_eq!(PageSize::new(512 << 20).unwrap().to_string(), "512M");
        assert_eq!(format!("{:#}", PageSize::new(1 << 63).unwrap()), "8EB");
        assert_eq!(PageSize::SIZE_1G.sysfs_name().to_string(), "hugepages-1048576kB");
    }

    #[test]
    fn mmap_bits_are_the_headers() {
        assert_eq!(PageSize::SIZE_2M.mmap_flags(), libc::MAP_HUGE_2MB);
        assert_eq!(PageSize::SIZE_1G.mmap_flags(), libc::MAP_HUGE_1GB);
        assert_eq!(PageSize::new(16 << 30).unwrap().mmap_flags(), libc::MAP_HUGE_16GB);
    }

    #[test]
    fn sysfs_names() {
        assert_eq!(PageSize::from_sysfs_name(b"hugepages-2048kB"), Some(PageSize::SIZE_2M));
        for name in [&b"hugepages-kB"[..], b"hugepages-3kB", b"hugepages-+4kB", b".", b"demote"] {
            assert_eq!(PageSize::from_sysfs_name(name), None);
        }
    }

    proptest! {
        #[test]
        fn all_spellings_come_back(shift in 12u32..63) {
            let size = PageSize::new(1 << shift).unwrap();
            let name = size.sysfs_name().to_string();
            prop_assert_eq!(PageSize::from_sysfs_name(name.as_bytes()), Some(size));
            if shift < 50 {
                prop_assert_eq!(size.to_string().parse(), Ok(size));
                prop_assert_eq!(format!("{size:#}").parse(), Ok(size));
            }
        }

        #[test]
        fn never_panics(text in ".{0,30}", name in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = text.parse::<PageSize>();
            let _ = PageSize::from_sysfs_name(&name);
        }

        #[test]
        fn never_panics_on_nearly_right_text(text in "[0-9]{0,21} ?[kKmMgGtTx]?[iI]?[bB]?") {
            if let Ok(size) = text.parse::<PageSize>() {
                prop_assert!(size.bytes().is_power_of_two());
            }
        }
    }
}
