//! NUMA: where the pages are taken, and what the nodes have when they run out.

use super::sys::{self, Machine};
use crate::hugepage::{NodeSet, PageSize, pool};
use crate::policy::Numa;

/// Modes of `uapi/linux/mempolicy.h`.
const MPOL_DEFAULT: usize = 0;
const MPOL_PREFERRED: usize = 1;
const MPOL_BIND: usize = 2;
const MPOL_INTERLEAVE: usize = 3;

/// A set of nodes as the kernel takes and gives it: one bit each.
pub(super) type Mask = [u64; WORDS];

const WORDS: usize = (Numa::MAX_NODE as usize + 1) / 64;

/// A memory policy for mbind(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Binding {
    pub(super) mode: usize,
    pub(super) mask: Mask,
}

impl Binding {
    /// No policy: what the thread's own policy says.
    pub(super) const NONE: Self = Self { mode: MPOL_DEFAULT, mask: [0; WORDS] };

    /// The policy for the staging area; `None` where none is asked for.
    pub(super) fn new(numa: Numa) -> Option<Self> {
        match numa {
            Numa::Inherit => None,
            // Without nodes: the node of the processor (mbind(2)).
            Numa::Local => Some(Self { mode: MPOL_PREFERRED, mask: Mask::default() }),
            Numa::Node(node) => Some(Self { mode: MPOL_BIND, mask: mask_of(node) }),
            Numa::Interleave => {
                let mask = sys::allowed_nodes().unwrap_or_default();
                Some(Self { mode: MPOL_INTERLEAVE, mask })
            }
        }
    }
}

fn mask_of(node: u32) -> Mask {
    let mut mask = Mask::default();
    let (word, bit) = (node as usize / 64, node % 64);
    if let Some(word) = mask.get_mut(word) {
        *word = 1 << bit;
    }
    mask
}

fn nodes_of(mask: &Mask) -> NodeSet {
    (0..=Numa::MAX_NODE)
        .filter(|node| {
            mask.get(*node as usize / 64).is_some_and(|word| word >> (node % 64) & 1 != 0)
        })
        .collect()
}

/// The nodes from which the pages had to come: the one asked for, else what the
/// thread's policy and cpuset allow. `None` when the kernel does not tell.
fn usable_nodes(numa: Numa) -> Option<NodeSet> {
    if let Numa::Node(node) = numa {
        return Some([node].into_iter().collect());
    }
    let allowed = nodes_of(&sys::allowed_nodes().ok()?);
    match sys::thread_policy() {
        Ok((MPOL_BIND, mask)) if numa == Numa::Inherit => {
            Some(allowed.intersection(&nodes_of(&mask)))
        }
        _ => Some(allowed),
    }
}

/// What a pool had to give when it was short, in pages.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Remaining {
    /// Free pages of the whole machine.
    pub free: u64,
    /// How many of these are promised to somebody.
    pub reserved: u64,
    /// The nodes that the pages had to come from and the free pages there, when these
    /// are not all nodes.
    pub nodes: Option<(NodeSet, u64)>,
}

/// What the pool of pages of `size` bytes has now; `None` when it cannot be read.
#[must_use]
pub fn remaining(size: u64, numa: Numa) -> Option<Remaining> {
    let size = PageSize::new(size)?;
    let pool = pool::read(&Machine, size).ok()??;
    let is_elsewhere = |usable: &NodeSet| pool.nodes.iter().any(|n| !usable.contains(n.node));
    let nodes = usable_nodes(numa).filter(is_elsewhere).map(|usable| {
        let there = pool.nodes.iter().filter(|n| usable.contains(n.node));
        let free = there.fold(0u64, |sum, n| sum.saturating_add(n.free));
        (usable, free)
    });
    Some(Remaining { free: pool.free, reserved: pool.reserved, nodes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks() {
        for node in [0, 1, 63, 64, Numa::MAX_NODE] {
            assert_eq!(nodes_of(&mask_of(node)), [node].into_iter().collect());
        }
        assert_eq!(mask_of(65)[1], 2);
        assert_eq!(Binding::new(Numa::Inherit), None);
    }

    #[test]
    fn this_thread_may_use_a_node_unless_the_kernel_has_none() {
        let allowed = sys::allowed_nodes().map(|mask| nodes_of(&mask));
        assert!(allowed.is_ok_and(|nodes| !nodes.is_empty()));
        assert_eq!(usable_nodes(Numa::Node(7)), Some([7].into_iter().collect()));
    }
}
