//! `/etc/ld.so.cache` in the format of glibc 2.2 and later.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::{FileSource, Source};

/// Real caches have some hundred kilobytes.
const MAX_CACHE: usize = 16 << 20;
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
/// `FLAG_ELF_LIBC6` with `FLAG_X8664_LIB64` or `FLAG_AARCH64_LIB64` of glibc's
/// ldconfig.h.
const FLAGS: u32 = if cfg!(target_arch = "aarch64") { 0x0a03 } else { 0x0303 };

/// The cache that ldconfig writes: names of shared objects and where they are.
#[derive(Clone, Default, Debug)]
pub struct LdCache {
    /// The paths of a name, in the cache's order: the loader takes the first that fits.
    paths: HashMap<String, Vec<PathBuf>>,
}

impl LdCache {
    /// Reads the cache file; empty when there is none (musl systems have none).
    #[must_use]
    pub fn open(path: &Path) -> Self {
        let Ok(source) = FileSource::open(path) else { return Self::default() };
        let bytes = source.take("ld.so.cache", 0, source.size(), MAX_CACHE);
        bytes.map_or_else(|_| Self::default(), |bytes| Self::parse(&bytes))
    }

    /// Takes the entries of this machine's 64-bit objects; damaged ones are left out.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut cache = Self::default();
        // A file of the older format may stand before; the newer part follows it
        // at an aligned offset.
        let Some(start) = bytes.windows(MAGIC.len()).position(|w| w == MAGIC) else { return cache };
        let bytes = &bytes[start..];
        let word = |at: usize| {
            let bytes = bytes.get(at..)?.first_chunk::<4>()?;
            Some(u32::from_le_bytes(*bytes))
        };
        let string = |at: u32| {
            let rest = bytes.get(usize::try_from(at).ok()?..)?;
            let end = rest.iter().take(4096).position(|&b| b == 0)?;
            std::str::from_utf8(&rest[..end]).ok()
        };
        let count = word(MAGIC.len()).and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        let room = bytes.len().saturating_sub(HEADER) / ENTRY;
        for at in (0..count.min(room)).map(|index| HEADER + index * ENTRY) {
            if word(at) != Some(FLAGS) {
                continue;
            }
            let name = word(at + 4).and_then(string);
            let path = word(at + 8).and_then(string);
            if let Some((name, path)) = name.zip(path) {
                cache.paths.entry(name.into()).or_default().push(path.into());
            }
        }
        cache
    }

    /// Where the object `name` may be, best first.
    pub fn paths(&self, name: &str) -> impl Iterator<Item = &Path> {
        self.paths.get(name).into_iter().flatten().map(PathBuf::as_path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_own_cache_knows_libc() {
        let cache = LdCache::open(Path::new("/etc/ld.so.cache"));
        let path = cache.paths("libc.so.6").next().expect("libc.so.6 in /etc/ld.so.cache");
        assert!(path.is_file(), "{}", path.display());
    }

    #[test]
    fn damaged_caches_give_fewer_entries_and_no_panic() {
        let good = std::fs::read("/etc/ld.so.cache").unwrap();
        let full = LdCache::parse(&good).paths.len();
        for length in (0..good.len()).step_by(97) {
            assert!(LdCache::parse(&good[..length]).paths.len() <= full);
        }
        let mut bad = good.clone();
        bad[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(LdCache::parse(&bad).paths.len() <= full);
        for byte in &mut bad[48..] {
            *byte ^= 0xff;
        }
        assert_eq!(LdCache::parse(&bad).paths.len(), 0);
    }
}
