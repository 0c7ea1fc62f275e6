//! The pools of hugetlb pages, global and per NUMA node.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::files::{Files, ReadError, value};
use super::nodes::NodeSet;
use super::size::PageSize;
use super::{meminfo, number};

const POOLS: &str = "/sys/kernel/mm/hugepages";
const NODES: &str = "/sys/devices/system/node";

/// One size's pool. All counts are in pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// The size of its pages.
    pub size: PageSize,
    /// `nr_hugepages` when read: all pages, the surplus ones among them.
    pub total: u64,
    /// `free_hugepages`: pages that hold nothing, promised ones among them.
    pub free: u64,
    /// `resv_hugepages`: free pages promised to mappings that have not touched them yet.
    /// Some kernels print a number just below 2^64 for a moment.
    pub reserved: u64,
    /// `surplus_hugepages`: pages beyond the persistent pool; each goes back to the
    /// system when it is freed.
    pub surplus: u64,
    /// `nr_overcommit_hugepages`: how many surplus pages there may be; 0 where the kernel
    /// does not offer them for the size.
    pub overcommit: u64,
    /// The nodes' parts, in ascending order of node; empty without NUMA support.
    pub nodes: Vec<NodePool>,
}

/// One node's part of a pool. All counts are in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodePool {
    /// The node's number.
    pub node: u32,
    /// All pages on the node, the surplus ones among them.
    pub total: u64,
    /// Pages that hold nothing. Promises are counted for the whole machine only, so
    /// some of these may be promised.
    pub free: u64,
    /// Surplus pages on the node.
    pub surplus: u64,
}

impl Pool {
    /// Free pages that are promised to nobody: what a new mapping can count on.
    #[must_use]
    pub const fn available(&self) -> u64 {
        self.free.saturating_sub(self.promised())
    }

    /// The reservation counter, with a value below zero (a passing state) taken as zero.
    #[must_use]
    pub const fn promised(&self) -> u64 {
        if self.reserved > i64::MAX.cast_unsigned() { 0 } else { self.reserved }
    }

    /// Pages the kernel would still try to get from the free memory when the pool is
    /// empty (surplus pages). It may fail to.
    #[must_use]
    pub const fn may_grow(&self) -> u64 {
        self.overcommit.saturating_sub(self.surplus)
    }

    /// Pages that stay in the pool when they are freed: what was written to `nr_hugepages`.
    #[must_use]
    pub const fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }

    /// Free pages on the nodes of `allowed` that are promised to nobody, as far as can be
    /// known: promises are kept for the whole machine, so the smaller of both numbers counts.
    /// Without per-node pools the machine is one node, numbered 0.
    #[must_use]
    pub fn available_on(&self, allowed: &NodeSet) -> u64 {
        if self.nodes.is_empty() {
            return if allowed.contains(0) { self.available() } else { 0 };
        }
        let on_nodes = self.nodes.iter().filter(|n| allowed.contains(n.node));
        on_nodes.fold(0u64, |sum, n| sum.saturating_add(n.free)).min(self.available())
    }
}

impl NodePool {
    /// Pages that stay in the pool when they are freed: what was written to `nr_hugepages`.
    #[must_use]
    pub const fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }
}

/// The huge page sizes the machine offers for `MAP_HUGETLB`, ascending; none when the kernel
/// has no hugetlb support.
///
/// # Errors
/// The directory cannot be listed.
pub fn sizes<F: Files>(files: &F) -> Result<Vec<PageSize>, ReadError<F::Error>> {
    let mut sizes = Vec::new();
    list(files, POOLS, |name| sizes.extend(PageSize::from_sysfs_name(name)))?;
    sizes.sort_unstable();
    Ok(sizes)
}

/// The default huge page size; `None` when the kernel has no hugetlb support.
///
/// # Errors
/// `/proc/meminfo` cannot be read.
pub fn default_size<F: Files>(files: &F) -> Result<Option<PageSize>, ReadError<F::Error>> {
    let size =
        value(files, String::from("/proc/meminfo"), |text| Some(meminfo::default_size(text)));
    Ok(size?.flatten())
}

/// The pool of one size with its nodes; `None` when the machine does not offer the size.
///
/// # Errors
/// A file cannot be read, or its content is unexpected.
pub fn read<F: Files>(files: &F, size: PageSize) -> Result<Option<Pool>, ReadError<F::Error>> {
    let Some(mut pool) = read_global(files, size)? else { return Ok(None) };
    pool.nodes = read_nodes(files, size)?;
    Ok(Some(pool))
}

