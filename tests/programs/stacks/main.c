// Stacks in bss: the signal stack, coroutines, threads; and jumps between them.
//# build: pie,no-pie x bfd
//# runs: few
//# flags: -pthread
//# exit: 42
#define _GNU_SOURCE
#include "hazard.h"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

static char signal_stack[1 << 16], routine_stacks[8][1 << 16];
static char thread_stacks[4][1 << 18] __attribute__((aligned(4096)));
static ucontext_t home, routines[8];
static unsigned long sum;
static sigjmp_buf back;

static void routine(int number) {
    unsigned char local[4096];
    for (int round = 0; round < 50; round++) {
        memset(local, round, sizeof local);
        swapcontext(&routines[number], &home);
        for (size_t i = 0; i < sizeof local; i++) sum += local[i] == (unsigned char)round;
    }
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    char local[8192];
    (void)info, (void)context;
    memset(local, signal, sizeof local);
    CHECK(local > signal_stack && local < signal_stack + sizeof signal_stack);
    siglongjmp(back, 1 + local[17]);
}

static void *on_thread(void *number) {
    char local[65536];
    memset(local, (int)(uintptr_t)number, sizeof local);
    CHECK(local > thread_stacks[0] && local < thread_stacks[4]);
    sched_yield();
    uintptr_t total = 0;
    for (size_t i = 0; i < sizeof local; i++) total += (uintptr_t)local[i];
    return (void *)total;
}

int main(void) {
    stack_t stack = {.ss_sp = signal_stack, .ss_size = sizeof signal_stack};
    CHECK(!sigaltstack(&stack, NULL));
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_ONSTACK | SA_SIGINFO};
    CHECK(!sigaction(SIGSEGV, &action, NULL));
    int faults = 0;
    for (int i = 0; i < 100; i++)
        if (sigsetjmp(back, 1)) faults++;
        else *(volatile char *)(uintptr_t)16 = 1;
    for (int i = 0; i < 8; i++) {
        getcontext(&routines[i]);
        routines[i].uc_stack.ss_sp = routine_stacks[i];
        routines[i].uc_stack.ss_size = sizeof routine_stacks[i];
        routines[i].uc_link = &home;
        makecontext(&routines[i], (void (*)(void))routine, 1, i);
    }
    for (int round = 0; round <= 50; round++)
        for (int i = 0; i < 8; i++) swapcontext(&home, &routines[i]);
    uintptr_t total = 0;
    for (int round = 0; round < 20; round++) {
        pthread_t threads[4];
        for (uintptr_t i = 0; i < 4; i++) {
            pthread_attr_t attributes;
            pthread_attr_init(&attributes);
            CHECK(!pthread_attr_setstack(&attributes, thread_stacks[i], sizeof thread_stacks[i]));
            CHECK(!pthread_create(&threads[i], &attributes, on_thread, (void *)(i + 1)));
        }
        for (int i = 0; i < 4; i++) {
            void *result;
            pthread_join(threads[i], &result);
            total += (uintptr_t)result;
        }
    }
    printf("%d faults, sum %lu, total %lu\n", faults, sum, (unsigned long)total);
    return hazard_end();
}
