"""Data of groups: inputs from URLs, outputs to URLs, and outputs for dependent groups. This module does no I/O.

Inputs are fetched or looked up before a group is queued, and outputs are written after its tasks end. Nodes themselves transfer
data of object stores (``s3``, ``gs``, ``az``, ``azure``), if they can. Such an input is only looked up before its group is
queued, and the node of each task fetches it during preparation. All other data is relayed: it passes through this machine. A
relayed input becomes an archive in the blob store, like the output of a task, and is sent to the nodes. A relayed output is
first collected from its node.

This module returns commands, which are repeated until the record has their outcome; ``transfer_threads`` executes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from msgspec import Struct

from distflow.backends.base import AttemptKey, AttemptObservation, Collected, InputNotFetched, LeaseObservation, VenvObservation
from distflow.documents.quantities import seconds_text
from distflow.documents.urls import parse_url
from distflow.lifecycle.states import Reason, State, joined_names
from distflow.plan.model import BoundLaunch, Download, GroupPlan, Plan, PlannedFile
from distflow.plan.tokens import input_place
from distflow.spec.model import DataSpec, InputSpec
from distflow.state.event_details import (
    DataFailed,
    DataRelayed,
    EventDetails,
    InputEmpty,
    InputFetched,
    OutputEmpty,
    OutputWritten,
)
from distflow.state.record import (
    Cause,
    DataKind,
    DataRef,
    EventRecord,
    GroupRecord,
    TaskRecord,
    TransferProgress,
    TransferRecord,
    WorkflowRecord,
)
from distflow.storage.credentials import package_of
from distflow.structs import replace
from distflow.supervisor.commands import TransferData, TransferEnded, TransferMoved
from distflow.supervisor.snapshot import NodeView, attempt_key

__all__ = [
    "GroupTransfers",
    "PendingOutputs",
    "Transfer",
    "add_task_inputs",
    "add_url_inputs",
    "apply_data",
    "apply_input_not_fetched",
    "archives",
    "arrived_archives",
    "fetch_transfer",
    "fetched_inputs",
    "inherited_results",
    "input_transfers",
    "is_needed",
    "output_transfers",
    "pending_outputs",
    "relayed_tasks",
    "write_transfer",
    "writers",
    "written_outputs",
]


class Transfer(Struct, frozen=True, kw_only=True):
    """One data transfer to execute."""

    data: DataRef
    url: str
    """The URL with all tokens replaced, perhaps with secrets."""
    regex: str
    digest: str = ""
    """The digest of the archive to write. Without it and without ``source``, the transfer fetches an input or looks it up."""
    source: AttemptKey | None = None
    """The attempt whose node writes the output itself."""
    dataset: str = ""
    """The dataset below the URL, with or without a version; empty if the URL itself is meant."""
    paths: tuple[str, ...] = ()
    """For an output into a dataset: the paths to write; empty for all."""
    is_update: bool = False
    """For an output into a dataset: whether its files are added to those of an existing version."""
    nodes_can_fetch: bool = False
    """For an input: whether nodes are expected to fetch it themselves."""

    @property
    def label(self) -> str:
        """The dataset, or the URL without secrets."""
        return f"dataset {self.dataset}" if self.dataset else str(parse_url(self.url))


class GroupTransfers(Struct, frozen=True, kw_only=True):
    """The state of a group's data transfers."""

    commands: tuple[TransferData, ...] = ()
    """All remaining transfers; some of them may be running."""
    message: str = ""
    """A message that names all transfers; empty if none of them remains."""
    failed: Cause | None = None
    """The reason why a transfer can never succeed."""
    at: float = 0.0
    """The time at which the last transfer ended; 0 if none has ended."""
    on_nodes: frozenset[str] = frozenset()
    """Tasks whose nodes still have outputs to write."""


def input_transfers(plan: GroupPlan, record: WorkflowRecord, group: GroupRecord) -> GroupTransfers:
    """Return the transfers from URLs that a group still needs. All groups that it depends on must have completed."""
    present = {task.name for task in group.tasks}
    done = {one.data: one.task for one in group.transfer_results if not one.is_relayed}
    transfers = [
        # The transfer is named after a task that runs: a smaller world may leave out the first task that needs the data.
        (done.get(data) or next(name for name in tasks if name in present), _fetch(data, one, record, group))
        for data, tasks, one in _fetches(plan)
        if data in done or not present.isdisjoint(tasks)
    ]
    doing = "checking inputs: " if all(transfer.nodes_can_fetch for _, transfer in transfers) else "fetching inputs: "
    return _group_transfers(record, group, transfers, doing, "an input cannot be fetched")


