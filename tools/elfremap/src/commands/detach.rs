//! `elfremap detach`: puts a program that runs back onto the pages of its files.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use crate::attach::{self, Returned, Target};
use crate::check::mb;
use crate::commands::attach::milliseconds;
use crate::exit::Status;
use crate::interrupt;
use crate::output;

/// Version of the `--json` document, raised when a field changes its meaning or goes.
const SCHEMA: u32 = 1;

/// Arguments of `elfremap detach`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
What `elfremap attach` or the preload has moved is mapped from its file again, at the
same offset and with the same rights, and the huge pages go back. Where the file is
gone it is put on small pages. What the preload has moved and may be written to stays.

Exit status: 0 back, 1 failed, 2 wrong usage, 3 nothing was moved, 4 not permitted.

Examples:
  elfremap detach $(pidof mariadbd)
  elfremap detach 4711 --objects 'libjvm.so'")]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// The process, or one of its threads
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(i32::MAX)))]
    pid: u32,

    /// Only these shared objects beside the program: names or globs, separated by colons;
    /// '' for none [default: all]
    #[arg(long, value_name = "GLOB")]
    objects: Option<String>,

    /// How long to wait for threads that cannot be stopped, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10",
          value_parser = clap::value_parser!(u32).range(1..=86400))]
    timeout: u32,

    /// Print a JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// The process cannot be attached to (statuses 1, 3, 4), or stdout cannot be written.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let target = Target::open(args.pid)?;
    interrupt::catch()?;
    let timeout = Duration::from_secs(args.timeout.into());
    let returned =
        target
            .explain(attach::detach(&target, args.objects.as_deref(), timeout, &|calls| calls))?;
    if args.json {
        output::print_json(&document(&target, &returned))?;
    } else {
        output::print(&describe(&target, &returned))?;
    }
    let kept = returned.objects.iter().any(|back| !back.kept.is_empty());
    let back = returned.objects.iter().any(|back| back.from_file + back.private > 0);
    Ok(match (back, kept) {
        (_, true) => Status::Failed,
        (true, false) => Status::Done,
        (false, false) => Status::Negative,
    })
}

fn describe(target: &Target, returned: &Returned) -> String {
    let mut text = format!("{} (pid {}):", target.name, target.pid);
    if returned.objects.is_empty() {
        return text + " nothing was moved\n";
    }
    text.push('\n');
    for back in &returned.objects {
        let _ = write!(text, "  {}: {} MB from the file", back.path, mb(back.from_file));
        if back.private > 0 {
            let _ = write!(text, ", {} MB on small pages of its own", mb(back.private));
        }
        text.push('\n');
        for (bytes, why) in &back.kept {
            let _ = writeln!(text, "    {} MB stay on huge pages: {why}", mb(*bytes));
        }
    }
    let stall = milliseconds(returned.stall);
    let _ = writeln!(text, "  all threads were stopped for {stall}");
    text
}

#[derive(Serialize)]
struct Document<'a> {
    schema: u32,
    pid: u32,
    name: &'a str,
    stall_nanoseconds: u128,
    objects: Vec<ObjectJson<'a>>,
}

#[derive(Serialize)]
struct ObjectJson<'a> {
    path: &'a str,
    from_file: u64,
    private: u64,
    kept: Vec<KeptJson<'a>>,
}

#[derive(Serialize)]
struct KeptJson<'a> {
    bytes: u64,
    reason: &'a str,
}

fn document<'a>(target: &'a Target, returned: &'a Returned) -> Document<'a> {
    let objects = returned.objects.iter().map(|back| ObjectJson {
        path: &back.path,
        from_file: back.from_file,
        private: back.private,
        kept: back.kept.iter().map(|(bytes, reason)| KeptJson { bytes: *bytes, reason }).collect(),
    });
    Document {
        schema: SCHEMA,
        pid: target.pid,
        name: &target.name,
        stall_nanoseconds: returned.stall.as_nanos(),
        objects: objects.collect(),
    }
}
