#!/bin/sh
# The tests of containers run a real podman and a real dockerd, each with a store of its own. Both need root; where they are missing
# and may not be installed, those tests are skipped and say so.
set -eu
. "$(dirname "$0")/apt.sh"

[ "$(id -u)" = 0 ] || exit 0
command -v podman >/dev/null 2>&1 && command -v dockerd >/dev/null 2>&1 && command -v runc >/dev/null 2>&1 && exit 0
apt_install podman docker.io runc && exit 0
echo "no podman or no dockerd here: the tests of containers will be skipped. To have them: sudo apt-get install podman docker.io" >&2
