"""A pipe for each rank of a task, to distinguish the output of ranks.

The pipes are FIFOs, ``ranks/<rank>`` in the attempt's directory, and the keeper reads them. A rank writes to its own pipe
instead of the task's output. Ranks that distflow's launcher starts do so by themselves (``distflow.train.launcher.rank``).
For torchrun, and launchers that use it, a small shell script does it: torchrun starts that script as its Python, because
``PYTHON_EXEC`` names it. Output that is already redirected, as by torchrun's ``--tee``, stays as it is.
"""

from __future__ import annotations

import os
from typing import Dict, Optional, Sequence

__all__ = ["FOLDER", "PYTHON", "environment", "make", "reopen"]

FOLDER = "ranks"
PYTHON = "rank-python"
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_SCRIPT = r"""#!/bin/sh
# torchrun starts this in place of Python: it gives the rank an output of its own, and becomes the Python that runs torchrun.
python=$(tr '\0' '\n' < "/proc/$PPID/cmdline" | head -n 1)
case ${python##*/} in
    python*|pypy*) ;;
    *) python=$(readlink "/proc/$PPID/exe") ;;
esac
case ${python##*/} in
    python*|pypy*) python=$(command -v "$python") ;;
    *) python= ;;
esac
[ -n "$python" ] || python=$(command -v python3) || python=python3
pipe=$DISTFLOW_ATTEMPT_DIR/ranks/$RANK
if [ -n "$RANK" ] && [ -p "$pipe" ]; then
    out=$(readlink "/proc/$$/fd/1")
    err=$(readlink "/proc/$$/fd/2")
    if [ "$out" = "$DISTFLOW_OUTPUT_PIPE" ]; then exec > "$pipe"; fi
    if [ "$err" = "$DISTFLOW_OUTPUT_PIPE" ]; then exec 2> "$pipe"; fi
fi
unset PYTHON_EXEC
exec "$python" "$@"
"""


def make(directory: str, ranks: Optional[Sequence[int]]) -> Dict[int, int]:
    """Create and open the pipes of the ranks ``[first, count]``; none where the file system has no FIFOs."""
    first, count = ranks or (0, 0)
    folder, pipes = os.path.join(directory, FOLDER), {}  # type: str, Dict[int, int]
    try:
        if count:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        for rank in range(first, first + count):
            path = os.path.join(folder, str(rank))
            os.mkfifo(path, 0o600)
            # Opened for writing too, so that the pipe has no end of file before its rank starts or restarts.
            pipes[rank] = os.open(path, os.O_RDWR | _FLAGS)
        if count:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(os.path.join(directory, PYTHON), flags, 0o700)
            with os.fdopen(fd, "w") as file:
                file.write(_SCRIPT)
    except OSError:
        return pipes  # ranks without a pipe write to the task's output, as before
    return pipes


def reopen(directory: str) -> Dict[int, int]:
    """Open the existing pipes, to read output that the keeper did not read."""
    folder, pipes = os.path.join(directory, FOLDER), {}  # type: str, Dict[int, int]
    try:
        for name in os.listdir(folder):
            if name.isdigit():
                pipes[int(name)] = os.open(os.path.join(folder, name), os.O_RDONLY | _FLAGS)
    except OSError:
        return pipes
    return pipes


def environment(directory: str, output: int, given: Dict[str, str]) -> Dict[str, str]:
    """Return the variables that lead ranks to their pipes, for a command that writes to the pipe ``output``."""
    script = os.path.join(directory, PYTHON)
    if not os.path.isdir(os.path.join(directory, FOLDER)):
        return {}
    variables = {"DISTFLOW_OUTPUT_PIPE": "pipe:[{}]".format(os.fstat(output).st_ino)}
    if "PYTHON_EXEC" not in given and os.access(script, os.X_OK):  # false where the root is mounted `noexec`
        variables["PYTHON_EXEC"] = script
    return variables
