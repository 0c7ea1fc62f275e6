#include <signal.h>
#include <sys/time.h>

extern void on_tick(int);

__attribute__((constructor)) static void start(void) {
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
    struct itimerval timer = {{0, 200}, {0, 200}};
    sigaction(SIGPROF, &action, 0);
    setitimer(ITIMER_PROF, &timer, 0);
}
