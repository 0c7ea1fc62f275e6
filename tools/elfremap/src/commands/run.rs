//! `elfremap run`: becomes a program with the preload set.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::fmt::{Display, Write as _};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use elfremap::hugepage::PageSize;
use elfremap::policy::{Backends, Merge, Numa, OnFailure, Segments, Strategy};
use elfremap::report::Summary;
use nix::errno::Errno;

use crate::attach;
use crate::check::{self, Secure, Unfit};
use crate::commands;
use crate::elf::{FileSource, Image};
use crate::exit::{Failure, Status};
use crate::host;
use crate::launch::{self, LibraryError, inherited};
use crate::options::PolicyArgs;
use crate::output;
use crate::reservation::text::shell_word;
use crate::system::System;

/// Arguments of `elfremap run`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
The options set the preload's variables of the same names: --merge rx is
ELFREMAP_MERGE=rx. What is not given keeps its value from the environment.
The process becomes the program: signals, exit status, standard input and
output are the program's own.

Exit status: the program's; 125 when elfremap itself fails, 126 when the
program cannot be run, 127 when it is not found.

Examples:
  elfremap run -- mysqld --datadir=/data
  elfremap run --reserve --log info -- ./server
  elfremap run --attach -- ./static-server
  elfremap run --numa-node 1 --merge rx -- postgres -D /data
  env $(elfremap run --dry-run -- true) mysqld")]
pub struct Args {
    /// The preload library, instead of the one installed with this command
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,

    /// Move the program from outside at its entry point, without the preload: static and
    /// static-pie programs, musl, Go
    #[arg(long, conflicts_with_all = ["library", "strategy", "numa", "exe", "inherit", "fork",
          "on_failure", "log_file"])]
    attach: bool,

    /// Before the start, grow the pool by what the program needs and the pool lacks
    #[arg(long)]
    reserve: bool,

    /// Run on the processors and in the memory of this NUMA node
    #[arg(long, value_name = "N")]
    numa_node: Option<u32>,

    /// Write /tmp/perf-PID.map once the program is remapped
    #[arg(long)]
    perfmap: bool,

    /// Print the environment and run nothing
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    variables: Variables,

    /// The program, looked up in PATH, and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

const HEADING: &str = "Options of the preload";

/// The preload's variables as options, checked but passed on as they are.
#[derive(clap::Args, Debug)]
struct Variables {
    /// Classes to move: a list of text, rodata, data, bss, header [default: text,data,bss]
    #[arg(long, help_heading = HEADING, value_name = "LIST", value_parser = checked::<Segments>)]
    segments: Option<String>,

    /// Where huge pages come from: auto, hugetlb, thp, or text:hugetlb,data:thp
    #[arg(long, help_heading = HEADING, value_name = "KIND", value_parser = checked::<Backends>)]
    backend: Option<String>,

    /// Huge page size: 2M, 1G, ...
    #[arg(long, help_heading = HEADING, value_name = "SIZE", value_parser = checked::<PageSize>)]
    page_size: Option<String>,

    /// What may share a huge page: none, rx, relro, rwx
    #[arg(long, help_heading = HEADING, value_name = "LEVEL", value_parser = checked::<Merge>)]
    merge: Option<String>,

    /// How pages are exchanged: auto, swap, move
    #[arg(long, help_heading = HEADING, value_name = "HOW", value_parser = checked::<Strategy>)]
    strategy: Option<String>,

    /// On which NUMA nodes pages are taken: inherit, local, interleave, or a node's number
    #[arg(long, help_heading = HEADING, value_name = "WHERE", value_parser = checked::<Numa>)]
    numa: Option<String>,

    /// Act only on these programs: names or globs, separated by colons
    #[arg(long, help_heading = HEADING, value_name = "NAMES")]
    exe: Option<String>,

    /// Whether children get the preload too
    #[arg(long, help_heading = HEADING, value_name = "0|1", value_parser = ["0", "1"])]
    inherit: Option<String>,

    /// What is done for children after fork: guard, off
    #[arg(long, help_heading = HEADING, value_name = "WHAT", value_parser = ["guard", "off"])]
    fork: Option<String>,

    /// What a failure does to the program: continue, abort
    #[arg(long, help_heading = HEADING, value_name = "WHAT", value_parser = checked::<OnFailure>)]
    on_failure: Option<String>,

    /// What the preload reports
    #[arg(long, help_heading = HEADING, value_name = "LEVEL", value_parser = ["off", "error", "warn", "info", "debug"])]
    log: Option<String>,

    /// Where it reports to (%p: process id) [default: stderr]
    #[arg(long, help_heading = HEADING, value_name = "FILE")]
    log_file: Option<String>,
}

