"""The keys of JSON documents that name a task, a group or a node (docs/ci.md). ``quantities.times`` has the keys of times."""

from __future__ import annotations

__all__ = ["name_keys"]


def name_keys(**given: str | None) -> dict[str, str | None]:
    """Return each name under two keys, such as ``task`` and ``task_name``. All JSON documents have the longer key.

    >>> name_keys(task="master", node=None)
    {'task': 'master', 'task_name': 'master', 'node': None, 'node_name': None}
    """
    return {key: value for kind, value in given.items() for key in (kind, f"{kind}_name")}