def output_transfers(plan: GroupPlan, record: WorkflowRecord, group: GroupRecord) -> GroupTransfers:
    """Return the transfers to URLs that remain for a group whose tasks ended well, if they can be done now."""
    transfers = [(task, transfer) for task, transfer in _writes(plan, record, group) if transfer.source or transfer.digest]
    return _group_transfers(record, group, transfers, "all tasks have ended; writing outputs: ", "its output cannot be written")


def relayed_tasks(plan: GroupPlan, record: WorkflowRecord, group: GroupRecord) -> frozenset[str]:
    """Return the tasks with an output that this machine writes. It must first be collected from the node."""
    return frozenset(task for task, transfer in _writes(plan, record, group) if transfer.source is None)


def writers(plan: GroupPlan, group: GroupRecord) -> list[TaskRecord]:
    """Return the tasks whose output goes to URLs: those that completed without being stopped."""
    wanting = {launch.task for launch in plan.launches if launch.url_outputs}
    return [
        task
        for task in group.tasks
        if task.name in wanting and task.state is State.COMPLETED and task.end is not None and task.end.stopped_at is None
    ]


def add_url_inputs(launch: BoundLaunch, plan: GroupPlan, record: WorkflowRecord, group: GroupRecord) -> BoundLaunch:
    """Return the launch with its inputs from URLs: archives to unpack, and inputs that its node fetches itself.

    All of them were fetched or looked up before the task was prepared.
    """
    refs = {_input_key(one): data for data, _, one in _fetches(plan)}
    done = {one.data: one for one in group.transfer_results if not one.is_relayed}
    files, downloads = [], []
    for one in plan.launch(launch.task).url_inputs:
        found, path = done[refs[_input_key(one)]], input_place(one.position)
        if found.is_direct:
            url = _filled_url(one, record)
            downloads.append(Download(number=found.data.number, path=path, url=url, regex=one.regex, dataset=found.dataset))
        else:
            shown = f"the data at {found.url}"
            files.append(PlannedFile(path=path, shown=shown, blob=found.digest, size=found.size, mode=0o700, is_tar=True))
    return replace(launch, files=(*launch.files, *files), downloads=tuple(downloads))


def fetched_inputs(plan: GroupPlan, group: GroupRecord, task: str) -> list[TransferRecord]:
    """Return the outcomes, successful or not, of fetching a task's inputs to this machine; several tasks may share one."""
    wanted = {_input_key(one) for one in plan.launch(task).url_inputs}
    refs = {data for data, _, one in _fetches(plan) if _input_key(one) in wanted}
    return [one for one in group.transfer_results if one.data in refs and not (one.is_relayed or one.is_direct)]


def written_outputs(group: GroupRecord, task: str) -> list[TransferRecord]:
    """Return the outcomes, successful or not, of writing a task's outputs to URLs."""
    return [one for one in group.transfer_results if one.is_written and one.task == task]


def inherited_results(group: GroupRecord) -> tuple[TransferRecord, ...]:
    """Return the transfers that the next attempt of a group inherits.

    They are the inputs that were fetched or looked up, and the notes about inputs that nodes cannot fetch.
    """
    inputs = [one for one in group.transfer_results if one.data.kind is DataKind.FETCH]
    return (
        *(one for one in inputs if not (one.is_relayed or one.error)),
        *(one for one in inputs if one.is_relayed),
    )


def fetch_transfer(plan: GroupPlan, record: WorkflowRecord, command: TransferData) -> Transfer:
    """Return the transfer that fetches an input or looks it up."""
    one = next(one for data, _, one in _fetches(plan) if data == command.data)
    return _fetch(command.data, one, record, record.group(plan.name))


def write_transfer(plan: GroupPlan, record: WorkflowRecord, command: TransferData) -> Transfer:
    """Return the transfer that writes an output."""
    group, task = record.group(plan.name), command.key.task
    one = next(one for one in plan.launch(task).url_outputs if one.position == command.data.number)
    return _write(one, record, group, group.task(task))


