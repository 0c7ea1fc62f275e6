/* A target with a second thread: `threads` waits in both, `threads leave` ends the first. */
#include <pthread.h>
#include <sys/syscall.h>
#include "move.h"

static void *second(void *arg) {
    printf("ready %lx\n%ld\n", (unsigned long)arg, syscall(SYS_gettid));
    fflush(stdout);
    pause();
    return 0;
}

int main(int argc, char **argv) {
    (void)argv;
    pthread_t thread;
    move_text(main, "text");
    pthread_create(&thread, 0, second, main);
    if (argc > 1) pthread_exit(0);
    pause();
}
