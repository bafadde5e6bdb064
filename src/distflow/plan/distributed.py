"""The gang as Valohai describes it: ``distributed.json`` and ``distributed.yaml``, and the variables that lead to them.

A program that was written for Valohai's distributed tasks finds the other tasks here without a change: the package
``valohai-utils`` reads the file that ``VH_CONFIG_DIR`` names. A *member* is a task, not a rank: eight GPUs of a node are one
member. Members are numbered as the ranks are, so that Valohai's rule (the lowest ``member_id`` is the master) names the task
that holds rank 0; tasks without ranks come after those that have some. The public address of a member is its local one, at
which the others reach it: distflow knows no other.

Format: the samples and the parser of https://github.com/valohai/valohai-utils (``valohai/internals/distributed_config``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow.layout.ranks import World
from distflow.plan.model import ATTEMPT_DIR, GroupPlan, PlannedFile, address_of
from distflow.spec.model import TaskSpec

__all__ = ["distributed_environment", "distributed_files", "member_ids"]

_FOLDER = "config"
"""Below the attempt's directory."""
_RESERVED = "VH_"


def member_ids(tasks: Sequence[TaskSpec], world: World | None) -> dict[str, int]:
    """Return the number of each task of a gang, by its name; nothing for a task that is alone and shares no world."""
    if len(tasks) < 2 and world is None:
        return {}
    ranked = {item.task: item.node_rank for item in world.tasks} if world is not None else {}
    order = sorted(tasks, key=lambda task: (ranked.get(task.name, len(ranked)), not task.lead))
    return {task.name: number for number, task in enumerate(order)}


def distributed_environment(task: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a member; none when the spec gives variables of that kind, which then mean something else."""
    if any(name.startswith(_RESERVED) for name in given):
        return {}
    return {
        "VH_JOB_ID": _job_id(task),
        "VH_CONFIG_DIR": f"{ATTEMPT_DIR}/{_FOLDER}",
        "VH_INPUTS_DIR": f"{ATTEMPT_DIR}/input",
        "VH_OUTPUTS_DIR": f"{ATTEMPT_DIR}/output",
        "VH_REPOSITORY_DIR": f"{ATTEMPT_DIR}/work",
    }


def distributed_files(group: GroupPlan, task: str) -> tuple[PlannedFile, ...]:
    """Return the two files of a task, still symbolic; none for a task that is not a member.

    They are made for one task at a time and never stored: all files of a gang together grow with the square of its size.
    """
    own = group.launch(task).member
    if own is None:
        return ()
    import yaml  # noqa: PLC0415  a plan is shown and compiled without it

    members = sorted((one.member, one.task) for one in group.launches if one.member is not None)
    described = [_member(number, name) for number, name in members]
    found = {
        "config": {
            "group_name": f"task-@@WORKFLOW_ID@@-{group.name}",
            "member_id": str(own),
            "required_count": len(members),
        },
        "members": described,
        "self": _member(own, task),
    }
    texts = {"json": json.dumps(found, indent=1) + "\n", "yaml": yaml.safe_dump(found, sort_keys=False)}
    return tuple(
        PlannedFile(
            path=f"{_FOLDER}/distributed.{kind}", shown=f"distributed.{kind}", text=text, size=len(text.encode()), mode=0o600
        )
        for kind, text in texts.items()
    )


def _member(number: int, task: str) -> dict[str, Any]:
    return {
        "announce_time": "@@LEASED_AT@@",
        "identity": f"@@NODE:{task}@@",
        "job_id": _job_id(task),
        "member_id": str(number),
        "network": {"exposed_ports": {}, "local_ips": [address_of(task)], "public_ips": [address_of(task)]},
    }


def _job_id(task: str) -> str:
    return f"exec-@@WORKFLOW_ID@@-{task}-@@RETRY_ID@@"
