// The heap is in use before the preload's constructor runs. (O21)
//# build: no-pie,pie x bfd,lld
//# library: allocates.c
//# exit: 42
#include "hazard.h"

extern char end[];
extern unsigned char *early_block;
extern char *early_break;
extern unsigned early_size;

int main(void) {
    unsigned bad = 0;
    if (getenv("HAZARD_CLOSE")) {
        int close = (uintptr_t)early_break >> 21 == (uintptr_t)(end - 1) >> 21;
        printf("%s\n", close ? "the heap begins in the last block" : "the heap begins elsewhere");
    }
    for (unsigned i = 0; i < early_size; i++) bad += early_block[i] != 0x5a;
    unsigned char *block = (unsigned char *)realloc(early_block, 200000);
    for (unsigned i = 0; i < early_size; i++) bad += block[i] != 0x5a;
    memset(block, 0xa5, 200000);
    for (size_t size = 1; size <= 2000; size++) {
        unsigned char *p = (unsigned char *)malloc(size * 37);
        memset(p, (int)size, size * 37);
        bad += p[size * 36] != (unsigned char)size;
        free(p);
    }
    char *blocks[200];
    for (int i = 0; i < 200; i++) memset(blocks[i] = (char *)malloc(20000), i, 20000);
    for (int i = 0; i < 200; i++) {
        bad += blocks[i][19999] != (char)i;
        free(blocks[i]);
    }
    free(block);
    printf("bad=%u\n", bad);
    CHECK(bad == 0);
    return hazard_end();
}
