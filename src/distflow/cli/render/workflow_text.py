"""Format workflows and unreachable nodes as text. The functions are pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from distflow.cli.render.metrics import (
    NO_METRICS,
    NO_USAGE,
    GroupMetrics,
    TaskUsage,
    metric_lines,
    spark,
    usage_cells,
    usage_header,
)
from distflow.cli.render.tables import Paint, cut, table
from distflow.documents.json_keys import name_keys
from distflow.documents.quantities import bytes_text, count_text, duration_hms, local_minute, local_second, times
from distflow.documents.text import few, plain, ranges
from distflow.lifecycle.exits import exit_text
from distflow.lifecycle.states import REASON_TEXT, Reason, State, waiting_text
from distflow.state.record import Cause, EventRecord, GroupRecord, Priority, TaskRecord, WorkflowRecord

__all__ = [
    "NO_LINES",
    "NO_REMEDIES",
    "LastLines",
    "UnreachableNode",
    "cancel_json",
    "cancel_words",
    "cause_lines",
    "changes",
    "elapsed_s",
    "event_line",
    "left_behind",
    "list_table",
    "missing_nodes",
    "output_words",
    "queued_s",
    "status_line",
    "task_words",
    "unreachable_nodes",
    "without_node_paths",
    "workflow_text",
    "written_words",
]

LastLines = Mapping[tuple[str, str, int], str]
"""The last line of each attempt's output, by group, task and attempt number."""

NO_LINES: LastLines = MappingProxyType({})
NO_REMEDIES: Mapping[str, str] = MappingProxyType({})
_LINE_WIDTH = 60
"""The width of the last log line in columns, if the output is not a terminal."""
_CAUSE_LINES = 3
"""The number of last lines to show of a first cause."""
_FEW_TASKS = 8
_FEW_ATTEMPTS = 3
_FEW_NODES = 4
_ATTEMPT = r"(?<![^\s\"'(\[=:,])/(?:[^/\s\"']+/){0,40}distflow-node/[0-9a-f]{32}/[\w-]+/[\w-]+/[0-9]+/"
"""The directory of an attempt on its node."""


def workflow_text(
    record: WorkflowRecord,
    *,
    now: float,
    last_lines: LastLines = NO_LINES,
    metrics: GroupMetrics = NO_METRICS,
    usage: TaskUsage = NO_USAGE,
    paint: Paint | None = None,
    width: int | None = None,
    verbose: bool = False,
    is_live: bool = False,
    outputs_until: float | None = None,
    remedies: Mapping[str, str] = NO_REMEDIES,
) -> str:
    """Return the output of ``query``: the workflow, then each group with its first cause and its tasks.

    Args:
        record: The workflow.
        now: The current time in seconds since the epoch.
        last_lines: The last line of each attempt's output.
        metrics: The latest metrics of each group.
        usage: The latest use of resources by each running task.
        paint: The colors. Default: none.
        width: The width of the terminal in columns, or ``None`` if the output is not a terminal.
        verbose: Whether to show earlier attempts and more fields.
        is_live: Whether the caller refreshes the text. It then has the age of the submission, and bars for use of resources.
        outputs_until: The time until which the output files of an ended workflow are kept, in seconds since the epoch.
        remedies: The remedy for the failure of each group, if it is known.

    """
    paint = paint or Paint()
    lines = [
        f"Workflow ID  {paint.strong(record.id)}",
        f"Status       {paint.status(record.status)}",
        f"Pool         {record.pool}",
        f"User         {record.user}",
        f"Submitted    {_ago(now - record.submitted_at) if is_live else local_minute(record.submitted_at)}",
    ]
    if record.parent is not None:
        lines.append(f"Restarts     {record.parent}")
    if record.started_at is None:
        lines.append(f"Queued       {duration_hms(queued_s(record, now))}")
    else:
        lines.append(f"Elapsed      {duration_hms(elapsed_s(record.started_at, record.ended_at, now))}")
    if verbose:
        lines.append(f"UUID         {record.uuid}")
    if verbose or record.priority is not Priority.NORMAL:
        lines.append(f"Priority     {record.priority.value}")
    lines += [f"{name:<12} {words}" for name, words in _labels_and_tags(record).items() if words]
    if record.cancel is not None:
        words = f": {record.cancel.message}" if record.cancel.message else ""
        lines.append(f"Canceled by  {record.cancel.by}{words}")
    if words := output_words(record, outputs_until):
        lines.append(f"Outputs      {words}")
    lines += [f"Warning: {warning}" for warning in record.warnings]
    for group in record.groups:
        lines += ["", f"{paint.strong(f'Group {group.name}')}: {paint.status(group.status)}"]
        lines += [f"  {line}" for line in _group_words(record, group, paint, remedies.get(group.name, ""))]
        if group.name in metrics:
            lines += [f"  {line}" for line in metric_lines(group, metrics[group.name], now)]
        lines += [f"  {line}" for one in unreachable_nodes(group) for line in _lines(one.words)]
        tasks = group.attempts if verbose else group.tasks
        used = {key: one for key, one in usage.items() if key[0] == group.name}
        trend = "Trend" if is_live and used else ""
        rows = [_task_row(group, task, now, last_lines, used, paint, verbose, trend) for task in tasks]
        if width is None:
            rows = [(*row[:-1], cut(row[-1], _LINE_WIDTH)) for row in rows]
        lines.append(table(_task_header(verbose, used, trend), rows, width=width).rstrip("\n"))
        if verbose:
            lines += [f"  {_attempt_name(task)}: {task_words(task)}" for task in tasks if task_words(task)]
    lines += _output_locations(record)
    return "".join(f"{line}\n" for line in lines)


