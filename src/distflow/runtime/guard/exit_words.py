"""How a process ended, as records have it and in words."""

from __future__ import annotations

import os

from distflow.runtime.wire import Json

__all__ = ["as_exit", "how", "tell"]


def as_exit(status: int) -> Json:
    """A wait status as ``exit_code`` and ``signal``."""
    if os.WIFSIGNALED(status):
        return {"exit_code": None, "signal": os.WTERMSIG(status)}
    return {"exit_code": os.WEXITSTATUS(status), "signal": None}


def how(end: Json) -> str:
    """The end of a command in words."""
    return "signal {}".format(end["signal"]) if end.get("signal") else "exit code {}".format(end.get("exit_code"))


def tell(status: int) -> str:
    """A wait status in words."""
    if os.WIFSIGNALED(status):
        return "was killed by signal {} (out of memory, or by hand?)".format(os.WTERMSIG(status))
    return "ended with code {}; see pair.log".format(os.WEXITSTATUS(status))
