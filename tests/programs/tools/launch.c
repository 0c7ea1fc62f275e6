// launch STEP... -- PROGRAM ARGUMENT...: does the steps and becomes the program.
//
//   barrier              waits for one byte on stdin
//   set=NAME:VALUE       sets an environment variable for the program
//   mdwe                 PR_SET_MDWE: nothing that was written becomes executable
//   deny=CALL:ERRNO      seccomp: the system call fails with this errno
//   deny-exec=ERRNO:N    seccomp: mmap without a file and mprotect with PROT_EXEC fail;
//                        N picks: 0 both, 9 mmap alone, 10 mprotect alone
//   timer=MICROSECONDS   an interval timer that goes on, its signal ignored
//   close=DIGITS         closes these descriptors
//   kill=CALL            seccomp: the system call ends the process (SIGSYS)
//   no-proc              unmounts /proc in a mount namespace of its own
//   no-sys               unmounts /sys in a mount namespace of its own
//   hidepid              mounts /proc anew with hidepid=2
//   read-only-sys        makes /sys read-only
//   no-new-privs         PR_SET_NO_NEW_PRIVS
//   user-namespace       a user namespace of its own, in which it is nobody
//   memory-lock=BYTES    RLIMIT_MEMLOCK
//   personality=NUMBER   personality(2), in hexadecimal
//   no-thp               PR_SET_THP_DISABLE
//   broken-stderr        stderr is a pipe that nobody reads; a write ends a careless writer
//   in-memory            what is executed is a copy in memory (memfd_create, fexecve)
//   user=NUMBER          becomes this user and group
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

static void fail(const char *what) {
    fprintf(stderr, "launch: %s: %s\n", what, strerror(errno));
    exit(125);
}

static void filter(const struct sock_filter *code, size_t length) {
    struct sock_fprog program = {(unsigned short)length, (struct sock_filter *)code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) fail("seccomp");
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define EQUAL(value, then, otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, then, otherwise)
#define RETURN(value) BPF_STMT(BPF_RET | BPF_K, value)

static void deny(unsigned call, unsigned error) {
    struct sock_filter code[] = {
        LOAD(nr),
        EQUAL(call, 0, 1),
        RETURN(SECCOMP_RET_ERRNO | error),
        RETURN(SECCOMP_RET_ALLOW),
    };
    filter(code, sizeof code / sizeof *code);
}

static void kill_on(unsigned call) {
    struct sock_filter code[] = {
        LOAD(nr),
        EQUAL(call, 0, 1),
        RETURN(SECCOMP_RET_KILL_PROCESS),
        RETURN(SECCOMP_RET_ALLOW),
    };
    filter(code, sizeof code / sizeof *code);
}

// Mounts of its own, for this process and what it becomes.
static void own_mounts(void) {
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL)) fail("unshare");
}

static void deny_exec(unsigned error, unsigned only) {
    struct sock_filter code[] = {
        LOAD(nr),
        EQUAL(only == SYS_mprotect ? 0xffff : SYS_mmap, 0, 2),
        LOAD(args[4]), // the file descriptor's low half
        EQUAL(0xffffffff, 1, 4),
        EQUAL(only == SYS_mmap ? 0xffff : SYS_mprotect, 0, 3),
        LOAD(args[2]), // the protection's low half
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, 4, 0, 1),
        RETURN(SECCOMP_RET_ERRNO | error),
        RETURN(SECCOMP_RET_ALLOW),
    };
    filter(code, sizeof code / sizeof *code);
}