def _ago(seconds: float) -> str:
    """Return an age for people: ``3 min ago``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


def output_words(record: WorkflowRecord, until: float | None = None) -> str:
    """Return the location of a workflow's output files and the command for them. Empty if no task can have files.

    ``until`` is the time until which the files are kept, in seconds since the epoch.
    """
    if not any(task.output_dir and task.has_files is not False for group in record.groups for task in group.tasks):
        return ""
    if not record.state.is_final:
        return f"on the nodes: distflow workflow outputs {record.id}"
    kept = "" if until is None else f" at least until {local_minute(until)}"
    return f"on the nodes{kept}: distflow workflow fetch {record.id}"


def _output_locations(record: WorkflowRecord) -> Iterator[str]:
    outputs = [task for group in record.groups for task in group.tasks if task.outputs and task.output_dir]
    if outputs:
        yield from ("", "Outputs on nodes:")
        yield from (f"  {task.name}  {task.node}:{task.output_dir}" for task in outputs)
    written = list(written_words(record))
    if written:
        yield from ("", "Outputs were written to:", *(f"  {words}" for words in written))


def written_words(record: WorkflowRecord) -> Iterator[str]:
    """Yield a line for each URL to which output files were written, with the task and the number of files."""
    for group in record.groups:
        for one in group.transfer_results:
            if one.is_written and one.files:
                yield f"{one.task}  {one.url}  ({count_text(one.files, 'file')})"


def list_table(records: Sequence[WorkflowRecord], *, now: float, paint: Paint | None = None) -> str:
    """Return the output of ``list``. ``now`` is the current time in seconds since the epoch."""
    paint = paint or Paint()
    # Leave out the columns of labels and tags if they would be empty.
    more = [name for name in ("Labels", "Tags") if any(_labels_and_tags(record)[name] for record in records)]
    rows = [
        (
            record.user,
            record.id,
            local_minute(record.submitted_at),
            paint.status(record.status),
            record.priority.value,
            *(_labels_and_tags(record)[name] for name in more),
            record.pool,
            duration_hms(elapsed_s(record.started_at, record.ended_at, now)),
        )
        for record in records
    ]
    return table(("User", "Workflow ID", "Submit Time", "Status", "Priority", *more, "Pool", "Elapsed"), rows)


def _labels_and_tags(record: WorkflowRecord) -> dict[str, str]:
    labels = " ".join(f"{key}={value}" for key, value in record.labels.items())
    return {"Labels": labels, "Tags": " ".join(record.tags)}


def status_line(record: WorkflowRecord, *, now: float, paint: Paint | None = None) -> str:
    """Return the status of a workflow in one line: ``pytorch-dist-3 RUNNING 0:42  master RUNNING · worker RUNNING``."""
    paint = paint or Paint()
    begun = record.started_at if record.started_at is not None else record.submitted_at
    head = f"{record.id} {paint.status(record.status)} {duration_hms(elapsed_s(begun, record.ended_at, now))}"
    tasks = [(group, task) for group in record.groups for task in group.tasks]
    if len(tasks) <= _FEW_TASKS:
        parts = [f"{task.name} {paint.status(task.status)}{_transfer_words(group, task, ' (', ')')}" for group, task in tasks]
    else:
        counts: dict[str, int] = {}
        for _, task in tasks:
            counts[task.status] = counts.get(task.status, 0) + 1
        parts = [f"{count} {paint.status(status)}" for status, count in counts.items()]
    waiting = [group.message for group in record.groups if group.state is State.SCHEDULING and group.message]
    return f"{head}  {' · '.join(parts)}{f'  ({plain(waiting[0])})' if waiting else ''}"


def changes(before: WorkflowRecord | None, after: WorkflowRecord) -> Iterator[str]:
    """Yield lines about the changes between two records: of statuses, messages and unreachable nodes.

    If ``before`` is ``None``, all statuses of the workflow and its groups count as changed. A task has a line when it
    fails by itself. Other changes of tasks have lines only if ``before`` is given and the group has at most 8 tasks.
    """
    if before is None or before.status != after.status:
        yield f"{after.id}: {after.status}"
    old_groups = {group.name: group for group in before.groups} if before else {}
    for group in after.groups:
        old = old_groups.get(group.name)
        if old is None or (old.status, old.message) != (group.status, group.message):
            if group.earlier_causes and (old is None or old.attempt != group.attempt):
                yield f"{group.name}: retried after {group.earlier_causes[-1].text}"
            yield f"{group.name}: {group.status}{f': {plain(group.message)}' if group.message else ''}"
        old_errors = {one.node: one.error for one in unreachable_nodes(old)} if old else {}
        errors = {one.node: one.error for one in unreachable_nodes(group)}
        news = (node for node, error in errors.items() if old_errors.get(node) != error)
        yield from (f"{node}: unreachable: {plain(errors[node].partition(chr(10))[0])}" for node in news)
        yield from (f"{node}: reachable again" for node in old_errors if node not in errors and not group.state.is_final)
        old_tasks = {task.name: task.status for task in old.tasks} if old else {}
        for task in group.tasks:
            if old_tasks.get(task.name) == task.status:
                continue
            failed_itself = task.state is State.FAILED and task.reason is not Reason.PEER_FAILED
            if (len(group.tasks) <= _FEW_TASKS and before is not None) or failed_itself:
                yield f"{task.name}: {task.status}{f': {task_words(task)}' if task_words(task) else ''}"


def missing_nodes(before: WorkflowRecord | None, after: WorkflowRecord, check: str, *, with_errors: bool) -> Iterator[str]:
    """Yield lines about the unreachable nodes that a group waits for, if ``before`` did not have the same nodes.

    ``check`` is the command that checks the nodes of the pool. ``with_errors`` adds the errors of the first 4 nodes.
    """
    old = {group.name: group.missing_nodes for group in before.groups} if before else {}
    for group in after.groups:
        known, missing = old.get(group.name), group.missing_nodes
        if missing is None or (known is not None and known.errors.keys() == missing.errors.keys()):
            continue
        nodes = few(list(missing.errors), ", ")
        yield f"{group.name} cannot start before distflow reaches {nodes}"
        if with_errors:
            yield from (f"  {node}: {plain(error)}" for node, error in list(missing.errors.items())[:_FEW_NODES])
        yield f"  distflow keeps trying. To check all nodes: {check}"
        yield f"  To use fewer or other nodes, cancel the workflow first: distflow workflow cancel {after.id}"


def event_line(event: EventRecord) -> str:
    """Return an event in OSMO's format: ``2025/04/11 14:31:07 [worker] started on gpu2``."""
    if event.task is None:
        return f"{local_second(event.at)} {plain(event.text)}"
    retry = f" retry-{event.attempt}" if event.attempt else ""
    return f"{local_second(event.at)} [{event.task}{retry}] {plain(event.description)}"