def is_needed(record: WorkflowRecord, command: TransferData) -> bool:
    """Return whether the group of a transfer still needs it."""
    group = record.group(command.key.group)
    return not group.state.is_final and group.attempt == command.key.attempt


def apply_data(record: WorkflowRecord, observation: TransferMoved | TransferEnded) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after progress or the end of a transfer, and the events that report it."""
    group = record.group(observation.key.group)
    task = group.find(observation.key.task, observation.key.attempt)
    is_relayed = isinstance(observation, TransferEnded) and observation.outcome.is_relayed
    is_known = any(
        (one.data, one.is_relayed, one.task) == (observation.data, is_relayed, observation.key.task)
        for one in group.transfer_results
    )
    if task is None or task.attempt != group.attempt or group.state.is_final or is_known:
        return record, []
    is_input = observation.data.kind is DataKind.FETCH
    if isinstance(observation, TransferMoved):
        step = "" if is_input else "writes"
        moved = TransferProgress(
            sent=observation.done,
            total=observation.total,
            bytes_per_s=observation.bytes_per_s,
            at=observation.at,
            output=step,
            url=observation.url,
        )
        return record.with_group(group.with_task(replace(task, transfer=moved))), []
    after = replace(
        group.with_task(replace(task, transfer=None)), transfer_results=(*group.transfer_results, observation.outcome)
    )
    details = _details(observation)
    event = EventRecord(
        at=observation.at, details=details, workflow=record.uuid, group=group.name, task=task.name, attempt=task.attempt
    )
    warnings = (event.text,) if isinstance(details, InputEmpty) else ()
    return replace(record.with_group(after), warnings=(*record.warnings, *warnings)), [event]


def _details(observation: TransferEnded) -> EventDetails:
    """Return the event's details for the end of a transfer."""
    done, is_input = observation.outcome, observation.data.kind is DataKind.FETCH
    if done.is_relayed:
        return DataRelayed(is_input=is_input, url=done.url, why=done.error)
    if done.error:
        return DataFailed(is_input=is_input, error=done.error)
    if is_input:
        if not done.files:
            return InputEmpty(url=observation.url, regex=done.regex)
        return InputFetched(url=done.url, files=done.files, size=done.content, is_direct=done.is_direct)
    if not done.files:
        return OutputEmpty(url=observation.url, regex=done.regex)
    return OutputWritten(url=done.url, files=done.files, size=done.content)


def apply_input_not_fetched(record: WorkflowRecord, observation: InputNotFetched) -> tuple[WorkflowRecord, list[EventRecord]]:
    """Return the workflow's record after a node could not fetch an input. This machine then fetches it for all nodes."""
    group = record.group(observation.key.group)
    data = DataRef(DataKind.FETCH, observation.number)
    found = next((one for one in group.transfer_results if one.data == data and one.is_direct), None)
    if found is None or observation.key.attempt != group.attempt or group.state.is_final:
        return record, []  # another node reported the same before, or the attempt is over
    left = tuple(one for one in group.transfer_results if one is not found)
    note = TransferRecord(
        data=data, is_relayed=True, task=found.task, at=observation.at, url=found.url, regex=found.regex, error=observation.why
    )
    event = EventRecord(
        at=observation.at, details=DataRelayed(is_input=True, url=found.url, why=observation.why),
        workflow=record.uuid, group=group.name, task=observation.key.task, attempt=observation.key.attempt,
    )  # fmt: skip
    return record.with_group(replace(group, transfer_results=(*left, note))), [event]


def _transfer(data: DataRef, one: DataSpec, record: WorkflowRecord) -> Transfer:
    paths = one.paths or ((one.path,) if one.path else ())
    return Transfer(
        data=data, url=_filled_url(one, record), regex=one.regex, dataset=one.dataset, paths=paths, is_update=one.is_update
    )


def _fetch(data: DataRef, one: DataSpec, record: WorkflowRecord, group: GroupRecord) -> Transfer:
    transfer = _transfer(data, one, record)
    relayed = {done.data for done in group.transfer_results if done.is_relayed}
    return replace(transfer, nodes_can_fetch=_nodes_can_transfer(transfer.url) and data not in relayed)


def _filled_url(one: DataSpec, record: WorkflowRecord) -> str:
    return one.url.replace("{{workflow_id}}", record.id)


