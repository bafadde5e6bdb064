#!/bin/sh
# The tests of `distflow ui` need Chromium, and axe-core to check the pages. axe-core is installed into a virtual environment. If one
# is missing and cannot be installed, pytest skips these tests.
set -eu
VENV=$1
VERSION=4.14.1
. "$(dirname "$0")/apt.sh"

command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 \
    || apt_install chromium \
    || echo "Chromium is missing, so the tests of the web page will be skipped. Run: sudo apt-get install chromium" >&2
[ -f "$VENV/axe-core/$VERSION" ] && exit 0
command -v npm >/dev/null 2>&1 || apt_install nodejs npm || true
timeout 120 npm install --silent --fetch-retries=1 --fetch-timeout=60000 --no-audit --no-fund --prefix "$VENV/axe-core" "axe-core@$VERSION" >/dev/null 2>&1 \
    && touch "$VENV/axe-core/$VERSION" \
    || echo "axe-core cannot be installed, so the checks of accessibility will be skipped. They need npm and its package registry." >&2
