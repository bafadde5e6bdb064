"""The runtime runs where distflow is not installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import distflow.runtime

TOP = Path(distflow.runtime.__file__).parents[1]
SOURCES = {
    str(file.relative_to(TOP)): file.read_text() for name in ("protocol", "runtime") for file in (TOP / name).rglob("*.py")
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_it_imports_only_itself_and_the_standard_library(name: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[name], feature_version=(3, 8))):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules = [node.module or ""]
        for module in modules:
            assert (
                module.startswith(("distflow.protocol", "distflow.runtime")) or module.split(".")[0] in sys.stdlib_module_names
            ), module
