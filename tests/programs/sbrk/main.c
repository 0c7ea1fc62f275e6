// Only write(2) and sbrk: the break grows, shrinks and grows again, and memory that
// comes back is zero. (O22, O25)
//# build: no-pie,pie x bfd x BSS4K,BSS1900K,BSS2M
//# fill: text=1152 rodata=4 relro=4 data=640 bss=1
//# exit: 42
#include "hazard.h"

static char area[BSS];
extern char end[];

static void say(const char *text) {
    if (write(1, text, strlen(text)) < 0) _exit(2);
}

static void need(int condition, const char *what) {
    if (condition) return;
    say("failed: ");
    say(what);
    say("\n");
    _exit(1);
}

static int all(const char *p, size_t size, char value) {
    for (size_t i = 0; i < size; i++)
        if (p[i] != value) return 0;
    return 1;
}

static void grow_and_shrink(void) {
    char *first = (char *)sbrk(0);
    need(first != (char *)-1, "sbrk(0)");
    need(sbrk(1000) == first, "grow by 1000");
    need(all(first, 1000, 0), "fresh memory is zero");
    char *at = first + 1000;
    for (int i = 0; i < 1000; i++) {
        need(sbrk(4096) == at, "grow by a page");
        need(all(at, 4096, 0), "a fresh page is zero");
        memset(at, i, 4096);
        at += 4096;
    }
    for (int i = 0; i < 1000; i++) need(all(first + 1000 + i * 4096, 4096, (char)i), "content");
    need(sbrk(first - at) == at, "shrink");
    need(sbrk(0) == first, "the break is where it was");
    need(sbrk(8192) == first, "grow again");
    need(all(first, 8192, 0), "memory that came back is zero");
    memset(first, 9, 8192);
    need(sbrk(-8192) == first + 8192, "shrink again");
}

int main(void) {
    char byte;
    if (getenv("HAZARD_BREAK")) {
        char text[] = "break - end = 0x0000000000000000\n";
        uintptr_t distance = (uintptr_t)sbrk(0) - (uintptr_t)end;
        for (char *digit = text + 31; distance; distance >>= 4) *digit-- = "0123456789abcdef"[distance & 15];
        say(text);
    }
    grow_and_shrink();
    area[0] = area[BSS - 1] = 3;
    say("ready\n");
    while (read(0, &byte, 1) > 0) {
    }
    grow_and_shrink();
    need(area[0] == 3 && area[BSS - 1] == 3 && all(area + 1, BSS - 2, 0), "bss");
    fill_check();
    say("done\n");
    return FILL_OK;
}
