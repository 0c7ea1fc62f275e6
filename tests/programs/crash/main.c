// Crashes three calls deep, under a handler that another library has installed, or
// under none: the one who looks at what is left finds the way there.
//# build: pie,no-pie x bfd x rdynamic
//# matrix: no
//# flags: -O0
//# exit: 42
#include "hazard.h"

static void __attribute__((noinline)) innermost(int mode) {
    if (mode == 1) abort();
    if (mode == 2) *(volatile int *)(uintptr_t)16 = mode;
    hazard_ready();
}
void __attribute__((noinline)) middle_function(int mode) { innermost(mode); fill_check(); }
void __attribute__((noinline)) outer_function(int mode) { middle_function(mode); fill_check(); }

int main(void) {
    const char *text = getenv("HAZARD_CRASH");
    fill_check();
    outer_function(text ? atoi(text) : 0);
    return hazard_end();
}
