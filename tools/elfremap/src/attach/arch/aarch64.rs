//! arm64.

/// `svc #0`.
pub(in crate::attach) const INSTRUCTION: [u8; 4] = [0x01, 0, 0, 0xd4];
/// Where an instruction may begin.
pub(in crate::attach) const ALIGNMENT: usize = 4;

/// `svc #0`, and what the helper does when nobody gives it another call: `exit(0)` of the
/// thread (`mov x8, #93; mov x0, #0; svc #0; udf #0`).
pub(in crate::attach) const CODE: [u8; 20] =
    [0x01, 0, 0, 0xd4, 0xa8, 0x0b, 0x80, 0xd2, 0, 0, 0x80, 0xd2, 0x01, 0, 0, 0xd4, 0, 0, 0, 0];

/// The room that [`borrow`] takes.
pub(in crate::attach) const ROOM: usize = 136;

/// As on x86-64. A jump takes a register here, so the thread loses x17, in which nothing lives
/// across a call of a function.
pub(in crate::attach) fn borrow(own: &Registers) -> (Vec<u8>, usize) {
    /// Where the values for the registers are, and behind them the helper's code.
    const VALUES: u32 = 48;
    const HELPER: u32 = VALUES + 8 * 8;
    let r = own.resumed().0;
    let values = [
        (0, r.regs[0]),
        (1, r.regs[1]),
        (2, r.regs[2]),
        (3, r.regs[3]),
        (4, r.regs[4]),
        (5, r.regs[5]),
        (8, r.regs[8]),
        (17, r.pc),
    ];
    // svc #0; cbz x0, behind the helper's first instruction
    let mut code = Vec::from(INSTRUCTION);
    code.extend((0xb400_0000 | (HELPER / 4) << 5).to_le_bytes());
    // ldr x..., its value
    let (mut at, mut from) = (8, VALUES);
    for (register, _) in values {
        code.extend((0x5800_0000 | ((from - at) / 4) << 5 | register).to_le_bytes());
        (at, from) = (at + 4, from + 8);
    }
    // ret x17, for which the place needs no landing pad (BTI); udf #0
    code.extend(0xd65f_0220_u32.to_le_bytes());
    code.extend([0; 4]);
    values.iter().for_each(|(_, value)| code.extend(value.to_le_bytes()));
    let helper = code.len();
    code.extend(CODE);
    (code, helper)
}

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

    /// The address of the next instruction.
    pub(in crate::attach) const fn address(&self) -> u64 {
        self.0.pc
    }

    /// The registers with which the thread goes on elsewhere.
    pub(in crate::attach) const fn at(mut self, address: u64) -> Self {
        self.0.pc = address;
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
