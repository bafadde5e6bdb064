"""Measure the nodes of a pool before a gang runs on them: first each node, then the connections between them.

The errors of failed queries are part of the measurements. ``findings`` and ``network`` interpret the measurements.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.checks.measured import (
    PYTHON_PROBE,
    NodeMeasurements,
    Pair,
    parse_apps,
    parse_gpus,
    parse_python,
    python_trouble,
)
from distflow.backends.machines.checks.network import AllReduce, all_reduce, run_python
from distflow.backends.machines.connection.bootstrap import connect, python_argv
from distflow.backends.machines.connection.link import AgentLink, ClockWatch
from distflow.backends.machines.connection.training_address import training_address
from distflow.documents.requirements import Requirements
from distflow.documents.text import few
from distflow.errors import AgentError, BootstrapFailed, DistflowError
from distflow.pools.model import Node, Pool
from distflow.structs import replace
from distflow.transports.base import Transport, fan_out

__all__ = ["PoolMeasurements", "check_pool"]

_AT_ONCE = 32
_PINGS = 5
_PROBE_S = 90.0
_PATH_S = 45.0
_PYTHON_S = 120.0
_LISTEN_S = 300.0
_REACH_S = 5.0
_DIAGNOSE_S = 10.0

_VERSION = "import sys; sys.stdout.write(sys.version.split()[0])"
_FIND_PYTHON = """
for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8; do
    path=$(command -v $name) && "$path" -c 'import sys; sys.exit(sys.version_info < (3, 8))' && echo "$path" && break
done
"""
"""Shell script that prints the path of a Python in PATH that can run an agent, if there is one."""

Progress = Callable[[str], None]
"""Called with a short text about the current step, from several threads, but one at a time."""


class PoolMeasurements(Struct, frozen=True, kw_only=True):
    """The measurements of a pool's nodes."""

    nodes: tuple[NodeMeasurements, ...]
    """In the order of the pool."""
    pairs: tuple[Pair, ...]
    """From each node that answered the check, one attempt to connect to each other node that opened a port.

    The attempts use the training addresses of these nodes.
    """
    all_reduce: AllReduce | None = None
    """``None`` if it was not requested."""


class _Session:
    """A node while it is being checked."""

    def __init__(self, pool: Pool, node: Node) -> None:
        self.node = node
        self.transport = transport_of(pool, node)
        self.link: AgentLink | None = None
        self.measured = NodeMeasurements(node=node)
        self.token = secrets.token_hex(16)
        self.port: int | None = None

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.transport.close()


def check_pool(
    pool: Pool,
    nodes: Sequence[Node],
    progress: Progress = lambda _: None,
    *,
    with_all_reduce: bool = False,
    paths: Sequence[str] = (),
    venv: Requirements | None = None,
) -> PoolMeasurements:
    """Measure these nodes of a pool. Errors of nodes are in the result, and never raised.

    ``paths``: directories and files whose names and sizes should be equal on all nodes. With ``venv``, distflow looks for torch
    in that Python environment, if the node already has it.
    """
    sessions = {node.name: _Session(pool, node) for node in nodes}
    waiting = _Waiting(sessions, progress)
    try:
        _each(list(sessions.values()), lambda one: _measure(pool, one, paths, venv), lambda one: waiting.done(one.node.name))
        answering = [session for session in sessions.values() if session.link is not None]
        pairs: list[Pair] = []
        found: AllReduce | None = None
        if answering:
            progress("checking the connections between nodes")
            _each(answering, _listen)
            listening = [session for session in answering if session.port is not None]
            results: dict[str, list[Pair]] = {}
            _each(answering, lambda one: results.update({one.node.name: _reach(one, listening)}))
            pairs = [pair for session in answering for pair in results.get(session.node.name, [])]
        if with_all_reduce:
            progress("running an all-reduce over all nodes")
            found = _all_reduce(answering, pairs)
    finally:
        for session in sessions.values():
            session.close()
    measured = tuple(session.measured for session in sessions.values())
    return PoolMeasurements(nodes=measured, pairs=tuple(pairs), all_reduce=found)


def _all_reduce(sessions: Sequence[_Session], pairs: Sequence[Pair]) -> AllReduce:
    if any(pair.kind != "ok" for pair in pairs):
        names = tuple(one.node.name for one in sessions)
        return AllReduce(nodes=names, skipped="the nodes do not all reach each other")
    return all_reduce([(one.measured, one.link) for one in sessions if one.link is not None])


class _Waiting:
    """Reports which nodes have not answered yet."""

    def __init__(self, nodes: Iterable[str], progress: Progress) -> None:
        self._lock = threading.Lock()
        self._left = dict.fromkeys(nodes)
        self._total = len(self._left)
        self._progress = progress
        self._report()

    def done(self, node: str) -> None:
        with self._lock:
            self._left.pop(node, None)
            self._report()

    def _report(self) -> None:
        self._progress(
            f"checking nodes: {self._total - len(self._left)} of {self._total} done"
            + (f", waiting for {few(list(self._left))}" if self._left else "")
        )


