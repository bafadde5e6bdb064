"""Copy a workflow's record to its nodes, and rebuild the workflow from a copy if its store is lost.

A copy shows the workflow as it was when an attempt was prepared. Rebuilding brings it into a state from which the supervisor
can ask the nodes for everything that happened later, as it does after every restart. Rebuilding never starts anything, because
the first supervisor may still be running elsewhere: groups that had not begun are ended, and failed groups are not retried.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from distflow.documents.text import plain
from distflow.documents.urls import parse_url
from distflow.errors import InputError, StateError
from distflow.lifecycle.states import Reason, State
from distflow.plan.model import Binding, GroupPlan, Plan
from distflow.protocol.names import attempt_name, is_uuid
from distflow.runtime.untrusted import decode_object
from distflow.state.codec import DecodeError, decode, encode
from distflow.state.directory import state_errors
from distflow.state.record import GroupRecord, TaskRecord, WorkflowRecord
from distflow.state.secrets import is_own_record, record_mac
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.commands import Prepare
from distflow.supervisor.observations import end_unstarted
from distflow.supervisor.snapshot import StoredWorkflow

__all__ = [
    "MAX_COPIES",
    "AdoptedAttempt",
    "Rebuilt",
    "WorkflowCopy",
    "encode_copy",
    "is_starting",
    "latest",
    "output_urls",
    "read_copy",
    "rebuild",
]


MAX_COPIES = 8
"""The maximum number of tasks of a gang that get a copy. Each copy names all tasks, so copies for all would be too large."""

_LONGEST: Final = 64 << 20
_SHOWN: Final = 80
"""Characters of an invalid name that an error shows."""
_SIGNED: Final = re.compile(r',"mac":"([0-9a-f]{64})"\}\Z')
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|")


class WorkflowCopy(Struct, frozen=True, kw_only=True):
    """A workflow when one of its attempts was prepared, without the values of ``--set-env`` and of credentials."""

    record: WorkflowRecord
    plan: Plan
    template: str
    spec: str
    host: str
    """The submitter's host name."""


def encode_copy(workflow: StoredWorkflow, command: Prepare, store: Store, host: str, secrets: Path) -> str:
    """Return the copy to send with a task's ``prepare``; empty for tasks after the first ``MAX_COPIES`` of a gang.

    It is signed with the key in the directory ``secrets``. Raises ``StateError`` if that key cannot be used.
    """
    record = workflow.record
    if command.key.task not in [task.name for task in record.group(command.key.group).tasks[:MAX_COPIES]]:
        return ""
    template, spec = store.document(record.uuid, "template"), store.document(record.uuid, "spec")
    text = encode(WorkflowCopy(record=record, plan=workflow.plan, template=template, spec=spec, host=host)).decode()
    with state_errors(secrets):
        return f'{text[:-1]},"mac":"{record_mac(secrets, text)}"}}'


def read_copy(text: str, secrets: Path, node: str) -> tuple[WorkflowCopy, bool]:
    """Return the copy in a text of ``encode_copy``, and whether the key in ``secrets`` signed it.

    ``node`` is the name of the node with the copy, for messages. All names that become paths on this machine are checked, even
    in a signed record. Raises ``StateError`` if the copy is not valid, for example because a newer version of distflow wrote it
    in a format that this version cannot read, or if the key cannot be used.
    """
    signed = _SIGNED.search(text)
    body = f"{text[: signed.start()]}}}" if signed else text
    try:
        decode_object(body, max_bytes=_LONGEST)
        copy = decode(body.encode(), WorkflowCopy)
        _check(copy.record, copy.plan)
        with state_errors(secrets):
            return copy, signed is not None and is_own_record(secrets, body, signed.group(1))
    except (DecodeError, ValueError, RecursionError) as error:
        raise StateError(
            f"the copy of the workflow's record on {node} (workflow.json) is not valid ({error}): run `distflow workflow "
            "adopt` with a `--pool` or `--hostfile` that contains the workflow's other nodes, or update distflow if a newer "
            "version wrote the copy"
        ) from error


def output_urls(copy: WorkflowCopy) -> tuple[list[str], list[str]]:
    """Return the URLs of a workflow's outputs and of its checkpoints that are not shared, in two lists.

    The first list has ``file://`` and ``sftp://`` URLs, which are written with this user's permissions and SSH keys, and URLs
    that cannot be parsed. The second list has all others.
    """
    with_user_rights: set[str] = set()
    others: set[str] = set()
    for group in copy.plan.groups:
        for launch in (launch for size in group.sizes for launch in size.launches):
            for url in (
                *(one.url for one in launch.url_outputs),
                *(one.url for one in launch.checkpoints if not one.is_shared),
            ):
                try:
                    goal = parse_url(url.replace("{{workflow_id}}", copy.record.id), writes=True)
                except InputError:
                    with_user_rights.add(url)
                    continue
                (with_user_rights if goal.scheme in ("file", "sftp") else others).add(str(goal))
    return sorted(with_user_rights), sorted(others)


