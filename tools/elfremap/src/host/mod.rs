//! What the machine, and the caller's place in it, has for a program: pools, limits,
//! transparent huge pages, kernel facilities and traps.

mod cgroup;
mod probe;

use std::io;

use elfremap::hugepage::{self, NodeSet, PageSize, Pool, ReadError, Thp, meminfo, pool, thp};

use crate::system::System;

pub use cgroup::Limit;
pub use probe::{Facility, Probes};

/// What was found. Parts that cannot be read are empty: they stop no verdict.
#[derive(Clone, Debug)]
pub struct Host {
    /// The pools, ascending by page size.
    pub pools: Vec<Pool>,
    /// The kernel's default huge page size.
    pub default_size: Option<PageSize>,
    /// Transparent huge pages.
    pub thp: Option<Thp>,
    /// NUMA nodes that this process may take memory from; `None` when unknown.
    pub nodes: Option<NodeSet>,
    /// Limits of the cgroups around this process, for all page sizes.
    pub limits: Vec<Limit>,
    is_running_machine: bool,
    /// Known traps of the processor, in words.
    pub traps: Vec<String>,
    /// Memory that could still be had, in bytes (`MemAvailable`).
    pub memory_available: Option<u64>,
}

impl Host {
    /// Looks at `system`.
    ///
    /// # Errors
    /// The pools cannot be read.
    pub fn read(system: &System) -> Result<Self, ReadError<io::Error>> {
        let mut pools = Vec::new();
        for size in pool::sizes(system)? {
            pools.extend(pool::read(system, size)?);
        }
        let limits = pools.iter().flat_map(|pool| cgroup::limits(system, pool.size)).collect();
        let content = |path| system.content(path).ok().flatten().unwrap_or_default();
        Ok(Self {
            pools,
            default_size: pool::default_size(system)?,
            thp: thp::read(system)?,
            nodes: nodes_allowed(&content("/proc/self/status")),
            limits,
            is_running_machine: system.is_running_machine(),
            traps: traps(&content(MULTIHIT), &content(NX_HUGE_PAGES), &content("/proc/cpuinfo")),
            memory_available: meminfo::bytes(&content("/proc/meminfo"), "MemAvailable"),
        })
    }

    /// Kernel facilities, tried for pages of this size; `None` for another machine's
    /// files.
    #[must_use]
    pub fn probe(&self, size: PageSize) -> Option<Probes> {
        self.is_running_machine.then(|| Probes::run(size))
    }

    /// Whether programs can have huge pages of this size.
    #[must_use]
    pub fn offers(&self, size: PageSize) -> bool {
        self.pool(size).is_some() || self.thp.is_some_and(|thp| thp.size == Some(size))
    }

    /// The pool of one size.
    #[must_use]
    pub fn pool(&self, size: PageSize) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.size == size)
    }

    /// Pages of the pool that a program started now could get: free and promised to
    /// nobody on the allowed nodes, what the kernel may add (surplus), and no more
    /// than the cgroups allow.
    #[must_use]
    pub fn available(&self, size: PageSize) -> u64 {
        let Some(pool) = self.pool(size) else { return 0 };
        let free = match &self.nodes {
            Some(nodes) => pool.available_on(nodes),
            None => pool.available(),
        };
        free.saturating_add(pool.may_grow()).min(self.limit(size))
    }

    /// Pages of this size that the cgroups leave.
    #[must_use]
    pub fn limit(&self, size: PageSize) -> u64 {
        let limits = self.limits.iter().filter(|limit| limit.size == size);
        limits.map(|limit| limit.room() / size.bytes()).min().unwrap_or(u64::MAX)
    }
}

const MULTIHIT: &str = "/sys/devices/system/cpu/vulnerabilities/itlb_multihit";
const NX_HUGE_PAGES: &str = "/sys/module/kvm/parameters/nx_huge_pages";

/// `Mems_allowed_list` of `/proc/<pid>/status`.
fn nodes_allowed(status: &[u8]) -> Option<NodeSet> {
    let mut lines = status.split(|&b| b == b'\n');
    NodeSet::parse(lines.find_map(|line| line.strip_prefix(b"Mems_allowed_list:"))?.trim_ascii())
}

/// KVM splits executable huge pages of its guests on processors with the "iTLB
/// multihit" fault (Documentation/admin-guide/hw-vuln/multihit.rst). The host's own
/// programs are not touched by it.
fn traps(multihit: &[u8], nx_huge_pages: &[u8], cpuinfo: &[u8]) -> Vec<String> {
    let affected = !multihit.is_empty() && !multihit.starts_with(b"Not affected");
    let mut traps = Vec::new();
    if affected && matches!(nx_huge_pages.trim_ascii(), b"Y" | b"1" | b"auto" | b"force") {
        traps.push(
            "KVM here splits the executable huge pages of its guests (nx_huge_pages): \
             inside them text gains nothing"
                .into(),
        );
    }
    let guest = cpuinfo.split(|&b| b == b'\n').any(|line| {
        line.starts_with(b"flags") && line.split(|&b| b == b' ').any(|flag| flag == b"hypervisor")
    });
    if affected && guest {
        traps.push(
            "a virtual machine on a processor with the iTLB multihit fault: its host may split \
             executable huge pages, which cannot be seen from here"
                .into(),
        );
    }
    traps
}

/// The huge page size to plan for: the one asked for, else 2 MiB where there is a
/// pool of it or transparent huge pages have it, else the kernel's default.
#[must_use]
pub fn block_size(system: &System, asked: Option<u64>) -> PageSize {
    if let Some(size) = asked.and_then(PageSize::new) {
        return size;
    }
    let sizes = hugepage::pool::sizes(system).unwrap_or_default();
    if sizes.contains(&PageSize::SIZE_2M) {
        return PageSize::SIZE_2M;
    }
    let default = pool::default_size(system).ok().flatten();
    let thp = thp::read(system).ok().flatten().and_then(|thp| thp.size);
    default.or(thp).unwrap_or(PageSize::SIZE_2M)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traps_of_processors() {
        let guest = b"flags\t\t: fpu hypervisor lm\n";
        assert!(traps(b"Not affected\n", b"Y\n", guest).is_empty());
        assert!(traps(b"", b"", guest).is_empty());
        assert_eq!(traps(b"KVM: Mitigation: Split huge pages\n", b"Y\n", b"flags: lm\n").len(), 1);
        assert_eq!(traps(b"Processor vulnerable\n", b"", guest).len(), 1);
    }

    #[test]
    fn nodes() {
        let nodes = nodes_allowed(b"Name:\tx\nMems_allowed_list:\t0,2-3\n").unwrap();
        assert!(nodes.contains(2) && !nodes.contains(1));
        assert!(nodes_allowed(b"Name:\tx\n").is_none());
    }
}