def _nodes_can_transfer(url: str) -> bool:
    """Return whether nodes can transfer data at the URL: only object stores, whose drivers are packages.

    ``file://`` and ``sftp://`` depend on this machine's files and keys, and web servers are also accessed only from here.
    """
    return bool(package_of(parse_url(url)))


def _writes(plan: GroupPlan, record: WorkflowRecord, group: GroupRecord) -> list[tuple[str, Transfer]]:
    """Return the outputs for URLs of the tasks in ``writers``, each with its task, including those that are already written."""
    return [
        (task.name, _write(one, record, group, task))
        for task in writers(plan, group)
        for one in plan.launch(task.name).url_outputs
    ]


def _write(one: DataSpec, record: WorkflowRecord, group: GroupRecord, task: TaskRecord) -> Transfer:
    transfer = _transfer(DataRef(DataKind.WRITE, one.position), one, record)
    source = attempt_key(record, group, task)
    is_relayed = (transfer.data, task.name) in {(done.data, done.task) for done in group.transfer_results if done.is_relayed}
    if source is not None and not is_relayed and _nodes_can_transfer(transfer.url):
        return replace(transfer, source=source)
    return replace(transfer, digest=task.saved.digest if task.saved is not None else "")


def _input_key(one: DataSpec) -> tuple[str, str, str]:
    """Return a key that equal inputs share."""
    return (one.url, one.dataset, one.regex)


def _fetches(plan: GroupPlan) -> list[tuple[DataRef, tuple[str, ...], DataSpec]]:
    """Return the inputs that a group fetches: the reference, the tasks that use it, and the input. Equal inputs are one."""
    found: dict[tuple[str, str, str], tuple[DataRef, tuple[str, ...], DataSpec]] = {}
    for launch in plan.launches:
        for one in launch.url_inputs:
            data, tasks, first = found.get(_input_key(one), (DataRef(DataKind.FETCH, len(found)), (), one))
            found[_input_key(one)] = (data, (*tasks, launch.task), first)
    return list(found.values())


def _group_transfers(
    record: WorkflowRecord, group: GroupRecord, transfers: list[tuple[str, Transfer]], doing: str, failing: str
) -> GroupTransfers:
    done = {(one.data, one.task): one for one in group.transfer_results if not one.is_relayed}
    left = [(task, transfer) for task, transfer in transfers if (transfer.data, task) not in done]
    failed = [one for task, transfer in transfers if (one := done.get((transfer.data, task))) is not None and one.error]
    first = failed[0] if failed else None
    return GroupTransfers(
        commands=tuple(
            TransferData(
                record.pool_key,
                AttemptKey(workflow=record.uuid, group=group.name, task=task, attempt=group.attempt, node=""),
                transfer.data,
            )
            for task, transfer in left
        ),
        message=doing + ", ".join(dict.fromkeys(transfer.label for _, transfer in transfers)) if left else "",
        failed=_cause(group, first, failing) if first is not None else None,
        at=max((one.at for task, transfer in transfers if (one := done.get((transfer.data, task))) is not None), default=0.0),
        on_nodes=frozenset(task for task, transfer in left if transfer.source is not None),
    )


def _cause(group: GroupRecord, failed: TransferRecord, failing: str) -> Cause:
    task = group.task(failed.task)
    message = f"{failing}: {failed.error}"
    return Cause(task=task.name, reason=Reason.DATA, message=message, at=failed.at, node=task.node, ranks=task.ranks)


class PendingOutputs(Struct, frozen=True, kw_only=True):
    """The state of a group's outputs after all of its tasks have ended."""

    missing: tuple[TaskRecord, ...] = ()
    """Tasks whose output is needed on this machine and has not arrived."""
    commands: tuple[TransferData, ...] = ()
    """Outputs that this machine or nodes must write to URLs."""
    message: str = ""
    """The remaining work as a message; empty if there is none."""
    failure: Cause | None = None
    """The reason why one of the outputs will never be available."""
    saved_at: float = 0.0
    """The time at which the last output arrived or was written."""
    wake_at: float | None = None
    """The time at which an unreachable node will be considered lost."""