static unsigned call_number(const char *name) {
    static const struct {
        const char *name;
        unsigned number;
    } calls[] = {
        {"mmap", SYS_mmap},       {"mremap", SYS_mremap},     {"munmap", SYS_munmap},
        {"mprotect", SYS_mprotect}, {"madvise", SYS_madvise}, {"mincore", SYS_mincore},
        {"openat", SYS_openat},   {"brk", SYS_brk},           {"rt_sigprocmask", SYS_rt_sigprocmask},
        {"prctl", SYS_prctl},     {"process_vm_readv", SYS_process_vm_readv},
        {"read", SYS_read},       {"pread64", SYS_pread64},   {"write", SYS_write},
        {"getdents64", SYS_getdents64}, {"ioctl", SYS_ioctl},
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (!strcmp(calls[i].name, name)) return calls[i].number;
    errno = ENOSYS;
    fail(name);
    return 0;
}

static unsigned error_number(const char *text) {
    if (!strcmp(text, "EPERM")) return EPERM;
    if (!strcmp(text, "EACCES")) return EACCES;
    if (!strcmp(text, "ENOMEM")) return ENOMEM;
    if (!strcmp(text, "ENOSYS")) return ENOSYS;
    if (!strcmp(text, "EINVAL")) return EINVAL;
    errno = EINVAL;
    fail(text);
    return 0;
}

static int in_memory;

static void step(char *text) {
    char *value = strchr(text, '=');
    if (value) *value++ = 0;
    char *second = value ? strchr(value, ':') : NULL;
    if (second) *second++ = 0;
    char byte;
    if (!strcmp(text, "barrier")) {
        if (read(0, &byte, 1) != 1) fail("barrier");
    } else if (!strcmp(text, "set")) {
        setenv(value, second, 1);
    } else if (!strcmp(text, "mdwe")) {
        if (prctl(65, 1, 0, 0, 0)) fail("PR_SET_MDWE");
    } else if (!strcmp(text, "deny")) {
        deny(call_number(value), error_number(second));
    } else if (!strcmp(text, "deny-exec")) {
        deny_exec(error_number(value), (unsigned)atoi(second));
    } else if (!strcmp(text, "timer")) {
        struct itimerval timer = {{0, atoi(value)}, {0, atoi(value)}};
        signal(SIGALRM, SIG_IGN);
        if (setitimer(ITIMER_REAL, &timer, NULL)) fail("setitimer");
    } else if (!strcmp(text, "close")) {
        for (; *value; value++) close(*value - '0');
    } else if (!strcmp(text, "no-proc")) {
        own_mounts();
        if (umount2("/proc", MNT_DETACH)) fail("umount /proc");
    } else if (!strcmp(text, "no-sys")) {
        own_mounts();
        if (umount2("/sys", MNT_DETACH)) fail("umount /sys");
    } else if (!strcmp(text, "hidepid")) {
        own_mounts();
        if (mount("proc", "/proc", "proc", 0, "hidepid=2")) fail("mount /proc");
    } else if (!strcmp(text, "read-only-sys")) {
        own_mounts();
        if (mount(NULL, "/sys", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL)) fail("remount /sys");
    } else if (!strcmp(text, "no-new-privs")) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) fail("no_new_privs");
    } else if (!strcmp(text, "user-namespace")) {
        if (unshare(CLONE_NEWUSER)) fail("unshare");
    } else if (!strcmp(text, "personality")) {
        if (personality(strtoul(value, NULL, 16)) < 0) fail("personality");
    } else if (!strcmp(text, "no-thp")) {
        if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)) fail("PR_SET_THP_DISABLE");
    } else if (!strcmp(text, "broken-stderr")) {
        int ends[2];
        signal(SIGPIPE, SIG_DFL);
        if (pipe(ends) || dup2(ends[1], 2) < 0 || close(ends[0]) || close(ends[1])) fail("pipe");
    } else if (!strcmp(text, "in-memory")) {
        in_memory = 1;
    } else if (!strcmp(text, "kill")) {
        kill_on(call_number(value));
    } else if (!strcmp(text, "memory-lock")) {
        struct rlimit limit = {(rlim_t)atol(value), (rlim_t)atol(value)};
        if (setrlimit(RLIMIT_MEMLOCK, &limit)) fail("memory-lock");
    } else if (!strcmp(text, "user")) {
        if (setgid((gid_t)atoi(value)) || setuid((uid_t)atoi(value))) fail("setuid");
    } else {
        errno = EINVAL;
        fail(text);
    }
}

static void execute_copy(char **argv) {
    extern char **environ;
    int from = open(argv[0], O_RDONLY), to = memfd_create("copy", MFD_CLOEXEC);
    struct stat status;
    if (from < 0 || to < 0 || fstat(from, &status)) fail(argv[0]);
    for (off_t left = status.st_size; left > 0;) {
        ssize_t n = sendfile(to, from, NULL, (size_t)left);
        if (n <= 0) fail("sendfile");
        left -= n;
    }
    fexecve(to, argv, environ);
    fail("fexecve");
}

int main(int argc, char **argv) {
    int i = 1;
    for (; i < argc && strcmp(argv[i], "--"); i++) step(argv[i]);
    if (i + 1 >= argc) {
        errno = EINVAL;
        fail("no program");
    }
    if (in_memory) execute_copy(argv + i + 1);
    execvp(argv[i + 1], argv + i + 1);
    fail(argv[i + 1]);
    return 125;
}
