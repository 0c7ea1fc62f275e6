//! Memory policies and numa_maps.

use anyhow::{Context, Result};
use elfremap::range::Range;
use std::collections::BTreeMap;
use std::io;

/// A memory policy of set_mempolicy(2) for one node.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemoryPolicy {
    Bind(u32),
    Preferred(u32),
}

impl MemoryPolicy {
    /// Gives the calling thread this policy.
    pub(crate) fn set(self) -> io::Result<()> {
        let (mode, node) = match self {
            Self::Preferred(node) => (libc::MPOL_PREFERRED, node),
            Self::Bind(node) => (libc::MPOL_BIND, node),
        };
        let mask = 1u64 << node;
        // SAFETY: the kernel reads the mask's 64 bits.
        let result =
            unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, &raw const mask, 65u64) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// Bytes of huge pages in `ranges` by node, as numa_maps(5) tells.
pub(crate) fn huge_bytes_by_node(pid: u32, ranges: &[Range]) -> Result<BTreeMap<u32, u64>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/numa_maps"))?;
    let mut sums = BTreeMap::new();
    for line in text.lines() {
        let start = line.split(' ').next().context("empty line")?;
        let start = u64::from_str_radix(start, 16)?;
        if !line.contains(" huge") || !ranges.iter().any(|range| range.contains(start)) {
            continue;
        }
        let value = |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name));
        let size: u64 = value("kernelpagesize_kB=").context("no page size")?.parse()?;
        for node in 0..8 {
            if let Some(pages) = value(&format!("N{node}=")) {
                *sums.entry(node).or_default() += pages.parse::<u64>()? * size * 1024;
            }
        }
    }
    Ok(sums)
}
