//! x86-64 (System V ABI).

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
    // SAFETY: the kernel's calling convention (syscall(2)): number in rax, arguments
    // in rdi, rsi, rdx, r10, r8, r9; rcx and r11 are overwritten. What the call does
    // is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
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
    // SAFETY: the ABI keeps the direction flag clear; the memory is the caller's promise.
    unsafe {
        asm!(
            "rep movsb",
            inout("rdi") to => _,
            inout("rsi") from => _,
            inout("rcx") len => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Makes code just written visible to instruction fetch: nothing to do, x86 keeps its
/// instruction cache coherent, and the code is reached by a later system call's return.
///
/// # Safety
/// None needed here; the signature is that of every processor.
#[inline(always)]
pub unsafe fn sync_code(_start: usize, _len: usize) {}

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
        "mov [rdi], rbx",
        "mov [rdi + 8], rbp",
        "mov [rdi + 16], r12",
        "mov [rdi + 24], r13",
        "mov [rdi + 32], r14",
        "mov [rdi + 40], r15",
        "mov [rdi + 48], rsp",
        // The stack is 16-byte aligned before a call, so it is not at our entry.
        "sub rsp, 8",
        "mov rax, rsi",
        "mov rdi, rdx",
        "call rax",
        "add rsp, 8",
        "xor eax, eax",
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
        "mov rbx, [rdi]",
        "mov rbp, [rdi + 8]",
        "mov r12, [rdi + 16]",
        "mov r13, [rdi + 24]",
        "mov r14, [rdi + 32]",
        "mov r15, [rdi + 40]",
        "mov rsp, [rdi + 48]",
        "mov eax, 1",
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
        "push rbp",
        "mov rbp, rsp",
        "mov rsp, rdi",
        "mov rdi, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        "ret",
    )
}
