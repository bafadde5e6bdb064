"""The rank layouts of whole specs: all messages about invalid layouts, and the drawings of valid ones.

Each ``goldens/problems/layout_*.yaml`` breaks one rule, and the messages are in the ``.txt`` file of the same name. Each
``goldens/layouts/*.yaml`` has no errors, and its drawing is in the ``.txt`` file.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

from distflow.documents.problems import errors_of, in_document_order
from distflow.layout.checks.group_checks import check_layout
from distflow.layout.drawing import draw_world
from distflow.spec.parse import load_spec_text

GOLDENS = Path(__file__).parents[2] / "goldens"
PROBLEMS = sorted((GOLDENS / "problems").glob("layout_*.yaml"))
LAYOUTS = sorted((GOLDENS / "layouts").glob("*.yaml"))
RENEW = "DISTFLOW_RENEW_GOLDENS=1 pytest tests/unit/layout/test_layout_goldens.py"


def described(path: Path) -> str:
    """Return all problems of a spec and the worlds of its groups, as text."""
    spec, _ = load_spec_text(path.read_text(encoding="utf-8"), path.name, path.parent)
    worlds, problems = check_layout(spec)
    parts = [problem.as_text() for problem in in_document_order(problems)]
    for group, world in worlds.items():
        port = f", port {world.port}" if world.port else ""
        parts.append(f"{group}: world of {world.world_size} by {world.style}, master {world.master}{port}")
        parts.append(draw_world(world))
    return "\n".join(parts or ["no world"]).rstrip() + "\n"


def assert_golden(path: Path, found: str) -> None:
    """Fail with the difference and the command that renews the golden file."""
    golden = path.with_suffix(".txt")
    if os.environ.get("DISTFLOW_RENEW_GOLDENS"):
        golden.write_text(found, encoding="utf-8")
    wanted = golden.read_text(encoding="utf-8") if golden.exists() else ""
    if found != wanted:
        lines = difflib.unified_diff(wanted.splitlines(), found.splitlines(), golden.name, "now", lineterm="")
        pytest.fail("\n".join([*lines, "", f"if this is right: {RENEW}"]), pytrace=False)


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_the_messages_about_an_invalid_layout_match_the_golden_file(path: Path) -> None:
    assert_golden(path, described(path))


@pytest.mark.parametrize(
    ("actions", "hint"),
    [
        ("{}", "set `limit` of `retry` to at least 1, and define the exit codes that cause a retry, such as "),
        ("{RESCHEDULE: 1-255}", "set `limit` of `retry` to at least 1"),
    ],
)
def test_a_shared_directory_without_retries_names_the_missing_settings(actions: str, hint: str) -> None:
    text = (GOLDENS / "problems" / "layout_shared_without_restart.yaml").read_text(encoding="utf-8")
    text = text.replace("shared:", "retry: {limit: 0}\n    shared:").replace(
        "lead: true", f"lead: true\n      exitActions: {actions}"
    )
    spec, _ = load_spec_text(text, "spec.yaml", GOLDENS)
    (problem,) = check_layout(spec)[1]
    assert problem.message == "`shared` restores nothing: the group `train` is never retried"
    assert problem.hint.partition("`exitActions")[0] == hint


def test_the_hint_for_a_launcher_with_framework_custom_names_the_consequence() -> None:
    text = (GOLDENS / "problems" / "layout_launcher_beside_a_framework.yaml").read_text(encoding="utf-8")
    spec, _ = load_spec_text(text.replace("deepspeed", "custom"), "spec.yaml", GOLDENS)
    (problem,) = check_layout(spec)[1]
    assert problem.message == "`launcher: torchrun` cannot be combined with `framework: custom`"
    wanted = "remove one of them; without `launcher`, `framework: custom` runs the command once for each task, unchanged"
    assert problem.hint == wanted


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_the_drawing_of_a_valid_layout_matches_the_golden_file(path: Path) -> None:
    spec, _ = load_spec_text(path.read_text(encoding="utf-8"), path.name, path.parent)
    assert not errors_of(check_layout(spec)[1])
    assert_golden(path, described(path))


def test_every_problem_names_a_line_and_a_remedy() -> None:
    for path in PROBLEMS:
        spec, _ = load_spec_text(path.read_text(encoding="utf-8"), path.name, path.parent)
        problems = check_layout(spec)[1]
        assert problems, path.name
        assert all(problem.where.line and problem.hint for problem in problems), path.name
        assert sum(bool(problem.drawing) for problem in problems) <= 2, path.name
