//! A guest's root file system: an archive in the format that the kernel unpacks at boot
//! (`Documentation/driver-api/early-userspace/buffer-format.rst`, "newc").

use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// An archive under construction.
#[derive(Default, Debug)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: BTreeSet<String>,
}

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

impl Archive {
    /// Adds a directory; its parents must be there.
    pub(crate) fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY, (0, 0), &[]);
    }

    /// Adds the content of `from` as an executable file.
    pub(crate) fn file(&mut self, path: &str, from: &Path) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        self.entry(path, FILE, (0, 0), &content);
        Ok(())
    }

    /// Adds bytes as a file.
    pub(crate) fn bytes(&mut self, path: &str, content: &[u8]) {
        self.entry(path, FILE, (0, 0), content);
    }

    /// Adds the directories above `path`, each at most once.
    pub(crate) fn parents(&mut self, path: &str) {
        let path = path.trim_start_matches('/');
        for (at, _) in path.match_indices('/') {
            if self.directories.insert(path[..at].to_owned()) {
                self.directory(&path[..at]);
            }
        }
    }

    /// Adds a character device.
    pub(crate) fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER_DEVICE, (major, minor), &[]);
    }

    /// The archive's bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        let path = path.trim_start_matches('/');
        self.entries += 1;
        let links = 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(path.len() + 1).unwrap_or(u32::MAX);
        // Inode, mode, user, group, links, time, size, device of the file, device,
        // size of the name, checksum.
        let fields =
            [self.entries, mode, 0, 0, links, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_header_name_and_content_padded_to_four_bytes() {
        let mut archive = Archive::default();
        archive.directory("/dev");
        archive.device("/dev/console", 5, 1);
        archive.parents("/usr/lib/x");
        archive.parents("/usr/lib/y");
        let bytes = archive.finish();
        assert!(bytes.len().is_multiple_of(4));
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.starts_with("070701000000010000"));
        assert_eq!(&text[54..62], "00000000", "no content");
        assert_eq!(&text[110..114], "dev\0");
        assert_eq!(text.matches("070701").count(), 5);
    }
}
