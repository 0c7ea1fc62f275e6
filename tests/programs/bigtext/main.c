// 150 MB of text between two functions. (O12)
//# build: pie x bfd
//# matrix: no
//# fill: none
//# exit: 42
#include <stdio.h>
#include <unistd.h>

__asm__(".text\n"
        ".globl first\nfirst: mov $1, %eax\n ret\n"
        ".fill 150000000, 1, 0x90\n"
        ".globl last\nlast: mov $2, %eax\n ret\n");
extern int first(void), last(void);

int main(void) {
    char byte;
    int sum = 10 * first() + last();
    for (const unsigned char *p = (unsigned char *)first + 8; p < (unsigned char *)last; p += 4096)
        sum += *p != 0x90;
    printf("%d\nready\n", sum);
    fflush(stdout);
    while (read(0, &byte, 1) > 0) {
    }
    return first() + last() == 3 ? 42 : 1;
}
