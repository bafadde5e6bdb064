"""Packages import only from lower layers, modules declare their public names, and start-up imports no slow module."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "paramiko", "jsonschema", "jinja2", "rich", "numpy", "asyncio", "fsspec", "s3fs", "aiohttp"}
SOURCES = sorted((ROOT / "src" / "distflow").rglob("*.py"))


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_declares_its_public_names(path: Path) -> None:
    tree = ast.parse(path.read_text())
    declared = _declared(tree)
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        # Commands of the CLI are registered by a decorator, so no module imports them by name.
        and not (isinstance(node, ast.FunctionDef) and node.decorator_list and "cli" in path.parts)
    }
    if declared is None:
        assert path.name in ("__init__.py", "__main__.py") or not defined, f"{path} has public names but no __all__"
        return
    assert declared == sorted(declared, key=_isort), f"{path}: __all__ is not sorted"
    assert defined <= set(declared), f"{path}: not in __all__: {sorted(defined - set(declared))}"
    module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    loaded = importlib.import_module(module)
    missing = [name for name in declared if not hasattr(loaded, name)]
    assert not missing, f"{path}: the module lacks names of __all__: {missing}"


def test_public_classes_have_different_names() -> None:
    """Only classes of ``distflow.api.spec`` share the names of the classes of ``distflow.spec.model`` that they describe."""
    modules: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(str(path.relative_to(ROOT / "src/distflow")))
    repeated = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert set(map(tuple, repeated.values())) == {("api/spec.py", "spec/model.py")}, repeated


def _declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def _isort(name: str) -> tuple[int, str]:
    """Return the sort key of ruff's order: constants, classes, other names."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        ["workflow", "--help"],
        ["pool", "--help"],
        ["data", "--help"],
        ["train", "--help"],
        ["workflow", "list"],
        ["workflow", "query", "x-1"],
        ["workflow", "why", "x-1"],
        ["workflow", "submit", "--help"],
        ["run", "--help"],
    ],
)
def test_quick_commands_import_nothing_heavy(command: list[str]) -> None:
    modules = _imported(command)
    assert not HEAVY & modules, command
    if "why" not in command:  # that command reads events
        assert "distflow.state.event_details" not in modules, "classes of all kinds of events, a sixth of the time of `list`"
    # `submit` and `run` import it after they have started the supervisor.
    assert "distflow.client.submission" not in modules, command


@pytest.mark.parametrize(
    "line", ["distflow workflow ", "distflow logs x-1 --task ", "distflow list --status F", "distflow pool check --node "]
)
def test_completion_imports_nothing_heavy(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "distflow.yaml").write_text("pools: {lab: {backend: ssh, nodes: [gpu1]}}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_DISTFLOW_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    modules = _imported([])
    assert not HEAVY & modules
    assert "distflow.cli.workflow.exec" not in modules, "only the module of the command itself"


def _imported(command: list[str]) -> set[str]:
    """Return the modules that distflow imports for a command."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "distflow", *command], capture_output=True, text=True, check=False
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "typer" in modules
    return modules


def test_the_python_api_is_imported_when_it_is_first_used() -> None:
    program = "import sys; before = {*sys.modules}; import distflow; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"__future__", "distflow"}


def test_every_backend_of_the_registry_can_be_opened() -> None:
    from distflow.backends.registry import BACKENDS

    for name, module in BACKENDS.items():
        assert callable(importlib.import_module(module).open_backend), name


def test_jinja_releases_with_known_sandbox_escapes_are_excluded() -> None:
    # CVE-2024-56201, CVE-2024-56326 and CVE-2025-27516 were fixed in 3.1.5 and 3.1.6.
    assert re.search(r'^  "jinja2>=3\.1\.6",', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
