//! What the preload library and the command line tools share: reading what a
//! process looks like, planning which of its pages move onto huge pages, and
//! carrying the plan out.
//!
//! The phases, in the order they run, each taking the earlier ones by reference:
//! discover -> [`facts::Facts`] -> [`plan::plan`] -> [`plan::Plan`] -> stage ->
//! commit -> verify -> report.
//!
//! The crate is `no_std`: the preload must not bring an unwinder, a second
//! allocator policy or any other guest into the program it is loaded into.
#![cfg_attr(not(test), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub mod class;
pub mod errno;
pub mod exec;
pub mod facts;
pub mod glob;
pub mod hugepage;
pub mod plan;
pub mod policy;
pub mod proc;
pub mod property;
pub mod prot;
pub mod range;
pub mod report;
