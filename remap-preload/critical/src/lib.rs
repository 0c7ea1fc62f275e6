//! The critical section: what runs while a program's segments are being exchanged.
//!
//! Nothing outside may be relied upon then: the program's own malloc, memcpy or mmap
//! may be what a "libc" call lands in, and its text or data may be away. So this
//! code makes no call, has no panic path, reads no static and touches memory only
//! through its arguments. It is a package of its own because a debug build would put
//! panic calls into it, which only a profile override for the package removes. All of
//! it ends up in the ELF section `elfremap_critical`; the tests disassemble that
//! section and fail on any transfer out of it.
//!
//! The caller decides everything beforehand and writes it down as a [`Op`] program:
//! system calls and copies, each with the place to go on at when it fails.
#![no_std]

pub mod arch;

/// One step of a program for [`run`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Op {
    /// What to do: one of the `KIND_` constants.
    pub kind: usize,
    /// Index of the step to go on at after an error; for [`KIND_JUMP`] the target.
    pub target: usize,
    /// System call number.
    pub number: usize,
    /// Arguments: of the system call, or destination, source and length of a copy.
    pub args: [usize; 6],
    /// Set by [`run`]: [`RESULT_NONE`] until the step has run, then 0, or the error
    /// number of a system call that failed.
    pub result: usize,
}

// The kinds are far apart so that the compiler has no use for a jump table, which
// would be an indirect branch and data outside of the section.

/// Make a system call; on an error go to the target.
pub const KIND_SYSCALL: usize = 1;
/// Copy `args[2]` bytes from `args[1]` to `args[0]`; the two do not overlap.
pub const KIND_COPY: usize = 1 << 8;
/// Make `args[1]` bytes of code just written at `args[0]` visible to instruction fetch.
pub const KIND_SYNC: usize = 1 << 16;
/// Go on at the target.
pub const KIND_JUMP: usize = 1 << 24;
/// The end.
pub const KIND_END: usize = 1 << 31;

/// The step has not run.
pub const RESULT_NONE: usize = usize::MAX;

/// The largest error number that a system call returns (as its negative).
const MAX_ERRNO: usize = 4095;

/// Runs a program of steps until its [`KIND_END`] (or a kind it does not know).
///
/// # Safety
/// - `ops` points to an array of steps in memory that the program's own steps do not
///   take away; every target is an index in it, and every path through it ends.
/// - Each step's effect on memory is one that the caller may cause: the stack, this
///   code and the array stay mapped and unchanged at their addresses.
#[unsafe(link_section = "elfremap_critical")]
#[inline(never)]
pub unsafe extern "C" fn run(ops: *mut Op) {
    let mut at = 0usize;
    loop {
        let op = ops.wrapping_add(at);
        // SAFETY: `at` is 0, the successor of a step that is not the end, or a
        // target; by the caller's promise a step lies there, aligned and writable.
        unsafe {
            let step = op.read();
            at = at.wrapping_add(1);
            let mut result = 0;
            if step.kind == KIND_SYSCALL {
                let value = arch::syscall(step.number, step.args);
                if value >= 0usize.wrapping_sub(MAX_ERRNO) {
                    result = 0usize.wrapping_sub(value);
                    at = step.target;
                }
            } else if step.kind == KIND_COPY {
                arch::copy(step.args[0], step.args[1], step.args[2]);
            } else if step.kind == KIND_SYNC {
                arch::sync_code(step.args[0], step.args[1]);
            } else if step.kind == KIND_JUMP {
                at = step.target;
            } else {
                return;
            }
            (&raw mut (*op).result).write(result);
        }
    }
}
