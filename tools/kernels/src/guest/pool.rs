//! The huge page pools, through their files.

use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use std::fs;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A pool's counters, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Counters {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) reserved: u64,
    pub(crate) surplus: u64,
}

fn file(size: PageSize, node: Option<u32>, name: &str) -> PathBuf {
    let top = match node {
        Some(node) => format!("/sys/devices/system/node/node{node}/hugepages"),
        None => "/sys/kernel/mm/hugepages".to_owned(),
    };
    PathBuf::from(top).join(size.sysfs_name().to_string()).join(name)
}

fn number(size: PageSize, node: Option<u32>, name: &str) -> Result<u64> {
    let path = file(size, node, name);
    let text = fs::read_to_string(&path);
    let text = text.with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.trim().parse()?)
}

impl Counters {
    pub(crate) fn read(size: PageSize) -> Result<Self> {
        Ok(Self {
            total: number(size, None, "nr_hugepages")?,
            free: number(size, None, "free_hugepages")?,
            reserved: number(size, None, "resv_hugepages")?,
            surplus: number(size, None, "surplus_hugepages")?,
        })
    }

    pub(crate) const fn used(self) -> u64 {
        self.total - self.free
    }
}

/// Pages of a node's part of the pool.
pub(crate) fn on_node(size: PageSize, node: u32) -> Result<u64> {
    number(size, Some(node), "nr_hugepages")
}

fn write(size: PageSize, node: Option<u32>, pages: u64) -> Result<()> {
    let path = file(size, node, "nr_hugepages");
    // Memory may be in use by caches: the kernel makes room when asked again.
    for _ in 0..5 {
        fs::write(&path, pages.to_string())?;
        if number(size, node, "nr_hugepages")? == pages {
            return Ok(());
        }
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        fs::write("/proc/sys/vm/compact_memory", "1")?;
    }
    let got = number(size, node, "nr_hugepages")?;
    ensure!(got == pages, "{pages} pages of {size} asked, {got} had (node {node:?})");
    Ok(())
}

/// Surplus pages that the kernel may add.
pub(crate) fn overcommit(size: PageSize) -> Result<u64> {
    number(size, None, "nr_overcommit_hugepages")
}

pub(crate) fn set_overcommit(size: PageSize, pages: u64) -> Result<()> {
    Ok(fs::write(file(size, None, "nr_overcommit_hugepages"), pages.to_string())?)
}

/// Sets the whole machine's pool.
pub(crate) fn set(size: PageSize, pages: u64) -> Result<()> {
    write(size, None, pages)
}

/// Sets the parts of nodes 0 and 1.
pub(crate) fn set_nodes(size: PageSize, pages: [u64; 2]) -> Result<()> {
    write(size, Some(0), 0)?;
    write(size, Some(1), 0)?;
    write(size, Some(0), pages[0])?;
    write(size, Some(1), pages[1])
}

/// Waits up to two seconds for a pool of which nothing is in use or spoken for.
pub(crate) fn expect_idle(size: PageSize) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(2);
    loop {
        let now = Counters::read(size)?;
        if now.free == now.total && now.reserved == 0 && now.surplus == 0 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "huge pages were not given back: {now:?}");
        sleep(Duration::from_millis(20));
    }
}
