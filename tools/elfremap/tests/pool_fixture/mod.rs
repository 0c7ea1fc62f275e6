//! A machine's sysfs and `/proc` in a temporary directory, and the lock of the real pool.
#![allow(dead_code, reason = "each test file uses its part")]

use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;

/// The files of a machine; removed in the end.
pub(crate) struct Machine {
    dir: TempDir,
}

/// One node: its number, the memory it has free in MiB, and its 2M pages (total, free, surplus).
/// A node without memory has no pages.
pub(crate) struct Node(pub(crate) u32, pub(crate) u64, pub(crate) Option<[u64; 3]>);

impl Machine {
    /// A machine with 2M (default) and 1G pages and these nodes.
    pub(crate) fn new(nodes: &[Node]) -> Self {
        let machine = Self { dir: TempDir::new().unwrap() };
        let sum = |of: usize| nodes.iter().filter_map(|n| n.2).map(|counts| counts[of]).sum();
        let free: u64 = nodes.iter().map(|node| node.1).sum();
        machine.put(
            "proc/meminfo",
            &format!(
                "MemTotal: {0} kB\nMemFree: {0} kB\nMemAvailable: {0} kB\nHugepagesize:    2048 kB\n",
                free * 1024
            ),
        );
        machine.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        machine.put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
        machine.pool("sys/kernel/mm/hugepages", "2048", [sum(0), sum(1), sum(2)], true);
        machine.pool("sys/kernel/mm/hugepages", "1048576", [0; 3], true);
        for Node(number, memory, counts) in nodes {
            let dir = format!("sys/devices/system/node/node{number}");
            let kilobytes = memory * 1024;
            machine.put(
                &format!("{dir}/meminfo"),
                &format!(
                    "Node {number} MemTotal:  {kilobytes} kB\nNode {number} MemFree: {kilobytes} kB\n"
                ),
            );
            if let Some(counts) = counts {
                machine.pool(&format!("{dir}/hugepages"), "2048", *counts, false);
                machine.pool(&format!("{dir}/hugepages"), "1048576", [0; 3], false);
            }
        }
        machine
    }

    fn pool(&self, dir: &str, size: &str, counts: [u64; 3], global: bool) {
        let dir = format!("{dir}/hugepages-{size}kB");
        for (file, count) in
            ["nr_hugepages", "free_hugepages", "surplus_hugepages"].iter().zip(counts)
        {
            self.put(&format!("{dir}/{file}"), &format!("{count}\n"));
        }
        if global {
            self.put(&format!("{dir}/resv_hugepages"), "0\n");
            self.put(&format!("{dir}/nr_overcommit_hugepages"), "0\n");
        }
    }

    pub(crate) fn put(&self, path: &str, text: &str) {
        let path = self.dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(crate) fn get(&self, path: &str) -> String {
        fs::read_to_string(self.dir.path().join(path)).unwrap().trim().to_owned()
    }

    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    /// The persistent 2M pages written to each node's file, and last the machine's.
    pub(crate) fn counts(&self, nodes: &[u32]) -> Vec<String> {
        let file = "hugepages/hugepages-2048kB/nr_hugepages";
        let of_node = |n: &u32| self.get(&format!("sys/devices/system/node/node{n}/{file}"));
        let mut counts: Vec<_> = nodes.iter().map(of_node).collect();
        counts.push(self.get(&format!("sys/kernel/mm/{file}")));
        counts
    }

    /// `elfremap COMMAND --sysfs-root DIR`.
    pub(crate) fn elfremap(&self, command: &str) -> Command {
        let mut elfremap = elfremap();
        elfremap.arg(command).arg("--sysfs-root").arg(self.root());
        elfremap
    }
}

pub(crate) fn elfremap() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfremap"));
    command.env_remove("NO_COLOR").env_remove("LD_PRELOAD");
    command
}

pub(crate) fn path_of_elfremap() -> PathBuf {
    env!("CARGO_BIN_EXE_elfremap").into()
}

pub(crate) fn stdout(command: &mut Command) -> String {
    String::from_utf8(command.assert().get_output().stdout.clone()).unwrap()
}

pub(crate) fn stderr(command: &mut Command) -> String {
    String::from_utf8(command.assert().get_output().stderr.clone()).unwrap()
}

pub(crate) fn json(command: &mut Command) -> serde_json::Value {
    serde_json::from_str(&stdout(command)).unwrap()
}

/// Fails when a line is too wide for a terminal of 80 columns.
pub(crate) fn assert_fits(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "wider than 80 columns: {line}");
    }
}

/// Whether the test has to be left out for `missing`; a failure where skips are forbidden.
pub(crate) fn skipped(missing: &str, is_missing: bool) -> bool {
    if is_missing {
        assert!(std::env::var_os("ELFREMAP_TEST_NO_SKIP").is_none(), "skipped: {missing}");
        eprintln!("skipped: {missing}");
    }
    is_missing
}

/// The real pool of 2M pages, alone, until it is dropped; its size is put back then.
pub(crate) struct RealPool {
    _lock: Flock<fs::File>,
    before: String,
}

const REAL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

impl RealPool {
    /// `None` when the test has to be left out.
    pub(crate) fn take() -> Option<Self> {
        if skipped("needs root", !nix::unistd::geteuid().is_root())
            || skipped("needs 2M huge pages", !Path::new(REAL).exists())
        {
            return None;
        }
        let lock = fs::File::create("/run/lock/elfremap-pool.lock").unwrap();
        let lock = Flock::lock(lock, FlockArg::LockExclusive).unwrap();
        Some(Self { _lock: lock, before: fs::read_to_string(REAL).unwrap() })
    }

    pub(crate) fn set(&self, pages: u64) {
        fs::write(REAL, pages.to_string()).unwrap();
        assert_eq!(Self::count("nr_hugepages"), pages, "no memory for the test's pages");
    }

    pub(crate) fn count(file: &str) -> u64 {
        let path = Path::new(REAL).with_file_name(file);
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }
}

impl Drop for RealPool {
    fn drop(&mut self) {
        fs::write(REAL, &self.before).unwrap();
    }
}
