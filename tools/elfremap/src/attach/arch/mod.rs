//! What differs between processors: registers of a stopped thread, the instruction of a
//! system call, and the calls that the kernel does not resume by itself.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(super) use aarch64::{ALIGNMENT, CODE, INSTRUCTION, RESUMED, ROOM, Registers, borrow};
#[cfg(target_arch = "x86_64")]
pub(super) use x86_64::{ALIGNMENT, CODE, INSTRUCTION, RESUMED, ROOM, Registers, borrow};

/// Where the instruction is in `code`, the bytes of executable memory at `start`.
pub(super) fn find(code: &[u8], start: u64) -> Option<u64> {
    let places = (0..code.len()).step_by(ALIGNMENT);
    let at = places.into_iter().find(|&at| code[at..].starts_with(&INSTRUCTION))?;
    start.checked_add(at as u64)
}
