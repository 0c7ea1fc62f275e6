//! One module per subcommand: its arguments and what it does.

pub mod attach;
pub mod check;
pub mod compare;
pub mod detach;
pub mod perfmap;
pub mod pool;
pub mod reserve;
pub mod run;
pub mod status;
