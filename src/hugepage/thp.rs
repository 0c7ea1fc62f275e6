//! Transparent huge pages: `/sys/kernel/mm/transparent_hugepage`
//! (`Documentation/admin-guide/mm/transhuge.rst`).

use alloc::format;
use alloc::string::String;
use core::fmt;

use super::files::{Files, ReadError, value};
use super::size::PageSize;

const DIR: &str = "/sys/kernel/mm/transparent_hugepage";

/// When the kernel backs anonymous memory with transparent huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThpMode {
    /// Wherever it fits.
    Always,
    /// Where `madvise(MADV_HUGEPAGE)` asked for it.
    Madvise,
    /// Not at all (only `MADV_COLLAPSE` still makes them).
    Never,
}

impl fmt::Display for ThpMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Always => "always",
            Self::Madvise => "madvise",
            Self::Never => "never",
        })
    }
}

/// The machine's transparent huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thp {
    /// The mode in force for huge pages of [`Self::size`].
    pub mode: ThpMode,
    /// The size one entry of the page middle directory maps (`hpage_pmd_size`, Linux 4.10);
    /// `None` on older kernels.
    pub size: Option<PageSize>,
}

/// Reads mode and size; `None` when the kernel has no transparent huge pages.
///
/// Since Linux 6.8 each size has a mode of its own, which may be `inherit`: take the
/// common one.
///
/// # Errors
/// A file cannot be read, or its content is unexpected.
pub fn read<F: Files>(files: &F) -> Result<Option<Thp>, ReadError<F::Error>> {
    let Some(common) = value(files, format!("{DIR}/enabled"), mode)? else { return Ok(None) };
    let size =
        value(files, format!("{DIR}/hpage_pmd_size"), |text| PageSize::new(super::number(text)?))?;
    let own = match size {
        Some(size) => {
            let path = format!("{DIR}/{}/enabled", size.sysfs_name());
            value(files, path, |text| match selected(text)? {
                "inherit" => Some(None),
                _ => mode(text).map(Some),
            })?
        }
        None => None,
    };
    Ok(Some(Thp { mode: own.flatten().unwrap_or(common), size }))
}

/// The choice in brackets: `madvise` in `always [madvise] never`.
#[must_use]
pub fn selected(text: &[u8]) -> Option<&str> {
    let open = text.iter().position(|&b| b == b'[')? + 1;
    let length = text[open..].iter().position(|&b| b == b']')?;
    core::str::from_utf8(&text[open..open + length]).ok()
}

/// The mode in the text of an `enabled` file.
#[must_use]
pub fn mode(text: &[u8]) -> Option<ThpMode> {
    match selected(text)? {
        "always" => Some(ThpMode::Always),
        "madvise" => Some(ThpMode::Madvise),
        "never" => Some(ThpMode::Never),
        _ => None,
    }
}

/// The path of the common `enabled` file, for messages.
#[must_use]
pub fn enabled_path() -> String {
    format!("{DIR}/enabled")
}

#[cfg(test)]
mod tests {
    use super::super::pool::tests::Tree;
    use super::*;
    use proptest::prelude::*;

    fn thp(entries: &[(&str, &str)]) -> Option<Thp> {
        let entries = entries.iter().map(|(name, text)| (format!("{DIR}/{name}"), *text));
        read(&Tree::new(entries)).unwrap()
    }

    #[test]
    fn the_sizes_own_mode_wins() {
        let size = ("hpage_pmd_size", "2097152\n");
        let enabled = ("enabled", "always [madvise] never\n");
        assert_eq!(thp(&[]), None);
        assert_eq!(thp(&[enabled]), Some(Thp { mode: ThpMode::Madvise, size: None }));
        for (own, expected) in [
            ("always [inherit] madvise never\n", ThpMode::Madvise),
            ("always inherit madvise [never]\n", ThpMode::Never),
            ("[always] inherit madvise never\n", ThpMode::Always),
        ] {
            let found = thp(&[size, enabled, ("hugepages-2048kB/enabled", own)]).unwrap();
            assert_eq!(found, Thp { mode: expected, size: Some(PageSize::SIZE_2M) });
        }
    }

    #[test]
    fn nonsense_is_an_error() {
        let tree = Tree::new([(format!("{DIR}/enabled"), "always madvise never\n")]);
        assert_eq!(read(&tree), Err(ReadError::Content { path: enabled_path() }));
    }

    proptest! {
        #[test]
        fn never_panics(text in "[\\[\\]a-z ]{0,40}", bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = mode(text.as_bytes());
            let _ = mode(&bytes);
        }
    }
}
