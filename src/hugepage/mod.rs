//! Huge page sizes, pools and transparent huge pages, as sysfs and `/proc` show them.
//!
//! The names and meanings are those of the kernel's admin guide,
//! `Documentation/admin-guide/mm/hugetlbpage.rst` and `transhuge.rst`. Parsers take
//! bytes and return values; the functions in [`pool`] and [`thp`] read through [`Files`],
//! which the tools implement over the standard library (below a root of the user's
//! choice) and the preload over raw system calls.

pub mod files;
pub mod meminfo;
pub mod nodes;
pub mod pool;
pub mod size;
pub mod thp;

pub use files::{Files, ReadError};
pub use nodes::NodeSet;
pub use pool::{NodePool, Pool};
pub use size::PageSize;
pub use thp::{Thp, ThpMode};

/// A number as the kernel prints it: decimal digits, a line end after them or not.
#[must_use]
pub fn number(text: &[u8]) -> Option<u64> {
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |sum, &digit| {
        let digit = char::from(digit).to_digit(10)?;
        sum.checked_mul(10)?.checked_add(u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    use super::number;
    use proptest::prelude::*;

    #[test]
    fn numbers() {
        assert_eq!(number(b"0\n"), Some(0));
        assert_eq!(number(b"18446744073709551615"), Some(u64::MAX));
        for text in [&b""[..], b"\n", b"18446744073709551616", b"1 ", b"-1", b"+1", b"1\n\n"] {
            assert_eq!(number(text), None);
        }
    }

    proptest! {
        #[test]
        fn as_the_standard_library_reads_them(value: u64) {
            prop_assert_eq!(number(format!("{value}\n").as_bytes()), Some(value));
        }

        #[test]
        fn never_panics(text in proptest::collection::vec(any::<u8>(), 0..30)) {
            let _ = number(&text);
        }
    }
}
