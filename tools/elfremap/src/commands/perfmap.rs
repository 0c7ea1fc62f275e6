//! `elfremap perfmap`: names for the code that perf cannot name any more.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use elfremap::range::Range;

use crate::exit::{Failure, Status};
use crate::output;
use crate::perfmap::map::Map;
use crate::perfmap::objects::{self, Found};
use crate::perfmap::output::Place;
use crate::perfmap::process::Process;
use crate::symbols;
use crate::symbols::debug::Search;

/// Arguments of `elfremap perfmap`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// The process, or one of its threads
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pub pid: u32,

    /// Name every executable range, also those that perf finds by itself
    #[arg(long)]
    pub all: bool,

    /// Leave C++ and Rust names as the linker sees them
    #[arg(long)]
    pub no_demangle: bool,

    /// Look for separate debug files in DIR too, before /usr/lib/debug (repeatable)
    #[arg(long, value_name = "DIR")]
    pub debug_dir: Vec<PathBuf>,

    /// Write the file for perf inside the process's container: in the /tmp and under the
    /// process number that the process itself sees
    #[arg(long, conflicts_with = "output")]
    pub in_container: bool,

    /// Write to FILE instead of /tmp/perf-PID.map; - is standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Whether the line about the written file is left out.
    #[arg(skip)]
    pub quiet: bool,
}

const EXAMPLES: &str = "\
Examples:
  elfremap perfmap 4711                 write /tmp/perf-4711.map, then:
  perf record -p 4711 sleep 10; perf report
  elfremap perfmap --in-container 4711  for a perf that runs in the container
  elfremap perfmap --all -o - 4711      every function, to standard output

Exit status: 0 written; 1 failed, or no symbols at all; 3 nothing to name (the
process was not remapped), or written from dynamic symbols alone; 4 not permitted.";

/// Runs the command.
///
/// # Errors
/// When the process cannot be examined, it has nothing to name, or writing fails.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let process = Process::find(args.pid)?;
    let pid = process.pid;
    if pid != args.pid {
        eprintln!("elfremap: note: {} is a thread of process {pid}", args.pid);
    }
    let mappings = process.mappings()?;
    let wanted = objects::wanted(&process, &mappings, args.all);
    let found = objects::find(&process, &mappings, &wanted);
    if found.objects.is_empty() {
        process.check_alive()?;
        found.rejected.iter().for_each(|reason| warn(reason));
        return Err(nothing_to_name(pid, &found).into());
    }
    found.rejected.iter().for_each(|reason| warn(reason));

    let mut map = Map::default();
    for object in &found.objects {
        let names = symbols::read(&object.elf, &search(args, &process, &object.path));
        let path = object.path.display();
        names.rejected.iter().for_each(|reason| warn(&format!("{path}: {reason}")));
        map.add(object, &names, !args.no_demangle);
    }
    process.check_alive()?;
    if map.nameless.len() == found.objects.len() || map.records == 0 {
        return Err(no_symbols(pid, &map).into());
    }
    write(args, &process, &mut map, &found)?;
    if map.is_complete() {
        return Ok(Status::Done);
    }
    if !map.nameless.is_empty() {
        warn(&format!("no symbols in {}", list(&map.nameless)));
    }
    if !map.dynamic_only.is_empty() {
        warn(&format!("dynamic symbols only in {}", list(&map.dynamic_only)));
    }
    eprintln!("hint: install the debug symbols, or: elfremap perfmap --debug-dir DIR {pid}");
    Ok(Status::Negative)
}

/// Writes the map of a process that this command has just moved.
///
/// # Errors
/// As [`run`].
pub fn write_map(pid: u32, quiet: bool) -> anyhow::Result<Status> {
    let (output, debug_dir) = (None, Vec::new());
    let (all, no_demangle, in_container) = (false, false, false);
    run(&Args { pid, all, no_demangle, debug_dir, in_container, output, quiet })
}

/// Where to look for the debug file of the program at `path`.
fn search(args: &Args, process: &Process, path: &Path) -> Search {
    const DEBUG: &str = "/usr/lib/debug";
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut search = Search { debug_dirs: args.debug_dir.clone(), ..Search::default() };
    if !process.shares_our_root() {
        search.debug_dirs.push(process.rooted(Path::new(DEBUG)));
        search.program_dirs.push(process.rooted(folder));
    }
    search.debug_dirs.push(PathBuf::from(DEBUG));
    search.program_dirs.push(folder.to_owned());
    search
}

