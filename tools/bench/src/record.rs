//! Raw data: JSON lines, one record each. `measure` appends them as they come, `report`
//! reads them.

use crate::machine::Machine;
use crate::pool::Pool;
use crate::snapshot::{Huge, Image};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;

/// What is measured.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum, Debug,
)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Bench {
    /// Whether huge pages reach the hardware here at all
    Chase,
    /// What the preload costs at the start of a program
    Startup,
    /// What the preload costs a script of programs too small to be moved
    Refused,
    /// What the move gains while the program runs
    Runtime,
    /// What the move gains for programs that work for a second
    Programs,
    /// What the move gains on real servers under load
    Servers,
    /// What the move costs while the program runs: fork, memory, a second instance
    Costs,
}

/// One line.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(tag = "record", rename_all = "kebab-case")]
pub(crate) enum Record {
    /// The first line of a run of `measure`.
    Run {
        schema: u32,
        /// Seconds since 1970.
        time: u64,
        machine: Machine,
        /// Command line, without the program's name.
        options: Vec<String>,
    },
    /// What smaps said of a subject in a variant.
    Huge { bench: Bench, subject: String, variant: String, huge: Huge },
    /// What smaps said of a subject's own segments in a variant.
    Image { bench: Bench, subject: String, variant: String, image: Image },
    /// One run of a subject in a variant.
    Sample(Sample),
    /// The first line of counts of the TLB model, which `elfremap-machines --tlb` writes.
    Model(Model),
    /// One run under the TLB model.
    Tlb(TlbRun),
    /// Something asked for was not measured.
    Skipped { bench: Bench, subject: String, variant: String, reason: String },
}

/// One run of a subject in a variant.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Sample {
    pub bench: Bench,
    pub subject: String,
    pub variant: String,
    /// The variants of one round ran one right after the other.
    pub round: u32,
    /// The pool before the run.
    pub pool: Pool,
    /// Figures by name; the unit is the end of the name.
    pub values: BTreeMap<String, f64>,
}

/// What the TLB model counted in.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Model {
    pub schema: u32,
    /// The guest's kernel.
    pub kernel: String,
    pub qemu: String,
    pub commit: String,
    /// Entries x ways of each modelled TLB.
    pub tlbs: BTreeMap<String, String>,
}

/// One run of a subject in a variant under the TLB model.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct TlbRun {
    pub subject: String,
    pub variant: String,
    pub round: u32,
    /// Whether the program does the same each time, so that the counts must be the same.
    pub exact: bool,
    /// 2 MiB pages that the kernel had given it when counting began.
    pub huge_pages: u64,
    pub counts: TlbCounts,
}

/// What the TLB model counts, from the program's first own instruction to its exit.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct TlbCounts {
    pub instructions: u64,
    /// Loads and stores.
    pub accesses: u64,
    /// Misses of the first level.
    pub itlb_misses: u64,
    pub dtlb_misses: u64,
    /// Misses of both levels.
    pub itlb_walks: u64,
    pub dtlb_walks: u64,
}

/// Appends records to a data file.
#[derive(Debug)]
pub(crate) struct Writer(File);

impl Writer {
    /// Creates the file, which must not exist: raw data is never written over.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        let file = File::options().write(true).create_new(true).open(path);
        Ok(Self(file.with_context(|| format!("cannot create {}", path.display()))?))
    }

    pub(crate) fn write(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_string(record)?;
        line.push('\n');
        self.0.write_all(line.as_bytes()).context("cannot write a record")
    }
}

/// All records of a data file.
pub(crate) fn read(path: &Path) -> Result<Vec<Record>> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let records = text.lines().enumerate().map(|(index, line)| {
        serde_json::from_str(line)
            .with_context(|| format!("cannot read line {} of {}", index + 1, path.display()))
    });
    records.collect()
}
