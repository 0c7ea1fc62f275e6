/* A program with threads in many states, for tests that move it while it runs. Each thread
   checks what it does. `subject THREAD...` starts one thread for each argument (see
   `kinds`; `main` has a few more words); it says `ready`
   and goes on until the end of its stdin. Then it prints `errors N` and `gap NANOSECONDS`, the
   longest time that the thread `clock` was kept from reading the clock, and ends with
   status 42, or 1 after an error, each of which has a line of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#if __has_include(<linux/seccomp.h>)
#include <linux/filter.h>
#include <linux/seccomp.h>
#endif
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef TEXT_PAGES
#define TEXT_PAGES 2048
#endif
#define STR2(x) #x
#define STR(x) STR2(x)

/* In every page one function that returns the page's number. */
__asm__(".text\n.p2align 12\n.globl pages\npages:\n.set i, 0\n.rept " STR(TEXT_PAGES) "\n.p2align 12\n"
#ifdef __aarch64__
        "movz w0, #i\n ret\n"
#else
        "mov $i, %eax\n ret\n"
#endif
        ".set i, i+1\n.endr\n.p2align 12\n");
/* 5 MiB of read-only data, 5 MiB of data: a number in each page. */
__asm__(".section .rodata\n.p2align 12\n.globl constants\nconstants:\n.set i, 0\n.rept 1280\n"
        ".quad i * 3 + 1\n.p2align 12\n.set i, i+1\n.endr\n"
        ".data\n.p2align 12\n.globl numbers\nnumbers:\n.set i, 0\n.rept 1280\n"
        ".quad i * 7 + 1\n.p2align 12\n.set i, i+1\n.endr\n.text\n");
extern char pages[], constants[], numbers[];
enum { OTHER_PAGES = 1280 };
static uint64_t zeros[5 << 17];

static atomic_int stop, errors;
static atomic_llong longest;

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            printf("line %d: failed: %s (errno %d)\n", __LINE__, #condition, errno);      \
            fflush(stdout);                                                               \
            errors++;                                                                     \
        }                                                                                 \
    } while (0)

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void call_all(int step) {
    for (int i = 0; i < TEXT_PAGES; i += step)
        if (((int (*)(void))(pages + i * 4096L))() != i) {
            CHECK(!"a function of the text");
            return;
        }
}

static void *clock_reader(void *unused) {
    long long last = now();
    while (!stop) {
        long long t = now();
        if (t - last > longest) longest = t - last;
        last = t;
    }
    return unused;
}

static void *caller(void *unused) {
    while (!stop) call_all(7);
    return unused;
}

/* Each page of data and bss counts up, and is what this thread has made it. */
static void *writer(void *unused) {
    for (uint64_t round = 1; !stop; round++) {
        for (int i = 0; i < OTHER_PAGES; i++) {
            volatile uint64_t *number = (void *)(numbers + i * 4096L), *zero = &zeros[i * 512];
            if (*number != (uint64_t)i * 7 + round || *zero != round - 1) {
                CHECK(!"a number of the data");
                return unused;
            }
            (*number)++, (*zero)++;
        }
    }
    return unused;
}

/* Calls with a time limit end when it is over, not before and not much later, and not
   by a signal that nobody has sent. */
enum { LIMIT = 400 };
static void timed(int (*call)(void), int result, int error) {
    while (!stop) {
        long long begin = now();
        errno = 0;
        int got = call();
        long long took = (now() - begin) / 1000000;
        if (stop) return;
        CHECK(got == result);
        CHECK(errno == error);
        CHECK(took >= LIMIT - 2);
        /* Begun anew again and again it would never end; a busy machine takes its time. */
        CHECK(took < LIMIT + 5000);
    }
}
static struct timespec limit(void) { return (struct timespec){0, LIMIT * 1000000}; }
static int by_nanosleep(void) {
    struct timespec t = limit();
    return nanosleep(&t, NULL);
}
static int by_clock_nanosleep(void) {
    struct timespec t = limit();
    return clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}
static int by_poll(void) { return poll(NULL, 0, LIMIT); }
static int by_ppoll(void) {
    struct timespec t = limit();
    return ppoll(NULL, 0, &t, NULL);
}
static int by_select(void) {
    struct timeval t = {0, LIMIT * 1000};
    return select(0, NULL, NULL, NULL, &t);
}
static int by_epoll(void) {
    static __thread int fd = -1;
    if (fd < 0) fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event;
    return epoll_wait(fd, &event, 1, LIMIT);
}
static int by_futex(void) {
    struct timespec t = limit();
    int word = 0;
    return syscall(SYS_futex, &word, 128 /* FUTEX_WAIT_PRIVATE */, 0, &t, NULL, 0);
}
static int by_sigtimedwait(void) {
    struct timespec t = limit();
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    return sigtimedwait(&set, NULL, &t);
}
#define TIMED(name, result, error)                                                        \
    static void *name##_thread(void *unused) {                                            \
        timed(by_##name, result, error);                                                  \
        return unused;                                                                    \
    }
