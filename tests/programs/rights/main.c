// No byte gains a right: constants, code and relro still refuse to be written, data
// still refuses to be executed, and no mapping is both writable and executable. (O07, O08)
//# build: pie,no-pie x bfd,gold,lld x default,now,page2m
//# build: pie,no-pie x bfd x noseparate-code
//# exit: 42
#include "hazard.h"
#include <setjmp.h>
#include <signal.h>

static sigjmp_buf back;
static void on_fault(int signal) { siglongjmp(back, signal); }

// Whether writing to `p` (or calling it) ends in a signal.
static int refuses_write(const void *p) {
    if (sigsetjmp(back, 1)) return 1;
    *(volatile char *)p = *(const volatile char *)p;
    return 0;
}

static int refuses_call(const void *p) {
    if (sigsetjmp(back, 1)) return 1;
    ((void (*)(void))(uintptr_t)p)();
    return 0;
}

static int first(void) { return 1; }
static int second(void) { return 2; }
int (*const table[])(void) = {first, second};
const char constant[] = "constant";

static int write_exec(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[5000];
    int found = 0;
    while (fgets(line, sizeof line, maps)) {
        const char *rights = strchr(line, ' ') + 1;
        found += rights[1] == 'w' && rights[2] == 'x';
    }
    fclose(maps);
    return found;
}

int main(void) {
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    CHECK(write_exec() == 0);
    CHECK(refuses_write(constant));
    CHECK(refuses_write((const void *)(uintptr_t)first));
    for (uint32_t page = 0; page < fill_pages[0]; page++) CHECK(refuses_write(fill_text + page * 4096));
    for (uint32_t page = 0; page < fill_pages[1]; page++) CHECK(refuses_write(fill_rodata + page * 1024));
    CHECK(refuses_write(table));
    for (uint32_t page = 0; page < fill_pages[2]; page++) CHECK(refuses_write(fill_relro + page * 1024));
    static const unsigned char code[] = {0xc3};
    fill_data[1024 * 100 + 5] = 0xc3;
    CHECK(refuses_call(fill_data + 1024 * 100 + 5));
    fill_data[1024 * 100 + 5] = fill_word(100, 4);
    CHECK(refuses_call(fill_bss + 3 * 1024));
    printf("constants kept, code kept, relro kept, no-execute kept %d\n", code[0] == 0xc3);
    CHECK(table[1]() == 2);
    return hazard_end();
}
