//! `report`: renders Markdown tables and SVG plots from raw data.
//!
//! Everything in them follows from the data file: rendering it again gives the same
//! bytes, and a test does so for the files that are kept in docs/benchmarks.

mod chase;
mod costs;
mod plot;
mod programs;
mod rivals;
mod tables;
mod tlb;

use crate::machine::Machine;
use crate::record::{self, Bench, Model, Record, Sample, TlbRun};
use crate::snapshot::{Huge, Image};
use crate::stats::{Estimate, estimate, median};
use crate::variant::{CONTROL, PLAIN};
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Arguments of `elfremap-bench report`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Data files that `measure` has written
    #[arg(required = true)]
    data: Vec<PathBuf>,
    /// Folder for NAME.md and its plots
    #[arg(short, long, value_name = "DIR", default_value = "docs/benchmarks")]
    out: PathBuf,
}

/// Renders each data file.
pub(crate) fn run(args: &Args) -> Result<()> {
    fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    for data in &args.data {
        for (name, text) in render(data)? {
            let path = args.out.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            println!("{}", path.display());
        }
    }
    Ok(())
}

/// The files made from one data file: name and content.
fn render(path: &Path) -> Result<Vec<(String, String)>> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(render_data(&stem, &Data::new(record::read(path)?)))
}

fn render_data(stem: &str, data: &Data) -> Vec<(String, String)> {
    let mut files = Vec::new();
    let mut page = tables::head(stem, data);
    if let Some(model) = &data.model {
        page.push_str(&tlb::section(model, &data.tlb));
    }
    for (bench, render) in [
        (Bench::Chase, chase::section as fn(&Data) -> tables::Section),
        (Bench::Startup, tables::startup),
        (Bench::Refused, tables::refused),
        (Bench::Runtime, tables::runtime),
        (Bench::Programs, programs::section),
        (Bench::Servers, tables::servers),
        (Bench::Costs, costs::section),
    ] {
        if data.subjects(bench).is_empty() {
            continue;
        }
        let section = render(data);
        page.push_str(&section.text);
        for (index, plot) in section.plots.iter().enumerate() {
            let name = format!("{stem}-{bench:?}-{}.svg", index + 1).to_lowercase();
            page.push_str(&format!("\n![{}]({name})\n", plot.title));
            files.push((name, plot.svg()));
        }
    }
    page.push_str(&rivals::section(data));
    files.push((format!("{stem}.md"), page));
    files
}

/// The records of a data file, sorted for rendering.
#[derive(Debug)]
struct Data {
    machine: Option<Machine>,
    time: u64,
    options: Vec<String>,
    /// In the order of the file.
    samples: Vec<Sample>,
    huge: BTreeMap<(Bench, String, String), Huge>,
    images: BTreeMap<(Bench, String, String), Image>,
    skipped: Vec<(Bench, String, String, String)>,
    model: Option<Model>,
    tlb: Vec<TlbRun>,
}

impl Data {
    fn new(records: Vec<Record>) -> Self {
        let mut data = Self {
            machine: None,
            time: 0,
            options: Vec::new(),
            samples: Vec::new(),
            huge: BTreeMap::new(),
            images: BTreeMap::new(),
            skipped: Vec::new(),
            model: None,
            tlb: Vec::new(),
        };
        for record in records {
            match record {
                Record::Run { time, machine, options, .. } => {
                    data.machine = Some(machine);
                    data.time = time;
                    data.options = options;
                }
                Record::Sample(sample) => data.samples.push(sample),
                Record::Huge { bench, subject, variant, huge } => {
                    data.huge.insert((bench, subject, variant), huge);
                }
                Record::Image { bench, subject, variant, image } => {
                    data.images.insert((bench, subject, variant), image);
                }
                Record::Model(model) => data.model = Some(model),
                Record::Tlb(run) => data.tlb.push(run),
                Record::Skipped { bench, subject, variant, reason } => {
                    data.skipped.push((bench, subject, variant, reason));
                }
            }
        }
        data
    }

    /// What smaps said of a subject's own segments.
    fn image(&self, bench: Bench, subject: &str, variant: &str) -> Option<Image> {
        self.images.get(&(bench, subject.to_owned(), variant.to_owned())).copied()
    }

