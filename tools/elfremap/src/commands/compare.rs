//! `elfremap compare`: is it worth it for this program?

use std::ffi::OsString;
use std::io::{self, IsTerminal, Write as _};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::compare::counters::Counters;
use crate::compare::logs::Logs;
use crate::compare::measure::{self, Cost};
use crate::compare::report::{Report, Run, Series};
use crate::compare::server::{Patience, Server, off_the_record, shell};
use crate::compare::stats;
use crate::compare::variant::Variant;
use crate::exit::{Failure, Status};
use crate::output::{self, Style};
use crate::{interrupt, launch};

/// Arguments of `elfremap compare`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Every round runs the program once in each way, in turn, so that a busy phase of
the machine weighs on all of them. speed: how many times as fast as plain; its
interval holds the true value with 95 % confidence. With --server each run starts
the server, waits for --ready, runs --load and stops the server with SIGTERM; what
counts is the time the load takes, or the number it prints after the --rate text.

Examples:
  elfremap compare -- clang -O2 -c big.c -o /dev/null
  elfremap compare --variants remapped,thp,hugetlb+rx -- ./server --self-test
  elfremap compare --server 'redis-server --port 7000' \\
      --ready 'redis-cli -p 7000 ping' \\
      --load 'redis-benchmark -p 7000 -q -n 300000 -t get'
  elfremap compare --server 'postgres -D /srv/db' --ready pg_isready \\
      --load 'pgbench -S -T 20 db' --rate 'tps = '

Exit status: 0 gain, 1 failed, 2 wrong usage, 3 no gain or loss.")]
pub struct Args {
    /// Rounds, each with one run of every variant (6 to 200; more find smaller gains)
    #[arg(short = 'n', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(i64::from(stats::FEWEST)..=i64::from(stats::MOST)))]
    rounds: u32,

    /// What to compare with the plain program: remapped, hugetlb, thp, rx, relro, rwx, text,
    /// swap, move, or several of them joined by + (hugetlb+rx)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "remapped")]
    variants: Vec<Variant>,

    /// The preload library, instead of the one installed with this command
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,

    /// Command line of a server to compare instead of a program
    #[arg(
        long,
        value_name = "CMD",
        requires = "load",
        requires = "ready",
        conflicts_with = "program"
    )]
    server: Option<String>,

    /// Command line that puts the server under load
    #[arg(long, value_name = "CMD", requires = "server")]
    load: Option<String>,

    /// Command line that succeeds as soon as the server is ready
    #[arg(long, value_name = "CMD", requires = "server")]
    ready: Option<String>,

    /// The load prints a rate after TEXT: compare that (more is better) instead of the time
    #[arg(long, value_name = "TEXT", requires = "server", conflicts_with = "by")]
    rate: Option<String>,

    /// What to compare: the time from start to end (of the load, for a server), or the processor
    /// time of the program (or server), which a busy machine disturbs less
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = By::Time)]
    by: By,

    /// Seconds until the server must be ready
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    ready_timeout: u64,

    /// Seconds until the server must have stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    stop_timeout: u64,

    /// Show what the program, server and load print
    #[arg(long)]
    show_output: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// The program and its arguments
    #[arg(last = true, value_name = "PROGRAM", required_unless_present = "server")]
    program: Vec<OsString>,
}

/// The measure to compare by.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum By {
    /// Time on the clock
    Time,
    /// Processor time, user and system
    Cpu,
}

