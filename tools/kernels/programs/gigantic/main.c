// Bss that fills pages of 1 GiB. A common symbol, so that the linker puts it behind all other
// variables: those have to be within 2 GiB of the text.
//# fill: text=1 rodata=1 relro=1 data=1 bss=4
#include "hazard.h"

char huge[(2ul << 30) - (16 << 20)];

static volatile char *at(unsigned long offset) {
    return (volatile char *)fill_opaque((const uint32_t *)huge) + offset;
}

int main(void) {
    const unsigned long step = sizeof huge / 8 - 4096;
    for (unsigned long i = 0; i < 8; i++) *at(i * step) = (char)(i + 1);
    for (unsigned long i = 0; i < 8; i++) CHECK(*at(i * step) == (char)(i + 1) && !*at(i * step + 1));
    hazard_ready();
    for (unsigned long i = 0; i < 8; i++) CHECK(*at(i * step) == (char)(i + 1));
    fill_check();
    printf("done\n");
    return FILL_OK;
}
