"""Messages and remedies for a runtime that does not start on a node. Pure.

They come from two sources: the report of the stub (``bootstrap.STUB``) about an exception on the node, and the exit code of a
login that ended before the stub could report anything.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

__all__ = ["after_exit", "after_report"]

_OTHER_PYTHON = "`python:` of the node, or of its pool, names the interpreter there"
_OTHER_ROOT = "name another directory with `root:` of the node or its pool"
_OWN_ROOT = "name a directory of your own with `root:` of the node or its pool"
_REFUSED = {
    "owner": (
        "{at} belongs to {owner} (mode {mode}), who could replace what {user} runs there",
        f"{_OWN_ROOT}, or let {{owner}} or root give it away (`chown -R {{user}} {{at}}`)",
    ),
    "writable": (
        "{at} may be written to by other users (mode {mode}), who could replace what {user} runs there",
        f"`chmod go-w {{at}}` there, or {_OWN_ROOT}",
    ),
    "unmarked": (
        "{at} holds files that distflow did not put there, and distflow removes what lies in this directory",
        f"move them away, or {_OTHER_ROOT}",
    ),
}
"""Message and remedy for each reason for which the stub refuses a directory."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM)
_IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def after_report(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return message and remedy for an exception that the stub reported. The remedy may be empty.

    ``report``: ``text`` (the exception), ``errno``, ``path`` (its path), ``at`` (the nearest existing path above that),
    ``owner`` and ``mode`` (octal) of ``at``, ``refused`` (why the stub did not use it), ``user``, ``root``, ``home``,
    ``has_home``, ``python``, ``version``. Any of them may be missing.
    """

    def said(name: str) -> str:
        return str(report.get(name) or "")

    root, at, owner, user = said("root"), said("at"), said("owner"), said("user")
    if _is_too_old(said("version")):
        return f"Python 3.8 or newer is needed; {said('python') or 'python'} is {said('version')}", _OTHER_PYTHON
    if said("refused") in _REFUSED:
        what, remedy = _REFUSED[said("refused")]
        fields = {"at": at, "owner": owner, "mode": said("mode"), "user": user}
        return what.format(**fields), remedy.format(**fields)
    number = report.get("errno")
    if number in _FULL:
        quota = "the quota there is used up" if number == errno.EDQUOT else "its disk is full"
        return f"distflow's runtime has no room in {root}: {quota}", f"free some (`df -h {at or root}`), or {_OTHER_ROOT}"
    if number == errno.EROFS:
        return f"distflow's directory {root} is on a read-only file system", _OTHER_ROOT
    if number in _DENIED and said("home") and not report.get("has_home", True) and root.startswith(said("home")):
        return f"{user} has no home directory there: {said('home')} does not exist", f"make it, or {_OTHER_ROOT}"
    if number in _DENIED:
        what = f"distflow's directory {root} cannot be used by {user or 'us'}: {at or said('path')}"
        if owner and owner != user:
            remedy = f"let {owner} or root give it away (`chown -R {user} {at}`)" if at.startswith(root) else ""
            return f"{what} belongs to {owner} (mode {said('mode')})", " or ".join(filter(None, [_OTHER_ROOT, remedy]))
        return f"{what} may not be written to (mode {said('mode')})", f"`chmod u+rwx {at}` there, or {_OTHER_ROOT}"
    if number == errno.ENOENT:
        return f"distflow's directory {root} cannot be made on this node: {said('text')}", _OTHER_ROOT
    if number in _IN_THE_WAY:
        return f"{said('path') or root} is in the way: distflow needs a directory there", f"remove it, or {_OTHER_ROOT}"
    if said("text").startswith(("ImportError", "ModuleNotFoundError", "zipimport")):
        lacking = f"{said('python') or 'its python'} lacks a part of the standard library: {said('text')}"
        return lacking, f"install all of it, or another one; {_OTHER_PYTHON}"
    return f"distflow's runtime does not come up: {said('text')}", ""


def after_exit(exit_code: int | None, python: str, printed: str) -> tuple[str, str]:
    """Return message and remedy for a login that ended with ``exit_code`` and the output ``printed``."""
    if exit_code == 127:
        return f"`{python}` is not on this node, or not in the PATH of a login without a terminal", _OTHER_PYTHON
    if exit_code == 126:
        return f"`{python}` cannot be executed on this node", _OTHER_PYTHON
    if "Unknown option: -I" in printed:
        return f"Python 3.8 or newer is needed; `{python}` is older than 3.4", _OTHER_PYTHON
    ended = "the login ended" if exit_code is None else f"the login ended with exit code {exit_code}"
    shell = "is the login's shell one that runs no commands (nologin, false), or does a start-up file or a ForceCommand exit?"
    return f"{ended} before `{python}` answered", f"is `{python}` a Python interpreter? If so, {shell}"


def _is_too_old(version: str) -> bool:
    numbers = version.split(".")[:2]
    return len(numbers) == 2 and all(part.isdecimal() for part in numbers) and (int(numbers[0]), int(numbers[1])) < (3, 8)
