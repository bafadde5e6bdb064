"""Queries for workflows on nodes that this state directory does not know."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.connection.bootstrap import connect
from distflow.errors import DistflowError
from distflow.lifecycle.clocks import Clock
from distflow.pools.model import Node, Pool

__all__ = ["FoundAttempt", "FoundWorkflow", "Recalled", "recall_node"]

_LIMIT_S = 120.0
_LONGEST = 4096
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+/(?:0|[1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAttempt:
    """An attempt that has a directory on a node."""

    name: str
    """``<workflow uuid>/<group>/<task>/<n>``."""
    phase: str
    """The phase of the agent protocol's ``status``."""
    pid: int | None
    started_at: float | None
    """Time of our clock if the node's clock was measured."""
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWorkflow:
    """A workflow with files on a node."""

    uuid: str
    memo: str
    """The submitter's latest note; empty if there is none."""
    attempts: tuple[FoundAttempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """The workflows on one node, or why it could not be asked."""

    pool: Pool
    node: str
    workflows: tuple[FoundWorkflow, ...] = ()
    error: str = ""


def recall_node(pool: Pool, node: Node, *, known: Collection[str]) -> Recalled:
    """Return a node's workflows whose uuids are not ``known``. Errors are in the result, and never raised."""
    transport = transport_of(pool, node)
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s)
    except DistflowError as error:
        return Recalled(pool=pool, node=node.name, error=error.message)
    try:
        answer = link.request("recall", known=sorted(known), timeout_s=_LIMIT_S)
    except DistflowError as error:
        return Recalled(pool=pool, node=node.name, error=error.message)
    finally:
        link.close()
        transport.close()
    try:
        found = tuple(_workflow(one, link.clock) for one in answer["workflows"])
    except (KeyError, TypeError, ValueError) as error:
        return Recalled(pool=pool, node=node.name, error=f"its answer cannot be understood: {error}")
    return Recalled(pool=pool, node=node.name, workflows=found)


def _workflow(one: Mapping[str, Any], clock: Clock | None) -> FoundWorkflow:
    uuid, memo = _text(one["uuid"]), one["memo"]
    if not isinstance(memo, str):
        raise TypeError("`memo` is not a text")
    attempts = tuple(_attempt(attempt, uuid, clock) for attempt in one["attempts"])
    return FoundWorkflow(uuid=uuid, memo=memo, attempts=attempts)


def _attempt(one: Mapping[str, Any], uuid: str, clock: Clock | None) -> FoundAttempt:
    name, pid, started_at = _text(one["attempt"]), one["pid"], one["started_at"]
    if _ATTEMPT.fullmatch(name) is None or not name.startswith(f"{uuid}/"):
        raise ValueError(f"{name!r} is not an attempt of {uuid}")
    if pid is not None and (type(pid) is not int or pid < 1):
        raise ValueError(f"the process id of {name} is not a number")
    if started_at is not None and type(started_at) not in (int, float):
        raise ValueError(f"the start of {name} is not a time")
    phase, directory = _text(one["phase"]), _text(one["directory"])
    return FoundAttempt(name=name, phase=phase, pid=pid, started_at=_ours(started_at, clock), directory=directory)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST or _CONTROL.search(value):
        raise ValueError("a name is too long, or holds characters that cannot be shown")
    return value


def _ours(at: float | None, clock: Clock | None) -> float | None:
    return at if at is None or clock is None else clock.ours(at)
