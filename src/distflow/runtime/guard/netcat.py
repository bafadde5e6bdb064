"""A substitute for ``nc -z HOST PORT`` on nodes without netcat.

Specs in the style of OSMO's tutorial use ``nc`` to wait for their master. The substitute is at the very end of a task's PATH,
so that a real ``nc`` takes precedence. It supports only ``-z`` (with ``-v``, ``-n``, ``-w``). In containers, it is not in PATH.
"""

from __future__ import annotations

import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

__all__ = ["TOOLS", "add_to", "main"]

TOOLS = ".tools"
"""Name of the substitute's directory in an attempt's directory."""

_LONGEST_S = 1e9
"""Sockets do not accept much longer timeouts."""
_USAGE = "distflow's substitute for `nc` supports only `nc -z [-nv] [-w SECONDS] HOST PORT`; install netcat for other uses\n"


def main(argv: List[str]) -> int:
    """Check whether a server listens on a port. Returns 0 if so, 1 if not, and 2 for arguments that need a real ``nc``."""
    words: List[str] = []
    timeout, probes, is_verbose = "5", False, False
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and len(word) > 1 and set(word[1:]) <= set("zvnw"):
            probes = probes or "z" in word
            is_verbose = is_verbose or "v" in word
            if word.endswith("w"):
                timeout = rest.pop(0) if rest else ""
        else:
            words.append(word)
    is_supported = probes and len(words) == 2 and words[1].isdecimal() and int(words[1]) < 65536
    try:
        timeout_s = float(timeout)
    except ValueError:
        is_supported = False
    if not is_supported or not 0 <= timeout_s < _LONGEST_S:
        sys.stderr.write(_USAGE)
        return 2
    try:
        socket.create_connection((words[0], int(words[1])), timeout=timeout_s).close()
    except OSError as error:
        if is_verbose:
            sys.stderr.write("nc: {} port {}: {}\n".format(words[0], words[1], error.strerror or error))
        return 1
    if is_verbose:
        sys.stderr.write("nc: {} port {}: open\n".format(words[0], words[1]))
    return 0


def add_to(attempt_directory: str) -> str:
    """Create the substitute in a directory below ``attempt_directory``. Returns that directory, or an empty string on failure.

    That directory is added to PATH, so it contains nothing else. It is removed with the attempt.
    """
    tools = os.path.join(attempt_directory, TOOLS)
    path = os.path.join(tools, "nc")
    if os.path.exists(path):
        return tools
    text = '#!/bin/sh\nexec "{}" -I -S "{}" "$@"\n'.format(sys.executable, os.path.abspath(__file__))
    try:
        os.makedirs(tools, mode=0o700, exist_ok=True)
        draft = "{}.{}".format(path, os.getpid())
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError:
        return ""
    return tools


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
