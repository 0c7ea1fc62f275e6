//! What the preload says in a run, in files of its own.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use anyhow::{anyhow, bail};

use crate::elf::printable;

/// Files that the preload writes its messages to.
pub(crate) struct Logs(PathBuf);

impl Logs {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let dir = std::env::temp_dir();
        for attempt in 0..100u32 {
            let path = dir.join(format!("elfremap-compare-{}-{attempt}", std::process::id()));
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(anyhow!(error).context(format!("create {}", path.display())));
                }
            }
        }
        bail!("create a directory in {}: all names are taken", dir.display())
    }

    pub(crate) fn variables(&self) -> [(&'static str, OsString); 2] {
        let file = self.0.join("%p").into_os_string();
        [("ELFREMAP_LOG", OsString::from("info")), ("ELFREMAP_LOG_FILE", file)]
    }

    /// The messages of all processes, those that say the same only once, those of programs that
    /// were moved first.
    pub(crate) fn lines(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        let mut lines: Vec<String> = Vec::new();
        for path in paths {
            for line in last_program(&fs::read(path).unwrap_or_default()) {
                if !lines.contains(&line) {
                    lines.push(line);
                }
            }
        }
        lines.sort_by_key(|line| line.contains(": left alone: "));
        lines
    }
}

/// The messages of the last program in one process's log: a shell may have been there before.
/// A line is `elfremap: LEVEL: PROGRAM: TEXT`.
fn last_program(log: &[u8]) -> Vec<String> {
    let lines = log.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    let mut lines: Vec<_> =
        lines.map(|line| printable(line.strip_prefix(b"elfremap: ").unwrap_or(line))).collect();
    let program = |line: &str| line.split(": ").nth(1).map(String::from);
    if let Some(last) = lines.last().and_then(|line| program(line)) {
        lines.retain(|line| program(line).as_ref() == Some(&last));
    }
    lines
}

impl Drop for Logs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shell_that_became_the_program_has_no_say() {
        let log =
            b"elfremap: info: /bin/dash: left alone: small\nelfremap: warning: /bin/a: short\n\
            elfremap: info: /bin/a: text 1.0 of 2.0 MB\n";
        assert_eq!(
            last_program(log),
            ["warning: /bin/a: short", "info: /bin/a: text 1.0 of 2.0 MB"]
        );
        assert_eq!(last_program(b"odd\x1b[0m\n"), ["odd\u{fffd}[0m"]);
        assert!(last_program(b"").is_empty());
    }
}
