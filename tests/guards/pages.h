/* Data and bss in which every page tells whose it is: its first word. */
#include <stdint.h>

/* Of data, and of bss: PAGES 4 KiB each. */
#ifndef PAGES
#define PAGES 1024
#endif
#define TEXT(x) #x
#define NUMBER(x) TEXT(x)
asm(".text\n.p2align 12\nfiller:\n.fill 4 << 20, 1, 0x90\nret\n");
asm(".data\n.p2align 12\n.globl data\ndata:\n.set i, 0\n.rept " NUMBER(PAGES) "\n.quad i\n.p2align 12\n.set i, i+1\n.endr\n.text\n");
extern char data[];
static char bss[PAGES * 4096L] __attribute__((aligned(4096)));

static int check(uint64_t base) {
    for (int i = 0; i < PAGES; i++)
        if (*(uint64_t *)(data + i * 4096L) != base + i || *(uint64_t *)(bss + i * 4096L) != base + i)
            return 1;
    return 0;
}

static void fill(uint64_t base) {
    for (int i = 0; i < PAGES; i++) *(uint64_t *)(data + i * 4096L) = *(uint64_t *)(bss + i * 4096L) = base + i;
}
