"""The client is a library: it prints nothing, reads no arguments, and imports its public names on first use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distflow.client

CLIENT = Path(distflow.client.__file__).parent
PROGRAMS = {"daemon.py", "shell.py", "sender.py"}
"""Modules that run as separate processes, which rsync, the client or the supervisor starts."""
STREAMS = {"stdin", "stdout", "stderr", "argv", "exit"}


@pytest.mark.parametrize("path", sorted(CLIENT.rglob("*.py")), ids=lambda path: str(path.name))
def test_a_module_neither_prints_nor_reads_arguments_nor_ends_the_process(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and node.id in ("print", "input"):
            found.append(f"{node.lineno}: {node.id}")
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "sys"
            and node.attr in STREAMS
        ):
            found.append(f"{node.lineno}: sys.{node.attr}")
    assert path.name in PROGRAMS or not found


def test_every_public_name_exists_and_is_imported_on_first_use() -> None:
    script = "import sys, distflow.client; print(*(name for name in sys.modules if name.startswith('distflow.client.')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    for name in distflow.client.__all__:
        assert getattr(distflow.client, name).__module__.startswith("distflow.client.")
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        getattr(distflow.client, "nothing_of_the_kind")  # noqa: B009  a missing name


def test_help_describes_every_public_name() -> None:
    script = "import pydoc, distflow.client; print(pydoc.plain(pydoc.render_doc(distflow.client)))"
    source = CLIENT.parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=source)
    assert [one for one in distflow.client.__all__ if not re.search(rf"^    (class )?{one}\(", done.stdout, re.MULTILINE)] == []


def test_client_imports_neither_typer_nor_rich() -> None:
    script = (
        "import sys, distflow.client as c; [getattr(c, name) for name in c.__all__]; "
        "print(*({'typer', 'rich', 'click', 'distflow.cli'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
