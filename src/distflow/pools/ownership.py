"""Check the owner of a configuration file or state directory, because its owner can run commands as this user."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["owned_by_stranger", "user_name", "why_not_trusted"]


def why_not_trusted(path: Path, environ: Mapping[str, str]) -> str:
    """Return the reason why an untrusted user can change a file; empty if none can. Raises ``OSError``.

    The reason is the file's owner or its mode.

    Trusted users are this user, root, and for root also the user that called ``sudo``.

    A user's private group, which has no other members, counts as that user.
    """
    stranger, found = owned_by_stranger(path, environ), os.stat(path)
    if stranger is not None:
        return f"it belongs to {user_name(stranger)}"
    if found.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid, found.st_uid):
        return f"every user in the group {_group_name(found.st_gid)} may write to it"
    return ""


def owned_by_stranger(path: Path, environ: Mapping[str, str]) -> int | None:
    """Return the owner of a file, or of a link to it, if it is neither this user nor root; otherwise ``None``.

    As in git, root also trusts the user that called ``sudo``. Raises ``OSError``.
    """
    users = {os.geteuid(), 0}
    if os.geteuid() == 0 and environ.get("SUDO_UID", "").isdecimal():
        users.add(int(environ["SUDO_UID"]))
    return next((found.st_uid for found in (os.lstat(path), os.stat(path)) if found.st_uid not in users), None)


def user_name(uid: int) -> str:
    """Describe a user by name, or by id if the name is unknown."""
    import pwd  # noqa: PLC0415  only for an error

    try:
        return f"the user `{pwd.getpwuid(uid).pw_name}`"
    except KeyError:
        return f"the user with the id {uid}"


def _group_name(gid: int) -> str:
    import grp  # noqa: PLC0415  only for an error

    try:
        return f"`{grp.getgrgid(gid).gr_name}`"
    except KeyError:
        return f"with the id {gid}"


def _is_private_group(gid: int, uid: int) -> bool:
    """Return whether a group is the private group of a user. Debian and Fedora create such a group for every user."""
    import grp  # noqa: PLC0415  only where files are writable for their group
    import pwd  # noqa: PLC0415

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
