"""Write a plan as a script for Slurm that needs no distflow on the cluster.

A workflow of one group becomes a script for ``sbatch``. A workflow of several groups becomes a script for ``sh``, which submits
one such script for each group, with dependencies between the jobs. A comment at the top lists the differences from a run by
distflow, and distflow warns about them. ``plan.slurm_tasks`` writes the part that runs on each node.
"""

from __future__ import annotations

import base64
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from distflow.documents.problems import Problem
from distflow.documents.text import few
from distflow.documents.urls import parse_url
from distflow.errors import InputError
from distflow.layout.ranks import rank_label
from distflow.plan.model import GroupPlan, Launch, Plan
from distflow.plan.pyxis import images_problem, pyxis_image
from distflow.plan.slurm_limits import slurm_limits
from distflow.plan.slurm_tasks import (
    address_variable,
    as_exported,
    credential_variable,
    ends_with_lead,
    here_document,
    input_variable,
    ordered,
    quoted,
    shared_files,
    task_script,
)
from distflow.pools.model import Pool, SlurmPlatform, SlurmSettings
from distflow.spec.model import ResourceSpec, WorkflowSpec

__all__ = ["SlurmScript", "slurm_script"]

_MOST_EMBEDDED = 1 << 20
"""The maximum size of all files in a script, in bytes. By default, Slurm accepts scripts of up to 4 MiB."""


class SlurmScript(Struct, frozen=True, kw_only=True):
    """A script, and warnings about it."""

    text: str
    warnings: tuple[Problem, ...]
    """The parts of the workflow that the script leaves out or runs in another way than distflow."""
    files: Mapping[str, str]
    """The digest of each file that does not fit into the script, by the name that it must have in the directory ``NAME.files``.

    ``NAME`` is the name of the script. By default, this directory is in the directory from which the job is submitted.
    """


def slurm_script(
    plan: Plan, spec: WorkflowSpec, pool: Pool, contents: Mapping[str, bytes], *, name: str, files_next_to_it: bool = False
) -> SlurmScript:
    """Return the script of a plan.

    Args:
        plan: The plan.
        spec: Its spec.
        pool: The settings of jobs (``slurm``) and of nodes (``template``).
        contents: The content of each blob of the plan, by its digest.
        name: The name of the script's file.
        files_next_to_it: Whether files that are too large for the script can be written to a directory next to the script.

    Raises:
        InputError: if the files are too large, if the tasks of a group have different images for Pyxis, or if a variable of the
            spec has the name of a variable of the script.

    """
    groups = [_Group(as_exported(group), pool) for group in plan.groups]
    external = _external(plan, contents)
    if external and not files_next_to_it:
        size, most = sum(map(len, contents.values())) / 2**20, _MOST_EMBEDDED / 2**20
        hint = "add `--output FILE`: distflow then writes the largest ones to the directory FILE.files"
        raise InputError(
            f"the files of the spec have {size:.1f} MiB in total, and a script can contain at most {most:g} MiB", hint=hint
        )
    files = shared_files(plan)
    warnings = slurm_limits(plan, spec, pool, contents)
    is_graph = len(groups) > 1
    context = _Context(plan=plan, files=files, contents=contents, external=external, name=name, is_graph=is_graph)
    jobs = [_job(group, context, warnings) for group in groups]
    text = _driver(context, groups, jobs, warnings) if is_graph else jobs[0]
    return SlurmScript(text=text, warnings=warnings, files={files[digest]: digest for digest in sorted(external)})


def _external(plan: Plan, contents: Mapping[str, bytes]) -> frozenset[str]:
    """Return the digests of the largest files, which do not fit into the script."""
    total, found = 0, set()
    for digest in sorted(plan.blobs, key=lambda one: (len(contents[one]), one)):
        total += len(contents[digest])
        if total > _MOST_EMBEDDED:
            found.add(digest)
    return frozenset(found)


class _Context(Struct, frozen=True):
    """Values that all jobs of a script share."""

    plan: Plan
    files: Mapping[str, str]
    """The name of each blob in the directory of the run."""
    contents: Mapping[str, bytes]
    external: frozenset[str]
    name: str
    is_graph: bool


