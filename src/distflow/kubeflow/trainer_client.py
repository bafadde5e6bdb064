"""``TrainerClient``: train functions on a pool, with the methods of Kubeflow's client."""

from __future__ import annotations

import logging
import re
import secrets
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from distflow.api.workflow import Workflow, submit
from distflow.client import workflows
from distflow.client.client import Client
from distflow.client.pools import choose_pool
from distflow.errors import DistflowError, InputError, WaitTimeout
from distflow.kubeflow.backends import PoolChoice, pool_choice
from distflow.kubeflow.job_specs import JobOptions, check_initializer, job_spec, read_options, required_packages
from distflow.kubeflow.jobs import DELETED_TAG, JOB_LABEL, RUNTIME_LABEL, events_of, failure_text, job_of, steps_of
from distflow.kubeflow.runtimes import PLAIN_RUNTIME, RUNTIMES, runtime_in, runtime_name
from distflow.kubeflow.types import (
    JOB_STATUSES,
    TRAINJOB_COMPLETE,
    TRAINJOB_CREATED,
    TRAINJOB_FAILED,
    TRAINJOB_RUNNING,
    BuiltinTrainer,
    CustomTrainer,
    CustomTrainerContainer,
    Event,
    Initializer,
    Runtime,
    TrainJob,
)
from distflow.pools.load import read_hosts
from distflow.pools.model import Pool
from distflow.state.record import WorkflowRecord
from distflow.state.search import Search

__all__ = ["TrainerClient"]

_log = logging.getLogger("distflow")
_MOST_JOBS = 1_000_000
_END_TIMEOUT_S = 120
_EARLIER_STATUSES = {TRAINJOB_RUNNING: (TRAINJOB_CREATED,), TRAINJOB_COMPLETE: (TRAINJOB_CREATED, TRAINJOB_RUNNING)}