/// Runs the command.
///
/// # Errors
/// Something cannot be started, crashes, or ends differently when remapped.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let library = launch::find_library(args.library.as_deref()).map_err(|error| {
        anyhow::Error::new(Failure {
            status: Status::Failed,
            message: format!("compare: {error}"),
            hint: Some(String::from("say where the library is with --library FILE")),
        })
    })?;
    let mut variants = vec![Variant::plain()];
    variants.extend(args.variants.iter().cloned());
    interrupt::catch()?;
    let progress = Progress::new(variants.len() * (args.rounds as usize + 1));
    let bench = Bench { args, library: &library, counters: Counters::open().err() };
    let mut series: Vec<_> = variants.iter().map(Series::new).collect();
    bench.warm_up(&mut series, &progress)?;
    for round in 0..args.rounds {
        // There and back again: no variant is always the one after another.
        let mut order: Vec<_> = (0..series.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            progress.step(&variants[index].name);
            let run = bench.once(&variants[index], &[])?;
            bench.check(&series[index], &run)?;
            series[index].runs.push(run);
        }
    }
    progress.clear();
    let no_counters = bench.counters.as_ref().map(ToString::to_string);
    let report = Report::new(args.words(), args.metric(), series, no_counters);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.text(Style::for_stdout()))?;
    }
    Ok(report.status())
}

impl Args {
    /// What is compared, in words.
    fn words(&self) -> Vec<String> {
        match &self.server {
            Some(server) => vec![server.clone()],
            None => self.program.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        }
    }

    fn metric(&self) -> &'static str {
        match (&self.rate, self.by) {
            (Some(_), _) => "rate",
            (None, By::Time) => "time",
            (None, By::Cpu) => "cpu",
        }
    }
}

struct Bench<'a> {
    args: &'a Args,
    library: &'a Path,
    /// Why there are no counters.
    counters: Option<crate::compare::counters::Unavailable>,
}

impl Bench<'_> {
    /// A round that is not counted: it fills caches, shows how the program ends, and has the
    /// preload say what it does.
    fn warm_up(&self, series: &mut [Series], progress: &Progress) -> anyhow::Result<()> {
        for one in series.iter_mut() {
            progress.step(&format!("{}, not counted", one.name));
            let logs = Logs::new()?;
            let run = self.once(&one.variant, &logs.variables())?;
            one.status = Some(run.status);
            one.preload = logs.lines();
        }
        let plain = series[0].status;
        match series.iter().find(|one| one.status != plain) {
            Some(one) => bail!(different(one, plain, one.status)),
            None => Ok(()),
        }
    }

    fn check(&self, series: &Series, run: &Run) -> anyhow::Result<()> {
        if self.args.server.is_none() && series.status != Some(run.status) {
            bail!(different(series, series.status, Some(run.status)));
        }
        Ok(())
    }

    fn once(&self, variant: &Variant, more: &[(&str, OsString)]) -> anyhow::Result<Run> {
        let run = match &self.args.server {
            Some(server) => self.serve(server, variant, more),
            None => self.program(variant, more),
        };
        match interrupt::requested() {
            Some(signal) => bail!("compare: interrupted by signal {signal}"),
            None => run.with_context(|| format!("compare: {}", variant.name)),
        }
    }

    fn program(&self, variant: &Variant, more: &[(&str, OsString)]) -> anyhow::Result<Run> {
        let [program, arguments @ ..] = &self.args.program[..] else {
            bail!("no program");
        };
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        if !self.args.show_output {
            command.stdout(Stdio::null()).stderr(Stdio::null());
        }
        variant.apply(&mut command, self.library);
        command.envs(more.iter().map(|(name, value)| (name, value)));
        let counters = Counters::open().ok();
        let ended = measure::run(&mut command)
            .with_context(|| format!("run {}", program.to_string_lossy()))?;
        Ok(Run {
            value: self.value(ended.cost.wall_seconds, &ended.cost),
            cost: ended.cost,
            counts: counters.map(|counters| counters.read()).unwrap_or_default(),
            status: ended.status,
        })
    }

    fn serve(
        &self,
        server: &str,
        variant: &Variant,
        more: &[(&str, OsString)],
    ) -> anyhow::Result<Run> {
        let args = self.args;
        let (Some(load), Some(ready)) = (&args.load, &args.ready) else {
            bail!("a server needs --load and --ready");
        };
        let patience = Patience {
            ready: Duration::from_secs(args.ready_timeout),
            stop: Duration::from_secs(args.stop_timeout),
        };
        let mut command = shell(server, args.show_output);
        variant.apply(&mut command, self.library);
        command.envs(more.iter().map(|(name, value)| (name, value)));
        let counters = Counters::open().ok();
        let running = Server::start(&mut command, ready, patience)?;
        let loaded = off_the_record(|| self.load(load));
        // Stop it cleanly whatever the load did: it may have data to write.
        let stopped = running.stop(patience);
        let (value, ended) = (loaded?, stopped?);
        Ok(Run {
            value: self.value(value, &ended.cost),
            cost: ended.cost,
            counts: counters.map(|counters| counters.read()).unwrap_or_default(),
            status: ended.status,
        })
    }

    /// What is compared.
    fn value(&self, seconds_or_rate: f64, cost: &Cost) -> f64 {
        match self.args.by {
            By::Time => seconds_or_rate,
            By::Cpu => cost.user_seconds + cost.system_seconds,
        }
    }

    /// Seconds the load took, or the rate it printed.
    fn load(&self, load: &str) -> anyhow::Result<f64> {
        let mut command = shell(load, self.args.show_output);
        if self.args.rate.is_some() {
            command.stdout(Stdio::piped());
        }
        let start = Instant::now();
        let output = command.spawn().and_then(std::process::Child::wait_with_output);
        let output = output.context("run the --load command")?;
        let seconds = start.elapsed().as_secs_f64();
        if !output.status.success() {
            bail!("the load failed: {}", output.status);
        }
        let Some(text) = &self.args.rate else { return Ok(seconds) };
        if self.args.show_output {
            io::stdout().write_all(&output.stdout)?;
        }
        number_after(&String::from_utf8_lossy(&output.stdout), text)
            .with_context(|| format!("the load printed no number after '{text}'"))
    }
}

