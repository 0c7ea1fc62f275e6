#!/bin/sh
# Installs the Debian packages that `make bench` and `make bench-full` measure with. What cannot
# be installed (as an ordinary user, or elsewhere than on Debian) is named, and not measured.
# No service is started.
set -u

packages="gcc libc6-dev clang nodejs php-cli python3 gdb mariadb-server-core mariadb-client-core
    postgresql redis-tools sysbench libhugetlbfs0 debian-archive-keyring"

missing=""
for package in $packages; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "install-packages: not measured unless they are installed:$missing" >&2
    exit 0
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

# The lists may be absent or older than the mirror: fetch them once, and try again.
install || { apt-get -q -o DPkg::Lock::Timeout=600 update && install; } ||
    echo "install-packages: not measured, since not all of these could be installed:$missing" >&2
