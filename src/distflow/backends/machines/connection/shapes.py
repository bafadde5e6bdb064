"""The types of an agent's messages (docs/agent-protocol.md): answers by operation, and events.

A node is not trusted. Code that handles an answer or an event relies on these fields having these types, and on fields without
a default being present. Other fields may be present. Values of the right type may still be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from distflow.protocol.names import Operation
from distflow.structs import convert

__all__ = ["check_answer", "check_event"]

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Time: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since the epoch, within the range of calendars."""
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
_Pid: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Code: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**32)]
_Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Blob: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]


class _Form(msgspec.Struct, kw_only=True):
    """Fields that other code relies on."""


class _Kernel(_Form):
    oom_pid: _Pid | None = None
    lines: list[str] = []


class _End(_Form):
    reason: str = ""
    exit_code: _Code | None = None
    signal: _Code | None = None
    why: str | None = None
    message: str | None = None
    started_at: _Time | None = None
    stopped_at: _Time | None = None
    ended_at: _Time | None = None
    output_bytes: _Count | None = None
    lost_output_bytes: _Count | None = None
    error: dict[str, Any] | None = None
    kernel: _Kernel | None = None


class _Status(_Form):
    phase: str
    pid: _Pid | None = None
    started_at: _Time | None = None
    end: _End | None = None
    directory: str = ""
    loses_output: bool = False
    has_files: bool | None = None


class _Address(_Form):
    interface: str = ""
    address: str = ""
    family: str = ""


class _Facts(_Form):
    root: str = ""
    python: str = ""
    user: str = ""
    ssh_server: str = ""
    boot_id: str = ""
    agent_pid: _Pid | None = None
    gpus: _Count | None = None
    cpus: _Count | None = None
    memory: _Count | None = None
    addresses: list[_Address] = []
    visible_gpus: str | None = None


class _Watch(_Form):
    attempts: dict[str, _Status]


class _Hello(_Watch):
    facts: _Facts


class _Ping(_Form):
    now: _Time


class _Lease(_Form):
    gpu_ids: list[_Count] | None = None
    port: _Port | None = None
    link_port: _Port | None = None


class _Stage(_Form):
    missing: list[_Blob]


class _Start(_Form):
    started_at: _Time
    pid: _Pid | None = None


class _Surveyed(_Form):
    uuid: str
    bytes: _Count
    modified_at: _Time
    alive: list[str]


class _SurveyedVenv(_Form):
    key: str
    file: str
    bytes: _Count
    used_at: _Time
    in_use: bool


class _Survey(_Form):
    workflows: list[_Surveyed]
    now: _Time
    venvs: list[_SurveyedVenv] = []
    blob_bytes: _Count = 0
    free_bytes: _Count | None = None


class _Clean(_Form):
    freed_bytes: _Count


class _Leftover(_Form):
    pid: _Pid
    name: str
    user: str
    attempt: str
    age_s: _Seconds | None
    gpus: list[_Count]
    why: str
    is_ours: bool


class _Container(_Form):
    name: str
    program: str
    attempt: str
    why: str
    is_ours: bool
    error: str | None = None


class _Reap(_Form):
    processes: list[_Leftover]
    containers: list[_Container]
    settled: list[str]
    left: list[_Leftover]
    message: str


class _FoundAttempt(_Form):
    attempt: str
    phase: str
    directory: str
    pid: _Pid | None = None
    started_at: _Time | None = None


class _Workflow(_Form):
    uuid: str
    memo: str
    attempts: list[_FoundAttempt]


class _Recall(_Form):
    workflows: list[_Workflow]


class _Uninstall(_Form):
    removed: list[str]
    left: list[str]


class _Holder(_Form):
    user: str
    attempt: str
    pid: int | None
    gpus: list[_Count]
    ports: list[_Count]
    cpus: _Count
    memory: _Count
    label: str = ""


class _Foreign(_Form):
    gpu: _Count
    words: str


class _Holders(_Form):
    holders: list[_Holder]
    foreign: list[_Foreign]


class _Run(_Form):
    exit_code: _Code | None
    stdout: str
    stderr: str
    seconds: _Seconds = 0.0


class _VenvTools(_Form):
    uv: str | None
    pip: bool


class _Probe(_Form):
    venv_tools: _VenvTools | None = None
    gpus: _Run | None = None
    gpu_apps: _Run | None = None


class _Listen(_Form):
    port: _Port
    is_own: bool | None = None


class _Reached(_Form):
    kind: str
    message: str = ""
    ms: _Seconds | None = None


class _Reach(_Form):
    results: list[_Reached]


class _StatusEvent(_Form):
    attempt: str
    status: _Status


class _BeatEvent(_Form):
    attempt: str
    age_s: _Seconds


class _DataEvent(_Form):
    stream: int
    file: str
    offset: _Count
    data: bytes
    """Base64."""


class _EofEvent(_Form):
    stream: int
    size: _Count = 0


_ANSWERS: Mapping[Operation, type[_Form]] = {
    "hello": _Hello,
    "ping": _Ping,
    "lease": _Lease,
    "stage": _Stage,
    "start": _Start,
    "survey": _Survey,
    "clean": _Clean,
    "reap": _Reap,
    "recall": _Recall,
    "uninstall": _Uninstall,
    "holders": _Holders,
    "probe": _Probe,
    "run": _Run,
    "listen": _Listen,
    "reach": _Reach,
    "watch": _Watch,
}
_EVENTS: Mapping[str, type[_Form]] = {
    "status": _StatusEvent,
    "beat": _BeatEvent,
    "data": _DataEvent,
    "eof": _EofEvent,
}


def check_answer(op: Operation, answer: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if an answer to ``op`` does not have the required form."""
    _check(f"the answer to `{op}`", _ANSWERS.get(op), answer)


def check_event(event: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if an event does not have the required form. Events of unknown kinds are accepted."""
    kind = str(event["event"])
    _check(f"the event `{kind[:50]}`", _EVENTS.get(kind), event)


def _check(what: str, form: type[_Form] | None, message: Mapping[str, Any]) -> None:
    if form is None:
        return
    try:
        convert(message, form)
    except (msgspec.ValidationError, ValueError) as error:
        raise ValueError(f"{what} is malformed: {error}") from None
