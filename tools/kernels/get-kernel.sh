#!/bin/bash
# get-kernel.sh CACHE ARCH PACKAGE SUITE...
# Fetches the Debian kernel that PACKAGE, a metapackage, stands for: the newest one
# among the suites. Prints the path of its image. The packages are unpacked below
# CACHE, not installed, and apt works on a state of its own there: the machine's
# package lists and sources stay as they are. The mirror is the machine's own.
set -euo pipefail
cache=$1 arch=$2 package=$3
shift 3

fail() {
    echo "get-kernel: $*" >&2
    exit 1
}

mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -m1 '/debian/\?$') ||
    fail "cannot find a Debian mirror in the machine's sources"
mirror=${mirror%/}

# Sets `options`: apt's, for a state of its own that knows only this suite.
enter_suite() {
    local suite=$1 state=$cache/apt/$1-$arch uri=$mirror
    case $suite in *-security) uri=$mirror-security ;; esac
    mkdir -p "$state/lists/partial" "$state/archives/partial"
    : >"$state/status"
    echo "deb [arch=$arch signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $suite main" \
        >"$state/sources.list"
    options=(
        -o Dir::Etc::SourceList="$state/sources.list" -o Dir::Etc::SourceParts=-
        -o Dir::State::Lists="$state/lists" -o Dir::State::Status="$state/status"
        -o Dir::Cache="$state" -o APT::Architecture="$arch" -o APT::Architectures="$arch"
        -o APT::Sandbox::User=root -o Acquire::Retries=3 -o Acquire::Check-Valid-Until=false
        -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false
        -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false
    )
    # A list that is a day old still names packages that the mirror has.
    if [ -z "$(find "$state/lists" -name '*Packages*' -mtime -1 -print -quit)" ]; then
        apt-get "${options[@]}" -qq update >&2 || return 1
    fi
}

# The packages of a name's dependencies that match a pattern.
dependencies() {
    apt-cache "${options[@]}" depends --important "$1" | sed -n 's/^ *Depends: //p' | grep -E "$2" || true
}

best='' version=''
for suite; do
    enter_suite "$suite" || continue
    image=$(dependencies "$package" '^linux-image-[0-9]' | head -n 1)
    [ -n "$image" ] || continue
    this=$(apt-cache "${options[@]}" policy "$image" | sed -n 's/^ *Candidate: //p')
    if [ -z "$best" ] || dpkg --compare-versions "$this" gt "$version"; then
        best=$suite version=$this chosen=$image
    fi
done
[ -n "$best" ] || fail "no $package for $arch in $*"

enter_suite "$best"
tree=$cache/$chosen-$version
image_in() {
    find "$1" \( -path '*/boot/vmlinu*' -o -path '*/lib/modules/*/vmlinu*' \) -type f -print -quit
}
if [ ! -d "$tree" ]; then
    work=$(mktemp -d "$cache/fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # Newer kernels keep the image in a package of its own.
    wanted=("$chosen")
    mapfile -t -O 1 wanted < <(dependencies "$chosen" '^linux-(binary|modules)-[0-9]')
    (cd "$work" && apt-get "${options[@]}" -qq download "${wanted[@]}" >&2)
    for file in "$work"/*.deb; do
        dpkg-deb --fsys-tarfile "$file" |
            tar -x -C "$work" --wildcards --wildcards-match-slash '*/vmlinu*' 2>/dev/null || true
    done
    rm -f "$work"/*.deb
    [ -n "$(image_in "$work")" ] || fail "no kernel image in ${wanted[*]}"
    mv "$work" "$tree"
fi
image_in "$tree"
