"""What the nodes are given to keep, so that a workflow can be found again where its store is lost."""

from __future__ import annotations

from dataclasses import dataclass

from distflow.errors import StateError
from distflow.plan.model import Plan
from distflow.state.codec import DecodeError, decode, encode
from distflow.state.record import WorkflowRecord
from distflow.state.store import Store
from distflow.supervisor.world import Command, Workflow

__all__ = ["COPIES", "Memo", "memo_for", "read_memo"]

COPIES = 8
"""Tasks of a gang that get one: it names all of them, and a thousand copies of a thousand tasks are too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """A workflow as it was when one of its attempts was prepared. It holds no values of secrets: plans and records do not."""

    record: WorkflowRecord
    plan: Plan
    template: str
    spec: str
    host: str
    """Of the submitter."""


def memo_for(workflow: Workflow, command: Command, store: Store, host: str) -> str:
    """Return what goes along with a task's ``prepare``; nothing for those beyond the first ones of a large gang."""
    record = workflow.record
    if command.task not in [task.name for task in record.group(command.group).tasks[:COPIES]]:
        return ""
    template, spec = store.document(record.uuid, "template"), store.document(record.uuid, "spec")
    return encode(Memo(record=record, plan=workflow.plan, template=template, spec=spec, host=host)).decode()


def read_memo(text: str) -> Memo:
    """Return what ``memo_for`` wrote, by this distflow or another one. Raises ``StateError``."""
    try:
        return decode(text.encode(), Memo)
    except DecodeError as error:
        raise StateError(f"its workflow.json on the node cannot be read: {error}") from error
