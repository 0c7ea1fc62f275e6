//! Binding to a NUMA node, cpus and memory: both outlive exec (sched_setaffinity(2),
//! set_mempolicy(2)).

use elfremap::hugepage::{Files, NodeSet, pool};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

use crate::system::System;

/// Why the binding failed.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// There is no such node.
    #[error("cannot bind to node {node}: this machine has {present}")]
    NoNode {
        /// The node asked for.
        node: u32,
        /// Those that are there, in words.
        present: String,
    },
    /// The node has memory only.
    #[error("cannot bind to node {0}: it has no processors")]
    NoCpus(u32),
    /// A system call failed.
    #[error("cannot bind to node {node}: {call}: {errno}")]
    Call {
        /// The node asked for.
        node: u32,
        /// Its name.
        call: &'static str,
        /// Why.
        errno: Errno,
    },
}

/// `MPOL_BIND` of linux/mempolicy.h.
const MPOL_BIND: libc::c_long = 2;
/// Nodes that fit the mask: the kernel's largest `MAX_NUMNODES`.
const MAX_NODES: u32 = 1024;

/// Restricts this process, and the program it becomes, to the processors and the
/// memory of `node`.
///
/// # Errors
/// [`NodeError`]; nothing is bound then, or the processors only.
pub fn bind(system: &System, node: u32) -> Result<(), NodeError> {
    let call = |call| move |errno| NodeError::Call { node, call, errno };
    let cpus = cpus_of(system, node)?;
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter_map(|cpu| usize::try_from(cpu).ok()) {
        set.set(cpu).map_err(call("processor number too high"))?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).map_err(call("sched_setaffinity"))?;
    bind_memory(node).map_err(call("set_mempolicy"))
}

fn cpus_of(system: &System, node: u32) -> Result<NodeSet, NodeError> {
    let mut text = Vec::new();
    let path = format!("/sys/devices/system/node/node{node}/cpulist");
    if node >= MAX_NODES || !system.read(&path, &mut text).unwrap_or(false) {
        let nodes = pool::online_nodes(system).unwrap_or_default();
        let numbers: Vec<String> = nodes.iter().map(|node| node.to_string()).collect();
        let present = match numbers.as_slice() {
            [] => "no NUMA nodes".into(),
            [one] => format!("only node {one}"),
            _ => format!("nodes {}", numbers.join(", ")),
        };
        return Err(NodeError::NoNode { node, present });
    }
    let cpus = NodeSet::parse(text.trim_ascii()).unwrap_or_default();
    if cpus.is_empty() { Err(NodeError::NoCpus(node)) } else { Ok(cpus) }
}

fn bind_memory(node: u32) -> nix::Result<()> {
    let mut mask = [0u64; MAX_NODES as usize / 64];
    let word = usize::try_from(node / 64).unwrap_or(usize::MAX);
    *mask.get_mut(word).ok_or(Errno::EINVAL)? = 1 << (node % 64);
    // SAFETY: the kernel reads MAX_NODES bits (one is taken off the count by the
    // interface's long-standing quirk) from `mask`, which has them all.
    let result = unsafe {
        libc::syscall(libc::SYS_set_mempolicy, MPOL_BIND, mask.as_ptr(), u64::from(MAX_NODES) + 1)
    };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_are_not_there() {
        let system = System::running();
        let error = bind(&system, 1023).unwrap_err().to_string();
        assert!(error.starts_with("cannot bind to node 1023: this machine has "), "{error}");
        assert!(matches!(bind(&system, u32::MAX), Err(NodeError::NoNode { .. })));
    }
}
