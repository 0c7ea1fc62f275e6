//! `measure`: runs variants side by side and keeps the raw data.
//!
//! In each round every variant runs once, one right after the other, in an order
//! that is rotated from round to round and reversed from turn to turn, so that work
//! of other users of the machine that lasts longer than a run hits all variants
//! alike. Nothing is discarded: a run that fails ends the measurement. Only somebody
//! else's library may fail: it is then left out of that subject, and the record says why.

pub(crate) mod chase;
mod costs;
mod programs;
mod refused;
pub(crate) mod runtime;
mod servers;
mod startup;

use crate::machine::Machine;
use crate::mysql::MySql;
use crate::pool::{Pool, Reservation};
use crate::record::{Bench, Record, Sample, Writer};
use crate::runner::{self, Runner};
use crate::variant::{LIBHUGETLBFS, Variant, Variants};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Version of the records.
const SCHEMA: u32 = 1;

/// Arguments of `elfremap-bench measure`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// What to measure [default: all]
    #[arg(value_enum)]
    benches: Vec<Bench>,
    /// File to keep the raw data in; must not exist
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Rounds, in each of which every variant runs once
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// A rival's preload library and its environment, measured beside
    #[arg(long, value_name = "NAME=PATH[,ENV=VALUE...]")]
    rival: Vec<String>,
    /// Measure only these variants, beside plain, control and rivals [default: all]
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = variant_names())]
    variant: Vec<String>,
    /// Text sizes of the generated programs, in MiB [default: 8,64,128 for startup,
    /// 4,16,64,128 for runtime]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=128))]
    text_mb: Vec<u32>,
    /// Strides of the generated programs of runtime, in bytes
    #[arg(long, value_delimiter = ',', default_values_t = [4096, 256])]
    stride: Vec<u32>,
    /// More programs for startup; each is run with the argument --version
    #[arg(long, value_name = "PATH")]
    program: Vec<PathBuf>,
    /// Measure only subjects whose name contains one of these
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    only: Vec<String>,
    /// Slices for each server in a round
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    slices: u32,
    /// Seconds of load in a slice
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    slice_seconds: u32,
    /// CPU for the programs that are measured
    #[arg(long, default_value_t = 0)]
    cpu: usize,
    /// CPU for the programs that load the servers
    #[arg(long, default_value_t = 1)]
    client_cpu: usize,
    /// The preload library
    #[arg(long, value_name = "FILE", default_value_os_t = default_library())]
    library: PathBuf,
    /// Folder for generated programs
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    work: PathBuf,
}

impl Args {
    /// Whether a subject of this name is to be measured.
    fn asks_for(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text))
    }
}

/// `libelfremap.so` beside this program.
pub(crate) fn default_library() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_default();
    own.with_file_name("libelfremap.so")
}

/// Measures and writes the data file.
pub(crate) fn run(args: &Args) -> Result<()> {
    runner::catch_interrupts()?;
    let mut session = Session {
        variants: Variants::new(&args.library, &args.work)?,
        mysql: None,
        failed: BTreeSet::new(),
        waited: Duration::ZERO,
        runner: Runner::new(args.cpu, &args.work)?,
        out: Writer::create(&args.out)?,
        args,
    };
    session.out.write(&Record::Run {
        schema: SCHEMA,
        time: SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs(),
        machine: Machine::read()?,
        options: std::env::args().skip(1).collect(),
    })?;
    let wanted = |bench| args.benches.is_empty() || args.benches.contains(&bench);
    let serves = wanted(Bench::Servers)
        && ["oltp_point_select", "oltp_read_only"]
            .iter()
            .any(|test| args.asks_for(&format!("{MYSQLD} {test}")));
    if serves || wanted(Bench::Startup) && args.asks_for(MYSQLD) {
        match MySql::get(&args.work) {
            Ok(mysql) => {
                eprintln!("elfremap-bench: {}", mysql.version);
                session.mysql = Some(mysql);
            }
            Err(error) => {
                let bench = if serves { Bench::Servers } else { Bench::Startup };
                session.skipped(bench, MYSQLD, "all", &format!("{error:#}"))?;
            }
        }
    }
    if wanted(Bench::Chase) {
        chase::measure(&mut session)?;
    }
    if wanted(Bench::Startup) {
        startup::measure(&mut session)?;
    }
    if wanted(Bench::Refused) {
        refused::measure(&mut session)?;
    }
    if wanted(Bench::Runtime) {
        runtime::measure(&mut session)?;
    }
    if wanted(Bench::Costs) {
        costs::measure(&mut session)?;
    }
    if wanted(Bench::Programs) {
        programs::measure(&mut session)?;
    }
    if wanted(Bench::Servers) {
        servers::measure(&mut session)?;
    }
    if session.waited > Duration::from_secs(1) {
        let seconds = session.waited.as_secs();
        eprintln!("elfremap-bench: waited {seconds} s while others used the pool of huge pages");
    }
    eprintln!("elfremap-bench: raw data in {}", args.out.display());
    Ok(())
}

