"""The prose check finds the phrases of its table in every kind of file, with their lines, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_prose.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    description = importlib.util.spec_from_file_location("check_prose", SCRIPT)
    assert description is not None
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    sys.modules["check_prose"] = module
    description.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.md", "It starts anew.\n", [(1, "anew")]),
        ("a.md", "The run goes\non.\n", [(1, "goes on")]),
        ("a.md", "`x` is no status.\nThere is no pool.\nIt is no longer there.\n", [(1, "is no status")]),
        ("a.md", "Write `anew`.\n```text\nanew\n```\n<!-- generated: x -->\nanew\n<!-- end of x -->\n", []),
        ("a.py", '"""Do it\nanew."""\n', [(2, "anew")]),
        ("a.py", "x = 1\n# It goes\n# on here.\n", [(2, "goes on")]),
        ("a.py", "x = f'{1} of {2} at work'\n", [(1, "at work")]),
        ("a.py", "anew = beside = 1\n", []),
        ("a.yaml", "# in the manner of it\n", [(1, "in the manner of")]),
    ],
)
def test_phrases_are_found_with_their_lines(
    check: ModuleType, tmp_path: Path, name: str, text: str, found: list[tuple[int, str]]
) -> None:
    (tmp_path / name).write_text(text)
    assert [(line, phrase) for line, phrase, _ in check.findings(tmp_path / name)] == found


def test_every_rule_has_a_remedy(check: ModuleType, tmp_path: Path) -> None:
    assert all(check.RULES.values())
    (tmp_path / "a.md").write_text("anew\nbeside\n")
    assert [remedy for _, _, remedy in check.findings(tmp_path / "a.md")] == ["again", "next to, alongside"]


def test_excluded_paths_are_not_checked(check: ModuleType) -> None:
    names = {path.relative_to(SCRIPT.parents[1]).as_posix() for path in check.files(["docs/ssh.md", "src/distflow/train"])}
    assert {"README.md", "docs/data.md", "src/distflow/errors.py"} <= names
    assert "docs/ssh.md" not in names
    assert not any(name.startswith("src/distflow/train/") for name in names)
