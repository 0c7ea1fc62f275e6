//! `elfremap check`, also known as `elfremap-check`.

use std::io::ErrorKind;
use std::path::PathBuf;

use serde_json::json;

use crate::check::{self, Analysis};
use crate::elf::{ElfError, Image, NotElf};
use crate::exit::{Failure, Status};
use crate::host::{self, Host};
use crate::options::PolicyArgs;
use crate::output::{self, Style};
use crate::system::RootArg;

/// Arguments of `elfremap check`.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
The file is only read, never run. The number of huge pages holds for every
address at which the kernel may load the program: a pool with that many free
pages is enough for one instance.

Exit status: 0 suitable, 1 the file cannot be read or is damaged, 2 wrong
usage, 3 not suitable, 4 not permitted, 5 (with --now) not enough huge pages.

Examples:
  elfremap-check /usr/sbin/mysqld
  elfremap-check --merge rx --backend hugetlb ./server
  elfremap-check --json node | jq .need.pool_pages.worst")]
pub struct Args {
    /// The program: a path, or a name that is looked up in PATH
    binary: PathBuf,

    #[command(flatten)]
    policy: PolicyArgs,

    /// Exit with 5 when the pool cannot give all the pages now
    #[arg(long)]
    now: bool,

    /// Print a JSON document
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    root: RootArg,
}

/// Runs the command.
///
/// # Errors
/// The file cannot be read (status 1 or 4), or stdout cannot be written.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    let policy = args.policy.policy();
    let system = args.root.system();
    // The machine's state is worth a message, but no reason to hold back the rest.
    let host = Host::read(&system);
    if let Err(error) = &host {
        eprintln!("elfremap: warning: {error}");
    }
    let host = host.ok();
    let path = check::find_program(&args.binary);
    let choose = |image: &Image| match &host {
        Some(host) => check::block_for(image, &policy, host),
        None => host::block_size(&system, policy.page_size),
    };
    let mut analysis = match Analysis::read(&path, &policy, choose) {
        Ok(analysis) => analysis,
        Err(ElfError::NotElf(what)) => return not_elf(args, &path, &what),
        Err(error) => return Err(unreadable(&path, &error)),
    };
    analysis.judge_abroad();
    // The program will not run here.
    let host = host.filter(|_| !analysis.abroad);
    if args.json {
        output::print_json(&check::document(&analysis, host.as_ref()))?;
    } else {
        output::print(&check::render(&analysis, host.as_ref(), Style::for_stdout()))?;
    }
    if analysis.unfit().is_some() {
        return Ok(Status::Negative);
    }
    let available = host.map_or(0, |host| host.available(analysis.block));
    if args.now && !analysis.abroad && available < analysis.need().pool_pages.max {
        return Ok(Status::Short);
    }
    Ok(Status::Done)
}

/// A verdict as well: what runs is something else.
fn not_elf(args: &Args, path: &std::path::Path, what: &NotElf) -> anyhow::Result<Status> {
    let reason = format!("not an ELF file: {}", what.describe());
    if args.json {
        output::print_json(&json!({
            "schema": check::SCHEMA,
            "path": path.to_string_lossy(),
            "suitable": false,
            "reason": { "code": "not-elf", "text": reason },
            "type": "not-elf",
        }))?;
    } else {
        output::print(&format!("{}: {reason}\n", Style::for_stdout().red("not suitable")))?;
    }
    if let NotElf::Script(interpreter) = what {
        eprintln!("hint: elfremap-check {interpreter}");
    }
    Ok(Status::Negative)
}

pub(super) fn unreadable(path: &std::path::Path, error: &ElfError) -> anyhow::Error {
    let path = crate::elf::printable(path.as_os_str().as_encoded_bytes());
    let message = format!("cannot check {path}: {error}");
    let denied =
        matches!(error, ElfError::Open { source } if source.kind() == ErrorKind::PermissionDenied);
    let (status, hint) = if denied {
        (Status::NotPermitted, Some(format!("sudo elfremap-check {path}")))
    } else {
        (Status::Failed, None)
    };
    anyhow::Error::new(Failure { status, message, hint })
}
