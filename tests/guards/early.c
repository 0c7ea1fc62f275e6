/* Does something to the program's data in its constructor, as EARLY says: `mlock`,
   `dontdump`, `dontfork`; or `sibling`, a process that shares the memory, is no thread, and
   counts in it until the end. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

extern char data[] __attribute__((weak));
static volatile int stop;
static volatile uint64_t counted;
static pid_t sibling;
static char stack[65536] __attribute__((aligned(16)));

/* Words that the program leaves alone, in all of its data. */
static int count(void *unused) {
    (void)unused;
    while (!stop && getppid() != 1) {
        for (long page = 0; page < 2048; page++)
            if (page % 64 > 34) ++*(volatile uint64_t *)(data + page * 4096 + 1024);
        counted++;
    }
    return 0;
}

__attribute__((constructor)) static void start(void) {
    const char *what = getenv("EARLY");
    if (!what || !data) return;
    char *page = data + 1024 * 4096;
    int failed = 0;
    if (!strcmp(what, "mlock")) failed = mlock(page, 4096);
    if (!strcmp(what, "dontdump")) failed = madvise(page, 4096, MADV_DONTDUMP);
    if (!strcmp(what, "dontfork")) failed = madvise(page, 4096, MADV_DONTFORK);
    if (!strcmp(what, "sibling")) {
        sibling = clone(count, stack + sizeof stack, CLONE_VM | SIGCHLD, NULL);
        failed = sibling < 0;
        while (!counted) usleep(1000);
    }
    if (failed) perror(what);
}

__attribute__((destructor)) static void end(void) {
    if (!sibling) return;
    stop = 1;
    int status;
    waitpid(sibling, &status, 0);
    for (long page = 0; page < 2048; page++)
        if (page % 64 > 34 && *(uint64_t *)(data + page * 4096 + 1024) != counted) {
            printf("page %ld: %lu of %lu\n", page, *(uint64_t *)(data + page * 4096 + 1024), counted);
            return;
        }
    puts("all counted");
}
