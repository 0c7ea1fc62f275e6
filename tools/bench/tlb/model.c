/* A model of a processor's TLBs, as a plugin of QEMU (qemu-system-ARCH -plugin): it counts
   what two levels of TLBs would miss, from the pages that a program in the guest fetches code
   from, reads and writes. No performance counters are needed, and two runs give the same
   numbers.

   The page under an address has the size that the guest's kernel really gave it:
   mark.c, preloaded into the program, tells which pages are huge when counting begins, and
   whether they still are when it ends. Only code of the guest's user mode counts; the guest has one
   processor, and nothing else runs in it meanwhile.

   What it is not: no speculation, no prefetching, no page walk caches, no kernel, no other
   process, no flush.

   Arguments: out=FILE, and itlb4k= itlb2m= dtlb4k= dtlb2m= stlb=ENTRIESxWAYS. FILE is made anew and gets
   one line of JSON for each run.

   No package of Debian's holds the header of QEMU's plugin interface, so what is used of it
   is declared here, as docs/devel/tcg-plugins.rst of QEMU 7.2 documents it: version 1 of the
   interface. */
#include "protocol.h"
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- QEMU's plugin interface ---- */

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
struct qemu_info {
    const char *target_name;
    struct {
        int min, cur;
    } version;
    bool system_emulation;
    struct {
        int cpus, max_cpus;
    } system;
};
enum { NO_REGISTERS = 0, READS_AND_WRITES = 3, ADD = 0 };

typedef void on_translation_fn(plugin_id, struct qemu_plugin_tb *);
typedef void on_block_fn(unsigned cpu, void *data);
typedef void on_access_fn(unsigned cpu, uint32_t info, uint64_t address, void *data);

void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, on_translation_fn *);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, on_block_fn *, int registers, void *data);
void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn *, on_access_fn *, int registers, int rw, void *data);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *, int operation, void *counter, uint64_t by);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
unsigned qemu_plugin_mem_size_shift(uint32_t info);

#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;

/* ---- One TLB: sets of ways, of which the least recently used is replaced ---- */

enum { BASE_SHIFT = 12 };

enum { ITLB_4K, ITLB_2M, DTLB_4K, DTLB_2M, STLB, TLBS };
/* About what a core of an Intel server of 2017 to 2020 has. The last is the second level, which
   pages of both sizes share. */
static struct geometry {
    const char *name;
    unsigned entries, ways;
} geometries[TLBS] = {
    { "itlb4k", 128, 8 }, { "itlb2m", 8, 8 }, { "dtlb4k", 64, 4 }, { "dtlb2m", 32, 4 }, { "stlb", 1536, 12 },
};

struct entry {
    uint64_t tag;  /* page number and size; 0: empty */
    uint64_t used; /* when */
};
struct tlb {
    unsigned sets, ways;
    uint64_t clock;
    struct entry *entries;
};
static struct tlb tlbs[TLBS];

static void fail(const char *what) {
    fprintf(stderr, "tlb: %s\n", what);
    exit(1);
}

static void tlb_empty(struct tlb *tlb, const struct geometry *g) {
    free(tlb->entries);
    *tlb = (struct tlb){ g->entries / g->ways, g->ways, 0, calloc(g->entries, sizeof(struct entry)) };
    if (!tlb->entries) fail("out of memory");
}

/* Whether the page was there; it is now. */
static bool tlb_hit(struct tlb *tlb, uint64_t page, unsigned shift) {
    uint64_t tag = page << 6 | shift;
    struct entry *set = tlb->entries + page % tlb->sets * tlb->ways, *oldest = set;
    for (struct entry *e = set; e < set + tlb->ways; e++) {
        if (e->tag == tag) {
            e->used = ++tlb->clock;
            return true;
        }
        if (e->used < oldest->used) oldest = e;
    }
    *oldest = (struct entry){ tag, ++tlb->clock };
    return false;
}

/* ---- The run that is counted ---- */

enum { MOST_WORDS = 1 + 2 * 4096 };
static uint32_t words[MOST_WORDS];
static size_t word_count;

static bool counting;
static uint32_t run;
static struct range {
    uint64_t start, end;
} huge[MOST_WORDS / 2];
static size_t huge_count;
/* Of user mode since the machine was started, and when counting began. */
static uint64_t instructions, instructions_before;
/* Pages of 4 KiB that were looked up last: they are in their TLB, as the newest. */
static uint64_t code_page, data_page;
static struct {
    uint64_t itlb_misses, itlb_walks, accesses, dtlb_misses, dtlb_walks;
} counts;

static unsigned shift_of(uint64_t address) {
    for (size_t i = 0; i < huge_count; i++)
        if (address >= huge[i].start && address < huge[i].end) return HUGE_SHIFT;
    return BASE_SHIFT;
}

static void look_up(uint64_t address, int small, int large, uint64_t *misses, uint64_t *walks) {
    unsigned shift = shift_of(address);
    uint64_t page = address >> shift;
    if (tlb_hit(&tlbs[shift == BASE_SHIFT ? small : large], page, shift)) return;
    ++*misses;
    if (!tlb_hit(&tlbs[STLB], page, shift)) ++*walks;
}

static void fetch(uint64_t address) {
    if (address >> BASE_SHIFT == code_page) return;
    code_page = address >> BASE_SHIFT;
    look_up(address, ITLB_4K, ITLB_2M, &counts.itlb_misses, &counts.itlb_walks);
}

static void access_data(uint64_t address) {
    if (address >> BASE_SHIFT == data_page) return;
    data_page = address >> BASE_SHIFT;
    look_up(address, DTLB_4K, DTLB_2M, &counts.dtlb_misses, &counts.dtlb_walks);
}

