//! Two nodes: pages where the program may not take them, and pages where it should.

use crate::cgroup::Cgroup;
use crate::checks::Checks;
use crate::launch::{Launch, Running};
use crate::moves::{Subject, only_pool};
use crate::node::{MemoryPolicy, huge_bytes_by_node};
use crate::pool;
use crate::probe::Machine;
use crate::rival;
use crate::snapshot::{Kind, Movable, Snapshot};
use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use nix::sys::ptrace;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use std::collections::BTreeMap;

/// The program of these checks, and what it needs.
struct Scene<'a> {
    subject: &'a Subject,
    size: PageSize,
    need: u64,
    movable: Movable,
}

/// Where all pages shall lie.
#[derive(Clone, Copy, Debug)]
enum Where {
    Node(u32),
    Both,
    /// Nothing moves.
    Nowhere,
}

pub(crate) fn run(checks: &mut Checks, machine: &Machine) -> Result<()> {
    if machine.nodes < 2 {
        return Ok(());
    }
    let size = machine.block();
    let subject = Subject::named("plain-page2m")?;
    only_pool(machine, size, 40)?;
    let need = subject.need(size)?;
    let scene = Scene { movable: subject.movable(size), subject: &subject, size, need };
    let enough = need + 2;

    let bind = MemoryPolicy::Bind;
    let prefer = MemoryPolicy::Preferred;
    let there = [0, enough];
    let both = [enough, enough];
    let reserve = "elfremap reserve --node 0";
    let mut check = |name: &str, pages, launch: &Launch, place, words: &[&str]| {
        checks.check("NUMA", name, || scene.place(pages, launch, place, words))
    };
    let plain = scene.launch();
    check("pages on the other node, no policy", there, &plain, Where::Node(1), &[])?;
    let other = plain.clone().policy(prefer(0));
    check("pages on the other node, preferred", there, &other, Where::Node(1), &[])?;
    let bound = plain.clone().policy(bind(0));
    check("pages on the other node, bound", there, &bound, Where::Nowhere, &["node 0", reserve])?;
    check("bound to where they are", there, &plain.clone().policy(bind(1)), Where::Node(1), &[])?;
    check("pages on both, bound to 0", both, &bound, Where::Node(0), &[])?;
    check("pages on both, bound to 1", both, &plain.clone().policy(bind(1)), Where::Node(1), &[])?;
    let few = [need - 1, enough];
    check("one page too few there", few, &bound, Where::Nowhere, &["node 0", reserve])?;
    for strategy in ["auto", "move"] {
        let launch = plain.clone().env("ELFREMAP_STRATEGY", strategy);
        let asked = |value: &str| launch.clone().env("ELFREMAP_NUMA", value);
        let name = |value: &str| format!("ELFREMAP_NUMA={value}, strategy {strategy}");
        check(&name("1"), both, &asked("1"), Where::Node(1), &[])?;
        check(&name("0"), both, &asked("0"), Where::Node(0), &[])?;
        check(&name("interleave"), both, &asked("interleave"), Where::Both, &[])?;
        let words = ["node 0", reserve];
        check(&name("0, none there"), there, &asked("0"), Where::Nowhere, &words)?;
        let local = asked("local").policy(bind(1));
        check(&name("inherit"), both, &asked("inherit").policy(bind(1)), Where::Node(1), &[])?;
        check(&name("local, bound"), [0, enough], &local, Where::Node(1), &[])?;
    }

    let group = Cgroup::new("before", &[("cpuset.mems", "0".into())])?;
    let inside = plain.clone().cgroup(group.path());
    check("cpuset of the other node", there, &inside, Where::Nowhere, &["node 0", reserve])?;
    check("cpuset of this node", both, &inside, Where::Node(0), &[])?;
    drop(group);

    checks.check("NUMA", "cpuset moves while it runs", || scene.cpuset_moves())?;
    for strategy in ["auto", "move"] {
        checks.check("NUMA", format!("a rival takes the pages, strategy {strategy}"), || {
            scene.rival(strategy)
        })?;
    }
    for limit in ["max", "rsvd.max"] {
        checks.check("NUMA", format!("hugetlb cgroup limit, {limit}"), || scene.limit(limit))?;
    }
    pool::set_nodes(size, [0, 0])
}

