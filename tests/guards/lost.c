/* Drops its privileges with threads running, which write to data and bss all the time, and forks.
   usage: lost FORKS; waits for a line on stdin first. A fork may fail with ENOMEM; a child that
   there is has all that the parent had. Prints what went wrong, and to stderr how many forks
   failed. */
#define _GNU_SOURCE
#include <errno.h>
#include <grp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "pages.h"

/* Threads write to the second word of a page, the one that forks to the first. */
static volatile int stop;
static void *scribble(void *number) {
    for (uint64_t n = 1; !stop; n++)
        for (int i = (int)(long)number; i < PAGES; i += 4) {
            *(volatile uint64_t *)(data + i * 4096L + 8) = n;
            *(volatile uint64_t *)(bss + i * 4096L + 8) = n;
        }
    return NULL;
}

int main(int argc, char **argv) {
    int forks = argc > 1 ? atoi(argv[1]) : 100, bad = 0, failed = 0;
    fill(1);
    puts("ready");
    fflush(stdout);
    char line[16];
    if (!fgets(line, sizeof line, stdin)) return 1;
    pthread_t ids[4];
    for (long i = 0; i < 4; i++) pthread_create(ids + i, NULL, scribble, (void *)i);
    if (setgroups(0, NULL) || setresgid(65534, 65534, 65534) || setresuid(65534, 65534, 65534)) {
        perror("setresuid");
        return 1;
    }
    for (int i = 0; i < forks; i++) {
        uint64_t base = 1000 + 1000 * (uint64_t)i;
        fill(base);
        pid_t pid = i % 2 ? fork() : _Fork();
        if (!pid) {
            if (check(base)) _exit(2);
            fill(base + 7);
            _exit(check(base + 7) ? 3 : 0);
        }
        int status;
        if (pid < 0) {
            failed++;
            if (errno != ENOMEM) { bad++; printf("fork: errno %d\n", errno); }
            /* No child is left behind. */
            if (waitpid(-1, &status, WNOHANG) != -1 || errno != ECHILD) { bad++; puts("a child is left"); }
        } else if (waitpid(pid, &status, 0) != pid || status) {
            bad++;
            printf("child ended with %x\n", status);
        }
        if (check(base)) { puts("the parent's data is wrong"); return 1; }
    }
    stop = 1;
    for (int i = 0; i < 4; i++) pthread_join(ids[i], NULL);
    printf("bad %d\n", bad);
    fprintf(stderr, "failed %d\n", failed);
    return bad != 0;
}
