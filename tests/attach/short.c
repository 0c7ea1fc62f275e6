/* 16 MiB of code, and a life of as many milliseconds as the argument says. */
#include <stdlib.h>
#include <time.h>

asm(".text\n.p2align 21\nfiller:\n.fill 16 << 20, 1, 0x90\nret\n");

int main(int argc, char **argv) {
    struct timespec time = { 0, (argc > 1 ? atol(argv[1]) : 1) * 1000000 };
    return nanosleep(&time, NULL);
}