def elapsed_s(begun: float | None, ended: float | None, now: float | None) -> float | None:
    """Return the seconds from ``begun`` to ``ended``, or else to ``now``; ``None`` if the begin or the end is unknown."""
    end = ended if ended is not None else now
    return None if begun is None or end is None else max(0.0, end - begun)


def queued_s(record: WorkflowRecord, now: float | None) -> float | None:
    """Return the seconds from the submission of a workflow to its start.

    If it has not started, count until its end, or else until ``now``.
    """
    begun = record.started_at if record.started_at is not None else record.ended_at
    return elapsed_s(record.submitted_at, begun, now)


def cause_lines(cause: Cause, paint: Paint) -> Iterator[str]:
    """Yield a first cause in short form: its text, and the last lines of its traceback or output that are not in the text."""
    words = cause.text
    yield paint.bad(f"First cause: {words}")
    lines = [without_node_paths(plain(line)).rstrip() for line in cause.traceback.splitlines() or cause.lines]
    news = [line for line in lines if line.strip() not in words and not line.startswith("Traceback (most recent call last)")]
    yield from (f"  | {line}" for line in news[-_CAUSE_LINES:])


def without_node_paths(line: str) -> str:
    """Return a line without the directory of the attempt on its node.

    Paths in the working directory become relative. Paths of the spec's ``files`` become the absolute paths in the spec.

    >>> without_node_paths('File "/home/me/distflow-node/0123456789abcdef0123456789abcdef/training/node-0/0/work/train.py"')
    'File "train.py"'
    """
    line = re.sub(_ATTEMPT + "work/", "", line)
    return re.sub(_ATTEMPT + "files/", "/", line)


