"""Find and remove workflows, processes and files that remain on nodes.

Each function handles one node. Errors of the node are in the result, and never raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec import Struct

from distflow.backends.machines.backend import link_to
from distflow.backends.machines.connection.link import AgentLink
from distflow.errors import AgentError, DistflowError
from distflow.lifecycle.clocks import Clock
from distflow.pools.model import Node, Pool

__all__ = [
    "Cleaned",
    "CleanedVenv",
    "FoundAttempt",
    "FoundWorkflow",
    "Leftover",
    "Reaped",
    "Uninstalled",
    "UnknownWorkflows",
    "clean_node",
    "reap_node",
    "uninstall_node",
    "unknown_workflows_of_node",
]


_CLEAN_S = 3600.0
"""Timeout for listing or removing millions of files. A dead node is detected long before, because its heartbeats stop."""


class CleanedVenv(Struct, frozen=True, kw_only=True):
    """A removed Python environment."""

    file: str
    """Its requirements file; empty if the environment was incomplete."""
    size: int
    """Bytes."""
    unused_s: float
    """Seconds since its last use."""


class Cleaned(Struct, frozen=True, kw_only=True):
    """The removed workflows and Python environments of one node. In a dry run, those that would be removed."""

    node: str
    removed: tuple[str, ...] = ()
    """uuids of workflows."""
    kept: int = 0
    """Number of workflows that remain: too young, unfinished, still running, or not removed because of an error."""
    venvs: tuple[CleanedVenv, ...] = ()
    """The removed Python environments."""
    kept_venvs: int = 0
    """Number of Python environments that remain: in use, used recently, or not removed because of an error."""
    freed_bytes: int = 0
    """Bytes of the removed directories."""
    free_bytes: int | None = None
    """Free bytes on the node's disk before the removal."""
    error: str = ""
    """Which removals the node refused, and why it could not be cleaned completely; otherwise empty."""


def clean_node(
    pool: Pool,
    node: Node,
    *,
    older_than_s: float,
    unfinished: Collection[str],
    is_dry_run: bool,
    progress: Callable[[str], None] = lambda _: None,
) -> Cleaned:
    """Remove old workflows that no longer run, and old Python environments that are not in use, from a node.

    They are old if their age is at least ``older_than_s``. A workflow's age is the time since the last change of its files.
    An environment's age is the time since its last use. Both are by the clock of the node's file system. ``unfinished``
    workflows (uuids) are never removed. With ``is_dry_run``, nothing is removed. ``progress`` gets the node and the next
    workflow or environment.
    """
    survey: Mapping[str, Any] = {"workflows": ()}
    freed, removed, errors = 0, list[str](), list[str]()
    venvs: list[CleanedVenv] = []
    try:
        with link_to(pool, node) as link:
            survey = link.request("survey", timeout_s=_CLEAN_S)
            old = [
                item
                for item in survey["workflows"]
                if item["uuid"] not in unfinished and not item["alive"] and survey["now"] - item["modified_at"] >= older_than_s
            ]
            for item in old:
                uuid = item["uuid"]
                progress(f"{node.name}: {uuid}")
                try:
                    freed += item["bytes"] if is_dry_run else _clean(link, workflow=uuid)
                except AgentError as error:
                    errors.append(f"{uuid}: {error.detail}")
                else:
                    removed.append(uuid)
            for item in survey.get("venvs", ()):
                unused_s = max(0.0, survey["now"] - item["used_at"])
                if item["in_use"] or unused_s < older_than_s:
                    continue
                name = f"the Python environment of {item['file']}" if item["file"] else "an incomplete Python environment"
                progress(f"{node.name}: {name}")
                try:
                    freed += item["bytes"] if is_dry_run else _clean(link, venv=item["key"])
                except AgentError as error:
                    errors.append(f"{name}: {error.detail}")
                else:
                    venvs.append(CleanedVenv(file=item["file"], size=item["bytes"], unused_s=unused_s))
    except DistflowError as error:
        errors.append(error.detail)
    return Cleaned(
        node=node.name,
        removed=tuple(removed),
        kept=len(survey["workflows"]) - len(removed),
        venvs=tuple(venvs),
        kept_venvs=len(survey.get("venvs", ())) - len(venvs),
        freed_bytes=freed,
        free_bytes=survey.get("free_bytes"),
        error="; ".join(errors),
    )


