//! `elfremap status`: what of running processes lies on huge pages, as the kernel
//! counts it.

use std::fmt::Write as _;
use std::io::IsTerminal;
use std::time::Duration;

use elfremap::class::Class;
use elfremap::plan::{Reason, Refusal};
use elfremap::proc::smaps::{self, Entry};
use serde::Serialize;

use crate::check::{self, mb};
use crate::exit::{Failure, Status};
use crate::output::{self, Style};
use crate::process::{self, Cache, Pages, Process, ProcessError, Report, Usage};

/// Version of the `--json` document, raised when a field changes its meaning or goes.
const SCHEMA: u32 = 1;
/// The smallest huge page size in use for programs, to which blocks are rounded at least.
const BLOCK: u64 = 2 << 20;

/// Arguments of `elfremap status`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Exit status: 0 remapped, 1 no such process, 2 wrong usage, 3 not remapped,
4 not permitted. With several processes: 3 when one of them is not remapped;
with --all: 0 when there is one that is.

Examples:
  elfremap status mariadbd           every process of that name
  elfremap status 4711 --watch 5     every 5 seconds, until it ends
  elfremap status --all              which processes are remapped at all")]
pub struct Args {
    /// Process id, or name of the program (all its processes)
    #[arg(value_name = "PID|NAME", required_unless_present = "all", conflicts_with = "all")]
    process: Option<String>,

    /// List every process that is remapped or has the preload loaded
    #[arg(long)]
    all: bool,

    /// Show all shared objects, not only those with huge pages
    #[arg(long)]
    objects: bool,

    /// Print a JSON document (one a line with --watch)
    #[arg(long)]
    json: bool,

    /// Repeat every SECONDS until the process ends
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
          value_parser = clap::value_parser!(u32).range(1..=86400))]
    watch: Option<u32>,
}

/// Runs the command.
///
/// # Errors
/// No such process (status 1), not permitted to look into it (4), stdout not writable.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let style = Style::for_stdout();
    let Some(seconds) = args.watch else {
        let states = look(args)?;
        print(args, &states, style, false)?;
        return Ok(verdict(args, &states));
    };
    let clear = std::io::stdout().is_terminal() && !args.json;
    let mut states = look(args)?;
    loop {
        if clear {
            output::print("\x1b[H\x1b[2J")?;
        }
        print(args, &states, style, true)?;
        std::thread::sleep(Duration::from_secs(seconds.into()));
        match look(args) {
            Ok(next) => states = next,
            // It has ended: what was seen last is the answer.
            Err(error) if is_gone(&error) => return Ok(verdict(args, &states)),
            Err(error) => return Err(error),
        }
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Failure>().is_some_and(|failure| failure.status == Status::Failed)
}

/// One process as it is at the moment.
#[derive(Debug)]
struct State {
    process: Process,
    exe: Option<String>,
    report: Option<Report>,
    objects: Vec<(process::Mapped, Usage)>,
}

/// All processes that were asked for.
#[derive(Debug)]
struct States {
    found: Vec<State>,
    /// Processes that could not be looked into (with `--all`).
    hidden: usize,
}

fn look(args: &Args) -> anyhow::Result<States> {
    let mut cache = Cache::default();
    if args.all {
        return Ok(look_at_all(&mut cache));
    }
    let wanted = args.process.as_deref().unwrap_or_default();
    let processes = find(wanted).map_err(failure)?;
    let mut found = Vec::new();
    for process in processes {
        match state(&process, &mut cache) {
            Ok(state) => found.push(state),
            // One of several processes of a name may end at any time.
            Err(ProcessError::Gone(_) | ProcessError::Zombie(_)) if is_name(wanted) => {}
            Err(error) => return Err(failure(error)),
        }
    }
    if found.is_empty() {
        return Err(failure(ProcessError::NoName(wanted.into())));
    }
    Ok(States { found, hidden: 0 })
}

fn look_at_all(cache: &mut Cache) -> States {
    let mut states = States { found: Vec::new(), hidden: 0 };
    for process in Process::all() {
        match state(&process, cache) {
            Ok(state) if state.is_remapped() || state.report.is_some() => states.found.push(state),
            Err(ProcessError::NotPermitted(_)) => states.hidden += 1,
            Ok(_) | Err(_) => {}
        }
    }
    states
}

fn is_name(text: &str) -> bool {
    !text.bytes().all(|b| b.is_ascii_digit())
}

fn find(wanted: &str) -> Result<Vec<Process>, ProcessError> {
    if is_name(wanted) {
        return Process::by_name(wanted);
    }
    // A number too large for a process id is none either.
    let pid = wanted.parse().map_err(|_| ProcessError::NoName(wanted.into()))?;
    Ok(vec![Process::by_pid(pid)?])
}