def _group_words(record: WorkflowRecord, group: GroupRecord, paint: Paint, remedy: str) -> Iterator[str]:
    if group.left_out:
        verb = "ran" if group.state.is_final else "runs"
        yield f"{verb} without {few(group.left_out, ', ')}, because the pool has too little room (elastic)"
    older = len(group.earlier_causes) - _FEW_ATTEMPTS
    if older > 0:
        attempts = "Attempt 1 is" if older == 1 else f"Attempts 1 to {older} are"
        yield f"{attempts} shown by `query -v` and `events`"
    for number, cause in enumerate(group.earlier_causes):
        if number >= older:
            yield f"Attempt {number + 1}: {cause.text}"
    if group.cause is not None:
        yield from cause_lines(group.cause, paint)
        if remedy:
            yield f"Remedy: {remedy}"
        pid = f", pid {group.cause.pid}" if group.cause.pid is not None else ""
        yield f"{local_second(group.cause.at)}{pid}; details: distflow workflow why {record.id}"
    elif group.state is State.WAITING:
        yield plain(group.message) or waiting_text(group.upstream or ("the groups before it",))
    elif group.state is State.SCHEDULING:
        yield from _lines(group.message or "Waiting for nodes")
    elif group.message:
        yield from _lines(group.message)


def _lines(message: str) -> Iterator[str]:
    """Yield the lines of a message. Lines after the first are indented, because remedies have commands on their own lines."""
    first, *rest = message.splitlines() or [""]
    yield plain(first)
    yield from (f"  {plain(line)}" for line in rest)


def _task_header(verbose: bool, usage: TaskUsage, trend: str) -> tuple[str, ...]:
    more = ("Retry ID", "PID", "Start Time") if verbose else ()
    return (
        "Task",
        *more,
        "Node",
        "Ranks",
        "GPUs",
        "Status",
        "Exit",
        "Elapsed",
        *usage_header(usage),
        *filter(None, [trend]),
        "Last log line",
    )


