"""Dependencies between groups: what a waiting group waits for, and what ends it before it ran. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distflow.lifecycle.states import State

__all__ = ["broken_upstream", "listed", "still_awaited", "waits_for"]


def still_awaited(upstream: Sequence[str], states: Mapping[str, State]) -> tuple[str, ...]:
    """Return the dependencies of a group that have not completed."""
    return tuple(name for name in upstream if states[name] is not State.COMPLETED)


def broken_upstream(upstream: Sequence[str], states: Mapping[str, State]) -> str | None:
    """Return the first dependency that ended without completing, so that the group can never run."""
    return next((name for name in upstream if states[name] in (State.FAILED, State.CANCELED)), None)


def waits_for(names: Sequence[str]) -> str:
    """Return text such as ``waits for crop, label and prepare``."""
    return f"waits for {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Return names as text such as ``crop, label and prepare``."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)
