"""The substitute for ``typing``, which lets agents start faster, and the imports of the runtime."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import distflow
from distflow.protocol.light_typing import NamedTuple


class _Point(NamedTuple):
    """A place."""

    x: int
    y: int = 2

    @property
    def total(self) -> int:
        """The sum."""
        return self.x + self.y


def test_named_tuples_have_defaults_and_methods() -> None:
    point = _Point(1)
    assert (point, point.total, repr(point), _Point.__doc__) == ((1, 2), 3, "_Point(x=1, y=2)", "A place.")
    assert point._replace(y=5).total == 6


def test_an_agent_starts_without_typing() -> None:
    source = str(Path(distflow.__file__).parent.parent)
    script = f"import sys; sys.path.insert(0, {source!r}); import distflow.runtime.agent.server; print('typing' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    "name", ["guard/netcat", "services/command_hub", "services/endpoint_client", "services/relay", "services/resident"]
)
def test_programs_of_one_file_do_not_import_distflow(name: str) -> None:
    text = (Path(distflow.__file__).parent / "runtime" / f"{name}.py").read_text()
    imported = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    assert [module for module in imported if module.startswith("distflow")] == []


def test_no_placeholder_is_used_as_a_class() -> None:
    found = []
    for path in sorted(Path(distflow.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "distflow.protocol.light_typing"
            for alias in node.names
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                is_check = call.func.id in ("isinstance", "issubclass")
                used = (
                    {node.id for node in ast.walk(call.args[1]) if isinstance(node, ast.Name)} if is_check else {call.func.id}
                )
                found += [f"{path}:{call.lineno}: {name}" for name in (used & names) - {"cast"}]
    assert found == []
