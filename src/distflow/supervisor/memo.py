"""Copies of a workflow's record for its nodes, from which it can be restored if its store is lost."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from distflow.documents.urls import parse_url
from distflow.errors import InputError, StateError
from distflow.plan.model import Plan
from distflow.protocol.attempts import is_uuid
from distflow.runtime.untrusted import decode_object
from distflow.state.codec import DecodeError, decode, encode
from distflow.state.directory import state_errors
from distflow.state.record import WorkflowRecord
from distflow.state.secrets import is_own_record, record_mac
from distflow.state.store import Store
from distflow.supervisor.commands import Prepare
from distflow.supervisor.world import Workflow

__all__ = ["COPIES", "Memo", "memo_for", "read_memo", "writes_here"]

COPIES = 8
"""Tasks of a gang that get a copy. Each copy names all tasks, so a thousand copies of a thousand tasks would be too much."""

_LONGEST: Final = 64 << 20
_SHOWN: Final = 80
"""Characters of an invalid name that an error shows."""
_SIGNED: Final = re.compile(r',"mac":"([0-9a-f]{64})"\}\Z')
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """A workflow when one of its attempts was prepared. It contains no secret values: plans and records do not have any."""

    record: WorkflowRecord
    plan: Plan
    template: str
    spec: str
    host: str
    """The submitter's host name."""


def memo_for(workflow: Workflow, command: Prepare, store: Store, host: str, secrets: Path) -> str:
    """Return the memo to send with a task's ``prepare``; empty for all but the first tasks of a large gang.

    It is signed with the key in the directory ``secrets``. Raises ``StateError`` if that key cannot be used.
    """
    record = workflow.record
    if command.key.task not in [task.name for task in record.group(command.key.group).tasks[:COPIES]]:
        return ""
    template, spec = store.document(record.uuid, "template"), store.document(record.uuid, "spec")
    text = encode(Memo(record=record, plan=workflow.plan, template=template, spec=spec, host=host)).decode()
    with state_errors(secrets):
        return f'{text[:-1]},"mac":"{record_mac(secrets, text)}"}}'


def read_memo(text: str, secrets: Path) -> tuple[Memo, bool]:
    """Return the memo in a text of ``memo_for``, from any version of distflow, and whether the key in ``secrets`` signed it.

    All names that become paths here are checked, even those of a signed record. Raises ``StateError``.
    """
    signed = _SIGNED.search(text)
    body = f"{text[: signed.start()]}}}" if signed else text
    try:
        decode_object(body, max_bytes=_LONGEST)
        memo = decode(body.encode(), Memo)
        _check(memo.record, memo.plan)
        with state_errors(secrets):
            return memo, signed is not None and is_own_record(secrets, body, signed.group(1))
    except (DecodeError, ValueError, RecursionError) as error:
        raise StateError(f"its workflow.json on the node cannot be read: {error}") from error


def writes_here(memo: Memo) -> tuple[list[str], list[str]]:
    """Return the URLs that a workflow writes to: those that this machine writes itself, and all others.

    The first are files of this machine, files that this user reaches over SSH, and URLs that cannot be parsed.
    """
    here: set[str] = set()
    stores: set[str] = set()
    for group in memo.plan.groups:
        for launch in (launch for size in group.sizes for launch in size.launches):
            for url in (
                *(one.url for one in launch.url_outputs),
                *(one.url for one in launch.checkpoints if not one.is_shared),
            ):
                try:
                    goal = parse_url(url.replace("{{workflow_id}}", memo.record.id), writes=True)
                except InputError:
                    here.add(url)
                    continue
                (here if goal.scheme in ("file", "sftp") else stores).add(str(goal))
    return sorted(here), sorted(stores)


def _check(record: WorkflowRecord, plan: Plan) -> None:
    """Refuse names and ids that would be paths elsewhere or that contradict one another. Raises ``ValueError``."""
    tasks = [(group, task) for group in record.groups for task in group.attempts]
    launches = [launch for group in plan.groups for size in group.sizes for launch in size.launches]
    names = [record.name, plan.name, *(group.name for group in plan.groups), *(launch.task for launch in launches)]
    names += [name for group, task in tasks for name in (group.name, task.name)]
    _match(_NAME, "name", names)
    for uuid in (record.uuid, *(group.kept.uuid for group in record.groups if group.kept is not None)):
        if not is_uuid(uuid):
            raise ValueError(f"{uuid[:_SHOWN]!r} is not a uuid")
    digests = [one.digest for group in record.groups for one in group.carried]
    digests += [one.digest for group in record.groups for one in group.checkpoints]
    digests += [task.saved.digest for _, task in tasks if task.saved is not None]
    digests += [file.blob or "" for launch in launches for file in launch.files]
    _match(_DIGEST, "digest", digests)
    if record.id != f"{record.name}-{record.number}" or record.number < 1:
        raise ValueError(f"the id {record.id!r} is not made of its name and number")
    if any(task.attempt < 0 for _, task in tasks):
        raise ValueError("the number of an attempt is negative")
    if sorted(group.name for group in record.groups) != sorted({group.name for group in plan.groups}):
        raise ValueError("its groups are not those of its plan")
    for group in record.groups:
        planned = {launch.task for launch in plan.group(group.name).launches}
        if not group.tasks or not planned >= {task.name for task in group.attempts}:
            raise ValueError(f"the tasks of {group.name} are not those of its plan")


def _match(pattern: re.Pattern[str], kind: str, values: Iterable[str]) -> None:
    for value in values:
        if not pattern.fullmatch(value):
            raise ValueError(f"{value[:_SHOWN]!r} is not a {kind}")
