// Text, data and bss, and nothing else: the program of the tests of options, pools
// and processes.
//# build: pie,no-pie x bfd
//# exit: 42
#include "hazard.h"

int main(void) { return hazard_end(); }
