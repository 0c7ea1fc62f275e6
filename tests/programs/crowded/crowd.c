#include <stdlib.h>
#include <sys/mman.h>

long crowd_mappings;

// Pages of alternating protection, so that none of them merge.
__attribute__((constructor)) static void crowd(void) {
    const char *text = getenv("HAZARD_MAPPINGS");
    if (!text) return;
    const long most = 1 << 20;
    char *area = mmap(0, most * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED) return;
    // Each adds a mapping, or two.
    long n = 0;
    while (n < most / 2 && !mprotect(area + 2 * n * 4096 + 4096, 4096, PROT_READ)) n++;
    crowd_mappings = n;
    // Gives back two mappings for each page whose protection becomes its neighbours'.
    long left = atol(text);
    for (long i = 0; i < left / 2; i++)
        mprotect(area + 2 * (n - 1 - i) * 4096 + 4096, 4096, PROT_NONE);
}
