/* A preload library for programs that run under the TLB model (model.c). Named first in LD_PRELOAD: the
   loader runs constructors in reverse order, so this one runs last, right before the program's
   own code. It tells the model which pages are huge, as the kernel says, and that counting
   begins; at exit that it ends, and whether the pages are still the same. Takes no
   memory from malloc: the program's heap is as it is without it.

   TLB_RUN: the number of the run, for the model. */
#include "protocol.h"
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* PAGEMAP_SCAN of Linux 6.7 and later: Documentation/admin-guide/mm/pagemap.rst. Debian 12's
   headers do not have it yet. */
struct scan {
    uint64_t size, flags, start, end, walk_end, regions, region_room, most_pages;
    uint64_t inverted, all_of, any_of, tell;
};
struct region {
    uint64_t start, end, categories;
};
#define SCAN _IOWR('f', 16, struct scan)
/* Pages of the pool, and those that one entry of the second-last page table maps. */
#define IS_HUGE (1 << 6)

enum { MOST_REGIONS = 4096 };
static struct region before[MOST_REGIONS], after[MOST_REGIONS];
static long before_count;

static void fail(const char *what) {
    dprintf(2, "mark: %s\n", what);
    _exit(99);
}

static long find_huge(struct region *regions) {
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("cannot open /proc/self/pagemap");
    struct scan scan = { .size = sizeof scan,
                         .end = 1ULL << 47,
                         .regions = (uintptr_t)regions,
                         .region_room = MOST_REGIONS,
                         .all_of = IS_HUGE,
                         .tell = IS_HUGE };
    long count = ioctl(fd, SCAN, &scan);
    close(fd);
    if (count < 0 || count == MOST_REGIONS) fail("cannot scan the pagemap (Linux 6.7 and later)");
    return count;
}

/* The process that started this one has work left when this one runs already: until it sleeps,
   what it does would count. It wakes again when this one is gone. */
static void wait_for_parent(void) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)getppid());
    for (;;) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = read(fd, text, sizeof text - 1);
        if (n < 0) fail("cannot read the parent's state");
        close(fd);
        text[n] = 0;
        const char *name_end = strrchr(text, ')');
        if (name_end && !strncmp(name_end, ") S", 3)) return;
        usleep(1000);
    }
}

static void read_byte(uint64_t address) { (void)*(volatile const char *)(uintptr_t)address; }
static void pass(uint64_t word) {
    if (word >> 32) fail("a word of more than 32 bits");
    read_byte(MAILBOX + word);
}

static void __attribute__((destructor)) end(void) {
    long count = find_huge(after);
    int same = count == before_count && !memcmp(before, after, (size_t)count * sizeof *after);
    pass((uint64_t)same);
    read_byte(COMMANDS + END_COUNTING);
}

static void __attribute__((constructor)) begin(void) {
    const char *run = getenv("TLB_RUN");
    if (!run) fail("TLB_RUN is not set");
    uint64_t length = COMMANDS + 4096 - MAILBOX;
    void *place = (void *)(uintptr_t)MAILBOX;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    if (mmap(place, length, PROT_READ, flags, -1, 0) != place) fail("cannot map the mailbox");
    wait_for_parent();
    before_count = find_huge(before);
    pass(strtoul(run, NULL, 10));
    for (long i = 0; i < before_count; i++) {
        if ((before[i].start | before[i].end) & ((1 << HUGE_SHIFT) - 1)) fail("huge pages of another size");
        pass(before[i].start >> HUGE_SHIFT);
        pass(before[i].end >> HUGE_SHIFT);
    }
    read_byte(COMMANDS + BEGIN_COUNTING);
}
