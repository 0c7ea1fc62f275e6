//! Man pages and shell completions, generated from the command line's types and from the
//! pages in `docs/` that say the same for readers of the repository.

mod markdown;
mod roff;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::{Shell, generate};

use crate::cli::{CheckCli, Cli};
use crate::exit::Status;

/// Arguments of `elfremap manual`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Where to write to: PREFIX/share
    directory: PathBuf,
}

/// Writes all pages and completions below the directory.
///
/// # Errors
/// A file cannot be written.
pub fn run(args: &Args) -> anyhow::Result<Status> {
    for (path, content) in files() {
        let path = args.directory.join(path);
        let directory = path.parent().unwrap_or(&args.directory);
        fs::create_dir_all(directory)
            .and_then(|()| fs::write(&path, content))
            .with_context(|| format!("write {}", path.display()))?;
    }
    Ok(Status::Done)
}

/// Paths below `PREFIX/share` and what belongs there.
#[must_use]
pub fn files() -> Vec<(PathBuf, Vec<u8>)> {
    // There is no page elfremap-help(1).
    let mut elfremap = visible(&Cli::command()).disable_help_subcommand(true);
    elfremap.build();
    let check = CheckCli::command();
    let man = Path::new("man");
    let page = |name: &str, text: String| (man.join("man1").join(name), text.into_bytes());
    let mut files = vec![
        page("elfremap.1", roff::command(&elfremap, "elfremap")),
        page("elfremap-check.1", roff::command(&check, "elfremap-check")),
        (man.join("man7").join("elfremap.7"), roff::library().into_bytes()),
    ];
    for command in elfremap.get_subcommands() {
        let name = command.get_name();
        // `check` has its page under its own name.
        if name != "check" {
            let full = format!("elfremap-{name}");
            files.push(page(&format!("{full}.1"), roff::command(command, &full)));
        }
    }
    for (command, name) in [(visible(&Cli::command()), "elfremap"), (check, "elfremap-check")] {
        let completions = [
            (Shell::Bash, format!("bash-completion/completions/{name}")),
            (Shell::Zsh, format!("zsh/site-functions/_{name}")),
            (Shell::Fish, format!("fish/vendor_completions.d/{name}.fish")),
        ];
        for (shell, path) in completions {
            let mut text = Vec::new();
            generate(shell, &mut command.clone(), name, &mut text);
            files.push((path.into(), text));
        }
    }
    files
}

/// The command without its hidden subcommands, which completions would offer.
fn visible(command: &clap::Command) -> clap::Command {
    let subcommands = command.get_subcommands().filter(|sub| !sub.is_hide_set()).cloned();
    clap::Command::new("elfremap")
        .about(command.get_about().cloned().unwrap_or_default())
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .subcommand_value_name("command")
        .subcommands(subcommands)
}
