"""Turn a request for nodes into a job: the options of ``sbatch``, and the meaning of its refusals."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from distflow.backends.allocated.engine import AllocationRequest, NodeRequest, RequestRefused
from distflow.backends.allocated.slurm.commands import error_text
from distflow.backends.allocated.slurm.job_states import parse_limit
from distflow.documents.text import did_you_mean, plain
from distflow.plan.pyxis import images_problem, pyxis_image
from distflow.pools.model import Pool, SlurmPlatform, SlurmSettings
from distflow.structs import replace
from distflow.transports.base import Completed

__all__ = [
    "as_one_shape",
    "components_of",
    "container_options",
    "is_temporary",
    "is_time_limit_refusal",
    "job_script",
    "lacks_het_jobs",
    "log_path",
    "refusal",
    "sbatch_arguments",
    "shell_path",
    "within_limits",
]

_TEMPORARY = (
    "unable to contact slurm controller",
    "socket timed out",
    "temporarily unable",
    "resource temporarily unavailable",
    "zero bytes were transmitted",
    "communication connection failure",
    "connection refused",
    "connection timed out",
    "connection reset",
    "controller not responding",
    "standby mode",
    "submitjob",
    "maximum job count",
    "rate limit",
    "required partition not available",
    "requested partition configuration not available now",
    "authentication credential",
    "protocol authentication",
    "munge",
    "slurmdbd",
    "try again",
    "unexpected message",
    "configuration source",
    "shutting down",
    "message receive failure",
    "unable to resolve",
    "writing script/environment",
)
"""Parts of error messages of ``sbatch`` after which the same request may succeed later."""

_REMEDIES: Sequence[tuple[str, str]] = (
    ("policy", "request less in the spec; `sacctmgr show associations user=$USER` and `sacctmgr show qos` list your limits"),
    ("invalid partition", "change `slurm.partition` of the pool, or `partition` of the platform; `sinfo -s` lists partitions"),
    ("account", "change `slurm.account` of the pool; `sacctmgr show associations user=$USER` lists your accounts"),
    ("partition", "change `slurm.partition` of the pool, or `partition` of the platform; `sinfo -s` lists partitions"),
    ("qos", "change `slurm.qos` of the pool; `sacctmgr show associations user=$USER` lists the QOS that you may use"),
    ("reservation", "change `slurm.reservation` of the pool; `scontrol show reservation` lists reservations"),
    (
        "generic resource",
        "change `slurm.gres` of the pool, or `gres` of the platform; `sinfo -o '%N %G'` lists generic resources",
    ),
    ("gres", "change `slurm.gres` of the pool, or `gres` of the platform; `sinfo -o '%N %G'` lists generic resources"),
    ("feature", "change `slurm.constraint` of the pool, or `constraint` of the platform; `sinfo -o '%N %f'` lists features"),
    ("constraint", "change `slurm.constraint` of the pool, or `constraint` of the platform; `sinfo -o '%N %f'` lists features"),
    (
        "time limit",
        "set a shorter `exec_timeout` in the spec, or `slurm.time` of the pool; `sinfo -o '%P %l'` lists time limits",
    ),
    ("memory", "request less memory in the spec; `sinfo -o '%N %m'` lists the memory of nodes in MiB"),
    ("node count", "request fewer nodes in the spec; `sinfo -o '%P %D'` lists the nodes of each partition"),
    ("node configuration", "request less in the spec; `sinfo -o '%P %D %c %m %G'` lists nodes, CPUs, memory and GPUs"),
    ("more processors", "request fewer CPUs in the spec; `sinfo -o '%N %c'` lists the CPUs of nodes"),
    ("option", "check `slurm.extra` of the pool"),
)
"""Part of an error message of ``sbatch``, and the remedy. The first match counts."""


def components_of(nodes: Sequence[NodeRequest]) -> tuple[tuple[NodeRequest, ...], ...]:
    """Return runs of consecutive tasks with equal resources and platform.

    Each run is a component of the job. Several components need a heterogeneous job.
    """
    return tuple(tuple(run) for _, run in groupby(nodes, key=_shape))


def _shape(node: NodeRequest) -> tuple[int, int, int, str | None]:
    return node.gpus, node.cpus, node.memory, node.platform


def as_one_shape(nodes: Sequence[NodeRequest]) -> tuple[NodeRequest, ...]:
    """Return requests that all have the largest amount of each resource.

    Raises ``RequestRefused`` if tasks need different platforms.
    """
    platforms = sorted({node.platform or "" for node in nodes})
    if len(platforms) > 1:
        raise RequestRefused(
            "the group has tasks for different platforms, which need a heterogeneous job",
            hint="give all tasks of the group one platform; heterogeneous jobs need `slurm: {het_jobs: true}`, and a cluster "
            "that allows them",
        )
    gpus, cpus, memory = (max(getattr(node, key) for node in nodes) for key in ("gpus", "cpus", "memory"))
    return tuple(replace(node, gpus=gpus, cpus=cpus, memory=memory) for node in nodes)


def sbatch_arguments(pool: Pool, wanted: AllocationRequest, components: Sequence[Sequence[NodeRequest]]) -> tuple[str, ...]:
    """Return the command that submits a job whose script is its standard input. Raises ``RequestRefused``."""
    settings = pool.slurm or SlurmSettings()
    words = ["sbatch", "--parsable"]
    for position, nodes in enumerate(components):
        words += [":"] if position else []
        words += _component(pool.name, settings, wanted, nodes)
    return tuple(words)


def within_limits(
    settings: SlurmSettings, wanted: AllocationRequest, partitions: Mapping[str, Mapping[str, str]]
) -> AllocationRequest:
    """Return the request with as much of the margin of its time limit as the limits of its partitions allow.

    ``partitions`` are the settings of all partitions, by name. A partition whose limit is too short even without the margin is
    ignored: Slurm uses another one, or reports why the job cannot run.
    """
    if wanted.time_limit_s is None:
        return wanted
    shortest, found = wanted.time_limit_s - wanted.margin_s, [wanted.time_limit_s]
    for name in {node.platform for node in wanted.nodes}:
        chosen = settings.platforms.get(name or "", SlurmPlatform()).partition or settings.partition
        names = chosen.split(",") if chosen else [one for one, keys in partitions.items() if keys.get("Default") == "YES"]
        limits = [parse_limit(partitions.get(one, {}).get("MaxTime", "")) for one in names]
        found += [limit for limit in limits if limit is not None and limit >= shortest]
    return replace(wanted, time_limit_s=min(found), margin_s=min(found) - shortest)


def is_time_limit_refusal(done: Completed) -> bool:
    """Return whether a job was refused for its time limit, perhaps among other limits."""
    return "time limit" in _text(done)


def _component(pool: str, settings: SlurmSettings, wanted: AllocationRequest, nodes: Sequence[NodeRequest]) -> list[str]:
    first = nodes[0]
    platform = _platform(pool, settings, first.platform)
    excluded = sorted({host for node in nodes for host in node.excluded})
    extra = []
    for option in settings.extra:
        match = re.fullmatch(r"(?:--exclude=|-x\s*=?)(.*)", option)
        if match is not None:
            excluded.insert(0, match[1].strip())
        else:
            extra.append(option)
    time_s = settings.time_s if wanted.time_limit_s is None else wanted.time_limit_s
    options: Iterable[tuple[str, object]] = (
        ("job-name", plain(wanted.label)[:120]),
        ("comment", wanted.allocation.marker),
        ("output", "/dev/null"),
        ("chdir", "/"),  # the login's directory may not exist on the nodes
        ("nodes", len(nodes)),
        ("ntasks-per-node", 1),
        ("cpus-per-task", first.cpus),
        ("mem", f"{math.ceil(first.memory / 2**20)}M" if first.memory else None),
        settings.gpu_request(first.gpus, platform) if first.gpus else ("gres", None),
        ("time", max(1, math.ceil(time_s / 60)) if time_s is not None else None),
        ("partition", platform.partition or settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("constraint", platform.constraint or settings.constraint),
        ("reservation", settings.reservation),
        ("exclude", ",".join(excluded)),
    )
    return [
        "--no-requeue",
        *(f"--{name}={value}" for name, value in options if value),
        *(["--exclusive"] if settings.exclusive else []),
        *extra,
    ]


def _platform(pool: str, settings: SlurmSettings, name: str | None) -> SlurmPlatform:
    if name is None:
        return SlurmPlatform()
    if name not in settings.platforms:
        hint = did_you_mean(name, settings.platforms, what="platforms")
        if not settings.platforms:
            hint = f"add for example `platforms: {{{name}: {{constraint: {name}}}}}` to the pool"
        raise RequestRefused(f"pool `{pool}` has no platform `{name}`", hint=hint)
    return settings.platforms[name]


def shell_path(root: str, name: str) -> str:
    """Return the path of a file in the pool's ``root`` as shell text that expands ``~``. ``name`` is shell text too."""
    home, rest = re.fullmatch(r"(~[A-Za-z0-9._-]*)?(.*)", root, re.DOTALL).groups()  # type: ignore[union-attr]
    return f"{home or ''}{shlex.quote(rest.rstrip('/')) if rest.strip('/') else ''}/{name}"


