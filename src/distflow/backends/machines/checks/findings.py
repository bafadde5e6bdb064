"""Pure functions that turn measurements of nodes into findings.

An error prevents a gang from running, a warning points to a likely surprise, and a note is information.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from distflow.backends.machines.checks.measured import NodeMeasurements
from distflow.backends.machines.checks.torch_search import torch_remedy
from distflow.documents.quantities import bytes_text
from distflow.documents.text import few
from distflow.errors import BootstrapFailed, NodeError
from distflow.runtime.files.venvs import REMEDY
from distflow.runtime.guard.kernel_log import MAX_LINES
from distflow.structs import replace

__all__ = [
    "Finding",
    "Grade",
    "count",
    "error",
    "folded",
    "judge_node",
    "judge_nodes",
    "judge_torch",
    "note",
    "warning",
]


_CLOCK_S = 1.0
_LEAST_FREE = 1 << 30
_LEAST_FREE_PART = 0.05
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "fuse.sshfs", "fuse.glusterfs", "9p", "afs")
_LEAST_MEMORY = 1 << 30
_LEAST_MEMORY_PART = 0.05
_LEAST_FILES = 1024
_LEAST_PROCESSES = 4096


class Grade(str, Enum):
    """The severity of a finding, in the order of reports."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(Struct, frozen=True, kw_only=True):
    """One finding about nodes."""

    grade: Grade
    about: str
    """The subject: ``ssh``, ``python``, ``root``, ``path``, ``disk``, ``cpus``, ``memory``, ``shm``, ``limits``, ``leases``,
    ``clock``, ``gpus``, ``torch``, ``venv``, ``address``, ``name``, ``login``, ``reach`` or ``all-reduce``. Checks of engines
    also use ``slurm``, ``container``, ``kubernetes``, ``rbac``, ``quota``, ``platform``, ``pod``, ``image`` and ``ray``."""
    nodes: tuple[str, ...]
    message: str
    hint: str = ""
    """What to do; may be empty."""

    def as_text(self) -> str:
        """Return the finding as lines."""
        lines = [f"{self.grade.value}: {', '.join(self.nodes)}: {self.message}"]
        lines += [f"    {line}" for line in self.hint.splitlines()]
        return "\n".join(lines)


def count(number: int, word: str, words: str = "") -> str:
    """Return a number with its noun."""
    return f"{number} {word if number == 1 else words or word + 's'}"


def error(about: str, nodes: Sequence[str], message: str, hint: str) -> Finding:
    """Return an error."""
    return Finding(grade=Grade.ERROR, about=about, nodes=tuple(nodes), message=message, hint=hint)


def warning(about: str, nodes: Sequence[str], message: str, hint: str) -> Finding:
    """Return a warning."""
    return Finding(grade=Grade.WARNING, about=about, nodes=tuple(nodes), message=message, hint=hint)


def note(about: str, nodes: Sequence[str], message: str, hint: str) -> Finding:
    """Return a note."""
    return Finding(grade=Grade.NOTE, about=about, nodes=tuple(nodes), message=message, hint=hint)


def judge_node(measured: NodeMeasurements) -> Iterator[Finding]:
    """Yield the findings about one node alone."""
    if measured.error is not None:
        yield _unreachable(measured)
        return
    for rule in _RULES:
        yield from rule(measured)


def judge_nodes(nodes: Sequence[NodeMeasurements]) -> Iterator[Finding]:
    """Yield findings that compare nodes: wrong clocks, shared machines, and differences of versions, GPUs and files."""
    yield from _clocks(nodes)
    yield from _same_machine(nodes)
    pythons = {one.node.name: ".".join(one.torch.python.split(".")[:2]) for one in nodes if one.torch and one.torch.python}
    yield from _differing("python", "Python", pythons)
    yield from _differing(
        "torch", "torch", {one.node.name: one.torch.version for one in nodes if one.torch and one.torch.version}
    )
    cudas = {one.node.name: one.torch.cuda for one in nodes if one.torch and one.torch.cuda}
    yield from _differing("torch", "the CUDA of torch", cudas)
    yield from _differing("torch", "NCCL", {one.node.name: one.torch.nccl for one in nodes if one.torch and one.torch.nccl})
    yield from _differing("gpus", "the GPU model", {one.node.name: one.gpus[0].name for one in nodes if one.gpus})
    drivers = {one.node.name: one.gpus[0].driver for one in nodes if one.gpus}
    yield from _differing("gpus", "the NVIDIA driver", drivers, Grade.NOTE)
    yield from _differing_paths(nodes)


