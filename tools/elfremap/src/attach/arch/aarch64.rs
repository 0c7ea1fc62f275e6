//! arm64.

/// `svc #0`.
pub(in crate::attach) const INSTRUCTION: [u8; 4] = [0x01, 0, 0, 0xd4];
/// Where an instruction may begin.
pub(in crate::attach) const ALIGNMENT: usize = 4;

/// `svc #0`, and what the helper does when nobody gives it another call: `exit(0)` of the
/// thread (`mov x8, #93; mov x0, #0; svc #0; udf #0`).
pub(in crate::attach) const CODE: [u8; 20] =
    [0x01, 0, 0, 0xd4, 0xa8, 0x0b, 0x80, 0xd2, 0, 0, 0x80, 0xd2, 0x01, 0, 0, 0xd4, 0, 0, 0, 0];

/// Calls in which a thread may sleep and which the kernel resumes by itself (signal(7)):
/// flock, pselect6, ppoll, waitid, futex, nanosleep, clock_nanosleep, rt_sigsuspend, wait4.
pub(in crate::attach) const RESUMED: &[u64] = &[32, 72, 73, 95, 98, 101, 115, 133, 260];

/// The registers of a stopped thread.
#[derive(Clone, Copy, Debug)]
pub(in crate::attach) struct Registers(libc::user_regs_struct);

impl Registers {
    /// From what `PTRACE_GETREGSET` gave; `None` for a thread in 32-bit mode, of which it
    /// gives less.
    pub(in crate::attach) fn new(set: libc::user_regs_struct, length: usize) -> Option<Self> {
        (length == size_of_val(&set)).then_some(Self(set))
    }

    pub(in crate::attach) const fn set(&self) -> &libc::user_regs_struct {
        &self.0
    }

    /// These registers with a system call to be made by the instruction at `at`.
    pub(in crate::attach) const fn with_call(
        mut self,
        at: u64,
        number: u64,
        args: [u64; 6],
    ) -> Self {
        self.0.pc = at;
        self.0.regs[8] = number;
        [
            self.0.regs[0],
            self.0.regs[1],
            self.0.regs[2],
            self.0.regs[3],
            self.0.regs[4],
            self.0.regs[5],
        ] = args;
        self
    }

    /// What the call has returned.
    pub(in crate::attach) const fn result(&self) -> u64 {
        self.0.regs[0]
    }

    /// The registers with which the thread goes on by itself. Here the kernel has set up the
    /// resumption before it stops the thread (`do_signal` of arch/arm64/kernel/signal.c).
    pub(in crate::attach) const fn resumed(self) -> Self {
        self
    }

    /// As on x86-64; here the number of the call is not among the registers, so an early end
    /// stays one.
    pub(in crate::attach) const fn uninterrupted(self, _has_just_begun: bool) -> Option<Self> {
        None
    }
}
