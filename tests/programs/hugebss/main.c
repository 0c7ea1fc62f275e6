// bss of several gigabytes of which next to nothing is used. (O13)
//# build: pie,no-pie x bfd
//# matrix: no
//# flags: -mcmodel=medium
//# exit: 42
#include "hazard.h"

static char area[4UL << 30];

int main(void) {
    area[3UL << 30] = 1;
    CHECK(area[3UL << 30] == 1 && area[(4UL << 30) - 1] == 0);
    return hazard_end();
}
