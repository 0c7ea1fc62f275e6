# The commands for people. CI calls `make test` by .ci/run.
#
#   make demo      build, run a real program and a generated one before and after (< 3 min)
#   make test      install what the tests need (as root), build, run everything (< 30 min)
#   make bench     measure what it gains and costs, short form (< 15 min); bench-full: longer
#   make test-machines  guests: other kernels, arm64, NUMA, page sizes (< 15 min, downloads included)
#   make tlb       count TLB walks under a model, in a guest (< 5 min); no hardware counters needed
#   make report    render docs/benchmarks again from the raw data kept there
#   make asan      the tests of the library and the tools under AddressSanitizer
#   make fuzz-smoke  every fuzz target, a minute in all (SECONDS=60); fuzz/README.md
#   make lint      formatting and clippy
#   make           release build of the library and the tools
#   make install   PREFIX=/usr/local DESTDIR=

CARGO  ?= cargo
PREFIX ?= /usr/local
DESTDIR ?=
TARGET := $(or $(CARGO_TARGET_DIR),target)

LIBRARY  := libelfremap.so
COMMANDS := elfremap elfremap-check

.PHONY: all release debug packages lint test unit-test program-test asan fuzz-smoke demo test-machines bench bench-full tlb report install uninstall clean
.DEFAULT_GOAL := all
.NOTPARALLEL:

all: release

# The preload is a cdylib that no `cargo test` builds: it is always built by name.
release:
	$(CARGO) build --locked --release -p elfremap-preload
	$(CARGO) build --locked --release -p elfremap-tools

debug:
	$(CARGO) build --locked -p elfremap-preload
	$(CARGO) build --locked -p elfremap-tools

packages:
	tests/install-packages.sh

# The preload is checked by itself: it is `no_std` with a panic handler of its own, and
# Cargo gives crates that are built together the union of their features (the tools'
# logger asks `log` for std).
lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --exclude elfremap-preload --all-targets -- -D warnings
	$(CARGO) clippy --locked -p elfremap-preload -- -D warnings

# Everything, in the order in which a fault is found soonest. The programs under
# test run one test binary after the other: the pool of huge pages is one for the
# whole machine.
test: packages lint debug release
	$(MAKE) -k unit-test program-test asan fuzz-smoke

unit-test:
	$(CARGO) test --locked --workspace --exclude elfremap-tests --exclude elfremap-preload --no-fail-fast

program-test:
	$(CARGO) test --locked -p elfremap-tests --no-fail-fast

# Both build the same packages with the same flags, in a folder of their own.
asan:
	cd fuzz && . ./flags.sh && cd .. && \
		$$CARGO test --locked $$TARGET -p elfremap -p elfremap-tools --lib --no-fail-fast

SECONDS := 60

fuzz-smoke:
	fuzz/run $(SECONDS)

# Guests under QEMU; needs no KVM and leaves this machine's pools alone. Writes docs/kernels.md.
test-machines:
	tools/kernels/install-packages.sh
	$(CARGO) build --locked -p elfremap-machines -p elfremap-bench
	$(TARGET)/debug/elfremap-machines

demo:
	$(CARGO) build --locked --release -p elfremap-preload
	$(CARGO) build --locked --release -p elfremap-bench
	$(TARGET)/release/elfremap-bench demo

# The raw data of a run stays in target/bench, with the report beside it. Rivals and other
# options of `measure`: BENCH_OPTIONS="--rival NAME=PATH".
BENCH_NAME := $(shell date -u +%Y%m%d-%H%M%S)
BENCHES ?= chase startup refused runtime programs costs
BENCH_ROUNDS ?= 5
BENCH_OPTIONS ?=

bench:
	tools/bench/install-packages.sh
	$(CARGO) build --locked --release -p elfremap-preload
	$(CARGO) build --locked --release -p elfremap-bench
	$(TARGET)/release/elfremap-bench measure $(BENCHES) --rounds $(BENCH_ROUNDS) $(BENCH_OPTIONS) \
		--out $(TARGET)/bench/data/$(BENCH_NAME).jsonl
	$(TARGET)/release/elfremap-bench report $(TARGET)/bench/data/$(BENCH_NAME).jsonl --out $(TARGET)/bench

# Hours: more rounds, and real servers under load.
bench-full:
	$(MAKE) bench BENCHES= BENCH_ROUNDS=20

# The model of TLBs is a plugin of QEMU: tools/bench/tlb.
tlb:
	tools/kernels/install-packages.sh
	$(CARGO) build --locked -p elfremap-machines -p elfremap-bench
	$(TARGET)/debug/elfremap-machines --tlb $(TARGET)/bench/data/tlb-model.jsonl
	$(TARGET)/debug/elfremap-bench report $(TARGET)/bench/data/tlb-model.jsonl --out $(TARGET)/bench

report:
	$(CARGO) run --locked -q -p elfremap-bench -- report docs/benchmarks/data/*.jsonl

# `sudo make install` often finds no cargo: it then installs what `make` has built.
install:
	@if command -v $(CARGO) >/dev/null; then $(MAKE) release; \
	elif [ ! -e $(TARGET)/release/$(LIBRARY) ]; then \
		echo "make: cannot install: $(TARGET)/release/$(LIBRARY) is not built and cargo is not found" >&2; \
		echo "hint: run \`make\` as the user who has Rust, then \`sudo make install\`" >&2; exit 1; fi
	install -d $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/bin
	install -m 644 $(TARGET)/release/$(LIBRARY) $(DESTDIR)$(PREFIX)/lib/
	install -m 755 $(addprefix $(TARGET)/release/,$(COMMANDS)) $(DESTDIR)$(PREFIX)/bin/
	$(TARGET)/release/elfremap manual $(DESTDIR)$(PREFIX)/share

uninstall:
	rm -f $(DESTDIR)$(PREFIX)/lib/$(LIBRARY) $(addprefix $(DESTDIR)$(PREFIX)/bin/,$(COMMANDS))
	cd $(DESTDIR)$(PREFIX)/share && rm -f man/man1/elfremap.1 man/man1/elfremap-*.1 man/man7/elfremap.7 \
		$(foreach command,$(COMMANDS),bash-completion/completions/$(command) \
		zsh/site-functions/_$(command) fish/vendor_completions.d/$(command).fish)

clean:
	$(CARGO) clean
