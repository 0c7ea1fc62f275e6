//! Growing and shrinking the pools of huge pages: [`survey`] reads, [`plan`] decides,
//! [`apply`] writes and reads back, [`text`] says how to make it last and how to hand it
//! to containers.
//!
//! The rules: only the chosen nodes' files are written, so that no other node changes
//! (the global counter would spread a change over all of them); pages are added to what
//! is there; what is given back was free and promised to nobody; the machine keeps
//! some memory free.

pub mod apply;
pub mod plan;
pub(crate) mod report;
pub mod survey;
pub mod text;

use elfremap::hugepage::{PageSize, pool};

/// Where pages are counted and set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Place {
    /// The whole machine: where the kernel has no NUMA support.
    Machine,
    /// One node.
    Node(u32),
}

impl Place {
    /// The path of one of its pool's files that both kinds of place have.
    #[must_use]
    pub fn path(self, size: PageSize, file: &str) -> String {
        match self {
            Self::Machine => pool::global_path(size, file),
            Self::Node(node) => pool::node_path(node, size, file),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Machine => f.pad("machine"),
            Self::Node(node) => f.pad(&format!("node {node}")),
        }
    }
}
