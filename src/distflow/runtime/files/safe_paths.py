"""Checks that paths do not lead out of a directory, directly or through a link, and that mounted directories exist."""

from __future__ import annotations

import os
from typing import Iterable, Optional, Set

from distflow.runtime.wire import OpError

__all__ = ["check_mounts", "inside"]


def inside(top: str, relative: str, known: Optional[Set[str]] = None) -> str:
    """Return the path of ``relative`` below ``top``. Raises ``bad_request`` if it leads outside, directly or through a link.

    ``known`` caches directories that were found to be inside. The caller must clear it after creating a link.
    """
    if not relative or os.path.isabs(relative) or ".." in relative.split("/") or "\0" in relative:
        raise OpError("bad_request", "the path {!r} does not lie below the attempt's directory".format(relative))
    path = os.path.normpath(os.path.join(top, relative))
    if known is not None and os.path.dirname(path) in known:
        return path
    real_top = os.path.realpath(top)
    parent = os.path.realpath(os.path.dirname(path)) if path != os.path.normpath(top) else real_top
    if parent != real_top and not parent.startswith(real_top + os.sep):
        raise OpError("bad_request", "the path {!r} leads through a link out of the attempt's directory".format(relative))
    if known is not None:
        known.add(os.path.dirname(path))
    return path


def check_mounts(sources: Iterable[str]) -> None:
    """Check that the directories of ``volumeMounts`` exist on this node. Raises ``no_mount``."""
    for source in sources:
        if not os.path.exists(source):
            raise OpError("no_mount", "volumeMounts: {} is not on this node".format(source))
