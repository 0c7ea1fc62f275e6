# Sets CARGO, TARGET, TARGET_DIR and the environment of a build with AddressSanitizer
# and libFuzzer's coverage. To be sourced in this folder.
if cargo +nightly --version >/dev/null 2>&1; then
    CARGO="cargo +nightly"
else
    # The sanitizer's runtime comes with stable toolchains, the flag's permission does not.
    CARGO=cargo
    export RUSTC_BOOTSTRAP=1
fi
TARGET_DIR=$(cd .. && pwd)/target/sanitized
TARGET="--target x86_64-unknown-linux-gnu --target-dir $TARGET_DIR"
# What does the work is optimised; the rest would take minutes to build.
for package in elfremap goblin scroll; do
    TARGET="$TARGET --config profile.dev.package.$package.opt-level=1"
done
RUSTFLAGS="-Zsanitizer=address --cfg fuzzing -Cpasses=sancov-module
    -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares"
RUSTFLAGS=$(echo $RUSTFLAGS)
export RUSTFLAGS CARGO_INCREMENTAL=0
export CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_PROFILE_TEST_DEBUG=line-tables-only
export CARGO_PROFILE_DEV_PANIC=abort
