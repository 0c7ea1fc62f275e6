//! Registers of a system call on x86-64.

use nix::Result;
use nix::sys::ptrace;
use nix::unistd::Pid;

/// At the entry of a call: the address it is made from, and its number.
pub(super) fn call(pid: Pid) -> Result<(u64, i64)> {
    let registers = ptrace::getregs(pid)?;
    Ok((registers.rip, registers.orig_rax.cast_signed()))
}

/// At the entry of a call: another number in place of its own.
pub(super) fn set_number(pid: Pid, number: i32) -> Result<()> {
    let mut registers = ptrace::getregs(pid)?;
    registers.orig_rax = i64::from(number).cast_unsigned();
    ptrace::setregs(pid, registers)
}

/// At the exit of a call: another result in place of its own.
pub(super) fn set_result(pid: Pid, result: i64) -> Result<()> {
    let mut registers = ptrace::getregs(pid)?;
    registers.rax = result.cast_unsigned();
    ptrace::setregs(pid, registers)
}
