int through_library(int (*callback)(int), int argument) {
    int result = callback(argument);
    __asm__ volatile("" : "+r"(result));
    return result;
}
