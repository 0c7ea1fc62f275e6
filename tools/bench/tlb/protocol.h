/* How mark.c, in the guest, tells model.c, in QEMU, when to count and which pages are
   huge: by the addresses that it reads. A read of the byte MAILBOX + WORD passes the 32-bit
   word; a read of COMMANDS + COMMAND gives the command, whose words came before it. */
#define MAILBOX 0x6e6c00000000ULL
#define COMMANDS (MAILBOX + (1ULL << 32))

enum {
    /* The run's number, then the first and the end of each range of huge pages, as
       multiples of their size. Counting begins. */
    BEGIN_COUNTING,
    /* One word: whether the huge pages are still the same. Counting ends. */
    END_COUNTING,
    COMMAND_COUNT
};

/* Size of the huge pages: 2 MiB. */
#define HUGE_SHIFT 21
