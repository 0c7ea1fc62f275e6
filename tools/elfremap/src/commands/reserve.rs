//! `elfremap reserve`: adds huge pages to the pools, or gives free ones back.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, anyhow};
use elfremap::hugepage::{PageSize, pool, size::parse_bytes};
use elfremap::policy::{Backends, Merge, Policy, Segments};

use super::pool::offered_sizes;
use crate::exit::{Failure, Status};
use crate::options::PolicyArgs;
use crate::output::{self, Style};
use crate::reservation::apply::{self, Effort};
use crate::reservation::plan::{self, Nodes, Step, Want};
use crate::reservation::report::{Change, PlannedWrite, Report};
use crate::reservation::survey::{self, KeepFree, Spot, Survey};
use crate::reservation::text::{self, Demand, Lasting, shell_word};
use crate::system::{RootArg, System};
use crate::{check, host, interrupt, launch};

/// Arguments of `elfremap reserve`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Pages are added to what is there, node by node; what others have reserved or use
stays theirs. The kernel may give fewer pages than asked without an error: the
command reads back, tries again and says what was had.

Examples:
  elfremap reserve --for /usr/sbin/mysqld --instances 2
  elfremap reserve --pages 100 --node 0,1 --persist tmpfiles
  elfremap reserve --at-least 512 --hard --all-or-nothing
  elfremap reserve --release                 give back all free pages
  elfremap reserve --for ./server --format kubernetes

Exit status: 0 done, 1 failed, 2 wrong usage, 4 not permitted, 5 fewer pages than asked.")]
#[command(group = clap::ArgGroup::new("number").args(["pages", "at_least", "available", "program"]))]
pub struct Args {
    /// Add N pages (with --release: give back N)
    #[arg(long, value_name = "N")]
    pages: Option<u64>,

    /// Grow the pool to at least N pages, those in use among them
    #[arg(long, value_name = "N", conflicts_with = "release")]
    at_least: Option<u64>,

    /// Grow the pool until at least N pages are free and promised to nobody
    #[arg(long, value_name = "N", conflicts_with = "release")]
    available: Option<u64>,

    /// Grow the pool until there are free pages for BINARY, as many as `elfremap check BINARY`
    /// says it needs; the plan is shown first
    #[arg(long = "for", value_name = "BINARY", conflicts_with = "release")]
    program: Option<PathBuf>,

    /// With --for or --format: how many instances of the program are to start, spread over
    /// the nodes, each on one of them as a whole
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    instances: u64,

    /// Page size: 2M, 1G, ... [default: 2M where the machine has it]
    #[arg(long)]
    size: Option<PageSize>,

    /// Nodes to take the pages from, evenly: numbers (0-1,4), all, or auto: those this
    /// process may use, one helping out for another
    #[arg(long, value_name = "NODES", default_value = "auto")]
    node: Nodes,

    /// Allow N surplus pages beyond the pool (lowered only with --release); auto, with --for:
    /// as many as one more instance needs, and what the nodes could not give
    #[arg(long, value_name = "N")]
    overcommit: Option<Overcommit>,

    /// Give free pages back to the system instead of adding some
    #[arg(long)]
    release: bool,

    /// When the kernel gives too few: compact memory, drop clean caches, try again
    #[arg(long, conflicts_with = "release")]
    hard: bool,

    /// When there are fewer pages than asked: give back what was had
    #[arg(long, conflicts_with = "release")]
    all_or_nothing: bool,

    /// Memory that must stay free; 0: take what the kernel gives
    /// [default: 5 % of all memory, at least 128M]
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    keep_free: Option<u64>,

    /// Only say what would be written
    #[arg(long)]
    dry_run: bool,

    /// Also print the text of a file that repeats this at every boot
    #[arg(long, value_name = "KIND", value_enum)]
    persist: Option<Persist>,

    /// Write that text to FILE instead of stdout
    #[arg(short, long, value_name = "FILE", requires = "persist")]
    output: Option<PathBuf>,

    /// Only print what a container or service needs for these pages; reserve nothing
    #[arg(long, value_name = "KIND", value_enum, conflicts_with_all = ["release", "persist", "overcommit", "json", "dry_run"])]
    format: Option<Format>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    root: RootArg,

