//! The program that the tests of `attach` and `detach` move, and how they call the commands.

use crate::library::{cache_dir, source_dir, tool};
use crate::run::{Output, Run, Running};
use crate::{image, smaps};
use anyhow::{Context, Result, ensure};
use image::{Class, Image};
use smaps::{Backing, Merge, Protections, Snapshot};
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `attach/subject.c` by `driver` with further `flags`, unless that has been done.
///
/// # Errors
/// When the compiler fails.
pub fn subject(driver: &str, flags: &[&str]) -> Result<PathBuf> {
    build(&source_dir().join("attach/subject.c"), driver, flags)
}

/// Builds a program from one C file, unless that has been done.
///
/// # Errors
/// When the compiler fails.
pub fn build(source: &Path, driver: &str, flags: &[&str]) -> Result<PathBuf> {
    let text = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    let mut hasher = DefaultHasher::new();
    (text, driver, flags).hash(&mut hasher);
    let stem = source.file_stem().context("no name")?.to_string_lossy().into_owned();
    let directory = cache_dir("attach")?.join(format!("{:016x}", hasher.finish()));
    let program = directory.join(&stem);
    if program.is_file() {
        return Ok(program);
    }
    fs::create_dir_all(&directory)?;
    // It appears all at once: another test may want it too.
    let scratch = tempfile::tempdir_in(&directory)?;
    let fresh = scratch.path().join(&stem);
    let made = Command::new(driver)
        .args(["-O1", "-g", "-Wall", "-Wextra", "-pthread"])
        .arg(source)
        .args(flags)
        .arg("-o")
        .arg(&fresh)
        .env("LC_ALL", "C")
        .output()
        .with_context(|| format!("cannot run {driver}"))?;
    ensure!(made.status.success(), "{driver}: {}", String::from_utf8_lossy(&made.stderr));
    fs::rename(&fresh, &program)?;
    Ok(program)
}

/// Runs `elfremap` to its end.
///
/// # Errors
/// When it cannot be started or does not end in time.
pub fn elfremap(arguments: &[&str]) -> Result<Output> {
    Run::new(tool("elfremap")?).args(arguments).output()
}

/// The same for a command with a process's number in second place, which must succeed.
///
/// # Errors
/// When it does not end with status 0; with all that it said.
pub fn succeed(command: &str, pid: u32, options: &[&str]) -> Result<Output> {
    let pid = pid.to_string();
    let output = elfremap(&[&[command, &pid], options].concat())?;
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    ensure!(
        output.status.code() == Some(0),
        "elfremap {command} {options:?}: {}: {}",
        output.status,
        String::from_utf8_lossy(&said)
    );
    Ok(output)
}

/// A subject that runs, with what it looked like before anything was done to it.
#[derive(Debug)]
pub struct Subject {
    /// The process.
    pub running: Running,
    /// Its program.
    pub image: Image,
    /// It before.
    pub before: Snapshot,
    protections: Protections,
}

impl Subject {
    /// Starts `run`, a subject with its arguments.
    ///
    /// # Errors
    /// When it does not get ready.
    pub fn start(run: &Run) -> Result<Self> {
        let image = Image::read(run.program())?;
        let running = run.until_ready()?;
        let before = Snapshot::take(living(running.pid())?, &image)?;
        let protections = before.protections(&image);
        Ok(Self { running, image, before, protections })
    }

    /// Its number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }

    /// It now.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn now(&self) -> Result<Snapshot> {
        Snapshot::take(living(self.pid())?, &self.image)
    }

    /// Proves by smaps that every block of these classes that can be moved at the merge level
    /// `none` lies on `backing`, all others are as they were, and that no byte's rights have changed.
    /// Returns the number of bytes that are huge.
    ///
    /// # Errors
    /// With what is not as it should be.
    pub fn expect(&self, classes: &[Class], backing: Backing) -> Result<u64> {
        let now = self.now()?;
        let changed = self.protections.differences(&now.protections(&self.image), |_, _| false);
        ensure!(changed.is_empty(), "protections changed: {changed:?}");
        let mut huge = 0;
        for block in self.protections.blocks(&self.image, self.before.bias) {
            let moves = block.is_uniform(Merge::None) && !block.header && block.has(classes);
            let found = now.backing(block.range);
            if moves {
                ensure!(
                    now.is_all(block.range, backing),
                    "{} {:?}: {backing:?} expected, found {found:?}",
                    block.range,
                    block.classes
                );
                huge += block.range.len();
            } else {
                ensure!(
                    found.keys().all(|b| *b == Backing::Small),
                    "{} {:?} has moved: {found:?}",
                    block.range,
                    block.classes
                );
            }
        }
        Ok(huge)
    }

    /// Proves that everything is as it was before: rights, small pages, the mappings of the
    /// program's file with their offsets, and no thread or mapping of ours.
    ///
    /// # Errors
    /// With what is not.
    pub fn expect_untouched(&self) -> Result<()> {
        self.expect(&[], Backing::Small)?;
        let now = self.now()?;
        let files = |snapshot: &Snapshot| -> Vec<_> {
            // Neighbours with the same rights may have become one mapping, or two.
            let mut parts: Vec<(u64, u64, u64, u64)> = Vec::new();
            for vma in snapshot.vmas.iter().filter(|v| v.inode != 0) {
                let (start, end) = (vma.range.start(), vma.range.end());
                let base = start.wrapping_sub(vma.offset);
                match parts.last_mut() {
                    Some(last) if last.1 == start && (last.2, last.3) == (base, vma.inode) => {
                        last.1 = end;
                    }
                    _ => parts.push((start, end, base, vma.inode)),
                }
            }
            parts
        };
        let (then, now) = (files(&self.before), files(&now));
        ensure!(then == now, "files are mapped otherwise: {now:x?} instead of {then:x?}");
        self.expect_no_trace()
    }

    /// Proves that no thread of ours is left.
    ///
    /// # Errors
    /// When there is one.
    pub fn expect_no_trace(&self) -> Result<()> {
        for task in fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            let name = fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
            ensure!(name.trim() != "elfremap", "the helper is still there");
        }
        Ok(())
    }

    /// Ends it, and proves that all was well with it. Returns what it said.
    ///
    /// # Errors
    /// When one of its threads has found something wrong.
    pub fn finish(self) -> Result<String> {
        let output = self.running.finish()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(42), "ended with {}: {said}{error}", output.status);
        ensure!(said.lines().any(|line| line == "errors 0"), "{said}");
        Ok(said)
    }
}

/// The number of the process, or of another thread of it when the first one has ended: that
/// has no memory to look at.
fn living(pid: u32) -> Result<u32> {
    let is_alive = |id: u32| fs::read(format!("/proc/{id}/auxv")).is_ok_and(|a| !a.is_empty());
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
    let mut ids = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok());
    if is_alive(pid) {
        return Ok(pid);
    }
    ids.find(|&id| is_alive(id)).context("the process has ended")
}
