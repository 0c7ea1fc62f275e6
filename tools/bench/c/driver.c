/* Driver of the generated program: walks the code chain and the bss pointer chase,
   prints one JSON line with ns of CPU time per hop for each repetition and a checksum.

   usage: PROGRAM [HOPS [REPEATS [wait|untimed|fork TIMES]]]
   HOPS       hops per repetition, in thousands (default 4000; 0: leave at once)
   REPEATS    repetitions of each walk (default 5)
   wait       after the line, wait until standard input ends: whoever started the
              program can then read its smaps
   untimed    print the checksum alone: two runs then do exactly the same
   fork       print, instead of that line, the microseconds of CPU time, of parent and children
              together, that each of TIMES children costs which exits at once, which
              writes a byte to each 2 MiB of the bss first, and which executes /bin/true
              with an empty environment */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern uint32_t chain_walk(uint64_t hops);
extern const uint64_t chain_blocks, chase_size;
extern char chase[];

enum { PAGE = 4096, LINE = 64, MOST_REPEATS = 100 };

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static uint64_t state = 0x2545f4914f6cdd1d;
static uint64_t below(uint64_t bound) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (state * 0x2545f4914f6cdd1dULL >> 33) % bound;
}

/* One pointer per page, at a random cache line of it, all in one random cycle. */
static void **lay_chase(uint64_t pages) {
    uint64_t *at = malloc(pages * sizeof *at);
    if (!at) exit(1);
    for (uint64_t i = 0; i < pages; i++) at[i] = i * PAGE + below(PAGE / LINE) * LINE;
    for (uint64_t i = pages - 1; i > 0; i--) {
        uint64_t j = below(i + 1), swap = at[i];
        at[i] = at[j], at[j] = swap;
    }
    for (uint64_t i = 0; i < pages; i++) *(void **)(chase + at[i]) = chase + at[(i + 1) % pages];
    void **first = (void **)(chase + at[0]);
    free(at);
    return first;
}

static void **walk_chase(void **p, uint64_t hops) {
    while (hops--) p = *p;
    return p;
}

static void print(const char *name, const double *ns, long n) {
    printf("\"%s\":[", name);
    for (long i = 0; i < n; i++) printf("%s%.3f", i ? "," : "", ns[i]);
    printf("],");
}

static double used_us(int who) {
    struct rusage u;
    getrusage(who, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e6 +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void child(int kind) {
    static char *const arguments[] = {"true", NULL}, *const environment[] = {NULL};
    if (kind == 1)
        for (uint64_t at = 0; at < chase_size; at += 512 * PAGE) ((volatile char *)chase)[at + 8]++;
    if (kind == 2) execve("/bin/true", arguments, environment);
    _exit(kind == 2);
}

static int fork_all(long times) {
    static const char *const names[] = {"exit_us", "write_us", "exec_us"};
    if (times < 1) return 2;
    for (int kind = 0; kind < 3; kind++) {
        double start = used_us(RUSAGE_SELF) + used_us(RUSAGE_CHILDREN);
        for (long i = 0; i < times; i++) {
            int status;
            pid_t pid = fork();
            if (pid == 0) child(kind);
            if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) return 1;
        }
        double us = used_us(RUSAGE_SELF) + used_us(RUSAGE_CHILDREN) - start;
        printf("%s\"%s\":%.3f", kind ? "," : "{", names[kind], us / (double)times);
        fflush(stdout); /* so that no child has it too */
    }
    printf("}\n");
    return 0;
}

int main(int argc, char **argv) {
    uint64_t hops = (argc > 1 ? strtoull(argv[1], NULL, 10) : 4000) * 1000;
    long repeats = argc > 2 ? strtol(argv[2], NULL, 10) : 5;
    double text[MOST_REPEATS], bss[MOST_REPEATS];
    uint32_t sum = 0;
    if (hops == 0) return 0;
    if (repeats < 1 || repeats > MOST_REPEATS) return 2;

    sum += chain_walk(chain_blocks); /* once around, so that every page is there */
    for (long r = 0; r < repeats; r++) {
        double start = now_ns();
        sum = sum * 31 + chain_walk(hops);
        text[r] = (now_ns() - start) / (double)hops;
    }
    long chased = 0;
    if (chase_size >= 2 * PAGE) {
        void **p = walk_chase(lay_chase(chase_size / PAGE), chase_size / PAGE);
        for (; chased < repeats; chased++) {
            double start = now_ns();
            p = walk_chase(p, hops);
            bss[chased] = (now_ns() - start) / (double)hops;
            sum = sum * 31 + (uint32_t)((char *)p - chase);
        }
    }
    if (argc > 4 && strcmp(argv[3], "fork") == 0) return fork_all(strtol(argv[4], NULL, 10));
    printf("{");
    if (argc <= 3 || strcmp(argv[3], "untimed") != 0) {
        print("text_ns", text, repeats);
        print("bss_ns", bss, chased);
    }
    printf("\"checksum\":%" PRIu32 "}\n", sum);
    fflush(stdout);
    if (argc > 3 && strcmp(argv[3], "wait") == 0) {
        char ignored[64];
        while (read(0, ignored, sizeof ignored) > 0) {}
    }
    return 0;
}