class _Group:
    """A group, its tasks in the order of their ranks, and the nodes that its job requests."""

    def __init__(self, plan: GroupPlan, pool: Pool) -> None:
        self.plan = plan
        self.pool = pool
        self.settings = pool.slurm or SlurmSettings()
        self.launches = ordered(plan)
        shapes = [_shape(launch.resource) for launch in self.launches]
        if not self.settings.het_jobs and len(set(shapes)) > 1:
            shapes = [_largest(shapes)] * len(shapes)
        self.components: list[tuple[ResourceSpec, int]] = []
        """Equal nodes and their number, in the order of the tasks. Several entries make a heterogeneous job."""
        for shape in shapes:
            if self.components and self.components[-1][0] == shape:
                self.components[-1] = (shape, self.components[-1][1] + 1)
            else:
                self.components.append((shape, 1))

    @property
    def image(self) -> str | None:
        """The image that Pyxis runs the tasks in; ``None`` without Pyxis or images.

        Raises ``InputError`` if the tasks have different images, or if only some of them have one.
        """
        images = {launch.image for launch in self.launches}
        if self.settings.container != "pyxis" or images == {None}:
            return None
        if len(images) > 1:
            message, hint = images_problem(images, self.plan.name)
            raise InputError(message, hint=hint)
        return images.pop()


def _shape(resource: ResourceSpec) -> ResourceSpec:
    """Return only the part of a resource that selects nodes. Equal results mean equal nodes."""
    return ResourceSpec(
        cpu=resource.cpu or None, gpu=resource.gpu or None, memory=resource.memory or None, platform=resource.platform,
        nodes_excluded=tuple(sorted(resource.nodes_excluded)),
    )  # fmt: skip


def _largest(shapes: Sequence[ResourceSpec]) -> ResourceSpec:
    return ResourceSpec(
        cpu=max(one.cpu or 0 for one in shapes) or None,
        gpu=max(one.gpu or 0 for one in shapes) or None,
        memory=max(one.memory or 0 for one in shapes) or None,
        platform=next((one.platform for one in shapes if one.platform), None),
        nodes_excluded=tuple(sorted({node for one in shapes for node in one.nodes_excluded})),
    )


# -- one job ----------------------------------------------------------------------------------------------------------

_ADDRESS = """\
# The address of a node for the other nodes: its name, or the address in Slurm's configuration if the name has none.
address() {
    if getent hosts "$1" > /dev/null; then echo "$1"; else
        scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\\([^ ]*\\) .*/\\1/p'
    fi
}"""


def _job(group: _Group, context: _Context, warnings: Sequence[Problem]) -> str:
    """Return the script for ``sbatch`` of one group."""
    name = context.plan.name
    job = f"{name}-{group.plan.name}" if context.is_graph else name
    lines = ["#!/bin/bash", *_job_head(group, context, warnings)]
    for number, (shape, nodes) in enumerate(group.components):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in _options(group, shape, nodes, job, is_first=number == 0)]
    lines += [
        "",
        '[ -n "${SLURM_JOB_ID-}" ] || exec sbatch "$0" "$@"',
        "set -u",
        "umask 077",
        f"export run_dir=${{1:-${{RUN_DIR:-$SLURM_SUBMIT_DIR/{name}-$SLURM_JOB_ID}}}}",
        'mkdir -p "$run_dir/files" && run_dir=$(cd "$run_dir" && pwd) || exit',
        "export workflow_id=${run_dir##*/}",
        *_required(group.launches),
        "",
        _ADDRESS,
        "# One node for each task.",
        f"nodes=({' '.join(_node_list(number, len(group.components)) for number in range(len(group.components)))})",
    ]
    numbers = {launch.task: number for number, launch in enumerate(group.launches)}
    lines += [f'export master_addr=$(address "${{nodes[{numbers[group.plan.master]}]}}")']
    lines += [
        f'export {variable}=$(address "${{nodes[{numbers[task]}]}}")' for task, variable in sorted(_addresses(group).items())
    ]
    if group.plan.world is not None and group.plan.world.port is not None:
        lines += [f"export master_port={group.plan.world.port}"]
    else:
        lines += ["export master_port=$((20000 + SLURM_JOB_ID % 10000))"]
    lines += ["", *_shared_file_lines(group, context)]
    task = task_script(group.plan, group.pool, context.files)
    lines += ["# This script runs once on each node.", f'cat > "$run_dir/{group.plan.name}.task.sh" {here_document(task)}', ""]
    lines += _srun(group)
    return "\n".join(lines) + "\n"


def _node_list(number: int, components: int) -> str:
    suffix = f"_HET_GROUP_{number}" if components > 1 else ""
    return f'$(scontrol show hostnames "$SLURM_JOB_NODELIST{suffix}")'


def _addresses(group: _Group) -> dict[str, str]:
    """Return the tasks whose addresses the script uses, each with the variable for its address."""
    text = task_script(group.plan, group.pool, {})
    names = {launch.task: address_variable(launch.task) for launch in group.launches}
    return {task: variable for task, variable in names.items() if re.search(rf"\$\{{{variable}\}}", text)}


