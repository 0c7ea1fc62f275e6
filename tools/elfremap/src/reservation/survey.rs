//! What there is before a change: the pool's part in every place, and the memory that
//! could become huge pages.

use std::io;

use elfremap::hugepage::{Files, NodeSet, PageSize, Pool, ReadError, meminfo, pool};

use super::Place;

/// A pool and the memory around it.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The pool.
    pub pool: Pool,
    /// The places that can hold pages, in ascending order; never empty.
    pub spots: Vec<Spot>,
    /// New pages for which the machine has memory; `None`: no limit known.
    pub room: Option<u64>,
    /// Online nodes, those without memory among them.
    pub online: NodeSet,
    /// Nodes this process may take memory from (its cpuset); `None` when the kernel does
    /// not say.
    pub allowed: Option<NodeSet>,
}

impl Survey {
    /// The same without regard to how much memory is free now.
    #[must_use]
    pub fn without_limits(&self) -> Self {
        let mut survey = Self { room: None, ..self.clone() };
        survey.spots.iter_mut().for_each(|spot| spot.room = None);
        survey
    }
}

/// One place's part of the pool. Counts are in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spot {
    /// Where.
    pub place: Place,
    /// All pages, the surplus ones among them.
    pub total: u64,
    /// Pages that hold nothing.
    pub free: u64,
    /// Pages beyond the persistent ones.
    pub surplus: u64,
    /// New pages for which there is memory; `None`: no limit known.
    pub room: Option<u64>,
}

impl Spot {
    /// Pages that stay when they are freed: what was written to `nr_hugepages`.
    #[must_use]
    pub const fn persistent(&self) -> u64 {
        self.total.saturating_sub(self.surplus)
    }
}

/// The memory to leave to everything else, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KeepFree {
    /// A twentieth of the machine's memory, at least 128 MiB.
    #[default]
    Default,
    /// So many bytes. 0: take what the kernel gives, whatever it says is free.
    Bytes(u64),
}

/// Reads the pool of `size`; `None` when the machine does not offer the size.
///
/// # Errors
/// A file cannot be read, or its content is unexpected.
pub fn read<F: Files<Error = io::Error>>(
    files: &F,
    size: PageSize,
    keep_free: KeepFree,
) -> Result<Option<Survey>, ReadError<io::Error>> {
    let Some(pool) = pool::read(files, size)? else { return Ok(None) };
    let memory = text(files, "/proc/meminfo")?;
    let total = meminfo::bytes(&memory, "MemTotal").unwrap_or(0);
    let keep = match keep_free {
        KeepFree::Default => (total / 20).max(128 << 20),
        KeepFree::Bytes(bytes) => bytes,
    };
    let room = |available: Option<u64>, share: u64| {
        available.filter(|_| keep > 0).map(|bytes| bytes.saturating_sub(share) / size.bytes())
    };
    let mut spots = Vec::new();
    for node in &pool.nodes {
        let memory = text(files, &pool::node_meminfo_path(node.node))?;
        // Each node keeps its share of what the machine is to keep.
        let share = meminfo::bytes(&memory, "MemTotal").and_then(|own| {
            let share = u128::from(keep) * u128::from(own) / u128::from(total.max(1));
            u64::try_from(share).ok()
        });
        spots.push(Spot {
            place: Place::Node(node.node),
            total: node.total,
            free: node.free,
            surplus: node.surplus,
            room: room(node_available(&memory), share.unwrap_or(keep)),
        });
    }
    let machine = room(meminfo::bytes(&memory, "MemAvailable"), keep);
    if spots.is_empty() {
        spots.push(Spot {
            place: Place::Machine,
            total: pool.total,
            free: pool.free,
            surplus: pool.surplus,
            room: machine,
        });
    }
    let status = text(files, "/proc/self/status")?;
    let allowed = line(&status, b"Mems_allowed_list:").and_then(NodeSet::parse);
    Ok(Some(Survey { pool, spots, room: machine, online: pool::online_nodes(files)?, allowed }))
}

/// Memory a node could give without swapping: free, or holding only what is in files. The
/// kernel estimates `MemAvailable` in much the same way, but for the whole machine only.
fn node_available(memory: &[u8]) -> Option<u64> {
    let of = |name| meminfo::bytes(memory, name);
    let given_up = ["Active(file)", "Inactive(file)", "SReclaimable"];
    let given_up = given_up.into_iter().filter_map(of).fold(0, u64::saturating_add);
    of("MemFree").map(|free| free.saturating_add(given_up))
}

/// The content of a file; empty when there is none.
fn text<F: Files<Error = io::Error>>(
    files: &F,
    path: &str,
) -> Result<Vec<u8>, ReadError<io::Error>> {
    let mut text = Vec::new();
    match files.read(path, &mut text) {
        Ok(_) => Ok(text),
        Err(error) => Err(ReadError::Access { path: String::from(path), error }),
    }
}

fn line<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    text.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(name))
}
