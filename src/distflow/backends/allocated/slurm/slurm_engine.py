"""Slurm as a cluster engine: ``sbatch``, ``squeue``, ``scancel`` and other commands of Slurm on the login node."""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar

from distflow.backends.allocated.engine import (
    Allocation,
    AllocationRequest,
    AllocationState,
    Granted,
    NodeRequest,
    Over,
    QueryLimit,
    Queued,
    Relay,
    RequestRefused,
)
from distflow.backends.allocated.slurm.commands import (
    CommandMissing,
    SlurmCommands,
    SlurmLogin,
    error_text,
    is_transient_error,
    step_prefix,
)
from distflow.backends.allocated.slurm.hostlists import expand_hosts
from distflow.backends.allocated.slurm.job_ends import JobEnd, job_end_command
from distflow.backends.allocated.slurm.job_request import (
    as_one_shape,
    components_of,
    container_options,
    is_temporary,
    is_time_limit_refusal,
    job_script,
    lacks_het_jobs,
    log_path,
    refusal,
    sbatch_arguments,
    within_limits,
)
from distflow.backends.allocated.slurm.job_states import (
    SHOW_PARTITIONS,
    Component,
    JobPhase,
    jobs_of,
    partitions_of,
    pending_text,
    phase_of,
    squeue_format,
    state_text,
)
from distflow.backends.allocated.slurm.slurm_checks import check_slurm
from distflow.backends.base import NO_EXIT_CODES
from distflow.backends.machines.checks.findings import Finding
from distflow.documents.text import plain
from distflow.errors import NodeUnreachable
from distflow.pools.model import Pool, SlurmSettings, ssh_node
from distflow.structs import replace
from distflow.transports.base import BorrowedTransport, Transport

__all__ = ["SlurmEngine"]

_SUBMIT_EVERY_S = 0.2
"""The shortest time between two submissions."""
_KNOWN_FOR_S = 20.0
"""How long the last list of jobs is used to find an existing job."""
_PARTITIONS_FOR_S = 600.0
"""How long the last list of partitions is used."""
_ENDED_ALREADY = "(?i)invalid job id|already completed|already completing"
"""Matches the output of ``scancel`` for jobs that have ended."""
_LARGEST_SHAPE = (
    "the tasks of the group request different resources, but every node gets the largest of them, because the pool or the "
    "cluster does not allow heterogeneous jobs"
)


