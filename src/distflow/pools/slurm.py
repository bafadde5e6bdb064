"""The settings of a pool on Slurm, from the configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from distflow.documents.document import View, path_text
from distflow.documents.quantities import parse_duration
from distflow.pools.model import SlurmPlatform, SlurmSettings

__all__ = ["parse_slurm"]

_GPU_OPTIONS: Mapping[str, Literal["gres", "gpus-per-node", "gpus-per-task"]] = MappingProxyType(
    {"gres": "gres", "gpus-per-node": "gpus-per-node", "gpus-per-task": "gpus-per-task"}
)
_CONTAINERS: Mapping[str, Literal["pyxis"]] = MappingProxyType({"pyxis": "pyxis"})
_SHORTEST_S = 60.0
"""Slurm counts time limits in minutes."""

_FORBIDDEN_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "-a": "",
        "-A": "account",
        "-C": "constraint",
        "-i": "",
        "-J": "",
        "-n": "",
        "-N": "",
        "-o": "",
        "-e": "",
        "-p": "partition",
        "-q": "qos",
        "-t": "time",
        "-W": "",
        "-G": "gpu_option",
        "-h": "",
        "-V": "",
        "--account": "account",
        "--array": "",
        "--comment": "",
        "--constraint": "constraint",
        "--error": "",
        "--exclusive": "exclusive",
        "--export": "",
        "--gpus": "gpu_option",
        "--gpus-per-node": "gpu_option",
        "--gpus-per-task": "gpu_option",
        "--gres": "gres",
        "--help": "",
        "--input": "",
        "--job-name": "",
        "--no-requeue": "",
        "--nodes": "",
        "--ntasks": "",
        "--ntasks-per-node": "",
        "--output": "",
        "--parsable": "",
        "--partition": "partition",
        "--qos": "qos",
        "--requeue": "",
        "--reservation": "reservation",
        "--signal": "",
        "--test-only": "",
        "--time": "time",
        "--usage": "",
        "--version": "",
        "--wait": "",
        "--wrap": "",
    }
)
"""Options of ``sbatch`` that ``extra`` may not contain: ``slurm`` has a key for them, or they would change how the job runs.

Each has the key of ``slurm`` to use instead; empty if there is none."""


def parse_slurm(pool: View) -> SlurmSettings:
    """Return the settings for submitting jobs, and add findings to those of the configuration."""
    slurm = pool.view("slurm")
    time_s = slurm.parsed("time", parse_duration)
    if time_s is not None and time_s < _SHORTEST_S:
        at = path_text((*slurm.path, "time"))
        slurm.add(f"`{at}` must be at least 1 minute, because Slurm counts minutes", "write for example `30m`", key="time")
    idle_release_s = slurm.parsed("idle_release", parse_duration)
    if idle_release_s == 0:
        at = path_text((*slurm.path, "idle_release"))
        slurm.add(f"`{at}` must be more than 0", "write a duration such as `10m`", key="idle_release")
    gpu_option = _GPU_OPTIONS.get(slurm.string("gpu_option") or "gres") or "gres"
    kinds = [slurm.string("gres"), *(pool.view("platforms", name).string("gres") for name in pool.view("platforms").keys)]
    other = next((kind for kind in kinds if kind is not None and kind.partition(":")[0] != "gpu"), None)
    if gpu_option != "gres" and other is not None:
        message = f"`--{gpu_option}` requests only the generic resource `gpu`, not `{other}`"
        slurm.add(message, "remove `gpu_option`", key="gpu_option")
    return SlurmSettings(
        partition=slurm.string("partition"),
        account=slurm.string("account"),
        qos=slurm.string("qos"),
        constraint=slurm.string("constraint"),
        reservation=slurm.string("reservation"),
        exclusive=slurm.flag("exclusive") or False,
        time_s=time_s,
        gres=slurm.string("gres") or SlurmSettings().gres,
        gpu_option=gpu_option,
        het_jobs=slurm.flag("het_jobs") is not False,
        extra=_extra(slurm),
        container=_CONTAINERS.get(slurm.string("container") or ""),
        idle_release_s=SlurmSettings().idle_release_s if idle_release_s is None else idle_release_s,
        platforms=MappingProxyType({name: _platform(pool.view("platforms", name)) for name in pool.view("platforms").keys}),
    )


def _platform(item: View) -> SlurmPlatform:
    return SlurmPlatform(partition=item.string("partition"), constraint=item.string("constraint"), gres=item.string("gres"))


def _instead(key: str) -> str:
    """Return the hint for an option that ``extra`` may not contain, and that the key ``key`` of ``slurm`` replaces."""
    if key == "gpu_option":
        return "remove it; set `gpu` in `resources` of the spec, and `gpu_option` of `slurm` if the cluster needs this option"
    return f"remove it; use the key `{key}` of `slurm`" if key else "remove it"


def _extra(slurm: View) -> tuple[str, ...]:
    """Return further options of ``sbatch``, and add findings. ``sbatch`` would use an argument without a dash as its script."""
    found = []
    for text in slurm.texts("extra"):
        option = text.value
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        if not re.fullmatch(r"--[a-z][a-z0-9-]+(=[^\x00-\x1f\x7f]*)?|-[A-Za-z][^\x00-\x1f\x7f]*", option):
            slurm.add(
                f"`{option}` in `slurm.extra` is not an option of sbatch",
                "write an option and its value as one item, such as `--licenses=matlab`",
                where=text.mark,
            )
        elif name in _FORBIDDEN_OPTIONS:
            key = _FORBIDDEN_OPTIONS[name]
            slurm.add(
                f"`{name}` cannot be in `slurm.extra`, because `slurm` has a key for it"
                if key
                else f"`{name}` cannot be in `slurm.extra`, because it would change how distflow runs the job",
                _instead(key),
                where=text.mark,
            )
        found.append(option)
    return tuple(found)
