// An earlier library's constructor has used up nearly all mappings that a process may
// have (vm.max_map_count): HAZARD_MAPPINGS are left.
//# build: pie,no-pie x bfd
//# matrix: no
//# library: crowd.c
//# exit: 42
#include "hazard.h"

extern long crowd_mappings;

int main(void) {
    printf("crowded: %d\n", crowd_mappings > 1000);
    return hazard_end();
}