/// What is measured in several variants.
trait Subject {
    /// Its name in the report.
    fn name(&self) -> &str;
    /// Huge pages that are enough for it.
    fn pages(&self) -> u64;
}

/// What the parts of a measurement share.
#[derive(Debug)]
struct Session<'a> {
    args: &'a Args,
    variants: Variants,
    /// MySQL's server, if it could be had.
    mysql: Option<MySql>,
    /// Subjects and variants that somebody else's library has made fail.
    failed: BTreeSet<(String, String)>,
    /// For the pool's lock.
    waited: Duration,
    runner: Runner,
    out: Writer,
}

impl Session<'_> {
    /// Plain, control, elfremap with each of `options` that is asked for, and the rivals.
    fn all_variants(&self, options: &[Options]) -> Result<Vec<Variant>> {
        let names = &self.args.variant;
        let asked = |name: &str| names.is_empty() || names.iter().any(|asked| asked == name);
        let mut all = vec![self.variants.plain(), self.variants.control()];
        let options = options.iter().filter(|o| asked(o.name));
        all.extend(options.map(|o| self.variants.elfremap(o.name, o.env, o.needs_pool)));
        if asked(LIBHUGETLBFS) {
            all.extend(self.variants.libhugetlbfs()?);
        }
        for rival in &self.args.rival {
            all.push(self.variants.rival(rival)?);
        }
        Ok(all)
    }

    /// Runs `work` for each round and subject with enough huge pages at hand; round
    /// `None` comes first, to warm up all but servers. The pool is reserved for one subject of one round at
    /// a time: it belongs to the whole machine.
    fn rounds<S: Subject>(
        &mut self,
        bench: Bench,
        subjects: &[S],
        mut work: impl FnMut(&mut Self, &S, Option<u32>, bool) -> Result<()>,
    ) -> Result<()> {
        let args = self.args;
        let subjects: Vec<&S> = subjects.iter().filter(|s| args.asks_for(s.name())).collect();
        // Servers are new in every round, and warmed there.
        let warm_up = (bench != Bench::Servers).then_some(None);
        for round in warm_up.into_iter().chain((0..self.args.rounds).map(Some)) {
            for &subject in &subjects {
                let reservation = match Reservation::take(subject.pages()) {
                    Ok(reservation) => {
                        self.waited += reservation.waited();
                        Some(reservation)
                    }
                    Err(error) => {
                        runner::check_interrupt()?;
                        if round.is_none() {
                            eprintln!("elfremap-bench: no huge pages from the pool: {error:#}");
                        }
                        None
                    }
                };
                work(self, subject, round, reservation.is_some())?;
            }
            if let Some(round) = round {
                eprintln!("elfremap-bench: {bench:?}: round {} of {}", round + 1, self.args.rounds);
            }
        }
        Ok(())
    }

    fn sample(
        &mut self,
        bench: Bench,
        subject: &str,
        variant: &str,
        round: u32,
        values: BTreeMap<String, f64>,
    ) -> Result<()> {
        self.out.write(&Record::Sample(Sample {
            bench,
            subject: subject.into(),
            variant: variant.into(),
            round,
            pool: Pool::read()?,
            values,
        }))
    }

    /// Whether to run `subject` in `variant`; says once why not.
    fn wants(
        &mut self,
        bench: Bench,
        subject: &str,
        variant: &Variant,
        pool: bool,
    ) -> Result<bool> {
        let key = (subject.to_owned(), variant.name.clone());
        if self.failed.contains(&key) {
            return Ok(false);
        }
        if variant.needs_pool && !pool {
            self.skipped(bench, subject, &variant.name, "no huge pages")?;
            self.failed.insert(key);
            return Ok(false);
        }
        Ok(true)
    }

    /// The failure of somebody else's library is no error: the variant is left out from now
    /// on, with the reason in the data.
    fn tolerate<T>(
        &mut self,
        bench: Bench,
        subject: &str,
        variant: &Variant,
        done: Result<T>,
    ) -> Result<Option<T>> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(error) if variant.foreign => {
                runner::check_interrupt()?;
                self.skipped(bench, subject, &variant.name, &format!("{error:#}"))?;
                self.failed.insert((subject.to_owned(), variant.name.clone()));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn skipped(&mut self, bench: Bench, subject: &str, variant: &str, reason: &str) -> Result<()> {
        eprintln!("elfremap-bench: skipped {subject}, {variant}: {reason}");
        self.out.write(&Record::Skipped {
            bench,
            subject: subject.into(),
            variant: variant.into(),
            reason: reason.into(),
        })
    }
}

