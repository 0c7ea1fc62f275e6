/* A program with much text: many functions of a page each (many.h, which the test generates).
 * `spin` runs through all of them for ever, `spin rounds N` N times; `spin wait` waits three
 * functions deep, `spin crash` aborts there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef long work(long);
#define FUNCTION(n) \
    __attribute__((noinline, aligned(4096))) long work_##n(long x) { \
        for (volatile int i = 0; i < 40; i++) x = x * 31 + n; \
        return x; \
    }
#include "many.h"
#undef FUNCTION
#define FUNCTION(n) work_##n,
static work *const all[] = {
#include "many.h"
};

int counter = 5;

__attribute__((noinline)) void innermost(int crash) {
    counter++;
    if (crash) abort();
    pause();
}
__attribute__((noinline)) void middle(int crash) { innermost(crash); fputs("", stdout); }
__attribute__((noinline)) void outer(int crash) { middle(crash); fputs("", stdout); }

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    printf("ready\n");
    fflush(stdout);
    if (!strcmp(what, "crash")) outer(1);
    if (!strcmp(what, "wait")) outer(0);
    long x = 1, rounds = argc > 2 ? atol(argv[2]) : -1;
    while (rounds < 0 || rounds-- > 0)
        for (unsigned i = 0; i < sizeof all / sizeof *all; i++) x = all[i](x);
    return x == 0;
}