def _job_head(group: _Group, context: _Context, warnings: Sequence[Problem]) -> list[str]:
    plan = context.plan
    lines = [
        f"# Group `{group.plan.name}` of the workflow `{plan.name}` as a job of Slurm, written by `distflow workflow export`.",
        "#",
    ]
    if not context.is_graph:
        lines += _usage("sbatch", context, [group], warnings)
    for number, launch in enumerate(group.launches):
        ranks = (
            f", {rank_label(launch.ranks.text)} of {group.plan.world.world_size}" if launch.ranks and group.plan.world else ""
        )
        lines.append(f"# Node {number} runs the task {launch.task}{ranks}.")
    return lines


def _usage(command: str, context: _Context, groups: Sequence[_Group], warnings: Sequence[Problem]) -> list[str]:
    """Return the comment at the top of a script: how to submit it, the variables that it reads, and the warnings."""
    run_dir = f"{context.plan.name}-<job id>"
    lines = [
        f"# Submit it:  {command} {context.name}",
        "# Variables that it reads:",
        f"#   RUN_DIR  the directory of the run, on a file system that all nodes share. Default: {run_dir} in the",
        "#            current directory. The task TASK runs in RUN_DIR/TASK/work, and its output is in RUN_DIR/TASK/output.",
    ]
    if context.external:
        lines += [
            "#   FILES_DIR  the directory of the files that are too large for the script. Default: the directory",
            f"#              {context.name}.files in the current directory.",
        ]
    needed = {name: text for group in groups for name, text in _needed(group.launches)}
    lines += [f"#   {name}  {text} (required)" for name, text in needed.items()]
    lines += ["#"]
    if warnings:
        lines += ["# Differences from a run by distflow:"]
        for one in warnings:
            text = one.message + (f" ({one.hint})" if one.hint else "")
            lines += textwrap.wrap(text, 118, initial_indent="# * ", subsequent_indent="#   ", break_on_hyphens=False)
        lines += ["#"]
    return lines


def _options(group: _Group, shape: ResourceSpec, nodes: int, job: str, *, is_first: bool) -> list[str]:
    """Return Slurm's options for one component of a job."""
    settings = group.settings
    platform = settings.platforms.get(shape.platform or "", SlurmPlatform())
    found: list[tuple[str, object]] = []
    if is_first:
        found += [("job-name", job), ("output", "%x-%j.log")]
    found += [("nodes", nodes), ("ntasks-per-node", 1), ("cpus-per-task", shape.cpu)]
    found += [("mem", None if shape.memory is None else _memory(shape.memory))]
    found += [settings.gpu_request(shape.gpu, platform)] if shape.gpu is not None else []
    limit = group.plan.timeouts.exec_s or settings.time_s
    found += [("time", None if not limit or not is_first else _time(limit))]
    found += [
        ("partition", platform.partition or settings.partition),
        ("constraint", platform.constraint or settings.constraint),
    ]
    found += [("account", settings.account), ("qos", settings.qos), ("reservation", settings.reservation)]
    found += [("exclude", ",".join(shape.nodes_excluded) or None)]
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in found if value is not None]
    lines += ["--exclusive"] if settings.exclusive else []
    lines += [shlex.quote(word) for word in settings.extra] if is_first else []
    return lines


