// Becomes itself again HAZARD_EXEC times. (O37)
//# build: pie,no-pie x bfd
//# exit: 42
#include "hazard.h"

extern char **environ;

int main(int argc, char **argv) {
    const char *text = getenv("HAZARD_EXEC");
    int times = text ? atoi(text) : 0;
    (void)argc;
    fill_check();
    if (times > 0) {
        char fewer[20];
        snprintf(fewer, sizeof fewer, "%d", times - 1);
        setenv("HAZARD_EXEC", fewer, 1);
        execve("/proc/self/exe", argv, environ);
        return 1;
    }
    return hazard_end();
}
