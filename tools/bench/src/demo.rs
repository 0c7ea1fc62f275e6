//! `demo`: a real program of this machine and a generated one, before and after.

mod jobs;

use crate::generate::{self, Spec};
use crate::machine::Machine;
use crate::measure::default_library;
use crate::measure::runtime::{self, Walked};
use crate::pool::{Pool, Reservation};
use crate::runner::{self, Job, Runner};
use crate::snapshot::{Huge, Image};
use crate::stats;
use crate::variant::{Variant, Variants};
use anyhow::{Result, ensure};
use jobs::RealJob;
use std::path::PathBuf;

/// Arguments of `elfremap-bench demo`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Pairs of runs (plain, then with elfremap) for each program
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Text of the generated program, in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=128))]
    text_mb: u32,
    /// CPU for the programs
    #[arg(long, default_value_t = 0)]
    cpu: usize,
    /// The preload library
    #[arg(long, value_name = "FILE", default_value_os_t = default_library())]
    library: PathBuf,
    /// Folder for generated programs and scratch files
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    work: PathBuf,
}

/// Bss of the generated program, in MiB.
const BSS_MB: u32 = 16;

/// Runs the demo.
pub(crate) fn run(args: &Args) -> Result<()> {
    runner::catch_interrupts()?;
    let variants = Variants::new(&args.library, &args.work)?;
    let show = Show {
        runner: Runner::new(args.cpu, &args.work)?,
        plain: variants.plain(),
        elfremap: variants.elfremap("elfremap", &[], false).bare(),
        library: args.library.display().to_string(),
        pairs: args.pairs,
    };
    println!(
        "elfremap {}: text, data and bss of a program on huge pages\n",
        env!("CARGO_PKG_VERSION")
    );
    let machine = Machine::read()?;
    println!("Machine  {}", machine.hardware());
    println!("Kernel   {}", machine.software());
    let pool = Pool::read()?;
    println!("Pool     {} of {} huge pages free", pool.available(), pool.total);
    if !nix::unistd::geteuid().is_root() {
        println!("         (only root may add to them: where they do not suffice,");
        println!("         transparent huge pages are used)");
    }

    let real = jobs::find(&args.work)?;
    if real.is_empty() {
        println!("\nNo large program found here ({}).", jobs::KNOWN);
    }
    for job in &real {
        show.with_pages(job.pages, || show.real(job))?;
    }
    let spec = Spec { text_mb: args.text_mb, stride: 4096, bss_mb: BSS_MB, seed: 1 };
    let program = generate::build(&spec, &args.work)?;
    let pages = u64::from(args.text_mb + BSS_MB) / 2 + 8;
    show.with_pages(pages, || show.generated(&spec, &Job::new(&program, &["2000", "3", "wait"])))?;

    println!("\nSizes are the kernel's (/proc/PID/smaps). Times depend on what else the");
    println!("machine does: the ratio is the median of pairs that ran one after the other.");
    Ok(())
}

/// What all programs of the demo share.
#[derive(Debug)]
struct Show {
    runner: Runner,
    plain: Variant,
    elfremap: Variant,
    library: String,
    pairs: u32,
}

impl Show {
    /// Shows something while `pages` huge pages are reserved, or without them.
    fn with_pages(&self, pages: u64, show: impl FnOnce() -> Result<()>) -> Result<()> {
        println!();
        // Given back at the end of this function.
        let _reservation = reserve(pages)?;
        show()
    }

    /// A program of the machine: its CPU time, as the kernel accounts it.
    fn real(&self, job: &RealJob) -> Result<()> {
        println!("{}: {}", job.name, job.what);
        println!("  LD_PRELOAD={} \\", self.library);
        println!("  {}\n", job.shown);
        let (plain_image, first, seconds) = self.inspect(job, &self.plain, None)?;
        let (image, output, _) = self.inspect(job, &self.elfremap, Some(seconds))?;
        let same = first == output;
        let pairs = self.pairs(|variant| {
            job.prepare()?;
            let run = self.runner.run(&job.job, variant)?;
            Ok((run.user_us + run.system_us) / 1e6)
        })?;
        table(plain_image, image);
        times("CPU time", "s", &pairs);
        println!("  {:<10}{:>37}", "output", if same { "same" } else { "DIFFERS" });
        ensure!(same, "{} printed something else with elfremap", job.name);
        Ok(())
    }

    /// Runs a job once; reads its smaps when half of its time (`seconds`) is over.
    fn inspect(
        &self,
        job: &RealJob,
        variant: &Variant,
        seconds: Option<f64>,
    ) -> Result<(Image, Vec<u8>, f64)> {
        let seconds = match seconds {
            Some(seconds) => seconds,
            None => {
                job.prepare()?;
                self.runner.run(&job.job, variant)?.wall_us / 1e6
            }
        };
        job.prepare()?;
        let image = self.runner.image_at(&job.job, variant, seconds / 2.0)?;
        Ok((image, job.output()?, seconds))
    }

