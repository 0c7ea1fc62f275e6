//! Debug registers of arm64 (`Documentation/arch/arm64/ptrace.rst` and asm/ptrace.h).

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::unistd::Pid;

/// The first breakpoint of `struct user_hwdebug_state`.
#[repr(C)]
struct Breakpoint {
    info: u32,
    padding: u32,
    address: u64,
    control: u32,
    padding_after: u32,
}

/// Enabled, for user mode, on the four bytes of an instruction.
const CONTROL: u32 = 1 | 2 << 1 | 0xf << 5;

/// Sets the first hardware breakpoint: the text stays as it is.
pub(super) fn stop_at(pid: Pid, address: u64) -> Result<()> {
    const NT_ARM_HW_BREAK: usize = 0x402;
    let mut state = Breakpoint { info: 0, padding: 0, address, control: CONTROL, padding_after: 0 };
    let data = libc::iovec { iov_base: (&raw mut state).cast(), iov_len: size_of::<Breakpoint>() };
    // SAFETY: the kernel reads `data` and the structure it points to, both of which are
    // there until the call returns.
    let result = unsafe {
        libc::ptrace(libc::PTRACE_SETREGSET, pid.as_raw(), NT_ARM_HW_BREAK, &raw const data)
    };
    Errno::result(result).context("cannot set a hardware breakpoint")?;
    Ok(())
}

/// Where the process has stopped.
pub(super) fn stopped_at(pid: Pid) -> Result<u64> {
    Ok(ptrace::getregs(pid)?.pc)
}
