/* A server that forks its workers beforehand and replaces those that have done their
   share; static tables in data and bss, which every worker writes.
   usage: prefork SOCKET; ends on SIGTERM. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORKERS 8
#define SHARE 15
#define WORDS (1 << 19)
static uint64_t table[WORDS];
static uint64_t start[WORDS] = {1};

/* Fills the worker's own table from the request, and sums it up. */
static uint64_t answer(uint64_t request) {
    uint64_t sum = 0;
    for (int i = 0; i < WORDS; i += 64) {
        start[i] += request;
        table[i] = start[i] * 31 + request * (uint64_t)i;
    }
    for (int i = 0; i < WORDS; i += 64) {
        sum = sum * 7 + table[i];
        start[i] -= request;
    }
    return sum;
}

static void work(int listener) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int done = 0; done < SHARE; done++) {
        int client = accept(listener, NULL, NULL);
        char text[64] = "";
        if (client < 0 || read(client, text, sizeof text - 1) <= 0) _exit(3);
        dprintf(client, "%lx\n", (unsigned long)answer(strtoul(text, NULL, 10)));
        close(client);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    (void)argc;
    /* Looked at one by one: none gets lost between a test and a wait. */
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGTERM);
    sigaddset(&awaited, SIGCHLD);
    sigprocmask(SIG_BLOCK, &awaited, NULL);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 64)) return 1;
    pid_t workers[WORKERS] = {0};
    int bad = 0, replaced = 0, number = 0;
    while (number != SIGTERM) {
        for (int i = 0; i < WORKERS; i++)
            if (!workers[i] && !(workers[i] = fork())) work(listener);
        sigwait(&awaited, &number);
        int status;
        for (pid_t gone; (gone = waitpid(-1, &status, WNOHANG)) > 0;)
            for (int i = 0; i < WORKERS; i++)
                if (workers[i] == gone) {
                    workers[i] = 0, replaced++;
                    if (status) bad++, fprintf(stderr, "a worker ended with %x\n", status);
                }
    }
    for (int i = 0; i < WORKERS; i++)
        if (workers[i]) kill(workers[i], SIGTERM), waitpid(workers[i], NULL, 0);
    printf("bad %d, some replaced: %d\n", bad, replaced >= 10);
    return bad != 0;
}
