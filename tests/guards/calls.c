/* What a program does to its own text, data and bss in steps of a page, while THREADS threads
   and the kernel write to the same memory. Prints what every call says and what is there
   afterwards: the same as on small pages, whatever it lies on.
   usage: calls THREADS (built with -DTHREADS, else 0); waits for a line on stdin before it begins and before it ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096L
#define PAGES 2048 /* of data, and of bss */
asm(".text\n.p2align 12\nfiller:\n.fill 4 << 20, 1, 0x90\nret\n"
    ".p2align 12\n.globl code\ncode:\nmov $41, %eax\nret\n.p2align 12\n.fill 4 << 20, 1, 0x90\nret\n");
asm(".data\n.p2align 12\n.globl data\ndata:\n.set i, 0\n.rept 2048\n.quad i\n.p2align 12\n.set i, i+1\n.endr\n.text\n");
extern char data[];
extern int code(void);
extern char __executable_start;
static char bss[PAGES * PAGE] __attribute__((aligned(4096)));

/* Pages that main works on, and nobody else. */
static int is_mains(int page) { return page % 64 == 32 || page % 64 == 33; }

/* Every thread counts in words of its own: a write that is lost is missing at the end. */
static volatile int stop;
static uint64_t rounds[9];
static void *count(void *number) {
    long id = (long)number, n = 0;
    while (!stop) {
        for (int i = 0; i < PAGES; i++) {
            if (is_mains(i)) continue;
            ++*(volatile uint64_t *)(data + i * PAGE + 64 + id * 8);
            ++*(volatile uint64_t *)(bss + i * PAGE + 64 + id * 8);
        }
        n++;
    }
    rounds[id] = n;
    return NULL;
}

/* The kernel writes on the program's behalf. */
static void *receive(void *unused) {
    int ends[2];
    if (pipe(ends)) return "pipe";
    for (uint64_t n = 1; !stop; n++)
        for (int i = 3; i < PAGES; i += 64) {
            uint64_t *at = (uint64_t *)(bss + i * PAGE + 2048);
            if (write(ends[1], &n, 8) != 8 || read(ends[0], at, 8) != 8) return "read";
            if (*(volatile uint64_t *)at != n) return "what was read is lost";
        }
    return unused;
}

/* Whether the kernel may write there: no signal needed to find out. */
static int writable(char *at) {
    static int ends[2];
    if (!ends[0] && pipe(ends)) return -1;
    char byte;
    if (write(ends[1], at, 1) != 1) return -2; /* not even readable */
    if (read(ends[0], at, 1) == 1) return 1;
    return read(ends[0], &byte, 1) == 1 ? 0 : -3;
}

#define SAY(call) (errno = 0, printf("%-60s %ld", #call, (long)(call)), printf(" %s\n", strerrorname_np(errno)))

