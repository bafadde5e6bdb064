#!/bin/sh
# OSMO's specs look up their master with nslookup and wait for it with nc; the tests of those specs use the real programs. Where they
# are missing and may not be installed, those tests are skipped and say so.
set -eu
. "$(dirname "$0")/apt.sh"

command -v nslookup >/dev/null 2>&1 && command -v dig >/dev/null 2>&1 && command -v nc >/dev/null 2>&1 && exit 0
apt_install bind9-dnsutils bind9-host netcat-openbsd && exit 0
echo "no nslookup or nc here: the tests of specs that use them will be skipped. To have them: sudo apt-get install bind9-dnsutils bind9-host netcat-openbsd" >&2
