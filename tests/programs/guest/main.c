// Nothing of a visit is left at `main`: errno, descriptors, signals, limits, and so on
// are what they would have been. (O45)
//# build: pie,no-pie x bfd
//# exit: 42
#define _GNU_SOURCE
#include "hazard.h"
#include <errno.h>
#include <fcntl.h>
#include <locale.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>

extern char **environ;

int main(int argc, char **argv) {
    int error = errno;
    struct mallinfo2 heap = mallinfo2();
    (void)argc;
    printf("errno %d\n", error);
    int fd = open("/dev/null", O_RDONLY);
    printf("next descriptor %d\n", fd);
    for (int i = 0; i < 1024; i++)
        if (i != fd && fcntl(i, F_GETFD) >= 0) printf("open %d\n", i);
    sigset_t mask;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    for (int i = 1; i < 65; i++) {
        struct sigaction action;
        if (sigismember(&mask, i) == 1) printf("blocked %d\n", i);
        if (!sigaction(i, NULL, &action) && action.sa_handler != SIG_DFL) printf("handled %d\n", i);
    }
    stack_t stack;
    sigaltstack(NULL, &stack);
    printf("signal stack %d\n", stack.ss_flags);
    char text[4096];
    printf("directory %s\n", getcwd(text, sizeof text));
    mode_t mode = umask(0);
    printf("umask %o\n", mode);
    for (int i = 0; i < RLIM_NLIMITS; i++) {
        struct rlimit limit;
        if (!getrlimit(i, &limit)) printf("limit %d %lx %lx\n", i, limit.rlim_cur, limit.rlim_max);
    }
    for (char **e = environ; *e; e++)
        if (strncmp(*e, "LD_PRELOAD", 10) && strncmp(*e, "ELFREMAP", 8)) printf("%s\n", *e);
    cpu_set_t cpus;
    sched_getaffinity(0, sizeof cpus, &cpus);
    printf("processors %d\n", CPU_COUNT(&cpus));
    printf("personality %x\n", personality(0xffffffff) & ~ADDR_NO_RANDOMIZE);
    prctl(PR_GET_NAME, text);
    printf("name %s of %s\n", text, strrchr(argv[0], '/'));
    printf("dumpable %d, THP off %d\n", prctl(PR_GET_DUMPABLE), prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0));
    printf("heap %zu %zu %zu\n", heap.arena, heap.uordblks, heap.hblks);
#ifdef __x86_64__
    unsigned mxcsr;
    unsigned short control;
    __asm__ volatile("stmxcsr %0" : "=m"(mxcsr));
    __asm__ volatile("fnstcw %0" : "=m"(control));
    printf("MXCSR %x, x87 control word %x\n", mxcsr & 0xffc0, control);
#elif defined __aarch64__
    unsigned long fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    printf("FPCR %lx\n", fpcr);
#endif
    for (int which = ITIMER_REAL; which <= ITIMER_PROF; which++) {
        struct itimerval timer;
        getitimer(which, &timer);
        printf("timer %d %d\n", which, timer.it_value.tv_sec || timer.it_value.tv_usec);
    }
    printf("locale %s\n", setlocale(LC_ALL, NULL));
    printf("policy %d, nice %d, death signal ", sched_getscheduler(0), getpriority(PRIO_PROCESS, 0));
    int death = -1, node_policy = -1;
    prctl(PR_GET_PDEATHSIG, &death);
    syscall(SYS_get_mempolicy, &node_policy, NULL, 0, NULL, 0);
    printf("%d, timer slack %d, memory policy %d\n", death, prctl(PR_GET_TIMERSLACK), node_policy);
    printf("children %d\n", waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(text, sizeof text, status))
        if (!strncmp(text, "Threads", 7) || !strncmp(text, "VmLck", 5) || !strncmp(text, "VmPin", 5) ||
            !strncmp(text, "Seccomp:", 8) || !strncmp(text, "NoNewPrivs", 10))
            printf("%s", text);
    fclose(status);
    FILE *filter = fopen("/proc/self/coredump_filter", "r");
    printf("core filter %s", fgets(text, sizeof text, filter));
    fclose(filter);
    return hazard_end();
}
