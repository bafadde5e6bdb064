#!/bin/sh
# The tests of SSH talk to a real OpenSSH server that they start themselves, as an ordinary process on loopback. Where it is missing
# and may not be installed, those tests are skipped and say so.
set -eu
. "$(dirname "$0")/apt.sh"

[ -x /usr/sbin/sshd ] && exit 0
apt_install openssh-server && exit 0
echo "no OpenSSH server here: the tests of SSH will be skipped. To have them: sudo apt-get install openssh-server" >&2
