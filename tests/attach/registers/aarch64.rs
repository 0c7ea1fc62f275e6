//! AArch64.

use libc::user_regs_struct as Registers;

/// The call that a thread makes with these registers if the instruction at the address
/// returned with it is `svc`.
pub(crate) const fn next(registers: &Registers) -> (libc::c_long, u64) {
    (registers.regs[8].cast_signed(), registers.pc)
}

/// The call that the thread has entered, with its first four arguments.
pub(crate) const fn entered(registers: &Registers) -> (libc::c_long, [u64; 4]) {
    let [a, b, c, d, ..] = registers.regs;
    (registers.regs[8].cast_signed(), [a, b, c, d])
}
