//! x86-64.

use libc::user_regs_struct as Registers;

/// The call that a thread makes with these registers if the instruction at the address
/// returned with it is `syscall`.
pub(crate) const fn next(registers: &Registers) -> (libc::c_long, u64) {
    (registers.rax.cast_signed(), registers.rip)
}

/// The call that the thread has entered, with its first four arguments.
pub(crate) const fn entered(registers: &Registers) -> (libc::c_long, [u64; 4]) {
    let arguments = [registers.rdi, registers.rsi, registers.rdx, registers.r10];
    (registers.orig_rax.cast_signed(), arguments)
}
