// Program headers that lie about alignment: what counts is where the segments are. (O05)
//# build: no-pie x bfd x align0,align1,align3,align64k,align2m,align1g
//# exit: 42
#include "hazard.h"

int main(void) { return hazard_end(); }