def _check(record: WorkflowRecord, plan: Plan) -> None:
    """Refuse names and ids that would lead outside of distflow's directories, or that contradict one another.

    Raises ``ValueError``.
    """
    tasks = [(group, task) for group in record.groups for task in group.attempts]
    launches = [launch for group in plan.groups for size in group.sizes for launch in size.launches]
    names = [record.name, plan.name, *(group.name for group in plan.groups), *(launch.task for launch in launches)]
    names += [name for group, task in tasks for name in (group.name, task.name)]
    _match(_NAME, "name of a workflow, group or task", names)
    for uuid in (record.uuid, *(group.kept.uuid for group in record.groups if group.kept is not None)):
        if not is_uuid(uuid):
            raise ValueError(f"`{plain(uuid[:_SHOWN])}` is not a uuid")
    digests = [one.digest for group in record.groups for one in group.transfer_results]
    digests += [one.digest for group in record.groups for one in group.checkpoints]
    digests += [task.saved.digest for _, task in tasks if task.saved is not None]
    digests += [file.blob or "" for launch in launches for file in launch.files]
    _match(_DIGEST, "SHA-256 digest", digests)
    if record.number < 1:
        raise ValueError(f"the workflow's number is {record.number}, but numbers start at 1")
    if record.id != f"{record.name}-{record.number}":
        raise ValueError(
            f"the workflow's id is `{plain(record.id[:_SHOWN])}`, but its name is `{record.name}` and its number is "
            f"{record.number}"
        )
    if negative := [task.name for _, task in tasks if task.attempt < 0]:
        raise ValueError(f"the task {negative[0]} has an attempt with a negative number")
    if sorted(group.name for group in record.groups) != sorted({group.name for group in plan.groups}):
        raise ValueError("its record and its plan have different groups")
    for group in record.groups:
        planned = {launch.task for launch in plan.group(group.name).launches}
        unplanned = {task.name for task in group.attempts} - planned
        if not group.tasks or unplanned:
            what = f"tasks that the plan does not have: {', '.join(sorted(unplanned))}" if unplanned else "no tasks"
            raise ValueError(f"the record of the group {group.name} has {what}")


def _match(pattern: re.Pattern[str], kind: str, values: Iterable[str]) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise ValueError(f"`{plain(value[:_SHOWN])}` is not a valid {kind}")


_BEGUN = (State.INITIALIZING, State.RUNNING, State.STOPPING)
_UNSTARTED = "had not been started when the workflow was adopted"


class AdoptedAttempt(Struct, frozen=True, kw_only=True):
    """An attempt that was found on a node."""

    node: str
    """The name of the node in the adopting pool."""
    phase: str
    """The phase in the agent protocol's ``status``."""
    pid: int | None = None
    started_at: float | None = None
    directory: str = ""


class Rebuilt(Struct, frozen=True, kw_only=True):
    """A rebuilt workflow, ready to be stored."""

    record: WorkflowRecord
    plan: Plan
    notes: tuple[str, ...]
    """Messages about parts that could not be recovered, and about differences from the original workflow."""


def latest(copies: Iterable[WorkflowCopy]) -> WorkflowCopy:
    """Return the copy that shows the most progress. The nodes' clocks are not compared."""

    def progress(copy: WorkflowCopy) -> tuple[int, int, int, int]:
        groups = copy.record.groups
        return (
            sum(group.attempt for group in groups),
            sum(group.state.is_final for group in groups),
            sum(group.state in _BEGUN for group in groups),
            sum(task.state.is_final or task.prepared for group in groups for task in group.tasks),
        )

    return max(copies, key=progress)


def is_starting(record: WorkflowRecord, attempts: Mapping[str, AdoptedAttempt]) -> bool:
    """Return whether a gang of the workflow is starting, or its start was abandoned a moment ago. Both states are temporary."""
    names = {
        attempt_name(record.uuid, group.name, task.name, task.attempt)
        for group in record.groups
        for task in group.tasks
        if group.state in _BEGUN
    }
    return any(name in names and attempt.phase in ("leased", "prepared") for name, attempt in attempts.items())


