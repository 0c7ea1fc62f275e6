/* A target whose shared object (argument 1) is moved: `object FILE text|all|whole`. */
#include <dlfcn.h>
#include "move.h"

int main(int argc, char **argv) {
    void *object = dlopen(argv[1], RTLD_NOW);
    void *inside = object ? dlsym(object, "exported") : 0;
    if (!inside || argc < 3) { fprintf(stderr, "%s\n", dlerror()); return 99; }
    move_text(inside, argv[2]);
    printf("ready %lx\n", (unsigned long)inside);
    fflush(stdout);
    pause();
}