/// Writes the map where the arguments say, and one line about it to standard output.
fn write(args: &Args, process: &Process, map: &mut Map, found: &Found) -> anyhow::Result<()> {
    let pid = process.pid;
    let place = match &args.output {
        Some(path) if path.as_os_str() == "-" => {
            let mut out = io::stdout().lock();
            return match map.text().into_iter().try_for_each(|part| out.write_all(part)) {
                // A reader that has gone (`| head`) is no error.
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                    Err(cannot_write("to standard output", &error, pid))
                }
                _ => Ok(()),
            };
        }
        Some(path) => {
            let place = Place::of_file(path).map_err(|e| cannot_write(path.display(), &e, pid))?;
            if place.is_special() {
                return Err(not_a_file(path, pid).into());
            }
            place
        }
        None => {
            let place = map_of(args, process)?;
            // Only generated code can have names that are not ours.
            let kept = !found.orphans.is_empty() && {
                let old = place.current(process.started().unwrap_or(i64::MAX), |owner| {
                    owner == 0 || owner == process.user || owner == nix::unistd::geteuid().as_raw()
                });
                map.keep(old.as_deref().unwrap_or_default(), &found.orphans)
            };
            if kept && process.holds_open(place.shown()) {
                warn(&format!(
                    "process {pid} is writing {} itself: the names it has added so far are \
                     kept, those it adds from now on are lost",
                    place.shown().display()
                ));
            }
            place
        }
    };
    let shown = place.shown().display();
    place.write(&map.text()).map_err(|error| cannot_write(&shown, &error, pid))?;
    if args.quiet {
        return Ok(());
    }
    let bytes: u64 = found.objects.iter().flat_map(|o| &o.ranges).map(|r| r.len()).sum();
    let files: Vec<_> = found.objects.iter().map(|o| o.path.clone()).collect();
    output::print(&format!(
        "{shown}: {} for {} of code from {}\n",
        output::counted(map.records as u64, "name"),
        output::megabytes(bytes),
        list(&files)
    ))
}

/// Where perf looks for the map of a process.
fn map_of(args: &Args, process: &Process) -> anyhow::Result<Place> {
    let pid = process.pid;
    if !args.in_container {
        return Place::of_host(pid).map_err(|error| cannot_write("/tmp", &error, pid));
    }
    // perf accepts its own user's files and root's: the container's root is who suits all.
    let owner = nix::unistd::geteuid().is_root();
    let owner = owner.then(|| process.root_inside().unwrap_or((process.user, process.user)));
    Place::of_container(&process.path("root"), process.inner_pid, owner)
        .map_err(|error| cannot_write(format!("/tmp in the container of {pid}"), &error, pid))
}

fn warn(message: &str) {
    eprintln!("elfremap: warning: {message}");
}

/// The first few of the paths.
fn list(paths: &[PathBuf]) -> String {
    let shown: Vec<_> = paths.iter().take(3).map(|p| p.display().to_string()).collect();
    match paths.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more files", shown.join(", ")),
    }
}

fn nothing_to_name(pid: u32, found: &Found) -> Failure {
    if !found.rejected.is_empty() {
        return Failure {
            status: Status::Failed,
            message: format!("cannot name the code of process {pid}: its files cannot be used"),
            hint: Some(format!("sudo elfremap perfmap {pid}")),
        };
    }
    let generated: u64 = found.orphans.iter().copied().map(Range::len).sum();
    let rest = match generated {
        0 => String::new(),
        bytes => format!(" (but for {} KiB that it generated itself)", bytes >> 10),
    };
    Failure {
        status: Status::Negative,
        message: format!(
            "process {pid} was not remapped: perf finds the files of its code by itself{rest}"
        ),
        hint: Some(format!("elfremap status {pid}")),
    }
}

fn no_symbols(pid: u32, map: &Map) -> Failure {
    let files = list(if map.nameless.is_empty() { &map.dynamic_only } else { &map.nameless });
    Failure {
        status: Status::Failed,
        message: format!("cannot name the code of process {pid}: no symbols for it in {files}"),
        hint: Some(format!(
            "install the debug symbols, or: elfremap perfmap --debug-dir DIR {pid}"
        )),
    }
}

fn not_a_file(path: &Path, pid: u32) -> Failure {
    let path = path.display();
    Failure {
        status: Status::Failed,
        message: format!("cannot write {path}: it is not a regular file"),
        hint: Some(format!("elfremap perfmap -o - {pid} > {path}")),
    }
}

fn cannot_write(what: impl std::fmt::Display, error: &io::Error, pid: u32) -> anyhow::Error {
    let (status, hint) = match error.kind() {
        io::ErrorKind::PermissionDenied => (
            Status::NotPermitted,
            format!("an older file may belong to another user: sudo elfremap perfmap {pid}"),
        ),
        _ => (Status::Failed, format!("elfremap perfmap -o FILE {pid}")),
    };
    Failure { status, message: format!("cannot write {what}: {error}"), hint: Some(hint) }.into()
}
