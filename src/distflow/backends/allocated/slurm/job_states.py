"""Slurm's reports about jobs, and their meaning for distflow: states, reasons for waiting, ends, and limits of partitions.

The names are those of Slurm 22.05 to 25.05 (``job_state_string`` and ``job_reason_string`` in its sources). A job in an unknown
state counts as waiting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from msgspec import Struct

from distflow.documents.text import plain
from distflow.lifecycle.states import Reason

__all__ = [
    "ENDS",
    "PHASES",
    "SHOW_PARTITIONS",
    "Component",
    "JobPhase",
    "jobs_of",
    "parse_limit",
    "partitions_of",
    "pending_text",
    "phase_of",
    "squeue_format",
    "state_text",
]


class JobPhase(Enum):
    """The meaning of a Slurm state for an allocation."""

    QUEUED = "queued"
    GRANTED = "granted"
    ENDING = "ending"
    """Slurm is ending the job's processes. The state does not contain the reason yet."""
    OVER = "over"


ENDS: Mapping[str, tuple[Reason | None, str]] = MappingProxyType(
    {
        "COMPLETED": (None, "has ended"),
        "FAILED": (None, "failed"),
        "CANCELLED": (Reason.CANCELED, "was canceled"),  # codespell:ignore
        "TIMEOUT": (Reason.EXEC_TIMEOUT, "reached its time limit"),
        "DEADLINE": (Reason.EXEC_TIMEOUT, "reached its deadline"),
        "PREEMPTED": (Reason.PREEMPTED, "was preempted by another job"),
        "NODE_FAIL": (Reason.NODE_LOST, "lost a node"),
        "BOOT_FAIL": (Reason.NODE_LOST, "lost a node that did not boot"),
        "RECONFIG_FAIL": (Reason.NODE_LOST, "lost a node that could not be configured"),
        "LAUNCH_FAILED": (Reason.START_ERROR, "could not be launched"),
        "OUT_OF_MEMORY": (Reason.OOM_KILLED, "used more memory than it requested"),
        "REVOKED": (None, "was moved to another cluster"),
    }
)
"""Final state → distflow's reason, and the end of a sentence about the job."""

