"""Warn about the parts of a workflow that a script for Slurm leaves out or runs in another way than distflow."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping

from distflow.documents.problems import Mark, Problem, Severity
from distflow.documents.text import few
from distflow.plan.model import GroupPlan, Launch, Plan
from distflow.pools.model import Pool
from distflow.spec.model import ResourceSpec, WorkflowSpec

__all__ = ["slurm_limits"]


def slurm_limits(plan: Plan, spec: WorkflowSpec, pool: Pool, contents: Mapping[str, bytes]) -> tuple[Problem, ...]:
    """Return warnings about parts that the script leaves out or runs in another way, with their tasks or groups."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, name in _limits(plan, spec, pool, contents):
        names = found.setdefault(key, [])
        if name and name not in names:
            names.append(name)
    where = Mark(spec.file or plan.name)
    return tuple(
        Problem(where=where, severity=Severity.WARNING, message=(f"{few(names)}: " if names else "") + message, hint=hint)
        for (message, hint), names in found.items()
    )


_Limits = Iterator[tuple[tuple[str, str], str]]
"""The message and the hint of each warning, and the name of the task or group; empty for the whole workflow."""


def _limits(plan: Plan, spec: WorkflowSpec, pool: Pool, contents: Mapping[str, bytes]) -> _Limits:
    if spec.notify:
        yield ("`notify` is left out", "Slurm's own option is `#SBATCH --mail-type=END,FAIL`"), ""
    if spec.labels:
        yield ("`labels` are left out", ""), ""
    if spec.max_log is not None:
        yield ("`max_log` is left out: the size of the log is not limited", ""), ""
    for group in plan.groups:
        yield from _group_limits(group, pool)
        for launch in group.launches:
            for key in _task_limits(launch, pool):
                yield key, launch.task
    if any(launch.member is not None for group in plan.groups for launch in group.launches) and _mentions_valohai(
        plan, contents
    ):
        yield ("`distributed.json` of Valohai is not written, and the variables VH_* are not set", ""), ""


def _group_limits(group: GroupPlan, pool: Pool) -> _Limits:
    if group.timeouts.queue_s is not None:
        yield ("`queue_timeout` is left out: the job waits in Slurm's queue without a limit", ""), group.name
    if group.timeouts.hang_s is not None:
        yield ("`hang_timeout` is left out: a group without output is not reported", ""), group.name
    if group.stop_on_missing_ranks:
        message = "if a rank fails but its task ends with code 0, the other tasks keep waiting for that rank"
        yield (f"`stop_on_missing_ranks` is left out: {message}", ""), group.name
    if group.smaller:
        yield ("`elastic` is left out: the job waits until there is room for all tasks", ""), group.name
    if group.venv is not None:
        hint = "create one on a shared file system, and export with `--python /shared/venv/bin/python`"
        yield (f"`venv` is left out: no Python environment is built from {group.venv.file}", hint), ""
    if len({launch.resource for launch in group.launches}) > 1 and pool.slurm is not None and not pool.slurm.het_jobs:
        message = "every node is requested with the largest amount of each resource in the group"
        yield (f"{message}, because the pool has `het_jobs: false`", ""), group.name
    programs = {word for launch in group.launches for word in launch.argv[:1]}
    if len(group.launches) > 1 and programs & {"mpirun", "horovodrun"}:
        hint = "if the nodes refuse that, start the program with `srun --mpi=pmix` instead"
        yield ("the lead starts the processes on the other nodes itself, usually through SSH", hint), group.name


def _task_limits(launch: Launch, pool: Pool) -> Iterator[tuple[str, str]]:
    yield from _data_limits(launch)
    slurm = pool.slurm
    if launch.exit_actions.reschedule:
        yield "RESCHEDULE of `exitActions` is left out: a failed job is not retried", "submit the script again"
    if launch.secret_names or launch.credentials:
        yield "secrets are not in the script", "set their variables before you submit the script"
    if launch.image is not None and (slurm is None or slurm.container != "pyxis"):
        hint = "if the cluster has Pyxis, use a pool with `slurm: {container: pyxis}`"
        yield "`image` is left out: the tasks run without a container", hint
        if any(source != target for source, colon, target in (one.partition(":") for one in launch.mounts) if colon):
            yield "`volumeMounts` is left out, because it needs a container", ""
    if launch.privileged:
        yield "`privileged` is left out", ""
    yield from _resource_limits(launch.resource, pool)


def _data_limits(launch: Launch) -> Iterator[tuple[str, str]]:
    if any(not one.is_shared for one in launch.checkpoints):
        yield "`checkpoint` is left out: the directory stays in the directory of the run and is not uploaded", ""
    if any(one.is_shared for one in launch.checkpoints):
        yield "`shared` is left out: each task has only its own files in that directory", ""
    if launch.url_inputs:
        yield (
            "inputs from URLs and datasets are not downloaded",
            "download them, and set the variables `INPUT_…` of the script to their directories",
        )
    if launch.earlier_inputs:
        hint = "copy them with `distflow workflow fetch`, and set the variables `INPUT_…` of the script to their directories"
        yield "outputs of earlier workflows are not copied", hint
    if launch.url_outputs:
        yield "the output is not uploaded to the URLs and datasets of `outputs`", "it is in RUN_DIR/TASK/output"


def _resource_limits(resource: ResourceSpec, pool: Pool) -> Iterator[tuple[str, str]]:
    if resource.storage:
        yield "`storage` is not requested", "Slurm's own option is `#SBATCH --tmp=100G`, if the nodes are configured for it"
    if resource.topology:
        yield "`topology` is not requested", "Slurm's own option is `#SBATCH --switches=1`"
    if resource.platform is not None and (pool.slurm is None or resource.platform not in pool.slurm.platforms):
        hint = "add `#SBATCH --partition` or `--constraint`, or use a pool whose `platforms` has the platform"
        yield f"the platform `{resource.platform}` is not requested", hint


def _mentions_valohai(plan: Plan, contents: Mapping[str, bytes]) -> bool:
    words = (b"valohai", b"VH_CONFIG_DIR", b"distributed.json")
    return any(word in text for text in _all_texts(plan, contents) for word in words)


def _all_texts(plan: Plan, contents: Mapping[str, bytes]) -> Iterator[bytes]:
    for launch in (launch for group in plan.groups for launch in group.launches):
        yield " ".join(launch.argv).encode()
        yield from ((file.text or "").encode() for file in launch.files)
        for file in launch.files:
            if file.blob is not None and file.path != "lib":  # the library for tasks contains these words, too
                content = contents[file.blob]
                try:
                    yield gzip.decompress(content) if file.is_tar else content
                except (OSError, EOFError, zlib.error):
                    yield content