/// A way to set elfremap's options.
#[derive(Clone, Copy, Debug)]
struct Options {
    name: &'static str,
    env: &'static [(&'static str, &'static str)],
    needs_pool: bool,
}

const DEFAULT: Options = Options { name: "elfremap", env: &[], needs_pool: false };
const THP: Options =
    Options { name: "elfremap-thp", env: &[("ELFREMAP_BACKEND", "thp")], needs_pool: false };
const HUGETLB: Options =
    Options { name: "elfremap-hugetlb", env: &[("ELFREMAP_BACKEND", "hugetlb")], needs_pool: true };
const RODATA: Options = Options {
    name: "elfremap-rodata",
    env: &[("ELFREMAP_SEGMENTS", "text,rodata,data,bss")],
    needs_pool: false,
};
const TEXT: Options =
    Options { name: "elfremap-text", env: &[("ELFREMAP_SEGMENTS", "text")], needs_pool: false };
const RX: Options =
    Options { name: "elfremap-rx", env: &[("ELFREMAP_MERGE", "rx")], needs_pool: false };

/// All of them; the default comes first.
const OPTIONS: [Options; 6] = [DEFAULT, RX, RODATA, TEXT, THP, HUGETLB];

/// What `--variant` takes.
fn variant_names() -> [&'static str; OPTIONS.len() + 1] {
    let mut names = [LIBHUGETLBFS; OPTIONS.len() + 1];
    for (name, options) in names.iter_mut().zip(OPTIONS) {
        *name = options.name;
    }
    names
}

/// Name of MySQL's server.
const MYSQLD: &str = "mysqld";

/// `items` in the order for `round`.
fn order<T>(items: &[T], round: u32) -> Vec<&T> {
    let round = round as usize;
    let (turn, shift) = (round / items.len(), round % items.len());
    let rotated = items[shift..].iter().chain(&items[..shift]);
    if turn % 2 == 0 { rotated.collect() } else { rotated.rev().collect() }
}

/// The path of an ELF program called `name`, in PATH or where servers and compilers lie.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    if name == "cc1" {
        let path = crate::machine::first_line("gcc", &["-print-prog-name=cc1"]);
        return is_elf(Path::new(&path)).then(|| path.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/usr/libexec")])
        .map(|dir| dir.join(name))
        .find(|path| is_elf(path))
}

fn is_elf(path: &Path) -> bool {
    let mut magic = [0; 4];
    std::fs::File::open(path)
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic))
        .is_ok_and(|()| magic == *b"\x7fELF")
}

/// The size of a file, in bytes.
fn file_size(path: &Path) -> Result<u64> {
    let data =
        std::fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    Ok(data.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_comes_first_and_last() {
        let items = ["a", "b", "c"];
        let orders: Vec<String> =
            (0..6).map(|round| order(&items, round).into_iter().copied().collect()).collect();
        assert_eq!(orders, ["abc", "bca", "cab", "cba", "acb", "bac"]);
    }

    #[test]
    fn finds_programs_but_no_scripts() {
        assert!(find_program("true").is_some());
        assert_eq!(find_program("no-such-program"), None);
        assert!(!is_elf(Path::new("/etc/passwd")));
    }
}
