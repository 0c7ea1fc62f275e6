/* Symbols of every awkward kind. The sizes of the labels are left out on purpose. */
        .text
        .p2align 4
        .globl label_one
label_one:
        nop
label_two:
        nop
        nop
label_three:
        nop
        ret

        .macro function name, size=8
        .p2align 4
        .type \name, @function
\name:  .skip \size, 0x90
        .size \name, \size
        .endm

        function work.cold
        function work.part.0
        function _RNvCs1234_7mycrate6v0_fun
        function _ZN7mycrate6legacy17h0123456789abcdefE
        function to_be_renamed
        function outer, 32

        /* Inside outer, 8 bytes from its start. */
        .type inner, @function
        .set inner, outer + 8
        .size inner, 4

        /* Mapping symbols, as assemblers of other processors make them. */
        .p2align 4
        nop
$x:     nop
$d.1:   nop

        .section lastsec, "ax", @progbits
        nop
last_label:
        .skip 5, 0x90

        .section .note.GNU-stack, "", @progbits
