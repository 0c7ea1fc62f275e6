// Page-aligned static memory on which the program works page by page. Transparent
// huge pages take part in that; for those of the pool the library moves the block back
// to ordinary pages first. (O50)
//# build: pie,no-pie x bfd
//# matrix: no
//# exit: 42
#include "hazard.h"
#include <sys/mman.h>

static unsigned char area[8 << 20] __attribute__((aligned(4096)));

int main(void) {
    memset(area, 1, sizeof area);
    unsigned char *page = area + (4 << 20);
    printf("%d ", mprotect(page, 4096, PROT_NONE));
    printf("%d ", mprotect(page, 4096, PROT_READ | PROT_WRITE));
    printf("%d ", madvise(page + 4096, 4096, MADV_DONTNEED));
    printf("%d ", page[4096]);
    void *fresh = mmap(page + 8192, 4096, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    printf("%d %d ", fresh == page + 8192, page[8192]);
    printf("%d ", munmap(page + 3 * 4096, 4096));
    unsigned sum = page[0] + page[4 * 4096] + area[0];
    printf("%u\n", sum);
    return hazard_end();
}
