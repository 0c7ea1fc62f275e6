//! Registers of a system call on arm64.

use nix::Result;
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;

/// At the entry of a call: the address it is made from, and its number.
pub(super) fn call(pid: Pid) -> Result<(u64, i64)> {
    let registers = ptrace::getregs(pid)?;
    Ok((registers.pc, registers.regs[8].cast_signed()))
}

/// At the entry of a call: another number in place of its own.
pub(super) fn set_number(pid: Pid, mut number: i32) -> Result<()> {
    /// The kernel has read x8 by now.
    const NT_ARM_SYSTEM_CALL: usize = 0x404;
    let data = libc::iovec { iov_base: (&raw mut number).cast(), iov_len: size_of::<i32>() };
    // SAFETY: the kernel reads `data` and the number it points to, both of which are there
    // until the call returns.
    let result = unsafe {
        libc::ptrace(libc::PTRACE_SETREGSET, pid.as_raw(), NT_ARM_SYSTEM_CALL, &raw const data)
    };
    Errno::result(result).map(drop)
}

/// At the exit of a call: another result in place of its own.
pub(super) fn set_result(pid: Pid, result: i64) -> Result<()> {
    let mut registers = ptrace::getregs(pid)?;
    registers.regs[0] = result.cast_unsigned();
    ptrace::setregs(pid, registers)
}
