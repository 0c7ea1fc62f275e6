//! The assembly, one module per processor; everything else is portable.

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
mod cpu;

pub use cpu::{copy, escape, on_stack, protect, sync_code, syscall};

/// Registers that a function has to preserve, and the stack pointer: where
/// [`escape`] returns to.
#[derive(Debug)]
#[repr(C, align(16))]
pub struct Context([usize; 24]);

impl Context {
    /// A place to fill in.
    #[must_use]
    pub const fn new() -> Self {
        Self([0; 24])
    }
}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}