def _clean(link: AgentLink, *, workflow: str = "", venv: str = "") -> int:
    return int(link.request("clean", timeout_s=_CLEAN_S, workflow=workflow, venv=venv)["freed_bytes"])


_REAP_S = 180.0


class Leftover(Struct, frozen=True, kw_only=True):
    """A process or a container of an ended attempt, or an allocation whose workflow is not known or has ended."""

    pid: int | None
    """``None`` for a container or an allocation."""
    name: str
    attempt: str
    """``<workflow uuid>/<group>/<task>/<n>``; of an allocation: ``<workflow uuid>/<group>/<n>``."""
    why: str
    """Why it is a leftover."""
    is_ours: bool
    """Whether it is removed, except in a dry run. Leftovers of another root, user or submitter are only reported."""
    user: str = ""
    age_s: float | None = None
    gpus: tuple[int, ...] = ()
    """GPUs on which it runs, as far as ``nvidia-smi`` reports them."""
    error: str = ""
    """Why it could not be removed; otherwise empty."""


class Reaped(Struct, frozen=True, kw_only=True):
    """The leftovers on one node, or the leftover allocations of one pool; or why they could not be found."""

    node: str
    found: tuple[Leftover, ...] = ()
    settled: tuple[str, ...] = ()
    """Attempts without runner and keeper whose end was recorded now. In a dry run: whose end would be recorded."""
    error: str = ""


def reap_node(pool: Pool, node: Node, *, is_dry_run: bool) -> Reaped:
    """Kill the leftovers on a node that are ``is_ours``, and check again. With ``is_dry_run``, only report all leftovers."""
    try:
        with link_to(pool, node) as link:
            answer = link.request("reap", dry_run=is_dry_run, timeout_s=_REAP_S)
    except DistflowError as error:
        return Reaped(node=node.name, error=error.detail)
    left = {one["pid"]: one for one in answer["left"]}
    # Leftovers that were found only after killing others are reported as well.
    processes = {one["pid"]: one for one in answer["processes"]} | left
    found = [_process(one, answer["message"] if one["pid"] in left else "") for one in processes.values()]
    return Reaped(
        node=node.name,
        found=(*found, *(_container(one) for one in answer["containers"])),
        settled=tuple(answer["settled"]),
    )


def _process(one: Mapping[str, Any], error: str) -> Leftover:
    return Leftover(
        pid=one["pid"],
        name=one["name"],
        attempt=one["attempt"],
        why=one["why"],
        is_ours=one["is_ours"],
        user=one["user"],
        age_s=one["age_s"],
        gpus=tuple(one["gpus"]),
        error=error,
    )


def _container(one: Mapping[str, Any]) -> Leftover:
    return Leftover(
        pid=None,
        name=f"{one['program']} {one['name']}",
        attempt=one["attempt"],
        why=one["why"],
        is_ours=one["is_ours"],
        error=one.get("error") or "",
    )


_LIST_TIMEOUT_S = 120.0
_LONGEST = 4096
_CONTROL = re.compile(r"[\0-\x1f\x7f]")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]+/[A-Za-z0-9_-]+/[A-Za-z0-9_-]+/(?:0|[1-9][0-9]{0,8})")


class FoundAttempt(Struct, frozen=True, kw_only=True):
    """An attempt that has a directory on a node."""

    name: str
    """``<workflow uuid>/<group>/<task>/<n>``."""
    phase: str
    """The phase of the agent protocol's ``status``."""
    pid: int | None
    started_at: float | None
    """Seconds since the epoch, by this machine's clock if the node's clock was measured."""
    directory: str


