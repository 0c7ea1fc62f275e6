//! What a thread's registers say about system calls.

#[cfg_attr(target_arch = "x86_64", path = "registers/x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "registers/aarch64.rs")]
mod arch;

pub(crate) use arch::{entered, next};
