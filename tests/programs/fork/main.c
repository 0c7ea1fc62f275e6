// Children write to the parent's data, and the parent does, with no huge page left:
// no signal, no wrong byte. (O31)
//# build: pie,no-pie x bfd
//# matrix: no
//# exit: 42
#include "hazard.h"
#include <sys/wait.h>

static volatile int global = 10;

static void children(void) {
    for (int i = 0; i < 3; i++) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            fill_rewrite();
            global += i;
            _exit(global);
        }
        CHECK(child > 0);
        if (i == 1) fill_rewrite(); // at the same time as the child
        CHECK(waitpid(child, &status, 0) == child);
        if (WIFSIGNALED(status)) printf("child %d: signal %d\n", i, WTERMSIG(status));
        CHECK(WIFEXITED(status));
        printf("child %d: %d\n", i, WEXITSTATUS(status));
    }
    CHECK(global == 10);
    fill_check();
}

int main(void) {
    children();
    hazard_ready();
    children();
    return hazard_end();
}
