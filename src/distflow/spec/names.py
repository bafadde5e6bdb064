"""Names, leads, labels and tags: tasks and groups share one namespace, and each group has exactly one lead."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct, field

from distflow.documents.document import View
from distflow.documents.problems import Mark
from distflow.documents.text import listed

__all__ = ["MOST_LABELS", "Namespace", "check_label", "check_tag", "is_label_key", "lead_position"]


_LONGEST = 64


class Namespace(Struct):
    """The names of tasks and groups that were added so far. As in OSMO, ``Group_1`` and ``group-1`` are the same name."""

    _taken: dict[str, tuple[str, Mark, str]] = field(default_factory=dict)
    """Normalized name → the name, its place, and the origin of a name that distflow made."""

    def take(self, name: str, view: View, *, made_from: str = "") -> None:
        """Add the ``name`` of the task or group ``view``, and report a duplicate name.

        ``made_from`` describes the origin of a name that distflow made. Such a name is also reported if it is too long. The
        check against the schema reports other names that are too long.
        """
        shown = f"`{name}`" + (f" (made from {made_from})" if made_from else "")
        where = view.key_mark("name")
        if len(name) > _LONGEST:
            if made_from:
                view.add(f"the name {shown} is longer than {_LONGEST} characters", "give it a shorter name", key="name")
            return
        key = name.lower().replace("_", "-")
        if key in self._taken:
            first, place, origin = self._taken[key]
            same = "the same name" if first == name else f"`{first}`"
            rule = "" if first == name else ", and names must differ in more than case, `-` and `_`"
            used = f"distflow makes {same} from {origin} (line {place.line})" if origin else f"line {place.line} has {same}"
            hint = "rename one of them; tasks and groups share one namespace"
            view.add(f"the name {shown} is already in use: {used}{rule}", hint, key="name")
        else:
            self._taken[key] = (name, where, made_from)


def lead_position(group: View, tasks: Sequence[View]) -> int | None:
    """Return the position of the task that leads a group; ``None`` if there is no lead or more than one.

    A single task always leads. If the result is ``None``, this function or the check against the schema adds a finding.
    """
    leads = [position for position, task in enumerate(tasks) if task.flag("lead")]
    if len(tasks) == 1:
        return 0
    if len(leads) == 1:
        return leads[0]
    names = listed(task.string("name") or "?" for task in tasks)
    # The check against the schema reports a `lead` of a wrong type, which may be the missing lead.
    if not leads and tasks and not any(task.has("lead") and task.flag("lead") is None for task in tasks):
        hint = (
            f"add `lead: true` to one of {names}. Choose the task with rank 0. If the tasks have no ranks, choose the task "
            "whose end ends the group"
        )
        group.add(f"the group `{group.string('name')}` has no lead", hint, key="tasks")
    for position in leads[1:]:
        first = tasks[leads[0]]
        other = f"`{first.string('name')}` (line {first.key_mark('lead').line})"
        message = f"the group `{group.string('name')}` has {len(leads)} leads; the first is {other}"
        tasks[position].add(message, "keep `lead: true` in one task", key="lead")
    return None


# -- labels, which are set at submission, and tags, which can be changed later ----------------------------------------

MOST_LABELS = 16

_WORD = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PREFIX = r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?"
_FORMAT = "at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends"
LABEL_KEY_FORMAT = (
    f"`name` or `prefix/name`. The name has {_FORMAT}. The prefix has at most 253 lowercase letters, digits, `-` and `.`, with "
    "a letter or digit at both ends"
)


def is_label_key(key: str) -> bool:
    """Return whether ``key`` is a valid label key: ``[prefix/]name``."""
    return re.fullmatch(f"(?:{_PREFIX}/)?{_WORD}", key) is not None


def check_label(key: str, value: str) -> None:
    """Raise ``ValueError`` for an invalid label."""
    if not is_label_key(key):
        raise ValueError(f"`{key}` is not a valid label key. Write {LABEL_KEY_FORMAT}")
    if not re.fullmatch(_WORD, value):
        raise ValueError(f"`{value}` is not a valid label value: write {_FORMAT}")


def check_tag(tag: str) -> None:
    """Raise ``ValueError`` for an invalid tag."""
    if not re.fullmatch(_WORD, tag):
        raise ValueError(f"`{tag}` is not a valid tag: write {_FORMAT}")
