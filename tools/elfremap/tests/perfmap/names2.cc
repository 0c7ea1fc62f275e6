#include <cstddef>
#include <cstdlib>
#include <utility>

static __attribute__((used, noinline)) int same_name(int x) asm("same_name");
static int same_name(int x) { return x + 2; }
extern "C" int same_name_too(int x) { return same_name(x); }

void *operator new(std::size_t n) { return std::malloc(n); }

namespace space {
template <class A, class B> __attribute__((noinline)) A join(std::pair<A, B> p) { return p.first; }
template long join<long, char const *>(std::pair<long, char const *>);
}
