"""Check a pool on Slurm: whether the cluster accepts its settings, and the Python on one of its nodes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from distflow.backends.allocated.engine import Allocation, AllocationRequest, NodeRequest, RequestRefused
from distflow.backends.allocated.slurm.commands import SlurmCommands, error_text
from distflow.backends.allocated.slurm.job_request import is_temporary, refusal, sbatch_arguments, shell_path
from distflow.backends.allocated.slurm.job_states import SHOW_PARTITIONS, parse_limit, partitions_of
from distflow.backends.machines.checks.findings import Finding, Grade, error, note, warning
from distflow.backends.machines.checks.measured import python_trouble
from distflow.backends.machines.connection.bootstrap import python_argv
from distflow.documents.quantities import local_minute, seconds_text
from distflow.documents.text import did_you_mean, listed, plain
from distflow.errors import NodeUnreachable
from distflow.pools.model import Pool, SlurmPlatform, SlurmSettings, ssh_node
from distflow.structs import replace

__all__ = ["check_slurm"]

_OVERLAP_SINCE = (20, 11)
"""The version of Slurm in which ``srun --overlap`` appeared."""
_AT_ONCE_S = 5
"""Maximum seconds to wait for a free node."""
_SOON_S = 60.0
"""If Slurm would start a job more than this number of seconds from now, no node is free."""
_PYTHON_S = 60.0
_PROBE = """
import os, subprocess, sys
env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
job = "--jobid=" + os.environ["SLURM_JOB_ID"]
step = ["srun", job, "--overlap", "--nodes=1", "--ntasks=1", "--gres=none", "--mpi=none", "--chdir=/", "true"]
try:
    done = subprocess.run(step, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
    trouble = done.stdout.decode("utf-8", "replace") or "exit code " + str(done.returncode) if done.returncode else ""
except (OSError, subprocess.TimeoutExpired) as error:
    trouble = str(error)
trouble = " ".join(trouble.split())[-300:].encode("ascii", "replace").decode()
print(sys.version.split()[0], os.path.exists(os.path.expanduser(sys.argv[1])), trouble or "ok")
"""
"""Prints the version of Python, whether a file of the login node exists here, and ``ok`` or why ``srun --overlap`` fails."""

_ALLOCATION = Allocation(workflow="check", group="check", attempt=0)


def check_slurm(pool: Pool, commands: SlurmCommands, progress: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Yield the findings. Submits at most one short job, if a node is free. Raises ``NodeUnreachable``."""
    check = _Check(pool, commands)
    progress("querying Slurm's configuration")
    yield from check.version()
    yield from check.pyxis()
    partitions = check.partitions()
    accepted = []
    for platform, settings in {"": SlurmPlatform(), **check.settings.platforms}.items():
        progress(f"checking whether Slurm would accept a job{_of(platform)}")
        found = list(check.partition(platform, settings, partitions))
        for step in (partial(check.gres, platform, settings), partial(check.submission, platform)):
            found += [] if _has_error(found) else step()
        yield from found
        accepted += [] if _has_error(found) else [platform]
    if "" in accepted:
        progress("running Python on a node, if one is free")
        yield from check.python()


def _has_error(findings: Sequence[Finding]) -> bool:
    return any(finding.grade is Grade.ERROR for finding in findings)


def _of(platform: str) -> str:
    return f" (platform `{platform}`)" if platform else ""


class _Check:
    def __init__(self, pool: Pool, commands: SlurmCommands) -> None:
        self._pool = pool
        self.settings = pool.slurm or SlurmSettings()
        self._commands = commands
        self._at = (commands.node,)
        self._has_gpus: dict[str, bool] = {}
        self._is_busy = False
        """Whether no node of the pool is free."""

    def version(self) -> Iterator[Finding]:
        """Check the version and settings of the cluster. Raises ``NodeUnreachable`` if the controller does not answer."""
        text = self._commands.query("scontrol", "show", "config")
        shown = re.search(r"^SLURM_VERSION\s*=\s*(([0-9]+)\.([0-9]+)\S*)", text, re.MULTILINE)
        if shown is None:
            return
        if (int(shown[2]), int(shown[3])) < _OVERLAP_SINCE:
            yield error(
                "slurm", self._at, f"this is Slurm {shown[1]}, which has no `srun --overlap`",
                "distflow needs Slurm 20.11 or newer: ask the administrators of the cluster",
            )  # fmt: skip
        else:
            yield note("slurm", self._at, f"Slurm {plain(shown[1])}", "")
        if re.search(r"^ProctrackType\s*=\s*proctrack/pgid", text, re.MULTILINE):
            yield warning(
                "slurm", self._at, "Slurm finds the processes of jobs by their process group (`proctrack/pgid`)",
                "processes of canceled jobs may remain on nodes: ask the administrators for `proctrack/cgroup`",
            )  # fmt: skip
        if "sched/builtin" in text and self.settings.het_jobs:
            yield note(
                "slurm",
                self._at,
                "this cluster does not support heterogeneous jobs (`sched/builtin`): every node of a group gets the largest "
                "resources of its tasks, and all tasks of a group must have the same platform",
                "",
            )

    def pyxis(self) -> Iterator[Finding]:
        """If the pool uses Pyxis, check that the cluster has it and that the pool does not set ``python``."""
        if self.settings.container != "pyxis":
            return
        shown = self._commands.run("srun", "--help")
        if b"--container-image" not in shown.stdout:
            yield error(
                "container", self._at, "`srun` has no option `--container-image`: Pyxis is not installed on this cluster",
                "remove `slurm.container`, and set `container: apptainer` of the pool if the nodes have Apptainer",
            )  # fmt: skip
        default, python = ssh_node().python, (self._pool.template or ssh_node()).python
        if python != default:
            yield warning(
                "container", self._at, f"`{python}`, the `python` of the pool, must exist in the `image` of each task",
                f"remove `python` of the pool, so that `{default}` is used, or use only images with this Python",
            )  # fmt: skip

    def partitions(self) -> Mapping[str, Mapping[str, str]]:
        """Return the partitions with their settings, by name."""
        return partitions_of(self._commands.query(*SHOW_PARTITIONS))

    def partition(
        self, platform: str, settings: SlurmPlatform, partitions: Mapping[str, Mapping[str, str]]
    ) -> Iterator[Finding]:
        """Check that the partitions of a platform exist, are up, and allow the pool's time limit.

        If none is configured, only check that the cluster has a default partition.
        """
        wanted = settings.partition or self.settings.partition
        if wanted is None:
            if not any(one.get("Default") == "YES" for one in partitions.values()):
                yield error(
                    "slurm", self._at, f"the cluster has no default partition{_of(platform)}",
                    f"set `slurm.partition` of the pool to a partition of the cluster: {listed(sorted(partitions))}",
                )  # fmt: skip
            return
        for name in wanted.split(","):
            if name not in partitions:
                yield error(
                    "slurm", self._at, f"there is no partition `{name}`{_of(platform)}",
                    did_you_mean(name, partitions, what="partitions"),
                )  # fmt: skip
                continue
            state, limit = partitions[name].get("State", "UP"), parse_limit(partitions[name].get("MaxTime", ""))
            if state != "UP":
                key = "`partition` of the platform" if settings.partition else "`slurm.partition` of the pool"
                yield error(
                    "slurm", self._at, f"partition `{name}` is {plain(state)}",
                    f"choose another partition in {key}, or ask the administrators of the cluster",
                )  # fmt: skip
            if limit is not None and self.settings.time_s is not None and self.settings.time_s > limit:
                own, most = seconds_text(self.settings.time_s), seconds_text(limit)
                yield error(
                    "slurm", self._at, f"`slurm.time` is {own}, but the limit of partition `{name}` is {most}",
                    "shorten `slurm.time` of the pool",
                )  # fmt: skip
            limits = (
                [f"{nodes} {'node' if nodes == '1' else 'nodes'}"]
                if (nodes := partitions[name].get("MaxNodes", "")).isdecimal()
                else []
            )
            limits += [seconds_text(limit)] if limit is not None else []
            if limits:
                yield note("slurm", self._at, f"partition `{name}` allows jobs of at most {' and '.join(limits)}", "")

    def gres(self, platform: str, settings: SlurmPlatform) -> Iterator[Finding]:
        """Check that nodes of a platform have its kind of GPU."""
        wanted = settings.gres or self.settings.gres
        partition = settings.partition or self.settings.partition
        chosen = [f"--partition={partition}"] if partition else []
        text = self._commands.query("sinfo", "--noheader", *chosen, "--format=%G")
        kinds = set(re.findall(r"([A-Za-z0-9_.-]+(?::[A-Za-z0-9_.-]*[A-Za-z_.-][A-Za-z0-9_.-]*)?):[0-9]", text))
        self._has_gpus[platform] = any(kind == wanted or kind.startswith(f"{wanted}:") for kind in kinds)
        if self._has_gpus[platform]:
            return
        message = (
            f"no node{f' of partition `{partition}`' if partition else ''} has the generic resource `{wanted}`{_of(platform)}"
        )
        known = f"the nodes have {listed(sorted(kinds))}" if kinds else "the nodes have none"
        if ":" in wanted:
            key = "`gres` of the platform" if settings.gres else "`slurm.gres` of the pool"
            yield error("gpus", self._at, message, f"change {key}; {known}")
        else:
            yield warning("gpus", self._at, message, f"tasks that request GPUs cannot run; {known}")

    def submission(self, platform: str) -> Iterator[Finding]:
        """Let Slurm check, without submitting it, a job of one node (with one GPU if the nodes have GPUs)."""
        node = NodeRequest(task="check", gpus=int(self._has_gpus.get(platform, False)), platform=platform or None)
        command = sbatch_arguments(self._pool, _request(node), [(node,)])
        done = self._commands.run(
            "env", "SLURM_TIME_FORMAT=%s", *command, "--test-only", program=command[0], input=b"#!/bin/sh\n"
        )
        if done.exit_code == 0:
            start = re.search(r" to start at ([0-9]{9,11}) ", error_text(done))
            when = f"; it would start at {local_minute(float(start[1]))}" if start is not None else ""
            if not platform:
                self._is_busy = start is not None and float(start[1]) > float(self._commands.query("date", "+%s")) + _SOON_S
            yield note("slurm", self._at, f"Slurm accepts a job of one node{_of(platform)}{when}", "")
        elif is_temporary(done):
            yield warning("slurm", self._at, f"Slurm refuses a job{_of(platform)} now: {error_text(done)}", "try again later")
        else:
            refused: RequestRefused = refusal(done)
            message = refused.message.replace("the job", f"a job of one node{_of(platform)}", 1)
            yield error("slurm", self._at, message, refused.hint)

    def python(self) -> Iterator[Finding]:
        """Run the pool's Python on a node if one is free.

        Also check ``srun --overlap`` there, and whether the node shares ``root`` with the login node.
        """
        if self._is_busy:
            yield note("python", self._at, "Python on the nodes was not checked: no node is free now", "")
            return
        template = self._pool.template or ssh_node()
        mark = shell_path(template.root, f"distflow-check-{secrets.token_hex(8)}")
        made = self._commands.run("sh", "-c", f'umask 077; f={mark}; mkdir -p "${{f%/*}}" && : >"$f" && printf %s "$f"')
        path = made.stdout.decode("utf-8", "replace") if made.exit_code == 0 else ""
        node = NodeRequest(task="check")
        options = [
            word
            for word in sbatch_arguments(self._pool, replace(_request(node), time_limit_s=60.0), [(node,)])[2:]
            if not word.startswith(("--output=", "--no-requeue", "--comment="))
        ]
        try:
            done = self._commands.run(
                "srun", f"--immediate={_AT_ONCE_S}", *options, "--job-name=distflow-check", "--ntasks=1",
                *python_argv(template.python), "-I", "-S", "-c", _PROBE, path or "/",
                timeout_s=_PYTHON_S,
            )  # fmt: skip
        except NodeUnreachable:
            yield note("python", self._at, "Python on the nodes was not checked: `srun` returned no result", "")
            return
        finally:
            if path:
                self._commands.run("rm", "-f", path)
        fields = done.stdout.decode("utf-8", "replace").split(maxsplit=2)
        if len(fields) == 3:
            yield from self._python_findings(template.python, template.root, *fields[:2], has_marker=bool(path))
            if (trouble := plain(fields[2]).strip()) != "ok":
                yield error(
                    "slurm", self._at, f"`srun --overlap` fails on a node: {trouble}",
                    "distflow starts and reaches tasks with it: ask the administrators of the cluster to allow it",
                )  # fmt: skip
        elif re.search("execve|No such file|not found|Permission denied", error_text(done)):
            yield error(
                "python", self._at, f"`{template.python}` does not run on a node: {error_text(done)[:300]}",
                "set `python` of the pool to a Python that exists on all nodes",
            )  # fmt: skip
        else:
            yield note(
                "python",
                self._at,
                f"Python on the nodes was not checked: {error_text(done)[:200] or 'no node was free at once'}",
                "",
            )

    def _python_findings(self, python: str, root: str, version: str, exists: str, *, has_marker: bool) -> Iterator[Finding]:
        trouble = python_trouble(0, version)
        if trouble:
            yield error(
                "python", self._at, f"on a node, `{python}` {plain(trouble)}", "set `python` of the pool to a newer Python"
            )
        else:
            yield note("python", self._at, f"on a node, `{python}` is Python {plain(version)}", "")
        if has_marker:
            sharing = (
                "shared with the login node"
                if exists == "True"
                else "not shared with the login node: files are sent to each node"
            )
            yield note("root", self._at, f"`{root}` is {sharing}", "")


def _request(node: NodeRequest) -> AllocationRequest:
    return AllocationRequest(allocation=_ALLOCATION, label="distflow-check", nodes=(node,))
