"""Names on which the supervisor and its nodes agree: attempts, operations of the agent, and kinds of errors.

Both sides use the types of this module, so mypy finds operations that are not in the list. docs/agent-protocol.md describes the
messages.
"""

from __future__ import annotations

import re
from typing import Literal

__all__ = ["ErrorKind", "Operation", "attempt_name", "is_attempt_name", "is_uuid"]


Operation = Literal[
    "clean", "credit", "hello", "holders", "lease", "listen", "ping", "prepare", "probe", "pull", "reach", "reap", "recall",
    "release", "run", "stacks", "stage", "start", "stop", "survey", "tail", "uninstall", "untail",
]  # fmt: skip
"""The field ``op`` of a request."""

ErrorKind = Literal[
    "bad_request", "busy", "conflict", "damaged", "image_pull", "internal", "no_container", "no_mount", "no_space", "no_venv",
    "not_found", "not_prepared", "not_running", "permission", "port_taken", "timeout", "venv_failed",
]  # fmt: skip
"""The field ``kind`` of an error."""


_UUID = r"[0-9a-f]{32}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_COMPONENT = r"[A-Za-z0-9_-]+"


def attempt_name(workflow: str, group: str, task: str, attempt: int) -> str:
    """Return ``<workflow uuid>/<group>/<task>/<attempt>``."""
    return "{}/{}/{}/{}".format(workflow, group, task, attempt)


def is_attempt_name(name: object) -> bool:
    """Return whether ``name`` is the name of an attempt. It may come from an untrusted source."""
    parts = name.split("/") if isinstance(name, str) else []
    return len(parts) == 4 and is_uuid(parts[0]) and all(re.fullmatch(_COMPONENT, part) for part in parts[1:])


def is_uuid(name: object) -> bool:
    """Return whether ``name`` is the UUID of a workflow: 32 lowercase hexadecimal digits, with or without four hyphens."""
    return isinstance(name, str) and re.fullmatch(_UUID, name) is not None