class TrainerClient:
    """Train functions on machines, as Kubeflow's client of the same name does on Kubernetes.

    ::

        client = TrainerClient(SSHBackendConfig(hosts=["gpu1 slots=8", "gpu2 slots=8"]))
        name = client.train(trainer=CustomTrainer(func=train, num_nodes=2, resources_per_node={"gpu": 8}))
        client.wait_for_job_status(name)

    A job is a workflow with the job's name and labels, so ``distflow list`` and ``distflow.get(name)`` show it, too.

    In addition to the errors that it lists, each method can raise ``RuntimeError`` if the state directory cannot be used, and
    ``ValueError`` if the configuration is wrong.

    Args:
        backend_config: The pool, such as ``SSHBackendConfig`` or ``LocalProcessBackendConfig``. Default: the default pool.

    Raises:
        ValueError: if ``backend_config`` is not valid, or selects a pool that does not exist.

    """

    def __init__(self, backend_config: object | None = None) -> None:
        """Check ``backend_config`` and its pool."""
        self._chosen: PoolChoice = pool_choice(backend_config)
        if self._chosen != PoolChoice():
            self._pool()

    # -- runtimes -----------------------------------------------------------------------------------------------------

    def list_runtimes(self) -> list[Runtime]:
        """Return the frameworks that distflow starts, as runtimes of this client's pool."""
        pool = self._pool()
        return [runtime_in(pool, name) for name in RUNTIMES]

    def get_runtime(self, name: str) -> Runtime:
        """Return a runtime. Raises ``ValueError`` if it does not exist."""
        return runtime_in(self._pool(), runtime_name(name))

    def get_runtime_packages(self, runtime: Runtime) -> None:
        """Run a short job, and print the Python version, the Python packages and the NVIDIA GPUs of a node of the pool.

        Raises:
            ValueError: if the runtime does not exist, or if the pool cannot hold the job.
            RuntimeError: if the job cannot be started, or fails.
            TimeoutError: if the job does not end within 10 minutes.

        """
        runtime_name(runtime)
        name = self._submit(PLAIN_RUNTIME, CustomTrainer(func=_print_packages), JobOptions())
        try:
            self.wait_for_job_status(name)
            for line in self.get_job_logs(name):
                sys.stdout.write(f"{line}\n")
        finally:
            self.delete_job(name)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Initializer | None = None,
        trainer: CustomTrainer | CustomTrainerContainer | BuiltinTrainer | None = None,
        options: list[object] | None = None,
    ) -> str:
        """Submit a job. It runs in the background, also after this program has ended.

        Args:
            runtime: A runtime of ``list_runtimes`` or its name. Default: ``torch-distributed``.
            initializer: Must be empty, because distflow does not run Kubeflow's initializers.
            trainer: The function or the container that trains.
            options: Options of ``distflow.kubeflow.options``.

        Returns:
            The name of the job.

        Raises:
            ValueError: if an argument is wrong, or if the pool cannot hold the job.
            RuntimeError: if a job of that name exists, or if the supervisor does not start.

        """
        name = runtime_name(runtime)
        check_initializer(initializer)
        return self._submit(name, trainer, read_options(options))

    def list_jobs(self, runtime: Runtime | None = None) -> list[TrainJob]:
        """Return this user's jobs of all clients, except deleted ones, newest first; with a runtime, only its jobs."""
        labels = {JOB_LABEL: "*"} | ({} if runtime is None else {RUNTIME_LABEL: runtime_name(runtime)})
        with _client() as client:
            # `distflow workflow restart` adds a workflow to a job. Only the newest workflow of each job counts.
            found = {one.labels[JOB_LABEL]: one.uuid for one in reversed(_records(client, labels))}
            records = [workflows.find_workflow(client, uuid, report_age=False) for uuid in found.values()]
            return [_job(client, one) for one in sorted(records, key=lambda one: one.submitted_at, reverse=True)]

    def get_job(self, name: str) -> TrainJob:
        """Return a job. Raises ``ValueError`` if it does not exist."""
        with _client() as client:
            return _job(client, _find(client, name))

    def get_job_logs(self, name: str, step: str = "node-0", follow: bool | None = False) -> Iterator[str]:
        """Return the output lines of one node of a job.

        Args:
            name: The name of the job.
            step: The node, such as ``node-0``.
            follow: Whether to wait for new lines until the job has ended.

        Raises:
            ValueError: if the job or the step does not exist.

        """
        with _client() as client:
            record = _find(client, name)
        steps = steps_of(record)
        if step not in steps:
            raise ValueError(f"TrainJob {name} has no step `{step}`: its steps are {', '.join(steps)}")
        return _lines(Workflow(record), step, bool(follow))

    def get_job_events(self, name: str) -> list[Event]:
        """Return the events of a job, oldest first. Raises ``ValueError`` if the job does not exist."""
        with _client() as client:
            record = _find(client, name)
            return events_of(record, workflows.read_events(client, record))

    def wait_for_job_status(
        self,
        name: str,
        status: AbstractSet[str] = frozenset({TRAINJOB_COMPLETE}),
        timeout: int = 600,
        polling_interval: int = 2,
        callbacks: list[Callable[[TrainJob], None]] | None = None,
    ) -> TrainJob:
        """Wait until a job has one of several statuses, or has had it.

        A job that is ``Complete`` has also been ``Created`` and ``Running``. A job that failed has only the status ``Failed``.

        Args:
            name: The name of the job.
            status: Some of ``Created``, ``Running``, ``Complete`` and ``Failed``.
            timeout: The maximum time to wait, in seconds.
            polling_interval: The time between two checks, in seconds.
            callbacks: Functions that are called with the job after each check.

        Returns:
            The job.

        Raises:
            ValueError: if an argument is wrong, or if the job does not exist.
            RuntimeError: if the job has ended with none of the statuses. If the job failed, the message contains the first
                cause, if it is known, and the status of each node.
            TimeoutError: if the job has none of the statuses after ``timeout``. The job continues.

        """
        _check_wait(status, timeout, polling_interval)
        deadline = time.monotonic() + timeout
        while True:
            with _client() as client:
                record = _find(client, name)
                job = _job(client, record)
            for callback in callbacks or ():
                callback(job)
            if not status.isdisjoint({job.status, *_EARLIER_STATUSES.get(job.status, ())}):
                return job
            if record.state.is_final:
                with _client() as client:
                    raise RuntimeError(_end_text(client, record, job))
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"TrainJob {name} is {job.status} after {timeout} s, not {' or '.join(sorted(status))}")
            workflows.pause(min(polling_interval, left))

    def delete_job(self, name: str) -> None:
        """Stop a job if it has not ended, and remove it from the list of jobs (see ``list_jobs``).

        Its workflow stays in ``distflow list`` with the tag ``kubeflow-deleted``, and its logs are kept.

        Raises:
            ValueError: if the job does not exist.
            RuntimeError: if the supervisor, which stops the job, does not start.
            TimeoutError: if the job does not stop within two minutes. It then stays in the list.

        """
        with _client() as client:
            record = _find(client, name)
            if not record.state.is_final:
                workflows.cancel(client, [record.uuid], message="TrainerClient.delete_job")
        with _kubeflow_errors():
            Workflow(record).wait(_END_TIMEOUT_S)
        with _client() as client:
            same = [one.uuid for one in _records(client, {JOB_LABEL: name})]
            workflows.change_tags(client, same, add=[DELETED_TAG])

    # -----------------------------------------------------------------------------------------------------------------

    def _pool(self) -> Pool:
        """Return the pool for new jobs, from the current configuration."""
        hosts = self._chosen.hosts
        with _client() as client:
            return choose_pool(
                client.configuration(), given=self._chosen.pool, hosts=None if hosts is None else read_hosts(hosts)
            )

    def _submit(self, runtime: str, trainer: object | None, options: JobOptions) -> str:
        name = options.name or _new_name()
        spec = job_spec(name, runtime, trainer, options, self._pool())
        with _client() as client:
            if options.name is not None and _records(client, {JOB_LABEL: name}):
                raise RuntimeError(f"TrainJob {name} already exists: delete it with delete_job, or choose another name")
        labels = {**options.labels, JOB_LABEL: name, RUNTIME_LABEL: runtime}
        with _kubeflow_errors():
            venv = required_packages(runtime, trainer) or None
            submit(spec, pool=self._chosen.pool, hosts=self._chosen.hosts, python=self._chosen.python, venv=venv, labels=labels)
        return name


