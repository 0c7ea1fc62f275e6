#include <pthread.h>

extern void tick(void);

static pthread_t thread;
static volatile int stop;

static void *loop(void *unused) {
    while (!stop) tick();
    return unused;
}

__attribute__((constructor)) static void start(void) { pthread_create(&thread, 0, loop, 0); }

void stop_thread(void) {
    stop = 1;
    pthread_join(thread, 0);
}
