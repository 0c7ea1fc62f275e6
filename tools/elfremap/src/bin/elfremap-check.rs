//! `elfremap-check`: `elfremap check` under its own name.

use clap::Parser;
use elfremap_tools::cli::{self, CheckCli, Cli, Command};
use std::process::ExitCode;

fn main() -> ExitCode {
    env_logger::init();
    cli::execute(&Cli { command: Command::Check(CheckCli::parse().args) })
}
