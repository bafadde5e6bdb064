"""The runtime needs only the standard library, because distflow is not installed on nodes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import distflow.runtime

TOP = Path(distflow.runtime.__file__).parents[1]
SOURCES = {
    str(file.relative_to(TOP)): file.read_text() for name in ("protocol", "runtime") for file in (TOP / name).rglob("*.py")
}

STANDARD = sys.stdlib_module_names | {"_sha2"}
"""``_sha2`` exists since Python 3.12."""


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_modules_for_nodes_import_only_each_other_and_the_standard_library(name: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[name], feature_version=(3, 8))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules = [node.module or ""]
        for module in modules:
            assert module.startswith(("distflow.protocol", "distflow.runtime")) or module.split(".")[0] in STANDARD, module


def test_the_agent_starts_without_modules_that_are_slow_to_import() -> None:
    slow = ("hashlib", "hmac", "subprocess", "shutil", "tempfile", "tarfile", "asyncio", "threading")
    script = (
        f"import sys; sys.path.insert(0, {str(TOP.parent)!r})\n"
        "import distflow.runtime.agent.server, distflow.runtime.guard.gang_link\n"
        f"print([name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