class SlurmEngine:
    """Allocates nodes as jobs of Slurm (contract: ``allocated.engine.Engine``).

    1. One ``squeue`` lists all jobs of the user. When jobs have ended, one further command reads the causes of all of them.
    2. A submission whose answer was lost is found by its marker. If Slurm accepts it only after ``request`` has submitted
       another job, two jobs have the same marker. Then ``states`` cancels the job that the caller does not know.
    """

    query_limit: ClassVar = QueryLimit(at_once=4.0, every_s=8.0)
    """At most 11 queries of states a minute. Other calls may also list the jobs, but not for each job."""

    def __init__(
        self,
        pool: Pool,
        login: Transport,
        *,
        script: Callable[[str, float, int], str],
        relay: Callable[..., Relay],
    ) -> None:
        """Use the commands of Slurm over ``login``, which ``close`` closes.

        ``script(python, idle_release_s, components)`` returns the script that starts the resident programs of a job.
        ``relay(login, job, host, python, prefix=…, is_transient=…)`` returns a ``RelayTransport`` to one of them.
        """
        self._script = script
        self._relay = relay
        self._pool = pool
        self._settings = pool.slurm or SlurmSettings()
        self._template = pool.template or ssh_node()
        self._login = SlurmLogin(login, is_local=pool.login is None)
        self._commands = SlurmCommands(self._login)
        self._submitting = threading.Lock()
        """Held during a submission, so that there is one at a time."""
        self._last_submit = 0.0
        self._known_partitions: Mapping[str, Mapping[str, str]] = {}
        self._partitions_at: float | None = None
        """When they were queried (monotonic clock)."""
        self._is_closed = threading.Event()
        self._state = threading.Lock()
        """Guards everything below."""
        self._active: dict[str, Allocation] = {}
        self._listed_at: float | None = None
        """When ``_active`` was queried (monotonic clock)."""
        self._unsure: set[str] = set()
        """Markers of submissions whose answer was lost."""
        self._submitted: dict[str, tuple[float, Allocation]] = {}
        """Jobs that this process submitted and has not released, with the time of submission."""
        self._over: dict[str, Over] = {}
        """Ended jobs whose reason is known."""
        self._released: set[str] = set()
        """Released jobs. They may still be listed, but a new request must not reuse them."""
        self._notices: dict[str, str] = {}
        self._hosts: dict[str, str] = {}
        """Job that has or had hosts → the hosts of its first component, as Slurm writes them."""
        self._het_groups: dict[str, dict[str, int]] = {}
        """Job → host → component; empty for a job that is not heterogeneous."""

    def request(self, wanted: AllocationRequest) -> str:
        """Submit a job, or return the one that exists already for this allocation."""
        try:
            with self._submitting:
                return self._existing(wanted.allocation) or self._new_job(wanted)
        except CommandMissing as error:
            raise RequestRefused(error.message, hint=error.hint) from error

    def notice(self, allocation_id: str) -> str:
        """Return a warning about how an allocation was requested; empty if there is none."""
        with self._state:
            return self._notices.get(allocation_id, "")

    def states(self, ids: Mapping[str, Sequence[str]]) -> Mapping[str, AllocationState]:
        """Return the state of each job. This takes one query to Slurm, and a second one if jobs have ended."""
        with self._state:
            known = {job: self._over[job] for job in ids if job in self._over}
        if not ids.keys() - known.keys():
            return known
        jobs = self._list()
        self._cancel_unwanted(jobs, ids)
        found: dict[str, AllocationState] = dict(known)
        ended = []
        for job, tasks in ids.items():
            if job in known:
                continue
            try:
                state = _state_of(jobs.get(job, ()), tasks)
            except ValueError as error:
                raise NodeUnreachable(self._commands.node, f"`squeue`: {plain(str(error))[:300]}") from error
            if state is None:
                ended.append(job)
            else:
                found[job] = state
        if ended:
            ends = self._job_ends(ended, jobs)
            with self._state:
                self._over |= {job: state for job, state in ends.items() if isinstance(state, Over)}
            found |= ends
        return found

    def allocations(self) -> Mapping[str, Allocation]:
        """Return all jobs of this user that carry a marker and have not ended."""
        self._list()
        with self._state:
            return dict(self._active)

    def release(self, ids: Sequence[str], exit_codes: Mapping[str, int] = NO_EXIT_CODES) -> None:
        """Cancel jobs, waiting or running. A job in ``exit_codes`` ends with that code if its resident program answers."""
        with self._state:
            is_known = all(job in self._active or job in self._submitted for job in ids)
        if not is_known:
            self._list()
        ids = [job for job in ids if job not in exit_codes or not self._end(job, exit_codes[job])]
        with self._state:
            # Only jobs with a marker: after a reset of the cluster, the user's own job may have got an old id.
            jobs = [job for job in ids if job in self._active or job in self._submitted]
        if not jobs:
            return
        logs = " ".join(log_path(self._template.root, job) for job in jobs)
        script = f'scancel "$@"; code=$?; rm -f {logs}; exit $code'
        done = self._commands.run("sh", "-c", script, "sh", *jobs, program="scancel")
        failures = [line for line in error_text(done).split("; ") if re.search(_ENDED_ALREADY, line) is None]
        if done.exit_code != 0 and failures:
            raise self._commands.failure("scancel", done)
        self._forget(jobs)

    def _forget(self, released: Collection[str]) -> None:
        with self._state:
            self._released.update(released)
            for job in released:
                self._active.pop(job, None)
                self._submitted.pop(job, None)
                self._notices.pop(job, None)

    def transport(self, allocation_id: str, host: str) -> Transport:
        """Return a transport to a node of a job, without connecting."""
        return self._open_relay(allocation_id, host)

    def _open_relay(self, allocation_id: str, host: str) -> Relay:
        prefix = partial(self._step, allocation_id, host)
        return self._relay(
            self._login, allocation_id, host, self._template.python, prefix=prefix, is_transient=is_transient_error
        )

    def login_transport(self) -> Transport:
        """Return a transport to the login node, which stays connected for the engine."""
        return BorrowedTransport(self._login)

    def check(self, on_progress: Callable[[str], None] = lambda _: None) -> Sequence[Finding]:
        """Return the findings about the cluster and the pool's settings."""
        return list(check_slurm(self._pool, self._commands, on_progress))

    def close(self) -> None:
        """Close the connection to the login node. Jobs stay."""
        self._is_closed.set()
        self._login.close()

    def _step(self, job: str, host: str) -> Sequence[str]:
        """Return the prefix that runs a command as another step of a job, on one of its hosts."""
        return step_prefix(job, host, self._het_group(job, host))

    def _het_group(self, job: str, host: str) -> int | None:
        """Return the component of a heterogeneous job that has a host; ``None`` for other jobs.

        Raises ``NodeUnreachable`` if Slurm must be queried and does not answer.
        """
        with self._state:
            groups = self._het_groups.get(job)
        if groups is None:
            self._list()
            with self._state:
                groups = self._het_groups.setdefault(job, {})
        return groups.get(host)

    # Requests.

    def _existing(self, allocation: Allocation) -> str | None:
        with self._state:
            is_fresh = self._listed_at is not None and time.monotonic() - self._listed_at < _KNOWN_FOR_S
            if allocation.marker in self._unsure:
                is_fresh = False
        if not is_fresh:
            self._list()
        with self._state:
            same = [int(job) for job, other in self._active.items() if other == allocation and job not in self._released]
            self._unsure.discard(allocation.marker) if same else None
            return str(min(same)) if same else None

    def _new_job(self, wanted: AllocationRequest) -> str:
        if wanted.time_limit_s is not None:
            wanted = within_limits(self._settings, wanted, self._partitions())
        components = components_of(wanted.nodes)
        job = None
        if len(components) == 1 or self._settings.het_jobs:
            job = self._submit(wanted, components)
        if job is None:
            job = self._submit(wanted, (as_one_shape(wanted.nodes),))
            with self._state:
                self._notices[job or ""] = _LARGEST_SHAPE
        return job or ""

    def _submit(self, wanted: AllocationRequest, components: Sequence[Sequence[NodeRequest]]) -> str | None:
        """Submit a job and return its id; ``None`` if the cluster does not allow heterogeneous jobs."""
        command = sbatch_arguments(self._pool, wanted, components)
        script = job_script(
            self._template.root,
            self._script(self._template.python, self._settings.idle_release_s, len(components)),
            container_options(self._pool, wanted),
        )
        self._is_closed.wait(max(0.0, self._last_submit + _SUBMIT_EVERY_S - time.monotonic()))
        self._last_submit = time.monotonic()
        marker = wanted.allocation.marker
        with self._state:
            self._unsure.add(marker)
        done = self._commands.run(*command, input=script)
        match = re.match(r"([0-9]+)(?:;|\s|$)", done.stdout.decode("utf-8", "replace"))
        if done.exit_code == 0 and match is None:
            raise self._commands.failure("sbatch", done)
        if match is None and is_temporary(done):
            raise self._commands.failure("sbatch", done)
        with self._state:
            self._unsure.discard(marker)
            if match is not None:
                self._active[match[1]] = wanted.allocation
                self._submitted[match[1]] = (time.monotonic(), wanted.allocation)
                return match[1]
        if len(components) > 1 and lacks_het_jobs(done):
            return None
        if wanted.time_limit_s is not None and wanted.margin_s > 0 and is_time_limit_refusal(done):
            # The limits of accounts and QOS are not known before the submission.
            shortest = replace(wanted, time_limit_s=wanted.time_limit_s - wanted.margin_s, margin_s=0.0)
            return self._submit(shortest, components)
        raise refusal(done)

    def _partitions(self) -> Mapping[str, Mapping[str, str]]:
        if self._partitions_at is None or time.monotonic() - self._partitions_at > _PARTITIONS_FOR_S:
            self._known_partitions = partitions_of(self._commands.query(*SHOW_PARTITIONS))
            self._partitions_at = time.monotonic()
        return self._known_partitions

    def _end(self, job: str, exit_code: int) -> bool:
        """End a job with an exit code. Returns whether its resident program accepted that."""
        with self._state:
            hosts = self._hosts.get(job, "") if job in self._active else ""
        try:
            first, *_ = expand_hosts(hosts)
            self._open_relay(job, first).end_allocation(exit_code)
        except (NodeUnreachable, ValueError):
            return False
        self._forget([job])
        return True

    # Queries.

    def _list(self) -> Mapping[str, Sequence[Component]]:
        """Return all jobs of this user that Slurm knows. Also updates ``_active``, ``_hosts`` and ``_het_groups``."""
        separator = f"<{secrets.token_hex(8)}>"
        command = ("squeue", "--me", "--noheader", "--states=all", f"--format={squeue_format(separator)}")
        listed_at = time.monotonic()
        text = self._commands.query(*command)
        try:
            jobs = jobs_of(text, separator)
        except ValueError as error:
            hint = "check that `squeue` there is Slurm's own program, not a wrapper, and that no shell startup file prints text"
            raise NodeUnreachable(self._commands.node, f"`squeue`: {error}", hint=hint) from error
        active = {
            job: allocation
            for job, components in jobs.items()
            if (allocation := Allocation.of_marker(components[0].comment)) is not None
            and any(phase_of(one.state) in (JobPhase.QUEUED, JobPhase.GRANTED) for one in components)
        }
        with self._state:
            later = {
                job: allocation for job, (at, allocation) in self._submitted.items() if at >= listed_at and job not in jobs
            }
            self._active, self._listed_at = active | later, listed_at
            self._hosts = {job: parts[0].hosts for job, parts in jobs.items() if parts[0].hosts}
            self._het_groups = {job: _groups_of(parts) for job, parts in jobs.items() if any(one.hosts for one in parts)}
        return jobs

    def _cancel_unwanted(self, jobs: Mapping[str, Sequence[Component]], known: Collection[str]) -> None:
        """Cancel duplicates of ``known`` jobs, and ``known`` heterogeneous jobs of which only some components have ended."""
        with self._state:
            active = dict(self._active)
        wanted = {active[job] for job in known if job in active}
        unwanted = [job for job, allocation in active.items() if job not in known and allocation in wanted]
        for job in known:
            phases = {phase_of(one.state) for one in jobs.get(job, ())}
            if JobPhase.OVER in phases and phases & {JobPhase.QUEUED, JobPhase.GRANTED}:
                unwanted.append(job)
        if unwanted:
            self.release(unwanted)

    def _job_ends(self, ended: Sequence[str], jobs: Mapping[str, Sequence[Component]]) -> Mapping[str, AllocationState]:
        """Return the states of jobs that have ended."""
        separator = f"<{secrets.token_hex(8)}>"
        done = self._commands.run(*job_end_command(separator, self._template.root, ended))
        if done.exit_code != 0:
            raise self._commands.failure("scontrol", done)
        *parts, nodes = done.stdout.decode("utf-8", "replace").split(separator)
        if len(parts) != 4 * len(ended):
            raise NodeUnreachable(
                self._commands.node, "`scontrol`: the answer does not have the requested format",
                hint="a newer distflow may support this version of Slurm; `scontrol --version` shows the version",
            )  # fmt: skip
        down = {
            name for name, _, state in (line.partition(" ") for line in nodes.split("\n")) if state.startswith(("down", "fail"))
        }
        found: dict[str, AllocationState] = {}
        for position, job in enumerate(ended):
            end = JobEnd(*(part.strip() for part in parts[4 * position : 4 * position + 4]))
            state = end.state_of(job, jobs.get(job, ()), down)
            if state is None:
                raise NodeUnreachable(self._commands.node, f"`scontrol` failed: {plain(end.scontrol)[:300]}")
            found[job] = state
        return found


def _groups_of(components: Sequence[Component]) -> dict[str, int]:
    if len(components) == 1:
        return {}
    return {host: one.offset for one in components for host in expand_hosts(one.hosts)}


def _state_of(components: Sequence[Component], tasks: Sequence[str]) -> AllocationState | None:
    """Return the state of a job; ``None`` if it has ended or is unknown."""
    phases = {phase_of(one.state) for one in components}
    if phases <= {JobPhase.OVER}:
        return None
    if phases & {JobPhase.OVER, JobPhase.ENDING}:
        return Queued(why="waits for the end of its job: Slurm stops the processes")
    waiting = [one for one in components if phase_of(one.state) is JobPhase.QUEUED]
    if waiting:
        first = next((one for one in waiting if one.reason != "None"), waiting[0])
        return Queued(
            why=pending_text(first.reason) if first.state == "PENDING" else state_text(first.state), starts_at=first.starts_at
        )
    hosts = [host for one in components for host in expand_hosts(one.hosts)]
    if len(hosts) < len(tasks):
        return Queued(why=f"waits for its nodes: Slurm names {len(hosts)} of {len(tasks)}")
    return Granted(hosts=dict(zip(tasks or map(str, range(len(hosts))), hosts, strict=False)))
