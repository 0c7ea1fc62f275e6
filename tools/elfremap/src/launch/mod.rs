//! Becoming another program: its environment, its place on the machine, and the state
//! of the process as the caller left it.

pub mod inherited;
mod library;
mod numa;
mod perfmap;

pub use library::{LibraryError, find as find_library, preload_value};
pub use numa::{NodeError, bind as bind_to_node};
pub use perfmap::write_later as write_perf_map_later;
