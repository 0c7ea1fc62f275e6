// Starts commands in every way there is. (O33)
//# build: pie,no-pie x bfd
//# matrix: no
//# exit: 42
#define _GNU_SOURCE
#include "hazard.h"
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

static int finished(pid_t pid) {
    int status;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status);
}

int main(void) {
    char *const command[] = {(char *)"true", NULL};
    int good = 0;
    for (int i = 0; i < 40; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            execv("/bin/true", command);
            _exit(1);
        }
        good += finished(pid);
        pid = vfork();
        if (pid == 0) {
            execv("/bin/true", command);
            _exit(1);
        }
        good += finished(pid);
        if (!posix_spawn(&pid, "/bin/true", NULL, NULL, command, environ)) good += finished(pid);
        good += system("/bin/true") == 0;
        char text[8] = "";
        FILE *pipe = popen("echo yes", "r");
        good += pipe && fgets(text, sizeof text, pipe) && !strcmp(text, "yes\n") && !pclose(pipe);
    }
    printf("%d commands of %d\n", good, 5 * 40);
    return hazard_end();
}