def rebuild(copy: WorkflowCopy, attempts: Mapping[str, AdoptedAttempt], *, nodes: Collection[str], now: float) -> Rebuilt:
    """Return the workflow in a state with which a supervisor can continue.

    ``attempts`` are the attempts that were found on nodes, by name. ``nodes`` are the names of the nodes of the pool.
    """
    record = copy.record
    notes: list[str] = []
    groups: list[GroupRecord] = []
    for group in record.groups:
        adopted = _adopted_group(record, group, attempts, nodes, now)
        groups.append(adopted)
        if not group.state.is_final and not _has_begun(group):
            notes.append(f"{group.name} {_UNSTARTED}: `distflow workflow restart` runs it")
        was_over = {task.name for task in group.tasks if task.state.is_final}
        if _has_begun(group):
            gone = [one for one in adopted.tasks if one.reason is Reason.NODE_LOST and one.name not in was_over]
            notes += [f"{task.name}: {task.message}" for task in gone]
    secret = sorted({name for group in copy.plan.groups for launch in group.launches for name in launch.secret_names})
    if secret:
        notes.append(f"the values of --set-env are gone ({', '.join(secret)}): a restart needs them again")
    if any(launch.exit_actions.reschedule for group in copy.plan.groups for launch in group.launches):
        notes.append("this machine does not retry a group that fails, because the submitter may still run the workflow")
    plan = replace(copy.plan, groups=tuple(_without_retries(one) for one in copy.plan.groups))
    return Rebuilt(record=replace(record, groups=tuple(groups)), plan=plan, notes=tuple(notes))


def _without_retries(plan: GroupPlan) -> GroupPlan:
    smaller = tuple(_without_retries(one) for one in plan.smaller)
    return replace(plan, retry=replace(plan.retry, limit=0), smaller=smaller)


def _adopted_group(
    record: WorkflowRecord, group: GroupRecord, attempts: Mapping[str, AdoptedAttempt], nodes: Collection[str], now: float
) -> GroupRecord:
    def attempt_of(task: TaskRecord) -> AdoptedAttempt | None:
        return attempts.get(attempt_name(record.uuid, group.name, task.name, task.attempt))

    def ended_task(task: TaskRecord) -> TaskRecord:
        """Return an attempt that had ended. Its output is mirrored again if a node still has it."""
        attempt = attempt_of(task)
        return replace(task, log_complete=True) if attempt is None else replace(task, node=attempt.node, log_complete=False)

    earlier = tuple(ended_task(task) for task in group.earlier)
    if group.state.is_final:
        return replace(group, earlier=earlier, tasks=tuple(ended_task(task) for task in group.tasks))
    if not _has_begun(group):
        ended = end_unstarted(group, State.FAILED, Reason.UPSTREAM, f"it {_UNSTARTED}", now)
        return replace(ended, earlier=earlier, withdrawing=False)

    def begun_task(task: TaskRecord) -> TaskRecord:
        if task.state.is_final:
            return ended_task(task)
        attempt = attempt_of(task)
        state = State.STOPPING if group.state is State.STOPPING else State.RUNNING
        if attempt is None and task.node not in nodes:
            return replace(
                task, state=State.FAILED, reason=Reason.NODE_LOST, message=_no_node(task), ended_at=now, log_complete=True
            )
        if attempt is None:
            return replace(task, state=state, prepared=True, transfer=None, log_complete=False)
        return replace(
            task, state=state, reason=None, node=attempt.node, prepared=True, transfer=None, pid=attempt.pid,
            started_at=attempt.started_at, output_dir=f"{attempt.directory}/output", outage=None, log_complete=False,
        )  # fmt: skip

    tasks = tuple(begun_task(task) for task in group.tasks)
    times = [task.started_at for task in tasks if task.started_at is not None]
    return replace(
        group,
        state=State.STOPPING if group.state is State.STOPPING else State.RUNNING,
        message="",
        tasks=tasks,
        earlier=earlier,
        binding=_renamed(group.binding, tasks),
        running_at=group.running_at or min(times, default=now),
    )


def _has_begun(group: GroupRecord) -> bool:
    """Return whether processes of the group's attempt may exist."""
    return group.state in _BEGUN and not group.withdrawing


def _no_node(task: TaskRecord) -> str:
    return f"it ran on {task.node}, which is not a node of the pool that it was adopted into"


def _renamed(binding: Binding | None, tasks: Iterable[TaskRecord]) -> Binding | None:
    """Return the binding with the node names of the adopting pool."""
    if binding is None:
        return None
    names = {task.name: task.node for task in tasks}
    return replace(binding, tasks={name: replace(one, node=names.get(name) or one.node) for name, one in binding.tasks.items()})
