// bss alone in a segment without bytes in the file, far away; one with the rights
// R, W and X; a segment with no bytes at all. (O06)
//# build: no-pie x bfd x odd=rw,odd=rwx
//# exit: 42
#include "hazard.h"

int main(void) { return hazard_end(); }
