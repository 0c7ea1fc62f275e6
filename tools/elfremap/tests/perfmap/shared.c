static int hidden(int x) { return x * 3; }
__attribute__((noinline)) int exported(int x) { return hidden(x) + 1; }
