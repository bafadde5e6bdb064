"""Which commands an observation answers. Pure."""

from __future__ import annotations

from distflow.backends.base import (
    AttemptKey,
    Collected,
    CollectFailed,
    Collecting,
    Leased,
    LeaseRefused,
    LogComplete,
    Observation,
    OutputLost,
    OutputWaits,
    Staging,
    Unanswered,
)
from distflow.supervisor.carrying import DataSeen
from distflow.supervisor.checkpointing import is_checkpoint
from distflow.supervisor.world import CommandId, command_id

__all__ = ["answered"]


def answered(seen: Observation) -> tuple[CommandId, ...]:
    """Return the commands that need no answer any more: mostly all of an attempt, as it was said how things stand there."""
    if isinstance(seen, LogComplete | OutputLost | OutputWaits | Staging | Collecting):
        return ()
    if isinstance(seen, Leased | LeaseRefused):
        gang = AttemptKey(workflow=seen.workflow, group=seen.group, task="", attempt=seen.attempt, node="")
        return (command_id("lease", gang),)
    key: AttemptKey = getattr(seen, "key")  # noqa: B009
    if isinstance(seen, DataSeen):
        return () if seen.outcome is None else (command_id(seen.op, key),)
    # Of an output that is on its way, what else is said of the attempt says nothing.
    if isinstance(seen, Collected | CollectFailed | Unanswered) and (seen.op == "collect" or is_checkpoint(seen.op)):
        return (command_id(seen.op, key),)
    return tuple(command_id(op, key) for op in ("prepare", "start", "stop", "release"))
