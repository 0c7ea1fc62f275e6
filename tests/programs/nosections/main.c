// No symbols, no section headers, nothing behind the last segment. (O10)
//# build: pie,no-pie x bfd,lld x nosections,truncated
//# exit: 42
#include "hazard.h"

int main(void) { return hazard_end(); }
