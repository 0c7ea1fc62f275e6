//! `elfremap attach`: moves the code of a program that runs.

use std::fmt::Write as _;
use std::time::Duration;

use elfremap::class::Class;
use elfremap::exec::Source;
use elfremap::hugepage::PageSize;
use elfremap::policy::{Backends, Merge, Policy, Segments};
use elfremap::report::{Report, Summary, Verdict, Warning};
use serde::Serialize;

use crate::attach::{self, Options, Outcome, Target};
use crate::commands::perfmap;
use crate::exit::Status;
use crate::host;
use crate::interrupt;
use crate::output;
use crate::system::System;

/// Version of the `--json` document, raised when a field changes its meaning or goes.
const SCHEMA: u32 = 1;

/// Arguments of `elfremap attach`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Copies the code onto huge pages while the program runs, stops all of its threads
for a few milliseconds, and lets the copy take its place. No restart, no preload:
it works for static programs, Go and musl too. `elfremap detach` undoes it.

Exit status: 0 moved, 1 failed, 2 wrong usage, 3 nothing to move or not suitable,
4 not permitted, 5 not enough huge pages.

Examples:
  elfremap attach $(pidof mariadbd)
  elfremap attach 4711 --dry-run
  elfremap attach 4711 --objects 'libjvm.so' --backend thp
  elfremap attach 4711 --segments text,data,bss --perfmap")]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// The process, or one of its threads
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pid: u32,

    #[command(flatten)]
    what: What,

    /// Only these shared objects beside the program: names or globs, separated by colons;
    /// '' for none [default: all that have a huge page to gain]
    #[arg(long, value_name = "GLOB")]
    objects: Option<String>,

    /// How long to wait for threads that cannot be stopped, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10",
          value_parser = clap::value_parser!(u32).range(1..=86400))]
    timeout: u32,

    /// Say what would be moved, and touch nothing
    #[arg(long)]
    dry_run: bool,

    /// Write /tmp/perf-PID.map as well
    #[arg(long, conflicts_with = "dry_run")]
    perfmap: bool,

    /// Print a JSON document
    #[arg(long)]
    json: bool,
}

/// What moves, and onto what.
#[derive(clap::Args, Clone, Debug)]
struct What {
    /// Classes to move: a list of text, rodata, data, bss, header. The program stands still
    /// while data and bss are copied
    #[arg(long, value_name = "LIST", default_value = "text,rodata")]
    segments: Segments,

    /// Where huge pages come from: auto, hugetlb, thp, or text:hugetlb,data:thp
    #[arg(long, value_name = "KIND", default_value = "auto")]
    backend: Backends,

    /// Huge page size: 2M, 1G, ... [default: 2M, or what the machine has]
    #[arg(long, value_name = "SIZE")]
    page_size: Option<PageSize>,

    /// What may share a huge page: none, rx, relro, rwx
    #[arg(long, value_name = "LEVEL", default_value = "none")]
    merge: Merge,
}

impl What {
    fn policy(&self) -> Policy {
        Policy {
            segments: self.segments,
            backends: self.backend,
            page_size: self.page_size.map(PageSize::bytes),
            merge: self.merge,
            ..Policy::default()
        }
    }
}

/// Runs the command.
///
/// # Errors
/// The process cannot be attached to (statuses 1, 3, 4), or stdout cannot be written.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let target = Target::open(args.pid)?;
    let policy = args.what.policy();
    let options = Options {
        policy,
        block: host::block_size(&System::running(), policy.page_size).bytes(),
        objects: args.objects.clone(),
        timeout: Duration::from_secs(args.timeout.into()),
    };
    if args.dry_run {
        let plans = target.explain(attach::plan(&target, &options))?;
        let done = plans.iter().any(|(_, plan)| plan.is_some());
        if args.json {
            output::print_json(&planned(&target, &plans))?;
        } else {
            output::print(&describe_plans(&target, &plans))?;
        }
        return Ok(if done { Status::Done } else { Status::Negative });
    }
    interrupt::catch()?;
    let outcome = target.explain(attach::attach(&target, &options, None, &|calls| calls))?;
    if args.json {
        output::print_json(&document(&target, &outcome))?;
    } else {
        output::print(&describe(&target, &outcome))?;
    }
    warn(&outcome.reports);
    let status = verdict(&outcome.reports);
    if args.perfmap && status == Status::Done {
        // Its line is for people; with --json the document stays alone on stdout.
        perfmap::write_map(target.pid, args.json)?;
    }
    Ok(status)
}

/// What the exit status says of the outcome.
#[must_use]
pub fn verdict(reports: &[Report]) -> Status {
    let moved = reports.iter().flat_map(|report| &report.moved);
    if moved.clone().any(|m| m.source.is_some()) {
        Status::Done
    } else if reports.iter().any(|report| !report.shortages.is_empty()) {
        Status::Short
    } else {
        Status::Negative
    }
}

/// Tells on stderr what could not be had.
pub fn warn(reports: &[Report]) {
    for report in reports {
        let is_notable = !report.shortages.is_empty() || report.loosened().is_some();
        if is_notable && matches!(report.verdict, Verdict::Planned) {
            eprintln!("elfremap: warning: {}", Warning { report, pool: None });
        }
    }
}

