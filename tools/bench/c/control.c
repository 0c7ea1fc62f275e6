/* The control: a preload library that moves nothing. A result counts only as far
   as it lies away from the control's. Named first in LD_PRELOAD, so that its
   constructor runs after those of the other preload libraries (the loader runs the
   constructors in reverse order of loading), it also serves as the clock:

   ELFREMAP_BENCH_STAMP=FILE   append the time and the CPU time of the process
                               (CLOCK_MONOTONIC, CLOCK_PROCESS_CPUTIME_ID; ns, 8 bytes each)
   ELFREMAP_BENCH_SMAPS=FILE   append /proc/self/smaps */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int64_t now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

__attribute__((constructor)) static void stamp(void) {
    const char *name = getenv("ELFREMAP_BENCH_STAMP");
    if (name) {
        int64_t ns[2] = {now(CLOCK_MONOTONIC), now(CLOCK_PROCESS_CPUTIME_ID)};
        int out = open(name, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (out < 0 || write(out, ns, sizeof ns) != sizeof ns) _exit(99);
        close(out);
    }
    name = getenv("ELFREMAP_BENCH_SMAPS");
    if (name) {
        static char buffer[1 << 15];
        int in = open("/proc/self/smaps", O_RDONLY | O_CLOEXEC);
        int out = open(name, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (in < 0 || out < 0) _exit(99);
        for (ssize_t n; (n = read(in, buffer, sizeof buffer)) > 0;)
            if (write(out, buffer, (size_t)n) != n) _exit(99);
        close(in);
        close(out);
    }
}
