//! The yardstick of the start-up cost: what the kernel needs to populate huge pages
//! and the CPU to copy bytes into them, once and nothing else. Run in a process of
//! its own, like the preload, on the same CPU.

use crate::memory::{Kind, Memory};
use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of the hidden command `populate`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Bytes to put on hugetlb pages
    #[arg(long, default_value_t = 0)]
    hugetlb: usize,
    /// Bytes to put on transparent huge pages
    #[arg(long, default_value_t = 0)]
    thp: usize,
    /// File whose bytes are copied, again and again when it is shorter
    #[arg(long, value_name = "FILE")]
    source: PathBuf,
}

/// What it took, in microseconds: mmap, MADV_POPULATE_WRITE and copying.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Cost {
    /// By the clock.
    pub wall_us: f64,
    /// CPU time.
    pub cpu_us: f64,
    /// CPU time of the copying alone.
    pub copy_cpu_us: f64,
    /// CPU time to read the bytes from the file with read(2) instead, from the page cache.
    pub read_cpu_us: f64,
}

/// Does it and prints the [`Cost`] as JSON.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut cost = Cost { wall_us: 0.0, cpu_us: 0.0, copy_cpu_us: 0.0, read_cpu_us: 0.0 };
    let file = File::open(&args.source);
    let file = file.with_context(|| format!("cannot open {}", args.source.display()))?;
    let source = Memory::of_file(&file).context("cannot map the source")?;
    for (bytes, kind) in [(args.hugetlb, Kind::Hugetlb), (args.thp, Kind::Thp)] {
        if bytes == 0 {
            continue;
        }
        let (start, start_cpu) = (Instant::now(), cpu_us()?);
        let target = Memory::anonymous(bytes, kind)?;
        let populated_cpu = cpu_us()?;
        target.fill_from(&source);
        let end_cpu = cpu_us()?;
        cost.wall_us += start.elapsed().as_secs_f64() * 1e6;
        cost.cpu_us += end_cpu - start_cpu;
        cost.copy_cpu_us += end_cpu - populated_cpu;
        let read_cpu = cpu_us()?;
        target.read_from(&file, source.len)?;
        cost.read_cpu_us += cpu_us()? - read_cpu;
        target.check(kind)?;
    }
    println!("{}", serde_json::to_string(&cost)?);
    Ok(())
}

fn cpu_us() -> Result<f64> {
    let now = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).context("cannot read the clock")?;
    Ok(now.tv_sec() as f64 * 1e6 + now.tv_nsec() as f64 / 1e3)
}