    /// With --for: classes to move, a list of text, rodata, data, bss
    #[arg(long, value_name = "LIST", requires = "program", conflicts_with_all = NUMBERS, help_heading = PROGRAM)]
    segments: Option<Segments>,

    /// With --for: where huge pages come from: auto, hugetlb, or text:hugetlb,data:thp
    #[arg(long, value_name = "KIND", requires = "program", conflicts_with_all = NUMBERS, help_heading = PROGRAM)]
    backend: Option<Backends>,

    /// With --for: what may share a huge page: none, rx, relro, rwx
    #[arg(long, value_name = "LEVEL", requires = "program", conflicts_with_all = NUMBERS, help_heading = PROGRAM)]
    merge: Option<Merge>,
}

/// clap does not demand what it also forbids, so these have to be forbidden by name.
const NUMBERS: [&str; 4] = ["pages", "at_least", "available", "release"];

const PROGRAM: &str = "How the program is to run (defaults: as the environment says)";

/// How many surplus pages to allow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Overcommit {
    Pages(u64),
    Auto,
}

impl FromStr for Overcommit {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Pages).map_err(|_| "write a number of pages, or auto"),
        }
    }
}

/// How a reservation is repeated at boot.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Persist {
    /// For /etc/sysctl.d: the default size, all nodes
    Sysctl,
    /// For /etc/tmpfiles.d: any size, each node
    Tmpfiles,
    /// A unit that runs this command, which reads back and tries again
    Systemd,
}

/// For whom the demand is printed.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    /// The resources of a pod
    Kubernetes,
    /// The commands for docker
    Docker,
    /// A drop-in for a service
    Systemd,
}

fn memory(text: &str) -> Result<u64, &'static str> {
    parse_bytes(text).ok_or("write an amount of memory such as 256M or 4G")
}

/// Runs the command.
///
/// # Errors
/// With the status of the exit code table: wrong nodes or size, missing rights, fewer
/// pages than asked.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let system = args.root.system();
    let policy = args.policy();
    let size = host::block_size(&system, policy.page_size);
    let want = args.want(&policy, size)?;
    if let Some(format) = args.format {
        return args.print_demand(format, size, want);
    }
    if want.is_none() && !args.release && args.overcommit.is_none() {
        return Err(usage("say how many pages: --pages N, --for BINARY, or --release"));
    }
    if args.instances > 1 && args.program.is_none() {
        return Err(usage("--instances multiplies the number of --for BINARY only"));
    }
    if args.overcommit == Some(Overcommit::Auto) && args.program.is_none() {
        return Err(usage("--overcommit auto goes by the number of --for BINARY: say how many"));
    }
    offered_sizes(&system, Some(size))?;
    let before = args.survey(&system, size)?;
    let spots = plan::chosen(&before, &args.node).map_err(|error| usage(&error.to_string()))?;
    args.check_sysctl(&before, &spots, pool::default_size(&system)? == Some(size))?;

    let mut report = Report::new(size, &before, args.dry_run);
    if args.release {
        args.release(&system, &before, &spots, &mut report);
    } else if let Some(want) = want {
        args.grow(&system, &before, &spots, want, &mut report)?;
    }
    if let Some(pages) = args.surplus(want, &before, &report) {
        args.overcommit(&system, &before, pages, &mut report);
    }
    if !args.dry_run {
        report.look_back(&args.survey(&system, size)?);
    }
    if let Some(kind) = args.persist {
        let is_default = pool::default_size(&system)? == Some(size);
        report.lasting = Some(args.lasting(kind, is_default, &before, want, &report)?);
    }
    args.print(&report)?;
    report.verdict(args.hard)
}

impl Args {
    fn policy(&self) -> Policy {
        let args = PolicyArgs {
            segments: self.segments,
            backend: self.backend,
            page_size: self.size,
            merge: self.merge,
        };
        args.policy()
    }

    fn want(&self, policy: &Policy, size: PageSize) -> anyhow::Result<Option<Want>> {
        Ok(if self.release {
            None
        } else if let Some(pages) = self.pages {
            Some(Want::Add(pages))
        } else if let Some(pages) = self.at_least {
            Some(Want::AtLeast(pages))
        } else if let Some(pages) = self.available {
            Some(Want::Available(pages))
        } else if let Some(program) = &self.program {
            let pages = pages_for(program, policy, size)?;
            Some(Want::Instances { count: self.instances, pages })
        } else {
            None
        })
    }

