//! Debug registers of x86-64.

use anyhow::{Context, Result};
use nix::sys::ptrace;
use nix::unistd::Pid;

/// Sets hardware breakpoint 0: the text stays as it is.
pub(super) fn stop_at(pid: Pid, address: u64) -> Result<()> {
    let registers = std::mem::offset_of!(libc::user, u_debugreg);
    let control = registers + 7 * size_of::<u64>();
    // Bit 0 of DR7 enables breakpoint 0, for execution and one byte when bits 16-19 are 0.
    for (register, value) in [(registers, address.cast_signed()), (control, 1)] {
        let register = std::ptr::without_provenance_mut(register);
        ptrace::write_user(pid, register, value).context("cannot set a hardware breakpoint")?;
    }
    Ok(())
}

/// Where the process has stopped.
pub(super) fn stopped_at(pid: Pid) -> Result<u64> {
    Ok(ptrace::getregs(pid)?.rip)
}