    /// MiB of text that are huge without any library: page cache mapped by huge entries.
    /// Such a subject cannot tell what the move gains.
    fn huge_without_us(&self, bench: Bench, subject: &str) -> f64 {
        let of = |variant: &str| {
            let image = self.image(bench, subject, variant).map(|i| i.text.file as f64 / 1048576.0);
            image.or_else(|| self.median(bench, subject, variant, "text_file_huge_mb"))
        };
        [PLAIN, CONTROL].into_iter().filter_map(of).fold(0.0, f64::max)
    }

    fn subjects(&self, bench: Bench) -> Vec<&str> {
        distinct(self.samples.iter().filter(|s| s.bench == bench).map(|s| s.subject.as_str()))
    }

    /// Variants in the order of the first round.
    fn variants(&self, bench: Bench) -> Vec<&str> {
        distinct(self.samples.iter().filter(|s| s.bench == bench).map(|s| s.variant.as_str()))
    }

    fn rounds(&self, bench: Bench) -> usize {
        let rounds = self.samples.iter().filter(|s| s.bench == bench).map(|s| s.round);
        rounds.collect::<std::collections::BTreeSet<_>>().len()
    }

    /// The values called `name` of a subject in a variant, by round.
    fn values(&self, bench: Bench, subject: &str, variant: &str, name: &str) -> BTreeMap<u32, f64> {
        self.samples
            .iter()
            .filter(|s| s.bench == bench && s.subject == subject && s.variant == variant)
            .filter_map(|s| Some((s.round, *s.values.get(name)?)))
            .collect()
    }

    /// The sums of the values called `name` over the slices of each round.
    fn sums(&self, bench: Bench, subject: &str, variant: &str, name: &str) -> BTreeMap<u32, f64> {
        let mut sums = BTreeMap::new();
        for s in &self.samples {
            if s.bench == bench && s.subject == subject && s.variant == variant {
                *sums.entry(s.round).or_default() += s.values.get(name).copied().unwrap_or(0.0);
            }
        }
        sums
    }

    fn median(&self, bench: Bench, subject: &str, variant: &str, name: &str) -> Option<f64> {
        let values: Vec<f64> = self.values(bench, subject, variant, name).into_values().collect();
        median(&values)
    }

    /// `variant` divided by `base`, round by round.
    fn ratio(
        &self,
        bench: Bench,
        subject: &str,
        variant: &str,
        base: &str,
        name: &str,
    ) -> Option<Estimate> {
        let base = self.values(bench, subject, base, name);
        let ratios: Vec<f64> = self
            .values(bench, subject, variant, name)
            .into_iter()
            .filter_map(|(round, value)| Some(value / base.get(&round)?))
            .collect();
        estimate(&ratios)
    }
}

