//! x86-64.

/// `syscall`. It is as good in the middle of another instruction, since nothing after it
/// is run.
pub(in crate::attach) const INSTRUCTION: [u8; 2] = [0x0f, 0x05];
/// Where an instruction may begin.
pub(in crate::attach) const ALIGNMENT: usize = 1;

/// `syscall`, and what the helper does when nobody gives it another call: `exit(0)` of the
/// thread (`mov $60, %eax; xor %edi, %edi; syscall; ud2`).
pub(in crate::attach) const CODE: [u8; 13] =
    [0x0f, 0x05, 0xb8, 0x3c, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05, 0x0f, 0x0b];

/// The room that [`borrow`] takes.
pub(in crate::attach) const ROOM: usize = 128;

/// Code for a thread of the program that makes the helper, and for the helper until it has
/// code of its own; and the place in it where the helper makes its calls. The thread executes a
/// system call by its first instruction, takes up what it had in its registers, without use of
/// its stack or its flags, and goes on where it was: also when nobody traces it any more.
/// A call that has returned 0, as in a new thread, is followed by the end of [`CODE`].
pub(in crate::attach) fn borrow(own: &Registers) -> (Vec<u8>, usize) {
    let r = own.resumed().0;
    // syscall; xchg %rax, %rcx; jrcxz 1f
    let mut code = vec![0x0f, 0x05, 0x48, 0x91, 0xe3, 0];
    let skip = code.len();
    // movabs $..., %rax, %rcx, %rdx, %rsi, %rdi, %r8, %r9, %r10, %r11
    let numbered = [
        (0x48, 0, r.rax),
        (0x48, 1, r.rcx),
        (0x48, 2, r.rdx),
        (0x48, 6, r.rsi),
        (0x48, 7, r.rdi),
        (0x49, 0, r.r8),
        (0x49, 1, r.r9),
        (0x49, 2, r.r10),
        (0x49, 3, r.r11),
    ];
    for (prefix, number, value) in numbered {
        code.extend([prefix, 0xb8 + number]);
        code.extend(value.to_le_bytes());
    }
    // jmp *0(%rip), and the address.
    code.extend([0xff, 0x25, 0, 0, 0, 0]);
    code.extend(r.rip.to_le_bytes());
    // 1: the helper's, from behind its first call.
    code[skip - 1] = u8::try_from(code.len() + INSTRUCTION.len() - skip).unwrap_or(0);
    let helper = code.len();
    code.extend(CODE);
    (code, helper)
}

/// Calls in which a thread may sleep and which the kernel resumes by itself, with the rest of
/// their time, when the thread was stopped without a signal (signal(7)): poll, nanosleep,
/// pause, wait4, select, flock, rt_sigsuspend, futex, clock_nanosleep, waitid, pselect6, ppoll.
pub(in crate::attach) const RESUMED: &[u64] =
    &[7, 35, 34, 61, 23, 73, 130, 202, 230, 247, 270, 271];

/// Calls that end early when the thread is stopped, though no signal has come (signal(7)),
/// and that may just be made again; each with the argument that limits their time, which
/// would begin anew: semop, epoll_wait, epoll_pwait, epoll_pwait2, semtimedop,
/// rt_sigtimedwait, io_getevents, io_pgetevents.
const REPEATED: &[(u64, Option<usize>)] = &[
    (65, None),
    (232, Some(3)),
    (281, Some(3)),
    (441, Some(3)),
    (220, Some(3)),
    (128, Some(2)),
    (208, Some(4)),
    (333, Some(4)),
];

/// The first of the kernel's internal error numbers that mean "make the call again"
/// (`ERESTARTSYS` of include/linux/errno.h), and the last one.
const RESTART: std::ops::RangeInclusive<u64> = 512..=516;
/// `ERESTART_RESTARTBLOCK`: by restart_syscall(2), which knows how long it is still to wait.
const RESTART_BLOCK: u64 = 516;

/// The registers of a stopped thread.
#[derive(Clone, Copy, Debug)]
pub(in crate::attach) struct Registers(libc::user_regs_struct);

impl Registers {
    /// From what `PTRACE_GETREGSET` gave; `None` for a thread in 32-bit mode, of which it
    /// gives less.
    pub(in crate::attach) fn new(set: libc::user_regs_struct, length: usize) -> Option<Self> {
        /// `__USER_CS`: the code segment of 64-bit programs.
        const USER_CS: u64 = 0x33;
        (length == size_of_val(&set) && set.cs == USER_CS).then_some(Self(set))
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
        let r = &mut self.0;
        /// `X86_EFLAGS_TF`: a trap after each instruction.
        const TRAP: u64 = 1 << 8;
        // Without a call in progress, the kernel has nothing to resume.
        (r.rip, r.rax, r.orig_rax) = (at, number, u64::MAX);
        r.eflags &= !TRAP;
        [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9] = args;
        self
    }

