//! The command `elfremap`.

use std::process::ExitCode;

fn main() -> ExitCode {
    env_logger::init();
    elfremap_tools::cli::execute(&elfremap_tools::cli::Cli::from_command_line())
}
