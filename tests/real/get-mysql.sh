#!/bin/bash
# Unpacks MySQL's server, as Debian's unstable suite builds it, with all its
# libraries (a newer glibc too) into a folder that serves as its root directory.
#
#   get-mysql.sh FOLDER
#
# Debian's stable releases have MariaDB only. apt works on a state of its own here,
# so nothing of this machine's packages or lists changes, and no package's own
# scripts run. About 60 MB are fetched. Needs apt and Debian's key ring, no root.
# ELFREMAP_DEBIAN_MIRROR names another mirror than deb.debian.org.
# Prints the server's package and version; the suite moves on, so that changes.
set -euo pipefail

folder=${1:?usage: get-mysql.sh FOLDER}
mirror=${ELFREMAP_DEBIAN_MIRROR:-http://deb.debian.org/debian}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
package=mysql-server-core

complete=$folder/.complete
if [ -e "$complete" ]; then
    cat "$complete"
    exit 0
fi
if [ ! -r "$keys" ]; then
    echo "get-mysql.sh: cannot read $keys (apt-get install debian-archive-keyring)" >&2
    exit 1
fi

rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
mkdir -p "$state"/{etc/sources.list.d,etc/preferences.d,lists/partial,cache/archives/partial}
: > "$state/status"
cat > "$state/etc/sources.list.d/unstable.sources" <<SOURCES
Types: deb
URIs: $mirror
Suites: sid
Components: main
Signed-By: $keys
SOURCES

# An empty status file: apt then takes every library from the suite itself.
apt=(apt-get -qq
    -o Dir::Etc="$state/etc"
    -o Dir::Etc::SourceList=/dev/null
    -o Dir::Etc::SourceParts="$state/etc/sources.list.d"
    -o Dir::State::Lists="$state/lists"
    -o Dir::State::Status="$state/status"
    -o Dir::Cache="$state/cache"
    -o APT::Sandbox::User=root
    -o Acquire::Languages=none
    -o Acquire::Retries=2
    -o Acquire::http::Timeout=20)
"${apt[@]}" update
"${apt[@]}" --yes --no-install-recommends --download-only install "$package" > /dev/null

for archive in "$state"/cache/archives/*.deb; do
    dpkg-deb --extract "$archive" "$folder"
done
# Debian's merged /usr: the links are made by a package's script, which did not run.
for link in bin sbin lib lib64; do
    [ -e "$folder/$link" ] || ln -s "usr/$link" "$folder/$link"
done
mkdir -p "$folder"/{dev,proc,sys,tmp,mnt}
chmod 0755 "$folder"
chmod 1777 "$folder/tmp"

archive=("$state"/cache/archives/"$package"_*.deb)
dpkg-deb --show --showformat '${Package} ${Version} ${Architecture}\n' "${archive[0]}" > "$complete.new"
mv "$complete.new" "$complete"
cat "$complete"
