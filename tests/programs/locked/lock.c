#include <sys/mman.h>

int lock_result = -1;

__attribute__((constructor)) static void lock(void) {
    lock_result = mlockall(MCL_CURRENT | MCL_FUTURE);
}