class FoundWorkflow(Struct, frozen=True, kw_only=True):
    """A workflow with files on a node."""

    uuid: str
    memo: str
    """The newest ``workflow.json``, for ``supervisor.workflow_copies.read_copy``; empty if there is none."""
    attempts: tuple[FoundAttempt, ...]


class UnknownWorkflows(Struct, frozen=True, kw_only=True):
    """The workflows on one node that the store does not have, or why the request failed."""

    pool: Pool
    node: str
    workflows: tuple[FoundWorkflow, ...] = ()
    error: str = ""


def unknown_workflows_of_node(pool: Pool, node: Node, *, known: Collection[str]) -> UnknownWorkflows:
    """Return a node's workflows whose uuids are not ``known``. Errors are in the result, and never raised."""
    try:
        with link_to(pool, node) as link:
            answer = link.request("recall", known=sorted(known), timeout_s=_LIST_TIMEOUT_S)
    except DistflowError as error:
        return UnknownWorkflows(pool=pool, node=node.name, error=error.detail)
    try:
        found = tuple(_workflow(one, link.clock) for one in answer["workflows"])
    except (KeyError, TypeError, ValueError) as error:
        return UnknownWorkflows(pool=pool, node=node.name, error=f"its answer is malformed: {error}")
    return UnknownWorkflows(pool=pool, node=node.name, workflows=found)


def _workflow(one: Mapping[str, Any], clock: Clock | None) -> FoundWorkflow:
    uuid, memo = _text(one, "uuid"), one["memo"]
    if not isinstance(memo, str):
        raise TypeError("`memo` is not a string")
    attempts = tuple(_attempt(attempt, uuid, clock) for attempt in one["attempts"])
    return FoundWorkflow(uuid=uuid, memo=memo, attempts=attempts)


def _attempt(one: Mapping[str, Any], uuid: str, clock: Clock | None) -> FoundAttempt:
    name, pid, started_at = _text(one, "attempt"), one["pid"], one["started_at"]
    if _ATTEMPT.fullmatch(name) is None or not name.startswith(f"{uuid}/"):
        raise ValueError(f"{name!r} is not an attempt of {uuid}")
    if pid is not None and (type(pid) is not int or pid < 1):
        raise ValueError(f"the process id of {name} is not a positive integer")
    if started_at is not None and type(started_at) not in (int, float):
        raise ValueError(f"the start time of {name} is not a number")
    phase, directory = _text(one, "phase"), _text(one, "directory")
    return FoundAttempt(name=name, phase=phase, pid=pid, started_at=_local_time(started_at, clock), directory=directory)


def _text(one: Mapping[str, Any], field: str) -> str:
    value = one[field]
    if not isinstance(value, str) or len(value) > _LONGEST or _CONTROL.search(value):
        raise ValueError(f"`{field}` must be a string of at most {_LONGEST} characters, without control characters")
    return value


def _local_time(at: float | None, clock: Clock | None) -> float | None:
    return at if at is None or clock is None else clock.ours(at)


_UNINSTALL_S = 600.0


class Uninstalled(Struct, frozen=True, kw_only=True):
    """The removed and the remaining paths of one node."""

    node: str
    removed: tuple[str, ...] = ()
    """Removed paths."""
    left: tuple[str, ...] = ()
    """Remaining paths, each with the cause."""
    error: str = ""
    """Why the request failed; otherwise empty."""


def uninstall_node(pool: Pool, node: Node) -> Uninstalled:
    """Remove distflow from a node. The node refuses while a task runs or a Python environment is built.

    Errors are in the result, and never raised.
    """
    try:
        with link_to(pool, node) as link:
            answer = link.request("uninstall", lease_dir=node.lease_dir, timeout_s=_UNINSTALL_S)
    except DistflowError as error:
        return Uninstalled(node=node.name, error=error.detail)
    return Uninstalled(node=node.name, removed=tuple(answer["removed"]), left=tuple(answer["left"]))
