#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

unsigned char *early_block;
char *early_break;
unsigned early_size = 60000;

__attribute__((constructor(101))) static void allocate(void) {
    early_break = sbrk(0);
    early_block = malloc(early_size);
    memset(early_block, 0x5a, early_size);
}
