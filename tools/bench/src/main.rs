//! Measures what the remap gains and costs; renders reports from kept raw data.

mod chase;
mod demo;
mod generate;
mod machine;
mod measure;
mod memory;
mod mysql;
mod pool;
mod populate;
mod record;
mod report;
mod rng;
mod runner;
mod snapshot;
mod source;
mod stats;
mod variant;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Measure what elfremap gains and costs, and render what was measured
#[derive(Parser, Debug)]
#[command(name = "elfremap-bench", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Show a real program and a generated one before and after, in under two minutes
    Demo(demo::Args),
    /// Measure (slow) and keep the raw data as JSON lines
    Measure(Box<measure::Args>),
    /// Render tables and plots from raw data (fast)
    Report(report::Args),
    /// Generate and build a program with many MiB of text
    Generate(generate::Args),
    /// Chase a pointer through memory on pages of one kind
    #[command(hide = true)]
    Chase(chase::Args),
    /// Populate huge pages and copy once: the yardstick of the start-up cost
    #[command(hide = true)]
    Populate(populate::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Measure(args) => measure::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Chase(args) => chase::run(&args),
        Command::Populate(args) => populate::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("elfremap-bench: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
