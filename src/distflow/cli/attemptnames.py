"""Names of workflows and tasks in what nodes report. Nodes know a workflow by its uuid, people by its id."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distflow.cli import wiring
from distflow.cli.reading import reading_directory

__all__ = ["named", "workflow_ids"]

# Not within a path, which must stay as it is.
_KNOWN_BY_UUID = re.compile(
    r"(?<![\w/.-])([0-9a-f]{8}(-?)[0-9a-f]{4}(?:\2[0-9a-f]{4}){2}\2[0-9a-f]{12})(?:/[A-Za-z0-9_-]+/([A-Za-z0-9_-]+)/([0-9]+))?(?![\w/-])"
)


def workflow_ids() -> Mapping[str, str]:
    """Return the id of every workflow in this user's record, by uuid."""
    with wiring.open_store(reading_directory(), quiet=True) as store:
        return store.ids()


def named(text: str, ids: Mapping[str, str]) -> str:
    """Return a text of a node with uuids of workflows and names of attempts as people know them.

    >>> named("7278eb5c7278eb5c7278eb5c7278eb5c/g/w1/2 runs", {"7278eb5c7278eb5c7278eb5c7278eb5c": "spin-1"})
    'spin-1/w1 retry-2 runs'
    """

    def name(match: re.Match[str]) -> str:
        uuid, _, task, attempt = match.groups()
        if task is None:
            return ids.get(uuid, "an unknown workflow")
        retry = f" retry-{attempt}" if int(attempt) else ""
        return f"{ids[uuid]}/{task}{retry}" if uuid in ids else f"{task}{retry} of an unknown workflow"

    return _KNOWN_BY_UUID.sub(name, text)
