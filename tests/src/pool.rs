//! The huge page pool and the other settings of the whole machine.
//!
//! The pool is one global counter: whoever changes it, or measures what is free in
//! it, holds the lock on [`LOCK`] for that time.

use crate::outcome::Skip;
use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{Flock, FlockArg};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The lock file of all tests and scripts of the project.
pub const LOCK: &str = "/run/lock/elfremap-pool.lock";

const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const ASLR: &str = "/proc/sys/kernel/randomize_va_space";
const THP: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// The counters of the 2 MiB pool, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counters {
    /// `HugePages_Total`, surplus pages included.
    pub total: u64,
    /// `HugePages_Free`.
    pub free: u64,
    /// `HugePages_Rsvd`.
    pub reserved: u64,
    /// `HugePages_Surp`.
    pub surplus: u64,
}

impl Counters {
    /// The counters now.
    ///
    /// # Errors
    /// A skip when the kernel has no 2 MiB huge pages.
    pub fn read() -> Result<Self> {
        if !Path::new(POOL).exists() {
            return Err(Skip::because(format!("needs 2 MiB huge pages (no {POOL})")));
        }
        let number = |name: &str| read_number(&Path::new(POOL).join(name));
        Ok(Self {
            total: number("nr_hugepages")?,
            free: number("free_hugepages")?,
            reserved: number("resv_hugepages")?,
            surplus: number("surplus_hugepages")?,
        })
    }

    /// Whether no page is in use or spoken for.
    #[must_use]
    pub const fn is_idle(self) -> bool {
        self.free == self.total && self.reserved == 0 && self.surplus == 0
    }

    /// Pages in use.
    #[must_use]
    pub const fn used(self) -> u64 {
        self.total - self.free
    }
}

/// The machine's settings, changed under the lock. Everything goes back to what it
/// was by [`Host::finish`], or when dropped.
#[derive(Debug)]
pub struct Host {
    undo: Vec<(PathBuf, String)>,
    _lock: Flock<File>,
}

/// Whether everybody may make threads wait by a userfaultfd.
const USERFAULTFD: &str = "/proc/sys/vm/unprivileged_userfaultfd";

