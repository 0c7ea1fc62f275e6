// What may share a block, and which classes are moved: the options ELFREMAP_MERGE
// and ELFREMAP_SEGMENTS.
//# build: pie,no-pie x bfd,gold,lld x ELFREMAP_MERGE=none,ELFREMAP_MERGE=rx,ELFREMAP_MERGE=relro,ELFREMAP_MERGE=rwx
//# build: pie,no-pie x bfd,lld x ELFREMAP_SEGMENTS=text,ELFREMAP_SEGMENTS=rodata,ELFREMAP_SEGMENTS=data,ELFREMAP_SEGMENTS=bss
//# build: no-pie x page2m x ELFREMAP_SEGMENTS=rodata,ELFREMAP_SEGMENTS=data
//# fill: text=1152 rodata=1152 relro=700 data=640 bss=1152
//# exit: 42
#include "hazard.h"

int main(void) { return hazard_end(); }