impl Scene<'_> {
    fn launch(&self) -> Launch {
        self.subject.hugetlb(self.size)
    }

    fn is_where(&self, pid: u32, now: &Snapshot, place: Where) -> Result<()> {
        let kind = Kind::Hugetlb(self.size);
        let by_node = huge_bytes_by_node(pid, &self.movable.all())?;
        let bytes = self.need * self.size.bytes();
        match place {
            Where::Nowhere => {
                ensure!(now.hugetlb_bytes() < bytes, "everything moved");
                return now.nothing_else(&self.movable, kind);
            }
            Where::Node(node) => {
                ensure!(by_node == BTreeMap::from([(node, bytes)]), "pages lie on {by_node:?}");
            }
            Where::Both => {
                ensure!(by_node.len() == 2, "pages lie on {by_node:?}");
                ensure!(by_node.values().sum::<u64>() == bytes, "pages lie on {by_node:?}");
            }
        }
        now.moved_exactly(&self.movable, kind)
    }

    /// With so many pages on the two nodes: where it ends up, and what it says.
    fn place(&self, pages: [u64; 2], launch: &Launch, place: Where, words: &[&str]) -> Result<()> {
        pool::set_nodes(self.size, pages)?;
        let output = self.subject.run(launch, |pid, now| self.is_where(pid, now, place))?;
        if words.is_empty() {
            output.silent()?;
        } else {
            output.warned_once(words)?;
        }
        pool::expect_idle(self.size)
    }

    /// Moved pages on node 1, then the cpuset allows node 0 alone.
    fn cpuset_moves(&self) -> Result<()> {
        pool::set_nodes(self.size, [0, self.need])?;
        let group = Cgroup::new("after", &[("cpuset.mems", "0-1".into())])?;
        let output = self.subject.run(&self.launch().cgroup(group.path()), |pid, now| {
            self.is_where(pid, now, Where::Node(1))?;
            group.set("cpuset.mems", "0")
        })?;
        output.silent()?;
        drop(group);
        pool::expect_idle(self.size)
    }

    /// Another process of the same node takes the pages after our mmap was promised
    /// them, before it populates: the promise is the machine's, not the node's.
    fn rival(&self, strategy: &str) -> Result<()> {
        pool::set_nodes(self.size, [self.need, self.need])?;
        let launch = self.launch().policy(MemoryPolicy::Bind(0)).env("ELFREMAP_STRATEGY", strategy);
        let mut running = launch.traced().start()?;
        let rival =
            stop_at_populate(&running, self.size, || rival::start(0, self.need, self.size))?;
        running.wait_until_ready()?;
        let now = Snapshot::take(running.pid(), &self.subject.path)?;
        now.same_rights_as(self.subject.snapshot())?;
        now.nothing_else(&self.movable, Kind::Hugetlb(self.size))?;
        ensure!(now.hugetlb_bytes() < self.need * self.size.bytes(), "everything moved");
        let output = running.finish()?;
        output.same_as(&self.subject.plain)?;
        output.warned_once(&["node 0", "elfremap reserve --node 0"])?;
        rival.finish()?.succeeded()?;
        pool::expect_idle(self.size)
    }

    /// A control group that may use one page, or reserve one.
    fn limit(&self, kind: &str) -> Result<()> {
        pool::set_nodes(self.size, [self.need, self.need])?;
        let group = Cgroup::new("limited", &[])?;
        let file = format!("hugetlb.{:#}.{kind}", self.size);
        ensure!(group.has(&file), "the kernel has no {file}");
        group.set(&file, &self.size.bytes().to_string())?;
        let output = self.subject.run(&self.launch().cgroup(group.path()), |pid, now| {
            self.is_where(pid, now, Where::Nowhere)
        })?;
        output.warned_once(&["cgroup", &file])?;
        drop(group);
        pool::expect_idle(self.size)
    }
}

/// Runs a program that was started traced up to the first call that populates huge
/// pages, does something then, and lets it go on untraced.
fn stop_at_populate<T>(
    running: &Running,
    size: PageSize,
    meanwhile: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let pid = Pid::from_raw(i32::try_from(running.pid())?);
    let mut status = waitpid(pid, None)?;
    ptrace::setoptions(pid, ptrace::Options::PTRACE_O_TRACESYSGOOD)?;
    loop {
        if let WaitStatus::PtraceSyscall(_) = status
            && is_populate(pid, size)?
        {
            break;
        }
        ensure!(
            matches!(status, WaitStatus::PtraceSyscall(_) | WaitStatus::Stopped(..)),
            "it never populates: {status:?}"
        );
        ptrace::syscall(pid, None)?;
        status = waitpid(pid, None)?;
    }
    let result = meanwhile().context("while the program was stopped");
    ptrace::detach(pid, None)?;
    result
}

/// Whether the call that `pid` is about to make populates a huge page:
/// `MADV_POPULATE_WRITE`, or a read of one byte.
fn is_populate(pid: Pid, size: PageSize) -> Result<bool> {
    const MADV_POPULATE_WRITE: u64 = 23;
    /// `PTRACE_SYSCALL_INFO_ENTRY` of ptrace(2), Linux 5.3.
    const ENTRY: u8 = 1;
    let info = ptrace::syscall_info(pid)?;
    if info.op != ENTRY {
        return Ok(false);
    }
    // SAFETY: the kernel filled in the structure of an entry.
    let entry = unsafe { info.u.entry };
    let [_, length, advice, ..] = entry.args;
    let number = i64::try_from(entry.nr)?;
    Ok(if number == libc::SYS_madvise {
        advice == MADV_POPULATE_WRITE && length >= size.bytes()
    } else {
        (number == libc::SYS_read || number == libc::SYS_pread64) && advice == 1
    })
}
