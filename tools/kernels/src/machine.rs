//! The machines.

use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};

/// An architecture of the guests, and how things are built for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arch {
    X86_64,
    Aarch64,
}

impl Arch {
    pub(crate) const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    pub(crate) const fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }

    pub(crate) fn is_native(self) -> bool {
        self.name() == std::env::consts::ARCH
    }

    /// The compiler for C programs of this architecture; `project` is this project's root.
    pub(crate) fn compiler(self, project: &Path) -> Result<PathBuf> {
        if self.is_native() {
            return Ok("gcc".into());
        }
        let path = project.join(format!("tools/kernels/{}-cc", self.name()));
        ensure!(path.is_file(), "no compiler for {} here: {}", self.name(), path.display());
        Ok(path)
    }

    /// What makes the compiler one for C++.
    pub(crate) fn cplusplus(self) -> &'static [&'static str] {
        if self.is_native() { &["-lstdc++"] } else { &["--driver-mode=g++"] }
    }

    /// The loader, as programs name it.
    pub(crate) const fn loader(self) -> &'static str {
        match self {
            Self::X86_64 => "/lib64/ld-linux-x86-64.so.2",
            Self::Aarch64 => "/lib/ld-linux-aarch64.so.1",
        }
    }

    pub(crate) const fn console(self) -> &'static str {
        match self {
            Self::X86_64 => "ttyS0",
            Self::Aarch64 => "ttyAMA0",
        }
    }
}

/// A guest machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    pub(crate) arch: Arch,
    /// Debian's metapackage of the kernel, and the suites to look for it.
    pub(crate) package: &'static str,
    pub(crate) suites: &'static [&'static str],
    /// QEMU's processor model.
    pub(crate) cpu: &'static str,
    /// Memory of each of the two nodes, in MiB.
    pub(crate) node_memory: u32,
    /// Groups of checks that are not run there.
    pub(crate) skip: &'static str,
    /// Seconds it takes on a quiet machine; the time limit is four times that.
    pub(crate) quiet_seconds: u64,
}

const CLOUD_AMD64: &str = "linux-image-cloud-amd64";
const CLOUD_ARM64: &str = "linux-image-cloud-arm64";

/// `max` with the slow pointer authentication replaced: three times faster.
const ARM_MAX: &str = "max,pauth-impdef=on";

/// The oldest kernel that Debian's mirrors have, each long-term one since, the newest.
pub(crate) const MACHINES: &[Machine] = &[
    x86("5.10-x86_64", &["bullseye"]),
    x86("6.1-x86_64", &["bookworm", "bookworm-security"]),
    x86("6.12-x86_64", &["trixie", "trixie-security"]),
    x86("newest-x86_64", &["trixie-backports", "forky", "sid"]),
    Machine {
        skip: "hazards",
        ..arm("5.10-aarch64", CLOUD_ARM64, &["bullseye"], "cortex-a72", 512)
    },
    arm("6.1-aarch64", CLOUD_ARM64, &["bookworm", "bookworm-security"], "cortex-a72", 512),
    Machine {
        skip: "hazards",
        ..arm("6.12-aarch64-bti", CLOUD_ARM64, &["trixie", "trixie-security"], ARM_MAX, 512)
    },
    arm(
        "6.12-aarch64-16k",
        "linux-image-arm64-16k",
        &["trixie", "trixie-security"],
        // A processor without 16 KiB pages, such as cortex-a72, hangs silently.
        "neoverse-n1",
        1536,
    ),
];

const fn x86(name: &'static str, suites: &'static [&'static str]) -> Machine {
    let arch = Arch::X86_64;
    Machine {
        name,
        arch,
        package: CLOUD_AMD64,
        suites,
        cpu: "max",
        node_memory: 512,
        // Those run on a 4 KiB and on a 16 KiB kernel of arm64; for this architecture the tests
        // proper run all of them.
        skip: "hazards",
        quiet_seconds: 90,
    }
}

const fn arm(
    name: &'static str,
    package: &'static str,
    suites: &'static [&'static str],
    cpu: &'static str,
    node_memory: u32,
) -> Machine {
    let arch = Arch::Aarch64;
    Machine { name, arch, package, suites, cpu, node_memory, skip: "", quiet_seconds: 150 }
}
