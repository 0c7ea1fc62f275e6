/* A program with text, data, bss and a heap that it checks, for tests that make the
   preload's own system calls fail. Prints what a guest must not change. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* 6 MiB of code: in every page one function that returns the page's number. */
asm(".text\n.p2align 12\n.globl pages\npages:\n"
    ".set i, 0\n.rept 1536\n.p2align 12\nmov $i, %eax\nret\n.set i, i+1\n.endr\n.p2align 12\n"
    ".set i, 0\n");
extern char pages[];
#define TEXT_PAGES 1536

/* 3 MiB of data, one number in each page. */
asm(".data\n.p2align 12\n.globl numbers\nnumbers:\n"
    ".set i, 0\n.rept 768\n.quad i * 7 + 1\n.p2align 12\n.set i, i+1\n.endr\n.text\n");
extern char numbers[];
#define DATA_PAGES 768

static char zeros[5 << 20];
static int (*const volatile table[])(const char *) = {puts, puts};

/* The lowest descriptor free at the start: before stdio or the loader has a say. */
static int first_free = -1;
static sigset_t mask;
static int first_errno;

__attribute__((constructor)) static void early(void) {
    extern int *__errno_location(void);
    first_errno = *__errno_location();
    first_free = open("/dev/null", O_RDONLY);
    close(first_free);
    sigprocmask(SIG_SETMASK, NULL, &mask);
}

int main(void) {
    for (int i = 0; i < TEXT_PAGES; i++)
        if (((int (*)(void))(pages + i * 4096L))() != i) return 10;
    for (int i = 0; i < DATA_PAGES; i++)
        if (*(uint64_t *)(numbers + i * 4096L) != (uint64_t)i * 7 + 1) return 11;
    for (size_t i = 0; i < sizeof zeros; i += 8)
        if (*(uint64_t *)(zeros + i)) return 12;
    memset(zeros, 0x5a, sizeof zeros);
    for (int i = 0; i < DATA_PAGES; i++) *(uint64_t *)(numbers + i * 4096L) += 5;
    void *before = sbrk(0);
    if (sbrk(8192) != before) return 13;
    memset(before, 1, 8192);
    if (sbrk(-8192) == (void *)-1) return 14;
    char *heap[100];
    for (int i = 0; i < 100; i++) memset(heap[i] = malloc(5000 + i * 10), i, 5000);
    for (int i = 0; i < 100; i++) {
        for (int j = 0; j < 5000; j++)
            if (heap[i][j] != (char)i) return 15;
        free(heap[i]);
    }
    for (int i = 0; i < DATA_PAGES; i++)
        if (*(uint64_t *)(numbers + i * 4096L) != (uint64_t)i * 7 + 6) return 16;
    uint64_t signals = 0;
    for (int i = 1; i < 64; i++) signals |= (uint64_t)(sigismember(&mask, i) == 1) << i;
    printf("fd %d errno %d mask %lx umask %o\n", first_free, first_errno, signals, umask(0));
    return table[0]("whole") < 0;
}
