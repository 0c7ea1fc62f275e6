// An allocator linked into the program: its tables are in the program's data and bss.
//# build: pie,no-pie x bfd x jemalloc
//# runs: few
//# flags: -fno-builtin -pthread
//# exit: 42
#include "hazard.h"
#include <pthread.h>

extern int mallctl(const char *name, void *old, size_t *length, void *value, size_t size);

static void *work(void *seed) {
    unsigned state = (unsigned)(uintptr_t)seed, bad = 0;
    char *blocks[64] = {0};
    size_t sizes[64] = {0};
    for (int i = 0; i < 20000; i++) {
        state = state * 1103515245 + 12345;
        unsigned slot = state >> 16 & 63;
        for (size_t j = 0; j < sizes[slot]; j += 97) bad += blocks[slot][j] != (char)slot;
        free(blocks[slot]);
        sizes[slot] = state >> 8 & 0x3fff;
        blocks[slot] = malloc(sizes[slot]);
        memset(blocks[slot], (int)slot, sizes[slot]);
    }
    for (int i = 0; i < 64; i++) free(blocks[i]);
    return (void *)(uintptr_t)bad;
}

int main(void) {
    const char *version = NULL;
    size_t length = sizeof version;
    CHECK(!mallctl("version", &version, &length, NULL, 0) && version);
    pthread_t threads[4];
    uintptr_t bad = 0;
    for (uintptr_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(threads[i], &result);
        bad += (uintptr_t)result;
    }
    printf("jemalloc %s, bad %lu\n", version, (unsigned long)bad);
    return hazard_end();
}
