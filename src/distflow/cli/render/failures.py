"""Format failures as text and JSON: first causes with timelines, and diagnoses with remedies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from distflow.cli.render.tables import Paint, table
from distflow.cli.render.workflow_json import cause_json, workflow_key
from distflow.cli.render.workflow_text import cause_lines, output_words, without_node_paths, written_words
from distflow.client.failures import GroupFailure, missing_ranks, remedy_of
from distflow.client.workflows import held_ranks
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import duration_hms, local_milli, times
from distflow.documents.text import listed, plain, plain_lines
from distflow.lifecycle.clocks import Clock
from distflow.lifecycle.states import REASON_TEXT, State, WorkflowState
from distflow.state.record import Cause, WorkflowRecord

if TYPE_CHECKING:
    from distflow.client.failures import DiagnosedGroup, Diagnosis


__all__ = [
    "diagnoses_json",
    "diagnoses_text",
    "end_text",
    "failures_json",
    "failures_text",
    "finding_lines",
    "no_failure_text",
    "remedies_of",
]


def no_failure_text(record: WorkflowRecord, names: Collection[str] = ()) -> str:
    """Return a message that says why ``why`` and ``diagnose`` found no failure of a workflow, or of its groups ``names``."""
    groups = [group for group in record.groups if not names or group.name in names]
    failed = [group.name for group in record.groups if group.state is State.FAILED and group not in groups]
    if failed:
        ends = (f"{one.name}: {one.status}" + f": {plain_lines(one.message)}" * bool(one.message) for one in groups)
        words = "\n".join((*ends, f"Failed groups: {listed(failed)}. Details: distflow workflow why {record.id}"))
    elif record.state is WorkflowState.COMPLETED:
        words = f"{record.id} completed, so there is no failure to explain"
    elif record.state is WorkflowState.CANCELED:
        who = f" by {record.cancel.by}" if record.cancel else ""
        message = f": {record.cancel.message}" if record.cancel and record.cancel.message else ""
        words = f"{record.id} was canceled{who}{message}"
    elif record.state.is_final:
        why = REASON_TEXT[record.reason] if record.reason else "groups failed for different reasons"
        words = f"{record.id}: {record.status}: {why}"
    else:
        tasks = (task for group in record.groups for task in group.tasks)
        has_failed = any(group.earlier_causes for group in record.groups) or any(task.state is State.FAILED for task in tasks)
        words = f"{record.id} has not ended{'' if has_failed else ', and no task has failed'}: {record.status}"
        for missing in filter(None, map(missing_ranks, groups)):
            words += f"\n{plain(missing.message)}\nDetails: distflow workflow diagnose {record.id}"
    for group in (one for one in groups if one.earlier_causes):
        count = len(group.earlier_causes)
        details = f"Details: distflow workflow why {record.id} -r {count - 1}"
        words += f"\n{group.name} was retried after {_failures(count)}. {details}"
    return words


def failures_text(record: WorkflowRecord, failures: Sequence[GroupFailure], *, paint: Paint, width: int | None) -> str:
    """Return the output of ``why``."""
    lines = [f"Workflow ID  {paint.strong(record.id)}", f"Status       {paint.status(record.status)}"]
    for failure in failures:
        group = failure.group
        number = "" if not group.attempt else f", attempt {failure.attempt + 1} of {group.attempt + 1}"
        status = group.status if failure.is_last else State.RESCHEDULED.value
        lines += ["", f"{paint.strong(f'Group {group.name}')}{number}: {paint.status(status)}"]
        if failure.cause is not None:
            lines.append(paint.bad(f"First cause: {failure.cause.text}"))
            lines += [f"  {line}" for line in _facts(failure.cause)]
        elif group.message:
            lines += [plain(line) for line in group.message.splitlines()]
        if failure.moments:
            lines += ["", *_timeline(failure, width)]
        if failure.clocks:
            lines += ["", *(f"Clock of {node}: {_clock_words(clock)}" for node, clock in failure.clocks.items())]
    return "".join(f"{line}\n" for line in lines)


def failures_json(record: WorkflowRecord, failures: Sequence[GroupFailure], words: str) -> dict[str, object]:
    """Return the JSON document of ``why --format-type json``.

    If there are no ``groups``, ``message`` has the reason. A group has ``retry_id``, ``first_cause`` as in ``query``, the
    ``clocks`` of its nodes (``offset_s`` ahead of this machine's clock, and ``uncertainty_s``) and the ``timeline``. The times
    of the timeline are those of this machine's clock. Their ``offset_s`` is relative to the first cause, or to the stop or the
    end of the group if no task failed by itself.
    """
    return {
        "name": record.id,
        "uuid": record.uuid,
        **workflow_key(record),
        "status": record.status,
        "message": words or None,
        "groups": [
            {
                "name": one.group.name,
                "group_name": one.group.name,
                "status": one.group.status if one.is_last else State.RESCHEDULED.value,
                "retry_id": one.attempt,
                "message": one.group.message if one.is_last else None,
                "first_cause": cause_json(one.cause) if one.cause else None,
                "clocks": [
                    {**name_keys(node=node), "offset_s": clock.offset_s, "uncertainty_s": clock.uncertainty_s}
                    for node, clock in one.clocks.items()
                ],
                "timeline": [
                    {
                        **times(time=moment.at),
                        "offset_s": round(moment.at - _origin(one), 6),
                        **name_keys(node=moment.node or None, task=moment.task or None),
                        "text": moment.text,
                        "because": moment.because or None,
                    }
                    for moment in one.moments
                ],
            }
            for one in failures
        ],
    }


def _failures(count: int) -> str:
    return "a failure" if count == 1 else f"{count} failures"


def _facts(cause: Cause) -> Iterator[str]:
    yield f"Process     pid {cause.pid if cause.pid is not None else 'unknown'}"
    uncertainty = f" ±{_short_duration(cause.clock.uncertainty_s)}" if cause.clock else ""
    yield f"Time        {local_milli(cause.at)}{uncertainty}"
    if cause.rivals:
        others = ", ".join(cause.rivals)
        yield f"Also failed {others}: at the same time, within the uncertainty of the nodes' clocks"
    for title, texts in (
        ("Kernel", cause.kernel),
        ("Traceback", cause.traceback.splitlines()),
        ("Last lines", cause.lines),
    ):
        shown = [without_node_paths(plain(text)) for text in texts]
        yield from (f"{title if number == 0 else '':<11} | {text}".rstrip() for number, text in enumerate(shown))


def _timeline(failure: GroupFailure, width: int | None) -> list[str]:
    rows = [
        (
            _offset(moment.at - _origin(failure)),
            moment.node,
            moment.task,
            plain(moment.text),
            plain(moment.because),
        )
        for moment in failure.moments
    ]
    return table(("Time", "Node", "Task", "What", "Because"), rows, width=width).splitlines()


def _origin(failure: GroupFailure) -> float:
    if failure.cause is not None:
        return failure.cause.at
    ended = failure.group.stopping_at or failure.group.ended_at
    return ended if ended is not None else failure.moments[0].at if failure.moments else 0.0


def _offset(seconds: float) -> str:
    """Return a signed time difference: ``+0.012 s``, ``-1:02:03``."""
    if abs(seconds) < 100:
        return f"{seconds:+.3f} s"
    return f"{'-' if seconds < 0 else '+'}{duration_hms(abs(seconds))}"


def _clock_words(clock: Clock) -> str:
    uncertainty = f"±{_short_duration(clock.uncertainty_s)}"
    if abs(clock.offset_s) <= clock.uncertainty_s:
        return f"equal to this machine's ({uncertainty})"
    side = "ahead of" if clock.offset_s > 0 else "behind"
    return f"{_short_duration(abs(clock.offset_s))} {side} this machine's ({uncertainty}); the times above are corrected"


def _short_duration(seconds: float) -> str:
    """Return a duration in milliseconds or seconds: ``0.4 ms``, ``30.0 s``."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


_ONLY_EXCEPTION = "exception"
"""The key of a diagnosis that only repeats the exception."""
_SHOWN_LINES = 5
"""The number of a failed task's last lines to show if no rule applies."""


def diagnoses_text(record: WorkflowRecord, examined: Sequence[DiagnosedGroup], paint: Paint) -> str:
    """Return the output of ``diagnose``."""
    lines = [f"Workflow ID  {paint.strong(record.id)}", f"Status       {paint.status(record.status)}"]
    for one in examined:
        number = f", attempt {one.attempt + 1} of {one.group.attempt + 1}" if one.group.attempt else ""
        lines += ["", f"{paint.strong(f'Group {one.group.name}')}{number}: {paint.status(one.status)}"]
        for position, diagnosis in enumerate(one.diagnoses):
            lines += [""] * bool(position) + list(_rows(record, diagnosis, paint))
        if one.is_failure and not one.diagnoses:
            lines += [f"  {line}" for line in _unknown(record, one)]
        for position, finding in enumerate(one.findings):
            lines += [""] * bool(position or one.is_failure) + list(_finding_rows(record, finding, paint))
    return "".join(f"{line}\n" for line in lines)


def diagnoses_json(record: WorkflowRecord, examined: Sequence[DiagnosedGroup], words: str) -> dict[str, object]:
    """Return the JSON document of ``diagnose --format-type json``.

    If there are no ``groups``, ``message`` has the reason. A group has ``retry_id`` and its ``diagnoses``, the most specific
    first. A diagnosis has ``key`` (such as ``rank-missing``), ``cause``, ``found``, ``remedy``, and the ``task`` with the
    ``line`` or ``traceback`` that shows the cause. If a failure has no diagnoses, the group's ``message`` names the next steps.
    ``findings`` are about the use of resources: ``key``, ``cause``, ``found``, ``remedy`` and ``task``.
    """
    return {
        "name": record.id,
        "uuid": record.uuid,
        **workflow_key(record),
        "status": record.status,
        "message": words or None,
        "groups": [
            {
                "name": one.group.name,
                "group_name": one.group.name,
                "status": one.status,
                "retry_id": one.attempt,
                "message": None
                if one.diagnoses or not one.is_failure
                else " ".join(line.strip() for line in _unknown(record, one)),
                "diagnoses": [
                    {
                        "key": diagnosis.key,
                        "cause": diagnosis.cause,
                        "found": diagnosis.found or None,
                        "remedy": remedy_of(record, diagnosis),
                        **name_keys(task=diagnosis.task or None),
                        "line": diagnosis.line or None,
                        "traceback": diagnosis.traceback or None,
                    }
                    for diagnosis in one.diagnoses
                ],
                "findings": [
                    {
                        "key": finding.key,
                        "cause": finding.cause,
                        "found": finding.found,
                        "remedy": remedy_of(record, finding),
                        **name_keys(task=finding.task),
                    }
                    for finding in one.findings
                ],
            }
            for one in examined
        ],
    }


def _rows(record: WorkflowRecord, diagnosis: Diagnosis, paint: Paint) -> Iterator[str]:
    yield f"  Cause   {paint.bad(diagnosis.cause)}"
    if diagnosis.found:
        yield f"  Found   {plain(diagnosis.found)}"
    if diagnosis.line:
        yield f"  Shown   [{diagnosis.task}] {plain(diagnosis.line)}"
    for number, line in enumerate(diagnosis.traceback.splitlines()):
        yield f"  {'' if number else 'Shown':<7} | {plain(line)}"
    yield f"  Remedy  {remedy_of(record, diagnosis)}"


def _finding_rows(record: WorkflowRecord, finding: Diagnosis, paint: Paint) -> Iterator[str]:
    yield f"  Finding {paint.grade(finding.cause, 'warning')}"
    yield f"  Found   {plain(finding.found)}"
    yield f"  Remedy  {remedy_of(record, finding)}"


def finding_lines(examined: Sequence[DiagnosedGroup]) -> Iterator[str]:
    """Yield a line for each finding in the use of resources."""
    for one in examined:
        yield from (f"{finding.cause}: {plain(finding.found)}" for finding in one.findings)


def remedies_of(record: WorkflowRecord, examined: Sequence[DiagnosedGroup]) -> dict[str, str]:
    """Return the remedy of each failed group's most specific diagnosis, by the name of the group.

    A diagnosis that only repeats the exception is left out, because the cause itself shows the exception.
    """
    return {
        one.group.name: remedy_of(record, one.diagnoses[0])
        for one in examined
        if one.diagnoses and one.group.state is State.FAILED and one.diagnoses[0].key != _ONLY_EXCEPTION
    }


def end_text(
    record: WorkflowRecord, examined: Sequence[DiagnosedGroup], *, paint: Paint, outputs_until: float | None, fetches: bool
) -> str:
    """Return the last lines of `submit --wait`: the first cause of a failure, its remedy, and commands for logs and outputs.

    Args:
        record: The ended workflow.
        examined: Its diagnosed groups.
        paint: The colors.
        outputs_until: The time until which the output files are kept, in seconds since the epoch.
        fetches: Whether the caller fetches the output files. The text then omits the command for them.

    """
    lines: list[str] = []
    failed = sorted(((one.group.cause.at, one) for one in examined if one.group.cause), key=lambda pair: pair[0])
    details = ""
    if failed:
        first = failed[0][1]
        group = first.group
        assert group.cause is not None  # noqa: S101  all groups in `failed` have a cause
        lines += cause_lines(group.cause, paint)
        lines += [f"Remedy:  {remedy_of(record, diagnosis)}" for diagnosis in first.diagnoses[:1]]
        others = [one.group for _, one in failed[1:]]
        lines += [f"Also failed: {other.name}: {other.cause.text}" for other in others if other.cause]
        lines.append(f"Logs:    distflow workflow logs {record.id} {_log_option(record, group.cause)}")
        details = f"Details: distflow workflow why {record.id}"
    elif record.state is not WorkflowState.COMPLETED:
        for group in record.groups:
            if group.message:
                lines += f"{group.name}: {group.status}: {plain_lines(group.message)}".splitlines()
        details = f"Details: distflow workflow query {record.id}"
    lines += [f"Outputs: {words}" for words in written_words(record)]
    if not fetches and (words := output_words(record, outputs_until)):
        lines.append(f"Outputs: {words}")
    return "".join(f"{line}\n" for line in (*lines, details) if line)


def _log_option(record: WorkflowRecord, cause: Cause) -> str:
    """Return the option of `logs` for the rank that failed, or else the option for the task.

    It is the rank's if exactly one rank is known to have failed, only one task of the workflow has a rank of this number, and
    that task has other ranks, too.
    """
    if cause.ranks.isdigit():
        held = [held_ranks(task.ranks) for group in record.groups for task in group.tasks]
        holders = [ranks for ranks in held if int(cause.ranks) in ranks]
        if len(holders) == 1 and len(holders[0]) > 1:
            return f"--rank {cause.ranks}"
    return f"--task {cause.task}"


def _unknown(record: WorkflowRecord, one: DiagnosedGroup) -> Iterator[str]:
    """Yield the lines for a failure without a diagnosis, with the commands for further investigation."""
    retry = f" -r {one.attempt}" if one.attempt < one.group.attempt else ""
    cause = one.group.cause if one.attempt == one.group.attempt else one.group.earlier_causes[one.attempt]
    if cause is None:
        message = one.group.message.splitlines()[0] if one.group.message else one.status
        yield f"Cause   no task failed by itself: {plain(message)}"
        yield f"Remedy  Read the timeline: distflow workflow why {record.id}{retry}"
        return
    yield f"Cause   unknown: no rule matches this failure: {cause.text}"
    for number, line in enumerate(cause.lines[-_SHOWN_LINES:]):
        yield f"{'' if number else 'Shown':<7} | {plain(line)}"
    yield f"Remedy  Read its output: distflow workflow logs {record.id} --task {cause.task}{retry}"
    yield f"        Read the timeline: distflow workflow why {record.id}{retry}"
    yield "        If it happens again, set `debug: true` in the group to check collectives, and"
    yield "        `timeout: {hang_timeout: 10m}` to get a report when the gang becomes silent."
