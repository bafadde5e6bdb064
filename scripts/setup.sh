#!/bin/sh
# Create a virtual environment with distflow and some of its extras: setup.sh VENV EXTRA[,EXTRA…]. Missing system packages are
# installed with apt if root or passwordless sudo allows it. Otherwise the script prints the command to run.
set -eu
VENV=$1
EXTRAS=$2
PYTHON=${PYTHON:-python3}

. "$(dirname "$0")/apt.sh"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "distflow needs Python 3.10 or newer; $PYTHON is $("$PYTHON" -V 2>&1). Run: make PYTHON=python3.12 ..." >&2
    exit 1
}

if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
    apt_install python3-venv || { echo "python3-venv is missing. Run: sudo apt-get install python3-venv" >&2; exit 1; }
fi

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"

# constraints.txt has the versions that the tests use. pip shows its progress.
echo "Installing distflow with the extras $EXTRAS into $VENV; downloading torch may take some minutes"
"$VENV/bin/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[$EXTRAS]"

# A test compares distflow.kubeflow with the signatures of Kubeflow's SDK. That needs none of the SDK's dependencies.
case ",$EXTRAS," in *,dev,*)
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps kubeflow==0.5.0 || {
        echo "kubeflow 0.5.0 could not be installed, so tests/unit/kubeflow/test_sdk.py is skipped" >&2
    } ;;
esac