static void begin(void) {
    if (word_count % 2 == 0) fail("a range without an end");
    run = words[0];
    huge_count = 0;
    for (size_t i = 1; i < word_count; i += 2)
        huge[huge_count++] = (struct range){ (uint64_t)words[i] << HUGE_SHIFT, (uint64_t)words[i + 1] << HUGE_SHIFT };
    for (int i = 0; i < TLBS; i++) tlb_empty(&tlbs[i], &geometries[i]);
    code_page = data_page = UINT64_MAX;
    memset(&counts, 0, sizeof counts);
    instructions_before = instructions;
    counting = true;
}

static const char *out;

static void end(void) {
    if (!counting || word_count != 1) fail("an end without a beginning");
    counting = false;
    FILE *file = fopen(out, "a");
    if (!file) fail("cannot open the file named by out=");
    uint64_t pages = 0;
    for (size_t i = 0; i < huge_count; i++) pages += (huge[i].end - huge[i].start) >> HUGE_SHIFT;
    fprintf(file, "{\"run\":%" PRIu32 ",\"huge_pages\":%" PRIu64 ",\"same_pages\":%s,\"tlbs\":{", run, pages,
            words[0] ? "true" : "false");
    for (int i = 0; i < TLBS; i++)
        fprintf(file, "%s\"%s\":\"%ux%u\"", i ? "," : "", geometries[i].name, geometries[i].entries,
                geometries[i].ways);
    fprintf(file,
            "},\"counts\":{\"instructions\":%" PRIu64 ",\"itlb_misses\":%" PRIu64 ",\"itlb_walks\":%" PRIu64
            ",\"accesses\":%" PRIu64 ",\"dtlb_misses\":%" PRIu64 ",\"dtlb_walks\":%" PRIu64 "}}\n",
            instructions - instructions_before, counts.itlb_misses, counts.itlb_walks, counts.accesses, counts.dtlb_misses,
            counts.dtlb_walks);
    if (fclose(file)) fail("cannot write the file named by out=");
}

/* ---- What QEMU calls ---- */

/* Translated code: the addresses of its first and last byte. */
struct block {
    uint64_t first, last;
};

static void on_block(unsigned cpu, void *data) {
    (void)cpu;
    if (!counting) return;
    const struct block *block = data;
    fetch(block->first);
    fetch(block->last);
}

/* The upper half of the address space is the kernel's, on all architectures of 64 bits.
   QEMU also tells of what the processor does when an interrupt comes in the middle of a program's
   instruction: it writes to the kernel's stack. */
static bool is_kernel(uint64_t address) { return address >> 63; }

static void on_access(unsigned cpu, uint32_t info, uint64_t address, void *data) {
    (void)cpu, (void)data;
    if (address >= MAILBOX && address < COMMANDS) {
        if (word_count == MOST_WORDS) fail("too many ranges");
        words[word_count++] = (uint32_t)(address - MAILBOX);
    } else if (address >= COMMANDS && address < COMMANDS + COMMAND_COUNT) {
        address == COMMANDS + BEGIN_COUNTING ? begin() : end();
        word_count = 0;
    } else if (counting && !is_kernel(address)) {
        counts.accesses++;
        access_data(address);
        access_data(address + (1ULL << qemu_plugin_mem_size_shift(info)) - 1);
    }
}

static void on_translation(plugin_id id, struct qemu_plugin_tb *tb) {
    (void)id;
    size_t n = qemu_plugin_tb_n_insns(tb);
    if (!n) return;
    const struct qemu_plugin_insn *first = qemu_plugin_tb_get_insn(tb, 0), *last = qemu_plugin_tb_get_insn(tb, n - 1);
    if (is_kernel(qemu_plugin_insn_vaddr(first))) return;
    /* Kept for ever: QEMU does not say when it forgets a block. */
    struct block *block = malloc(sizeof *block);
    if (!block) fail("out of memory");
    *block = (struct block){ qemu_plugin_insn_vaddr(first),
                             qemu_plugin_insn_vaddr(last) + qemu_plugin_insn_size(last) - 1 };
    qemu_plugin_register_vcpu_tb_exec_cb(tb, on_block, NO_REGISTERS, block);
    for (size_t i = 0; i < n; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        qemu_plugin_register_vcpu_insn_exec_inline(insn, ADD, &instructions, 1);
        qemu_plugin_register_vcpu_mem_cb(insn, on_access, NO_REGISTERS, READS_AND_WRITES, NULL);
    }
}

static bool take_argument(const char *name, const char *value) {
    if (!strcmp(name, "out")) return (out = strdup(value)) != NULL;
    for (int i = 0; i < TLBS; i++) {
        if (strcmp(name, geometries[i].name)) continue;
        unsigned entries, ways;
        if (sscanf(value, "%ux%u", &entries, &ways) != 2 || !ways || !entries || entries % ways) return false;
        geometries[i].entries = entries, geometries[i].ways = ways;
        return true;
    }
    return false;
}

EXPORT int qemu_plugin_install(plugin_id id, const struct qemu_info *info, int argc, char **argv) {
    if (!info->system_emulation || info->system.max_cpus != 1) {
        fprintf(stderr, "tlb: only for a machine with one processor\n");
        return 1;
    }
    for (int i = 0; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (value) *value++ = 0;
        if (!value || !take_argument(argv[i], value)) {
            fprintf(stderr, "tlb: bad argument %s\n", argv[i]);
            return 1;
        }
    }
    if (!out) {
        fprintf(stderr, "tlb: out=FILE is missing\n");
        return 1;
    }
    /* Each machine begins anew: the file of one that ended early is not added to. */
    if (remove(out) && errno != ENOENT) {
        fprintf(stderr, "tlb: cannot remove %s: %s\n", out, strerror(errno));
        return 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    return 0;
}
