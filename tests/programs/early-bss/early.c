#include <stddef.h>

extern unsigned char early_bss[3 << 20], early_data[1 << 20];
extern const unsigned char early_const[1 << 20];

__attribute__((constructor)) static void fill(void) {
    for (size_t i = 0; i < sizeof early_bss; i++) early_bss[i] = i * 7 + i / 4096;
    for (size_t i = 0; i < sizeof early_data; i += 4096) early_data[i] += early_const[2] + i / 4096;
}
