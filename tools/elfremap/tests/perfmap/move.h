/* Moves the executable segments of the object that holds `inside` onto anonymous memory by
 * mremap: what the preload does, but page for page and without huge pages. */
#pragma once
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum what { TEXT, ALL, WHOLE };
struct moving { uintptr_t inside; enum what what; };

static void move_range(uintptr_t start, uintptr_t end, int prot) {
    size_t len = end - start;
    char *copy = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) { perror("mmap"); exit(99); }
    memcpy(copy, (void *)start, len);
    mprotect(copy, len, prot);
    if (mremap(copy, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, start) == MAP_FAILED) {
        perror("mremap");
        exit(99);
    }
}

static int move_segments(struct dl_phdr_info *info, size_t size, void *arg) {
    struct moving *moving = arg;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        uintptr_t at = info->dlpi_addr + p->p_vaddr;
        if (p->p_type != PT_LOAD || moving->inside < at || moving->inside >= at + p->p_memsz) continue;
        for (int j = 0; j < info->dlpi_phnum; j++) {
            p = &info->dlpi_phdr[j];
            if (p->p_type != PT_LOAD) continue;
            if (moving->what < WHOLE && (p->p_flags & PF_W)) continue;
            if (moving->what < ALL && !(p->p_flags & PF_X)) continue;
            uintptr_t start = (info->dlpi_addr + p->p_vaddr) & -4096ul;
            uintptr_t end = (info->dlpi_addr + p->p_vaddr + p->p_memsz + 4095) & -4096ul;
            int prot = PROT_READ | (p->p_flags & PF_W ? PROT_WRITE : 0);
            move_range(start, end, prot | (p->p_flags & PF_X ? PROT_EXEC : 0));
        }
        return 1;
    }
    return 0;
}

/* What to move: "text", "all" that is read-only, the ELF header too, or the "whole" object. */
static inline void move_text(void *inside, const char *what) {
    enum what how = !strcmp(what, "whole") ? WHOLE : !strcmp(what, "all") ? ALL : TEXT;
    struct moving moving = { (uintptr_t)inside, how };
    if (!dl_iterate_phdr(move_segments, &moving)) { fprintf(stderr, "no such object\n"); exit(99); }
}
