#!/bin/sh
# The tests of shell completion run zsh and fish. If they are missing and cannot be installed, pytest skips these tests.
set -eu
. "$(dirname "$0")/apt.sh"

command -v zsh >/dev/null 2>&1 && command -v fish >/dev/null 2>&1 && exit 0
apt_install zsh fish && exit 0
echo "zsh or fish is missing, so the tests of their completion will be skipped. Run: sudo apt-get install zsh fish" >&2