def _task_row(
    group: GroupRecord,
    task: TaskRecord,
    now: float,
    last_lines: LastLines,
    usage: TaskUsage,
    paint: Paint,
    verbose: bool,
    trend: str,
) -> tuple[str, ...]:
    end = task.end
    exit_shown = exit_text(end.exit_code, end.signal).removeprefix("exit code ") if end else ""
    pid = str(task.pid) if task.pid is not None else ""
    more = (str(task.attempt), pid, local_minute(task.started_at)) if verbose else ()
    used = usage.get((group.name, task.name, task.attempt))
    return (
        task.name,
        *more,
        task.node or "",
        task.ranks,
        ranges(task.gpu_ids, ","),
        paint.status(task.status),
        exit_shown,
        duration_hms(elapsed_s(task.started_at, task.ended_at, now)),
        *usage_cells(used, usage_header(usage)),
        *((spark(used.recent) if used is not None else "",) if trend else ()),
        _transfer_words(group, task) or plain(last_lines.get((group.name, task.name, task.attempt), "")).strip(),
    )


def _transfer_words(group: GroupRecord, task: TaskRecord, before: str = "", after: str = "") -> str:
    files = group.current_transfer(task)
    if files is None:
        return ""
    if files.image:
        return f"{before}Pulling image {files.image}{after}"
    step = {"packs": "Packing", "sends": "Sending", "writes": "Writing"}.get(files.output, "Moving")
    doing = f"{step} output" if files.output else "Copying files"
    if files.url:
        doing = f"{doing} to {files.url}" if files.output else f"Fetching {files.url}"
    share = f"{bytes_text(files.sent)} of {bytes_text(files.total)}"
    return f"{before}{doing}: {share}, {bytes_text(files.bytes_per_s)}/s{after}"


def _attempt_name(task: TaskRecord) -> str:
    return f"{task.name} retry-{task.attempt}" if task.attempt else task.name


def task_words(task: TaskRecord) -> str:
    """Return the reason of a task's status, or an empty text."""
    return plain(task.message) if task.message else REASON_TEXT[task.reason] if task.reason else ""


class UnreachableNode(Struct, frozen=True, kw_only=True):
    """An unreachable node and the unfinished tasks of one group on it."""

    node: str
    since: float
    error: str
    tasks: tuple[str, ...]

    @property
    def words(self) -> str:
        """A sentence that reports the node as unreachable."""
        return f"{self.node} has been unreachable since {local_second(self.since)}: {self.error}"


def unreachable_nodes(group: GroupRecord) -> list[UnreachableNode]:
    """Return the unreachable nodes of a group, in the order of its tasks."""
    found: dict[str, UnreachableNode] = {}
    for task in group.tasks:
        if task.node is None or task.outage is None or task.state.is_final:
            continue
        others = found[task.node].tasks if task.node in found else ()
        found[task.node] = UnreachableNode(
            node=task.node, since=task.outage.since, error=task.outage.error, tasks=(*others, task.name)
        )
    return list(found.values())


def cancel_words(record: WorkflowRecord, node_lost_after_s: float) -> Iterator[str]:
    """Yield the effect of a cancel request on each unreachable node of a workflow."""
    for group in record.groups:
        for one in unreachable_nodes(group):
            yield one.words
            yield (
                f"  {' and '.join(one.tasks)} may still run on {one.node} and will be stopped as soon as it responds."
                f" If that takes longer than `node_lost_after` ({node_lost_after_s:g} s), {record.id} ends without them."
            )


def left_behind(record: WorkflowRecord) -> Iterator[str]:
    """Yield a sentence for each task of an ended workflow that may still run on an unreachable node."""
    for group in record.groups:
        for task in group.tasks:
            if task.orphan is not None:
                yield f"{task.name}: {task.message}; it may still run there until {task.node} responds"


def cancel_json(record: WorkflowRecord) -> list[dict[str, object]]:
    """Return the unreachable nodes for ``cancel --format-type json``."""
    return [
        {**name_keys(node=one.node), **times(since=one.since), "error": one.error, "tasks": list(one.tasks)}
        for group in record.groups
        for one in unreachable_nodes(group)
    ]