def log_path(root: str, job: str) -> str:
    """Return the path of the file with the messages of a job's script, as shell text. ``job`` is shell text."""
    return shell_path(root, f"distflow-job-{job}.log")


def container_options(pool: Pool, wanted: AllocationRequest) -> tuple[str, ...]:
    """Return the options by which ``srun`` starts the resident programs in the image of the tasks, as shell text.

    The result is empty without an image, and if Slurm does not start the pool's containers. ``$root`` in the options is the
    pool's root. Raises ``RequestRefused`` if not all tasks have the same image. Options:
    https://github.com/NVIDIA/pyxis/wiki/Usage
    """
    images = {node.image for node in wanted.nodes}
    if pool.template is None or pool.template.container != "engine" or images == {None}:
        return ()
    if len(images) > 1:
        message, hint = images_problem(images, wanted.allocation.group)
        raise RequestRefused(message, hint=hint)
    mounts = dict.fromkeys(mount if ":" in mount else f"{mount}:{mount}" for node in wanted.nodes for mount in node.mounts)
    others = shlex.quote("".join(f",{mount}" for mount in mounts)) if mounts else ""
    return (
        shlex.quote(f"--container-image={pyxis_image(str(images.pop()))}"),
        f'--container-mounts="$root:$root"{others}',
        "--container-mount-home",
        "--no-container-remap-root",
    )


