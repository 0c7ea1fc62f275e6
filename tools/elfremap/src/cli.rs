//! The command line as clap types; what the commands do is in [`crate::commands`].

use clap::{Parser, Subcommand};

use crate::commands;
use crate::exit::{self, Status};
use crate::manual;
use std::process::ExitCode;

/// Move a program's text, data and bss onto huge pages
#[derive(Parser, Debug)]
#[command(name = "elfremap", version, max_term_width = 80)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// Say whether BINARY can be moved onto huge pages, and what it needs and gains
#[derive(Parser, Debug)]
#[command(name = "elfremap-check", version, max_term_width = 80)]
pub struct CheckCli {
    /// As those of `elfremap check`.
    #[command(flatten)]
    pub args: commands::check::Args,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Say whether BINARY can be moved onto huge pages, and what it needs and gains
    Check(commands::check::Args),
    /// Run PROGRAM with its text, data and bss on huge pages
    Run(commands::run::Args),
    /// Move the code of a running process onto huge pages
    Attach(commands::attach::Args),
    /// Put a running process back onto the pages of its files
    Detach(commands::detach::Args),
    /// Show what of a running process lies on huge pages, from its smaps
    Status(commands::status::Args),
    /// Write /tmp/perf-PID.map, so that perf names the moved functions
    Perfmap(commands::perfmap::Args),
    /// Show the huge page pools and who uses them
    Pool(commands::pool::Args),
    /// Reserve huge pages for a program
    Reserve(commands::reserve::Args),
    /// Measure a program with and without huge pages, side by side
    Compare(commands::compare::Args),
    /// Write man pages and shell completions (for `make install`)
    #[command(hide = true)]
    Manual(manual::Args),
}

impl Command {
    fn run(&self) -> anyhow::Result<Status> {
        match self {
            Self::Check(args) => commands::check::run(args),
            Self::Run(args) => commands::run::run(args),
            Self::Attach(args) => commands::attach::run(args),
            Self::Detach(args) => commands::detach::run(args),
            Self::Status(args) => commands::status::run(args),
            Self::Perfmap(args) => commands::perfmap::run(args),
            Self::Pool(args) => commands::pool::run(args),
            Self::Reserve(args) => commands::reserve::run(args),
            Self::Compare(args) => commands::compare::run(args),
            Self::Manual(args) => manual::run(args),
        }
    }
}

impl Cli {
    /// Parses the command line; a wrong one ends the process with status 2, for `run`
    /// with 125, since 2 may be the program's own.
    #[must_use]
    pub fn from_command_line() -> Self {
        Self::try_parse().unwrap_or_else(|error| {
            let is_run = std::env::args_os().nth(1).is_some_and(|name| name == "run");
            let status = if is_run && error.use_stderr() { 125 } else { error.exit_code() };
            let _ = error.print();
            std::process::exit(status)
        })
    }
}

/// Runs the parsed command; prints its error, if any.
#[must_use]
pub fn execute(cli: &Cli) -> ExitCode {
    match cli.command.run() {
        Ok(status) => status.into(),
        Err(error) => exit::report(&error),
    }
}
