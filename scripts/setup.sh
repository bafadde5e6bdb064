#!/bin/sh
# Makes a virtual environment with distflow, its tools and torch (CPU is enough). What the system lacks is installed through apt
# when root or passwordless sudo allows it; otherwise the command to type is shown.
set -eu
VENV=$1
PYTHON=${PYTHON:-python3}

. "$(dirname "$0")/apt.sh"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "distflow needs Python 3.10 or newer; $PYTHON is $("$PYTHON" -V 2>&1). Try: make PYTHON=python3.12 ..." >&2
    exit 1
}

if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
    apt_install python3-venv || { echo "python3-venv is missing. Type: sudo apt-get install python3-venv" >&2; exit 1; }
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"

# torch first and pinned: the plain name would bring gigabytes of CUDA packages to a machine that has no GPU.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,data,dev]'
