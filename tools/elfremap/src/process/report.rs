//! What the preload says of its work, read out of the process's memory.
//!
//! It exports the data symbol `elfremap_report`: the eight bytes `ELFREMAP`, the
//! length of a text as a little-endian number of four bytes, and the text, lines of
//! `key=value` in UTF-8.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{Mapped, Process};
use crate::elf::printable;

const MAGIC: &[u8; 8] = b"ELFREMAP";
const HEAD: u64 = 12;
/// More than this is not read of another process's text.
const MAX_TEXT: u64 = 64 << 10;

/// The preload in a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Path of the library.
    pub library: String,
    /// Its lines, in order; `None` when it has not written any (its constructor has
    /// not run, or the memory cannot be read).
    pub lines: Option<Vec<(String, String)>>,
}

impl Report {
    /// The value of the first line with this key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        let lines = self.lines.as_ref()?;
        lines.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// The values of all lines with this key.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        let lines = self.lines.iter().flatten();
        lines.filter(move |(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

/// The report of the preload among `objects`; `None` when it is not loaded.
#[must_use]
pub fn read(process: &Process, objects: &[Mapped]) -> Option<Report> {
    let (library, (address, size)) =
        objects.iter().find_map(|object| Some((&object.path, object.report?)))?;
    let text = File::open(process.path("mem")).ok().and_then(|memory| {
        let mut head = [0; 12];
        memory.read_exact_at(&mut head, address).ok()?;
        let length = u64::from(u32::from_le_bytes(*head.last_chunk()?));
        if !head.starts_with(MAGIC) || length > MAX_TEXT || length > size.checked_sub(HEAD)? {
            return None;
        }
        let mut text = vec![0; usize::try_from(length).ok()?];
        memory.read_exact_at(&mut text, address + HEAD).ok()?;
        Some(text)
    });
    let lines = text.filter(|text| !text.is_empty()).map(|text| parse(&text));
    Some(Report { library: library.clone(), lines })
}

fn parse(text: &[u8]) -> Vec<(String, String)> {
    let lines = text.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    lines
        .filter_map(|line| {
            let at = line.iter().position(|&b| b == b'=')?;
            Some((printable(&line[..at]), printable(&line[at + 1..])))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_key_and_value() {
        let lines = parse(b"outcome=moved\nreason=a=b\x1b[31m\nnonsense\n\nempty=\n");
        let report = Report { library: String::new(), lines: Some(lines) };
        assert_eq!(report.get("outcome"), Some("moved"));
        assert_eq!(report.get("reason"), Some("a=b\u{fffd}[31m"));
        assert_eq!(report.get("empty"), Some(""));
        assert_eq!(report.get("nonsense"), None);
        assert_eq!(report.all("outcome").count(), 1);
    }
}
