// Between exec and the preload's constructor the program's file is replaced by
// another one of the same size. (O18)
//# build: pie,no-pie x bfd
//# matrix: no
//# preload: replaces.c
//# exit: 42
#include "hazard.h"

int main(void) { return hazard_end(); }
