//! The ways in which a program is run.

use anyhow::Result;
use elfremap_tests::lab::Lab;
use elfremap_tests::run::Run;
use elfremap_tests::smaps::{Backing, Merge};
use std::fmt;
use std::path::Path;

/// `ELFREMAP_BACKEND`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backend {
    Auto,
    Thp,
    Hugetlb,
}

impl Backend {
    /// What text and data that is never written must lie on.
    pub(crate) fn read_only(self) -> Backing {
        match self {
            Self::Auto | Self::Hugetlb => Backing::Hugetlb,
            Self::Thp => Backing::Thp,
        }
    }

    /// What data and bss must lie on: `auto` keeps hugetlb pages away from memory
    /// that is written.
    pub(crate) fn written(self) -> Backing {
        match self {
            Self::Hugetlb => Backing::Hugetlb,
            Self::Auto | Self::Thp => Backing::Thp,
        }
    }
}

/// What of the library is in a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Library {
    /// Not loaded.
    Absent,
    /// Loaded, and told to do nothing (`ELFREMAP=off`).
    Off,
    /// Loaded, with these options; those of their default value are not set.
    On(Backend, Merge),
}

/// One way to run a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mode {
    pub(crate) library: Library,
    /// Whether addresses are random.
    pub(crate) aslr: bool,
    /// Whether the pages are moved aside and copied back, as on kernels before 5.16.
    pub(crate) aside: bool,
}

impl Mode {
    /// Without the library, at fixed addresses.
    pub(crate) const PLAIN: Self = Self { library: Library::Absent, aslr: false, aside: false };

    /// With the library told to do nothing.
    pub(crate) const OFF: Self = Self { library: Library::Off, aslr: false, aside: false };

    /// With the library at work.
    pub(crate) const fn on(backend: Backend, merge: Merge, aslr: bool) -> Self {
        Self { library: Library::On(backend, merge), aslr, aside: false }
    }

    /// The same with the strategy for old kernels.
    pub(crate) const fn aside(self) -> Self {
        Self { aside: true, ..self }
    }

    /// The backend, when the library is at work, and the merge level.
    pub(crate) fn options(&self) -> (Option<Backend>, Merge) {
        match self.library {
            Library::On(backend, merge) => (Some(backend), merge),
            Library::Absent | Library::Off => (None, Merge::None),
        }
    }

    /// The same options for a run of `elfremap-check`.
    pub(crate) fn apply_to_check(&self, run: Run) -> Run {
        let (backend, merge) = self.options();
        let run = run.arg("--merge").arg(lower(&merge));
        match backend {
            Some(backend) => run.arg("--backend").arg(lower(&backend)),
            None => run,
        }
    }

    /// `run` in this mode.
    ///
    /// # Errors
    /// When the library has not been built.
    pub(crate) fn apply(&self, lab: &Lab, run: Run) -> Result<Run> {
        match self.library {
            Library::Absent => Ok(self.apply_at(Path::new(""), run)),
            _ => Ok(self.apply_at(&lab.library()?, run)),
        }
    }

    /// The same with the library at a given path.
    pub(crate) fn apply_at(&self, library: &Path, run: Run) -> Run {
        let run = if self.aslr { run } else { run.aslr_off() };
        let (backend, merge) = match self.library {
            Library::Absent => return run,
            Library::Off => return run.preload_too(library).env("ELFREMAP", "off"),
            Library::On(backend, merge) => (backend, merge),
        };
        let run = run.preload_too(library);
        let run = if self.aside { run.env("ELFREMAP_STRATEGY", "move") } else { run };
        let run = match backend {
            Backend::Auto => run,
            Backend::Thp => run.env("ELFREMAP_BACKEND", "thp"),
            Backend::Hugetlb => run.env("ELFREMAP_BACKEND", "hugetlb"),
        };
        match merge {
            Merge::None => run,
            Merge::Rx => run.env("ELFREMAP_MERGE", "rx"),
            Merge::Relro => run.env("ELFREMAP_MERGE", "relro"),
            Merge::Rwx => run.env("ELFREMAP_MERGE", "rwx"),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.library {
            Library::Absent => f.write_str("plain")?,
            Library::Off => f.write_str("off")?,
            Library::On(backend, merge) => {
                write!(f, "{}, {}", lower(&backend), lower(&merge))?;
            }
        }
        f.write_str(if self.aside { ", move" } else { "" })?;
        f.write_str(if self.aslr { "" } else { ", aslr off" })
    }
}

fn lower(value: &impl fmt::Debug) -> String {
    format!("{value:?}").to_lowercase()
}
