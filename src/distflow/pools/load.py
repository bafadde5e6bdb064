"""Find and load the configuration, and detect this machine's resources for pools with ``backend: local``.

The configuration is ``distflow.yaml`` in the working directory or above it (up to the root of the git repository, or to the
home directory; outside of both, only in the working directory), else in the user's configuration directory.
``DISTFLOW_CONFIG`` names another file. Without a file there is one pool, ``local``: this machine. Keys of a node override its
pool's ``defaults``, which override keys of the pool. The variables of ``environment`` are merged with the same priorities.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct

from distflow.documents.document import Document, View, path_text
from distflow.documents.document import Path as KeyPath
from distflow.documents.notify import NotifyTarget, parse_notify
from distflow.documents.problems import Problem, ProblemsFound, raise_errors
from distflow.documents.quantities import parse_bytes, parse_duration, parse_log_bytes
from distflow.documents.requirements import Requirements
from distflow.documents.schema import load_schema, schema_problems, schema_text
from distflow.documents.source import read_text
from distflow.documents.text import did_you_mean
from distflow.documents.urls import parse_url
from distflow.documents.yaml_parser import parse_yaml
from distflow.errors import InputError
from distflow.pools.engine_keys import ENGINES, refuse_keys_of_engines, refuse_keys_of_nodes
from distflow.pools.hostfile import Host, nodes_of, parse_hostfile
from distflow.pools.kubernetes import parse_kubernetes
from distflow.pools.model import DEFAULT_MAX_LOG, NO_SETTINGS, Configuration, ContainerRuntime, Node, Pool, ssh_node
from distflow.pools.ownership import owned_by_stranger, why_not_trusted
from distflow.pools.ray import parse_ray
from distflow.pools.slurm import parse_slurm
from distflow.structs import replace

__all__ = [
    "Machine",
    "configuration_schema_text",
    "count_gpus",
    "find_configuration",
    "load_configuration",
    "load_hostfile",
    "parse_configuration",
    "parse_memory",
    "parse_profile_notify",
    "read_hosts",
    "this_machine",
]


_FILE_NAME = "distflow.yaml"
_PACKAGE, _SCHEMA = "distflow.pools", "config.schema.json"
_HOSTFILE_LIMIT = 1 << 20

_DURATIONS: Mapping[str, str] = MappingProxyType(
    {
        "connect_timeout": "connect_timeout_s",
        "ping": "ping_s",
        "node_lost_after": "node_lost_after_s",
        "self_stop_after": "self_stop_after_s",
        "start_barrier": "start_barrier_s",
        "stop_grace": "stop_grace_s",
        "peer_failed_grace": "peer_failed_grace_s",
        "retention": "retention_s",
        "venv_timeout": "venv_timeout_s",
    }
)
_NEVER_ZERO = ("connect_timeout", "ping", "node_lost_after", "self_stop_after", "start_barrier", "venv_timeout")


def load_configuration(
    cwd: Path, environ: Mapping[str, str], machine: Machine | None = None, *, names_only: bool = False
) -> Configuration:
    """Return the configuration for ``cwd``. Raises ``ProblemsFound``, and ``InputError`` as ``find_configuration`` does.

    ``names_only`` omits the check against the schema, which is faster. Then only the names of pools and nodes may be used,
    because other values may be invalid.
    """
    machine = machine or this_machine()
    root = _default_root(environ)
    path = find_configuration(cwd, environ)
    if path is None:
        return Configuration(pools=MappingProxyType({"local": _built_in(root, machine)}), default_pool="local")
    text = read_text(path, kind="configuration file")
    return parse_configuration(text, path, root=root, machine=machine, names_only=names_only)


def find_configuration(cwd: Path, environ: Mapping[str, str]) -> str | None:
    """Return the path of the configuration for ``cwd``, or ``None``. The file that ``DISTFLOW_CONFIG`` names need not exist.

    Raises ``InputError`` for a found file that another user could have written.
    """
    named = environ.get("DISTFLOW_CONFIG")
    if named:
        return named
    for folder in (*_folders(cwd, environ), _user_folder(environ)):
        path = folder / _FILE_NAME
        if os.path.exists(path):  # unlike `Path.exists`, false in a directory that this user may not search
            _check_owner(path, environ)
            return str(path)
    return None


def _check_owner(path: Path, environ: Mapping[str, str]) -> None:
    why = why_not_trusted(path, environ)
    if why:
        file, stranger = shlex.quote(str(path)), owned_by_stranger(path, environ)
        if stranger is not None:
            of_link = "-h " if path.is_symlink() and path.lstat().st_uid == stranger else ""
            remedy = f"sudo chown {of_link}$(id -un) {file}"
        else:
            remedy = f"{'sudo ' if os.stat(path).st_uid != os.geteuid() != 0 else ''}chmod go-w {file}"
        raise InputError(
            f"distflow does not trust the configuration {path}: {why}, and a configuration can define commands that run as you",
            hint=f"check the file; if you trust it, run `{remedy}`, or set DISTFLOW_CONFIG={file}",
        )


def load_hostfile(path: str) -> tuple[Host, ...]:
    """Return the hosts of a hostfile. Raises ``ProblemsFound``, also if the file cannot be read."""
    hosts, problems = parse_hostfile(read_text(path, limit=_HOSTFILE_LIMIT, kind="hostfile"), path)
    raise_errors(problems)
    return hosts


def read_hosts(hosts: str | os.PathLike[str] | Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts of a hostfile, given as its path or its lines. Raises ``ProblemsFound`` as ``load_hostfile`` does."""
    if isinstance(hosts, str | os.PathLike):
        return load_hostfile(os.fspath(hosts))
    found, problems = parse_hostfile("\n".join(hosts), "<hosts>")
    raise_errors(problems)
    return found


