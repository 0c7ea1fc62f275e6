//! Programs of this machine for a guest of the same architecture.

use crate::archive::Archive;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;
use std::process::Command;

/// MariaDB's server, as Debian installs it.
pub(crate) const SERVER: &str = "/usr/sbin/mariadbd";

/// Adds a program at its own path, and the libraries it needs.
pub(crate) fn add_program(archive: &mut Archive, program: &Path) -> Result<()> {
    let path = program.to_str().context("odd path")?;
    archive.parents(path);
    archive.file(path, program)?;
    let output = Command::new("ldd").arg(program).output().context("cannot run ldd")?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        // `	libz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x...)`
        let Some((name, rest)) = line.split_once(" => ") else { continue };
        let library = rest.split(" (").next().unwrap_or_default();
        archive.file(&format!("lib/{}", name.trim()), Path::new(library))?;
    }
    Ok(())
}

/// Adds what mariadbd reads when it starts, where it is installed.
pub(crate) fn add_server_files(archive: &mut Archive) -> Result<()> {
    archive.parents("etc/passwd");
    archive.bytes("etc/passwd", b"root:x:0:0::/:/nothing\n");
    let top = Path::new("/usr/share/mysql");
    for part in ["english", "charsets"] {
        let Ok(list) = fs::read_dir(top.join(part)) else { continue };
        for entry in list {
            let path = entry?.path();
            let name = path.to_str().context("odd path")?;
            archive.parents(name);
            archive.file(name, &path)?;
        }
    }
    Ok(())
}

/// Writes a root file system with more in it: the kernel unpacks archives that follow each
/// other.
pub(crate) fn extend_root(root: &Path, archive: Archive, to: &Path) -> Result<()> {
    let mut bytes = fs::read(root)?;
    bytes.extend(archive.finish());
    fs::write(to, bytes).with_context(|| format!("cannot write {}", to.display()))
}