/// Accepts what the preload accepts, and keeps the text.
fn checked<T: FromStr<Err: Display>>(text: &str) -> Result<String, String> {
    text.parse::<T>().map(|_| text.to_owned()).map_err(|error| error.to_string())
}

impl Variables {
    fn pairs(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let all = [
            ("ELFREMAP_SEGMENTS", &self.segments),
            ("ELFREMAP_BACKEND", &self.backend),
            ("ELFREMAP_PAGE_SIZE", &self.page_size),
            ("ELFREMAP_MERGE", &self.merge),
            ("ELFREMAP_STRATEGY", &self.strategy),
            ("ELFREMAP_NUMA", &self.numa),
            ("ELFREMAP_EXE", &self.exe),
            ("ELFREMAP_INHERIT", &self.inherit),
            ("ELFREMAP_FORK", &self.fork),
            ("ELFREMAP_ON_FAILURE", &self.on_failure),
            ("ELFREMAP_LOG", &self.log),
            ("ELFREMAP_LOG_FILE", &self.log_file),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
    }

    /// What is planned under these options.
    fn policy(&self) -> PolicyArgs {
        fn parsed<T: FromStr>(text: Option<&String>) -> Option<T> {
            text.and_then(|text| text.parse().ok())
        }
        PolicyArgs {
            segments: parsed(self.segments.as_ref()),
            backend: parsed(self.backend.as_ref()),
            page_size: parsed(self.page_size.as_ref()),
            merge: parsed(self.merge.as_ref()),
        }
    }
}

/// Runs the command; comes back only when the program could not be executed, and
/// after `--dry-run`.
///
/// # Errors
/// Statuses 125 to 127.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let (program, _) = args.command.split_first().ok_or_else(|| own("no program given"))?;
    if args.attach {
        return run_attached(args, program);
    }
    let library = launch::find_library(args.library.as_deref()).map_err(|error| {
        let hint = matches!(error, LibraryError::NotFound | LibraryError::Unusable(_))
            .then(|| "elfremap run --library FILE -- PROGRAM".into());
        failure(Status::RunFailed, error.to_string(), hint)
    })?;
    let path = look_up(program);
    let obstacle = path.as_deref().and_then(obstacle);
    // Behind a preload a program with AddressSanitizer would not start at all.
    let preload = !matches!(obstacle, Some(Unfit::Sanitizer(_)));
    let changes = changes(args, preload.then_some(library.as_path()));
    if args.dry_run {
        let mut text = String::new();
        for (name, value) in &changes {
            let _ = writeln!(text, "{name}={}", shell_word(&value.to_string_lossy()));
        }
        output::print(&text).map_err(|error| own(&format!("{error:#}")))?;
        return Ok(Status::Done);
    }
    if let (Some(path), Some(obstacle)) = (&path, &obstacle) {
        let path = path.display();
        let remedy = match obstacle {
            Unfit::Static(_) | Unfit::OtherLibc(..) | Unfit::Sanitizer(_) => "; try: run --attach",
            _ => "",
        };
        eprintln!("elfremap: warning: {path} runs as it is: {}{remedy}", obstacle.describe());
    }
    if let Some(node) = args.numa_node {
        let bound = launch::bind_to_node(&System::running(), node);
        bound.map_err(|error| failure(Status::RunFailed, error.to_string(), None))?;
    }
    if let (true, Some(path)) = (args.reserve, &path) {
        reserve(args, path);
    }
    if args.perfmap && obstacle.is_none() {
        let later = launch::write_perf_map_later();
        later.map_err(|errno| own(&format!("cannot start the perf map's writer: {errno}")))?;
    }
    Err(execute(&args.command, changes))
}

/// The program is moved from outside, by a process that traces it up to its entry point.
fn run_attached(args: &Args, program: &OsStr) -> anyhow::Result<Status> {
    let path = look_up(program);
    if args.dry_run {
        return Ok(Status::Done);
    }
    if let Some(node) = args.numa_node {
        let bound = launch::bind_to_node(&System::running(), node);
        bound.map_err(|error| failure(Status::RunFailed, error.to_string(), None))?;
    }
    if let (true, Some(path)) = (args.reserve, &path) {
        reserve(args, path);
    }
    // A tracer without privileges would take the program's own away.
    let secure = path.as_deref().and_then(|path| FileSource::open(path).ok());
    let secure = secure.and_then(|source| Secure::of(&source).describe());
    if let (Some(what), Some(path), false) = (secure, &path, nix::unistd::geteuid().is_root()) {
        eprintln!("elfremap: warning: {} runs as it is: a {what} program", path.display());
        return Err(execute(&args.command, BTreeMap::new()));
    }
    let policy = args.variables.policy().policy();
    let options = attach::Options {
        policy,
        block: host::block_size(&System::running(), policy.page_size).bytes(),
        objects: None,
        timeout: Duration::from_secs(10),
    };
    let log = args.variables.log.clone().or_else(|| env::var("ELFREMAP_LOG").ok());
    let tell = |outcome| tell(log.as_deref(), outcome);
    let after = |pid| {
        if args.perfmap
            && let Err(error) = commands::perfmap::write_map(pid, true)
        {
            eprintln!("elfremap: warning: {error:#}");
        }
    };
    if let Err(error) = attach::start(&options, &tell, &after) {
        eprintln!("elfremap: warning: the program runs as it is: {error:#}");
    }
    Err(execute(&args.command, BTreeMap::new()))
}

