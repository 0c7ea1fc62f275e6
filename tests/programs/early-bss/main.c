// bss, data and constants that the program's own shared library has filled or read
// before `main`, at whatever address the program was loaded. (O01)
//# build: pie,no-pie x bfd,gold,lld
//# library: early.c
//# exit: 42
#include "hazard.h"

unsigned char early_bss[3 << 20];
unsigned char early_data[1 << 20] = {1, 2, 3};
const unsigned char early_const[1 << 20] = {4, 5, 6};

static uint64_t sum(const unsigned char *bytes, size_t size) {
    uint64_t hash = 0xcbf29ce484222325;
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 0x100000001b3;
    return hash;
}

int main(void) {
    for (size_t i = 0; i < sizeof early_bss; i++) CHECK(early_bss[i] == (unsigned char)(i * 7 + i / 4096));
    printf("%016lx %016lx %016lx\n", sum(early_bss, sizeof early_bss),
           sum(early_data, sizeof early_data), sum(early_const, sizeof early_const));
    return hazard_end();
}
