// Signals arrive all the time from before the preload's constructor on, and their
// handler lives in the program. (O48)
//# build: pie,no-pie x bfd
//# library: timer.c
//# exit: 42
#include "hazard.h"
#include <sys/time.h>

extern void start_timer(void);
static volatile unsigned ticks, bss_ticks[1024];
static volatile unsigned data_ticks[1024] = {1};

void on_tick(int signal) {
    (void)signal;
    ticks++;
    data_ticks[ticks % 1024]++;
    bss_ticks[ticks % 1024] = ticks;
}

int main(void) {
    unsigned sum = 0;
    for (int round = 0; round < 3; round++) fill_check();
    while (ticks < 5) {
    }
    struct itimerval off = {{0, 0}, {0, 0}};
    setitimer(ITIMER_PROF, &off, NULL);
    for (int i = 0; i < 1024; i++) sum += data_ticks[i];
    CHECK(sum == ticks + 1);
    printf("no tick was lost\n");
    return hazard_end();
}
