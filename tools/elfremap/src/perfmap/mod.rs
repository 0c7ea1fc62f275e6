//! Which code a running process has where, and writing its names down as perf reads them.

pub mod map;
pub mod objects;
pub mod output;
pub mod process;
