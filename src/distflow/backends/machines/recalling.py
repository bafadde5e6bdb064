"""Asking nodes what lies there of workflows that nobody here knows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.bootstrap import connect
from distflow.errors import DistflowError
from distflow.lifecycle.clocks import Clock
from distflow.pools.model import Node, Pool

__all__ = ["FoundAttempt", "FoundWorkflow", "Recalled", "recall_node"]

_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundAttempt:
    """An attempt that has a directory on a node."""

    name: str
    """``<workflow uuid>/<group>/<task>/<n>``."""
    phase: str
    """As in the agent protocol's ``status``."""
    pid: int | None
    started_at: float | None
    """Our clock, where the node's was measured."""
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWorkflow:
    """A workflow of which something lies on a node."""

    uuid: str
    memo: str
    """What its submitter left there last; empty when nothing is."""
    attempts: tuple[FoundAttempt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What one node has, or why nobody could ask it."""

    pool: Pool
    node: str
    workflows: tuple[FoundWorkflow, ...] = ()
    error: str = ""


def recall_node(pool: Pool, node: Node, *, known: Collection[str]) -> Recalled:
    """Return what lies on a node of workflows whose uuids are not ``known``; an error is in the answer, not an exception."""
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
    found = tuple(
        FoundWorkflow(
            uuid=one["uuid"],
            memo=one["memo"],
            attempts=tuple(
                FoundAttempt(
                    name=attempt["attempt"],
                    phase=attempt["phase"],
                    pid=attempt["pid"],
                    started_at=_ours(attempt["started_at"], link.clock),
                    directory=attempt["directory"],
                )
                for attempt in one["attempts"]
            ),
        )
        for one in answer["workflows"]
    )
    return Recalled(pool=pool, node=node.name, workflows=found)


def _ours(at: float | None, clock: Clock | None) -> float | None:
    return at if at is None or clock is None else clock.ours(at)