def _new_name() -> str:
    return secrets.choice(string.ascii_lowercase) + secrets.token_hex(6)[:11]


@contextmanager
def _kubeflow_errors() -> Iterator[None]:
    """Raise distflow's errors as those of Kubeflow's client, with the same text."""
    try:
        yield
    except WaitTimeout as error:
        raise TimeoutError(str(error)) from error
    except InputError as error:
        raise ValueError(str(error)) from error
    except DistflowError as error:
        raise RuntimeError(str(error)) from error


@contextmanager
def _client() -> Iterator[Client]:
    with _kubeflow_errors(), Client(notify=lambda text: _log.warning("%s", text)) as client:
        yield client


def _records(client: Client, labels: dict[str, str]) -> Sequence[WorkflowRecord]:
    """Return the workflows of jobs that were not deleted, newest first, without their groups."""
    found = workflows.list_workflows(client, Search(labels=(*labels.items(),)), count=_MOST_JOBS)
    return [record for record in found if DELETED_TAG not in record.tags]


def _find(client: Client, name: str) -> WorkflowRecord:
    """Return the workflow of a job."""
    is_name = re.fullmatch(r"[-A-Za-z0-9_.]+", name)  # other characters could be a pattern
    found = _records(client, {JOB_LABEL: name}) if is_name else []
    if not found:
        raise ValueError(f"there is no TrainJob {name}: `list_jobs` returns the jobs that exist")
    return workflows.find_workflow(client, found[0].uuid, report_age=False)


def _job(client: Client, record: WorkflowRecord) -> TrainJob:
    return job_of(record, workflows.plan_of(client, record), workflows.pool_of(client, record))


def _lines(workflow: Workflow, step: str, follow: bool) -> Iterator[str]:
    with _kubeflow_errors():
        for line in workflow.logs(task=step, follow=follow):
            yield line.text


def _check_wait(status: AbstractSet[str], timeout: float, polling_interval: float) -> None:
    if not status:
        raise ValueError(f"status is empty: name one or more of {sorted(JOB_STATUSES)}")
    if set(status) - JOB_STATUSES:
        raise ValueError(f"status is {set(status)}: give a subset of {sorted(JOB_STATUSES)}")
    if timeout <= 0:
        raise ValueError(f"timeout is {timeout}: it must be positive")
    if not 0 < polling_interval < timeout:
        raise ValueError(
            f"polling_interval is {polling_interval}: it must be positive and less than timeout, which is {timeout}"
        )


def _end_text(client: Client, record: WorkflowRecord, job: TrainJob) -> str:
    if job.status != TRAINJOB_FAILED:
        return f"TrainJob {job.name} is {job.status}, so its status no longer changes"
    last = {task: line for (_, task, _), line in workflows.read_status(client, record).last_lines.items()}
    return failure_text(record, last)


def _print_packages() -> None:
    """Print the Python version, the Python packages and the NVIDIA GPUs of a job's node."""
    import shutil  # noqa: PLC0415  only this function is sent
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    sys.stdout.write(f"Python: {sys.version}\n")
    for command in ([sys.executable, "-m", "pip", "list"], ["nvidia-smi"]):
        if shutil.which(command[0]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
            sys.stdout.write(done.stdout)
