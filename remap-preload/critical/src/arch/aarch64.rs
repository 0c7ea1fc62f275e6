//! AArch64 (AAPCS64).

use super::Context;
use core::arch::{asm, naked_asm};

/// Makes a system call and returns what the kernel returns: a value in
/// `-4095..=-1` is an error number.
///
/// # Safety
/// As for the system call.
#[inline(always)]
#[must_use]
pub unsafe fn syscall(number: usize, args: [usize; 6]) -> usize {
    let result;
    // SAFETY: the kernel's calling convention (syscall(2)): number in x8, arguments in
    // x0-x5, result in x0; other registers are kept. What the call does is the
    // caller's promise.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") args[0] => result,
            in("x1") args[1],
            in("x2") args[2],
            in("x3") args[3],
            in("x4") args[4],
            in("x5") args[5],
            options(nostack),
        );
    }
    result
}

/// Copies `len` bytes from `from` to `to`, without a call.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes; they do not overlap, and
/// nothing else accesses `to` meanwhile.
#[inline(always)]
pub unsafe fn copy(to: usize, from: usize, len: usize) {
    // SAFETY: the loops read and write exactly `len` bytes; the memory is the caller's
    // promise.
    unsafe {
        asm!(
            "2:",
            "cmp {len}, #64",
            "b.lo 3f",
            "ldp {a}, {b}, [{from}]",
            "stp {a}, {b}, [{to}]",
            "ldp {a}, {b}, [{from}, #16]",
            "stp {a}, {b}, [{to}, #16]",
            "ldp {a}, {b}, [{from}, #32]",
            "stp {a}, {b}, [{to}, #32]",
            "ldp {a}, {b}, [{from}, #48]",
            "stp {a}, {b}, [{to}, #48]",
            "add {from}, {from}, #64",
            "add {to}, {to}, #64",
            "sub {len}, {len}, #64",
            "b 2b",
            "3:",
            "cbz {len}, 4f",
            "ldrb {a:w}, [{from}], #1",
            "strb {a:w}, [{to}], #1",
            "sub {len}, {len}, #1",
            "b 3b",
            "4:",
            to = inout(reg) to => _,
            from = inout(reg) from => _,
            len = inout(reg) len => _,
            a = out(reg) _,
            b = out(reg) _,
            options(nostack),
        );
    }
}

/// Makes code just written visible to instruction fetch: cleans the data cache to the
/// point of unification and invalidates the instruction cache, line by line (Arm ARM,
/// "Concurrent modification and execution of instructions").
///
/// # Safety
/// `len` bytes at `start` are mapped and readable.
#[inline(always)]
pub unsafe fn sync_code(start: usize, len: usize) {
    // SAFETY: CTR_EL0 and the two cache operations are open to user space under Linux;
    // they change no memory. The range is the caller's promise.
    unsafe {
        asm!(
            "mrs {ctr}, ctr_el0",
            "ubfx {line}, {ctr}, #16, #4",
            "mov {at}, #4",
            "lsl {line}, {at}, {line}",
            "sub {at}, {line}, #1",
            "bic {at}, {start}, {at}",
            "2:",
            "cmp {at}, {end}",
            "b.hs 3f",
            "dc cvau, {at}",
            "add {at}, {at}, {line}",
            "b 2b",
            "3:",
            "dsb ish",
            "and {line}, {ctr}, #15",
            "mov {at}, #4",
            "lsl {line}, {at}, {line}",
            "sub {at}, {line}, #1",
            "bic {at}, {start}, {at}",
            "4:",
            "cmp {at}, {end}",
            "b.hs 5f",
            "ic ivau, {at}",
            "add {at}, {at}, {line}",
            "b 4b",
            "5:",
            "dsb ish",
            "isb",
            start = in(reg) start,
            end = in(reg) start.wrapping_add(len),
            ctr = out(reg) _,
            line = out(reg) _,
            at = out(reg) _,
            options(nostack),
        );
    }
}

/// Calls `function(argument)` and returns 0; or returns 1 when `function`, directly
/// or deeper, called [`escape`] with the same context. Frames in between are then
/// gone without having been unwound.
///
/// # Safety
/// `context` is valid until `function` returns or escapes. Frames that an escape
/// skips own nothing that must be released.
#[unsafe(naked)]
pub unsafe extern "C" fn protect(
    context: *mut Context,
    function: unsafe extern "C" fn(*mut u8),
    argument: *mut u8,
) -> usize {
    naked_asm!(
        // bti c, for programs that run with branch target identification.
        "hint #34",
        "stp x19, x20, [x0]",
        "stp x21, x22, [x0, #16]",
        "stp x23, x24, [x0, #32]",
        "stp x25, x26, [x0, #48]",
        "stp x27, x28, [x0, #64]",
        "stp x29, x30, [x0, #80]",
        "stp d8, d9, [x0, #96]",
        "stp d10, d11, [x0, #112]",
        "stp d12, d13, [x0, #128]",
        "stp d14, d15, [x0, #144]",
        "mov x9, sp",
        "str x9, [x0, #160]",
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "mov x9, x1",
        "mov x0, x2",
        "blr x9",
        "ldp x29, x30, [sp], #16",
        "mov x0, #0",
        "ret",
    )
}

/// Returns from the [`protect`] that filled in `context`.
///
/// # Safety
/// That `protect` has not returned yet, and runs in this thread.
#[unsafe(naked)]
pub unsafe extern "C" fn escape(context: *const Context) -> ! {
    naked_asm!(
        "hint #34",
        "ldp x19, x20, [x0]",
        "ldp x21, x22, [x0, #16]",
        "ldp x23, x24, [x0, #32]",
        "ldp x25, x26, [x0, #48]",
        "ldp x27, x28, [x0, #64]",
        "ldp x29, x30, [x0, #80]",
        "ldp d8, d9, [x0, #96]",
        "ldp d10, d11, [x0, #112]",
        "ldp d12, d13, [x0, #128]",
        "ldp d14, d15, [x0, #144]",
        "ldr x9, [x0, #160]",
        "mov sp, x9",
        "mov x0, #1",
        "ret",
    )
}

/// Calls `function(argument)` on the stack that ends at `top`.
///
/// # Safety
/// `top` is the end of memory that nobody else uses meanwhile, a multiple of 16, with room
/// for all that `function` needs. `function` returns.
#[unsafe(naked)]
pub unsafe extern "C" fn on_stack(
    top: usize,
    function: unsafe extern "C" fn(*mut u8),
    argument: *mut u8,
) {
    naked_asm!(
        "hint #34",
        "stp x29, x30, [sp, #-16]!",
        "mov x29, sp",
        "mov sp, x0",
        "mov x9, x1",
        "mov x0, x2",
        "blr x9",
        "mov sp, x29",
        "ldp x29, x30, [sp], #16",
        "ret",
    )
}
