// A thread that a library started before the preload's constructor runs the program's
// code and writes its data all the time: no hole in the text, no lost write.
//# build: pie,no-pie x bfd
//# matrix: no
//# library: thread.c
//# exit: 42
#include "hazard.h"
#include <sched.h>

extern void stop_thread(void);
static volatile unsigned long ticks = 1, bad;
static volatile unsigned long counters[4096] = {1};

// Called by the library's thread.
void tick(void) {
    uint32_t page = (uint32_t)(ticks * 7919) % fill_pages[0];
    uint32_t (*function)(void) = (uint32_t (*)(void))(uintptr_t)(fill_text + page * 4096);
    bad += function() != page;
    counters[ticks % 4096]++;
    ticks++;
}

int main(void) {
    unsigned long sum = 0;
    for (int round = 0; round < 5; round++) fill_check();
    hazard_ready();
    while (ticks < 1000) sched_yield();
    stop_thread();
    for (int i = 0; i < 4096; i++) sum += counters[i];
    CHECK(bad == 0);
    CHECK(sum == ticks);
    CHECK(ticks > 10);
    fill_check();
    printf("no tick was lost\n");
    return FILL_OK;
}
