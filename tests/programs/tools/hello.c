// The smallest program that can be looked at.
#include <stdio.h>
#include <unistd.h>

int main(void) {
    char byte;
    printf("hello\nready\n");
    fflush(stdout);
    while (read(0, &byte, 1) > 0) {
    }
    return 42;
}
