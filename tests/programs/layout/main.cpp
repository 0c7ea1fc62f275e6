// Every linker's layout: exceptions, a thread, thread-local data with an initial
// value, static constructors, the heap and the break, in a program whose segments
// the linkers place in many ways. (O03, O09)
//# build: pie,no-pie x bfd,gold,lld x default,noseparate-code,separate-code,norelro,now,page64k,page2m,page2m-common
//# build: no-pie x bfd,gold,lld x base300000
//# build: pie,no-pie x lld x no-rosegment,rosegment,separate-loadable
//# build: pie,no-pie x mold x default,separate-code,norelro,now,page2m,page2m-common
//# build: pie,no-pie x bfd x loads12
//# exit: 42
#include "hazard.h"
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

static thread_local int tls_value = 4711;
static thread_local int tls_zero;

struct Registry {
    std::map<std::string, int> entries;
    Registry() {
        for (int i = 0; i < 100; i++) entries["key" + std::to_string(i)] = i * i;
    }
};
static Registry registry;

typedef int (*operation)(int);
static int twice(int x) { return 2 * x; }
static int square(int x) { return x * x; }
extern const operation operations[];
const operation operations[] = {twice, square, twice};

[[gnu::noinline]] static void thrower(int depth) {
    if (depth == 0) throw std::runtime_error("thrown");
    std::string local(100, 'x');
    thrower(depth - 1);
    if (local[50] != 'x') abort();
}

static int catches() {
    int caught = 0;
    for (int i = 0; i < 10; i++) {
        try {
            thrower(i);
        } catch (const std::runtime_error &error) {
            caught += std::string(error.what()) == "thrown";
        }
    }
    return caught;
}

int main(int argc, char **) {
    CHECK(registry.entries.size() == 100 && registry.entries["key9"] == 81);
    CHECK(tls_value == 4711 && tls_zero == 0);
    int in_thread = 0;
    std::thread([&] { in_thread = tls_value + tls_zero + catches(); }).join();
    CHECK(in_thread == 4721);
    CHECK(catches() == 10);
    CHECK(operations[argc % 3](5) == 25);
    void *before = sbrk(0);
    CHECK(sbrk(1 << 20) == before);
    memset(before, 7, 1 << 20);
    std::vector<char *> blocks;
    for (int i = 1; i < 300; i++) {
        blocks.push_back(static_cast<char *>(malloc(i * 100)));
        memset(blocks.back(), i, i * 100);
    }
    for (int i = 1; i < 300; i++) {
        CHECK(blocks[i - 1][i * 99] == static_cast<char>(i));
        free(blocks[i - 1]);
    }
    printf("caught %d, in thread %d\n", catches(), in_thread);
    return hazard_end();
}