/// Each item once, in the order of first appearance.
fn distinct<'a>(items: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut list = Vec::new();
    for item in items {
        if !list.contains(&item) {
            list.push(item);
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;

    fn sample_of(bench: Bench, variant: &str, round: u32, values: &[(&str, f64)]) -> Record {
        Record::Sample(Sample {
            bench,
            subject: "s".into(),
            variant: variant.into(),
            round,
            pool: Pool { page_kb: 2048, total: 0, free: 0, reserved: 0, surplus: 0 },
            values: values.iter().map(|&(name, value)| (name.to_owned(), value)).collect(),
        })
    }

    fn sample(variant: &str, round: u32, value: f64) -> Record {
        sample_of(Bench::Runtime, variant, round, &[("text_ns", value)])
    }

    /// The page made from `records`.
    fn page(records: Vec<Record>) -> String {
        render_data("t", &Data::new(records)).pop().unwrap().1
    }

    /// A server that serves 100 a second with 1 s of CPU time, times `factor`; six rounds of
    /// two slices, the second round on a machine half as fast.
    fn server(variant: &str, moved_mb: f64, file_mb: f64, factor: f64) -> Vec<Record> {
        let slice = |round: u32, slice: u32| {
            let speed = if round == 1 { 0.5 } else { 1.0 };
            let values = [
                ("done", 100.0 * factor * speed + f64::from(slice)),
                ("seconds", 1.0),
                ("user_us", 6e5),
                ("system_us", 4e5),
                ("text_moved_mb", moved_mb),
                ("text_file_huge_mb", file_mb),
            ];
            sample_of(Bench::Servers, variant, round, &values)
        };
        (0..12).map(|n| slice(n / 2, n % 2)).collect()
    }

    fn row<'a>(page: &'a str, start: &str) -> &'a str {
        let row = page.lines().find(|line| line.starts_with(start));
        row.unwrap_or_else(|| panic!("no row `{start}` in {page}"))
    }

    #[test]
    fn a_rival_is_compared_in_the_same_rounds() {
        let mut records = Vec::new();
        for (variant, moved, factor) in [
            (PLAIN, 0.0, 1.0),
            (CONTROL, 0.0, 1.0),
            ("elfremap", 30.0, 1.2),
            ("slower", 30.0, 1.1),
            ("idle", 0.0, 1.0),
        ] {
            records.extend(server(variant, moved, 0.0, factor));
        }
        let page = page(records);
        let done = row(&page, "| s | done per second | 30 | slower | 30 |");
        assert!(done.ends_with("| ahead |") && done.contains("| 1.09"), "{done}");
        let idle = row(&page, "| s | done per second | 30 | idle | 0 |");
        assert!(idle.ends_with("| (the rival moves nothing) |"), "{idle}");
        let cpu = row(&page, "| s | all CPU for each | 30 | slower |");
        assert!(cpu.ends_with("| ahead |"), "{cpu}");
    }

    #[test]
    fn a_subject_that_is_huge_without_us_is_ruled_out() {
        let measured = |file_mb| {
            let mut records = Vec::new();
            for (variant, moved, factor) in
                [(PLAIN, 0.0, 1.0), (CONTROL, 0.0, 1.0), ("elfremap", 30.0, 1.2), ("r", 9.0, 1.0)]
            {
                records.extend(server(variant, moved, file_mb, factor));
            }
            page(records)
        };
        let (small, huge) = (measured(0.0), measured(4.0));
        assert!(!small.contains("Ruled out: s") && small.contains("## Against rivals"), "{small}");
        assert!(
            huge.contains("Ruled out: s. 4.0 MB") && !huge.contains("## Against rivals"),
            "{huge}"
        );
    }

    #[test]
    fn pages_programs_and_costs_are_compared_with_their_base() {
        let mut records = Vec::new();
        for round in 0..3 {
            let slow = f64::from(round + 1);
            for (pages, ns) in [("small", 40.0), ("thp", 20.0), ("hugetlb", 10.0)] {
                records.push(sample_of(Bench::Chase, pages, round, &[("ns", ns * slow)]));
            }
            for (variant, factor) in [(PLAIN, 1.0), (CONTROL, 1.25), ("elfremap", 2.0)] {
                let cpu = [("user_us", 3e5 * slow * factor), ("system_us", 1e5 * slow * factor)];
                records.push(sample_of(Bench::Programs, variant, round, &cpu));
                let us = [("exit_us", 100.0 * slow * factor), ("write_us", 1.0), ("exec_us", 1.0)];
                records.push(sample_of(Bench::Costs, variant, round, &us));
            }
        }
        let page = page(records);
        assert!(row(&page, "| s | thp |").ends_with("| 0.500 [0.500..0.500] |"));
        assert!(row(&page, "| s | hugetlb |").ends_with("| 0.250 [0.250..0.250] |"));
        assert!(
            row(&page, "| s | elfremap | 0.0, 0.0, 0.0 |")
                .contains("| 2.000 [2.000..2.000] | 1.600 [")
        );
        assert!(row(&page, "| s | elfremap | 400 |").contains("| 2.00 [2.00..2.00] |"));
    }

    #[test]
    fn ratios_are_taken_within_rounds() {
        // The machine is ten times slower in round 1: the ratio does not move.
        let data = Data::new(vec![
            sample("plain", 0, 10.0),
            sample("elfremap", 0, 8.0),
            sample("elfremap", 1, 80.0),
            sample("plain", 1, 100.0),
            sample("elfremap", 2, 3.0), // without its partner: not counted
        ]);
        let ratio = data.ratio(Bench::Runtime, "s", "elfremap", "plain", "text_ns").unwrap();
        assert_eq!((ratio.median, ratio.low, ratio.high, ratio.n), (0.8, 0.8, 0.8, 2));
        assert_eq!(data.variants(Bench::Runtime), ["plain", "elfremap"]);
        assert_eq!(data.rounds(Bench::Runtime), 3);
    }

    #[test]
    fn the_kept_reports_are_what_their_data_render_to() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/benchmarks");
        let Ok(list) = fs::read_dir(docs.join("data")) else { return };
        for entry in list {
            for (name, text) in render(&entry.unwrap().path()).unwrap() {
                let kept = fs::read_to_string(docs.join(&name)).unwrap_or_default();
                assert!(kept == text, "{name} is stale: run `make report`");
            }
        }
    }
}