/// Objects that are worth a line: those of which something moves, and the program.
fn worth<T>(items: &[T], moves: impl Fn(&T) -> bool) -> impl Iterator<Item = &T> {
    items.iter().enumerate().filter(move |(index, item)| *index == 0 || moves(item)).map(|(_, i)| i)
}

fn describe(target: &Target, outcome: &Outcome) -> String {
    let mut text = format!("{} (pid {}):\n", target.name, target.pid);
    for report in worth(&outcome.reports, |report| !report.moved.is_empty()) {
        let _ = writeln!(text, "  {}", Summary(report));
        for left in &report.left {
            if left.reason.is_notable() {
                let _ = writeln!(text, "    stays: {}: {}", left.range, left.reason);
            }
        }
    }
    if !outcome.stall.is_zero() {
        let _ = writeln!(text, "  all threads were stopped for {}", milliseconds(outcome.stall));
    }
    text
}

/// A duration for people.
pub(super) fn milliseconds(duration: Duration) -> String {
    let hundredths = duration.as_micros().div_ceil(10);
    format!("{}.{:02} ms at most", hundredths / 100, hundredths % 100)
}

fn describe_plans(target: &Target, plans: &[(Report, Option<elfremap::plan::Plan>)]) -> String {
    let mut text = format!("{} (pid {}) would move:\n", target.name, target.pid);
    for (report, plan) in worth(plans, |(_, plan)| plan.is_some()) {
        let path = crate::elf::printable(&report.program);
        let Some(plan) = plan else {
            if let Verdict::Refused(refusal) = report.verdict {
                let _ = writeln!(text, "  {path}: nothing: {refusal}");
            }
            continue;
        };
        let pages = output::counted(plan.pages(), "huge page");
        let _ = writeln!(text, "  {path}: {pages}, {} of the pool", plan.pool_pages());
        for m in &plan.moves {
            let classes = Class::ALL.into_iter().filter(|&class| m.bytes.get(class) > 0);
            let classes: Vec<_> = classes.map(Class::name).collect();
            let _ = writeln!(text, "    {} {} {}", m.range, m.prot, classes.join(", "));
        }
    }
    text
}

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    pid: u32,
    name: &'a str,
    dry_run: bool,
    /// The longest time for which all threads were stopped.
    stall_nanoseconds: u128,
    objects: Vec<ObjectJson>,
}

#[derive(Serialize)]
struct ObjectJson {
    path: String,
    refusal: Option<&'static str>,
    moved: Vec<RangeJson>,
    left: Vec<LeftJson>,
    shortages: Vec<ShortageJson>,
}

#[derive(Serialize)]
struct RangeJson {
    range: String,
    rights: String,
    bytes: u64,
    /// `hugetlb`, `thp`; null for small pages, or when nothing was done yet.
    pages: Option<&'static str>,
    page_size: Option<u64>,
}

#[derive(Serialize)]
struct LeftJson {
    range: String,
    bytes: u64,
    reason: &'static str,
}

#[derive(Serialize)]
struct ShortageJson {
    range: String,
    step: &'static str,
    error: String,
}

fn object(report: &Report) -> ObjectJson {
    let refusal = match report.verdict {
        Verdict::Refused(refusal) => Some(refusal.code()),
        Verdict::Planned => None,
    };
    let moved = report.moved.iter().map(|m| RangeJson {
        range: m.range.to_string(),
        rights: m.prot.to_string(),
        bytes: m.range.len(),
        pages: m.source.map(|source| match source {
            Source::Hugetlb(_) => "hugetlb",
            Source::Thp(_) => "thp",
        }),
        page_size: m.source.map(Source::size),
    });
    let left = report.left.iter().map(|left| LeftJson {
        range: left.range.to_string(),
        bytes: left.bytes.total(),
        reason: left.reason.code(),
    });
    let shortages = report.shortages.iter().map(|(range, shortage)| ShortageJson {
        range: range.to_string(),
        step: shortage.step,
        error: shortage.errno.to_string(),
    });
    ObjectJson {
        path: crate::elf::printable(&report.program),
        refusal,
        moved: moved.collect(),
        left: left.collect(),
        shortages: shortages.collect(),
    }
}

fn document<'a>(target: &'a Target, outcome: &Outcome) -> Document<'a> {
    Document {
        schema: SCHEMA,
        pid: target.pid,
        name: &target.name,
        dry_run: false,
        stall_nanoseconds: outcome.stall.as_nanos(),
        objects: outcome.reports.iter().map(object).collect(),
    }
}

fn planned<'a>(
    target: &'a Target,
    plans: &[(Report, Option<elfremap::plan::Plan>)],
) -> Document<'a> {
    let objects = plans.iter().map(|(report, plan)| {
        let mut object = object(report);
        let moves = plan.iter().flat_map(|plan| &plan.moves);
        object.moved = moves
            .map(|m| RangeJson {
                range: m.range.to_string(),
                rights: m.prot.to_string(),
                bytes: m.range.len(),
                pages: None,
                page_size: None,
            })
            .collect();
        object
    });
    Document {
        schema: SCHEMA,
        pid: target.pid,
        name: &target.name,
        dry_run: true,
        stall_nanoseconds: 0,
        objects: objects.collect(),
    }
}