def _each(
    sessions: Sequence[_Session],
    action: Callable[[_Session], None],
    done: Callable[[_Session], None] = lambda _: None,
) -> None:
    """Call ``action`` with every session. An error replaces the node's measurements."""
    by_name = {session.node.name: session for session in sessions}

    def act(transport: Transport) -> None:
        session = by_name[transport.name]
        try:
            action(session)
        except DistflowError as error:
            # Treat a node that stops answering like one that never answered.
            session.measured = NodeMeasurements(node=session.node, error=error)
            if session.link is not None:
                session.link.close()
            session.link = None
        done(session)

    fan_out([session.transport for session in sessions], act, limit=_AT_ONCE)


def _measure(pool: Pool, session: _Session, paths: Sequence[str], venv: Requirements | None) -> None:
    node, transport = session.node, session.transport
    try:
        link = connect(transport, node.root, node.python, timeout_s=pool.connect_timeout_s, ping_s=pool.ping_s)
    except BootstrapFailed as error:
        raise (_explained(node, transport, error) if error.about == "python" else error) from error
    session.link = link
    facts = link.request("hello", watch=[], lease_dir=node.lease_dir)["facts"]
    watch = ClockWatch()
    for _ in range(_PINGS):
        answered = watch.ping()
        answered(link.request("ping"))
    address, interface = training_address(node, transport, facts)
    session.measured = replace(session.measured, facts=facts, address=address, interface=interface, clock=watch.clock)
    session.measured = replace(session.measured, venv=venv, **_probed(link, node, paths, needs_venv=venv is not None))
    try:
        answer = run_python(session.measured, link, [PYTHON_PROBE], {}, limit_s=_PYTHON_S)
    except AgentError as error:
        if error.kind != "no_venv":
            raise
        # The first workflow builds the environment, so the packages of the node's own Python do not matter.
        session.measured = replace(session.measured, lacks_venv=True)
    else:
        session.measured = replace(session.measured, torch=parse_python(answer))


def _probed(link: AgentLink, node: Node, paths: Sequence[str], *, needs_venv: bool) -> Mapping[str, Any]:
    """Return the agent's measurements, as fields of ``NodeMeasurements``."""
    limit_s = _PROBE_S + _PATH_S * len(paths)
    probe = link.request("probe", lease_dir=node.lease_dir, paths=list(paths), venv_tools=needs_venv, timeout_s=limit_s)
    gpus, apps = probe.get("gpus"), probe.get("gpu_apps")
    if gpus is None:
        return {"probe": probe}
    if gpus["exit_code"] != 0:
        lines = (gpus["stderr"].strip() or gpus["stdout"].strip()).splitlines()
        fallback = "it does not answer" if gpus["exit_code"] is None else f"exit code {gpus['exit_code']}"
        return {"probe": probe, "gpu_error": lines[-1] if lines else fallback}
    return {"probe": probe, "gpus": parse_gpus(gpus["stdout"]), "apps": parse_apps((apps or {}).get("stdout", ""))}


def _explained(node: Node, transport: Transport, error: BootstrapFailed) -> BootstrapFailed:
    """Return an error that names the problem if the node's Python is missing, not executable or too old, else ``error``."""
    try:
        done = transport.run([*python_argv(node.python), "-c", _VERSION], timeout_s=_DIAGNOSE_S)
        printed = transport.run(["sh", "-c", _FIND_PYTHON], timeout_s=_DIAGNOSE_S).stdout.decode("utf-8", "replace").strip()
    except DistflowError:
        return error
    why = python_trouble(done.exit_code, done.stdout.decode("utf-8", "replace"))
    if not why:
        return error
    hint = "install Python 3.8 or newer there if necessary, and set `python` of the node to its path"
    if printed:
        hint = f"set `python` of the node to Python 3.8 or newer, such as `{printed.splitlines()[-1]}`"
    return BootstrapFailed(node.name, f"its python {node.python} {why}", hint=hint)


def _listen(session: _Session) -> None:
    if session.link is None:
        return
    try:
        answer = session.link.request("listen", address=session.measured.address, word=session.token, limit_s=_LISTEN_S)
    except AgentError as error:
        session.measured = replace(session.measured, listen_error=error.detail)
        return
    session.port = answer["port"]
    session.measured = replace(session.measured, is_address_own=answer["is_own"] is not False)


def _reach(session: _Session, listening: Sequence[_Session]) -> list[Pair]:
    others = [one for one in listening if one is not session]
    if session.link is None or not others:
        return []
    targets = [{"address": one.measured.address, "port": one.port, "word": one.token} for one in others]
    results = session.link.request("reach", targets=targets, limit_s=_REACH_S, timeout_s=30.0 + _REACH_S * len(others))[
        "results"
    ]
    return [
        Pair(
            source=session.node.name,
            target=one.node.name,
            address=one.measured.address,
            kind=result["kind"],
            message=result.get("message", ""),
            ms=result.get("ms"),
        )
        for one, result in zip(others, results, strict=True)
    ]