/// As [`read`], but without the nodes, which takes fewer files.
///
/// # Errors
/// A file cannot be read, or its content is unexpected.
pub fn read_global<F: Files>(
    files: &F,
    size: PageSize,
) -> Result<Option<Pool>, ReadError<F::Error>> {
    let counter = |name| value(files, global_path(size, name), number);
    let Some(total) = counter("nr_hugepages")? else { return Ok(None) };
    Ok(Some(Pool {
        size,
        total,
        free: counter("free_hugepages")?.unwrap_or(0),
        reserved: counter("resv_hugepages")?.unwrap_or(0),
        surplus: counter("surplus_hugepages")?.unwrap_or(0),
        overcommit: counter("nr_overcommit_hugepages")?.unwrap_or(0),
        nodes: Vec::new(),
    }))
}

/// The nodes' parts of the pool of one size. Nodes without memory have none.
///
/// # Errors
/// A file cannot be read, or its content is unexpected.
pub fn read_nodes<F: Files>(
    files: &F,
    size: PageSize,
) -> Result<Vec<NodePool>, ReadError<F::Error>> {
    let mut nodes = Vec::new();
    for node in online_nodes(files)?.iter() {
        let counter = |name| value(files, node_path(node, size, name), number);
        // A node may go offline between listing and reading: then it has no part.
        let Some(total) = counter("nr_hugepages")? else { continue };
        nodes.push(NodePool {
            node,
            total,
            free: counter("free_hugepages")?.unwrap_or(0),
            surplus: counter("surplus_hugepages")?.unwrap_or(0),
        });
    }
    Ok(nodes)
}

/// The machine's NUMA nodes, those without memory among them; none when the kernel has no
/// NUMA support.
///
/// # Errors
/// The directory cannot be listed.
pub fn online_nodes<F: Files>(files: &F) -> Result<NodeSet, ReadError<F::Error>> {
    let mut nodes = Vec::new();
    list(files, NODES, |name| nodes.extend(NodeSet::from_sysfs_name(name)))?;
    Ok(nodes.into_iter().collect())
}

/// The path of a file of the whole machine's pool, such as `nr_hugepages`.
#[must_use]
pub fn global_path(size: PageSize, file: &str) -> String {
    format!("{POOLS}/{}/{file}", size.sysfs_name())
}

/// The path of a file of a node's part of the pool.
#[must_use]
pub fn node_path(node: u32, size: PageSize, file: &str) -> String {
    format!("{NODES}/node{node}/hugepages/{}/{file}", size.sysfs_name())
}

/// The path of a node's own `meminfo`.
#[must_use]
pub fn node_meminfo_path(node: u32) -> String {
    format!("{NODES}/node{node}/meminfo")
}

