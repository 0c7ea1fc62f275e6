// Text and data that share a block after rounding, and do not overlap at all. (O19)
//# build: no-pie x bfd x data5ff000
//# fill: text=400 rodata=4 relro=4 data=1152 bss=1152
//# exit: 42
#include "hazard.h"

int main(void) {
    CHECK((uintptr_t)fill_data >= 0x5ff000 && (uintptr_t)fill_data < 0x600000);
    return hazard_end();
}
