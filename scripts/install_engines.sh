#!/bin/sh
# The container tests run a real podman and a real dockerd with private stores. Both need root. If they are missing and cannot be
# installed, pytest skips these tests.
set -eu
. "$(dirname "$0")/apt.sh"

[ "$(id -u)" = 0 ] || exit 0
command -v podman >/dev/null 2>&1 && command -v dockerd >/dev/null 2>&1 && command -v runc >/dev/null 2>&1 && exit 0
apt_install podman docker.io runc && exit 0
echo "podman or dockerd is missing, so the container tests will be skipped. Run: sudo apt-get install podman docker.io" >&2
