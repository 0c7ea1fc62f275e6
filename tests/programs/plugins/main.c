// Libraries are loaded and unloaded once the program is on huge pages; they find the
// program's symbols, and it theirs.
//# build: pie,no-pie x bfd x rdynamic
//# runs: few
//# exit: 42
#define _GNU_SOURCE
#include "hazard.h"
#include <dlfcn.h>

int own_function(int n) { return n + 1; }
int own_variable = 7;

int main(void) {
    int found = 0;
    // All of the C library's own package.
    const char *names[] = {"libresolv.so.2", "libanl.so.1", "libBrokenLocale.so.1", "libm.so.6"};
    const char *symbols[] = {"ns_name_ntop", "gai_cancel", NULL, "cbrt"};
    for (int round = 0; round < 100; round++)
        for (int i = 0; i < 4; i++) {
            void *library = dlopen(names[i], round % 2 ? RTLD_NOW : RTLD_LAZY | RTLD_GLOBAL);
            CHECK(library);
            found += symbols[i] && dlsym(library, symbols[i]);
            CHECK(!dlclose(library));
        }
    void *self = dlopen(NULL, RTLD_NOW);
    int (*function)(int) = (int (*)(int))dlsym(self, "own_function");
    int *variable = (int *)dlsym(self, "own_variable");
    CHECK(function && function(1) == 2 && variable == &own_variable && *variable == 7);
    Dl_info info;
    CHECK(dladdr((void *)own_function, &info) && !strcmp(info.dli_sname, "own_function"));
    printf("%d found\n", found);
    return hazard_end();
}
