// Segments that end or begin at, just before or just past a border of 2 MiB, or are
// one page or one byte long: their first and last bytes are where they belong. (O04)
//# build: no-pie x bfd x edge=0,edge=1,edge=-1
//# fill: text=1152 rodata=4 relro=4 data=640 bss=1152
//# exit: 42
#include "hazard.h"

__asm__(".section edge_text_first, \"ax\", @progbits\n"
        ".globl edge_function\nedge_function: mov $41, %eax\n ret\n"
        ".section edge_text_last, \"ax\", @progbits\n"
        ".globl edge_text_end\nedge_text_end: ret\n"
        ".text\n");
extern int edge_function(void);
extern void edge_text_end(void);

#define AT(name) __attribute__((section("at_" #name), used)) name
char AT(edge_data_first) = 'a';
char AT(edge_data_last) = 'b';
char AT(edge_page_first) = 'c';
char AT(edge_page_last) = 'd';
const char AT(edge_byte) = 'e';

static char of(const char *p) {
    __asm__ volatile("" : "+r"(p));
    return *p;
}

int main(void) {
    CHECK(edge_function() == 41);
    edge_text_end();
    CHECK((uintptr_t)edge_function == 0x1000000 && (uintptr_t)&edge_data_first == 0x1800000);
    CHECK(((uintptr_t)&edge_data_last + 2) / 4 * 4 == 0x1c00000);
    printf("%c%c%c%c%c\n", of(&edge_data_first), of(&edge_data_last), of(&edge_page_first),
           of(&edge_page_last), of(&edge_byte));
    edge_data_first = edge_data_last = edge_page_first = edge_page_last = 'x';
    CHECK(of(&edge_data_first) == 'x' && of(&edge_data_last) == 'x');
    CHECK(of(&edge_page_first) == 'x' && of(&edge_page_last) == 'x');
    return hazard_end();
}
