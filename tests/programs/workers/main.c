// Twenty workers that run the parent's text and read its constants. (O32)
//# build: pie,no-pie x bfd
//# matrix: no
//# exit: 42
#include "hazard.h"
#include <sys/wait.h>

int main(void) {
    int begun[2], go[2];
    char byte;
    CHECK(!pipe(begun) && !pipe(go));
    for (int i = 0; i < 20; i++)
        if (fork() == 0) {
            fill_check();
            close(go[1]);
            if (write(begun[1], "x", 1) != 1) _exit(1);
            while (read(go[0], &byte, 1) > 0) {
            }
            fill_check();
            _exit(7);
        }
    for (int i = 0; i < 20; i++) CHECK(read(begun[0], &byte, 1) == 1);
    hazard_ready();
    close(go[1]);
    int sum = 0, status;
    while (wait(&status) > 0) sum += WIFEXITED(status) ? WEXITSTATUS(status) : 1000;
    printf("workers: %d\n", sum);
    return FILL_OK;
}
