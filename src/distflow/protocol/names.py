"""Names on which the supervisor and its nodes agree: attempts, operations of the agent, and kinds of errors.

Both sides use the types of this module, so mypy finds operations that are not in the list. docs/agent-protocol.md describes the
messages.
"""

from __future__ import annotations

from distflow.protocol.light_typing import Literal

__all__ = ["ErrorKind", "Operation", "attempt_name", "is_attempt_name", "is_uuid"]


Operation = Literal[
    "clean", "credit", "hello", "holders", "lease", "listen", "ping", "prepare", "probe", "pull", "reach", "reap", "recall",
    "release", "run", "stacks", "stage", "start", "stop", "survey", "tail", "uninstall", "untail", "watch",
]  # fmt: skip
"""The field ``op`` of a request."""

ErrorKind = Literal[
    "bad_request", "busy", "conflict", "damaged", "image_pull", "internal", "no_container", "no_mount", "no_space", "no_venv",
    "not_found", "not_prepared", "not_running", "permission", "port_taken", "timeout", "venv_failed",
]  # fmt: skip
"""The field ``kind`` of an error."""


_HEXADECIMAL = frozenset("0123456789abcdef")


def attempt_name(workflow: str, group: str, task: str, attempt: int) -> str:
    """Return ``<workflow uuid>/<group>/<task>/<attempt>``."""
    return "{}/{}/{}/{}".format(workflow, group, task, attempt)


def is_attempt_name(name: object) -> bool:
    """Return whether ``name`` has the form of ``attempt_name``. It may come from an untrusted source."""
    parts = name.split("/") if isinstance(name, str) else []
    return len(parts) == 4 and is_uuid(parts[0]) and all(_is_component(part) for part in parts[1:])


def is_uuid(name: object) -> bool:
    """Return whether ``name`` has the form of a UUID: 32 lowercase hexadecimal digits, with or without four hyphens."""
    if not isinstance(name, str):
        return False
    digits = name.replace("-", "")
    hyphenated = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    return len(digits) == 32 and _HEXADECIMAL.issuperset(digits) and name in (digits, hyphenated)


def _is_component(text: str) -> bool:
    """Return whether ``text`` consists of ASCII letters, digits, ``_`` and ``-``, and is not empty."""
    return text.isascii() and text.replace("-", "_").replace("_", "a").isalnum()
