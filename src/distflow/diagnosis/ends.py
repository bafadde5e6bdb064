"""Find the causes of failures in events, kernel logs, exit codes and end reasons.

This module does not use the output of tasks, and does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from distflow.diagnosis.model import Diagnosis, GroupOutcome, TaskOutcome
from distflow.diagnosis.rules import HANG, HOST_MEMORY, Rule
from distflow.lifecycle.states import Reason

__all__ = ["END_RULES", "HIDDEN", "by_ends", "by_kernel"]

KILLED = Rule(
    key="killed",
    shows="a task or rank that was killed by SIGKILL (exit code 137 in a shell), but not by distflow",
    cause="something on the node killed a process with SIGKILL",
    remedy="Usually the kernel killed the process for lack of memory, and distflow cannot read the kernel's log: check "
    "`dmesg` on the node as root, and give the task more memory or fewer data workers. Otherwise a person, an "
    "administrator's script or a container engine killed it.",
)
CRASHED = Rule(
    key="crashed",
    shows="a task or rank that was ended by SIGSEGV, SIGABRT, SIGBUS, SIGILL or SIGFPE",
    cause="a process crashed in native code",
    remedy="Set `PYTHONFAULTHANDLER=1` in the task's environment to see where it crashed. SIGBUS usually means a full "
    "/dev/shm, SIGILL means a library built for another CPU. With torch 2.13 and gloo, TORCH_DISTRIBUTED_DEBUG=DETAIL makes "
    "DDP crash at construction: try without `debug: true`.",
)
LOST = Rule(
    key="node-lost",
    shows="the reason NODE_LOST",
    cause="a node was rebooted, was unreachable for too long, or its allocation ended",
    remedy="Check whether the node runs and answers: `distflow pool check`. Processes that still run there are stopped when "
    "the node is back. `exitActions: {RESCHEDULE: 3001}` of the tasks restarts the gang automatically.",
)
TOO_LONG = Rule(
    key="too-long",
    shows="the reason EXEC_TIMEOUT",
    cause="the group ran longer than its exec_timeout, or its job reached a time limit",
    remedy="If the steps continued to the end (`distflow workflow logs <id>`), raise `timeout: {exec_timeout: …}` or the time "
    "limit of the job. If they stopped, the group hung: set `timeout: {hang_timeout: 10m}`, and run `distflow workflow stacks "
    "<id>` while it runs.",
)
SLOW_START = Rule(
    key="start-timeout",
    shows="the reason START_TIMEOUT",
    cause="not all tasks of the gang got ready in time",
    remedy="`distflow workflow events <id>` names the slow task. Check its node, or raise `start_barrier` of the pool.",
)
HIDDEN = Rule(
    key="exit-code-hidden",
    shows="a task that ended with code 0 although its ranks failed, while others of its world wait",
    cause="a script did not pass on the exit code of its ranks",
    remedy="Start the script with `set -e` (and `set -o pipefail`), or make its last command start the ranks: `exec …`. "
    "The task then fails, and the others are stopped at once. If you cannot change the script, set "
    "`stop_on_missing_ranks: true` in the group: distflow then stops it when the others have been silent for 30 s.",
)
NO_PROGRAM = Rule(
    key="program-missing",
    shows="the reason START_ERROR with the exit code 126 or 127",
    cause="the program of a task's command cannot be started on its node",
    remedy="Install the program on the node, or write its absolute path. `setup` of the pool is the place for `module load` "
    "and conda. `python` of the pool or node puts a virtual environment first in PATH. With `image`, the task runs in a "
    "container that has the program. A script from `files` needs an interpreter in its first line (`#!`), and "
    "`chmod +x` if it is copied from a local file; or start it as `bash script.sh`.",
)
NOT_STARTED = Rule(
    key="start-error",
    shows="the reason START_ERROR without an exit code of the command",
    cause="a task could not be started on its node",
    remedy="Correct the problem in the message. `distflow pool check` checks every node of the pool.",
)
MEMORY_LIMIT = Rule(
    key="memory-limit",
    shows="the reason EVICTED",
    cause="a task used more memory than it requested, or its node ran short of resources",
    remedy="Request more in `resources` (`memory: 64Gi`), or use less: fewer workers of the data loader, smaller batches, "
    "weights loaded on one rank only. `enforce_limits: false` of the pool or node lets tasks use more than they request.",
)
NO_IMAGE = Rule(
    key="image-pull",
    shows="the reason IMAGE_PULL",
    cause="a container image could not be pulled",
    remedy="Check the name and tag of `image`, and that the node reaches the registry. A private registry needs a REGISTRY "
    "credential: `distflow credential set`.",
)
NO_DATA = Rule(
    key="data-transfer",
    shows="the reason DATA",
    cause="an input could not be fetched, or an output could not be written",
    remedy="Check that the URL exists and that its credential may read or write there: `distflow data check URL`. "
    "Outputs that were not written stay in the task's output directory on its node.",
)
GUARD_DIED = Rule(
    key="guard-died",
    shows="the reason INTERNAL",
    cause="distflow's processes or files for a task were removed on its node, or another program stopped the task",
    remedy="Find out who did that: a person, another supervisor, an administrator's script, systemd at logout "
    "(`KillUserProcesses=no` in the node's logind.conf prevents that), or the kernel (`dmesg`). Submit the workflow again, or "
    "let `exitActions: {RESCHEDULE: 3002}` of the tasks restart the gang.",
)
QUEUE_TIMEOUT = Rule(
    key="queue-timeout",
    shows="the reason QUEUE_TIMEOUT",
    cause="the group waited for nodes longer than its queue_timeout",
    remedy="`distflow workflow events <id>` shows why it waited, and `distflow pool check` shows the resources of the nodes. "
    "Raise `timeout: {queue_timeout: …}`, request less, or submit the workflow with a higher priority.",
)
END_RULES = (
    NO_PROGRAM, NOT_STARTED, MEMORY_LIMIT, NO_IMAGE, NO_DATA, KILLED, CRASHED, LOST, GUARD_DIED, QUEUE_TIMEOUT, TOO_LONG,
    SLOW_START, HIDDEN,
)  # fmt: skip
"""In the order of the table in `docs/diagnosis.md`."""

_CRASHES = MappingProxyType({4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"})
_BY_REASON = MappingProxyType(
    {
        Reason.START_ERROR: NOT_STARTED,
        Reason.EVICTED: MEMORY_LIMIT,
        Reason.IMAGE_PULL: NO_IMAGE,
        Reason.DATA: NO_DATA,
        Reason.NODE_LOST: LOST,
        Reason.INTERNAL: GUARD_DIED,
        Reason.QUEUE_TIMEOUT: QUEUE_TIMEOUT,
        Reason.EXEC_TIMEOUT: TOO_LONG,
        Reason.START_TIMEOUT: SLOW_START,
    }
)
_NOT_EXECUTED = (126, 127)
"""Exit codes if a program cannot be executed or does not exist."""


def by_kernel(group: GroupOutcome) -> Diagnosis | None:
    """Return a diagnosis if the task that failed first has the reason ``OOM_KILLED``.

    If the first failure is not known, any task counts.
    """
    for outcome in _suspects(group):
        if outcome.reason is Reason.OOM_KILLED:
            message = group.first.message if group.first else ""
            return _diagnosis(
                HOST_MEMORY,
                outcome,
                f"{outcome.place}: {message or 'the kernel killed one of its processes'}",
                outcome.kernel[-1] if outcome.kernel else "",
            )
    return None


def by_ends(group: GroupOutcome) -> tuple[Diagnosis, ...]:
    """Return the causes that follow from the ends and events of a group, the most specific first."""
    found = (_from_signal(group), _from_reason(group), _from_silence(group), _from_hidden_failure(group))
    return tuple(one for one in found if one is not None)


def _from_reason(group: GroupOutcome) -> Diagnosis | None:
    for outcome in _suspects(group):
        rule = _BY_REASON.get(outcome.reason) if outcome.reason else None
        if rule is NOT_STARTED and outcome.exit_code in _NOT_EXECUTED:
            rule = NO_PROGRAM
        if rule is not None:
            message = group.first.message if group.first and group.first.task == outcome.task else ""
            return _diagnosis(rule, outcome, f"{outcome.place}: {message}" if message else outcome.place)
    return None


def _from_signal(group: GroupOutcome) -> Diagnosis | None:
    for outcome in _suspects(group):
        number = _signal(group, outcome) if outcome.reason in (Reason.SIGNAL, Reason.EXIT_CODE) else 0
        rule = KILLED if number == 9 else CRASHED if number in _CRASHES else None
        if rule is not None:
            name = "SIGKILL" if number == 9 else _CRASHES[number]
            rank = group.first.rank if group.first and group.first.task == outcome.task and group.first.rank.isdigit() else ""
            who = f"rank {rank} ({outcome.place})" if rank else outcome.place
            return _diagnosis(rule, outcome, f"{who} was ended by {name}")
    return None


def _from_silence(group: GroupOutcome) -> Diagnosis | None:
    if not group.silence:
        return None
    return Diagnosis(key=HANG.key, cause=HANG.cause, found=group.silence, remedy=HANG.remedy)


def _from_hidden_failure(group: GroupOutcome) -> Diagnosis | None:
    if not group.hidden_failure:
        return None
    task = group.first.task if group.first else ""
    return Diagnosis(key=HIDDEN.key, cause=HIDDEN.cause, found=group.hidden_failure, remedy=HIDDEN.remedy, task=task)


def _suspects(group: GroupOutcome) -> Iterator[TaskOutcome]:
    """Yield the task that failed first; all tasks if it is not known."""
    for outcome in group.outcomes:
        if group.first is None or outcome.task == group.first.task:
            yield outcome


def _signal(group: GroupOutcome, outcome: TaskOutcome) -> int:
    """Return the number of the signal that ended a task, or its rank that failed first; 0 if none is known.

    For a rank, and for an exit code such as 137, only SIGKILL and the signals of crashes count.
    """
    if outcome.signal is not None:
        return outcome.signal
    named = group.first.rank_signal if group.first and group.first.task == outcome.task else None
    if named == 9 or named in _CRASHES:
        return named or 0
    code = outcome.exit_code or 0
    return code - 128 if code in (137, *(128 + number for number in _CRASHES)) else 0


def _diagnosis(rule: Rule, outcome: TaskOutcome, found: str, line: str = "") -> Diagnosis:
    return Diagnosis(key=rule.key, cause=rule.cause, found=found, remedy=rule.remedy, task=outcome.task, line=line)
