// Branch target identification: all code has landing pads, and the processor refuses an
// indirect call to anything else, after the move as before. The C library's start files
// have no landing pads, so this program brings its own.
#include "hazard.h"
#include <setjmp.h>
#include <signal.h>

__asm__(".globl _start\n"
        ".type _start, %function\n"
        "_start:\n"
        "    hint #34\n" // bti c
        "    mov x29, #0\n"
        "    mov x30, #0\n"
        "    mov x5, x0\n" // rtld_fini
        "    ldr x1, [sp]\n"
        "    add x2, sp, #8\n"
        "    mov x6, sp\n"
        "    adrp x0, main\n"
        "    add x0, x0, :lo12:main\n"
        "    mov x3, #0\n"
        "    mov x4, #0\n"
        "    bl __libc_start_main\n"
        "    bl abort\n");

static sigjmp_buf back;
static void on_trap(int signal) { siglongjmp(back, signal); }

// Whether an indirect call to the instruction after a landing pad ends in a signal.
static int refuses_call(const char *landing_pad) {
    if (sigsetjmp(back, 1)) return 1;
    ((uint32_t(*)(void))(uintptr_t)(landing_pad + 4))();
    return 0;
}

static uint32_t refused_calls(void) {
    uint32_t refused = 0;
    for (uint32_t page = 0; page < fill_pages[0]; page++) refused += refuses_call(fill_text + page * 4096);
    return refused;
}

int main(void) {
    signal(SIGILL, on_trap);
    printf("%u of %u calls beside a landing pad refused\n", refused_calls(), fill_pages[0]);
    int status = hazard_end();
    printf("%u refused at the end\n", refused_calls());
    return status;
}
