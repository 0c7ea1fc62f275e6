// pack PROGRAM ARGUMENT...: what a packed program's stub does. Puts the program and its
// loader into anonymous memory and starts them; the kernel goes on taking this file for
// what runs. Linked as static-pie, so that nothing is preloaded into the stub.
#include <elf.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

struct image {
    uint64_t bias, entry, headers, count;
    const char *interpreter;
};

static void fail(const char *what) {
    write(2, what, strlen(what));
    write(2, "\n", 1);
    _exit(125);
}

static struct image load(const char *path) {
    int fd = open(path, O_RDONLY);
    struct stat status;
    if (fd < 0 || fstat(fd, &status)) fail(path);
    char *file = mmap(0, status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    Elf64_Ehdr *elf = (Elf64_Ehdr *)file;
    Elf64_Phdr *headers = (Elf64_Phdr *)(file + elf->e_phoff);
    uint64_t low = UINT64_MAX, high = 0;
    struct image image = {.count = elf->e_phnum};
    for (int i = 0; i < elf->e_phnum; i++) {
        Elf64_Phdr *h = headers + i;
        if (h->p_type == PT_INTERP) image.interpreter = file + h->p_offset;
        if (h->p_type != PT_LOAD) continue;
        if (h->p_vaddr < low) low = h->p_vaddr & ~4095ul;
        if (h->p_vaddr + h->p_memsz > high) high = h->p_vaddr + h->p_memsz;
    }
    int fixed = elf->e_type == ET_EXEC ? MAP_FIXED_NOREPLACE : 0;
    char *place = mmap(fixed ? (void *)low : NULL, high - low, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    if (place == MAP_FAILED) fail("no place");
    image.bias = (uint64_t)place - low;
    for (int i = 0; i < elf->e_phnum; i++) {
        Elf64_Phdr *h = headers + i;
        if (h->p_type != PT_LOAD) continue;
        memcpy((char *)(h->p_vaddr + image.bias), file + h->p_offset, h->p_filesz);
        if (h->p_offset <= elf->e_phoff && elf->e_phoff < h->p_offset + h->p_filesz)
            image.headers = elf->e_phoff - h->p_offset + h->p_vaddr + image.bias;
    }
    for (int i = 0; i < elf->e_phnum; i++) {
        Elf64_Phdr *h = headers + i;
        if (h->p_type != PT_LOAD) continue;
        int rights = (h->p_flags & PF_R ? PROT_READ : 0) | (h->p_flags & PF_W ? PROT_WRITE : 0) |
                     (h->p_flags & PF_X ? PROT_EXEC : 0);
        uint64_t start = (h->p_vaddr + image.bias) & ~4095ul;
        uint64_t end = (h->p_vaddr + h->p_memsz + image.bias + 4095) & ~4095ul;
        if (mprotect((void *)start, end - start, rights)) fail("mprotect");
    }
    image.entry = elf->e_entry + image.bias;
    return image;
}

int main(int argc, char **argv, char **envp) {
    if (argc < 2) fail("no program");
    struct image program = load(argv[1]), loader = load(program.interpreter);
    int variables = 0;
    while (envp[variables]) variables++;
    char *stack = mmap(0, 8 << 20, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK | MAP_NORESERVE, -1, 0);
    // The auxiliary vector as the kernel would have made it for the program.
    uint64_t vector[][2] = {
        {AT_PHDR, program.headers}, {AT_PHENT, sizeof(Elf64_Phdr)}, {AT_PHNUM, program.count},
        {AT_BASE, loader.bias}, {AT_ENTRY, program.entry}, {AT_PAGESZ, 4096},
        {AT_RANDOM, getauxval(AT_RANDOM)}, {AT_SYSINFO_EHDR, getauxval(AT_SYSINFO_EHDR)},
        {AT_HWCAP, getauxval(AT_HWCAP)}, {AT_HWCAP2, getauxval(AT_HWCAP2)}, {AT_CLKTCK, 100},
        {AT_MINSIGSTKSZ, getauxval(AT_MINSIGSTKSZ)}, {AT_SECURE, 0}, {AT_UID, getuid()},
        {AT_EUID, geteuid()}, {AT_GID, getgid()}, {AT_EGID, getegid()},
        {AT_EXECFN, (uint64_t)argv[1]}, {AT_NULL, 0},
    };
    size_t words = 1 + (size_t)argc + (size_t)variables + 1 + sizeof vector / 8;
    uint64_t *top = (uint64_t *)(((uint64_t)stack + (8 << 20) - 4096 - words * 8) & ~63ul), *at = top;
    *at++ = (uint64_t)argc - 1;
    for (int i = 1; i <= argc; i++) *at++ = (uint64_t)argv[i];
    for (int i = 0; i <= variables; i++) *at++ = (uint64_t)envp[i];
    memcpy(at, vector, sizeof vector);
    __asm__ volatile("mov %0, %%rsp\n xor %%rdx, %%rdx\n xor %%rbp, %%rbp\n jmp *%1"
                     : : "r"(top), "r"(loader.entry) : "memory");
    __builtin_unreachable();
}
