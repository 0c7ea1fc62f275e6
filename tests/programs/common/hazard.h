// What the test programs share. A program checks itself, prints what it found (no
// addresses), says `ready`, waits for the end of its stdin, so that it can be looked
// at from outside, checks once more, and ends with status 42.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif
extern const char fill_text[] __attribute__((visibility("hidden")));
extern const uint32_t fill_rodata[] __attribute__((visibility("hidden")));
extern const uint32_t fill_relro[] __attribute__((visibility("hidden")));
extern uint32_t fill_data[] __attribute__((visibility("hidden")));
extern uint32_t fill_bss[] __attribute__((visibility("hidden")));
extern const uint32_t fill_pages[5] __attribute__((visibility("hidden")));
#ifdef __cplusplus
}
#endif

enum { FILL_OK = 42 };

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                \
            fflush(stdout);                                                               \
            _exit(1);                                                                     \
        }                                                                                 \
    } while (0)

static inline uint32_t fill_word(uint32_t page, uint32_t salt) {
    return page * 0x9e3779b1u + salt;
}

// Hides from the compiler what it knows about an object.
static inline const uint32_t *fill_opaque(const uint32_t *p) {
    __asm__ volatile("" : "+r"(p) : : "memory");
    return p;
}

static inline int fill_words_ok(const uint32_t *words, uint32_t pages, uint32_t salt,
                                uint32_t skip, uint32_t change) {
    words = fill_opaque(words);
    for (uint32_t page = 0; page < pages; page++)
        for (uint32_t i = skip; i < 1024; i++) {
            uint32_t want = fill_word(page, salt) + (i == 1 ? change : 0);
            if (words[page * 1024 + i] != want) return 0;
        }
    return 1;
}

// bss: the first and last word of three pages in four; the other pages stay untouched.
static inline uint32_t fill_bss_word(uint32_t page, uint32_t change) {
    return page % 4 == 3 ? 0 : fill_word(page, 5) + change;
}

static inline void fill_bss_write(uint32_t change) {
    for (uint32_t page = 0; page < fill_pages[4]; page++) {
        if (page % 4 == 3) continue;
        fill_bss[page * 1024] = fill_bss[page * 1024 + 1023] = fill_bss_word(page, change);
    }
}

static uint32_t fill_change;

// Before any library's constructor, so also before the preload's.
static void fill_early(int argc, char **argv, char **envp) {
    (void)argc, (void)argv, (void)envp;
    fill_bss_write(0);
}
__attribute__((section(".preinit_array"), used)) static void (*fill_early_entry)(int, char **,
                                                                              char **) = fill_early;

// All of text (called and read), rodata, relro, data, bss.
static inline void fill_check(void) {
    CHECK(fill_words_ok((const uint32_t *)fill_text, fill_pages[0], 1, 4, 0));
    for (uint32_t page = 0; page < fill_pages[0]; page++) {
        uint32_t (*function)(void) = (uint32_t (*)(void))(uintptr_t)(fill_text + page * 4096);
        CHECK(function() == page);
    }
    CHECK(fill_words_ok(fill_rodata, fill_pages[1], 2, 0, 0));
    CHECK(fill_words_ok(fill_relro, fill_pages[2], 3, 0, 0));
    CHECK(fill_words_ok(fill_data, fill_pages[3], 4, 0, fill_change));
    const uint32_t *bss = fill_opaque(fill_bss);
    for (uint32_t page = 0; page < fill_pages[4]; page++) {
        uint32_t want = fill_bss_word(page, fill_change);
        CHECK(bss[page * 1024] == want && bss[page * 1024 + 1023] == want);
        CHECK(bss[page * 1024 + 512] == 0);
    }
}

// Writes to every page of data and bss, and checks that all of it took.
static inline void fill_rewrite(void) {
    fill_change++;
    for (uint32_t page = 0; page < fill_pages[3]; page++) fill_data[page * 1024 + 1]++;
    fill_bss_write(fill_change);
    fill_check();
}

// Says `ready` and waits for the end of stdin.
static inline void hazard_ready(void) {
    char byte;
    printf("ready\n");
    fflush(stdout);
    while (read(0, &byte, 1) > 0) {
    }
}

// The usual end of a program: checks the fill, lets itself be looked at, checks again.
static inline int hazard_end(void) {
    fill_check();
    hazard_ready();
    fill_check();
    fill_rewrite();
    printf("done\n");
    return FILL_OK;
}
