"""Causes that an end, an event or the kernel shows, and not the output. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from distflow.diagnosis.model import Case, Diagnosis, Witness
from distflow.diagnosis.rules import HANG, HOST_MEMORY, Rule
from distflow.lifecycle.states import Reason

__all__ = ["END_RULES", "HIDDEN", "by_kernel", "by_other_ends"]

KILLED = Rule(
    key="killed",
    shows="a task or rank that SIGKILL ended (exit code 137 in a shell), though distflow did not stop it",
    cause="something on the node killed a process with SIGKILL",
    remedy="Most often it is the kernel, for want of memory, where its log may not be read: look at `dmesg` on the node as "
    "root, and give the task more memory or fewer data workers. Else a person, an administrator's script or an engine "
    "did it.",
)
CRASHED = Rule(
    key="crashed",
    shows="a task or rank that SIGSEGV, SIGABRT, SIGBUS, SIGILL or SIGFPE ended",
    cause="a process crashed in native code",
    remedy="Set `PYTHONFAULTHANDLER=1` in the task's environment to see where. SIGBUS is mostly a full /dev/shm; SIGILL a "
    "library built for another CPU. With torch 2.13 and gloo, TORCH_DISTRIBUTED_DEBUG=DETAIL makes DDP crash where "
    "parameters are unused: try without `debug: true`.",
)
LOST = Rule(
    key="node-lost",
    shows="the reason NODE_LOST",
    cause="a node was out of reach for longer than the pool allows",
    remedy="See whether it runs and answers: `distflow pool check`. What may still run there is stopped when it is back. "
    "`retry:` in the spec lets the gang start again without a person.",
)
TOO_LONG = Rule(
    key="too-long",
    shows="the reason EXEC_TIMEOUT",
    cause="the group ran longer than its exec_timeout",
    remedy="If its steps went on to the end (`distflow workflow logs <id>`), allow more in `timeout: {exec_timeout: …}`. If "
    "they stopped, it hung: set `timeout: {hang_timeout: 10m}`, and look at `distflow workflow stacks <id>` while it "
    "runs.",
)
SLOW_START = Rule(
    key="start-timeout",
    shows="the reason START_TIMEOUT",
    cause="not all tasks of the gang got ready in time",
    remedy="`distflow workflow events <id>` names the straggler; see to its node, or raise `start_barrier` of the pool.",
)
HIDDEN = Rule(
    key="exit-code-hidden",
    shows="a task that ended with code 0 although its ranks failed, while others of its world wait",
    cause="a script did not pass on the exit code of its ranks",
    remedy="Begin the script with `set -e` (and `set -o pipefail`), or start the ranks with its last command: `exec …`. "
    "Then the task fails, and the others are stopped at once. `stop_on_missing_ranks` of the group decides what happens "
    "otherwise.",
)
END_RULES = (KILLED, CRASHED, LOST, TOO_LONG, SLOW_START, HIDDEN)
"""In the order of the page."""

_CRASHES = MappingProxyType({4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV"})
_BY_REASON = MappingProxyType({Reason.NODE_LOST: LOST, Reason.EXEC_TIMEOUT: TOO_LONG, Reason.START_TIMEOUT: SLOW_START})


def by_kernel(case: Case) -> Diagnosis | None:
    """Return what the kernel said of the first to fail: that it was killed for want of memory. Nothing outranks that."""
    for witness in _suspects(case):
        if witness.reason is Reason.OOM_KILLED:
            told = case.first.message if case.first else ""
            return _of(
                HOST_MEMORY,
                witness,
                f"{witness.place}: {told or 'the kernel killed a process of it'}",
                witness.kernel[-1] if witness.kernel else "",
            )
    return None


def by_other_ends(case: Case) -> tuple[Diagnosis, ...]:
    """Return what the ends and events of a case show by themselves, the most specific first."""
    found = (_from_signal(case), _from_reason(case), _from_silence(case), _from_missing(case))
    return tuple(one for one in found if one is not None)


def _from_reason(case: Case) -> Diagnosis | None:
    for witness in _suspects(case):
        rule = _BY_REASON.get(witness.reason) if witness.reason else None
        if rule is not None:
            return _of(rule, witness, witness.place)
    return None


def _from_signal(case: Case) -> Diagnosis | None:
    for witness in _suspects(case):
        number = _signal(case, witness) if witness.reason in (Reason.SIGNAL, Reason.EXIT_CODE) else 0
        rule = KILLED if number == 9 else CRASHED if number in _CRASHES else None
        if rule is not None:
            name = "SIGKILL" if number == 9 else _CRASHES[number]
            rank = case.first.rank if case.first and case.first.task == witness.task and case.first.rank.isdigit() else ""
            who = f"rank {rank} ({witness.place})" if rank else witness.place
            return _of(rule, witness, f"{who} was ended by {name}")
    return None


def _from_silence(case: Case) -> Diagnosis | None:
    if not case.silence:
        return None
    return Diagnosis(key=HANG.key, cause=HANG.cause, found=case.silence, remedy=HANG.remedy)


def _from_missing(case: Case) -> Diagnosis | None:
    if not case.missing:
        return None
    task = case.first.task if case.first else ""
    return Diagnosis(key=HIDDEN.key, cause=HIDDEN.cause, found=case.missing, remedy=HIDDEN.remedy, task=task)


def _suspects(case: Case) -> Iterator[Witness]:
    """Yield the first to fail; all tasks where the verdict names none."""
    for witness in case.witnesses:
        if case.first is None or witness.task == case.first.task:
            yield witness


def _signal(case: Case, witness: Witness) -> int:
    """Return the number of the signal that ended a task, or the rank of it that failed first; 0 when it was none."""
    if witness.signal is not None:
        return witness.signal
    message = case.first.message if case.first and case.first.task == witness.task else ""
    named = next((number for number, name in {**_CRASHES, 9: "SIGKILL"}.items() if f"by {name}" in message), 0)
    if named:
        return named
    code = witness.exit_code or 0
    return code - 128 if code in (137, *(128 + number for number in _CRASHES)) else 0


def _of(rule: Rule, witness: Witness, found: str, line: str = "") -> Diagnosis:
    return Diagnosis(key=rule.key, cause=rule.cause, found=found, remedy=rule.remedy, task=witness.task, line=line)
