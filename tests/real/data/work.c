// Compiled by the compilers under test, and debugged by the debugger.
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

struct node {
    struct node *left, *right;
    int key;
    double weight;
};

static struct node *insert(struct node *tree, int key) {
    if (!tree) {
        struct node *node = calloc(1, sizeof *node);
        node->key = key;
        node->weight = sqrt(key);
        return node;
    }
    struct node **side = key < tree->key ? &tree->left : &tree->right;
    *side = insert(*side, key);
    return tree;
}

static double sum(const struct node *tree) {
    return tree ? sum(tree->left) + tree->weight + sum(tree->right) : 0;
}

static int compare(const void *a, const void *b) {
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

#define STEP(n) case n: h = (h ^ (h >> (n % 13 + 1))) * (2654435761u + 2 * n); break;
#define EIGHT(n) STEP(n) STEP(n + 1) STEP(n + 2) STEP(n + 3) STEP(n + 4) STEP(n + 5) STEP(n + 6) STEP(n + 7)

static uint32_t mix(uint32_t h, unsigned rounds) {
    for (unsigned i = 0; i < rounds; i++) {
        switch (h % 64) {
            EIGHT(0) EIGHT(8) EIGHT(16) EIGHT(24) EIGHT(32) EIGHT(40) EIGHT(48) EIGHT(56)
        }
    }
    return h;
}

static void matrix(float out[32][32], const float a[32][32], const float b[32][32]) {
    for (int i = 0; i < 32; i++)
        for (int j = 0; j < 32; j++) {
            float s = 0;
            for (int k = 0; k < 32; k++) s += a[i][k] * b[k][j];
            out[i][j] = s;
        }
}

static void *worker(void *argument) {
    uint32_t *value = argument;
    *value = mix(*value, 1000);
    return NULL;
}

static int inner(int depth) {
    if (depth == 0) return (int)mix(1, 10) & 0xff; /* stop here */
    return inner(depth - 1) + depth;
}

int main(void) {
    struct node *tree = NULL;
    uint32_t values[1000];
    static float a[32][32], b[32][32], c[32][32];
    for (int i = 0; i < 1000; i++) {
        values[i] = mix((uint32_t)i, 20);
        tree = insert(tree, (int)(values[i] % 100000));
    }
    qsort(values, 1000, sizeof *values, compare);
    for (int i = 0; i < 32; i++)
        for (int j = 0; j < 32; j++) a[i][j] = (float)(i + j), b[i][j] = (float)(i - j);
    matrix(c, a, b);
    pthread_t thread;
    pthread_create(&thread, NULL, worker, &values[7]);
    pthread_join(thread, NULL);
    printf("%.3f %u %u %.1f %d\n", sum(tree), values[0], values[7], c[3][4], inner(4));
    return 0;
}
