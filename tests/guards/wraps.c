/* Wraps the calls that our library wraps, counts those that the program makes, and makes
   some in its constructor, which runs before ours when it stands after it in LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static int counts[9], forks[3];
#define NEXT(type, name, ...) (((type (*)())dlsym(RTLD_NEXT, #name))(__VA_ARGS__))

int mprotect(void *a, size_t n, int p) { counts[0]++; return NEXT(int, mprotect, a, n, p); }
/* Advice that huge pages fulfil, and what is not to be discarded, is not passed on. */
int madvise(void *a, size_t n, int w) { counts[1] += w == MADV_DONTDUMP; return NEXT(int, madvise, a, n, w); }
int munmap(void *a, size_t n) { counts[2]++; return NEXT(int, munmap, a, n); }
int mlock(const void *a, size_t n) { counts[3]++; return NEXT(int, mlock, a, n); }
int posix_madvise(void *a, size_t n, int w) { counts[4]++; return NEXT(int, posix_madvise, a, n, w); }
int pkey_mprotect(void *a, size_t n, int p, int k) { counts[5]++; return NEXT(int, pkey_mprotect, a, n, p, k); }
void *mmap(void *a, size_t n, int p, int f, int fd, off_t o) {
    counts[6]++;
    return NEXT(void *, mmap, a, n, p, f, fd, o);
}
void *mremap(void *a, size_t n, size_t m, int f, ...) {
    va_list list;
    va_start(list, f);
    void *to = va_arg(list, void *);
    va_end(list);
    counts[7]++;
    return NEXT(void *, mremap, a, n, m, f, to);
}

static void before(void) { forks[0]++; }
static void in_parent(void) { forks[1]++; }
static void in_child(void) { forks[2]++; }

__attribute__((constructor)) static void start(void) {
    char *page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    page[0] = 1;
    counts[8] = mprotect(page, 4096, PROT_READ) | madvise(page, 4096, MADV_DONTNEED) | page[0] | munmap(page, 8192);
    pthread_atfork(before, in_parent, in_child);
}

__attribute__((destructor)) static void end(void) {
    printf("wrapped");
    for (int i = 0; i < 9; i++) printf(" %d", counts[i]);
    printf("; forks %d %d %d\n", forks[0], forks[1], forks[2]);
}
