/* What a fork costs with MB of data and as much bss, all of it written: medians in
   microseconds of fork and _exit, fork and exec, vfork and exec. Not a test:
     cc -O1 -pthread -DMB=8 -o cost cost.c
     for backend in thp hugetlb; do ./cost 0; LD_PRELOAD=libelfremap.so ELFREMAP_BACKEND=$backend ./cost 0; done
   usage: cost THREADS (idle ones). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef MB
#define MB 8
#endif
#define ROUNDS 201
asm(".text\n.p2align 12\nfiller:\n.fill 4 << 20, 1, 0x90\nret\n");
static char data[MB << 20] = {1}, bss[MB << 20];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static int before(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static void *idle(void *unused) { pause(); return unused; }

int main(int argc, char **argv) {
    static const char *const names[] = {"fork and exit", "fork and exec", "vfork and exec"};
    unsetenv("LD_PRELOAD");
    memset(data, 2, sizeof data);
    memset(bss, 2, sizeof bss);
    for (int i = argc > 1 ? atoi(argv[1]) : 0; i > 0; i--) {
        pthread_t id;
        pthread_create(&id, NULL, idle, NULL);
    }
    for (int way = 0; way < 3; way++) {
        double times[ROUNDS];
        for (int i = 0; i < ROUNDS; i++) {
            double start = now();
            pid_t pid = way == 2 ? vfork() : fork();
            if (!pid) {
                if (way) execl("/bin/true", "true", NULL);
                _exit(0);
            }
            waitpid(pid, NULL, 0);
            times[i] = now() - start;
        }
        qsort(times, ROUNDS, sizeof *times, before);
        printf("%s %.0f us%s", names[way], times[ROUNDS / 2], way < 2 ? ", " : "\n");
    }
    return 0;
}