def parse_configuration(text: str, file: str, *, root: str, machine: Machine, names_only: bool = False) -> Configuration:
    """Return the configuration in ``text``. ``root`` is the default ``root`` of a node that is this machine.

    Hostfiles, requirements and pod templates of pools are read. Their paths are relative to the directory of ``file``.
    ``names_only`` omits the checks against the schema and for NUL bytes. Raises ``ProblemsFound`` with the findings.
    """
    document = parse_yaml(text, file)
    problems = [*document.warnings]
    if not names_only:
        problems += schema_problems(document, load_schema(_PACKAGE, _SCHEMA), _explain)
        for path in document.places:
            if "\0" in (document.raw_at(path) or ""):
                problems.append(Problem(where=document.mark_at(path), message=f"`{path_text(path)}` contains a NUL byte"))
    top = View(document, (), problems)
    names = top.view("pools").keys
    pools = {name: _parse_pool(top.view("pools", name), name, root, machine) for name in names}
    default = _default_pool(top, names)
    datasets = _datasets(top)
    notify = parse_notify(top, allows_commands=True)
    raise_errors(problems)
    bases = {name: _base_node(top.view("pools", name)) for name in names if pools[name].backend == "ssh"}
    return Configuration(
        pools=MappingProxyType(pools), default_pool=default, file=file, datasets=datasets, notify=notify,
        bases=MappingProxyType(bases),
    )  # fmt: skip


def parse_profile_notify(entries: object, file: str) -> tuple[NotifyTarget, ...]:
    """Return the targets from the decoded ``notify`` entries of a profile. Raises ``ProblemsFound`` with all findings."""
    document = parse_yaml(json.dumps({"notify": entries}), file)
    whole = load_schema(_PACKAGE, _SCHEMA)
    rule = {"type": "object", "properties": {"notify": whole["properties"]["notify"]}, "$defs": whole["$defs"]}
    problems = [*document.warnings, *schema_problems(document, rule)]
    found = parse_notify(View(document, (), problems), allows_commands=True)
    raise_errors(problems)
    return found


def configuration_schema_text() -> str:
    """Return the text of the published schema of the configuration."""
    return schema_text(_PACKAGE, _SCHEMA)


def _folders(cwd: Path, environ: Mapping[str, str]) -> Sequence[Path]:
    """Return the directories to search: up to the repository's root or the home directory; without both, only ``cwd``."""
    home = environ.get("HOME")
    seen: list[Path] = []
    for folder in (cwd, *cwd.parents):
        seen.append(folder)
        boundary = folder / ".git"
        if str(folder) == home or (os.path.exists(boundary) and owned_by_stranger(boundary, environ) is None):
            return seen
    # The directories above may belong to other users. distflow must not use a file that another user wrote, such as in /tmp.
    return [cwd]


