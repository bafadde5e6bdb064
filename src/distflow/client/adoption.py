"""Adopt workflows that are on nodes but not in the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from distflow.backends.machines.cleanup import UnknownWorkflows
from distflow.client.client import Client
from distflow.client.nodes import choose_nodes, unknown_workflows_of_nodes
from distflow.client.notifications.targets import own_targets
from distflow.client.submission import pool_key
from distflow.documents.notify import NotifyTarget
from distflow.documents.text import few
from distflow.errors import StateError
from distflow.pools.hostfile import Host
from distflow.pools.model import Pool
from distflow.state import opening
from distflow.state.directory import StateDirectory, find_state_directory
from distflow.state.event_details import Message, WorkflowAdopted
from distflow.state.record import EventRecord, WorkflowRecord
from distflow.state.store import Store
from distflow.structs import replace
from distflow.supervisor.process import SupervisorLock, is_running
from distflow.supervisor.workflow_copies import (
    MAX_COPIES,
    AdoptedAttempt,
    Rebuilt,
    WorkflowCopy,
    is_starting,
    latest,
    output_urls,
    read_copy,
    rebuild,
)

__all__ = ["AdoptableWorkflow", "AdoptedWorkflow", "Adoption", "adopt"]

_NO_RECORD = (
    f"no node that answered has a copy of the workflow's record. Only the nodes of the first {MAX_COPIES} tasks of each group "
    "keep one: search these nodes too. If they have none, the submission was incomplete, or an old version of distflow "
    "submitted the workflow"
)


class AdoptableWorkflow(Struct, frozen=True, kw_only=True):
    """A workflow that was found on the nodes of a pool, with a readable copy of its record."""

    uuid: str
    pool: Pool
    copy: WorkflowCopy
    is_own: bool
    """Whether the key of this state directory signed its record."""
    attempts: dict[str, AdoptedAttempt]
    """The attempts that were found, by name."""


class AdoptedWorkflow(Struct, frozen=True, kw_only=True):
    """The result for one workflow that was found on nodes."""

    uuid: str
    name: str
    """The id in this store. If the workflow was not adopted: its previous id, or its uuid."""
    notes: tuple[str, ...] = ()
    skipped: str = ""
    """The reason why it was not adopted, or empty."""


class Adoption(Struct, frozen=True, kw_only=True):
    """The result of a search for workflows on nodes."""

    workflows: tuple[AdoptedWorkflow, ...]
    nodes: tuple[UnknownWorkflows, ...]
    """The answers of the nodes, including errors."""
    kept_aside: Path | None
    """The new path of a damaged store (in a dry run, its current path), or ``None`` if the store is not damaged."""


def adopt(
    client: Client,
    pool: str | None = None,
    *,
    hosts: Sequence[Host] | None = None,
    trust_records: bool = False,
    is_dry_run: bool = False,
) -> Adoption:
    """Find workflows that only nodes have, and add them to the store. Another machine submitted them, or the store was lost.

    The supervisor then watches these workflows, and they can be canceled. It does not start any of their tasks. A damaged store
    is renamed first.

    Args:
        client: The client whose store gets the workflows.
        pool: The pool whose nodes are searched. Default: all pools.
        hosts: Machines to search instead of the configured nodes.
        trust_records: Whether to also adopt records that are refused by default: those that are not signed with the key of this
            state directory, if their outputs or checkpoints go to local files, over SFTP, or to a URL that is not valid.
        is_dry_run: Whether to only report, without any change.

    Returns:
        The result for each workflow and the answer of each node. Errors of nodes are part of it and are not raised.

    Raises:
        InputError: if the pool cannot use ``hosts``.
        NotFound: if the pool does not exist.
        ProblemsFound: if the configuration is wrong.
        StateError: if the store cannot be used, or if a supervisor is running on a damaged or deleted store.
        SupervisorError: if the supervisor does not start.

    """
    choose_nodes(client, pool, hosts=hosts)  # raises errors of `pool` and `hosts` before anything is changed
    directory = find_state_directory(client.environ) if is_dry_run else client.writable_directory()
    aside = _set_aside(directory, is_dry_run)
    known = frozenset() if aside is not None or not directory.store.exists() else client.store.uuids()
    answers = unknown_workflows_of_nodes(client, pool, hosts=hosts, known=known)
    found, skipped = _gather(answers, directory.secrets)
    trusted, refused = _trusted(found, trust=trust_records)
    results = (*skipped, *refused, *_adopt(client, trusted, is_dry_run))
    return Adoption(workflows=results, nodes=tuple(answers), kept_aside=aside)


def _set_aside(directory: StateDirectory, dry_run: bool) -> Path | None:
    """Rename a damaged store and return its new path (in a dry run, its current path); ``None`` if it is not damaged."""
    is_gone = not directory.store.exists()
    try:
        if is_gone and is_running(directory):
            raise _still_in_use(directory, "gone")
        if is_gone or not opening.is_broken(directory.store):
            return None
        if dry_run:
            return directory.store
        lock = SupervisorLock(directory)
        if not lock.take():
            raise _still_in_use(directory, "damaged")
        try:
            return opening.set_aside(directory.store, time.strftime("%Y-%m-%d"))
        finally:
            lock.release()
    except OSError as error:
        raise opening.state_error(directory.store, error) from error


def _still_in_use(directory: StateDirectory, how: str) -> StateError:
    return StateError(
        f"{directory.store} is {how}, but a supervisor is still using it",
        hint=f"stop the supervisor first (its process id is in {directory.lock}); tasks on the nodes continue to run",
    )


def _trusted(found: list[AdoptableWorkflow], *, trust: bool) -> tuple[list[AdoptableWorkflow], list[AdoptedWorkflow]]:
    """Separate the workflows to adopt from those that are refused.

    A node could have forged a record that the key of this state directory did not sign. Without ``trust``, such a record is
    refused if outputs or checkpoints would be written with this user's permissions or SSH keys (``output_urls``).
    """
    trusted, refused = [], []
    for one in found:
        here, _ = output_urls(one.copy)
        if one.is_own or trust or not here:
            trusted.append(one)
            continue
        why = (
            f"its record is not signed with the key of this state directory, and its outputs would go to {few(here)}; "
            "if you know this workflow, adopt it with --trust-records"
        )
        refused.append(AdoptedWorkflow(uuid=one.uuid, name=one.copy.record.id, skipped=why))
    return trusted, refused


def _foreign_record_note(one: AdoptableWorkflow, adopted_id: str | None) -> tuple[str, ...]:
    """Return a note if the key of this state directory did not sign the record of a workflow.

    ``adopted_id`` is its id after the adoption; ``None`` in a dry run.
    """
    if one.is_own:
        return ()
    here, stores = output_urls(one.copy)
    outputs = f"; its outputs go to {few([*here, *stores])}" if here or stores else ""
    command = f" (`distflow workflow spec {adopted_id}`)" if adopted_id is not None else ""
    remedy = f"read its spec{command} before you restart it"
    return (f"its record is not signed with the key of this state directory{outputs}; {remedy}",)


def _gather(answers: Iterable[UnknownWorkflows], secrets: Path) -> tuple[list[AdoptableWorkflow], list[AdoptedWorkflow]]:
    """Combine the answers of nodes. Return the workflows that can be adopted, and those without a readable copy."""
    copies: dict[str, list[tuple[Pool, WorkflowCopy, bool]]] = {}
    attempts: dict[tuple[str, str], dict[str, list[AdoptedAttempt]]] = {}
    unread: dict[str, str] = {}
    for answer in answers:
        for workflow in answer.workflows:
            for one in workflow.attempts:
                attempt = AdoptedAttempt(
                    node=answer.node, phase=one.phase, pid=one.pid, started_at=one.started_at, directory=one.directory
                )
                attempts.setdefault((answer.pool.name, workflow.uuid), {}).setdefault(one.name, []).append(attempt)
            try:
                copy, is_own = read_copy(workflow.memo, secrets, answer.node) if workflow.memo else (None, False)
                if copy is not None and copy.record.uuid == workflow.uuid:
                    copies.setdefault(workflow.uuid, []).append((answer.pool, copy, is_own))
                elif workflow.attempts:
                    unread.setdefault(workflow.uuid, _NO_RECORD)
            except StateError as error:
                unread[workflow.uuid] = error.message
    found = []
    for uuid, candidates in copies.items():
        # If a node has a record that the key of this state directory signed, ignore records that it did not sign.
        is_own = any(own for _, _, own in candidates)
        accepted = [(pool, copy) for pool, copy, own in candidates if own or not is_own]
        copy, pool = latest(one for _, one in accepted), accepted[0][0]
        reported = {name: _report_of(copy, name, reports) for name, reports in attempts.get((pool.name, uuid), {}).items()}
        found.append(AdoptableWorkflow(uuid=uuid, pool=pool, copy=copy, is_own=is_own, attempts=reported))
    skipped = [AdoptedWorkflow(uuid=uuid, name=uuid, skipped=why) for uuid, why in unread.items() if uuid not in copies]
    return found, skipped


def _report_of(copy: WorkflowCopy, name: str, reports: list[AdoptedAttempt]) -> AdoptedAttempt:
    """Return the report of the node that ran an attempt, or else the first report.

    Nodes that share their root directory all report the attempt.
    """
    group, task, number = name.split("/")[1:]
    group_record = next((one for one in copy.record.groups if one.name == group), None)
    attempt = group_record.find(task, int(number)) if group_record and number.isdigit() else None
    return next((one for one in reports if attempt is not None and one.node == attempt.node), reports[0])


def _adopt(client: Client, found: list[AdoptableWorkflow], dry_run: bool) -> list[AdoptedWorkflow]:
    now = time.time()  # noqa: TID251  the moment of adoption
    results, ready = [], []
    for one in sorted(found, key=lambda one: one.copy.record.submitted_at):
        if is_starting(one.copy.record, one.attempts):
            why = "its tasks are just being started, or their start was abandoned a moment ago; try again in a few minutes"
            results.append(AdoptedWorkflow(uuid=one.uuid, name=one.copy.record.id, skipped=why))
            continue
        ready.append((one, rebuild(one.copy, one.attempts, nodes=[node.name for node in one.pool.nodes], now=now)))
    if dry_run:
        return results + [
            AdoptedWorkflow(uuid=one.uuid, name=one.copy.record.id, notes=(*_foreign_record_note(one, None), *rebuilt.notes))
            for one, rebuilt in ready
        ]
    if not ready:
        return results
    store = client.store
    client.stop_outdated_supervisor()
    # Another command may have submitted or adopted one of these workflows in the meantime.
    known = store.uuids()
    # Entries of `notify` in the spec are not used, because a node could have forged them.
    notify = own_targets(client, client.configuration())
    for one, rebuilt in ready:
        if one.uuid in known:
            continue
        record = _store(store, one, rebuilt, now, notify)
        renamed = record.id != one.copy.record.id
        note = (f"its id was {one.copy.record.id}, which another workflow has on this machine",) if renamed else ()
        notes = (*note, *_foreign_record_note(one, record.id), *rebuilt.notes)
        results.append(AdoptedWorkflow(uuid=one.uuid, name=record.id, notes=notes))
    client.ensure_supervisor()
    return results


def _store(
    store: Store, one: AdoptableWorkflow, rebuilt: Rebuilt, now: float, notify: Sequence[NotifyTarget]
) -> WorkflowRecord:
    """Insert a workflow with the pool as configured on this machine, because this machine now connects to the nodes."""
    details = WorkflowAdopted(
        nodes=tuple(sorted({attempt.node for attempt in one.attempts.values()})), user=one.copy.record.user, host=one.copy.host,
        id=one.copy.record.id,
    )  # fmt: skip
    events = [EventRecord(at=now, details=details, workflow=one.uuid)]
    events += [EventRecord(at=now, details=Message(text=note), workflow=one.uuid) for note in rebuilt.notes]
    return store.submit(
        # ``pool_key`` identifies workflows with the same nodes and settings, and this machine now defines both.
        _with_pool(rebuilt.record, one.pool),
        template=one.copy.template,
        spec=one.copy.spec,
        plan=rebuilt.plan,
        pool=one.pool,
        notify=notify,
        events=events,
        keep_number=True,
    )


def _with_pool(record: WorkflowRecord, pool: Pool) -> WorkflowRecord:
    return replace(record, pool=pool.name, pool_key=pool_key(pool))
