"""The sentences of events. Code that needs the content of an event reads its fields instead."""

from __future__ import annotations

from distflow.documents.quantities import bytes_text, count_text, seconds_text
from distflow.documents.text import few
from distflow.layout.ranks import rank_label
from distflow.state import event_details as of

__all__ = ["event_text", "hang_text", "next_attempt_text"]


def event_text(details: of.EventDetails, *, group: str | None, task: str | None) -> str:
    """Return the sentence of an event. It begins with the task or group, if the event has one, except for a ``Message``."""
    text = _text(details)
    subject = task or group
    return f"{subject}: {text}" if subject is not None and not isinstance(details, of.Message) else text


def hang_text(limit_s: float | None) -> str:
    """Return the reason why a group may hang."""
    if not limit_s:
        return "no task prints anything or sends a heartbeat"
    return f"no task has printed anything or sent a heartbeat for {seconds_text(limit_s)} (hang_timeout)"


def next_attempt_text(attempt: int, attempts: int, wait_s: float) -> str:
    """Return when the next attempt of a group begins; attempts are counted from 1."""
    return f"attempt {attempt} of at most {attempts} begins in {seconds_text(wait_s)}"


def _text(details: of.EventDetails) -> str:  # noqa: C901  one case for each kind of event
    match details:
        case of.Message():
            return details.text
        case of.WorkflowSubmitted():
            kept = f"; kept: {', '.join(details.kept)}" if details.kept else ""
            if details.parent:
                return f"restarted from {details.parent} by {details.user} in pool {details.pool}{kept}"
            return f"submitted by {details.user} to pool {details.pool}{kept}"
        case of.WorkflowAdopted():
            where = ", ".join(details.nodes)
            return f"adopted from {where}: {details.user} submitted it on {details.host} as {details.id}"
        case of.CancelRequested():
            return f"{details.user} requested the cancellation" + _after(details.message)
        case of.WorkflowStatus():
            return f"workflow {details.id}: {details.status}"
        case of.WorkflowRefused():
            return f"cannot run: {details.message}"
        case of.NodeBecameUnreachable():
            return f"{details.node}: unreachable: {details.error}"
        case of.NodeBecameReachable():
            return f"{details.node}: reachable again"
        case of.GroupStatus() | of.TaskStatus():
            return details.status + _after(details.message)
        case of.GroupWaiting():
            return details.message
        case of.CheckpointsDiffer():
            return details.message or _checkpoints(details)
        case of.AttemptForgotten():
            return details.message or f"{details.node} has no record of this attempt: its directory is gone"
        case of.GroupCannotStart() | of.TaskCannotStart():
            return f"cannot start: {details.message}"
        case of.GroupRescheduled():
            following = details.next or next_attempt_text(details.attempt, details.attempts, details.wait_s)
            return f"RESCHEDULED: {details.failed_task}: {details.message}; {following}"
        case of.VenvReady():
            how = f"{details.tool}, {seconds_text(details.seconds)}"
            return f"{details.node} has built the Python environment of {details.file} ({how})"
        case of.LeaseGranted():
            return _lease(details)
        case of.HangSuspected():
            where = (
                f"; to show the stacks of its processes: distflow workflow stacks {details.workflow_id}"
                if details.workflow_id
                else ""
            )
            return f"may hang: {hang_text(details.limit_s)}{where}"
        case of.HangOver():
            return "makes progress again"
        case of.TaskReady():
            return f"ready to start on {details.node}"
        case of.TaskStarted():
            where = ", ".join(filter(None, [details.node, rank_label(details.ranks)]))
            return f"started on {where}" + (f" (pid {details.pid})" if details.pid is not None else "")
        case of.LeaseLost():
            return "lost its lease before it was started"
        case of.OrphanStopping():
            return f"stopping the abandoned attempt on {details.node}, which is reachable again"
        case of.OrphanGone():
            return f"the abandoned attempt on {details.node} has ended"
        case of.NotificationSent():
            return f"notified {details.target} (`{details.on}`)"
        case of.NotificationFailed():
            return f"could not notify {details.target} (`{details.on}`): {details.error}"
        case of.OrphanNotSeen():
            return f"the abandoned attempt on {details.node} was not stopped: the node stayed unreachable"
        case _:
            return _data_text(details)


def _data_text(  # noqa: C901  one case for each kind of event
    details: (
        of.OutputCollected | of.OutputHeldBack | of.OutputLosing | of.InputFetched | of.InputEmpty | of.OutputWritten
        | of.OutputEmpty | of.DataRelayed | of.DataFailed
        | of.CheckpointFailed | of.CheckpointFilesLeftOut | of.CheckpointWritten
    ),
) -> str:  # fmt: skip
    match details:
        case of.OutputCollected():
            where = "is available on every node" if details.is_everywhere else "was copied to this machine"
            left_out = (
                f"; left out, because archives cannot contain them: {', '.join(details.left_out)}" if details.left_out else ""
            )
            return f"its output {where}: {bytes_text(details.size)}{left_out}"
        case of.OutputHeldBack():
            return f"its printed output stays on {details.node}: this machine's disk is almost full or fails; free space here"
        case of.OutputLosing():
            return f"its printed output is being lost: the disk of {details.node} is full or fails; free space there"
        case of.InputFetched():
            verb = "is fetched by its node" if details.is_direct else "was fetched"
            return f"its input {verb}: {details.url}: {_files(details.files, details.size)}"
        case of.InputEmpty():
            matched = f"no file at {details.url} matches `{details.regex}`"
            return f"{matched if details.regex else f'there is no file at {details.url}'}: the directory of its input is empty"
        case of.OutputWritten():
            return f"its output is at {details.url}: {_files(details.files, details.size)}"
        case of.OutputEmpty():
            why = f"no output file matches `{details.regex}`" if details.regex else "its output has no files"
            return f"nothing is written to {details.url}: {why}"
        case of.DataRelayed():
            what = "input comes from" if details.is_input else "output goes to"
            return f"its {what} {details.url} through this machine: {details.why}"
        case of.DataFailed():
            return f"its {'input' if details.is_input else 'output'}: {details.error}"
        case of.CheckpointFailed():
            return f"its checkpoint was not {'written' if details.is_taken else 'taken'}: {details.error}"
        case of.CheckpointFilesLeftOut():
            what = "files that changed during the copy, links that lead out of its directory, sockets, pipes or devices"
            return f"its checkpoint does not contain {what}: {', '.join(details.files)}"
        case of.CheckpointWritten():
            return f"its checkpoint is at {details.url}: {_files(details.files, details.size)}"


def _checkpoints(details: of.CheckpointsDiffer) -> str:
    found = []
    for directory, sizes in details.sizes.items():
        texts = [f"{task}: {'none' if size is None else bytes_text(size)}" for task, size in sizes.items()]
        found.append(f"`{directory}` ({few(texts)})")
    return (
        f"the tasks begin with different files in {' and '.join(found)}. Ranks that load different checkpoints train wrongly"
        "; `shared` gives all tasks of the group the same files"
    )


def _lease(details: of.LeaseGranted) -> str:
    port = f", port {details.port}" if details.port is not None else ""
    where = ", ".join(f"{task} on {node}" for task, node in details.nodes.items()) + port
    return f"has its nodes: {where}" + (f"; runs without {few(details.left_out, ', ')}" if details.left_out else "")


def _files(files: int, size: int) -> str:
    return f"{count_text(files, 'file')}, {bytes_text(size)}"


def _after(message: str) -> str:
    return f": {message}" if message else ""