def _user_folder(environ: Mapping[str, str]) -> Path:
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"]) / "distflow"
    import platformdirs  # noqa: PLC0415  not needed if XDG_CONFIG_HOME is set

    return platformdirs.user_config_path("distflow")


def _default_root(environ: Mapping[str, str]) -> str:
    if environ.get("DISTFLOW_STATE"):
        return str(Path(os.path.abspath(environ["DISTFLOW_STATE"])) / "node")
    if environ.get("XDG_DATA_HOME"):
        return str(Path(environ["XDG_DATA_HOME"]) / "distflow" / "node")
    import platformdirs  # noqa: PLC0415  not needed if DISTFLOW_STATE or XDG_DATA_HOME is set

    return str(platformdirs.user_data_path("distflow") / "node")


def _built_in(root: str, machine: Machine) -> Pool:
    return Pool(name="local", backend="local", nodes=(_local_node(root, machine),))


def _local_node(root: str, machine: Machine) -> Node:
    return Node(
        name="local",
        host="localhost",
        address="127.0.0.1",
        root=root,
        python=machine.python,
        gpus=machine.gpus,
        cpus=machine.cpus,
        memory=machine.memory,
    )


def _datasets(top: View) -> str | None:
    url = top.string("datasets")
    if url is not None:
        try:
            parse_url(url, writes=True)
        except InputError as error:
            top.add(error.message, error.hint, key="datasets")
    return url


def _default_pool(top: View, names: Sequence[str]) -> str:
    default = top.string("default_pool")
    if default is None:
        if len(names) > 1:
            top.add("there are several pools, but no `default_pool`", f"add `default_pool: {names[0]}`", key="pools")
        return names[0] if names else ""
    if names and default not in names:
        top.add(f"there is no pool `{default}`", did_you_mean(default, names, what="pools"), key="default_pool")
    return default


def _parse_pool(pool: View, name: str, root: str, machine: Machine) -> Pool:
    backend = pool.string("backend") or ""
    is_allocated = backend in ENGINES
    refuse_keys_of_engines(pool, backend)
    nodes: tuple[Node, ...]
    if is_allocated:
        refuse_keys_of_nodes(pool, backend)
        nodes = ()
    elif pool.has("hostfile"):
        nodes = _nodes_of_hostfile(pool, backend)
    else:
        nodes = _parse_nodes(pool, root, machine, is_remote=backend == "ssh")
    if backend == "local" and len(nodes) > 1:
        pool.add(
            f"a pool with `backend: local` has {len(nodes)} nodes, but only this machine can be its node",
            "keep one node",
            key="nodes",
        )
    times: dict[str, Any] = {
        field: seconds for key, field in _DURATIONS.items() if (seconds := pool.parsed(key, parse_duration)) is not None
    }
    for key in _NEVER_ZERO:
        if times.get(_DURATIONS[key]) == 0:
            pool.add(f"`{path_text((*pool.path, key))}` must be more than 0", key=key)
    template = _base_node(pool, _pod_node() if backend == "kubernetes" else ssh_node()) if is_allocated else None
    slurm = parse_slurm(pool) if backend == "slurm" else None
    if slurm is not None and slurm.container == "pyxis" and template is not None and template.container == "none":
        template = replace(template, container="engine")
    ray = parse_ray(pool) if backend == "ray" else None
    if ray is not None and template is not None and not (pool.has("python") or pool.view("defaults").has("python")):
        template = replace(template, python=ray.python)  # Ray needs the same Python on all nodes
    return Pool(
        name=name,
        backend=backend,
        nodes=nodes,
        host_key_policy=_POLICIES.get(pool.string("host_key_policy") or ""),
        ssh_config=_absolute((pool,), "ssh_config", pool.string("ssh_config")),
        max_log=pool.parsed("max_log", parse_log_bytes) or DEFAULT_MAX_LOG,
        given=NO_SETTINGS,
        venv=_requirements(pool),
        slurm=slurm,
        kubernetes=parse_kubernetes(pool) if backend == "kubernetes" else None,
        ray=ray,
        login=_parse_login(pool) if is_allocated else None,
        template=template,
        **times,
    )


