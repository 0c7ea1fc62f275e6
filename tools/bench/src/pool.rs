//! The pool of huge pages: its state, and a reservation that is given back.

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Everything of this project that changes the pool, or measures with it, holds this lock.
const LOCK: &str = "/run/lock/elfremap-pool.lock";

/// The pool of the default huge page size. Numbers of pages, but for `page_kb`.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct Pool {
    pub page_kb: u64,
    pub total: u64,
    pub free: u64,
    pub reserved: u64,
    pub surplus: u64,
}

impl Pool {
    /// Reads /proc/meminfo; all zero on a kernel without hugetlb.
    pub(crate) fn read() -> Result<Self> {
        let text = fs::read_to_string("/proc/meminfo").context("cannot read /proc/meminfo")?;
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
                .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
                .unwrap_or(0)
        };
        Ok(Self {
            page_kb: field("Hugepagesize"),
            total: field("HugePages_Total"),
            free: field("HugePages_Free"),
            reserved: field("HugePages_Rsvd"),
            surplus: field("HugePages_Surp"),
        })
    }

    /// Pages that a new mapping can have.
    pub(crate) const fn available(self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    fn file(self) -> PathBuf {
        format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", self.page_kb).into()
    }
}

/// The machine-wide lock; released when dropped.
pub(crate) fn lock() -> Result<Flock<File>> {
    // Opened for reading where it exists: flock(2) asks for no more, and the file may
    // belong to another user.
    let file = File::open(LOCK)
        .or_else(|_| File::options().read(true).append(true).create(true).open(LOCK));
    let file = file.with_context(|| format!("cannot open {LOCK}"))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| anyhow::Error::from(errno))
        .with_context(|| format!("cannot lock {LOCK}"))
}

/// Huge pages added to the pool, under the lock; both are given back when dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    pool: Pool,
    waited: Duration,
    _lock: Flock<File>,
}

impl Reservation {
    /// Waits for the lock and makes `pages` pages available.
    ///
    /// # Errors
    /// When the pool cannot be changed (not root), or when the kernel finds too few
    /// pages; the pool is then as it was.
    pub(crate) fn take(pages: u64) -> Result<Self> {
        let start = Instant::now();
        let lock = lock()?;
        let waited = start.elapsed();
        let pool = Pool::read()?;
        // From here on, dropping it puts the old number back.
        let reservation = Self { pool, waited, _lock: lock };
        let missing = pages.saturating_sub(pool.available());
        if missing > 0 {
            let wanted = pool.total - pool.surplus + missing;
            fs::write(pool.file(), wanted.to_string())
                .with_context(|| format!("cannot write {wanted} to {}", pool.file().display()))?;
            let now = Pool::read()?;
            if now.available() < pages {
                bail!("the kernel found only {} of {pages} huge pages", now.available());
            }
        }
        Ok(reservation)
    }

    /// How long others had the lock.
    pub(crate) const fn waited(&self) -> Duration {
        self.waited
    }

    /// The pool as it was before.
    pub(crate) const fn before(&self) -> Pool {
        self.pool
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let persistent = (self.pool.total - self.pool.surplus).to_string();
        let changed =
            fs::read_to_string(self.pool.file()).is_ok_and(|now| now.trim() != persistent);
        if changed && let Err(error) = fs::write(self.pool.file(), &persistent) {
            eprintln!("elfremap-bench: cannot give the huge pages back: {error}");
            eprintln!("hint: echo {persistent} > {}", self.pool.file().display());
        }
    }
}
