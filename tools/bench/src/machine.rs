//! What the figures were measured on, for the head of every data file.

use crate::pool::Pool;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Machine, kernel and versions.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Machine {
    pub cpu: String,
    pub cpus: usize,
    /// Memory in MiB.
    pub memory_mb: u64,
    /// Whether the processor says that a hypervisor runs it.
    pub virtual_machine: bool,
    /// Whether hardware counters can be had (`cpu` or `armv8_pmuv3*` event sources).
    pub hardware_counters: bool,
    pub kernel: String,
    /// Transparent huge pages: `always`, `madvise` or `never`.
    pub thp: String,
    pub aslr: String,
    pub pool: Pool,
    pub libc: String,
    pub compiler: String,
    /// This project's version.
    pub version: String,
    /// Commit of the tree that was built, with `-dirty` when it was changed.
    pub commit: String,
}

impl Machine {
    pub(crate) fn read() -> Result<Self> {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
        let field = |name: &str| {
            let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
            line.split_once(':').map(|(_, value)| value.trim().to_owned())
        };
        let line = |path: &str| {
            fs::read_to_string(path).map_or_else(|_| "unknown".into(), |s| s.trim().to_owned())
        };
        let memory = line("/proc/meminfo");
        let memory = memory.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok());
        let thp = line("/sys/kernel/mm/transparent_hugepage/enabled");
        let thp =
            thp.split_once('[').and_then(|(_, rest)| Some(rest.split_once(']')?.0.to_owned()));
        Ok(Self {
            cpu: field("model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
            cpus: std::thread::available_parallelism()?.get(),
            memory_mb: memory.unwrap_or(0) / 1024,
            virtual_machine: field("flags")
                .is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor")),
            hardware_counters: fs::read_dir("/sys/bus/event_source/devices").is_ok_and(|devices| {
                devices.flatten().any(|device| {
                    let name = device.file_name();
                    name == "cpu" || name.to_string_lossy().starts_with("armv8_pmuv3")
                })
            }),
            kernel: line("/proc/sys/kernel/osrelease"),
            thp: thp.unwrap_or_else(|| "unknown".into()),
            aslr: line("/proc/sys/kernel/randomize_va_space"),
            pool: Pool::read()?,
            libc: first_line("getconf", &["GNU_LIBC_VERSION"]),
            compiler: first_line("cc", &["--version"]),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: first_line("git", &["describe", "--always", "--dirty", "--abbrev=12"]),
        })
    }

    /// The hardware in one line for people.
    pub(crate) fn hardware(&self) -> String {
        let kind = if self.virtual_machine { ", virtual machine" } else { "" };
        format!("{}, {} CPUs, {} MB{kind}", self.cpu, self.cpus, self.memory_mb)
    }

    /// The kernel and its settings in one line for people.
    pub(crate) fn software(&self) -> String {
        format!("Linux {}, transparent huge pages: {}", self.kernel, self.thp)
    }
}

/// The first line that a command prints, or `unknown`.
pub(crate) fn first_line(program: impl AsRef<Path>, args: &[&str]) -> String {
    let output = Command::new(program.as_ref()).args(args).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().next().map_or_else(|| "unknown".into(), |line| line.trim().to_owned())
}