fn failure(error: ProcessError) -> anyhow::Error {
    let (status, hint) = match &error {
        ProcessError::NotPermitted(pid) => {
            (Status::NotPermitted, Some(format!("sudo elfremap status {pid}")))
        }
        ProcessError::NoPid(_) | ProcessError::NoName(_) => {
            (Status::Failed, Some("elfremap status --all".into()))
        }
        _ => (Status::Failed, None),
    };
    anyhow::Error::new(Failure { status, message: error.to_string(), hint })
}

fn state(process: &Process, cache: &mut Cache) -> Result<State, ProcessError> {
    let text = process.smaps()?;
    let entries: Vec<Entry<'_>> = smaps::parse(&text)
        .collect::<Result<_, _>>()
        .map_err(|source| ProcessError::Parse { pid: process.pid, source })?;
    let objects = process::objects(process, &entries, cache);
    let report = process::read_report(process, &objects);
    let page = check::page_size();
    let block = entries.iter().map(|entry| entry.kernel_page_size).max().unwrap_or(0).max(BLOCK);
    let objects = objects
        .into_iter()
        .map(|mapped| {
            let usage = process::usage(&mapped.object, &entries, page, block);
            (mapped, usage)
        })
        .collect();
    let exe = process.exe().map(|exe| crate::elf::printable(exe.as_os_str().as_encoded_bytes()));
    Ok(State { process: process.clone(), exe, report, objects })
}

impl State {
    /// Whether some of it is on huge pages that were made for it: not page cache
    /// that the kernel maps huge, and not bss that it makes huge by itself.
    fn is_remapped(&self) -> bool {
        let classes = self.objects.iter().flat_map(|(_, usage)| &usage.classes);
        classes.into_iter().any(|(class, pages)| {
            let own = *class != Class::Bss || self.report.is_some();
            pages.hugetlb > 0 || (pages.thp > 0 && own)
        })
    }

    /// Whether it was moved from outside, by `elfremap attach` or `run --attach`: without a
    /// preload in it that says it did.
    fn is_attached(&self) -> bool {
        self.is_remapped() && self.report.as_ref().is_none_or(|report| report.lines.is_none())
    }

    /// Text, data and bss of all objects that are moved, and the part that is huge.
    fn main(&self) -> Pages {
        let mut sum = Pages::default();
        for (mapped, usage) in &self.objects {
            if mapped.main || usage.total().hugetlb + usage.total().thp > 0 {
                let wanted = usage.classes.iter().filter(|(class, _)| *class != Class::Rodata);
                wanted.for_each(|(_, pages)| sum.add(pages));
            }
        }
        sum
    }

    fn file_thp(&self) -> u64 {
        self.objects.iter().map(|(_, usage)| usage.total().file_thp).sum()
    }

    fn title(&self) -> String {
        format!("{} (pid {})", self.process.name, self.process.pid)
    }

    /// Why nothing is on huge pages, as far as it is known.
    fn reason(&self) -> String {
        let Some(report) = &self.report else {
            let pid = self.process.pid;
            return format!("the preload is not loaded; try: elfremap attach {pid}");
        };
        let size: u64 = self.objects.first().map_or(0, |(_, usage)| usage.total().size);
        match (&report.lines, self.process.variable("ELFREMAP").as_deref()) {
            (None, Some("off")) => {
                return "the preload is loaded, but switched off: ELFREMAP=off".into();
            }
            (None, _) if size < BLOCK => {
                return format!("the preload left it alone: {}", Refusal::TooSmall);
            }
            (None, _) => {
                return match self.process.variable("ELFREMAP_EXE") {
                    Some(names) => format!("the preload left it alone: ELFREMAP_EXE={names}"),
                    None => "the preload is loaded, but its report cannot be read".into(),
                };
            }
            (Some(_), _) => {}
        }
        if let Some(trouble) = report.get("trouble") {
            return format!("the preload left it alone: {trouble}");
        }
        match (report.get("refusal_text"), report.get("refusal")) {
            (Some(text), _) => format!("the preload left it alone: {text}"),
            (None, Some("too-small")) => {
                "the preload left it alone: less than one huge page to gain".into()
            }
            (None, Some(code)) => format!("the preload left it alone: {code}"),
            (None, None) => "the preload is loaded, but could not move anything".into(),
        }
    }

    fn verdict(&self, style: Style) -> String {
        if !self.is_remapped() {
            return format!(
                "{}: {} ({})",
                self.title(),
                style.yellow("not remapped"),
                self.reason()
            );
        }
        let main = self.main();
        let attached = if self.is_attached() { " (attached)" } else { "" };
        format!(
            "{}: {}{attached}, {} of {} MB of text, data and bss ({})",
            self.title(),
            style.green("remapped"),
            mb(main.huge()),
            mb(main.size),
            percent(main.huge(), main.size)
        )
    }
}

