//! `elfremap pool`: the huge page pools and who uses them.

use std::fmt::Write;
use std::io::ErrorKind;

use anyhow::Context;
use elfremap::hugepage::{PageSize, Pool, Thp, meminfo, pool, thp};
use serde::Serialize;

use crate::exit::{Failure, Status};
use crate::output::{self, Style, megabytes};
use crate::system::{RootArg, System};

/// Arguments of `elfremap pool`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Counts are pages. reserved: free pages promised to running programs; surplus: pages
beyond the pool, up to overcommit, given back to the system as soon as they are free.

Examples:
  elfremap pool                    every size, every node, every user
  elfremap pool --size 2M --json   one size, for a script

Exit status: 0 done, 1 failed, 2 wrong usage.")]
pub struct Args {
    /// Show only this page size (2M, 1G, ...)
    #[arg(long)]
    size: Option<PageSize>,

    /// Leave out the search for the processes that use huge pages
    #[arg(long)]
    no_users: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    root: RootArg,
}

/// Runs the command.
///
/// # Errors
/// The kernel has no hugetlb pages (or not of the size), or a file cannot be read.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let system = args.root.system();
    let report = Report::read(&system, args)?;
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.text(Style::for_stdout()))?;
    }
    Ok(Status::Done)
}

/// What the command prints. Field by field, this is the JSON schema.
#[derive(Serialize, Debug)]
struct Report {
    schema: u32,
    default_page_size: Option<u64>,
    pools: Vec<PoolEntry>,
    thp: Option<ThpEntry>,
    users: Option<Users>,
}

/// A pool; its counts are pages, its size is in bytes.
#[derive(Serialize, Debug)]
pub(crate) struct PoolEntry {
    page_size: u64,
    #[serde(skip)]
    page: PageSize,
    total: u64,
    free: u64,
    reserved: u64,
    surplus: u64,
    overcommit: u64,
    available: u64,
    nodes: Vec<NodeEntry>,
}

#[derive(Serialize, Debug)]
struct NodeEntry {
    node: u32,
    total: u64,
    free: u64,
    surplus: u64,
}

#[derive(Serialize, Debug)]
struct ThpEntry {
    mode: String,
    page_size: Option<u64>,
}

/// Who uses hugetlb pages. Amounts are in bytes.
#[derive(Serialize, Debug)]
struct Users {
    processes: Vec<User>,
    /// Used, but mapped by no process that can be seen. An estimate from below: a page shared
    /// by processes of which one hides its share counts once for each of them.
    unseen: u64,
}

#[derive(Serialize, Debug)]
struct User {
    pid: u32,
    command: String,
    total: u64,
    /// Pages only this process maps; `None` when it may not be looked at.
    private: Option<u64>,
    /// Pages others map as well (after a fork, or shared memory).
    shared: Option<u64>,
}

impl From<&Pool> for PoolEntry {
    fn from(pool: &Pool) -> Self {
        let node = |n: &elfremap::hugepage::NodePool| NodeEntry {
            node: n.node,
            total: n.total,
            free: n.free,
            surplus: n.surplus,
        };
        Self {
            page_size: pool.size.bytes(),
            page: pool.size,
            total: pool.total,
            free: pool.free,
            reserved: pool.promised(),
            surplus: pool.surplus,
            overcommit: pool.overcommit,
            available: pool.available(),
            nodes: pool.nodes.iter().map(node).collect(),
        }
    }
}

impl Report {
    fn read(system: &System, args: &Args) -> anyhow::Result<Self> {
        let shown = offered_sizes(system, args.size)?;
        let mut pools = Vec::new();
        for size in offered_sizes(system, None)? {
            pools.extend(pool::read(system, size)?.as_ref().map(PoolEntry::from));
        }
        let users = if args.no_users { None } else { Some(Users::find(system, &pools)?) };
        pools.retain(|pool| shown.contains(&pool.page));
        Ok(Self {
            schema: 1,
            default_page_size: pool::default_size(system)?.map(PageSize::bytes),
            pools,
            thp: thp::read(system)?.map(|Thp { mode, size }| ThpEntry {
                mode: mode.to_string(),
                page_size: size.map(PageSize::bytes),
            }),
            users,
        })
    }

