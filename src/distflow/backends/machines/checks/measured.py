"""The measurements of a pool check, as plain values. ``findings`` and ``network`` interpret them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from distflow.backends.machines.checks.torch_search import FIND_OTHERS, valid_pythons
from distflow.documents.requirements import Requirements
from distflow.errors import DistflowError
from distflow.lifecycle.clocks import Clock
from distflow.pools.model import Node
from distflow.runtime.untrusted import decode_object

__all__ = [
    "PYTHON_PROBE",
    "Gpu",
    "GpuApp",
    "NodeMeasurements",
    "Pair",
    "Torch",
    "parse_apps",
    "parse_gpus",
    "parse_python",
    "python_trouble",
]


_MARK = "@@distflow-python "

PYTHON_PROBE = f"""
import json, sys
{FIND_OTHERS}
answer = {{"version": sys.version.split()[0], "executable": sys.executable}}
try:
    import torch
    answer["torch"] = torch.__version__
    answer["cuda"] = torch.version.cuda or getattr(torch.version, "hip", None)
    answer["is_available"] = torch.cuda.is_available()
    answer["devices"] = torch.cuda.device_count()
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except ModuleNotFoundError as error:
    if error.name != "torch":
        answer["error"] = repr(error)
    answer["others"] = find_other_pythons()
except BaseException as error:
    answer["error"] = repr(error)
print("\\n{_MARK}" + json.dumps(answer))
"""
"""Script for the Python of a node's tasks. ``parse_python`` reads its output."""


class Torch(Struct, frozen=True, kw_only=True):
    """The Python of a node's tasks, started in their environment, and its torch."""

    python: str = ""
    """Version of Python; empty if it gave no valid answer (then ``error`` has the cause)."""
    executable: str = ""
    version: str | None = None
    """Version of torch; ``None`` if it is missing or cannot be imported."""
    cuda: str | None = None
    """CUDA or HIP version of torch; ``None`` for a build without support for GPUs."""
    is_available: bool = False
    """Whether torch can use a GPU of the node."""
    devices: int = 0
    nccl: str | None = None
    """Version of NCCL; ``None`` if torch has no usable one."""
    error: str = ""
    """Why Python gave no valid answer, or why torch cannot be imported or queried. Empty if torch is just not installed."""
    others: tuple[str, ...] = ()
    """If torch, or a module that it imports, is missing: other Pythons on the node that have torch."""


class NodeMeasurements(Struct, frozen=True, kw_only=True):
    """The measurements of one node."""

    node: Node
    error: DistflowError | None = None
    """Why the node could not be measured; then nothing else is known."""
    address: str = ""
    """Address on the training network."""
    interface: str = ""
    """Interface that owns the address; empty if there is none."""
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The facts in the answer to ``hello`` (docs/agent-protocol.md)."""
    probe: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The answer to ``probe`` (docs/agent-protocol.md)."""
    gpus: tuple[Gpu, ...] | None = None
    """``None`` if the node has no ``nvidia-smi``, or if that failed (then ``gpu_error`` has the cause)."""
    gpu_error: str = ""
    """Error message of ``nvidia-smi``; empty if it did not fail."""
    apps: tuple[GpuApp, ...] = ()
    torch: Torch | None = None
    """``None`` if its Python was not queried, or if the environment of its tasks is not built yet."""
    venv: Requirements | None = None
    """The packages of the Python environment of its tasks."""
    lacks_venv: bool = False
    """Whether that environment is not built yet."""
    clock: Clock | None = None
    listen_error: str = ""
    """Why the node cannot listen at its training address; empty if it can."""
    is_address_own: bool = True
    """Whether the training address belongs to the node, as far as an attempt to bind it shows."""


class Pair(Struct, frozen=True, kw_only=True):
    """One node's attempt to connect to another node."""

    source: str
    target: str
    address: str
    kind: str
    """A result kind of the agent protocol's ``reach``; ``ok`` for success."""
    message: str = ""
    ms: float | None = None
    """Milliseconds until the connection was open; ``None`` if it failed."""


def parse_python(answer: Mapping[str, Any]) -> Torch:
    """Parse the output of ``PYTHON_PROBE`` in the agent's answer to ``run``."""
    line = next((one for one in reversed(str(answer["stdout"]).splitlines()) if one.startswith(_MARK)), None)
    if line is None:
        if answer["exit_code"] is None:
            return Torch(error=f"it did not end within {answer['seconds']:.0f} s")
        lines = str(answer["stderr"]).strip().splitlines()[-1:] or [f"exit code {answer['exit_code']}"]
        return Torch(error=lines[0])
    try:
        found = decode_object(line.removeprefix(_MARK))
        devices = int(found.get("devices") or 0)
    except (ValueError, TypeError):
        return Torch(error=f"its answer is malformed: {line[:200]}")

    def text(name: str) -> str | None:
        return str(found[name]) if found.get(name) is not None else None

    return Torch(
        python=text("version") or "",
        executable=text("executable") or "",
        version=text("torch"),
        cuda=text("cuda"),
        is_available=bool(found.get("is_available")),
        devices=devices,
        nccl=text("nccl"),
        error=text("error") or "",
        others=valid_pythons(found.get("others")),
    )


def python_trouble(exit_code: int, version: str) -> str:
    """Return why a Python cannot run an agent; empty if it can, or if that is unknown.

    ``exit_code`` and ``version`` are the result of a command that prints the Python's version.

    >>> python_trouble(0, "2.7.18"), python_trouble(0, "3.12.1"), python_trouble(127, "")
    ('is Python 2.7.18; 3.8 or newer is needed', '', 'does not exist')
    """
    if exit_code in (126, 127):
        return "does not exist" if exit_code == 127 else "cannot be executed"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < (3, 8):
        return f"is Python {version}; 3.8 or newer is needed"
    return ""


class Gpu(Struct, frozen=True, kw_only=True):
    """One GPU."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    ecc_errors: int | None = None
    """Uncorrected memory errors since the driver was loaded."""


class GpuApp(Struct, frozen=True, kw_only=True):
    """A process on a GPU."""

    gpu_uuid: str
    pid: int
    name: str
    used_mib: int | None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs in the output of the query of ``runtime.probes.probing``.

    The output has a line for each GPU, with the fields index, uuid, name, driver_version, memory.total, memory.used and
    ecc.errors.uncorrected.volatile.total. Other lines (a warning, a lost GPU) are ignored.
    """
    found = []
    for fields in _rows(text, 7):
        index = _number(fields[0])
        if index is not None and fields[1].startswith(("GPU-", "MIG-")):
            found.append(
                Gpu(
                    index=index,
                    uuid=fields[1],
                    name=", ".join(fields[2:-4]),
                    driver=fields[-4],
                    memory_mib=_number(fields[-3]),
                    used_mib=_number(fields[-2]),
                    ecc_errors=_number(fields[-1]),
                )
            )
    return tuple(found)


def parse_apps(text: str) -> tuple[GpuApp, ...]:
    """Return the processes of ``--query-compute-apps=gpu_uuid,pid,process_name,used_memory``."""
    found = []
    for fields in _rows(text, 4):
        pid = _number(fields[1])
        if pid is not None and fields[0].startswith(("GPU-", "MIG-")):
            # A process may have commas in its name.
            name = ", ".join(fields[2:-1])
            found.append(GpuApp(gpu_uuid=fields[0], pid=pid, name=name, used_mib=_number(fields[-1])))
    return tuple(found)


def _rows(text: str, least: int) -> list[list[str]]:
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    return [fields for fields in rows if len(fields) >= least]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