def _memory(size: int) -> str:
    mebibytes = -(-size // 2**20)
    return f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 else f"{mebibytes}M"


def _time(seconds: float) -> str:
    """Return a time limit of Slurm, rounded up to whole minutes.

    >>> _time(90061)
    '1-01:02:00'
    """
    minutes = int(-(-seconds // 60))
    days, rest = divmod(minutes, 1440)
    return f"{f'{days}-' if days else ''}{rest // 60:02}:{rest % 60:02}:00"


def _needed(launches: Iterable[Launch]) -> list[tuple[str, str]]:
    """Return the variables that the user must set, each with a description."""
    found: dict[str, str] = {}
    for launch in launches:
        found.update(dict.fromkeys(launch.secret_names, "a secret of --set-env"))
        for one in launch.credentials:
            found.update({name: f"`{key}` of the credential `{one.name}`" for name, key in one.variables.items()})
            if one.path:
                found[credential_variable(one.name)] = f"a directory with a file for each key of the credential `{one.name}`"
        for data in launch.url_inputs:
            what = f"dataset {data.dataset}" if data.dataset else str(parse_url(data.url))
            found[input_variable(data)] = f"a directory with the data of {what}"
        for old in launch.earlier_inputs:
            found[input_variable(old)] = f"a directory with the output of {old.task} of {old.workflow}"
    return list(found.items())


def _required(launches: Iterable[Launch]) -> list[str]:
    # Keep only characters that a shell does not interpret within `${…}`.
    return [f': "${{{name}:?must be set: {re.sub("[^A-Za-z0-9 ./:@_-]", "", text)}}}"' for name, text in _needed(launches)]


def _shared_file_lines(group: _Group, context: _Context) -> list[str]:
    """Return the lines that create the files of a group's tasks in the directory of the run."""
    used = dict.fromkeys(file.blob for launch in group.launches for file in launch.files if file.blob)
    lines: list[str] = []
    for digest in used:
        name, content = context.files[digest], context.contents[digest]
        target = f'"$run_dir"/files/{shlex.quote(name)}'
        if digest in context.external:
            source = f'"${{FILES_DIR:-$SLURM_SUBMIT_DIR/{context.name}.files}}"/{shlex.quote(name)}'
            lines += [f"cp {source} {target} || exit", ""]
        elif (text := _text(content)) is not None:
            lines += [f"cat > {target} {here_document(text)}", ""]
        else:
            encoded = base64.encodebytes(content).decode()
            lines += [f"base64 -d > {target} {here_document(encoded)}", ""]
    return lines


def _text(content: bytes) -> str | None:
    """Return the content of a file that a here-document can hold, else ``None``."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return text if text.endswith("\n") and "\0" not in text and "\r" not in text else None


def _srun(group: _Group) -> list[str]:
    words = ["srun --kill-on-bad-exit=1 --label", *_container_options(group)]
    command = f'bash "$run_dir/{group.plan.name}.task.sh"'
    parts = []
    for number, (shape, _) in enumerate(group.components):
        options = [f"--het-group={number}"] if len(group.components) > 1 else []
        # Since Slurm 22.05, srun does not take this option from the job.
        options += [f"--cpus-per-task={shape.cpu}"] if shape.cpu is not None else []
        parts.append(" ".join([*options, command]))
    lines = [" ".join([*words, " : ".join(parts)])]
    if not ends_with_lead(group.plan):
        return lines
    ended = f'"$run_dir/{group.plan.lead.task}.ended"'
    return [
        "# The lead ends with an error in any case, so that srun stops the other tasks. Its own exit code is in the file.",
        f"rm -f {ended}",
        *lines,
        f'exit "$(cat {ended} || echo 1)"',
    ]


def _container_options(group: _Group) -> list[str]:
    """Return the options of Pyxis; empty without a container."""
    if (image := group.image) is None:
        return []
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for launch in group.launches for mount in launch.mounts]
    others = "".join(f",{mount}" for mount in dict.fromkeys(mounts))
    return [
        f"--container-image={quoted(pyxis_image(image))}",
        f'--container-mounts="$run_dir:$run_dir"{quoted(others) if others else ""}',
    ]


# -- several jobs -----------------------------------------------------------------------------------------------------


def _driver(context: _Context, groups: Sequence[_Group], jobs: Sequence[str], warnings: Sequence[Problem]) -> str:
    """Return the script that submits the job of each group."""
    plan = context.plan
    variables = {group.plan.name: "job_" + re.sub("[^A-Za-z0-9]", "_", group.plan.name) for group in groups}
    lines = [
        "#!/bin/sh",
        f"# The workflow `{plan.name}` as {len(groups)} jobs of Slurm, written by `distflow workflow export`.",
        "#",
    ]
    usage = _usage("sh", context, groups, warnings)
    lines += [line.replace(f"{plan.name}-<job id>", f"{plan.name}-<date>") for line in usage]
    lines += ["# A job starts when the jobs before it have succeeded:"]
    lines += [
        f"# * {group.plan.name}" + (f" after {few(group.plan.upstream)}" if group.plan.upstream else "") for group in groups
    ]
    lines += [
        "",
        "set -eu",
        "umask 077",
        f"run_dir=${{RUN_DIR:-$PWD/{plan.name}-$(date +%Y%m%d-%H%M%S)}}",
        'mkdir -p "$run_dir" && run_dir=$(cd "$run_dir" && pwd)',
        "# If a job cannot be submitted, cancel the jobs before it.",
        "jobs=",
        "trap '[ $? = 0 ] || [ -z \"$jobs\" ] || scancel $jobs' EXIT",
    ]
    lines += [line for group in groups for line in _required(group.launches)]
    for group, job in zip(groups, jobs, strict=True):
        variable, file = variables[group.plan.name], f'"$run_dir/{group.plan.name}.sbatch"'
        after = "".join(f":${variables[one]}" for one in group.plan.upstream)
        options = f" --dependency=afterok{after} --kill-on-invalid-dep=yes" if after else ""
        lines += ["", f"cat > {file} {here_document(job)}"]
        lines += [f'{variable}=$(sbatch --parsable{options} {file} "$run_dir")', f"{variable}=${{{variable}%%;*}}"]
        lines += [f'jobs="$jobs ${variable}"', f'echo "{group.plan.name}: job ${variable}"']
    lines += ["", 'echo "Files: $run_dir"']
    return "\n".join(lines) + "\n"