def job_script(root: str, resident: str, step_options: Sequence[str] = ()) -> bytes:
    """Return the script of a job, which runs ``resident``, the script that starts the resident programs.

    ``step_options`` are options of its ``srun``, as shell text in which ``$root`` is the pool's root.

    Messages go to a file in ``root``, and not to ``--output``, because a job fails if Slurm cannot create the file of
    ``--output``. The script keeps the file only if it fails with messages. The login node can read it if it shares ``root``.
    """
    log = log_path(root, "$SLURM_JOB_ID")
    options = ""
    if step_options:
        options = f"""\
root={shell_path(root, "")}
root=${{root%/}}
DISTFLOW_STEP_OPTIONS=$(printf '%s\\n' {" ".join(step_options)})
export DISTFLOW_STEP_OPTIONS
"""
    body = resident.split("\n", 1)[1] if resident.startswith("#!") else resident
    return f"""\
#!/bin/sh
umask 077
log={log}
if ! {{ mkdir -p "${{log%/*}}" && : >"$log"; }} 2>/dev/null; then
  log=
fi
{options}(
{body.rstrip()}
) >"${{log:-/dev/null}}" 2>&1
code=$?
if [ -n "$log" ] && {{ [ "$code" = 0 ] || [ ! -s "$log" ]; }}; then
  rm -f "$log"
fi
exit "$code"
""".encode()


def is_temporary(done: Completed) -> bool:
    """Return whether the request of this failed ``sbatch`` may succeed later."""
    text = _text(done)
    if "accounting/qos policy" in text and "submitjob" not in text:
        # Older versions do not name the limit, which may be the limit of submitted jobs.
        return re.search(r"\b(assoc|qos)(grp|max|min)[a-z]+", text) is None
    return any(part in text for part in _TEMPORARY)


def lacks_het_jobs(done: Completed) -> bool:
    """Return whether the cluster refused a job because it is heterogeneous."""
    text = _text(done)
    return "not supported" in text or "heterogeneous" in text or "het job" in text or "hetjob" in text


def refusal(done: Completed) -> RequestRefused:
    """Return the error for a request that Slurm will never accept."""
    text = _text(done)
    hint = next(
        (remedy for part, remedy in _REMEDIES if part in text), "change the pool's `slurm`, or the resources in the spec"
    )
    return RequestRefused(f"Slurm refused the job: {error_text(done) or f'exit code {done.exit_code}'}", hint=hint)


def _text(done: Completed) -> str:
    return error_text(done).lower()
