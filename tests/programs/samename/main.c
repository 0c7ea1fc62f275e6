// A shared library with the program's own name, and a second executable mapping of
// the program's file made before the preload's constructor. (O20)
//# build: pie,no-pie x bfd
//# library: samename.c
//# preload: maps.c
//# exit: 42
#define _GNU_SOURCE
#include "hazard.h"
#include <dlfcn.h>

extern int same_name_bss[], same_name_sum(void);


int main(void) {
    CHECK(same_name_sum() == 1 << 20);
    const char **mapped_twice = (const char **)dlsym(RTLD_DEFAULT, "mapped_twice");
    CHECK(mapped_twice && *mapped_twice && !memcmp(*mapped_twice, "\177ELF", 4));
    return hazard_end();
}
