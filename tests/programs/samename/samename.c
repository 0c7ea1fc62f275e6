int same_name_bss[1 << 20];

__attribute__((constructor)) static void fill(void) {
    for (int i = 0; i < 1 << 20; i++) same_name_bss[i] = 1;
}

int same_name_sum(void) {
    int sum = 0;
    for (int i = 0; i < 1 << 20; i++) sum += same_name_bss[i];
    return sum;
}