    /// The address of the next instruction.
    pub(in crate::attach) const fn address(&self) -> u64 {
        self.0.rip
    }

    /// The registers with which the thread goes on elsewhere.
    pub(in crate::attach) const fn at(mut self, address: u64) -> Self {
        self.0.rip = address;
        self
    }

    /// What the call has returned.
    pub(in crate::attach) const fn result(&self) -> u64 {
        self.0.rax
    }

    /// The registers with which the thread goes on by itself when it is let go outside of
    /// the place where the kernel resumes calls: nearly the same, but a call that a signal is
    /// to interrupt is made again.
    pub(in crate::attach) fn resumed(mut self) -> Self {
        /// `__NR_restart_syscall`.
        const RESTART_SYSCALL: u64 = 219;
        let error = self.0.rax.wrapping_neg();
        if self.0.orig_rax.cast_signed() >= 0 && RESTART.contains(&error) && error != 515 {
            self.0.rax = if error == RESTART_BLOCK { RESTART_SYSCALL } else { self.0.orig_rax };
            self.0.rip -= INSTRUCTION.len() as u64;
        }
        self
    }

    /// When the thread's call has ended early (EINTR) only because it was stopped: the
    /// registers with which it is made again. `None` as well where the time that it was to
    /// wait would begin anew, unless the call has only just begun.
    pub(in crate::attach) fn uninterrupted(mut self, has_just_begun: bool) -> Option<Self> {
        let call = self.0.orig_rax;
        if call.cast_signed() < 0
            || self.0.rax != u64::from(libc::EINTR.cast_unsigned()).wrapping_neg()
        {
            return None;
        }
        let (_, limit) = REPEATED.iter().find(|(number, _)| *number == call)?;
        if let Some(index) = limit {
            let r = &self.0;
            let value = [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9][*index];
            // Of epoll_wait a number of milliseconds, negative for none; of others a pointer.
            let is_number = call == 232 || call == 281;
            let forever = if is_number { value & 1 << 31 != 0 } else { value == 0 };
            if !forever && !has_just_begun {
                return None;
            }
        }
        self.0.rax = call;
        self.0.orig_rax = u64::MAX;
        self.0.rip -= INSTRUCTION.len() as u64;
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registers(call: u64, result: i64) -> Registers {
        // SAFETY: the structure has integers only.
        let mut set: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        (set.rip, set.orig_rax, set.rax, set.cs) = (100, call, result.cast_unsigned(), 0x33);
        Registers::new(set, size_of_val(&set)).unwrap()
    }

    #[test]
    fn calls_are_made_again_where_the_kernel_would() {
        let of = |r: Registers| (r.0.rip, r.0.rax);
        assert_eq!(of(registers(34, -514).resumed()), (98, 34));
        assert_eq!(of(registers(230, -516).resumed()), (98, 219));
        assert_eq!(of(registers(1, 5).resumed()), (100, 5));
        // Not in a call: what rax holds is the program's.
        assert_eq!(of(registers(u64::MAX, -512).resumed()), (100, (-512i64).cast_unsigned()));
    }

    #[test]
    fn interrupted_calls_without_limit_are_made_again() {
        let mut forever = registers(232, -4);
        forever.0.r10 = u64::from(u32::MAX);
        assert_eq!(forever.uninterrupted(false).map(|r| (r.0.rip, r.0.rax)), Some((98, 232)));
        let mut limited = registers(232, -4);
        limited.0.r10 = 1000;
        assert!(limited.uninterrupted(false).is_none());
        assert!(limited.uninterrupted(true).is_some());
        assert!(registers(0, 7).uninterrupted(true).is_none());
        assert!(registers(65, -4).uninterrupted(false).is_some());
        assert!(registers(3, -4).uninterrupted(true).is_none());
    }

    #[test]
    fn the_borrowed_thread_takes_up_its_registers() {
        let mut own = registers(u64::MAX, 0x1111);
        own.0.rip = 0x1234_5678_9abc;
        own.0.r11 = 0xbbbb;
        let (code, helper) = borrow(&own);
        assert!(code.len() <= ROOM);
        assert_eq!(code[helper..], CODE);
        // jrcxz leads to what follows the helper's instruction.
        assert_eq!(6 + usize::from(code[5]), helper + INSTRUCTION.len());
        assert_eq!(code[helper - 8..helper], 0x1234_5678_9abcu64.to_le_bytes());
        let values = 0x1111u64.to_le_bytes();
        assert_eq!(code[6..16], [&[0x48, 0xb8], &values[..]].concat());
    }

    #[test]
    fn the_helpers_code_begins_with_the_instruction() {
        assert_eq!(super::super::find(&CODE, 7), Some(7));
        assert_eq!(super::super::find(&CODE[2..], 7), Some(14));
        assert_eq!(super::super::find(&[0x0f], 7), None);
    }
}
