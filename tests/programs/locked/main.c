// An earlier library's constructor has locked all memory, present and future.
//# build: pie,no-pie x bfd
//# runs: few
//# library: lock.c
//# expect: parity
//# exit: 42
#include "hazard.h"

extern int lock_result;

int main(void) {
    printf("locked %d\n", lock_result);
    return hazard_end();
}
