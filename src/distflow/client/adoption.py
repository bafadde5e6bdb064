"""Workflows that lie on nodes and that the store does not know: found, judged and taken in."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distflow.backends.machines.cleanup.recalling import Recalled, recall_node
from distflow.client.client import Client
from distflow.client.nodes import ask_nodes, choose_nodes
from distflow.client.submitting.submission import pool_key
from distflow.errors import StateError
from distflow.pools.hostfile import Host
from distflow.pools.model import Pool
from distflow.state import opening
from distflow.state.directory import StateDirectory, find_state_directory
from distflow.state.event_details import Message, WorkflowAdopted
from distflow.state.record import Event, WorkflowRecord
from distflow.state.store import Store
from distflow.supervisor.adopting import Place, Rebuilt, is_starting, latest, rebuild
from distflow.supervisor.memo import Memo, read_memo, writes_here
from distflow.supervisor.process import Lock, is_running

__all__ = ["AdoptedWorkflow", "Adoption", "FoundWorkflow", "adopt"]

_NAMED = 3
"""URLs of a record that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWorkflow:
    """A workflow that lies on nodes of a pool, and whose note can be read."""

    uuid: str
    pool: Pool
    memo: Memo
    is_own: bool
    """The key of this state directory signed its record."""
    places: dict[str, Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedWorkflow:
    """A workflow that was found on nodes, and whether it was adopted."""

    uuid: str
    name: str
    """Its id here; the one that it had, or its uuid, where it was not adopted."""
    notes: tuple[str, ...] = ()
    skipped: str = ""
    """Why it was not adopted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """The result of one search on the nodes."""

    workflows: tuple[AdoptedWorkflow, ...]
    nodes: tuple[Recalled, ...]
    """The answers of the nodes, some of which may be errors."""
    kept_aside: Path | None
    """Where the damaged store is now (in a dry run: where it lies); ``None`` when it is not damaged."""


def adopt(
    client: Client,
    pool: str | None = None,
    *,
    hosts: Sequence[Host] | None = None,
    trust_records: bool = False,
    is_dry_run: bool = False,
) -> Adoption:
    """Take in workflows that lie on nodes and that the store does not know: from another machine, or of a lost store.

    They are watched from then on, and can be canceled; nothing of them is started from here. A store that is damaged is kept
    aside first.

    Args:
        client: Where they are stored.
        pool: The pool whose nodes are asked; else all pools.
        hosts: Machines that are a pool of their own.
        trust_records: Whether to take in unsigned records whose outputs go to files of this machine or over SFTP, too.
        is_dry_run: Whether to change nothing.

    Raises:
        NotFound: for an unknown pool.
        StateError: when the store cannot be used, or a supervisor is running with a store that is damaged or gone.

    """
    nodes = choose_nodes(client, pool, hosts=hosts)
    directory = find_state_directory(client.environ) if is_dry_run else client.writable_directory()
    aside = _set_aside(directory, is_dry_run)
    known = frozenset() if aside is not None or not directory.store.exists() else client.store.uuids()
    answers = ask_nodes(nodes, lambda one, node: recall_node(one, node, known=known))
    found, skipped = _gather(answers, directory.secrets)
    trusted, refused = _trusted(found, trust=trust_records)
    results = (*skipped, *refused, *_adopt(client, trusted, is_dry_run))
    return Adoption(workflows=results, nodes=tuple(answers), kept_aside=aside)


def _set_aside(directory: StateDirectory, dry_run: bool) -> Path | None:
    """Move a damaged store out of the way and return where it is now (or, in a dry run, where it lies)."""
    is_gone = not directory.store.exists()
    try:
        if is_gone and is_running(directory):
            raise _at_work(directory, "gone")
        if is_gone or not opening.is_broken(directory.store):
            return None
        if dry_run:
            return directory.store
        lock = Lock(directory)
        if not lock.take():
            raise _at_work(directory, "damaged")
        try:
            return opening.set_aside(directory.store, time.strftime("%Y-%m-%d"))
        finally:
            lock.give_up()
    except OSError as error:
        raise opening.state_error(directory.store, error) from error


def _at_work(directory: StateDirectory, how: str) -> StateError:
    return StateError(
        f"{directory.store} is {how}, and a supervisor is at work with it",
        hint=f"end it first (its process id is in {directory.lock}); what runs on the nodes goes on",
    )


def _trusted(found: list[FoundWorkflow], *, trust: bool) -> tuple[list[FoundWorkflow], list[AdoptedWorkflow]]:
    """Keep the workflows that a node may not have made up: signed ones, and those that write no files of this user."""
    trusted, refused = [], []
    for one in found:
        here, _ = writes_here(one.memo)
        if one.is_own or trust or not here:
            trusted.append(one)
            continue
        why = (
            f"this machine did not sign its record, and it would write to {', '.join(here[:_NAMED])}; "
            "if you know it, repeat the command with --trust-records"
        )
        refused.append(AdoptedWorkflow(uuid=one.uuid, name=one.memo.record.id, skipped=why))
    return trusted, refused


def _origin(one: FoundWorkflow, name: str) -> tuple[str, ...]:
    """Return what a person should know of a record that this machine did not sign."""
    if one.is_own:
        return ()
    here, stores = writes_here(one.memo)
    goals = f"; its outputs go to {', '.join([*here, *stores][:_NAMED])}" if here or stores else ""
    return (f"this machine did not sign its record{goals}; read `distflow workflow spec {name}` before you restart it",)


def _gather(answers: Iterable[Recalled], secrets: Path) -> tuple[list[FoundWorkflow], list[AdoptedWorkflow]]:
    """Put together what the nodes of each pool have of one workflow."""
    memos: dict[str, list[tuple[Pool, Memo, bool]]] = {}
    places: dict[tuple[str, str], dict[str, list[Place]]] = {}
    unread: dict[str, str] = {}
    for answer in answers:
        for workflow in answer.workflows:
            for one in workflow.attempts:
                place = Place(
                    node=answer.node, phase=one.phase, pid=one.pid, started_at=one.started_at, directory=one.directory
                )
                places.setdefault((answer.pool.name, workflow.uuid), {}).setdefault(one.name, []).append(place)
            try:
                memo, is_own = read_memo(workflow.memo, secrets) if workflow.memo else (None, False)
                if memo is not None and memo.record.uuid == workflow.uuid:
                    memos.setdefault(workflow.uuid, []).append((answer.pool, memo, is_own))
                elif workflow.attempts:
                    unread.setdefault(workflow.uuid, "no node holds what is needed: it had not got that far, or is too old")
            except StateError as error:
                unread[workflow.uuid] = error.message
    found = []
    for uuid, known in memos.items():
        # What another node says without a signature is worth nothing next to a record that is signed.
        is_own = any(own for _, _, own in known)
        believed = [(pool, memo) for pool, memo, own in known if own or not is_own]
        memo, pool = latest(one for _, one in believed), believed[0][0]
        at = {name: _nearest(memo, name, some) for name, some in places.get((pool.name, uuid), {}).items()}
        found.append(FoundWorkflow(uuid=uuid, pool=pool, memo=memo, is_own=is_own, places=at))
    skipped = [AdoptedWorkflow(uuid=uuid, name=uuid, skipped=why) for uuid, why in unread.items() if uuid not in memos]
    return found, skipped


def _nearest(memo: Memo, name: str, some: list[Place]) -> Place:
    """Return where an attempt is, when nodes share their root and all of them have seen it."""
    group, task, number = name.split("/")[1:]
    known = next((one for one in memo.record.groups if one.name == group), None)
    attempt = known.find(task, int(number)) if known and number.isdigit() else None
    return next((one for one in some if attempt is not None and one.node == attempt.node), some[0])


def _adopt(client: Client, found: list[FoundWorkflow], dry_run: bool) -> list[AdoptedWorkflow]:
    now = time.time()  # noqa: TID251  the moment of adoption
    results, ready = [], []
    for one in sorted(found, key=lambda one: one.memo.record.submitted_at):
        if is_starting(one.memo.record, one.places):
            why = "it is just being started from elsewhere; try again in some minutes"
            results.append(AdoptedWorkflow(uuid=one.uuid, name=one.memo.record.id, skipped=why))
            continue
        ready.append((one, rebuild(one.memo, one.places, nodes=[node.name for node in one.pool.nodes], now=now)))
    if dry_run:
        return results + [
            AdoptedWorkflow(uuid=one.uuid, name=(name := one.memo.record.id), notes=(*_origin(one, name), *rebuilt.notes))
            for one, rebuilt in ready
        ]
    if not ready:
        return results
    store = client.store
    # Somebody may have submitted or adopted one while the nodes were asked.
    known = store.uuids()
    for one, rebuilt in ready:
        if one.uuid in known:
            continue
        record = _store(store, one, rebuilt, now)
        renamed = record.id != one.memo.record.id
        told = (f"its id was {one.memo.record.id}, which another one has here",) if renamed else ()
        results.append(AdoptedWorkflow(uuid=one.uuid, name=record.id, notes=(*told, *_origin(one, record.id), *rebuilt.notes)))
    client.ensure_supervisor()
    return results


def _store(store: Store, one: FoundWorkflow, rebuilt: Rebuilt, now: float) -> WorkflowRecord:
    """Insert a workflow with the pool as it is configured here: how its nodes are reached is this machine's to say."""
    details = WorkflowAdopted(
        nodes=tuple(sorted({place.node for place in one.places.values()})), user=one.memo.record.user, host=one.memo.host,
        id=one.memo.record.id,
    )  # fmt: skip
    events = [Event(at=now, details=details, workflow=one.uuid)]
    events += [Event(at=now, details=Message(text=note), workflow=one.uuid) for note in rebuilt.notes]
    record = store.submit(
        # ``pool_key`` says who shares nodes and settings, and both are ours from now on.
        _moved(rebuilt.record, one.pool),
        template=one.memo.template,
        spec=one.memo.spec,
        plan=rebuilt.plan,
        pool=one.pool,
        events=events,
        keep_number=True,
    )
    store.save([record], [])
    return record


def _moved(record: WorkflowRecord, pool: Pool) -> WorkflowRecord:
    return replace(record, pool=pool.name, pool_key=pool_key(pool))
