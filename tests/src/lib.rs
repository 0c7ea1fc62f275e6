//! What the tests share: the machine's huge page pool under a lock, an independent
//! reading of smaps, building and running the programs, skips that can be turned
//! into failures.

pub mod attach;
pub mod grown;
pub mod image;
pub mod lab;
pub mod library;
pub mod outcome;
pub mod pool;
pub mod run;
pub mod smaps;

/// Bytes of the huge page that x86-64 machines have by default, and of one block.
pub const BLOCK: u64 = 2 << 20;

/// Bytes of a base page.
pub const PAGE: u64 = 4096;
