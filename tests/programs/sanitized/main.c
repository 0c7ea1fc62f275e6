// Programs that bring a sanitizer's runtime along. (O42)
//# build: pie x bfd x ubsan,asan-static
//# matrix: no
//# exit: 42
#include "hazard.h"

int main(void) {
    char *p = (char *)malloc(10000);
    memset(p, 3, 10000);
    CHECK(p[9999] == 3);
    free(p);
    fill_check();
    return hazard_end();
}