/// Says on stderr what became of the program, as much as the preload would.
fn tell(log: Option<&str>, outcome: anyhow::Result<attach::Outcome>) {
    if matches!(log, Some("off" | "error")) {
        return;
    }
    match outcome {
        Ok(outcome) => {
            for report in outcome.reports.iter().take(1) {
                if matches!(log, Some("info" | "debug")) {
                    eprintln!("elfremap: {}", Summary(report));
                }
            }
            commands::attach::warn(&outcome.reports);
        }
        Err(error) => eprintln!("elfremap: warning: the program runs as it is: {error:#}"),
    }
}

fn failure(status: Status, message: String, hint: Option<String>) -> anyhow::Error {
    anyhow::Error::new(Failure { status, message, hint })
}

/// A failure of `run` itself.
fn own(message: &str) -> anyhow::Error {
    failure(Status::RunFailed, message.into(), None)
}

/// The variables to set.
fn changes(args: &Args, library: Option<&Path>) -> BTreeMap<&'static str, OsString> {
    let mut changes: BTreeMap<&'static str, OsString> =
        args.variables.pairs().map(|(name, value)| (name, value.into())).collect();
    if let Some(library) = library {
        let existing = env::var_os("LD_PRELOAD");
        changes.insert("LD_PRELOAD", launch::preload_value(existing.as_deref(), library));
    }
    changes
}

/// The file that execvp(3) will find; `None` when there is none.
fn look_up(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let paths = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let mut found = env::split_paths(&paths).map(|directory| directory.join(program));
    found.find(|path| nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok())
}

/// Why the preload will do nothing for the program, as far as its headers tell. A
/// script is none: its interpreter gets the preload.
fn obstacle(path: &Path) -> Option<Unfit> {
    let source = FileSource::open(path).ok()?;
    let image = Image::read(&source).ok()?;
    check::obstacle(&image, Secure::of(&source))
}

/// Grows the pool by what is missing. The program runs whatever comes of it: what
/// cannot be had stays on small pages.
fn reserve(args: &Args, path: &Path) {
    let policy = args.variables.policy().policy();
    let block = host::block_size(&System::running(), policy.page_size);
    let need = if args.attach {
        check::need_attached(path, &policy, block)
    } else {
        check::need(path, &policy, block)
            .map(|(need, unfit)| if unfit.is_none() { need.pool_pages.max } else { 0 })
    };
    let need = match need {
        Ok(need) => need,
        Err(error) => {
            eprintln!("elfremap: warning: nothing reserved: {}: {error}", path.display());
            return;
        }
    };
    if need == 0 {
        return;
    }
    let mut command = Command::new(env::current_exe().unwrap_or_else(|_| "elfremap".into()));
    command.args(["reserve", "--available", &need.to_string(), "--size", &block.to_string()]);
    if let Some(node) = args.numa_node {
        command.args(["--node", &node.to_string()]);
    }
    // Its own messages on stderr say what was wrong; stdout is the program's.
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    if let Err(error) = status {
        eprintln!("elfremap: warning: nothing reserved: {error}");
    }
}

/// Becomes the program; comes back with the reason only if that fails.
fn execute(command: &[OsString], changes: BTreeMap<&'static str, OsString>) -> anyhow::Error {
    let name = command.first().map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_default();
    let arguments: Result<Vec<_>, _> =
        command.iter().map(|argument| CString::new(argument.as_bytes())).collect();
    let mut variables: BTreeMap<OsString, OsString> = env::vars_os().collect();
    variables.extend(changes.into_iter().map(|(name, value)| (name.into(), value)));
    let environment: Result<Vec<_>, _> = variables
        .iter()
        .map(|(name, value)| CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()))
        .collect();
    // Neither can hold a NUL byte: they came through exec and clap.
    let (Ok(arguments), Ok(environment)) = (arguments, environment) else {
        return own("an argument holds a NUL byte");
    };
    let Some(program) = arguments.first() else { return own("no program given") };
    inherited::restore();
    let Err(errno) = nix::unistd::execvpe(program, &arguments, &environment);
    let status = if errno == Errno::ENOENT { Status::NotFound } else { Status::CannotRun };
    failure(status, format!("cannot run {name}: {}", errno.desc()), None)
}
