"""One line for the login shell of a node that runs exactly an argv, whatever shell that is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from distflow.shell import quote

__all__ = ["remote_command"]

# What stands for itself between double quotes in sh and, at the same time, between single quotes in bash, zsh, fish and csh.
_SPECIAL = re.compile(rb"[^A-Za-z0-9 _%+=:,./@<>()\[\]{}*?#&;|~^-]")


def remote_command(argv: Sequence[str], mark: str = "") -> str:
    """Return the line; with a ``mark``, that and the command's process id are written to standard error first.

    sshd hands it to the login shell. Quotes, backslashes, newlines and ``!`` mean other things in fish and csh, so they travel
    as octal numbers inside one pair of single quotes, and a POSIX shell, which takes the login shell's place, spells them out.
    """
    first = f'printf "{mark} %d\\n" $$ >&2; ' if mark else ""
    words = f"{first}exec {quote(argv)}".encode("utf-8", "surrogateescape")
    octal = _SPECIAL.sub(lambda found: b"\\0%03o" % found[0][0], words).decode("ascii")
    # A % means something to printf only in its format.
    return f"""exec /bin/sh -c 'eval "$(printf %b "{octal}")"'"""