PHASES: Mapping[str, JobPhase] = MappingProxyType(
    {
        **dict.fromkeys(ENDS, JobPhase.OVER),
        **dict.fromkeys(("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "EXPEDITING"), JobPhase.GRANTED),
        **dict.fromkeys(("COMPLETING", "STAGE_OUT", "UPDATE_DB"), JobPhase.ENDING),
        **dict.fromkeys(
            (
                "PENDING", "CONFIGURING", "POWER_UP_NODE", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD",
                "SPECIAL_EXIT",
            ),
            JobPhase.QUEUED,
        ),
    }
)  # fmt: skip
"""State of Slurm → its meaning."""

_PENDING: Mapping[str, str] = MappingProxyType(
    {
        "None": "waits to be scheduled",
        "Priority": "waits for jobs of higher priority",
        "Resources": "waits for free nodes",
        "Dependency": "waits for a job that it depends on",
        "DependencyNeverSatisfied": "will never start: a job that it depends on failed",
        "BeginTime": "waits for its start time",
        "Cleaning": "waits for the cleanup of an earlier run",
        "Licenses": "waits for a license",
        "JobHeldAdmin": "is held by an administrator, who can release it",
        "JobHeldUser": "is held: release it with `scontrol release`",
        "JobArrayTaskLimit": "waits for other jobs of its array",
        "JobLaunchFailure": "could not be launched",
        "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
        "Reservation": "waits for its reservation",
        "ReservationDeleted": "will never start: its reservation was deleted",
        "ReservationInvalid": "will never start: its reservation does not exist",
        "MaxPoweredUpNodes": "waits for nodes: the cluster has powered up its maximum number of nodes",
        "NodeDown": "waits for a node that is down",
        "FrontEndDown": "waits for a front end that is down",
        "PartitionDown": "waits: its partition is down",
        "PartitionInactive": "waits: its partition accepts no jobs now",
        "PartitionConfig": "will not start: it requests more than its partition allows",
        "PartitionNodeLimit": "will not start: it requests more nodes than its partition has or allows",
        "PartitionTimeLimit": "will not start: its time limit is longer than that of its partition",
        "BadConstraints": "will never start: no node meets its constraints",
        "Constraints": "waits for nodes that meet its constraints",
        "AccountNotAllowed": "will not start: its partition does not allow its account",
        "QosNotAllowed": "will not start: its partition or account does not allow its QOS",
        "InvalidAccount": "will not start: its account is not valid",
        "InvalidQOS": "will not start: its QOS is not valid",
        "QOSNotAllowed": "will not start: its partition or account does not allow its QOS",
        "QOSJobLimit": "waits: the QOS runs its maximum number of jobs",
        "QOSResourceLimit": "waits: a limit of the QOS is reached",
        "QOSTimeLimit": "will not start: its time limit is longer than that of its QOS",
        "QOSUsageThreshold": "waits: the usage of the account is above the threshold of its QOS",
        "QOSMinGRES": "will not start: its QOS requires more GPUs or other generic resources",
        "QOSMinCpuNotSatisfied": "will not start: its QOS requires more CPUs",
        "QOSMinMemory": "will not start: its QOS requires more memory",
        "QOSMinNode": "will not start: its QOS requires more nodes",
        "QOSMinBB": "will not start: its QOS requires more of the burst buffer",
        "QOSMinBilling": "will not start: its QOS requires a larger job",
        "QOSMinEnergy": "will not start: its QOS requires more energy",
        "QOSMinLicense": "will not start: its QOS requires more licenses",
        "AssociationJobLimit": "waits: the account runs its maximum number of jobs",
        "AssociationResourceLimit": "waits: a limit of the account is reached",
        "AssociationTimeLimit": "will not start: its time limit is longer than that of the account",
        "JobArrayTaskUpdating": "waits to be scheduled",
        "HetJobLimit": "waits: the nodes of a heterogeneous job are not free at the same time",
        "BurstBufferResources": "waits for the burst buffer",
        "BurstBufferStageIn": "waits for files in the burst buffer",
        "BurstBufferOperation": "waits: an operation of the burst buffer failed",
        "BlockFreeAction": "waits for nodes that are being freed",
        "BlockMaxError": "waits for nodes with errors",
        "Prolog": "waits for the preparation of its nodes",
        "SchedDefer": "waits to be scheduled",
        "MaxRequeue": "will not start: it was requeued too often",
        "SystemFailure": "waits: Slurm failed",
        "NonZeroExitCode": "an earlier run failed",
        "RaisedSignal": "an earlier run was ended by a signal",
        "TimeLimit": "an earlier run reached its time limit",
        "InactiveLimit": "an earlier run was inactive for too long",
        "OutOfMemory": "an earlier run used too much memory",
        "AccountingPolicy": "waits: a limit of the account is reached",
        "FedJobLock": "waits for the federation of clusters",
        "DeadLine": "will not start: its deadline cannot be met",
        "NoReason": "waits to be scheduled",
        "WaitingForScheduling": "waits to be scheduled",
    }
)
"""Slurm's reason for waiting → the end of a sentence about the job. ``_limit`` decodes reasons about limits."""

_RESOURCES: Mapping[str, str] = MappingProxyType(
    {
        "BB": "burst buffer", "Billing": "billing units", "CPU": "CPUs", "Cpu": "CPUs", "Energy": "energy", "GRES": "GPUs",
        "Job": "jobs", "Jobs": "jobs", "JobsAccrue": "jobs that gain priority", "License": "licenses", "Mem": "memory",
        "Memory": "memory", "Node": "nodes", "SubmitJob": "submitted jobs", "SubmitJobs": "submitted jobs",
        "Unknown": "resources", "Wall": "run time", "WallDuration": "run time",
    }
)  # fmt: skip
_WHOSE: Mapping[str, str] = MappingProxyType(
    {"Assoc": "the account", "QOS": "the QOS", "Partition": "the partition", "": "the cluster"}
)
_LIMIT = (
    rf"(Assoc|QOS|Partition|)(Grp|Max)({'|'.join(sorted(_RESOURCES, key=len, reverse=True))})"
    r"(RunMinutes|Minutes|Mins|)(PerUser|PerAccount|PerJob|PerNode|PU|PA|)(?:Limit)?"
)


def pending_text(reason: str) -> str:
    """Return the reason why a job waits, in plain words and with Slurm's reason."""
    word = re.split(r"[,(\s:]", reason, maxsplit=1)[0]
    text = _PENDING.get(word) or _limit(word)
    shown = plain(reason)[:200]
    if text is None:
        return f"waits: {shown}" if shown else "waits"
    return f"{text} ({shown})"


def _limit(word: str) -> str | None:
    match = re.fullmatch(_LIMIT, word)
    if match is None:
        return None
    whose, kind, resource, minutes, per, *_ = match.groups()
    what = _RESOURCES[resource] + (" times run time" if minutes else "")
    each = {"PerUser": " per user", "PU": " per user", "PerAccount": " per account", "PA": " per account"}.get(per, "")
    if per in ("PerJob", "PerNode") or (kind == "Max" and resource == "WallDuration"):
        one = per.removeprefix("Per").lower() or "job"
        return f"will not start: it requests more {what} than {_WHOSE[whose]} allows for one {one}"
    return f"waits: the limit of {_WHOSE[whose]} on {what}{each} is reached"


def state_text(state: str) -> str:
    """Return the reason why a job waits in a state other than ``PENDING``."""
    text = {
        "CONFIGURING": "waits for its nodes to start",
        "POWER_UP_NODE": "waits for its nodes to start",
        "REQUEUE_HOLD": "was requeued and is held: release it with `scontrol release`",
        "SPECIAL_EXIT": "was requeued and is held: release it with `scontrol release`",
        "RESV_DEL_HOLD": "is held, because its reservation was deleted",
    }.get(state, "waits")
    return f"{text} ({plain(state)[:60]})"


def phase_of(state: str) -> JobPhase:
    """Return the meaning of a state. A job in an unknown state counts as waiting until Slurm forgets it."""
    return PHASES.get(state, JobPhase.QUEUED)


def parse_limit(text: str) -> float | None:
    """Return a time limit such as ``1-12:00:00`` in seconds; ``None`` for ``UNLIMITED`` and any other text."""
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


SHOW_PARTITIONS = ("scontrol", "--all", "show", "partition", "--oneliner")


def partitions_of(text: str) -> Mapping[str, Mapping[str, str]]:
    """Return partition → settings, from the output of ``SHOW_PARTITIONS``."""
    lines = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


# -- the output of squeue ---------------------------------------------------------------------------------------------


class Component(Struct, frozen=True, kw_only=True):
    """A job, or one component of a heterogeneous job."""

    job: str
    """The id of the whole job."""
    offset: int
    """The position of the component in a heterogeneous job; otherwise 0."""
    number: str
    """The id of the component."""
    state: str
    starts_at: float | None
    """Start or expected start, in seconds since the epoch."""
    hosts: str
    """Its hosts as Slurm writes them; empty if it has none."""
    reason: str
    comment: str


_FIELDS = ("%i", "%A", "%T", "%S", "%N", "%r", "%k")


def squeue_format(separator: str) -> str:
    """Return the format of ``squeue`` for ``jobs_of``.

    The separator must not occur in any text of a job. Such texts may have any character, so it must be new and random.
    """
    return "".join(f"{separator}{field}" for field in _FIELDS) + separator


def jobs_of(text: str, separator: str) -> Mapping[str, Sequence[Component]]:
    """Return job → components in order, from the output of ``squeue``. Raises ``ValueError`` for any other text."""
    width = len(_FIELDS) + 1
    first, *parts = text.split(separator)
    if first.strip() or len(parts) % width or any(part.strip() for part in parts[width - 1 :: width]):
        raise ValueError("the answer does not have the requested format")
    found: dict[str, list[Component]] = {}
    for at in range(0, len(parts), width):
        name, number, state, starts, hosts, reason, comment = parts[at : at + width - 1]
        match = re.fullmatch(r"([0-9]+)(?:\+([0-9]+))?", name)
        if match is None:
            continue  # part of an array, which distflow never submits
        found.setdefault(match[1], []).append(
            Component(
                job=match[1],
                offset=int(match[2] or 0),
                number=number,
                state=state,
                starts_at=float(starts) if re.fullmatch(r"[1-9][0-9]{0,11}", starts) else None,
                hosts="" if hosts == "(null)" else hosts,
                reason=reason,
                comment=comment,
            )
        )
    return {job: sorted(components, key=lambda one: one.offset) for job, components in found.items()}