    /// The generated program: it times its own walks.
    fn generated(&self, spec: &Spec, job: &Job) -> Result<()> {
        println!(
            "generated program: jumps through {} MB of text, pointers through {} MB of bss",
            spec.text_mb, spec.bss_mb
        );
        println!("  LD_PRELOAD={} \\", self.library);
        println!("  {}\n", job.program.display());
        let pairs = self.pairs(|variant| {
            let (line, image) = self.runner.walk(job, variant)?;
            Ok((runtime::parse(&line)?, image))
        })?;
        let hop = |pick: fn(&Walked) -> &[f64]| -> Vec<(f64, f64)> {
            let ns = |walked| stats::median(pick(walked)).unwrap_or(f64::NAN);
            pairs.iter().map(|(plain, elfremap)| (ns(&plain.0), ns(&elfremap.0))).collect()
        };
        let (plain, elfremap) = &pairs[0];
        table(plain.1, elfremap.1);
        times("text hop", "ns", &hop(|walked| &walked.text_ns));
        times("bss hop", "ns", &hop(|walked| &walked.bss_ns));
        let sum = plain.0.checksum;
        let same = pairs.iter().all(|(a, b)| a.0.checksum == sum && b.0.checksum == sum);
        println!("  {:<10}{:>37}", "checksum", if same { "same" } else { "DIFFERS" });
        ensure!(same, "the generated program computed something else with elfremap");
        Ok(())
    }

    /// Runs plain and elfremap one after the other, each first in every other pair.
    fn pairs<T>(&self, mut run: impl FnMut(&Variant) -> Result<T>) -> Result<Vec<(T, T)>> {
        (0..self.pairs)
            .map(|pair| {
                if pair % 2 == 0 {
                    let plain = run(&self.plain)?;
                    Ok((plain, run(&self.elfremap)?))
                } else {
                    let elfremap = run(&self.elfremap)?;
                    Ok((run(&self.plain)?, elfremap))
                }
            })
            .collect()
    }
}

/// Adds what is missing of `pages` to the pool, which only root may.
fn reserve(pages: u64) -> Result<Option<Reservation>> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    match Reservation::take(pages) {
        Ok(reservation) => {
            let added = pages.saturating_sub(reservation.before().available());
            if added > 0 {
                println!("({added} huge pages reserved, given back afterwards)");
            }
            Ok(Some(reservation))
        }
        Err(error) => {
            runner::check_interrupt()?;
            println!("(transparent huge pages are used: {error:#})");
            Ok(None)
        }
    }
}

fn table(plain: Image, elfremap: Image) {
    println!("  {:<10}{:>9}{:>14}{:>14}", "", "size", "plain", "elfremap");
    println!("  {:<10}{:>9}{:>28}", "", "", "MB on huge pages");
    let rows = [
        ("text", plain.text, elfremap.text),
        ("rodata", plain.rodata, elfremap.rodata),
        ("data+bss", plain.data, elfremap.data),
    ];
    for (name, before, after) in rows {
        let huge = |huge: Huge| mb(huge.moved() + huge.file);
        let row = format!(
            "  {name:<10}{:>9.1}{:>14.1}{:>14.1}",
            mb(after.size),
            huge(before),
            huge(after)
        );
        println!("{}", format!("{row}   {}", kinds(after)).trim_end());
    }
}

/// How many MB on pages of which kind.
fn kinds(huge: Huge) -> String {
    let list: Vec<String> =
        [(huge.hugetlb, "hugetlb"), (huge.thp, "transparent"), (huge.file, "page cache")]
            .into_iter()
            .filter(|&(bytes, _)| bytes > 0)
            .map(|(bytes, kind)| format!("{:.1} {kind}", mb(bytes)))
            .collect();
    list.join(", ")
}

fn times(name: &str, unit: &str, pairs: &[(f64, f64)]) {
    let column = |values: Vec<f64>| stats::median(&values).unwrap_or(f64::NAN);
    let mut ratios: Vec<f64> = pairs.iter().map(|&(plain, elfremap)| elfremap / plain).collect();
    ratios.sort_unstable_by(f64::total_cmp);
    println!(
        "  {name:<10}{:>9}{:>14}{:>14}   x {:.2} ({:.2} to {:.2})",
        "",
        format!("{:.2} {unit}", column(pairs.iter().map(|p| p.0).collect())),
        format!("{:.2} {unit}", column(pairs.iter().map(|p| p.1).collect())),
        column(ratios.clone()),
        ratios.first().unwrap_or(&f64::NAN),
        ratios.last().unwrap_or(&f64::NAN),
    );
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
