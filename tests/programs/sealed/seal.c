#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int sealed_mappings;

// SEAL names what is sealed: `text` or `all`.
__attribute__((constructor)) static void seal(void) {
    const char *what = getenv("HAZARD_SEAL");
    char path[4096], line[8192];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    FILE *maps = fopen("/proc/self/maps", "r");
    if (length < 0 || !maps) return;
    path[length] = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char rights[8];
        if (!strstr(line, path) || sscanf(line, "%lx-%lx %7s", &start, &end, rights) != 3) continue;
        if (what && !strcmp(what, "text") && !strchr(rights, 'x')) continue;
        sealed_mappings += !syscall(462, start, end - start, 0);
    }
    fclose(maps);
}