impl Host {
    /// Waits for the lock and for an idle pool.
    ///
    /// # Errors
    /// A skip when the user is not root, or when something outside of the tests
    /// uses the pool.
    pub fn lock() -> Result<Self> {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root, to set the size of the huge page pool"));
        }
        Counters::read()?;
        let file = File::options()
            .create(true)
            .append(true)
            .open(LOCK)
            .with_context(|| format!("cannot open {LOCK}"))?;
        let lock = Flock::lock(file, FlockArg::LockExclusive)
            .map_err(|(_, errno)| errno)
            .with_context(|| format!("cannot lock {LOCK}"))?;
        let counters = wait_until_idle(Duration::from_secs(10))?;
        if !counters.is_idle() {
            return Err(Skip::because(format!("needs an idle huge page pool, found {counters:?}")));
        }
        let mut host = Self { undo: Vec::new(), _lock: lock };
        // Servers run as other users too, and have threads: without this the library keeps
        // their data off the pool.
        host.unprivileged_userfaultfd(true)?;
        Ok(host)
    }

    /// Sets `vm.unprivileged_userfaultfd` where the kernel has it: whether everybody may make
    /// threads wait by a userfaultfd, also in the kernel. Under the lock everybody may, at first.
    ///
    /// # Errors
    /// When the file cannot be written, or reads back another value.
    pub fn unprivileged_userfaultfd(&mut self, may: bool) -> Result<()> {
        let file = Path::new(USERFAULTFD);
        if !file.exists() {
            return Ok(());
        }
        self.set(file, if may { "1" } else { "0" }, str::to_owned)
    }

    /// Sets the number of pages in the pool, exactly.
    ///
    /// # Errors
    /// A skip when the machine does not have that much memory in whole blocks.
    pub fn pages(&mut self, pages: u64) -> Result<()> {
        let path = Path::new(POOL).join("nr_hugepages");
        self.remember(&path, |text| text.to_owned())?;
        for attempt in 0..5 {
            fs::write(&path, pages.to_string())?;
            if read_number(&path)? == pages {
                let counters = Counters::read()?;
                ensure!(counters.is_idle(), "pool of {pages} pages is not idle: {counters:?}");
                return Ok(());
            }
            // Memory is fragmented: free what can be freed, and compact.
            for (file, value) in [("drop_caches", "1"), ("compact_memory", "1")] {
                fs::write(Path::new("/proc/sys/vm").join(file), value)?;
            }
            sleep(Duration::from_millis(50 << attempt));
        }
        Err(Skip::because(format!(
            "needs {pages} huge pages, the kernel grants {}",
            read_number(&path)?
        )))
    }

    /// Sets how many pages the kernel may add to the pool when asked (surplus pages).
    ///
    /// # Errors
    /// When the file cannot be written, or reads back another value.
    pub fn overcommit(&mut self, pages: u64) -> Result<()> {
        self.set(
            &Path::new(POOL).join("nr_overcommit_hugepages"),
            &pages.to_string(),
            str::to_owned,
        )
    }

    /// Sets `kernel.randomize_va_space`: 0 off, 1 without the heap, 2 all.
    ///
    /// # Errors
    /// When the file cannot be written, or reads back another value.
    pub fn aslr(&mut self, level: u8) -> Result<()> {
        self.set(Path::new(ASLR), &level.to_string(), str::to_owned)
    }

    /// Sets the mode of transparent huge pages: `always`, `madvise` or `never`.
    ///
    /// # Errors
    /// A skip when the kernel has no transparent huge pages.
    pub fn thp(&mut self, mode: &str) -> Result<()> {
        if !Path::new(THP).exists() {
            return Err(Skip::because("needs transparent huge pages"));
        }
        self.set(Path::new(THP), mode, chosen)
    }

    /// Calls `body` while the pool's size goes up and down between none and `most` pages,
    /// every few milliseconds, whatever is in use: as when an administrator resizes it, or
    /// other programs drain and refill it. Afterwards the pool has `most` pages.
    ///
    /// # Errors
    /// When the pool's size was changed less than three times, or it cannot be brought back.
    pub fn unsteady<T>(&mut self, most: u64, body: impl FnOnce() -> T) -> Result<T> {
        self.pages(most)?;
        let path = Path::new(POOL).join("nr_hugepages");
        let ended = AtomicBool::new(false);
        let (result, changes) = std::thread::scope(|scope| {
            let mover = scope.spawn(|| {
                let mut changes = 0u64;
                while !ended.load(Ordering::Relaxed) {
                    // Empty every third time; else a number that wanders.
                    let pages =
                        if changes.is_multiple_of(3) { 0 } else { changes * 7919 % (most + 1) };
                    fs::write(&path, pages.to_string())?;
                    changes += 1;
                    sleep(Duration::from_millis(1 + changes * 31 % 12));
                }
                Ok::<u64, std::io::Error>(changes)
            });
            // Also when the body panics, or the mover would not end.
            let ends = Ends(&ended);
            let result = body();
            drop(ends);
            (result, mover.join())
        });
        let changes = changes.map_err(|_| anyhow::anyhow!("the pool's mover panicked"))??;
        ensure!(changes >= 3, "the pool's size was changed {changes} times only");
        self.expect_idle()?;
        self.pages(most)?;
        Ok(result)
    }

    /// Sets `kernel.core_pattern`, the name of core files.
    ///
    /// # Errors
    /// When the file cannot be written, or reads back another value.
    pub fn core_pattern(&mut self, pattern: &str) -> Result<()> {
        self.set(Path::new("/proc/sys/kernel/core_pattern"), pattern, str::to_owned)
    }

    /// Waits up to two seconds for a pool of which nothing is in use, as it was
    /// before the programs ran, and says so if that does not come.
    ///
    /// # Errors
    /// When pages, reservations or surplus pages are left.
    pub fn expect_idle(&self) -> Result<()> {
        let counters = wait_until_idle(Duration::from_secs(2))?;
        ensure!(counters.is_idle(), "huge pages were not given back: {counters:?}");
        Ok(())
    }

    /// Puts everything back and checks that the pool is as idle as it was found.
    ///
    /// # Errors
    /// When pages are still in use, or a setting cannot be put back.
    pub fn finish(mut self) -> Result<()> {
        let idle = self.expect_idle();
        self.restore()?;
        idle?;
        self.expect_idle()
    }

    fn set(&mut self, path: &Path, value: &str, normal: impl Fn(&str) -> String) -> Result<()> {
        self.remember(path, &normal)?;
        fs::write(path, value)
            .with_context(|| format!("cannot write {value} to {}", path.display()))?;
        let got = normal(&read_text(path)?);
        if got != value {
            bail!("{} reads {got} after writing {value}", path.display());
        }
        Ok(())
    }

    fn remember(&mut self, path: &Path, normal: impl Fn(&str) -> String) -> Result<()> {
        if !self.undo.iter().any(|(known, _)| known == path) {
            self.undo.push((path.to_owned(), normal(&read_text(path)?)));
        }
        Ok(())
    }

    fn restore(&mut self) -> Result<()> {
        let mut result = Ok(());
        for (path, value) in self.undo.drain(..).rev() {
            if let Err(error) = fs::write(&path, &value) {
                result = Err(error)
                    .with_context(|| format!("cannot put {} back to {value}", path.display()));
            }
        }
        result
    }
}

/// Sets the flag when dropped.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            eprintln!("{error:#}");
        }
    }
}

/// Takes all pages away that are neither in use nor reserved. Whoever calls it has a
/// [`Host`] that puts them back.
///
/// # Errors
/// When the pool's size cannot be written.
pub fn drain() -> Result<()> {
    fs::write(Path::new(POOL).join("nr_hugepages"), "0").context("cannot drain the pool")
}

/// A process that was killed or waited for has given its pages back by then, but
/// its children may still be on their way out.
fn wait_until_idle(limit: Duration) -> Result<Counters> {
    let end = Instant::now() + limit;
    loop {
        let counters = Counters::read()?;
        if counters.is_idle() || Instant::now() >= end {
            return Ok(counters);
        }
        sleep(Duration::from_millis(5));
    }
}

/// The word in brackets of a line such as `always [madvise] never`.
fn chosen(text: &str) -> String {
    text.split(['[', ']']).nth(1).unwrap_or(text).to_owned()
}

fn read_text(path: &Path) -> Result<String> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().to_owned())
}

fn read_number(path: &Path) -> Result<u64> {
    let text = read_text(path)?;
    text.parse().with_context(|| format!("{} is not a number: {text}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::check;

    #[test]
    fn the_word_in_brackets() {
        assert_eq!(chosen("always [madvise] never"), "madvise");
        assert_eq!(chosen("2"), "2");
    }

    #[test]
    fn settings_change_and_go_back() {
        check((|| {
            let mut host = Host::lock()?;
            let before = (Counters::read()?, read_text(Path::new(THP))?);
            host.pages(3)?;
            assert_eq!(Counters::read()?, Counters { total: 3, free: 3, reserved: 0, surplus: 0 });
            host.thp("never")?;
            host.aslr(1)?;
            assert_eq!(read_text(Path::new(ASLR))?, "1");
            host.restore()?;
            assert_eq!((Counters::read()?, read_text(Path::new(THP))?), before);
            host.finish()
        })());
    }
}
