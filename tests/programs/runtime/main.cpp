// What a language runtime needs of a program's image: exceptions through a library,
// dl_iterate_phdr, dladdr, backtrace, ifunc, encapsulated sections, the ELF header. (O49)
//# build: pie,no-pie x bfd,gold,lld x rdynamic
//# library: callback.c
//# exit: 42
#include "hazard.h"
#include <dlfcn.h>
#include <elf.h>
#include <execinfo.h>
#include <link.h>
#include <stdexcept>
#include <thread>

extern "C" int through_library(int (*callback)(int), int argument);
extern "C" const ElfW(Ehdr) __ehdr_start __attribute__((visibility("hidden")));

struct entry {
    int value;
};
#define ENTRY(name, value)                                                                \
    static const entry name __attribute__((section("entries"), used, retain)) = {value}
ENTRY(one, 1);
ENTRY(two, 2);
ENTRY(three, 3);
extern "C" const entry __start_entries[], __stop_entries[];

static int implementation() { return 77; }
extern "C" int (*resolve_ifunc())() { return implementation; }
extern "C" int chosen() __attribute__((ifunc("resolve_ifunc")));

static int throws(int argument) {
    if (argument > 0) throw std::logic_error("through the library");
    return argument;
}

extern "C" [[gnu::noinline]] int named_function(int depth, void **frames) {
    if (depth == 0) return backtrace(frames, 32);
    int n = named_function(depth - 1, frames);
    __asm__ volatile("" : "+r"(n));
    return n;
}

static int count_loads(dl_phdr_info *info, size_t, void *data) {
    auto *result = static_cast<int *>(data);
    if (*result < 0) {
        *result = 0;
        for (int i = 0; i < info->dlpi_phnum; i++) *result += info->dlpi_phdr[i].p_type == PT_LOAD;
    }
    return 0;
}

static thread_local int tls = 99;

// Symbolizers look for the program's file, from its first byte on. (O55)
static bool file_is_found() {
    char path[4096], line[8192];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    CHECK(n > 0);
    path[n] = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    bool found = false;
    while (fgets(line, sizeof line, maps)) {
        unsigned long offset = 1;
        char *name = strchr(line, '/');
        if (!name || sscanf(line, "%*x-%*x %*s %lx", &offset) != 1) continue;
        name[strcspn(name, "\n")] = 0;
        found = found || (offset == 0 && !strcmp(name, path));
    }
    fclose(maps);
    return found;
}

int main() {
    std::string caught;
    try {
        through_library(throws, 1);
    } catch (const std::logic_error &error) {
        caught = error.what();
    }
    CHECK(caught == "through the library");
    CHECK(through_library(throws, 0) == 0);
    int loads = -1;
    dl_iterate_phdr(count_loads, &loads);
    CHECK(loads >= 2);
    Dl_info info;
    CHECK(dladdr(reinterpret_cast<void *>(named_function), &info) && info.dli_sname);
    CHECK(!strcmp(info.dli_sname, "named_function"));
    void *frames[32];
    int n = named_function(5, frames), named = 0;
    for (int i = 0; i < n; i++)
        named += dladdr(frames[i], &info) && info.dli_sname && !strcmp(info.dli_sname, "named_function");
    CHECK(named >= 5);
    int sum = 0;
    for (const entry *e = __start_entries; e < __stop_entries; e++) sum += e->value;
    CHECK(file_is_found());
    CHECK(sum == 6 && chosen() == 77);
#ifdef __aarch64__
    const int machine = EM_AARCH64;
#else
    const int machine = EM_X86_64;
#endif
    CHECK(!memcmp(__ehdr_start.e_ident, ELFMAG, SELFMAG) && __ehdr_start.e_machine == machine);
    std::thread([] { CHECK(tls == 99); }).join();
    printf("%d loads, %d named frames, sum %d\n", loads, named, sum);
    return hazard_end();
}
