"""The JSON document of a notification, and its text for people. ``client/output.schema.json`` describes the document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distflow.client.client import Client, now
from distflow.client.failures import diagnose_groups, remedy_of
from distflow.documents.json_keys import name_keys
from distflow.documents.notify import Trigger
from distflow.documents.quantities import ZONED, duration_hms, times
from distflow.documents.text import few, plain, plain_lines
from distflow.lifecycle.states import REASON_TEXT

if TYPE_CHECKING:
    from distflow.client.failures import DiagnosedGroup
    from distflow.state.record import Cause, GroupRecord, WorkflowRecord

__all__ = ["VERSION", "Message", "compose", "sample"]

VERSION = 1
"""The version of the document. It is increased when a key is removed or changes its meaning."""

Message = Mapping[str, Any]
"""The JSON document of a notification."""

_LINES = 20
_SHOWN_LINES = 5
_LINE_LENGTH = 500
_TRACEBACK_LENGTH = 8000


def compose(client: Client, record: WorkflowRecord, trigger: Trigger, *, notification_id: str, subject: str = "") -> Message:
    """Return the message about a workflow.

    Args:
        client: The client whose store has the workflow.
        record: The workflow as it is now.
        trigger: The event that the message reports.
        notification_id: An id that is the same for each try to send the message.
        subject: For ``waiting``, ``<group>/<attempt>``. Empty for all other triggers.

    Raises:
        StateError: if the store or the logs cannot be read.

    """
    group = _group(record, subject.rpartition("/")[0])
    first = _first_failure(client, record) if trigger is Trigger.FAILED else None
    if first is not None:
        group = first.group
    cause = group.cause if group is not None and trigger is Trigger.FAILED else None
    remedy = remedy_of(record, first.diagnoses[0]) if first is not None and first.diagnoses else None
    return _with_text(
        {
            "version": VERSION,
            "id": notification_id,
            "test": False,
            "on": trigger.value,
            "summary": _summary(record, trigger, group, cause),
            "name": record.id,
            "spec_name": record.name,
            "uuid": record.uuid,
            "workflow_id": record.id,
            "workflow_uuid": record.uuid,
            "submitted_by": record.user,
            "status": record.status,
            "state": record.state.value,
            "reason": record.reason.value if record.reason else None,
            "pool": record.pool,
            "labels": dict(record.labels),
            "tags": list(record.tags),
            **_times(submit_time=record.submitted_at, start_time=record.started_at, end_time=record.ended_at),
            **name_keys(group=group.name if group is not None else None),
            "first_cause": _cause_json(cause) if cause is not None else None,
            "lines": [plain(line)[:_LINE_LENGTH] for line in cause.lines[-_LINES:]] if cause is not None else [],
            "remedy": remedy,
            "details": f"distflow workflow {'why' if cause is not None else 'query'} {record.id}",
        }
    )


def sample(trigger: Trigger) -> Message:
    """Return a message for a test. It does not belong to a real workflow."""
    return _with_text(
        {
            "version": VERSION,
            "id": f"test/{trigger.value}",
            "test": True,
            "on": trigger.value,
            "summary": f"Test of distflow's notifications (`{trigger.value}`)",
            "name": "test-1",
            "spec_name": "test",
            "uuid": "0" * 32,
            "workflow_id": "test-1",
            "workflow_uuid": "0" * 32,
            "submitted_by": "",
            "status": "PENDING",
            "state": "PENDING",
            "reason": None,
            "pool": "",
            "labels": {},
            "tags": [],
            **_times(submit_time=now(), start_time=None, end_time=None),
            **name_keys(group=None),
            "first_cause": None,
            "lines": [],
            "remedy": None,
            "details": "distflow notify list",
        }
    )


def _with_text(message: Message) -> Message:
    """Return a message with the key ``text``: several lines for people. Many chat services show only this key."""
    shown = [message["summary"]]
    shown += [f"  | {line}" for line in message["lines"][-_SHOWN_LINES:]]
    shown += [f"Remedy: {message['remedy']}"] if message["remedy"] else []
    return {**message, "text": "\n".join([*shown, f"Details: {message['details']}"])}


def _group(record: WorkflowRecord, name: str) -> GroupRecord | None:
    return next((group for group in record.groups if group.name == name), None)


def _first_failure(client: Client, record: WorkflowRecord) -> DiagnosedGroup | None:
    """Return the failed group whose cause was the earliest; without a cause, the first failed group."""
    failed = [one for one in diagnose_groups(client, record) if one.group.ended_at is not None]
    return min(failed, key=lambda one: (one.group.cause is None, one.group.cause.at if one.group.cause else 0.0), default=None)


def _summary(record: WorkflowRecord, trigger: Trigger, group: GroupRecord | None, cause: Cause | None) -> str:
    """Describe the event in one line."""
    why = plain(" ".join(plain_lines(group.message).split("\n"))) if group is not None else ""
    if trigger is Trigger.STARTED:
        nodes = dict.fromkeys(task.node for one in record.groups for task in one.tasks if task.node)
        return f"{record.id} started" + (f" on {few(tuple(nodes))}" if nodes else "")
    if trigger is Trigger.WAITING:
        return f"{record.id} is waiting for nodes" + (f": {group.name}: {why}" if group is not None and why else "")
    if trigger is Trigger.CANCELED:
        by = f" by {record.cancel.by}" if record.cancel else ""
        why = plain(record.cancel.message) if record.cancel else ""
        return f"{record.id} was canceled{by}" + (f": {why}" if why else "")
    took = f" after {duration_hms(record.ended_at - record.started_at)}" if record.ended_at and record.started_at else ""
    if trigger is Trigger.COMPLETED:
        return f"{record.id} completed{took}"
    why = cause.text if cause is not None else why or (REASON_TEXT[record.reason] if record.reason else "")
    status = "" if record.status == record.state.value else f" ({record.status})"
    return f"{record.id} failed{took}{status}" + (f": {why}" if why else "")


def _cause_json(cause: Cause) -> dict[str, object]:
    return {
        **name_keys(task=cause.task, node=cause.node),
        "ranks": cause.ranks,
        "reason": cause.reason.value,
        "message": plain(cause.message),
        "exit_code": cause.exit_code,
        "signal": cause.signal,
        **_times(time=cause.at),
        "traceback": plain_lines(cause.traceback)[-_TRACEBACK_LENGTH:],
    }


def _times(**given: float | None) -> dict[str, str | None]:
    """Return times in UTC with their zone, each under its old key (``start_time``) and its current key (``started_at``)."""
    zoned = {ZONED[key]: times(**{key: at})[ZONED[key]] for key, at in given.items()}
    return {key: zoned[ZONED[key]] for key in given} | zoned