fn verdict(args: &Args, states: &States) -> Status {
    let mut remapped = states.found.iter().map(State::is_remapped);
    let done = if args.all { remapped.any(|r| r) } else { remapped.all(|r| r) };
    if done { Status::Done } else { Status::Negative }
}

fn print(args: &Args, states: &States, style: Style, watching: bool) -> anyhow::Result<()> {
    if args.json {
        let document = document(states);
        return if watching {
            output::print(&(serde_json::to_string(&document)? + "\n"))
        } else {
            output::print_json(&document)
        };
    }
    let mut text = String::new();
    if args.all {
        list(&mut text, states, style);
    } else {
        for (index, state) in states.found.iter().enumerate() {
            if index > 0 {
                text.push('\n');
            }
            describe(&mut text, state, args.objects, style);
        }
    }
    if watching {
        text.push('\n');
    }
    output::print(&text)
}

/// One process, in full.
fn describe(out: &mut String, state: &State, all_objects: bool, style: Style) {
    let _ = writeln!(out, "{}", state.verdict(style));
    let file_thp = state.file_thp();
    if file_thp > 0 {
        let _ = writeln!(
            out,
            "the kernel itself maps {} MB huge from the page cache (file THP); it may stop at any time",
            mb(file_thp)
        );
    }
    let heading = format!(
        "{:<18} {:>8} {:>8} {:>8} {:>9} {:>8} {:>6}",
        "MB of", "size", "hugetlb", "THP", "file THP", "small", "huge"
    );
    let _ = writeln!(out, "\n{}", style.bold(&heading));
    for (mapped, usage) in &state.objects {
        if !(all_objects || mapped.main || usage.total().huge() > 0) {
            continue;
        }
        let _ = writeln!(out, "{}", shortened(&mapped.path, 79));
        for (class, pages) in &usage.classes {
            row(out, class.name(), pages);
        }
        if usage.padding.huge() > 0 {
            row(out, "beside", &usage.padding);
        }
    }
    if let Some(report) = &state.report {
        describe_report(out, report);
    }
}

/// What the preload says: what it could not have, and what it left and why.
fn describe_report(out: &mut String, report: &Report) {
    let _ = match report.get("version") {
        Some(version) => writeln!(out, "\npreload: {} (version {version})", report.library),
        None => writeln!(out, "\npreload: {}", report.library),
    };
    let milliseconds = report.get("nanoseconds").and_then(|n| n.parse::<u64>().ok());
    if let Some(nanoseconds) = milliseconds {
        let _ =
            writeln!(out, "  took {}.{} ms", nanoseconds / 1_000_000, nanoseconds / 100_000 % 10);
    }
    for shortage in report.all("shortage") {
        // range, step, errno, kind of pages
        let parts: Vec<&str> = shortage.split(' ').collect();
        let _ = match parts.as_slice() {
            [range, step, errno, kind @ ..] => {
                writeln!(out, "  short: {range}: {step} of {} failed: {errno}", kind.join(" "))
            }
            _ => writeln!(out, "  short: {shortage}"),
        };
    }
    let mut left: Vec<(&str, u64)> = Vec::new();
    for line in report.all("left") {
        let mut parts = line.split(' ').skip(1);
        let (Some(code), Some(bytes)) = (parts.next(), parts.next()) else { continue };
        let bytes = bytes.parse().unwrap_or(0);
        match left.iter_mut().find(|(known, _)| *known == code) {
            Some((_, sum)) => *sum += bytes,
            None => left.push((code, bytes)),
        }
    }
    for (code, bytes) in left {
        let text = REASONS.iter().find(|reason| reason.code() == code);
        let text = text.map_or_else(|| code.to_owned(), ToString::to_string);
        let _ = writeln!(out, "  left {} MB: {text}", mb(bytes));
    }
}

/// The reasons that this version knows by code.
const REASONS: [Reason; 14] = [
    Reason::MixedProtections,
    Reason::Header,
    Reason::ForeignMapping,
    Reason::WriteExec,
    Reason::Threads,
    Reason::LowAddress,
    Reason::HeapLimit,
    Reason::LargeBss,
    Reason::Limited,
    Reason::Unreadable,
    Reason::TextModified,
    Reason::NotFromFile,
    Reason::ThpSize,
    Reason::Changed,
];