    fn survey(&self, system: &System, size: PageSize) -> anyhow::Result<Survey> {
        let keep_free = self.keep_free.map_or(KeepFree::Default, KeepFree::Bytes);
        survey::read(system, size, keep_free)?
            .with_context(|| format!("the pool of {size} pages has gone"))
    }

    fn print_demand(
        &self,
        format: Format,
        size: PageSize,
        want: Option<Want>,
    ) -> anyhow::Result<Status> {
        let pages = match want {
            Some(
                Want::Add(pages)
                | Want::AtLeast(pages)
                | Want::Available(pages)
                | Want::Instances { pages, .. },
            ) => pages,
            None => return Err(usage("say how many pages: --for BINARY, or --pages N")),
        };
        // A unit wants the whole path.
        let program = self.program.as_deref().map(check::find_program);
        let program = program.map(|path| std::path::absolute(&path).unwrap_or(path));
        let demand = Demand {
            size,
            pages,
            instances: self.instances,
            program: program.as_deref(),
            library: &launch::find_library(None)
                .unwrap_or_else(|_| PathBuf::from("/usr/local/lib/libelfremap.so")),
            elfremap: &own_path(),
        };
        output::print(&match format {
            Format::Kubernetes => text::kubernetes(&demand),
            Format::Docker => text::docker(&demand),
            Format::Systemd => text::service(&demand),
        })?;
        Ok(Status::Done)
    }

    /// sysctl knows neither nodes nor sizes: better refuse than write what it can't keep.
    fn check_sysctl(
        &self,
        survey: &Survey,
        spots: &[Spot],
        is_default: bool,
    ) -> anyhow::Result<()> {
        if self.persist != Some(Persist::Sysctl) {
            Ok(())
        } else if !is_default {
            Err(usage("sysctl sets the default page size only: use --persist tmpfiles"))
        } else if spots.len() < survey.spots.len() {
            Err(usage("sysctl cannot choose nodes: use --persist tmpfiles"))
        } else {
            Ok(())
        }
    }

    fn grow(
        &self,
        system: &System,
        before: &Survey,
        spots: &[Spot],
        want: Want,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let plan = plan::grow(before, spots, &self.node, want);
        report.asked = plan.asked;
        report.held_back = plan.held_back;
        if let Want::Instances { pages, .. } = want {
            report.note_instances(&plan, pages);
            self.show_plan(report);
        }
        if self.all_or_nothing && plan.held_back > 0 {
            report.undone = true;
            return Ok(());
        }
        if self.dry_run {
            report.note_steps(before.pool.size, &plan.steps);
            return Ok(());
        }
        let effort = Effort { hard: self.hard, all_or_nothing: self.all_or_nothing };
        interrupt::catch()?;
        let stop = || interrupt::requested().is_some();
        let outcome = apply::grow(system, before, &plan, effort, stop);
        report.take(&plan, outcome);
        Ok(())
    }

    fn release(&self, system: &System, before: &Survey, spots: &[Spot], report: &mut Report) {
        // `--release --overcommit N` alone is about the surplus pages only.
        if self.overcommit.is_some() && self.pages.is_none() {
            return;
        }
        let steps = plan::shrink(before, spots, self.pages.unwrap_or(u64::MAX));
        let given: u64 = steps.iter().map(Step::give).sum();
        report.release = true;
        report.asked = self.pages.unwrap_or(given);
        for step in &steps {
            report.places.iter_mut().filter(|p| p.place == step.place).for_each(|p| {
                p.asked = step.give();
            });
        }
        if self.dry_run {
            report.note_steps(before.pool.size, &steps);
        } else {
            report.failure = apply::shrink(system, before.pool.size, &steps).err();
        }
    }

    /// Before anything is written. Stdout is a document's or a file's when there is one.
    fn show_plan(&self, report: &Report) {
        let program = self.program.as_deref().unwrap_or(Path::new("")).display();
        let text = report.plan_text(&program.to_string(), self.instances);
        if self.json || (self.persist.is_some() && self.output.is_none()) {
            eprint!("{text}");
        } else {
            // Whoever closed stdout meanwhile is told when the result is printed.
            let _ = output::print(&text);
        }
    }