    fn text(&self, style: Style) -> String {
        let mut text = style
            .bold("size   where         total      free  reserved   surplus  overcommit    memory");
        text += "\n";
        for pool in &self.pools {
            let is_default = self.default_page_size == Some(pool.page_size);
            let _ = writeln!(
                text,
                "{:<6} machine {:>12} {:>9} {:>9} {:>9} {:>11} {:>9}",
                format!("{}{}", pool.page, if is_default { " *" } else { "" }),
                pool.total,
                pool.free,
                pool.reserved,
                pool.surplus,
                pool.overcommit,
                megabytes(pool.total.saturating_mul(pool.page_size)),
            );
            for node in &pool.nodes {
                let _ = writeln!(
                    text,
                    "       node {:<4}{:>11} {:>9} {:>19} {:>21}",
                    node.node,
                    node.total,
                    node.free,
                    node.surplus,
                    megabytes(node.total.saturating_mul(pool.page_size)),
                );
            }
        }
        if self.pools.iter().any(|pool| self.default_page_size == Some(pool.page_size)) {
            text += "* the default size\n";
        }
        text += "\ntransparent huge pages: ";
        match &self.thp {
            Some(ThpEntry { mode, page_size: size }) => {
                text += mode;
                if let Some(size) = size.and_then(PageSize::new) {
                    let _ = write!(text, ", {size}");
                }
                text += "\n";
            }
            None => text += "none in this kernel\n",
        }
        if let Some(users) = &self.users {
            users.text(&mut text, style);
        }
        text
    }
}

/// The sizes to show or work on.
///
/// # Errors
/// The machine offers none, or not the wanted one.
pub(crate) fn offered_sizes(
    system: &System,
    wanted: Option<PageSize>,
) -> anyhow::Result<Vec<PageSize>> {
    let sizes = pool::sizes(system)?;
    let failure = |message: String| {
        anyhow::Error::new(Failure { status: Status::Failed, message, hint: None })
    };
    match wanted {
        _ if sizes.is_empty() => Err(failure(String::from(
            "this kernel has no pools of huge pages (no /sys/kernel/mm/hugepages)",
        ))),
        Some(size) if !sizes.contains(&size) => {
            let offered: Vec<_> = sizes.iter().map(PageSize::to_string).collect();
            let offered = offered.join(", ");
            Err(failure(format!("no huge pages of {size}: this machine offers {offered}")))
        }
        Some(size) => Ok(vec![size]),
        None => Ok(sizes),
    }
}

impl Users {
    /// Looks through all processes. `/proc/<pid>/status` is open to everybody and costs
    /// little; only where it shows hugetlb pages the page tables are walked (smaps_rollup).
    fn find(system: &System, pools: &[PoolEntry]) -> anyhow::Result<Self> {
        let mut pids = Vec::new();
        let mut note = |name: &[u8]| {
            pids.extend(std::str::from_utf8(name).ok().and_then(|name| name.parse::<u32>().ok()));
        };
        elfremap::hugepage::Files::list(system, "/proc", &mut note).context("list /proc")?;
        let mut processes: Vec<_> =
            pids.into_iter().filter_map(|pid| User::read(system, pid)).collect();
        processes.sort_by_key(|user| (std::cmp::Reverse(user.total), user.pid));
        let used = pools.iter().map(|p| p.total.saturating_sub(p.free).saturating_mul(p.page_size));
        let seen = processes.iter().map(|user| user.total);
        let unseen = used.fold(0, u64::saturating_add).saturating_sub(seen.sum());
        Ok(Self { processes, unseen })
    }

    fn text(&self, text: &mut String, style: Style) {
        if self.processes.is_empty() {
            *text += "no process uses pages of the pools\n";
        } else {
            let heading = "    pid  used by              memory    private     shared";
            let _ = writeln!(text, "\n{}", style.bold(heading));
        }
        let amount = |bytes: Option<u64>| bytes.map_or(String::from("?"), megabytes);
        for user in &self.processes {
            let _ = writeln!(
                text,
                "{:>7}  {:<16} {:>10} {:>10} {:>10}",
                user.pid,
                user.command,
                megabytes(user.total),
                amount(user.private),
                amount(user.shared),
            );
        }
        if self.processes.iter().any(|user| user.private.is_none()) {
            *text += "?: not open to this user; run as root to see more\n";
        }
        if self.unseen > 0 {
            let _ = writeln!(
                text,
                "{} in no process seen here: shared memory, hugetlbfs files, other containers",
                megabytes(self.unseen)
            );
        }
    }
}

impl User {
    /// `None` when the process uses no hugetlb page, or has gone.
    fn read(system: &System, pid: u32) -> Option<Self> {
        let status = system.content(&format!("/proc/{pid}/status")).ok()??;
        let total = meminfo::bytes(&status, "HugetlbPages").filter(|&bytes| bytes > 0)?;
        let name = system.content(&format!("/proc/{pid}/comm")).ok()??;
        let rollup = match system.content(&format!("/proc/{pid}/smaps_rollup")) {
            Ok(rollup) => rollup,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
            Err(_) => return None,
        };
        let amount = |name| rollup.as_deref().and_then(|text| meminfo::bytes(text, name));
        Some(Self {
            pid,
            // A process may put control characters into its name.
            command: String::from_utf8_lossy(name.trim_ascii_end()).escape_debug().to_string(),
            total,
            private: amount("Private_Hugetlb"),
            shared: amount("Shared_Hugetlb"),
        })
    }
}