def _parse_login(pool: View) -> Node | None:
    """Return the login node of a pool, which is given as an SSH destination or a mapping; ``None`` without one."""
    item = pool.view("login")
    named = item.string("host") or pool.string("login")
    if named is None:
        return None
    user, _, host = named.rpartition("@")
    key = item.string("identity_file")
    return replace(
        ssh_node(), name=host, host=host, user=item.string("user") or user or None, port=item.whole("port"),
        identity_file=_absolute((item,), "identity_file", key),
    )  # fmt: skip


def _requirements(pool: View) -> Requirements | None:
    """Return the pool's requirements, and add their findings to those of the configuration."""
    named = pool.string("venv")
    if named is None:
        return None
    from distflow.documents.requirements_file import read_requirements  # noqa: PLC0415  few configurations need it

    try:
        return read_requirements(os.path.join(os.path.dirname(pool.mark.file), os.path.expanduser(named)), named)
    except ProblemsFound as error:
        pool.problems.extend(error.problems)
        return None


def _parse_nodes(pool: View, root: str, machine: Machine, *, is_remote: bool) -> tuple[Node, ...]:
    entries = pool.document.value_at((*pool.path, "nodes"))
    if not isinstance(entries, list) or not entries:
        if is_remote:
            hint = "add for example `nodes: [gpu1, {host: gpu2, gpus: 8}]`; names may be aliases of ~/.ssh/config"
            pool.add("a pool with `backend: ssh` needs `nodes` or a `hostfile`", hint, key="backend")
            return ()
        return (_parse_node(pool, None, _local_node(root, machine)),)
    found: dict[str, Node] = {}
    for position, entry in enumerate(entries):
        if not isinstance(entry, str | dict):
            continue
        node = _parse_node(pool, position, ssh_node() if is_remote else _local_node(root, machine))
        at = (*pool.path, "nodes", position)
        if node.name in found:
            pool.add(
                f"the node `{node.name}` is given twice", "change the `name` of one of them", where=pool.document.mark_at(at)
            )
        found[node.name] = node
    return tuple(found.values())


def _nodes_of_hostfile(pool: View, backend: str) -> tuple[Node, ...]:
    """Return the nodes of the pool's hostfile, and add its findings to those of the configuration."""
    if backend != "ssh":
        pool.add("`hostfile` needs `backend: ssh`", "write `backend: ssh`, or remove `hostfile`", key="hostfile")
        return ()
    if pool.has("nodes"):
        pool.add("the pool has both `nodes` and `hostfile`", "keep one of them", key="hostfile")
    named = pool.string("hostfile")
    if named is None:
        return ()
    path = os.path.join(os.path.dirname(pool.mark.file), os.path.expanduser(named))
    try:
        hosts = load_hostfile(path)
    except ProblemsFound as error:
        pool.problems.extend(error.problems)
        return ()
    return nodes_of(hosts, _base_node(pool))


def _pod_node() -> Node:
    """Return the default settings of a pod. Its directories are in a volume, because its image may be read-only."""
    return replace(ssh_node(), root="/distflow", lease_dir="/distflow/leases", container="engine")


def _base_node(pool: View, base: Node | None = None) -> Node:
    """Return the settings that a node without its own keys gets from the pool; ``base`` has the default settings."""
    return _parse_node(pool, None, base or ssh_node())


def _parse_node(pool: View, position: int | None, base: Node) -> Node:
    """Return one node. Its entry at ``position``, if given, has priority over ``defaults``, the pool and ``base``."""
    item = pool.view("nodes", position) if position is not None else pool.view("no node")  # a missing key: an empty view
    bare_name = pool.document.text_at(item.path)
    layers = (item, pool.view("defaults"), pool)
    is_remote = not base.host

    def text(key: str) -> str | None:
        return next(
            (value for layer in layers[: 3 if key in _POOL_KEYS else 2] if (value := layer.string(key)) is not None), None
        )

    def whole(key: str) -> int | None:
        return next((value for layer in layers[:2] if (value := layer.whole(key)) is not None), None)

    def flag(key: str, default: bool) -> bool:
        return next((value for layer in layers if (value := layer.flag(key)) is not None), default)

    memory = next((value for layer in layers[:2] if (value := layer.parsed("memory", parse_bytes)) is not None), None)
    name = item.string("name") or (bare_name.value if bare_name is not None else None) or text("host") or base.name
    gpus, cpus = whole("gpus"), whole("cpus")
    # Only the remote machine can expand `~` in its directories.
    directory = _remote_directory if is_remote else _absolute
    return Node(
        name=name,
        host=text("host") or base.host or name,
        port=whole("port"),
        user=text("user"),
        identity_file=_absolute(layers, "identity_file", text("identity_file")),
        address=text("address") or base.address,
        root=directory(layers, "root", text("root")) or base.root,
        python=text("python") or base.python,
        gpus=base.gpus if gpus is None else gpus,
        cpus=base.cpus if cpus is None else cpus,
        memory=base.memory if memory is None else memory,
        platform=text("platform"),
        labels=_merged(pool.document, layers[:2], "labels"),
        environment=_merged(pool.document, layers, "environment"),
        container=_CONTAINERS.get(text("container") or "", base.container),
        enforce_limits=flag("enforce_limits", base.enforce_limits),
        setup=text("setup"),
        share_gpus=flag("share_gpus", base.share_gpus),
        check_capacity=flag("check_capacity", base.check_capacity),
        lease_dir=directory(layers, "lease_dir", text("lease_dir")) or base.lease_dir,
    )