fn list<F: Files>(
    files: &F,
    path: &str,
    mut each: impl FnMut(&[u8]),
) -> Result<bool, ReadError<F::Error>> {
    files
        .list(path, &mut each)
        .map_err(|error| ReadError::Access { path: String::from(path), error })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// Files in memory.
    #[derive(Debug)]
    pub(in crate::hugepage) struct Tree(BTreeMap<String, String>);

    impl Tree {
        pub(in crate::hugepage) fn new<T: Into<String>>(
            entries: impl IntoIterator<Item = (String, T)>,
        ) -> Self {
            Self(entries.into_iter().map(|(path, text)| (path, text.into())).collect())
        }
    }

    impl Files for Tree {
        type Error = core::convert::Infallible;

        fn read(&self, path: &str, out: &mut Vec<u8>) -> Result<bool, Self::Error> {
            let content = self.0.get(path);
            out.extend(content.into_iter().flat_map(|text| text.bytes()));
            Ok(content.is_some())
        }

        fn list(&self, path: &str, each: &mut dyn FnMut(&[u8])) -> Result<bool, Self::Error> {
            let below = self.0.keys().filter_map(|key| key.strip_prefix(path)?.strip_prefix('/'));
            let names: BTreeSet<_> = below.filter_map(|rest| rest.split('/').next()).collect();
            names.iter().for_each(|name| each(name.as_bytes()));
            Ok(!names.is_empty())
        }
    }

    fn pool_files(size: PageSize, node: Option<u32>, counts: [u64; 5]) -> Vec<(String, String)> {
        let names = [
            "nr_hugepages",
            "free_hugepages",
            "surplus_hugepages",
            "resv_hugepages",
            "nr_overcommit_hugepages",
        ];
        let take = if node.is_some() { 3 } else { 5 };
        let path = |name| match node {
            Some(node) => node_path(node, size, name),
            None => global_path(size, name),
        };
        names.iter().zip(counts).take(take).map(|(n, c)| (path(n), format!("{c}\n"))).collect()
    }

    fn sparse_machine() -> Tree {
        let mut entries = pool_files(PageSize::SIZE_2M, None, [30, 20, 2, 4, 8]);
        entries.extend(pool_files(PageSize::SIZE_1G, None, [0; 5]));
        entries.extend(pool_files(PageSize::SIZE_2M, Some(0), [10, 3, 0, 0, 0]));
        entries.extend(pool_files(PageSize::SIZE_2M, Some(5), [20, 17, 2, 0, 0]));
        entries.push((node_meminfo_path(2), String::from("Node 2 MemTotal: 0 kB\n")));
        entries.push((format!("{NODES}/possible"), String::from("0-7\n")));
        entries.push((String::from("/proc/meminfo"), String::from("Hugepagesize: 2048 kB\n")));
        Tree::new(entries)
    }

    #[test]
    fn sparse_nodes_and_one_without_memory() {
        let tree = sparse_machine();
        assert_eq!(sizes(&tree).unwrap(), [PageSize::SIZE_2M, PageSize::SIZE_1G]);
        assert_eq!(default_size(&tree).unwrap(), Some(PageSize::SIZE_2M));
        assert_eq!(online_nodes(&tree).unwrap().to_string(), "0,2,5");
        let pool = read(&tree, PageSize::SIZE_2M).unwrap().unwrap();
        assert_eq!((pool.total, pool.free, pool.reserved), (30, 20, 4));
        assert_eq!((pool.surplus, pool.overcommit, pool.persistent()), (2, 8, 28));
        assert_eq!((pool.available(), pool.may_grow()), (16, 6));
        assert_eq!(pool.nodes.iter().map(|n| n.node).collect::<Vec<_>>(), [0, 5]);
        assert_eq!(pool.nodes[1], NodePool { node: 5, total: 20, free: 17, surplus: 2 });
        assert_eq!(read(&tree, PageSize::SIZE_4K).unwrap(), None);
    }

    #[test]
    fn what_a_bound_program_can_count_on() {
        let pool = read(&sparse_machine(), PageSize::SIZE_2M).unwrap().unwrap();
        let on = |nodes: &str| pool.available_on(&nodes.parse().unwrap());
        assert_eq!((on("0"), on("2"), on("5"), on("0-7")), (3, 0, 16, 16));
        let without_numa = Pool { nodes: Vec::new(), ..pool.clone() };
        assert_eq!(without_numa.available_on(&"0".parse().unwrap()), 16);
        assert_eq!(without_numa.available_on(&"1".parse().unwrap()), 0);
    }

    #[test]
    fn a_reservation_count_below_zero_promises_nothing() {
        let tree =
            Tree::new(pool_files(PageSize::SIZE_2M, None, [8, 8, 0, 0u64.wrapping_sub(4), 0]));
        let pool = read(&tree, PageSize::SIZE_2M).unwrap().unwrap();
        assert_eq!((pool.promised(), pool.available()), (0, 8));
    }

    #[test]
    fn no_hugetlb_and_no_numa_support() {
        let nothing = Tree::new::<String>([]);
        assert_eq!(sizes(&nothing).unwrap(), []);
        assert_eq!(default_size(&nothing).unwrap(), None);
        assert!(online_nodes(&nothing).unwrap().is_empty());
        assert_eq!(read(&nothing, PageSize::SIZE_2M).unwrap(), None);
    }

    #[test]
    fn nonsense_in_a_counter_is_an_error() {
        let path = global_path(PageSize::SIZE_2M, "nr_hugepages");
        let tree = Tree::new([(path.clone(), "many\n")]);
        assert_eq!(read(&tree, PageSize::SIZE_2M), Err(ReadError::Content { path }));
    }

    proptest! {
        #[test]
        fn derived_counts_never_panic(counts: [u64; 5], node: [u64; 5], on in 0u32..3) {
            let mut entries = pool_files(PageSize::SIZE_2M, None, counts);
            entries.extend(pool_files(PageSize::SIZE_2M, Some(1), node));
            let pool = read(&Tree::new(entries), PageSize::SIZE_2M).unwrap().unwrap();
            prop_assert!(pool.available() <= pool.free);
            prop_assert!(pool.persistent() <= pool.total && pool.may_grow() <= pool.overcommit);
            prop_assert!(pool.available_on(&[on].into_iter().collect()) <= pool.available());
        }
    }
}
