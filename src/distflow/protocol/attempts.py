"""The name of an attempt, which is also the path of its directory below a node's root and below the mirrored logs."""

from __future__ import annotations

import re

__all__ = ["attempt_name", "is_attempt_name", "is_uuid"]

_UUID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_COMPONENT = re.compile(r"[A-Za-z0-9_-]+")


def attempt_name(workflow: str, group: str, task: str, attempt: int) -> str:
    """Return ``<workflow uuid>/<group>/<task>/<attempt>``."""
    return "{}/{}/{}/{}".format(workflow, group, task, attempt)


def is_attempt_name(name: object) -> bool:
    """Return whether ``name`` is the name of an attempt. It may come from an untrusted source."""
    parts = name.split("/") if isinstance(name, str) else []
    return len(parts) == 4 and is_uuid(parts[0]) and all(_COMPONENT.fullmatch(part) for part in parts[1:])


def is_uuid(name: object) -> bool:
    """Return whether ``name`` is the UUID of a workflow: 32 lowercase hexadecimal digits, with or without four hyphens."""
    return isinstance(name, str) and _UUID.fullmatch(name) is not None
