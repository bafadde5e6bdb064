"""Find the Python that tasks use on each node of a pool, and its missing modules, without importing them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from distflow.backends.machines.backend import transport_of
from distflow.backends.machines.checks.torch_search import FIND_OTHERS, valid_pythons
from distflow.backends.machines.connection.bootstrap import connect
from distflow.backends.machines.connection.training_address import path_prepend
from distflow.documents.requirements import Requirements
from distflow.documents.text import plain
from distflow.errors import AgentError
from distflow.pools.model import Node, Pool
from distflow.runtime.untrusted import decode_object
from distflow.transports.base import Transport, fan_out

__all__ = ["Interpreter", "find_interpreters"]

_MARK = "@@distflow-interpreter "
_CONNECT_S = 5.0
_PROBE_S = 15.0
_LONGEST_PATH = 256
_PROBE = f"""
import importlib.util, json, shutil, sys
{FIND_OTHERS}
wanted, modules = json.loads(sys.argv[1])
version = ".".join(map(str, sys.version_info[:3]))
missing, others = [], []
if version.rpartition(".")[0] != wanted:
    path = shutil.which("python" + wanted)
    others = [path] if path else []
else:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    others = find_other_pythons() if "torch" in missing else []
print("\\n{_MARK}" + json.dumps({{"version": version, "executable": sys.executable, "missing": missing, "others": others}}))
"""


class Interpreter(Struct, frozen=True, kw_only=True):
    """The Python of tasks on a node."""

    node: str
    version: str
    executable: str
    missing: tuple[str, ...] = ()
    """The required modules that it lacks. Empty if its version is wrong, or if the Python environment is not built yet."""
    others: tuple[str, ...] = ()
    """If its version is wrong: another Python with the required version. If torch is missing: other Pythons that have torch."""

    def has_version(self, minor: str) -> bool:
        """Return whether its version is ``minor``, such as ``3.11``."""
        return self.version.rpartition(".")[0] == minor


def find_interpreters(
    pool: Pool,
    nodes: Sequence[Node],
    *,
    version: str,
    modules: Sequence[str] = (),
    variables: Mapping[str, str],
    venv: Requirements | None = None,
) -> list[Interpreter]:
    """Query nodes in parallel for the ``python3`` of a task.

    Nodes that cannot be reached within a few seconds, or give no valid answer, are not in the result.

    Args:
        pool: The pool of the nodes.
        nodes: The nodes.
        version: The minor version that is needed, such as ``3.11``.
        modules: The top-level modules that are needed.
        variables: The environment variables of the task.
        venv: The packages of its Python environment. Its modules are not checked on nodes that have not built it yet.

    """
    wanted = json.dumps([version, list(modules)])
    by_name = {node.name: node for node in nodes}
    transports = [transport_of(pool, node) for node in nodes]

    def query(transport: Transport) -> Interpreter | None:
        node = by_name[transport.name]
        link = connect(transport, node.root, node.python, timeout_s=min(pool.connect_timeout_s, _CONNECT_S))
        try:
            request: dict[str, Any] = {
                "argv": ["python3", "-c", _PROBE, wanted], "env": {**node.environment, **variables},
                "path_prepend": path_prepend(node, link.request("hello", watch=[])["facts"]),
                "shell_prelude": node.setup, "limit_s": _PROBE_S, "timeout_s": _PROBE_S + 5.0,
            }  # fmt: skip
            try:
                answer = link.request("run", venv=venv and venv.digest(node.environment), **request)
            except AgentError as error:
                if error.kind != "no_venv":
                    raise
                # The environment will have the version of the Python that builds it.
                request["argv"][-1] = json.dumps([version, []])
                answer = link.request("run", **request)
        finally:
            link.close()
        return _parsed(node.name, answer, modules)

    try:
        outcomes = fan_out(transports, query)
    finally:
        for transport in transports:
            transport.close()
    return [outcome.value for outcome in outcomes if outcome.value is not None]


def _parsed(node: str, answer: Mapping[str, Any], modules: Sequence[str]) -> Interpreter | None:
    """Return the interpreter in a node's answer, or ``None`` if the answer is malformed."""
    line = next((one for one in reversed(str(answer.get("stdout")).splitlines()) if one.startswith(_MARK)), None)
    try:
        found = decode_object(line.removeprefix(_MARK)) if line else {}
    except ValueError:
        return None
    version, missing = found.get("version"), found.get("missing")
    if not isinstance(version, str) or not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", version, re.ASCII):
        return None
    return Interpreter(
        node=node, version=version, executable=plain(str(found.get("executable")))[:_LONGEST_PATH],
        missing=tuple(name for name in modules if isinstance(missing, list) and name in missing),
        others=valid_pythons(found.get("others")),
    )  # fmt: skip