/// The number behind the last `text`; spaces, colons and equals signs between are skipped.
fn number_after(output: &str, text: &str) -> Option<f64> {
    let (_, rest) = output.rsplit_once(text)?;
    let rest = rest.trim_start_matches([' ', '\t', ':', '=']);
    let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
    rest[..end].trim_end_matches('.').parse().ok()
}

fn different(
    series: &Series,
    expected: Option<ExitStatus>,
    seen: Option<ExitStatus>,
) -> anyhow::Error {
    let show = |status: Option<ExitStatus>| {
        status.map_or(String::from("?"), |status| match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (_, Some(signal)) => format!("signal {signal}"),
            _ => status.to_string(),
        })
    };
    anyhow::Error::new(Failure {
        status: Status::Failed,
        message: format!(
            "compare: {} ended with {}, but before with {}",
            series.name,
            show(seen),
            show(expected)
        ),
        hint: Some(String::from("look at what it says with --show-output")),
    })
}

/// A line on the terminal that says how far it is.
struct Progress {
    total: usize,
    done: std::cell::Cell<usize>,
    shown: bool,
}

impl Progress {
    fn new(total: usize) -> Self {
        Self { total, done: std::cell::Cell::new(0), shown: io::stderr().is_terminal() }
    }

    fn step(&self, what: &str) {
        self.done.set(self.done.get() + 1);
        if self.shown {
            eprint!("\r\x1b[Krun {} of {}: {what}", self.done.get(), self.total);
        }
    }

    fn clear(&self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_in_the_output_of_well_known_loads() {
        let pgbench =
            "number of clients: 1\ntps = 12345.678901 (without initial connection time)\n";
        assert_eq!(number_after(pgbench, "tps = "), Some(12_345.678_901));
        assert_eq!(number_after(pgbench, "tps"), Some(12_345.678_901));
        assert_eq!(number_after("Requests/sec:  98039.22\n", "Requests/sec:"), Some(98_039.22));
        assert_eq!(number_after("a 1. a 2.", "a"), Some(2.0));
        assert_eq!(number_after("rate: none", "rate:"), None);
        assert_eq!(number_after("", "rate"), None);
    }
}