static void pages(const char *name, char *area) {
    char *p = area + 32 * PAGE, *q = area + 96 * PAGE, *far = area + 1056 * PAGE;
    printf("%s\n", name);
    strcpy(p, "first");
    strcpy(p + PAGE, "second");
    SAY(mprotect(p, 2 * PAGE, PROT_READ));
    SAY(writable(p));
    SAY(writable(p + PAGE));
    SAY(mprotect(p, PAGE, PROT_NONE));
    SAY(writable(p));
    SAY(mprotect(p, 2 * PAGE, PROT_READ | PROT_WRITE));
    SAY(writable(p));
    puts(p);
    puts(p + PAGE);
    SAY(mprotect(p + 1, PAGE, PROT_READ));
    SAY(mprotect(p, PAGE, PROT_READ | PROT_WRITE));
    if (area == bss) {
        strcpy(q, "gone");
        SAY(madvise(q, PAGE, MADV_DONTNEED));
        printf("%d\n", q[0]);
    }
    SAY(madvise(far, PAGE, MADV_DONTDUMP));
    SAY(madvise(far, 8 * PAGE, MADV_WILLNEED));
    SAY(madvise(far + 1, PAGE, MADV_WILLNEED));
    SAY(posix_madvise(far, PAGE, POSIX_MADV_DONTNEED));
    SAY(posix_madvise(far, PAGE, POSIX_MADV_RANDOM));
    char *s = area + 544 * PAGE;
    strcpy(s, "locked");
    SAY(mlock(s, PAGE));
    SAY(mlock2(s, PAGE, MLOCK_ONFAULT));
    SAY(munlock(s, PAGE));
    puts(s);
    char *fresh = mmap(s, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    printf("%d %d\n", fresh == s, *s);
    char *t = area + 1632 * PAGE;
    strcpy(t, "moved");
    char *out = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *moved = mremap(t, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, out);
    printf("%d %s\n", moved == out, moved == out ? out : strerror(errno));
    moved = mremap(out, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, t);
    printf("%d %s\n", moved == t, moved == t ? t : strerror(errno));
    SAY(munmap(t, PAGE));
    SAY(writable(t));
    SAY(pkey_mprotect(area + 160 * PAGE, PAGE, PROT_READ, -1));
    SAY(writable(area + 160 * PAGE));
    SAY(munmap(NULL, 0));
}

/* A guard page below a stack that lies in bss, set by code that runs on that stack. */
static char stack[64 * 4096] __attribute__((aligned(4096)));
static ucontext_t before, inside;
static void on_static_stack(void) {
    volatile char local[9000];
    for (unsigned i = 0; i < sizeof local; i++) local[i] = (char)i;
    SAY(mprotect(stack, PAGE, PROT_NONE));
    SAY(writable(stack));
    for (int i = 0; i < 3; i++) {
        fflush(stdout);
        pid_t pid = fork();
        if (!pid) {
            for (unsigned k = 0; k < sizeof local; k++) if (local[k] != (char)k) _exit(2);
            _exit(!writable((char *)local + 4000));
        }
        int status;
        SAY(waitpid(pid, &status, 0) == pid && status == 0);
    }
    for (unsigned i = 0; i < sizeof local; i++) if (local[i] != (char)i) puts("the stack is damaged");
    SAY(mprotect(stack, PAGE, PROT_READ | PROT_WRITE));
}

static volatile long handled = -1;
static void on_signal(int number) {
    (void)number;
    handled = mprotect(data + 1888 * PAGE, PAGE, PROT_READ);
}

static int patch(unsigned char value) {
    char *page = (char *)code;
    if (mprotect(page, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC)) return -1;
    page[1] = (char)value;
    return mprotect(page, PAGE, PROT_READ | PROT_EXEC);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 0;
    for (int i = 0; i < PAGES; i++) if (*(int64_t *)(data + i * PAGE) != i) return 1;
    puts("ready");
    fflush(stdout);
    char line[16];
    if (!fgets(line, sizeof line, stdin)) return 1;
#ifdef THREADS
    pthread_t ids[9], kernel;
    for (long i = 0; i < threads; i++) pthread_create(ids + i, NULL, count, (void *)i);
    if (threads) pthread_create(&kernel, NULL, receive, NULL);
#endif
    SAY(mprotect(data, PAGE, PROT_READ | PROT_WRITE));
    SAY(code());
    /* All of the program's code may be discarded: it comes back from the file. */
    SAY(madvise(&__executable_start, 8 << 20, MADV_DONTNEED));
    SAY(madvise((char *)code - (2 << 20), 4 << 20, MADV_FREE));
    SAY(code());
    SAY(patch(42));
    SAY(code());
    SAY(madvise((char *)code, PAGE, MADV_WILLNEED));
    pages("data", data);
    pages("bss", bss);
    getcontext(&inside);
    inside.uc_stack = (stack_t){.ss_sp = stack, .ss_size = sizeof stack};
    inside.uc_link = &before;
    makecontext(&inside, on_static_stack, 0);
    swapcontext(&before, &inside);
    signal(SIGUSR1, on_signal);
    raise(SIGUSR1);
    printf("in a handler: %ld %d\n", handled, writable(data + 1888 * PAGE));
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) {
        SAY(patch(43));
        SAY(code());
        SAY(mprotect(bss + 1760 * PAGE, PAGE, PROT_READ));
        SAY(writable(bss + 1760 * PAGE));
        fflush(stdout);
        _exit(0);
    }
    int status;
    SAY(waitpid(pid, &status, 0) == pid && status == 0);
    SAY(code());
    SAY(writable(bss + 1760 * PAGE));
#ifdef THREADS
    usleep(100000);
    stop = 1;
    void *trouble = NULL;
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    if (threads) pthread_join(kernel, &trouble);
    if (trouble) printf("the kernel's writes: %s\n", (char *)trouble);
#endif
    for (int i = 0; i < PAGES; i++) {
        if (is_mains(i)) continue;
        if (*(int64_t *)(data + i * PAGE) != i) printf("page %d of data is damaged\n", i);
        for (long id = 0; id < threads; id++)
            if (*(uint64_t *)(data + i * PAGE + 64 + id * 8) != rounds[id] ||
                *(uint64_t *)(bss + i * PAGE + 64 + id * 8) != rounds[id])
                printf("a write of thread %ld to page %d is lost\n", id, i);
    }
    puts("checked");
    fflush(stdout);
    return !fgets(line, sizeof line, stdin);
}
