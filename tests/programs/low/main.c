// Text at the lowest addresses that a program can have: what lies below is nobody's,
// and stays so.
//# build: no-pie x bfd x base10000
//# build: no-pie x lld x base200000
//# runs: few
//# exit: 42
#include "hazard.h"
#include <sys/mman.h>

int main(void) {
    CHECK((uintptr_t)fill_text < 0x400000);
    unsigned char present;
    CHECK(mincore((void *)0x1000, 4096, &present) < 0);
    return hazard_end();
}
