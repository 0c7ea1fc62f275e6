// Objects of the C and C++ libraries that the dynamic linker has copied into the
// program's bss before anything else runs. (O02)
//# build: no-pie x bfd,gold,lld x default,now
//# exit: 42
#include "hazard.h"
#include <errno.h>
#include <getopt.h>
#include <iostream>
#include <stdexcept>

extern "C" char **environ;

int main(int argc, char **argv) {
    char *fake[] = {argv[0], const_cast<char *>("-x"), const_cast<char *>("value"), nullptr};
    CHECK(getopt(3, fake, "x:") == 'x' && std::string(optarg) == "value" && optind == 3);
    CHECK(argc == 1);
    const char *name = strrchr(argv[0], '/');
    CHECK(!strcmp(program_invocation_short_name, name ? name + 1 : argv[0]));
    CHECK(!strcmp(program_invocation_name, argv[0]));
    int locale = 0;
    for (char **e = environ; *e; e++) locale += !strcmp(*e, "LC_ALL=C");
    CHECK(locale == 1);
    std::cout << "cout " << std::hex << 255 << std::endl;
    std::cerr << "cerr" << std::endl;
    fprintf(stdout, "stdout %s\n", optarg);
    try {
        throw std::out_of_range("range");
    } catch (const std::exception &error) {
        std::cout << error.what() << std::endl;
    }
    return hazard_end();
}