_POLICIES: Mapping[str, Literal["strict", "accept-new"]] = MappingProxyType({"strict": "strict", "accept-new": "accept-new"})

_CONTAINERS: Mapping[str, ContainerRuntime] = MappingProxyType(
    {"none": "none", "auto": "auto", "docker": "docker", "podman": "podman", "apptainer": "apptainer"}
)
_POOL_KEYS = ("root", "python", "setup", "lease_dir", "container")
"""Keys of a node that a pool may also have, in addition to ``environment`` and boolean keys."""


def _remote_directory(layers: Sequence[View], key: str, value: str | None) -> str | None:
    """Return a directory of a remote machine as written. Add a finding if it is relative."""
    if value is not None and not value.startswith(("/", "~")):
        _absolute(layers, key, value)
    return value


def _absolute(layers: Sequence[View], key: str, value: str | None) -> str | None:
    """Return a path on this machine with ``~`` expanded. Add a finding if it is relative."""
    if value is None:
        return None
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        layer = next(layer for layer in layers if layer.has(key))
        layer.add(
            f"`{path_text((*layer.path, key))}` must be an absolute path, not `{value}`", "begin it with `/` or `~/`", key=key
        )
    return path


def _merged(document: Document, layers: Sequence[View], key: str) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for layer in reversed(layers):
        for name in layer.view(key).keys:
            path: KeyPath = (*layer.path, key, name)
            text = document.text_at(path)
            if text is not None:
                found[name] = text.value
    return MappingProxyType(found)


def _explain(keyword: str, path: KeyPath, value: Any, _rule: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a better message and hint for findings whose default message would not help."""
    if keyword == "minProperties":
        return "`pools` is empty", "add a pool, or remove the file: without a file there is one pool, `local`"
    if keyword == "required" and not path and isinstance(value, Mapping) and "backend" in value:
        return "the configuration has no `pools`", "indent the keys of the pool below `pools:` and its name"
    return None


# -- this machine, read from the kernel without external tools --------------------------------------------------------

_GPU = re.compile(r"nvidia[0-9]+")
_MEMORY = re.compile(r"^MemTotal:\s*([0-9]+) kB$", re.MULTILINE)


class Machine(Struct, frozen=True, kw_only=True):
    """The resources of a machine."""

    cpus: int | None
    """Cores that this process may use."""
    memory: int | None
    """Bytes."""
    gpus: int
    python: str
    """Path of the interpreter that runs distflow."""


def this_machine() -> Machine:
    """Return the resources of this machine."""
    return Machine(
        cpus=_cpus(),
        memory=parse_memory(_read(Path("/proc/meminfo"))),
        gpus=count_gpus(_names(Path("/dev"))),
        python=sys.executable,
    )


def count_gpus(devices: Iterable[str]) -> int:
    """Count the NVIDIA GPUs among the names in ``/dev`` (``nvidia0``; not ``nvidiactl``)."""
    return sum(1 for name in devices if _GPU.fullmatch(name))


def parse_memory(meminfo: str) -> int | None:
    """Return the total memory in bytes from the text of ``/proc/meminfo``; ``None`` if it is missing."""
    match = _MEMORY.search(meminfo)
    return int(match.group(1)) * 1024 if match else None


def _cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(os.listdir(path))
    except OSError:
        return ()
