//! The commands `elfremap` and `elfremap-check`: argument types in [`cli`], one
//! module per subcommand in [`commands`], exit codes in [`exit`].

pub mod attach;
pub mod check;
pub mod cli;
pub mod commands;
pub mod compare;
pub mod elf;
pub mod exit;
pub mod host;
pub mod interrupt;
pub mod launch;
pub mod manual;
pub mod options;
pub mod output;
pub mod perfmap;
pub mod process;
pub mod reservation;
pub mod symbols;
pub mod system;