TIMED(nanosleep, 0, 0)
TIMED(clock_nanosleep, 0, 0)
TIMED(poll, 0, 0)
TIMED(ppoll, 0, 0)
TIMED(select, 0, 0)
TIMED(epoll, 0, 0)
TIMED(futex, -1, ETIMEDOUT)
TIMED(sigtimedwait, -1, EAGAIN)

/* Calls without a limit go on until they get what they wait for. */
static int pipes[2];
static void *reader(void *unused) {
    char byte;
    CHECK(read(pipes[0], &byte, 1) == 1 && byte == 'x');
    return unused;
}
static int epoll_pipes[2];
static void *waiter(void *unused) {
    int fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN}, got;
    CHECK(epoll_ctl(fd, EPOLL_CTL_ADD, epoll_pipes[0], &event) == 0);
    CHECK(epoll_wait(fd, &got, 1, -1) == 1);
    return unused;
}

/* A thread that is in a signal handler nearly all of the time, interrupted by a timer. */
static atomic_int handled;
static void handler(int signal) {
    (void)signal;
    int saved = errno;
    call_all(31);
    handled++;
    errno = saved;
}
static void *in_handler(void *unused) {
    struct sigaction action = {.sa_handler = handler};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGALRM};
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
    event.sigev_notify_thread_id = gettid();
    timer_t timer;
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0);
    struct itimerspec each = {{0, 300000}, {0, 300000}};
    CHECK(timer_settime(timer, 0, &each, NULL) == 0);
    while (!stop) {
        int before = handled;
        /* A real signal ends it. */
        if (pause() != -1 || errno != EINTR) CHECK(!"pause");
        CHECK(handled != before);
    }
    timer_delete(timer);
    return unused;
}

/* Threads that are made and end all the time. */
static void *short_lived(void *step) {
    call_all((int)(intptr_t)step);
    return step;
}
static void *maker(void *unused) {
    while (!stop) {
        pthread_t thread;
        void *result;
        if (pthread_create(&thread, NULL, short_lived, (void *)61)) {
            CHECK(errno == EAGAIN);
            continue;
        }
        CHECK(pthread_join(thread, &result) == 0 && result == (void *)61);
    }
    return unused;
}

