static __attribute__((used, noinline)) int same_name(int x) { return x + 1; }

__attribute__((noinline)) int real_function(int x) { return x * 7; }
extern int real(int) __attribute__((alias("real_function")));
extern int weak_and_much_longer_name(int) __attribute__((weak, alias("real_function")));
__attribute__((used)) static int local_but_longest_name_of_all(int) __attribute__((alias("real_function")));

static int picked(void) { return 1; }
static void *resolver(void) { return picked; }
int chosen(void) __attribute__((ifunc("resolver")));

int some_data = 5;
int absent(void) __attribute__((weak));

int same_name_too(int x);
void extra(void) {
    volatile int x = same_name(1) + same_name_too(1) + real_function(1) + chosen() + some_data;
    if (absent) x += absent();
}
