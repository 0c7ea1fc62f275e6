// A program that asks for an executable stack: what it may do stays what it was. (O06)
//# build: pie,no-pie x bfd x execstack
//# expect: parity
//# exit: 42
#include "hazard.h"

int main(void) {
    unsigned char code[] = {0xb8, 42, 0, 0, 0, 0xc3};
    int (*function)(void) = (int (*)(void))(uintptr_t)code;
    __asm__ volatile("" : "+r"(function) : : "memory");
    printf("called on the stack: %d\n", function());
    return hazard_end();
}
