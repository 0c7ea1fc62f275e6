// Text, read-only data, relro and data of several MiB with distinct content on each
// page, so that a page that was lost or swapped is noticed. hazard.h checks them.
// The sizes are in pages of 4096 bytes.

#ifndef TEXT_PAGES
#define TEXT_PAGES 1152
#endif
#ifndef RODATA_PAGES
#define RODATA_PAGES 32
#endif
#ifndef RELRO_PAGES
#define RELRO_PAGES 16
#endif
#ifndef DATA_PAGES
#define DATA_PAGES 640
#endif
#ifndef BSS_PAGES
#define BSS_PAGES 1152
#endif

.macro words pages, salt
    .set i, 0
    .rept \pages
    .fill 1024, 4, (i * 0x9e3779b1 + \salt) & 0xffffffff
    .set i, i + 1
    .endr
.endm

.macro object name
    .globl \name
    .hidden \name
    .type \name, @object
    .balign 16
\name:
.endm

// A function on each page that returns the page's number, four words long; on arm64 it
// begins with a landing pad (bti c).
.section .text.fill, "ax", @progbits
.globl fill_text
.hidden fill_text
.type fill_text, @function
.balign 16
fill_text:
    .set i, 0
    .rept TEXT_PAGES
#ifdef __aarch64__
    hint #34
    movz w0, #i
    ret
    nop
#else
    .byte 0xb8
    .long i
    .byte 0xc3
    .fill 10, 1, 0x90
#endif
    .fill 1020, 4, (i * 0x9e3779b1 + 1) & 0xffffffff
    .set i, i + 1
    .endr
.size fill_text, . - fill_text

.section .rodata.fill, "a", @progbits
object fill_rodata
    words RODATA_PAGES, 2

.section .data.rel.ro.fill, "aw", @progbits
object fill_relro
    words RELRO_PAGES, 3

.section .data.fill, "aw", @progbits
object fill_data
    words DATA_PAGES, 4

.section .bss.fill, "aw", @nobits
object fill_bss
    .zero BSS_PAGES * 4096

.section .rodata.sizes, "a", @progbits
object fill_pages
    .long TEXT_PAGES, RODATA_PAGES, RELRO_PAGES, DATA_PAGES, BSS_PAGES

.section .note.GNU-stack, "", @progbits

#ifdef __aarch64__
// GNU_PROPERTY_AARCH64_FEATURE_1_AND: BTI.
.section .note.gnu.property, "a"
.balign 8
    .long 4, 16, 5
    .asciz "GNU"
    .long 0xc0000000, 4, 1, 0
#endif
