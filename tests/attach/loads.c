/* Loads the library that its argument names, and calls all of its functions again and again. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

static char *pages;
static atomic_int stop;

static void *caller(void *unused) {
    while (!stop)
        for (int i = 0; i < 2048; i++)
            if (((int (*)(void))(pages + i * 4096L))() != i) _exit(1);
    return unused;
}

int main(int argc, char **argv) {
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    pages = library ? dlsym(library, "big_pages") : NULL;
    if (!pages) return 2;
    pthread_t thread;
    if (pthread_create(&thread, NULL, caller, NULL)) return 3;
    printf("ready\n");
    fflush(stdout);
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    stop = 1;
    pthread_join(thread, NULL);
    return 42;
}
