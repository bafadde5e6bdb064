"""Annotations and job summaries of GitHub Actions.

Annotations are workflow commands in the output of a step: ``::error file=train.yaml,line=7::message``. The summary is Markdown
that is appended to the file in ``GITHUB_STEP_SUMMARY``.
"""

from __future__ import annotations

import html
import os
import secrets
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from distflow.cli.render.workflow_text import elapsed_s, task_words
from distflow.documents.problems import Mark, Problem
from distflow.documents.quantities import seconds_text
from distflow.documents.text import plain, plain_lines
from distflow.errors import DistflowError, WorkflowEnded
from distflow.lifecycle.states import Reason, State, WorkflowState

if TYPE_CHECKING:
    from distflow.client.specs import CheckedSpec
    from distflow.state.record import GroupRecord, WorkflowRecord

__all__ = [
    "append_summary",
    "problem_lines",
    "problem_summary",
    "reporting_errors",
    "without_workflow_commands",
    "workflow_lines",
    "workflow_summary",
]


def problem_lines(problems: Iterable[Problem]) -> Iterator[str]:
    """Yield an annotation for each finding in a spec."""
    for problem in problems:
        text = f"{problem.message}\n{problem.hint}" if problem.hint else problem.message
        yield _annotation(problem.severity.value, text, problem.where)


def workflow_lines(record: WorkflowRecord, checked: CheckedSpec, remedies: Mapping[str, str]) -> Iterator[str]:
    """Yield an annotation for each failed or canceled group of an ended workflow, at the line of the task that failed first.

    Groups that only depend on such a group have no annotation. If no task failed first, the line is that of the group.
    """
    for group in _failed(record):
        lines = (_why(group), remedies.get(group.name, ""), f"Details: distflow workflow why {record.id}")
        text = "\n".join(line for line in lines if line)
        yield _annotation("error", text, _mark(checked, group), title=f"{record.id} {group.name}: {group.status}")


def workflow_summary(record: WorkflowRecord, remedies: Mapping[str, str]) -> str:
    """Return an ended workflow as Markdown: its status, its tasks, and the last output and the remedy of its failures.

    Args:
        record: The workflow.
        remedies: The remedies of failed groups, by the name of the group.

    """
    elapsed = _seconds(elapsed_s(record.started_at, record.ended_at, None))
    rows = [
        (group.name, task.name, task.status, task.node or "", "" if task.exit_code is None else str(task.exit_code),
         _seconds(elapsed_s(task.started_at, task.ended_at, None)), task_words(task) if task.state is State.FAILED else "")
        for group in record.groups for task in group.tasks
    ]  # fmt: skip
    lines = [f"### distflow: {_cell(record.id)}: {record.status}{f' ({elapsed})' if elapsed else ''}", ""]
    lines += _table(("Group", "Task", "Status", "Node", "Exit code", "Time", "Reason"), rows)
    for group in _failed(record):
        lines += ["", f"**{_cell(group.name)}**: {_cell(_why(group))}", ""]
        if group.cause is not None and group.cause.lines:
            lines += ["<pre>", *(html.escape(plain(line)) or "&nbsp;" for line in group.cause.lines), "</pre>", ""]
        if group.name in remedies:
            lines += [_cell(remedies[group.name]), ""]
        lines.append(f"Details: `distflow workflow why {record.id}`")
    return "\n".join(lines)


def problem_summary(problems: Sequence[Problem]) -> str:
    """Return the findings in specs, or another error, as Markdown."""
    rows = [(str(problem.where), problem.severity.value, problem.message, problem.hint) for problem in problems]
    return "\n".join(["### distflow: problems", "", *_table(("Where", "Severity", "Problem", "Remedy"), rows)])


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Annotate a ``DistflowError`` that ends the block, write it to the summary, and raise it again.

    A ``WorkflowEnded`` is only raised again.
    """
    try:
        yield
    except WorkflowEnded:
        raise  # the failures of workflows have their own annotations
    except DistflowError as error:
        problems: Sequence[Problem] | None = getattr(error, "problems", None)
        if problems is None:
            problems = [Problem(where=Mark(""), message=error.message, hint=error.hint)]
        for line in problem_lines(problems):
            print(line)
        append_summary(problem_summary(problems))
        raise


@contextmanager
def without_workflow_commands() -> Iterator[None]:
    """In this block, prevent GitHub from running workflow commands in the output of tasks."""
    token = secrets.token_hex(16)
    print(f"::stop-commands::{token}", flush=True)
    try:
        yield
    finally:
        print(f"::{token}::", flush=True)


def append_summary(text: str, environment: Mapping[str, str] | None = None) -> None:
    """Append Markdown to the summary of the job. Outside of GitHub Actions, do nothing."""
    path = (os.environ if environment is None else environment).get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{text}\n\n")
    except OSError as error:
        print(f"warning: the job summary {path} cannot be written: {error.strerror}", file=sys.stderr)


def _failed(record: WorkflowRecord) -> list[GroupRecord]:
    """Return the groups that did not complete, without groups that only depend on such a group."""
    if record.state is WorkflowState.COMPLETED:
        return []
    return [group for group in record.groups if group.state.is_final and group.state is not State.COMPLETED
            and group.reason is not Reason.UPSTREAM]  # fmt: skip


def _why(group: GroupRecord) -> str:
    return group.cause.text if group.cause is not None else plain_lines(group.message) or group.status


def _mark(checked: CheckedSpec, group: GroupRecord) -> Mark:
    """Return the line of the task that failed first, or else of the group, or else of the spec."""
    written = next((one for one in checked.spec.groups if one.name == group.name), None)
    if written is None:
        return checked.spec.mark
    first = group.cause.task if group.cause is not None else None
    return next((task.mark for task in written.tasks if task.name == first), written.mark)


def _annotation(level: str, text: str, where: Mark, *, title: str = "") -> str:
    properties = {"file": _path(where.file), "title": title}
    if properties["file"] and where.line:
        properties["line"] = str(where.line)
        properties["col"] = str(where.column) if where.column else ""
    shown = ",".join(f"{name}={_escape_property(value)}" for name, value in properties.items() if value)
    return f"::{level}{f' {shown}' if shown else ''}::{_escape_data(text)}"


def _path(file: str) -> str:
    """Return the path of a file, relative to the checkout if it is there; empty for standard input and ids of workflows."""
    if not file or file == "-" or not os.path.exists(file):
        return ""
    path = os.path.realpath(file)
    root = os.path.realpath(os.environ.get("GITHUB_WORKSPACE") or os.getcwd())
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path


def _escape_data(text: str) -> str:
    return plain_lines(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines]


def _cell(text: str) -> str:
    """Escape a text for one line of Markdown."""
    escaped = html.escape(plain_lines(text), quote=False)
    for character in "\\`*_[]|~#":
        escaped = escaped.replace(character, "\\" + character)
    return escaped.replace("\n", "<br>")


def _seconds(value: float | None) -> str:
    return "" if value is None else seconds_text(value)
