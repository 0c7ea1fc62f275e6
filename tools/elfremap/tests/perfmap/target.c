/* A target: `target none|text|all|whole [spin]`. Moves its text, says where its main is, waits. */
#include "move.h"

extern void extra(void) __attribute__((weak));

__attribute__((noinline)) void innermost(volatile long *n) { for (int i = 0; i < 1000; i++) ++*n; }
__attribute__((noinline)) void f(volatile long *n) { for (int i = 0; i < 1000; i++) ++*n; }

int main(int argc, char **argv) {
    volatile long n = 0;
    if (argc > 1 && strcmp(argv[1], "none")) move_text(main, argv[1]);
    if (extra) extra();
    printf("ready %lx\n", (unsigned long)main);
    fflush(stdout);
    if (argc > 2) for (;;) innermost(&n), f(&n);
    pause();
}
