"""Write an ended workflow as a JUnit report: a test suite for each group, a test case for each task."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.cli.render.workflow_text import elapsed_s, task_words
from distflow.documents.quantities import iso
from distflow.documents.text import plain, plain_lines
from distflow.errors import InputError
from distflow.lifecycle.states import Reason, State

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from distflow.state.record import GroupRecord, TaskRecord, WorkflowRecord

__all__ = ["check_path", "junit_text", "write_junit"]

_NOT_XML = "[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
_NO_OWN_FAILURE = (Reason.PEER_FAILED, Reason.UPSTREAM, Reason.CANCELED)
"""A task that ended for one of these reasons counts as skipped, unless it is the first cause."""


def junit_text(record: WorkflowRecord) -> str:
    """Return the report of an ended workflow.

    A task that failed by itself, or is the first cause of a failure, is reported as failed, and any other completed task as
    passed. All other tasks are reported as skipped, such as a task that was stopped because another task failed.
    """
    from xml.etree.ElementTree import Element, SubElement, indent, tostring  # only this option needs it

    root = Element("testsuites", name=record.id, time=_seconds(record.started_at, record.ended_at))
    for group in record.groups:
        suite = SubElement(root, "testsuite", name=f"{record.id}.{group.name}", time=_seconds(group.running_at, group.ended_at))
        if group.running_at is not None:
            suite.set("timestamp", (iso(group.running_at) or "") + "Z")
        for task in group.tasks:
            _add_case(suite, record, group, task)
        if group.state is State.FAILED and not suite.findall("*/failure") and group.reason not in _NO_OWN_FAILURE:
            # A group can fail without a failed task, for example because its data could not be written.
            case = SubElement(suite, "testcase", classname=suite.get("name", ""), name="(group)", time="0.000")
            _add_failure(case, group.status, group.message, group.message)
        _count(suite, suite.findall("testcase"))
    _count(root, root.findall("*/testcase"))
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def check_path(option: str, path: Path) -> None:
    """Raise ``InputError`` if a report cannot be written to this path. Call it before the workflow starts."""
    # Methods of ``Path`` raise an error for a path in a directory that this user cannot read.
    exists, is_directory = os.path.exists(path), os.path.isdir(path)
    if is_directory or not os.access(path if exists else path.absolute().parent, os.W_OK):
        reason = "the file is not writable" if exists else "the directory does not exist or is not writable"
        reason = "it is a directory" if is_directory else reason
        raise InputError(
            f"{option}: `{path}` cannot be written: {reason}", hint="name a file in a directory that you can write to"
        )


def write_junit(record: WorkflowRecord, path: Path) -> None:
    """Write the report of an ended workflow. Raises ``InputError`` if the file cannot be written."""
    try:
        path.write_text(junit_text(record), encoding="utf-8")
    except OSError as error:
        hint = f"the workflow has ended, but its report is lost; to see the results: distflow workflow query {record.id}"
        raise InputError(f"--junit: `{path}` cannot be written: {error.strerror}", hint=hint) from error


def _add_case(suite: Element, record: WorkflowRecord, group: GroupRecord, task: TaskRecord) -> None:
    from xml.etree.ElementTree import SubElement

    case = SubElement(
        suite, "testcase", classname=f"{record.id}.{group.name}", name=task.name, time=_seconds(task.started_at, task.ended_at)
    )
    words = task_words(task)
    is_cause = group.cause is not None and group.cause.task == task.name
    if task.state is State.COMPLETED and not is_cause:
        return
    if not is_cause and (task.state is not State.FAILED or task.reason in _NO_OWN_FAILURE):
        SubElement(case, "skipped", message=_clean(words or task.status))
    elif is_cause and group.cause is not None:
        text = "\n".join(plain(line) for line in (group.cause.text, *group.cause.lines, *group.cause.kernel))
        _add_failure(case, task.status, group.cause.message or words, text)
    else:
        _add_failure(case, task.status, words, words)


def _add_failure(case: Element, kind: str, message: str, text: str) -> None:
    from xml.etree.ElementTree import SubElement

    failure = SubElement(case, "failure", type=kind, message=_clean(message))
    failure.text = _clean(text)


def _count(parent: Element, cases: list[Element]) -> None:
    parent.set("tests", str(len(cases)))
    parent.set("errors", "0")
    for name, tag in (("failures", "failure"), ("skipped", "skipped")):
        parent.set(name, str(sum(case.find(tag) is not None for case in cases)))


def _clean(text: str) -> str:
    """Return text with ``?`` in place of characters that XML does not allow."""
    return re.sub(_NOT_XML, "?", plain_lines(text))


def _seconds(begun: float | None, ended: float | None) -> str:
    return f"{elapsed_s(begun, ended, None) or 0.0:.3f}"
