// A segment at the other end of the address space: what lies between is nobody's.
//# build: no-pie x bfd x far
//# exit: 42
#include "hazard.h"

__attribute__((section(".far"))) int far_away[1 << 20] = {1};

int main(void) {
    CHECK((uintptr_t)far_away == 0x7e0000000000);
    for (int i = 0; i < 1 << 20; i += 1024) far_away[i] += i;
    CHECK(far_away[0] == 1 && far_away[1023 * 1024] == 1023 * 1024);
    return hazard_end();
}
