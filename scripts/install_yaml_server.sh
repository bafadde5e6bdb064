#!/bin/sh
# Install yaml-language-server, which checks specs in editors, into a virtual environment. The tests of the schemas run it. If it
# cannot be installed, pytest skips these tests.
set -eu
VENV=$1
VERSION=1.19.2
. "$(dirname "$0")/apt.sh"

[ -f "$VENV/yaml-language-server/$VERSION" ] && exit 0
command -v npm >/dev/null 2>&1 || apt_install nodejs npm || true
timeout 240 npm install --silent --fetch-retries=1 --fetch-timeout=60000 --no-audit --no-fund --prefix "$VENV/yaml-language-server" "yaml-language-server@$VERSION" >/dev/null 2>&1 \
    && touch "$VENV/yaml-language-server/$VERSION" \
    || echo "yaml-language-server cannot be installed, so its tests will be skipped. They need npm and its package registry." >&2
