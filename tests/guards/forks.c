/* Forks with data and bss that parent and child both write, page by page.
   usage: forks FORKS THREADS; waits for a line on stdin first. Prints what went wrong. */
#define _GNU_SOURCE
#include <pthread.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "pages.h"

extern char **environ;

/* Threads write to the second word of a page, forks to the first. */
static volatile int stop;
static void *scribble(void *number) {
    /* Always at work, but not in the way of the forks. */
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 19);
    for (uint64_t n = 1; !stop; n++)
        for (int i = (int)(long)number; i < PAGES; i += 8) {
            *(volatile uint64_t *)(data + i * 4096L + 8) = n;
            *(volatile uint64_t *)(bss + i * 4096L + 8) = n;
        }
    return NULL;
}

static int bad;
static void reap(pid_t pid) {
    int status;
    if (pid < 0) { bad++; perror("fork"); return; }
    if (waitpid(pid, &status, 0) != pid) { bad++; return; }
    if (status) { bad++; printf("child ended with %x\n", status); }
}

/* The child sees what the parent had, then has its own; a child of it as well. */
static void child(uint64_t base, int deeper) {
    if (check(base)) _exit(2);
    fill(base + 7);
    if (check(base + 7)) _exit(3);
    if (deeper) {
        pid_t pid = fork();
        if (!pid) child(base + 7, 0);
        int status;
        if (waitpid(pid, &status, 0) != pid || status) _exit(4);
        if (check(base + 7)) _exit(5);
    }
    _exit(0);
}

static uint64_t now;
static void on_signal(int number) {
    (void)number;
    pid_t pid = fork();
    if (!pid) child(now, 0);
    reap(pid);
}

/* By clone(2), on a stack of its own, also with descriptors that it shares. */
static int cloned(void *base) { child(*(uint64_t *)base, 1); return 6; }
static void by_clone(uint64_t base, int flags) {
    char *stack = malloc(1 << 18);
    reap(clone(cloned, stack + (1 << 18), flags | SIGCHLD, &base));
    free(stack);
}

/* By daemon(3), whose child nobody waits for: it tells by a pipe. */
static void by_daemon(uint64_t base) {
    int ends[2];
    if (pipe(ends)) { bad++; return; }
    pid_t pid = fork();
    if (!pid) {
        if (daemon(1, 1)) _exit(7);
        pid_t grandchild = fork();
        if (!grandchild) child(base, 0);
        int status;
        char well = waitpid(grandchild, &status, 0) == grandchild && !status && !check(base);
        _exit(write(ends[1], &well, 1) != 1);
    }
    reap(pid);
    close(ends[1]);
    char well = 0;
    if (read(ends[0], &well, 1) != 1 || !well) { bad++; puts("the daemon did not do well"); }
    close(ends[0]);
}

static int handled;
static void count(void) { handled++; }

int main(int argc, char **argv) {
    int forks = argc > 1 ? atoi(argv[1]) : 100, threads = argc > 2 ? atoi(argv[2]) : 0;
    fill(1);
    puts("ready");
    fflush(stdout);
    char line[16];
    if (!fgets(line, sizeof line, stdin)) return 1;
    pthread_t ids[8];
    for (long i = 0; i < threads; i++) pthread_create(ids + i, NULL, scribble, (void *)i);
    uint64_t base = 1;
    for (int done = 0; done < forks; done += 10) {
        /* Ten children side by side, the parent writing meanwhile. */
        pid_t pids[10];
        for (int i = 0; i < 10; i++) {
            if ((pids[i] = i == 5 ? _Fork() : fork()) < 0) { bad++; perror("fork"); continue; }
            if (!pids[i]) child(base, i == 0);
            base += 1000;
            fill(base);
        }
        for (int i = 0; i < 10; i++) if (pids[i] > 0) reap(pids[i]);
        if (check(base)) { puts("the parent's data is wrong"); return 1; }
    }
    now = base;
    signal(SIGUSR1, on_signal);
    raise(SIGUSR1);
    int terminal;
    pid_t pid = forkpty(&terminal, NULL, NULL, NULL);
    if (!pid) child(base, 0);
    reap(pid);
    by_clone(base, 0);
    by_clone(base, CLONE_FILES | CLONE_FS);
    by_daemon(base);
    /* These share memory or give it up at once: no fork handler runs. */
    pthread_atfork(count, count, count);
    if (system("true")) bad++;
    FILE *pipe = popen("echo piped", "r");
    if (!pipe || !fgets(line, sizeof line, pipe) || strcmp(line, "piped\n") || pclose(pipe)) bad++;
    if (posix_spawn(&pid, "/bin/true", NULL, NULL, (char *[]){"true", NULL}, environ)) bad++;
    else reap(pid);
    if (!(pid = vfork())) { execl("/bin/true", "true", NULL); _exit(9); }
    reap(pid);
    if (handled) { bad++; puts("a fork where none is needed"); }
    stop = 1;
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    if (check(base)) { puts("the parent's data is wrong at the end"); return 1; }
    puts("checked");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) return 1;
    printf("bad %d\n", bad);
    return bad != 0;
}
