#!/bin/sh
# The SSH tests start a real OpenSSH server as an ordinary process on loopback. If it is missing and cannot be installed, pytest
# skips these tests.
set -eu
. "$(dirname "$0")/apt.sh"

[ -x /usr/sbin/sshd ] && exit 0
apt_install openssh-server && exit 0
echo "the OpenSSH server is missing, so the SSH tests will be skipped. Run: sudo apt-get install openssh-server" >&2
