// Opens a file first thing: with descriptors closed at the start it gets a low
// number, and must hold what this program writes and nothing else. (O44)
//# build: pie,no-pie x bfd
//# matrix: no
//# exit: 42
#include "hazard.h"
#include <fcntl.h>

int main(void) {
    int fd = open("out", O_CREAT | O_TRUNC | O_WRONLY, 0600);
    if (fd < 0 || write(fd, "12345", 5) != 5) _exit(1);
    fill_check();
    _exit(fd == atoi(getenv("HAZARD_FD")) ? 42 : 2);
}