def pending_outputs(
    plan: Plan,
    record: WorkflowRecord,
    group: GroupRecord,
    node_of: Callable[[TaskRecord], NodeView | None],
    lost_after_s: float,
    now: float,
) -> PendingOutputs:
    """Return the remaining work for a group's outputs: fetch them for dependent groups, and write them to URLs."""
    planned = plan.group(group.name)
    passed_on = _wanted(plan, record)
    wanted = passed_on | relayed_tasks(planned, record, group)
    written = output_transfers(planned, record, group)
    tasks = [task for task in group.tasks if task.name in wanted]
    missing = tuple(task for task in tasks if task.saved is None)
    needed = [task for task in group.tasks if task.name in wanted | written.on_nodes]
    unavailable = [cause for task in needed if (cause := _unavailable(task, node_of(task), lost_after_s, now)) is not None]
    unreachable = {
        task.node: view
        for task in needed
        if (task in missing or task.name in written.on_nodes) and (view := node_of(task)) is not None and not view.up
    }
    message = _collecting_message(missing, passed_on) if missing else written.message
    return PendingOutputs(
        missing=missing,
        commands=written.commands,
        message="; ".join(
            [message, *(f"{name} is unreachable: {view.error}" for name, view in unreachable.items() if view.error)]
        ),
        failure=unavailable[0] if unavailable else written.failed,
        saved_at=max([written.at, *(task.saved.at for task in tasks if task.saved is not None)]),
        wake_at=min((view.lost_at(lost_after_s, now) for view in unreachable.values()), default=None),
    )


def add_task_inputs(launch: BoundLaunch, inputs: Sequence[InputSpec], record: WorkflowRecord) -> BoundLaunch:
    """Return the launch with its inputs from other tasks as archives to unpack; the groups of those tasks have completed."""
    saved = {task.name: task.saved for group in record.groups for task in group.tasks}
    files = []
    for one in inputs:
        found = saved[one.task]
        if found is None:
            raise AssertionError("a group completes only after its outputs have arrived")
        files.append(
            PlannedFile(
                path=input_place(one.position), shown=f"the output of {one.task}", blob=found.digest, size=found.size,
                mode=0o700, is_tar=True, only=one.regex,
            )
        )  # fmt: skip
    return replace(launch, files=(*launch.files, *files))


def archives(record: WorkflowRecord) -> frozenset[str]:
    """Return the archives (SHA-256) of a workflow's outputs, checkpoints and fetched inputs."""
    saved = {task.saved.digest for group in record.groups for task in group.attempts if task.saved and task.saved.digest}
    inputs = {one.digest for group in record.groups for one in group.transfer_results if one.digest}
    checkpoints = {one.digest for group in record.groups for one in group.checkpoints if one.digest}
    return frozenset(saved | inputs | checkpoints)


def arrived_archives(
    observation: LeaseObservation | VenvObservation | AttemptObservation | TransferMoved | TransferEnded,
) -> frozenset[str]:
    """Return the archive (SHA-256) whose arrival an observation reports; empty for any other observation."""
    outcome = (
        observation.outcome
        if isinstance(observation, TransferEnded)
        else observation
        if isinstance(observation, Collected)
        else None
    )
    return frozenset({outcome.digest} - {""}) if outcome is not None else frozenset()


def _wanted(plan: Plan, record: WorkflowRecord) -> frozenset[str]:
    """Return the tasks whose output a waiting group uses as its input."""
    waiting = [group for group in plan.groups if record.group(group.name).state is State.WAITING]
    return frozenset(one.task for group in waiting for launch in group.launches for one in launch.inputs)


def _unavailable(task: TaskRecord, view: NodeView | None, lost_after_s: float, now: float) -> Cause | None:
    reason, why = Reason.DATA, ""
    if task.saved is not None:
        why = task.saved.error
    elif task.node is None:
        why = "it was never started, so it has no output"
    elif view is not None and not view.up and now >= view.lost_at(lost_after_s, now):
        reason = Reason.NODE_LOST
        why = f"{task.node} has been unreachable for {seconds_text(now - view.since)}: {view.error}"
    if not why:
        return None
    message = f"its output cannot be passed on: {why}"
    return Cause(task=task.name, reason=reason, message=message, at=now, node=task.node, ranks=task.ranks)


def _collecting_message(missing: Sequence[TaskRecord], passed_on: Container[str]) -> str:
    why = "for waiting groups" if any(task.name in passed_on for task in missing) else "to write it to its URL"
    return f"all tasks have ended; copying the output of {joined_names([task.name for task in missing])} to this machine {why}"