    /// How many surplus pages to allow in all.
    fn surplus(&self, want: Option<Want>, before: &Survey, report: &Report) -> Option<u64> {
        Some(match (self.overcommit?, want) {
            (Overcommit::Pages(pages), _) => pages,
            (Overcommit::Auto, Some(Want::Instances { pages, .. })) => {
                let had = if self.dry_run { report.asked - report.held_back } else { report.got };
                let rest = report.asked.saturating_sub(had);
                before.pool.surplus.saturating_add(pages).saturating_add(rest)
            }
            (Overcommit::Auto, _) => return None,
        })
    }

    fn overcommit(&self, system: &System, before: &Survey, pages: u64, report: &mut Report) {
        let now = before.pool.overcommit;
        let to = if self.release { pages } else { pages.max(now) };
        report.overcommit = Some(Change { before: now, after: to });
        if to == now {
            return;
        }
        let path = pool::global_path(before.pool.size, "nr_overcommit_hugepages");
        if self.dry_run {
            report.writes.push(PlannedWrite { path, from: now, to });
        } else {
            let done = apply::set_overcommit(system, before.pool.size, to);
            report.failure = report.failure.take().or(done.err());
        }
    }

    fn lasting(
        &self,
        kind: Persist,
        is_default: bool,
        before: &Survey,
        want: Option<Want>,
        report: &Report,
    ) -> anyhow::Result<String> {
        // At boot there is more memory than now, so what is asked counts, not what was had.
        let before = &before.without_limits();
        let spots = &plan::chosen(before, &self.node)?;
        let steps = match want {
            Some(want) => plan::grow(before, spots, &self.node, want).steps,
            None if report.release => plan::shrink(before, spots, self.pages.unwrap_or(u64::MAX)),
            None => Vec::new(),
        };
        let added: u64 = steps.iter().map(Step::add).sum();
        let given: u64 = steps.iter().map(Step::give).sum();
        let lasting = Lasting {
            size: before.pool.size,
            is_default,
            counts: steps.iter().map(|step| (step.place, step.to)).collect(),
            machine: before.pool.persistent().saturating_add(added).saturating_sub(given),
            overcommit: report.overcommit.as_ref().map(|change| change.after),
        };
        let text = match kind {
            Persist::Sysctl => text::sysctl(&lasting),
            Persist::Tmpfiles => text::tmpfiles(&lasting),
            Persist::Systemd => text::unit(&lasting, &own_path()),
        };
        match &self.output {
            Some(file) if !self.dry_run => {
                fs::write(file, &text).with_context(|| format!("write {}", file.display()))?;
            }
            _ => {}
        }
        Ok(text)
    }

    fn print(&self, report: &Report) -> anyhow::Result<()> {
        if self.json {
            return output::print_json(report);
        }
        if report.failure.is_some() && report.gained == 0 {
            // Nothing was done: the error says it all.
            return Ok(());
        }
        match &report.lasting {
            // Stdout is the file's, so that it can be redirected.
            Some(lasting) if self.output.is_none() => {
                eprint!("{}", report.text(Style::PLAIN));
                output::print(lasting)
            }
            _ => output::print(&report.text(Style::for_stdout())),
        }
    }
}

/// Pages of the pool that one instance of the program asks for, wherever it is loaded.
fn pages_for(program: &Path, policy: &Policy, size: PageSize) -> anyhow::Result<u64> {
    let path = check::find_program(program);
    // The error's text holds its cause already, so it is not chained.
    let (need, unfit) = check::need(&path, policy, size)
        .map_err(|error| anyhow!("reserve: {}: {error}", path.display()))?;
    match unfit {
        None => Ok(need.pool_pages.max),
        Some(unfit) => Err(anyhow::Error::new(Failure {
            status: Status::Negative,
            message: format!("reserve: {} is not suitable: {}", path.display(), unfit.describe()),
            hint: Some(format!("elfremap check {}", shell_word(&path.to_string_lossy()))),
        })),
    }
}

fn usage(message: &str) -> anyhow::Error {
    let message = format!("reserve: {message}");
    anyhow::Error::new(Failure { status: Status::Usage, message, hint: None })
}

fn own_path() -> PathBuf {
    env::current_exe().unwrap_or_else(|_| PathBuf::from("/usr/local/bin/elfremap"))
}
