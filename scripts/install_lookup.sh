#!/bin/sh
# OSMO's specs look up their master with nslookup and wait for it with nc. The tests of these specs use the real programs. If they
# are missing and cannot be installed, pytest skips these tests.
set -eu
. "$(dirname "$0")/apt.sh"

command -v nslookup >/dev/null 2>&1 && command -v dig >/dev/null 2>&1 && command -v nc >/dev/null 2>&1 && exit 0
apt_install bind9-dnsutils bind9-host netcat-openbsd && exit 0
echo "nslookup, dig or nc is missing, so the tests that use them will be skipped. Run: sudo apt-get install bind9-dnsutils bind9-host netcat-openbsd" >&2
