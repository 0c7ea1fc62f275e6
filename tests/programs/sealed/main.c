// Segments that an earlier library's constructor has sealed (mseal(2), Linux 6.10): they
// stay as they are. Where the kernel has no such call this is an ordinary program.
//# build: pie,no-pie x bfd
//# runs: few
//# expect: parity
//# library: seal.c
//# exit: 42
#include "hazard.h"

extern int sealed_mappings;

int main(void) {
    printf("sealed: %s\n", sealed_mappings > 2 ? "yes" : "no");
    return hazard_end();
}