fn row(out: &mut String, name: &str, pages: &Pages) {
    let cell = |bytes| if bytes == 0 { "-".into() } else { mb(bytes) };
    let _ = writeln!(
        out,
        "  {name:<16} {:>8} {:>8} {:>8} {:>9} {:>8} {:>6}",
        mb(pages.size),
        cell(pages.hugetlb),
        cell(pages.thp),
        cell(pages.file_thp),
        cell(pages.small()),
        percent(pages.huge(), pages.size)
    );
}

/// One line for each process.
fn list(out: &mut String, states: &States, style: Style) {
    let heading = format!(
        "{:>8} {:<16} {:>9} {:>9} {:>9} {:>6}  {}",
        "PID", "NAME", "hugetlb", "THP", "file THP", "huge", "preload"
    );
    let _ = writeln!(out, "{}", style.bold(&heading));
    for state in &states.found {
        let mut sum = Pages::default();
        state.objects.iter().for_each(|(_, usage)| sum.add(&usage.total()));
        let main = state.main();
        let preload = match (&state.report, state.is_remapped()) {
            (None, true) => "no, attached",
            (None, false) => "no",
            (Some(_), true) => "yes",
            (Some(_), false) => "yes, not remapped",
        };
        let _ = writeln!(
            out,
            "{:>8} {:<16} {:>9} {:>9} {:>9} {:>6}  {preload}",
            state.process.pid,
            shortened(&state.process.name, 16),
            mb(sum.hugetlb),
            mb(sum.thp),
            mb(sum.file_thp),
            percent(main.huge(), main.size)
        );
    }
    if states.found.is_empty() {
        let _ = writeln!(out, "no process is remapped or has the preload loaded");
    }
    if states.hidden > 0 {
        let hidden = states.hidden;
        let _ = writeln!(out, "not permitted to look into {hidden} others; root may");
    }
}

/// A share, in words for people.
fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "-".into() } else { format!("{} %", check::percent(part, whole)) }
}

/// The last `width` characters of a long text.
fn shortened(text: &str, width: usize) -> String {
    let count = text.chars().count();
    if count <= width {
        return text.into();
    }
    text.chars().skip(count - width + 3).fold(String::from("..."), |mut text, c| {
        text.push(c);
        text
    })
}

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    processes: Vec<ProcessJson<'a>>,
    not_permitted: usize,
}

#[derive(Serialize)]
struct ProcessJson<'a> {
    pid: u32,
    name: &'a str,
    exe: Option<&'a str>,
    remapped: bool,
    attached: bool,
    preload: Option<PreloadJson<'a>>,
    objects: Vec<ObjectJson<'a>>,
}

#[derive(Serialize)]
struct PreloadJson<'a> {
    library: &'a str,
    reported: bool,
    report: Vec<(&'a str, &'a str)>,
}

#[derive(Serialize)]
struct ObjectJson<'a> {
    path: &'a str,
    main: bool,
    classes: Vec<PagesJson>,
    beside: PagesJson,
}

/// Amounts in bytes.
#[derive(Serialize)]
struct PagesJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    class: Option<&'static str>,
    size: u64,
    hugetlb: u64,
    thp: u64,
    file_thp: u64,
    small: u64,
}

impl PagesJson {
    fn new(class: Option<&'static str>, pages: &Pages) -> Self {
        Self {
            class,
            size: pages.size,
            hugetlb: pages.hugetlb,
            thp: pages.thp,
            file_thp: pages.file_thp,
            small: pages.small(),
        }
    }
}

fn document(states: &States) -> Document<'_> {
    let processes = states.found.iter().map(|state| {
        let objects = state.objects.iter().map(|(mapped, usage)| {
            let classes = usage.classes.iter();
            ObjectJson {
                path: &mapped.path,
                main: mapped.main,
                classes: classes.map(|(c, pages)| PagesJson::new(Some(c.name()), pages)).collect(),
                beside: PagesJson::new(None, &usage.padding),
            }
        });
        ProcessJson {
            pid: state.process.pid,
            name: &state.process.name,
            exe: state.exe.as_deref(),
            remapped: state.is_remapped(),
            attached: state.is_attached(),
            preload: state.report.as_ref().map(|report| PreloadJson {
                library: &report.library,
                reported: report.lines.is_some(),
                report: report
                    .lines
                    .iter()
                    .flatten()
                    .map(|(key, value)| (key.as_str(), value.as_str()))
                    .collect(),
            }),
            objects: objects.collect(),
        }
    });
    Document { schema: SCHEMA, processes: processes.collect(), not_permitted: states.hidden }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts() {
        assert_eq!(shortened("abcdefghij", 6), "...hij");
        assert_eq!(shortened("äöü", 3), "äöü");
        assert_eq!(percent(0, 0), "-");
    }
}
