#!/bin/sh
# Installs the Debian packages that `make test-machines` needs. As an ordinary user it
# names those that are missing and fails. The arm64 standard library of Rust comes from
# rustup's target when that is there, else with Debian's own compiler, which is
# installed beside rustup's and does not replace it.
set -eu

# Debian's cross libraries carry the version of its GCC in their names.
gcc_version() { apt-cache depends gcc | sed -n 's/.*Depends: gcc-\([0-9]*\)$/\1/p' | head -n 1; }

packages="qemu-system-x86 qemu-system-arm seabios debian-archive-keyring gcc g++ clang mariadb-server-core
    binutils-aarch64-linux-gnu libc6-dev-arm64-cross libstdc++-$(gcc_version)-dev-arm64-cross"

target=aarch64-unknown-linux-gnu
has_target() { [ -d "$("$1" --print target-libdir --target $target 2>/dev/null)" ]; }
has_target rustc || packages="$packages rustc-web libstd-rust-web-dev libstd-rust-web-dev:arm64"

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "install-packages: these packages are missing:$missing" >&2
    echo "hint: sudo tools/kernels/install-packages.sh" >&2
    exit 1
fi

# Only the compiler's foreign library needs the second architecture.
case $missing in
    *:arm64*)
        dpkg --print-foreign-architectures | grep -qx arm64 || dpkg --add-architecture arm64
        apt-get -q -o DPkg::Lock::Timeout=600 update
        ;;
esac

install() {
    # shellcheck disable=SC2086 # a list of names
    DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 install -y \
        --no-install-recommends $missing
}

# The lists may be absent or older than the mirror: fetch them once, and try again.
install || { apt-get -q -o DPkg::Lock::Timeout=600 update && install; }