def folded(findings: Iterator[Finding] | Sequence[Finding]) -> tuple[Finding, ...]:
    """Merge findings that are the same for several nodes, and return all with errors first."""
    same: dict[tuple[Grade, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.grade, finding.about, finding.message, finding.hint)
        known = same.get(key)
        same[key] = finding if known is None else replace(known, nodes=tuple(dict.fromkeys((*known.nodes, *finding.nodes))))
    order = list(Grade)
    return tuple(sorted(same.values(), key=lambda finding: order.index(finding.grade)))


# -- one node


def _unreachable(measured: NodeMeasurements) -> Finding:
    error = measured.error
    message = error.detail if isinstance(error, NodeError) else str(error)
    hint = error.hint if error is not None else ""
    about = error.about if isinstance(error, BootstrapFailed) else "ssh"
    return Finding(grade=Grade.ERROR, about=about, nodes=(measured.node.name,), message=message, hint=hint)


def _root(measured: NodeMeasurements) -> Iterator[Finding]:
    root, names = measured.probe.get("root"), [measured.node.name]
    if not root:
        return
    if root["error"]:
        hint = "make it writable, free disk space, or set another `root`"
        yield error("root", names, f"its root {root['path']} is not writable: {root['error']}", hint)
    if root["is_noexec"]:
        yield warning(
            "root",
            names,
            f"its root {root['path']} is on a file system that does not allow execution (noexec)",
            "start scripts with their interpreter (`[bash, /tmp/entry.sh]`), or set another `root`",
        )
    if _is_network(root["file_system"]):
        message = f"its root {root['path']} is on a network file system ({root['file_system']})"
        yield note("root", names, message, "tasks start and log faster on a local disk: set `root`")
    free, total = root["free_bytes"], root["total_bytes"]
    if free < _LEAST_FREE or free < total * _LEAST_FREE_PART:
        message = f"only {bytes_text(free)} of {bytes_text(total)} are free at its root {root['path']}"
        hint = "free space there (`distflow node clean --older-than 1d` removes old workflows), or set another `root`"
        yield warning("disk", names, message, hint)


def _paths(measured: NodeMeasurements) -> Iterator[Finding]:
    for path, found in (measured.probe.get("paths") or {}).items():
        if found["error"]:
            hint = "copy or mount the data there, or make it readable: a gang's tasks run on any node with free resources"
            yield error("path", [measured.node.name], f"{path} cannot be read: {found['error']}", hint)
        elif not found["is_complete"]:
            seen = count(found["files"], "file")
            message = f"{path} was checked only in part (limits: half a minute, a million files): {seen} found"
            yield note("path", [measured.node.name], message, "")


def _leases(measured: NodeMeasurements) -> Iterator[Finding]:
    leases, names = measured.probe.get("leases"), [measured.node.name]
    if not leases:
        return
    if leases["error"]:
        hint = f"make {leases['path']} a directory with mode 1777, or set another `lease_dir` for all users of the machine"
        yield error("leases", names, leases["error"], hint)
    elif _is_network(leases["file_system"]):
        yield warning(
            "leases",
            names,
            f"its lease directory {leases['path']} is on a network file system ({leases['file_system']}), "
            "so leases of different machines collide",
            "set `lease_dir` to a directory on a local disk of the machine",
        )
    elif leases.get("owner"):
        yield warning(
            "leases",
            names,
            f"its lease directory {leases['path']} belongs to {leases['owner']}, who can remove the leases of other users",
            f"let root create it (`mkdir -m 1777`, or `chown root {leases['path']}`), or set another `lease_dir` for all users",
        )


def _gpus(measured: NodeMeasurements) -> Iterator[Finding]:
    names, wanted = [measured.node.name], measured.node.gpus if measured.node.check_capacity else None
    if measured.gpu_error:
        hint = "tasks usually cannot use its GPUs until `nvidia-smi` works: reboot the node, or read the driver's log (`dmesg`)"
        yield warning("gpus", names, f"`nvidia-smi` fails: {measured.gpu_error}", hint)
    elif measured.gpus is None:
        reported = int(measured.facts.get("gpus") or 0)
        if wanted and wanted > reported:
            message = f"the configuration says {count(wanted, 'GPU')}, and the node reports {reported}"
            message += "" if reported else ": it has no nvidia-smi"
            hint = "correct `gpus` (or the slots of the hostfile), or install the NVIDIA driver\n"
            yield error("gpus", names, message, f"{hint}for accelerators that distflow cannot count: `check_capacity: false`")
    elif wanted is not None and wanted > len(measured.gpus):
        message = f"the configuration says {count(wanted, 'GPU')}, and the node reports {len(measured.gpus)}"
        yield error(
            "gpus",
            names,
            message,
            "correct `gpus` (or the slots of the hostfile); `dmesg` on the node may show a GPU that failed",
        )
    elif wanted is not None and wanted < len(measured.gpus):
        yield note("gpus", names, f"the configuration allows {wanted} of its {count(len(measured.gpus), 'GPU')}", "")
    yield from _gpu_users(measured)


def _capacity(measured: NodeMeasurements) -> Iterator[Finding]:
    """Yield a finding if the node has fewer CPUs or less memory than configured."""
    node, cpus, memory = measured.node, measured.facts.get("cpus"), measured.facts.get("memory")
    hint = "correct `{}`; `check_capacity: false` is for nodes whose tasks may share resources"
    if node.cpus is not None and (node.usable_cpus(cpus) or 0) < node.cpus:
        message = f"the configuration says {count(node.cpus, 'CPU')}, and the node reports {cpus}"
        yield error("cpus", [node.name], message, hint.format("cpus"))
    if node.memory is not None and (node.usable_memory(memory) or 0) < node.memory:
        reported = bytes_text(int(memory or 0))
        message = f"the configuration says {bytes_text(node.memory)} of memory, and the node reports {reported}"
        yield error("memory", [node.name], message, hint.format("memory"))


def _gpu_users(measured: NodeMeasurements) -> Iterator[Finding]:
    owners: Mapping[str, Mapping[str, str | None]] = measured.probe.get("gpu_owners") or {}
    index = {gpu.uuid: gpu.index for gpu in measured.gpus or ()}
    ours = 0
    others = []
    for app in measured.apps:
        owner = owners.get(str(app.pid), {})
        if owner.get("attempt"):
            ours += 1
            continue
        used = f", {app.used_mib} MiB" if app.used_mib is not None else ""
        who = f" of {owner['user']}" if owner.get("user") else ""
        others.append(f"GPU {index.get(app.gpu_uuid, '?')}: pid {app.pid}{who} ({app.name}{used})")
    if others:
        message = "processes that are not known to be tasks of distflow are on its GPUs"
        effect = "these GPUs are not leased until the processes end: stop them, or set `share_gpus: true`"
        if measured.node.share_gpus:
            effect = "tasks use these GPUs too, because `share_gpus` is true: stop the processes if they disturb the tasks"
        yield warning("gpus", [measured.node.name], message, "\n".join([*others, effect]))
    if ours:
        yield note("gpus", [measured.node.name], f"{count(ours, 'process', 'processes')} of distflow workflows on its GPUs", "")


def _torch(measured: NodeMeasurements) -> Iterator[Finding]:
    names, torch = [measured.node.name], measured.torch
    if torch is None:
        return
    if not torch.python:
        message = f"its `python` ({measured.node.python}) does not answer in the environment of tasks: {torch.error}"
        yield warning("python", names, message, "check `python`, `setup` and `environment` of the node")
    elif torch.error:
        what = "torch cannot be imported"
        if torch.version is not None:
            what = f"torch {torch.version} can be imported, but not queried"
        hint = f"run on the node: {torch.executable} -c 'import torch; print(torch.cuda.is_available())'"
        yield warning("torch", names, f"{what}: {torch.error}", hint)
    elif torch.version is None:
        return  # judge_torch decides: it matters if other nodes have torch
    elif measured.gpus and not torch.is_available:
        built = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
        hint = "install a torch that fits the driver" + (f" ({measured.gpus[0].driver})" if measured.gpus[0].driver else "")
        yield warning("torch", names, f"torch {torch.version} ({built}) sees none of its GPUs", hint)
    elif measured.gpus and torch.devices < len(measured.gpus):
        message = f"torch sees {torch.devices} of its {len(measured.gpus)} GPUs"
        yield warning(
            "torch", names, message, "check whether `environment`, `setup` or a login script sets CUDA_VISIBLE_DEVICES"
        )


def _venv(measured: NodeMeasurements) -> Iterator[Finding]:
    tools, names = measured.probe.get("venv_tools"), [measured.node.name]
    if measured.venv is None or not measured.lacks_venv or tools is None:
        return
    if not tools["uv"] and not tools["pip"]:
        message = "it cannot build a Python environment: it has no uv, and its Python has no `ensurepip`"
        yield error("venv", names, message, f"{REMEDY}, or remove `venv`")
        return
    message = f"the Python environment of {measured.venv.file} is not built yet"
    yield note("venv", names, message, "the first workflow builds it")


def _address(measured: NodeMeasurements) -> Iterator[Finding]:
    names = [measured.node.name]
    if measured.listen_error:
        yield error("address", names, measured.listen_error, "set `address` to one of its own addresses")
    elif not measured.is_address_own:
        others = [
            f"{item['address']} ({item['interface']})"
            for item in measured.facts.get("addresses") or ()
            if not str(item["address"]).startswith(("127.", "fe80:")) and item["address"] != "::1"
        ]
        hint = f"set `address` to the one that the other nodes reach: {', '.join(others)}"
        hint = hint if others else "connect the node to the training network: it has only loopback and link-local addresses"
        yield warning("address", names, f"its training address {measured.address} is not on any of its interfaces", hint)


def _name(measured: NodeMeasurements) -> Iterator[Finding]:
    names = measured.probe.get("names") or {}
    addresses = names.get("addresses") or []
    if addresses and all(re.match(r"127\.|::1$", address) for address in addresses) and measured.node.host != "localhost":
        yield note(
            "name",
            [measured.node.name],
            f"its own name {names['hostname']} resolves to {', '.join(addresses)}",
            "this does not affect gangs, because distflow passes addresses and interfaces itself; for other launchers, add "
            "the node's address to its /etc/hosts",
        )


def _login(measured: NodeMeasurements) -> Iterator[Finding]:
    logind = measured.probe.get("logind") or {}
    properties = [*logind.get("properties", ()), "", "", ""]
    excluded, only = (re.findall(r'"([^"]*)"', text) for text in properties[1:3])
    user = str(measured.facts.get("user", ""))
    if logind.get("in_session") and properties[0] == "b true" and user not in excluded and (not only or user in only):
        yield warning(
            "login",
            [measured.node.name],
            "systemd kills all processes of a login when it ends (KillUserProcesses=yes): tasks die with their connection",
            f"in its /etc/systemd/logind.conf, set KillUserProcesses=no, or add {user} to KillExcludeUsers; then "
            "`systemctl restart systemd-logind`\n(`loginctl enable-linger` does not protect processes that SSH started)",
        )


def _memory(measured: NodeMeasurements) -> Iterator[Finding]:
    memory = measured.probe.get("memory")
    if not memory:
        return
    available, total = memory["available_bytes"], memory["total_bytes"]
    if available < _LEAST_MEMORY or available < total * _LEAST_MEMORY_PART:
        message = f"only {bytes_text(available)} of its {bytes_text(total)} of memory are free"
        yield warning("memory", [measured.node.name], message, "find the processes that use it: `ps aux --sort=-rss | head`")


def _shm(measured: NodeMeasurements) -> Iterator[Finding]:
    shm = measured.probe.get("shm")
    if shm and shm["free_bytes"] < _LEAST_MEMORY:
        message = f"only {bytes_text(shm['free_bytes'])} of {bytes_text(shm['total_bytes'])} are free in /dev/shm"
        hint = (
            "DataLoader workers and NCCL share memory there: remove leftover files, or as root run "
            "`mount -o remount,size=50% /dev/shm`; for a container, set `--shm-size`"
        )
        yield warning("shm", [measured.node.name], message, hint)


def _limits(measured: NodeMeasurements) -> Iterator[Finding]:
    limits, names = measured.probe.get("limits") or {}, [measured.node.name]
    files, processes, locked = limits.get("nofile"), limits.get("nproc"), limits.get("memlock")
    hint = "raise it in its /etc/security/limits.conf, or by `ulimit` in `setup`"
    if files is not None and files < _LEAST_FILES:
        yield warning("limits", names, f"a process may open only {count(files, 'file')} (ulimit -n)", hint)
    if processes is not None and processes < _LEAST_PROCESSES:
        message = f"its user may have only {count(processes, 'process', 'processes')} and threads (ulimit -u)"
        yield warning("limits", names, message, hint)
    if locked is not None and measured.probe.get("has_rdma"):
        message = f"a process may lock only {bytes_text(locked)} of memory (ulimit -l), and the node has InfiniBand or RoCE"
        yield warning("limits", names, message, f"NCCL needs `unlimited` for its network: {hint}")


def _gpu_health(measured: NodeMeasurements) -> Iterator[Finding]:
    names = [measured.node.name]
    broken = [gpu for gpu in measured.gpus or () if gpu.ecc_errors]
    if broken:
        errors = ", ".join(f"GPU {gpu.index}: {gpu.ecc_errors}" for gpu in broken)
        message = f"uncorrectable memory errors since its driver was loaded: {errors}"
        yield warning("gpus", names, message, "reset the GPU or reboot; if the errors return, replace the GPU")
    xids = measured.probe.get("xids") or []
    if xids:
        errors = f"{MAX_LINES} or more GPU errors" if len(xids) >= MAX_LINES else count(len(xids), "GPU error")
        message = f"{errors} in its kernel's log, the last: {xids[-1]}"
        yield warning("gpus", names, message, "NVIDIA's list of Xid errors explains the number after `Xid`")


_RULES: tuple[Callable[[NodeMeasurements], Iterator[Finding]], ...] = (
    _root, _leases, _paths, _memory, _shm, _limits, _gpu_health, _capacity, _gpus, _torch, _venv, _address, _name, _login,
)  # fmt: skip


# -- nodes compared with each other


def _clocks(nodes: Sequence[NodeMeasurements]) -> Iterator[Finding]:
    offsets = {one.node.name: one.clock for one in nodes if one.clock is not None}
    wrong = {name: clock for name, clock in offsets.items() if abs(clock.offset_s) - clock.uncertainty_s > _CLOCK_S}
    values = [clock.offset_s for clock in wrong.values()]
    if len(wrong) > 1 and len(wrong) == len(offsets) and max(values) - min(values) <= _CLOCK_S:
        message = f"their clocks agree with each other, and are {_offset(values[0])} this machine's"
        yield warning("clock", list(wrong), message, "set this machine's clock by NTP: `timedatectl set-ntp true`")
        return
    for name, clock in wrong.items():
        message = f"its clock is {_offset(clock.offset_s)} this machine's"
        hint = "times of logs and events will be out of order; set it by NTP: `timedatectl set-ntp true`"
        yield warning("clock", [name], message, hint)


def _same_machine(nodes: Sequence[NodeMeasurements]) -> Iterator[Finding]:
    """Yield a finding for nodes that share their lease files, and for nodes that run on one kernel."""
    leases, boots = _by_fact(nodes, "machine"), _by_fact(nodes, "boot_id")
    for same in leases:
        names = [one.node.name for one in same]
        directory = same[0].node.lease_dir
        has_gpus = any(one.node.usable_gpus(one.facts.get("gpus")) for one in same)
        if all(one.facts.get("boot_id") == same[0].facts.get("boot_id") for one in same):
            message = (
                f"they are the same machine, with the same lease directory ({directory}): its GPUs, CPUs and memory count once"
            )
            hint = "list each machine once; containers with their own GPUs need their own `lease_dir`"
        else:
            message = f"they share the lease directory {directory}, so GPU 0 of one is mistaken for GPU 0 of the other"
            hint = "set `lease_dir` to a directory on a local disk of each machine"
        yield (error if has_gpus else warning)("leases", names, message, hint)
    for same in boots:
        if same not in leases:
            names = [one.node.name for one in same]
            hint = "list each machine once; several containers of a machine are fine if each has its own GPUs"
            yield note("name", names, "they are the same machine, or containers of it", hint)


def _by_fact(nodes: Sequence[NodeMeasurements], fact: str) -> list[list[NodeMeasurements]]:
    """Return groups of at least two nodes that report the same value."""
    groups: dict[str, list[NodeMeasurements]] = {}
    for one in nodes:
        if one.facts.get(fact):
            groups.setdefault(str(one.facts[fact]), []).append(one)
    return [same for same in groups.values() if len(same) > 1]


def judge_torch(nodes: Sequence[NodeMeasurements], needed: Collection[str] = ()) -> Iterator[Finding]:
    """Yield a finding for each node without torch.

    It is an error if the node is in ``needed``, a warning if other nodes have torch, and otherwise a note.
    """
    having = [one.node.name for one in nodes if one.torch and one.torch.version]
    for one in nodes:
        if one.torch is None or not one.torch.python or one.torch.version or one.torch.error:
            continue
        message = f"torch is not installed for {one.torch.executable}" + (
            f"; nodes with torch: {few(having)}" if having else ""
        )
        grade = Grade.ERROR if one.node.name in needed else Grade.WARNING if having else Grade.NOTE
        hint = f"add `torch` to {one.venv.file}" if one.venv else torch_remedy(one.torch.others)
        yield Finding(grade=grade, about="torch", nodes=(one.node.name,), message=message, hint=hint)


def _differing(about: str, what: str, values: Mapping[str, str | None], grade: Grade = Grade.WARNING) -> Iterator[Finding]:
    """Yield a finding if nodes differ in ``what``. ``values``: node → value."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value or "", []).append(name)
    if len(groups) > 1:
        found = "; ".join(f"{value} on {few(names)}" for value, names in groups.items())
        hint = "use the same version or model on all nodes of a world" if grade is Grade.WARNING else ""
        yield Finding(grade=grade, about=about, nodes=tuple(values), message=f"{what} differs: {found}", hint=hint)


def _differing_paths(nodes: Sequence[NodeMeasurements]) -> Iterator[Finding]:
    """Yield a finding for each path whose contents differ between nodes that read it completely."""
    by_path: dict[str, dict[tuple[str | None, int, int], list[str]]] = {}
    for one in nodes:
        for path, found in (one.probe.get("paths") or {}).items():
            if not found["error"] and found["is_complete"]:
                same = (found["digest"], found["files"], found["bytes"])
                by_path.setdefault(path, {}).setdefault(same, []).append(one.node.name)
    for path, groups in by_path.items():
        if len(groups) > 1:
            is_clear = len({(files, bytes_text(size)) for _, files, size in groups}) == len(groups)
            shown = bytes_text if is_clear else "{:,} bytes".format
            found = [f"{count(files, 'file')}, {shown(size)} on {few(names)}" for (_, files, size), names in groups.items()]
            if len({(files, size) for _, files, size in groups}) < len(groups):
                found.append("the names or sizes of files differ")
            message = f"{path} has different contents: {'; '.join(found)}"
            everyone = [name for names in groups.values() for name in names]
            yield warning("path", everyone, message, "compare it with `rsync -ainc`, and copy the files that differ")


# -- text


def _offset(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'}"


def _is_network(file_system: str) -> bool:
    return file_system.startswith(_NETWORK_FILE_SYSTEMS)
