/* A library with 8 MiB of text: in every page one function that returns the page's number. */
__asm__(".text\n.p2align 12\n.globl big_pages\n.type big_pages, @function\nbig_pages:\n.set i, 0\n"
        ".rept 2048\n.p2align 12\n"
#ifdef __aarch64__
        "movz w0, #i\n ret\n"
#else
        "mov $i, %eax\n ret\n"
#endif
        ".set i, i+1\n.endr\n.p2align 12\n");
