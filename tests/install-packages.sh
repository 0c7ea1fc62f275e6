#!/bin/sh
# Installs the Debian packages that the tests need. As an ordinary user it names
# those that are missing and fails. No service is started, and `apt-get update`
# runs only when a package is unknown.
set -eu

# Debian's own Python names its packages by its version; another may come first in PATH.
python3_version() {
    /usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null ||
        apt-cache depends python3-minimal | sed -n 's/.*Depends: python\([0-9.]*\)-minimal$/\1/p'
}

# One group per kind of test.
HAZARDS="gcc g++ libc6-dev binutils lld mold musl-tools gcc-multilib libc6-dev-i386"
# Other libraries that are preloaded or linked in, other languages, tools that change programs.
GUESTS="libjemalloc2 libjemalloc-dev libtcmalloc-minimal4 libmimalloc2.0 valgrind strace golang-go patchelf"
# Real programs. redis-tools holds Redis's server too, and starts no service.
REAL="mariadb-server-core mariadb-client-core postgresql redis-tools nginx nodejs php-cli php-fpm
    python3 libpython$(python3_version)-testsuite gdb clang debian-archive-keyring"
# Programs that are moved while they run, and the load for a server that is.
ATTACH="default-jdk-headless sysbench golang-go"
# The tools' tests: a linker whose flags are advised, file capabilities; checks of the man pages
# and units that are written, and of processes left behind.
TOOLS="mold libcap2-bin groff-base systemd procps"
# Profilers, and what their tests pack with.
PROFILING="linux-perf util-linux xz-utils zstd"

packages="$HAZARDS $GUESTS $REAL $ATTACH $TOOLS $PROFILING"

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "install-packages: these packages are missing:$missing" >&2
    echo "hint: sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi

# A policy-rc.d that forbids (101) keeps the packages' services from starting.
# One that is there already is the machine's own choice and stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

install() {
    # shellcheck disable=SC2086 # a list of names
    DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=600 install -y \
        --no-install-recommends $missing
}

# A service that comes with a package installed here shall not start at the next boot
# either, now that the policy is gone.
disable_services() {
    command -v systemctl >/dev/null || return 0
    for package in $missing; do
        case $package in
            nginx | postgresql) systemctl --quiet disable "$package.service" || true ;;
            php-fpm)
                for unit in /lib/systemd/system/php*-fpm.service; do
                    systemctl --quiet disable "${unit##*/}" || true
                done
                ;;
        esac
    done
}

# The lists may be absent or older than the mirror: fetch them once, and try again.
install || { apt-get -q -o DPkg::Lock::Timeout=600 update && install; }
disable_services
