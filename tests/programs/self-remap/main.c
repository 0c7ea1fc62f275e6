// A program that itself remaps its own text, and goes on when that is refused. (O51)
//# build: pie,no-pie x bfd
//# matrix: no
//# exit: 42
#define _GNU_SOURCE
#include "hazard.h"
#include <fcntl.h>
#include <sys/mman.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

int main(void) {
    char *page = (char *)(((uintptr_t)fill_text + (3 << 20)) & -4096ul);
    char copy[4096];
    memcpy(copy, page, sizeof copy);
    void *moved = mremap(page, 4096, 4096, MREMAP_DONTUNMAP | MREMAP_MAYMOVE, NULL);
    if (moved != MAP_FAILED) {
        // Bring it home, as such a runtime does.
        if (mremap(moved, 4096, 4096, MREMAP_FIXED | MREMAP_MAYMOVE, page) == MAP_FAILED) _exit(3);
    }
    madvise(page, 4096, MADV_HUGEPAGE);
    CHECK(!memcmp(copy, page, sizeof copy));
    return hazard_end();
}
