"""How a process ended, as fields of records and as text."""

from __future__ import annotations

import os

from distflow.runtime.wire import Json

__all__ = ["as_exit", "describe_end", "describe_status"]


def as_exit(status: int) -> Json:
    """Return a wait status as ``exit_code`` and ``signal``."""
    if os.WIFSIGNALED(status):
        return {"exit_code": None, "signal": os.WTERMSIG(status)}
    return {"exit_code": os.WEXITSTATUS(status), "signal": None}


def describe_end(end: Json) -> str:
    """Describe the end of a command."""
    return "signal {}".format(end["signal"]) if end.get("signal") else "exit code {}".format(end.get("exit_code"))


def describe_status(status: int) -> str:
    """Describe a wait status."""
    if os.WIFSIGNALED(status):
        return "was killed by signal {} (out of memory, or by hand?)".format(os.WTERMSIG(status))
    return "ended with code {}; see pair.log".format(os.WEXITSTATUS(status))
