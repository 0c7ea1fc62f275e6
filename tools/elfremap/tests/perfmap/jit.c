/* A target that writes a perf map itself, as JIT compilers do, for code it made. */
#include "move.h"

int main(void) {
    move_text(main, "text");
    char *code = mmap(0, 8192, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char name[64];
    snprintf(name, sizeof name, "/tmp/perf-%d.map", getpid());
    FILE *map = fopen(name, "w");
    if (!map) return 99;
    fprintf(map, "%lx 40 js:later\n%lx 40 js:first\n", (unsigned long)code + 64, (unsigned long)code);
    fprintf(map, "1000 10 stale:elsewhere\n");
    fflush(map);
    printf("ready %lx\n", (unsigned long)main);
    fflush(stdout);
    pause();
}
