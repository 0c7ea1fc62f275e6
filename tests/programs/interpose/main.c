// The program's own mmap, malloc, open and so on stand in for the C library's: what
// they count must not depend on the preload, and none may be called while the
// program's text or bss is away. (O43)
//# build: pie,no-pie x bfd,lld x rdynamic
//# flags: -fno-builtin
//# exit: 42
#include "hazard.h"
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static unsigned calls[16];
static char arena[1 << 20] __attribute__((aligned(16)));
static size_t arena_used;

enum { MMAP, MUNMAP, MREMAP, MPROTECT, MADVISE, OPEN, READ, WRITE, CLOSE, MALLOC, CALLOC, REALLOC, FREE };

void *mmap(void *a, size_t n, int p, int f, int fd, off_t o) {
    calls[MMAP]++;
    return (void *)syscall(SYS_mmap, a, n, p, f, fd, o);
}
void *mmap64(void *a, size_t n, int p, int f, int fd, off_t o) { return mmap(a, n, p, f, fd, o); }
int munmap(void *a, size_t n) {
    calls[MUNMAP]++;
    return (int)syscall(SYS_munmap, a, n);
}
void *mremap(void *a, size_t old, size_t n, int f, ...) {
    va_list list;
    va_start(list, f);
    void *to = va_arg(list, void *);
    va_end(list);
    calls[MREMAP]++;
    return (void *)syscall(SYS_mremap, a, old, n, f, to);
}
int mprotect(void *a, size_t n, int p) {
    calls[MPROTECT]++;
    return (int)syscall(SYS_mprotect, a, n, p);
}
int madvise(void *a, size_t n, int advice) {
    calls[MADVISE]++;
    return (int)syscall(SYS_madvise, a, n, advice);
}
int open(const char *path, int flags, ...) {
    calls[OPEN]++;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0600);
}
int open64(const char *path, int flags, ...) {
    calls[OPEN]++;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0600);
}
ssize_t read(int fd, void *p, size_t n) {
    calls[READ]++;
    return syscall(SYS_read, fd, p, n);
}
ssize_t write(int fd, const void *p, size_t n) {
    calls[WRITE]++;
    return syscall(SYS_write, fd, p, n);
}
int close(int fd) {
    calls[CLOSE]++;
    return (int)syscall(SYS_close, fd);
}
void *malloc(size_t n) {
    calls[MALLOC]++;
    size_t at = arena_used + 16;
    n = (n + 15) & ~(size_t)15;
    if (at + n > sizeof arena) return NULL;
    arena_used = at + n;
    memcpy(arena + at - 16, &n, sizeof n);
    return arena + at;
}
void free(void *p) {
    (void)p;
    calls[FREE]++;
}
void *calloc(size_t n, size_t size) {
    calls[CALLOC]++;
    calls[MALLOC]--;
    void *p = malloc(n * size);
    return p ? memset(p, 0, n * size) : NULL;
}
void *realloc(void *p, size_t n) {
    calls[REALLOC]++;
    calls[MALLOC]--;
    void *fresh = malloc(n);
    if (p && fresh) {
        size_t old;
        memcpy(&old, (char *)p - 16, sizeof old);
        memcpy(fresh, p, old < n ? old : n);
    }
    return fresh;
}

// Also functions that a compiler calls by itself.
static volatile unsigned copies;
void *memcpy(void *to, const void *from, size_t n) {
    copies++;
    char *t = (char *)to;
    const char *f = (const char *)from;
    while (n--) *t++ = *f++;
    return to;
}

int main(void) {
    unsigned before[16];
    for (int i = 0; i < 16; i++) before[i] = calls[i];
    char *p = (char *)malloc(100);
    strcpy(p, "from the program's own malloc");
    p = (char *)realloc(p, 1000);
    CHECK(!strcmp(p, "from the program's own malloc"));
    free(p);
    void *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(map != MAP_FAILED && !munmap(map, 4096));
    for (int i = 0; i < 13; i++) printf("%u ", before[i]);
    printf("\n");
    return hazard_end();
}