/* Children that share the memory until they execute something (vfork), and such that do not. */
static void *vforker(void *unused) {
    while (!stop) {
        pid_t child = vfork();
        if (child == 0) {
            usleep(2000);
            _exit(7);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 7);
    }
    return unused;
}
static void *forker(void *unused) {
    while (!stop) {
        pid_t child = fork();
        if (child == 0) {
            call_all(97);
            _exit(errors ? 1 : 9);
        }
        int status;
        CHECK(child > 0 && waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 9);
    }
    return unused;
}
static int held_pipe[2];
/* In vfork for as long as the program runs. */
static void *long_vfork(void *unused) {
    pid_t child = vfork();
    if (child == 0) {
        char byte;
        close(held_pipe[1]);
        _exit(read(held_pipe[0], &byte, 1) ? 1 : 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return unused;
}

/* Patches one of the text's functions again and again, as some profilers do. */
static void *patcher(void *unused) {
    char *page = pages + (TEXT_PAGES / 2 + 3) * 4096L;
    while (!stop) {
        for (char value = 1; value >= 0; value--) {
            if (mprotect(page, 4096, PROT_READ | PROT_WRITE)) CHECK(!"mprotect");
            page[2048] = value;
            if (mprotect(page, 4096, PROT_READ | PROT_EXEC)) CHECK(!"mprotect");
            if (page[2048] != value) CHECK(!"what was patched");
        }
    }
    return unused;
}

#if defined __x86_64__ && __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
/* A section that begins anew when the thread is disturbed in it: the kernel forgets it only when
   it leads the thread out of it. */
static void *in_section(void *unused) {
    struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
    CHECK(__rseq_size);
    while (!stop) {
        int forgotten = 0;
        __asm__ volatile(
            ".pushsection .data\n.p2align 5\n3: .long 0, 0\n.quad 1f, 2f - 1f, 4f\n.popsection\n"
            "lea 3b(%%rip), %%rax\n mov %%rax, 8(%1)\n"
            "1: mov $5000000, %%ecx\n5: dec %%ecx\n jnz 5b\n"
            "cmpq $0, 8(%1)\n jne 2f\n mov $1, %0\n"
            "2: jmp 6f\n.long 0x53053053\n4: nop\n6:\n"
            : "+r"(forgotten) : "r"(area) : "rax", "rcx", "memory", "cc");
        CHECK(!forgotten);
    }
    return unused;
}
#endif
#ifdef __x86_64__
/* A thread that traps after each of its instructions. */
static atomic_int steps;
static void stepped(int signal) {
    (void)signal;
    steps++;
}
static void *stepper(void *unused) {
    struct sigaction action = {.sa_handler = stepped};
    CHECK(sigaction(SIGTRAP, &action, NULL) == 0);
    for (int each = 0; !stop;) {
        steps = 0;
        __asm__ volatile("sub $128, %%rsp\n pushf\n orq $0x100, (%%rsp)\n popf\n"
                         ".rept 32\n nop\n .endr\n"
                         "pushf\n andq $~0x100, (%%rsp)\n popf\n add $128, %%rsp" ::: "memory", "cc");
        if (!each) each = steps;
        CHECK(each >= 32 && steps == each);
    }
    return unused;
}
/* The program has no vdso any more. */
static void forget_vdso(void) {
    char line[512];
    unsigned long start = 0, end = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps);
    while (maps && fgets(line, sizeof line, maps))
        if (strstr(line, "[vdso]")) CHECK(sscanf(line, "%lx-%lx", &start, &end) == 2);
    if (maps) fclose(maps);
    CHECK(start && munmap((void *)start, end - start) == 0);
}
#endif

static const struct {
    const char *name;
    void *(*run)(void *);
} kinds[] = {
    {"clock", clock_reader},
    {"caller", caller},
    {"writer", writer},
    {"nanosleep", nanosleep_thread},
    {"clock_nanosleep", clock_nanosleep_thread},
    {"poll", poll_thread},
    {"ppoll", ppoll_thread},
    {"select", select_thread},
    {"epoll", epoll_thread},
    {"futex", futex_thread},
    {"sigtimedwait", sigtimedwait_thread},
    {"reader", reader},
    {"waiter", waiter},
    {"handler", in_handler},
    {"maker", maker},
    {"vforker", vforker},
    {"forker", forker},
    {"long-vfork", long_vfork},
    {"patcher", patcher},
#ifdef __x86_64__
    {"stepper", stepper},
#if __has_include(<sys/rseq.h>)
    {"section", in_section},
#endif
#endif
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static pthread_t threads[64];
static int count;

/* From `ready` to the end, once the thread at `first` has ended: on its way out it loads a
   library. */
static void *rest(void *first) {
    if (first) CHECK(pthread_join(*(pthread_t *)first, NULL) == 0);
    printf("ready\n");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    stop = 1;
    if (write(pipes[1], "x", 1) + write(epoll_pipes[1], "x", 1) != 2) exit(5);
    close(held_pipe[1]);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    call_all(1);
    for (int i = 0; i < OTHER_PAGES; i++)
        if (*(uint64_t *)(constants + i * 4096L) != (uint64_t)i * 3 + 1) CHECK(!"a constant");
    printf("errors %d\ngap %lld\n", (int)errors, (long long)longest);
    fflush(stdout);
    _exit(errors ? 1 : 42);
    return first;
}

#ifdef SECCOMP_RET_KILL_PROCESS
/* Ends the program at every call but those that it makes itself from now on. */
static void filter(void) {
#define ALLOW(name)                                                                       \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1),                                \
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(read), ALLOW(write), ALLOW(close), ALLOW(futex), ALLOW(exit), ALLOW(exit_group),
        ALLOW(clock_nanosleep), ALLOW(clock_gettime), ALLOW(restart_syscall), ALLOW(rt_sigprocmask),
        ALLOW(madvise), ALLOW(newfstatat), ALLOW(ioctl), ALLOW(munmap), ALLOW(brk), ALLOW(rseq), ALLOW(set_robust_list),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0);
}
#endif

int main(int argc, char **argv) {
    if (pipe(pipes) || pipe(epoll_pipes) || pipe2(held_pipe, O_CLOEXEC)) return 2;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int leaves = 0;
    for (int i = 1; i < argc && count < 64; i++) {
        int k = 0;
        while (k < KINDS && strcmp(kinds[k].name, argv[i])) k++;
        if (k < KINDS) {
            if (pthread_create(&threads[count++], NULL, kinds[k].run, NULL)) return 4;
        } else if (!strcmp(argv[i], "leave")) {
            /* The first thread ends before the others. */
            leaves = 1;
        } else if (!strcmp(argv[i], "alone")) {
            /* No child that it has not started. */
            CHECK(waitpid(-1, NULL, 0) == -1 && errno == ECHILD);
        } else if (!strcmp(argv[i], "mdwe")) {
            /* PR_SET_MDWE: memory may not become executable (Linux 6.3). */
            if (prctl(65, 1, 0, 0, 0)) return 6;
#ifdef __x86_64__
        } else if (!strcmp(argv[i], "no-vdso")) {
            forget_vdso();
#endif
#ifdef SECCOMP_RET_KILL_PROCESS
        } else if (!strcmp(argv[i], "filter")) {
            filter();
#endif
        } else {
            return 3;
        }
    }
    if (!leaves) rest(NULL);
    static pthread_t first;
    first = pthread_self();
    pthread_t thread;
    if (pthread_create(&thread, NULL, rest, &first)) return 4;
    pthread_exit(NULL);
}
